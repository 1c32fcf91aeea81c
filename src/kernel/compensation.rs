//! Rounding or removing weights one column after another, while the columns that come later make up for the error: the solver of
//! GPTQ (Frantar et al. 2022, <https://arxiv.org/abs/2210.17323>) and SparseGPT (Frantar and Alistarh 2023,
//! <https://arxiv.org/abs/2301.00774>).
//!
//! With `E = W - Q` and `H = XᵀX = R Rᵀ`, `R` an upper triangle, the error of a layer's output is `tr(E H Eᵀ) = Σⱼ (Σ_{k≤j} Eₖ Rₖⱼ)²`.
//! Column `j` is therefore best rounded from `Wⱼ + Σ_{k<j} Eₖ Rₖⱼ / Rⱼⱼ`. That is the update of the papers, whose `U` of `H⁻¹ = UᵀU` is
//! `R⁻¹` (Chen et al. 2025, <https://arxiv.org/abs/2507.18553>), but needs no inverse, and is a product of matrices from block to block.

use std::ops::Range;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::matmul::{Columns, Left, Rows, product};
use super::solve;

/// Columns that [`Compensation::divide`] eliminates at once.
const SOLVED: usize = 64;

/// How columns of a layer's weight make up for each other.
pub struct Compensation {
    size: usize,
    /// `R[k][j] / R[j][j]`; the diagonal and what is below mean nothing.
    ratios: Vec<f32>,
    /// `R[j][j]²`: what the squared error of a column costs after all later ones have made up for it.
    costs: Vec<f32>,
}

/// Chooses the values of a weight.
pub trait Choice: Sync {
    /// Whether [`begin`](Choice::begin) looks at blocks.
    fn ranks_blocks(&self) -> bool {
        false
    }

    /// Columns, from multiples of which on values are looked at together; a divisor of the block.
    fn looks_ahead(&self) -> usize {
        1
    }

    /// Sees what a block of columns of all rows, `[rows, width]`, would best be, after all columns before it were chosen; nothing where
    /// it does not look at blocks.
    fn begin(&mut self, first: usize, width: usize, values: &[f32], costs: &[f32]);

    /// The value of a column of a row, given what it would best be; at a column from which on values are looked at
    /// together, also what those would best be. `marks` belongs to the row and block, and begins as zero.
    fn choose(&self, row: usize, column: usize, ahead: &[f32], costs: &[f32], marks: &mut u64) -> f32;
}

impl Compensation {
    /// From the upper triangle of sums of products `[size, size]`, after `damping` times the mean of the diagonal is added to it;
    /// `order` is the column that comes first, second and so on. Their memory is used again.
    ///
    /// # Errors
    /// The sums, where the matrix is not positive even so.
    pub fn new(mut products: Vec<f32>, size: usize, order: &[usize], damping: f64) -> Result<Compensation, Vec<f32>> {
        let mean = (0..size).map(|at| f64::from(products[at * size + at])).sum::<f64>() / size.max(1) as f64;
        // Features that are zero in all samples alone leave nothing to divide by.
        let added = if mean > 0.0 { damping * mean } else { 1.0 };
        // The last column first, so that the lower triangle of Cholesky's is an upper one.
        let mut matrix = vec![0f64; size * size];
        matrix.par_chunks_mut(size.max(1)).enumerate().for_each(|(i, row)| {
            let a = order[size - 1 - i];
            for (j, out) in row[..=i].iter_mut().enumerate() {
                let b = order[size - 1 - j];
                *out = f64::from(products[a.min(b) * size + a.max(b)]);
            }
            row[i] += added;
        });
        let Some(lower) = solve::triangle(matrix, size) else { return Err(products) };
        let at = |k: usize, j: usize| lower[(size - 1 - k) * size + (size - 1 - j)];
        let costs: Vec<f32> = (0..size).map(|j| (at(j, j) * at(j, j)) as f32).collect();
        products.par_chunks_mut(size.max(1)).enumerate().for_each(|(k, row)| (k + 1..size).for_each(|j| row[j] = (at(k, j) / at(j, j)) as f32));
        Ok(Compensation { size, ratios: products, costs })
    }

    /// What the squared error of each column costs, in order.
    pub fn costs(&self) -> &[f32] {
        &self.costs
    }

    /// What columns of a row from `first` on would best be if all of them could be anything, from what each would best be if those between
    /// stayed as they were.
    fn free(&self, values: &mut [f32], weights: &[f32], first: usize) {
        for at in 0..values.len() {
            let (done, rest) = values.split_at_mut(at + 1);
            add_scaled(rest, &self.ratios[(first + at) * self.size + first + at + 1..], weights[at] - done[at]);
        }
    }

