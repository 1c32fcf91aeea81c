//! Low-rank corrections of the quantization error: options, and the layers that have one.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{NAME, Quantize};
use crate::error::{Error, ParseError, Result, counted};
use crate::model::Model;
use crate::model::adapter::factor_names;
use crate::pass::plan::placeholder;
use crate::pass::{InputImportance, peft};
use crate::store::{DType, Origin, QuantizationSpec, Weights};

/// Low-rank correction of the quantization error, written as a LoRA adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Correction {
    /// Rank of the correction of each layer
    pub rank: usize,
    /// Weighting of errors
    #[serde(default)]
    pub importance: InputImportance,
}

impl FromStr for Correction {
    type Err = ParseError;

    /// Parses a rank, or an object like that of a recipe.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text.trim().parse() {
            Ok(rank) => Ok(Correction { rank, importance: InputImportance::Auto }),
            Err(_) => serde_saphyr::from_str(text).map_err(|e| e.to_string().into()),
        }
    }
}

impl Correction {
    /// Whether errors are weighted by the inputs of layers on calibration samples.
    pub(super) fn uses_samples(self) -> bool {
        self.importance == InputImportance::Activation
    }
}

/// A layer with a correction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pass) struct CorrectedLayer {
    /// Outputs and inputs.
    pub sizes: [usize; 2],
    /// Dtype of the factors.
    pub dtype: DType,
}

/// The corrections of a model.
#[derive(Debug, Clone)]
pub(in crate::pass) struct Corrections {
    pub rank: usize,
    /// Whether errors are weighted by the inputs of layers on calibration samples.
    pub uses_samples: bool,
    /// By the name of the weight.
    pub layers: BTreeMap<String, CorrectedLayer>,
    /// Notes on layers without a correction.
    pub notes: Vec<String>,
}

impl Quantize {
    /// The corrections of the weights with these encodings; `None` if they are not requested. Fails if no
    /// weight can have one.
    pub(super) fn corrections(&self, encodings: &BTreeMap<String, QuantizationSpec>, model: &Model) -> Result<Option<Corrections>> {
        let Some(correction) = self.correct else { return Ok(None) };
        let refused = |reason: &str| Err(Error::option(format!("{NAME}: correct"), reason));
        if let Some(requirement) = peft::unmet_requirement(model) {
            return refused(requirement);
        }
        if model.config.has_conv1d() {
            return refused("requires layers that are stored as [out, in], unlike `Conv1D` of transformers");
        }
        let (mut layers, mut left) = (BTreeMap::new(), BTreeMap::<&str, Vec<&str>>::new());
        for name in encodings.keys() {
            let weight = model.weights.get(name)?;
            let [rows, size] = weight.shape[..] else { continue };
            let reason = if let Some(reason) = peft::obstacle(name, model)? {
                reason
            } else if correction.rank.saturating_mul(rows + size) >= rows * size {
                "are not larger than their correction: choose a smaller rank"
            } else {
                let dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
                layers.insert(name.clone(), CorrectedLayer { sizes: [rows, size], dtype });
                continue;
            };
            left.entry(reason).or_default().push(name);
        }
        let describe = |(reason, names): (&&str, &Vec<&str>)| {
            let first = names.first().copied().unwrap_or_default();
            format!("{} without a correction (the first: `{first}`), because they {reason}", counted(names.len(), "weight"))
        };
        match left.iter().next().filter(|_| layers.is_empty()).map(describe) {
            Some(reason) => refused(&reason),
            None => {
                let notes = left.iter().map(|layers| format!("{NAME}: {}", describe(layers))).collect();
                Ok(Some(Corrections { rank: correction.rank, uses_samples: correction.uses_samples(), layers, notes }))
            }
        }
    }
}

impl Corrections {
    /// The shapes of the factors of a layer.
    pub fn shapes(&self, [rows, size]: [usize; 2]) -> [Vec<usize>; 2] {
        [vec![self.rank, size], vec![rows, self.rank]]
    }

    /// Size of all factors in bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = |layer: &CorrectedLayer| self.rank as u64 * layer.sizes.iter().sum::<usize>() as u64 * layer.dtype.bitsize() as u64 / 8;
        self.layers.values().map(bytes).sum()
    }

    /// Adds the factors to planned weights.
    pub fn plan(&self, weights: &mut Weights) {
        for (weight, layer) in &self.layers {
            for (name, shape) in factor_names(weight).into_iter().zip(self.shapes(layer.sizes)) {
                let factor = placeholder(&name, layer.dtype, shape).with_origin(Origin::Rescaled);
                weights.by_name.insert(name, factor);
            }
        }
    }

    /// A note on the adapter and how to load it.
    pub fn note(&self) -> String {
        format!(
            "{NAME}: the folder `adapter` has corrections of rank {} for {} ({:.1} MB), a LoRA adapter that must be loaded with the model: all figures of this report are those of both together. {}",
            self.rank,
            counted(self.layers.len(), "layer"),
            self.bytes() as f64 / 1e6,
            peft::vllm_note(self.rank, false, "corrected").unwrap_or_else(|reason| reason),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_states_whether_vllm_loads_the_adapter() {
        let note = |rank: usize| Corrections { rank, uses_samples: false, layers: BTreeMap::new(), notes: Vec::new() }.note();
        assert!(note(300).contains("`--enable-lora --max-lora-rank 320 "), "{}", note(300));
        assert!(note(513).ends_with("vLLM loads ranks up to 512"), "{}", note(513));
    }

    #[test]
    fn a_correction_is_a_rank_or_an_object() {
        let parse = |text: &str| text.parse::<Correction>();
        assert_eq!(parse("32").unwrap(), Correction { rank: 32, importance: InputImportance::Auto });
        assert_eq!(parse("{rank: 8, importance: none}").unwrap(), Correction { rank: 8, importance: InputImportance::None });
        assert!(parse("-1").is_err() && parse("{rank: 8, alpha: 1}").unwrap_err().to_string().contains("alpha"));
    }
}
