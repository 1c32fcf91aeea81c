//! Concatenation with cached keys and values, and positions of cached and new tokens.

use super::super::kv_cache::CachedAttention;
use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::{Error, Result};
use crate::ir::decoder::{POSITIONS, past, present};

/// Concatenates the cached keys and values of the current attention and the `new` ones, and declares the
/// results as outputs.
pub(super) fn append(n: &mut Lowering, new: [String; 2]) -> Result<[String; 2]> {
    let size = |n: &Lowering, input, axis| Ok::<_, Error>(usize::try_from(n.fixed(input, axis)?).unwrap_or(0));
    let attention = CachedAttention { heads: size(n, 0, 1)?, groups: size(n, 1, 1)?, widths: [size(n, 1, 3)?, size(n, 2, 3)?] };
    let Some(cache) = &mut n.cache else { return Ok(new) };
    let label = cache.label(cache.attentions.len());
    cache.attentions.push(attention);
    let ([keys, values], [earlier_keys, earlier_values], [all_keys, all_values]) = (new, past(&label), present(&label));
    let axis = || vec![AttributeProto::int("axis", 2)];
    Ok([n.publish(&all_keys, "Concat", &[&earlier_keys, &keys], axis()), n.publish(&all_values, "Concat", &[&earlier_values, &values], axis())])
}

/// Name of the input with token positions.
pub(super) fn positions(n: &mut Lowering) -> String {
    if let Some(cache) = &mut n.cache {
        cache.positions = true;
    }
    POSITIONS.to_owned()
}

/// Length of the longest sequence, from the positions.
pub(super) fn length(n: &mut Lowering) -> Result<String> {
    let positions = positions(n);
    n.share("length", |n| {
        let (_, attributes) = n.reduction("ReduceMax", &[], false);
        let (last, one) = (n.emit("ReduceMax", "last", &[&positions], attributes), n.int(1));
        Ok(n.emit("Add", "tokens", &[&last, &one], vec![]))
    })
}

/// Column numbers of the new tokens in the mask, and of all tokens. `axis` is the token axis of the first
/// input of the current node.
pub(super) fn position_ranges(n: &mut Lowering, axis: usize) -> Result<[String; 2]> {
    let new = n.size(0, axis)?;
    n.share_many("places", |n| {
        let [first, _] = past(n.cache.as_ref().map_or_else(String::new, |cache| cache.label(0)));
        let (axis, zero, one) = (n.ints(&[0]), n.int(0), n.int(1));
        let size = n.emit("Shape", "past_shape", &[&first], vec![AttributeProto::int("start", 2), AttributeProto::int("end", 3)]);
        let past = n.emit("Squeeze", "past", &[&size, &axis], vec![]);
        let all = n.emit("Add", "all", &[&past, &new], vec![]);
        Ok([n.emit("Range", "of_new", &[&past, &all, &one], vec![]), n.emit("Range", "of_all", &[&zero, &all, &one], vec![])])
    })
}

/// Positions of queries `[batch, 1, sequence, 1]` and of keys `[batch, 1, 1, past_sequence + sequence]`.
/// Padding has no positions of its own.
pub(super) fn positions_of_pairs(n: &mut Lowering, mask: &str) -> Result<[String; 2]> {
    let queries = positions(n);
    n.share_many("positions_of_pairs", |n| {
        let (one, of_queries, of_keys) = (n.int(1), n.ints(&[1, 3]), n.ints(&[1, 2]));
        let counted = n.emit("CumSum", "counted", &[mask, &one], vec![]);
        let keys = n.emit("Sub", "positions", &[&counted, &one], vec![]);
        let keys = n.emit("Unsqueeze", "keys", &[&keys, &of_keys], vec![]);
        Ok([n.emit("Unsqueeze", "queries", &[&queries, &of_queries], vec![]), keys])
    })
}

/// Position of each query minus that of each key, `[batch, 1, sequence, past_sequence + sequence]`.
pub(super) fn key_distances(n: &mut Lowering, mask: &str) -> Result<String> {
    let [queries, keys] = positions_of_pairs(n, mask)?;
    n.share("distances", |n| Ok(n.emit("Sub", "value", &[&queries, &keys], vec![])))
}
