//! Keys and values of attention that go through a cache of eight bits.

use std::collections::BTreeMap;

use super::graph::{Graph, Kind, ValueId};
use super::ops::{CacheQuantize, Op};
use super::rebuild::{Rewrite, rebuild};
use super::{Builder, Catalog};
use crate::error::{Error, Result};
use crate::kernel::cache::CacheFormat;

/// An attention whose keys and values decoders cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// The module that computes them, as tensors are named: `model.layers.0.self_attn`.
    pub module: String,
    /// The values that it reads as keys and as values, by name.
    pub reads: [String; 2],
}

/// What helps a model that cannot have such a cache.
const WITHOUT: &str = "leave `kv_cache` out, and take `kv_cache_scheme` out of config.json if it stands there";

impl Cached {
    /// Names of the tensors that hold the scales of keys and of values, both `[1]`.
    pub fn scales(&self) -> [String; 2] {
        ["k_scale", "v_scale"].map(|scale| format!("{}.{scale}", self.module))
    }
}

/// The attentions of a graph, in its order.
///
/// # Errors
/// There is none, one sees later tokens, so that nothing can be cached, one is quantized already or has no layer that computes keys, or one
/// caches a latent vector instead of keys and values.
pub fn cached(graph: &Graph) -> Result<Vec<Cached>> {
    let unusable = |name: &str, reason: &str| Err(Error::graph(format!("graph node `{name}`"), format!("{reason}: {WITHOUT}")));
    let mut found = Vec::new();
    for node in graph.nodes() {
        let Op::Attention(op) = &node.op else { continue };
        let name = &graph.value(node.output).name;
        if !op.causal {
            return unusable(name, "is attention that sees later tokens, so that there is no cache of keys and values");
        }
        let reads = [1, 2].map(|at| node.inputs[at]);
        let made_by = |id: ValueId| if let Kind::Node(at) = graph.value(id).kind { Some(&graph.nodes()[at].op) } else { None };
        if reads.iter().any(|id| matches!(made_by(*id), Some(Op::CacheQuantize(_)))) {
            return unusable(name, "reads keys and values that are quantized already");
        }
        let Some(module) = module_of(graph, reads[0]) else { return unusable(name, "reads keys that no linear layer computes") };
        if graph.params().any(|(_, value)| value.name == format!("{module}.kv_b_proj.weight")) {
            return unusable(name, "is multi-head latent attention, whose cache holds the latent vector and not the keys and values of the heads");
        }
        found.push(Cached { module: module.to_owned(), reads: reads.map(|id| graph.value(id).name.clone()) });
    }
    if found.is_empty() {
        return Err(Error::graph("the model", format!("has no attention, so that there is no cache of keys and values: {WITHOUT}")));
    }
    Ok(found)
}

/// The module of the layer that a value comes from.
fn module_of(graph: &Graph, mut id: ValueId) -> Option<&str> {
    loop {
        let Kind::Node(at) = graph.value(id).kind else { return None };
        let node = &graph.nodes()[at];
        if let Op::Linear(_) = node.op {
            let weight = graph.value(*node.inputs.get(1)?).name.as_str();
            return weight.strip_suffix(".weight")?.rsplit_once('.').map(|(module, _)| module);
        }
        id = *node.inputs.first()?;
    }
}

/// Lets all attentions read what a cache of this format gives back, by scales of the checkpoint.
///
/// # Errors
/// As [`cached`], or a scale is missing.
pub fn insert(graph: &Graph, catalog: &dyn Catalog, format: CacheFormat) -> Result<Graph> {
    let mut scales: BTreeMap<String, String> = BTreeMap::new();
    for found in cached(graph)? {
        for (value, scale) in found.reads.iter().zip(found.scales()) {
            if catalog.shape(&scale).is_none() {
                return Err(Error::tensor(
                    &scale,
                    "is missing, and config.json says (`kv_cache_scheme`) that keys and values are quantized by it",
                    "write the checkpoint again, or take `kv_cache_scheme` out of config.json to run the model without",
                ));
            }
            scales.insert(value.clone(), scale);
        }
    }
    let mut made: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut through = |builder: &mut Builder, value: ValueId, name: &str| -> Result<ValueId> {
        let (None, Some(scale)) = (made.get(&value), scales.get(name)) else { return Ok(made.get(&value).copied().unwrap_or(value)) };
        let scale = builder.param(scale, &[1])?;
        let id = builder.node(&format!("{name}/cached"), CacheQuantize { format }, &[value, scale])?;
        made.insert(value, id);
        Ok(id)
    };
    rebuild(graph, catalog, &mut |mut step: Rewrite| {
        if let Op::Attention(_) = step.node.op {
            for at in [1, 2] {
                step.inputs[at] = through(step.builder, step.inputs[at], &graph.value(step.node.inputs[at]).name)?;
            }
        }
        step.keep()
    })
}
