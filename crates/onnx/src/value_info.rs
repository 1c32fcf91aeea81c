//! Declarations of the inputs and outputs of ONNX files, and the types of graph values.

use super::proto::{DataType, Dimension, DimensionProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto};
use crate::ir::{Dim, Element, TensorType};

/// The declaration of a value of a graph.
pub(super) fn value_info_proto(name: &str, ty: &TensorType) -> ValueInfoProto {
    value_info_proto_as(name, ty, None)
}

/// [`value_info_proto`] with another float type than 32 bits, which integers ignore.
pub(super) fn value_info_proto_as(name: &str, ty: &TensorType, float: Option<DataType>) -> ValueInfoProto {
    let element = if ty.element == Element::Float { float.unwrap_or(DataType::Float) } else { DataType::Int64 };
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Dimension::DimValue(*size as i64),
        other => Dimension::DimParam(formula(other)),
    };
    let dim = ty.shape.iter().map(|dim| DimensionProto { value: Some(size(dim)), denotation: None }).collect();
    let tensor = TensorTypeProto { elem_type: Some(element as i32), shape: Some(TensorShapeProto { dim }) };
    let ty = TypeProto { tensor_type: Some(tensor), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// Formula of a dynamic dimension.
fn formula(dim: &Dim) -> String {
    match dim {
        Dim::Window { of, offset, stride } => {
            let of = formula(of);
            let sign = if *offset < 0 { '-' } else { '+' };
            format!("floor(({of} {sign} {})/{stride}) + 1", offset.unsigned_abs())
        }
        other => other.to_string(),
    }
}

/// A dimension name without characters that have a meaning in size formulas.
pub(super) fn dim_name(name: &str) -> String {
    let letters: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if letters.starts_with(|c: char| c.is_ascii_digit()) { format!("size_{letters}") } else { letters }
}

/// Shape of an input. Open dimensions have the same names as in the graph.
pub(super) fn input_shape(input: &ValueInfoProto) -> Option<Vec<Dim>> {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref())?;
    // An unnamed dimension gets a unique name.
    let open = |axis: usize| Dim::Named(dim_name(&format!("{}_{axis}", input.name())));
    let size = |(axis, dim): (usize, &DimensionProto)| match &dim.value {
        Some(Dimension::DimValue(size)) if *size > 0 => usize::try_from(*size).map_or_else(|_| open(axis), Dim::Fixed),
        Some(Dimension::DimParam(name)) if !name.is_empty() => Dim::Named(dim_name(name)),
        _ => open(axis),
    };
    Some(tensor.shape.as_ref()?.dim.iter().enumerate().map(size).collect())
}
