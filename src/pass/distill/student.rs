//! The model that learns.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::analysis;
use crate::arch::{self, SentenceModule, Settings};
use crate::error::{Error, Result};
use crate::ir::{Builder, Graph, Op};
use crate::model::{Config, Model};
use crate::pass::prune_structured::keep_layers;
use crate::run_state::RunState;
use crate::store::header::element_count;
use crate::store::{Computed, Weight};

/// The model that learns: the input model with some of its layers, another folder, or fresh weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Student {
    /// The layers of the input model that stay, from 0
    Layers(Vec<usize>),
    /// Every so-many-th layer of the input model, from the first
    Every(usize),
    /// A folder of its own
    Model(PathBuf),
    /// Fresh weights for a configuration: a config.json, or a folder with one
    Config(PathBuf),
}

impl FromStr for Student {
    type Err = String;

    /// `layers=0,2,4`, `every=2`, `model=FOLDER`, `config=FILE`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || format!("`{text}` is none of layers=0,2,4, every=2, model=FOLDER, config=FILE");
        let (kind, value) = text.split_once('=').ok_or_else(wrong)?;
        match kind.trim() {
            "layers" => value.split(',').map(|n| n.trim().parse().map_err(|_| wrong())).collect::<std::result::Result<_, _>>().map(Student::Layers),
            "every" => value.trim().parse().map(Student::Every).map_err(|_| wrong()),
            "model" => Ok(Student::Model(value.into())),
            "config" => Ok(Student::Config(value.into())),
            _ => Err(wrong()),
        }
    }
}

/// Elements of a fresh weight at most.
const LARGEST: u64 = 1 << 32;

fn wrong(reason: impl std::fmt::Display) -> Error {
    Error::option("distill: student", reason)
}

impl Student {
    /// The path that it names, if any.
    pub(super) fn path(&mut self) -> Option<&mut PathBuf> {
        match self {
            Student::Model(path) | Student::Config(path) => Some(path),
            Student::Layers(_) | Student::Every(_) => None,
        }
    }

    /// The student as it is before it has learned anything.
    ///
    /// # Errors
    /// The model has no such layers, or the student cannot be opened or built.
    pub(super) fn of(&self, model: Model, run: &mut RunState, seed: u64) -> Result<Model> {
        if let (Student::Model(_) | Student::Config(_), Some(before)) = (self, run.history.last()) {
            let reason = format!("takes the place of the model that `{}` has changed: apply that pass behind `distill`, or leave it out", before.name);
            return Err(wrong(reason));
        }
        match self {
            Student::Layers(kept) => keep(model, run, kept),
            Student::Every(0) => Err(wrong("`every` must be at least 1")),
            Student::Every(step) => {
                let graph = model.graph()?;
                let count = analysis::layers(&graph).map_or(0, |layers| layers.layers.len());
                keep(model, run, &(0..count).step_by(*step).collect::<Vec<_>>())
            }
            Student::Model(path) => {
                let student = Model::open(path)?;
                require_same_modules(&model, &student)?;
                Ok(student)
            }
            Student::Config(path) => fresh(model, run, path, seed),
        }
    }
}

/// Refuses a student whose modules compute something else than those of the input.
fn require_same_modules(model: &Model, student: &Model) -> Result<()> {
    let (theirs, own) = (SentenceModule::open(&model.path)?, SentenceModule::open(&student.path)?);
    let differ = |at: &usize| match (theirs.get(*at), own.get(*at)) {
        (Some(wanted), Some(found)) => !wanted.is_like(found),
        _ => true,
    };
    let Some(at) = (0..theirs.len().max(own.len())).find(differ) else { return Ok(()) };
    let name = |modules: &[SentenceModule]| modules.get(at).map_or_else(|| "none".to_owned(), SentenceModule::name);
    let (wanted, found) = (name(&theirs), name(&own));
    let what = if wanted == found {
        format!("{wanted}, which computes something else than that of the input model")
    } else {
        format!("{found}, where the input model has {wanted}")
    };
    Err(wrong(format!("module {} behind the transformer of {} is {what}: give the student the modules of the input", at + 1, student.path.display())))
}

fn keep(mut model: Model, run: &mut RunState, kept: &[usize]) -> Result<Model> {
    let graph = model.graph()?;
    let Some(found) = analysis::layers(&graph) else { return Err(wrong("the model has no layers that repeat: give a folder, or prune its width")) };
    let count = found.layers.len();
    let set: BTreeSet<usize> = kept.iter().copied().collect();
    if set.len() != kept.len() || !kept.is_sorted() || kept.is_empty() {
        return Err(wrong(format!("layers {kept:?}: name at least one, each once, in order")));
    }
    if let Some(layer) = set.iter().find(|layer| **layer >= count) {
        return Err(wrong(format!("layer {layer}: the model has {count} layers, the first is 0")));
    }
    let gone = (0..count).filter(|layer| !set.contains(layer)).collect();
    let notes = keep_layers(&mut model, &graph, &found, &gone)?;
    run.notes.extend(notes);
    Ok(model)
}

