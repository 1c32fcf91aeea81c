//! Token embeddings, positions, and pooling over tokens.

use super::super::proto::{AttributeProto, DataType};
use super::{Lowering, integer, kv_cache};
use crate::error::Result;
use crate::ir::ops::{Positions, Select, TokenChoice, TokenPool};

pub(super) fn embedding(n: &mut Lowering) -> Result<()> {
    if n.layout(1).is_some_and(|layout| layout.integers.is_some()) {
        return integer::embedding(n);
    }
    n.finish("Gather", &[&n.input(1), &n.input(0)], vec![AttributeProto::int("axis", 0)]);
    Ok(())
}

pub(super) fn positions(op: &Positions, n: &mut Lowering) -> Result<()> {
    if n.cache.as_ref().is_some_and(|cache| !cache.after_encoder) {
        let (positions, first) = (kv_cache::positions(n), n.int(op.first() as i64));
        n.finish("Add", &[&positions, &first], vec![]);
        return Ok(());
    }
    let tokens = n.input(0);
    let Some(padding) = op.padding else {
        let [mut range, _] = if n.cache.is_some() { kv_cache::position_ranges(n, 1)? } else { [n.range(0, 1)?, String::new()] };
        if op.offset != 0 {
            let offset = n.int(op.offset);
            range = n.emit("Add", "moved", &[&range, &offset], vec![]);
        }
        let shape = n.emit("Shape", "shape", &[&tokens], vec![]);
        n.finish("Expand", &[&range, &shape], vec![]);
        return Ok(());
    };
    let (padding, first, one) = (n.int(padding), n.int(padding.saturating_add(op.offset)), n.int(1));
    let padded = n.emit("Equal", "padded", &[&tokens, &padding], vec![]);
    let real = n.emit("Not", "real", &[&padded], vec![]);
    let real = n.cast("ones", &real, DataType::Int64);
    let counted = n.emit("CumSum", "counted", &[&real, &one], vec![]);
    let counted = n.emit("Mul", "places", &[&counted, &real], vec![]);
    n.finish("Add", &[&counted, &first], vec![]);
    Ok(())
}

pub(super) fn prepend(n: &mut Lowering) -> Result<()> {
    let (token, x) = (n.input(0), n.input(1));
    let rest = n.ints(&[n.fixed(0, 1)?, n.fixed(0, 2)?]);
    let batch = n.emit("Shape", "batch", &[&x], vec![AttributeProto::int("start", 0), AttributeProto::int("end", 1)]);
    let shape = n.emit("Concat", "shape", &[&batch, &rest], vec![AttributeProto::int("axis", 0)]);
    let tokens = n.emit("Expand", "tokens", &[&token, &shape], vec![]);
    n.finish("Concat", &[&tokens, &x], vec![AttributeProto::int("axis", 1)]);
    Ok(())
}

pub(super) fn select(op: &Select, n: &mut Lowering) -> Result<()> {
    let index = n.int(op.index as i64);
    n.finish("Gather", &[&n.input(0), &index], vec![AttributeProto::int("axis", 1)]);
    Ok(())
}

pub(super) fn masked_mean(n: &mut Lowering) -> Result<()> {
    let (x, mask) = (n.wide(&n.input(0))?, n.input(1));
    let (last, least) = (n.ints(&[2]), n.float_wide(1e-9));
    let mask = n.cast("mask", &mask, DataType::Float);
    let mask = n.emit("Unsqueeze", "column", &[&mask, &last], vec![]);
    let masked = n.emit("Mul", "masked", &[&x, &mask], vec![]);
    let sum = n.reduce("ReduceSum", "sum", &masked, 1, false);
    let count = n.reduce("ReduceSum", "count", &mask, 1, false);
    let count = n.emit("Clip", "positive", &[&count, &least], vec![]);
    n.finish_wide("Div", &[&sum, &count], vec![]);
    Ok(())
}

