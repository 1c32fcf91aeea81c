//! Int8 weights by rounding to nearest; activations are quantized for each token while the model runs.
//!
//! The arithmetic is that of compressed-tensors: symmetric `scale = absmax / 127.5`, asymmetric
//! `scale = (max - min) / 255`, the scale rounded to the model's own format before it is used.
//!
//! ```yaml
//! passes:
//!   - quantize-dynamic: { granularity: channel, observer: mse, ignore: ["*pooler*"] }
//! ```

use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::targets::{self, Chosen};
use super::{Pass, options_of};
use crate::error::{Error, Result};
use crate::kernel::{Float, convert, quantize, with_float};
use crate::model::{self, Applied, Model};
use crate::store::{Activations, Affine, Block, DType, Encoding, Granularity, Meter, Pattern, Sink, Source, View, Weight, least_common_multiple};

/// How many weights share a scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum GranularityKind {
    /// One scale for a tensor
    Tensor,
    /// One scale for each output channel (row)
    #[default]
    Channel,
    /// One scale for each `group_size` consecutive inputs of a row
    Group,
}

/// What the consumer does to the inputs of a quantized layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ActivationScheme {
    /// Int8, with a scale for each token found while the model runs (W8A8)
    #[default]
    Token,
    /// Nothing: only weights are int8 (W8A16)
    None,
}

/// How the range of a scale is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Observer {
    /// From the smallest to the largest value
    #[default]
    Minmax,
    /// The range, from 100 % down to 80 % of minmax, with the smallest squared error
    Mse,
}

/// Store linear weights as int8.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct QuantizeDynamic {
    /// How many weights share a scale
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().granularity))]
    pub granularity: GranularityKind,
    /// Inputs of a row that share a scale, with `granularity: group` [default: 128]
    #[cfg_attr(feature = "cli", arg(long, value_name = "INPUTS", allow_negative_numbers = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<usize>,
    /// Whether zero points are fixed at zero
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", default_value_t = Self::default().symmetric))]
    pub symmetric: bool,
    /// What the consumer does to the inputs of a quantized layer
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().activations))]
    pub activations: ActivationScheme,
    /// How the range of a scale is chosen
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().observer))]
    pub observer: Observer,
    /// Quantize embedding tables too (weights only)
    #[cfg_attr(feature = "cli", arg(long))]
    pub embeddings: bool,
    /// Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave alone
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
            activations: ActivationScheme::Token,
            observer: Observer::Minmax,
            embeddings: false,
            targets: Vec::new(),
            ignore: Vec::new(),
        }
    }
}

const NAME: &str = "quantize-dynamic";
const DEFAULT_GROUP: usize = 128;

impl QuantizeDynamic {
    fn affine(&self, weight: &Weight, embedding: bool) -> Affine {
        let granularity = match self.granularity {
            // A table's rows are looked up one by one; a scale for all of them would be the worst of all.
            GranularityKind::Tensor if embedding => Granularity::Channel,
            GranularityKind::Tensor => Granularity::Tensor,
            GranularityKind::Channel => Granularity::Channel,
            GranularityKind::Group => Granularity::Group(self.group_size.unwrap_or(DEFAULT_GROUP)),
        };
        let activations = match self.activations {
            ActivationScheme::Token if !embedding => Activations::DynamicToken,
            _ => Activations::None,
        };
        let scale_dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
        Affine { granularity, symmetric: self.symmetric, scale_dtype, activations }
    }

