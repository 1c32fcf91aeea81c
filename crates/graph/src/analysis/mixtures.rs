//! Mixtures of experts: the nodes and tensors of each expert.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::ir::ops::{Route, Slice};
use crate::ir::{Dim, Graph, Kind, Node, Op, ValueId};

/// A mixture-of-experts layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// The node that sums the expert outputs.
    pub sum: String,
    /// The routing op.
    pub route: Route,
    /// Tensors of the router, and the expert axis of each.
    pub router: Vec<(String, usize)>,
    /// The experts by index.
    pub experts: Vec<Expert>,
    /// Tensors that stack the weights of all experts along the first axis.
    pub stacked: BTreeSet<String>,
    /// Prefixes of the expert index in the names of nodes and of tensors, where they have one.
    pub prefixes: [Option<String>; 2],
}

/// One expert of a mixture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expert {
    /// Its nodes, including slices of its weights from stacked tensors.
    pub nodes: BTreeSet<String>,
    /// Tensors that only this expert reads.
    pub tensors: BTreeSet<String>,
}

/// Returns the mixtures of a graph, in graph order. Fails if the nodes of a mixture cannot be assigned to
/// experts.
pub fn mixtures(graph: &Graph) -> Result<Vec<Mixture>> {
    let sums = graph.nodes().iter().filter(|node| matches!(node.op, Op::Combine(_)));
    // Values that depend on inputs and not only on weights.
    let mut follows: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Input).collect();
    for node in graph.nodes() {
        follows[node.output.index()] = node.inputs.iter().any(|id| follows[id.index()]);
    }
    sums.map(|node| mixture(graph, node, &follows)).collect()
}

