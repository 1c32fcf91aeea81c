//! A subgraph without a typed form, whose nodes are run unchanged: by the interpreter if it supports them, or
//! else by ONNX Runtime.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use prost::Message;

use super::body_layers::{self, BodyLayer};
use super::check;
use super::interpreter::Interpreter;
use super::proto::{DataType, NodeProto};
use super::subgraph_parts::SubgraphParts;
use super::value_info::dim_name;
use crate::error::{Error, Result};
use crate::ir::ops::{FakeQuantize, Function};
use crate::ir::{Bindings, Dim, Element, TensorType};
use crate::runtime::{self, Limits, Session};

/// Trial sizes for open axes, as step and first size. Some subgraphs accept only small sizes or only
/// multiples.
const TRIALS: [(usize, usize); 4] = [(1, 5), (8, 16), (32, 64), (32, 256)];
/// Number of steps to the third trial size, which is far from the other two.
const FAR_STEPS: usize = 7;
/// Trial sizes for batch axes. Some models accept only one sample.
const SAMPLES: [(usize, usize); 2] = [(1, 2), (0, 1)];

/// Time limit of loading a subgraph and of each trial.
const TIME: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

/// The limits for a subgraph with weights and constants of this size.
fn limits(bytes: usize) -> Limits {
    Limits::for_size(TIME, bytes as u64)
}

/// Nondeterministic operators.
pub(super) const RANDOM: [&str; 6] = ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"];

/// Loaded subgraphs of a file, by outputs, inputs, and whether they were optimized.
pub(super) type SubgraphCache = BTreeMap<(Vec<String>, Vec<String>, bool), Result<Arc<LoadedSubgraph>, String>>;

/// Output shapes by name, or the reason why a trial failed.
type TrialSizes = Result<BTreeMap<String, Vec<usize>>, String>;

/// A loaded subgraph with all outputs of its last node. Trials with each input shape run once.
#[derive(Debug)]
pub(super) struct LoadedSubgraph {
    parts: SubgraphParts,
    /// The file that it is a part of.
    path: PathBuf,
    /// Types of the inputs.
    types: Vec<TensorType>,
    /// ONNX element type numbers of the outputs.
    elements: Vec<Option<i32>>,
    backend: Backend,
    /// The limit that a trial has exceeded. Later trials fail immediately.
    exceeded: OnceLock<String>,
    /// Results of previous trials, by input shapes.
    sizes: Mutex<BTreeMap<Vec<Vec<usize>>, TrialSizes>>,
}

/// The implementation that runs a subgraph.
#[derive(Debug)]
enum Backend {
    BuiltIn(Interpreter),
    Runtime(Box<Mutex<Session>>),
}

/// One output of a loaded subgraph.
#[derive(Debug)]
pub(super) struct OpaqueSubgraph {
    loaded: Arc<LoadedSubgraph>,
    /// Name of the output.
    pub output: String,
    /// ONNX element type number of the output.
    pub element: i32,
    /// The subgraph before quantizers were inserted, and the layers with quantized inputs.
    pub quantized: Option<(SubgraphParts, Vec<(BodyLayer, FakeQuantize)>)>,
}

/// The graph element for an ONNX element type number; `None` for types that graphs do not support.
pub(super) fn element(number: i32) -> Option<Element> {
    match DataType::try_from(number).ok()? {
        DataType::Float => Some(Element::Float),
        DataType::Int64 | DataType::Int32 | DataType::Int16 | DataType::Int8 | DataType::Uint8 | DataType::Uint16 | DataType::Bool => Some(Element::Int),
        _ => None,
    }
}

impl LoadedSubgraph {
    /// Loads a subgraph of the file at `path` whose inputs have these types. Fails if the interpreter does
    /// not support the nodes, and ONNX Runtime is missing or refuses them.
    pub fn new(parts: SubgraphParts, types: &[TensorType], path: &Path, optimize: bool) -> Result<LoadedSubgraph, String> {
        let (elements, backend) = if let Some(interpreter) = Interpreter::new(&parts) {
            (interpreter.output_types(), Backend::BuiltIn(interpreter))
        } else {
            let model = parts.model(types);
            let options = runtime::Options { optimize, limits: Some(limits(model.encoded_len())), ..runtime::Options::default() };
            let session = Session::from_model(&model, path, options).map_err(|e| e.to_string())?;
            (session.output_types(), Backend::Runtime(Box::new(Mutex::new(session))))
        };
        let (path, types) = (path.to_owned(), types.to_vec());
        Ok(LoadedSubgraph { parts, path, types, elements, backend, exceeded: OnceLock::new(), sizes: Mutex::default() })
    }

