//! Column-wise rounding or pruning of weights with error compensation by the later columns: the solver
//! of GPTQ (Frantar et al. 2022, <https://arxiv.org/abs/2210.17323>) and SparseGPT (Frantar and Alistarh
//! 2023, <https://arxiv.org/abs/2301.00774>).
//!
//! With `E = W - Q` and `H = XᵀX = R Rᵀ`, `R` upper triangular, the error of a layer's output is `tr(E H
//! Eᵀ) = Σⱼ (Σ_{k≤j} Eₖ Rₖⱼ)²`. Column `j` is therefore best rounded from `Wⱼ + Σ_{k<j} Eₖ Rₖⱼ / Rⱼⱼ`.
//! This equals the update of the papers, whose `U` of `H⁻¹ = UᵀU` is `R⁻¹` (Chen et al. 2025,
//! <https://arxiv.org/abs/2507.18553>), but requires no inverse, and is a matrix product from block to
//! block.

use std::ops::Range;

use rayon::prelude::*;

use super::cholesky_f32;
use super::epilogue::Epilogue;
use super::operands::{Columns, LeftRows, Right, Rows};
use super::pool::on_pool_thread;
use super::product::product;
use super::solve;

/// Number of columns that [`Compensation::divide`] eliminates at once.
const SOLVED: usize = 128;

/// Smallest damping with which matrices are factorized in f32. The implementations of both papers compute in
/// f32 with a damping of 0.01.
pub const DAMPING_F32: f64 = 0.01;

/// Error compensation between the columns of a layer's weight.
pub struct Compensation {
    size: usize,
    /// `R[k][j] / R[j][j]` above the diagonal, and zeros elsewhere.
    ratios: Vec<f32>,
    /// `R[j][j]²`: the cost of a column's squared error after compensation by all later columns.
    costs: Vec<f32>,
}

/// Chooses the values of the columns of a weight.
pub trait ColumnRule: Send + Sync {
    /// Whether [`begin_block`](ColumnRule::begin_block) needs the values of the block.
    fn ranks_blocks(&self) -> bool {
        false
    }

    /// Size of the column groups whose values are chosen together; must divide the block width.
    fn lookahead(&self) -> usize {
        1
    }

    /// Starts a block of columns. `values` `[rows, width]` are the optimal values of the block after all
    /// previous columns were chosen. They are empty if [`ranks_blocks`](ColumnRule::ranks_blocks) is
    /// false.
    fn begin_block(&mut self, first: usize, width: usize, values: &[f32], costs: &[f32]);

    /// Chooses the value of a column of a row. `ahead` starts with its optimal value; at the first
    /// column of a group, it contains the optimal values of the complete group. `marks` is specific to
    /// the row and block, and is initially zero.
    fn choose(&self, row: usize, column: usize, ahead: &[f32], costs: &[f32], marks: &mut u64) -> f32;
}

impl Compensation {
    /// From the upper triangle of `H` `[size, size]`, with `damping` times the mean of the diagonal
    /// added to the diagonal. `order` contains the columns in processing order. `None` if the damped matrix
    /// is not positive definite.
    pub fn new(products: &[f32], size: usize, order: &[usize], damping: f64) -> Option<Compensation> {
        on_pool_thread(|| Compensation::factorized(products, size, order, damping))
    }

    fn factorized(products: &[f32], size: usize, order: &[usize], damping: f64) -> Option<Compensation> {
        if damping >= DAMPING_F32
            && let Some(lower) = cholesky_f32::triangle(damped(products, size, order, damping, |x| x as f32), size)
        {
            return Some(Compensation::from_triangle(&lower, size));
        }
        let lower = solve::triangle(damped(products, size, order, damping, |x| x), size)?;
        Some(Compensation::from_triangle(&lower, size))
    }

    /// From the lower Cholesky triangle of the [`damped`] matrix.
    fn from_triangle<T: Copy + Into<f64> + Sync>(lower: &[T], size: usize) -> Compensation {
        let diagonal: Vec<f64> = (0..size).rev().map(|j| lower[j * size + j].into()).collect();
        let costs: Vec<f32> = diagonal.iter().map(|root| (root * root) as f32).collect();
        let inverses: Vec<f64> = diagonal.iter().map(|root| 1.0 / root).collect();
        let mut ratios = vec![0f32; size * size];
        ratios.par_chunks_mut(size.max(1)).zip(lower.par_chunks(size.max(1)).rev()).enumerate().for_each(|(k, (row, lower))| {
            let later = row[k + 1..].iter_mut().zip(&inverses[k + 1..]).zip(lower[..size - 1 - k].iter().rev());
            later.for_each(|((ratio, inverse), x)| *ratio = ((*x).into() * inverse) as f32);
        });
        Compensation { size, ratios, costs }
    }