fn mixture(graph: &Graph, sum: &Node, follows: &[bool]) -> Result<Mixture> {
    let name = |id: ValueId| graph.value(id).name.as_str();
    let refuse = |id: ValueId, reason: &str| Error::graph(format!("graph node `{}`", name(id)), format!("{reason}, so that experts cannot be removed"));
    let readers = |id: ValueId| graph.nodes().iter().filter(move |node| node.inputs.contains(&id));
    let (Some(weights), count) = (sum.inputs.first().copied(), sum.inputs.len().saturating_sub(1)) else {
        return Err(refuse(sum.output, "has no expert outputs"));
    };
    let Some((Op::Route(route), [scores, biases @ ..])) = graph.producer(weights).map(|node| (&node.op, node.inputs.as_slice())) else {
        return Err(refuse(sum.output, "has routing weights that are not computed by a router"));
    };
    if readers(weights).any(|node| !matches!(node.op, Op::Dispatch(_)) && node.output != sum.output) || graph.is_output(weights) {
        return Err(refuse(weights, "is read by other nodes than the experts"));
    }
    let scores = *scores;
    let router = graph.producer(scores).filter(|_| readers(scores).count() == 1 && !graph.is_output(scores)).and_then(|node| match &node.op {
        Op::Linear(op) => Some((node, usize::from(op.input_major))),
        _ => None,
    });
    let Some((router, axis)) = router else { return Err(refuse(weights, "has scores that are not computed by a linear layer of its own")) };
    let own = |id: &&ValueId| graph.value(**id).kind == Kind::Param && readers(**id).count() == 1 && !graph.is_output(**id);
    if router.inputs.iter().skip(1).chain(biases).any(|id| !own(&id)) {
        return Err(refuse(router.output, "has weights that are computed or shared with other nodes"));
    }
    let router = router.inputs.iter().skip(1).zip([axis, 0]).chain(biases.iter().zip([0])).map(|(id, axis)| (name(*id).to_owned(), axis)).collect();

    // Activations of each expert, and the values that it computes from weights only.
    let mut owner: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut own_weights: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut stacked: BTreeSet<ValueId> = BTreeSet::new();
    for node in graph.nodes().iter().filter(|node| node.output != sum.output) {
        let mut of: BTreeSet<usize> = node.inputs.iter().filter_map(|id| owner.get(id).copied()).collect();
        let dispatch = if let Op::Dispatch(op) = &node.op { Some(op).filter(|_| node.inputs.get(1) == Some(&weights)) } else { None };
        of.extend(dispatch.map(|op| op.expert));
        let Some(number) = of.first().copied() else { continue };
        if of.len() > 1 || number >= count {
            return Err(refuse(node.output, "reads values of several experts"));
        }
        owner.insert(node.output, number);
        let mut others: Vec<ValueId> = if dispatch.is_some() { Vec::new() } else { node.inputs.iter().filter(|id| !owner.contains_key(id)).copied().collect() };
        while let Some(id) = others.pop() {
            if follows[id.index()] {
                return Err(refuse(node.output, "reads values other than its expert's tokens"));
            }
            match own_weights.insert(id, number) {
                Some(other) if other == number => continue,
                Some(_) => return Err(refuse(node.output, &format!("reads `{}`, which another expert also reads", name(id)))),
                None => {}
            }
            let Some(producer) = graph.producer(id) else { continue };
            match (&producer.op, producer.inputs.first()) {
                (Op::Slice(slice), Some(all)) if is_slice_of(graph, slice, *all, [number, count]) => drop(stacked.insert(*all)),
                _ => others.extend(&producer.inputs),
            }
        }
    }
    if sum.inputs.iter().skip(1).enumerate().any(|(number, id)| owner.get(id) != Some(&number)) {
        return Err(refuse(sum.output, "does not sum the experts in order"));
    }
    for node in graph.nodes() {
        for id in &node.inputs {
            let wanted = own_weights.get(id);
            let reads = wanted.is_none_or(|number| owner.get(&node.output) == Some(number) || own_weights.get(&node.output) == Some(number));
            let slices = match (&node.op, own_weights.get(&node.output)) {
                (Op::Slice(slice), Some(number)) => is_slice_of(graph, slice, *id, [*number, count]),
                _ => false,
            };
            if !reads || (stacked.contains(id) && (wanted.is_some() || !slices)) {
                return Err(refuse(node.output, &format!("reads `{}`, which belongs to an expert", name(*id))));
            }
        }
    }
    let own = |id: &ValueId| owner.contains_key(id) || own_weights.contains_key(id) || stacked.contains(id);
    if let Some((output, _)) = graph.outputs().iter().find(|(_, id)| own(id)) {
        return Err(Error::graph(format!("output `{output}`"), "is a value of an expert, so that experts cannot be removed"));
    }
    let mut experts = vec![Expert::default(); count];
    for (id, number) in owner.iter().chain(&own_weights) {
        let Some(expert) = experts.get_mut(*number) else { continue };
        let names = if graph.value(*id).kind == Kind::Param { &mut expert.tensors } else { &mut expert.nodes };
        names.insert(name(*id).to_owned());
    }
    let stacked = stacked.into_iter().map(|id| name(id).to_owned()).collect();
    let prefixes = [prefix(&experts, |expert| &expert.nodes), prefix(&experts, |expert| &expert.tensors)];
    Ok(Mixture { sum: name(sum.output).to_owned(), route: *route, router, experts, stacked, prefixes })
}

/// Whether a slice selects one expert of a tensor that stacks `count` experts.
fn is_slice_of(graph: &Graph, slice: &Slice, all: ValueId, [number, count]: [usize; 2]) -> bool {
    let value = graph.value(all);
    value.kind == Kind::Param
        && value.ty.shape.first().and_then(Dim::fixed) == Some(count)
        && *slice == Slice { start: i64::try_from(number).unwrap_or(-1), length: Some(1), axis: 0, ..Slice::default() }
}

