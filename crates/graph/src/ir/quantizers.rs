//! Insertion of activation quantizers into a graph.

use std::collections::{BTreeMap, BTreeSet};

use super::graph::{Graph, ValueId};
use super::ops::{FakeQuantize, Op};
use super::rebuild::{Rewrite, rebuild};
use super::{Builder, Catalog};
use crate::error::Result;

/// The activation quantizers of a graph.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quantizers {
    /// Quantized values by name, inputs or node results; all their consumers read the quantized value.
    pub values: BTreeMap<String, FakeQuantize>,
    /// Layers whose input is quantized, by the name of their weight.
    pub layers: BTreeMap<String, FakeQuantize>,
}

/// Inserts quantizers into a graph. Layers that read the same value with the same parameters share one
/// quantizer.
pub fn insert(graph: &Graph, catalog: &dyn Catalog, quantizers: &Quantizers) -> Result<Graph> {
    let mut inserted: BTreeMap<(ValueId, u32, i32), ValueId> = BTreeMap::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    // A graph whose quantizers were removed has values with their names.
    let taken: BTreeSet<&str> = graph.values().iter().map(|value| value.name.as_str()).collect();
    let mut quantized = |builder: &mut Builder, value: ValueId, name: &str, by: &FakeQuantize| -> Result<ValueId> {
        let key = (value, by.scale.to_bits(), by.zero_point);
        if let Some(id) = inserted.get(&key) {
            return Ok(*id);
        }
        let count = counts.entry(name.to_owned()).or_default();
        let name = loop {
            *count += 1;
            let name = if *count == 1 { format!("{name}/quantized") } else { format!("{name}/quantized_{count}") };
            if !taken.contains(name.as_str()) {
                break name;
            }
        };
        let id = builder.node(&name, *by, &[value])?;
        inserted.insert(key, id);
        Ok(id)
    };
    rebuild(graph, catalog, &mut |mut step: Rewrite| {
        let old = step.node.inputs.clone();
        let weight = layer_weight(graph, step.node);
        for (at, id) in old.iter().enumerate() {
            let name = &graph.value(*id).name;
            let own = weight.filter(|_| at == 0).and_then(|weight| quantizers.layers.get(weight));
            if let Some(by) = own.or_else(|| quantizers.values.get(name)) {
                step.inputs[at] = quantized(step.builder, step.inputs[at], name, by)?;
            }
        }
        step.copy()
    })
}

/// The name of the weight of a linear layer or a convolution.
pub fn layer_weight<'g>(graph: &'g Graph, node: &super::Node) -> Option<&'g str> {
    match (&node.op, node.inputs.get(1)) {
        (Op::Linear(_) | Op::Conv(_), Some(weight)) => Some(graph.value(*weight).name.as_str()),
        _ => None,
    }
}
