//! Runs a model over calibration samples and collects statistics of its graph values.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::channels::add_images;
use super::device_stats::{self, ColumnStats};
use super::{ActivationHistogram, Channels, RunningRange};
use crate::data::{Batch, DataSet, Padding, SequenceRoles, TokenAxis};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Blockwise, BlockwiseOptions, Executor, floats_on_host, read, state_bytes};
use crate::ir::Graph;
use crate::ir::ops::on_host;
use crate::kernel::linear_histogram::extremes;
use crate::store::Weights;
use crate::work::Work;

/// Channel axis of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// The last axis.
    Last,
    /// The second axis, for images.
    Second,
}

impl Axis {
    /// Number of channels of a value with this shape.
    fn channels(self, shape: &[usize]) -> usize {
        let width = match self {
            Axis::Last => shape.last(),
            Axis::Second => shape.get(1),
        };
        width.copied().unwrap_or(1)
    }
}

/// Statistics to collect of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Channel axis.
    pub axis: Axis,
    /// Whether to collect a histogram per channel.
    pub histograms: bool,
}

impl Request {
    /// Number of sample groups with separate statistics. Histograms take 1 KiB per channel and group.
    /// Images have more groups, because they are calibrated with fewer samples than texts, so that a
    /// single outlier has more influence.
    fn groups(self) -> usize {
        match self.axis {
            _ if !self.histograms => 1,
            Axis::Last => 4,
            Axis::Second => 8,
        }
    }
}

/// Maximum number of raw rows stored per value. They are the test inputs for quantized arithmetic.
const STORED_ROWS: usize = 64;

/// Statistics of one graph value over all calibration samples.
#[derive(Debug, Clone)]
pub struct ValueStatistics {
    /// All elements.
    pub histogram: ActivationHistogram,
    /// Moving average of the extremes of batches.
    pub running_range: RunningRange,
    /// Channel statistics per group: sample `i` belongs to group `i % groups.len()`.
    groups: Vec<Channels>,
    /// A few raw rows, spread over the samples. For images, a row holds the channels of one pixel.
    pub rows: Vec<Vec<f32>>,
    batches: u64,
    samples: u64,
}