    pub(super) fn run_all(&self, inputs: &[Tensor], limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>, String> {
        if let (Some(reason), Some(_)) = (self.exceeded.get(), limits) {
            return Err(reason.clone());
        }
        let session = match &self.backend {
            Backend::BuiltIn(interpreter) => {
                let begun = Instant::now();
                let outputs = interpreter.run(inputs, limits);
                if let (Err(reason), true) = (&outputs, limits.is_some_and(|limits| begun.elapsed() > limits.time)) {
                    let _ = self.exceeded.set(reason.clone());
                }
                return outputs;
            }
            Backend::Runtime(session) => session,
        };
        let named = self.parts.inputs.iter().map(|(name, _)| name.clone()).zip(inputs.iter().cloned()).collect();
        let outputs = session.lock().unwrap_or_else(PoisonError::into_inner).run_within(&named, limits);
        outputs.map_err(|e| {
            let reason = e.to_string();
            // Invalid inputs have other error variants.
            if matches!(e, Error::Cancelled | Error::Run { .. }) {
                let _ = self.exceeded.set(reason.clone());
            }
            reason
        })
    }

    /// Runs a trial with zeros and ones, and returns the shapes of all outputs.
    fn trial_sizes(&self, inputs: &[Vec<usize>], limits: Option<Limits>) -> TrialSizes {
        // One is valid as a token, as an attention mask, and as a boolean.
        let trial_input = |((name, number), sizes): (&(String, i32), &Vec<usize>)| match element(*number) {
            Some(Element::Int) => Tensor::full(self.parts.trial_values.get(name).copied().unwrap_or(1), sizes.as_slice(), &Device::Cpu),
            _ => Tensor::zeros(sizes.as_slice(), DType::F32, &Device::Cpu),
        };
        let values = self.parts.inputs.iter().zip(inputs).map(trial_input).collect::<candle_core::Result<Vec<_>>>().map_err(|e| e.to_string())?;
        Ok(self.run_all(&values, limits)?.into_iter().map(|(name, output)| (name, output.dims().to_vec())).collect())
    }
}

impl OpaqueSubgraph {
    /// An output of a loaded subgraph. Fails unless it is a numeric tensor.
    pub fn new(loaded: Arc<LoadedSubgraph>, output: &str) -> Result<OpaqueSubgraph, String> {
        let element = loaded.parts.outputs.iter().zip(&loaded.elements).find(|(name, _)| *name == output).and_then(|(_, element)| *element);
        let element = element.ok_or_else(|| format!("`{output}` is not a numeric tensor"))?;
        Ok(OpaqueSubgraph { loaded, output: output.to_owned(), element, quantized: None })
    }

    /// Nodes, constants and interface of the subgraph.
    pub fn parts(&self) -> &SubgraphParts {
        &self.loaded.parts
    }

    /// The file that the subgraph is a part of.
    pub fn path(&self) -> &Path {
        &self.loaded.path
    }

