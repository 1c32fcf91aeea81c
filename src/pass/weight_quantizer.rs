//! Weights as codes, by rounding to nearest: what the passes that quantize share.
//!
//! The arithmetic is that of compressed-tensors: with `steps = 2^bits - 1`, symmetric `scale = absmax / (steps / 2)`, asymmetric
//! `scale = (max - min) / steps`, FP8 `scale = absmax / 448`, FP4 as `narrow` and NVIDIA's global scale say, the scale rounded to the model's own format before it is used (up, where that is subnormal).

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kernel::quantize::{Bounds, FourthPowers, Squares};
use crate::kernel::{Float, convert, narrow, quantize, with_float};
use crate::store::{Affine, Block, BlockSink, Codes, DType, Encoding, Granularity, Rows, View, Weight, WeightSource, least_common_multiple};
use crate::work::Meter;

/// How the range of a scale is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WeightObserver {
    /// From the smallest to the largest value
    #[default]
    Minmax,
    /// The range with the least squared error, among 80 % to 100 % of minmax and, of symmetric integers, the one whose largest value is a whole number of steps; by samples, from 40 %, weighted by what errors cost
    Mse,
    /// The same by fourth powers of errors, which cuts off less: for integers without samples
    L4,
}

/// The weights whose NVFP4 scales are in steps of one over the same number: consumers hold one for layers that they fuse.
#[derive(Default)]
pub(super) struct Peers {
    pub weights: Vec<Weight>,
    found: OnceLock<f32>,
}

impl Peers {
    pub fn of(weights: Vec<Weight>) -> Arc<Peers> {
        Arc::new(Peers { weights, found: OnceLock::new() })
    }

    /// `448 · 6 / absmax`, so that the largest scale is the largest E4M3.
    fn global_scale(&self, meter: &Meter) -> Result<f32> {
        if let Some(found) = self.found.get() {
            return Ok(*found);
        }
        let mut largest = f32::MIN_POSITIVE;
        for weight in &self.weights {
            weight.visit(1, &mut |block| {
                let (low, high) = meter.time(|| with_float!(weight.dtype, F => quantize::range::<F>(block.now.values), else (0.0, 0.0)));
                largest = largest.max(-low).max(high);
                Ok(())
            })?;
        }
        let exact = narrow::E4M3_MAX * narrow::E2M1_MAX / largest;
        Ok(*self.found.get_or_init(|| if exact.is_finite() { exact } else { 1.0 }))
    }
}

/// A weight as codes.
pub(super) struct Integers {
    name: String,
    upstream: Weight,
    affine: Affine,
    observer: WeightObserver,
    /// The integers that may be used: all, or those that cannot saturate.
    reduced: bool,
    /// The least scale of each row (with a scale per channel) or of all, so that a bias in units of the products fits 32 bits.
    least: Option<Vec<f32>>,
    peers: Option<Arc<Peers>>,
    meter: Arc<Meter>,
    shared: OnceLock<(f32, f32)>,
}

/// 255 · 64 · 2 is below 2¹⁵.
const REDUCED: Bounds = [-64.0, 64.0];

/// Where the search by errors ends, in hundredths of the range.
const LEAST: u32 = 80;

/// One of so many parts of a range.
fn step(low: f32, high: f32, steps: f32) -> f32 {
    // The range can be wider than f32 reaches.
    if (high - low).is_finite() { (high - low) / steps } else { high / steps - low / steps }
}

impl Integers {
    pub fn new(name: &str, upstream: &Weight, affine: Affine, observer: WeightObserver, meter: &Arc<Meter>) -> Self {
        let (name, upstream, meter) = (name.to_owned(), upstream.clone(), meter.clone());
        Self { name, upstream, affine, observer, reduced: false, least: None, peers: None, meter, shared: OnceLock::new() }
    }

    /// Shares a global scale with others.
    pub fn with_peers(self, peers: Option<Arc<Peers>>) -> Self {
        Self { peers, ..self }
    }

    /// The weight that the codes stand for.
    pub fn weight(self) -> Weight {
        let (upstream, affine) = (self.upstream.clone(), self.affine.clone());
        upstream.then(affine.value_dtype(upstream.dtype), Encoding::Affine(affine), Arc::new(self))
    }

    /// Rows that share scales.
    fn high(&self) -> usize {
        if let Granularity::Block([high, _]) = self.affine.granularity { high } else { 1 }
    }