impl ValueStatistics {
    /// Rescales the statistics as if each channel had been multiplied by its factor.
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
        self.running_range.scale(before, self.histogram.range());
        for row in &mut self.rows {
            row.iter_mut().zip(factors).for_each(|(x, factor)| *x = (f64::from(*x) * factor) as f32);
        }
    }

    pub(super) fn new(width: usize, request: Request) -> ValueStatistics {
        let groups = vec![Channels::new(width, request.histograms); request.groups()];
        ValueStatistics { histogram: ActivationHistogram::default(), running_range: RunningRange::default(), groups, rows: Vec::new(), batches: 0, samples: 0 }
    }

    /// Statistics of a parameter, which has the same value for every sample. Returns an error if it is
    /// not finite.
    pub fn from_parameter(name: &str, values: &[f32], shape: &[usize], request: Request) -> Result<ValueStatistics> {
        let mut statistics = ValueStatistics::new(request.axis.channels(shape), request);
        statistics.add(name, values, shape, request.axis, &[values.len() / request.axis.channels(shape).max(1)])?;
        Ok(statistics)
    }

    /// Channel statistics over all samples.
    pub fn channels(&self) -> Channels {
        merged(&self.groups)
    }

    /// Channel statistics of the groups that have samples and histograms.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Channels> {
        self.groups.iter().filter(|group| group.has_histograms() && group.count() > 0)
    }

    /// Channel statistics of the even and of the odd samples. Returns `None` if a half is empty or has no
    /// histograms.
    pub(super) fn channels_of_halves(&self) -> Option<[Channels; 2]> {
        let halves = [0, 1].map(|first| merged(self.groups.iter().skip(first).step_by(2)));
        halves.iter().all(|half| half.has_histograms() && half.count() > 0).then_some(halves)
    }

    /// Statistics of the even and of the odd samples. Returns `None` if a half is empty or has no
    /// histograms.
    pub fn halves(&self) -> Option<[ValueStatistics; 2]> {
        let half = |channels: Channels| {
            let mut running_range = self.running_range;
            let histogram = channels.histogram();
            running_range.scale(self.histogram.range(), histogram.range());
            ValueStatistics { histogram, running_range, groups: vec![channels], rows: Vec::new(), batches: self.batches / 2, samples: self.samples / 2 }
        };
        self.channels_of_halves().map(|halves| halves.map(half))
    }

    /// Adds the values of a batch. `sizes` holds the number of rows of each sample, which is constant for
    /// images.
    pub(super) fn add(&mut self, name: &str, values: &[f32], shape: &[usize], axis: Axis, sizes: &[usize]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let width = self.groups[0].channels().max(1);
        let plane = shape.iter().skip(2).product::<usize>().max(1);
        let (low, high, finite) = match axis {
            Axis::Last => {
                let range = extremes(values);
                self.histogram.add_parallel(values, range.0, range.1);
                let mut rest = values;
                for (index, size) in sizes.iter().enumerate() {
                    let (sample, next) = rest.split_at(size * width);
                    let group = self.group(index);
                    self.groups[group].add_rows(sample);
                    rest = next;
                }
                range
            }
            Axis::Second => add_images(&mut self.groups, (self.samples as usize, sizes.len()), (values, plane), &mut self.histogram),
        };
        self.samples += sizes.len() as u64;
        if !finite {
            return Err(not_finite(name, values.iter().find(|x| !x.is_finite()).map_or(f32::NAN, |x| *x)));
        }
        self.running_range.add(low, high);
        let rows = match axis {
            Axis::Last => values.len() / width,
            Axis::Second => plane.min(values.len() / width),
        };
        let stored = self.row_to_store(rows, axis);
        self.rows.extend(stored.map(|at| match axis {
            Axis::Last => values[at * width..(at + 1) * width].to_vec(),
            Axis::Second => (0..width).map(|channel| values[channel * plane + at]).collect(),
        }));
        self.batches += 1;
        Ok(())
    }

    /// Like [`add`](ValueStatistics::add), for values on a device with the shape `[rows, channels]`. The
    /// pixels of an image are consecutive rows.
    fn add_on_device(&mut self, name: &str, rows: &Tensor, axis: Axis, sizes: &[usize]) -> Result<()> {
        let failed = |e| Error::run(format!("graph value `{name}`"), e, "");
        let count = rows.dim(0).map_err(failed)?;
        if count == 0 {
            return Ok(());
        }
        let samples = (0..).zip(sizes).flat_map(|(index, size)| std::iter::repeat_n(self.group(index), *size)).collect::<Vec<_>>();
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for group in 0..self.groups.len() {
            let indices: Vec<u32> = (0..count as u32).zip(&samples).filter(|(_, of)| **of == group).map(|(row, _)| row).collect();
            if indices.is_empty() {
                continue;
            }
            let group_rows = device_stats::select_rows(rows, indices).map_err(failed)?;
            for part in device_stats::row_chunks(&group_rows).map_err(failed)? {
                let columns = ColumnStats::from_rows(&part).map_err(failed)?;
                if let Some(value) = columns.non_finite() {
                    return Err(not_finite(name, value));
                }
                let (min, max) = columns.extremes();
                (low, high) = (low.min(min), high.max(max));
                self.histogram.add_on_device(&part, min, max).and_then(|()| self.groups[group].add_on_device(&part, &columns)).map_err(failed)?;
            }
        }
        self.running_range.add(low, high);
        self.samples += sizes.len() as u64;
        if let Some(at) = self.row_to_store(if axis == Axis::Last { count } else { sizes.first().copied().unwrap_or(0) }, axis) {
            let row = rows.narrow(0, at, 1).and_then(|row| transfer::values(&row, Cause::Statistics));
            self.rows.push(row.map_err(failed)?);
        }
        self.batches += 1;
        Ok(())
    }

    /// The group of sample `index` of the current batch.
    fn group(&self, index: usize) -> usize {
        (self.samples as usize + index) % self.groups.len()
    }

    /// Index of the row of the current batch, or of the pixel of its first image, to store in `rows`.
    fn row_to_store(&self, rows: usize, axis: Axis) -> Option<usize> {
        // One row of each of the first 32 batches, then of batches 32, 64, 128, …
        let selected = axis == Axis::Second || self.batches.is_power_of_two() || self.batches < 32;
        (selected && self.rows.len() < STORED_ROWS).then(|| (self.batches as usize * 7919).checked_rem(rows)).flatten()
    }
}

