//! What a model file must keep for anything else to be said about it.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::proto::{FunctionProto, GraphProto, ModelProto, NodeProto};

/// The newest set of ONNX's own operators that is known here.
pub const NEWEST: i64 = 28;

/// Holds a model to what runtimes need: versions, a graph, names that are given once and before they are read, and no cycle.
///
/// # Errors
/// What is not so, by the name of the node or value.
pub(super) fn check(model: &ModelProto) -> Result<(), String> {
    if model.ir_version.is_none() {
        return Err("it does not say the version of its format (`ir_version`): not an ONNX model, or truncated".into());
    }
    let top = model.graph.as_ref().ok_or("it has no graph: not an ONNX model, or truncated")?;
    let opset = opset(model).ok_or("it does not say which set of operators it uses (`opset_import`)")?;
    if !(1..=NEWEST).contains(&opset) {
        return Err(format!("it uses opset {opset}, and 1 to {NEWEST} are known: write it with an older opset, or use a newer compress"));
    }
    graph(top, &BTreeSet::new()).map_err(|reason| format!("graph `{}`: {reason}", top.name()))?;
    model.functions.iter().try_for_each(|of| function(of).map_err(|reason| format!("function `{}`: {reason}", of.name())))
}

/// Whether a domain is that of ONNX's own operators, which has two names.
pub(super) fn is_own(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

/// The version of ONNX's own operators.
pub(super) fn opset(model: &ModelProto) -> Option<i64> {
    let mut imports = model.opset_import.iter();
    match imports.clone().find(|import| is_own(import.domain())) {
        Some(import) => Some(import.version()),
        // A model of operators of other domains alone uses none of ONNX's.
        None => imports.next().map(|_| 1),
    }
}

/// A node as a person finds it: by its name, else by what it computes.
pub(super) fn label(node: &NodeProto) -> String {
    let name = node.name.as_deref().filter(|name| !name.is_empty()).or_else(|| node.output.first().map(String::as_str)).unwrap_or("");
    format!("node `{name}` ({})", node.op_type())
}

/// The bodies of a node.
pub(super) fn bodies(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs))
}

/// Names that a graph gives to values by itself.
fn given(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
    graph.initializer.iter().chain(sparse).map(|tensor| tensor.name())
}

/// Names that a graph gives to its values, those of its bodies left out.
pub(super) fn own_names(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let computed = graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str));
    graph.input.iter().map(|input| input.name()).chain(given(graph)).chain(computed)
}

/// How often each name is given, in a graph and its bodies. A body may give a name that stands for something else around it.
pub(super) fn given_times<'g>(graph: &'g GraphProto, times: &mut BTreeMap<&'g str, usize>) {
    for name in own_names(graph) {
        let times = times.entry(name).or_default();
        *times = times.saturating_add(1);
    }
    graph.node.iter().flat_map(bodies).for_each(|body| given_times(body, times));
}

/// Every name in a graph and its bodies.
pub(super) fn names(graph: &GraphProto, found: &mut BTreeSet<String>) {
    let ports = graph.input.iter().chain(&graph.output).map(|port| port.name());
    let values = graph.node.iter().flat_map(|node| node.input.iter().chain(&node.output).chain(&node.name)).map(String::as_str);
    found.extend(ports.chain(given(graph)).chain(values).map(str::to_owned));
    graph.node.iter().flat_map(bodies).for_each(|body| names(body, found));
}

/// Names that a node reads, those that its bodies take from around it among them.
pub(super) fn reads(node: &NodeProto) -> BTreeSet<&str> {
    let mut names: BTreeSet<&str> = node.input.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    for body in bodies(node) {
        let own: BTreeSet<&str> = own_names(body).collect();
        let taken = body.node.iter().flat_map(reads).chain(body.output.iter().map(|output| output.name()));
        names.extend(taken.filter(|name| !own.contains(name)));
    }
    names
}

