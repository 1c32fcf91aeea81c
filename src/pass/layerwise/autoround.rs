//! Trained rounding (Cheng et al. 2024, SignRound, <https://arxiv.org/abs/2309.05516>): rounding offsets and
//! ranges of all layers of a block descend along the signs of the gradients of the block's output error.
//! Inputs are those of the compressed model, targets the outputs of the original one. The best state on
//! held-out tokens is kept, or the start if none is better.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::held_out::{Errors, Split};
use super::layer_format::LayerFormat;
use super::row_scales::RowScales;
use super::{Layer, ModifiedBlock};
use crate::calibration::sample_sizes;
use crate::data::{Padding, TokenAxis};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{MemoryTracker, Parameters, Tape, floats_on_host, read};
use crate::ir::ValueId;
use crate::kernel::column_solver::Grid;
use crate::kernel::grid::QuantizationParams;
use crate::kernel::trained_rounding::{self, TrainedRange};
use crate::pass::calibrate::tensor_error;
use crate::store::Weight;
use crate::work::{Event, ProgressUnit};

/// Distance of initial offsets from the ends of the rounding interval of their codes.
const MARGIN: f32 = 0.25;
/// Learning rate of the ranges, relative to that of the offsets.
const RANGE_RATE: f32 = 0.05;
/// Learning rate of the offsets of weights with [fixed scales](LayerFormat::has_fixed_scales), relative to
/// that of others.
const FIXED_RANGE_RATE: f32 = 2.0;
/// Number of times that the error on held-out tokens is measured, and of measurements without an improvement
/// after which training ends.
const MEASUREMENTS: usize = 8;
const PATIENCE: usize = 3;

/// Options of trained rounding.
#[derive(Debug, Clone, Copy)]
pub(super) struct Training {
    /// Number of steps per block.
    pub iterations: usize,
    /// Samples per step.
    pub batch: usize,
    /// Learning rate of the offsets, in units of the inverse number of steps.
    pub rate: f32,
}

/// A layer with the state of its rounding.
pub(super) struct TrainedLayer {
    layer: Layer,
    weight: Weight,
    format: LayerFormat,
    values: Vec<f32>,
    /// Scales before training.
    scales: RowScales,
    state: State,
}

/// Trained numbers of a layer.
#[derive(Clone)]
struct State {
    offsets: Vec<f32>,
    ranges: Vec<TrainedRange>,
}

impl TrainedLayer {
    /// A layer with the weight `values` `[rows, size]`, which was rounded to `rounded` with these scales.
    pub fn new(layer: &Layer, weight: &Weight, format: &LayerFormat, values: Vec<f32>, rounded: &[f32], scales: &RowScales) -> TrainedLayer {
        let LayerFormat { levels, group, .. } = *format;
        let (size, params) = (layer.size.max(1), format.steps(scales));
        let groups = size.div_ceil(group.max(1)).max(1);
        let rows = values.par_chunks(size).zip(rounded.par_chunks(size)).zip(params.par_chunks(groups));
        let offsets = rows.flat_map_iter(|((values, rounded), params)| {
            let offset = |(at, (value, rounded)): (usize, (&f32, &f32))| trained_rounding::offset(levels, [*value, *rounded], params[at / group], MARGIN);
            values.iter().zip(rounded).enumerate().map(offset).collect::<Vec<f32>>()
        });
        let state = State { offsets: offsets.collect(), ranges: params.iter().map(|params| TrainedRange::new(*params)).collect() };
        let (layer, weight, format, scales) = (layer.clone(), weight.clone(), format.clone(), scales.clone());
        TrainedLayer { layer, weight, format, values, scales, state }
    }

    /// Number of groups of a row.
    fn groups(&self) -> usize {
        self.layer.size.div_ceil(self.format.group.max(1)).max(1)
    }

    /// Quantization parameters of all groups.
    fn params(&self) -> Vec<QuantizationParams> {
        let store = self.format.store();
        let stored = |scale: f64| store.map_or(scale as f32, |store| store(scale));
        self.state.ranges.iter().map(|range| range.params(self.format.levels, stored)).collect()
    }