/// Merges channel statistics of several groups.
fn merged<'c>(groups: impl IntoIterator<Item = &'c Channels>) -> Channels {
    let mut groups = groups.into_iter();
    let mut all = groups.next().cloned().unwrap_or_else(|| Channels::new(0, false));
    groups.for_each(|group| all.merge(group));
    all
}

fn not_finite(name: &str, value: impl std::fmt::Display) -> Error {
    Error::run(
        format!("graph value `{name}`"),
        format!("is {value} for a calibration sample"),
        "the model overflows on this sample, or a weight is not finite: run `compress eval` on the same data for details",
    )
}

/// Runs the model over all samples and collects statistics of the requested graph values. Padding tokens
/// are excluded.
///
/// # Errors
/// Besides errors of the data and the model: if a value is not finite, if the data is empty, or if the
/// work is cancelled.
pub fn calibrate(executor: &Executor, data: &DataSet, requests: &BTreeMap<String, Request>, work: &Work) -> Result<BTreeMap<String, ValueStatistics>> {
    let mut statistics = BTreeMap::new();
    let observation = executor.observation(|name| requests.contains_key(name));
    let sides = SequenceRoles::new(executor.graph());
    data.for_each_batch("Calibrating", work, |batch| {
        let padding = padding(&batch)?;
        let mut observe = |name: &str, value: &Tensor| match requests.get(name) {
            Some(request) => record(&mut statistics, name, value, *request, (&padding, sides.token_axis(name)), batch.samples),
            _ => Ok(()),
        };
        for (name, value) in &batch.inputs {
            observe(name, value)?;
        }
        executor.run_observed(&observation, &batch.inputs, &mut observe)
    })?;
    Ok(statistics)
}

/// Like [`calibrate`], running the model block by block. `cache_bytes` limits the memory of the
/// activations cached between blocks.
///
/// # Errors
/// The same as [`calibrate`].
pub fn calibrate_blockwise(
    model: (&Graph, &Weights),
    options: &BlockwiseOptions,
    cache_bytes: u64,
    data: &DataSet,
    requests: &BTreeMap<String, Request>,
    work: &Work,
) -> Result<BTreeMap<String, ValueStatistics>> {
    let mut statistics = BTreeMap::new();
    let sides = SequenceRoles::new(model.0);
    observe_blockwise(
        model,
        options,
        cache_bytes,
        data,
        |name| requests.contains_key(name),
        work,
        |batch, name, value| match requests.get(name) {
            Some(request) => record(&mut statistics, name, value, *request, (&padding(batch)?, sides.token_axis(name)), batch.samples),
            None => Ok(()),
        },
    )?;
    Ok(statistics)
}

/// Runs the model block by block and passes the selected graph values of every batch to `observe`.
/// Batches are processed in groups whose cached activations fit into `cache_bytes`. Within a group,
/// `observe` receives all batches of one value, in order, before the next value.
///
/// # Errors
/// Besides errors of the data, the model and `observe`: if the data is empty, or if the work is cancelled.
pub fn observe_blockwise(
    (graph, weights): (&Graph, &Weights),
    options: &BlockwiseOptions,
    cache_bytes: u64,
    data: &DataSet,
    selected: impl Fn(&str) -> bool,
    work: &Work,
    mut observe: impl FnMut(&Batch, &str, &Tensor) -> Result<()>,
) -> Result<()> {
    let group_size = |batch: &Batch| usize::try_from(cache_bytes / state_bytes(graph, &batch.inputs).max(1)).unwrap_or(usize::MAX);
    data.for_each_group(
        work,
        &mut observe,
        |_, batch| group_size(batch),
        |observe, batches| {
            let mut run = Blockwise::new(graph, weights, &selected, options.clone(), work);
            for batch in batches {
                batch.inputs.iter().filter(|(name, _)| selected(name)).try_for_each(|(name, value)| observe(batch, name, value))?;
                run.push(batch.clone())?;
            }
            for block in 0..run.blocks().len() {
                run.enter(block)?;
                for name in run.values_of(block).into_iter().filter(|name| selected(name)) {
                    run.each(name, |batch, value| observe(batch, name, value))?;
                }
                run.leave()?;
            }
            Ok(())
        },
    )
}

