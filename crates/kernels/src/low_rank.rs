//! Best low-rank approximation of a matrix: by squared error (Eckart and Young), or by the error of a
//! layer's outputs for given inputs (Wang et al., *SVD-LLM*, 2024, <https://arxiv.org/abs/2403.07378>).
//!
//! With `H = XᵀX` of the inputs, `‖(W - W') Xᵀ‖²` is minimal if `W'` is `W` projected onto the leading
//! left singular vectors of `W S`, for any `S` with `S Sᵀ = H`. These are eigenvectors of `W H Wᵀ`, so
//! if there are at most as many outputs as inputs, neither `S` nor its inverse is needed, and `H` may be
//! singular. Otherwise they are computed from the eigenvectors of `Sᵀ Wᵀ W S`.

use super::compensation::damping_of;
use super::dense::{gram, product, transposed};
use super::eigen::Eigen;
use super::solve::{Factor, triangle};

/// Damping of the diagonal of `H`, relative to its mean, so that directions without any sample have a
/// defined order.
const DAMPING: f64 = 1e-6;

/// A low-rank factorization `outer · inner`.
pub struct LowRank {
    /// The factor that is applied last, `[rows, rank]`.
    pub outer: Vec<f64>,
    /// The factor that is applied first, `[rank, size]`.
    pub inner: Vec<f64>,
    /// Relative squared error: of the outputs if inputs are known, otherwise of the matrix.
    pub lost: f64,
    /// Additional damping of the diagonal, relative to its mean, that was needed to make `H` positive
    /// definite. Usually 0.
    pub damping: f64,
}

impl LowRank {
    /// Approximates a matrix `[rows, size]`. `products` is the upper triangle of `H` `[size, size]`, if
    /// inputs are known. `None` if a number is not finite.
    pub fn new(matrix: &[f32], size: usize, rank: usize, products: Option<&[f32]>) -> Option<LowRank> {
        let rows = matrix.len() / size.max(1);
        let matrix: Vec<f64> = matrix.iter().map(|x| f64::from(*x)).collect();
        let mut found = match products.map(|products| damped(symmetric(products, size), size)) {
            None => nearest(&matrix, [rows, size, rank])?,
            Some(moments) if rows <= size => by_outputs(&matrix, [rows, size, rank], &moments)?,
            Some(moments) => by_inputs(&matrix, [rows, size, rank], moments)?,
        };
        found.balance(size, rank);
        Some(found)
    }

    /// Scales both factors to the same norm in each direction, so that both use the range of their dtype
    /// equally.
    fn balance(&mut self, size: usize, rank: usize) {
        let length = |sum: f64| sum.sqrt();
        for direction in 0..rank {
            let outer = length(self.outer.iter().skip(direction).step_by(rank).map(|x| x * x).sum());
            let row = &mut self.inner[direction * size..][..size];
            let inner = length(row.iter().map(|x| x * x).sum());
            let factor = (inner / outer).sqrt();
            if factor.is_normal() {
                row.iter_mut().for_each(|x| *x /= factor);
                self.outer.iter_mut().skip(direction).step_by(rank).for_each(|x| *x *= factor);
            }
        }
    }
}

/// Expands an upper triangle `[size, size]` to a symmetric matrix.
pub fn symmetric(upper: &[f32], size: usize) -> Vec<f64> {
    (0..size * size).map(|at| upper[(at / size).min(at % size) * size + (at / size).max(at % size)].into()).collect()
}

/// Adds the damping to the diagonal.
fn damped(mut moments: Vec<f64>, size: usize) -> Vec<f64> {
    let added = damping_of((0..size).map(|at| moments[at * size + at]), DAMPING);
    (0..size).for_each(|at| moments[at * size + at] += added);
    moments
}

/// Relative sum of the eigenvalues beyond the rank. It is summed directly, because a difference of large
/// sums would be dominated by rounding errors.
fn lost(values: &[f64], rank: usize) -> f64 {
    let sum = |values: &[f64]| values.iter().map(|value| value.max(0.0)).sum::<f64>();
    let all = sum(values);
    if all > 0.0 { sum(&values[rank.min(values.len())..]) / all } else { 0.0 }
}

