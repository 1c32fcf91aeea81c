//! Activation statistics per channel.

use candle_core::Tensor;
use rayon::prelude::*;

use super::device_stats::{ColumnStats, histogram_counts};
use super::histogram::{ActivationHistogram, add_narrower, exponent_of};
use crate::kernel::columns::STRIPE;
use crate::kernel::linear_histogram::{Counter, add_row, count, extremes, for_each_occupied, number_row, sums};

/// Bins of a channel, half of them below zero.
const BINS: usize = 256;
const HALF: i32 = BINS as i32 / 2;

/// Minimum number of values per parallel job.
const MIN_JOB_VALUES: usize = 1 << 16;

/// Extremes, sums, sums of squares and, optionally, a small histogram of each channel.
#[derive(Debug, Clone, PartialEq)]
pub struct Channels {
    low: Vec<f32>,
    high: Vec<f32>,
    sums: Vec<f64>,
    squares: Vec<f64>,
    count: u64,
    bins: Option<Bins>,
}

#[derive(Debug, Clone, PartialEq)]
struct Bins {
    exponents: Vec<i32>,
    /// Factor by which each channel was multiplied after counting.
    factors: Vec<f64>,
    /// `BINS` saturating counts per channel.
    counts: Vec<u32>,
}

impl Bins {
    fn grow(&mut self, channel: usize, exponent: i32) {
        grow(&mut self.exponents[channel], &mut self.counts[channel * BINS..(channel + 1) * BINS], exponent);
    }
}

/// Widens the range of a channel's bins to `-2ᵉ..2ᵉ`, if it is narrower.
fn grow(current: &mut i32, counts: &mut [u32], exponent: i32) {
    let doublings = exponent - *current;
    if doublings <= 0 {
        return;
    }
    let mut wider = [0u32; BINS];
    add_narrower(&mut wider, counts, doublings);
    counts.copy_from_slice(&wider);
    *current = exponent;
}

/// The inverse of the bin width.
fn inverse(exponent: i32) -> f32 {
    (f64::from(HALF) / 2f64.powi(exponent)) as f32
}

/// Mutable view of the statistics of one channel.
struct ChannelMut<'c> {
    low: &'c mut f32,
    high: &'c mut f32,
    sum: &'c mut f64,
    square: &'c mut f64,
    bins: Option<(&'c mut i32, &'c mut [u32; BINS])>,
}

impl ChannelMut<'_> {
    /// Adds values to this channel and to a histogram of all channels. Returns their minimum and
    /// maximum, and whether all are finite.
    fn add(&mut self, values: &[f32], all: Option<&mut ActivationHistogram>) -> (f32, f32, bool) {
        let (found, (sum, square)) = (extremes(values), sums(values));
        (*self.low, *self.high) = (self.low.min(found.0), self.high.max(found.1));
        (*self.sum, *self.square) = (*self.sum + sum, *self.square + square);
        all.into_iter().for_each(|all| all.add_within(values, found.0, found.1));
        if let Some((exponent, counts)) = self.bins.as_mut().filter(|_| *self.low <= *self.high) {
            grow(exponent, *counts, exponent_of(self.low.abs().max(self.high.abs())));
            count(values, inverse(**exponent), counts);
        }
        found
    }
}

/// Images, stored as one plane of `size` values per channel.
#[derive(Clone, Copy)]
pub(super) struct Images<'v> {
    values: &'v [f32],
    size: usize,
    count: usize,
    /// Distance of the planes of adjacent images, and of adjacent channels of an image.
    strides: [usize; 2],
}

impl<'v> Images<'v> {
    /// Images with `channels` planes each. `by_channel`: the planes of a channel are adjacent, instead of
    /// those of an image.
    pub fn new(values: &'v [f32], size: usize, channels: usize, by_channel: bool) -> Images<'v> {
        let count = values.len() / (size * channels).max(1);
        Images { values, size, count, strides: if by_channel { [size, count * size] } else { [channels * size, size] } }
    }

    pub fn plane(&self, image: usize, channel: usize) -> &'v [f32] {
        &self.values[image * self.strides[0] + channel * self.strides[1]..][..self.size]
    }

    /// `parts` groups of consecutive images.
    pub fn divided(self, parts: usize) -> impl Iterator<Item = Images<'v>> {
        let count = self.count / parts.max(1);
        (0..parts).map(move |part| Images { values: &self.values[part * count * self.strides[0]..], count, ..self })
    }
}