    /// The stored values of the weight, and its scales.
    fn rounded(&self) -> Result<(Vec<f32>, RowScales)> {
        let LayerFormat { levels, group, .. } = self.format;
        let (size, mut out, params) = (self.layer.size.max(1), vec![0f32; self.values.len()], self.params());
        let rows = out.par_chunks_mut(size).zip(self.values.par_chunks(size)).zip(self.state.offsets.par_chunks(size));
        rows.zip(params.par_chunks(self.groups())).for_each(|(((out, values), offsets), params)| {
            let groups = out.chunks_mut(group).zip(values.chunks(group)).zip(offsets.chunks(group));
            for (((out, values), offsets), params) in groups.zip(params) {
                trained_rounding::round(levels, values, offsets, *params, out);
            }
        });
        let order: Vec<usize> = (0..self.layer.size).collect();
        let grid = Grid { levels, group, steps: params, order: &order, store: self.format.store() };
        let scales = self.format.finish(&mut out, grid, self.scales.clone())?;
        Ok((out, scales))
    }

    /// Moves all numbers against the signs of their gradients. `gradients` are those of the rounded weight.
    fn step(&mut self, gradients: &[f32], rate: f32) {
        let LayerFormat { levels, group, .. } = self.format;
        let (size, groups, params) = (self.layer.size.max(1), self.groups(), self.params());
        let (rate, range_rate) = if self.format.has_fixed_scales() { (FIXED_RANGE_RATE * rate, 0.0) } else { (rate, RANGE_RATE * rate) };
        let State { offsets, ranges } = &mut self.state;
        let rows = offsets.par_chunks_mut(size).zip(self.values.par_chunks(size)).zip(gradients.par_chunks(size));
        rows.zip(ranges.par_chunks_mut(groups)).zip(params.par_chunks(groups)).for_each(|((((offsets, values), gradients), ranges), params)| {
            let parts = offsets.chunks_mut(group).zip(values.chunks(group)).zip(gradients.chunks(group));
            for ((((offsets, values), gradients), range), params) in parts.zip(ranges).zip(params) {
                let of_range = trained_rounding::step(levels, values, offsets, gradients, *params, rate);
                range.step(levels, of_range, range_rate);
            }
        });
    }

    /// The quantized weight.
    fn quantized(&self) -> Result<Weight> {
        let (values, scales) = self.rounded()?;
        self.format.weight(&self.weight, &values, scales)
    }
}

/// Result of training a block.
pub(super) struct Trained {
    /// The new weights; empty if the start is the best.
    pub weights: Vec<(String, Weight)>,
    /// Squared error on held-out tokens, relative to the start. `None` if the start has none.
    pub relative_error: Option<f64>,
}

/// Training of one block.
struct BlockTraining<'t, 'r, 'b, 'a> {
    block: &'t mut ModifiedBlock<'b, 'a>,
    tape: &'r Tape<'a>,
    output: ValueId,
    value: String,
    tracker: &'r MemoryTracker,
    /// Parts of the rows of the block's output, by batch.
    parts: Vec<Vec<Part>>,
}

/// Use of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    Padding,
    HeldOut,
    Trained,
}

