//! Held-out calibration tokens: solutions of a layer that fit other tokens are compared by their errors on
//! these.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::counted;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::matmul::{Columns, Left, product};

/// Maximum number of held-out rows of a value, if its rows are not few.
const HELD_OUT_ROWS: usize = 1024;
/// Number of rows up to which all of them are held out, in one of two folds.
const FEW_ROWS: usize = 2048;
/// One of this many samples is held out.
const INTERVAL: usize = 4;
/// Maximum number of held-out samples.
const MAX_SAMPLES: usize = 64;
/// Minimum mean improvement of the rows, in standard errors.
const SIGNIFICANT: f64 = 1.0;

/// Assigns the rows of calibration samples to folds of held-out rows.
#[derive(Debug, Clone, Copy)]
pub(super) enum Split {
    /// Rows are in one of two folds: even and odd samples, or the two halves of one sample.
    CrossFitting { samples: usize },
    /// The first rows of some samples are in one fold; the others are in none.
    HoldOut {
        /// Number of held-out samples.
        samples: usize,
        /// Distance between them.
        interval: usize,
        /// The first one.
        first: usize,
    },
}

impl Split {
    /// For a number of samples with at most `rows` rows each.
    pub fn new(samples: usize, rows: usize, seed: u64) -> Split {
        if samples * rows <= FEW_ROWS {
            return Split::CrossFitting { samples };
        }
        let held_out = (samples / INTERVAL).clamp(1, MAX_SAMPLES);
        let interval = samples / held_out;
        Split::HoldOut { samples: held_out, interval, first: (seed % interval as u64) as usize }
    }

    /// Held-out rows of a sample with this many rows, in each fold.
    fn rows(self, sample: usize, count: usize) -> [Range<usize>; 2] {
        match self {
            Split::CrossFitting { samples } => {
                // Only samples that are longer than the first ones have more rows.
                let end = count.min((FEW_ROWS / samples.max(1)).max(1));
                let middle = if samples == 1 { end / 2 } else { end * (1 - sample % 2) };
                [0..middle, middle..end]
            }
            Split::HoldOut { samples, interval, first } => {
                let is_held_out = sample % interval == first && sample / interval < samples;
                [0..if is_held_out { count.min(HELD_OUT_ROWS / samples) } else { 0 }, 0..0]
            }
        }
    }

    /// Indices of the rows of a batch in each fold, and of the other rows. `first` is the index of the
    /// first sample, and `sizes` the number of rows of each sample.
    pub fn indices(self, first: usize, sizes: &[usize]) -> ([Vec<u32>; 2], Vec<u32>) {
        let (mut folds, mut others) = ([Vec::new(), Vec::new()], Vec::new());
        let mut begin = 0;
        for (sample, size) in (first..).zip(sizes) {
            let held_out = self.rows(sample, *size);
            for row in 0..*size {
                let fold = held_out.iter().position(|rows| rows.contains(&row));
                fold.map_or(&mut others, |fold| &mut folds[fold]).push((begin + row) as u32);
            }
            begin += size;
        }
        (folds, others)
    }
}

/// Rows of held-out tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct HeldOut {
    /// Inputs of layers, `[n, size]`.
    pub rows: Vec<f32>,
    /// Inputs of the same layers in the original model; empty if they are not requested.
    pub original: Vec<f32>,
}

impl HeldOut {
    /// Adds rows, except rows of zeros: padding, and tokens that one of the models does not route to an
    /// expert.
    pub fn add(&mut self, size: usize, rows: &[f32], original: Option<&[f32]>) {
        let is_zero = |row: &[f32]| row.iter().all(|x| *x == 0.0);
        for (at, row) in rows.chunks_exact(size.max(1)).enumerate() {
            let original = original.map_or(&[][..], |original| &original[at * size..][..size]);
            if !is_zero(row) && (original.is_empty() || !is_zero(original)) {
                self.rows.extend_from_slice(row);
                self.original.extend_from_slice(original);
            }
        }
    }

    /// Outputs `[n, outputs]` of a layer with the weight `[outputs, size]`.
    pub fn outputs(&self, weight: &[f32], size: usize) -> Vec<f32> {
        outputs(&self.rows, weight, size)
    }

    /// Outputs `[n, outputs]` of a layer of the original model.
    pub fn original_outputs(&self, weight: &[f32], size: usize) -> Vec<f32> {
        outputs(if self.original.is_empty() { &self.rows } else { &self.original }, weight, size)
    }
}

fn outputs(rows: &[f32], weight: &[f32], size: usize) -> Vec<f32> {
    let [count, outputs] = [rows, weight].map(|values| values.len() / size.max(1));
    let mut out = vec![0f32; count * outputs];
    if !out.is_empty() {
        product(&Left::pack(rows, count, size, size), &Columns { values: weight, count: outputs, stride: size }, outputs, Epilogue::NONE, &mut out);
    }
    out
}

/// Squared errors of the outputs of held-out rows.
#[derive(Debug, Clone, Default)]
pub(super) struct Errors(Vec<f64>);

impl Errors {
    /// Adds the errors of rows `[n, width]`.
    pub fn add(&mut self, outputs: &[f32], targets: &[f32], width: usize) {
        let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
        let rows = outputs.chunks_exact(width.max(1)).zip(targets.chunks_exact(width.max(1)));
        self.0.extend(rows.map(|(outputs, targets)| outputs.iter().zip(targets).map(square).sum::<f64>()));
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
    /// Adds the choices of a pass to its report.
    pub fn describe(choices: &[LayerChoice], pass: &str, details: &mut Map<String, Value>, notes: &mut Vec<String>) {
        if choices.is_empty() {
            return;
        }
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        choices.iter().for_each(|choice| *counts.entry(&choice.choice).or_default() += 1);
        if counts.len() > 1 {
            let counts: Vec<String> = counts.iter().map(|(choice, count)| format!("{choice} for {}", counted(*count, "layer"))).collect();
            notes.push(format!("{pass}: chosen by the errors on held-out tokens: {}", counts.join(", ")));
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
        assert_eq!(folds(1, 4000, 0, &[4000]), ([(0..1024).collect(), vec![]], (1024..4000).collect()));
        // One of four samples, the second one with this seed.
        let ([held_out, none], others) = folds(8, 512, 4, &[512, 512, 512]);
        assert_eq!((held_out, none.len()), ((512..1024).collect(), 0));
        assert_eq!(others.len(), 1024);
        // At most 1,024 rows are held out.
        let ([held_out, _], _) = folds(100, 4000, 1, &[4000]);
        assert_eq!(held_out, (0..40).collect::<Vec<u32>>());
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
