//! Construction of the student model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::draft_head::DraftHead;
use crate::analysis;
use crate::arch::{self, SentenceModule, Settings};
use crate::error::{Error, ParseError, Result};
use crate::ir::Builder;
use crate::model::{Config, Model};
use crate::pass::fresh_weights::fresh_weights;
use crate::pass::prune_structured::drop_layers;
use crate::pass::tower;
use crate::run_state::RunState;

/// The student: the input model with some of its layers, another model, or random weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Student {
    /// Indices of the layers of the input model to keep, from 0
    Layers(Vec<usize>),
    /// Every n-th layer of the input model, starting with the first
    Every(usize),
    /// A model folder
    Model(PathBuf),
    /// Random weights for a configuration: a config.json, or a folder with one
    Config(PathBuf),
    /// An EAGLE-3 head of the input model, for speculative decoding
    Eagle3(DraftHead),
}

impl FromStr for Student {
    type Err = ParseError;

    /// `layers=0,2,4`, `every=2`, `model=FOLDER`, `config=FILE`, `eagle3=FILE`.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        let wrong = || ParseError::from(format!("`{text}` is not layers=0,2,4, every=2, model=FOLDER, config=FILE or eagle3=FILE"));
        let (kind, value) = text.split_once('=').ok_or_else(wrong)?;
        match kind.trim() {
            "layers" => value.split(',').map(|n| n.trim().parse().map_err(|_| wrong())).collect::<std::result::Result<_, _>>().map(Student::Layers),
            "every" => value.trim().parse().map(Student::Every).map_err(|_| wrong()),
            "model" => Ok(Student::Model(value.into())),
            "config" => Ok(Student::Config(value.into())),
            "eagle3" => Ok(Student::Eagle3(DraftHead { vocabulary: Some(value.into()), ..DraftHead::default() })),
            _ => Err(wrong()),
        }
    }
}

fn wrong(reason: impl std::fmt::Display) -> Error {
    Error::option("distill: student", reason)
}

impl Student {
    /// The path of a student in another folder, or of the vocabulary of a head.
    pub(super) fn path(&mut self) -> Option<&mut PathBuf> {
        match self {
            Student::Model(path) | Student::Config(path) => Some(path),
            Student::Eagle3(head) => head.vocabulary.as_mut(),
            Student::Layers(_) | Student::Every(_) => None,
        }
    }

    /// Creates the student before training, and adds notes on it.
    pub(super) fn create(&self, model: &Model, state: &RunState, notes: &mut Vec<String>) -> Result<Model> {
        if let (Student::Model(_) | Student::Config(_), Some(before)) = (self, state.history.last()) {
            let reason = format!("would replace the model that `{}` has changed: move that pass after `distill`, or remove it", before.name);
            return Err(wrong(reason));
        }
        match self {
            Student::Layers(layers) => with_layers(model.clone(), notes, layers),
            Student::Every(0) => Err(wrong("`every` must be at least 1")),
            Student::Every(step) => {
                let graph = model.graph()?;
                let count = analysis::layers(&graph).map_or(0, |layers| layers.layers.len());
                with_layers(model.clone(), notes, &(0..count).step_by(*step).collect::<Vec<_>>())
            }
            Student::Model(path) => {
                let student = model.open_like(path)?;
                if student.is_corrected() {
                    let reason = "has low-rank corrections (`adapter`), which would not fit the trained weights: run `compress dequantize` on it, which adds them to the weights";
                    return Err(wrong(format!("{} {reason}", path.display())));
                }
                require_same_modules(model, &student)?;
                Ok(student)
            }
            Student::Config(path) => fresh(model.clone(), notes, path, state.seed),
            // Attached to the model by `Distill::plan`.
            Student::Eagle3(_) => Ok(model.clone()),
        }
    }
}

/// Returns an error if the sentence-transformers modules of the student differ from those of the input
/// model.
fn require_same_modules(model: &Model, student: &Model) -> Result<()> {
    let (input_modules, student_modules) = (SentenceModule::open(&model.path)?, SentenceModule::open(&student.path)?);
    let differ = |at: &usize| match (input_modules.get(*at), student_modules.get(*at)) {
        (Some(expected), Some(found)) => !expected.is_like(found),
        _ => true,
    };
    let Some(at) = (0..input_modules.len().max(student_modules.len())).find(differ) else { return Ok(()) };
    let name = |modules: &[SentenceModule]| modules.get(at).map_or_else(|| "missing".to_owned(), SentenceModule::name);
    let (expected, found) = (name(&input_modules), name(&student_modules));
    let what = if expected == found {
        format!("{expected} with different settings than in the input model")
    } else {
        format!("{found}, but in the input model it is {expected}")
    };
    Err(wrong(format!("module {} after the transformer of {} is {what}: copy the modules of the input model", at + 1, student.path.display())))
}

