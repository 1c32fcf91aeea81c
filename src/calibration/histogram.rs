//! Counts of values in equal bins around zero, over a range that grows in place.

use candle_core::Tensor;
use rayon::prelude::*;

use super::there;
use crate::kernel::bins::{Counter, count, extremes};

/// Number of bins, half of them below zero.
pub const BINS: usize = 8192;
const HALF: i32 = BINS as i32 / 2;

/// Values that are counted by one job at least.
const JOB: usize = 1 << 17;

/// The smallest range is from -2⁻¹⁰⁰ to 2⁻¹⁰⁰.
const LEAST: i32 = -100;

/// A histogram over `-2ᵉ..2ᵉ`, where `e` is the least that holds every value so far.
///
/// Bins of a wider range are unions of those of a narrower one, so that counts do not depend on the order of values or on how they
/// came in batches.
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
        Self { exponent: LEAST, counts: vec![0; BINS], low: f32::INFINITY, high: f32::NEG_INFINITY, total: 0 }
    }
}

/// The least `e` with every magnitude below `2ᵉ`.
pub(super) fn exponent_of(largest: f32) -> i32 {
    if largest < f32::MIN_POSITIVE { LEAST } else { ((largest.to_bits() >> 23) as i32 - 126).max(LEAST) }
}

/// Adds counts of bins around zero to those of as many bins over a range that has been doubled so many times more.
pub(super) fn add_narrower<C: Counter>(counts: &mut [C], narrower: &[C], doublings: i32) {
    let (half, shift) = (counts.len() as i32 / 2, doublings.min(20));
    for (bin, count) in narrower.iter().enumerate() {
        counts[(((bin as i32 - half) >> shift) + half) as usize].increase((*count).into());
    }
}

impl ActivationHistogram {
    /// Counts finite values; others are for the caller to refuse.
    pub fn add(&mut self, values: &[f32]) {
        let (low, high, _) = extremes(values);
        self.add_in_parts(values, low, high);
    }

    /// Counts values of which the smallest and the largest are known.
    pub(super) fn add_within(&mut self, values: &[f32], low: f32, high: f32) {
        if values.is_empty() {
            return;
        }
        self.make_room(low, high);
        self.total += values.len() as u64;
        let inverse = 1.0 / self.width() as f32;
        self.counts.as_chunks_mut().0.iter_mut().for_each(|counts: &mut [u64; BINS]| count(values, inverse, counts));
    }

    /// The same, by all threads.
    pub(super) fn add_in_parts(&mut self, values: &[f32], low: f32, high: f32) {
        let add = |mut so_far: ActivationHistogram, values: &[f32]| {
            so_far.add_within(values, low, high);
            so_far
        };
        let parts = values.par_chunks(JOB).fold(|| self.emptied(), add);
        let found = parts.reduce_with(|mut all, part| {
            all.merge(&part);
            all
        });
        found.iter().for_each(|found| self.merge(found));
    }

    /// Counts values `[rows, columns]` of a device, of which the smallest and the largest are known.
    pub(super) fn add_there(&mut self, values: &Tensor, low: f32, high: f32) -> candle_core::Result<()> {
        self.make_room(low, high);
        self.total += values.elem_count() as u64;
        let inverses = vec![1.0 / self.width() as f32; values.dim(1)?];
        let found = there::counts(values, &inverses, HALF, true)?;
        self.counts.iter_mut().zip(found).for_each(|(count, found)| *count += found);
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

    /// Adds what another has counted.
    pub fn merge(&mut self, other: &ActivationHistogram) {
        self.grow(other.exponent);
        add_narrower(&mut self.counts, &other.counts, self.exponent - other.exponent);
        (self.low, self.high) = (self.low.min(other.low), self.high.max(other.high));
        self.total += other.total;
    }

    /// Nothing, over the same range.
    pub(super) fn emptied(&self) -> ActivationHistogram {
        ActivationHistogram { exponent: self.exponent, ..ActivationHistogram::default() }
    }

    /// Makes room for values between these.
    pub(super) fn make_room(&mut self, low: f32, high: f32) {
        self.grow(exponent_of(low.abs().max(high.abs())));
        (self.low, self.high) = (self.low.min(low), self.high.max(high));
    }

    /// Counts a value many times.
    pub(super) fn add_many(&mut self, value: f64, count: u64) {
        let bin = (value / self.width()).floor() + f64::from(HALF);
        self.counts[bin.clamp(0.0, (BINS - 1) as f64) as usize] += count;
        self.total += count;
    }

    /// Width of a bin.
    pub fn width(&self) -> f64 {
        2f64.powi(self.exponent) / f64::from(HALF)
    }

    /// Counts of all bins; the middle one begins at zero.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// How many values were counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The smallest and the largest value that there is room for, zero included; at first, zeros.
    pub fn range(&self) -> (f32, f32) {
        (self.low.min(0.0), self.high.max(0.0))
    }

    /// The middle of a bin.
    pub fn middle(&self, bin: usize) -> f64 {
        (bin as f64 - f64::from(HALF) + 0.5) * self.width()
    }

    /// The bin of zero and of what lies just above.
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
            let whole = counted(&[values.clone()]);
            let cut = cut.min(values.len());
            prop_assert_eq!(&counted(&[values[..cut].to_vec(), values[cut..].to_vec()]), &whole);
            values.reverse();
            let singly: Vec<Vec<f32>> = values.iter().map(|v| vec![*v]).collect();
            prop_assert_eq!(&counted(&singly), &whole);
            let mut merged = counted(&[values[..cut].to_vec()]);
            merged.merge(&counted(&[values[cut..].to_vec()]));
            prop_assert_eq!(&merged, &whole);
            prop_assert_eq!(whole.counts().iter().sum::<u64>(), values.len() as u64);
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
