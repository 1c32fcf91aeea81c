//! Nodes, constants and interface of a part of a file.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::proto::{
    Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use crate::ir::TensorType;

/// Nodes, constants and interface of a subgraph.
#[derive(Debug, Clone, Default)]
pub(super) struct SubgraphParts {
    /// Nodes in topological order.
    pub nodes: Vec<NodeProto>,
    /// Constants.
    pub constants: Vec<TensorProto>,
    /// Names of the inputs and their ONNX element type numbers.
    pub inputs: Vec<(String, i32)>,
    /// Trial values of integer inputs, instead of 1.
    pub trial_values: BTreeMap<String, i64>,
    /// Names of the outputs of the last node.
    pub outputs: Vec<String>,
    /// Operator sets.
    pub opsets: Vec<OperatorSetIdProto>,
    /// Version of the file format.
    pub ir_version: Option<i64>,
}

impl SubgraphParts {
    /// The subgraph as a model whose inputs have these types. Some operators require the sizes of weights.
    pub fn model(&self, types: &[TensorType]) -> ModelProto {
        let fixed = |size: usize| i64::try_from(size).ok().map(Dimension::DimValue);
        let shape = |ty: &TensorType| {
            let dim = ty.shape.iter().map(|size| DimensionProto { value: size.fixed().and_then(fixed), denotation: None });
            Some(TensorShapeProto { dim: dim.collect() })
        };
        let port = |((name, element), ty): (&(String, i32), &TensorType)| {
            let tensor = TensorTypeProto { elem_type: Some(*element), shape: shape(ty) };
            let ty = TypeProto { tensor_type: Some(tensor), ..TypeProto::default() };
            ValueInfoProto { name: Some(name.clone()), r#type: Some(ty), ..ValueInfoProto::default() }
        };
        let graph = GraphProto {
            name: Some("subgraph".into()),
            node: self.nodes.clone(),
            initializer: self.constants.clone(),
            input: self.inputs.iter().zip(types).map(port).collect(),
            output: self.outputs.iter().map(|name| ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() }).collect(),
            ..GraphProto::default()
        };
        ModelProto { ir_version: self.ir_version.max(Some(4)), graph: Some(graph), opset_import: self.opsets.clone(), ..ModelProto::default() }
    }
}