impl Training {
    /// Trains the layers of a block.
    pub fn run(&self, layers: &mut [TrainedLayer], block: &mut ModifiedBlock) -> Result<Trained> {
        let names: Vec<String> = layers.iter().map(|layer| layer.layer.weight.clone()).collect();
        let (tape, output) = block.runs.blocks.tape(&|name| names.iter().any(|other| other == name))?;
        let value = block.runs.blocks.blocks()[block.index].value.clone();
        let (tokens, seed, work) = (block.runs.roles.token_axis(&value), block.context.seed ^ (block.index as u64) << 32, block.context.work);
        let tracker = block.context.memory_tracker.clone().unwrap_or_default();
        let parts = parts(block, &value, tokens)?;
        let batches = |part| parts.iter().enumerate().filter(|(_, rows)| rows.contains(&part)).map(|(batch, _)| batch).collect::<Vec<usize>>();
        let [held_out, known] = [Part::HeldOut, Part::Trained].map(batches);
        let mut training = BlockTraining { block, tape: &tape, output, value, tracker: &tracker, parts };
        let mut parameters = training.block.runs.blocks.parameters();
        let start = training.errors(&parameters, &held_out)?;
        let mut best: Option<(Errors, Vec<State>)> = None;
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut queue, mut without) = (Vec::new(), 0);
        let stage = format!("Rounding block {}", training.block.index + 1);
        work.progress.on(Event::Begin { stage: &stage, total: self.iterations as u64, done: 0, unit: ProgressUnit::Steps });
        for step in 0..self.iterations {
            work.cancel.check()?;
            let mut gradients: BTreeMap<String, Tensor> = BTreeMap::new();
            for _ in 0..self.batch {
                if queue.is_empty() {
                    queue = known.clone();
                    random.shuffle(&mut queue);
                }
                let Some(batch) = queue.pop() else { break };
                training.add_gradients(&parameters, batch, &mut gradients)?;
            }
            let rate = self.rate / self.iterations as f32 * (1.0 - step as f32 / self.iterations as f32);
            for layer in layers.iter_mut() {
                let Some(gradient) = gradients.get(&layer.layer.weight) else { continue };
                let gradient = floats_on_host(gradient, Cause::Statistics).map_err(tensor_error)?;
                let step = |gradient: &[f32]| {
                    layer.step(gradient, rate);
                    Ok(())
                };
                read(&gradient, step).map_err(tensor_error)?;
                let rounded = Tensor::from_vec(layer.rounded()?.0, (layer.layer.rows, layer.layer.size), &training.block.context.device);
                parameters = parameters.with(&layer.layer.weight, rounded.map_err(tensor_error)?);
            }
            drop(gradients);
            work.advance(1)?;
            let interval = self.iterations.div_ceil(MEASUREMENTS).max(1);
            if (step + 1).is_multiple_of(interval) || step + 1 == self.iterations {
                let errors = training.errors(&parameters, &held_out)?;
                without += 1;
                if errors.total() < best.as_ref().map_or(f64::INFINITY, |(best, _)| best.total()) {
                    best = Some((errors, layers.iter().map(|layer| layer.state.clone()).collect()));
                    without = 0;
                }
                if without >= PATIENCE {
                    break;
                }
            }
        }
        work.progress.on(Event::End);
        let Some((errors, states)) = best.filter(|(errors, _)| errors.are_below(&start)) else {
            return Ok(Trained { weights: Vec::new(), relative_error: (start.total() > 0.0).then_some(1.0) });
        };
        layers.iter_mut().zip(states).for_each(|(layer, state)| layer.state = state);
        let weights = layers.iter().map(|layer| Ok((layer.layer.weight.clone(), layer.quantized()?))).collect::<Result<_>>()?;
        Ok(Trained { weights, relative_error: (start.total() > 0.0).then(|| errors.total() / start.total()) })
    }
}

/// Parts of the rows of a block's output, by batch. The held-out rows are chosen as for the other solutions
/// of layers.
fn parts(block: &mut ModifiedBlock, value: &str, tokens: TokenAxis) -> Result<Vec<Vec<Part>>> {
    let mut batches = Vec::new();
    for index in 0..block.runs.blocks.batches() {
        let reference = block.runs.reference.as_mut().ok_or_else(no_reference)?;
        let shape = reference.value(index, value)?.dims().to_vec();
        let batch = block.runs.blocks.batch(index);
        let padding = Padding::from_batch(batch).map_err(tensor_error)?;
        let rows = shape.iter().rev().skip(1).product();
        let is_token = padding.token_rows(tokens, &shape).map_or_else(|| vec![true; rows], |is_token| is_token.into_owned());
        batches.push((sample_sizes(rows, batch.samples, Some(&is_token)), is_token));
    }
    Ok(assign(&batches, block.context.seed))
}

