//! Weight quantization by rounding to nearest, shared by the quantization passes.
//!
//! The arithmetic is that of compressed-tensors: with `steps = 2^bits - 1`, symmetric
//! `scale = absmax / (steps / 2)`, asymmetric `scale = (max - min) / steps`, FP8 `scale = absmax / 448`,
//! and for other scales of floats as in [`FloatFormat`]. The scale is rounded to the dtype of the
//! model before it is used (rounded up if it is subnormal).

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kernel::grid::Levels;
use crate::kernel::quantize::{Bounds, FourthPowers, Squares};
use crate::kernel::{Float, convert, minifloat, quantize, with_float};
use crate::store::{
    Block, BlockSink, Codes, DType, Encoding, FloatFormat, Granularity, QuantizationSpec, Rows, ScaleFormat, View, Weight, WeightSource, least_common_multiple,
};
use crate::work::Meter;

/// Method that chooses the range of a weight scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum WeightObserver {
    /// From the smallest to the largest value
    #[default]
    Minmax,
    /// The range with the least squared error, among 80 % to 100 % of minmax (with calibration samples
    /// from 40 %, with errors weighted by the inputs); for symmetric integers also the range with its
    /// largest value at a whole number of steps, and for floats the ranges whose largest value is stored as
    /// the second largest number of the format (for FP4, four instead of six)
    Mse,
    /// Like mse with fourth powers of errors, which clips less: for integers without calibration samples
    L4,
}

impl WeightObserver {
    /// The largest E4M3 scale relative to a global scale. A search also tries larger scales.
    fn largest_relative_scale(self) -> f32 {
        match self {
            WeightObserver::Minmax => minifloat::E4M3_MAX,
            WeightObserver::Mse | WeightObserver::L4 => 256.0,
        }
    }
}

/// Rounds exact scales to the format of an encoding; relative scales are divided by the global scale.
pub(super) fn stored_scale(affine: &QuantizationSpec, global_scale: f32) -> impl Fn(f64) -> f32 + Copy + Sync + use<> {
    let (dtype, float) = (affine.scale_dtype, affine.codes.float().map(|format| (format, affine.scale_format(), f64::from(format.row().max))));
    move |exact| match float {
        Some((format, ScaleFormat::PowerOfTwo, largest)) => format.power_of_two_scale((exact * largest) as f32),
        Some((format, ScaleFormat::Relative, largest)) => format.relative_scale((exact * largest) as f32, global_scale) / global_scale,
        _ => convert::scale(dtype, exact),
    }
}

/// Weights with a common NVFP4 global scale, because runtimes fuse their layers.
#[derive(Default)]
pub(super) struct ScaleGroup {
    pub weights: Vec<Weight>,
    observer: WeightObserver,
    global_scale: OnceLock<f32>,
}

impl ScaleGroup {
    pub fn new(weights: Vec<Weight>, observer: WeightObserver) -> Arc<ScaleGroup> {
        Arc::new(ScaleGroup { weights, observer, global_scale: OnceLock::new() })
    }

    /// The scale for the largest magnitude of the weights.
    pub fn global_scale(&self, format: FloatFormat, meter: &Meter) -> Result<f32> {
        if let Some(scale) = self.global_scale.get() {
            return Ok(*scale);
        }
        let mut largest = 0f32;
        for weight in &self.weights {
            weight.visit(1, &mut |block| {
                let (low, high) = meter.time(|| with_float!(weight.dtype, F => quantize::range::<F>(block.now.values), else (0.0, 0.0)));
                largest = largest.max(-low).max(high);
                Ok(())
            })?;
        }
        Ok(*self.global_scale.get_or_init(|| format.global_scale(largest, self.observer.largest_relative_scale())))
    }
}

/// Quantized weight.
pub(super) struct WeightQuantizer {
    name: String,
    upstream: Weight,
    affine: QuantizationSpec,
    observer: WeightObserver,
    /// Whether codes are limited to [`REDUCED`].
    reduced: bool,
    /// Minimum scale of each row, so that the bias fits 32 bits in units of the accumulator.
    min_scales: Option<Vec<f32>>,
    scale_group: Option<Arc<ScaleGroup>>,
    meter: Arc<Meter>,
    /// Scale and zero point of the tensor, with a scale per tensor.
    tensor_parameters: OnceLock<(f32, f32)>,
}

