//! Compresses a model into `OUT_DIR`, from which the program embeds it.
//!
//! `MODEL` selects another model folder. `MODEL_PROGRESS=1` reports progress as cargo warnings.

use std::process::ExitCode;

use compress::prelude::*;

fn main() -> ExitCode {
    println!("cargo::rerun-if-env-changed=MODEL");
    println!("cargo::rerun-if-env-changed=MODEL_PROGRESS");
    let model = std::env::var_os("MODEL").unwrap_or("model".into());
    let mut pipeline = Pipeline::builder().pass(QuantizeDynamic::default());
    if std::env::var_os("MODEL_PROGRESS").is_some() {
        pipeline = pipeline.progress(|event: Event| {
            if let Event::Begin { stage, total, .. } = event {
                println!("cargo::warning={stage}: {total} bytes");
            }
        });
    }
    compress::build::embed("EMBEDDED_MODEL", model, pipeline)
}