    /// `B H⁻¹` in the place of rows `B` `[n, size]`; columns of both are in order.
    ///
    /// `H = P D Pᵀ` with the ratios as `P` and the costs as `D`: columns are eliminated from the last to the first, divided, and eliminated
    /// from the first to the last, a block at a time.
    pub fn divide(&self, values: &mut [f32]) {
        let size = self.size;
        let rows = values.len() / size.max(1);
        let mut sums = vec![0f32; rows * SOLVED.min(size)];
        let blocks = || (0..size).step_by(SOLVED).map(|first| first..size.min(first + SOLVED));
        for Range { start, end } in blocks().rev() {
            let sums = &mut sums[..rows * (end - start)];
            if end < size {
                let right = Columns { values: &self.ratios[start * size + end..], count: end - start, stride: size };
                product(&Left::pack(&values[end..], rows, size - end, size), &right, end - start, Epilogue::NONE, sums);
            } else {
                sums.fill(0.0);
            }
            values.par_chunks_mut(size).zip(sums.par_chunks(end - start)).for_each(|(row, sums)| {
                for at in (start..end).rev() {
                    let later = row[at + 1..end].iter().zip(&self.ratios[at * size + at + 1..]).map(|(x, ratio)| x * ratio).sum::<f32>();
                    row[at] -= sums[at - start] + later;
                }
            });
        }
        values.par_chunks_mut(size.max(1)).for_each(|row| row.iter_mut().zip(&self.costs).for_each(|(x, cost)| *x /= cost));
        for Range { start, end } in blocks() {
            let sums = &mut sums[..rows * (end - start)];
            if start > 0 {
                let right = Rows { values: &self.ratios[start..], count: end - start, stride: size };
                product(&Left::pack(values, rows, start, size), &right, end - start, Epilogue::NONE, sums);
            } else {
                sums.fill(0.0);
            }
            values.par_chunks_mut(size).zip(sums.par_chunks(end - start)).for_each(|(row, sums)| {
                row[start..end].iter_mut().zip(sums).for_each(|(x, sum)| *x -= sum);
                for at in start..end {
                    let factor = -row[at];
                    add_scaled(&mut row[at + 1..end], &self.ratios[at * size + at + 1..], factor);
                }
            });
        }
    }

    /// Replaces the columns of a weight `[rows, size]`, in order, by what `choice` makes of them, a block at a time.
    pub fn apply(&self, weights: &mut [f32], block: usize, choice: &mut impl Choice) {
        let size = self.size;
        let rows = weights.len() / size.max(1);
        let mut errors = vec![0f32; weights.len()];
        let mut targets = vec![0f32; rows * block.min(size)];
        for first in (0..size).step_by(block.max(1)) {
            let width = block.min(size - first);
            let targets = &mut targets[..rows * width];
            if first > 0 {
                let right = Rows { values: &self.ratios[first..], count: width, stride: size };
                product(&Left::pack(&errors, rows, first, size), &right, width, Epilogue::NONE, targets);
            }
            targets.par_chunks_mut(width).zip(weights.par_chunks(size)).for_each(|(targets, weights)| {
                targets.iter_mut().zip(&weights[first..]).for_each(|(target, weight)| *target += weight);
            });
            if choice.ranks_blocks() {
                let mut free = targets.to_vec();
                let lines = free.par_chunks_mut(width).zip(weights.par_chunks(size));
                lines.for_each(|(values, weights)| self.free(values, &weights[first..], first));
                choice.begin(first, width, &free, &self.costs[first..first + width]);
            } else {
                choice.begin(first, width, &[], &[]);
            }
            let (choice, looks) = (&*choice, choice.looks_ahead().max(1));
            let lines = weights.par_chunks_mut(size).zip(errors.par_chunks_mut(size)).zip(targets.par_chunks_mut(width));
            lines.enumerate().for_each(|(row, ((weights, errors), targets))| {
                let (mut marks, mut free) = (0, Vec::with_capacity(looks));
                for at in 0..width {
                    let column = first + at;
                    let together = if at.is_multiple_of(looks) { looks.min(width - at) } else { 1 };
                    free.clear();
                    free.extend_from_slice(&targets[at..at + together]);
                    self.free(&mut free, &weights[column..], column);
                    let value = choice.choose(row, column, &free, &self.costs[column..first + width], &mut marks);
                    let error = weights[column] - value;
                    add_scaled(&mut targets[at + 1..], &self.ratios[column * size + column + 1..], error);
                    (weights[column], errors[column]) = (value, error);
                }
            });
        }
    }
}

simd! {
    fn add_scaled(out: &mut [f32], values: &[f32], factor: f32) {
        for (out, x) in out.iter_mut().zip(values) {
            *out += factor * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_undoes_multiplication() {
        let (rows, size) = (5, 150);
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0;
        let features: Vec<f32> = (0..400 * size).map(|i| number(i * i)).collect();
        let mut sums = vec![0f32; size * size];
        super::super::gram::add(&features, size, &mut sums);
        let order: Vec<usize> = (0..size).rev().collect();
        let compensation = Compensation::new(sums.clone(), size, &order, 0.0).ok().unwrap();
        let wanted: Vec<f32> = (0..rows * size).map(|i| number(i * 31)).collect();
        let at = |a: usize, b: usize| f64::from(sums[a.min(b) * size + a.max(b)]);
        let product = |row: usize, column: usize| (0..size).map(|k| f64::from(wanted[row * size + k]) * at(order[k], order[column])).sum::<f64>() as f32;
        let mut values: Vec<f32> = (0..rows * size).map(|i| product(i / size, i % size)).collect();
        compensation.divide(&mut values);
        for (have, want) in values.iter().zip(&wanted) {
            assert!((have - want).abs() < 1e-3, "{have} for {want}");
        }
    }
}