/// Codes for which the sum of two products with uint8 activations, up to 255 · 64 · 2, fits into 16 bits.
const REDUCED: Bounds = [-64.0, 64.0];

/// Smallest range of the search, in percent of minmax.
const MIN_RANGE_PERCENT: u32 = 80;

/// Width of a step when a range is divided into `steps` steps.
fn step(low: f32, high: f32, steps: f32) -> f32 {
    // The width of the range can overflow f32.
    if (high - low).is_finite() { (high - low) / steps } else { high / steps - low / steps }
}

impl WeightQuantizer {
    pub fn new(name: &str, upstream: &Weight, affine: QuantizationSpec, observer: WeightObserver, meter: &Arc<Meter>) -> Self {
        let (name, upstream, meter) = (name.to_owned(), upstream.clone(), meter.clone());
        Self { name, upstream, affine, observer, reduced: false, min_scales: None, scale_group: None, meter, tensor_parameters: OnceLock::new() }
    }

    /// Sets the group of weights with a common global scale.
    pub fn with_scale_group(self, scale_group: Option<Arc<ScaleGroup>>) -> Self {
        Self { scale_group, ..self }
    }

    /// The quantized weight.
    pub fn weight(self) -> Weight {
        let (upstream, affine) = (self.upstream.clone(), self.affine.clone());
        upstream.then(affine.value_dtype(upstream.dtype), Encoding::Quantized(affine), Arc::new(self))
    }

    /// Number of rows that share scales.
    fn block_rows(&self) -> usize {
        if let Granularity::Block([high, _]) = self.affine.granularity { high } else { 1 }
    }

    /// Number of elements to read at once, so that blocks are multiples of both `unit` and rows that
    /// share scales.
    fn unit(&self, unit: usize) -> usize {
        least_common_multiple(unit, self.upstream.row() * self.block_rows())
    }

    fn bounds(&self) -> Bounds {
        if self.reduced { REDUCED } else { quantize::bounds(self.affine.codes.bits()) }
    }

    fn encode<F: Float>(&self, values: &[u8], codes: &mut [u8], scale: f32, zero: f32) {
        match self.affine.codes {
            Codes::Integer(_) => quantize::quantize::<F>(values, codes, scale, zero, self.bounds()),
            Codes::Float(format) => format.quantize::<F>(values, codes, scale),
            Codes::Palette(_) => debug_assert!(false, "palettes do not have scales"),
        }
    }

    /// Encodes rows in a float format. Groups of `high` rows share scales; `high` is 1 except for 2-D blocks.
    fn stripes<F: Float>(&self, format: FloatFormat, input: &[u8], (row, high): (usize, usize), global_scale: f32, out: &mut Output) {
        let run = self.affine.granularity.run(row, row);
        let line = row.max(1) * F::SIZE;
        let (levels, store, ones) = (Levels::Floats(format.codec()), stored_scale(&self.affine, global_scale), vec![1f32; run]);
        for (stripe, codes) in input.chunks(line * high).zip(out.integers.chunks_mut(row.max(1) * high)) {
            // Groups of one row are searched; options exclude a search over several rows.
            let scales: Vec<f32> = if self.observer == WeightObserver::Minmax || high > 1 {
                let mut ranges = vec![(0f32, 0f32); row.div_ceil(run)];
                for values in stripe.chunks(line) {
                    for (range, values) in ranges.iter_mut().zip(values.chunks(run * F::SIZE)) {
                        let (low, high) = quantize::range::<F>(values);
                        *range = (range.0.min(low), range.1.max(high));
                    }
                }
                ranges.into_iter().map(|range| levels.params(range, store).scale).collect()
            } else {
                let values: Vec<f32> = F::split(stripe).iter().map(|e| F::to_f32(*e)).collect();
                values.chunks(run).map(|values| levels.search(values, &ones[..values.len()], MIN_RANGE_PERCENT, store).scale).collect()
            };
            for (values, codes) in stripe.chunks(line).zip(codes.chunks_mut(row.max(1))) {
                for ((values, codes), scale) in values.chunks(run * F::SIZE).zip(codes.chunks_mut(run)).zip(&scales) {
                    format.quantize::<F>(values, codes, *scale);
                    out.scales.push(*scale * global_scale);
                }
            }
        }
    }

