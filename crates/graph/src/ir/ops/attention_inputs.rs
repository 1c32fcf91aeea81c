//! Inputs of attention after queries, keys and values.

use candle_core::{Result as Computed, Tensor};

/// The mask, the bias and the sinks, where present.
#[derive(Clone, Copy)]
pub(super) struct Extras<'t> {
    pub(super) mask: Option<&'t Tensor>,
    pub(super) bias: Option<&'t Tensor>,
    pub(super) sinks: Option<&'t Tensor>,
}

/// Finds the inputs after the values by their rank.
pub(super) fn extras(rest: &[Tensor]) -> Extras<'_> {
    let of = |rank: usize| rest.iter().find(|extra| extra.rank() == rank);
    Extras { mask: of(2), bias: of(3).or_else(|| of(4)), sinks: of(1) }
}

/// The bias as `[batch, heads, sequence, keys]`.
pub(super) fn with_batch_axis(bias: &Tensor) -> Computed<Tensor> {
    if bias.rank() == 3 { bias.unsqueeze(0) } else { Ok(bias.clone()) }
}
