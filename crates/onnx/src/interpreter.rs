//! Evaluation of subgraphs of shapes, masks and positions without ONNX Runtime.
//!
//! Exporters compute masks, position ids and position tables with operators on integers and booleans, which
//! have no typed ops. A subgraph of only the operators in this table is evaluated here, and ONNX Runtime runs
//! all others.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod elementwise;
mod indexing;
mod reductions;
mod reshaping;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::check::{self, label};
use super::elements;
use super::initializer_roles::{int, text as attribute_text};
use super::proto::{DataType, NodeProto, TensorProto};
use super::subgraph_parts::SubgraphParts;
use crate::runtime::{self, Limits};

/// The oldest opset whose operators broadcast in the present way.
const OLDEST_OPSET: i64 = 7;
/// Maximum size of a value in bytes, for runs without a limit.
const MAX_BYTES: u64 = 1 << 36;
/// Bytes per element of a value in memory.
const ELEMENT: u64 = 8;

/// The element type of the first output of an operator.
#[derive(Debug, Clone, Copy)]
enum OutputType {
    /// That of an input.
    Input(usize),
    /// Always the same.
    Fixed(DataType),
    /// That of the attribute `to`.
    Cast,
    /// That of the tensor in the attribute `value`.
    Filled,
}

/// Computes an output of a node.
type Compute = fn(&Call) -> Result<Tensor, String>;

use OutputType::{Cast, Filled, Fixed, Input};

/// The operators.
const OPERATORS: &[(&str, OutputType, Compute)] = &[
    ("Shape", Fixed(DataType::Int64), reshaping::shape),
    ("Size", Fixed(DataType::Int64), reshaping::size),
    ("Identity", Input(0), |call| Ok(call.input(0)?.tensor.clone())),
    ("Reshape", Input(0), reshaping::reshape),
    ("Flatten", Input(0), reshaping::flatten),
    ("Squeeze", Input(0), reshaping::squeeze),
    ("Unsqueeze", Input(0), reshaping::unsqueeze),
    ("Expand", Input(0), reshaping::expand),
    ("Tile", Input(0), reshaping::tile),
    ("Transpose", Input(0), reshaping::transpose),
    ("Concat", Input(0), reshaping::concat),
    ("ConstantOfShape", Filled, reshaping::constant_of_shape),
    ("Range", Input(0), reshaping::range),
    ("Trilu", Input(0), reshaping::trilu),
    ("Gather", Input(0), indexing::gather),
    ("GatherElements", Input(0), indexing::gather_elements),
    ("GatherND", Input(0), indexing::gather_nd),
    ("ScatterND", Input(0), indexing::scatter_nd),
    ("Slice", Input(0), indexing::slice),
    ("Split", Input(0), indexing::split),
    ("Cast", Cast, elementwise::cast),
    ("Where", Input(1), elementwise::choose),
    ("Clip", Input(0), elementwise::clip),
    ("Add", Input(0), elementwise::arithmetic),
    ("Sub", Input(0), elementwise::arithmetic),
    ("Mul", Input(0), elementwise::arithmetic),
    ("Div", Input(0), elementwise::arithmetic),
    ("Mod", Input(0), elementwise::arithmetic),
    ("Pow", Input(0), elementwise::arithmetic),
    ("Max", Input(0), elementwise::arithmetic),
    ("Min", Input(0), elementwise::arithmetic),
    ("Neg", Input(0), elementwise::unary),
    ("Abs", Input(0), elementwise::unary),
    ("Sign", Input(0), elementwise::unary),
    ("Ceil", Input(0), elementwise::unary),
    ("Floor", Input(0), elementwise::unary),
    ("Round", Input(0), elementwise::unary),
    ("Sin", Input(0), elementwise::unary),
    ("Cos", Input(0), elementwise::unary),
    ("IsNaN", Fixed(DataType::Bool), elementwise::is_nan),
    ("Equal", Fixed(DataType::Bool), elementwise::compare),
    ("Less", Fixed(DataType::Bool), elementwise::compare),
    ("LessOrEqual", Fixed(DataType::Bool), elementwise::compare),
    ("Greater", Fixed(DataType::Bool), elementwise::compare),
    ("GreaterOrEqual", Fixed(DataType::Bool), elementwise::compare),
    ("And", Fixed(DataType::Bool), elementwise::logic),
    ("Or", Fixed(DataType::Bool), elementwise::logic),
    ("Xor", Fixed(DataType::Bool), elementwise::logic),
    ("Not", Fixed(DataType::Bool), elementwise::not),
    ("ReduceSum", Input(0), reductions::reduce),
    ("ReduceMax", Input(0), reductions::reduce),
    ("ReduceMin", Input(0), reductions::reduce),
    ("ReduceProd", Input(0), reductions::reduce),
    ("ArgMax", Fixed(DataType::Int64), reductions::arg_max),
    ("CumSum", Input(0), reductions::cum_sum),
];

