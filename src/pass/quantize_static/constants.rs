//! Numbers that all channels of a picture are multiplied by, or get added, as in the learned affine blocks of PP-LCNetV3: with a number
//! for each channel in their place, they take factors over like a layer, and the model runs as fast.

use std::collections::BTreeMap;

use super::prepare::Prepared;
use crate::error::Result;
use crate::ir::{Graph, Kind, Node, Op, Rewrite, rebuild};
use crate::pass::walk::{only_reader, weight_input};
use crate::store::{Computed, DType, Weight};

/// What stood in the place of each constant that has a number for each channel now, by name.
pub(super) type Widened = BTreeMap<String, Weight>;

/// Gives constants of one number a number for each channel where that lets factors pass: products behind quantized convolutions, and
/// products and the sums behind them before such. The constant is the second input then.
pub(super) fn widen(prepared: &mut Prepared) -> Result<Widened> {
    let graph = &prepared.graph;
    let quantized = |node: &Node| matches!(node.op, Op::Conv(_)) && prepared.layers.contains(weight_input(graph, node));
    let maker = |node: &Node, at: usize| if let Kind::Node(index) = graph.value(node.inputs[at]).kind { graph.nodes().get(index) } else { None };
    let reader = |node: &Node| only_reader(graph, node.output).map(|reader| &graph.nodes()[reader]);
    let mut channels: BTreeMap<String, usize> = BTreeMap::new();
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Mul(_))) {
        let Some((at, width)) = constant(graph, node, prepared) else { continue };
        let mut found = vec![(node, at)];
        let next = reader(node).and_then(|next| match next.op {
            Op::Add(_) => {
                let (at, _) = constant(graph, next, prepared)?;
                found.push((next, at));
                reader(next)
            }
            _ => Some(next),
        });
        if !next.is_some_and(quantized) {
            found.truncate(1);
            if !maker(node, 1 - at).is_some_and(|maker| quantized(maker) && only_reader(graph, maker.output).is_some()) {
                continue;
            }
        }
        channels.extend(found.into_iter().map(|(node, at)| (graph.value(node.inputs[at]).name.clone(), width)));
    }
    let mut widened = Widened::new();
    for (name, width) in channels {
        let before = prepared.model.weights.get(&name)?.clone();
        let (number, of) = (before.clone(), name.clone());
        let values = move || Ok(number.floats(&of)?.repeat(width));
        prepared.model.weights.by_name.insert(name.clone(), Computed { values }.weight(vec![width, 1, 1]));
        widened.insert(name, before);
    }
    reshape(prepared, &widened)?;
    Ok(widened)
}

/// Puts single numbers back where no factor has come.
pub(super) fn narrow(prepared: &mut Prepared, widened: Widened) -> Result<()> {
    let mut narrowed = Widened::new();
    for (name, before) in widened {
        let (number, values) = (before.floats(&name)?, prepared.model.weights.get(&name)?.floats(&name)?);
        if values.iter().all(|value| number.first() == Some(value)) {
            prepared.model.weights.by_name.insert(name.clone(), before.clone());
            narrowed.insert(name, before);
        }
    }
    reshape(prepared, &narrowed)
}

/// Where a node has a constant of one number as an input, and how many channels the other one has.
fn constant(graph: &Graph, node: &Node, prepared: &Prepared) -> Option<(usize, usize)> {
    let one = |id: &crate::ir::ValueId| {
        let value = graph.value(*id);
        let weight = prepared.model.weights.by_name.get(&value.name);
        value.kind == Kind::Param && only_reader(graph, *id).is_some() && weight.is_some_and(|weight| weight.elements() == 1 && weight.dtype == DType::F32)
    };
    let at = node.inputs.iter().position(one)?;
    let other = &graph.value(*node.inputs.get(1 - at)?).ty.shape;
    Some((at, other.get(1)?.fixed().filter(|_| other.len() == 4)?))
}

/// Builds the graph again over constants of other shapes, which are second inputs.
fn reshape(prepared: &mut Prepared, names: &Widened) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let (graph, weights) = (&prepared.graph, &prepared.model.weights);
    prepared.graph = rebuild(graph, weights, &mut |mut step: Rewrite| {
        if let Some(at) = step.node.inputs.iter().position(|id| names.contains_key(&graph.value(*id).name)) {
            step.inputs.swap(at, 1);
        }
        step.keep()
    })?;
    Ok(())
}
