//! One run over samples.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::channels::add_images;
use super::there::{self, Columns};
use super::{ActivationHistogram, Averages, Channels};
use crate::data::{Batch, DataSet, Padding, Sides, TokenAxis};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Blockwise, BlockwiseOptions, Executor, floats_on_host, read, state_bytes};
use crate::ir::Graph;
use crate::ir::ops::on_host;
use crate::kernel::bins::extremes;
use crate::store::Weights;
use crate::work::Work;

/// Where the channels of a value are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// The last axis.
    Last,
    /// The second: images.
    Second,
}

impl Axis {
    /// How many channels a value of a shape has.
    fn channels(self, shape: &[usize]) -> usize {
        let width = match self {
            Axis::Last => shape.last(),
            Axis::Second => shape.get(1),
        };
        width.copied().unwrap_or(1)
    }
}

/// What is to be seen of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Where its channels are.
    pub axis: Axis,
    /// Whether a histogram for each channel is wanted.
    pub histograms: bool,
}

/// Rows of a value that are kept as they are, to try arithmetic on.
const KEPT: usize = 64;

/// What was seen of a value.
#[derive(Debug, Clone)]
pub struct ValueStatistics {
    /// All elements.
    pub histogram: ActivationHistogram,
    /// The extremes of batches.
    pub averages: Averages,
    /// Channel by channel, of every second sample (of every second batch, where a value has tokens): what one half says can be held
    /// to the other.
    halves: [Channels; 2],
    /// A few rows, spread over the samples; for images, the channels of one place.
    pub rows: Vec<Vec<f32>>,
    batches: u64,
    samples: u64,
}

impl ValueStatistics {
    /// What would have been seen, had every channel been multiplied by a number of its own.
    pub fn multiply(&mut self, factors: &[f64]) {
        if factors.iter().all(|factor| *factor == 1.0) {
            return;
        }
        let before = self.histogram.range();
        self.halves.iter_mut().for_each(|half| half.multiply(factors));
        let channels = self.channels();
        if channels.has_histograms() {
            self.histogram = channels.histogram();
        }
        self.averages.scale(before, self.histogram.range());
        for row in &mut self.rows {
            row.iter_mut().zip(factors).for_each(|(x, factor)| *x = (f64::from(*x) * factor) as f32);
        }
    }

    pub(super) fn new(width: usize, request: Request) -> ValueStatistics {
        let halves = [(); 2].map(|()| Channels::new(width, request.histograms));
        ValueStatistics { histogram: ActivationHistogram::default(), averages: Averages::default(), halves, rows: Vec::new(), batches: 0, samples: 0 }
    }

    /// What there is to see of a parameter, which is the same for every sample.
    ///
    /// # Errors
    /// One of its numbers is not finite.
    pub(crate) fn of_parameter(name: &str, values: &[f32], shape: &[usize], request: Request) -> Result<ValueStatistics> {
        let mut seen = ValueStatistics::new(request.axis.channels(shape), request);
        seen.add(name, values, shape, request.axis, 1)?;
        Ok(seen)
    }

    /// Channel by channel.
    pub fn channels(&self) -> Channels {
        let mut all = self.halves[0].clone();
        all.merge(&self.halves[1]);
        all
    }

    /// The channels of both halves, where both have something.
    pub(super) fn channels_of_halves(&self) -> Option<&[Channels; 2]> {
        self.halves.iter().all(|half| half.has_histograms() && half.count() > 0).then_some(&self.halves)
    }

    /// The halves of what was seen as if each were all of it, where both have something.
    pub fn halves(&self) -> Option<[ValueStatistics; 2]> {
        let half = |index: usize| {
            let channels = &self.halves[index];
            let mut averages = self.averages;
            let histogram = channels.histogram();
            averages.scale(self.histogram.range(), histogram.range());
            let halves = [channels.clone(), Channels::new(channels.channels(), true)];
            ValueStatistics { histogram, averages, halves, rows: Vec::new(), batches: self.batches / 2, samples: self.samples / 2 }
        };
        self.channels_of_halves().map(|_| [half(0), half(1)])
    }