    fn check_weight(&self, name: &str, weight: &Weight) -> Result<()> {
        targets::require_float(NAME, name, weight)?;
        if weight.shape.len() != 2 {
            return Err(Error::tensor(name, format!("has shape {:?}; only matrices can be stored as int8 in safetensors", weight.shape), "add it to `ignore`"));
        }
        let size = self.group_size.unwrap_or(DEFAULT_GROUP);
        if self.granularity == GranularityKind::Group && !weight.row().is_multiple_of(size) {
            return Err(Error::tensor(
                name,
                format!("has rows of {} inputs, which groups of {size} do not divide", weight.row()),
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

    fn apply(&self, mut model: Model) -> Result<Model> {
        let weights = model.weights.clone();
        let rule = if self.embeddings { format!("{}; and embeddings", model::LINEAR_RULE) } else { model::LINEAR_RULE.to_owned() };
        let eligible = |name: &str, w: &Weight| model::is_linear(name, w) || (self.embeddings && model::is_embedding(name, w));
        let Chosen { names, rule } = targets::choose(NAME, &weights, &self.targets, &self.ignore, &rule, eligible)?;
        let meter = Arc::new(Meter::default());
        for name in &names {
            let weight = weights.get(name)?;
            self.check_weight(name, weight)?;
            let affine = self.affine(weight, model::is_embedding(name, weight));
            let source = Quantized {
                name: (*name).to_owned(),
                upstream: weight.clone(),
                affine: affine.clone(),
                observer: self.observer,
                meter: meter.clone(),
                shared: OnceLock::new(),
            };
            let dtype = affine.scale_dtype;
            model.weights.by_name.insert((*name).to_owned(), weight.then(dtype, Encoding::Affine(affine), Arc::new(source)));
        }
        let count = names.len();
        model.history.push(Applied {
            name: NAME,
            options: self.options(),
            tensors: names.into_iter().map(str::to_owned).collect(),
            rule,
            meter,
            details: Arc::new(move || json!({ "quantized": count })),
            notes: Vec::new(),
        });
        Ok(model)
    }
}

/// A weight as integers.
struct Quantized {
    name: String,
    upstream: Weight,
    affine: Affine,
    observer: Observer,
    meter: Arc<Meter>,
    shared: OnceLock<(f32, f32)>,
}

/// Steps of the search by squared error, each one percent of the range.
const MSE_STEPS: usize = 20;

/// The 255th part of a range.
fn step(low: f32, high: f32) -> f32 {
    // The range can be wider than f32 reaches.
    if (high - low).is_finite() { (high - low) / 255.0 } else { high / 255.0 - low / 255.0 }
}

fn shrink(step: usize) -> f32 {
    (1.0 - step as f64 / 100.0) as f32
}

impl Quantized {
    /// Scale and zero point for a range, as a reader will see them.
    fn parameters(&self, (low, high): (f32, f32)) -> (f32, f32) {
        let positive = |scale: f32| if scale > 0.0 { scale } else { f32::EPSILON };
        let exact = if self.affine.symmetric { low.abs().max(high.abs()) / 127.5 } else { step(low, high) };
        // Zeros alone stay zero bits, so that a sparse layout drops them.
        let zero_point = if self.affine.symmetric || exact == 0.0 { 0.0 } else { (-128.0 - low / exact).clamp(-128.0, 127.0).round_ties_even() };
        (positive(convert::rounded(self.affine.scale_dtype, exact)), zero_point)
    }

    fn observe<F: Float>(&self, values: &[u8]) -> (f32, f32) {
        let (low, high) = quantize::range::<F>(values);
        match self.observer {
            Observer::Minmax => self.parameters((low, high)),
            Observer::Mse => self.best((low, high), |scale, zero| quantize::squared_error::<F>(values, scale, zero)),
        }
    }

    fn best(&self, (low, high): (f32, f32), error: impl Fn(f32, f32) -> f64) -> (f32, f32) {
        let mut best = (f64::INFINITY, self.parameters((low, high)));
        for step in 0..=MSE_STEPS {
            let (scale, zero) = self.parameters((low * shrink(step), high * shrink(step)));
            let error = error(scale, zero);
            if error < best.0 {
                best = (error, (scale, zero));
            }
        }
        best.1
    }

    /// Range of the whole tensor, over sweeps of its own.
    fn observe_all<F: Float>(&self) -> Result<(f32, f32)> {
        if let Some(found) = self.shared.get() {
            return Ok(*found);
        }
        let mut range = (0f32, 0f32);
        self.upstream.visit(1, &mut |block| {
            let (low, high) = self.meter.time(|| quantize::range::<F>(block.now.values));
            range = (range.0.min(low), range.1.max(high));
            Ok(())
        })?;
        let found = match self.observer {
            Observer::Minmax => self.parameters(range),
            Observer::Mse => {
                let mut errors = [0f64; MSE_STEPS + 1];
                self.upstream.visit(1, &mut |block| {
                    self.meter.time(|| {
                        for (step, error) in errors.iter_mut().enumerate() {
                            let (scale, zero) = self.parameters((range.0 * shrink(step), range.1 * shrink(step)));
                            *error += quantize::squared_error::<F>(block.now.values, scale, zero);
                        }
                    });
                    Ok(())
                })?;
                let best = (0..errors.len()).reduce(|best, step| if errors[step] < errors[best] { step } else { best }).unwrap_or(0);
                self.parameters((range.0 * shrink(best), range.1 * shrink(best)))
            }
        };
        Ok(*self.shared.get_or_init(|| found))
    }

    /// Scales are f32 at most: a double that no f32 reaches would be clipped to what the others leave.
    fn require_range<F: Float>(&self, values: &[u8]) -> Result<()> {
        let outside = |e: &F::Bytes| F::magnitude(*e) < F::INFINITY && F::to_f32(*e).is_infinite();
        match F::DTYPE == DType::F64 && F::split(values).iter().any(outside) {
            false => Ok(()),
            true => Err(Error::tensor(
                &self.name,
                "holds values past the end of f32, which its scales cannot cover",
                "scale the weights down, or add the tensor to `ignore`",
            )),
        }
    }

    fn visit_as<F: Float>(&self, unit: usize, sink: Sink) -> Result<()> {
        let row = self.upstream.row();
        let shared = if self.affine.granularity == Granularity::Tensor { Some(self.observe_all::<F>()?) } else { None };
        let mut out = Output::default();
        self.upstream.visit(least_common_multiple(unit, row), &mut |block: Block| {
            let input = block.now.values;
            self.require_range::<F>(input)?;
            self.meter.time(|| {
                out.clear(input.len() / F::SIZE);
                let run = self.affine.granularity.run(row, input.len() / F::SIZE);
                for (index, (values, integers)) in input.chunks(run * F::SIZE).zip(out.integers.chunks_mut(run)).enumerate() {
                    let (scale, zero) = shared.unwrap_or_else(|| self.observe::<F>(values));
                    quantize::quantize::<F>(values, integers, scale, zero);
                    if shared.is_none() || index == 0 {
                        out.scales.push(scale);
                        out.zero_points.push(zero as i8 as u8);
                    }
                }
                out.encode_scales(self.affine.scale_dtype);
            });
            let zero_points = if self.affine.symmetric { &[] } else { out.zero_points.as_slice() };
            sink(block.becomes(View {
                dtype: self.affine.scale_dtype,
                values: &out.integers,
                affine: Some((&self.affine, row)),
                scales: &out.scale_bytes,
                zero_points,
            }))
        })
    }
}

#[derive(Default)]
struct Output {
    integers: Vec<u8>,
    scales: Vec<f32>,
    scale_bytes: Vec<u8>,
    zero_points: Vec<u8>,
}

impl Output {
    fn clear(&mut self, elements: usize) {
        self.integers.resize(elements, 0);
        self.scales.clear();
        self.zero_points.clear();
    }

    fn encode_scales(&mut self, dtype: DType) {
        self.scale_bytes.resize(self.scales.len() * dtype.bitsize() / 8, 0);
        let encoded = convert::from_f32(dtype, &self.scales, &mut self.scale_bytes);
        debug_assert!(encoded, "scales are stored in 32 bits or fewer");
    }
}

impl Source for Quantized {
    fn visit(&self, unit: usize, sink: Sink) -> Result<()> {
        with_float!(self.upstream.dtype, F => self.visit_as::<F>(unit, sink), else self.upstream.visit(unit, sink))
    }
}
