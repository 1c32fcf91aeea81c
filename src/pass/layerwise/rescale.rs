//! Moving range between layers before they are rounded: from weights that matter to those that do not (AWQ, Lin et al. 2023,
//! <https://arxiv.org/abs/2306.00978>), or from activations to weights (SmoothQuant, Xiao et al. 2022,
//! <https://arxiv.org/abs/2211.10438>). Which layers can share range is read from the graph.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::{Layer, Layerwise, Moments, Site, Wanted, tensor};
use crate::analysis::Block;
use crate::data::Sides;
use crate::error::Result;
use crate::exec::{Blockwise, Rounding};
use crate::ir::Graph;
use crate::ir::ops::{Linear, Op, PreparedOp};
use crate::model::Model;
use crate::pass::calibrate::{computed, numbers};
use crate::pass::chains::{self, Chain};
use crate::store::{ActivationScheme, DType, Encoding, Pattern, Weight};

/// Where range goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strength {
    /// To the inputs of a layer whose values are large on average, by weights that are rounded.
    Awq,
    /// From the largest activations to weights, where both are rounded.
    Smooth,
}

/// Rounds weights `[rows, size]`: as they will be written, or by the range of their values, which is quicker; `squares` are the sums of squares of
/// what the layer reads.
type Round<'r> = Box<dyn Fn(&Layer, &Weight, &mut [f32], &[f64], Rounds) + 'r>;

/// How closely rounding is imitated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounds {
    /// By the range of values.
    Quick,
    /// As weights will be written.
    Written,
}

/// How range is moved.
pub(super) struct Rescale {
    pub strength: Strength,
    /// What happens to activations while the model runs.
    pub activations: ActivationScheme,
    /// Inputs under one scale, by weight; whole rows where nothing is said.
    pub groups: BTreeMap<String, usize>,
    /// Weights that stay as they are.
    pub ignored: Vec<Pattern>,
    pub round: Round<'static>,
}

/// A layer that takes the multiplication over.
struct Reader {
    layer: Layer,
    weight: Weight,
    values: Vec<f32>,
    /// What it gives for the rows that are tried, `[n, rows]`.
    answers: Tensor,
}

/// A part of the error that must be saved, so that what samples happen to say changes nothing.
const GAIN: f64 = 0.01;

/// The stored factors of a normalization in 16 bits, to which an offset is added when it computes.
struct OffsetNorm {
    values: Vec<f32>,
    offset: f32,
    dtype: DType,
}

impl OffsetNorm {
    /// Rounds factors to values that the format can represent: near -offset its steps are coarse.
    fn restrict(&self, factors: &mut [f32]) {
        for (factor, value) in factors.iter_mut().zip(&self.values) {
            let scale = value + self.offset;
            let stored = scale / *factor - self.offset;
            let stored = if self.dtype == DType::F16 { half::f16::from_f32(stored).to_f32() } else { half::bf16::from_f32(stored).to_f32() };
            let found = scale / (stored + self.offset);
            *factor = if found.is_finite() && (0.25..=4.0).contains(&(found / *factor)) { found } else { 1.0 };
        }
    }
}

/// The chains of a graph that can be rescaled.
pub(super) struct Chains {
    chains: Vec<(Chain, Site)>,
    /// Normalizations that are not among them, by the name of their first parameter.
    skipped: BTreeSet<String>,
}

/// The parameters of a chain.
fn names(chain: &Chain) -> impl Iterator<Item = &String> {
    chain.makers.iter().map(|(name, _)| name).chain(chain.sinks.iter().map(|sink| &sink.weight))
}

impl Chains {
    /// Values to observe.
    pub fn values(&self) -> impl Iterator<Item = &str> {
        self.chains.iter().map(|(_, source)| source.value.as_str())
    }

    /// A note on the normalizations whose outliers stay in the activations.
    pub fn note(&self, blocks: &[Block]) -> Option<String> {
        let is_split = |chain: &Chain| !blocks.iter().any(|block| names(chain).all(|name| block.parameters.contains(name)));
        let split = self.chains.iter().filter(|(chain, _)| is_split(chain)).filter_map(|(chain, _)| chain.makers.first());
        let left: BTreeSet<&String> = self.skipped.iter().chain(split.map(|(name, _)| name)).collect();
        left.first().map(|first| {
            format!(
                "warning: {} normalizations were not rescaled, because more than the linear layers and experts of their block read their outputs (the first: `{first}`)",
                left.len()
            )
        })
    }
}

