//! Statistics of one graph value, reduced per channel and per group of samples.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::Tensor;

use super::channels::{EMPTY_RANGE, Images, add_images, union};
use super::device_stats::{self, ColumnStats};
use super::{ActivationHistogram, Channels, WeightedError};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::kernel::linear_histogram::extremes;

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
    pub(super) fn channels(self, shape: &[usize]) -> usize {
        let width = match self {
            Axis::Last => shape.last(),
            Axis::Second => shape.get(1),
        };
        width.copied().unwrap_or(1)
    }
}

/// Statistics to collect of a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Channel axis.
    pub axis: Axis,
    /// Whether to collect a histogram per channel.
    pub histograms: bool,
    /// Whether to collect a histogram of all channels together, whose bins are smaller.
    pub joint: bool,
    /// Weights of each channel's squared error. If present, the best range of each sample is computed.
    pub weights: Option<Arc<[f64]>>,
}

impl Request {
    /// Number of sample groups with separate statistics. Histograms take 1 KiB per channel and group.
    /// Images have more groups, because they are calibrated with fewer samples than texts, so that a
    /// single outlier has more influence.
    fn groups(&self) -> usize {
        match self.axis {
            _ if !self.histograms => 1,
            Axis::Last => 4,
            Axis::Second => 8,
        }
    }
}

/// Maximum number of raw rows stored per value. They are the test inputs for quantized arithmetic.
const STORED_ROWS: usize = 64;

/// Exponential moving average of the minimum and maximum of each batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunningRange(Option<(f64, f64)>);

/// Weight of a new batch.
const MOMENTUM: f64 = 0.01;

impl RunningRange {
    /// Adds the minimum and maximum of a batch.
    pub fn add(&mut self, low: f32, high: f32) {
        let (low, high) = (f64::from(low), f64::from(high));
        self.0 = Some(self.0.map_or((low, high), |(l, h)| (l + MOMENTUM * (low - l), h + MOMENTUM * (high - h))));
    }

    /// Scales both ends by the ratio of two ranges.
    pub(super) fn scale(&mut self, before: (f32, f32), after: (f32, f32)) {
        let ratio = |before: f32, after: f32| if before == 0.0 { 1.0 } else { f64::from(after) / f64::from(before) };
        if let Some((low, high)) = &mut self.0 {
            *low *= ratio(before.0, after.0);
            *high *= ratio(before.1, after.1);
        }
    }

    /// The averages, extended to include zero.
    pub fn range(&self) -> (f32, f32) {
        self.0.map_or((0.0, 0.0), |(low, high)| (low.min(0.0) as f32, high.max(0.0) as f32))
    }
}

/// Mean of the ranges that minimize the error of each sample.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampleRanges {
    /// Weights of each channel's squared error.
    weights: Arc<[f64]>,
    /// Sums of the ends.
    sums: (f64, f64),
    count: u64,
}

impl SampleRanges {
    fn add(&mut self, sample: &Channels) {
        let Some(error) = WeightedError::from_channels(sample, None, &self.weights) else { return };
        let (low, high) = error.best_range();
        self.sums = (self.sums.0 + f64::from(low), self.sums.1 + f64::from(high));
        self.count += 1;
    }

    /// The mean; `None` without samples.
    pub fn mean(&self) -> Option<(f64, f64)> {
        let count = self.count as f64;
        (self.count > 0).then(|| (self.sums.0 / count, self.sums.1 / count))
    }
}

/// Statistics of one graph value over all calibration samples.
#[derive(Debug, Clone)]
pub struct ValueStatistics {
    /// All elements, if this histogram was requested.
    pub(super) histogram: Option<ActivationHistogram>,
    /// Moving average of the extremes of batches.
    pub running_range: RunningRange,
    /// Channel statistics per group: sample `i` belongs to group `i % groups.len()`.
    pub(super) groups: Vec<Channels>,
    /// Best ranges of single samples, if they were requested.
    pub(super) sample_ranges: Option<SampleRanges>,
    /// A few raw rows, spread over the samples. For images, a row holds the channels of one pixel.
    pub rows: Vec<Vec<f32>>,
    pub(super) batches: u64,
    pub(super) samples: u64,
}

/// A division of the samples into two parts.
pub struct Fold {
    /// Channel statistics of the samples from which parameters are derived.
    pub fitted: Channels,
    /// Channel statistics of the other samples, on which they are tested.
    pub held_out: Channels,
}

