//! Compares a weight with its input while it is written, and collects a coarse histogram of its values.

use std::ops::Range;

use super::convert::RUN;
use super::hash::{RunHasher, Subtree, merge};
use super::{Block, DType, RowsOf, View, Weight};
use crate::kernel::compare::{self, Difference};
use crate::kernel::exact::ExactSum;
use crate::kernel::{Float, scan, with_float};

/// Number of sampled values per histogram. Fixed, so that the cost does not depend on the size of the
/// weight.
const SAMPLE: usize = 16 * 1024;
/// Number of positions in a weight that are sampled.
const POSITIONS: usize = 64;
/// Number of histogram bins.
const BINS: usize = 64;
/// Range of the histogram in standard deviations to either side of the mean. Values beyond it are
/// counted in the outermost bins.
const SPREAD: f64 = 4.0;

/// Minimum number of elements per scale for comparing codes without decoding them first. Below, the
/// summation takes longer.
const LONG: usize = 512;

/// Histograms of a sample of a weight's values, before and after.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueHistogram {
    /// Lower edge of the first bin.
    pub low: f32,
    /// Upper edge of the last bin.
    pub high: f32,
    /// Counts of the input's values.
    pub before: Vec<u32>,
    /// Counts of the written values.
    pub after: Vec<u32>,
}

/// Measurements of a weight, taken while it was written.
#[derive(Debug, Clone, Default)]
pub struct WeightMeasurement {
    /// Difference to the input.
    pub difference: Difference,
    /// Whether any element changed.
    pub changed: bool,
    /// NaN and infinite values of the input.
    pub nonfinite: u64,
    /// Hash of the input values.
    pub input_hash: Option<blake3::Hash>,
    /// Size in the output in bytes.
    pub bytes: u64,
    /// Number of stored elements, if the weight is stored sparse.
    pub nonzeros: Option<u64>,
    /// Distribution of the values, if they changed.
    pub histogram: Option<ValueHistogram>,
    /// If only some rows were written: the state from which the measurements of all rows are combined.
    /// In this case, hash and histogram are not set.
    pub rows: Option<Box<RowRange>>,
}

impl ValueHistogram {
    /// Bins are centered on the mean of the values before. `None` if all values are equal.
    fn new(before: &[f32], after: &[f32]) -> Option<ValueHistogram> {
        let finite = || before.iter().filter(|v| v.is_finite()).map(|v| f64::from(*v));
        let (mut count, mut sum, mut squares, mut least, mut most) = (0.0, 0.0, 0.0, f64::INFINITY, f64::NEG_INFINITY);
        for value in finite() {
            (count, sum, squares) = (count + 1.0, sum + value, squares + value * value);
            (least, most) = (least.min(value), most.max(value));
        }
        let mean = sum / count;
        let spread = SPREAD * (squares / count - mean * mean).max(0.0).sqrt();
        let (low, high) = (least.max(mean - spread) as f32, most.min(mean + spread) as f32);
        let scale = BINS as f32 / (high - low);
        if !(low < high && scale.is_finite()) {
            return None;
        }
        let counts = |values: &[f32]| {
            let mut counts = vec![0u32; BINS];
            for value in values.iter().filter(|v| !v.is_nan()) {
                counts[(((value - low) * scale).max(0.0) as usize).min(BINS - 1)] += 1;
            }
            counts
        };
        Some(ValueHistogram { low, high, before: counts(before), after: counts(after) })
    }
}

/// Measures the blocks of a weight, in runs that fit into the L1 cache.
pub(super) struct Measure {
    before: Vec<f32>,
    after: Vec<f32>,
    /// Sampling interval in runs, and number of sampled values per run.
    every: usize,
    take: usize,
    runs: usize,
    /// Number of sampled values, including those of the rows before the measured ones.
    sampled: usize,
    sample: [Vec<f32>; 2],
    /// Signal, other, noise and product, as sums that can be merged across row ranges.
    sums: [ExactSum; 4],
    hasher: Hasher,
}

enum Hasher {
    Full(Box<blake3::Hasher>),
    Rows { row: usize, of: usize, rows: Range<usize>, run: Option<Box<RunHasher>> },
}

