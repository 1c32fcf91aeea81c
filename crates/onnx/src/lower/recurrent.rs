//! Recurrent layers.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{Direction, Recurrent, RecurrentKind, RecurrentResult};

pub(super) fn recurrent(op: &Recurrent, n: &mut Lowering) -> Result<()> {
    let direction = match op.direction {
        Direction::Forward => "forward",
        Direction::Reverse => "reverse",
        Direction::Both => "bidirectional",
    };
    let mut attributes = vec![AttributeProto::text("direction", direction), AttributeProto::int("hidden_size", n.fixed(2, 2)?)];
    attributes.extend(op.reset_after.then(|| AttributeProto::int("linear_before_reset", 1)));
    let mut inputs: Vec<String> = (0..n.inputs()).map(|i| n.wide(&n.input(i))).collect::<Result<_>>()?;
    // The input for sequence lengths precedes the initial state.
    if inputs.len() > 4 {
        inputs.insert(4, String::new());
    }
    let (name, place) = match (op.kind, op.result) {
        (RecurrentKind::Lstm, RecurrentResult::Cell) => ("LSTM", 2),
        (RecurrentKind::Lstm, result) => ("LSTM", usize::from(result == RecurrentResult::Last)),
        (RecurrentKind::Gru, result) => ("GRU", usize::from(result == RecurrentResult::Last)),
    };
    n.finish_wide_at(name, place, &inputs.iter().map(String::as_str).collect::<Vec<_>>(), attributes);
    Ok(())
}
