//! Rescaling of channels before quantization: protects the weights of salient inputs (AWQ, Lin et al.
//! 2023, <https://arxiv.org/abs/2306.00978>), or migrates scales from activations to weights
//! (SmoothQuant, Xiao et al. 2022, <https://arxiv.org/abs/2211.10438>). The layers that can be rescaled
//! jointly follow from the graph.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_core::Tensor;

use super::held_out::Errors;
use super::ranks::Ranks;
use super::{Layer, Layerwise, Moments, MomentsRequest, Site, tensor};
use crate::analysis::Block;
use crate::data::SequenceRoles;
use crate::error::{Error, Result, counted};
use crate::exec::{Blockwise, Rounding};
use crate::ir::Graph;
use crate::ir::ops::{Linear, Op, PreparedOp, ScalarOps, round_half_even};
use crate::model::Model;
use crate::pass::calibrate::{numbers, tensor_error};
use crate::pass::channel_equalization::{self, Chain};
use crate::pass::input_scales;
use crate::store::{ActivationScheme, DType, Encoding, Pattern, Weight};

/// Algorithm that chooses the factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strength {
    /// Scales up the weights of inputs with a large mean magnitude, if weights are quantized.
    Awq,
    /// Migrates scales from the largest activations to weights, if both are quantized.
    Smooth,
}

/// Quantizes and dequantizes weights `[rows, size]`. The second last argument holds the sums of squares
/// of the inputs.
type Round<'r> = Box<dyn Fn(&Layer, &mut [f32], &[f64], RoundingMode) + 'r>;

/// Accuracy of simulated quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoundingMode {
    /// With minmax scales, which is faster.
    MinMax,
    /// With the scales that are written.
    Exact,
}

/// Rescaling of channels.
pub(super) struct Rescale {
    pub strength: Strength,
    /// Quantization of activations. Static scales follow from the rescaled inputs.
    pub activations: ActivationScheme,
    /// Group size by weight. Weights that are not listed have one scale per row.
    pub groups: BTreeMap<String, usize>,
    /// Weights to leave unchanged.
    pub ignored: Vec<Pattern>,
    pub round: Round<'static>,
}

/// A layer that absorbs the multiplication.
struct Reader {
    layer: Layer,
    values: Vec<f32>,
    /// Outputs of the unquantized layer for the test rows, `[n, rows]`.
    outputs: Tensor,
}

/// Minimum relative reduction of the error, so that noise in the samples does not change weights.
const MIN_GAIN: f64 = 0.01;

/// Stored 16-bit weights of a normalization that adds an offset to them.
struct OffsetNorm {
    values: Vec<f32>,
    offset: f32,
    dtype: DType,
}

impl OffsetNorm {
    /// Rounds factors so that the rescaled weights are representable. Near `-offset`, the weights are
    /// coarse.
    fn restrict(&self, factors: &mut [f32]) {
        for (factor, value) in factors.iter_mut().zip(&self.values) {
            let scale = value + self.offset;
            let stored = scale / *factor - self.offset;
            let stored = if self.dtype == DType::F16 { half::f16::from_f32(stored).to_f32() } else { half::bf16::from_f32(stored).to_f32() };
            let actual = scale / (stored + self.offset);
            *factor = if actual.is_finite() && (0.25..=4.0).contains(&(actual / *factor)) { actual } else { 1.0 };
        }
    }
}

/// Chains of a graph that can be rescaled.
pub(super) struct Chains {
    chains: Vec<(Chain, Site)>,
    /// Normalizations that cannot be rescaled, by the name of their weight.
    skipped: BTreeSet<String>,
}

/// Names of the parameters of a chain.
fn names(chain: &Chain) -> impl Iterator<Item = &String> {
    chain.producers.iter().map(|(name, _)| name).chain(chain.consumers.iter().map(|layer| &layer.weight))
}

impl Chains {
    /// Names of the values to observe.
    pub fn values(&self) -> impl Iterator<Item = &str> {
        self.chains.iter().map(|(_, source)| source.value.as_str())
    }