impl ValueStatistics {
    /// Rescales the statistics as if each channel had been multiplied by its factor. Drops the best ranges
    /// of single samples, which do not follow from those of the original values.
    pub fn multiply(&mut self, factors: &[f64]) {
        self.drop_sample_ranges();
        if factors.iter().all(|factor| *factor == 1.0) {
            return;
        }
        let before = self.range();
        // That of the rescaled values is derived from the histograms of channels.
        self.histogram = None;
        self.groups.iter_mut().for_each(|group| group.multiply(factors));
        self.running_range.scale(before, self.range());
        for row in &mut self.rows {
            row.iter_mut().zip(factors).for_each(|(x, factor)| *x = (f64::from(*x) * factor) as f32);
        }
    }

    pub(super) fn new(width: usize, request: &Request) -> ValueStatistics {
        let groups = vec![Channels::new(width, request.histograms); request.groups()];
        let sample_ranges = request.weights.clone().map(|weights| SampleRanges { weights, sums: (0.0, 0.0), count: 0 });
        ValueStatistics {
            histogram: request.joint.then(ActivationHistogram::default),
            running_range: RunningRange::default(),
            groups,
            sample_ranges,
            rows: Vec::new(),
            batches: 0,
            samples: 0,
        }
    }

    /// Statistics of a parameter, which has the same value for every sample. Returns an error if it is
    /// not finite.
    pub fn from_parameter(name: &str, values: &[f32], shape: &[usize], request: &Request) -> Result<ValueStatistics> {
        let mut statistics = ValueStatistics::new(request.axis.channels(shape), request);
        statistics.add(name, (values, false), shape, request.axis, &[values.len() / request.axis.channels(shape).max(1)])?;
        Ok(statistics)
    }

    /// Mean number of tokens or pixels of a sample.
    pub fn rows_per_sample(&self) -> u64 {
        self.groups.iter().map(Channels::count).sum::<u64>() / self.samples.max(1)
    }

    /// The minimum and maximum of all values and zero.
    pub fn range(&self) -> (f32, f32) {
        let ranges = self.groups.iter().map(Channels::range);
        ranges.fold((0.0, 0.0), |(low, high), range| (low.min(range.0), high.max(range.1)))
    }

