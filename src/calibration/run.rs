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

impl Request {
    /// How many groups of samples have statistics of their own. Histograms take 1 KiB for each channel and group. Images are calibrated with
    /// fewer samples than texts, so that a single one counts more.
    fn groups(self) -> usize {
        match self.axis {
            _ if !self.histograms => 1,
            Axis::Last => 4,
            Axis::Second => 8,
        }
    }
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
    /// Statistics of the channels: sample `i` is in group `i % groups.len()`.
    groups: Vec<Channels>,
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
        self.groups.iter_mut().for_each(|group| group.multiply(factors));
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
        let groups = vec![Channels::new(width, request.histograms); request.groups()];
        ValueStatistics { histogram: ActivationHistogram::default(), averages: Averages::default(), groups, rows: Vec::new(), batches: 0, samples: 0 }
    }

    /// What there is to see of a parameter, which is the same for every sample.
    ///
    /// # Errors
    /// One of its numbers is not finite.
    pub(crate) fn of_parameter(name: &str, values: &[f32], shape: &[usize], request: Request) -> Result<ValueStatistics> {
        let mut seen = ValueStatistics::new(request.axis.channels(shape), request);
        seen.add(name, values, shape, request.axis, &[values.len() / request.axis.channels(shape).max(1)])?;
        Ok(seen)
    }

    /// The channels over all samples.
    pub fn channels(&self) -> Channels {
        merged(&self.groups)
    }

    /// The channels of each group that has samples, where there are histograms.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Channels> {
        self.groups.iter().filter(|group| group.has_histograms() && group.count() > 0)
    }

    /// The channels of samples with even and with odd numbers, if there are both, and histograms.
    pub(super) fn channels_of_halves(&self) -> Option<[Channels; 2]> {
        let halves = [0, 1].map(|first| merged(self.groups.iter().skip(first).step_by(2)));
        halves.iter().all(|half| half.has_histograms() && half.count() > 0).then_some(halves)
    }

    /// Statistics of the samples with even and with odd numbers, if there are both, and histograms.
    pub fn halves(&self) -> Option<[ValueStatistics; 2]> {
        let half = |channels: Channels| {
            let mut averages = self.averages;
            let histogram = channels.histogram();
            averages.scale(self.histogram.range(), histogram.range());
            ValueStatistics { histogram, averages, groups: vec![channels], rows: Vec::new(), batches: self.batches / 2, samples: self.samples / 2 }
        };
        self.channels_of_halves().map(|halves| halves.map(half))
    }

    /// Takes the values of a batch; `sizes` are the numbers of rows of its samples, and of images all samples have the same.
    pub(super) fn add(&mut self, name: &str, values: &[f32], shape: &[usize], axis: Axis, sizes: &[usize]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let width = self.groups[0].channels().max(1);
        let plane = shape.iter().skip(2).product::<usize>().max(1);
        let (low, high, finite) = match axis {
            Axis::Last => {
                let seen = extremes(values);
                self.histogram.add_in_parts(values, seen.0, seen.1);
                let mut rest = values;
                for (index, size) in sizes.iter().enumerate() {
                    let (sample, others) = rest.split_at(size * width);
                    let group = self.group(index);
                    self.groups[group].add_rows(sample);
                    rest = others;
                }
                seen
            }
            Axis::Second => add_images(&mut self.groups, (self.samples as usize, sizes.len()), (values, plane), &mut self.histogram),
        };
        self.samples += sizes.len() as u64;
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

    /// As [`add`](ValueStatistics::add), of values on a device: rows `[rows, channels]`, the positions of an image one after the other.
    fn add_there(&mut self, name: &str, rows: &Tensor, axis: Axis, sizes: &[usize]) -> Result<()> {
        let failed = |e| Error::run(format!("graph value `{name}`"), e, "");
        let count = rows.dim(0).map_err(failed)?;
        if count == 0 {
            return Ok(());
        }
        let samples = (0..).zip(sizes).flat_map(|(index, size)| std::iter::repeat_n(self.group(index), *size)).collect::<Vec<_>>();
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for group in 0..self.groups.len() {
            let numbers: Vec<u32> = (0..count as u32).zip(&samples).filter(|(_, of)| **of == group).map(|(row, _)| row).collect();
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
                self.histogram.add_there(&part, least, most).and_then(|()| self.groups[group].add_there(&part, &columns)).map_err(failed)?;
            }
        }
        self.averages.add(low, high);
        self.samples += sizes.len() as u64;
        if let Some(at) = self.kept(if axis == Axis::Last { count } else { sizes.first().copied().unwrap_or(0) }, axis) {
            let row = rows.narrow(0, at, 1).and_then(|row| transfer::values(&row, Cause::Statistics));
            self.rows.push(row.map_err(failed)?);
        }
        self.batches += 1;
        Ok(())
    }

    /// The group of a sample of the batch.
    fn group(&self, index: usize) -> usize {
        (self.samples as usize + index) % self.groups.len()
    }

    /// Which row of a batch is kept, or which place of its first image.
    fn kept(&self, rows: usize, axis: Axis) -> Option<usize> {
        // One row of a batch at first, then of every second, of every fourth batch.
        let turn = axis == Axis::Second || self.batches.is_power_of_two() || self.batches < 32;
        (turn && self.rows.len() < KEPT).then(|| (self.batches as usize * 7919).checked_rem(rows)).flatten()
    }
}

