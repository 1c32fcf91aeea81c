//! Pattern of linear layers on rows.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::{Match, Matcher};
use crate::ir::{Node, Op};

/// A layer on all tokens as the rows of one matrix: `[batch, sequence, k]` to `[batch · sequence, k]`, the
/// layer, and back to `[batch, sequence, n]`.
pub(super) fn linear(matcher: &Matcher, node: &Node) -> Match {
    let product = match &node.op {
        Op::Reshape(_) => node.inputs.first().copied()?,
        // A reshape to two open sizes.
        Op::Opaque(_) => matcher.first_operand(node.output, "Reshape")?,
        _ => return None,
    };
    let layer = matcher.producer(product).filter(|layer| matches!(layer.op, Op::Linear(_)))?;
    let (rows, others) = layer.inputs.split_first()?;
    let x = matcher.input_of(*rows, |op| matches!(op, Op::Reshape(_)))?;
    let shape = |id| matcher.graph.value(id).ty.shape.as_slice();
    let ([_, of_rows], Some((width, outer)), Some((_, outer_of_output))) = (shape(*rows), shape(x).split_last(), shape(node.output).split_last()) else {
        return None;
    };
    let same = outer.len() >= 2 && outer == outer_of_output && width == of_rows;
    same.then(|| (layer.op.clone(), std::iter::once(x).chain(others.iter().copied()).map(Into::into).collect()))
}