/// Removes all layers except the given ones.
fn with_layers(mut model: Model, notes: &mut Vec<String>, layers: &[usize]) -> Result<Model> {
    let graph = model.graph()?;
    let Some(found) = analysis::layers(&graph) else {
        return Err(wrong("the model has no repeated layers: specify a model folder, or prune its width"));
    };
    let count = found.layers.len();
    let set: BTreeSet<usize> = layers.iter().copied().collect();
    if set.len() != layers.len() || !layers.is_sorted() || layers.is_empty() {
        return Err(wrong(format!("layers {layers:?}: list at least one layer, without duplicates and in ascending order")));
    }
    if let Some(layer) = set.iter().find(|layer| **layer >= count) {
        return Err(wrong(format!("layer {layer}: the model has {count} layers, numbered from 0")));
    }
    let removed = (0..count).filter(|layer| !set.contains(layer)).collect();
    notes.extend(drop_layers(&mut model, &graph, &found, &removed)?);
    Ok(model)
}

/// Replaces the weights and configuration of a model by random weights for another configuration. The
/// tokenizer and other files are kept.
fn fresh(mut model: Model, notes: &mut Vec<String>, path: &Path, seed: u64) -> Result<Model> {
    tower::require_none(&model, "a student with another configuration")?;
    let is_folder = crate::files::is_dir(path);
    let file = if is_folder { path.join("config.json") } else { path.to_owned() };
    let files = if is_folder { crate::files::files(path).map_err(Error::io("list", path))? } else { Vec::new() };
    let unused: Vec<_> = files.iter().filter(|path| **path != file).filter_map(|path| path.file_name()?.to_str()).collect();
    if !unused.is_empty() {
        notes.push(format!(
            "the student uses only config.json from {}, and the tokenizer and other files of the input model; not used: {}",
            crate::error::redact_path(path).display(),
            unused.join(", ")
        ));
    }
    let config = Config::open(&file)?;
    let modules = SentenceModule::open(&model.path)?;
    let graph = arch::build(&Settings::new(config.values()), &modules, Builder::unchecked())?;
    model.weights.by_name = fresh_weights(&graph, &config, seed, "distill: student", |_| true)?.into_iter().collect();
    model.config = config;
    model.changed_graph = Some(Arc::new(graph));
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn students_are_parsed() {
        assert_eq!("layers=0,2,4".parse(), Ok(Student::Layers(vec![0, 2, 4])));
        assert_eq!(serde_saphyr::from_str::<Student>("{ every: 2 }").unwrap(), Student::Every(2));
        assert_eq!("model=./a".parse(), Ok(Student::Model("./a".into())));
        assert!("layers=a".parse::<Student>().is_err() && "twice".parse::<Student>().is_err());
    }

    #[test]
    fn random_weights_are_tied_as_configured() {
        for (name, head) in [("llama-grouped-tied", "lm_head.weight"), ("bert-masked-lm", "cls.predictions.decoder.weight"), ("llama", "lm_head.weight")] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            let model = Model::open(&folder).unwrap();
            let stored: Vec<String> = model.weights.by_name.keys().cloned().collect();
            let fresh = fresh(model, &mut Vec::new(), &folder, 0).unwrap();
            assert_eq!(fresh.weights.by_name.contains_key(head), name == "llama");
            let names: Vec<String> = fresh.weights.by_name.keys().filter(|name| !name.contains("pooler")).cloned().collect();
            assert_eq!(names, stored, "{name}");
        }
    }

    /// The initial values in transformers, unless `config.json` specifies others.
    #[test]
    fn initial_layer_scales_match_transformers() {
        for (name, suffix, value) in [("dinov2", "lambda1", 1.0), ("convnext", "layer_scale_parameter", 1e-6)] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            let fresh = fresh(Model::open(&folder).unwrap(), &mut Vec::new(), &folder, 0).unwrap();
            let scales: Vec<_> = fresh.weights.by_name.iter().filter(|(name, _)| name.ends_with(suffix)).collect();
            assert!(!scales.is_empty());
            for (name, scale) in scales {
                assert!(scale.floats(name).unwrap().iter().all(|scale| *scale == value), "{name}");
            }
        }
    }
}