/// A value: floats as 32-bit floats, integers and booleans as 64-bit integers.
#[derive(Debug, Clone)]
struct Value {
    tensor: Tensor,
    ty: DataType,
}

impl Value {
    fn dims(&self) -> &[usize] {
        self.tensor.dims()
    }

    fn is_float(&self) -> bool {
        self.ty == DataType::Float
    }

    /// The elements of an integer or boolean value, broadcast to a shape.
    fn ints(&self, shape: &[usize]) -> Result<Vec<i64>, String> {
        if self.is_float() {
            return Err("it has floats instead of integers".into());
        }
        self.tensor.broadcast_as(shape).and_then(|tensor| runtime::integers(&tensor)).map_err(text)
    }

    /// The elements as floats, broadcast to a shape.
    fn floats(&self, shape: &[usize]) -> Result<Vec<f32>, String> {
        self.tensor.broadcast_as(shape).and_then(|tensor| runtime::floats(&tensor)).map_err(text)
    }
}

/// A node with its inputs, and the output to compute.
struct Call<'c> {
    node: &'c NodeProto,
    inputs: Vec<Option<Value>>,
    output: usize,
    /// Maximum number of elements of the output.
    limit: u64,
}

impl Call<'_> {
    fn input(&self, at: usize) -> Result<&Value, String> {
        self.optional(at).ok_or_else(|| format!("its input {at} is missing"))
    }

    fn optional(&self, at: usize) -> Option<&Value> {
        self.inputs.get(at)?.as_ref()
    }

    /// All elements of an integer input.
    fn ints(&self, at: usize) -> Result<Vec<i64>, String> {
        let value = self.input(at)?;
        value.ints(value.dims())
    }

    /// Integers that are an attribute in older opsets and an input in newer ones; `None` if they are omitted.
    fn attribute_or_input(&self, name: &str, at: usize) -> Result<Option<Vec<i64>>, String> {
        match self.node.attribute.iter().find(|attribute| attribute.name() == name) {
            Some(attribute) => Ok(Some(attribute.ints.clone())),
            None => self.optional(at).map(|_| self.ints(at)).transpose(),
        }
    }

    /// The axis in an attribute, counted from the first axis.
    fn axis(&self, missing: i64, rank: usize) -> Result<usize, String> {
        axis_of(int(self.node, "axis", missing), rank)
    }

    /// Fails if a value of this shape exceeds the memory limit.
    fn check_size(&self, shape: &[usize]) -> Result<(), String> {
        let count = extent(shape);
        if count <= self.limit {
            return Ok(());
        }
        Err(format!("it creates {count} elements, but only {} more fit into the memory limit", self.limit))
    }

    /// The shape to which values are broadcast.
    fn broadcast(&self, shapes: &[&[usize]]) -> Result<Vec<usize>, String> {
        let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
        let size = |shape: &[usize], axis: usize| axis.checked_sub(rank.saturating_sub(shape.len())).and_then(|at| shape.get(at)).copied().unwrap_or(1);
        let both = |a: usize, b: usize| match (a, b) {
            (1, size) | (size, 1) => Ok(size),
            (a, b) if a == b => Ok(a),
            _ => Err(format!("its inputs have the shapes {shapes:?}, which do not broadcast")),
        };
        let shape: Vec<usize> = (0..rank).map(|axis| shapes.iter().try_fold(1, |all, shape| both(all, size(shape, axis)))).collect::<Result<_, _>>()?;
        self.check_size(&shape)?;
        Ok(shape)
    }
}