    /// `R[k][j] / R[j][j]` above the diagonal, in processing order, and zeros elsewhere.
    pub fn ratios(&self) -> &[f32] {
        &self.ratios
    }

    /// Cost of the squared error of each column, in processing order.
    pub fn costs(&self) -> &[f32] {
        &self.costs
    }

    /// Replaces the rows `B` `[n, size]` by `B H⁻¹`, with columns in processing order.
    ///
    /// `H = P D Pᵀ` with the ratios as `P` and the costs as `D`: columns are eliminated from last to
    /// first, divided, and eliminated from first to last, block by block.
    pub fn divide(&self, values: &mut [f32]) {
        on_pool_thread(|| self.divide_blocks(values));
    }

    fn divide_blocks(&self, values: &mut [f32]) {
        let size = self.size;
        let rows = values.len() / size.max(1);
        let mut sums = vec![0f32; rows * SOLVED.min(size)];
        let mut quotients = sums.clone();
        let blocks: Vec<Range<usize>> = (0..size).step_by(SOLVED).map(|first| first..size.min(first + SOLVED)).collect();
        let square = |block: &Range<usize>| Ratios { values: &self.ratios[block.start * size + block.start..], stride: size };
        let inverses: Vec<Vec<f32>> = blocks.par_iter().map(|block| square(block).transposed_inverse(block.len())).collect();
        for (block, inverse) in blocks.iter().zip(&inverses).rev() {
            let (count, end) = (block.len(), block.end);
            if end < size {
                let right = Columns { values: &self.ratios[block.start * size + end..], count, stride: size };
                product(&LeftRows::new(&values[end..], rows, size - end, size), &right, count, Epilogue::NONE, &mut sums);
            }
            let inverse = Rows { values: inverse, count, stride: count };
            eliminate(values, size, block, [&mut sums, &mut quotients], &inverse);
        }
        values.par_chunks_mut(size.max(1)).for_each(|row| row.iter_mut().zip(&self.costs).for_each(|(x, cost)| *x /= cost));
        sums.fill(0.0);
        for (block, inverse) in blocks.iter().zip(&inverses) {
            let (count, start) = (block.len(), block.start);
            if start > 0 {
                let right = Rows { values: &self.ratios[start..], count, stride: size };
                product(&LeftRows::new(values, rows, start, size), &right, count, Epilogue::NONE, &mut sums);
            }
            let inverse = Columns { values: inverse, count, stride: count };
            eliminate(values, size, block, [&mut sums, &mut quotients], &inverse);
        }
    }

    /// Replaces the columns of a weight `[rows, size]`, in processing order, by the values that `rule`
    /// chooses, block by block.
    pub fn apply(&self, weights: &mut [f32], block: usize, rule: &mut impl ColumnRule) {
        on_pool_thread(|| self.apply_blocks(weights, block, rule));
    }

    fn apply_blocks(&self, weights: &mut [f32], block: usize, rule: &mut impl ColumnRule) {
        let size = self.size;
        let rows = weights.len() / size.max(1);
        let mut errors = vec![0f32; weights.len()];
        let mut targets = vec![0f32; rows * block.min(size)];
        for first in (0..size).step_by(block.max(1)) {
            let width = block.min(size - first);
            let targets = &mut targets[..rows * width];
            if first > 0 {
                let right = Rows { values: &self.ratios[first..], count: width, stride: size };
                product(&LeftRows::new(&errors, rows, first, size), &right, width, Epilogue::NONE, targets);
            }
            targets.par_chunks_mut(width).zip(weights.par_chunks(size)).for_each(|(targets, weights)| {
                targets.iter_mut().zip(&weights[first..]).for_each(|(target, weight)| *target += weight);
            });
            let ratios = Ratios { values: &self.ratios[first * size + first..], stride: size };
            let block = Block { ratios, first, costs: &self.costs[first..first + width] };
            block.apply(weights, &mut errors, (size, first), targets, rule);
        }
    }
}

/// `R[k][j] / R[j][j]` of consecutive columns; elements on and below the diagonal are not read.
#[derive(Clone, Copy)]
pub struct Ratios<'a> {
    /// The ratios, from those of the first column on.
    pub values: &'a [f32],
    /// Distance of the rows.
    pub stride: usize,
}

