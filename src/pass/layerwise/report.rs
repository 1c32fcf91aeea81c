//! Reports of methods.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::held_out::LayerChoice;

/// Report of a method.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct MethodReport {
    pub notes: Vec<String>,
    /// A metric of each modified weight, if the method has one.
    pub figures: BTreeMap<String, f64>,
    /// The solutions that were chosen, if the method has several.
    pub choices: Vec<LayerChoice>,
    /// Errors of layers with low-rank corrections.
    pub corrections: Vec<CorrectedError>,
    /// Weights that gradients of the loss would guide, but whose outputs have none.
    #[serde(default)]
    pub without_gradients: BTreeSet<String>,
}

impl MethodReport {
    pub fn extend(&mut self, other: MethodReport) {
        self.notes.extend(other.notes);
        self.figures.extend(other.figures);
        self.choices.extend(other.choices);
        self.corrections.extend(other.corrections);
        self.without_gradients.extend(other.without_gradients);
    }
}

/// Errors of a layer: squares, relative to the outputs of the original layer on the calibration samples, or
/// without samples relative to its weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CorrectedError {
    pub weight: String,
    /// Of the quantized layer.
    pub before: f64,
    /// With the stored correction.
    pub after: f64,
}