fn padding(batch: &Batch) -> Result<Padding> {
    Padding::from_batch(batch).map_err(|e| Error::run("input `attention_mask`", e, ""))
}

/// Adds one value of a batch to its statistics.
fn record(
    statistics: &mut BTreeMap<String, ValueStatistics>,
    name: &str,
    value: &Tensor,
    request: Request,
    (padding, tokens): (&Padding, TokenAxis),
    samples: usize,
) -> Result<()> {
    let shape = value.dims();
    let width = request.axis.channels(shape);
    if !statistics.contains_key(name) {
        statistics.insert(name.to_owned(), ValueStatistics::new(width, request));
    }
    let Some(statistics) = statistics.get_mut(name) else { return Ok(()) };
    let mask = padding.token_rows(tokens, shape).filter(|_| request.axis == Axis::Last);
    let sizes = sample_sizes(value.elem_count() / width.max(1), samples, mask.as_deref());
    if !on_host(value.device()) {
        let rows = device_rows(value, width, request.axis, mask.as_deref()).map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?;
        return statistics.add_on_device(name, &rows, request.axis, &sizes);
    }
    let mut add = |values: &[f32]| match &mask {
        Some(mask) => {
            let rows = values.chunks_exact(width.max(1)).zip(&**mask).filter(|(_, is_token)| **is_token);
            let tokens: Vec<f32> = rows.flat_map(|(row, _)| row.iter().copied()).collect();
            statistics.add(name, &tokens, &[tokens.len() / width.max(1), width], request.axis, &sizes)
        }
        None => statistics.add(name, values, shape, request.axis, &sizes),
    };
    floats_on_host(value, Cause::Statistics)
        .and_then(|value| read(&value, |values| Ok(add(values))))
        .map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?
}

/// Number of rows of each sample of a batch, without padding. Rows that cannot be divided evenly, such as
/// those routed to an expert, count as one sample.
pub fn sample_sizes(rows: usize, samples: usize, mask: Option<&[bool]>) -> Vec<usize> {
    let samples = if samples > 0 && rows.is_multiple_of(samples) { samples } else { 1 };
    match mask {
        Some(mask) => mask.chunks((rows / samples).max(1)).map(|rows| rows.iter().filter(|is_token| **is_token).count()).collect(),
        None => vec![rows / samples; samples],
    }
}

