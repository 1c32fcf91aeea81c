//! A piece of a file without typed form: its nodes as they stand, run by ONNX Runtime.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use prost::Message;

use super::check;
use super::proto::{
    DataType, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use crate::error::{Error, Result};
use crate::ir::ops::Function;
use crate::ir::{Bindings, Dim, Element, TensorType};
use crate::runtime::{self, Limits, Session};

/// Sizes for open axes that a piece is tried with, as a step and a first size: it may take none that are too large, or multiples alone.
const TRIALS: [(usize, usize); 4] = [(1, 5), (8, 16), (32, 64), (32, 256)];
/// Steps to a third size, far off the others.
const FAR: usize = 7;
/// The same for numbers of samples; some models take one alone.
const SAMPLES: [(usize, usize); 2] = [(1, 2), (0, 1)];

/// Limits of loading a piece and of each trial, in addition to a few copies of its weights: files may contain loops of any length and values
/// of any size.
const LIMITS: Limits = Limits { time: Duration::from_secs(if cfg!(test) { 2 } else { 30 }), memory: 1 << 30 };

/// The limits for a piece with weights and constants of so many bytes.
fn limits(bytes: usize) -> Limits {
    Limits { memory: LIMITS.memory.saturating_add((bytes as u64).saturating_mul(4)), ..LIMITS }
}

/// Operators whose results are others each time.
pub(super) const RANDOM: [&str; 6] = ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"];

/// What a piece is made of.
#[derive(Debug, Clone, Default)]
pub(super) struct Parts {
    /// In an order in which they can run.
    pub nodes: Vec<NodeProto>,
    /// Constants.
    pub constants: Vec<TensorProto>,
    /// Names of what it reads, and element types as ONNX numbers them.
    pub inputs: Vec<(String, i32)>,
    /// Whole numbers that inputs are tried with, where that is not one.
    pub tried: BTreeMap<String, i64>,
    /// Names of what its last node computes.
    pub outputs: Vec<String>,
    /// The sets of operators that it uses.
    pub opsets: Vec<OperatorSetIdProto>,
    /// Version of the file format.
    pub ir_version: Option<i64>,
}

/// Sizes by name.
type Tried = Result<BTreeMap<String, Vec<usize>>, String>;

/// Nodes that are loaded, for all that the last of them computes: to be tried with sizes once.
#[derive(Debug)]
pub(super) struct Loaded {
    parts: Parts,
    /// Element types of what it computes as ONNX numbers them.
    elements: Vec<Option<i32>>,
    session: Mutex<Session>,
    /// The limit that a trial has exceeded: later trials fail with it.
    exceeded: OnceLock<String>,
    /// Sizes of what it computes, by those of the inputs, as far as they were asked for; or why there are none.
    sizes: Mutex<BTreeMap<Vec<Vec<usize>>, Tried>>,
}

/// One of the values that loaded nodes compute.
#[derive(Debug)]
pub(super) struct Piece {
    loaded: Arc<Loaded>,
    /// Its name.
    pub output: String,
    /// Its element type as ONNX numbers it.
    pub element: i32,
}

/// What stands for elements of such a type here; nothing for types that the executor's graphs do not have.
pub(super) fn element(number: i32) -> Option<Element> {
    match DataType::try_from(number).ok()? {
        DataType::Float => Some(Element::Float),
        DataType::Int64 | DataType::Int32 | DataType::Int16 | DataType::Int8 | DataType::Uint8 | DataType::Uint16 | DataType::Bool => Some(Element::Int),
        _ => None,
    }
}

impl Loaded {
    /// Loads nodes of the file at a path, whose inputs have so many axes.
    ///
    /// # Errors
    /// There is no ONNX Runtime, it refuses the nodes, or nothing that they compute is a tensor of numbers.
    pub fn new(parts: Parts, ranks: &[usize], path: &Path, optimize: bool) -> Result<Loaded, String> {
        let bytes = parts.model(ranks).encode_to_vec();
        let options = runtime::Options { optimize, limits: Some(limits(bytes.len())), ..runtime::Options::default() };
        let session = Session::of(&bytes, path, options).map_err(|e| e.to_string())?;
        Ok(Loaded { parts, elements: session.output_types(), session: Mutex::new(session), exceeded: OnceLock::new(), sizes: Mutex::default() })
    }

    fn answers(&self, inputs: &[Tensor], limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>, String> {
        if let (Some(reason), Some(_)) = (self.exceeded.get(), limits) {
            return Err(reason.clone());
        }
        let given = self.parts.inputs.iter().map(|(name, _)| name.clone()).zip(inputs.iter().cloned()).collect();
        let answers = self.session.lock().unwrap_or_else(PoisonError::into_inner).run_within(&given, limits);
        answers.map_err(|e| {
            let reason = e.to_string();
            // Errors of the inputs are of another kind.
            if matches!(e, Error::Cancelled | Error::Run { .. }) {
                let _ = self.exceeded.set(reason.clone());
            }
            reason
        })
    }

    /// Sizes of everything that is computed from inputs of these sizes.
    fn try_out(&self, inputs: &[Vec<usize>], limits: Option<Limits>) -> Tried {
        // Ones are tokens, marks of what is no padding, and truth.
        let given = |((name, number), sizes): (&(String, i32), &Vec<usize>)| match element(*number) {
            Some(Element::Int) => Tensor::full(self.parts.tried.get(name).copied().unwrap_or(1), sizes.as_slice(), &Device::Cpu),
            _ => Tensor::zeros(sizes.as_slice(), DType::F32, &Device::Cpu),
        };
        let given = self.parts.inputs.iter().zip(inputs).map(given).collect::<candle_core::Result<Vec<_>>>().map_err(|e| e.to_string())?;
        Ok(self.answers(&given, limits)?.into_iter().map(|(name, answer)| (name, answer.dims().to_vec())).collect())
    }
}

impl Piece {
    /// A value that loaded nodes compute.
    ///
    /// # Errors
    /// It is no tensor of numbers.
    pub fn new(loaded: Arc<Loaded>, output: &str) -> Result<Piece, String> {
        let element = loaded.parts.outputs.iter().zip(&loaded.elements).find(|(name, _)| *name == output).and_then(|(_, element)| *element);
        let element = element.ok_or_else(|| format!("`{output}` is no tensor of numbers"))?;
        Ok(Piece { loaded, output: output.to_owned(), element })
    }

    /// What it is made of.
    pub fn parts(&self) -> &Parts {
        &self.loaded.parts
    }

    /// The type of the output: found by running it on inputs of several sizes, where some are open; those that are numbers of samples stay small.
    ///
    /// # Errors
    /// The output's elements are none that graphs have, or it runs on none of the inputs that were tried.
    pub fn learn(&self, inputs: &[TensorType], batch: &dyn Fn(&str) -> bool) -> Result<TensorType, String> {
        let element = element(self.element).ok_or_else(|| format!("`{}` is of a type that the built-in executor does not have", self.output))?;
        let mut names: Vec<&str> = Vec::new();
        inputs.iter().flat_map(|ty| &ty.shape).for_each(|size| size.names(&mut names));
        let count = |ty: &TensorType| ty.shape.iter().try_fold(4usize, |all, size| all.checked_mul(size.fixed()?)).unwrap_or(0);
        let within = limits(inputs.iter().map(count).fold(0, usize::saturating_add));
        let mut reason = String::new();
        for ((step, first), samples) in SAMPLES.iter().flat_map(|samples| TRIALS.iter().map(move |trial| (*trial, *samples))) {
            let tried = [0usize, 1, FAR].map(|round| {
                let size = |(at, name): (usize, &&str)| {
                    let (step, first) = if batch(name) { samples } else { (step, first) };
                    ((*name).to_owned(), first.saturating_add(step.saturating_mul(at.saturating_add(round.saturating_mul(names.len())))))
                };
                let sizes: Bindings = names.iter().enumerate().map(size).collect();
                let shapes = inputs.iter().map(|ty| ty.shape.iter().map(|size| size.evaluate(&sizes)).collect::<Option<Vec<_>>>()).collect::<Option<Vec<_>>>();
                let shapes = shapes.ok_or_else(|| "sizes do not come out even".to_owned())?;
                Ok::<_, String>((self.sizes(&shapes, Some(within))?, sizes))
            });
            match tried {
                [Ok((sizes, _)), ..] | [_, Ok((sizes, _)), _] if sizes.contains(&0) => {
                    reason = format!("`{}` has no elements where all that is read is zero: its sizes depend on values", self.output);
                }
                [Ok(one), Ok(other), Ok((sizes, bindings))] => {
                    let mut shape = self.formulas(inputs, &one, &other);
                    // What holds by chance for two sizes close to each other does not for one far off.
                    for (axis, size) in shape.iter_mut().enumerate() {
                        if size.evaluate(&bindings) != sizes.get(axis).copied() {
                            *size = self.unknown(axis);
                        }
                    }
                    return Ok(TensorType { element, shape });
                }
                [Err(e), ..] | [_, Err(e), _] | [.., Err(e)] => reason = e,
            }
        }
        Err(reason)
    }

    /// A size that is known by running alone.
    fn unknown(&self, axis: usize) -> Dim {
        Dim::Named(super::lift::plain(&format!("{}_{axis}", self.output)))
    }

    /// Sizes as formulas of those of the inputs, from two runs; a name of its own for what follows from none of them.
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
            (Some(a), Some(b)) => found((*a, *b)).unwrap_or_else(|| self.unknown(axis)),
            _ => self.unknown(axis),
        };
        (0..rank).map(size).collect()
    }

    /// What a piece that reads nothing computes, if that is a whole number or a vector of them.
    pub fn numbers(&self) -> Option<(Vec<i64>, bool)> {
        let answer = self.answer(&[], Some(LIMITS)).ok().filter(|answer| answer.rank() < 2 && element(self.element) == Some(Element::Int))?;
        Some((runtime::integers(&answer).ok()?, answer.rank() == 1))
    }

    /// What a piece that reads nothing computes, if that is one number, and the same each time.
    pub fn number(&self) -> Option<f64> {
        if self.is_random() {
            return None;
        }
        let answer = self.answer(&[], Some(LIMITS)).ok().filter(|answer| answer.elem_count() == 1)?;
        runtime::floats(&answer).ok()?.first().copied().map(f64::from)
    }

    /// Whether what it computes is another each time.
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

    /// Whether it reads nothing but the sizes of this input.
    pub fn reads_sizes_alone(&self, input: &str) -> bool {
        let mut readers = self.parts().nodes.iter().filter(|node| check::reads(node).contains(&input));
        readers.all(|node| ["Shape", "Size"].contains(&node.op_type()) && check::is_own(node.domain()))
    }

    fn not_numeric(&self) -> String {
        format!("`{}` is not a numeric tensor", self.output)
    }

    fn sizes(&self, inputs: &[Vec<usize>], limits: Option<Limits>) -> Result<Vec<usize>, String> {
        let mut known = self.loaded.sizes.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = known.entry(inputs.to_vec()).or_insert_with(|| self.loaded.try_out(inputs, limits)).as_ref().map_err(String::clone)?;
        sizes.get(&self.output).cloned().ok_or_else(|| self.not_numeric())
    }

    fn answer(&self, inputs: &[Tensor], limits: Option<Limits>) -> Result<Tensor, String> {
        self.loaded.answers(inputs, limits)?.remove(&self.output).ok_or_else(|| self.not_numeric())
    }
}