/// The prefix of each expert's index that all of these names share.
fn prefix(experts: &[Expert], names: impl Fn(&Expert) -> &BTreeSet<String>) -> Option<String> {
    let first = names(experts.first()?).first()?;
    let ends = first.match_indices('.').map(|(at, _)| &first[..=at]);
    let fits =
        |prefix: &&str| experts.iter().enumerate().all(|(number, expert)| names(expert).iter().all(|name| super::layer_index(name, prefix) == Some(number)));
    ends.filter(fits).map(str::to_owned).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts, each with a separate weight and one sliced from a stacked tensor; `changes` replaces
    /// lines.
    fn found(changes: &[(&str, &str)]) -> Result<Vec<Mixture>> {
        let mut text = [
            "input x: float[batch, 4]",
            "param r: float[2, 4]",
            "param e.0.w: float[4, 4]",
            "param e.1.w: float[4, 4]",
            "param all: float[2, 4, 4]",
            "s = Linear(x, r) -> float[batch, 2]",
            "p = Route(s) -> float[batch, 2]",
            "e.0 = Dispatch(x, p) -> float[batch, 4]",
            "e.0.up = Linear(e.0, e.0.w) -> float[batch, 4]",
            "e.0.slice = Slice{\"axis\":0}(all) -> float[1, 4, 4]",
            "e.0.matrix = Reshape{\"shape\":[{\"copy\":1},{\"copy\":2}]}(e.0.slice) -> float[4, 4]",
            "e.0.down = Linear(e.0.up, e.0.matrix) -> float[batch, 4]",
            "e.1 = Dispatch{\"expert\":1}(x, p) -> float[batch, 4]",
            "e.1.up = Linear(e.1, e.1.w) -> float[batch, 4]",
            "e.1.slice = Slice{\"axis\":0,\"start\":1}(all) -> float[1, 4, 4]",
            "e.1.matrix = Reshape{\"shape\":[{\"copy\":1},{\"copy\":2}]}(e.1.slice) -> float[4, 4]",
            "e.1.down = Linear(e.1.up, e.1.matrix) -> float[batch, 4]",
            "y = Combine(p, e.0.down, e.1.down) -> float[batch, 4]",
            "output logits = y",
        ]
        .join("\n");
        for (line, other) in changes {
            assert!(text.contains(line), "{line}");
            text = text.replace(line, other);
        }
        mixtures(&text.parse::<Graph>().unwrap())
    }

    #[test]
    fn experts_have_nodes_and_tensors() {
        let found = found(&[]).unwrap();
        let [mixture] = &found[..] else { panic!("{found:?}") };
        assert_eq!((mixture.router.as_slice(), mixture.experts.len()), ([("r".to_owned(), 0)].as_slice(), 2));
        assert_eq!(mixture.stacked, BTreeSet::from(["all".to_owned()]));
        assert_eq!(mixture.experts[1].tensors, BTreeSet::from(["e.1.w".to_owned()]));
        assert_eq!(mixture.experts[1].nodes.len(), 5);
        assert_eq!(mixture.prefixes, [Some("e.".to_owned()), Some("e.".to_owned())]);
    }

    #[test]
    fn ambiguous_experts_are_refused() {
        for (changes, reason) in [
            // Tensors that are shared.
            (vec![("e.1.up = Linear(e.1, e.1.w)", "e.1.up = Linear(e.1, e.0.w)"), ("param e.1.w: float[4, 4]\n", "")], "which another expert also reads"),
            (vec![("output logits = y", "z = Linear(y, e.0.w) -> float[batch, 4]\noutput logits = z")], "which belongs to an expert"),
            (vec![("output logits = y", "z = Slice{\"axis\":0}(all) -> float[1, 4, 4]\noutput logits = y\noutput part = z")], "which belongs to an expert"),
            // The slice of another expert.
            (vec![("{\"axis\":0,\"start\":1}", "{\"axis\":0}")], "which belongs to an expert"),
            // An expert that reads another one, and one that reads other values than its tokens.
            (vec![("e.1 = Dispatch{\"expert\":1}(x, p)", "e.1 = Dispatch{\"expert\":1}(e.0, p)")], "reads values of several experts"),
            (vec![("e.1.down = Linear(e.1.up, e.1.matrix)", "e.1.down = Add(e.1.up, x)")], "reads values other than its expert's tokens"),
            (vec![("Combine(p, e.0.down, e.1.down)", "Combine(p, e.1.down, e.0.down)")], "does not sum the experts in order"),
            // Parameters and results of the router.
            (vec![("output logits = y", "output logits = y\noutput routing = p")], "read by other nodes than the experts"),
            (vec![("output logits = y", "z = Linear(y, r) -> float[batch, 2]\noutput logits = z")], "shared with other nodes"),
            (vec![("output logits = y", "output logits = y\noutput scores = s")], "not computed by a linear layer of its own"),
            (vec![("output logits = y", "output logits = y\noutput inner = e.0.up")], "is a value of an expert"),
        ] {
            let message = found(&changes).unwrap_err().to_string();
            assert!(message.contains(reason), "{message}");
        }
    }
}
