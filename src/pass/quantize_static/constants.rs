//! Scalar constants that scale or shift images, as in the learnable affine blocks of PP-LCNetV3. Expanded
//! to one element per channel, they absorb factors like a layer, without cost at run time.

use std::collections::BTreeMap;

use super::prepare::Prepared;
use crate::error::Result;
use crate::ir::{Graph, Kind, Node, Op, Rewrite, rebuild};
use crate::pass::consumers::{only_reader, weight_input};
use crate::store::{Computed, DType, Weight};

/// Original scalars of expanded constants, by name.
pub(super) type Widened = BTreeMap<String, Weight>;

/// Expands scalar constants to one element per channel where that allows rescaling: in multiplications
/// after quantized convolutions, and in multiplications and subsequent additions before quantized
/// convolutions. Makes the constants the second inputs of their nodes.
pub(super) fn widen(prepared: &mut Prepared) -> Result<Widened> {
    let graph = &prepared.graph;
    let quantized = |node: &Node| matches!(node.op, Op::Conv(_)) && prepared.layers.contains(weight_input(graph, node));
    let producer = |node: &Node, at: usize| graph.producer(node.inputs[at]);
    let reader = |node: &Node| only_reader(graph, node.output).map(|reader| &graph.nodes()[reader]);
    let mut channels: BTreeMap<String, usize> = BTreeMap::new();
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Mul(_))) {
        let Some((at, width)) = constant(graph, node, prepared) else { continue };
        let mut constants = vec![(node, at)];
        let next = reader(node).and_then(|next| match next.op {
            Op::Add(_) => {
                let (at, _) = constant(graph, next, prepared)?;
                constants.push((next, at));
                reader(next)
            }
            _ => Some(next),
        });
        if !next.is_some_and(quantized) {
            constants.truncate(1);
            if !producer(node, 1 - at).is_some_and(|producer| quantized(producer) && only_reader(graph, producer.output).is_some()) {
                continue;
            }
        }
        channels.extend(constants.into_iter().map(|(node, at)| (graph.value(node.inputs[at]).name.clone(), width)));
    }
    let mut widened = Widened::new();
    for (name, width) in channels {
        let before = prepared.model.weights.get(&name)?.clone();
        let (scalar, scalar_name) = (before.clone(), name.clone());
        let values = move || Ok(scalar.floats(&scalar_name)?.repeat(width));
        prepared.model.weights.by_name.insert(name.clone(), Computed { values }.weight(vec![width, 1, 1]));
        widened.insert(name, before);
    }
    reshape(prepared, &widened)?;
    Ok(widened)
}

/// Restores the scalars of constants that were not rescaled.
pub(super) fn narrow(prepared: &mut Prepared, widened: Widened) -> Result<()> {
    let mut narrowed = Widened::new();
    for (name, before) in widened {
        let (scalar, values) = (before.floats(&name)?, prepared.model.weights.get(&name)?.floats(&name)?);
        if values.iter().all(|value| scalar.first() == Some(value)) {
            prepared.model.weights.by_name.insert(name.clone(), before.clone());
            narrowed.insert(name, before);
        }
    }
    reshape(prepared, &narrowed)
}

/// Index of the scalar constant among the inputs of a node, and the number of channels of the other input.
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

/// Rebuilds the graph after the shapes of these constants have changed, and makes them second inputs.
fn reshape(prepared: &mut Prepared, names: &Widened) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let (graph, weights) = (&prepared.graph, &prepared.model.weights);
    prepared.graph = rebuild(graph, weights, &mut |mut step: Rewrite| {
        if let Some(at) = step.node.inputs.iter().position(|id| names.contains_key(&graph.value(*id).name)) {
            step.inputs.swap(at, 1);
        }
        step.copy()
    })?;
    Ok(())
}