/// A model of fresh weights in the place of another, whose tokenizer and other files it keeps.
fn fresh(mut model: Model, run: &mut RunState, path: &Path, seed: u64) -> Result<Model> {
    let is_folder = crate::files::is_dir(path);
    let file = if is_folder { path.join("config.json") } else { path.to_owned() };
    let found = if is_folder { crate::files::files(path).map_err(Error::io("list", path))? } else { Vec::new() };
    let unused: Vec<_> = found.iter().filter(|found| **found != file).filter_map(|found| found.file_name()?.to_str()).collect();
    if !unused.is_empty() {
        run.notes.push(format!(
            "the student takes only config.json from {}, and tokenizer and other files from the input; not used: {}",
            crate::error::tellable(path).display(),
            unused.join(", ")
        ));
    }
    let config = Config::open(&file)?;
    let modules = SentenceModule::open(&model.path)?;
    let graph = arch::build(&Settings::new(config.values()), &modules, Builder::unchecked())?;
    let number = |key: &str| config.get(key).and_then(serde_json::Value::as_f64);
    let deviation = number("initializer_range").unwrap_or(0.02);
    // The defaults of transformers for DINOv2 and ConvNeXt.
    let layer_scale = number("layerscale_value").or(number("layer_scale_init_value")).unwrap_or(if config.model_type() == "convnext" { 1e-6 } else { 1.0 });
    model.weights.by_name.clear();
    for (number, (id, value)) in graph.params().enumerate() {
        let shape: Option<Vec<usize>> = value.ty.shape.iter().map(crate::ir::Dim::fixed).collect();
        let shape = shape.ok_or_else(|| wrong(format!("the shape of `{}` is not known", value.name)))?;
        let elements = element_count(&shape).filter(|count| *count <= LARGEST);
        let elements = elements.ok_or_else(|| wrong(format!("`{}` of shape {shape:?} would have more than {LARGEST} elements", value.name)))?;
        let filling = filling(&graph, id, &shape, (deviation, layer_scale));
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64);
        let weight: Weight = Computed { values: move || Ok(filling.values(elements as usize, random)) }.weight(shape);
        model.weights.by_name.insert(value.name.clone(), weight);
    }
    model.config = config;
    model.changed_graph = Some(Arc::new(graph));
    Ok(model)
}

/// What a fresh weight holds.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filling {
    Constant(f32),
    /// Normally distributed with this deviation.
    Normal(f64),
}

/// As transformers and torchvision begin: normal matrices, and convolutions by the size of what they sum (He et al., 2015).
fn filling(graph: &Graph, id: crate::ir::ValueId, shape: &[usize], (deviation, layer_scale): (f64, f64)) -> Filling {
    let place = graph.nodes().iter().find_map(|node| Some((&node.op, node.inputs.iter().position(|input| *input == id)?)));
    match place {
        Some((Op::RmsNorm(op), _)) => Filling::Constant((1.0 - op.offset) as f32),
        Some((Op::LayerNorm(_) | Op::BatchNorm(_), at)) => Filling::Constant(if at == 1 || at == 4 { 1.0 } else { 0.0 }),
        Some((Op::Conv(_), 1)) => Filling::Normal((2.0 / shape[1..].iter().product::<usize>().max(1) as f64).sqrt()),
        Some((Op::Mul(_), _)) if shape.len() == 1 => Filling::Constant(layer_scale as f32),
        _ if shape.len() > 1 => Filling::Normal(deviation),
        _ => Filling::Constant(0.0),
    }
}

impl Filling {
    fn values(self, count: usize, seed: u64) -> Vec<f32> {
        match self {
            Filling::Constant(value) => vec![value; count],
            Filling::Normal(deviation) => {
                let mut random = fastrand::Rng::with_seed(seed);
                // Box and Muller, 1958: one of the two numbers.
                let mut next = || (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos();
                (0..count).map(|_| (deviation * next()) as f32).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn students_are_read() {
        assert_eq!("layers=0,2,4".parse(), Ok(Student::Layers(vec![0, 2, 4])));
        assert_eq!(serde_saphyr::from_str::<Student>("{ every: 2 }").unwrap(), Student::Every(2));
        assert_eq!("model=./a".parse(), Ok(Student::Model("./a".into())));
        assert!("layers=a".parse::<Student>().is_err() && "twice".parse::<Student>().is_err());
    }

    #[test]
    fn fresh_models_are_tied_as_their_configuration_says() {
        for (name, head) in [("llama-grouped-tied", "lm_head.weight"), ("bert-masked-lm", "cls.predictions.decoder.weight"), ("llama", "lm_head.weight")] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            let model = Model::open(&folder).unwrap();
            let stored: Vec<String> = model.weights.by_name.keys().cloned().collect();
            let fresh = fresh(model, &mut RunState::default(), &folder, 0).unwrap();
            assert_eq!(fresh.weights.by_name.contains_key(head), name == "llama");
            let names: Vec<String> = fresh.weights.by_name.keys().filter(|name| !name.contains("pooler")).cloned().collect();
            assert_eq!(names, stored, "{name}");
        }
    }

    /// The initial values in transformers, unless `config.json` specifies others.
    #[test]
    fn fresh_layer_scales_are_those_of_transformers() {
        for (name, suffix, value) in [("dinov2", "lambda1", 1.0), ("convnext", "layer_scale_parameter", 1e-6)] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            let fresh = fresh(Model::open(&folder).unwrap(), &mut RunState::default(), &folder, 0).unwrap();
            let scales: Vec<_> = fresh.weights.by_name.iter().filter(|(name, _)| name.ends_with(suffix)).collect();
            assert!(!scales.is_empty());
            for (name, scale) in scales {
                assert!(scale.floats(name).unwrap().iter().all(|scale| *scale == value), "{name}");
            }
        }
    }

    #[test]
    fn fresh_weights_are_spread_as_asked() {
        let values = Filling::Normal(0.5).values(20_000, 1);
        let (mean, square) = values.iter().fold((0.0, 0.0), |(m, s), v| (m + f64::from(*v), s + f64::from(v * v)));
        assert!((mean / 20_000.0).abs() < 0.02 && (square / 20_000.0 - 0.25).abs() < 0.01);
        assert_eq!(values, Filling::Normal(0.5).values(20_000, 1));
    }
}
