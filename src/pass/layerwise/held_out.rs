//! Held-out calibration tokens: solutions of a layer that fit other tokens are compared by their errors on
//! these.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Result, counted};
use crate::exec::transfer::{self, Cause};
use crate::kernel::epilogue::Epilogue;
use crate::kernel::operands::{Columns, LeftRows};
use crate::kernel::product::product;
use crate::pass::calibrate::tensor_error;

/// Maximum number of held-out rows of a value, if its rows are not few.
const HELD_OUT_ROWS: usize = 1024;
/// Number of rows up to which all of them are held out, in one of two folds.
const FEW_ROWS: usize = 2048;
/// Minimum number of held-out rows, if more rows exist.
const MIN_ROWS: usize = 64;
/// Maximum number of consecutive held-out rows of a sample of which not all rows are held out.
const RUN: usize = 16;
/// Distance of the runs of consecutive samples, so that they cover all positions: a prime number.
const RUN_SHIFT: usize = 7919;
/// One of this many samples is held out.
const INTERVAL: usize = 4;
/// Maximum number of held-out samples.
const MAX_SAMPLES: usize = 64;
/// Number of values of a row that its hash covers.
const HASHED: usize = 64;
/// Minimum mean improvement of the rows, in standard errors.
const SIGNIFICANT: f64 = 1.0;

/// Assigns the rows of calibration samples to folds of held-out rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Split {
    /// Rows are in one of two folds: even and odd samples, or the two halves of one sample.
    CrossFitting { samples: usize },
    /// Rows are in one of two folds, the two halves of each sample, of which about [`FEW_ROWS`] of this many
    /// rows are held out.
    Halves { rows: usize },
    /// Some rows of some samples are in one fold; the others are in none.
    HoldOut {
        /// Number of held-out samples.
        samples: usize,
        /// Distance between them.
        interval: usize,
        /// The first one.
        first: usize,
        /// Number of held-out rows of each.
        rows: usize,
    },
}

impl Split {
    /// For a number of samples with at most `rows` rows each.
    pub fn new(samples: usize, rows: usize, seed: u64) -> Split {
        if samples * rows <= FEW_ROWS {
            return Split::CrossFitting { samples };
        }
        Split::hold_out(samples, HELD_OUT_ROWS, seed)
    }

    /// As [`new`](Split::new), for training, which uses no fold: few rows are not cross-fitted, and at most
    /// about a quarter of them is held out.
    pub fn for_training(samples: usize, rows: usize, seed: u64) -> Split {
        Split::hold_out(samples, HELD_OUT_ROWS.min(samples * rows / INTERVAL), seed)
    }

    /// Holds out this many rows of some samples.
    fn hold_out(samples: usize, rows: usize, seed: u64) -> Split {
        let held_out = (samples / INTERVAL).clamp(1, MAX_SAMPLES);
        let interval = (samples / held_out).max(1);
        Split::HoldOut { samples: held_out, interval, first: (seed % interval as u64) as usize, rows: rows / held_out }
    }

    /// The split to use instead if too few of `rows` rows are in the folds: the held-out samples are short,
    /// or an expert sees few of their tokens.
    pub fn with_more(self, folds: [usize; 2], rows: usize) -> Option<Split> {
        let held_out = match self {
            Split::CrossFitting { .. } => folds[0].min(folds[1]),
            Split::HoldOut { .. } => folds[0],
            Split::Halves { .. } => return None,
        };
        (held_out < MIN_ROWS.min(rows / INTERVAL)).then_some(Split::Halves { rows })
    }

    /// The fold of a row of a sample with `count` rows.
    fn fold(self, sample: usize, row: usize, count: usize) -> Option<usize> {
        let half = usize::from(row >= count / 2);
        match self {
            // Only samples that are longer than the first ones have more rows.
            Split::CrossFitting { samples } => is_spread(sample, row, count, FEW_ROWS / samples.max(1)).then_some(if samples == 1 { half } else { sample % 2 }),
            Split::Halves { rows } => is_spread(sample, row, count, (count * FEW_ROWS).div_ceil(rows.max(1))).then_some(half),
            Split::HoldOut { samples, interval, first, rows } => {
                let (index, is_held_out) = (sample / interval, sample % interval == first);
                (is_held_out && index < samples && is_spread(index, row, count, rows)).then_some(0)
            }
        }
    }

