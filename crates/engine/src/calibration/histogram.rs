//! Histogram of activations with equal bins centred on zero. Its range doubles when a value lies outside
//! of it.

use candle_core::Tensor;
use rayon::prelude::*;

use super::device_stats;
use crate::kernel::linear_histogram::{Counter, count, extremes, for_each_occupied};

/// Number of bins, half of them below zero.
pub const BINS: usize = 8192;
const HALF: i32 = BINS as i32 / 2;

/// Minimum number of values per parallel job.
const MIN_JOB_VALUES: usize = 1 << 17;

/// Exponent of the narrowest range, -2⁻¹⁰⁰ to 2⁻¹⁰⁰.
const MIN_EXPONENT: i32 = -100;

/// Histogram over `-2ᵉ..2ᵉ`, where `e` is the smallest exponent that covers all values added.
///
/// Each bin of a wider range is the union of bins of a narrower one, so the counts do not depend on the
/// order of the values or on how they are batched.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationHistogram {
    exponent: i32,
    counts: Vec<u64>,
    low: f32,
    high: f32,
    total: u64,
}

impl Default for ActivationHistogram {
    fn default() -> Self {
        Self { exponent: MIN_EXPONENT, counts: vec![0; BINS], low: f32::INFINITY, high: f32::NEG_INFINITY, total: 0 }
    }
}

/// The smallest `e` with `largest < 2ᵉ`.
pub(super) fn exponent_of(largest: f32) -> i32 {
    if largest < f32::MIN_POSITIVE { MIN_EXPONENT } else { ((largest.to_bits() >> 23) as i32 - 126).max(MIN_EXPONENT) }
}

/// Adds the counts of a histogram to one with equally many bins and a range that is wider by `doublings`
/// powers of two.
pub(super) fn add_narrower<C: Counter>(counts: &mut [C], narrower: &[C], doublings: i32) {
    if doublings == 0 {
        return counts.iter_mut().zip(narrower).for_each(|(count, added)| *count = count.plus(*added));
    }
    let (half, shift) = (counts.len() as i32 / 2, doublings.min(20));
    for_each_occupied(narrower, |bin, count| counts[(((bin as i32 - half) >> shift) + half) as usize].increase(count.into()));
}

impl ActivationHistogram {
    /// Counts finite values. The caller rejects NaN and infinity.
    pub fn add(&mut self, values: &[f32]) {
        let (low, high, _) = extremes(values);
        self.add_parallel(values, low, high);
    }

    /// Counts values with the minimum `low` and the maximum `high`.
    pub(super) fn add_within(&mut self, values: &[f32], low: f32, high: f32) {
        if values.is_empty() {
            return;
        }
        self.extend_range(low, high);
        self.total += values.len() as u64;
        let inverse = 1.0 / self.width() as f32;
        self.counts.as_chunks_mut().0.iter_mut().for_each(|counts: &mut [u64; BINS]| count(values, inverse, counts));
    }

    /// Like [`add_within`](Self::add_within), with all threads.
    pub(super) fn add_parallel(&mut self, values: &[f32], low: f32, high: f32) {
        let add = |mut histogram: ActivationHistogram, values: &[f32]| {
            histogram.add_within(values, low, high);
            histogram
        };
        let parts = values.par_chunks(MIN_JOB_VALUES).fold(|| self.empty_like(), add);
        let sum = parts.reduce_with(|mut all, part| {
            all.merge(&part);
            all
        });
        sum.iter().for_each(|sum| self.merge(sum));
    }

    /// Counts values `[rows, columns]` on a device, with the minimum `low` and the maximum `high`.
    pub(super) fn add_on_device(&mut self, values: &Tensor, low: f32, high: f32) -> candle_core::Result<()> {
        self.extend_range(low, high);
        self.total += values.elem_count() as u64;
        let inverses = vec![1.0 / self.width() as f32; values.dim(1)?];
        let added = device_stats::histogram_counts(values, &inverses, HALF, true)?;
        self.counts.iter_mut().zip(added).for_each(|(count, added)| *count += added);
        Ok(())
    }