fn graph(graph: &GraphProto, around: &BTreeSet<&str>) -> Result<(), String> {
    let mut initializers = BTreeSet::new();
    for name in given(graph) {
        if name.is_empty() {
            return Err("an initializer has no name".into());
        }
        if !initializers.insert(name) {
            return Err(format!("two initializers are named `{name}`"));
        }
    }
    let mut inputs = BTreeSet::new();
    for input in &graph.input {
        if !inputs.insert(input.name()) {
            return Err(format!("two inputs are named `{}`", input.name()));
        }
    }
    let visible: BTreeSet<&str> = initializers.union(&inputs).copied().collect();
    nodes(&graph.node, &visible, around, graph.output.iter().map(|output| output.name()))
}

fn function(function: &FunctionProto) -> Result<(), String> {
    let inputs = function.input.iter().map(String::as_str).collect();
    nodes(&function.node, &inputs, &BTreeSet::new(), function.output.iter().map(String::as_str))
}

/// Positions of nodes in an order in which they can run: that of the file, but that a node stands behind those whose values it reads. Nodes
/// that wait for themselves are left out.
pub(super) fn order(nodes: &[NodeProto]) -> Vec<usize> {
    let outputs = nodes.iter().enumerate().flat_map(|(number, node)| node.output.iter().map(move |output| (output.as_str(), number)));
    let makers: BTreeMap<&str, usize> = outputs.collect();
    // How many nodes each still waits for, and who waits for it.
    let (mut waits, mut readers) = (vec![0usize; nodes.len()], vec![Vec::new(); nodes.len()]);
    for ((number, node), waits) in nodes.iter().enumerate().zip(&mut waits) {
        for maker in reads(node).into_iter().filter_map(|name| makers.get(name)) {
            *waits = waits.saturating_add(1);
            readers.get_mut(*maker).into_iter().for_each(|readers| readers.push(number));
        }
    }
    let mut ready: BTreeSet<usize> = waits.iter().enumerate().filter(|(_, waits)| **waits == 0).map(|(number, _)| number).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(number) = ready.pop_first() {
        order.push(number);
        for reader in readers.get(number).into_iter().flatten() {
            if let Some(left) = waits.get_mut(*reader) {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    ready.insert(*reader);
                }
            }
        }
    }
    order
}

/// Holds nodes to names: `first` are there from the beginning, `around` outside.
fn nodes<'g>(nodes: &'g [NodeProto], first: &BTreeSet<&'g str>, around: &BTreeSet<&'g str>, outputs: impl Iterator<Item = &'g str>) -> Result<(), String> {
    let mut makers: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, node) in nodes.iter().enumerate() {
        if node.op_type().is_empty() {
            return Err(format!("node `{}` does not say what it computes", node.name()));
        }
        for output in node.output.iter().map(String::as_str).filter(|output| !output.is_empty()) {
            if first.contains(output) || makers.insert(output, number).is_some() {
                return Err(format!("{} computes `{output}`, which is there already", label(node)));
            }
        }
    }
    let is_there = |name: &str| makers.contains_key(name) || first.contains(name) || around.contains(name);
    for node in nodes {
        if let Some(name) = reads(node).into_iter().find(|name| !is_there(name)) {
            return Err(format!("{} reads `{name}`, which is no input, no initializer and computed by no node", label(node)));
        }
    }
    if let Some(name) = outputs.into_iter().find(|name| !is_there(name)) {
        return Err(format!("output `{name}` is computed by no node"));
    }
    let done: BTreeSet<usize> = order(nodes).into_iter().collect();
    if let Some((_, stuck)) = nodes.iter().enumerate().find(|(number, _)| !done.contains(number)) {
        return Err(format!("{} waits for what it computes itself: the graph is a circle", label(stuck)));
    }
    let visible: BTreeSet<&str> = around.iter().chain(first).copied().chain(makers.keys().copied()).collect();
    let inner = |node: &'g NodeProto| bodies(node).try_for_each(|body| graph(body, &visible).map_err(|reason| format!("body of {}: {reason}", label(node))));
    nodes.iter().try_for_each(inner)
}

