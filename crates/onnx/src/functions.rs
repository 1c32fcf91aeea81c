//! Calls of functions that a file defines, replaced by the nodes of the functions.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::{self, bodies_mut, is_own};
use super::fresh;
use super::inlining::{Key, check_functions};
use super::proto::{AttributeProto, FunctionProto, ModelProto, NodeProto};
use super::renaming::{NameMap, rename_node};
use super::upgrade::upgrade;

/// Maximum depth of calls within bodies of control flow operators, which are replaced recursively.
const MAX_DEPTH: usize = 32;

/// The nodes of the graph of a model, with calls of functions replaced. Calls of functions with a [`refusal`]
/// remain. Fails if the number of nodes exceeds the limit of [`check_functions`].
pub(super) fn inlined(model: &ModelProto) -> Result<Vec<NodeProto>, String> {
    let Some(graph) = &model.graph else { return Ok(Vec::new()) };
    if model.functions.is_empty() {
        return Ok(graph.node.clone());
    }
    check_functions(model)?;
    let opset = check::opset(model).unwrap_or(1);
    let functions = model.functions.iter().filter(|function| refusal(function, opset).is_none());
    let functions = functions.map(|function| ((function.domain(), function.name(), function.overload()), function));
    let mut used_names = BTreeSet::new();
    check::names(graph, &mut used_names);
    let mut inliner = Inliner { functions: functions.collect(), used_names };
    Ok(inliner.expand(graph.node.clone(), 0))
}

/// The reason why calls of a function are not replaced: a node has another meaning in the version of the
/// standard operators that the function specifies than in that of the model, which ONNX Runtime uses.
pub(super) fn refusal(function: &FunctionProto, opset: i64) -> Option<String> {
    let import = function.opset_import.iter().find(|import| is_own(import.domain()));
    let version = import.map_or(opset, |import| import.version());
    let (older, newer) = (version.min(opset), version.max(opset));
    let is_same = |node: &NodeProto| upgrade(node.clone(), older, newer, &mut str::to_owned).is_ok_and(|nodes| nodes == [node.clone()]);
    let other = function.node.iter().find(|node| !is_same(node))?;
    Some(format!("{} in the function has opset {version}, and another meaning in opset {opset} of the graph", check::label(other)))
}

struct Inliner<'m> {
    functions: BTreeMap<Key<'m>, &'m FunctionProto>,
    /// All names of values.
    used_names: BTreeSet<String>,
}

impl<'m> Inliner<'m> {
    /// Replaces all calls in a list of nodes.
    fn expand(&mut self, nodes: Vec<NodeProto>, depth: usize) -> Vec<NodeProto> {
        let (mut expanded, mut open) = (Vec::with_capacity(nodes.len()), nodes);
        open.reverse();
        while let Some(mut node) = open.pop() {
            if let Some(function) = self.functions.get(&(node.domain(), node.op_type(), node.overload())).copied() {
                open.extend(self.instantiate(&node, function).into_iter().rev());
                continue;
            }
            if depth < MAX_DEPTH {
                for body in bodies_mut(&mut node) {
                    body.node = self.expand(std::mem::take(&mut body.node), depth.saturating_add(1));
                }
            }
            expanded.push(node);
        }
        expanded
    }