    /// Indices of the rows of a batch in each fold, and of the other rows. `first` is the index of the
    /// first sample, and `sizes` the number of rows of each sample.
    pub fn indices(self, first: usize, sizes: &[usize]) -> ([Vec<u32>; 2], Vec<u32>) {
        let (mut folds, mut others) = ([Vec::new(), Vec::new()], Vec::new());
        let mut begin = 0;
        for (sample, size) in (first..).zip(sizes) {
            for row in 0..*size {
                self.fold(sample, row, *size).map_or(&mut others, |fold| &mut folds[fold]).push((begin + row) as u32);
            }
            begin += size;
        }
        (folds, others)
    }
}

/// Whether a row is one of about `held_out` of the `count` rows of a sample, which are runs of consecutive
/// rows at regular intervals. They begin at another position in each sample.
fn is_spread(sample: usize, row: usize, count: usize, held_out: usize) -> bool {
    if held_out >= count {
        return true;
    }
    let run = held_out.clamp(1, RUN);
    let (runs, chosen) = (count.div_ceil(run), held_out.max(1) / run);
    let index = row / run + sample * RUN_SHIFT % runs;
    index * chosen / runs != (index + 1) * chosen / runs
}

/// Rows of held-out tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct HeldOut {
    /// Inputs of layers, `[n, size]`.
    pub rows: Vec<f32>,
    /// Inputs of the same layers in the original model; empty if they are not requested.
    pub original: Vec<f32>,
    /// For each row, the index of its value among the different rows. Samples with a common prefix have equal
    /// rows, which are not independent observations.
    groups: Vec<usize>,
    /// Indices of the first rows with the same hash of some of their values, and of their groups.
    first: HashMap<u64, Vec<[usize; 2]>>,
    /// Number of different rows.
    different: usize,
    /// Both kinds of rows on a device, if outputs are computed there.
    pub on_device: Option<[Tensor; 2]>,
}

impl HeldOut {
    /// Adds rows, except rows of zeros: padding, and tokens that one of the models does not route to an
    /// expert.
    pub fn add(&mut self, size: usize, rows: &[f32], original: Option<&[f32]>) {
        let is_zero = |row: &[f32]| row.iter().all(|x| *x == 0.0);
        self.rows.reserve(rows.len());
        self.original.reserve(original.map_or(0, <[f32]>::len));
        for (at, row) in rows.chunks_exact(size.max(1)).enumerate() {
            let original = original.map_or(&[][..], |original| &original[at * size..][..size]);
            if !is_zero(row) && (original.is_empty() || !is_zero(original)) {
                self.group(size, row);
                self.rows.extend_from_slice(row);
                self.original.extend_from_slice(original);
            }
        }
    }

    /// Assigns the next row to the group of equal rows.
    fn group(&mut self, size: usize, row: &[f32]) {
        let mut hasher = DefaultHasher::new();
        row.iter().step_by(size.div_ceil(HASHED).max(1)).for_each(|x| hasher.write_u32(x.to_bits()));
        let candidates = self.first.entry(hasher.finish()).or_default();
        // Zeros of different signs are different.
        let is_equal = |other: &[f32]| other.iter().zip(row).all(|(a, b)| a.to_bits() == b.to_bits());
        let equal = candidates.iter().find(|[at, _]| is_equal(&self.rows[at * size..][..size])).map(|[_, group]| *group);
        self.groups.push(equal.unwrap_or(self.different));
        if equal.is_none() {
            candidates.push([self.groups.len() - 1, self.different]);
            self.different += 1;
        }
    }

    /// Whether a row differs from the original model's.
    pub fn is_changed(&self) -> bool {
        !self.original.is_empty() && self.original != self.rows
    }

    /// Copies the rows to a device, on which outputs are then computed.
    pub fn upload(&mut self, size: usize, device: &Device) -> candle_core::Result<()> {
        if !self.rows.is_empty() {
            let tensor = |rows: &[f32]| transfer::from_slice(rows, (rows.len() / size, size), device, Cause::Statistics);
            let rows = tensor(&self.rows)?;
            let original = if self.is_changed() { tensor(&self.original)? } else { rows.clone() };
            self.on_device = Some([rows, original]);
        }
        Ok(())
    }

    /// Outputs `[n, outputs]` of a layer with the weight `[outputs, size]`.
    pub fn outputs(&self, weight: &[f32], size: usize) -> Result<Vec<f32>> {
        match &self.on_device {
            Some([rows, _]) => device_outputs(rows, weight, size).map_err(tensor_error),
            None => Ok(outputs(&self.rows, weight, size)),
        }
    }

