//! The executable specification of a graph.

use std::collections::BTreeSet;

use super::graph::{Graph, Kind};
use crate::error::{Error, Result};

/// Infers every type again and holds the wiring to its rules. Meant to be run after anything that edits a graph.
///
/// # Errors
/// The first node that is not as it should be.
pub fn check(graph: &Graph) -> Result<()> {
    let wrong = |name: &str, reason: String| Err(Error::graph(format!("graph value `{name}`"), reason));
    let mut names = BTreeSet::new();
    for value in graph.values() {
        if !names.insert(&value.name) {
            return wrong(&value.name, "its name is not unique".into());
        }
    }
    for (index, node) in graph.nodes().iter().enumerate() {
        let output = graph.value(node.output);
        if output.kind != Kind::Node(index) {
            return wrong(&output.name, format!("belongs to {:?}, not to node {index}", output.kind));
        }
        for input in &node.inputs {
            let value = graph.value(*input);
            if matches!(value.kind, Kind::Node(at) if at >= index) {
                return wrong(&output.name, format!("reads `{}`, which is computed later", value.name));
            }
        }
        match node.op.spec().output(&graph.input_types(node)) {
            Ok(ty) if ty == output.ty => {}
            Ok(ty) => return wrong(&output.name, format!("is {} where {ty} follows from its inputs", output.ty)),
            Err(reason) => return wrong(&output.name, reason),
        }
    }
    if graph.outputs().is_empty() {
        return wrong("", "there are no outputs".into());
    }
    Ok(())
}