    /// The nodes of a function with the values and attributes of a call.
    fn instantiate(&mut self, call: &NodeProto, function: &FunctionProto) -> Vec<NodeProto> {
        let own = call.name.as_deref().filter(|name| !name.is_empty()).or_else(|| call.output.first().map(String::as_str)).unwrap_or("call").to_owned();
        let given = |values: &[String], at: usize| values.get(at).cloned().unwrap_or_default();
        let mut names: NameMap = function.input.iter().enumerate().map(|(at, name)| (name.clone(), given(&call.input, at))).collect();
        let mut copies = Vec::new();
        for (at, name) in function.output.iter().enumerate() {
            let output = given(&call.output, at);
            match names.get(name).cloned() {
                // The function returns one of its inputs, or a value twice.
                Some(source) if !output.is_empty() => {
                    copies.push(NodeProto { op_type: Some("Identity".into()), input: vec![source], output: vec![output], ..NodeProto::default() })
                }
                None if !output.is_empty() => drop(names.insert(name.clone(), output)),
                _ => {}
            }
        }
        for name in function.node.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty()) {
            if !names.contains_key(name) {
                names.insert(name.clone(), fresh(&mut self.used_names, format!("{own}/{name}")));
            }
        }
        let mut nodes = function.node.clone();
        for node in &mut nodes {
            rename_node(&names, node);
            substitute(node, &call.attribute, &function.attribute_proto);
            node.name = node.name.take().filter(|name| !name.is_empty()).map(|name| format!("{own}/{name}"));
        }
        nodes.extend(copies);
        nodes
    }
}

/// Replaces attributes that refer to those of the call, or to their default values, also in bodies.
/// Attributes that neither specifies are omitted.
fn substitute(node: &mut NodeProto, of_call: &[AttributeProto], defaults: &[AttributeProto]) {
    let value = |name: &str| of_call.iter().chain(defaults).find(|attribute| attribute.name() == name);
    let attributes = std::mem::take(&mut node.attribute).into_iter().filter_map(|attribute| match attribute.ref_attr_name.as_deref() {
        Some(reference) if !reference.is_empty() => value(reference).map(|found| AttributeProto { name: attribute.name, ..found.clone() }),
        _ => Some(attribute),
    });
    node.attribute = attributes.collect();
    for body in bodies_mut(node) {
        body.node.iter_mut().for_each(|node| substitute(node, of_call, defaults));
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{GraphProto, OperatorSetIdProto};
    use super::*;

    fn node(op: &str, domain: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), domain: Some(domain.into()), input: names(inputs), output: names(outputs), ..NodeProto::default() }
    }

    /// A model that calls a function with two outputs, the first of which is the input.
    fn model(opset: i64) -> ModelProto {
        let import = |version| vec![OperatorSetIdProto { domain: None, version: Some(version) }];
        let function = FunctionProto {
            name: Some("Both".into()),
            domain: Some("f".into()),
            input: vec!["a".into()],
            output: vec!["a".into(), "b".into()],
            node: vec![node("Neg", "", &["a"], &["t"]), node("Relu", "", &["t"], &["b"])],
            opset_import: import(opset),
            ..FunctionProto::default()
        };
        let graph = GraphProto { node: vec![node("Both", "f", &["x"], &["y", "z"]), node("Neg", "", &["z"], &["y/t"])], ..GraphProto::default() };
        ModelProto { graph: Some(graph), functions: vec![function], opset_import: import(13), ..ModelProto::default() }
    }

    #[test]
    fn calls_become_nodes_with_fresh_names() {
        let nodes = inlined(&model(13)).unwrap();
        let found: Vec<String> = nodes.iter().map(|node| format!("{} {:?} {:?}", node.op_type(), node.input, node.output)).collect();
        let expected = [r#"Neg ["x"] ["y/t_2"]"#, r#"Relu ["y/t_2"] ["z"]"#, r#"Identity ["x"] ["y"]"#, r#"Neg ["z"] ["y/t"]"#];
        assert_eq!(found, expected);
        // The operators have the same meaning in other versions.
        for opset in [12, 14] {
            assert_eq!(inlined(&model(opset)).unwrap(), nodes, "{opset}");
        }
    }

    #[test]
    fn functions_whose_operators_have_another_meaning_are_not_inlined() {
        for (op, opset) in [("Softmax", 11), ("Upsample", 9), ("Relu", 6)] {
            let mut model = model(opset);
            model.functions[0].node[1].op_type = Some(op.into());
            assert_eq!(inlined(&model).unwrap(), model.graph.clone().unwrap().node, "{op}");
            let reason = refusal(&model.functions[0], 13).unwrap();
            assert!(reason.contains(&format!("has opset {opset}, and another meaning in opset 13 of the graph")), "{reason}");
        }
    }
}