/// Number of elements of a shape, where axes without elements count as one: no loop over an axis is longer.
fn extent(shape: &[usize]) -> u64 {
    shape.iter().fold(1u64, |count, size| count.saturating_mul((*size as u64).max(1)))
}

/// A non-negative axis of a value of this rank.
fn axis_of(axis: i64, rank: usize) -> Result<usize, String> {
    let wide = i64::try_from(rank).unwrap_or(i64::MAX);
    let from_start = if axis < 0 { axis.saturating_add(wide) } else { axis };
    usize::try_from(from_start).ok().filter(|axis| *axis < rank).ok_or_else(|| format!("axis {axis} is out of range for {rank} axes"))
}

/// A tensor of integers.
fn from_ints(values: Vec<i64>, shape: &[usize]) -> Result<Tensor, String> {
    Tensor::from_vec(values, shape, &Device::Cpu).map_err(text)
}

/// A tensor of floats.
fn from_floats(values: Vec<f32>, shape: &[usize]) -> Result<Tensor, String> {
    Tensor::from_vec(values, shape, &Device::Cpu).map_err(text)
}

fn text(error: candle_core::Error) -> String {
    error.to_string()
}

fn is_supported(ty: DataType) -> bool {
    matches!(ty, DataType::Float | DataType::Int64 | DataType::Int32 | DataType::Bool)
}

/// The value of a tensor of a supported type.
fn constant(tensor: &TensorProto) -> Option<Value> {
    let ty = tensor.data_type();
    let (shape, count) = elements::shape(tensor).ok()?;
    let bytes = elements::inline(tensor, ty, count).ok()??;
    let tensor = match ty {
        DataType::Float => from_floats(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(), &shape),
        DataType::Int64 => from_ints(bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(), &shape),
        DataType::Int32 => from_ints(bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(), &shape),
        DataType::Bool => from_ints(bytes.iter().map(|byte| i64::from(*byte != 0)).collect(), &shape),
        _ => return None,
    };
    Some(Value { tensor: tensor.ok()?, ty })
}

/// The value of a `Constant` node.
fn constant_node(node: &NodeProto) -> Option<Value> {
    let [attribute] = node.attribute.as_slice() else { return None };
    let (tensor, ty) = match attribute.name() {
        "value" => return constant(attribute.t.as_ref()?),
        "value_int" => (from_ints(vec![attribute.i?], &[]), DataType::Int64),
        "value_ints" => (from_ints(attribute.ints.clone(), &[attribute.ints.len()]), DataType::Int64),
        "value_float" => (from_floats(vec![attribute.f?], &[]), DataType::Float),
        "value_floats" => (from_floats(attribute.floats.clone(), &[attribute.floats.len()]), DataType::Float),
        _ => return None,
    };
    Some(Value { tensor: tensor.ok()?, ty })
}

/// The tensor in the attribute `value`.
fn filling(node: &NodeProto) -> Option<Value> {
    match node.attribute.iter().find(|attribute| attribute.name() == "value") {
        Some(attribute) => constant(attribute.t.as_ref()?),
        None => Some(Value { tensor: from_floats(vec![0.0], &[1]).ok()?, ty: DataType::Float }),
    }
}

/// Whether the functions of the table compute this form of an operator.
fn is_computed(node: &NodeProto, types: &BTreeMap<&str, DataType>) -> bool {
    let is_float = |at: usize| node.input.get(at).and_then(|name| types.get(name.as_str())) == Some(&DataType::Float);
    match node.op_type() {
        "ScatterND" => matches!(attribute_text(node, "reduction").as_deref(), None | Some("none")),
        "Pow" => is_float(0) || !is_float(1),
        _ => true,
    }
}

