//! The graph of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::{AuxiliaryFiles, Config, LogitKind, Model, adapter, no_single_label};
use crate::arch::{self, SentenceModule, Settings};
use crate::error::{Error, Result};
use crate::files;
pub use crate::ir::Graph;
use crate::ir::ops::FakeQuantize;
use crate::ir::quantizers::{self, Quantizers};
use crate::ir::{Builder, Dim, GraphFile, Node, Op, difference, is_equivalent, kv_cache, low_rank, rebuild};
pub use crate::onnx::ModelFile;
use crate::store::{ActivationScheme, Encoding, Module, OpenSize, OpenSizes, QuantizationSpec, Weight, Weights};

#[doc(hidden)]
impl Model {
    /// Whether values of the inputs of an ONNX file decide which parts of it run, for a batch as a whole.
    pub fn branches(&self) -> bool {
        self.onnx.as_ref().is_some_and(|file| file.branches())
    }

    /// Opens an ONNX file; `path` is the file itself or its folder.
    pub(super) fn open_onnx(path: &Path, file: &Path) -> Result<Model> {
        let onnx = ModelFile::open(file)?;
        let weight_files: Vec<_> = std::iter::once(file.to_owned()).chain(onnx.data_files.iter().cloned()).collect();
        let folder = files::is_dir(path);
        let mut auxiliary = if folder { AuxiliaryFiles::scan(path, &weight_files)? } else { AuxiliaryFiles::adjacent(file) };
        auxiliary.in_weight_files.extend(onnx.quantization_notes());
        let config = if folder { Config::open(&path.join("config.json"))? } else { Config::default() };
        let model = Model::new(path, config, onnx.all_weights(), weight_files, auxiliary);
        Ok(Model { onnx: Some(Arc::new(onnx)), ..model })
    }

    /// Fixes symbolic dimensions of an ONNX file, or the `height` and `width` of the images in the texts of a
    /// model with a vision tower, which then is part of the graph. Fails if the model has no such sizes, or
    /// other sizes were specified before.
    pub fn fix_sizes(&self, sizes: &OpenSizes) -> Result<()> {
        let wrong = |reason: &str| Error::option("sizes", format!("{}: {reason}", self.path.display()));
        match &self.onnx {
            // An exported model with a tower has the size of its images already.
            Some(file) => {
                let images = file.input_sizes("pixel_values").unwrap_or_default();
                let is_fixed =
                    |name: &str, axis: usize| matches!((sizes.get(name), images.get(axis)), (Some(OpenSize::One(size)), Some(Some(fixed))) if size == fixed);
                let both = is_fixed("height", 2) && is_fixed("width", 3);
                let others = sizes.iter().filter(|(name, _)| !both || !["height", "width"].contains(&name.as_str()));
                return file.fix_sizes(&others.map(|(name, size)| (name.clone(), size.clone())).collect());
            }
            None if sizes.is_empty() => return Ok(()),
            None if !arch::has_tower(self.config.model_type()) => return Err(wrong("is not an .onnx file: other models accept any size")),
            None => {}
        }
        let side = |name: &str| sizes.get(name).and_then(|size| if let OpenSize::One(side) = size { Some(*side) } else { None });
        let (Some(height), Some(width), 2) = (side("height"), side("width"), sizes.len()) else {
            return Err(wrong("expected `height` and `width`, the size of the images in its texts"));
        };
        let size = [height, width];
        let graph = Model { image_size: Arc::new(size.into()), ..self.clone() }.graph();
        let graph = graph.map_err(|e| Error::option("sizes", format!("{height} x {width}: {e}")))?;
        let read = graph.inputs().find(|(_, value)| value.ty.shape.len() == 4).map(|(_, value)| value.ty.shape.get(2..));
        if read != Some(Some(&size.map(Dim::Fixed)[..])) {
            return Err(wrong("its graph.json does not describe texts with images of this size"));
        }
        if *self.image_size.get_or_init(|| size) == size { Ok(()) } else { Err(wrong("was already opened with other sizes")) }
    }

