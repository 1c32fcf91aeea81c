//! Memory that ONNX Runtime takes while it loads a file, for values that nodes compute from constants and
//! from shapes.
//!
//! It infers integers that shapes are computed from, and folds constants. Both can grow exponentially
//! with the number of nodes, and neither can be interrupted. Therefore their sizes are estimated first.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::{self, label};
use super::elements;
use super::numbers::{self, KnownValues, Numbers};
use super::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto};
use super::sizes::{BROADCAST, SAME_SHAPE, output_sizes, product};
use super::value_info::input_shape;
use crate::ir::Dim;

/// Bytes per element of a folded constant.
const ELEMENT: u64 = 4;
/// Bytes per inferred integer, which ONNX Runtime stores as a dimension of a shape.
const INFERRED: u64 = 128;
/// Assumed rank of a value of unknown shape.
const RANK: u64 = 64;
/// Operators through which integers are inferred.
const INFERRING: [&str; 21] = [
    "Identity",
    "Cast",
    "Concat",
    "Gather",
    "Slice",
    "Squeeze",
    "Unsqueeze",
    "Reshape",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Mod",
    "Max",
    "Min",
    "Neg",
    "Abs",
    "Floor",
    "Ceil",
    "Where",
    "Split",
];
/// Operators of which only the first input contains data; the others contain sizes and positions.
const OF_FIRST_INPUT: [&str; 5] = ["Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"];
/// Operators whose outputs have at most as many elements as pairs of elements of the inputs.
const PRODUCTS: [&str; 3] = ["MatMul", "MatMulInteger", "Gemm"];
/// Operators whose outputs have at most as many elements as the largest input.
const NOT_GROWING: [&str; 24] = [
    "Slice",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "Reshape",
    "Flatten",
    "Transpose",
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSumExp",
    "ArgMax",
    "ArgMin",
    "TopK",
    "GatherElements",
    "ScatterND",
    "ScatterElements",
    "Compress",
    "CastLike",
];

/// Estimates the memory for constants and inferred integers of a model, whose weights may be missing.
/// Returns whether constants may be folded: their sizes are known, and their total is below `limit`
/// bytes. Fails if nodes create values beyond the limit.
pub(super) fn may_fold(model: &ModelProto, limit: u64) -> Result<bool, String> {
    let mut estimate = Estimate { known: Scope::default(), grown: 0, total: 0, folds: true, limit };
    model.graph.iter().try_for_each(|graph| estimate.graph(graph))?;
    for function in &model.functions {
        estimate.known = Scope { open: function.input.iter().map(String::as_str).collect(), ..Scope::default() };
        estimate.nodes(&function.node)?;
    }
    Ok(estimate.folds && estimate.total <= limit)
}

/// A value that depends only on constants and shapes.
#[derive(Debug, Clone, Default)]
struct Computed {
    numbers: Option<Numbers>,
    sizes: Option<Vec<u64>>,
    /// Upper bound of the number of elements.
    count: u64,
    /// Whether ONNX Runtime infers it without running nodes.
    inferred: bool,
    /// Whether the shapes on which it depends may be fixed.
    constant: bool,
}

/// Static knowledge about the values that the nodes of a graph can read.
#[derive(Debug, Clone, Default)]
struct Scope<'m> {
    computed: BTreeMap<&'m str, Computed>,
    declared: BTreeMap<&'m str, Vec<Dim>>,
    floats: BTreeMap<&'m str, &'m TensorProto>,
    /// Values that depend on inputs with open dimensions.
    open: BTreeSet<&'m str>,
}