    /// Infers the type of the output by running the subgraph with several sizes for open axes. Axes for
    /// which `batch` returns true are batch axes. Fails if all trials fail or the element type is not
    /// supported.
    pub fn infer_type(&self, inputs: &[TensorType], batch: &dyn Fn(&str) -> bool) -> Result<TensorType, String> {
        let element = element(self.element).ok_or_else(|| format!("`{}` has an element type that the built-in executor does not support", self.output))?;
        let mut names: Vec<&str> = Vec::new();
        inputs.iter().flat_map(|ty| &ty.shape).for_each(|size| size.names(&mut names));
        let count = |ty: &TensorType| ty.shape.iter().try_fold(4usize, |all, size| all.checked_mul(size.fixed()?)).unwrap_or(0);
        let within = limits(inputs.iter().map(count).fold(0, usize::saturating_add));
        let mut reason = String::new();
        for ((step, first), samples) in SAMPLES.iter().flat_map(|samples| TRIALS.iter().map(move |trial| (*trial, *samples))) {
            let trials = [0usize, 1, FAR_STEPS].map(|round| {
                let size = |(at, name): (usize, &&str)| {
                    let (step, first) = if batch(name) { samples } else { (step, first) };
                    ((*name).to_owned(), first.saturating_add(step.saturating_mul(at.saturating_add(round.saturating_mul(names.len())))))
                };
                let sizes: Bindings = names.iter().enumerate().map(size).collect();
                let shapes = inputs.iter().map(|ty| ty.shape.iter().map(|size| size.evaluate(&sizes)).collect::<Option<Vec<_>>>()).collect::<Option<Vec<_>>>();
                let shapes = shapes.ok_or_else(|| "an input size is not an integer for the trial sizes".to_owned())?;
                // The run needs the inputs, copies of them, and outputs that are often as large.
                let bytes = shapes.iter().map(|shape| shape.iter().fold(4u64, |all, size| all.saturating_mul(*size as u64))).fold(0, u64::saturating_add);
                if bytes.saturating_mul(4) > within.memory {
                    return Err(format!("inputs of the trial sizes take {} MB: specify sizes with `sizes`", bytes >> 20));
                }
                Ok::<_, String>((self.sizes(&shapes, Some(within))?, sizes))
            });
            match trials {
                [Ok((sizes, _)), ..] | [_, Ok((sizes, _)), _] if sizes.contains(&0) => {
                    reason = format!("`{}` is empty for inputs of zeros: its shape depends on values", self.output);
                }
                [Ok(one), Ok(other), Ok((sizes, bindings))] => {
                    let mut shape = self.formulas(inputs, &one, &other);
                    // A formula that matches two similar sizes by chance fails for a much larger one.
                    for (axis, size) in shape.iter_mut().enumerate() {
                        if size.evaluate(&bindings) != sizes.get(axis).copied() {
                            *size = self.unknown_size(axis);
                        }
                    }
                    return Ok(TensorType { element, shape });
                }
                [Err(e), ..] | [_, Err(e), _] | [.., Err(e)] => reason = e,
            }
        }
        Err(reason)
    }

    /// A size that is known only at run time.
    fn unknown_size(&self, axis: usize) -> Dim {
        Dim::Named(dim_name(&format!("{}_{axis}", self.output)))
    }

    /// Derives output sizes as formulas of the input sizes from two trials. Sizes without a formula get
    /// a new name.
    fn formulas(&self, inputs: &[TensorType], one: &(Vec<usize>, Bindings), other: &(Vec<usize>, Bindings)) -> Vec<Dim> {
        let open: Vec<&Dim> = inputs.iter().flat_map(|ty| &ty.shape).filter(|size| size.fixed().is_none()).collect();
        let both = |size: &Dim| Some((size.evaluate(&one.1)?, size.evaluate(&other.1)?));
        let found = |wanted: (usize, usize)| {
            let same = |size: &Dim| both(size) == Some(wanted);
            let moved = |size: &&Dim| {
                let (a, b) = both(size)?;
                let by = |of: usize, wanted: usize| i64::try_from(wanted).ok()?.checked_sub(i64::try_from(of).ok()?);
                by(a, wanted.0).filter(|some| Some(*some) == by(b, wanted.1)).and_then(|by| size.moved(by))
            };
            let times = |size: &&Dim| size.times(&Dim::Fixed(wanted.0.checked_div(both(size)?.0)?)).filter(same);
            let product = |a: &&Dim| open.iter().find_map(|b| a.times(b).filter(same));
            let of_one = open.iter().find(|size| same(size)).map(|size| (*size).clone());
            of_one.or_else(|| open.iter().find_map(times)).or_else(|| open.iter().find_map(moved)).or_else(|| open.iter().find_map(product))
        };
        let rank = one.0.len().max(other.0.len());
        let size = |axis: usize| match (one.0.get(axis), other.0.get(axis)) {
            (Some(a), Some(b)) if a == b => Dim::Fixed(*a),
            (Some(a), Some(b)) => found((*a, *b)).unwrap_or_else(|| self.unknown_size(axis)),
            _ => self.unknown_size(axis),
        };
        (0..rank).map(size).collect()
    }

