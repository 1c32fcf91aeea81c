//! Decoders with a KV cache: inputs and outputs in addition to tokens, under the names that optimum and
//! onnxruntime-genai use.
//!
//! Keys and values of cached tokens are inputs, those of all tokens are outputs: `past_key_values.N.key`
//! `[batch, groups, past_sequence, d]` and `present.N.key`, where `N` numbers the attentions in graph
//! order. In an encoder-decoder model, `N` is followed by `decoder` or `encoder`, the source of the keys.
//! Rotary embeddings are applied before keys are cached. The mask covers all tokens, `position_ids` only
//! the new ones, so that padding can be at any position.

use std::collections::BTreeSet;

use super::proto::{DataType, ValueInfoProto};
use super::value_info::{value_info_proto, value_info_proto_as};
use crate::error::{Error, Result};
use crate::ir::decoder::{LOGITS, MASK, POSITIONS, SIDES, TOKENS, past, present, successor};
use crate::ir::ops::RotaryScaling;
use crate::ir::{Dim, Graph, Kind, Op, TensorType, ValueId};

/// Name of the dimension for the number of cached tokens.
const PAST: &str = "past_sequence";

/// Shape of the cache of one attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedAttention {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub groups: usize,
    /// Widths of keys and of values.
    pub widths: [usize; 2],
}

/// The KV cache of a graph, collected while it is lowered.
#[derive(Debug, Default)]
pub(super) struct KvCache {
    /// Cache shapes, in graph order.
    pub attentions: Vec<CachedAttention>,
    /// Whether `position_ids` is used.
    pub positions: bool,
    /// Whether keys and values over the output of an encoder are inputs of the graph.
    pub after_encoder: bool,
}

impl KvCache {
    /// The part of the names of cached keys and values that identifies the attention.
    pub fn label(&self, number: usize) -> String {
        if self.after_encoder { format!("{number}.{}", SIDES[0]) } else { number.to_string() }
    }
}

/// Rejects decoders of encoder-decoder models with ops that need more than tokens, keys and values of earlier
/// steps.
pub(super) fn check_after_encoder(graph: &Graph) -> Result<()> {
    let rank = |id: &ValueId| graph.value(*id).ty.shape.len();
    let is_relative = |id: &ValueId| graph.producer(*id).is_some_and(|node| matches!(node.op, Op::RelativeBias(_)));
    for node in graph.nodes() {
        let reason = match &node.op {
            op if has_other_state(op) => "has a state that is not part of a cache of keys and values",
            Op::Positions(op) if op.padding.is_some() => "derives positions from a padding token, but the file reads only new tokens",
            Op::Rotary(_) | Op::PositionScale(_) | Op::ChunkBias(_) | Op::RelativeProducts(_) => {
                "needs the positions of tokens, which are not an input of the file"
            }
            Op::Attention(op) if op.causal && node.inputs.iter().skip(3).any(|id| rank(id) > 1 && !is_relative(id)) => {
                "has a mask or a bias that has no columns for cached tokens"
            }
            _ => continue,
        };
        let name = &graph.value(node.output).name;
        return Err(Error::graph(format!("graph node `{name}`"), format!("{reason}: remove the option `cache` of `onnx`")));
    }
    Ok(())
}

/// Rejects graphs that cannot have a KV cache: unknown inputs, other uses of the mask, or positions that
/// depend on padding tokens.
pub(super) fn check(graph: &Graph) -> Result<()> {
    let refuse = |what: String, reason: &str| Err(Error::graph(what, format!("{reason}: remove the option `cache` of `onnx`")));
    if let Some(node) = graph.nodes().iter().find(|node| has_other_state(&node.op)) {
        let reason = format!("is a {}, whose state is not part of a KV cache of keys and values", node.op.name());
        return refuse(format!("graph node `{}`", graph.value(node.output).name), &reason);
    }
    for (id, value) in graph.inputs() {
        if ![TOKENS, MASK].contains(&value.name.as_str()) {
            return refuse(format!("input `{}`", value.name), "is not supported for decoders with a KV cache");
        }
        if value.name == MASK
            && let Some(node) = graph.nodes().iter().find(|node| node.inputs.contains(&id) && !reads_mask(&node.op))
        {
            return refuse(
                format!("graph node `{}`", graph.value(node.output).name),
                "uses the mask, which covers cached and new tokens in a file with a KV cache",
            );
        }
    }
    if let Some(name) = [TOKENS, MASK].into_iter().find(|name| !graph.inputs().any(|(_, value)| value.name == *name)) {
        return refuse("this model".into(), &format!("has no input `{name}`, which determines the number of tokens"));
    }
    let rank = |id: ValueId| graph.value(id).ty.shape.len();
    let mask = |id: ValueId| graph.value(id).kind == Kind::Input && graph.value(id).name == MASK;
    for node in graph.nodes() {
        let name = || format!("graph node `{}`", graph.value(node.output).name);
        match &node.op {
            Op::Positions(op) if op.padding.is_some_and(|padding| padding != 0 || !node.inputs.iter().all(|id| mask(*id))) => {
                return refuse(name(), "derives positions from a padding token, but a file with a KV cache has the input `position_ids`");
            }
            Op::Attention(_) if node.inputs.iter().skip(3).any(|id| rank(*id) > 2 && !graph.is_chunk_mask(*id)) => {
                return refuse(name(), "adds a bias to the attention scores, which has no columns for cached tokens");
            }
            Op::Attention(_) if node.inputs.iter().skip(3).any(|id| rank(*id) == 2 && !mask(*id)) => {
                return refuse(name(), "uses a mask other than `attention_mask`, which has no columns for cached tokens");
            }
            Op::Rotary(op) if matches!(op.scaling, RotaryScaling::Dynamic { .. }) => {
                return refuse(
                    name(),
                    "scales rotary embeddings by the sequence length (`dynamic`), so cached keys would have the angles of a shorter sequence",
                );
            }
            _ => {}
        }
    }
    let public: BTreeSet<String> =
        (0..graph.nodes().len()).flat_map(|number| [past(number), present(number)]).flatten().chain([POSITIONS.to_owned()]).collect();
    if let Some(id) = graph.ids().find(|id| public.contains(&graph.value(*id).name)) {
        return refuse(format!("graph value `{}`", graph.value(id).name), "has the name of an input or output of the KV cache");
    }
    if graph.outputs().iter().any(|(name, id)| name == LOGITS && graph.value(*id).ty.shape.len() == 3) {
        return Ok(());
    }
    refuse("this model".into(), "has no output `logits` of shape `[batch, sequence, vocabulary]`")
}