fn nearest(matrix: &[f64], [rows, size, rank]: [usize; 3]) -> Option<LowRank> {
    let (outer, inner, lost) = if rows <= size {
        let found = Eigen::new(gram(matrix, size), rows, rank)?;
        (transposed(&found.vectors, rows), product(&found.vectors, matrix, rows, size), lost(&found.values, rank))
    } else {
        let found = Eigen::new(gram(&transposed(matrix, size), rows), size, rank)?;
        (product(matrix, &transposed(&found.vectors, size), size, rank), found.vectors, lost(&found.values, rank))
    };
    Some(LowRank { outer, inner, lost, damping: 0.0 })
}

/// Uses eigenvectors of `W H Wᵀ`.
fn by_outputs(matrix: &[f64], [rows, size, rank]: [usize; 3], moments: &[f64]) -> Option<LowRank> {
    let outputs = product(&product(matrix, moments, size, size), &transposed(matrix, size), size, rows);
    let even: Vec<f64> = (0..rows * rows).map(|at| f64::midpoint(outputs[at], outputs[at % rows * rows + at / rows])).collect();
    let found = Eigen::new(even, rows, rank)?;
    Some(LowRank { outer: transposed(&found.vectors, rows), inner: product(&found.vectors, matrix, rows, size), lost: lost(&found.values, rank), damping: 0.0 })
}

