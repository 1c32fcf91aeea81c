//! Conversion to another floating-point format.
//!
//! ```yaml
//! passes:
//!   - cast: { to: bf16 }
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::targets::{self, SelectedWeights};
use super::{Pass, Plan, options_of};
use crate::arch;
use crate::error::{Error, Result};
use crate::kernel::{F64, Float, convert, with_float};
use crate::model::Model;
use crate::run_state::{Applied, RunState};
use crate::store::{Block, BlockSink, DType, Encoding, Pattern, Role, Rows, View, Weight, WeightSource};
use crate::work::Meter;

/// Target format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FloatFormat {
    /// 32 bits
    F32,
    /// IEEE half precision: 11 bits of precision, values up to 65504
    F16,
    /// bfloat16: 8 bits of precision, the range of f32
    #[default]
    Bf16,
}

impl FloatFormat {
    fn dtype(self) -> DType {
        match self {
            FloatFormat::F32 => DType::F32,
            FloatFormat::F16 => DType::F16,
            FloatFormat::Bf16 => DType::BF16,
        }
    }

    fn config_name(self) -> &'static str {
        match self {
            FloatFormat::F32 => "float32",
            FloatFormat::F16 => "float16",
            FloatFormat::Bf16 => "bfloat16",
        }
    }
}

/// Handling of values outside of the range of the format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Overflow {
    /// Stop, and name the tensor
    #[default]
    Error,
    /// Use the largest finite value
    Saturate,
}

/// Convert floats to another float format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Cast {
    /// Format to convert to
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().to))]
    pub to: FloatFormat,
    /// Treatment of values beyond the range of the format
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().overflow))]
    pub overflow: Overflow,
    /// Tensors to convert: names with `*`, or `re:` and a regular expression [default: all floats]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

const NAME: &str = "cast";

impl Pass for Cast {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn plan(&self, model: &Model, _state: &RunState) -> Result<Plan<'static>> {
        let (weights, mut model) = (&model.weights, model.clone());
        let is_integers = |w: &Weight| w.stored_type == Some(Weight::INTEGERS);
        let is_constant = |w: &Weight| w.role == Some(Role::Constant);
        let is_quantized = |w: &Weight| w.encoding != Encoding::Dense || w.exact_blocks().is_some();
        // Nodes of ONNX files require the dtype of some empty tensors, such as the scales of Resize.
        let require_type = if model.onnx.is_some() { targets::require_float } else { targets::require_float_type };
        let eligible = |name: &str, w: &Weight| require_type(NAME, name, w).is_ok() && !is_quantized(w) && !is_integers(w) && !is_constant(w);
        let SelectedWeights { mut names, rule, .. } =
            targets::select_weights(NAME, weights, &self.targets, &self.ignore, "all float tensors that are not quantized", eligible)?;
        let (to, model_type) = (self.to.dtype(), model.config.model_type());
        let reason = |name: &str| match weights.by_name.get(name) {
            Some(weight) if is_constant(weight) => Some("a constant of the graph"),
            Some(weight) if weight.dtype != to && to != DType::F32 && arch::stays_float32(model_type, name) => Some("kept in float32 by transformers"),
            _ => None,
        };
        let mut skipped = BTreeMap::<&str, Vec<&str>>::new();
        names.retain(|name| match reason(name) {
            None => true,
            Some(reason) => {
                skipped.entry(reason).or_default().push(*name);
                false
            }
        });
        let mut notes = targets::left_unchanged(NAME, &skipped, &self.targets, names.is_empty())?;
        if self.targets.is_empty() {
            let narrow = targets::narrow_floats(weights.by_name.iter().map(|(name, weight)| (name.as_str(), weight)));
            notes.extend(narrow.map(|narrow| format!("{NAME} leaves unchanged: {narrow}")));
        }
        let meter = Arc::new(Meter::default());
        let mut changed = std::collections::BTreeSet::new();
        for name in names {
            let weight = weights.get(name)?;
            require_type(NAME, name, weight)?;
            if is_integers(weight) {
                let hint = "run `dequantize` before this pass, or add the tensor to `ignore`";
                return Err(Error::tensor(name, "is stored as 32-bit integers with scales, but cast needs floats", hint));
            }
            if weight.dtype == to {
                continue;
            }
            let source = Converted {
                name: name.to_owned(),
                upstream: weight.clone(),
                complete: weight.clone(),
                underflows: Arc::default(),
                to: self.to,
                overflow: self.overflow,
                meter: meter.clone(),
            };
            model.weights.by_name.insert(name.to_owned(), weight.then(to, Encoding::Dense, Arc::new(source)));
            changed.insert(name.to_owned());
        }
        if self.targets.is_empty() && self.ignore.is_empty() {
            model.config.set_dtype(self.to.config_name());
            model.float_type = Some(to);
        }
        let details = json!({ "converted": changed.len() });
        Ok(Plan::new(model, Applied { tensors: changed, rule, meter, details, notes, ..Applied::new(NAME, self.options()) }))
    }

    fn remedy(&self) -> &'static str {
        match self.to {
            FloatFormat::F16 => "`to: bf16`, which has the range of f32, or `ignore` for the weights with the largest values",
            FloatFormat::Bf16 => "`to: f16`, which has more bits of precision, or `ignore` for the weights that `compress analyze` names",
            FloatFormat::F32 => "",
        }
    }
}

