//! Names of values in nodes and their bodies.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::{self, bodies, bodies_mut};
use super::proto::{GraphProto, NodeProto};

/// New names by old name.
pub(super) type NameMap = BTreeMap<String, String>;

/// A name that one body of a node defines and another one, or a body within it, reads from the enclosing
/// graph.
///
/// ONNX requires that names of bodies differ from visible names of enclosing graphs (IR specification, "Names
/// Within a Graph"). ONNX Runtime 1.31 reads the outer value in both bodies, or none.
pub(super) fn shadowed(node: &NodeProto) -> Option<String> {
    let read = check::reads(node);
    let mut defined = Vec::new();
    let mut stack: Vec<&GraphProto> = bodies(node).collect();
    while let Some(body) = stack.pop() {
        defined.extend(check::defined_names(body));
        stack.extend(body.node.iter().flat_map(bodies));
    }
    defined.into_iter().find(|name| !name.is_empty() && read.contains(name)).map(str::to_owned)
}

/// Renames names that are in the map.
pub(super) fn rename<'n>(names: &NameMap, of: impl Iterator<Item = &'n mut String>) {
    of.for_each(|name| names.get(name).into_iter().for_each(|new| name.clone_from(new)));
}

/// Renames inputs and outputs of a node, and what its bodies read.
pub(super) fn rename_node(names: &NameMap, node: &mut NodeProto) {
    rename(names, node.input.iter_mut().chain(&mut node.output));
    bodies_mut(node).for_each(|body| rename_body(names, body));
}

/// Names that a body defines shadow those of the enclosing graph.
fn rename_body(names: &NameMap, body: &mut GraphProto) {
    let own: BTreeSet<&str> = check::defined_names(body).collect();
    let names = &names.iter().filter(|(name, _)| !own.contains(name.as_str())).map(|(name, new)| (name.clone(), new.clone())).collect();
    body.node.iter_mut().for_each(|node| rename_node(names, node));
    rename(names, body.output.iter_mut().filter_map(|output| output.name.as_mut()));
}

#[cfg(test)]
mod tests {
    use super::super::proto::{AttributeProto, TensorProto, ValueInfoProto};
    use super::*;

    fn node(inputs: &[&str], output: &str, body: Option<GraphProto>) -> NodeProto {
        let attribute = body.into_iter().map(|body| AttributeProto { g: Some(body), ..AttributeProto::default() }).collect();
        NodeProto { input: inputs.iter().map(|name| (*name).to_owned()).collect(), output: vec![output.to_owned()], attribute, ..NodeProto::default() }
    }

    fn body(node: NodeProto, initializers: &[&str], output: &str) -> GraphProto {
        let initializer = initializers.iter().map(|name| TensorProto { name: Some((*name).to_owned()), ..TensorProto::default() }).collect();
        let output = vec![ValueInfoProto { name: Some(output.to_owned()), ..ValueInfoProto::default() }];
        GraphProto { node: vec![node], initializer, output, ..GraphProto::default() }
    }

    /// Names that a body defines are found if another body or an input of the node means an outer value.
    #[test]
    fn names_with_two_meanings_are_found() {
        let own = || body(node(&["w"], "t", None), &["w"], "t");
        let outer = |name: &str| body(node(&[name], "e", None), &[], "e");
        let both = |bodies: Vec<GraphProto>| {
            let attribute = bodies.into_iter().map(|body| AttributeProto { g: Some(body), ..AttributeProto::default() }).collect();
            NodeProto { attribute, ..node(&["c"], "t", None) }
        };
        assert_eq!(shadowed(&both(vec![own(), outer("v")])), None);
        assert_eq!(shadowed(&both(vec![own(), outer("w")])).as_deref(), Some("w"));
        assert_eq!(shadowed(&both(vec![outer("w"), own()])).as_deref(), Some("w"));
        let nested = |name: &str| body(node(&["x"], "n", Some(own())), &[], name);
        assert_eq!(shadowed(&both(vec![nested("n"), outer("w")])).as_deref(), Some("w"));
        assert_eq!(shadowed(&both(vec![nested("n"), outer("v")])), None);
    }
}