    /// Normalizations that are not rescaled, by the name of their weight: unsupported ones, and those of
    /// chains that span several blocks.
    pub fn skipped(&self, blocks: &[Block]) -> BTreeSet<String> {
        let is_split = |chain: &Chain| !blocks.iter().any(|block| names(chain).all(|name| block.parameters.contains(name)));
        let split = self.chains.iter().filter(|(chain, _)| is_split(chain)).filter_map(|(chain, _)| chain.producers.first());
        self.skipped.iter().chain(split.map(|(name, _)| name)).cloned().collect()
    }
}

/// A note on normalizations that were not rescaled.
pub(super) fn note(skipped: &BTreeSet<String>) -> Option<String> {
    skipped.first().map(|first| {
        format!(
            "warning: {} not rescaled, because other operators than the linear layers and experts of the block read the output (the first: `{first}`; all: `not_rescaled` in report.json)",
            counted(skipped.len(), "normalization")
        )
    })
}

impl Rescale {
    /// Finds the chains of the layers to be quantized.
    pub fn chains(&self, graph: &Graph, layers: &BTreeSet<String>, model: &Model) -> Result<Chains> {
        let sides = SequenceRoles::new(graph);
        let mut chains = Vec::new();
        let mut skipped = channel_equalization::norms(graph, layers);
        let mut remove = |chain: &Chain| chain.producers.iter().for_each(|(name, _)| drop(skipped.take(name)));
        for chain in channel_equalization::find_chains(graph, layers).into_iter().chain(channel_equalization::slice_chains(graph, layers)) {
            let names = || names(&chain);
            if self.ignored.iter().any(|pattern| names().any(|name| pattern.matches(name))) {
                remove(&chain);
                continue;
            }
            let Some(source) = channel_equalization::source(graph, &chain) else { continue };
            // Experts that are stored as one tensor have no separate weights.
            let Some(weights) = names().map(|name| model.weights.by_name.get(name)).collect::<Option<Vec<_>>>() else { continue };
            if !chain.clamps.is_empty()
                || chain.costly
                || chain.consumers.iter().any(|layer| layer.depthwise)
                || weights.iter().any(|weight| weight.encoding != Encoding::Dense)
            {
                continue;
            }
            remove(&chain);
            let value = graph.value(source).name.clone();
            let tokens = sides.token_axis(&value);
            chains.push((chain, Site { value, tokens, layers: Vec::new() }));
        }
        Ok(Chains { chains, skipped })
    }

    /// Rescales the chains of one block. Returns their number.
    pub fn block(
        &self,
        chains: &Chains,
        block: usize,
        work: &Layerwise,
        model: &Model,
        (blocks, ranks): (&mut Blockwise, &Ranks),
        changed: &mut BTreeMap<String, Weight>,
    ) -> Result<usize> {
        let mut count = 0;
        for (chain, source) in &chains.chains {
            let within = |name: &str| blocks.blocks()[block].parameters.contains(name);
            let names = || names(chain);
            if !names().all(|name| within(name)) {
                continue;
            }
            let current = |name: &str| changed.get(name).map_or_else(|| model.weights.get(name), Ok).cloned();
            let weights = names().map(|name| current(name)).collect::<Result<Vec<Weight>>>()?;
            // Powers of two are exact for 16-bit weights. With int8 activations, a rounding error of
            // 16-bit weights would be significant.
            let exact = self.strength == Strength::Smooth && weights.iter().any(|weight| !matches!(weight.dtype, DType::F32 | DType::F64));
            let norm = match (chain.producers.first(), weights.first()) {
                (Some((name, _)), Some(weight)) if chain.offset != 0.0 && matches!(weight.dtype, DType::F16 | DType::BF16) => {
                    Some(OffsetNorm { values: weight.floats(name)?, offset: chain.offset, dtype: weight.dtype })
                }
                _ => None,
            };
            let size = chain.consumers.first().map_or(0, |layer| layer.index.len());
            let rows = ROWS.div_ceil(ranks.share.batches.max(1));
            let mut moments = Moments::new(size, MomentsRequest { rows, ..MomentsRequest::default() });
            work.observe(source, &mut moments, (&mut *blocks, ranks), None, None)?;
            // No token is routed to this expert.
            if moments.rows.is_empty() {
                continue;
            }
            let rows = tensor(&moments.rows, &[moments.rows.len() / size.max(1), size], work.context)?;
            let mut readers = Vec::with_capacity(chain.consumers.len());
            for consumer in chain.consumers.iter().filter(|consumer| work.targets.contains(consumer.weight.as_str())) {
                let weight = current(&consumer.weight)?;
                let [a, b] = weight.shape[..] else { continue };
                let (outputs, inputs) = if consumer.first { (b, a) } else { (a, b) };
                let layer = Layer { weight: consumer.weight.clone(), rows: outputs, size: inputs, input_major: consumer.first };
                let values = layer.output_major(weight.floats(&consumer.weight)?);
                let outputs = product(&rows, &tensor(&values, &[outputs, inputs], work.context)?)?;
                readers.push((consumer.index.clone(), Reader { layer, values, outputs }));
            }
            let representable = |factors: &mut [f32]| match &norm {
                Some(norm) => norm.restrict(factors),
                None if exact => factors.iter_mut().for_each(|factor| *factor = factor.log2().round().exp2()),
                None => {}
            };
            let Some(factors) = ranks.first(|| self.best(chain, &readers, &moments, &rows, &representable))? else { continue };
            let mut new = Vec::new();
            chain.rescale(&factors, |name, scaled| {
                new.push((name.to_owned(), scaled(current(name)?)));
                Ok(())
            })?;
            let floats = new.iter().map(|(name, weight)| weight.floats(name)).collect::<Result<Vec<_>>>()?;
            // A rescaled weight can overflow in 16 bits.
            if floats.iter().flatten().all(|value| value.is_finite()) {
                for ((name, weight), values) in new.into_iter().zip(floats) {
                    blocks.replace(&name, tensor(&values, &weight.shape, work.context)?);
                    changed.insert(name, weight);
                }
                count += 1;
            }
        }
        Ok(count)
    }