    /// Whether a weight of an ONNX file has been replaced.
    pub fn changes(&self, name: &str, now: &Weight) -> bool {
        self.onnx.as_ref().is_some_and(|file| file.weights.get(name).is_none_or(|before| !Arc::ptr_eq(&before.source(), &now.source())))
    }

    /// Whether the model has a classification head that the input lacks.
    pub(super) fn has_added_head(&self, input: &Model) -> bool {
        let head = arch::ClassificationHead::for_model(&Settings::new(self.config.values()));
        let has = |model: &Model, name: &str| model.weights.by_name.contains_key(name);
        head.map(|head| format!("{}.weight", head.logits())).is_some_and(|name| has(self, &name) && !has(input, &name))
    }

    /// The graph: as changed by passes, otherwise from the ONNX file, `graph.json` or `config.json`.
    pub fn graph(&self) -> Result<Graph> {
        self.graph_and_unknown_keys().map(|(graph, _)| graph)
    }

    /// The graph, and unrecognized keys of the folder's configuration files, each prefixed with its file
    /// name.
    pub fn graph_and_unknown_keys(&self) -> Result<(Graph, Vec<String>)> {
        let file = self.path.join(GraphFile::NAME);
        match (&self.changed_graph, &self.onnx) {
            (Some(graph), _) => Ok(((**graph).clone(), Vec::new())),
            (None, Some(file)) => Ok((file.lift(&self.weights)?, Vec::new())),
            (None, None) if files::is_file(&file) => Ok((GraphFile::open(&file)?.build(&self.weights)?, Vec::new())),
            (None, None) => self.described(),
        }
    }

    /// The content of `graph.json`, if passes have changed the graph so that `config.json` does not
    /// describe it.
    pub fn graph_file(&self) -> Result<Option<GraphFile>> {
        let Some(graph) = &self.changed_graph else { return Ok(None) };
        let described = self.described().is_ok_and(|(described, _)| is_equivalent(&described, graph, &self.weights));
        Ok((!described).then(|| GraphFile::from(&**graph)))
    }

    /// The model with other weights. Removes the input quantizers of layers that are no longer quantized.
    pub fn with_weights(&self, weights: Weights) -> Result<Model> {
        let weights = self.replace_weights(weights).weights;
        if self.changed_graph.is_some() && self.graph_file()?.is_none() {
            // `config.json` also describes the graph for other weight names, such as those of experts
            // fused in one tensor.
            let model = Model { weights, ..self.clone() };
            let (graph, _) = model.described()?;
            return Ok(Model { changed_graph: Some(Arc::new(graph)), ..model });
        }
        let quantized = |weights: &Weights, name: &str| weights.by_name.get(name).is_some_and(|weight| weight.encoding != Encoding::Dense);
        let mut changed_graph = self.changed_graph.clone();
        if let Some(graph) = &self.changed_graph {
            let mut unquantized = BTreeMap::new();
            let floats = rebuild(graph, &weights, &mut |mut step| {
                if quantizers::layer_weight(graph, step.node).is_some_and(|name| quantized(&self.weights, name) && !quantized(&weights, name))
                    && let Some(input) = step.inputs.first_mut()
                {
                    *input = unquantized.get(&*input).copied().unwrap_or(*input);
                }
                let from = step.inputs.first().copied().filter(|_| matches!(step.node.op, Op::FakeQuantize(_)));
                let copy = step.copy()?;
                unquantized.extend(from.map(|from| (copy, from)));
                Ok(copy)
            })?;
            changed_graph = Some(Arc::new(floats));
        }
        Ok(Model { weights, changed_graph, ..self.clone() })
    }

