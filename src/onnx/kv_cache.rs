//! Decoders that go on with a text: what they take and give beside tokens, under the names that optimum and onnxruntime-genai use.
//!
//! Keys and values of earlier tokens are inputs, and those of all tokens outputs: `past_key_values.N.key` `[batch, groups, past_sequence, d]`
//! and `present.N.key`, for the attention of number `N` in the order of the graph; keys as rotary embeddings have turned them. The mask is that
//! of all tokens, positions are those of the new ones, so that padding may stand anywhere.

use std::collections::BTreeSet;

use super::lowering::Lowering;
use super::proto::{AttributeProto, DataType, ValueInfoProto};
use super::write::info;
use crate::error::{Error, Result};
use crate::ir::decoder::{LOGITS, MASK, POSITIONS, TOKENS, past, present};
use crate::ir::ops::RotaryScaling;
use crate::ir::{Dim, Graph, Kind, Op, TensorType, ValueId};

/// The number of earlier tokens.
const PAST: &str = "past_sequence";

/// What is kept of each token for one attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub groups: usize,
    /// Widths of keys and of values.
    pub widths: [usize; 2],
}

/// The cache of a graph that is being written.
#[derive(Debug, Default)]
pub(super) struct Cache {
    /// By attention.
    pub kept: Vec<Kept>,
    /// Whether positions are read.
    pub positions: bool,
}

/// Refuses graphs whose inputs, outputs and readers of the mask are not those of a decoder.
pub(super) fn check(graph: &Graph) -> Result<()> {
    let refuse = |what: String, reason: &str| Err(Error::graph(what, format!("{reason}: leave `cache` of `onnx` out")));
    for (id, value) in graph.inputs() {
        if ![TOKENS, MASK].contains(&value.name.as_str()) {
            return refuse(format!("input `{}`", value.name), "is not known of decoders with a cache");
        }
        if value.name == MASK
            && let Some(node) = graph.nodes().iter().find(|node| node.inputs.contains(&id) && !reads_mask(&node.op))
        {
            return refuse(format!("graph node `{}`", graph.value(node.output).name), "reads the mask, which with a cache is that of all tokens");
        }
    }
    if let Some(name) = [TOKENS, MASK].into_iter().find(|name| !graph.inputs().any(|(_, value)| value.name == *name)) {
        return refuse("this model".into(), &format!("has no input `{name}`, which says how many tokens there are"));
    }
    let mask = |id: ValueId| graph.value(id).kind == Kind::Input && graph.value(id).name == MASK;
    for node in graph.nodes() {
        let name = || format!("graph node `{}`", graph.value(node.output).name);
        match &node.op {
            Op::Positions(op) if op.padding.is_some_and(|padding| padding != 0 || !node.inputs.iter().all(|id| mask(*id))) => {
                return refuse(name(), "counts positions by a padding token, and those of a cache come from `position_ids`");
            }
            Op::Attention(_) if node.inputs.len() > 4 || node.inputs.get(3).is_some_and(|id| graph.value(*id).ty.shape.len() != 2) => {
                return refuse(name(), "adds a bias to its scores, which has no rows for earlier tokens");
            }
            Op::Attention(_) if node.inputs.get(3).is_some_and(|id| !mask(*id)) => {
                return refuse(name(), "hides keys by another mask than `attention_mask`, which has no columns for earlier tokens");
            }
            Op::Rotary(op) if matches!(op.scaling, RotaryScaling::Dynamic { .. }) => {
                return refuse(name(), "turns keys by angles that follow the length of the text (`dynamic`), and kept keys would have those of a shorter one");
            }
            _ => {}
        }
    }
    let public: BTreeSet<String> =
        (0..graph.nodes().len()).flat_map(|number| [past(number), present(number)]).flatten().chain([POSITIONS.to_owned()]).collect();
    if let Some(id) = graph.ids().find(|id| public.contains(&graph.value(*id).name)) {
        return refuse(format!("graph value `{}`", graph.value(id).name), "has a name that an input or output of the cache has");
    }
    if graph.outputs().iter().any(|(name, id)| name == LOGITS && graph.value(*id).ty.shape.len() == 3) {
        return Ok(());
    }
    refuse("this model".into(), "has no `logits` for each token")
}

fn reads_mask(op: &Op) -> bool {
    matches!(op, Op::Attention(_) | Op::Positions(_))
}

/// The inputs of a file with a cache.
pub(super) fn inputs(graph: &Graph, cache: &Cache, half: bool) -> Vec<ValueInfoProto> {
    let tokens = tokens(graph);
    let mut ports: Vec<ValueInfoProto> = Vec::new();
    for (_, value) in graph.inputs() {
        let shape = if value.name == MASK { of_all(&tokens) } else { tokens.clone() };
        ports.push(info(&value.name, &TensorType::int(shape)));
    }
    ports.extend(cache.positions.then(|| info(POSITIONS, &TensorType::int(tokens.clone()))));
    let earlier: Vec<Dim> = tokens.first().cloned().into_iter().chain([Dim::named(PAST)]).collect();
    ports.extend(kept(cache, &earlier, half, past));
    ports
}