    /// The factors with the smallest error of the outputs; `None` if the gain is too small.
    fn best(
        &self,
        chain: &Chain,
        readers: &[(Vec<usize>, Reader)],
        moments: &Moments,
        rows: &Tensor,
        representable: &dyn Fn(&mut [f32]),
    ) -> Result<Option<Vec<f32>>> {
        let one = vec![1.0; chain.width];
        // The factors are chosen on one half of the rows, and compared with none on the other half.
        let count = rows.dims()[0];
        let (chosen, held_out) = (0..count / 2, count / 2..count);
        let error = |factors: &[f32]| Ok::<f64, Error>(self.errors(factors, readers, moments, (rows, &chosen), RoundingMode::MinMax)?.total());
        let mut best = (error(&one)?, None);
        let ranges = self.ranges(chain, readers, moments);
        let (parts, variants): (usize, &[bool]) = if self.strength == Strength::Awq { (20, &[true, false]) } else { (10, &[true]) };
        for by_weights in variants {
            // The error is nearly unimodal: search a coarse grid, then refine around the best point.
            let mut tried = BTreeMap::new();
            let mut stride = parts / 5;
            let mut next: Vec<usize> = (stride..parts).step_by(stride).collect();
            loop {
                for step in next.drain(..).filter(|step| (1..parts).contains(step)) {
                    let mut factors = self.factors(&ranges, step as f64 / parts as f64, *by_weights);
                    representable(&mut factors);
                    let finite = factors.iter().all(|factor| factor.is_finite());
                    let error = if finite { error(&factors)? } else { f64::INFINITY };
                    tried.insert(step, error);
                    if error < best.0 {
                        best = (error, Some(factors));
                    }
                }
                let Some((least, _)) = tried.iter().min_by(|a, b| a.1.total_cmp(b.1)).filter(|_| stride > 1) else { break };
                stride = stride.div_ceil(2);
                next = vec![least.saturating_sub(stride), least + stride];
            }
        }
        let Some(factors) = best.1 else { return Ok(None) };
        let [before, after] = [&one, &factors].map(|factors| self.errors(factors, readers, moments, (rows, &held_out), RoundingMode::Exact));
        let (before, after) = (before?, after?);
        Ok((after.are_below(&before) && after.total() < before.total() * (1.0 - MIN_GAIN)).then_some(factors))
    }

