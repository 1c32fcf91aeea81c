//! Low-rank adapters of linear layers (Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*,
//! 2021; Liu et al., *DoRA: Weight-Decomposed Low-Rank Adaptation*, 2024). They are attached to the graph
//! before training, as parameters of which the losses compute gradients, and afterwards are merged into the
//! weights, or written as an adapter of PEFT.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use crate::analysis;
use crate::contract::facts::VLLM_ADAPTER_REMEDY;
use crate::error::{Error, Result, counted};
use crate::ir::ops::Op;
use crate::ir::{Graph, Node, low_rank};
use crate::model::adapter::{factor_names, magnitude_name};
use crate::model::{Model, is_linear};
use crate::pass::{layerwise, peft};
use crate::store::{
    ActivationScheme, Computed, Corrected, DType, Encoding, Normalized, Origin, Pattern, Role, Scaled, Weight, ZeroOrigin, output_norms, select,
};
use crate::train::{Absorbed, Adapter, AdapterKind, BatchNorm, ClassifyZeros, OutputNorm, Training, ZeroKind, norm_names};

/// Option of the selected layers, for messages.
const TARGETS: &str = "adapter: targets";

/// The adapters of a model.
pub(super) struct Adapters {
    options: Adapter,
    /// The model without adapters.
    base: Model,
    /// Layers by the name of their weight.
    layers: BTreeMap<String, Layer>,
}

/// A layer with an adapter.
struct Layer {
    /// Names of the factors `[rank, in]` and `[out, rank]`.
    factors: [String; 2],
    /// With DoRA, names of the trained norms `[out]`, and of those of the weight with the product.
    norms: Option<[String; 2]>,
    /// Outputs and inputs.
    sizes: [usize; 2],
    /// Whether the weight is stored as `[in, out]`.
    input_major: bool,
}

impl Adapters {
    /// Selects the layers of a model, and returns it with adapters whose products are zero. Fails if a layer
    /// cannot have an adapter; `pass` is the prefix of error messages.
    pub fn attach(pass: &str, options: &Adapter, training: &Training, base: &Model, seed: u64) -> Result<(Adapters, Model)> {
        let refused = |reason: &str| Err(Error::option(format!("{pass}: adapter"), reason));
        let graph = base.graph()?;
        if training.batch_norm == BatchNorm::Batch && graph.nodes().iter().any(|node| matches!(node.op, Op::BatchNorm(_))) {
            return refused("requires `batch_norm: fixed`, because the running statistics belong to the base, which does not change");
        }
        if let Some(requirement) = peft::unmet_requirement(base).filter(|_| !options.merge) {
            return refused(&format!("with `merge: false`, {requirement}; or set `merge: true`"));
        }
        let layers = layers(options, base, &graph)?;
        if layers.is_empty() {
            return refused("finds no linear layers in repeated layers: list weights in its `targets`");
        }
        let mut model = base.clone();
        if options.absorb {
            return Ok((Adapters { options: options.clone(), base: base.clone(), layers }, model));
        }
        for (number, (name, layer)) in layers.iter().enumerate() {
            let [outputs, inputs] = layer.sizes;
            let inner = initial_inner(options.rank, inputs, seed, number);
            let inner = Computed { values: move || Ok(inner()) }.weight(vec![options.rank, inputs]);
            let count = outputs * options.rank;
            let outer = Computed { values: move || Ok(vec![0.0; count]) }.weight(vec![outputs, options.rank]);
            let mut added = vec![(&layer.factors[0], inner), (&layer.factors[1], outer)];
            for norms in layer.norms.iter().flatten() {
                let (name, weight, input_major) = (name.clone(), base.weights.get(name)?.clone(), layer.input_major);
                let values = move || -> Result<Vec<f32>> { Ok(output_norms(&name, &weight, input_major)?.into_iter().map(|norm| norm as f32).collect()) };
                added.push((norms, Computed { values }.weight(vec![outputs])));
            }
            for (name, mut weight) in added {
                // Optimizers treat factors like the matrices of linear layers.
                weight.role = Some(if weight.shape.len() == 2 { Role::Matrix } else { Role::Other });
                model.weights.by_name.insert(name.clone(), weight);
            }
        }
        let factors = layers.iter().map(|(name, layer)| (name.clone(), layer.factors.clone())).collect();
        let norms = layers.iter().filter_map(|(name, layer)| Some((name.clone(), layer.norms.clone()?))).collect();
        let terms = low_rank::Terms { factors: &factors, scale: options.scale(), norms: &norms };
        model.changed_graph = Some(Arc::new(low_rank::insert_terms(&graph, &model.weights, terms)?));
        Ok((Adapters { options: options.clone(), base: base.clone(), layers }, model))
    }