/// State of measuring a range of rows, from which the measurement of the complete weight is merged.
#[derive(Debug, Clone)]
pub struct RowRange {
    /// The measured rows.
    pub rows: Range<usize>,
    /// Total number of rows of the weight.
    pub of: usize,
    /// Signal, other, noise and product.
    pub sums: [ExactSum; 4],
    /// Their subtrees of the hash tree. Empty if the hash of the weight cannot be merged from row
    /// ranges.
    pub hash: Vec<Subtree>,
    /// Sampled values, before and after.
    pub sample: [Vec<f32>; 2],
}

fn difference(sums: &[ExactSum; 4], known: Difference) -> Difference {
    let [signal, other, noise, dot] = sums.map(|sum| sum.value());
    Difference { signal, other, noise, dot, ..known }
}

/// Merges the measurements of consecutive row ranges into that of the weight. `None` if their hashes do
/// not form one tree.
pub(super) fn merge_rows(pieces: &[WeightMeasurement]) -> Option<WeightMeasurement> {
    let mut whole = WeightMeasurement::default();
    let (mut sums, mut hash, mut sample, mut hashed) = ([ExactSum::default(); 4], Vec::new(), [Vec::new(), Vec::new()], true);
    for (seen, rows) in pieces.iter().filter_map(|seen| Some((seen, seen.rows.as_ref()?))) {
        whole.difference.add(&seen.difference);
        sums.iter_mut().zip(&rows.sums).for_each(|(sum, part)| sum.merge(part));
        whole.changed |= seen.changed;
        whole.nonfinite = whole.nonfinite.saturating_add(seen.nonfinite);
        hashed &= !rows.hash.is_empty();
        hash.extend(rows.hash.iter().cloned());
        sample.iter_mut().zip(&rows.sample).for_each(|(all, part)| all.extend(part));
    }
    whole.difference = difference(&sums, whole.difference);
    // Without subtrees, the input is hashed again.
    whole.input_hash = if hashed { Some(merge(&hash)?) } else { None };
    let [before, after] = &sample;
    whole.histogram = ValueHistogram::new(before, after);
    Some(whole)
}

impl Measure {
    /// Starts measuring a weight or a range of its rows. For a range, sampling continues as if the
    /// previous rows had been measured.
    pub(super) fn new(weight: &Weight) -> Measure {
        let (row, of) = (weight.row(), weight.rows_of);
        let elements = of.map_or(weight.elements(), |of| of.of * row);
        let runs = elements.div_ceil(RUN).max(1);
        let every = runs.div_ceil(POSITIONS);
        let take = (SAMPLE / runs.div_ceil(every)).min(RUN);
        let hasher = match of {
            None => Hasher::Full(Box::default()),
            Some(RowsOf { first, of, .. }) => Hasher::Rows { row, of, rows: first..first + weight.all_rows().end, run: None },
        };
        let (before, after, sample, sums) = Default::default();
        let mut measure = Measure { before, after, every, take, runs: 0, sampled: 0, sample, sums, hasher };
        if let Some(of) = of {
            let each = of.block.div_ceil(RUN).max(1);
            measure.runs = of.first * row / of.block.max(1) * each;
            for run in (0..measure.runs).step_by(every) {
                let count = if run % each + 1 < each { RUN } else { of.block - (each - 1) * RUN };
                measure.sampled += measure.sample_size(run, count);
            }
        }
        measure
    }

    /// Number of values to sample from a run.
    fn sample_size(&self, run: usize, count: usize) -> usize {
        if run.is_multiple_of(self.every) && self.sampled < SAMPLE { self.take.min(count) } else { 0 }
    }

    /// Stores sums, hash and histogram into the measurement.
    pub(super) fn finish(self, seen: &mut WeightMeasurement) {
        seen.difference = difference(&self.sums, seen.difference);
        match self.hasher {
            Hasher::Full(hasher) => {
                let [before, after] = &self.sample;
                seen.histogram = ValueHistogram::new(before, after);
                seen.input_hash = Some(hasher.finalize());
            }
            Hasher::Rows { of, rows, run, .. } => {
                let hash = run.and_then(|run| run.finish()).unwrap_or_default();
                seen.rows = Some(Box::new(RowRange { rows, of, sums: self.sums, hash, sample: self.sample }));
            }
        }
    }

