//! Values, nodes and the graph that contains them.

use super::{Bindings, Dim, Op, TensorType};

/// A value of a graph, by its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub(super) u32);

impl ValueId {
    /// Position among the graph's values.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// How a value is produced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Input of the graph, provided for each run.
    Input,
    /// A tensor of the checkpoint, by the value's name.
    Param,
    /// Computed by the node at this position.
    Node(usize),
}

/// Input, parameter or result of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Unique in the graph; for parameters, the name in the checkpoint.
    pub name: String,
    /// Element type and shape.
    pub ty: TensorType,
    /// How it is produced.
    pub kind: Kind,
}

/// One application of an op.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The op.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<ValueId>,
    /// Its result; the name of this value is also the name of the node.
    pub output: ValueId,
}

/// A graph. Nodes are in topological order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Graph {
    pub(super) values: Vec<Value>,
    pub(super) nodes: Vec<Node>,
    pub(super) outputs: Vec<(String, ValueId)>,
}

impl Graph {
    /// Ids of all values, in order.
    pub fn ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// All values, indexed by id.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The node that computes a value; `None` for inputs and parameters.
    pub fn producer(&self, id: ValueId) -> Option<&Node> {
        if let Kind::Node(index) = self.value(id).kind { self.nodes.get(index) } else { None }
    }

    /// Whether a value is the mask of attention within chunks.
    pub fn is_chunk_mask(&self, id: ValueId) -> bool {
        self.producer(id).is_some_and(|node| matches!(node.op, Op::ChunkBias(_)))
    }

    /// All nodes, in topological order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Outputs: public names and values.
    pub fn outputs(&self) -> &[(String, ValueId)] {
        &self.outputs
    }

    /// Whether a value is an output of the graph.
    pub fn is_output(&self, id: ValueId) -> bool {
        self.outputs.iter().any(|(_, output)| *output == id)
    }

    /// Removes the output with this name.
    pub fn remove_output(&mut self, name: &str) {
        self.outputs.retain(|(output, _)| output != name);
    }

    /// For each value, indexed by id, whether one of the values in `of` depends on it or is it.
    pub fn dependencies(&self, of: impl IntoIterator<Item = ValueId>) -> Vec<bool> {
        self.dependencies_after(of, &[])
    }

    /// [`dependencies`](Graph::dependencies), without those of the values in `given`.
    pub fn dependencies_after(&self, of: impl IntoIterator<Item = ValueId>, given: &[ValueId]) -> Vec<bool> {
        let mut needed = vec![false; self.values.len()];
        of.into_iter().for_each(|id| needed[id.index()] = true);
        for node in self.nodes.iter().rev() {
            if needed[node.output.index()] && !given.contains(&node.output) {
                node.inputs.iter().for_each(|id| needed[id.index()] = true);
            }
        }
        needed
    }

    /// The token of a patch of an image in texts, and the number of patches.
    pub fn image_patches(&self) -> Option<(i64, usize)> {
        self.nodes.iter().find_map(|node| match (&node.op, node.inputs.as_slice()) {
            (Op::InsertImages(op), [_, _, features]) => Some((op.token, self.value(*features).ty.shape.get(1)?.fixed()?)),
            _ => None,
        })
    }

    /// For each value, whether it is computed for the features of images in texts, by a vision tower.
    pub fn of_images(&self) -> Vec<bool> {
        let inserts = self.nodes.iter().filter(|node| matches!(node.op, Op::InsertImages(_)));
        self.dependencies(inserts.filter_map(|node| node.inputs.get(2).copied()))
    }

    /// Inputs of the graph.
    pub fn inputs(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.of_kind(Kind::Input)
    }

    /// Binds each named size of the inputs to `size(name)`.
    pub fn bind(&self, size: impl Fn(&str) -> usize) -> Bindings {
        let dims = self.inputs().flat_map(|(_, value)| &value.ty.shape);
        dims.filter_map(|dim| if let Dim::Named(name) = dim { Some((name.clone(), size(name))) } else { None }).collect()
    }

    /// Parameters: tensors of the checkpoint.
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