    /// Patterns of the names of all trained parameters of the graph, or of the weights that absorb the
    /// adapters.
    pub fn patterns(&self) -> Result<Vec<Pattern>> {
        let trained = self.layers.values().flat_map(|layer| layer.factors.iter().chain(layer.norms.iter().map(|[trained, _]| trained)));
        let names: Vec<&String> = if self.options.absorb { self.layers.keys().collect() } else { trained.collect() };
        let names = names.into_iter();
        names.map(|name| name.parse::<Pattern>().map_err(|e| Error::tensor(name, e, "rename the tensor of the base"))).collect()
    }

    /// The parameters that are computed from others in each step.
    pub fn norms(&self) -> BTreeMap<String, OutputNorm> {
        let norm = |(weight, layer): (&String, &Layer)| {
            let [_, name] = layer.norms.clone()?;
            let norm = OutputNorm { weight: weight.clone(), factors: layer.factors.clone(), scale: self.options.scale(), input_major: layer.input_major };
            Some((name, norm))
        };
        self.layers.iter().filter_map(norm).collect()
    }

    /// The weights that absorb adapters, and the initial factors.
    pub fn absorbed(&self, seed: u64) -> Result<(BTreeMap<String, Absorbed>, BTreeMap<String, Tensor>)> {
        let (mut absorbed, mut values) = (BTreeMap::new(), BTreeMap::new());
        for (number, (name, layer)) in self.layers.iter().enumerate().filter(|_| self.options.absorb) {
            let ([outputs, inputs], rank) = (layer.sizes, self.options.rank);
            let inner = Tensor::from_vec(initial_inner(rank, inputs, seed, number)(), (rank, inputs), &Device::Cpu);
            let outer = Tensor::zeros((outputs, rank), candle_core::DType::F32, &Device::Cpu);
            for (name, tensor) in layer.factors.iter().zip([inner, outer]) {
                values.insert(name.clone(), tensor.map_err(|e| Error::candle(format!("tensor `{name}`"), e))?);
            }
            let (factors, scale, input_major) = (layer.factors.clone(), self.options.scale(), layer.input_major);
            absorbed.insert(name.clone(), Absorbed { factors, scale, input_major });
        }
        Ok((absorbed, values))
    }

    /// Whether a weight has an adapter.
    pub fn adapts(&self, name: &str) -> bool {
        self.layers.contains_key(name)
    }

    /// Names of the weights that the output has instead of those of the base.
    pub fn changed(&self) -> BTreeSet<String> {
        match self.options.merge {
            true => self.layers.keys().cloned().collect(),
            false => {
                self.layers.iter().flat_map(|(name, layer)| layer.factors.iter().cloned().chain(layer.norms.as_ref().map(|_| magnitude_name(name)))).collect()
            }
        }
    }

    /// Number of weights with zeros of unknown origin, which the merged products replace.
    pub fn unexplained(&self, kind: ClassifyZeros) -> Result<usize> {
        let mut count = 0;
        for name in self.layers.keys().filter(|_| self.options.merge) {
            let weight = self.base.weights.get(name)?;
            if kind(weight) == ZeroKind::Unexplained {
                let (zeros, elements) = (weight.zeros()?, weight.elements() as u64);
                // As many as are noted without adapters: 0.5 %.
                count += usize::from(zeros < elements && 200 * zeros > elements);
            }
        }
        Ok(count)
    }

    /// Rejects merging into pruned weights, whose zeros the products would replace.
    pub fn require_unpruned(&self, kind: ClassifyZeros) -> Result<()> {
        for name in self.layers.keys().filter(|_| self.options.merge) {
            let weight = self.base.weights.get(name)?;
            let zeros = if matches!(kind(weight), ZeroKind::Pruned | ZeroKind::OfPrunedModel) { weight.zeros()? } else { 0 };
            if zeros > 0 && zeros < weight.elements() as u64 {
                return Err(pruned(name));
            }
        }
        Ok(())
    }