/// The sum of statistics of the same channels.
fn merged<'c>(groups: impl IntoIterator<Item = &'c Channels>) -> Channels {
    let mut groups = groups.into_iter();
    let mut all = groups.next().cloned().unwrap_or_else(|| Channels::new(0, false));
    groups.for_each(|group| all.merge(group));
    all
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
            Some(request) => watch(&mut seen, name, value, *request, (&padding, sides.token_axis(name)), batch.samples),
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
            Some(request) => watch(&mut seen, name, value, *request, (&padding(batch)?, sides.token_axis(name)), batch.samples),
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

fn watch(
    seen: &mut BTreeMap<String, ValueStatistics>,
    name: &str,
    value: &Tensor,
    request: Request,
    (padding, tokens): (&Padding, TokenAxis),
    samples: usize,
) -> Result<()> {
    let shape = value.dims();
    let width = request.axis.channels(shape);
    if !seen.contains_key(name) {
        seen.insert(name.to_owned(), ValueStatistics::new(width, request));
    }
    let Some(so_far) = seen.get_mut(name) else { return Ok(()) };
    let kept = padding.kept(tokens, shape).filter(|_| request.axis == Axis::Last);
    let sizes = rows_of_samples(value.elem_count() / width.max(1), samples, kept.as_deref());
    if !on_host(value.device()) {
        let rows = rows_there(value, width, request.axis, kept.as_deref()).map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?;
        return so_far.add_there(name, &rows, request.axis, &sizes);
    }
    let mut take = |values: &[f32]| match &kept {
        Some(kept) => {
            let real: Vec<f32> = values.chunks_exact(width.max(1)).zip(&**kept).filter(|(_, kept)| **kept).flat_map(|(row, _)| row.iter().copied()).collect();
            so_far.add(name, &real, &[real.len() / width.max(1), width], request.axis, &sizes)
        }
        None => so_far.add(name, values, shape, request.axis, &sizes),
    };
    floats_on_host(value, Cause::Statistics)
        .and_then(|value| read(&value, |values| Ok(take(values))))
        .map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?
}

/// How many of the rows of a value each sample of a batch has, padding left out. Rows that cannot be divided evenly, such as the rows of an
/// expert, count as one sample.
fn rows_of_samples(rows: usize, samples: usize, kept: Option<&[bool]>) -> Vec<usize> {
    let samples = if samples > 0 && rows.is_multiple_of(samples) { samples } else { 1 };
    match kept {
        Some(kept) => kept.chunks((rows / samples).max(1)).map(|rows| rows.iter().filter(|kept| **kept).count()).collect(),
        None => vec![rows / samples; samples],
    }
}

/// A value of a device as rows of channels, without padding.
fn rows_there(value: &Tensor, width: usize, axis: Axis, kept: Option<&[bool]>) -> candle_core::Result<Tensor> {
    let value = value.to_dtype(DType::F32)?;
    let rows = match axis {
        Axis::Last => value.contiguous()?,
        Axis::Second if value.rank() > 2 => value.flatten_from(2)?.transpose(1, 2)?.contiguous()?,
        Axis::Second => value,
    };
    let rows = rows.reshape((rows.elem_count() / width.max(1), width))?;
    match kept {
        Some(kept) => there::rows_of(&rows, (0u32..).zip(kept).filter(|(_, kept)| **kept).map(|(row, _)| row).collect()),
        None => Ok(rows),
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
            watch(&mut seen[0], "x", &value, request, (&padding, tokens), shape[0]).unwrap();
            let there = seen[1].entry("x".to_owned()).or_insert_with(|| ValueStatistics::new(width, request));
            let kept = padding.kept(tokens, shape).filter(|_| request.axis == Axis::Last);
            let rows = rows_there(&value, width, request.axis, kept.as_deref()).unwrap();
            let sizes = rows_of_samples(value.elem_count() / width, shape[0], kept.as_deref());
            there.add_there("x", &rows, request.axis, &sizes).unwrap();
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
                for (here, there) in here.groups.iter().zip(&there.groups) {
                    assert_eq!((here.histogram(), here.largest(), here.count()), (there.histogram(), there.largest(), there.count()));
                    let figures = |channels: &Channels| channels.means().into_iter().chain(channels.mean_squares()).collect::<Vec<_>>();
                    assert!(figures(here).iter().zip(figures(there)).all(|(a, b)| (a - b).abs() < 1e-9), "{shapes:?}");
                }
            }
        }
        let mut wrong = ValueStatistics::new(2, Request { axis: Axis::Last, histograms: true });
        let value = Tensor::new(&[[1f32, f32::NAN]], &Device::Cpu).unwrap();
        assert!(wrong.add_there("x", &value, Axis::Last, &[1]).unwrap_err().to_string().contains("is NaN for a calibration sample"));
    }

    /// Statistics of groups do not depend on how samples are batched, with and without padding.
    #[test]
    fn groups_are_of_samples_not_of_batches() {
        let number = |i: usize| ((i * 37) % 61) as f32 / 7.0 - 4.0;
        let mask = |row: usize| [1i64, 1, i64::from(row != 1)];
        let groups = |shape: &[usize], axis: Axis, batch: usize, padded: bool| {
            let row: usize = shape.iter().product();
            let width = if axis == Axis::Last { shape[shape.len() - 1] } else { shape[0] };
            let tokens = TokenAxis { side: Side::Read, axis: (shape.len() > 1).then_some(1) };
            let mut seen = BTreeMap::new();
            for first in (0..11).step_by(batch) {
                let samples = batch.min(11 - first);
                let values: Vec<f32> = (first * row..(first + samples) * row).map(number).collect();
                let value = Tensor::from_vec(values, [&[samples], shape].concat(), &Device::Cpu).unwrap();
                let rows: Vec<i64> = (first..first + samples).flat_map(mask).collect();
                let mask = Tensor::from_vec(rows, (samples, 3), &Device::Cpu).unwrap();
                let inputs = padded.then(|| ("attention_mask".to_owned(), mask)).into_iter().collect();
                let padding = Padding::of(&Batch { inputs, references: References::None, samples }).unwrap();
                watch(&mut seen, "x", &value, Request { axis, histograms: true }, (&padding, tokens), samples).unwrap();
            }
            let seen = seen.remove("x").unwrap();
            assert_eq!(seen.groups[0].channels(), width);
            seen.groups
        };
        for (shape, axis, padded) in
            [(&[2, 3, 1][..], Axis::Second, false), (&[5][..], Axis::Last, false), (&[3, 5][..], Axis::Last, false), (&[3, 5][..], Axis::Last, true)]
        {
            let singly = groups(shape, axis, 1, padded);
            assert!(singly.iter().all(|group| group.count() > 0));
            for batch in [2, 3, 11] {
                assert_eq!(groups(shape, axis, batch, padded), singly, "{shape:?} in batches of {batch}");
            }
        }
    }
}