impl Rescale {
    /// The chains that layers to be rounded are part of.
    pub fn chains(&self, graph: &Graph, layers: &BTreeSet<String>, model: &Model) -> Result<Chains> {
        let sides = Sides::of(graph);
        let mut chains = Vec::new();
        let mut skipped = chains::norms(graph, layers);
        let mut remove = |chain: &Chain| chain.makers.iter().for_each(|(name, _)| drop(skipped.take(name)));
        for chain in chains::chains(graph, layers) {
            let names = || names(&chain);
            if self.ignored.iter().any(|pattern| names().any(|name| pattern.matches(name))) {
                remove(&chain);
                continue;
            }
            let Some(source) = chains::source(graph, &chain) else { continue };
            // Experts that are stored as one tensor have no weights of their own.
            let Some(weights) = names().map(|name| model.weights.by_name.get(name)).collect::<Option<Vec<_>>>() else { continue };
            if !chain.ceilings.is_empty()
                || chain.costly
                || chain.sinks.iter().any(|sink| sink.depthwise)
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

    /// Rescales the chains of one block; gives how many.
    pub fn block(
        &self,
        chains: &Chains,
        block: usize,
        work: &Layerwise,
        model: &Model,
        blocks: &mut Blockwise,
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
            // Rounding to 16 bits loses nothing by powers of two, where activations are rounded to as many as weights.
            let exact = self.strength == Strength::Smooth && weights.iter().any(|weight| !matches!(weight.dtype, DType::F32 | DType::F64));
            let norm = match (chain.makers.first(), weights.first()) {
                (Some((name, _)), Some(weight)) if chain.offset != 0.0 && matches!(weight.dtype, DType::F16 | DType::BF16) => {
                    Some(OffsetNorm { values: weight.floats(name)?, offset: chain.offset, dtype: weight.dtype })
                }
                _ => None,
            };
            let size = chain.sinks.first().map_or(0, |sink| sink.index.len());
            let rows = ROWS.div_ceil(blocks.batches().max(1));
            let mut moments = Moments::new(size, Wanted { rows, ..Wanted::default() });
            work.observe(source, &mut moments, blocks, None)?;
            // An expert that no token has come to.
            if moments.rows.is_empty() {
                continue;
            }
            let rows = tensor(&moments.rows, &[moments.rows.len() / size.max(1), size], work.context)?;
            let mut readers = Vec::with_capacity(chain.sinks.len());
            for sink in chain.sinks.iter().filter(|sink| work.targets.contains(sink.weight.as_str())) {
                let weight = current(&sink.weight)?;
                let [a, b] = weight.shape[..] else { continue };
                let (outputs, inputs) = if sink.first { (b, a) } else { (a, b) };
                let layer = Layer { weight: sink.weight.clone(), rows: outputs, size: inputs, input_major: sink.first };
                let values = layer.rows_of(weight.floats(&sink.weight)?);
                let answers = product(&rows, &tensor(&values, &[outputs, inputs], work.context)?)?;
                readers.push((sink.index.clone(), Reader { layer, weight, values, answers }));
            }
            let representable = |factors: &mut [f32]| match &norm {
                Some(norm) => norm.restrict(factors),
                None if exact => factors.iter_mut().for_each(|factor| *factor = factor.log2().round().exp2()),
                None => {}
            };
            let Some(factors) = self.best(chain, &readers, &moments, &rows, &representable)? else { continue };
            let mut new = Vec::new();
            chain.rescale(&factors, |name, scaled| {
                new.push((name.to_owned(), scaled(current(name)?)));
                Ok(())
            })?;
            let floats = new.iter().map(|(name, weight)| weight.floats(name)).collect::<Result<Vec<_>>>()?;
            // In 16 bits, a weight can leave what they reach.
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

    /// The factors of the least error of what the layers give, where that is worth it.
    fn best(
        &self,
        chain: &Chain,
        readers: &[(Vec<usize>, Reader)],
        moments: &Moments,
        rows: &Tensor,
        representable: &dyn Fn(&mut [f32]),
    ) -> Result<Option<Vec<f32>>> {
        let one = vec![1.0; chain.width];
        let mut best = (self.error(&one, readers, moments, rows, Rounds::Quick)?, None);
        let ranges = self.ranges(chain, readers, moments);
        let (parts, ways): (usize, &[bool]) = if self.strength == Strength::Awq { (20, &[true, false]) } else { (10, &[true]) };
        for by_weights in ways {
            // The error is nearly one valley: a few places along it, then closer ones beside the best.
            let mut tried = BTreeMap::new();
            let mut stride = parts / 5;
            let mut next: Vec<usize> = (stride..parts).step_by(stride).collect();
            loop {
                for step in next.drain(..).filter(|step| (1..parts).contains(step)) {
                    let mut factors = self.factors(&ranges, step as f64 / parts as f64, *by_weights);
                    representable(&mut factors);
                    let finite = factors.iter().all(|factor| factor.is_finite());
                    let error = if finite { self.error(&factors, readers, moments, rows, Rounds::Quick)? } else { f64::INFINITY };
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
        let [before, after] = [&one, &factors].map(|factors| self.error(factors, readers, moments, rows, Rounds::Written));
        Ok((after? < before? * (1.0 - GAIN)).then_some(factors))
    }

    /// How large activations and weights are, by channel of the chain.
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

    /// Factors of a strength from 0 to 1, by channel: by how large activations are, and weights too if that is asked for.
    fn factors(&self, ranges: &[(f64, f64)], part: f64, by_weights: bool) -> Vec<f32> {
        let one = |(a, w): &(f64, f64)| match (self.strength, by_weights) {
            (Strength::Awq, true) => (a.powf(part) / (w.powf(1.0 - part) + 1e-4)).max(1e-4),
            (Strength::Awq, false) => a.powf(part).max(1e-4),
            (Strength::Smooth, _) => (a.max(1e-5).powf(part) / w.max(1e-5).powf(1.0 - part)).max(1e-5),
        };
        let factors: Vec<f64> = ranges.iter().map(one).collect();
        let (low, high) = factors.iter().fold((f64::INFINITY, 0f64), |(low, high), factor| (low.min(*factor), high.max(*factor)));
        let middle = (low * high).sqrt();
        factors.into_iter().map(|factor| (factor / middle).clamp(1.0 / FARTHEST, FARTHEST) as f32).collect()
    }

    /// The squared error of what the layers give for the rows that are tried.
    fn error(&self, factors: &[f32], readers: &[(Vec<usize>, Reader)], moments: &Moments, rows: &Tensor, rounds: Rounds) -> Result<f64> {
        let mut total = 0.0;
        for (index, reader) in readers {
            let by: Vec<f32> = index.iter().map(|channel| factors[*channel]).collect();
            let mut values = reader.values.clone();
            values.chunks_exact_mut(by.len().max(1)).for_each(|row| row.iter_mut().zip(&by).for_each(|(value, by)| *value *= by));
            let squares: Vec<f64> = moments.squares.iter().zip(&by).map(|(square, by)| square / f64::from(by * by)).collect();
            (self.round)(&reader.layer, &reader.weight, &mut values, &squares, rounds);
            let read = || {
                let divided = rows.broadcast_div(&Tensor::from_slice(&by, (1, by.len()), rows.device())?)?;
                Rounding::Token.of(self.activations, &divided)
            };
            let read = read().map_err(computed)?;
            let weight = Tensor::from_slice(&values, (reader.layer.rows, reader.layer.size), rows.device()).map_err(computed)?;
            let difference = (product(&read, &weight)? - &reader.answers).map_err(computed)?;
            total += numbers(&difference)?.iter().map(|error| error * error).sum::<f64>();
        }
        Ok(total)
    }
}

/// The largest factor.
const FARTHEST: f64 = 256.0;
/// Rows on which factors are tried.
const ROWS: usize = 512;

impl Reader {
    /// How large the weights of each input are: the mean of their parts of the largest under the same scale, or the largest.
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

/// `x Wᵀ`, by the kernel where there is one, whose sums are the same on every machine.
fn product(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    PreparedOp::new(&Op::Linear(Linear::default()), x.device(), candle_core::DType::F32).forward(&[x.clone(), weight.clone()]).map_err(computed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For all requested factors, the norm stores a number of its format that stands for exactly the restricted factor.
    #[test]
    fn factors_of_norms_with_an_offset_are_representable() {
        let values: Vec<f32> = (0..64).map(|at| half::bf16::from_f32(at as f32 / 16.0 - 0.97).to_f32()).collect();
        let norm = OffsetNorm { values: values.clone(), offset: 1.0, dtype: DType::BF16 };
        let wanted: Vec<f32> = (0..64).map(|at| 1.37f32.powi(at % 21 - 6)).collect();
        let mut factors = wanted.clone();
        norm.restrict(&mut factors);
        let mut changed = 0;
        for ((value, factor), wanted) in values.iter().zip(&factors).zip(&wanted) {
            let stored = half::bf16::from_f32((value + 1.0) / factor - 1.0).to_f32();
            let scale = (value + 1.0) / factor;
            assert!((stored + 1.0 - scale).abs() <= 1e-5 * scale.abs(), "{value} {factor}");
            assert!(*factor == 1.0 || (0.25..=4.0).contains(&(factor / wanted)));
            changed += usize::from(*factor != 1.0);
        }
        assert!(changed > 40, "{changed}");
    }
}
