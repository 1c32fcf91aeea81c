//! Zeroes half of a model's weights and stores the rest as int8, from a program of your own.
//!
//! ```text
//! cargo run --release --example prune_and_quantize -- MODEL OUT
//! ```
//!
//! MODEL is a folder with safetensors, OUT a folder that does not exist yet. Enter stops the run; then there is no OUT.

use std::path::Path;
use std::process::ExitCode;

use compress::Result;
use compress::model::Model;
use compress::pass::{Amount, PruneUnstructured, QuantizeDynamic};
use compress::pipeline::Pipeline;
use compress::report::Report;
use compress::work::{Cancel, Event};

/// Prunes and quantizes `model` into the folder `output`, until `cancel` says otherwise.
pub fn shrink(model: &Path, output: &Path, cancel: Cancel) -> Result<Report> {
    let pipeline = Pipeline::builder()
        // A pass is a plain value with the options of a recipe; what is not named is as the recipe has it by default.
        .pass(PruneUnstructured { amount: Some(Amount::fraction(0.5)), ..Default::default() })
        .pass(QuantizeDynamic::default())
        // Called from several threads, and the work waits for it.
        .progress(|event: Event| {
            if let Event::Begin { stage, total, .. } = event {
                eprintln!("{stage}: {:.1} MB", total as f64 / 1e6);
            }
        })
        .cancel(cancel)
        .build()?;
    // Opening reads headers only. Both passes run in one reading from disk to disk, a block of each tensor at a time, and
    // the folder appears when every file in it was read back.
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
