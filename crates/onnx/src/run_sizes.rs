//! Sizes of the values that a run of a model computes, as far as they follow from the shapes of its
//! inputs.
//!
//! A kernel of ONNX Runtime cannot be interrupted, so a value that exceeds the memory limit must be
//! found before the run.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::check::{self, is_own, label};
use super::elements;
use super::initializer_roles::int;
use super::numbers::{self, KnownValues, Numbers};
use super::proto::{DataType, ModelProto, NodeProto, TensorProto};
use super::sizes::{output_sizes, product};
use crate::ir::Dim;

/// Operators that return booleans or bytes.
const BYTES: [&str; 13] =
    ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf", "QuantizeLinear", "DynamicQuantizeLinear"];

/// Checks a run with inputs of these shapes. The error names a node that computes a value of more than
/// `limit` bytes.
pub(super) fn check_run(model: &ModelProto, inputs: &BTreeMap<String, Vec<usize>>, limit: u64) -> Result<(), String> {
    let Some(graph) = &model.graph else { return Ok(()) };
    let mut values = Values::default();
    for tensor in &graph.initializer {
        values.constant(tensor.name(), tensor);
    }
    for input in &graph.input {
        if let Some(shape) = inputs.get(input.name()) {
            values.sizes.insert(input.name(), shape.iter().map(|size| *size as u64).collect());
        }
        let ty = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()).and_then(|tensor| tensor.elem_type);
        values.widths.extend(ty.map(|ty| (input.name(), width(ty))));
    }
    for node in check::order(&graph.node).into_iter().filter_map(|position| graph.node.get(position)).filter(|node| is_own(node.domain())) {
        let Some(output) = node.output.first() else { continue };
        if let ("Constant", Some(tensor)) = (node.op_type(), node.attribute.iter().find_map(|attribute| attribute.t.as_ref())) {
            values.constant(output, tensor);
            continue;
        }
        let width = values.output_width(node);
        values.widths.insert(output, width);
        let numbers = numbers::evaluate(&values, node);
        let sizes = match &numbers {
            Some(numbers) => Some(numbers.shape().iter().filter_map(Dim::fixed).map(|size| size as u64).collect()),
            None => output_sizes(&values, node),
        };
        // A value that is expanded has at least the requested size.
        let requested = || values.numbers(node.input.get(1).filter(|_| node.op_type() == "Expand")?)?.all();
        let least = sizes.as_deref().map(product).or_else(|| Some(requested()?.iter().fold(1u64, |count, size| count.saturating_mul(size.unsigned_abs()))));
        if let Some(count) = least.filter(|count| count.saturating_mul(width) > limit) {
            return Err(format!("the run would take more than {} MB of memory: {} creates {count} elements", limit >> 20, label(node)));
        }
        values.numbers.extend(numbers.map(|numbers| (output.as_str(), numbers)));
        values.sizes.extend(sizes.map(|sizes| (output.as_str(), sizes)));
    }
    Ok(())
}

/// Known values of a run.
#[derive(Default)]
struct Values<'m> {
    numbers: BTreeMap<&'m str, Numbers>,
    sizes: BTreeMap<&'m str, Vec<u64>>,
    /// Bytes per element.
    widths: BTreeMap<&'m str, u64>,
    constants: BTreeMap<&'m str, &'m TensorProto>,
}

impl<'m> Values<'m> {
    fn constant(&mut self, name: &'m str, tensor: &'m TensorProto) {
        let Ok((shape, _)) = elements::shape(tensor) else { return };
        self.sizes.insert(name, shape.into_iter().map(|size| size as u64).collect());
        self.widths.insert(name, width(tensor.data_type.unwrap_or(0)));
        self.numbers.extend(numbers::constant(tensor).map(|numbers| (name, numbers)));
        self.constants.insert(name, tensor);
    }

    /// A lower bound of the bytes per element of a node's first output.
    fn output_width(&self, node: &NodeProto) -> u64 {
        let input = |at: usize| node.input.get(at).and_then(|name| self.widths.get(name.as_str())).copied().unwrap_or(1);
        match node.op_type() {
            op if BYTES.contains(&op) => 1,
            "Cast" => width(i32::try_from(int(node, "to", 0)).unwrap_or(0)),
            "ConstantOfShape" => node.attribute.iter().find_map(|attribute| attribute.t.as_ref()).map_or(4, |tensor| width(tensor.data_type.unwrap_or(0))),
            "Where" | "DequantizeLinear" => input(1),
            "OneHot" => input(2),
            _ => input(0),
        }
    }
}

/// Bytes per element of a type; 1 for types of fewer bits.
fn width(ty: i32) -> u64 {
    DataType::try_from(ty).map_or(1, |ty| ty.bits().div_ceil(8).max(1))
}

