//! Patterns of head splitting, head merging and attention.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::super::check;
use super::super::super::opaque_subgraph::OpaqueSubgraph;
use super::{Match, Matcher, Operand, Product};
use crate::ir::ops::{Attention, MergeHeads, Reshape, Softmax, SplitHeads, TargetSize, Transpose};
use crate::ir::{Dim, Kind, Node, Op, ValueId};

/// The permutation that swaps the head axis and the sequence axis.
const HEADS_FIRST: [usize; 4] = [0, 2, 1, 3];

/// `[batch, sequence, heads · width]` to `[batch, heads, sequence, width]`.
pub(super) fn split_heads(matcher: &Matcher, node: &Node) -> Match {
    let rows = transposed(node, HEADS_FIRST)?;
    let (x, head_dim) = matcher.by_head(rows)?;
    Some((SplitHeads { head_dim }.into(), vec![x.into()]))
}

/// `[batch, heads, sequence, width]` to `[batch, sequence, heads · width]`.
pub(super) fn merge_heads(matcher: &Matcher, node: &Node) -> Match {
    let Op::Reshape(_) = node.op else { return None };
    let heads = transposed(matcher.producer(*node.inputs.first()?)?, HEADS_FIRST)?;
    let ([batch, heads_count, sequence, width], [of_batch, of_sequence, whole]) = (matcher.shape(heads)?, matcher.shape(node.output)?);
    let merged = (batch, sequence) == (of_batch, of_sequence) && heads_count.fixed()?.checked_mul(width.fixed()?) == whole.fixed();
    merged.then(|| (MergeHeads {}.into(), vec![heads.into()]))
}

/// `softmax(factor · q kᵀ + bias) v`. The factor may be applied to the queries, to the keys, or to their
/// product. Keys and values may be repeated for query heads that share them.
pub(super) fn attention(matcher: &Matcher, node: &Node) -> Match {
    let ([weighted, values], Op::MatMul(_)) = (node.inputs.as_slice(), &node.op) else { return None };
    let guarded = matcher.without_nan(*weighted);
    let weights = guarded.unwrap_or(*weighted);
    let alone = |id: ValueId| matcher.readers.get(&id) == Some(&1);
    let last = |op: &Op| matches!(op, Op::Softmax(Softmax { axis: -1 | 3 }));
    let scores = matcher.input_of(weights, last).filter(|scores| [*weighted, weights, *scores].into_iter().all(alone))?;
    let summands = matcher.producer(scores).filter(|producer| matches!(producer.op, Op::Add(_))).map_or(&[][..], |producer| producer.inputs.as_slice());
    let split = if let [a, b] = summands { vec![(*a, Some(*b)), (*b, Some(*a))] } else { vec![(scores, None)] };
    split.into_iter().find_map(|(products, bias)| {
        let (product, behind) = matcher.scaled(products)?;
        let producer = matcher.producer(product).filter(|producer| matches!(producer.op, Op::MatMul(_)) && matcher.is_heads(product))?;
        let [q, k] = producer.inputs.as_slice() else { return None };
        let ((q, at_queries), (k, at_keys)) = (matcher.scaled(*q)?, matcher.scaled(*k)?);
        let keys = matcher.keys(k)?;
        let shared = [Some(keys.value).filter(|_| keys.through.is_none()), Some(*values)].map(|repeated| matcher.shared_heads(repeated?));
        let (keys, values) = if let [Some(keys), Some(values)] = shared { (keys.into(), values) } else { (keys, *values) };
        let mut reads = vec![q.into(), keys, values.into()];
        if let Some(bias) = bias {
            reads.push(matcher.by_sample(bias)?);
        }
        let scale = behind * at_queries * at_keys;
        let op = Attention { scale, zero_where_hidden: guarded.is_some(), ..Attention::default() };
        scale.is_finite().then(|| (op.into(), reads))
    })
}

/// The input of a transpose with this permutation.
fn transposed<const N: usize>(node: &Node, order: [usize; N]) -> Option<ValueId> {
    let Op::Transpose(Transpose { perm }) = &node.op else { return None };
    node.inputs.first().copied().filter(|_| *perm == order)
}