#[cfg(test)]
mod tests {
    use super::super::proto::{AttributeProto, OperatorSetIdProto, TensorProto, ValueInfoProto};
    use super::*;

    fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), input: names(inputs), output: names(outputs), ..NodeProto::default() }
    }

    fn value(name: &str) -> ValueInfoProto {
        ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() }
    }

    fn model(nodes: Vec<NodeProto>) -> ModelProto {
        let weight = TensorProto { name: Some("w".into()), ..TensorProto::default() };
        let graph = GraphProto { node: nodes, input: vec![value("x")], output: vec![value("y")], initializer: vec![weight], ..GraphProto::default() };
        let import = OperatorSetIdProto { version: Some(17), ..OperatorSetIdProto::default() };
        ModelProto { ir_version: Some(8), graph: Some(graph), opset_import: vec![import], ..ModelProto::default() }
    }

    fn branch(inner: NodeProto) -> NodeProto {
        let body = GraphProto { output: vec![value(&inner.output[0])], node: vec![inner], ..GraphProto::default() };
        let attribute = AttributeProto { g: Some(body), ..AttributeProto::int("then_branch", 0) };
        NodeProto { attribute: vec![attribute], ..node("If", &["x"], &["y"]) }
    }

    #[test]
    fn order_does_not_matter_and_bodies_see_what_is_around_them() {
        let any = model(vec![node("Relu", &["a"], &["y"]), node("MatMul", &["x", "w"], &["a"])]);
        assert_eq!(check(&any), Ok(()));
        let inner = branch(node("Mul", &["a", "w"], &["b"]));
        assert_eq!(reads(&inner).into_iter().collect::<Vec<_>>(), ["a", "w", "x"]);
        assert_eq!(check(&model(vec![inner, node("Relu", &["x"], &["a"])])), Ok(()));
    }

    #[test]
    fn what_does_not_hold_together_is_named() {
        let said = |nodes: Vec<NodeProto>| check(&model(nodes)).unwrap_err();
        let relu = || node("Relu", &["x"], &["y"]);
        assert!(said(vec![node("Relu", &["z"], &["y"])]).contains("node `y` (Relu) reads `z`"));
        assert!(said(vec![relu(), relu()]).contains("computes `y`, which is there already"));
        assert!(said(vec![node("Relu", &["x"], &["w"]), relu()]).contains("`w`"));
        assert!(said(vec![node("Relu", &["b"], &["a"]), node("Relu", &["a"], &["b"]), relu()]).contains("circle"));
        assert!(said(vec![]).contains("output `y`"));
        assert!(said(vec![branch(node("Relu", &["z"], &["b"]))]).contains("node `y` (If) reads `z`"));
        assert!(said(vec![branch(node("", &["x"], &["b"]))]).contains("body of node `y` (If): node `` does not say"));
        assert!(said(vec![branch(node("Relu", &["y"], &["b"]))]).contains("circle"));
        assert!(said(vec![node("", &["x"], &["y"])]).contains("does not say"));
        let change = |change: &dyn Fn(&mut ModelProto)| {
            let mut model = model(vec![relu()]);
            change(&mut model);
            check(&model).unwrap_err()
        };
        assert!(change(&|model| model.opset_import[0].version = Some(NEWEST + 1)).contains("opset 29"));
        assert!(change(&|model| model.opset_import.clear()).contains("opset_import"));
        assert!(change(&|model| model.ir_version = None).contains("ir_version"));
        assert!(change(&|model| model.graph = None).contains("no graph"));
        assert!(change(&|model| model.graph.as_mut().unwrap().input.push(value("x"))).contains("two inputs"));
        assert!(
            change(&|model| model.graph.as_mut().unwrap().initializer.push(TensorProto { name: Some("w".into()), ..TensorProto::default() }))
                .contains("two initializers")
        );
    }
}
