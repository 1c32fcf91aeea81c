//! What errors in a weight count for.

use serde::{Deserialize, Serialize};

use super::Samples;

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
    pub(super) fn settled(self, sets: &[Samples]) -> InputImportance {
        match self {
            InputImportance::Auto if !sets.is_empty() => InputImportance::Activation,
            InputImportance::Auto => InputImportance::None,
            said => said,
        }
    }
}