impl Matcher<'_> {
    /// Shape of a value of rank `N`.
    fn shape<const N: usize>(&self, id: ValueId) -> Option<&[Dim; N]> {
        self.graph.value(id).ty.shape.as_slice().try_into().ok()
    }

    fn is_heads(&self, id: ValueId) -> bool {
        self.shape::<4>(id).is_some()
    }

    /// For a view `[batch, sequence, heads, width]`: its input `[batch, sequence, heads · width]`, and
    /// the width.
    fn by_head(&self, rows: ValueId) -> Option<(ValueId, usize)> {
        let x = self.input_of(rows, |op| matches!(op, Op::Reshape(_)))?;
        let ([batch, sequence, whole], [of_batch, of_sequence, heads, width]) = (self.shape(x)?, self.shape(rows)?);
        let same = (batch, sequence) == (of_batch, of_sequence) && heads.fixed()?.checked_mul(width.fixed()?) == whole.fixed();
        same.then_some((x, width.fixed()?))
    }

    /// For a value times a constant: both.
    fn scaled(&self, id: ValueId) -> Option<(ValueId, f64)> {
        let Product { values, factor } = self.product(id);
        let [value] = values.as_slice() else { return None };
        (self.graph.value(*value).ty == self.graph.value(id).ty).then_some((*value, factor))
    }

    /// The keys `[batch, heads, keys, width]` of a transposed value `[batch, heads, width, keys]`.
    fn keys(&self, turned: ValueId) -> Option<Operand> {
        let producer = self.producer(turned)?;
        if let Some(keys) = transposed(producer, [0, 1, 3, 2]) {
            return Some(keys.into());
        }
        if let Some(rows) = transposed(producer, [0, 2, 3, 1]) {
            return Some(match self.by_head(rows) {
                Some((x, head_dim)) => Operand { value: x, through: Some(SplitHeads { head_dim }.into()) },
                None => Operand { value: rows, through: Some(Transpose { perm: HEADS_FIRST.to_vec() }.into()) },
            });
        }
        // Batch and heads are merged into one axis for the transpose.
        let middle = self.input_of(turned, |op| matches!(op, Op::Reshape(_)))?;
        let flat = transposed(self.producer(middle)?, [0, 2, 1])?;
        let keys = self.input_of(flat, |op| matches!(op, Op::Reshape(_)))?;
        let ([a, b, rows, width], [_, of_rows, of_width], [c, d, to_width, to_rows]) = (self.shape(keys)?, self.shape(flat)?, self.shape(turned)?);
        let same = (a, b) == (c, d) && [of_rows, to_rows].iter().all(|size| *size == rows) && [of_width, to_width].iter().all(|size| *size == width);
        same.then(|| keys.into())
    }

    /// The heads `[batch, groups, keys, width]` that a value `[batch, heads, keys, width]` repeats, each for
    /// consecutive query heads.
    fn shared_heads(&self, id: ValueId) -> Option<ValueId> {
        let repeated = self.input_of(id, |op| matches!(op, Op::Reshape(_)))?;
        let single = self.first_operand(repeated, "Expand")?;
        let heads = self.input_of(single, |op| matches!(op, Op::Reshape(_)))?;
        let [batch, all, rest @ ..] = self.shape::<4>(id)?;
        let [of_batch, groups, own_rest @ ..] = self.shape::<4>(heads)?;
        let [_, _, one, single_rest @ ..] = self.shape::<5>(single)?;
        let [_, of_groups, times, repeated_rest @ ..] = self.shape::<5>(repeated)?;
        let same_rest = [own_rest, single_rest, repeated_rest].iter().all(|other| *other == rest);
        let same = batch == of_batch && groups == of_groups && one.fixed() == Some(1) && same_rest;
        (same && groups.fixed()?.checked_mul(times.fixed()?) == all.fixed()).then_some(heads)
    }

    /// The attention bias with four axes.
    fn by_sample(&self, bias: ValueId) -> Option<Operand> {
        let rank = self.graph.value(bias).ty.shape.len();
        let missing = 4usize.checked_sub(rank)?;
        let shape = std::iter::repeat_n(TargetSize::Number(1), missing).chain((0..rank).map(TargetSize::Copy));
        let through = if missing > 0 { Some(Reshape { shape: shape.collect() }.into()) } else { None };
        // Weights cannot be reshaped.
        (missing == 0 || self.graph.value(bias).kind != Kind::Param).then_some(Operand { value: bias, through })
    }

    /// For `where(isnan(x), 0, x)`: `x`.
    fn without_nan(&self, id: ValueId) -> Option<ValueId> {
        let node = self.producer(id)?;
        let Op::Opaque(opaque) = &node.op else { return None };
        let piece = opaque.function.as_ref()?.as_any().downcast_ref::<OpaqueSubgraph>()?;
        let parts = piece.parts();
        let [found, chosen] = parts.nodes.as_slice() else { return None };
        let own = [(found, "IsNaN"), (chosen, "Where")].iter().all(|(node, op)| node.op_type() == *op && check::is_own(node.domain()));
        let ([x], [condition, zero, other]) = (found.input.as_slice(), chosen.input.as_slice()) else { return None };
        let linked = found.output.first() == Some(condition) && x == other && chosen.output.first() == Some(&piece.output);
        let of = |name: &String| node.inputs.get(parts.inputs.iter().position(|(input, _)| input == name)?).copied();
        (own && linked && self.number(of(zero)?) == Some(0.0)).then(|| of(x)).flatten()
    }
}
