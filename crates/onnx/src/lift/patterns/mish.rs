//! Pattern of Mish, which is an operator of ONNX only since opset 18.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::{Match, Matcher};
use crate::ir::ops::Mish;
use crate::ir::{Node, Op, ValueId};

/// `x · tanh(softplus(x))`, where the softplus may be computed as `ln(1 + exp(x))`.
pub(super) fn mish(matcher: &Matcher, node: &Node) -> Match {
    let (Op::Mul(_), [a, b]) = (&node.op, node.inputs.as_slice()) else { return None };
    let x = [(*a, *b), (*b, *a)].into_iter().find_map(|(x, gate)| {
        let softplus = matcher.input_of(gate, |op| matches!(op, Op::Tanh(_)))?;
        (matcher.argument_of_softplus(softplus)? == x).then_some(x)
    })?;
    Some((Mish {}.into(), vec![x.into()]))
}

impl Matcher<'_> {
    /// The value of which this is the softplus.
    fn argument_of_softplus(&self, id: ValueId) -> Option<ValueId> {
        let spelled = || {
            let (exp, one) = self.plus_constant(self.input_of(id, |op| matches!(op, Op::Log(_)))?)?;
            self.input_of(exp, |op| matches!(op, Op::Exp(_))).filter(|_| one == 1.0)
        };
        self.input_of(id, |op| matches!(op, Op::Softplus(_))).or_else(spelled)
    }
}