/// A value on a device as `[rows, channels]`, without padding.
fn device_rows(value: &Tensor, width: usize, axis: Axis, mask: Option<&[bool]>) -> candle_core::Result<Tensor> {
    let value = value.to_dtype(DType::F32)?;
    let rows = match axis {
        Axis::Last => value.contiguous()?,
        Axis::Second if value.rank() > 2 => value.flatten_from(2)?.transpose(1, 2)?.contiguous()?,
        Axis::Second => value,
    };
    let rows = rows.reshape((rows.elem_count() / width.max(1), width))?;
    match mask {
        Some(mask) => device_stats::select_rows(&rows, (0u32..).zip(mask).filter(|(_, is_token)| **is_token).map(|(row, _)| row).collect()),
        None => Ok(rows),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::{References, SequenceRole};

    /// Statistics of the same batches, computed by the host path and by the device path.
    fn statistics(shapes: &[&[usize]], request: Request, mask: Option<&Tensor>) -> [ValueStatistics; 2] {
        let width = shapes[0][if request.axis == Axis::Last { shapes[0].len() - 1 } else { 1 }];
        let inputs = mask.map(|mask| ("attention_mask".to_owned(), mask.clone())).into_iter().collect();
        let tokens = TokenAxis { role: SequenceRole::Input, axis: shapes[0].len().checked_sub(2) };
        let padding = Padding::from_batch(&Batch { inputs, references: References::None, samples: 1 }).unwrap();
        let mut statistics: [BTreeMap<String, ValueStatistics>; 2] = [BTreeMap::new(), BTreeMap::new()];
        for (index, shape) in shapes.iter().enumerate() {
            let number = |i: usize| (((i * 7919 + index * 31) % 1009) as f32 / 90.0 - 5.0) * 2f32.powi((index % 5) as i32);
            let value = Tensor::from_vec((0..shape.iter().product()).map(number).collect::<Vec<f32>>(), *shape, &Device::Cpu).unwrap();
            record(&mut statistics[0], "x", &value, request, (&padding, tokens), shape[0]).unwrap();
            let on_device = statistics[1].entry("x".to_owned()).or_insert_with(|| ValueStatistics::new(width, request));
            let kept = padding.token_rows(tokens, shape).filter(|_| request.axis == Axis::Last);
            let rows = device_rows(&value, width, request.axis, kept.as_deref()).unwrap();
            let sizes = sample_sizes(value.elem_count() / width, shape[0], kept.as_deref());
            on_device.add_on_device("x", &rows, request.axis, &sizes).unwrap();
        }
        statistics.map(|mut statistics| statistics.remove("x").unwrap())
    }

    #[test]
    fn host_and_device_statistics_are_equal() {
        let mask = Tensor::new(&[[1i64, 1, 0], [1, 0, 0]], &Device::Cpu).unwrap();
        let zeros = mask.zeros_like().unwrap();
        for empty in statistics(&[&[2, 3, 10]], Request { axis: Axis::Last, histograms: true }, Some(&zeros)) {
            assert_eq!((empty.running_range, empty.samples), (RunningRange::default(), 0));
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
                let [host, device] = statistics(shapes, Request { axis, histograms }, mask);
                assert_eq!((host.histogram.clone(), host.rows.clone()), (device.histogram.clone(), device.rows.clone()));
                assert_eq!((host.running_range, host.batches, host.samples), (device.running_range, device.batches, device.samples));
                assert!(host.histogram.total() > 0 && !host.rows.is_empty());
                for (host, device) in host.groups.iter().zip(&device.groups) {
                    assert_eq!((host.histogram(), host.largest(), host.count()), (device.histogram(), device.largest(), device.count()));
                    let moments = |channels: &Channels| channels.means().into_iter().chain(channels.mean_squares()).collect::<Vec<_>>();
                    assert!(moments(host).iter().zip(moments(device)).all(|(a, b)| (a - b).abs() < 1e-9), "{shapes:?}");
                }
            }
        }
        let mut wrong = ValueStatistics::new(2, Request { axis: Axis::Last, histograms: true });
        let value = Tensor::new(&[[1f32, f32::NAN]], &Device::Cpu).unwrap();
        assert!(wrong.add_on_device("x", &value, Axis::Last, &[1]).unwrap_err().to_string().contains("is NaN for a calibration sample"));
    }

    /// Group statistics do not depend on how samples are batched, with and without padding.
    #[test]
    fn group_statistics_do_not_depend_on_batches() {
        let number = |i: usize| ((i * 37) % 61) as f32 / 7.0 - 4.0;
        let mask = |row: usize| [1i64, 1, i64::from(row != 1)];
        let groups = |shape: &[usize], axis: Axis, batch: usize, padded: bool| {
            let row: usize = shape.iter().product();
            let width = if axis == Axis::Last { shape[shape.len() - 1] } else { shape[0] };
            let tokens = TokenAxis { role: SequenceRole::Input, axis: (shape.len() > 1).then_some(1) };
            let mut statistics = BTreeMap::new();
            for first in (0..11).step_by(batch) {
                let samples = batch.min(11 - first);
                let values: Vec<f32> = (first * row..(first + samples) * row).map(number).collect();
                let value = Tensor::from_vec(values, [&[samples], shape].concat(), &Device::Cpu).unwrap();
                let rows: Vec<i64> = (first..first + samples).flat_map(mask).collect();
                let mask = Tensor::from_vec(rows, (samples, 3), &Device::Cpu).unwrap();
                let inputs = padded.then(|| ("attention_mask".to_owned(), mask)).into_iter().collect();
                let padding = Padding::from_batch(&Batch { inputs, references: References::None, samples }).unwrap();
                record(&mut statistics, "x", &value, Request { axis, histograms: true }, (&padding, tokens), samples).unwrap();
            }
            let statistics = statistics.remove("x").unwrap();
            assert_eq!(statistics.groups[0].channels(), width);
            statistics.groups
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
