//! Heads that are split and merged, and attention between them.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::super::check;
use super::super::super::piece::Piece;
use super::{Found, Product, Read, Seen};
use crate::ir::ops::{Attention, MergeHeads, Reshape, Softmax, SplitHeads, TargetSize, Transpose};
use crate::ir::{Dim, Kind, Node, Op, ValueId};

/// The order of axes of heads that stand before the sequence, and back.
const HEADS_FIRST: [usize; 4] = [0, 2, 1, 3];

/// The width in heads, with their axis before the sequence.
pub(super) fn split_heads(seen: &Seen, node: &Node) -> Found {
    let rows = transposed(node, HEADS_FIRST)?;
    let (x, head_dim) = seen.by_head(rows)?;
    Some((SplitHeads { head_dim }.into(), vec![x.into()]))
}

/// Heads with their axis behind the sequence, as one width.
pub(super) fn merge_heads(seen: &Seen, node: &Node) -> Found {
    let Op::Reshape(_) = node.op else { return None };
    let heads = transposed(seen.maker(*node.inputs.first()?)?, HEADS_FIRST)?;
    let ([batch, heads_count, sequence, width], [of_batch, of_sequence, whole]) = (seen.shape(heads)?, seen.shape(node.output)?);
    let merged = (batch, sequence) == (of_batch, of_sequence) && heads_count.fixed()?.checked_mul(width.fixed()?) == whole.fixed();
    merged.then(|| (MergeHeads {}.into(), vec![heads.into()]))
}

/// `softmax(factor · q kᵀ + bias) v`: the factor may stand at the queries, at the keys, or behind their product.
pub(super) fn attention(seen: &Seen, node: &Node) -> Found {
    let ([weighted, values], Op::MatMul(_)) = (node.inputs.as_slice(), &node.op) else { return None };
    let guarded = seen.without_nan(*weighted);
    let weights = guarded.unwrap_or(*weighted);
    let alone = |id: ValueId| seen.readers.get(&id) == Some(&1);
    let last = |op: &Op| matches!(op, Op::Softmax(Softmax { axis: -1 | 3 }));
    let scores = seen.of(weights, last).filter(|scores| [*weighted, weights, *scores].into_iter().all(alone))?;
    let summands = seen.maker(scores).filter(|maker| matches!(maker.op, Op::Add(_))).map_or(&[][..], |maker| maker.inputs.as_slice());
    let split = if let [a, b] = summands { vec![(*a, Some(*b)), (*b, Some(*a))] } else { vec![(scores, None)] };
    split.into_iter().find_map(|(products, bias)| {
        let (product, behind) = seen.scaled(products)?;
        let maker = seen.maker(product).filter(|maker| matches!(maker.op, Op::MatMul(_)) && seen.is_heads(product))?;
        let [q, k] = maker.inputs.as_slice() else { return None };
        let ((q, at_queries), (k, at_keys)) = (seen.scaled(*q)?, seen.scaled(*k)?);
        let mut reads = vec![q.into(), seen.keys(k)?, (*values).into()];
        if let Some(bias) = bias {
            reads.push(seen.by_sample(bias)?);
        }
        let scale = behind * at_queries * at_keys;
        let op = Attention { scale, zero_where_hidden: guarded.is_some(), ..Attention::default() };
        scale.is_finite().then(|| (op.into(), reads))
    })
}

/// What a node has in another order of axes, if this is the order.
fn transposed<const N: usize>(node: &Node, order: [usize; N]) -> Option<ValueId> {
    let Op::Transpose(Transpose { perm }) = &node.op else { return None };
    node.inputs.first().copied().filter(|_| *perm == order)
}