pub(super) fn token_pool(op: &TokenPool, n: &mut Lowering) -> Result<()> {
    let (x, numbers) = (n.wide(&n.input(0))?, n.input(1));
    let column = n.ints(&[2]);
    let unsqueezed = |n: &mut Lowering, weights: &str| n.emit("Unsqueeze", "column", &[weights, &column], vec![]);
    if op.choice == TokenChoice::Max {
        let (zero, low, nothing) = (n.int(0), n.float_wide(TokenPool::MASKED), n.float_wide(0.0));
        let padded = n.emit("Equal", "padded", &[&numbers, &zero], vec![]);
        let hidden = n.emit("Where", "hidden", &[&padded, &low, &nothing], vec![]);
        let hidden = unsqueezed(n, &hidden);
        let lowered = n.emit("Add", "lowered", &[&x, &hidden], vec![]);
        let (axes, attributes) = n.reduction("ReduceMax", &[1], false);
        n.finish_wide("ReduceMax", &[lowered.as_str()].into_iter().chain(axes.as_deref()).collect::<Vec<_>>(), attributes);
        return Ok(());
    }
    let weights = token_weights(op.choice, &numbers, n)?;
    let weights = unsqueezed(n, &weights);
    let weighted = n.emit("Mul", "weighted", &[&x, &weights], vec![]);
    let (axes, attributes) = n.reduction("ReduceSum", &[1], false);
    n.finish_wide("ReduceSum", &[weighted.as_str()].into_iter().chain(axes.as_deref()).collect::<Vec<_>>(), attributes);
    Ok(())
}

/// Pooling weights of the tokens, floats `[batch, sequence]`.
fn token_weights(choice: TokenChoice, numbers: &str, n: &mut Lowering) -> Result<String> {
    let is = |n: &mut Lowering, other: &str| {
        let same = n.emit("Equal", "same", &[numbers, other], vec![]);
        n.cast("chosen", &same, DataType::Int64)
    };
    let real = |n: &mut Lowering| {
        let (zero, one) = (n.int(0), n.int(1));
        let padded = is(n, &zero);
        n.emit("Sub", "real", &[&one, &padded], vec![])
    };
    let normed = |n: &mut Lowering, counted: &str, root: bool| {
        let least = n.float_wide(1e-9);
        let counted = n.cast("counted", counted, DataType::Float);
        let sum = n.reduce("ReduceSum", "sum", &counted, 1, true);
        let mut sum = n.emit("Clip", "positive", &[&sum, &least], vec![]);
        if root {
            sum = n.emit("Sqrt", "root", &[&sum], vec![]);
        }
        n.emit("Div", "weights", &[&counted, &sum], vec![])
    };
    let (chosen, late) = match choice {
        TokenChoice::Max | TokenChoice::RootMean => {
            let real = real(n);
            return Ok(normed(n, &real, true));
        }
        TokenChoice::WeightedMean => {
            let (one, places) = (n.int(1), n.range(1, 1)?);
            let (real, counts) = (real(n), n.emit("Add", "counts", &[&places, &one], vec![]));
            let counted = n.emit("Mul", "by_place", &[&real, &counts], vec![]);
            return Ok(normed(n, &counted, false));
        }
        TokenChoice::Last => (real(n), true),
        TokenChoice::Largest => {
            let most = n.reduce("ReduceMax", "most", numbers, 1, true);
            (is(n, &most), false)
        }
        TokenChoice::Named(name) => {
            let name = n.int(name);
            (is(n, &name), false)
        }
    };
    // Candidate tokens rank above all others, ordered by position.
    let (places, sequence) = (n.range(1, 1)?, n.size(1, 1)?);
    let order = if late { places } else { n.emit("Sub", "early", &[&sequence, &places], vec![]) };
    let two = n.int(2);
    let most = n.emit("Mul", "beyond", &[&sequence, &two], vec![]);
    let rank = n.emit("Mul", "before", &[&chosen, &most], vec![]);
    let rank = n.emit("Add", "rank", &[&rank, &order], vec![]);
    let first = n.reduce("ReduceMax", "first", &rank, 1, true);
    let taken = n.emit("Equal", "taken", &[&rank, &first], vec![]);
    Ok(n.cast("weights", &taken, DataType::Float))
}
