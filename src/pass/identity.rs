//! What unfinished work belongs to.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::Value;

use crate::data::Data;
use crate::files;
use crate::ir::Graph;
use crate::model::Model;
use crate::run_state::RunState;

/// A file as it is now, by name, size and time, or by its version on another machine.
fn stamp(path: &Path) -> (PathBuf, Option<u64>, Option<SystemTime>, Option<String>) {
    let (file, version) = (std::fs::metadata(path).ok(), files::version(path).ok().flatten());
    (path.to_owned(), file.as_ref().map(std::fs::Metadata::len), file.and_then(|file| file.modified().ok()), version)
}

/// What is made of a model (and a teacher), on what, and how.
pub(super) fn identity(
    (model, teacher): (&Model, Option<&Model>),
    run: &RunState,
    graph: &Graph,
    options: &Value,
    data: [Option<&Data>; 2],
    seed: u64,
) -> String {
    let mut hasher = blake3::Hasher::new();
    let weights = [Some(model), teacher].into_iter().flatten().flat_map(|model| &model.weight_files);
    let samples = data.into_iter().flatten().flat_map(|data| [&data.text, &data.images, &data.arrays, &data.labels].into_iter().flatten());
    let tokenizer = model.path.join("tokenizer.json");
    let files: Vec<_> = weights.chain(samples).chain([&tokenizer]).map(|path| stamp(path)).collect();
    let history: Vec<_> = run.history.iter().map(|applied| (applied.name, &applied.options)).collect();
    let text = format!("{} {seed} {options} {data:?} {files:?} {history:?}\n{graph}", env!("CARGO_PKG_VERSION"));
    hasher.update(text.as_bytes());
    hasher.finalize().to_string()
}
