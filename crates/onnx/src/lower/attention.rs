//! Attention as elementary operators, so that its matrix products can be quantized.

use super::super::proto::AttributeProto;
use super::{Lowering, kv_cache};
use crate::error::Result;
use crate::ir::ops::{Attention, ChunkBias, RelativeBias, RelativeProducts, SplitHeads, WindowBias};

const HEADS_FIRST: [i64; 4] = [0, 2, 1, 3];

pub(super) fn split_heads(op: &SplitHeads, n: &mut Lowering) -> Result<()> {
    let width = op.head_dim.max(1) as i64;
    let shape = n.ints(&[0, 0, n.width(0)? / width, width]);
    let heads = n.emit("Reshape", "heads", &[&n.input(0), &shape], vec![]);
    n.finish("Transpose", &[&heads], vec![AttributeProto::ints("perm", HEADS_FIRST)]);
    Ok(())
}

pub(super) fn merge_heads(n: &mut Lowering) -> Result<()> {
    let shape = n.ints(&[0, 0, n.fixed(0, 1)? * n.fixed(0, 3)?]);
    let heads = n.emit("Transpose", "heads", &[&n.input(0)], vec![AttributeProto::ints("perm", HEADS_FIRST)]);
    n.finish("Reshape", &[&heads, &shape], vec![]);
    Ok(())
}

/// Query heads that share a key head are stacked in one matrix product, so that keys are not copied.
pub(super) fn attention(op: &Attention, n: &mut Lowering) -> Result<()> {
    if op.segments {
        return Err(n.node_error("reads several texts in each row, as in training, but a file for inference reads one".into()));
    }
    let [mut q, mut k, mut v] = [0, 1, 2].map(|i| n.input(i));
    // The keys of cross-attention are those of all steps.
    if n.cache.is_some() && op.causal {
        [k, v] = kv_cache::append(n, [k, v])?;
    }
    let (heads, groups) = (n.fixed(0, 1)?, n.fixed(1, 1)?);
    let grouped = heads != groups;
    let (mut given, mut sinks) = (None, None);
    for input in 3..n.inputs() {
        match n.ty(input)?.shape.len() {
            1 => sinks = Some(n.input(input)),
            2 => {}
            _ => given = Some(n.input(input)),
        }
    }
    let added: Vec<String> = match (given, mask_bias(op, n)?) {
        // Not their sum, in which keys that both hide would be below keys that one hides.
        (Some(chunks), Some(hidden)) if has_chunks(n) => {
            vec![n.emit("Min", "hidden_or_apart", &[&chunks, &hidden], vec![])]
        }
        (given, hidden) => given.into_iter().chain(hidden).collect(),
    };
    if grouped {
        let shape = n.ints(&[0, groups, -1, n.fixed(0, 3)?]);
        q = n.emit("Reshape", "queries", &[&q, &shape], vec![]);
    }
    if n.half && op.scale != 1.0 {
        // Scaled before the product, which would otherwise exceed the range of 16-bit floats.
        let scale = n.float(op.scale);
        q = n.emit("Mul", "scaled", &[&q, &scale], vec![]);
    }
    let keys = n.emit("Transpose", "keys", &[&k], vec![AttributeProto::ints("perm", [0, 1, 3, 2])]);
    let mut scores = n.emit("MatMul", "products", &[&q, &keys], vec![]);
    if !n.half && op.scale != 1.0 {
        let scale = n.float(op.scale);
        scores = n.emit("Mul", "scores", &[&scores, &scale], vec![]);
    }
    if let Some(cap) = op.soft_cap {
        let cap = n.float(cap);
        let part = n.emit("Div", "part", &[&scores, &cap], vec![]);
        let part = n.emit("Tanh", "held", &[&part], vec![]);
        scores = n.emit("Mul", "capped", &[&part, &cap], vec![]);
    }
    let by_head = grouped && (sinks.is_some() || !added.is_empty());
    if by_head {
        scores = regroup_heads(n, "by_head", &scores, heads);
    }
    for bias in &added {
        scores = n.emit("Add", "masked", &[&scores, bias], vec![]);
    }
    // Sinks are the last column of the scores, and have no values.
    if let Some(sinks) = &sinks {
        let (shape, one, axis) = (n.ints(&[1, heads, 1, 1]), n.ints(&[1]), || vec![AttributeProto::int("axis", -1)]);
        let column = n.emit("Reshape", "sinks", &[sinks, &shape], vec![]);
        let rows = n.emit("Shape", "rows", &[&scores], vec![AttributeProto::int("start", 0), AttributeProto::int("end", 3)]);
        let rows = n.emit("Concat", "column", &[&rows, &one], vec![AttributeProto::int("axis", 0)]);
        let column = n.emit("Expand", "sink_scores", &[&column, &rows], vec![]);
        scores = n.emit("Concat", "with_sinks", &[&scores, &column], axis());
        let (first, end, last) = (n.ints(&[0]), n.ints(&[-1]), n.ints(&[3]));
        scores = n.emit("Softmax", "shares", &[&scores], axis());
        scores = n.emit("Slice", "without_sinks", &[&scores, &first, &end, &last], vec![]);
    }
    if by_head {
        scores = regroup_heads(n, "by_group", &scores, groups);
    }
    let mut weights = match sinks {
        Some(_) => scores,
        None => n.emit("Softmax", "weights", &[&scores], vec![AttributeProto::int("axis", -1)]),
    };
    if op.zero_where_hidden {
        let (nothing, zero) = (n.emit("IsNaN", "hidden", &[&weights], vec![]), n.float(0.0));
        weights = n.emit("Where", "seen", &[&nothing, &zero, &weights], vec![]);
    }
    if grouped {
        let shape = n.ints(&[0, heads, -1, 0]);
        let context = n.emit("MatMul", "context", &[&weights, &v], vec![]);
        n.finish("Reshape", &[&context, &shape], vec![]);
    } else {
        n.finish("MatMul", &[&weights, &v], vec![]);
    }
    Ok(())
}