    fn hash(&mut self, before: &View) {
        match &mut self.hasher {
            Hasher::Full(hasher) => hash_values(hasher, before),
            // Codes and scales alternate block by block, so row ranges cannot be hashed separately.
            Hasher::Rows { .. } if before.affine.is_some() => {}
            Hasher::Rows { row, rows, run, .. } => {
                let line = (*row * before.dtype.bitsize() / 8) as u64;
                let begin = || Box::new(RunHasher::new(rows.start as u64 * line, rows.end as u64 * line));
                run.get_or_insert_with(begin).update(before.values);
            }
        }
    }

    pub(super) fn add(&mut self, block: &Block, seen: &mut WeightMeasurement) {
        self.hash(&block.before);
        let (now, before) = (&block.now, &block.before);
        let nonfinite_before = nonfinite(before);
        seen.nonfinite += nonfinite_before;
        if now.is(before) && now.affine.is_none() {
            let zeros = now.zeros();
            seen.difference.zeros_before += zeros;
            seen.difference.zeros_after += zeros;
            return;
        }
        let changed = !now.is(before);
        seen.changed |= changed;
        let counted = (seen.difference.zeros_before, seen.difference.zeros_after);
        let elements = now.elements();
        let mut is_finite = true;
        for start in (0..elements).step_by(RUN) {
            let count = RUN.min(elements - start);
            let sampled = if changed { self.sample_size(self.runs, count) } else { 0 };
            let Some(found) = self.compare(before, now, start, count) else { continue };
            seen.difference.add(&found);
            is_finite &= found.noise.is_finite();
            let sums = [found.signal, found.other, found.noise, found.dot];
            self.sums.iter_mut().zip(sums).for_each(|(sum, value)| sum.add(value));
            self.sampled += sampled;
            for (sample, view) in self.sample.iter_mut().zip([before, now]) {
                let length = sample.len();
                sample.resize(length + sampled, 0.0);
                let decoded = view.decode(start, &mut sample[length..]);
                debug_assert!(decoded, "they were compared");
            }
            self.runs += 1;
        }
        // A result that is not finite has an infinite distance from a finite value.
        if changed && !is_finite {
            seen.nonfinite += nonfinite(now).saturating_sub(nonfinite_before);
        }
        // Small f64 values become zero when they are converted to f32 for the comparison.
        if before.affine.is_none() && before.dtype == DType::F64 {
            seen.difference.zeros_before = counted.0 + before.zeros();
            if now.dtype == DType::F64 {
                seen.difference.zeros_after = counted.1 + now.zeros();
            }
        }
    }

    /// Compares a run of elements, in a single loop if the formats allow it. `None` if the formats are
    /// not floats.
    fn compare(&mut self, before: &View, now: &View, start: usize, count: usize) -> Option<Difference> {
        let range = |size: usize| start * size..(start + count) * size;
        match (before.affine, now.affine) {
            (None, None) if before.dtype == now.dtype => {
                with_float!(now.dtype, F => Some(compare::elements::<F>(&before.values[range(F::SIZE)], &now.values[range(F::SIZE)])), else None)
            }
            (None, Some((affine, row))) if affine.codes.is_integer() && affine.granularity.run(row, now.values.len()) >= LONG => {
                with_float!(before.dtype, F => {
                let run = affine.granularity.run(row, now.values.len());
                let mut sums = Difference::default();
                let (mut at, end) = (start, start + count);
                while at < end {
                    let stop = end.min((at / run + 1) * run);
                    let (scale, zero) = now.parameters(affine, at / run);
                    sums.add(&compare::integers::<F>(&before.values[at * F::SIZE..stop * F::SIZE], &now.values[at..stop], scale, zero));
                    at = stop;
                }
                Some(sums)
            }, else None)
            }
            _ => {
                self.before.resize(count, 0.0);
                self.after.resize(count, 0.0);
                (before.decode(start, &mut self.before) && now.decode(start, &mut self.after)).then(|| compare::floats(&self.before, &self.after))
            }
        }
    }
}