/// Assigns the rows of batches to parts. Each batch has the token counts of its samples, and for each row
/// whether it is a token.
fn assign(batches: &[(Vec<usize>, Vec<bool>)], seed: u64) -> Vec<Vec<Part>> {
    let sizes = || batches.iter().flat_map(|(sizes, _)| sizes);
    let (samples, longest, total) = (sizes().count(), sizes().max().copied().unwrap_or(0), sizes().sum());
    let with = |split: Split| {
        let mut first = 0;
        let held_out = batches.iter().map(|(sizes, _)| {
            first += sizes.len();
            let ([held_out, _], _) = split.indices(first - sizes.len(), sizes);
            held_out
        });
        held_out.collect::<Vec<Vec<u32>>>()
    };
    let split = Split::for_training(samples, longest, seed);
    let mut held_out = with(split);
    if let Some(split) = split.with_more([held_out.iter().map(Vec::len).sum(), 0], total) {
        held_out = with(split);
    }
    let rows = |((_, is_token), held_out): (&(Vec<usize>, Vec<bool>), Vec<u32>)| {
        let (mut held_out, mut token) = (held_out.into_iter().peekable(), 0);
        let part = |is_token: &bool| {
            token += u32::from(*is_token);
            match is_token {
                true if held_out.next_if_eq(&(token - 1)).is_some() => Part::HeldOut,
                true => Part::Trained,
                false => Part::Padding,
            }
        };
        is_token.iter().map(part).collect()
    };
    batches.iter().zip(held_out).map(rows).collect()
}

fn no_reference() -> Error {
    Error::run("trained rounding", "has no original model", "")
}

impl BlockTraining<'_, '_, '_, '_> {
    /// Differences of the block's output from that of the original model, times a power of the factors of the
    /// guide. Rows of other parts are zero.
    fn differences(&mut self, output: &Tensor, batch: usize, part: Part, power: i32) -> Result<Tensor> {
        let runs = &mut *self.block.runs;
        let target = runs.reference.as_mut().ok_or_else(no_reference)?.value(batch, &self.value)?;
        let mut factors = runs.guide.as_ref().and_then(|guide| guide.sample(&self.value, batch)).into_iter().flatten();
        let mask = self.parts[batch].iter().map(|row| {
            // The guide has a factor for each token.
            let factor = if *row == Part::Padding { 0.0 } else { factors.next().map_or(1.0, |factor| factor.powi(power)) };
            if *row == part { factor } else { 0.0 }
        });
        let (mask, mut shape): (Vec<f32>, _) = (mask.collect(), output.dims().to_vec());
        shape.iter_mut().rev().take(1).for_each(|width| *width = 1);
        let mask = Tensor::from_vec(mask, shape, &Device::Cpu).and_then(|mask| transfer::to_device(&mask, output.device(), Cause::Batch));
        mask.and_then(|mask| (output - target)?.broadcast_mul(&mask)).map_err(tensor_error)
    }

    /// Adds the gradients of the error of a batch.
    fn add_gradients(&mut self, parameters: &Parameters, batch: usize, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        self.tracker.begin_step(None);
        let forward = self.block.runs.blocks.forward(self.tape, batch, parameters, self.tracker)?;
        let differences = self.differences(&forward.taps()[&self.output], batch, Part::Trained, 2)?;
        self.tape.backward(forward, [(self.output, differences)].into(), parameters, self.tracker, &mut |name, gradient| {
            let sum = match gradients.remove(name) {
                Some(sum) => (sum + gradient).map_err(tensor_error)?,
                None => gradient,
            };
            gradients.insert(name.to_owned(), sum);
            Ok(())
        })
    }