    /// Takes the values of a batch of so many samples of one size.
    pub(super) fn add(&mut self, name: &str, values: &[f32], shape: &[usize], axis: Axis, samples: usize) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let width = self.halves[0].channels().max(1);
        let plane = shape.iter().skip(2).product::<usize>().max(1);
        let (low, high, finite) = match axis {
            Axis::Last => {
                let seen = extremes(values);
                self.histogram.add_in_parts(values, seen.0, seen.1);
                for (index, sample) in values.chunks((values.len() / samples.max(1)).max(1)).enumerate() {
                    self.halves[(self.samples as usize + index) % 2].add_rows(sample);
                }
                seen
            }
            Axis::Second => add_images(&mut self.halves, (self.samples as usize, samples), (values, plane), &mut self.histogram),
        };
        self.samples += samples as u64;
        if !finite {
            return Err(not_finite(name, values.iter().find(|x| !x.is_finite()).map_or(f32::NAN, |x| *x)));
        }
        self.averages.add(low, high);
        let places = match axis {
            Axis::Last => values.len() / width,
            Axis::Second => plane.min(values.len() / width),
        };
        let kept = self.kept(places, axis);
        self.rows.extend(kept.map(|at| match axis {
            Axis::Last => values[at * width..(at + 1) * width].to_vec(),
            Axis::Second => (0..width).map(|channel| values[channel * plane + at]).collect(),
        }));
        self.batches += 1;
        Ok(())
    }

    /// Takes the values of a batch that are on a device: rows `[rows, channels]` of so many samples, an image's places one after the other.
    fn add_there(&mut self, name: &str, rows: &Tensor, axis: Axis, samples: usize) -> Result<()> {
        let failed = |e| Error::run(format!("graph value `{name}`"), e, "");
        let count = rows.dim(0).map_err(failed)?;
        if count == 0 {
            return Ok(());
        }
        let each = count / samples.max(1);
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for half in 0..2 {
            let first = self.samples as usize;
            let numbers: Vec<u32> = (0..count as u32).filter(|row| (first + *row as usize / each.max(1)) % 2 == half).collect();
            if numbers.is_empty() {
                continue;
            }
            let own = there::rows_of(rows, numbers).map_err(failed)?;
            for part in there::in_parts(&own).map_err(failed)? {
                let columns = Columns::of(&part).map_err(failed)?;
                if let Some(odd) = columns.odd() {
                    return Err(not_finite(name, odd));
                }
                let (least, most) = columns.extremes();
                (low, high) = (low.min(least), high.max(most));
                self.histogram.add_there(&part, least, most).and_then(|()| self.halves[half].add_there(&part, &columns)).map_err(failed)?;
            }
        }
        self.averages.add(low, high);
        self.samples += samples as u64;
        if let Some(at) = self.kept(if axis == Axis::Last { count } else { each }, axis) {
            let row = rows.narrow(0, at, 1).and_then(|row| transfer::values(&row, Cause::Statistics));
            self.rows.push(row.map_err(failed)?);
        }
        self.batches += 1;
        Ok(())
    }

    /// Which row of a batch is kept, or which place of its first image.
    fn kept(&self, rows: usize, axis: Axis) -> Option<usize> {
        // One row of a batch at first, then of every second, of every fourth batch.
        let turn = axis == Axis::Second || self.batches.is_power_of_two() || self.batches < 32;
        (turn && self.rows.len() < KEPT).then(|| (self.batches as usize * 7919).checked_rem(rows)).flatten()
    }
}

fn not_finite(name: &str, what: impl std::fmt::Display) -> Error {
    Error::run(
        format!("graph value `{name}`"),
        format!("is {what} for a calibration sample"),
        "the model cannot compute this sample, or a weight is not finite: `compress eval` on the same data shows more",
    )
}

/// Runs the model over samples and looks at the values that are asked for, by name. Padding is left out.
///
/// # Errors
/// Reading or running fails, a value is not finite, there is no sample, or the work is cancelled.
pub fn calibrate(executor: &Executor, data: &DataSet, requests: &BTreeMap<String, Request>, work: &Work) -> Result<BTreeMap<String, ValueStatistics>> {
    let mut seen = BTreeMap::new();
    let observation = executor.observation(|name| requests.contains_key(name));
    let sides = Sides::of(executor.graph());
    data.for_each_batch("Calibrating", work, |batch| {
        let padding = padding(&batch)?;
        let mut look = |name: &str, value: &Tensor| match requests.get(name) {
            Some(request) => watch(&mut seen, name, value, *request, (&padding, sides.token_axis(name))),
            _ => Ok(()),
        };
        for (name, value) in &batch.inputs {
            look(name, value)?;
        }
        executor.run_observed(&observation, &batch.inputs, &mut look)
    })?;
    Ok(seen)
}

/// As [`calibrate`], block by block: `states` are the bytes that batches may hold between blocks.
///
/// # Errors
/// As [`calibrate`].
pub fn calibrate_blockwise(
    model: (&Graph, &Weights),
    options: &BlockwiseOptions,
    states: u64,
    data: &DataSet,
    requests: &BTreeMap<String, Request>,
    work: &Work,
) -> Result<BTreeMap<String, ValueStatistics>> {
    let mut seen = BTreeMap::new();
    let sides = Sides::of(model.0);
    observe_blockwise(
        model,
        options,
        states,
        data,
        |name| requests.contains_key(name),
        work,
        |batch, name, value| match requests.get(name) {
            Some(request) => watch(&mut seen, name, value, *request, (&padding(batch)?, sides.token_axis(name))),
            None => Ok(()),
        },
    )?;
    Ok(seen)
}

