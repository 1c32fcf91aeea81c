//! The result of a layerwise run.

use std::collections::{BTreeMap, BTreeSet};

use super::block_checkpoints::BlockReport;
use super::report::MethodReport;
use crate::error::counted;
use crate::store::Weight;

/// Result of a layerwise run.
#[derive(Debug, Default)]
pub(super) struct Summary {
    /// Number of calibration samples.
    pub samples: usize,
    /// Number of chains that were rescaled.
    pub rescaled: usize,
    /// Normalizations that were not rescaled.
    pub skipped: BTreeSet<String>,
    /// Modified weights, including rescaled ones.
    pub changed: BTreeSet<String>,
    pub report: MethodReport,
    /// Inputs of layers with fewer tokens than features.
    pub few_tokens: Vec<(usize, usize, String)>,
}

impl Summary {
    /// Adds a finished block.
    pub fn add(&mut self, changed: &BTreeMap<String, Weight>, report: BlockReport) {
        self.rescaled += report.rescaled;
        self.few_tokens.extend(report.few_tokens);
        self.report.extend(report.method);
        self.changed.extend(changed.keys().cloned());
    }
}

/// A note on inputs of layers that had fewer tokens than features.
pub(super) fn few_tokens_note(few: Vec<(usize, usize, String)>) -> Option<String> {
    let few: BTreeSet<_> = few.into_iter().collect();
    let count = few.len();
    let (tokens, features, value) = few.into_iter().min()?;
    let example = format!("`{value}`: {tokens} for {features}");
    Some(format!("{} had fewer calibration tokens than features ({example}): more samples reduce errors on other data", counted(count, "layer input")))
}

/// A note on weights that the gradients of the loss did not guide, because their outputs have none.
pub(super) fn without_gradients_note(weights: &BTreeSet<String>) -> Option<String> {
    let first = weights.first()?;
    let count = counted(weights.len(), "weight");
    Some(format!("`guide: loss` had no effect on {count}, whose outputs had no gradients on the calibration samples (`{first}`)"))
}