    /// Magnitudes of activations and weights by channel of the chain.
    fn ranges(&self, chain: &Chain, readers: &[(Vec<usize>, Reader)], moments: &Moments) -> Vec<(f64, f64)> {
        let mean = moments.mean_magnitudes();
        let (mut activations, mut weights, mut counts) = (vec![0f64; chain.width], vec![0f64; chain.width], vec![0f64; chain.width]);
        for (index, reader) in readers {
            let columns = reader.columns(self.strength, self.groups.get(&reader.layer.weight).copied().unwrap_or(reader.layer.size));
            for (input, channel) in index.iter().enumerate() {
                match self.strength {
                    Strength::Awq => {
                        activations[*channel] += mean[input];
                        weights[*channel] += columns[input];
                        counts[*channel] += 1.0;
                    }
                    Strength::Smooth => {
                        activations[*channel] = activations[*channel].max(moments.largest[input].into());
                        weights[*channel] = weights[*channel].max(columns[input]);
                        counts[*channel] = 1.0;
                    }
                }
            }
        }
        activations.iter().zip(&weights).zip(&counts).map(|((a, w), count)| (a / count.max(1.0), w / count.max(1.0))).collect()
    }

    /// Factors by channel for a strength from 0 to 1, from the magnitudes of activations and, optionally,
    /// of weights.
    fn factors(&self, ranges: &[(f64, f64)], part: f64, by_weights: bool) -> Vec<f32> {
        let one = |(a, w): &(f64, f64)| match (self.strength, by_weights) {
            (Strength::Awq, true) => (a.powf(part) / (w.powf(1.0 - part) + 1e-4)).max(1e-4),
            (Strength::Awq, false) => a.powf(part).max(1e-4),
            (Strength::Smooth, _) => (a.max(1e-5).powf(part) / w.max(1e-5).powf(1.0 - part)).max(1e-5),
        };
        let factors: Vec<f64> = ranges.iter().map(one).collect();
        let (low, high) = factors.iter().fold((f64::INFINITY, 0f64), |(low, high), factor| (low.min(*factor), high.max(*factor)));
        let middle = (low * high).sqrt();
        factors.into_iter().map(|factor| (factor / middle).clamp(1.0 / MAX_FACTOR, MAX_FACTOR) as f32).collect()
    }

    /// Squared errors of the outputs of the layers for a range of the test rows.
    fn errors(
        &self,
        factors: &[f32],
        readers: &[(Vec<usize>, Reader)],
        moments: &Moments,
        (rows, range): (&Tensor, &Range<usize>),
        mode: RoundingMode,
    ) -> Result<Errors> {
        let part = |tensor: &Tensor| tensor.narrow(0, range.start, range.len()).map_err(tensor_error);
        let (rows, mut errors) = (part(rows)?, vec![0f64; range.len()]);
        for (index, reader) in readers {
            let by: Vec<f32> = index.iter().map(|channel| factors[*channel]).collect();
            let mut values = reader.values.clone();
            values.chunks_exact_mut(by.len().max(1)).for_each(|row| row.iter_mut().zip(&by).for_each(|(value, by)| *value *= by));
            let squares: Vec<f64> = moments.squares.iter().zip(&by).map(|(square, by)| square / f64::from(by * by)).collect();
            (self.round)(&reader.layer, &mut values, &squares, mode);
            let largest = moments.largest.iter().zip(&by).fold(0f32, |largest, (value, by)| largest.max(value / by));
            let activations = input_scales::for_largest(self.activations, DType::F32, largest);
            let divide = || rows.broadcast_div(&Tensor::from_slice(&by, (1, by.len()), rows.device())?);
            let read = divide().and_then(|divided| rounded(activations, &divided)).map_err(tensor_error)?;
            let weight = Tensor::from_slice(&values, (reader.layer.rows, reader.layer.size), rows.device()).map_err(tensor_error)?;
            let difference = numbers(&(product(&read, &weight)? - part(&reader.outputs)?).map_err(tensor_error)?)?;
            for (error, row) in errors.iter_mut().zip(difference.chunks_exact(reader.layer.rows.max(1))) {
                *error += row.iter().map(|difference| difference * difference).sum::<f64>();
            }
        }
        Ok(Errors::from(errors))
    }
}