    fn grow(&mut self, exponent: i32) {
        let doublings = exponent - self.exponent;
        if doublings <= 0 {
            return;
        }
        if self.total > 0 {
            let counts = std::mem::replace(&mut self.counts, vec![0; BINS]);
            add_narrower(&mut self.counts, &counts, doublings);
        }
        self.exponent = exponent;
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &ActivationHistogram) {
        self.grow(other.exponent);
        add_narrower(&mut self.counts, &other.counts, self.exponent - other.exponent);
        (self.low, self.high) = (self.low.min(other.low), self.high.max(other.high));
        self.total += other.total;
    }

    /// An empty histogram over the same range.
    pub(super) fn empty_like(&self) -> ActivationHistogram {
        ActivationHistogram { exponent: self.exponent, ..ActivationHistogram::default() }
    }

    /// Widens the range to include `low` and `high`.
    pub(super) fn extend_range(&mut self, low: f32, high: f32) {
        self.grow(exponent_of(low.abs().max(high.abs())));
        (self.low, self.high) = (self.low.min(low), self.high.max(high));
    }

    /// Counts a value `count` times.
    pub(super) fn add_repeated(&mut self, value: f64, count: u64) {
        let bin = (value / self.width()).floor() + f64::from(HALF);
        self.counts[bin.clamp(0.0, (BINS - 1) as f64) as usize] += count;
        self.total += count;
    }

    /// Width of a bin.
    pub fn width(&self) -> f64 {
        2f64.powi(self.exponent) / f64::from(HALF)
    }

    /// Counts of all bins. The bin `BINS / 2` starts at zero.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Number of values counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The minimum and maximum of all values and zero. Both are zero for an empty histogram.
    pub fn range(&self) -> (f32, f32) {
        (self.low.min(0.0), self.high.max(0.0))
    }

    /// The centre of a bin.
    pub fn bin_center(&self, bin: usize) -> f64 {
        (bin as f64 - f64::from(HALF) + 0.5) * self.width()
    }

    /// Index of the bin that starts at zero.
    pub fn zero_bin() -> usize {
        HALF as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counted(batches: &[Vec<f32>]) -> ActivationHistogram {
        let mut histogram = ActivationHistogram::default();
        batches.iter().for_each(|batch| histogram.add(batch));
        histogram
    }

    proptest! {
        #[test]
        fn order_and_batches_do_not_matter(mut values in prop::collection::vec(prop_oneof![-1e-3f32..1e-3, -2f32..2.0, -1e4f32..1e4, Just(0.0), Just(2.0)], 1..200), cut in 0usize..200) {
            let full = counted(&[values.clone()]);
            let cut = cut.min(values.len());
            prop_assert_eq!(&counted(&[values[..cut].to_vec(), values[cut..].to_vec()]), &full);
            values.reverse();
            let singly: Vec<Vec<f32>> = values.iter().map(|v| vec![*v]).collect();
            prop_assert_eq!(&counted(&singly), &full);
            let mut merged = counted(&[values[..cut].to_vec()]);
            merged.merge(&counted(&[values[cut..].to_vec()]));
            prop_assert_eq!(&merged, &full);
            prop_assert_eq!(full.counts().iter().sum::<u64>(), values.len() as u64);
        }
    }

    #[test]
    fn values_lie_in_their_bins() {
        let values = [-3.0f32, -0.5, 0.0, 1e-6, 0.75, 3.99];
        let histogram = counted(&[values.to_vec()]);
        assert_eq!((histogram.width(), histogram.range()), (4.0 / 4096.0, (-3.0, 3.99)));
        for value in values {
            let bin = (f64::from(value) / histogram.width()).floor() as i64 + 4096;
            assert!(histogram.counts()[bin as usize] > 0, "{value}");
        }
        assert_eq!(ActivationHistogram::default().range(), (0.0, 0.0));
        assert_eq!(counted(&[vec![3.0; 5]]).range(), (0.0, 3.0));
    }
}