    /// The model without the quantization of its KV cache; `None` if the cache is not quantized.
    pub fn without_cache(&self) -> Result<Option<Model>> {
        if self.config.cache()?.is_none() {
            return Ok(None);
        }
        let mut model = self.clone();
        if !self.has_derived_graph() {
            let floats = rebuild(&self.graph()?, &self.weights, &mut |step| match (&step.node.op, step.inputs.as_slice()) {
                (Op::CacheQuantize(_), [value, ..]) => Ok(*value),
                _ => step.copy(),
            })?;
            model.changed_graph = Some(Arc::new(floats));
        }
        model.weights.by_name.retain(|name, _| !self.is_cache_scale(name));
        model.config.remove_cache();
        Ok(Some(model))
    }

    /// Compares the graph with that of another model with the same weight names, with constants as
    /// 32-bit floats. `None` if one of them has no graph.
    pub fn difference_from(&self, other: &Model) -> Option<std::result::Result<(), String>> {
        let (Ok(one), Ok(two)) = (self.graph(), other.graph()) else { return None };
        Some(match difference(&one, &two, &self.weights) {
            Ok(None) => Ok(()),
            Ok(Some([one, two])) => Err(match self.config.differing_numbers(&other.config).as_slice() {
                [] => format!("`{one}` is written as `{two}`"),
                keys => format!("{}; `{one}` is written as `{two}`", keys.join(", ")),
            }),
            Err(e) => Err(e.to_string()),
        })
    }

    /// Whether a `graph.json` describes the model, because `config.json` cannot: a pass of this run has
    /// changed the graph, or the folder has such a file.
    pub fn needs_graph_file(&self) -> bool {
        let path = self.path.join(GraphFile::NAME);
        match &self.changed_graph {
            Some(_) => self.graph_file().is_ok_and(|file| file.is_some()),
            None if self.onnx.is_some() || !files::is_file(&path) => false,
            // The file may be redundant.
            None => match (self.graph(), self.described()) {
                (Ok(graph), Ok((described, _))) => !is_equivalent(&described, &graph, &self.weights),
                _ => true,
            },
        }
    }

    /// Checks that the weights fit the graph.
    ///
    /// # Errors
    /// A weight is missing, or has another shape than the graph requires, or sizes in `config.json`
    /// contradict each other. Other reasons why the model cannot run are not errors: other programs may
    /// support it.
    pub fn require_matching_weights(&self) -> Result<()> {
        mismatch_of(self.graph())
    }

    /// Checks that the weights fit `config.json`, even if the folder has a `graph.json`, which only this
    /// program reads.
    ///
    /// # Errors
    /// As for [`require_matching_weights`](Model::require_matching_weights).
    pub fn require_weights_of_config(&self) -> Result<()> {
        if self.onnx.is_some() { Ok(()) } else { mismatch_of(self.family_graph()) }
    }

    /// Checks that the graph uses the biases among these weights.
    ///
    /// # Errors
    /// A bias is not used. A model without a graph is not an error.
    pub fn require_used_biases<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<()> {
        let biases: Vec<&str> = names.filter(|name| name.ends_with(".bias")).collect();
        let unused = if biases.is_empty() { Vec::new() } else { self.graph().map_or_else(|_| Vec::new(), |graph| self.unused(&graph)) };
        biases.into_iter().find(|name| unused.iter().any(|unused| unused == name)).map_or(Ok(()), |name| {
            let reason = format!("is a bias that `{}` with this configuration does not have", self.config.model_type());
            Err(Error::tensor(name, reason, "correct config.json, or start from the original checkpoint"))
        })
    }

    /// Whether `config.json` describes the graph.
    pub fn is_described(&self) -> bool {
        match &self.changed_graph {
            Some(_) => self.graph_file().is_ok_and(|file| file.is_none()),
            None => self.onnx.is_none() && !files::is_file(&self.path.join(GraphFile::NAME)),
        }
    }

    /// Whether the graph is built from `config.json` and the weights, so that it follows their changes.
    pub fn has_derived_graph(&self) -> bool {
        self.changed_graph.is_none() && self.is_described()
    }