/// The inputs of a layer after quantization at run time.
fn rounded(activations: ActivationScheme, inputs: &Tensor) -> candle_core::Result<Tensor> {
    let ActivationScheme::Static(step) = activations else { return Rounding::Token.round_input(activations, inputs) };
    let scale = f64::from(step.scale());
    round_half_even(&inputs.div_scalar(scale)?)?.clamp_scalar(-128.0, 127.0)? * scale
}

/// The largest factor.
const MAX_FACTOR: f64 = 256.0;
/// Number of test rows.
const ROWS: usize = 512;

impl Reader {
    /// Magnitude of the weights of each input: the mean ratio to the largest weight with the same scale
    /// (AWQ), or the maximum (SmoothQuant).
    fn columns(&self, strength: Strength, group: usize) -> Vec<f64> {
        let size = self.layer.size.max(1);
        let mut columns = vec![0f64; size];
        for row in self.values.chunks_exact(size) {
            for (columns, row) in columns.chunks_mut(group.max(1)).zip(row.chunks(group.max(1))) {
                let largest = f64::from(row.iter().fold(0f32, |largest, w| largest.max(w.abs()))).max(f64::MIN_POSITIVE);
                for (column, w) in columns.iter_mut().zip(row) {
                    let w = f64::from(w.abs());
                    match strength {
                        Strength::Awq => *column += w / largest / self.layer.rows.max(1) as f64,
                        Strength::Smooth => *column = column.max(w),
                    }
                }
            }
        }
        columns
    }
}

/// Computes `x Wᵀ`, on the CPU with a kernel whose results do not depend on the machine.
fn product(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    PreparedOp::new(&Op::Linear(Linear::default()), x.device(), candle_core::DType::F32).forward(&[x.clone(), weight.clone()]).map_err(tensor_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The restricted factors are exactly representable in the weights of the normalization.
    #[test]
    fn factors_of_norms_with_an_offset_are_representable() {
        let values: Vec<f32> = (0..64).map(|at| half::bf16::from_f32(at as f32 / 16.0 - 0.97).to_f32()).collect();
        let norm = OffsetNorm { values: values.clone(), offset: 1.0, dtype: DType::BF16 };
        let requested: Vec<f32> = (0..64).map(|at| 1.37f32.powi(at % 21 - 6)).collect();
        let mut factors = requested.clone();
        norm.restrict(&mut factors);
        let mut changed = 0;
        for ((value, factor), requested) in values.iter().zip(&factors).zip(&requested) {
            let stored = half::bf16::from_f32((value + 1.0) / factor - 1.0).to_f32();
            let scale = (value + 1.0) / factor;
            assert!((stored + 1.0 - scale).abs() <= 1e-5 * scale.abs(), "{value} {factor}");
            assert!(*factor == 1.0 || (0.25..=4.0).contains(&(factor / requested)));
            changed += usize::from(*factor != 1.0);
        }
        assert!(changed > 40, "{changed}");
    }

    /// Ignored weights are not changed, so that the other weights of their chains cannot be either.
    #[test]
    fn chains_with_an_ignored_weight_are_not_rescaled() {
        let model = Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        let graph = model.graph().unwrap();
        let layers: BTreeSet<String> = model.weights.by_name.keys().filter(|name| name.ends_with("proj.weight")).cloned().collect();
        let found = |ignored: Vec<Pattern>| -> Vec<BTreeSet<String>> {
            let (strength, activations, round) = (Strength::Awq, ActivationScheme::None, Box::new(|_: &Layer, _: &mut [f32], _: &[f64], _: RoundingMode| {}));
            let rescale = Rescale { strength, activations, groups: BTreeMap::new(), ignored, round };
            rescale.chains(&graph, &layers, &model).unwrap().chains.iter().map(|(chain, _)| names(chain).cloned().collect()).collect()
        };
        for name in ["model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"] {
            let (mut expected, count) = (found(Vec::new()), found(Vec::new()).len());
            expected.retain(|names| !names.contains(name));
            assert_eq!(expected.len(), count - 1);
            assert_eq!(found(vec![name.parse().unwrap()]), expected, "{name}");
        }
    }
}