/// Whether incremental decoding of an op has a state other than keys, values and positions.
fn has_other_state(op: &Op) -> bool {
    matches!(op, Op::CausalConv(_) | Op::GatedDelta(_))
}

fn reads_mask(op: &Op) -> bool {
    matches!(op, Op::Attention(_) | Op::ChunkBias(_) | Op::Positions(_))
}

/// Inputs of a decoder with a KV cache.
pub(super) fn inputs(graph: &Graph, cache: &KvCache, half: bool) -> Vec<ValueInfoProto> {
    let tokens = tokens(graph);
    let (mut ports, mut crossing) = (Vec::new(), Vec::new());
    for (_, value) in graph.inputs() {
        let ty = if value.name == MASK { TensorType::int(total_shape(&tokens)) } else { value.ty.clone() };
        let port = value_info_proto_as(&value.name, &ty, half.then_some(DataType::Float16));
        if successor(&value.name).is_some() { crossing.push(port) } else { ports.push(port) }
    }
    ports.extend(cache.positions.then(|| value_info_proto(POSITIONS, &TensorType::int(tokens.clone()))));
    let earlier: Vec<Dim> = tokens.first().cloned().into_iter().chain([Dim::named(PAST)]).collect();
    // optimum assigns keys and values to inputs in this order: layer by layer, those of cross-attention last.
    let mut crossing = crossing.into_iter();
    for pair in cache_ports(cache, &earlier, half, past).chunks(2) {
        ports.extend(pair.iter().cloned().chain(crossing.by_ref().take(2)));
    }
    ports
}

/// Cache outputs of a decoder, which follow the logits.
pub(super) fn outputs(graph: &Graph, cache: &KvCache, half: bool) -> Vec<ValueInfoProto> {
    let tokens = tokens(graph);
    cache_ports(cache, &total_shape(&tokens), half, present)
}

/// Shape of the new tokens, `[batch, sequence]`.
fn tokens(graph: &Graph) -> Vec<Dim> {
    graph.inputs().find(|(_, value)| value.name == TOKENS).map(|(_, value)| value.ty.shape.clone()).unwrap_or_default()
}

/// Shape of cached and new tokens, from that of the new tokens `[batch, sequence]`.
fn total_shape(tokens: &[Dim]) -> Vec<Dim> {
    let all = |(axis, dim): (usize, &Dim)| if axis == 1 { Dim::named(&format!("{PAST} + {dim}")) } else { dim.clone() };
    tokens.iter().enumerate().map(all).collect()
}

fn cache_ports(cache: &KvCache, tokens: &[Dim], half: bool, names: fn(String) -> [String; 2]) -> Vec<ValueInfoProto> {
    let [batch, sequence] = tokens else { return Vec::new() };
    let port = |(number, attention): (usize, &CachedAttention)| {
        let of = |(name, width): (String, usize)| {
            let mut port = value_info_proto(&name, &TensorType::float([batch.clone(), Dim::Fixed(attention.groups), sequence.clone(), Dim::Fixed(width)]));
            if let Some(tensor) = port.r#type.as_mut().and_then(|ty| ty.tensor_type.as_mut()).filter(|_| half) {
                tensor.elem_type = Some(DataType::Float16 as i32);
            }
            port
        };
        names(cache.label(number)).into_iter().zip(attention.widths).map(of).collect::<Vec<_>>()
    };
    cache.attentions.iter().enumerate().flat_map(port).collect()
}
