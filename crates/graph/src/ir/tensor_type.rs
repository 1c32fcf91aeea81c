//! Types of graph values.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Dim;

/// Element type. The width of floats is chosen when a graph runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// Floating point.
    Float,
    /// Integers: token ids, masks.
    Int,
}

/// Element type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorType {
    /// Element type.
    pub element: Element,
    /// Shape, outermost axis first.
    pub shape: Vec<Dim>,
}

impl TensorType {
    /// A float tensor of this shape.
    pub fn float(shape: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        Self { element: Element::Float, shape: shape.into_iter().map(Into::into).collect() }
    }

    /// An integer tensor of this shape.
    pub fn int(shape: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        Self { element: Element::Int, shape: shape.into_iter().map(Into::into).collect() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let element = if self.element == Element::Float { "float" } else { "int" };
        write!(f, "{element}[{}]", self.shape.iter().map(Dim::to_string).collect::<Vec<_>>().join(", "))
    }
}