    /// The model to write, from the model with trained adapters.
    pub fn finish(&self, trained: &Model) -> Result<Model> {
        if self.options.absorb {
            return Ok(trained.clone());
        }
        let mut model = self.base.clone();
        for (name, layer) in &self.layers {
            let [inner, outer] = layer.factors.each_ref().map(|factor| trained.weights.get(factor).cloned());
            let (inner, outer) = (inner?, self.scaled(&layer.factors[1], outer?));
            if self.options.merge {
                let sum = Corrected { name: name.clone(), upstream: model.weights.get(name)?.clone(), inner, outer };
                let (dtype, input_major) = (sum.upstream.dtype, layer.input_major);
                let sum = if input_major { sum.input_major() } else { sum };
                let merged = match &layer.norms {
                    None => sum.weight()?,
                    Some([norms, _]) => {
                        let norms = trained.weights.get(norms)?.clone();
                        Normalized { name: name.clone(), upstream: sum.weight_as(DType::F32)?, norms, input_major }.weight(dtype)
                    }
                };
                model.weights.by_name.insert(name.clone(), merged.with_origin(Origin::Learned));
            } else {
                model.weights.by_name.extend(layer.factors.iter().cloned().zip([inner, outer]));
                if let Some([norms, _]) = &layer.norms {
                    model.weights.by_name.insert(magnitude_name(name), trained.weights.get(norms)?.clone());
                }
            }
        }
        if !self.options.merge {
            layerwise::declare_corrections(&mut model)?;
        }
        Ok(model)
    }

    /// The factor `[out, rank]`, multiplied by the scale of the product.
    fn scaled(&self, name: &str, outer: Weight) -> Weight {
        let scale = self.options.scale() as f32;
        if scale == 1.0 {
            return outer;
        }
        let rows = Some(Arc::new(vec![scale; outer.shape.first().copied().unwrap_or(0)]));
        Scaled { name: name.to_owned(), upstream: outer, rows, columns: None, offset: 0.0 }.weight(DType::F32)
    }

    /// Number of trained elements.
    fn parameters(&self) -> usize {
        let count = |layer: &Layer| self.options.rank * layer.sizes.iter().sum::<usize>() + if layer.norms.is_some() { layer.sizes[0] } else { 0 };
        self.layers.values().map(count).sum()
    }

    /// Description of the trained tensors in reports.
    pub fn rule(&self) -> String {
        let layers = match self.options.targets.as_slice() {
            [] => "the linear layers of the repeated layers".to_owned(),
            targets => targets.iter().map(Pattern::as_str).collect::<Vec<_>>().join(", "),
        };
        format!("low-rank adapters of {layers}")
    }

    /// A note on the adapters.
    pub fn note(&self, pass: &str) -> String {
        let (rank, layers, parameters) = (self.options.rank, counted(self.layers.len(), "layer"), self.parameters());
        let is_dora = self.options.kind == AdapterKind::Dora;
        let kind = if is_dora { "DoRA" } else { "LoRA" };
        let trained =
            format!("{pass}: {kind} adapters of rank {rank} were trained for {layers}, {parameters} parameters of {}", self.base.weights.parameters());
        if self.options.absorb {
            return format!("{trained}; the codes of the weights absorbed them, with unchanged scales");
        }
        if self.options.merge {
            return format!("{trained}; they are added to the weights");
        }
        let note = format!(
            "{trained}; the folder `adapter` has them as a {kind} adapter that must be loaded with the model, whose weights did not change: all figures of this report are those of both together",
        );
        let is_palette = |weight: &Weight| matches!(&weight.encoding, Encoding::Quantized(spec) if spec.codes.is_palette());
        if self.base.needs_graph_file() || self.base.weights.by_name.values().any(is_palette) {
            // No other program loads the model.
            return note;
        }
        format!("{note}. {}", peft::vllm_note(rank, is_dora, "tuned").unwrap_or_else(|reason| format!("{reason}: {VLLM_ADAPTER_REMEDY}")))
    }

    /// Details for the report.
    pub fn details(&self) -> Value {
        json!({ "kind": self.options.kind, "rank": self.options.rank, "scale": self.options.scale(), "layers": self.layers.len(), "parameters": self.parameters(), "merged": self.options.merge, "absorbed": self.options.absorb })
    }
}

/// The model to write, from the trained one.
pub(super) fn finished(adapters: Option<&Adapters>, trained: Model) -> Result<Model> {
    match adapters {
        Some(adapters) => adapters.finish(&trained),
        None => Ok(trained),
    }
}

