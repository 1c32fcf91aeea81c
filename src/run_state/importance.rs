//! What errors in weights count for, and the samples that tell it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A data set of a recipe, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Samples {
    /// `calibration`.
    Calibration,
    /// `train`.
    Train,
    /// None: the pass computes on weights alone.
    None,
}

/// What an error in a weight counts for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum InputImportance {
    /// `activation` where there are samples, else `none`
    #[default]
    Auto,
    /// All weights count the same; needs no data
    None,
    /// Weights of inputs that are large on calibration samples count for more
    Activation,
}

impl InputImportance {
    /// Decided by the data sets there are.
    #[must_use]
    pub(crate) fn settled(self, sets: &[Samples]) -> InputImportance {
        match self {
            InputImportance::Auto if !sets.is_empty() => InputImportance::Activation,
            InputImportance::Auto => InputImportance::None,
            said => said,
        }
    }
}

/// What errors in the columns of matrices count for, as far as calibration samples told it.
#[derive(Debug, Clone, Default)]
pub struct ColumnImportance {
    /// By weight, the mean square of what each column is multiplied with; of a tensor that holds several matrices, matrix after matrix.
    pub columns: BTreeMap<String, Arc<Vec<f32>>>,
    /// How many samples there were.
    pub samples: usize,
    /// Matrices of experts that no sample came to: their columns count the same.
    pub unseen: Vec<String>,
}
