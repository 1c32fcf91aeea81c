//! Explicit multiplications by channel factors, for values that no layer can rescale, such as the output
//! of a normalization that is also part of the residual stream. They are kept only where the gain is
//! large.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::prepare::Prepared;
use super::sites::Sites;
use crate::calibration::ValueStatistics;
use crate::error::Result;
use crate::ir::ops::{Mul, Op};
use crate::ir::{Graph, Rewrite, ValueId, rebuild};
use crate::pass::channel_equalization::{Chain, is_factor};
use crate::pass::consumers::weight_input;
use crate::store::{Bytes, DType, Encoding, Weight};

/// Suffix of the names of factors.
const SUFFIX: &str = ".factors";

/// Inserts factors of one before quantized layers whose input no chain rescales.
pub(super) fn insert(prepared: &mut Prepared, chains: &[Chain]) -> Result<()> {
    let graph = &prepared.graph;
    let rescaled: BTreeSet<ValueId> = chains.iter().flat_map(|chain| chain.values.iter().map(|(value, _)| *value)).collect();
    let sites = Sites::new(graph, &prepared.layers);
    let mut factors: BTreeMap<ValueId, String> = BTreeMap::new();
    for (id, site) in &sites.values {
        let value = graph.value(*id);
        if site.all_readers || rescaled.contains(id) || value.ty.shape.len() != 3 {
            continue;
        }
        let Some(width) = value.ty.shape.last().and_then(|d| d.fixed()) else { continue };
        let name = format!("{}{SUFFIX}", value.name);
        let bytes = 1f32.to_le_bytes().repeat(width);
        let ones = Weight::new(DType::F32, vec![width], Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
        prepared.model.weights.by_name.insert(name.clone(), ones);
        factors.insert(*id, name);
    }
    let (layers, weights) = (&prepared.layers, &prepared.model.weights);
    let mut products: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let after = rebuild(graph, weights, &mut |mut step: Rewrite| {
        let layer = matches!(step.node.op, Op::Linear(_)) && layers.contains(weight_input(graph, step.node));
        if let (true, Some(name)) = (layer, step.node.inputs.first().and_then(|id| factors.get(id))) {
            let value = step.inputs[0];
            step.inputs[0] = match products.get(&value) {
                Some(product) => *product,
                None => {
                    let factors = step.builder.param(name, &weights.get(name)?.shape)?;
                    let product = step.builder.node(&format!("{}/scaled", graph.value(step.node.inputs[0]).name), Mul {}, &[value, factors])?;
                    products.insert(value, product);
                    product
                }
            };
        }
        step.copy()
    })?;
    prepared.graph = after;
    Ok(())
}

/// Removes factors that are still one. The statistics of their products become those of the values.
pub(super) fn remove_unused(prepared: &mut Prepared, changed: &BTreeSet<String>, statistics: &mut BTreeMap<String, ValueStatistics>) -> Result<()> {
    let graph = &prepared.graph;
    let is_unused = |graph: &Graph, node: &crate::ir::Node| {
        is_factor(graph, node) && graph.value(node.inputs[1]).name.ends_with(SUFFIX) && !changed.contains(&graph.value(node.output).name)
    };
    let weights = &prepared.model.weights;
    let after = rebuild(graph, weights, &mut |step: Rewrite| if is_unused(graph, step.node) { Ok(step.inputs[0]) } else { step.copy() })?;
    let mut has_factors = false;
    for node in graph.nodes().iter().filter(|node| is_factor(graph, node)) {
        if !is_unused(graph, node) {
            has_factors = true;
            continue;
        }
        let [value, product] = [node.inputs[0], node.output].map(|id| graph.value(id).name.clone());
        if let Some(same) = statistics.remove(&product) {
            statistics.entry(value).or_insert(same);
        }
        prepared.model.weights.by_name.remove(&graph.value(node.inputs[1]).name);
    }
    prepared.described &= !has_factors;
    prepared.graph = after;
    Ok(())
}
