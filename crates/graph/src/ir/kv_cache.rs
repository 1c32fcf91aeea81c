//! Attention with a KV cache quantized to 8 bits.

use std::collections::BTreeMap;

use super::graph::{Graph, ValueId};
use super::ops::{CacheQuantize, Op};
use super::rebuild::{Rewrite, rebuild};
use super::{Builder, Catalog};
use crate::error::{Error, Result};
use crate::kernel::cache::{CacheScales, CacheScheme};

/// An attention node whose keys and values are cached by decoders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedAttention {
    /// The attention module, as named in tensor names: `model.layers.0.self_attn`.
    pub module: String,
    /// Names of the values that the node reads as keys and as values.
    pub reads: [String; 2],
}

/// Advice for models that cannot have a quantized KV cache.
const WITHOUT: &str = "leave `kv_cache` out; `dequantize` removes the `kv_cache_scheme` of a model";

impl CachedAttention {
    /// Names of the scale tensors of keys and of values, both `[1]` or `[heads, 1, 1]`.
    pub fn scales(&self) -> [String; 2] {
        ["k_scale", "v_scale"].map(|scale| format!("{}.{scale}", self.module))
    }
}

/// Returns the attention nodes of a graph, in graph order. Fails if the graph has no attention, or one of its
/// attention nodes cannot be quantized: it is not causal, reads values that are already quantized, has no
/// linear layer that computes its keys, or caches a latent vector instead of keys and values.
pub fn cached_attentions(graph: &Graph) -> Result<Vec<CachedAttention>> {
    let unusable = |name: &str, reason: &str| Err(Error::graph(format!("graph node `{name}`"), format!("{reason}: {WITHOUT}")));
    let (mut found, of_images) = (Vec::new(), graph.of_images());
    for node in graph.nodes().iter().filter(|node| !of_images[node.output.index()]) {
        let Op::Attention(op) = &node.op else { continue };
        let name = &graph.value(node.output).name;
        if !op.causal {
            return unusable(name, "cannot have a KV cache because it is not causal");
        }
        let reads = [1, 2].map(|at| node.inputs[at]);
        if reads.iter().any(|id| graph.producer(*id).is_some_and(|node| matches!(node.op, Op::CacheQuantize(_)))) {
            return unusable(name, "reads keys and values that are already quantized");
        }
        let Some(module) = module_of(graph, reads[0]) else { return unusable(name, "reads keys that no linear layer computes") };
        if graph.params().any(|(_, value)| value.name == format!("{module}.kv_b_proj.weight")) {
            return unusable(name, "is multi-head latent attention, whose cache holds the latent vector and not the keys and values of the heads");
        }
        found.push(CachedAttention { module: module.to_owned(), reads: reads.map(|id| graph.value(id).name.clone()) });
    }
    if found.is_empty() {
        return Err(Error::graph("the model", format!("has no attention and therefore no KV cache: {WITHOUT}")));
    }
    Ok(found)
}

/// The module of the linear layer that a value is computed from, following first inputs.
fn module_of(graph: &Graph, mut id: ValueId) -> Option<&str> {
    loop {
        let node = graph.producer(id)?;
        if let Op::Linear(_) = node.op {
            let weight = graph.value(*node.inputs.get(1)?).name.as_str();
            return weight.strip_suffix(".weight")?.rsplit_once('.').map(|(module, _)| module);
        }
        id = *node.inputs.first()?;
    }
}

/// Inserts a fake-quantized KV cache into all attention nodes, with scales from the checkpoint.
pub fn insert(graph: &Graph, catalog: &dyn Catalog, scheme: CacheScheme) -> Result<Graph> {
    let mut scales: BTreeMap<String, (String, Vec<usize>)> = BTreeMap::new();
    for found in cached_attentions(graph)? {
        for (value, scale) in found.reads.iter().zip(found.scales()) {
            let Some(shape) = catalog.shape(&scale) else {
                return Err(Error::tensor(
                    &scale,
                    "is missing, although `kv_cache_scheme` in config.json specifies quantized keys and values",
                    "write the checkpoint again, or run `compress dequantize`, which removes `kv_cache_scheme`, to run the model without a quantized cache",
                ));
            };
            let (is_valid, strategy) = match scheme.scales {
                CacheScales::Tensor => (shape == [1], "tensor"),
                CacheScales::Head => (matches!(shape[..], [_, 1, 1]), "attn_head"),
            };
            if !is_valid {
                let reason = format!("has the shape {shape:?}, but `kv_cache_scheme` in config.json specifies the strategy {strategy}");
                return Err(Error::tensor(&scale, reason, "write the checkpoint again"));
            }
            scales.insert(value.clone(), (scale, shape));
        }
    }
    let mut quantized: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut through = |builder: &mut Builder, value: ValueId, name: &str| -> Result<ValueId> {
        let (None, Some((scale, shape))) = (quantized.get(&value), scales.get(name)) else { return Ok(quantized.get(&value).copied().unwrap_or(value)) };
        let scale = builder.param(scale, shape)?;
        let id = builder.node(&format!("{name}/cached"), CacheQuantize { format: scheme.format }, &[value, scale])?;
        quantized.insert(value, id);
        Ok(id)
    };
    rebuild(graph, catalog, &mut |mut step: Rewrite| {
        if let Op::Attention(_) = step.node.op {
            for at in [1, 2] {
                step.inputs[at] = through(step.builder, step.inputs[at], &graph.value(step.node.inputs[at]).name)?;
            }
        }
        step.copy()
    })
}
