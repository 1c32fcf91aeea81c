//! Pattern of tokens in front of a sequence.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::{Match, Matcher};
use crate::ir::ops::{Concat, Prepend};
use crate::ir::{Kind, Node, Op};

/// A weight `[1, n, width]`, such as a class token, that is expanded to the batch and precedes the tokens.
pub(super) fn prepend(matcher: &Matcher, node: &Node) -> Match {
    let (Op::Concat(Concat { axis: 1 | -2 }), [expanded, x]) = (&node.op, node.inputs.as_slice()) else { return None };
    let token = matcher.first_operand(*expanded, "Expand").filter(|token| matcher.graph.value(*token).kind == Kind::Param)?;
    Some((Prepend {}.into(), vec![token.into(), (*x).into()]))
}
