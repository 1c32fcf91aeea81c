//! Int8 weights by rounding to nearest; activations are quantized per token at run time.
//!
//! The arithmetic is that of compressed-tensors: symmetric `scale = absmax / 127.5`, asymmetric
//! `scale = (max - min) / 255`. The scale is rounded to the dtype of the model before it is used.
//!
//! ```yaml
//! passes:
//!   - quantize-dynamic: { granularity: channel, observer: mse, ignore: ["*pooler*"] }
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::targets::{self, SelectedWeights};
use super::weight_quantizer::{WeightObserver, WeightQuantizer};
use super::{Pass, Plan, options_of};
use crate::error::{Error, Result};
use crate::model::{self, Model};
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, Codes, DType, Granularity, Pattern, QuantizationSpec, Weight};
use crate::work::Meter;

/// Granularity of scales.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum GranularityKind {
    /// One scale per tensor
    Tensor,
    /// One scale per output channel (row)
    #[default]
    Channel,
    /// One scale per `group_size` consecutive inputs of a row
    Group,
}

/// Quantization of the inputs of quantized layers at run time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ActivationRounding {
    /// Int8, with one scale per token computed at run time (W8A8)
    #[default]
    Token,
    /// Floats: only weights are int8 (W8A16)
    None,
}

/// Quantize linear weights to int8.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct QuantizeDynamic {
    /// Granularity of scales
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().granularity))]
    pub granularity: GranularityKind,
    /// Consecutive inputs of a row that share a scale, with `granularity: group` [default: 128]
    #[cfg_attr(feature = "cli", arg(long, value_name = "INPUTS", allow_negative_numbers = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<usize>,
    /// Symmetric quantization: zero points are fixed at zero
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", default_value_t = Self::default().symmetric))]
    pub symmetric: bool,
    /// Quantization of the inputs of quantized layers at run time
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().activations))]
    pub activations: ActivationRounding,
    /// Method that chooses the range of a scale
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().observer))]
    pub observer: WeightObserver,
    /// Quantize embedding tables too (weights only)
    #[cfg_attr(feature = "cli", arg(long))]
    pub embeddings: bool,
    /// Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

impl Default for QuantizeDynamic {
    fn default() -> Self {
        Self {
            granularity: GranularityKind::Channel,
            group_size: None,
            symmetric: true,
            activations: ActivationRounding::Token,
            observer: WeightObserver::Minmax,
            embeddings: false,
            targets: Vec::new(),
            ignore: Vec::new(),
        }
    }
}

const NAME: &str = "quantize-dynamic";
const DEFAULT_GROUP: usize = 128;

impl QuantizeDynamic {
    fn affine(&self, weight: &Weight, embedding: bool) -> QuantizationSpec {
        let granularity = match self.granularity {
            // Rows of an embedding table are looked up separately, so that a scale per row costs nothing.
            GranularityKind::Tensor if embedding => Granularity::Channel,
            GranularityKind::Tensor => Granularity::Tensor,
            GranularityKind::Channel => Granularity::Channel,
            GranularityKind::Group => Granularity::Group(self.group_size.unwrap_or(DEFAULT_GROUP)),
        };
        let activations = match self.activations {
            ActivationRounding::Token if !embedding => ActivationScheme::DynamicToken,
            _ => ActivationScheme::None,
        };
        let scale_dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
        QuantizationSpec { codes: Codes::INT8, granularity, symmetric: self.symmetric, scale_dtype, activations }
    }

    fn check_weight(&self, name: &str, weight: &Weight) -> Result<()> {
        targets::require_matrix(NAME, name, weight)?;
        let size = self.group_size.unwrap_or(DEFAULT_GROUP);
        if self.granularity == GranularityKind::Group && !weight.row().is_multiple_of(size) {
            return Err(Error::tensor(
                name,
                format!("has {} inputs per row, which is not a multiple of the group size {size}", weight.row()),
                "choose another group_size, or add it to `ignore`",
            ));
        }
        Ok(())
    }
}

impl Pass for QuantizeDynamic {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        let mut full = self.clone();
        if self.granularity == GranularityKind::Group {
            full.group_size = Some(self.group_size.unwrap_or(DEFAULT_GROUP));
        }
        options_of(&full)
    }

    fn check(&self) -> Result<()> {
        match (self.granularity, self.group_size) {
            (GranularityKind::Group, Some(0)) => Err(Error::option(NAME, "`group_size` must be at least 1")),
            (GranularityKind::Group, _) | (_, None) => Ok(()),
            (_, Some(_)) => Err(Error::option(NAME, "`group_size` needs `granularity: group`")),
        }
    }

    fn plan(&self, model: &Model, _state: &RunState) -> Result<Plan<'static>> {
        let (weights, mut model) = (&model.weights, model.clone());
        let rule = if self.embeddings { format!("{}; and embeddings", model::LINEAR_RULE) } else { model::LINEAR_RULE.to_owned() };
        let eligible = |name: &str, w: &Weight| model::is_linear(name, w) || (self.embeddings && model::is_embedding(name, w));
        let SelectedWeights { names, rule, notes } = targets::select_weights(NAME, weights, &self.targets, &self.ignore, &rule, eligible)?;
        let meter = Arc::new(Meter::default());
        for name in &names {
            let weight = weights.get(name)?;
            self.check_weight(name, weight)?;
            let affine = self.affine(weight, model::is_embedding(name, weight));
            let quantizer = WeightQuantizer::new(name, weight, affine, self.observer, &meter);
            model.weights.by_name.insert((*name).to_owned(), quantizer.weight());
        }
        let details = json!({ "quantized": names.len() });
        let note = targets::naming_note(NAME, &model, &self.targets);
        let twice = targets::requantized(NAME, weights, names.iter().copied());
        let notes = targets::unquantized_convolutions(NAME, weights, &self.targets).into_iter().chain(notes).chain(note).chain(twice).collect();
        let tensors = names.into_iter().map(str::to_owned).collect();
        Ok(Plan::new(model, Applied { tensors, rule, meter, details, notes, ..Applied::new(NAME, self.options()) }))
    }

    fn remedy(&self) -> &'static str {
        "`granularity: channel` or `group`, `observer: mse`, or `ignore` for the layers that `compress analyze` names"
    }
}