    /// As [`outputs`](HeldOut::outputs), of a weight on the device of the rows.
    pub fn outputs_on_device(&self, weight: &Tensor) -> Result<Vec<f32>> {
        let found = match &self.on_device {
            Some([rows, _]) => weight.t().and_then(|weight| rows.matmul(&weight)).and_then(|outputs| transfer::values(&outputs, Cause::Statistics)),
            None => return self.outputs(&transfer::values::<f32>(weight, Cause::Statistics).map_err(tensor_error)?, weight.dim(1).map_err(tensor_error)?),
        };
        found.map_err(tensor_error)
    }

    /// Outputs `[n, outputs]` of a layer of the original model.
    pub fn original_outputs(&self, weight: &[f32], size: usize) -> Result<Vec<f32>> {
        match &self.on_device {
            Some([_, original]) => device_outputs(original, weight, size).map_err(tensor_error),
            None => Ok(outputs(if self.original.is_empty() { &self.rows } else { &self.original }, weight, size)),
        }
    }
}

fn device_outputs(rows: &Tensor, weight: &[f32], size: usize) -> candle_core::Result<Vec<f32>> {
    let weight = transfer::from_slice(weight, (weight.len() / size.max(1), size), rows.device(), Cause::Statistics)?;
    transfer::values(&rows.matmul(&weight.t()?)?, Cause::Statistics)
}

fn outputs(rows: &[f32], weight: &[f32], size: usize) -> Vec<f32> {
    let [count, outputs] = [rows, weight].map(|values| values.len() / size.max(1));
    let mut out = vec![0f32; count * outputs];
    if !out.is_empty() {
        product(&LeftRows::new(rows, count, size, size), &Columns { values: weight, count: outputs, stride: size }, outputs, Epilogue::NONE, &mut out);
    }
    out
}

/// Squared errors of the outputs of held-out rows.
#[derive(Debug, Clone, Default)]
pub(super) struct Errors(Vec<f64>);

impl From<Vec<f64>> for Errors {
    fn from(rows: Vec<f64>) -> Errors {
        Errors(rows)
    }
}

impl Errors {
    /// Adds the errors of rows `[n, width]`.
    pub fn add(&mut self, outputs: &[f32], targets: &[f32], width: usize) {
        self.add_columns([outputs, targets], width, 0..width);
    }

    /// Adds the errors of some columns of rows `[n, width]`.
    fn add_columns(&mut self, [outputs, targets]: [&[f32]; 2], width: usize, columns: Range<usize>) {
        let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
        let rows = outputs.chunks_exact(width.max(1)).zip(targets.chunks_exact(width.max(1)));
        self.0.extend(rows.map(|(outputs, targets)| outputs[columns.clone()].iter().zip(&targets[columns.clone()]).map(square).sum::<f64>()));
    }

    /// Adds the errors of the outputs `[n, width]` of held-out rows. Those of equal rows are one observation.
    pub fn add_held_out(&mut self, held_out: &HeldOut, outputs: &[f32], targets: &[f32], width: usize) {
        self.add_held_out_columns(held_out, [outputs, targets], width, 0..width);
    }

    /// As [`add_held_out`](Errors::add_held_out), of some of the outputs.
    pub fn add_held_out_columns(&mut self, held_out: &HeldOut, compared: [&[f32]; 2], width: usize, columns: Range<usize>) {
        let first = self.0.len();
        self.add_columns(compared, width, columns);
        let errors = self.0.split_off(first);
        self.0.resize(first + held_out.different, 0.0);
        errors.into_iter().zip(&held_out.groups).for_each(|(error, group)| self.0[first + group] += error);
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sum over all rows.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    /// Whether the errors are smaller than others of the same rows by more than their noise.
    pub fn are_below(&self, others: &Errors) -> bool {
        let gains = || self.0.iter().zip(&others.0).map(|(error, other)| other - error);
        let (gain, squares) = (gains().sum::<f64>(), gains().map(|gain| gain * gain).sum::<f64>());
        let count = self.0.len() as f64;
        // The variance of the mean of `count` gains; unknown for a single one.
        let variance = (squares - gain * gain / count) / (count - 1.0) / count;
        count > 1.0 && gain > 0.0 && gain / count > SIGNIFICANT * variance.max(0.0).sqrt()
    }
}

/// The solution that was chosen for a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct LayerChoice {
    /// Name of its weight.
    pub weight: String,
    /// Name of the solution.
    pub choice: String,
    /// Damping of the diagonal of the second moments, as a fraction of its mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub damping: Option<f64>,
    /// Fraction of the error of earlier layers that is compensated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub propagation: Option<f32>,
    /// Squared error of the best alternative on held-out tokens, relative to the solution without
    /// samples. `None` if no tokens were held out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relative_error: Option<f64>,
}