/// Adds images to the statistics of their channels and to a histogram of all channels. Returns the minimum
/// and maximum, and whether all values are finite.
pub(super) fn add_images(channels: &mut Channels, images: Images, all: Option<&mut ActivationHistogram>) -> (f32, f32, bool) {
    let values = images.count * images.size;
    channels.count += values as u64;
    // One thread processes a channel of all images, so that sums do not depend on the number of threads.
    // All statistics of a plane are computed while it is in the cache.
    let job = MIN_JOB_VALUES.div_ceil(values.max(1));
    let add = |(mut histogram, mut range): (Option<ActivationHistogram>, _), (index, mut channel): (usize, ChannelMut)| {
        for image in 0..images.count {
            range = union(range, channel.add(images.plane(image, index), histogram.as_mut()));
        }
        (histogram, range)
    };
    let empty = all.as_ref().map(|all| all.empty_like());
    let jobs = channels.channels_mut().into_par_iter().enumerate().with_min_len(job).fold(|| (empty.clone(), EMPTY_RANGE), add);
    let reduced = jobs.reduce_with(|(mut histogram, a), (other, b)| {
        histogram.iter_mut().zip(&other).for_each(|(histogram, other)| histogram.merge(other));
        (histogram, union(a, b))
    });
    let Some((histogram, range)) = reduced else { return EMPTY_RANGE };
    all.into_iter().zip(&histogram).for_each(|(all, histogram)| all.merge(histogram));
    range
}

/// Minimum, maximum and finiteness of an empty slice.
pub(super) const EMPTY_RANGE: (f32, f32, bool) = (f32::INFINITY, f32::NEG_INFINITY, true);

/// The union of two ranges, and whether the values of both are finite.
pub(super) fn union(a: (f32, f32, bool), b: (f32, f32, bool)) -> (f32, f32, bool) {
    (a.0.min(b.0), a.1.max(b.1), a.2 && b.2)
}

impl Channels {
    /// Empty statistics of `count` channels. Histograms take 1 KiB per channel.
    pub fn new(count: usize, histograms: bool) -> Channels {
        Channels {
            low: vec![f32::INFINITY; count],
            high: vec![f32::NEG_INFINITY; count],
            sums: vec![0.0; count],
            squares: vec![0.0; count],
            count: 0,
            bins: histograms.then(|| Bins { exponents: vec![exponent_of(0.0); count], factors: vec![1.0; count], counts: vec![0; count * BINS] }),
        }
    }

    /// Adds values of shape `[rows, channels]`.
    pub fn add_rows(&mut self, values: &[f32]) {
        let width = self.low.len().max(1);
        // One thread processes a channel of all rows, so that sums do not depend on the number of threads.
        let extremes = self.low.par_chunks_mut(STRIPE).zip(self.high.par_chunks_mut(STRIPE));
        let sums = self.sums.par_chunks_mut(STRIPE).zip(self.squares.par_chunks_mut(STRIPE));
        extremes.zip(sums).enumerate().for_each(|(index, ((low, high), (sums, squares)))| {
            values.chunks_exact(width).for_each(|row| add_row(&row[index * STRIPE..], low, high, sums, squares));
        });
        if let Some(bins) = &mut self.bins {
            let extremes = self.low.par_chunks(STRIPE).zip(self.high.par_chunks(STRIPE));
            let counts = bins.exponents.par_chunks_mut(STRIPE).zip(bins.counts.par_chunks_mut(STRIPE * BINS));
            extremes.zip(counts).enumerate().for_each(|(index, ((low, high), (exponents, counts)))| {
                let channels = counts.chunks_exact_mut(BINS).zip(exponents.iter_mut());
                for ((counts, exponent), (low, high)) in channels.zip(low.iter().zip(high)) {
                    grow(exponent, counts, exponent_of(low.abs().max(high.abs())));
                }
                let inverses: Vec<f32> = exponents.iter().map(|exponent| inverse(*exponent)).collect();
                let mut numbers = [0; STRIPE];
                for row in values.chunks_exact(width) {
                    number_row(&row[index * STRIPE..], &inverses, HALF, &mut numbers);
                    for (bin, counts) in numbers.iter().zip(counts.as_chunks_mut::<BINS>().0) {
                        let count = &mut counts[*bin as usize % BINS];
                        *count = count.saturating_add(1);
                    }
                }
            });
        }
        self.count += (values.len() / width) as u64;
    }

