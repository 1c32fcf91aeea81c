//! Validation of an opened model: versions, names and topological order.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::proto::{FunctionProto, GraphProto, ModelProto, NodeProto};

/// The newest supported version of the standard operator set.
pub const NEWEST_OPSET: i64 = 28;

/// Validates a model: its structure, and the names of its initializers. The error names the node or value.
pub(super) fn check(model: &ModelProto) -> Result<(), String> {
    structure(model)?;
    let of_functions = model.functions.iter().flat_map(|function| &function.node).flat_map(bodies);
    model.graph.iter().chain(of_functions).try_for_each(|graph| initializers(graph).map_err(|reason| format!("graph `{}`: {reason}", graph.name())))
}

/// Validates a model as ONNX Runtime does, which loads initializers without a name and with the same name:
/// versions and a graph are present, other names are unique and defined, and the graph is acyclic.
pub(super) fn structure(model: &ModelProto) -> Result<(), String> {
    if model.ir_version.is_none() {
        return Err("the format version (`ir_version`) is missing: not an ONNX model, or truncated".into());
    }
    let top = model.graph.as_ref().ok_or("the graph is missing: not an ONNX model, or truncated")?;
    let opset = opset(model).ok_or("the operator set (`opset_import`) is missing")?;
    if !(1..=NEWEST_OPSET).contains(&opset) {
        return Err(format!("it uses opset {opset}, but 1 to {NEWEST_OPSET} are supported: convert it to an older opset, or use a newer compress"));
    }
    graph(top, &BTreeSet::new()).map_err(|reason| format!("graph `{}`: {reason}", top.name()))?;
    model.functions.iter().try_for_each(|of| function(of).map_err(|reason| format!("function `{}`: {reason}", of.name())))
}

/// Whether a domain is that of the standard operators, which has two names.
pub(super) fn is_own(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

/// Version of the standard operator set.
pub(super) fn opset(model: &ModelProto) -> Option<i64> {
    let mut imports = model.opset_import.iter();
    match imports.clone().find(|import| is_own(import.domain())) {
        Some(import) => Some(import.version()),
        // A model that imports only other domains uses no standard operators.
        None => imports.next().map(|_| 1),
    }
}

/// Describes a node by its name, or by its first output if it has none.
pub(super) fn label(node: &NodeProto) -> String {
    let name = node.name.as_deref().filter(|name| !name.is_empty()).or_else(|| node.output.first().map(String::as_str)).unwrap_or("");
    format!("node `{name}` ({})", node.op_type())
}

/// The subgraphs in the attributes of a node.
pub(super) fn bodies(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs))
}

/// As [`bodies`], mutable.
pub(super) fn bodies_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs))
}

/// Names of the initializers of a graph.
fn initializer_names(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
    graph.initializer.iter().chain(sparse).map(|tensor| tensor.name())
}

/// Names that a graph defines, without those in the bodies of its nodes.
pub(super) fn defined_names(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let computed = graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str));
    graph.input.iter().map(|input| input.name()).chain(initializer_names(graph)).chain(computed)
}

/// Counts the definitions of each name in a graph and its bodies. A body may shadow names of the
/// enclosing graph.
pub(super) fn definition_counts<'g>(graph: &'g GraphProto, times: &mut BTreeMap<&'g str, usize>) {
    for name in defined_names(graph) {
        let times = times.entry(name).or_default();
        *times = times.saturating_add(1);
    }
    graph.node.iter().flat_map(bodies).for_each(|body| definition_counts(body, times));
}

/// All names in a graph and its bodies.
pub(super) fn names(graph: &GraphProto, found: &mut BTreeSet<String>) {
    let ports = graph.input.iter().chain(&graph.output).map(|port| port.name());
    let values = graph.node.iter().flat_map(|node| node.input.iter().chain(&node.output).chain(&node.name)).map(String::as_str);
    found.extend(ports.chain(initializer_names(graph)).chain(values).map(str::to_owned));
    graph.node.iter().flat_map(bodies).for_each(|body| names(body, found));
}

/// Names that a node reads, including names of the enclosing graph that its bodies read.
pub(super) fn reads(node: &NodeProto) -> BTreeSet<&str> {
    let mut names: BTreeSet<&str> = node.input.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    for body in bodies(node) {
        let own: BTreeSet<&str> = defined_names(body).collect();
        let taken = body.node.iter().flat_map(reads).chain(body.output.iter().map(|output| output.name()));
        names.extend(taken.filter(|name| !own.contains(name)));
    }
    names
}

/// The initializers of a graph and its bodies have different names.
fn initializers(graph: &GraphProto) -> Result<(), String> {
    let mut names = BTreeSet::new();
    for name in initializer_names(graph) {
        if name.is_empty() {
            return Err("an initializer has no name".into());
        }
        if !names.insert(name) {
            return Err(format!("two initializers are named `{name}`"));
        }
    }
    graph.node.iter().flat_map(bodies).try_for_each(initializers)
}