impl LayerChoice {
    /// Adds the choices of a pass to its report, and a note if a layer does not use the requested solution.
    pub fn describe(choices: &[LayerChoice], (pass, requested): (&str, &str), details: &mut Map<String, Value>, notes: &mut Vec<String>) {
        if choices.is_empty() {
            return;
        }
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        choices.iter().for_each(|choice| *counts.entry(&choice.choice).or_default() += 1);
        if counts.keys().any(|choice| *choice != requested) {
            let instead = if counts.contains_key(requested) { String::new() } else { format!(", instead of {requested}") };
            let counts: Vec<String> = counts.iter().map(|(choice, count)| format!("{choice} for {}", counted(*count, "layer"))).collect();
            notes.push(format!("{pass}: chosen by the errors on held-out tokens: {}{instead}", counts.join(", ")));
        }
        details.insert("choices".into(), json!(counts));
        details.insert("layers".into(), json!(choices));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_samples_are_held_out() {
        let folds = |samples, rows, first, sizes: &[usize]| Split::new(samples, rows, 5).indices(first, sizes);
        assert_eq!(folds(3, 2, 0, &[2, 1, 2]), ([vec![0, 1, 3, 4], vec![2]], vec![]));
        assert_eq!(folds(1, 2000, 0, &[5]), ([vec![0, 1], vec![2, 3, 4]], vec![]));
        // One of four samples, the second one with this seed.
        let ([held_out, none], others) = folds(8, 512, 4, &[512, 512, 512]);
        assert_eq!((held_out, none.len()), ((512..1024).collect(), 0));
        assert_eq!(others.len(), 1024);
    }

    /// Tokens at the beginning of all samples, such as a common prompt, must not dominate.
    #[test]
    fn held_out_rows_are_spread_over_samples() {
        let folds = |samples, first: usize, sizes: &[usize]| Split::new(samples, 4000, 5).indices(first, sizes);
        let ([held_out, none], others) = folds(1, 0, &[4000]);
        assert_eq!((held_out.len(), none.len(), others.len()), (1024, 0, 2976));
        let in_quarter = |quarter: u32| held_out.iter().filter(|row| **row / 1000 == quarter).count();
        assert!((0..4).all(|quarter| (200..312).contains(&in_quarter(quarter))));
        // Two runs in each of 25 samples, at different positions.
        let mut positions = std::collections::BTreeSet::new();
        for sample in (1..100).step_by(4) {
            let ([held_out, _], _) = folds(100, sample, &[4000]);
            assert_eq!(held_out.len(), 32, "{sample}");
            positions.extend(held_out);
        }
        assert!(positions.len() > 700 && positions.iter().filter(|row| **row < 2000).count().abs_diff(positions.len() / 2) < 64, "{positions:?}");
    }

    /// Training cannot use held-out rows in another fold.
    #[test]
    fn training_holds_out_at_most_a_quarter_of_the_rows() {
        for (samples, rows) in [(1, 16), (1, 500), (2, 64), (3, 100), (8, 32), (40, 12), (100, 4000)] {
            let sizes = vec![rows; samples];
            let (folds, others) = Split::for_training(samples, rows, 5).indices(0, &sizes);
            let [held_out, total] = [folds[0].len(), samples * rows];
            assert!(folds[1].is_empty() && held_out + others.len() == total);
            assert!(held_out <= total / 4 + RUN && held_out >= (total / 4).min(HELD_OUT_ROWS) / 2, "{held_out} of {total}");
            if total > FEW_ROWS {
                assert_eq!(Split::new(samples, rows, 5).indices(0, &sizes), (folds, others));
            }
        }
    }

    /// A held-out sample may be short, and an expert may see few of its tokens.
    #[test]
    fn too_few_held_out_rows_are_replaced_by_cross_fitting() {
        let sizes = [1, 700, 700, 700];
        let count = |split: Split| split.indices(0, &sizes).0.map(|fold| fold.len());
        let split = Split::new(4, 700, 0);
        assert_eq!(count(split), [1, 0]);
        let split = split.with_more([1, 0], 2101).unwrap();
        assert!(count(split).iter().all(|rows| (900..1100).contains(rows)), "{:?}", count(split));
        assert_eq!(split.with_more([0, 0], 2101), None);
        assert_eq!(Split::new(4, 700, 0).with_more([64, 0], 2101), None);
        // One of two folds is short; all rows of an expert with few tokens.
        assert_eq!(Split::new(2, 700, 0).with_more([1, 700], 701), Some(Split::Halves { rows: 701 }));
        assert_eq!(Split::new(3, 2, 5).with_more([4, 1], 5), None);
        assert_eq!(count(Split::Halves { rows: 20 }).iter().sum::<usize>(), 2101);
    }

    /// Rows of zeros in either model are left out of both.
    #[test]
    fn rows_stay_paired_with_those_of_the_original_model() {
        let mut held_out = HeldOut::default();
        held_out.add(2, &[1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 5.0, 6.0], Some(&[1.5, 2.5, 7.0, 7.0, 0.0, 0.0, 5.5, 6.5]));
        assert_eq!((held_out.rows, held_out.original), (vec![1.0, 2.0, 5.0, 6.0], vec![1.5, 2.5, 5.5, 6.5]));
    }

    #[test]
    fn equal_rows_are_one_observation() {
        let mut held_out = HeldOut::default();
        held_out.add(2, &[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 1.0, 2.0], None);
        held_out.add(2, &[1.0, 2.0], None);
        assert_eq!((held_out.rows.len(), held_out.groups.clone(), held_out.different), (8, vec![0, 1, 0, 0], 2));
        let mut errors = Errors(vec![7.0]);
        errors.add_held_out(&held_out, &[1.0, 2.0, 3.0, 4.0], &[0.0; 4], 1);
        assert_eq!(errors.0, [7.0, 1.0 + 9.0 + 16.0, 4.0]);
        let mut errors = Errors(Vec::new());
        let outputs = [[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]].concat();
        errors.add_held_out_columns(&held_out, [&outputs, &[0.0; 8]], 2, 0..1);
        assert_eq!(errors.0, [1.0 + 9.0 + 16.0, 4.0]);
    }

    /// The hash covers only some of the values.
    #[test]
    fn rows_that_differ_in_any_value_are_different() {
        let size = 3 * HASHED;
        let row = |changed: Option<(usize, f32)>| {
            let mut row = vec![0.5; size];
            changed.into_iter().for_each(|(at, value)| row[at] = value);
            row
        };
        let mut held_out = HeldOut::default();
        for changed in [None, Some((1, 0.0)), Some((1, -0.0)), Some((size - 1, 2.0)), None, Some((1, -0.0))] {
            held_out.add(size, &row(changed), None);
        }
        assert_eq!((held_out.groups, held_out.different), (vec![0, 1, 2, 3, 0, 2], 4));
    }

    #[test]
    fn a_solution_that_was_not_requested_is_noted() {
        let choice = |choice: &str| LayerChoice { weight: "w".into(), choice: choice.into(), damping: None, propagation: None, relative_error: None };
        let notes = |choices: &[&str]| {
            let choices: Vec<LayerChoice> = choices.iter().map(|name| choice(name)).collect();
            let mut notes = Vec::new();
            LayerChoice::describe(&choices, ("quantize", "gptq"), &mut Map::new(), &mut notes);
            notes
        };
        assert!(notes(&["gptq", "gptq"]).is_empty());
        assert_eq!(notes(&["rtn", "rtn"]), ["quantize: chosen by the errors on held-out tokens: rtn for 2 layers, instead of gptq"]);
        assert_eq!(notes(&["rtn", "gptq"]), ["quantize: chosen by the errors on held-out tokens: gptq for 1 layer, rtn for 1 layer"]);
    }

    #[test]
    fn improvements_must_exceed_their_noise() {
        let errors = |values: &[f64]| Errors(values.to_vec());
        let plain = errors(&[1.0, 1.0, 1.0, 1.0]);
        assert!(errors(&[0.9, 0.8, 0.9, 0.7]).are_below(&plain));
        assert!(!errors(&[0.1, 1.6, 0.9, 1.3]).are_below(&plain), "the sum is smaller because of one row");
        assert!(!errors(&[0.1]).are_below(&errors(&[1.0])), "one row has no variance");
        assert!(!plain.are_below(&plain));
    }
}