    /// Squared errors of the held-out rows of the block's output.
    fn errors(&mut self, parameters: &Parameters, batches: &[usize]) -> Result<Errors> {
        let mut errors = Errors::default();
        for batch in batches {
            let forward = self.block.runs.blocks.forward(self.tape, *batch, parameters, self.tracker)?;
            let differences = self.differences(&forward.taps()[&self.output], *batch, Part::HeldOut, 1)?;
            let width = differences.dims().last().copied().unwrap_or(1).max(1);
            let differences = floats_on_host(&differences, Cause::Statistics).map_err(tensor_error)?;
            let add = |values: &[f32]| {
                let rows = values.chunks_exact(width).zip(&self.parts[*batch]).filter(|(_, part)| **part == Part::HeldOut);
                rows.for_each(|(row, _)| errors.add(row, &vec![0.0; width], width));
                Ok(())
            };
            read(&differences, add).map_err(tensor_error)?;
        }
        Ok(errors)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::kernel::column_solver::Range;
    use crate::kernel::ggml::BlockType;
    use crate::pass::weight_quantizer::stored_scale;
    use crate::store::{ActivationScheme, Bytes, Codes, DType, Encoding, ExactBlocks, FloatFormat, Granularity, QuantizationSpec};

    /// A layer with weights in rows of `size`, and with the scales and values to which it was rounded.
    fn trained(format: &LayerFormat, values: Vec<f32>, size: usize, rounded: &[f32], scales: &RowScales) -> TrainedLayer {
        let bytes = Bytes { dtype: DType::F32, bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() };
        let weight = Weight::new(DType::F32, vec![values.len() / size, size], Encoding::Dense, Arc::new(bytes));
        TrainedLayer::new(&layer(values.len(), size), &weight, format, values, rounded, scales)
    }

    fn layer(count: usize, size: usize) -> Layer {
        Layer { weight: "w".into(), rows: count / size, size, input_major: false }
    }

    /// A layer of eight weights in rows of `size`, with codes that differ from the nearest ones, and the
    /// weight that they represent.
    fn in_scheme(codes: Codes, symmetric: bool, scale_dtype: DType, size: usize) -> (TrainedLayer, Vec<f32>) {
        const POSITIONS: [f32; 8] = [2.0, -4.0, 1.0, 3.0, 0.0, -1.0, 1.0, -3.0];
        let values = vec![0.3f32, -0.9, 0.2, 2.0, 0.1, -0.26, 0.5, -3.0];
        let group = size.min(2);
        let spec = QuantizationSpec { codes, granularity: Granularity::Group(group), symmetric, scale_dtype, activations: ActivationScheme::None };
        let global_scale = if spec.has_global_scale() { 37.0 } else { 1.0 };
        let format = LayerFormat::from_scheme(&layer(8, size), &spec, global_scale, Range::MinMax).unwrap();
        let (zero, store) = (if symmetric { 0.0 } else { 1.0 }, stored_scale(&spec, global_scale));
        let scales = [0.25, 0.25, 0.5, 0.5, 0.125, 0.125, 0.75, 0.75];
        let step = |scale: f64| QuantizationParams { scale: store(scale), zero };
        let levels = format.levels;
        let rounded: Vec<f32> = POSITIONS.iter().zip(scales).map(|(at, scale)| levels.level_at(*at, step(scale)) * step(scale).scale).collect();
        let scales = RowScales { steps: scales.iter().step_by(group).map(|scale| step(*scale)).collect(), blocks: Vec::new() };
        (trained(&format, values, size, &rounded, &scales), rounded)
    }

    /// A layer of two rows in blocks, as above.
    fn in_blocks(kind: BlockType) -> Option<(TrainedLayer, Vec<f32>)> {
        const SIZE: usize = 256;
        let mut random = fastrand::Rng::with_seed(kind.id().into());
        let values: Vec<f32> = (0..2 * SIZE).map(|_| random.f32() - 0.4).collect();
        let format = LayerFormat::from_blocks(&layer(values.len(), SIZE), ExactBlocks { kind, file_type: None }).ok()?;
        let (scales, order) = (format.fit(&values, &[1.0; SIZE]), (0..SIZE).collect::<Vec<usize>>());
        let mut rounded: Vec<f32> = values.iter().map(|value| 0.8 * value).collect();
        let grid = format.grid(&scales, &order);
        grid.round(&mut rounded);
        let scales = format.finish(&mut rounded, grid, scales).unwrap();
        Some((trained(&format, values, SIZE, &rounded, &scales), rounded))
    }

    /// The weights of the trained model are those of the file, bit for bit.
    #[test]
    fn training_starts_from_the_given_codes() {
        let [e2m1, e4m3] = [FloatFormat::E2m1, FloatFormat::E4m3].map(Codes::Float);
        let schemes = [
            (Codes::Integer(3), true, DType::F32, 4),
            (Codes::Integer(3), false, DType::F32, 4),
            (Codes::Integer(3), true, DType::F32, 1),
            (e2m1, true, DType::F8_E4M3, 4),
            (e2m1, true, DType::F8_E8M0, 4),
            (e4m3, true, DType::F32, 4),
        ];
        let schemes = schemes.map(|(codes, symmetric, scales, size)| (format!("{codes} {scales}"), in_scheme(codes, symmetric, scales, size)));
        let blocks = BlockType::ALL.into_iter().filter_map(|kind| Some((kind.name().to_owned(), in_blocks(kind)?)));
        let mut count = 0;
        for (name, (mut layer, rounded)) in schemes.into_iter().chain(blocks) {
            let gradients: Vec<f32> = [1.0f32, -1.0, 2.0, -0.5, 1.0, 0.0, -3.0, 1.0].into_iter().cycle().take(rounded.len()).collect();
            layer.step(&gradients, 0.0);
            assert_eq!(layer.rounded().unwrap().0, rounded, "{name}");
            assert_eq!(layer.quantized().unwrap().floats("w").unwrap(), rounded, "{name}");
            // Steps against the signs of gradients decrease their product with the weight.
            let product = |values: &[f32]| values.iter().zip(&gradients).map(|(value, gradient)| value * gradient).sum::<f32>();
            (0..8).for_each(|_| layer.step(&gradients, 0.125));
            let trained = layer.rounded().unwrap().0;
            let least = if name.starts_with(&e4m3.to_string()) { 0.0 } else { 0.5 };
            assert!(product(&trained) < product(&rounded) - least, "{name}: {trained:?} {rounded:?}");
            assert_eq!(layer.quantized().unwrap().floats("w").unwrap(), trained, "{name}");
            count += 1;
        }
        assert_eq!(count, 6 + BlockType::ALL.into_iter().filter(|kind| kind.levels().is_some()).count());
    }

    /// Batches may contain several samples with padding, and some samples may be short.
    #[test]
    fn tokens_of_any_batches_are_held_out_and_trained() {
        for lengths in [vec![vec![8]], vec![vec![700, 3], vec![500, 700]], vec![vec![2]; 9], vec![vec![1, 40], vec![40, 40]]] {
            let batch = |lengths: &Vec<usize>| {
                let longest = *lengths.iter().max().unwrap();
                (lengths.clone(), lengths.iter().flat_map(|length| (0..longest).map(move |at| at < *length)).collect())
            };
            let batches: Vec<(Vec<usize>, Vec<bool>)> = lengths.iter().map(batch).collect();
            for seed in 0..4 {
                let parts = assign(&batches, seed);
                for ((_, is_token), parts) in batches.iter().zip(&parts) {
                    assert_eq!(*is_token, parts.iter().map(|part| *part != Part::Padding).collect::<Vec<_>>());
                }
                let count = |part| parts.iter().flatten().filter(|found| **found == part).count();
                let (held_out, trained) = (count(Part::HeldOut), count(Part::Trained));
                assert!(held_out >= (held_out + trained) / 5 && trained >= held_out.min(2), "{lengths:?}, {seed}: {held_out} held out, {trained} trained");
            }
        }
    }
}
