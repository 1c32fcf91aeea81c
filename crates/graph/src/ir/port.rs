//! Inputs and outputs of a model, independent of how it is executed.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::{Dim, Element, Graph, TensorType};

/// The tensor for an input, if it is provided. `token_type_ids`, which tokenizers omit for single texts,
/// default to zeros.
pub fn input_tensor(inputs: &BTreeMap<String, Tensor>, name: &str) -> Option<candle_core::Result<Tensor>> {
    match (inputs.get(name), inputs.get("input_ids")) {
        (Some(tensor), _) => Some(Ok(tensor.clone())),
        (None, Some(tokens)) if name == "token_type_ids" => Some(tokens.zeros_like()),
        _ => None,
    }
}

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Public name.
    pub name: String,
    /// Element type.
    pub element: Element,
    /// Shape, outermost axis first; `None` for dynamic axes.
    pub shape: Vec<Option<usize>>,
    /// The integer value of a scalar input that the user has fixed.
    pub number: Option<i64>,
}

impl Port {
    /// The port of a graph value.
    pub fn new(name: &str, ty: &TensorType) -> Port {
        Port { name: name.to_owned(), element: ty.element, shape: ty.shape.iter().map(Dim::fixed).collect(), number: None }
    }

    /// Ports of all inputs and of all outputs of a graph.
    pub fn from_graph(graph: &Graph) -> (Vec<Port>, Vec<Port>) {
        let inputs = graph.inputs().map(|(_, value)| Port::new(&value.name, &value.ty)).collect();
        let outputs = graph.outputs().iter().map(|(name, id)| Port::new(name, &graph.value(*id).ty)).collect();
        (inputs, outputs)
    }

    /// The shape for messages, such as `any x 128`.
    pub fn sizes(&self) -> String {
        self.shape.iter().map(|size| size.map_or("any".to_owned(), |s| s.to_string())).collect::<Vec<_>>().join(" x ")
    }
}
