//! Pattern of vectors that are divided by their norms.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::{Match, Matcher, is_close};
use crate::ir::ops::{BinaryKind, Clip, Normalize, ReduceKind};
use crate::ir::{Node, Op, ValueId};

/// Lower bound of the norm, as in the definition of the op and by default in PyTorch.
const LEAST: f64 = 1e-12;

/// `x / max(‖x‖₂, 1e-12)`, where the norm may be expanded to the shape of `x`.
pub(super) fn normalize(matcher: &Matcher, node: &Node) -> Match {
    let (Op::Binary(binary), [x, norm]) = (&node.op, node.inputs.as_slice()) else { return None };
    let bounded = matcher.first_operand(*norm, "Expand").unwrap_or(*norm);
    let is_norm = binary.kind == BinaryKind::Div && matcher.reduced(matcher.above_least(bounded)?, ReduceKind::L2)? == *x;
    is_norm.then(|| (Normalize { epsilon: 0.0 }.into(), vec![(*x).into()]))
}

impl Matcher<'_> {
    /// The value of which this is the maximum with [`LEAST`].
    fn above_least(&self, id: ValueId) -> Option<ValueId> {
        let node = self.producer(id)?;
        match (&node.op, node.inputs.as_slice()) {
            (Op::Clip(Clip { min, max }), [x]) if is_close(*min, LEAST) && *max == f64::INFINITY => Some(*x),
            (Op::Binary(binary), [a, b]) if binary.kind == BinaryKind::Max => {
                [(*a, *b), (*b, *a)].into_iter().find_map(|(x, least)| is_close(self.number(least)?, LEAST).then_some(x))
            }
            _ => None,
        }
    }
}