fn graph(graph: &GraphProto, around: &BTreeSet<&str>) -> Result<(), String> {
    let initializers: BTreeSet<&str> = initializer_names(graph).collect();
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

/// A topological order of the nodes, as close as possible to the order of the file. Nodes on a cycle are
/// omitted.
pub(super) fn order(nodes: &[NodeProto]) -> Vec<usize> {
    let outputs = nodes.iter().enumerate().flat_map(|(number, node)| node.output.iter().map(move |output| (output.as_str(), number)));
    let producers: BTreeMap<&str, usize> = outputs.collect();
    // The number of unprocessed producers of each node, and its consumers.
    let (mut waits, mut readers) = (vec![0usize; nodes.len()], vec![Vec::new(); nodes.len()]);
    for ((number, node), waits) in nodes.iter().enumerate().zip(&mut waits) {
        for producer in reads(node).into_iter().filter_map(|name| producers.get(name)) {
            *waits = waits.saturating_add(1);
            readers.get_mut(*producer).into_iter().for_each(|readers| readers.push(number));
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

/// Validates the names that nodes read and define. `first` are the inputs and initializers of the graph,
/// `around` the names of enclosing graphs.
fn nodes<'g>(nodes: &'g [NodeProto], first: &BTreeSet<&'g str>, around: &BTreeSet<&'g str>, outputs: impl Iterator<Item = &'g str>) -> Result<(), String> {
    let mut producers: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, node) in nodes.iter().enumerate() {
        if node.op_type().is_empty() {
            return Err(format!("node `{}` has no operator (`op_type`)", node.name()));
        }
        for output in node.output.iter().map(String::as_str).filter(|output| !output.is_empty()) {
            if first.contains(output) || producers.insert(output, number).is_some() {
                return Err(format!("{} computes `{output}`, which is already defined", label(node)));
            }
        }
    }
    let is_defined = |name: &str| producers.contains_key(name) || first.contains(name) || around.contains(name);
    for node in nodes {
        if let Some(name) = reads(node).into_iter().find(|name| !is_defined(name)) {
            return Err(format!("{} reads `{name}`, which is not an input, an initializer or the output of a node", label(node)));
        }
    }
    if let Some(name) = outputs.into_iter().find(|name| !is_defined(name)) {
        return Err(format!("output `{name}` is not computed by any node"));
    }
    let done: BTreeSet<usize> = order(nodes).into_iter().collect();
    if let Some((_, stuck)) = nodes.iter().enumerate().find(|(number, _)| !done.contains(number)) {
        return Err(format!("{} depends on its own output: the graph has a cycle", label(stuck)));
    }
    let visible: BTreeSet<&str> = around.iter().chain(first).copied().chain(producers.keys().copied()).collect();
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
    fn node_order_is_free_and_bodies_read_names_of_enclosing_graphs() {
        let any = model(vec![node("Relu", &["a"], &["y"]), node("MatMul", &["x", "w"], &["a"])]);
        assert_eq!(check(&any), Ok(()));
        let inner = branch(node("Mul", &["a", "w"], &["b"]));
        assert_eq!(reads(&inner).into_iter().collect::<Vec<_>>(), ["a", "w", "x"]);
        assert_eq!(check(&model(vec![inner, node("Relu", &["x"], &["a"])])), Ok(()));
    }

    #[test]
    fn invalid_models_are_refused_by_name() {
        let error_of = |nodes: Vec<NodeProto>| check(&model(nodes)).unwrap_err();
        let relu = || node("Relu", &["x"], &["y"]);
        assert!(error_of(vec![node("Relu", &["z"], &["y"])]).contains("node `y` (Relu) reads `z`"));
        assert!(error_of(vec![relu(), relu()]).contains("computes `y`, which is already defined"));
        assert!(error_of(vec![node("Relu", &["x"], &["w"]), relu()]).contains("`w`"));
        assert!(error_of(vec![node("Relu", &["b"], &["a"]), node("Relu", &["a"], &["b"]), relu()]).contains("cycle"));
        assert!(error_of(vec![]).contains("output `y`"));
        assert!(error_of(vec![branch(node("Relu", &["z"], &["b"]))]).contains("node `y` (If) reads `z`"));
        assert!(error_of(vec![branch(node("", &["x"], &["b"]))]).contains("body of node `y` (If): node `` has no operator"));
        assert!(error_of(vec![branch(node("Relu", &["y"], &["b"]))]).contains("cycle"));
        assert!(error_of(vec![node("", &["x"], &["y"])]).contains("has no operator"));
        let change = |change: &dyn Fn(&mut ModelProto)| {
            let mut model = model(vec![relu()]);
            change(&mut model);
            check(&model).unwrap_err()
        };
        assert!(change(&|model| model.opset_import[0].version = Some(NEWEST_OPSET + 1)).contains("opset 29"));
        assert!(change(&|model| model.opset_import.clear()).contains("opset_import"));
        assert!(change(&|model| model.ir_version = None).contains("ir_version"));
        assert!(change(&|model| model.graph = None).contains("the graph is missing"));
        assert!(change(&|model| model.graph.as_mut().unwrap().input.push(value("x"))).contains("two inputs"));
        assert!(
            change(&|model| model.graph.as_mut().unwrap().initializer.push(TensorProto { name: Some("w".into()), ..TensorProto::default() }))
                .contains("two initializers")
        );
    }
}
