//! Number of nodes after inlining of the functions of a model, which ONNX Runtime does while it loads a
//! file. It cannot be interrupted, and the number can grow exponentially with the number of functions.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::check::bodies;
use super::proto::{FunctionProto, ModelProto, NodeProto};

/// Maximum number of nodes that replace the calls of functions, for small files. ONNX Runtime needs several
/// seconds for as many, and more than twice the time for twice the number.
const MAX_NODES: u64 = 1 << 14;
/// The same, relative to the number of nodes in a large file.
const MAX_GROWTH: u64 = 4;

/// Domain, operator and overload of a function.
pub(super) type Key<'m> = (&'m str, &'m str, &'m str);

/// Checks the number of nodes that replace the calls of functions.
pub(super) fn check_functions(model: &ModelProto) -> Result<(), String> {
    let functions = model.functions.iter().map(|function| ((function.domain(), function.name(), function.overload()), function));
    let functions: BTreeMap<Key, &FunctionProto> = functions.collect();
    let calls_of: BTreeMap<Key, Calls> = functions.iter().map(|(key, function)| (*key, calls(&function.node, &functions))).collect();
    let (mut callers, mut waits) = (BTreeMap::<Key, Vec<Key>>::new(), BTreeMap::<Key, usize>::new());
    for (caller, calls) in &calls_of {
        waits.insert(*caller, calls.called.len());
        calls.called.keys().for_each(|called| callers.entry(*called).or_default().push(*caller));
    }
    let mut ready: Vec<Key> = waits.iter().filter(|(_, waits)| **waits == 0).map(|(key, _)| *key).collect();
    let mut sizes: BTreeMap<Key, u64> = BTreeMap::new();
    while let Some(key) = ready.pop() {
        sizes.insert(key, calls_of.get(&key).map_or(0, |calls| calls.nodes.saturating_add(calls.inlined(&sizes))));
        for caller in callers.get(&key).into_iter().flatten() {
            if let Some(left) = waits.get_mut(caller) {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    ready.push(*caller);
                }
            }
        }
    }
    if let Some((_, name, _)) = functions.keys().find(|key| !sizes.contains_key(*key)) {
        return Err(format!("function `{name}` calls itself, or a function that calls itself"));
    }
    let Some(graph) = &model.graph else { return Ok(()) };
    let calls = calls(&graph.node, &functions);
    let inlined = calls.inlined(&sizes);
    let stored = calls_of.values().chain([&calls]).map(Calls::stored).fold(0, u64::saturating_add);
    let limit = MAX_NODES.max(stored.saturating_mul(MAX_GROWTH));
    let size = |(key, times): &(&Key, &u64)| sizes.get(*key).copied().unwrap_or(0).saturating_mul(**times);
    match calls.called.iter().max_by_key(size) {
        Some(((_, name, _), _)) if inlined > limit => {
            Err(format!("ONNX Runtime would replace calls of functions by {inlined} nodes, more than {limit}; most of them are calls of `{name}`"))
        }
        _ => Ok(()),
    }
}

/// Calls of functions, with their numbers, and the number of other nodes.
#[derive(Default)]
struct Calls<'m> {
    called: BTreeMap<Key<'m>, u64>,
    nodes: u64,
}

impl Calls<'_> {
    /// Number of nodes in the file.
    fn stored(&self) -> u64 {
        self.called.values().fold(self.nodes, |sum, times| sum.saturating_add(*times))
    }

    /// Number of nodes that replace the calls.
    fn inlined(&self, sizes: &BTreeMap<Key, u64>) -> u64 {
        self.called.iter().fold(0, |sum, (key, times)| sum.saturating_add(sizes.get(key).copied().unwrap_or(0).saturating_mul(*times)))
    }
}

fn calls<'m>(nodes: &'m [NodeProto], functions: &BTreeMap<Key<'m>, &'m FunctionProto>) -> Calls<'m> {
    let mut calls = Calls::default();
    let mut open: Vec<&'m NodeProto> = nodes.iter().collect();
    while let Some(node) = open.pop() {
        let count = match functions.get_key_value(&(node.domain(), node.op_type(), node.overload())) {
            Some((key, _)) => calls.called.entry(*key).or_default(),
            None => &mut calls.nodes,
        };
        *count = count.saturating_add(1);
        open.extend(bodies(node).flat_map(|body| &body.node));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::super::proto::GraphProto;
    use super::*;

    fn call(name: &str) -> NodeProto {
        NodeProto { op_type: Some(name.into()), domain: Some("f".into()), ..NodeProto::default() }
    }

    fn function(name: &str, node: Vec<NodeProto>) -> FunctionProto {
        FunctionProto { name: Some(name.into()), domain: Some("f".into()), node, ..FunctionProto::default() }
    }

    fn checked(functions: Vec<FunctionProto>, node: Vec<NodeProto>) -> Result<(), String> {
        let graph = GraphProto { node, ..GraphProto::default() };
        check_functions(&ModelProto { graph: Some(graph), functions, ..ModelProto::default() })
    }

    /// Functions that call the previous one twice: `f0` to `f{last}`.
    fn doubling(last: usize) -> Vec<FunctionProto> {
        let relu = NodeProto { op_type: Some("Relu".into()), ..NodeProto::default() };
        let calls = |number: usize| (0..2).map(|_| call(&format!("f{}", number - 1))).collect();
        (0..=last).map(|number| function(&format!("f{number}"), if number == 0 { vec![relu.clone()] } else { calls(number) })).collect()
    }

    #[test]
    fn the_number_of_inlined_nodes_is_bounded() {
        assert_eq!(checked(doubling(14), vec![call("f14")]), Ok(()));
        // Functions that the graph does not call are not inlined.
        assert_eq!(checked(doubling(27), vec![call("f3")]), Ok(()));
        let error = checked(doubling(27), vec![call("f3"), call("f27")]).unwrap_err();
        assert!(error.contains("by 134217736 nodes, more than 16384; most of them are calls of `f27`"), "{error}");
        assert!(checked(doubling(15), vec![call("f15")]).is_err());
        // A large file may call each function often.
        assert_eq!(checked(doubling(2), vec![call("f2"); 9000]), Ok(()));
        let error = checked(vec![function("a", vec![call("b")]), function("b", vec![call("a")])], vec![call("a")]).unwrap_err();
        assert!(error.contains("`a` calls itself, or"), "{error}");
        // An overload that calls itself, before one that does not.
        let overload = |name: &str, nodes| FunctionProto { overload: Some(name.into()), ..function("f", nodes) };
        let again = || NodeProto { overload: Some("1".into()), ..call("f") };
        assert!(checked(vec![overload("1", vec![again()]), overload("2", vec![])], vec![again()]).is_err());
        // Calls of operators that are not functions of the model.
        assert_eq!(checked(vec![], vec![call("f0")]), Ok(()));
    }
}