/// Shows the values that are wanted, by name, for every batch, block by block: of several batches together first one value, then the
/// next; the batches of a value come in their order.
///
/// # Errors
/// Reading or running fails, the observer does, there is no sample, or the work is cancelled.
pub fn observe_blockwise(
    (graph, weights): (&Graph, &Weights),
    options: &BlockwiseOptions,
    states: u64,
    data: &DataSet,
    wanted: impl Fn(&str) -> bool,
    work: &Work,
    mut see: impl FnMut(&Batch, &str, &Tensor) -> Result<()>,
) -> Result<()> {
    let most = |batch: &Batch| usize::try_from(states / state_bytes(graph, &batch.inputs).max(1)).unwrap_or(usize::MAX);
    data.for_each_group(
        work,
        &mut see,
        |_, batch| most(batch),
        |see, batches| {
            let mut run = Blockwise::new(graph, weights, &wanted, options.clone(), work);
            for batch in batches {
                batch.inputs.iter().filter(|(name, _)| wanted(name)).try_for_each(|(name, value)| see(batch, name, value))?;
                run.push(batch.clone())?;
            }
            for block in 0..run.blocks().len() {
                run.enter(block)?;
                for name in run.values_of(block).into_iter().filter(|name| wanted(name)) {
                    run.each(name, |batch, value| see(batch, name, value))?;
                }
                run.leave()?;
            }
            Ok(())
        },
    )
}

fn padding(batch: &Batch) -> Result<Padding> {
    Padding::of(batch).map_err(|e| Error::run("input `attention_mask`", e, ""))
}

fn watch(seen: &mut BTreeMap<String, ValueStatistics>, name: &str, value: &Tensor, request: Request, (padding, tokens): (&Padding, TokenAxis)) -> Result<()> {
    let shape = value.dims();
    let width = request.axis.channels(shape);
    if !seen.contains_key(name) {
        seen.insert(name.to_owned(), ValueStatistics::new(width, request));
    }
    let Some(so_far) = seen.get_mut(name) else { return Ok(()) };
    let each = request.axis == Axis::Second || shape.len() == 2;
    let samples = if each { shape.first().copied().unwrap_or(1) } else { 1 };
    if !on_host(value.device()) {
        let (rows, samples) = rows_there(value, width, request.axis, padding.kept(tokens, shape).as_deref(), samples)
            .map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?;
        return so_far.add_there(name, &rows, request.axis, samples);
    }
    let mut take = |values: &[f32]| match padding.kept(tokens, shape) {
        Some(kept) if request.axis == Axis::Last => {
            let real: Vec<f32> = values.chunks_exact(width.max(1)).zip(&*kept).filter(|(_, kept)| **kept).flat_map(|(row, _)| row.iter().copied()).collect();
            so_far.add(name, &real, &[real.len() / width.max(1), width], request.axis, 1)
        }
        _ => so_far.add(name, values, shape, request.axis, samples),
    };
    floats_on_host(value, Cause::Statistics)
        .and_then(|value| read(&value, |values| Ok(take(values))))
        .map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?
}