impl KnownValues for Scope<'_> {
    fn numbers(&self, name: &str) -> Option<Numbers> {
        self.computed.get(name)?.numbers.clone()
    }

    fn shape(&self, name: &str) -> Option<Vec<Dim>> {
        let sizes = self.sizes(name).map(|sizes| sizes.into_iter().map(|size| Dim::Fixed(usize::try_from(size).unwrap_or(usize::MAX))).collect());
        sizes.or_else(|| self.declared.get(name).cloned())
    }

    fn sizes(&self, name: &str) -> Option<Vec<u64>> {
        match self.computed.get(name) {
            Some(computed) => computed.sizes.clone(),
            None => self.declared.get(name)?.iter().map(|size| size.fixed().map(|size| size as u64)).collect(),
        }
    }

    fn scales(&self, name: &str) -> Option<Vec<f32>> {
        elements::small_floats(self.floats.get(name)?)
    }
}

struct Estimate<'m> {
    known: Scope<'m>,
    /// Bytes of values that are larger than the values from which they are computed.
    grown: u64,
    /// Bytes of all values.
    total: u64,
    /// Whether the sizes of all constants are known.
    folds: bool,
    limit: u64,
}

impl<'m> Estimate<'m> {
    fn graph(&mut self, graph: &'m GraphProto) -> Result<(), String> {
        for value in graph.input.iter().chain(&graph.value_info).chain(&graph.output) {
            if let Some(shape) = input_shape(value) {
                self.known.declared.insert(value.name(), shape);
            }
        }
        for input in graph.input.iter().map(|input| input.name()) {
            self.known.computed.remove(input);
            if self.known.sizes(input).is_none() {
                self.known.open.insert(input);
            }
        }
        graph.initializer.iter().for_each(|tensor| self.tensor(tensor.name(), tensor));
        for sparse in &graph.sparse_initializer {
            let name = sparse.values.as_ref().map_or("", |values| values.name());
            self.sparse(name, sparse, || format!("the sparse initializer `{name}`"))?;
        }
        self.nodes(&graph.node)
    }

    fn nodes(&mut self, nodes: &'m [NodeProto]) -> Result<(), String> {
        check::order(nodes).into_iter().filter_map(|number| nodes.get(number)).try_for_each(|node| self.node(node))
    }

    fn tensor(&mut self, name: &'m str, tensor: &'m TensorProto) {
        let Ok((shape, count)) = elements::shape(tensor) else { return };
        let inferred = shape.len() <= 1 && matches!(tensor.data_type(), DataType::Int64 | DataType::Int32);
        let sizes = Some(shape.into_iter().map(|size| size as u64).collect());
        self.known.floats.insert(name, tensor);
        self.known.computed.insert(name, Computed { numbers: numbers::constant(tensor), sizes, count, inferred, constant: true });
    }

    /// A sparse tensor, which is loaded as a dense one.
    fn sparse(&mut self, name: &'m str, tensor: &'m SparseTensorProto, what: impl Fn() -> String) -> Result<(), String> {
        let sizes: Vec<u64> = tensor.dims.iter().map(|size| size.unsigned_abs()).collect();
        self.add(name, Computed { count: product(&sizes), sizes: Some(sizes), constant: true, ..Computed::default() }, true, what)
    }

