//! What goes into a model and comes out, whoever runs it.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::{Dim, Element, Graph, TensorType};

/// The value for an input, if there is one. Token types, which tokenizers leave out for one text, are all of the first then.
pub fn given(inputs: &BTreeMap<String, Tensor>, name: &str) -> Option<candle_core::Result<Tensor>> {
    match (inputs.get(name), inputs.get("input_ids")) {
        (Some(given), _) => Some(Ok(given.clone())),
        (None, Some(tokens)) if name == "token_type_ids" => Some(tokens.zeros_like()),
        _ => None,
    }
}

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Public name.
    pub name: String,
    /// Element.
    pub element: Element,
    /// Sizes, outermost first; none where any size goes.
    pub shape: Vec<Option<usize>>,
    /// The whole number that it is, where a user has told one.
    pub number: Option<i64>,
}

impl Port {
    /// The port for a value of a graph.
    pub fn new(name: &str, ty: &TensorType) -> Port {
        Port { name: name.to_owned(), element: ty.element, shape: ty.shape.iter().map(Dim::fixed).collect(), number: None }
    }

    /// Inputs and outputs of a graph.
    pub fn of(graph: &Graph) -> (Vec<Port>, Vec<Port>) {
        let inputs = graph.inputs().map(|(_, value)| Port::new(&value.name, &value.ty)).collect();
        let outputs = graph.outputs().iter().map(|(name, id)| Port::new(name, &graph.value(*id).ty)).collect();
        (inputs, outputs)
    }

    /// The shape as a person would write it.
    pub fn sizes(&self) -> String {
        self.shape.iter().map(|size| size.map_or("any".to_owned(), |s| s.to_string())).collect::<Vec<_>>().join(" x ")
    }
}