    /// Scale and zero point for a range, rounded to their stored dtypes.
    fn parameters(&self, (low, high): (f32, f32)) -> (f32, f32) {
        if let Some(format) = self.affine.codes.float() {
            return (Levels::Floats(format.codec()).params((low, high), stored_scale(&self.affine, 1.0)).scale, 0.0);
        }
        let positive = |scale: f32| if scale > 0.0 { scale } else { f32::EPSILON };
        let [least, most] = quantize::bounds(self.affine.codes.bits());
        let steps = most - least;
        let exact = match self.affine.symmetric {
            true => f64::from(low.abs().max(high.abs())) / f64::from(if self.reduced { REDUCED[1] } else { steps / 2.0 }),
            false => step(low, high, steps).into(),
        };
        // A block of zeros has zero codes, so that sparse layouts can omit them.
        let zero_point = if self.affine.symmetric || exact == 0.0 { 0.0 } else { (least - low / exact as f32).clamp(least, most).round_ties_even() };
        // A range that is not empty has a positive scale, even if it underflows f32.
        let exact = if exact == 0.0 { (f64::from(high) - f64::from(low)) / f64::from(steps) } else { exact };
        (positive(convert::scale(self.affine.scale_dtype, exact)), zero_point)
    }

    fn observe<F: Float>(&self, values: &[u8]) -> (f32, f32) {
        let (low, high) = quantize::range::<F>(values);
        match self.observer {
            WeightObserver::Minmax => self.parameters((low, high)),
            WeightObserver::Mse | WeightObserver::L4 => self.best((low, high), |scale, zero| self.error::<F>(values, scale, zero)),
        }
    }

    fn error<F: Float>(&self, values: &[u8], scale: f32, zero: f32) -> f64 {
        match self.observer {
            WeightObserver::L4 => quantize::error::<F, FourthPowers>(values, scale, zero, self.bounds()),
            _ => quantize::error::<F, Squares>(values, scale, zero, self.bounds()),
        }
    }

    /// Candidate scales and zero points of the range search.
    fn candidates(&self, (low, high): (f32, f32)) -> impl Iterator<Item = (f32, f32)> {
        let symmetric = self.affine.symmetric && self.affine.codes.is_integer() && !self.reduced;
        quantize::parts(self.bounds(), symmetric, (low, high), MIN_RANGE_PERCENT).map(move |part| self.parameters((low * part, high * part)))
    }

    fn best(&self, range: (f32, f32), error: impl Fn(f32, f32) -> f64) -> (f32, f32) {
        let mut best = (f64::INFINITY, self.parameters(range));
        for (scale, zero) in self.candidates(range) {
            let error = error(scale, zero);
            if error < best.0 {
                best = (error, (scale, zero));
            }
        }
        best.1
    }

    /// Scale and zero point of the entire tensor, computed by reading it once or twice.
    fn observe_tensor<F: Float>(&self) -> Result<(f32, f32)> {
        if let Some(parameters) = self.tensor_parameters.get() {
            return Ok(*parameters);
        }
        let mut range = (0f32, 0f32);
        self.upstream.visit(1, &mut |block| {
            let (low, high) = self.meter.time(|| quantize::range::<F>(block.now.values));
            range = (range.0.min(low), range.1.max(high));
            Ok(())
        })?;
        let parameters = match self.observer {
            WeightObserver::Minmax => self.parameters(range),
            WeightObserver::Mse | WeightObserver::L4 => {
                let mut errors: Vec<((f32, f32), f64)> = self.candidates(range).map(|candidate| (candidate, 0.0)).collect();
                self.upstream.visit(1, &mut |block| {
                    self.meter.time(|| errors.iter_mut().for_each(|((scale, zero), error)| *error += self.error::<F>(block.now.values, *scale, *zero)));
                    Ok(())
                })?;
                errors.into_iter().reduce(|best, next| if next.1 < best.1 { next } else { best }).map_or(self.parameters(range), |(best, _)| best)
            }
        };
        Ok(*self.tensor_parameters.get_or_init(|| parameters))
    }

    /// Rejects f64 values outside of the range of f32, because scales have at most 32 bits and would clip
    /// them.
    fn require_range<F: Float>(&self, values: &[u8]) -> Result<()> {
        let outside = |e: &F::Bytes| F::magnitude(*e) < F::INFINITY && F::to_f32(*e).is_infinite();
        match F::DTYPE == DType::F64 && F::split(values).iter().any(outside) {
            false => Ok(()),
            true => Err(Error::tensor(
                &self.name,
                "contains values outside of the range of f32, which its scales cannot represent",
                "scale the weights down, or add the tensor to `ignore`",
            )),
        }
    }