/// The outputs of a file with a cache, behind the logits.
pub(super) fn outputs(graph: &Graph, cache: &Cache, half: bool) -> Vec<ValueInfoProto> {
    let tokens = tokens(graph);
    kept(cache, &of_all(&tokens), half, present)
}

/// The sizes of new tokens, `[batch, sequence]`.
fn tokens(graph: &Graph) -> Vec<Dim> {
    graph.inputs().find(|(_, value)| value.name == TOKENS).map(|(_, value)| value.ty.shape.clone()).unwrap_or_default()
}

/// Of new tokens `[batch, sequence]`, the sizes of all.
fn of_all(tokens: &[Dim]) -> Vec<Dim> {
    let all = |(axis, dim): (usize, &Dim)| if axis == 1 { Dim::named(&format!("{PAST} + {dim}")) } else { dim.clone() };
    tokens.iter().enumerate().map(all).collect()
}

fn kept(cache: &Cache, tokens: &[Dim], half: bool, names: fn(usize) -> [String; 2]) -> Vec<ValueInfoProto> {
    let [batch, sequence] = tokens else { return Vec::new() };
    let port = |(number, kept): (usize, &Kept)| {
        let of = |(name, width): (String, usize)| {
            let mut port = info(&name, &TensorType::float([batch.clone(), Dim::Fixed(kept.groups), sequence.clone(), Dim::Fixed(width)]));
            if let Some(tensor) = port.r#type.as_mut().and_then(|ty| ty.tensor_type.as_mut()).filter(|_| half) {
                tensor.elem_type = Some(DataType::Float16 as i32);
            }
            port
        };
        names(number).into_iter().zip(kept.widths).map(of).collect::<Vec<_>>()
    };
    cache.kept.iter().enumerate().flat_map(port).collect()
}

/// The keys and values of all tokens, for an attention that is given those of the new ones.
pub(super) fn keep(n: &mut Lowering, new: [String; 2]) -> Result<[String; 2]> {
    let size = |n: &Lowering, input, axis| Ok::<_, Error>(usize::try_from(n.fixed(input, axis)?).unwrap_or(0));
    let kept = Kept { heads: size(n, 0, 1)?, groups: size(n, 1, 1)?, widths: [size(n, 1, 3)?, size(n, 2, 3)?] };
    let Some(cache) = &mut n.cache else { return Ok(new) };
    let number = cache.kept.len();
    cache.kept.push(kept);
    let ([keys, values], [earlier_keys, earlier_values], [all_keys, all_values]) = (new, past(number), present(number));
    let axis = || vec![AttributeProto::int("axis", 2)];
    Ok([n.publish(&all_keys, "Concat", &[&earlier_keys, &keys], axis()), n.publish(&all_values, "Concat", &[&earlier_values, &values], axis())])
}

/// The input that says where tokens stand.
pub(super) fn positions(n: &mut Lowering) -> String {
    if let Some(cache) = &mut n.cache {
        cache.positions = true;
    }
    POSITIONS.to_owned()
}

/// How many tokens the longest text has, by its positions.
pub(super) fn length(n: &mut Lowering) -> Result<String> {
    let positions = positions(n);
    n.share("length", |n| {
        let (_, attributes) = n.reduction("ReduceMax", &[], false);
        let (last, one) = (n.emit("ReduceMax", "last", &[&positions], attributes), n.int(1));
        Ok(n.emit("Add", "tokens", &[&last, &one], vec![]))
    })
}

/// Places of the new tokens among all, and places of all.
pub(super) fn places(n: &mut Lowering) -> Result<[String; 2]> {
    let new = n.size(0, 2)?;
    n.share_many("places", |n| {
        let [first, _] = past(0);
        let (axis, zero, one) = (n.ints(&[0]), n.int(0), n.int(1));
        let size = n.emit("Shape", "past_shape", &[&first], vec![AttributeProto::int("start", 2), AttributeProto::int("end", 3)]);
        let past = n.emit("Squeeze", "past", &[&size, &axis], vec![]);
        let all = n.emit("Add", "all", &[&past, &new], vec![]);
        Ok([n.emit("Range", "of_new", &[&past, &all, &one], vec![]), n.emit("Range", "of_all", &[&zero, &all, &one], vec![])])
    })
}

/// How many positions keys stand before queries, `[batch, 1, sequence, past_sequence + sequence]`: padding between them has none.
pub(super) fn distances(n: &mut Lowering, mask: &str) -> Result<String> {
    let queries = positions(n);
    n.share("distances", |n| {
        let (one, of_queries, of_keys) = (n.int(1), n.ints(&[1, 3]), n.ints(&[1, 2]));
        let counted = n.emit("CumSum", "counted", &[mask, &one], vec![]);
        let keys = n.emit("Sub", "positions", &[&counted, &one], vec![]);
        let keys = n.emit("Unsqueeze", "keys", &[&keys, &of_keys], vec![]);
        let queries = n.emit("Unsqueeze", "queries", &[&queries, &of_queries], vec![]);
        Ok(n.emit("Sub", "value", &[&queries, &keys], vec![]))
    })
}