/// Number of NaN and infinite values.
fn nonfinite(view: &View) -> u64 {
    // Integers are finite, but their scales may not be.
    let (dtype, floats) = view.affine.map_or((view.dtype, view.values), |(affine, _)| (affine.scale_dtype, view.scales));
    let count = with_float!(dtype, F => scan::nonfinite::<F>(floats), else 0);
    let Some((affine, _)) = view.affine else { return count };
    let nans = |bytes, codes: &[u8]| codes.iter().map(|nan| scan::count_bytes(bytes, *nan)).sum::<u64>();
    count + affine.codes.float().map_or(0, |format| nans(view.values, format.row().nans)) + nans(view.scales, affine.scale_format().nans())
}

pub(super) fn hash_values(hasher: &mut blake3::Hasher, before: &View) {
    hasher.update(before.values);
    if before.affine.is_some() {
        hasher.update(before.scales);
        hasher.update(before.zero_points);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_histogram_uses_a_bounded_sample_of_all_positions() {
        for elements in [1000, 20_000, 5_000_000] {
            let before: Vec<f32> = (0..elements).map(|i| i as f32 / elements as f32).collect();
            let after: Vec<f32> = before.iter().map(|v| if *v < 0.5 { 0.0 } else { *v }).collect();
            let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
            let (before, after) = (bytes(&before), bytes(&after));
            let weight = Weight::new(
                DType::F32,
                vec![elements],
                super::super::Encoding::Dense,
                std::sync::Arc::new(super::super::Bytes { dtype: DType::F32, bytes: Vec::new() }),
            );
            let (mut measure, mut seen) = (Measure::new(&weight), WeightMeasurement::default());
            for (before, after) in before.chunks(4 << 17).zip(after.chunks(4 << 17)) {
                measure.add(&Block { now: View::dense(DType::F32, after), before: View::dense(DType::F32, before) }, &mut seen);
            }
            measure.finish(&mut seen);
            let picture = seen.histogram.unwrap();
            let total = picture.before.iter().sum::<u32>() as usize;
            assert!(total <= SAMPLE + RUN && total >= elements.min(SAMPLE / 2), "{total} of {elements}");
            assert_eq!(picture.after.iter().sum::<u32>() as usize, total);
            assert!(picture.low.abs() < 0.01 && picture.high > 0.98, "{picture:?}");
            assert!(picture.before.iter().all(|count| *count as usize <= total / BINS + RUN), "{picture:?}");
            assert!(picture.after[0] as usize >= total * 9 / 20 && picture.after[1] == 0, "{picture:?}");
        }
    }

    #[test]
    fn values_that_are_not_finite_are_counted_in_the_input_and_in_the_result() {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let [finite, huge, other] = [[1.0, 2.0, 3.0], [1.0, 3e38, -3e38], [f32::NAN, 2.0, f32::INFINITY]].map(|values| bytes(&values));
        let stored = std::sync::Arc::new(super::super::Bytes { dtype: DType::F32, bytes: Vec::new() });
        let weight = Weight::new(DType::F32, vec![3], super::super::Encoding::Dense, stored);
        for (before, now, count) in [(&finite, &finite, 0), (&finite, &huge, 0), (&finite, &other, 2), (&other, &finite, 2), (&other, &other, 2)] {
            let (mut measure, mut seen) = (Measure::new(&weight), WeightMeasurement::default());
            measure.add(&Block { now: View::dense(DType::F32, now), before: View::dense(DType::F32, before) }, &mut seen);
            assert_eq!(seen.nonfinite, count);
        }
    }

    #[test]
    fn unusual_values_yield_a_histogram_or_none() {
        assert_eq!(ValueHistogram::new(&[], &[]), None);
        assert_eq!(ValueHistogram::new(&[2.0; 9], &[2.0; 9]), None);
        assert_eq!(ValueHistogram::new(&[f32::NAN; 3], &[0.0; 3]), None);
        let picture = ValueHistogram::new(&[-1.0, 1.0, f32::INFINITY, f32::NAN], &[-9.0, 9.0, f32::NEG_INFINITY, 0.0]).unwrap();
        assert_eq!((picture.before.iter().sum::<u32>(), picture.after[0], picture.after[BINS - 1]), (3, 2, 1));
    }
}