/// Whether the current node reads a mask of chunks.
fn has_chunks(n: &Lowering) -> bool {
    n.node().is_some_and(|node| node.inputs.iter().any(|id| n.graph.is_chunk_mask(*id)))
}

/// Reshapes scores `[batch, heads, rows, keys]` to another number of heads.
fn regroup_heads(n: &mut Lowering, part: &str, scores: &str, matrices: i64) -> String {
    let shape = n.ints(&[0, matrices, -1, 0]);
    n.emit("Reshape", part, &[scores, &shape], vec![])
}

/// The additive mask of the scores: zero for visible keys, the lowest number for hidden ones; `None`
/// without masking.
fn mask_bias(op: &Attention, n: &mut Lowering) -> Result<Option<String>> {
    let mask = if n.inputs() > 3 && n.ty(3)?.shape.len() == 2 { Some(n.input(3)) } else { None };
    let ordered = op.causal || op.window.is_some();
    if mask.is_none() && !ordered {
        return Ok(None);
    }
    let (queries, keys) = (&n.ty(0)?.shape[2], &n.ty(1)?.shape[2]);
    let what = format!("|{queries}|{keys}|{}|{:?}|{mask:?}", op.causal, op.window);
    n.share(&format!("attention_bias{what}"), |n| {
        let (zero, lowest) = (n.float(0.0), lowest(n));
        let padded = match &mask {
            None => None,
            Some(mask) => {
                let (nothing, axes) = (n.int(0), n.ints(&[1, 2]));
                let padded = n.emit("Equal", "padded", &[mask, &nothing], vec![]);
                Some(n.emit("Unsqueeze", "padded_keys", &[&padded, &axes], vec![]))
            }
        };
        let by_position = if ordered { Some(position_mask(op, n, mask.as_deref())?) } else { None };
        let masked = match (padded, by_position) {
            (Some(a), Some(b)) => n.emit("Or", "hidden", &[&a, &b], vec![]),
            (a, b) => a.or(b).unwrap_or_default(),
        };
        Ok(n.emit("Where", "bias", &[&masked, &lowest, &zero], vec![]))
    })
    .map(Some)
}

/// The number that is added to the scores of hidden keys. With 16-bit floats, half of the range, so that the
/// sum remains finite.
fn lowest(n: &mut Lowering) -> String {
    let lowest = if n.half { f64::from(half::f16::MIN) / 2.0 } else { f64::from(f32::MIN) };
    n.float(lowest)
}

/// Keys that are hidden because of their position, `[queries, keys]`. With a KV cache, windows skip
/// padding.
fn position_mask(op: &Attention, n: &mut Lowering, mask: Option<&str>) -> Result<String> {
    let [queries, keys] = if n.cache.is_some() { kv_cache::position_ranges(n, 2)? } else { [n.range(0, 2)?, n.range(1, 2)?] };
    let column = n.ints(&[1]);
    let queries = n.emit("Unsqueeze", "queries", &[&queries, &column], vec![]);
    let after = op.causal.then(|| n.emit("Greater", "later", &[&keys, &queries], vec![]));
    let Some(window) = op.window else { return Ok(after.unwrap_or_default()) };
    let window = n.int(window as i64);
    let mut distance = match mask {
        Some(mask) if n.cache.is_some() => kv_cache::key_distances(n, mask)?,
        _ => n.emit("Sub", "distance", &[&queries, &keys], vec![]),
    };
    if after.is_none() {
        distance = n.emit("Abs", "places", &[&distance], vec![]);
    }
    let far = n.emit("GreaterOrEqual", "far", &[&distance, &window], vec![]);
    Ok(match after {
        Some(after) => n.emit("Or", "out_of_window", &[&after, &far], vec![]),
        None => far,
    })
}

