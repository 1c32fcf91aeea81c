//! Mixtures of experts: which nodes and tensors an expert has.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::ir::ops::{Route, Slice};
use crate::ir::{Graph, Kind, Node, Op, ValueId};

/// Experts whose answers one node sums up.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// The node that sums up what experts say.
    pub sum: String,
    /// The node that says what each expert counts for.
    pub weights: String,
    /// How it says so.
    pub route: Route,
    /// Tensors of the layer that scores experts, and the axis of each that is theirs.
    pub router: Vec<(String, usize)>,
    /// By number.
    pub experts: Vec<Expert>,
    /// Tensors whose first axis is that of all experts.
    pub stacked: BTreeSet<String>,
    /// What stands before the number of an expert in the names of its nodes, and in those of its tensors, where it does.
    pub prefixes: [Option<String>; 2],
}

/// One of several experts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expert {
    /// Its nodes, and those that cut its weights out of tensors of all.
    pub nodes: BTreeSet<String>,
    /// Tensors that it reads as a whole.
    pub tensors: BTreeSet<String>,
}

/// The mixtures of a graph, in its order.
///
/// # Errors
/// One is wired so that experts cannot be told apart.
pub fn mixtures(graph: &Graph) -> Result<Vec<Mixture>> {
    graph.nodes().iter().filter(|node| matches!(node.op, Op::Combine(_))).map(|node| mixture(graph, node)).collect()
}

fn mixture(graph: &Graph, sum: &Node) -> Result<Mixture> {
    let name = |id: ValueId| graph.value(id).name.as_str();
    let refuse = |id: ValueId, reason: &str| Error::graph(format!("graph node `{}`", name(id)), format!("{reason}, so that no expert can be taken out"));
    let node_of = |id: ValueId| if let Kind::Node(at) = graph.value(id).kind { graph.nodes().get(at) } else { None };
    let readers = |id: ValueId| graph.nodes().iter().filter(move |node| node.inputs.contains(&id));
    let (Some(weights), count) = (sum.inputs.first().copied(), sum.inputs.len().saturating_sub(1)) else {
        return Err(refuse(sum.output, "sums up nothing"));
    };
    let Some((Op::Route(route), scores)) = node_of(weights).and_then(|node| Some((&node.op, *node.inputs.first()?))) else {
        return Err(refuse(sum.output, "has weights of experts that no router gives"));
    };
    if readers(weights).any(|node| !matches!(node.op, Op::Dispatch(_)) && node.output != sum.output) || graph.outputs().iter().any(|(_, id)| *id == weights) {
        return Err(refuse(weights, "is read by more than the experts"));
    }
    let router = node_of(scores).filter(|_| readers(scores).count() == 1).and_then(|node| match &node.op {
        Op::Linear(op) => Some((node, usize::from(op.input_major))),
        _ => None,
    });
    let Some((router, axis)) = router else { return Err(refuse(weights, "has scores that no layer gives to it alone")) };
    let own = |id: &&ValueId| graph.value(**id).kind == Kind::Param && readers(**id).count() == 1;
    if router.inputs.iter().skip(1).any(|id| !own(&id)) {
        return Err(refuse(router.output, "has weights that are computed, or that others read"));
    }
    let router = router.inputs.iter().skip(1).zip([axis, 0]).map(|(id, axis)| (name(*id).to_owned(), axis)).collect();

    let mut owner: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut experts = vec![Expert::default(); count];
    let mut stacked = BTreeSet::new();
    for node in graph.nodes().iter().filter(|node| node.output != sum.output) {
        let of = match &node.op {
            Op::Dispatch(op) if node.inputs.get(1) == Some(&weights) => BTreeSet::from([op.expert]),
            _ => node.inputs.iter().filter_map(|id| owner.get(id).copied()).collect(),
        };
        let Some(number) = of.first().copied() else { continue };
        let (Some(expert), 1) = (experts.get_mut(number), of.len()) else { return Err(refuse(node.output, "looks at several experts")) };
        if graph.outputs().iter().any(|(_, id)| *id == node.output) {
            return Err(refuse(node.output, "is an output of the model and belongs to an expert"));
        }
        owner.insert(node.output, number);
        expert.nodes.insert(name(node.output).to_owned());
        // What is computed of weights alone belongs to the expert that reads it.
        let dispatched = matches!(node.op, Op::Dispatch(_));
        let mut beside: Vec<ValueId> = if dispatched { Vec::new() } else { node.inputs.iter().filter(|id| !owner.contains_key(id)).copied().collect() };
        while let Some(id) = beside.pop() {
            match node_of(id) {
                Some(side) => {
                    if !depends_on_weights_alone(graph, id) {
                        return Err(refuse(node.output, "looks at more than the tokens of its expert"));
                    }
                    expert.nodes.insert(name(id).to_owned());
                    match (&side.op, side.inputs.first()) {
                        (Op::Slice(slice), Some(all)) if is_slice_of(graph, slice, *all, [number, count]) => {
                            stacked.insert(name(*all).to_owned());
                        }
                        _ => beside.extend(&side.inputs),
                    }
                }
                None => {
                    expert.tensors.insert(name(id).to_owned());
                }
            }
        }
    }
    let answers = sum.inputs.iter().skip(1).enumerate();
    if answers.into_iter().any(|(number, id)| owner.get(id) != Some(&number)) {
        return Err(refuse(sum.output, "does not sum up its experts in their order"));
    }
    let prefixes = [prefix(&experts, |expert| &expert.nodes), prefix(&experts, |expert| &expert.tensors)];
    Ok(Mixture { sum: name(sum.output).to_owned(), weights: name(weights).to_owned(), route: *route, router, experts, stacked, prefixes })
}

fn depends_on_weights_alone(graph: &Graph, id: ValueId) -> bool {
    let needed = graph.dependencies([id].into_iter());
    graph.ids().all(|id| !needed[id.index()] || graph.value(id).kind != Kind::Input)
}

/// Whether this is the part of an expert of a tensor of so many.
fn is_slice_of(graph: &Graph, slice: &Slice, all: ValueId, [number, count]: [usize; 2]) -> bool {
    let value = graph.value(all);
    value.kind == Kind::Param
        && value.ty.shape.first().and_then(crate::ir::Dim::fixed) == Some(count)
        && *slice == Slice { start: i64::try_from(number).unwrap_or(-1), length: Some(1), axis: 0, ..Slice::default() }
}

/// What stands before the number of each expert in all of these names.
fn prefix(experts: &[Expert], names: impl Fn(&Expert) -> &BTreeSet<String>) -> Option<String> {
    let first = names(experts.first()?).first()?;
    let ends = first.match_indices('.').map(|(at, _)| &first[..=at]);
    let fits = |prefix: &&str| experts.iter().enumerate().all(|(number, expert)| names(expert).iter().all(|name| super::number(name, prefix) == Some(number)));
    ends.filter(fits).map(str::to_owned).next()
}