impl Function for Piece {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>, String> {
        self.sizes(inputs, None)
    }

    fn run(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let answer = self.answer(inputs, None).map_err(candle_core::Error::Msg)?;
        let sizes: Vec<Vec<usize>> = inputs.iter().map(|input| input.dims().to_vec()).collect();
        let wanted = self.shape(&sizes).map_err(candle_core::Error::Msg)?;
        if answer.dims() != wanted {
            candle_core::bail!("has sizes {:?}, which depend on more than the sizes of what it reads: the built-in executor cannot go on", answer.dims());
        }
        inputs.first().map_or(Ok(answer.clone()), |like| runtime::beside(&answer, like))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Parts {
    /// The piece as a model whose inputs have so many axes.
    fn model(&self, ranks: &[usize]) -> ModelProto {
        let open = |rank: &usize| Some(TensorShapeProto { dim: vec![DimensionProto::default(); *rank] });
        let port = |((name, element), rank): (&(String, i32), &usize)| {
            let tensor = TensorTypeProto { elem_type: Some(*element), shape: open(rank) };
            let ty = TypeProto { tensor_type: Some(tensor), ..TypeProto::default() };
            ValueInfoProto { name: Some(name.clone()), r#type: Some(ty), ..ValueInfoProto::default() }
        };
        let graph = GraphProto {
            name: Some("piece".into()),
            node: self.nodes.clone(),
            initializer: self.constants.clone(),
            input: self.inputs.iter().zip(ranks).map(port).collect(),
            output: self.outputs.iter().map(|name| ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() }).collect(),
            ..GraphProto::default()
        };
        ModelProto { ir_version: self.ir_version.max(Some(4)), graph: Some(graph), opset_import: self.opsets.clone(), ..ModelProto::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::AttributeProto;
    use super::*;

    fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
        let input = inputs.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), input, output: vec![output.into()], ..NodeProto::default() }
    }

    /// A loop of 2^62 trips; with `kept`, the results of all trips are kept.
    fn endless(kept: bool) -> Result<Arc<Loaded>, String> {
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
        let parts = Parts {
            nodes: vec![turn],
            constants: vec![trips],
            inputs: vec![("x".into(), DataType::Float as i32)],
            outputs: vec!["y".into()],
            opsets: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
            ..Parts::default()
        };
        Loaded::new(parts, &[2], Path::new("endless.onnx"), true).map(Arc::new)
    }

    #[test]
    fn an_endless_loop_is_refused_while_a_file_is_opened() {
        if runtime::library().is_err() {
            return;
        }
        let input = TensorType { element: Element::Float, shape: vec![Dim::Named("n".into()), Dim::Fixed(1 << 14)] };
        for kept in [false, true] {
            let (piece, begun) = (Piece::new(endless(kept).unwrap(), "y").unwrap(), std::time::Instant::now());
            let reason = piece.learn(std::slice::from_ref(&input), &|_| false).unwrap_err();
            assert!(reason.contains("it takes longer than 2 s") || kept && reason.contains("it takes more than 1024 MB"), "{reason}");
            // The first trial is the last.
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        }
    }
}