    /// The integer scalar or vector that a subgraph without inputs computes, and whether it is a vector.
    pub fn numbers(&self) -> Option<(Vec<i64>, bool)> {
        let output = self.run_one(&[], Some(limits(0))).ok().filter(|output| output.rank() < 2 && element(self.element) == Some(Element::Int))?;
        Some((runtime::integers(&output).ok()?, output.rank() == 1))
    }

    /// The number that a deterministic subgraph without inputs computes.
    pub fn number(&self) -> Option<f64> {
        if self.is_random() {
            return None;
        }
        let output = self.run_one(&[], Some(limits(0))).ok().filter(|output| output.elem_count() == 1)?;
        runtime::floats(&output).ok()?.first().copied().map(f64::from)
    }

    /// Whether the subgraph is nondeterministic.
    pub fn is_random(&self) -> bool {
        let mut open: Vec<&NodeProto> = self.parts().nodes.iter().collect();
        while let Some(node) = open.pop() {
            if RANDOM.contains(&node.op_type()) {
                return true;
            }
            open.extend(check::bodies(node).flat_map(|body| &body.node));
        }
        false
    }

    /// Whether the subgraph reads only the shape of this input.
    pub fn reads_only_sizes(&self, input: &str) -> bool {
        let mut readers = self.parts().nodes.iter().filter(|node| check::reads(node).contains(&input));
        readers.all(|node| ["Shape", "Size"].contains(&node.op_type()) && check::is_own(node.domain()))
    }

    fn not_numeric(&self) -> String {
        format!("`{}` is not a numeric tensor", self.output)
    }

    fn sizes(&self, inputs: &[Vec<usize>], limits: Option<Limits>) -> Result<Vec<usize>, String> {
        let mut known = self.loaded.sizes.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = known.entry(inputs.to_vec()).or_insert_with(|| self.loaded.trial_sizes(inputs, limits)).as_ref().map_err(String::clone)?;
        sizes.get(&self.output).cloned().ok_or_else(|| self.not_numeric())
    }

    fn run_one(&self, inputs: &[Tensor], limits: Option<Limits>) -> Result<Tensor, String> {
        self.loaded.run_all(inputs, limits)?.remove(&self.output).ok_or_else(|| self.not_numeric())
    }
}

impl Function for OpaqueSubgraph {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>, String> {
        self.sizes(inputs, None)
    }

    fn run(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let output = self.run_one(inputs, None).map_err(candle_core::Error::Msg)?;
        let sizes: Vec<Vec<usize>> = inputs.iter().map(|input| input.dims().to_vec()).collect();
        let wanted = self.shape(&sizes).map_err(candle_core::Error::Msg)?;
        if output.dims() != wanted {
            candle_core::bail!("has shape {:?}, which depends on more than the input shapes: the built-in executor cannot run it", output.dims());
        }
        inputs.first().map_or(Ok(output.clone()), |like| runtime::to_device_of(&output, like))
    }

    fn with_quantizers(&self, quantizers: &BTreeMap<String, FakeQuantize>) -> Result<Arc<dyn Function>, String> {
        let original = self.quantized.as_ref().map_or_else(|| self.parts(), |(parts, _)| parts);
        let layers = body_layers::layers(original).into_iter();
        let layers: Vec<_> = layers.filter_map(|layer| Some((layer.clone(), *quantizers.get(&layer.weight)?))).collect();
        if layers.len() != quantizers.len() {
            return Err(format!("has {} of {} layers whose inputs are quantized", layers.len(), quantizers.len()));
        }
        let mut parts = original.clone();
        // Names of weights are unique, and those of the file have no such parts.
        body_layers::insert_quantizers(&mut parts.nodes, &layers, true, &BTreeMap::new(), &mut |name| format!("{name}/inserted"))?;
        let loaded = Arc::new(LoadedSubgraph::new(parts, &self.loaded.types, &self.loaded.path, true)?);
        let quantized = Some((original.clone(), layers));
        Ok(Arc::new(OpaqueSubgraph { loaded, output: self.output.clone(), element: self.element, quantized }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{
        AttributeProto, DimensionProto, GraphProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    };
    use super::*;

    fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
        let input = inputs.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), input, output: vec![output.into()], ..NodeProto::default() }
    }

