//! Settings of GPTQ and AWQ checkpoints in a configuration.

use std::fmt;
use std::num::NonZeroUsize;

/// Settings of GPTQ and AWQ checkpoints in a configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GptqConfig {
    /// Whether zero points are stored unchanged (GPTQ version 2) instead of minus one.
    pub second_version: bool,
    /// Whether all zero points are the middle of the range, if specified.
    pub symmetric: Option<bool>,
    /// Number of inputs per group, if it is specified and the same for all layers.
    pub group_size: Option<GroupSize>,
    /// Whether GPTQ has assigned inputs to groups in the order of their importance (`desc_act`).
    pub is_ordered: bool,
}

/// A group size of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupSize {
    /// One group for all inputs (-1).
    Row,
    /// Inputs per group; the last group may have fewer.
    Inputs(NonZeroUsize),
}

impl GroupSize {
    /// Number of inputs of a group, for rows of `row` inputs.
    pub(super) fn inputs(self, row: usize) -> usize {
        match self {
            GroupSize::Row => row,
            GroupSize::Inputs(size) => size.get().min(row),
        }
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupSize::Row => f.write_str("-1"),
            GroupSize::Inputs(size) => write!(f, "{size}"),
        }
    }
}
