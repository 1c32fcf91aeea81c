//! Rules of all runtimes: the weights fit `config.json`, and the tokenizer can be read.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::tokenizer_files::{Damage, damaged};
use super::{Finding, Runtime};
use crate::error::{Error, Result};
use crate::files;
use crate::model::{Model, parse_json};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const OTHER_CONFIG: &str = "use the config.json that was saved together with these weights";
const OTHER_CONFIG_IN_RUN: &str = "copy the config.json that was saved together with the weights into the model's folder";
const DESCRIBED: &str = "when pruning, choose `dims` and amounts whose result config.json can describe: one width for all layers, and heads together with `hidden` in families that divide one by the other";
const COMPLETE: &str = "the checkpoint is incomplete: download it again, or start from the original checkpoint";
/// Beginning of the reason why an incomplete weight is not opened.
const MISSING: &str = "is missing";
const OTHER_FILE: &str = "copy the file from the original model into the folder";
const OTHER_FILE_IN_RUN: &str = "download the file again into the model's folder, from which the run reads it";

/// A tensor, key or file with the reason why runtimes do not load it.
struct Defect {
    subject: String,
    reason: String,
    hints: [&'static str; 2],
}

/// Defects of a model that no runtime accepts.
#[derive(Default)]
pub(crate) struct Defects {
    mismatch: Option<Defect>,
    /// Whether `config.json` cannot describe the model, and a `graph.json` does.
    needs_graph_file: bool,
    /// Files of the tokenizer that runtimes do not read.
    damaged: Vec<Damage>,
    /// Why the settings of text generation are not read.
    generation: Option<String>,
}

impl Defects {
    /// The defects of a written model. Weights in formats that this program does not open are not checked.
    pub(super) fn of_output(path: &Path, names: impl Iterator<Item = PathBuf>) -> Result<Defects> {
        let files = names.map(|name| (path.join(&name), name)).collect();
        match Model::open(path) {
            Ok(model) => Defects::of_model(&model, files),
            Err(error) => Defects::new(incomplete(error), files),
        }
    }

    /// The defects of a planned model, whose files are copied.
    pub(crate) fn of_plan(model: &Model) -> Result<Defects> {
        Defects::of_model(model, model.auxiliary.files.iter().map(|file| (model.path_of(file), file.clone())).collect())
    }

    fn of_model(model: &Model, files: Vec<(PathBuf, PathBuf)>) -> Result<Defects> {
        Ok(Defects { needs_graph_file: model.needs_graph_file(), ..Defects::new(mismatch(model), files)? })
    }

    fn new(mismatch: Option<Defect>, files: Vec<(PathBuf, PathBuf)>) -> Result<Defects> {
        let settings = files.iter().find(|(_, name)| name == Path::new(GENERATION));
        let generation = settings.map(|(path, _)| not_an_object(path)).transpose()?.flatten();
        Ok(Defects { mismatch, needs_graph_file: false, damaged: damaged(&files)?, generation })
    }

    /// The defects of a file that contains its configuration and its tokenizer.
    pub(super) fn of_file(path: &Path) -> Defects {
        Defects { mismatch: Model::open(path).ok().as_ref().and_then(mismatch), ..Defects::default() }
    }

    /// The next step if only a `graph.json` describes the model.
    pub(super) fn undescribed(&self) -> Option<&'static str> {
        self.needs_graph_file.then_some(DESCRIBED)
    }

    /// The weights have the names and shapes that the configuration requires.
    pub(super) fn shapes(&self) -> Vec<Finding> {
        let finding = |Defect { subject, reason, hints }: &Defect| {
            let [hint, in_run] = self.undescribed().map_or(*hints, |hint| [hint; 2]);
            Finding::new(subject.clone(), reason.clone(), hint).for_run(in_run)
        };
        self.mismatch.iter().map(finding).collect()
    }

    /// A runtime reads the files of the tokenizer.
    pub(super) fn tokenizer(&self, runtime: Runtime) -> Vec<Finding> {
        let finding = |damage: &Damage| Finding::new(damage.file.clone(), damage.reason.clone(), OTHER_FILE).for_run(OTHER_FILE_IN_RUN);
        self.damaged.iter().filter(|damage| damage.affects(runtime)).map(finding).collect()
    }

    /// The settings of text generation are an object.
    pub(super) fn generation(&self) -> Vec<Finding> {
        let finding = |reason: &String| Finding::new(GENERATION, reason.clone(), OTHER_FILE).for_run(OTHER_FILE_IN_RUN);
        self.generation.iter().map(finding).collect()
    }
}

fn mismatch(model: &Model) -> Option<Defect> {
    let (subject, reason) = match model.require_weights_of_config().err()? {
        Error::Tensor { name, reason, .. } => (name, reason),
        Error::Graph { what, reason } => (what, reason),
        error => (CONFIG.to_owned(), error.to_string()),
    };
    Some(Defect { subject, reason, hints: [OTHER_CONFIG, OTHER_CONFIG_IN_RUN] })
}

/// A missing part of a quantized weight, because of which a model is not opened. Formats that this program
/// does not support are not defects.
fn incomplete(error: Error) -> Option<Defect> {
    match error {
        Error::Tensor { name, reason, .. } if reason.starts_with(MISSING) => Some(Defect { subject: name, reason, hints: [COMPLETE; 2] }),
        _ => None,
    }
}

/// Why a file with settings of text generation is not read. Files that are not JSON are ignored.
fn not_an_object(path: &Path) -> Result<Option<String>> {
    let text = files::read_to_string(path).map_err(Error::io("read", path))?;
    let is_other = parse_json::<Value>(&text).is_ok_and(|value| !value.is_object());
    Ok(is_other.then(|| "contains JSON that is not an object".to_owned()))
}
