//! `graph.json`: a graph of a model that `config.json` cannot describe, short enough to be written by
//! hand.
//!
//! ```json
//! {
//!   "inputs": { "x": { "element": "float", "shape": ["batch", 4] } },
//!   "nodes": [
//!     { "name": "fc", "op": "Linear", "inputs": ["x", "fc.weight", "fc.bias"] },
//!     { "name": "act", "op": { "Clip": { "min": 0, "max": 6 } }, "inputs": ["fc"] }
//!   ],
//!   "outputs": { "logits": "act" }
//! }
//! ```
//!
//! A node input that names neither a graph input nor an earlier node is a tensor of the checkpoint. Sizes
//! are numbers or names. Ops without attributes, or with all attributes at their defaults, are plain
//! names.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::graph::{Graph, Kind};
use super::tensor_type::TensorType;
use super::{Builder, Catalog, Op};
use crate::error::{Error, Result};
use crate::files;

/// Contents of `graph.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphFile {
    inputs: Map<String, Json>,
    nodes: Vec<NodeFile>,
    outputs: Map<String, Json>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeFile {
    name: String,
    op: Op,
    inputs: Vec<String>,
}

impl GraphFile {
    /// Name of the file in a model folder.
    pub const NAME: &'static str = "graph.json";

    /// Reads `graph.json`.
    pub fn open(path: &Path) -> Result<GraphFile> {
        let text = files::read_to_string(path).map_err(Error::io("read", path))?;
        serde_json::from_str(&text).map_err(|e| Error::malformed(path, e))
    }

    /// Copies the functions of opaque nodes, which JSON does not contain, from the original graph. Fails if
    /// the original graph cannot be built, or does not identify each opaque node uniquely.
    pub fn with_functions(mut self, original: &dyn Fn() -> Result<Graph>) -> Result<GraphFile> {
        if !self.nodes.iter().any(|node| matches!(node.op, Op::Opaque(_))) {
            return Ok(self);
        }
        let original = GraphFile::from(&original()?);
        for node in &mut self.nodes {
            let Op::Opaque(op) = &mut node.op else { continue };
            let equal = |found: &'_ &NodeFile| matches!(&found.op, Op::Opaque(other) if other.is_same_subgraph(op));
            let candidates: Vec<&NodeFile> = original.nodes.iter().filter(equal).collect();
            let named = candidates.iter().find(|found| found.name == node.name).copied();
            let only = if let [only] = candidates.as_slice() { Some(*only) } else { None };
            let Some(NodeFile { op: Op::Opaque(found), .. }) = named.or(only) else {
                return Err(Error::graph(format!("{}, node `{}`", Self::NAME, node.name), "the original graph does not contain exactly one such node"));
            };
            let restored = found.clone().with_quantizers(std::mem::take(&mut op.quantizers));
            *op = restored.map_err(|reason| Error::graph(format!("{}, node `{}`", Self::NAME, node.name), reason))?;
        }
        Ok(self)
    }

    /// Adds nodes after all others: name, op and names of the inputs.
    #[must_use]
    pub fn extended(mut self, nodes: impl IntoIterator<Item = (String, Op, Vec<String>)>) -> GraphFile {
        self.nodes.extend(nodes.into_iter().map(|(name, op, inputs)| NodeFile { name, op, inputs }));
        self
    }

    /// Removes the nodes selected by `drops` and maps all remaining names with `refer`.
    #[must_use]
    pub fn edited(self, drops: &dyn Fn(&str) -> bool, refer: &dyn Fn(&str) -> String) -> GraphFile {
        let node = |node: NodeFile| NodeFile { name: refer(&node.name), op: node.op, inputs: node.inputs.iter().map(|name| refer(name)).collect() };
        let output = |(name, value): (String, Json)| (name, value.as_str().map_or(Json::Null, |value| Json::String(refer(value))));
        GraphFile {
            inputs: self.inputs,
            nodes: self.nodes.into_iter().filter(|node| !drops(&node.name)).map(node).collect(),
            outputs: self.outputs.into_iter().map(output).collect(),
        }
    }

    /// Builds the graph over the tensors of a checkpoint.
    pub fn build(&self, catalog: &dyn Catalog) -> Result<Graph> {
        let mut builder = Builder::new(catalog);
        for (name, ty) in &self.inputs {
            let ty: TensorType = serde_json::from_value(ty.clone()).map_err(|e| Error::graph(format!("{}, input `{name}`", Self::NAME), e))?;
            builder.input(name, ty)?;
        }
        for node in &self.nodes {
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for name in &node.inputs {
                inputs.push(match (builder.find(name), catalog.shape(name)) {
                    (Some(id), _) => id,
                    (None, Some(shape)) => builder.param(name, &shape)?,
                    (None, None) => {
                        let near = catalog.nearest(name).map_or(String::new(), |n| format!("; the nearest tensor is `{n}`"));
                        return Err(Error::graph(
                            format!("{}, node `{}`", Self::NAME, node.name),
                            format!("`{name}` is neither a graph input, an earlier node nor a tensor of the checkpoint{near}"),
                        ));
                    }
                });
            }
            builder.node(&node.name, node.op.clone(), &inputs)?;
        }
        for (name, value) in &self.outputs {
            if name.is_empty() {
                return Err(Error::graph(Self::NAME, "an output has no name"));
            }
            let id = value
                .as_str()
                .and_then(|value| builder.find(value))
                .ok_or_else(|| Error::graph(format!("{}, output `{name}`", Self::NAME), format!("{value} is not a value of the graph")))?;
            builder.output(name, id);
        }
        builder.finish()
    }
}

impl From<&Graph> for GraphFile {
    fn from(graph: &Graph) -> GraphFile {
        let name = |id: &super::ValueId| graph.value(*id).name.clone();
        let inputs = graph.values().iter().filter(|v| v.kind == Kind::Input).map(|v| (v.name.clone(), serde_json::to_value(&v.ty).unwrap_or(Json::Null)));
        GraphFile {
            inputs: inputs.collect(),
            nodes: graph.nodes().iter().map(|n| NodeFile { name: name(&n.output), op: n.op.clone(), inputs: n.inputs.iter().map(name).collect() }).collect(),
            outputs: graph.outputs().iter().map(|(public, id)| (public.clone(), Json::String(name(id)))).collect(),
        }
    }
}