/// A node that has been validated.
#[derive(Debug)]
struct Step {
    node: NodeProto,
    compute: Compute,
    ty: DataType,
    /// Values that no later step reads.
    finished: Vec<String>,
}

/// A subgraph of supported operators.
#[derive(Debug)]
pub(super) struct Interpreter {
    steps: Vec<Step>,
    constants: BTreeMap<String, Value>,
    inputs: Vec<(String, DataType)>,
    /// Names and types of the outputs.
    outputs: Vec<(String, DataType)>,
}

impl Interpreter {
    /// `None` if an operator or an element type is not supported.
    pub fn new(parts: &SubgraphParts) -> Option<Interpreter> {
        let opset = parts.opsets.iter().find(|import| check::is_own(import.domain())).map_or(1, |import| import.version());
        if opset < OLDEST_OPSET {
            return None;
        }
        let inputs: Vec<(String, DataType)> = parts
            .inputs
            .iter()
            .map(|(name, number)| Some((name.clone(), DataType::try_from(*number).ok().filter(|ty| is_supported(*ty))?)))
            .collect::<Option<_>>()?;
        let mut constants: BTreeMap<String, Value> =
            parts.constants.iter().map(|tensor| Some((tensor.name().to_owned(), constant(tensor)?))).collect::<Option<_>>()?;
        let mut types: BTreeMap<&str, DataType> = inputs.iter().map(|(name, ty)| (name.as_str(), *ty)).collect();
        types.extend(parts.constants.iter().map(|tensor| (tensor.name(), tensor.data_type())));
        let mut steps = Vec::new();
        for node in &parts.nodes {
            let outputs = node.output.iter().filter(|name| !name.is_empty());
            if !check::is_own(node.domain()) || node.op_type() != "Split" && outputs.clone().count() > 1 {
                return None;
            }
            if node.op_type() == "Constant" {
                let (name, value) = (node.output.first()?, constant_node(node)?);
                types.insert(name, value.ty);
                constants.insert(name.clone(), value);
                continue;
            }
            if !is_computed(node, &types) {
                return None;
            }
            let (_, output, compute) = OPERATORS.iter().find(|(name, ..)| *name == node.op_type())?;
            let ty = match output {
                Input(at) => *types.get(node.input.get(*at)?.as_str())?,
                Fixed(ty) => *ty,
                Cast => DataType::try_from(i32::try_from(int(node, "to", 0)).ok()?).ok()?,
                Filled => filling(node)?.ty,
            };
            if !is_supported(ty) || node.input.iter().any(|name| !name.is_empty() && !types.contains_key(name.as_str())) {
                return None;
            }
            types.extend(outputs.map(|name| (name.as_str(), ty)));
            steps.push(Step { node: node.clone(), compute: *compute, ty, finished: Vec::new() });
        }
        let mut read: BTreeSet<&str> = parts.outputs.iter().map(String::as_str).collect();
        let computed = parts.nodes.iter().filter(|node| node.op_type() != "Constant");
        for (step, node) in steps.iter_mut().rev().zip(computed.rev()) {
            step.finished = node.input.iter().filter(|name| read.insert(name.as_str())).cloned().collect();
        }
        let outputs = parts.outputs.iter().map(|name| Some((name.clone(), *types.get(name.as_str())?))).collect::<Option<_>>()?;
        Some(Interpreter { steps, constants, inputs, outputs })
    }

    /// ONNX element type numbers of the outputs.
    pub fn output_types(&self) -> Vec<Option<i32>> {
        self.outputs.iter().map(|(_, ty)| Some(*ty as i32)).collect()
    }

