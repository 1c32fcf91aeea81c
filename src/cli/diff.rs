//! `compress diff`

use std::path::PathBuf;

use super::args::Global;
use super::output;
use crate::error::Result;
use crate::model::{Model, diff};
use crate::report::format::{bytes, decibels, natural, percent};
use crate::report::terminal::table;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Model folder, or a file: .safetensors, .onnx, .gguf, or .bin, .pt or .pth of PyTorch; also
    /// hf:org/name, s3://bucket/name
    before: PathBuf,
    /// The model to compare with it
    after: PathBuf,
    /// Also list equal weights
    #[arg(long)]
    all: bool,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let (before, after) = (Model::open(&self.before)?, Model::open(&self.after)?);
        let mut found = global.work(|work| {
            let found = diff(&before, &after, work)?;
            [&before, &after].into_iter().try_for_each(|model| model.check_contents(work)).map(|()| found)
        })?;
        found.weights.sort_by(|a, b| natural(&a.name, &b.name));
        if global.json {
            return output::json(&found);
        }
        let listed: Vec<_> = found.weights.iter().filter(|w| self.all || !w.equal).collect();
        let equal = found.weights.iter().filter(|w| w.equal).count();
        if !listed.is_empty() {
            let rows = listed.iter().map(|w| {
                let encodings = format!("{} -> {}", w.before.as_deref().unwrap_or("-"), w.after.as_deref().unwrap_or("-"));
                if let Some(note) = &w.note {
                    return vec![w.name.clone(), encodings, note.clone()];
                }
                let number = |value: Option<f64>, digits: usize| value.map_or("-".into(), |v| format!("{v:.digits$}"));
                let error = w.max_abs_error.map_or("-".into(), |e| format!("{e:.3e}"));
                vec![
                    w.name.clone(),
                    encodings,
                    decibels(w.sqnr_db),
                    number(w.cosine, 6),
                    error,
                    percent(w.zeros_before, w.elements),
                    percent(w.zeros_after, w.elements),
                ]
            });
            output::print(&format!("{}\n\n", table(&["weight", "encoding", "SQNR", "cosine", "max error", "zeros", "after"], rows)))?;
        }
        let (a, b) = (found.bytes_before, found.bytes_after);
        output::print(&format!(
            " {equal} of {} weights are equal; {} -> {}, {:.2} x smaller\n",
            found.weights.len(),
            bytes(a),
            bytes(b),
            a as f64 / b.max(1) as f64
        ))
    }
}