    /// The graph that `config.json` describes, and unrecognized keys.
    fn described(&self) -> Result<(Graph, Vec<String>)> {
        let (graph, unknown) = self.family_graph()?;
        let corrections = self.corrections();
        let graph = if corrections.is_empty() { graph } else { low_rank::insert(&graph, &self.weights, &corrections, &self.corrected_norms())? };
        let quantizers = self.quantizers();
        let graph = if quantizers.layers.is_empty() { graph } else { quantizers::insert(&graph, &self.weights, &quantizers)? };
        let graph = match self.config.cache()? {
            None => graph,
            Some(scheme) => kv_cache::insert(&graph, &self.weights, scheme)?,
        };
        Ok((graph, unknown))
    }

    /// The graph that the model family builds from `config.json`, without quantization and corrections, and
    /// unrecognized keys.
    fn family_graph(&self) -> Result<(Graph, Vec<String>)> {
        if self.config.model_type().is_empty() {
            return Err(Error::Unsupported {
                what: format!("{}: running a model without graph.json and without a model_type in config.json", self.path.display()),
                hint: "add a config.json, or describe the model in a graph.json; weight passes require neither".into(),
            });
        }
        let (modules, unknown) = SentenceModule::described(&self.path)?;
        let (mut graph, mut keys) = arch::describe(&Settings::new(self.config.values()), &modules, Builder::new(&self.weights))?;
        if let Some(size) = self.image_size.get() {
            let (with_images, of_tower) = arch::with_images(&graph, self.config.values(), *size, &self.weights)?;
            graph = with_images;
            keys.extend(of_tower);
        }
        let keys = keys.into_iter().filter(|key| key != adapter::KEY);
        Ok((graph, keys.map(|key| format!("config.json: {key}")).chain(unknown).collect()))
    }

    /// Folders of pooling modules with their input widths, if a pass has changed the graph.
    pub(super) fn pooled_widths(&self, folder: &Path) -> Result<Vec<(String, usize)>> {
        let Some(graph) = &self.changed_graph else { return Ok(Vec::new()) };
        let width = |index: usize| {
            let node = graph.nodes().iter().find(|node| arch::is_of_module(index, &graph.value(node.output).name))?;
            graph.value(*node.inputs.first()?).ty.shape.last()?.fixed()
        };
        // Modules after the transformer that compute something are numbered.
        let computes = |module: &Module| !["Transformer", "Dropout"].contains(&module.kind.as_str());
        let modules = Module::try_list(folder)?.unwrap_or_default().into_iter().filter(computes).enumerate();
        let poolings = modules.filter(|(_, module)| module.kind == "Pooling" && !module.folder.is_empty());
        let known = poolings.filter_map(|(index, module)| Some((module.folder, width(index)?)));
        known.map(|(inside, width)| Module::require_inside(folder, &inside).map(|()| (inside, width))).collect()
    }

    /// Layers with statically quantized inputs, whose parameters are stored with their weights.
    fn quantizers(&self) -> Quantizers {
        let quantizer = |(name, weight): (&String, &Weight)| match &weight.encoding {
            Encoding::Quantized(QuantizationSpec { activations: ActivationScheme::Static(by), .. }) => {
                Some((name.clone(), FakeQuantize { scale: by.scale(), zero_point: by.zero_point.unwrap_or(0).into() }))
            }
            _ => None,
        };
        Quantizers { layers: self.weights.by_name.iter().filter_map(quantizer).collect(), ..Quantizers::default() }
    }

    /// The input value of each linear layer, by the name of its weight; empty for models without a graph.
    pub fn inputs_of_layers(&self) -> BTreeMap<String, String> {
        let Ok(graph) = self.graph() else { return BTreeMap::new() };
        let input = |node: &Node| match (&node.op, node.inputs.as_slice()) {
            (Op::Linear(_), [x, weight, ..]) => Some((graph.value(*weight).name.clone(), graph.value(*x).name.clone())),
            _ => None,
        };
        graph.nodes().iter().filter_map(input).collect()
    }