/// A value of a device as rows of channels, without padding, and how many samples these are.
fn rows_there(value: &Tensor, width: usize, axis: Axis, kept: Option<&[bool]>, samples: usize) -> candle_core::Result<(Tensor, usize)> {
    let value = value.to_dtype(DType::F32)?;
    let rows = match axis {
        Axis::Last => value.contiguous()?,
        Axis::Second if value.rank() > 2 => value.flatten_from(2)?.transpose(1, 2)?.contiguous()?,
        Axis::Second => value,
    };
    let rows = rows.reshape((rows.elem_count() / width.max(1), width))?;
    match kept.filter(|_| axis == Axis::Last) {
        Some(kept) => {
            let numbers = (0u32..).zip(kept).filter(|(_, kept)| **kept).map(|(row, _)| row).collect();
            Ok((there::rows_of(&rows, numbers)?, 1))
        }
        None => Ok((rows, samples)),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::{References, Side};

    /// What is seen of batches of a shape, where values are on the host and where they are not.
    fn seen(shapes: &[&[usize]], request: Request, mask: Option<&Tensor>) -> [ValueStatistics; 2] {
        let width = shapes[0][if request.axis == Axis::Last { shapes[0].len() - 1 } else { 1 }];
        let inputs = mask.map(|mask| ("attention_mask".to_owned(), mask.clone())).into_iter().collect();
        let tokens = TokenAxis { side: Side::Read, axis: shapes[0].len().checked_sub(2) };
        let padding = Padding::of(&Batch { inputs, references: References::None, samples: 1 }).unwrap();
        let mut seen: [BTreeMap<String, ValueStatistics>; 2] = [BTreeMap::new(), BTreeMap::new()];
        for (index, shape) in shapes.iter().enumerate() {
            let number = |i: usize| (((i * 7919 + index * 31) % 1009) as f32 / 90.0 - 5.0) * 2f32.powi((index % 5) as i32);
            let value = Tensor::from_vec((0..shape.iter().product()).map(number).collect::<Vec<f32>>(), *shape, &Device::Cpu).unwrap();
            watch(&mut seen[0], "x", &value, request, (&padding, tokens)).unwrap();
            let there = seen[1].entry("x".to_owned()).or_insert_with(|| ValueStatistics::new(width, request));
            let samples = if request.axis == Axis::Second || shape.len() == 2 { shape[0] } else { 1 };
            let (rows, samples) = rows_there(&value, width, request.axis, padding.kept(tokens, shape).as_deref(), samples).unwrap();
            there.add_there("x", &rows, request.axis, samples).unwrap();
        }
        seen.map(|mut seen| seen.remove("x").unwrap())
    }

    #[test]
    fn statistics_are_the_same_where_values_are() {
        let mask = Tensor::new(&[[1i64, 1, 0], [1, 0, 0]], &Device::Cpu).unwrap();
        let nothing = mask.zeros_like().unwrap();
        for empty in seen(&[&[2, 3, 10]], Request { axis: Axis::Last, histograms: true }, Some(&nothing)) {
            assert_eq!((empty.averages, empty.samples), (Averages::default(), 0));
        }
        let tokens: &[&[usize]] = &[&[2, 3, 10], &[2, 3, 10], &[2, 3, 10]];
        let heads: &[&[usize]] = &[&[2, 4, 3, 10], &[2, 4, 3, 10]];
        let images: &[&[usize]] = &[&[3, 2, 4, 4], &[2, 2, 4, 4], &[1, 2, 4, 4]];
        let vectors: &[&[usize]] = &[&[7, 2500], &[4, 2500]];
        for (shapes, axis, mask) in [
            (tokens, Axis::Last, Some(&mask)),
            (heads, Axis::Last, Some(&mask)),
            (tokens, Axis::Last, None),
            (images, Axis::Second, None),
            (vectors, Axis::Last, None),
        ] {
            for histograms in [true, false] {
                let [here, there] = seen(shapes, Request { axis, histograms }, mask);
                assert_eq!((here.histogram.clone(), here.rows.clone()), (there.histogram.clone(), there.rows.clone()));
                assert_eq!((here.averages, here.batches, here.samples), (there.averages, there.batches, there.samples));
                assert!(here.histogram.total() > 0 && !here.rows.is_empty());
                for (here, there) in here.halves.iter().zip(&there.halves) {
                    assert_eq!((here.histogram(), here.largest(), here.count()), (there.histogram(), there.largest(), there.count()));
                    let figures = |channels: &Channels| channels.means().into_iter().chain(channels.mean_squares()).collect::<Vec<_>>();
                    assert!(figures(here).iter().zip(figures(there)).all(|(a, b)| (a - b).abs() < 1e-9), "{shapes:?}");
                }
            }
        }
        let mut wrong = ValueStatistics::new(2, Request { axis: Axis::Last, histograms: true });
        let value = Tensor::new(&[[1f32, f32::NAN]], &Device::Cpu).unwrap();
        assert!(wrong.add_there("x", &value, Axis::Last, 1).unwrap_err().to_string().contains("is NaN for a calibration sample"));
    }

    /// One half can be held to the other however samples come in batches.
    #[test]
    fn halves_are_of_samples_not_of_batches() {
        let images: Vec<f32> = (0..4 * 2 * 3).map(|i| ((i * 37) % 61) as f32 / 7.0 - 4.0).collect();
        let request = Request { axis: Axis::Second, histograms: true };
        let [mut whole, mut singly] = [(); 2].map(|()| ValueStatistics::new(2, request));
        whole.add("x", &images, &[4, 2, 3, 1], Axis::Second, 4).unwrap();
        images.chunks(6).for_each(|image| singly.add("x", image, &[1, 2, 3, 1], Axis::Second, 1).unwrap());
        let [whole, singly] = [whole, singly].map(|seen| seen.halves().unwrap().map(|half| half.channels()));
        assert_eq!(whole, singly);
    }
}
