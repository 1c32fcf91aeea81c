//! Factors of their own for values that no layer can rescale: what a normalisation gives to layers and to a residual stream alike.
//! One multiplication for each value, taken only where it saves much.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::prepare::Prepared;
use super::sites::Sites;
use crate::calibration::ValueStatistics;
use crate::error::Result;
use crate::ir::ops::{Mul, Op};
use crate::ir::{Graph, Rewrite, ValueId, rebuild};
use crate::pass::chains::{Chain, is_factor};
use crate::pass::walk::weight_input;
use crate::store::{Bytes, DType, Encoding, Weight};

/// End of the names of factors.
const ENDING: &str = ".factors";

/// Puts factors of one before quantized layers whose input no chain rescales.
pub(super) fn insert(prepared: &mut Prepared, chains: &[Chain]) -> Result<()> {
    let graph = &prepared.graph;
    let rescaled: BTreeSet<ValueId> = chains.iter().flat_map(|chain| chain.values.iter().map(|(value, _)| *value)).collect();
    let sites = Sites::of(graph, &prepared.layers);
    let mut wanted: BTreeMap<ValueId, String> = BTreeMap::new();
    for (id, site) in &sites.values {
        let value = graph.value(*id);
        if site.everyone || rescaled.contains(id) || value.ty.shape.len() != 3 {
            continue;
        }
        let Some(width) = value.ty.shape.last().and_then(|d| d.fixed()) else { continue };
        let name = format!("{}{ENDING}", value.name);
        let bytes = 1f32.to_le_bytes().repeat(width);
        let ones = Weight::new(DType::F32, vec![width], Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
        prepared.model.weights.by_name.insert(name.clone(), ones);
        wanted.insert(*id, name);
    }
    let (layers, weights) = (&prepared.layers, &prepared.model.weights);
    let mut made: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let after = rebuild(graph, weights, &mut |mut step: Rewrite| {
        let layer = matches!(step.node.op, Op::Linear(_)) && layers.contains(weight_input(graph, step.node));
        if let (true, Some(name)) = (layer, step.node.inputs.first().and_then(|id| wanted.get(id))) {
            let value = step.inputs[0];
            step.inputs[0] = match made.get(&value) {
                Some(product) => *product,
                None => {
                    let factors = step.builder.param(name, &weights.get(name)?.shape)?;
                    let product = step.builder.node(&format!("{}/scaled", graph.value(step.node.inputs[0]).name), Mul {}, &[value, factors])?;
                    made.insert(value, product);
                    product
                }
            };
        }
        step.keep()
    })?;
    prepared.graph = after;
    Ok(())
}

/// Takes factors out again that have stayed one. What was seen of the products was seen of the values then.
pub(super) fn remove_idle(prepared: &mut Prepared, changed: &BTreeSet<String>, seen: &mut BTreeMap<String, ValueStatistics>) -> Result<()> {
    let graph = &prepared.graph;
    let idle = |graph: &Graph, node: &crate::ir::Node| {
        is_factor(graph, node) && graph.value(node.inputs[1]).name.ends_with(ENDING) && !changed.contains(&graph.value(node.output).name)
    };
    let weights = &prepared.model.weights;
    let after = rebuild(graph, weights, &mut |step: Rewrite| if idle(graph, step.node) { Ok(step.inputs[0]) } else { step.keep() })?;
    let mut kept = false;
    for node in graph.nodes().iter().filter(|node| is_factor(graph, node)) {
        if !idle(graph, node) {
            kept = true;
            continue;
        }
        let [value, product] = [node.inputs[0], node.output].map(|id| graph.value(id).name.clone());
        if let Some(same) = seen.remove(&product) {
            seen.entry(value).or_insert(same);
        }
        prepared.model.weights.by_name.remove(&graph.value(node.inputs[1]).name);
    }
    prepared.described &= !kept;
    prepared.graph = after;
    Ok(())
}
