//! Prunes half of a model's weights and quantizes the rest to int8 through the library API.
//!
//! ```text
//! cargo run --release --example prune_and_quantize -- MODEL OUT
//! ```
//!
//! MODEL is a folder with safetensors, OUT a folder that does not exist yet. Enter cancels the run, in
//! which case OUT is not written.

use std::path::Path;
use std::process::ExitCode;

use compress::Result;
use compress::pass::{Amount, PruneUnstructured, QuantizeDynamic};
use compress::pipeline::Pipeline;
use compress::report::Report;
use compress_core::work::{Cancel, Event};
use compress_engine::model::Model;

/// Prunes and quantizes `model` into the folder `output`, unless `cancel` is triggered.
pub fn shrink(model: &Path, output: &Path, cancel: Cancel) -> Result<Report> {
    let pipeline = Pipeline::builder()
        // A pass is a struct with the options of a recipe; other options have the defaults of recipes.
        .pass(PruneUnstructured { amount: Some(Amount::fraction(0.5)), ..Default::default() })
        .pass(QuantizeDynamic::default())
        // Called from several threads, which wait for it to return.
        .progress(|event: Event| {
            if let Event::Begin { stage, total, .. } = event {
                eprintln!("{stage}: {:.1} MB", total as f64 / 1e6);
            }
        })
        .cancel(cancel)
        .build()?;
    // Opening reads only headers. Both passes run in one streaming pass over the tensors, block by
    // block, and the folder appears after every file in it has been verified.
    pipeline.run(Model::open(model)?, output)
}

fn main() -> ExitCode {
    let paths: Vec<_> = std::env::args_os().skip(1).collect();
    let [model, output] = &paths[..] else {
        eprintln!("usage: prune_and_quantize MODEL OUT");
        return ExitCode::from(2);
    };
    let cancel = Cancel::default();
    let handle = cancel.clone();
    std::thread::spawn(move || {
        if std::io::stdin().read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0) {
            handle.cancel();
        }
    });
    match shrink(model.as_ref(), output.as_ref(), cancel) {
        Ok(report) => {
            println!("{:.2} x smaller, in {:.2} s", report.size.ratio, report.totals.seconds);
            report.notes.iter().for_each(|note| println!("note: {note}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            error.hint().iter().for_each(|hint| eprintln!("hint: {hint}"));
            ExitCode::FAILURE
        }
    }
}
