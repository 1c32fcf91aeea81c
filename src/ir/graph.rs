//! Values, nodes, and the graph that they make.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Bindings, Dim, Op};

/// A value of a graph, by its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub(super) u32);

impl ValueId {
    /// Position among the graph's values.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What elements are. The width of floats is chosen when a graph runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// Real numbers.
    Float,
    /// Whole numbers: token ids, masks.
    Int,
}

/// Element and sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorType {
    /// What elements are.
    pub element: Element,
    /// Sizes, outermost first.
    pub shape: Vec<Dim>,
}

impl TensorType {
    /// Floats of this shape.
    pub fn float(shape: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        Self { element: Element::Float, shape: shape.into_iter().map(Into::into).collect() }
    }

    /// Whole numbers of this shape.
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

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Given for each run.
    Input,
    /// A tensor of the checkpoint, by the value's name.
    Param,
    /// Computed by the node at this position.
    Node(usize),
}

/// Anything that flows along an edge.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Unique in the graph; for parameters, the name in the checkpoint.
    pub name: String,
    /// What is known about it.
    pub ty: TensorType,
    /// Where it comes from.
    pub kind: Kind,
}

/// One op at work.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// What it does.
    pub op: Op,
    /// What it reads.
    pub inputs: Vec<ValueId>,
    /// What it computes; its name is the node's name.
    pub output: ValueId,
}

/// A graph. Nodes stand in an order in which they can run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Graph {
    pub(super) values: Vec<Value>,
    pub(super) nodes: Vec<Node>,
    pub(super) outputs: Vec<(String, ValueId)>,
}

impl Graph {
    /// All values, by position.
    pub fn ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// All values, by position.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// All nodes, in an order in which they can run.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Results: their public names, and the values.
    pub fn outputs(&self) -> &[(String, ValueId)] {
        &self.outputs
    }

    /// Whether a value is a result.
    pub fn is_output(&self, id: ValueId) -> bool {
        self.outputs.iter().any(|(_, output)| *output == id)
    }

    /// For each value, by position, whether one of these is computed from it or is it.
    pub fn dependencies(&self, of: impl IntoIterator<Item = ValueId>) -> Vec<bool> {
        let mut needed = vec![false; self.values.len()];
        of.into_iter().for_each(|id| needed[id.index()] = true);
        for node in self.nodes.iter().rev() {
            if needed[node.output.index()] {
                node.inputs.iter().for_each(|id| needed[id.index()] = true);
            }
        }
        needed
    }

    /// Values given for each run.
    pub fn inputs(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.of_kind(Kind::Input)
    }

    /// Sizes for the open axes of the inputs, by name.
    pub fn bind(&self, size: impl Fn(&str) -> usize) -> Bindings {
        let dims = self.inputs().flat_map(|(_, value)| &value.ty.shape);
        dims.filter_map(|dim| if let Dim::Named(name) = dim { Some((name.clone(), size(name))) } else { None }).collect()
    }

    /// Tensors of the checkpoint.
    pub fn params(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.of_kind(Kind::Param)
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values.iter().enumerate().filter(move |(_, v)| v.kind == kind).map(|(i, v)| (ValueId(i as u32), v))
    }

    /// Types of a node's inputs.
    pub fn input_types(&self, node: &Node) -> Vec<&TensorType> {
        node.inputs.iter().map(|id| &self.value(*id).ty).collect()
    }
}