impl Ratios<'_> {
    /// Those of a column to the later ones.
    fn later(&self, column: usize) -> &[f32] {
        &self.values[column * self.stride + column + 1..]
    }

    /// The transposed inverse `[size, size]` of the unit upper triangle of the first columns.
    fn transposed_inverse(&self, size: usize) -> Vec<f32> {
        let mut transposed = vec![0f64; size * size];
        for column in 0..size {
            transposed[column * size + column] = 1.0;
            self.later(column).iter().zip(column + 1..size).for_each(|(ratio, row)| transposed[row * size + column] = f64::from(*ratio));
        }
        solve::inverse(&transposed, size)
    }

    /// Converts the optimal values of columns from `first` on, each under the assumption that the columns in
    /// between are unchanged, into the optimal values when all of them can be changed.
    pub fn free(&self, values: &mut [f32], weights: &[f32], first: usize) {
        for at in 0..values.len() {
            let (done, rest) = values.split_at_mut(at + 1);
            add_scaled(rest, self.later(first + at), weights[at] - done[at]);
        }
    }
}

/// Consecutive columns, processed after all previous columns.
pub struct Block<'a> {
    /// Ratios of the columns.
    pub ratios: Ratios<'a>,
    /// Index of the first column.
    pub first: usize,
    /// Cost of the squared error of each column.
    pub costs: &'a [f32],
}

impl Block<'_> {
    /// Replaces the columns of the block by the values that `rule` chooses, and sets their errors. Rows of
    /// weights and errors have `size` columns, and the block starts at column `start`. `targets` `[rows,
    /// width]` are the optimal values after all previous columns were chosen.
    pub fn apply(&self, weights: &mut [f32], errors: &mut [f32], (size, start): (usize, usize), targets: &mut [f32], rule: &mut impl ColumnRule) {
        let width = self.costs.len();
        if rule.ranks_blocks() {
            let mut free = targets.to_vec();
            let lines = free.par_chunks_mut(width).zip(weights.par_chunks(size));
            lines.for_each(|(values, weights)| self.ratios.free(values, &weights[start..], 0));
            rule.begin_block(self.first, width, &free, self.costs);
        } else {
            rule.begin_block(self.first, width, &[], &[]);
        }
        let (rule, group) = (&*rule, rule.lookahead().max(1));
        let lines = weights.par_chunks_mut(size).zip(errors.par_chunks_mut(size)).zip(targets.par_chunks_mut(width));
        lines.enumerate().for_each(|(row, ((weights, errors), targets))| {
            let (mut marks, mut free) = (0, Vec::with_capacity(group));
            for at in 0..width {
                let column = start + at;
                let count = if at.is_multiple_of(group) { group.min(width - at) } else { 1 };
                free.clear();
                free.extend_from_slice(&targets[at..at + count]);
                self.ratios.free(&mut free, &weights[column..], at);
                let value = rule.choose(row, self.first + at, &free, &self.costs[at..], &mut marks);
                let error = weights[column] - value;
                add_scaled(&mut targets[at + 1..], self.ratios.later(at), error);
                (weights[column], errors[column]) = (value, error);
            }
        });
    }
}

/// Subtracts sums from some columns of rows of `size` values, and multiplies them by the inverse of a
/// triangle.
fn eliminate(values: &mut [f32], size: usize, columns: &Range<usize>, [sums, quotients]: [&mut [f32]; 2], inverse: &impl Right) {
    let (rows, count) = (values.len() / size, columns.len());
    let (sums, quotients) = (&mut sums[..rows * count], &mut quotients[..rows * count]);
    sums.par_chunks_mut(count).zip(values.par_chunks(size)).for_each(|(sums, row)| {
        sums.iter_mut().zip(&row[columns.clone()]).for_each(|(sum, x)| *sum = x - *sum);
    });
    product(&LeftRows::new(sums, rows, count, count), inverse, count, Epilogue::NONE, quotients);
    values.par_chunks_mut(size).zip(quotients.par_chunks(count)).for_each(|(row, quotients)| row[columns.clone()].copy_from_slice(quotients));
}