fn pruned(name: &str) -> Error {
    let hint = "set `merge: false` in `adapter`, so that the zeros remain in the base, or train without `adapter`, which keeps zeros";
    Error::tensor(name, "has pruned weights, and the product of a merged adapter is not zero there", hint)
}

/// Computes the initial factor `[rank, in]` of the layer with this number.
fn initial_inner(rank: usize, inputs: usize, seed: u64, number: usize) -> impl Fn() -> Vec<f32> + Clone + Send + Sync + 'static {
    let (count, bound) = (rank * inputs, 1.0 / (inputs as f64).sqrt());
    let state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64);
    move || uniform(count, bound, state)
}

/// Values between -`bound` and `bound`, as Kaiming's initialization with a = √5 draws them for a bound of the
/// inverse root of the inputs.
fn uniform(count: usize, bound: f64, seed: u64) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| (bound * (2.0 * random.f64() - 1.0)) as f32).collect()
}

/// The weight of a linear layer, and whether it is stored as `[in, out]`.
fn linear_weight<'g>(graph: &'g Graph, node: &Node) -> Option<(&'g str, bool)> {
    match (&node.op, node.inputs.get(1)) {
        (Op::Linear(op), Some(weight)) if graph.producer(*weight).is_none() => Some((graph.value(*weight).name.as_str(), op.input_major)),
        _ => None,
    }
}

/// The reason why a pattern matches no weight of a linear layer, if it matches other tensors.
fn explain_targets(error: Error, options: &Adapter, base: &Model) -> Error {
    let Error::NoMatch { pattern, .. } = &error else { return error };
    let mut targets = options.targets.iter().filter(|target| target.to_string() == *pattern);
    if !targets.any(|target| base.weights.by_name.keys().any(|name| target.matches(name))) {
        return error;
    }
    Error::option(TARGETS, format!("pattern `{pattern}` matches only tensors that are not weights of linear layers, and only such weights can have adapters"))
}

/// The selected layers. Fails if one of them cannot have an adapter.
fn layers(options: &Adapter, base: &Model, graph: &Graph) -> Result<BTreeMap<String, Layer>> {
    let names: BTreeSet<String> = graph.nodes().iter().filter_map(|node| linear_weight(graph, node)).map(|(weight, _)| weight.to_owned()).collect();
    select::check(TARGETS, &options.targets, names.iter()).map_err(|e| explain_targets(e, options, base))?;
    let stacks = analysis::stacks(graph);
    let repeated: BTreeSet<&String> = stacks.iter().flat_map(|stack| &stack.layers).flat_map(|layer| &layer.nodes).collect();
    let mut found = BTreeMap::new();
    for node in graph.nodes() {
        let Some((name, input_major)) = linear_weight(graph, node) else { continue };
        let weight = base.weights.get(name)?;
        let is_selected = match options.targets.as_slice() {
            [] => repeated.contains(&graph.value(node.output).name) && is_linear(name, weight),
            targets => targets.iter().any(|pattern| pattern.matches(name)),
        };
        if !is_selected {
            continue;
        }
        let [first, second] = weight.shape[..] else { continue };
        let sizes = if input_major { [second, first] } else { [first, second] };
        let norms = (options.kind == AdapterKind::Dora).then(|| norm_names(name));
        let layer = Layer { factors: factor_names(name), norms, sizes, input_major };
        require_supported(options, base, graph, (name, weight), (node, &layer))?;
        found.insert(name.to_owned(), layer);
    }
    Ok(found)
}