    /// Elements that have to come together, where so many are asked for together.
    fn unit(&self, unit: usize) -> usize {
        least_common_multiple(unit, self.upstream.row() * self.high())
    }

    fn bounds(&self) -> Bounds {
        if self.reduced { REDUCED } else { quantize::bounds(self.affine.codes.bits()) }
    }

    /// The scale of codes that are floats, for a range. Of NVFP4 it is in steps of one over the global scale.
    fn scale_of_floats(&self, (low, high): (f32, f32), global_scale: f32) -> f32 {
        let largest = low.abs().max(high);
        let or = |scale: f32, least: f32| if scale > 0.0 { scale } else { least };
        match (self.affine.codes, self.affine.scale_dtype) {
            (codes, DType::F8_E8M0) => narrow::from_e8m0(narrow::e8m0_scale(largest, if codes == Codes::E2m1 { 2 } else { 8 })),
            (Codes::E2m1, _) => or(narrow::from_e4m3(narrow::to_e4m3(global_scale * (largest / narrow::E2M1_MAX))), 0.125),
            (_, dtype) => or(convert::scale(dtype, f64::from(largest) / f64::from(narrow::E4M3_MAX)), f32::EPSILON),
        }
    }

    fn encode<F: Float>(&self, values: &[u8], codes: &mut [u8], scale: f32, zero: f32) {
        match self.affine.codes {
            Codes::Integer(_) => quantize::quantize::<F>(values, codes, scale, zero, self.bounds()),
            Codes::E4m3 => narrow::quantize_e4m3::<F>(values, codes, scale),
            Codes::E2m1 => narrow::quantize_e2m1::<F>(values, codes, scale),
            Codes::Palette(_) => debug_assert!(false, "palettes have no scales"),
        }
    }

    /// Codes of whole rows whose blocks share scales; of NVFP4 and others, `high` is 1.
    fn stripes<F: Float>(&self, input: &[u8], row: usize, high: usize, global_scale: f32, out: &mut Output) {
        let run = self.affine.granularity.run(row, row);
        let line = row.max(1) * F::SIZE;
        for (stripe, codes) in input.chunks(line * high).zip(out.integers.chunks_mut(row.max(1) * high)) {
            let mut ranges = vec![(0f32, 0f32); row.div_ceil(run)];
            for values in stripe.chunks(line) {
                for (range, values) in ranges.iter_mut().zip(values.chunks(run * F::SIZE)) {
                    let (low, high) = quantize::range::<F>(values);
                    *range = (range.0.min(low), range.1.max(high));
                }
            }
            let scales: Vec<f32> = ranges.into_iter().map(|range| self.scale_of_floats(range, global_scale)).collect();
            for (values, codes) in stripe.chunks(line).zip(codes.chunks_mut(row.max(1))) {
                for ((values, codes), scale) in values.chunks(run * F::SIZE).zip(codes.chunks_mut(run)).zip(&scales) {
                    self.encode::<F>(values, codes, scale / global_scale, 0.0);
                    out.scales.push(*scale);
                }
            }
        }
    }

