//! Consistency check of a graph.

use std::collections::BTreeSet;

use super::graph::{Graph, Kind};
use crate::error::{Error, Result};

/// Infers every type again and checks names, order and wiring. Meant to be called after every edit of a
/// graph. The error names the first inconsistent node.
pub fn check(graph: &Graph) -> Result<()> {
    let invalid = |name: &str, reason: String| Err(Error::graph(format!("graph value `{name}`"), reason));
    let mut names = BTreeSet::new();
    for value in graph.values() {
        if !names.insert(&value.name) {
            return invalid(&value.name, "its name is not unique".into());
        }
    }
    for (index, node) in graph.nodes().iter().enumerate() {
        let output = graph.value(node.output);
        if output.kind != Kind::Node(index) {
            return invalid(&output.name, format!("belongs to {:?}, not to node {index}", output.kind));
        }
        for input in &node.inputs {
            let value = graph.value(*input);
            if matches!(value.kind, Kind::Node(at) if at >= index) {
                return invalid(&output.name, format!("reads `{}`, which is computed later", value.name));
            }
        }
        match node.op.spec().output(&graph.input_types(node)) {
            Ok(ty) if ty == output.ty => {}
            Ok(ty) => return invalid(&output.name, format!("has type {}, but {ty} follows from its inputs", output.ty)),
            Err(reason) => return invalid(&output.name, reason),
        }
    }
    if graph.outputs().is_empty() {
        return invalid("", "the graph has no outputs".into());
    }
    Ok(())
}