/// The bias table is reordered by distance once, and gathered for each pair of positions. Layers that
/// share the table share the bias.
pub(super) fn relative_bias(op: &RelativeBias, n: &mut Lowering) -> Result<()> {
    let (sequence, table) = (&n.ty(0)?.shape[1], n.input(1));
    let bias = n.share(&format!("relative_bias|{sequence}|{table}|{op:?}"), |n| biases(op, n))?;
    n.finish("Identity", &[&bias], vec![]);
    Ok(())
}

fn biases(op: &RelativeBias, n: &mut Lowering) -> Result<String> {
    let [queries, keys] = if n.cache.is_some() { kv_cache::position_ranges(n, 1)? } else { [n.range(0, 1)?, n.range(0, 1)?] };
    let table = n.input(1);
    let (column, rows) = (n.ints(&[1]), n.ints(&op.by_distance()));
    let far = op.max_distance as i64;
    let (far, least) = (n.int(far), n.int(-far));
    let by_distance = n.emit("Gather", "by_distance", &[&table, &rows], vec![AttributeProto::int("axis", 0)]);
    let by_head = n.emit("Transpose", "by_head", &[&by_distance], vec![AttributeProto::ints("perm", [1, 0])]);
    let queries = n.emit("Unsqueeze", "queries", &[&queries, &column], vec![]);
    let behind = n.emit("Sub", "behind", &[&keys, &queries], vec![]);
    let held = n.emit("Clip", "held", &[&behind, &least, &far], vec![]);
    let at = n.emit("Add", "at", &[&held, &far], vec![]);
    Ok(n.emit("Gather", "bias", &[&by_head, &at], vec![AttributeProto::int("axis", 1)]))
}

/// The table is ordered by relative position, from `1 - sequence` to `sequence`. Rows of the product are
/// shifted against each other by one element each, by a reshape of the flattened rows.
pub(super) fn relative_products(op: &RelativeProducts, n: &mut Lowering) -> Result<()> {
    let (heads, width, table) = (n.fixed(0, 1)?, n.fixed(0, 3)?, n.input(1));
    let mut x = n.input(0);
    let (size, key) = (n.size(0, 2)?, format!("{}|{op:?}", n.ty(0)?.shape[2]));
    let [rows, before, beyond] = n.share_many(&format!("relative_products|{key}"), |n| {
        let (one, first) = (n.int(1), n.ints(&[0]));
        let before = n.emit("Sub", "before", &[&size, &one], vec![]);
        let least = n.emit("Neg", "furthest_before", &[&before], vec![]);
        let end = n.emit("Add", "end", &[&size, &one], vec![]);
        let places = n.emit("Range", "places", &[&least, &end, &one], vec![]);
        let (rows, reach) = op.by_distance();
        let (rows, far, least) = (n.ints(&rows), n.int(reach), n.int(-reach));
        let held = n.emit("Clip", "held", &[&places, &least, &far], vec![]);
        let at = n.emit("Add", "at", &[&held, &far], vec![]);
        let rows = n.emit("Gather", "rows", &[&rows, &at], vec![AttributeProto::int("axis", 0)]);
        let [before, beyond] = [("moved", &before), ("columns", &size)].map(|(part, size)| n.emit("Unsqueeze", part, &[size, &first], vec![]));
        Ok([rows, before, beyond])
    })?;
    if op.scale != 1.0 {
        let scale = n.float(op.scale);
        x = n.emit("Mul", "scaled", &[&x, &scale], vec![]);
    }
    let shape = n.ints(&[-1, heads, width]);
    let in_order = |n: &mut Lowering, vectors: &str, axis: i64| n.emit("Gather", "by_place", &[vectors, &rows], vec![AttributeProto::int("axis", axis)]);
    let by_head = |n: &mut Lowering, vectors: &str| {
        let vectors = n.emit("Reshape", "vectors", &[vectors, &shape], vec![]);
        n.emit("Transpose", "by_head", &[&vectors], vec![AttributeProto::ints("perm", [1, 2, 0])])
    };
    // Gathering rows is faster than gathering columns. ONNX Runtime 1.31 crashes in a 16-bit product
    // that reads a transpose of a gathered constant.
    let vectors = if n.half {
        let vectors = by_head(n, &table);
        in_order(n, &vectors, 2)
    } else {
        let vectors = in_order(n, &table, 0);
        by_head(n, &vectors)
    };
    let products = n.emit("MatMul", "products", &[&x, &vectors], vec![]);
    let (flat, last, axes) = (n.ints(&[0, heads, -1]), n.ints(&[-1]), [n.ints(&[2]), n.ints(&[3])]);
    let flat = n.emit("Reshape", "flat", &[&products, &flat], vec![]);
    let flat = n.emit("Slice", "from_first", &[&flat, &before, &last, &axes[0]], vec![]);
    let sizes = n.emit("Shape", "sizes", &[&x], vec![AttributeProto::int("start", 0), AttributeProto::int("end", 3)]);
    let sizes = n.emit("Concat", "shape", &[&sizes, &last], vec![AttributeProto::int("axis", 0)]);
    let shorter = n.emit("Reshape", "shorter", &[&flat, &sizes], vec![]);
    let first = n.ints(&[0]);
    let inputs = [&shorter, &first, &beyond, &axes[1]].map(String::as_str);
    if op.of_keys {
        let by_key = n.emit("Slice", "by_key", &inputs, vec![]);
        n.finish("Transpose", &[&by_key], vec![AttributeProto::ints("perm", [0, 1, 3, 2])]);
    } else {
        n.finish("Slice", &inputs, vec![]);
    }
    Ok(())
}