    /// Scale and zero point for a range, as a reader will see them.
    fn parameters(&self, (low, high): (f32, f32)) -> (f32, f32) {
        if !self.affine.codes.is_integer() {
            return (self.scale_of_floats((low, high), 1.0), 0.0);
        }
        let positive = |scale: f32| if scale > 0.0 { scale } else { f32::EPSILON };
        let [least, most] = quantize::bounds(self.affine.codes.bits());
        let steps = most - least;
        let exact = match self.affine.symmetric {
            true => f64::from(low.abs().max(high.abs())) / f64::from(if self.reduced { REDUCED[1] } else { steps / 2.0 }),
            false => step(low, high, steps).into(),
        };
        // Zeros alone stay zero bits, so that a sparse layout drops them.
        let zero_point = if self.affine.symmetric || exact == 0.0 { 0.0 } else { (least - low / exact as f32).clamp(least, most).round_ties_even() };
        // A range that is no zero has a scale, however small.
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

    /// The ranges that the search tries, as scales and zero points.
    fn tries(&self, (low, high): (f32, f32)) -> impl Iterator<Item = (f32, f32)> {
        let symmetric = self.affine.symmetric && self.affine.codes.is_integer() && !self.reduced;
        quantize::parts(self.bounds(), symmetric, (low, high), LEAST).map(move |part| self.parameters((low * part, high * part)))
    }

    fn best(&self, range: (f32, f32), error: impl Fn(f32, f32) -> f64) -> (f32, f32) {
        let mut best = (f64::INFINITY, self.parameters(range));
        for (scale, zero) in self.tries(range) {
            let error = error(scale, zero);
            if error < best.0 {
                best = (error, (scale, zero));
            }
        }
        best.1
    }

    /// Range of the whole tensor, by a reading of its own.
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
            WeightObserver::Minmax => self.parameters(range),
            WeightObserver::Mse | WeightObserver::L4 => {
                let mut tries: Vec<((f32, f32), f64)> = self.tries(range).map(|found| (found, 0.0)).collect();
                self.upstream.visit(1, &mut |block| {
                    self.meter.time(|| tries.iter_mut().for_each(|((scale, zero), error)| *error += self.error::<F>(block.now.values, *scale, *zero)));
                    Ok(())
                })?;
                tries.into_iter().reduce(|best, other| if other.1 < best.1 { other } else { best }).map_or(self.parameters(range), |(found, _)| found)
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

    fn visit_as<F: Float>(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = self.upstream.row();
        let least = |row: Option<usize>| match (&self.least, row) {
            (None, _) => 0.0,
            (Some(least), Some(row)) => least.get(row).copied().unwrap_or(0.0),
            (Some(least), None) => least.iter().copied().fold(0.0, f32::max),
        };
        let shared = if self.affine.granularity == Granularity::Tensor {
            let (scale, zero) = self.observe_all::<F>()?;
            Some((scale.max(least(None)), zero))
        } else {
            None
        };
        let mut runs = 0;
        let mut out = Output::default();
        let high = self.high();
        let global_scale = match &self.peers {
            Some(peers) if self.affine.has_global_scale() => peers.global_scale(&self.meter)?,
            _ => 1.0,
        };
        let floats = !self.affine.codes.is_integer() && shared.is_none();
        self.upstream.visit(self.unit(unit), &mut |block: Block| {
            let input = block.now.values;
            self.require_range::<F>(input)?;
            self.meter.time(|| {
                out.clear(input.len() / F::SIZE);
                if floats {
                    self.stripes::<F>(input, row, high, global_scale, &mut out);
                    return out.encode_scales(self.affine.scale_dtype);
                }
                let run = self.affine.granularity.run(row, input.len() / F::SIZE);
                for (index, (values, integers)) in input.chunks(run * F::SIZE).zip(out.integers.chunks_mut(run)).enumerate() {
                    let (scale, zero) = shared.unwrap_or_else(|| {
                        let (scale, zero) = self.observe::<F>(values);
                        (scale.max(least(Some(runs))), zero)
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

/// What activations ask of weights.
#[cfg(feature = "run")]
impl Integers {
    /// Uses -64 to 64 alone, so that two products with unsigned activations fit 16 bits.
    pub fn reduced(self, reduced: bool) -> Self {
        Self { reduced, ..self }
    }

    /// Makes room for this bias, added to sums of products with an input of this scale, so that the scale of the sums is no number too small for a float.
    pub fn for_sums(self, bias: Option<Vec<f32>>, input_scale: f32) -> Self {
        let least = |bias: f32| ((f64::from(bias.abs()) / (f64::from(input_scale) * 2e9)) as f32).max(f32::MIN_POSITIVE / input_scale);
        Self { least: bias.map(|bias| bias.into_iter().map(least).collect()), ..self }
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
        debug_assert!(encoded, "scales are stored in 32 bits or fewer");
    }
}

impl WeightSource for Integers {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        with_float!(self.upstream.dtype, F => self.visit_as::<F>(unit, sink), else self.upstream.visit(unit, sink))
    }

    /// Where no scale is for all rows.
    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let shared = self.affine.granularity == Granularity::Tensor || self.affine.has_global_scale() || self.least.is_some();
        let (upstream, block) = self.upstream.rows(rows, self.unit(unit)).filter(|_| !shared)?;
        let integers = Integers::new(&self.name, &upstream, self.affine.clone(), self.observer, &self.meter);
        Some(Rows { source: Arc::new(Integers { reduced: self.reduced, ..integers }), block })
    }

    fn unrounded(&self) -> Option<&Weight> {
        Some(&self.upstream)
    }
}