impl KnownValues for Values<'_> {
    fn numbers(&self, name: &str) -> Option<Numbers> {
        self.numbers.get(name).cloned()
    }

    fn shape(&self, name: &str) -> Option<Vec<Dim>> {
        let sizes = self.sizes.get(name)?;
        Some(sizes.iter().map(|size| Dim::Fixed(usize::try_from(*size).unwrap_or(usize::MAX))).collect())
    }

    fn sizes(&self, name: &str) -> Option<Vec<u64>> {
        self.sizes.get(name).cloned()
    }

    fn scales(&self, name: &str) -> Option<Vec<f32>> {
        elements::small_floats(self.constants.get(name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{AttributeProto, GraphProto, TensorTypeProto, TypeProto, ValueInfoProto};
    use super::*;

    const LIMIT: u64 = 1 << 30;

    fn node(op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
        let input = inputs.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), input, output: vec![output.into()], attribute, ..NodeProto::default() }
    }

    fn ints(name: &str, values: &[i64]) -> TensorProto {
        let dims = vec![i64::try_from(values.len()).unwrap()];
        TensorProto { name: Some(name.into()), data_type: Some(DataType::Int64 as i32), dims, int64_data: values.to_vec(), ..TensorProto::default() }
    }

    /// Checks a run of a model whose input `x` has this type and shape.
    fn checked(ty: DataType, shape: &[usize], nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> Result<(), String> {
        let tensor_type = Some(TensorTypeProto { elem_type: Some(ty as i32), shape: None });
        let input = ValueInfoProto { name: Some("x".into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() };
        let graph = GraphProto { node: nodes, initializer, input: vec![input], ..GraphProto::default() };
        check_run(&ModelProto { graph: Some(graph), ..ModelProto::default() }, &[("x".to_owned(), shape.to_vec())].into(), LIMIT)
    }

    #[test]
    fn values_that_exceed_the_limit_are_found_before_the_run() {
        let weight = || TensorProto { name: Some("w".into()), data_type: Some(1), dims: vec![16, 32], ..TensorProto::default() };
        let expand = |to: &[i64]| {
            let nodes = vec![node("MatMul", &["x", "w"], "a", vec![]), node("Expand", &["a", "to"], "y", vec![])];
            checked(DataType::Float, &[4, 16], nodes, vec![weight(), ints("to", to)])
        };
        assert_eq!(expand(&[1 << 10, 4, 1]), Ok(()));
        let error = expand(&[1 << 10, 1 << 12, 4, 1]).unwrap_err();
        assert_eq!(error, "the run would take more than 1024 MB of memory: node `y` (Expand) creates 536870912 elements");
        // The shape of the expanded value is unknown.
        let unknown = vec![node("Mystery", &["x"], "a", vec![]), node("Expand", &["a", "to"], "y", vec![])];
        assert!(checked(DataType::Float, &[4, 16], unknown, vec![ints("to", &[1 << 20, 1 << 12])]).is_err());
        let einsum = |equation: &str| vec![node("Einsum", &["x", "x", "x"], "y", vec![AttributeProto::text("equation", equation)])];
        assert!(checked(DataType::Float, &[64, 64], einsum("ab,cd,ef->abcdef"), vec![]).is_err());
        assert_eq!(checked(DataType::Float, &[64, 64], einsum("ab, bc, cd -> ad"), vec![]), Ok(()));
        // Sizes that are computed from the shape of the input.
        let squared = |rows: usize| {
            let nodes = vec![
                node("Shape", &["x"], "s", vec![]),
                node("Mul", &["s", "s"], "t", vec![]),
                node("ConstantOfShape", &["t"], "y", vec![]),
                node("Cast", &["y"], "z", vec![AttributeProto::int("to", DataType::Double as i64)]),
            ];
            checked(DataType::Float, &[rows, 8], nodes, vec![])
        };
        assert_eq!(squared(1 << 9), Ok(()));
        assert!(squared(1 << 11).unwrap_err().contains("node `z` (Cast)"));
        assert!(squared(1 << 12).unwrap_err().contains("node `y` (ConstantOfShape)"));
    }

    #[test]
    fn the_element_type_determines_the_size() {
        for (ty, fits) in [(DataType::Bool, true), (DataType::Float16, true), (DataType::Float, false), (DataType::Int64, false)] {
            let nodes = vec![node("Expand", &["x", "to"], "y", vec![])];
            assert_eq!(checked(ty, &[1 << 10, 1], nodes, vec![ints("to", &[1, 1 << 19])]).is_ok(), fits, "{ty:?}");
        }
        let equal = vec![node("Equal", &["x", "x"], "e", vec![]), node("Expand", &["e", "to"], "y", vec![])];
        assert_eq!(checked(DataType::Float, &[1 << 10, 1], equal, vec![ints("to", &[1, 1 << 19])]), Ok(()));
    }

    /// Shapes are exact: a wrong order of axes would change the size of products.
    #[test]
    fn axes_are_in_order() {
        let pick = vec![
            node("Gather", &["x", "at"], "g", vec![AttributeProto::int("axis", 1)]),
            node("Transpose", &["g"], "t", vec![]),
            node("MatMul", &["g", "t"], "y", vec![]),
        ];
        assert_eq!(checked(DataType::Float, &[4, 8], pick.clone(), vec![ints("at", &[0; 60])]), Ok(()));
        let flat = |axis: i64| vec![node("Flatten", &["x"], "f", vec![AttributeProto::int("axis", axis)]), node("MatMul", &["f", "w"], "y", vec![])];
        let weight = || TensorProto { name: Some("w".into()), data_type: Some(1), dims: vec![4, 1 << 16], ..TensorProto::default() };
        assert!(checked(DataType::Float, &[1 << 7, 1 << 6, 4], flat(2), vec![weight()]).is_err());
        assert_eq!(checked(DataType::Float, &[1 << 7, 4], flat(1), vec![weight()]), Ok(()));
    }
}
