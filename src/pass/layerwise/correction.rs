//! Error compensation and input correction, computed once for all layers that read the same value.

use super::Moments;
use crate::error::{Error, Result};
use crate::kernel::compensation::Compensation;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::matmul::{Left, Rows, product};

/// Fraction of the input correction that is applied. The full correction overfits the calibration
/// samples. With 15,000 tokens, a quarter and a half perform equally well on other text, better than no
/// correction and the full one.
const CORRECTION_STRENGTH: f32 = 0.5;

/// Compensates for the errors of previous columns and for changed inputs, for all layers that read the
/// same value.
pub(super) struct CompensatedSolver {
    pub compensation: Compensation,
    /// `(X₀ - X)ᵀX (XᵀX)⁻¹` `[size, size]`, where the original model's layers read `X₀` and these read `X`.
    correction: Option<Vec<f32>>,
    size: usize,
}

impl CompensatedSolver {
    /// Factorizes the sums of products of a value, with the columns in the given order. Increases the
    /// damping until the matrix is positive definite, and adds a note if it does. Returns an error if it
    /// is not even with a damping of 1.
    pub fn new(value: &str, moments: Moments, order: &[usize], damping: f64, notes: &mut Vec<String>) -> Result<CompensatedSolver> {
        let Moments { size, mut products, mut differences, .. } = moments;
        let mut tried = damping;
        let compensation = loop {
            match Compensation::new(products, size, order, tried) {
                Ok(found) => break found,
                Err(_) if tried >= 1.0 => {
                    let hint = "use other or more calibration samples";
                    return Err(Error::run(format!("graph value `{value}`"), "has a Hessian that is not positive definite with any damping", hint));
                }
                Err(same) => products = same,
            }
            tried = (2.0 * tried).clamp(0.01, 1.0);
        };
        if tried > damping {
            notes.push(format!("the features of `{value}` are nearly linearly dependent: damping {tried:.2} instead of {damping}"));
        }
        let correction = (!differences.is_empty()).then(|| {
            reorder(&mut differences, order);
            compensation.divide(&mut differences);
            restore(&mut differences, order);
            differences
        });
        Ok(CompensatedSolver { compensation, correction, size })
    }

    /// Corrects a weight `[rows, size]` for changed inputs: moves it by [`CORRECTION_STRENGTH`] towards
    /// the least-squares solution for the outputs of the original model (Li et al. 2025, GPTAQ,
    /// <https://arxiv.org/abs/2504.02692>).
    pub fn correct(&self, values: &mut [f32]) {
        if let Some(correction) = &self.correction {
            let left = Left::pack(values, values.len() / self.size.max(1), self.size, self.size);
            let mut added = vec![0f32; values.len()];
            product(&left, &Rows { values: correction, count: self.size, stride: self.size }, self.size, Epilogue::NONE, &mut added);
            values.iter_mut().zip(added).for_each(|(value, added)| *value += CORRECTION_STRENGTH * added);
        }
    }
}

/// Permutes the columns of rows into the given order.
pub(super) fn reorder(values: &mut [f32], order: &[usize]) {
    let mut before = Vec::with_capacity(order.len());
    for row in values.chunks_exact_mut(order.len().max(1)) {
        before.clear();
        before.extend_from_slice(row);
        row.iter_mut().zip(order).for_each(|(value, column)| *value = before[*column]);
    }
}

/// The inverse of [`reorder`].
pub(super) fn restore(values: &mut [f32], order: &[usize]) {
    let mut before = Vec::with_capacity(order.len());
    for row in values.chunks_exact_mut(order.len().max(1)) {
        before.clear();
        before.extend_from_slice(row);
        order.iter().zip(&before).for_each(|(column, value)| row[*column] = *value);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::MomentsRequest;
    use super::*;

    /// At the least-squares solution, the residual of the outputs is orthogonal to the inputs of the layer.
    #[test]
    fn layers_are_corrected_for_changed_inputs() {
        let (count, size, rows) = (300, 40, 7);
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0;
        let original: Vec<f32> = (0..count * size).map(|i| number(i * i)).collect();
        // Each feature has an error that depends on another one.
        let read: Vec<f32> = (0..count * size).map(|i| original[i] - 0.5 * original[i / size * size + (i % size * 7 + 3) % size]).collect();
        let tensor = |values: &[f32]| Tensor::from_slice(values, (count, size), &Device::Cpu).unwrap();
        let mut moments = Moments::new(size, MomentsRequest { products: true, original: true, ..MomentsRequest::default() });
        moments.add_original("x", &tensor(&original), &tensor(&read)).unwrap();
        moments.add("x", &tensor(&read)).unwrap();
        let order: Vec<usize> = (0..size).rev().collect();
        let weight: Vec<f32> = (0..rows * size).map(|i| number(i * 31)).collect();
        let mut corrected = weight.clone();
        CompensatedSolver::new("x", moments, &order, 1e-6, &mut Vec::new()).unwrap().correct(&mut corrected);
        corrected.iter_mut().zip(&weight).for_each(|(new, old)| *new = old + (*new - old) / CORRECTION_STRENGTH);
        let output = |x: &[f32], w: &[f32], at: usize, row: usize| (0..size).map(|i| f64::from(x[at * size + i]) * f64::from(w[row * size + i])).sum::<f64>();
        for (row, feature) in (0..rows * size).map(|i| (i / size, i % size)) {
            let along = |w: &[f32]| {
                let left = |at: usize| output(&original, &weight, at, row) - output(&read, w, at, row);
                (0..count).map(|at| left(at) * f64::from(read[at * size + feature])).sum::<f64>()
            };
            assert!(along(&corrected).abs() < 0.05, "{} of {}", along(&corrected), along(&weight));
        }
    }
}
