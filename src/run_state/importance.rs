//! Importance of weight columns, estimated from the activations of calibration samples.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::store::gguf::InputSums;

/// Purpose of a data set of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Samples {
    /// Calibration data (`calibration`).
    Calibration,
    /// Training data (`train`).
    Train,
    /// No data: the pass uses only the weights.
    None,
}

/// How errors in weights are weighted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum InputImportance {
    /// `activation` if there is calibration data, otherwise `none`
    #[default]
    Auto,
    /// All weights have the same importance; needs no data
    None,
    /// Weights are more important the larger their inputs are on calibration samples
    Activation,
}

impl InputImportance {
    /// Resolves `Auto` by whether data sets are available.
    #[must_use]
    pub(crate) fn resolved(self, sets: &[Samples]) -> InputImportance {
        match self {
            InputImportance::Auto if !sets.is_empty() => InputImportance::Activation,
            InputImportance::Auto => InputImportance::None,
            explicit => explicit,
        }
    }
}

/// Importance of the columns of weight matrices, estimated from calibration samples.
#[derive(Debug, Clone, Default)]
pub struct ColumnImportance {
    /// Mean square of the input of each column, by weight. For tensors that stack several matrices, the
    /// values of the matrices are concatenated.
    pub columns: BTreeMap<String, Arc<Vec<f32>>>,
    /// The sums from which the means were computed.
    pub sums: BTreeMap<String, InputSums>,
    /// Number of samples.
    pub samples: usize,
    /// Matrices of experts to which no sample was routed; their columns have equal importance.
    pub unseen: Vec<String>,
}