/// Weight converted to another format.
#[derive(Clone)]
struct Converted {
    name: String,
    /// The weight, or some of its rows.
    upstream: Weight,
    /// All rows of the weight.
    complete: Weight,
    /// Whether all its values become zero, although some are not.
    underflows: Arc<OnceLock<bool>>,
    to: FloatFormat,
    overflow: Overflow,
    meter: Arc<Meter>,
}

/// Elements converted at a time. The buffers fit into the L1 cache.
const RUN: usize = 4096;

impl Converted {
    fn convert<F: Float>(&self, input: &[u8], floats: &mut [f32], output: &mut [u8]) -> Result<()> {
        let size = self.to.dtype().bitsize() / 8;
        for (input, output) in input.chunks(RUN * F::SIZE).zip(output.chunks_mut(RUN * size)) {
            let floats = &mut floats[..input.len() / F::SIZE];
            convert::to_f32::<F>(input, floats);
            if F::DTYPE == DType::F64 && self.to != FloatFormat::F32 {
                round_to_odd(input, floats);
            }
            self.limit(F::split(input).iter().map(|e| F::magnitude(*e) < F::INFINITY), floats)?;
            if !convert::from_f32(self.to.dtype(), floats, output) {
                return Err(Error::tensor(&self.name, format!("cannot be converted to {}", self.to.config_name()), ""));
            }
        }
        Ok(())
    }

    /// Converts the blocks of a weight.
    fn convert_blocks(&self, weight: &Weight, unit: usize, consume: &mut dyn FnMut(Block, &[u8]) -> Result<()>) -> Result<()> {
        let size = self.to.dtype().bitsize() / 8;
        let mut floats = vec![0f32; RUN];
        let mut output = Vec::new();
        weight.visit(unit, &mut |block: Block| {
            output.resize(block.now.elements() * size, 0);
            self.meter.time(|| with_float!(block.now.dtype, F => self.convert::<F>(block.now.values, &mut floats, &mut output), else Ok(())))?;
            consume(block, &output)
        })
    }

    fn is_zero(&self, output: &[u8]) -> bool {
        let view = View::dense(self.to.dtype(), output);
        view.zeros() == view.elements() as u64
    }

    /// Returns an error if all values of the weight become zero.
    fn require_nonzero(&self) -> Result<()> {
        let mut is_zero = true;
        if self.underflows.get().is_none() {
            self.convert_blocks(&self.complete, 1, &mut |_, output| {
                is_zero = is_zero && self.is_zero(output);
                Ok(())
            })?;
        }
        if !*self.underflows.get_or_init(|| is_zero) {
            return Ok(());
        }
        Err(Error::tensor(
            &self.name,
            format!("contains only values that become zero in {}", self.to.config_name()),
            format!("{}or add the tensor to `ignore`", self.wider()),
        ))
    }

    /// Advice to use a format with a larger range, if there is one.
    fn wider(&self) -> &'static str {
        if self.to == FloatFormat::F16 { "cast to bf16 (`to: bf16`), " } else { "" }
    }

    /// Saturates finite values that overflow in the target format, or returns an error.
    fn limit(&self, finite: impl Iterator<Item = bool>, floats: &mut [f32]) -> Result<()> {
        let largest = convert::largest(self.to.dtype());
        if floats.iter().all(|v| v.abs() <= largest) {
            return Ok(());
        }
        for (value, finite) in floats.iter_mut().zip(finite) {
            if finite && !convert::rounded(self.to.dtype(), *value).is_finite() {
                if self.overflow == Overflow::Error {
                    let value = if value.is_finite() { format!("{value:e}") } else { format!("a value above {:e}", f32::MAX) };
                    return Err(Error::tensor(
                        &self.name,
                        format!("contains {value}, but the largest value of {} is {largest:e}", self.to.config_name()),
                        format!("{}set overflow: saturate, or add the tensor to `ignore`", self.wider()),
                    ));
                }
                *value = largest.copysign(*value);
            }
        }
        Ok(())
    }
}

/// Rounds f64 values to odd in f32, so that rounding the result to a 16-bit float equals rounding
/// directly (Boldo and Melquiond, *Emulation of a FMA and correctly rounded sums*, 2008). `floats` holds
/// the values rounded to nearest.
fn round_to_odd(input: &[u8], floats: &mut [f32]) {
    for (element, float) in F64::split(input).iter().zip(floats) {
        let exact = f64::from_le_bytes(*element);
        let back = f64::from(*float);
        if exact != back && float.is_finite() && float.to_bits() & 1 == 0 {
            let away = exact.abs() > back.abs();
            *float = f32::from_bits(if away || *float == 0.0 { float.to_bits() + 1 } else { float.to_bits() - 1 });
        }
    }
}

impl WeightSource for Converted {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (mut loses_values, mut is_zero) = (false, true);
        self.convert_blocks(&self.upstream, unit, &mut |block, output| {
            if is_zero {
                is_zero = self.is_zero(output);
                loses_values |= is_zero && block.now.zeros() < block.now.elements() as u64;
            }
            sink(block.becomes(View::dense(self.to.dtype(), output)))
        })?;
        if is_zero && loses_values { self.require_nonzero() } else { Ok(()) }
    }

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let (upstream, block) = self.upstream.rows(rows, unit)?;
        Some(Rows { source: Arc::new(Converted { upstream, ..self.clone() }), block })
    }
}
