//! Replacement of 16-bit floats by 32-bit floats in the messages of a file.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use half::f16;

use super::check::bodies_mut;
use super::elements;
use super::proto::{DataType, NodeProto, TensorProto, ValueInfoProto};

const HALF: i32 = DataType::Float16 as i32;
const FLOAT: i32 = DataType::Float as i32;

/// Attributes that specify the element type of a result.
const TYPES: [&str; 5] = ["to", "dtype", "output_dtype", "softmax_precision", "stash_type"];

/// Whether a value is a tensor of 16-bit floats.
pub(super) fn is_half(value: &ValueInfoProto) -> bool {
    value.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()).is_some_and(|tensor| tensor.elem_type == Some(HALF))
}

/// Replaces the type of 16-bit floats in a node and in its bodies. Elements outside of the messages are
/// converted when they are read.
pub(super) fn widen_node(node: &mut NodeProto) -> Result<(), String> {
    for attribute in &mut node.attribute {
        if TYPES.contains(&attribute.name()) && attribute.i == Some(HALF.into()) {
            attribute.i = Some(FLOAT.into());
        }
        attribute.t.iter_mut().chain(&mut attribute.tensors).try_for_each(widen_tensor)?;
    }
    for body in bodies_mut(node) {
        body.initializer.iter_mut().try_for_each(widen_tensor)?;
        for value in body.input.iter_mut().chain(&mut body.output).chain(&mut body.value_info).filter(|value| is_half(value)) {
            if let Some(tensor) = value.r#type.as_mut().and_then(|ty| ty.tensor_type.as_mut()) {
                tensor.elem_type = Some(FLOAT);
            }
        }
        body.node.iter_mut().try_for_each(widen_node)?;
    }
    Ok(())
}

/// Converts a tensor of 16-bit floats in the message to 32 bits.
pub(super) fn widen_tensor(tensor: &mut TensorProto) -> Result<(), String> {
    if tensor.data_type != Some(HALF) {
        return Ok(());
    }
    let (_, count) = elements::shape(tensor)?;
    let Some(bytes) = elements::inline(tensor, DataType::Float16, count)? else { return Ok(()) };
    let floats = bytes.as_chunks::<2>().0.iter().flat_map(|bytes| f16::from_le_bytes(*bytes).to_f32().to_le_bytes());
    (tensor.data_type, tensor.raw_data) = (Some(FLOAT), Some(floats.collect()));
    tensor.int32_data.clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::proto::{AttributeProto, GraphProto};
    use super::*;

    #[test]
    fn types_in_nodes_and_bodies_become_those_of_32_bits() {
        let tensor = TensorProto { data_type: Some(HALF), dims: vec![2], int32_data: vec![0x3c00, 0xc000], ..TensorProto::default() };
        let cast = |to: i32| NodeProto { op_type: Some("Cast".into()), attribute: vec![AttributeProto::int("to", to.into())], ..NodeProto::default() };
        let body = GraphProto { node: vec![cast(HALF), cast(DataType::Int64 as i32)], initializer: vec![tensor.clone()], ..GraphProto::default() };
        let attributes = vec![AttributeProto::tensor("value", tensor), AttributeProto { g: Some(body), i: None, ..AttributeProto::int("body", 0) }];
        let mut node = NodeProto { attribute: attributes, ..cast(0) };
        widen_node(&mut node).unwrap();
        let wide = node.attribute[0].t.clone().unwrap();
        assert_eq!((wide.data_type(), wide.raw_data()), (DataType::Float, &[1f32.to_le_bytes(), (-2f32).to_le_bytes()].concat()[..]));
        let body = node.attribute[1].g.clone().unwrap();
        assert_eq!(body.initializer, [wide]);
        assert_eq!(body.node, [cast(FLOAT), cast(DataType::Int64 as i32)]);
    }
}
