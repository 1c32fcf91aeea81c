//! Compresses a model into `OUT_DIR`, from which the program embeds it.
//!
//! `MODEL` selects another model folder. `MODEL_PROGRESS=1` reports progress as cargo warnings.

use std::path::PathBuf;
use std::process::ExitCode;

use compress::prelude::*;

fn embed(output: PathBuf) -> compress::Result<()> {
    let model = Model::open(std::env::var_os("MODEL").unwrap_or("model".into()))?;
    for input in model.inputs() {
        println!("cargo::rerun-if-changed={}", input.display());
    }
    let mut pipeline = Pipeline::builder().pass(QuantizeDynamic::default());
    if std::env::var_os("MODEL_PROGRESS").is_some() {
        pipeline = pipeline.progress(|event: Event| {
            if let Event::Begin { stage, total, .. } = event {
                println!("cargo::warning={stage}: {total} bytes");
            }
        });
    }
    // The output is reused unless the bytes of the model or the options change, even if cargo runs this
    // script again.
    let report = pipeline.build()?.run_cached(model, &output)?.report;
    println!("cargo::rustc-env=EMBEDDED_MODEL={}", output.join("model.safetensors").display());
    println!("cargo::rustc-env=EMBEDDED_MODEL_BEFORE={}", report.size.before.bytes);
    Ok(())
}

fn main() -> ExitCode {
    println!("cargo::rerun-if-env-changed=MODEL");
    println!("cargo::rerun-if-env-changed=MODEL_PROGRESS");
    let output = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("model");
    match embed(output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={error}");
            error.hint().iter().for_each(|hint| println!("cargo::warning={hint}"));
            ExitCode::FAILURE
        }
    }
}