    fn visit_as<F: Float>(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = self.upstream.row();
        let min_scale = |row: Option<usize>| match (&self.min_scales, row) {
            (None, _) => 0.0,
            (Some(scales), Some(row)) => scales.get(row).copied().unwrap_or(0.0),
            (Some(scales), None) => scales.iter().copied().fold(0.0, f32::max),
        };
        let shared = if self.affine.granularity == Granularity::Tensor {
            let (scale, zero) = self.observe_tensor::<F>()?;
            Some((scale.max(min_scale(None)), zero))
        } else {
            None
        };
        let mut runs = 0;
        let mut out = Output::default();
        let high = self.block_rows();
        let format = self.affine.codes.float();
        let global_scale = match (&self.scale_group, format) {
            (Some(group), Some(format)) if self.affine.has_global_scale() => group.global_scale(format, &self.meter)?,
            _ => 1.0,
        };
        let floats = format.filter(|_| shared.is_none());
        self.upstream.visit(self.unit(unit), &mut |block: Block| {
            let input = block.now.values;
            self.require_range::<F>(input)?;
            self.meter.time(|| {
                out.clear(input.len() / F::SIZE);
                if let Some(format) = floats {
                    self.stripes::<F>(format, input, (row, high), global_scale, &mut out);
                    return out.encode_scales(self.affine.scale_dtype);
                }
                let run = self.affine.granularity.run(row, input.len() / F::SIZE);
                for (index, (values, integers)) in input.chunks(run * F::SIZE).zip(out.integers.chunks_mut(run)).enumerate() {
                    let (scale, zero) = shared.unwrap_or_else(|| {
                        let (scale, zero) = self.observe::<F>(values);
                        (scale.max(min_scale(Some(runs))), zero)
                    });
                    runs += 1;
                    self.encode::<F>(values, integers, scale, zero);
                    if shared.is_none() || index == 0 {
                        out.scales.push(scale);
                        out.zero_points.push(zero as i8 as u8);
                    }
                }
                out.encode_scales(self.affine.scale_dtype);
            });
            let zero_points = if self.affine.symmetric { &[] } else { out.zero_points.as_slice() };
            sink(block.becomes(View {
                dtype: self.affine.value_dtype(F::DTYPE),
                values: &out.integers,
                affine: Some((&self.affine, row)),
                scales: &out.scale_bytes,
                zero_points,
                global_scale,
                blocks: &[],
            }))
        })
    }
}

/// Options for static quantization of activations.
#[cfg(feature = "run")]
impl WeightQuantizer {
    /// Limits codes to -64 to 64, so that the sum of two products with uint8 activations fits into 16 bits.
    pub fn reduced(self, reduced: bool) -> Self {
        Self { reduced, ..self }
    }

    /// Sets minimum scales: the int32 bias must not overflow, and the scale of the accumulator (the weight
    /// scale times `input_scale`) must be a normal float.
    pub fn with_bias(self, bias: Option<Vec<f32>>, input_scale: f32) -> Self {
        let min_scale = |bias: f32| ((f64::from(bias.abs()) / (f64::from(input_scale) * 2e9)) as f32).max(f32::MIN_POSITIVE / input_scale);
        Self { min_scales: bias.map(|bias| bias.into_iter().map(min_scale).collect()), ..self }
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
        let encoded = convert::encode_scales(dtype, &self.scales, &mut self.scale_bytes);
        debug_assert!(encoded, "scales have at most 32 bits");
    }
}

impl WeightSource for WeightQuantizer {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        with_float!(self.upstream.dtype, F => self.visit_as::<F>(unit, sink), else self.upstream.visit(unit, sink))
    }

    /// Supported unless a scale depends on all rows.
    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let shared = self.affine.granularity == Granularity::Tensor || self.affine.has_global_scale() || self.min_scales.is_some();
        let (upstream, block) = self.upstream.rows(rows, self.unit(unit)).filter(|_| !shared)?;
        let quantizer = WeightQuantizer::new(&self.name, &upstream, self.affine.clone(), self.observer, &self.meter);
        Some(Rows { source: Arc::new(WeightQuantizer { reduced: self.reduced, ..quantizer }), block })
    }

    fn unrounded(&self) -> Option<&Weight> {
        Some(&self.upstream)
    }
}