/// The mask of keys outside of the chunk of a query, which all layers share. With a KV cache, padding has no
/// positions of its own.
pub(super) fn chunk_bias(op: ChunkBias, n: &mut Lowering) -> Result<()> {
    let mask = n.input(0);
    let bias = n.share(&format!("chunk_bias|{}|{op:?}", n.ty(0)?.shape[1]), |n| {
        let [queries, keys] = match n.cache {
            Some(_) => kv_cache::positions_of_pairs(n, &mask)?,
            None => {
                let (places, rows, columns) = (n.range(0, 1)?, n.ints(&[0, 2]), n.ints(&[0, 1]));
                [n.emit("Unsqueeze", "queries", &[&places, &rows], vec![]), n.emit("Unsqueeze", "keys", &[&places, &columns], vec![])]
            }
        };
        let size = n.int(op.size as i64);
        let [queries, keys] = [("query_chunks", queries), ("key_chunks", keys)].map(|(part, places)| n.emit("Div", part, &[&places, &size], vec![]));
        let (zero, lowest) = (n.float(0.0), lowest(n));
        let same = n.emit("Equal", "same", &[&queries, &keys], vec![]);
        Ok(n.emit("Where", "bias", &[&same, &zero, &lowest], vec![]))
    })?;
    n.finish("Identity", &[&bias], vec![]);
    Ok(())
}

/// The bias of each pair of positions in a window, with a mask for pairs from different regions of a
/// shifted image.
pub(super) fn window_bias(op: &WindowBias, n: &mut Lowering) -> Result<()> {
    let (table, heads, places) = (n.input(0), n.fixed(0, 1)?, (op.window * op.window) as i64);
    let windows = (op.windows[0] * op.windows[1]) as i64;
    let (pairs, axis) = (n.ints(&op.pairs()), AttributeProto::int("axis", 0));
    let by_pair = n.emit("Gather", "by_pair", &[&table, &pairs], vec![axis]);
    let by_head = n.emit("Transpose", "by_head", &[&by_pair], vec![AttributeProto::ints("perm", [1, 0])]);
    let shape = n.ints(&[heads, 1, places, places]);
    let by_head = n.emit("Reshape", "pairs", &[&by_head, &shape], vec![]);
    let all = if op.shift == 0 {
        let shape = n.ints(&[heads, windows, places, places]);
        n.emit("Expand", "all", &[&by_head, &shape], vec![])
    } else {
        let apart = n.share(&format!("window_parts|{op:?}"), |n| {
            let parts = n.ints(&op.regions());
            let [queries, keys] = [("queries", [windows, places, 1]), ("keys", [windows, 1, places])].map(|(part, shape)| {
                let shape = n.ints(&shape);
                n.emit("Reshape", part, &[&parts, &shape], vec![])
            });
            let (apart, together) = (n.float(-WindowBias::MASK_PENALTY), n.float(0.0));
            let same = n.emit("Equal", "same", &[&queries, &keys], vec![]);
            Ok(n.emit("Where", "apart", &[&same, &together, &apart], vec![]))
        })?;
        n.emit("Add", "all", &[&by_head, &apart], vec![])
    };
    let shape = n.ints(&[heads * windows, places, places]);
    n.finish("Reshape", &[&all, &shape], vec![]);
    Ok(())
}