    /// The histogram of all channels, or the sum of their histograms. Returns `None` if none was requested.
    pub(super) fn histogram(&self) -> Option<Cow<'_, ActivationHistogram>> {
        let sum = || Some(self.channels()).filter(Channels::has_histograms).map(|channels| Cow::Owned(channels.histogram()));
        self.histogram.as_ref().map(Cow::Borrowed).or_else(sum)
    }

    /// Drops the best ranges of single samples.
    pub fn drop_sample_ranges(&mut self) {
        self.sample_ranges = None;
    }

    /// Whether the best range of each sample was computed with these weights of the channels' errors.
    pub fn has_sample_ranges(&self, weights: &[f64]) -> bool {
        self.sample_ranges.as_ref().is_some_and(|ranges| *ranges.weights == *weights)
    }

    /// Channel statistics over all samples.
    pub fn channels(&self) -> Channels {
        merged(&self.groups)
    }

    /// Channel statistics of the groups that have samples and histograms.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Channels> {
        self.groups.iter().filter(|group| group.has_histograms() && group.count() > 0)
    }

    /// The even and the odd samples, each held out once. Returns `None` if a half is empty or has no
    /// histograms.
    pub(super) fn halves(&self) -> Option<[Fold; 2]> {
        let [even, odd] = [0, 1].map(|first| merged(self.groups.iter().skip(first).step_by(2)));
        let is_usable = |half: &Channels| half.has_histograms() && half.count() > 0;
        (is_usable(&even) && is_usable(&odd)).then(|| [Fold { fitted: even.clone(), held_out: odd.clone() }, Fold { fitted: odd, held_out: even }])
    }

    /// Statistics of a part of the samples that has these channels.
    pub(super) fn part(&self, channels: Channels) -> ValueStatistics {
        let mut running_range = self.running_range;
        running_range.scale(self.range(), channels.range());
        let (batches, samples) = (self.batches, self.samples);
        ValueStatistics { histogram: None, running_range, groups: vec![channels], sample_ranges: None, rows: Vec::new(), batches, samples }
    }

    /// Splits the samples for cross-validation: each group is held out once. Empty if only one group has
    /// samples, or without histograms.
    pub fn folds(&self) -> Vec<Fold> {
        let groups: Vec<&Channels> = self.groups().collect();
        let fold = |held_out: usize| {
            let rest = groups.iter().enumerate().filter(|(number, _)| *number != held_out).map(|(_, group)| *group);
            Fold { fitted: merged(rest), held_out: groups[held_out].clone() }
        };
        if groups.len() < 2 { Vec::new() } else { (0..groups.len()).map(fold).collect() }
    }

    /// Adds the values of a batch. `sizes` holds the number of rows of each sample, which is constant for
    /// images. `by_channel`: images are stored in the order of channels, images and pixels.
    pub(super) fn add(&mut self, name: &str, (values, by_channel): (&[f32], bool), shape: &[usize], axis: Axis, sizes: &[usize]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let width = self.groups[0].channels().max(1);
        let plane = shape.iter().skip(2).product::<usize>().max(1);
        let images = Images::new(values, plane, width, by_channel);
        let (low, high, finite) = match axis {
            Axis::Last => {
                let range = extremes(values);
                self.histogram.iter_mut().for_each(|histogram| histogram.add_parallel(values, range.0, range.1));
                let mut rest = values;
                for (index, size) in sizes.iter().enumerate() {
                    let (sample, next) = rest.split_at(size * width);
                    let group = self.group(index);
                    self.groups[group].add_rows(sample);
                    rest = next;
                }
                range
            }
            Axis::Second => {
                let mut range = EMPTY_RANGE;
                for (index, sample) in images.divided(sizes.len()).enumerate() {
                    let group = self.group(index);
                    let add = |channels: &mut Channels| Ok(add_images(channels, sample, self.histogram.as_mut()));
                    range = union(range, add_sample(&mut self.groups[group], self.sample_ranges.as_mut(), add)?);
                }
                range
            }
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
            Axis::Second => (0..width).map(|channel| images.plane(0, channel)[at]).collect(),
        }));
        self.batches += 1;
        Ok(())
    }

    /// Like [`add`](ValueStatistics::add), for values on a device with the shape `[rows, channels]`. The
    /// pixels of an image are consecutive rows.
    pub(super) fn add_on_device(&mut self, name: &str, rows: &Tensor, axis: Axis, sizes: &[usize]) -> Result<()> {
        let failed = |e| Error::run(format!("graph value `{name}`"), e, "");
        let count = rows.dim(0).map_err(failed)?;
        if count == 0 {
            return Ok(());
        }
        let samples = (0..).zip(sizes).flat_map(|(index, size)| std::iter::repeat_n(index, *size)).collect::<Vec<usize>>();
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        // Groups, each with samples to add together: all of the group, unless single samples have ranges.
        let parts: Vec<(usize, Vec<usize>)> = if self.sample_ranges.is_some() {
            (0..sizes.len()).map(|sample| (self.group(sample), vec![sample])).collect()
        } else {
            let members = |group| (0..sizes.len()).filter(|sample| self.group(*sample) == group).collect();
            (0..self.groups.len()).map(|group| (group, members(group))).collect()
        };
        for (group, members) in parts {
            let indices: Vec<u32> = (0..count as u32).zip(&samples).filter(|(_, sample)| members.contains(sample)).map(|(row, _)| row).collect();
            if indices.is_empty() {
                continue;
            }
            let part_rows = device_stats::select_rows(rows, indices).map_err(failed)?;
            add_sample(&mut self.groups[group], self.sample_ranges.as_mut(), |channels| {
                for chunk in device_stats::row_chunks(&part_rows).map_err(failed)? {
                    let columns = ColumnStats::from_rows(&chunk).map_err(failed)?;
                    if let Some(value) = columns.non_finite() {
                        return Err(not_finite(name, value));
                    }
                    let (min, max) = columns.extremes();
                    (low, high) = (low.min(min), high.max(max));
                    let added = self.histogram.iter_mut().try_for_each(|histogram| histogram.add_on_device(&chunk, min, max));
                    added.and_then(|()| channels.add_on_device(&chunk, &columns)).map_err(failed)?;
                }
                Ok(())
            })?;
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

/// Adds values to the statistics of their group. If ranges of single samples were requested, the values
/// must be those of one sample.
fn add_sample<R>(group: &mut Channels, ranges: Option<&mut SampleRanges>, add: impl FnOnce(&mut Channels) -> Result<R>) -> Result<R> {
    let Some(ranges) = ranges else { return add(group) };
    let mut sample = Channels::new(group.channels(), group.has_histograms());
    let added = add(&mut sample)?;
    rayon::join(|| ranges.add(&sample), || group.merge(&sample));
    Ok(added)
}

/// Merges channel statistics of several groups.
fn merged<'c>(groups: impl IntoIterator<Item = &'c Channels>) -> Channels {
    let mut groups = groups.into_iter();
    let mut all = groups.next().cloned().unwrap_or_else(|| Channels::new(0, false));
    groups.for_each(|group| all.merge(group));
    all
}

pub(super) fn not_finite(name: &str, value: impl std::fmt::Display) -> Error {
    Error::run(
        format!("graph value `{name}`"),
        format!("is {value} for a calibration sample"),
        "the model overflows on this sample, or a weight is not finite: run `compress eval` on the same data for details",
    )
}