    fn node(&mut self, node: &'m NodeProto) -> Result<(), String> {
        let reads = check::reads(node);
        let open = reads.iter().any(|name| self.known.open.contains(name));
        for body in check::bodies(node) {
            let outside = self.known.clone();
            self.graph(body)?;
            self.known = outside;
        }
        let outputs = || node.output.iter().map(String::as_str).filter(|name| !name.is_empty());
        outputs().for_each(|output| drop(self.known.computed.remove(output)));
        if open {
            self.known.open.extend(outputs());
        }
        let attribute = |name: &str| node.attribute.iter().find(|attribute| attribute.name() == name);
        match (node.op_type(), node.output.first()) {
            ("Constant", Some(output)) if check::is_own(node.domain()) => match (attribute("value"), attribute("sparse_value")) {
                (Some(AttributeProto { t: Some(tensor), .. }), _) => self.tensor(output, tensor),
                (_, Some(AttributeProto { sparse_tensor: Some(tensor), .. })) => self.sparse(output, tensor, || label(node))?,
                _ => {
                    let numbers = numbers::evaluate(&self.known, node);
                    let count = node.attribute.iter().map(|attribute| attribute.floats.len().max(attribute.ints.len()).max(1)).max().unwrap_or(1) as u64;
                    let sizes = attribute("value_float").or_else(|| attribute("value_int")).map_or(Some(vec![count]), |_| Some(Vec::new()));
                    self.known.computed.insert(output, Computed { numbers, sizes, count, inferred: true, constant: true });
                }
            },
            ("Shape" | "Size", Some(output)) if check::is_own(node.domain()) => {
                let numbers = numbers::evaluate(&self.known, node);
                let rank = node.input.first().and_then(|input| self.known.shape(input)).map(|shape| shape.len() as u64);
                let count = if node.op_type() == "Size" { 1 } else { numbers.as_ref().map(|numbers| numbers.each().len() as u64).or(rank).unwrap_or(RANK) };
                let constant = !open || numbers.as_ref().is_some_and(|numbers| numbers.all().is_some());
                let sizes = if node.op_type() == "Size" { Some(Vec::new()) } else { rank.map(|_| vec![count]) };
                self.add(output, Computed { numbers, sizes, count, inferred: true, constant }, true, || label(node))?;
            }
            _ => self.computed(node, &reads, outputs())?,
        }
        Ok(())
    }

    /// Adds the outputs of a node that reads only values of this kind.
    fn computed(&mut self, node: &'m NodeProto, reads: &BTreeSet<&str>, outputs: impl Iterator<Item = &'m str>) -> Result<(), String> {
        let Some(inputs) = reads.iter().map(|name| self.known.computed.get(name)).collect::<Option<Vec<&Computed>>>() else { return Ok(()) };
        // Nodes with bodies are not folded.
        if inputs.is_empty() || check::bodies(node).next().is_some() {
            return Ok(());
        }
        let constant = inputs.iter().all(|input| input.constant);
        let largest = inputs.iter().map(|input| input.count).max().unwrap_or(0);
        let count = if OF_FIRST_INPUT.contains(&node.op_type()) { 1 } else { node.input.len() };
        let mut operands = node.input.iter().take(count).filter_map(|name| self.known.computed.get(name.as_str()));
        let inferred = INFERRING.contains(&node.op_type()) && operands.any(|operand| operand.inferred);
        let computed = check::is_own(node.domain()).then(|| self.bound(node, inferred, largest)).flatten();
        let Some((sizes, count, tight)) = computed else {
            self.folds &= !constant;
            return Ok(());
        };
        let numbers = numbers::evaluate(&self.known, node);
        let sizes = numbers.as_ref().and_then(|numbers| Some(if numbers.constants()?.1 { vec![numbers.each().len() as u64] } else { Vec::new() })).or(sizes);
        // Its other outputs are scalars.
        let scalars = node.op_type() == "DynamicQuantizeLinear";
        for (place, output) in outputs.enumerate() {
            let value = match place {
                0 => Computed { numbers: numbers.clone(), sizes: sizes.clone(), count, inferred, constant },
                _ => Computed { sizes: scalars.then(Vec::new), count: if scalars { 1 } else { count }, inferred, constant, ..Computed::default() },
            };
            self.add(output, value, tight && count > largest, || label(node))?;
        }
        Ok(())
    }

    /// Shape of a node's output, if it is known; an upper bound of the number of elements; and whether the
    /// output may have that many.
    fn bound(&self, node: &NodeProto, inferred: bool, largest: u64) -> Option<(Option<Vec<u64>>, u64, bool)> {
        let count = |name: &String| self.known.computed.get(name.as_str()).map_or(0, |value| value.count);
        if let Some(sizes) = output_sizes(&self.known, node) {
            let count = product(&sizes);
            return Some((Some(sizes), count, true));
        }
        let (bound, tight) = match node.op_type() {
            "Concat" => (node.input.iter().map(count).fold(0, u64::saturating_add), true),
            "Gather" if inferred => (count(node.input.get(1)?), true),
            // Vectors and scalars of the same length.
            op if BROADCAST.contains(&op) && inferred => (largest, true),
            op if BROADCAST.contains(&op) || PRODUCTS.contains(&op) => (node.input.iter().map(count).fold(1, u64::saturating_mul), false),
            op if SAME_SHAPE.contains(&op) || NOT_GROWING.contains(&op) => (largest, true),
            _ => return None,
        };
        Some((None, bound, tight))
    }