/// The factors of a symmetric positive definite matrix `H = P D Pᵀ` `[size, size]`, of which only the upper
/// triangle is read: the unit upper triangle `P`, the diagonal of `D`, and the inverse of `P`. They contain
/// NaN if the matrix is not positive definite.
pub fn unit_factors(matrix: &[f64], size: usize) -> [Vec<f64>; 3] {
    let (mut ratios, mut costs, mut inverse) = (matrix.to_vec(), vec![0.0; size], vec![0.0; size * size]);
    (0..size).for_each(|at| inverse[at * size + at] = 1.0);
    for column in (0..size).rev() {
        let pivot = ratios[column * size + column];
        let cost = if pivot > 0.0 { pivot } else { f64::NAN };
        costs[column] = cost;
        let found: Vec<f64> = (0..column).map(|row| ratios[row * size + column] / cost).collect();
        for (row, ratio) in found.iter().enumerate() {
            (row..column).for_each(|at| ratios[row * size + at] -= ratio * cost * found[at]);
            ratios[row * size + column] = *ratio;
            (column..size).for_each(|at| inverse[row * size + at] -= ratio * inverse[column * size + at]);
        }
        ratios[column * size + column] = 1.0;
        ratios[column * size..][..column].fill(0.0);
    }
    [ratios, costs, inverse]
}

/// The number that is added to the diagonal of a matrix: `damping` times its mean.
pub fn damping_of(diagonal: impl ExactSizeIterator<Item = f64>, damping: f64) -> f64 {
    let size = diagonal.len();
    let mean = diagonal.sum::<f64>() / size.max(1) as f64;
    // If all features are zero in all samples, any positive value works.
    if mean > 0.0 { damping * mean } else { 1.0 }
}

/// The damped matrix with columns in reverse order, so that its lower Cholesky triangle corresponds to an
/// upper one. Elements above the diagonal are not set.
fn damped<T: Copy + Default + Send>(products: &[f32], size: usize, order: &[usize], damping: f64, number: impl Fn(f64) -> T + Sync) -> Vec<T> {
    let added = damping_of((0..size).map(|at| f64::from(products[at * size + at])), damping);
    let mut matrix = vec![T::default(); size * size];
    matrix.par_chunks_mut(size.max(1)).enumerate().for_each(|(i, row)| {
        let a = order[size - 1 - i];
        for (j, out) in row[..=i].iter_mut().enumerate() {
            let b = order[size - 1 - j];
            let product = f64::from(products[a.min(b) * size + a.max(b)]);
            *out = number(if i == j { product + added } else { product });
        }
    });
    matrix
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
        let (rows, size) = (5, 290);
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0;
        let features: Vec<f32> = (0..700 * size).map(|i| number(i * i)).collect();
        let mut sums = vec![0f32; size * size];
        super::super::gram::add(&features, size, &mut sums);
        let order: Vec<usize> = (0..size).rev().collect();
        let compensation = Compensation::new(&sums, size, &order, 0.0).unwrap();
        let wanted: Vec<f32> = (0..rows * size).map(|i| number(i * 31)).collect();
        let at = |a: usize, b: usize| f64::from(sums[a.min(b) * size + a.max(b)]);
        let product = |row: usize, column: usize| (0..size).map(|k| f64::from(wanted[row * size + k]) * at(order[k], order[column])).sum::<f64>() as f32;
        let mut values: Vec<f32> = (0..rows * size).map(|i| product(i / size, i % size)).collect();
        compensation.divide(&mut values);
        for (have, want) in values.iter().zip(&wanted) {
            assert!((have - want).abs() < 1e-3, "{have} for {want}");
        }
    }

    #[test]
    fn unit_factors_multiply_to_the_matrix() {
        let size = 9;
        let root: Vec<f64> = (0..size * size).map(|i| f64::from((i as u32).wrapping_mul(2_654_435_761) >> 20) / 2048.0 - 1.0).collect();
        let entry = |i: usize, j: usize| (0..size).map(|k| root[i * size + k] * root[j * size + k]).sum::<f64>() + if i == j { 0.5 } else { 0.0 };
        let matrix: Vec<f64> = (0..size * size).map(|at| if at / size <= at % size { entry(at / size, at % size) } else { f64::NAN }).collect();
        let [ratios, costs, inverse] = unit_factors(&matrix, size);
        for (i, j) in (0..size * size).map(|at| (at / size, at % size)) {
            let product: f64 = (0..size).map(|k| ratios[i * size + k] * costs[k] * ratios[j * size + k]).sum();
            assert!((product - entry(i, j)).abs() < 1e-12, "{i} {j}");
            let unit: f64 = (0..size).map(|k| ratios[i * size + k] * inverse[k * size + j]).sum();
            assert!((unit - if i == j { 1.0 } else { 0.0 }).abs() < 1e-12, "{i} {j}");
        }
        assert!(unit_factors(&[1.0, 2.0, 0.0, 1.0], 2)[1][0].is_nan());
    }
}
