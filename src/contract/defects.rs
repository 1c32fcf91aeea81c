//! Rules of all runtimes: the weights fit `config.json`, and the tokenizer can be read.

use std::path::{Path, PathBuf};

use super::{Finding, facts};
use crate::error::{Error, Result};
use crate::model::Model;

const CONFIG: &str = "config.json";
const OTHER_CONFIG: &str = "use the config.json that was saved together with these weights";
const OTHER_CONFIG_IN_RUN: &str = "copy the config.json that was saved together with the weights into the model's folder";
const OTHER_FILE: &str = "copy the file from the original model into the folder";
const OTHER_FILE_IN_RUN: &str = "download the file again into the model's folder, from which the run reads it";

/// A tensor, key or file with the reason why runtimes do not load it.
struct Defect {
    subject: String,
    reason: String,
}

/// Defects of a model that no runtime accepts.
#[derive(Default)]
pub(crate) struct Defects {
    mismatch: Option<Defect>,
    /// Files of the tokenizer that cannot be parsed.
    damaged: Vec<Defect>,
}

impl Defects {
    /// The defects of a written model. Weights in formats that this program does not open are not checked.
    pub(super) fn of_output(path: &Path, names: impl Iterator<Item = PathBuf>) -> Result<Defects> {
        let mismatch = Model::open(path).ok().as_ref().and_then(mismatch);
        Ok(Defects { mismatch, damaged: damaged(names.map(|name| (path.join(&name), name)))? })
    }

    /// The defects of a planned model, whose files are copied.
    pub(crate) fn of_plan(model: &Model) -> Result<Defects> {
        let files = model.auxiliary.files.iter().map(|file| (model.path_of(file), file.clone()));
        Ok(Defects { mismatch: mismatch(model), damaged: damaged(files)? })
    }

    /// The defects of a file that contains its configuration and its tokenizer.
    pub(super) fn of_file(path: &Path) -> Defects {
        Defects { mismatch: Model::open(path).ok().as_ref().and_then(mismatch), damaged: Vec::new() }
    }

    /// The weights have the names and shapes that the configuration requires.
    pub(super) fn shapes(&self) -> Vec<Finding> {
        let finding = |defect: &Defect| Finding::new(defect.subject.clone(), defect.reason.clone(), OTHER_CONFIG).for_run(OTHER_CONFIG_IN_RUN);
        self.mismatch.iter().map(finding).collect()
    }

    /// The files of the tokenizer can be parsed.
    pub(super) fn tokenizer(&self) -> Vec<Finding> {
        let finding = |defect: &Defect| Finding::new(defect.subject.clone(), defect.reason.clone(), OTHER_FILE).for_run(OTHER_FILE_IN_RUN);
        self.damaged.iter().map(finding).collect()
    }
}

fn mismatch(model: &Model) -> Option<Defect> {
    let (subject, reason) = match model.require_weights_of_config().err()? {
        Error::Tensor { name, reason, .. } => (name, reason),
        Error::Graph { what, reason } => (what, reason),
        error => (CONFIG.to_owned(), error.to_string()),
    };
    Some(Defect { subject, reason })
}

/// The files of the tokenizer among these paths and names that cannot be parsed.
fn damaged(files: impl Iterator<Item = (PathBuf, PathBuf)>) -> Result<Vec<Defect>> {
    let files: Vec<(PathBuf, PathBuf)> = files.collect();
    let is_fast = files.iter().any(|(_, name)| name == Path::new(facts::FAST_TOKENIZER));
    let mut found = Vec::new();
    for (path, name) in files.iter().filter(|(_, name)| facts::is_parsed_with_tokenizer(name, is_fast)) {
        if let Some(reason) = facts::invalid_json(path)? {
            found.push(Defect { subject: name.display().to_string(), reason: format!("is not valid JSON ({reason}), so that the tokenizer does not load") });
        }
    }
    Ok(found)
}