    /// Adds a value. `grows`: it is larger than the values from which it is computed.
    fn add(&mut self, name: &'m str, value: Computed, grows: bool, what: impl Fn() -> String) -> Result<(), String> {
        let bytes = value.count.saturating_mul(if value.inferred { INFERRED } else { ELEMENT });
        self.total = self.total.saturating_add(bytes);
        if grows {
            self.grown = self.grown.saturating_add(bytes);
        }
        if self.grown > self.limit {
            let (what, count, limit) = (what(), value.count, self.limit >> 20);
            return Err(format!(
                "loading it in ONNX Runtime would take more than {limit} MB of memory for values that it computes from constants: {what} creates {count} elements"
            ));
        }
        self.known.computed.insert(name, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Dimension, DimensionProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto};
    use super::*;

    const LIMIT: u64 = 1 << 30;

    fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
        let input = inputs.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), input, output: vec![output.into()], ..NodeProto::default() }
    }

    fn ints(name: &str, values: &[i64]) -> TensorProto {
        let raw_data = Some(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        TensorProto { name: Some(name.into()), data_type: Some(DataType::Int64 as i32), dims: vec![values.len() as i64], raw_data, ..TensorProto::default() }
    }

    fn floats(name: &str, dims: &[i64]) -> TensorProto {
        TensorProto { name: Some(name.into()), data_type: Some(DataType::Float as i32), dims: dims.to_vec(), ..TensorProto::default() }
    }

    /// Checks a model whose input `x` has rank 2; a size of zero is open.
    fn checked(x: [i64; 2], nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> Result<bool, String> {
        let dim = x.map(|size| DimensionProto { value: (size > 0).then_some(Dimension::DimValue(size)), denotation: None }).to_vec();
        let tensor_type = Some(TensorTypeProto { elem_type: Some(1), shape: Some(TensorShapeProto { dim }) });
        let input = ValueInfoProto { name: Some("x".into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() };
        let graph = GraphProto { node: nodes, initializer, input: vec![input], ..GraphProto::default() };
        may_fold(&ModelProto { graph: Some(graph), ..ModelProto::default() }, LIMIT)
    }

    /// Doubles `from` this often, with the name `d0`, `d1` ….
    fn doubled(from: &str, times: usize) -> Vec<NodeProto> {
        let name = |number: usize| if number == 0 { from.to_owned() } else { format!("d{number}") };
        (0..times).map(|number| node("Concat", &[&name(number), &name(number)], &name(number + 1))).collect()
    }

    #[test]
    fn weights_that_are_reshaped_are_not_inferred() {
        let nodes = vec![node("Reshape", &["w", "shape"], "r"), node("MatMul", &["x", "r"], "y")];
        assert_eq!(checked([1, 4096], nodes, vec![floats("w", &[4096, 4096]), ints("shape", &[0, 0])]), Ok(true));
    }

    #[test]
    fn values_beyond_the_limit_are_named() {
        let shape = || node("Shape", &["x"], "s");
        let hidden = || vec![node("MatMul", &["x", "w"], "h"), node("Shape", &["h"], "s")];
        let refused: [(&str, Vec<NodeProto>, Vec<TensorProto>); 7] = [
            ("Concat", [vec![shape()], doubled("s", 27)].concat(), vec![]),
            ("Concat", [hidden(), doubled("s", 27)].concat(), vec![floats("w", &[4, 4])]),
            ("Concat", doubled("w", 27), vec![floats("w", &[1024])]),
            ("ConstantOfShape", vec![node("ConstantOfShape", &["n"], "c")], vec![ints("n", &[1 << 20, 1 << 20])]),
            ("Expand", vec![node("Expand", &["w", "n"], "c")], vec![floats("w", &[1]), ints("n", &[1 << 32])]),
            ("Add", vec![node("Add", &["w", "v"], "c")], vec![floats("w", &[1 << 16, 1]), floats("v", &[1 << 16])]),
            ("Tile", vec![node("Cast", &["w"], "v"), node("Tile", &["v", "n"], "c")], vec![floats("w", &[1 << 10]), ints("n", &[1 << 20])]),
        ];
        for (op, nodes, initializers) in refused {
            for x in [[1, 4], [0, 4]] {
                let error = checked(x, nodes.clone(), initializers.clone()).unwrap_err();
                assert!(error.contains(&format!("({op}) creates")) && error.contains("1024 MB"), "{op}: {error}");
            }
        }
    }

    /// In bodies too, where values of the enclosing graph are known.
    #[test]
    fn bodies_are_checked() {
        let body = GraphProto { node: doubled("w", 27), ..GraphProto::default() };
        let branch = NodeProto { attribute: vec![AttributeProto { g: Some(body), ..AttributeProto::int("then_branch", 0) }], ..node("If", &["x"], "y") };
        assert!(checked([1, 4], vec![branch], vec![floats("w", &[1024])]).unwrap_err().contains("(Concat)"));
    }

    #[test]
    fn sparse_tensors_count_as_dense_ones() {
        let values = Some(floats("w", &[1]));
        let sparse = SparseTensorProto { values, dims: vec![1 << 20, 1 << 20], ..SparseTensorProto::default() };
        let graph = GraphProto { sparse_initializer: vec![sparse], ..GraphProto::default() };
        let error = may_fold(&ModelProto { graph: Some(graph), ..ModelProto::default() }, LIMIT).unwrap_err();
        assert!(error.contains("the sparse initializer `w`"), "{error}");
        let sparse = SparseTensorProto { values: Some(floats("w", &[1])), dims: vec![1024], ..SparseTensorProto::default() };
        let graph = GraphProto { sparse_initializer: vec![sparse], node: doubled("w", 27), ..GraphProto::default() };
        let error = may_fold(&ModelProto { graph: Some(graph), ..ModelProto::default() }, LIMIT).unwrap_err();
        assert!(error.contains("(Concat) creates"), "{error}");
    }

    /// Constants of unknown size are not folded. A value that depends on open dimensions is none.
    #[test]
    fn constants_of_unknown_size_are_not_folded() {
        let exported = || {
            let sizes = [node("MatMul", &["x", "w"], "h"), node("Shape", &["h"], "s"), node("Gather", &["s", "first"], "n")];
            [sizes.to_vec(), vec![node("Concat", &["n", "more"], "all"), node("ConstantOfShape", &["all"], "mask")]].concat()
        };
        let weights = || vec![floats("w", &[4, 4]), ints("first", &[0]), ints("more", &[16])];
        assert_eq!(checked([0, 4], exported(), weights()), Ok(true));
        assert_eq!(checked([2, 4], exported(), weights()), Ok(false));
        assert_eq!(checked([2, 4], vec![node("Unknown", &["w"], "y")], weights()), Ok(false));
        assert_eq!(checked([2, 4], vec![node("Transpose", &["w"], "t"), node("DequantizeLinear", &["t", "w"], "y")], weights()), Ok(true));
        // A node without inputs is not folded.
        assert_eq!(checked([2, 4], vec![node("RandomNormal", &[], "r")], weights()), Ok(true));
        // Each of these copies is as large as the weight.
        let copies = (0..20).map(|number| node("Neg", &["w"], &format!("n{number}"))).collect();
        assert_eq!(checked([2, 4], copies, vec![floats("w", &[1 << 14, 1 << 10])]), Ok(false));
    }
}