    /// Computes all outputs. Fails if a value exceeds the limit of memory, or all nodes that of time.
    pub fn run(&self, inputs: &[Tensor], limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>, String> {
        let begun = Instant::now();
        let limit = limits.map_or(MAX_BYTES, |limits| limits.memory).checked_div(ELEMENT).unwrap_or(0);
        let mut values = self.constants.clone();
        for ((name, ty), input) in self.inputs.iter().zip(inputs) {
            let dtype = if *ty == DataType::Float { DType::F32 } else { DType::I64 };
            let tensor = runtime::to_host(input).and_then(|tensor| tensor.to_dtype(dtype)).map_err(text)?;
            values.insert(name.clone(), Value { tensor, ty: *ty });
        }
        if let Some((name, value)) = values.iter().find(|(_, value)| extent(value.dims()) > limit) {
            return Err(format!("`{name}` has the shape {:?}, which exceeds the limit of {limit} elements", value.dims()));
        }
        let elements = |value: &Value| value.tensor.elem_count() as u64;
        let mut live = values.values().map(elements).fold(0, u64::saturating_add);
        for Step { node, compute, ty, finished } in &self.steps {
            if let Some(limits) = limits.filter(|limits| begun.elapsed() > limits.time) {
                return Err(format!("{}: it takes longer than {} s", label(node), limits.time.as_secs()));
            }
            for (output, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let left = limit.saturating_sub(live);
                let call = Call { node, inputs: node.input.iter().map(|name| values.get(name).cloned()).collect(), output, limit: left };
                let tensor = compute(&call).map_err(|reason| format!("{}: {reason}", label(node)))?;
                if extent(tensor.dims()) > left {
                    let shape = tensor.dims();
                    return Err(format!("{}: it creates the shape {shape:?}, but only {left} more elements fit into the memory limit", label(node)));
                }
                let value = Value { tensor, ty: *ty };
                live = live.saturating_add(elements(&value));
                values.insert(name.clone(), value);
            }
            for name in finished {
                live = live.saturating_sub(values.remove(name).as_ref().map_or(0, elements));
            }
        }
        let output = |(name, _): &(String, DataType)| Some((name.clone(), values.get(name)?.tensor.clone()));
        Ok(self.outputs.iter().filter_map(output).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::proto::{AttributeProto, OperatorSetIdProto};
    use super::*;

    /// A subgraph of one node, whose inputs have these types.
    fn interpreter(op: &str, types: &[DataType], attribute: Vec<AttributeProto>) -> Option<Interpreter> {
        let names: Vec<String> = (0..types.len()).map(|at| format!("i{at}")).collect();
        let node = NodeProto { op_type: Some(op.into()), input: names.clone(), output: vec!["o".into()], attribute, ..NodeProto::default() };
        Interpreter::new(&SubgraphParts {
            nodes: vec![node],
            inputs: names.into_iter().zip(types.iter().map(|ty| *ty as i32)).collect(),
            outputs: vec!["o".into()],
            opsets: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
            ..SubgraphParts::default()
        })
    }

    /// Runs a node within 2^17 elements.
    fn computed(op: &str, inputs: &[Tensor]) -> Result<Tensor, String> {
        let ty = |input: &Tensor| if input.dtype() == DType::F32 { DataType::Float } else { DataType::Int64 };
        let types: Vec<DataType> = inputs.iter().map(ty).collect();
        let limits = Limits { time: Duration::from_secs(60), memory: 1 << 20 };
        Ok(interpreter(op, &types, vec![]).unwrap().run(inputs, Some(limits))?.remove("o").unwrap())
    }

    fn ints(values: &[i64]) -> Tensor {
        Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap()
    }

    #[test]
    fn shapes_without_elements_are_bounded() {
        let empty = |size: usize| Tensor::zeros((size, 0), DType::I64, &Device::Cpu).unwrap();
        assert_eq!(computed("Identity", &[empty(1 << 16)]).unwrap().dims(), [1 << 16, 0]);
        for (op, inputs, reason) in [
            ("Identity", vec![empty(1 << 60)], "`i0` has the shape [1152921504606846976, 0], which exceeds the limit of 131072 elements"),
            ("Identity", vec![ints(&[0; 100_000])], "it creates the shape [100000], but only 31072 more elements fit"),
            ("ConstantOfShape", vec![ints(&[1 << 60, 0])], "it creates 1152921504606846976 elements"),
            ("Reshape", vec![empty(4), ints(&[1 << 40, 1 << 40])], "it creates 18446744073709551615 elements"),
            ("GatherND", vec![ints(&[1, 2, 3]), empty(1 << 16)], "it creates 196608 elements"),
            ("ScatterND", vec![ints(&[1, 2, 3]), empty(1 << 16), ints(&[1])], "it creates 196608 elements"),
            ("Slice", vec![empty(1 << 17), ints(&[0]), ints(&[i64::MAX])], "it creates 131072 elements, but only 131070 more"),
        ] {
            let error = computed(op, &inputs).unwrap_err();
            assert!(error.contains(reason), "{op}: {error}");
        }
    }

    #[test]
    fn other_forms_are_left_to_the_runtime() {
        let (float, int) = (DataType::Float, DataType::Int64);
        let scatter = |reduction: &str| interpreter("ScatterND", &[int; 3], vec![AttributeProto::text("reduction", reduction)]);
        assert_eq!(["none", "add", "max"].map(|reduction| scatter(reduction).is_some()), [true, false, false]);
        let pow = |base, exponent| interpreter("Pow", &[base, exponent], vec![]).is_some();
        assert_eq!([pow(float, float), pow(float, int), pow(int, int), pow(int, float)], [true, true, true, false]);
    }

    /// The results of ONNX Runtime 1.31.
    #[test]
    fn ranges_of_floats_are_those_of_the_runtime() {
        let range = |numbers: [f32; 3]| computed("Range", &numbers.map(|number| Tensor::new(number, &Device::Cpu).unwrap()));
        for (numbers, wanted) in [
            ([0.0, 0.3, 0.1], vec![0.0, 0.1, 0.2, 0.3]),
            ([0.1, 0.4, 0.1], vec![0.1, 0.2, 0.3]),
            ([0.0, 1.0, 0.1], vec![0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.700_000_05, 0.800_000_1, 0.900_000_1]),
            ([1.0, 2.0, 0.3], vec![1.0, 1.3, 1.599_999_9, 1.899_999_9]),
            ([16_777_216.0, 16_777_220.0, 1.0], vec![16_777_216.0; 4]),
            ([1.0, 0.0, 0.1], vec![]),
        ] {
            assert_eq!(runtime::floats(&range(numbers).unwrap()).unwrap(), wanted, "{numbers:?}");
        }
    }

    /// The results of ONNX Runtime 1.31.
    #[test]
    fn slices_backwards_and_remainders_are_those_of_the_runtime() {
        for (size, start, end, step, wanted) in [
            (4, -10, -20, -1, vec![0]),
            (4, -10, -10, -2, vec![0]),
            (4, 10, -20, -1, vec![3, 2, 1, 0]),
            (4, 3, 0, -1, vec![3, 2, 1]),
            (4, -1, -5, -2, vec![3, 1]),
            (4, 2, -1, -1, vec![]),
            (4, -1, i64::MIN, i64::MIN, vec![3]),
            (4, i64::MAX, i64::MIN, -3, vec![3, 0]),
            (4, i64::MIN, i64::MIN, -1, vec![0]),
            (4, -10, 10, 3, vec![0, 3]),
            (0, 5, -10, -1, vec![]),
        ] {
            let inputs = [ints(&(0..size).collect::<Vec<i64>>()), ints(&[start]), ints(&[end]), ints(&[0]), ints(&[step])];
            assert_eq!(runtime::integers(&computed("Slice", &inputs).unwrap()).unwrap(), wanted, "{size} {start} {end} {step}");
        }
        let (least, most) = (i64::MIN, i64::MAX);
        let remainders = computed("Mod", &[ints(&[-7, 7, -7, 6, most, least, most, 1, 0]), ints(&[3, -3, -3, -3, -most, most, least, least, -5])]);
        assert_eq!(runtime::integers(&remainders.unwrap()).unwrap(), [2, -2, -1, 0, 0, most - 1, -1, -most, 0]);
    }
}