impl Seen<'_> {
    /// Sizes of a value of so many axes.
    fn shape<const N: usize>(&self, id: ValueId) -> Option<&[Dim; N]> {
        self.graph.value(id).ty.shape.as_slice().try_into().ok()
    }

    fn is_heads(&self, id: ValueId) -> bool {
        self.shape::<4>(id).is_some()
    }

    /// Of `[batch, sequence, heads, width]`, the value `[batch, sequence, heads · width]` that it is a view of, and the width.
    fn by_head(&self, rows: ValueId) -> Option<(ValueId, usize)> {
        let x = self.of(rows, |op| matches!(op, Op::Reshape(_)))?;
        let ([batch, sequence, whole], [of_batch, of_sequence, heads, width]) = (self.shape(x)?, self.shape(rows)?);
        let same = (batch, sequence) == (of_batch, of_sequence) && heads.fixed()?.checked_mul(width.fixed()?) == whole.fixed();
        same.then_some((x, width.fixed()?))
    }

    /// The value and the number that a value is the product of.
    fn scaled(&self, id: ValueId) -> Option<(ValueId, f64)> {
        let Product { values, factor } = self.product(id);
        let [value] = values.as_slice() else { return None };
        (self.graph.value(*value).ty == self.graph.value(id).ty).then_some((*value, factor))
    }

    /// Keys `[batch, heads, keys, width]` of what is multiplied with the queries, `[batch, heads, width, keys]`.
    fn keys(&self, turned: ValueId) -> Option<Read> {
        let maker = self.maker(turned)?;
        if let Some(keys) = transposed(maker, [0, 1, 3, 2]) {
            return Some(keys.into());
        }
        if let Some(rows) = transposed(maker, [0, 2, 3, 1]) {
            return Some(match self.by_head(rows) {
                Some((x, head_dim)) => Read { value: x, through: Some(SplitHeads { head_dim }.into()) },
                None => Read { value: rows, through: Some(Transpose { perm: HEADS_FIRST.to_vec() }.into()) },
            });
        }
        // All heads of all samples one behind the other, and back.
        let middle = self.of(turned, |op| matches!(op, Op::Reshape(_)))?;
        let flat = transposed(self.maker(middle)?, [0, 2, 1])?;
        let keys = self.of(flat, |op| matches!(op, Op::Reshape(_)))?;
        let ([a, b, rows, width], [_, of_rows, of_width], [c, d, to_width, to_rows]) = (self.shape(keys)?, self.shape(flat)?, self.shape(turned)?);
        let same = (a, b) == (c, d) && [of_rows, to_rows].iter().all(|size| *size == rows) && [of_width, to_width].iter().all(|size| *size == width);
        same.then(|| keys.into())
    }

    /// What is added to products, with four axes.
    fn by_sample(&self, bias: ValueId) -> Option<Read> {
        let rank = self.graph.value(bias).ty.shape.len();
        let missing = 4usize.checked_sub(rank)?;
        let shape = std::iter::repeat_n(TargetSize::Number(1), missing).chain((0..rank).map(TargetSize::Copy));
        let through = if missing > 0 { Some(Reshape { shape: shape.collect() }.into()) } else { None };
        // A weight is read as it is stored.
        (missing == 0 || self.graph.value(bias).kind != Kind::Param).then_some(Read { value: bias, through })
    }

    /// The value that a piece passes on but for what is no number, which becomes zero.
    fn without_nan(&self, id: ValueId) -> Option<ValueId> {
        let node = self.maker(id)?;
        let Op::Opaque(opaque) = &node.op else { return None };
        let piece = opaque.function.as_ref()?.as_any().downcast_ref::<Piece>()?;
        let parts = piece.parts();
        let [found, chosen] = parts.nodes.as_slice() else { return None };
        let own = [(found, "IsNaN"), (chosen, "Where")].iter().all(|(node, op)| node.op_type() == *op && check::is_own(node.domain()));
        let ([x], [condition, zero, other]) = (found.input.as_slice(), chosen.input.as_slice()) else { return None };
        let linked = found.output.first() == Some(condition) && x == other && chosen.output.first() == Some(&piece.output);
        let of = |name: &String| node.inputs.get(parts.inputs.iter().position(|(input, _)| input == name)?).copied();
        (own && linked && self.number(of(zero)?) == Some(0.0)).then(|| of(x)).flatten()
    }
}