    /// Mutable views of all channels.
    fn channels_mut(&mut self) -> Vec<ChannelMut<'_>> {
        let mut bins = self.bins.as_mut().map(|bins| bins.exponents.iter_mut().zip(bins.counts.as_chunks_mut().0));
        let extremes = self.low.iter_mut().zip(&mut self.high);
        let sums = self.sums.iter_mut().zip(&mut self.squares);
        let view = |((low, high), (sum, square))| ChannelMut { low, high, sum, square, bins: bins.as_mut().and_then(Iterator::next) };
        extremes.zip(sums).map(view).collect()
    }

    /// Adds rows on a device, like [`add_rows`](Channels::add_rows), with their precomputed extremes and
    /// sums.
    pub(super) fn add_on_device(&mut self, rows: &Tensor, columns: &ColumnStats) -> candle_core::Result<()> {
        for at in 0..self.low.len() {
            (self.low[at], self.high[at]) = (self.low[at].min(columns.low[at]), self.high[at].max(columns.high[at]));
            self.sums[at] += columns.sums[at];
            self.squares[at] += columns.squares[at];
        }
        self.count += rows.dim(0)? as u64;
        let Some(bins) = &mut self.bins else { return Ok(()) };
        for (at, (low, high)) in self.low.iter().zip(&self.high).enumerate() {
            bins.grow(at, exponent_of(low.abs().max(high.abs())));
        }
        let inverses: Vec<f32> = bins.exponents.iter().map(|exponent| inverse(*exponent)).collect();
        bins.counts.iter_mut().zip(histogram_counts(rows, &inverses, HALF, false)?).for_each(|(count, added)| count.increase(added));
        Ok(())
    }

    /// Adds statistics of other samples of the same channels.
    pub fn merge(&mut self, other: &Channels) {
        for channel in 0..self.low.len() {
            self.low[channel] = self.low[channel].min(other.low[channel]);
            self.high[channel] = self.high[channel].max(other.high[channel]);
            self.sums[channel] += other.sums[channel];
            self.squares[channel] += other.squares[channel];
            if let (Some(bins), Some(added)) = (&mut self.bins, &other.bins) {
                bins.grow(channel, added.exponents[channel]);
                let range = channel * BINS..(channel + 1) * BINS;
                add_narrower(&mut bins.counts[range.clone()], &added.counts[range], bins.exponents[channel] - added.exponents[channel]);
            }
        }
        self.count += other.count;
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.low.len()
    }

    /// Number of values per channel.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Calls `visit(center, count)` for each bin of a channel that is not empty. The centres are
    /// multiplied by `factor`.
    pub fn for_each_bin(&self, channel: usize, factor: f64, mut visit: impl FnMut(f64, f64)) {
        let Some(bins) = &self.bins else { return };
        let width = bins.factors[channel] * factor * 2f64.powi(bins.exponents[channel]) / f64::from(HALF);
        for_each_occupied(&bins.counts[channel * BINS..(channel + 1) * BINS], |bin, count| {
            visit((f64::from(bin as i32 - HALF) + 0.5) * width, f64::from(count))
        });
    }

    /// Mean of each channel.
    pub fn means(&self) -> Vec<f64> {
        self.sums.iter().map(|sum| sum / self.count.max(1) as f64).collect()
    }

    /// Mean square of each channel.
    pub fn mean_squares(&self) -> Vec<f64> {
        self.squares.iter().map(|sum| sum / self.count.max(1) as f64).collect()
    }

    /// The minimum and maximum of all channels and zero.
    pub fn range(&self) -> (f32, f32) {
        (self.low.iter().fold(0.0, |low, x| x.min(low)), self.high.iter().fold(0.0, |high, x| x.max(high)))
    }

    /// Largest absolute value of each channel.
    pub fn largest(&self) -> Vec<f32> {
        self.low.iter().zip(&self.high).map(|(low, high)| if *low > *high { 0.0 } else { low.abs().max(high.abs()) }).collect()
    }

    /// Rescales the statistics as if each channel had been multiplied by its factor.
    pub fn multiply(&mut self, factors: &[f64]) {
        for (channel, by) in factors.iter().enumerate() {
            self.low[channel] = (f64::from(self.low[channel]) * by) as f32;
            self.high[channel] = (f64::from(self.high[channel]) * by) as f32;
            self.sums[channel] *= by;
            self.squares[channel] *= by * by;
            if let Some(bins) = &mut self.bins {
                bins.factors[channel] *= by;
            }
        }
    }

    /// Whether each channel has a histogram.
    pub fn has_histograms(&self) -> bool {
        self.bins.is_some()
    }

    /// An empty histogram whose range covers all channels, each multiplied by its factor.
    pub(super) fn empty_histogram(&self, factors: impl Fn(usize) -> f64) -> ActivationHistogram {
        let mut histogram = ActivationHistogram::default();
        for (channel, (low, high)) in self.low.iter().zip(&self.high).enumerate().filter(|(_, (low, high))| low <= high) {
            let [low, high] = [low, high].map(|end| (f64::from(*end) * factors(channel)) as f32);
            histogram.extend_range(low, high);
        }
        histogram
    }

    /// One histogram of all channels. Each value counts at the centre of its channel's bin.
    pub fn histogram(&self) -> ActivationHistogram {
        let mut all = self.empty_histogram(|_| 1.0);
        (0..self.low.len()).for_each(|channel| self.for_each_bin(channel, 1.0, |center, count| all.add_repeated(center, count as u64)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_planes_give_the_same_channel_statistics() {
        let mut rows = Channels::new(2, true);
        rows.add_rows(&[1.0, -8.0, 3.0, 0.5]);
        assert_eq!((rows.means(), rows.mean_squares(), rows.largest()), (vec![2.0, -3.75], vec![5.0, 32.125], vec![3.0, 8.0]));
        let (mut planes, mut all) = (Channels::new(2, false), ActivationHistogram::default());
        assert_eq!(add_images(&mut planes, Images::new(&[1.0, 3.0, -8.0, 0.5], 2, 2, false), Some(&mut all)), (-8.0, 3.0, true));
        assert_eq!((all.total(), planes.count()), (4, 2));
        assert_eq!((planes.means(), planes.largest()), (rows.means(), rows.largest()));
    }

    #[test]
    fn bins_saturate_and_counts_of_values_do_not() {
        let mut channels = Channels::new(1, true);
        channels.add_rows(&[0.25]);
        (0..33).for_each(|_| channels.merge(&channels.clone()));
        channels.add_rows(&[0.25, -0.75]);
        assert_eq!((channels.count(), channels.histogram().total()), ((1 << 33) + 2, u64::from(u32::MAX) + 1));
    }

    #[test]
    fn channels_do_not_depend_on_threads_or_neighbours() {
        let width = 150;
        let values: Vec<f32> = (0..width * 40).map(|i| ((i * 7919) % 1009) as f32 / 100.0 - 5.0).collect();
        let add = |threads| {
            let mut channels = Channels::new(width, true);
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap()
                .install(|| values.chunks(width * 8).for_each(|batch| channels.add_rows(batch)));
            channels
        };
        let all = add(1);
        assert_eq!(all, add(3));
        for channel in [0, 63, 64, 149] {
            let mut one = Channels::new(1, true);
            one.add_rows(&values.iter().skip(channel).step_by(width).copied().collect::<Vec<_>>());
            let bins = |channels: &Channels, channel| {
                let mut bins = Vec::new();
                channels.for_each_bin(channel, 1.0, |center, count| bins.push((center, count)));
                bins
            };
            assert_eq!((one.means()[0], one.largest()[0], bins(&one, 0)), (all.means()[channel], all.largest()[channel], bins(&all, channel)));
        }
    }

    #[test]
    fn images_do_not_depend_on_threads() {
        let (width, size) = (5, 40 * 500);
        let values: Vec<f32> = (0..3 * width * size).map(|i| (((i * 7919) % 1009) as f32 / 100.0 - 5.0) * (i / size + 1) as f32).collect();
        let add = |threads| {
            let (mut channels, mut all) = (Channels::new(width, true), ActivationHistogram::default());
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let range = pool.install(|| add_images(&mut channels, Images::new(&values, size, width, false), Some(&mut all)));
            (range, channels, all)
        };
        let (range, channels, all) = add(1);
        assert_eq!((range, channels.clone(), all.clone()), add(3));
        assert_eq!((range.2, all.total(), channels.count()), (true, values.len() as u64, 3 * size as u64));
        let mut singly = ActivationHistogram::default();
        values.chunks(7).for_each(|few| singly.add(few));
        assert_eq!(all, singly);
    }

    #[test]
    fn merged_halves_equal_the_statistics_of_all_rows() {
        let values: Vec<f32> = (0..60).map(|i| ((i * 37) % 61) as f32 / 7.0 - 4.0 * (i % 3) as f32).collect();
        let [mut full, mut first, mut second] = [(); 3].map(|()| Channels::new(3, true));
        full.add_rows(&values);
        first.add_rows(&values[..21]);
        second.add_rows(&values[21..]);
        first.merge(&second);
        assert_eq!((first.histogram(), first.largest(), first.count()), (full.histogram(), full.largest(), full.count()));
    }

    #[test]
    fn a_multiplied_channel_is_the_histogram_of_multiplied_values() {
        let values = [0.3f32, -0.7, 0.9, 0.11, -0.02, 5.0];
        let mut channels = Channels::new(1, true);
        values.chunks(2).for_each(|batch| channels.add_rows(batch));
        channels.multiply(&[0.25]);
        let all = channels.histogram();
        assert_eq!((all.range(), all.total()), ((-0.175, 1.25), 6));
        // Each value is counted within one bin width of the channel's histogram.
        let bin = 0.25 * 8.0 / 128.0;
        for value in values {
            let at = f64::from(value / 4.0);
            let near = (0..super::super::BINS).any(|b| all.counts()[b] > 0 && (all.bin_center(b) - at).abs() <= bin);
            assert!(near, "{value}");
        }
    }
}