/// Rejects layers that cannot have an adapter.
fn require_supported(options: &Adapter, base: &Model, graph: &Graph, (name, weight): (&str, &Weight), (node, layer): (&Node, &Layer)) -> Result<()> {
    let other = "select other layers in `targets` of `adapter`";
    let [outputs, inputs] = layer.sizes;
    if options.rank > outputs.min(inputs) {
        let hint = format!("lower `rank`, or {other}");
        return Err(Error::tensor(name, format!("has the shape {:?}, which is smaller than the rank {} of `adapter`", weight.shape, options.rank), hint));
    }
    let readers = graph.nodes().iter().filter(|other| other.inputs.iter().any(|id| graph.value(*id).name == name)).count();
    if readers > 1 {
        return Err(Error::tensor(name, format!("is read by {readers} operators, so that an adapter of one of them would not fit the others"), other));
    }
    if options.absorb {
        let has_codes = matches!(&weight.encoding, Encoding::Quantized(spec) if !spec.codes.is_palette());
        let reason = || format!("is {}, and has no codes that absorb an adapter", weight.describe());
        return if has_codes { Ok(()) } else { Err(Error::tensor(name, reason(), format!("quantize it before, or {other}"))) };
    }
    if options.merge {
        if weight.encoding != Encoding::Dense {
            let hint = "set `absorb: true` or `merge: false` in `adapter`, or run `dequantize` before and `quantize` after training";
            return Err(Error::tensor(name, format!("is {}, whose codes a merged adapter would change", weight.describe()), hint));
        }
        if !matches!(weight.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::tensor(name, format!("is {}, to which an adapter cannot be added", weight.describe()), "run `cast` before"));
        }
        if weight.zero_origin == Some(ZeroOrigin::Pruning) {
            return Err(pruned(name));
        }
        return Ok(());
    }
    if let Some(reason) = peft::obstacle(name, base)? {
        return Err(Error::tensor(name, format!("cannot have an adapter that PEFT loads: such weights {reason}"), format!("set `merge: true`, or {other}")));
    }
    if layer.input_major != base.config.has_conv1d() {
        let reason = "is stored in another order than other layers, which adapters of PEFT do not support";
        return Err(Error::tensor(name, reason, format!("set `merge: true`, or {other}")));
    }
    let input = node.inputs.first().and_then(|id| graph.producer(*id));
    let is_static = matches!(&weight.encoding, Encoding::Quantized(spec) if matches!(spec.activations, ActivationScheme::Static(_)));
    if is_static || input.is_some_and(|input| matches!(input.op, Op::FakeQuantize(_))) {
        let reason = "reads activations with static quantization, which an adapter next to it would not";
        return Err(Error::tensor(name, reason, "train before quantizing, or quantize only weights"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn attach(name: &str, options: &str) -> Result<(Adapters, Model)> {
        let base = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name))?;
        Adapters::attach("finetune", &options.parse().unwrap(), &Training::default(), &base, 3)
    }

    #[test]
    fn layers_of_blocks_get_adapters_and_others_are_refused_by_name() {
        for (name, count) in [("llama", 14), ("phi3", 8), ("gpt2", 8), ("llama-grouped-tied", 14), ("bert", 12)] {
            let (adapters, model) = attach(name, "4").unwrap();
            assert_eq!((adapters.layers.len(), adapters.patterns().unwrap().len()), (count, 2 * count), "{name}");
            assert!(adapters.layers.keys().all(|name| !name.contains("embed") && !name.contains("head")), "{name}");
            let graph = model.graph().unwrap();
            let is_scale = |node: &&Node| matches!(&node.op, Op::Scale(op) if (op.factor - 8.0).abs() < 1e-12);
            assert_eq!(graph.nodes().iter().filter(is_scale).count(), count, "{name}");
            let (adapters, _) = attach(name, "{kind: dora, rank: 4}").unwrap();
            assert_eq!((adapters.norms().len(), adapters.patterns().unwrap().len()), (count, 3 * count), "{name}");
        }
        let refused = |name: &str, options: &str| attach(name, options).err().unwrap().to_string();
        assert!(refused("llama", "17").contains("is smaller than the rank 17"));
        assert!(refused("llama", "{targets: [nosuch.*]}").contains("nosuch"));
        assert!(refused("llama-grouped-tied", "{rank: 2, targets: [\"*embed_tokens*\"]}").contains("read by 2 operators"));
        assert!(refused("resnet-basic", "1").contains("batch_norm: fixed"));
        let (adapters, _) = attach("llama", "{rank: 2, targets: [\"*.q_proj\", lm_head]}").unwrap();
        assert_eq!(adapters.layers.len(), 3);
        // PEFT ignores tensors with other names than those of the modules in transformers.
        let cases = [
            ("gpt2-first-published", "{rank: 2, merge: false}", "the names of the modules in transformers"),
            ("dinov2", "{rank: 2, merge: false}", "have other names in transformers"),
            ("mamba2", "{rank: 2, merge: false, targets: [\"*out_proj*\"]}", "Mamba"),
        ];
        for (name, options, reason) in cases {
            let error = refused(name, options);
            assert!(error.contains(reason), "{name}: {error}");
            attach(name, &options.replace(", merge: false", "")).unwrap();
        }
        for name in ["gpt2", "bert", "bert-masked-lm", "opt", "modernbert", "whisper", "t5"] {
            attach(name, "{rank: 2, merge: false}").unwrap();
        }
    }
}