    /// Kind of the output `logits`.
    pub fn logit_kind(&self) -> Result<LogitKind> {
        Ok(LogitKind::from_config(self.preprocessing()?.1.values()))
    }

    /// Rejects models whose output `logits`, if there is one, is not a distribution over classes or tokens.
    ///
    /// # Errors
    /// If each class has its own sigmoid, or there is only one. The error names the option that needs a
    /// distribution, and how to do without.
    pub fn require_distribution(&self, graph: &Graph, option: &str, how: &str) -> Result<()> {
        let Some((_, logits)) = graph.outputs().iter().find(|(name, _)| name == "logits") else { return Ok(()) };
        let shape = &graph.value(*logits).ty.shape;
        let reason = if graph.outputs().iter().any(|(name, _)| name == arch::BOXES) {
            "the scores of a detector are sigmoids".to_owned()
        } else if shape.len() == 2 {
            match no_single_label(self.config.values(), shape.last().and_then(Dim::fixed)) {
                Some(reason) => reason,
                None => return Ok(()),
            }
        } else {
            return Ok(());
        };
        Err(Error::option(option, format!("needs logits of a distribution over classes or tokens, but {reason}: {how}")))
    }

    /// Weights that the graph does not use, by name.
    pub fn unused(&self, graph: &Graph) -> Vec<String> {
        let used: BTreeSet<&str> = graph.params().map(|(_, v)| v.name.as_str()).collect();
        self.weights.by_name.keys().filter(|name| !used.contains(name.as_str())).cloned().collect()
    }
}

/// The error, if the weights or the configuration contradict the graph that was to be built from them.
fn mismatch_of<T>(graph: Result<T>) -> Result<()> {
    match graph {
        Err(error) if matches!(error, Error::Tensor { .. }) || arch::is_indivisible(&error) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Codes, DType, Granularity};

    /// Queries, keys and values share one quantizer; a layer with float weights reads its input unquantized.
    #[test]
    fn only_inputs_of_quantized_layers_are_quantized() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/bert");
        let model = Model::open(folder).unwrap();
        let graph = model.graph().unwrap();
        let by = FakeQuantize { scale: 0.1, zero_point: 3 };
        let layer = |part: &str| format!("encoder.layer.0.{part}.weight");
        let all = ["attention.self.query", "attention.self.key", "attention.self.value", "output.dense"].map(layer);
        let rounding = |layers: &[String]| {
            let quantizers = Quantizers { layers: layers.iter().map(|name| (name.clone(), by)).collect(), ..Quantizers::default() };
            quantizers::insert(&graph, &model.weights, &quantizers).unwrap()
        };
        let quantized_weights = |layers: &[String]| {
            let mut weights = model.weights.clone();
            for name in layers {
                let codes = (Codes::INT8, Granularity::Tensor, ActivationScheme::None);
                let affine = QuantizationSpec { codes: codes.0, granularity: codes.1, symmetric: true, scale_dtype: DType::F32, activations: codes.2 };
                weights.by_name.get_mut(name).unwrap().encoding = Encoding::Quantized(affine);
            }
            weights
        };
        let quantized = Model { weights: quantized_weights(&all), changed_graph: Some(Arc::new(rounding(&all))), ..model.clone() };
        for left in [&all[..], &all[1..], &all[..3], &all[3..], &[]] {
            let model = quantized.with_weights(quantized_weights(left)).unwrap();
            // The order of nodes may differ, since quantizers precede their first consumer.
            let lines = |graph: &Graph| graph.to_string().lines().map(str::to_owned).collect::<BTreeSet<_>>();
            assert_eq!(lines(&model.changed_graph.unwrap()), lines(&rounding(left)), "{left:?}");
        }
    }
}