/// Uses eigenvectors of `Sᵀ Wᵀ W S`. `W S` times these vectors yields the directions of the projection.
fn by_inputs(matrix: &[f64], [rows, size, rank]: [usize; 3], moments: Vec<f64>) -> Option<LowRank> {
    let mean = (0..size).map(|at| moments[at * size + at]).sum::<f64>() / size.max(1) as f64;
    if !mean.is_finite() {
        return None;
    }
    let mut damping = 0.0;
    let mut root = loop {
        let mut damped = moments.clone();
        (0..size).for_each(|at| damped[at * size + at] += damping * mean);
        match triangle(damped, size) {
            Some(root) => break root,
            None if damping >= 1.0 => return None,
            None => damping = f64::max(10.0 * damping, 10.0 * DAMPING),
        }
    };
    (0..size).for_each(|row| root[row * size + row + 1..(row + 1) * size].fill(0.0));
    let scaled = product(matrix, &root, size, size);
    drop(root);
    let found = Eigen::new(gram(&transposed(&scaled, size), rows), size, rank)?;
    // Normalized directions, one per row. Directions of zero length are zero.
    let mut directions = product(&found.vectors, &transposed(&scaled, size), size, rows);
    drop(scaled);
    let longest = directions.chunks_exact(rows).map(|row| row.iter().map(|x| x * x).sum::<f64>()).fold(0.0, f64::max);
    for row in directions.chunks_exact_mut(rows) {
        let square: f64 = row.iter().map(|x| x * x).sum();
        let factor = if square > longest * 1e-20 { 1.0 / square.sqrt() } else { 0.0 };
        row.iter_mut().for_each(|x| *x *= factor);
    }
    // They are orthogonal except for rounding errors, which solving the linear system compensates.
    let mut angles = gram(&directions, rows);
    (0..rank).for_each(|at| angles[at * rank + at] = if angles[at * rank + at] > 0.0 { angles[at * rank + at] } else { 1.0 });
    let mut inner = transposed(&product(&directions, matrix, rows, size), size);
    Factor::new(angles, rank)?.solve(&mut inner);
    Some(LowRank { outer: transposed(&directions, rows), inner: transposed(&inner, rank), lost: lost(&found.values, rank), damping })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * i * 7919 + i * 104_729 + seed * 31) % 10_007) as f32 / 5000.0 - 1.0).collect()
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|x| f64::from(*x)).collect()
    }

    /// Reference implementation of `‖(W - W') Xᵀ‖²`.
    fn error(matrix: &[f32], found: &LowRank, rank: usize, inputs: &[f64], size: usize) -> f64 {
        let near = product(&found.outer, &found.inner, rank, size);
        let gone: Vec<f64> = wide(matrix).iter().zip(&near).map(|(a, b)| a - b).collect();
        product(&gone, &transposed(inputs, size), size, inputs.len() / size).iter().map(|x| x * x).sum()
    }

    fn moments(inputs: &[f64], size: usize) -> Vec<f32> {
        gram(&transposed(inputs, size), inputs.len() / size).iter().map(|x| *x as f32).collect()
    }

    #[test]
    fn a_low_rank_matrix_is_recovered() {
        for (rows, size, rank) in [(30, 50, 7), (50, 30, 7), (24, 24, 1)] {
            let exact = product(&wide(&matrix(rows * rank, 1)), &wide(&matrix(rank * size, 2)), rank, size);
            let exact: Vec<f32> = exact.iter().map(|x| *x as f32).collect();
            let inputs = wide(&matrix(200 * size, 3));
            for products in [None, Some(moments(&inputs, size))] {
                let found = LowRank::new(&exact, size, rank, products.as_deref()).unwrap();
                assert!(found.lost < 1e-9);
                let near = product(&found.outer, &found.inner, rank, size);
                assert!(near.iter().zip(&exact).all(|(a, b)| (a - f64::from(*b)).abs() < 1e-4), "{rows} {size}");
                // Both factors have the same norm in each direction.
                let outer: f64 = found.outer.iter().step_by(rank).map(|x| x * x).sum();
                let inner: f64 = found.inner[..size].iter().map(|x| x * x).sum();
                assert!((outer - inner).abs() < 1e-9 * outer);
            }
        }
    }

    #[test]
    fn inputs_reduce_the_output_error_and_the_loss_is_reported() {
        for (rows, size, rank) in [(30, 50, 8), (50, 30, 8)] {
            let matrix = matrix(rows * size, 5);
            let inputs: Vec<f64> = wide(&self::matrix(300 * size, 6)).iter().enumerate().map(|(i, x)| x * if i % size % 7 == 3 { 20.0 } else { 1.0 }).collect();
            let (plain, aware) = (LowRank::new(&matrix, size, rank, None).unwrap(), LowRank::new(&matrix, size, rank, Some(&moments(&inputs, size))).unwrap());
            let [plain_error, aware_error] = [&plain, &aware].map(|found| error(&matrix, found, rank, &inputs, size));
            assert!(aware_error < 0.7 * plain_error, "{aware_error} for {plain_error}");
            let all: f64 = product(&wide(&matrix), &transposed(&inputs, size), size, 300).iter().map(|x| x * x).sum();
            assert!((aware.lost - aware_error / all).abs() < 1e-3 * aware.lost, "{} {}", aware.lost, aware_error / all);
            // Projections onto slightly different directions are worse.
            let mut perturbed = LowRank { outer: aware.outer.clone(), inner: aware.inner.clone(), lost: 0.0, damping: 0.0 };
            perturbed.inner.iter_mut().enumerate().for_each(|(i, x)| *x *= 1.0 + 0.01 * ((i % 3) as f64 - 1.0));
            assert!(error(&matrix, &perturbed, rank, &inputs, size) > aware_error);
        }
    }

    #[test]
    fn singular_moments_zeros_and_nonfinite_values() {
        for (rows, size) in [(20, 40), (40, 20)] {
            let matrix = matrix(rows * size, 7);
            // With fewer samples than inputs, outputs are exact if the rank is the number of samples.
            let inputs = wide(&self::matrix(5 * size, 8));
            let found = LowRank::new(&matrix, size, 5, Some(&moments(&inputs, size))).unwrap();
            let all: f64 = product(&wide(&matrix), &transposed(&inputs, size), size, 5).iter().map(|x| x * x).sum();
            assert!(error(&matrix, &found, 5, &inputs, size) < 1e-6 * all);
            let none = LowRank::new(&matrix, size, 3, Some(&vec![0.0; size * size])).unwrap();
            assert!(none.outer.iter().chain(&none.inner).all(|x| x.is_finite()));
            let zeros = LowRank::new(&vec![0.0; rows * size], size, 3, Some(&moments(&inputs, size))).unwrap();
            assert!(zeros.outer.iter().chain(&zeros.inner).all(|x| x.is_finite()) && zeros.lost == 0.0);
            assert!(LowRank::new(&vec![f32::NAN; rows * size], size, 3, None).is_none());
            assert!(LowRank::new(&matrix, size, 3, Some(&vec![f32::INFINITY; size * size])).is_none());
        }
    }
}