    fn input() -> TensorType {
        TensorType { element: Element::Float, shape: vec![Dim::Named("n".into()), Dim::Fixed(1 << 14)] }
    }

    /// A loop of 2^62 iterations; with `kept`, it stacks the results of all iterations.
    fn endless(kept: bool) -> Result<Arc<LoadedSubgraph>, String> {
        let port = |name: &str, number: DataType, rank: Option<usize>| {
            let shape = rank.map(|rank| TensorShapeProto { dim: vec![DimensionProto::default(); rank] });
            let tensor_type = Some(TensorTypeProto { elem_type: Some(number as i32), shape });
            ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
        };
        let mut body = GraphProto {
            name: Some("body".into()),
            node: vec![node("Identity", &["go"], "goes"), node("Neg", &["a"], "b")],
            input: vec![port("i", DataType::Int64, Some(0)), port("go", DataType::Bool, Some(0)), port("a", DataType::Float, None)],
            output: vec![port("goes", DataType::Bool, Some(0)), port("b", DataType::Float, None)],
            ..GraphProto::default()
        };
        let mut turn = node("Loop", &["trips", "", "x"], "y");
        if kept {
            body.node.push(node("Identity", &["b"], "c"));
            body.output.push(port("c", DataType::Float, None));
            turn.output.push("all".into());
        }
        turn.attribute.push(AttributeProto { g: Some(body), i: None, r#type: Some(5), ..AttributeProto::int("body", 0) });
        let trips = TensorProto { name: Some("trips".into()), data_type: Some(DataType::Int64 as i32), int64_data: vec![1 << 62], ..TensorProto::default() };
        let parts = SubgraphParts {
            nodes: vec![turn],
            constants: vec![trips],
            inputs: vec![("x".into(), DataType::Float as i32)],
            outputs: vec!["y".into()],
            opsets: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
            ..SubgraphParts::default()
        };
        LoadedSubgraph::new(parts, std::slice::from_ref(&input()), Path::new("endless.onnx"), true).map(Arc::new)
    }

    /// Many open axes, whose trial sizes multiply: the sum fits only if all are equal.
    #[test]
    fn trials_with_large_inputs_are_not_run() {
        if !compress_testing::available("ONNX Runtime", runtime::library()) {
            return;
        }
        let inputs = ["a", "b"].map(|name| TensorType { element: Element::Float, shape: (0..4).map(|axis| Dim::Named(format!("{name}{axis}"))).collect() });
        let parts = SubgraphParts {
            nodes: vec![node("Add", &["x", "y"], "z")],
            inputs: ["x", "y"].map(|name| (name.into(), DataType::Float as i32)).into(),
            outputs: vec!["z".into()],
            opsets: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
            ..SubgraphParts::default()
        };
        let loaded = LoadedSubgraph::new(parts, &inputs, Path::new("open.onnx"), true).unwrap();
        let reason = OpaqueSubgraph::new(Arc::new(loaded), "z").unwrap().infer_type(&inputs, &|_| false).unwrap_err();
        assert!(reason.contains("inputs of the trial sizes take") && reason.contains("MB"), "{reason}");
    }

    #[test]
    fn endless_loops_are_refused() {
        if !compress_testing::available("ONNX Runtime", runtime::library()) {
            return;
        }
        for kept in [false, true] {
            let (subgraph, begun) = (OpaqueSubgraph::new(endless(kept).unwrap(), "y").unwrap(), std::time::Instant::now());
            let reason = subgraph.infer_type(std::slice::from_ref(&input()), &|_| false).unwrap_err();
            assert!(reason.contains("it takes longer than 2 s") || kept && reason.contains("it takes more than 1024 MB"), "{reason}");
            // No further trial runs.
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        }
    }
}
