//! Renaming of values in nodes and their bodies.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check;
use super::proto::{GraphProto, NodeProto};

/// New names by old name.
pub(super) type NameMap = BTreeMap<String, String>;

/// Renames values that a body defines if an enclosing graph has a value of the same name. Weights of a
/// subgraph are its inputs, which ONNX Runtime confuses with constants of the same name in bodies.
pub(super) fn rename_shadowing(node: &mut NodeProto, enclosing: &BTreeSet<String>) {
    for body in bodies_mut(node) {
        let mut taken = enclosing.clone();
        check::names(body, &mut taken);
        let shadowing: BTreeSet<String> = check::defined_names(body).filter(|name| !name.is_empty() && enclosing.contains(*name)).map(str::to_owned).collect();
        let names = shadowing.into_iter().map(|name| (name.clone(), super::fresh(&mut taken, name))).collect();
        rename_defined(&names, body);
        let mut enclosing = enclosing.clone();
        enclosing.extend(check::defined_names(body).map(str::to_owned));
        body.node.iter_mut().for_each(|node| rename_shadowing(node, &enclosing));
    }
}

/// Renames values that a body defines, and all their uses.
fn rename_defined(names: &NameMap, body: &mut GraphProto) {
    if names.is_empty() {
        return;
    }
    let sparse = body.sparse_initializer.iter_mut().filter_map(|tensor| tensor.values.as_mut());
    rename(names, body.initializer.iter_mut().chain(sparse).filter_map(|tensor| tensor.name.as_mut()));
    let ports = body.input.iter_mut().chain(&mut body.output).chain(&mut body.value_info);
    rename(names, ports.filter_map(|port| port.name.as_mut()));
    body.node.iter_mut().for_each(|node| rename_node(names, node));
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

fn bodies_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs))
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

    /// The inner body reads `w` of the outer body, and defines a value with the name of a graph value.
    #[test]
    fn values_of_bodies_do_not_shadow_those_of_the_graph() {
        let inner = |w: &str, x: &str| body(node(&[w, "y"], x, None), &[], x);
        let outer = |w: &str, x: &str| node(&["c"], "z", Some(body(node(&[w], "t", Some(inner(w, x))), &[w], "t")));
        let mut found = outer("w", "x");
        rename_shadowing(&mut found, &["w", "x", "y"].map(str::to_owned).into());
        assert_eq!(found, outer("w_1", "x_1"));
    }
}
