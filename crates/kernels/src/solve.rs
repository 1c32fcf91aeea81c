//! Linear systems with a symmetric positive definite matrix in f64: blocked Cholesky factorization
//! (Golub and van Loan, *Matrix Computations*, 4.2).
//!
//! Products are summed in column order, block by block, without fused multiply-add, so results depend on
//! neither threads nor instruction set.

use std::ops::Range;

use rayon::prelude::*;

/// Number of columns eliminated at once.
const BLOCK: usize = 64;
/// Number of rows updated at once.
const HEIGHT: usize = 6;
/// Number of columns updated at once.
const WIDTH: usize = 8;
/// Number of rows per job.
const ROWS: usize = 10 * HEIGHT;

/// Cholesky factor of a symmetric positive definite matrix.
pub struct Factor {
    size: usize,
    /// The lower triangle; elements above the diagonal are undefined.
    lower: Vec<f64>,
    /// Its transpose; elements below the diagonal are undefined.
    upper: Vec<f64>,
}

#[inline(always)]
fn part(factors: &[[f64; HEIGHT]], panel: &[[f64; WIDTH]]) -> [[f64; WIDTH]; HEIGHT] {
    let mut sums = [[0f64; WIDTH]; HEIGHT];
    for (factors, values) in factors.iter().zip(panel) {
        for lane in 0..HEIGHT {
            for column in 0..WIDTH {
                sums[lane][column] += factors[lane] * values[column];
            }
        }
    }
    sums
}

simd! {
    // Not inlined, so that the sums stay in registers.
    #[inline(never)]
    fn products(factors: &[[f64; HEIGHT]], panel: &[[f64; WIDTH]], tile: &mut [[f64; WIDTH]; HEIGHT]) {
        *tile = part(factors, panel);
    }
}

/// `row[to] -= Σ row[from + i] · strip[i][to]` for rows of `size` elements, over the columns of a block.
fn eliminate(rows: &mut [f64], size: usize, from: usize, count: usize, to: Range<usize>, strip: &[f64]) {
    let mut factors = vec![[[0f64; HEIGHT]; BLOCK]; (rows.len() / size).div_ceil(HEIGHT)];
    for (index, row) in rows.chunks_exact(size).enumerate() {
        row[from..from + count].iter().zip(&mut factors[index / HEIGHT]).for_each(|(x, factors)| factors[index % HEIGHT] = *x);
    }
    let (mut panel, mut tile) = ([[0f64; WIDTH]; BLOCK], [[0f64; WIDTH]; HEIGHT]);
    for left in to.clone().step_by(WIDTH) {
        let columns = left..to.end.min(left + WIDTH);
        for (panel, row) in panel[..count].iter_mut().zip(strip.chunks_exact(size)) {
            panel[..columns.len()].copy_from_slice(&row[columns.clone()]);
        }
        for (rows, factors) in rows.chunks_mut(HEIGHT * size).zip(&factors) {
            products(&factors[..count], &panel[..count], &mut tile);
            for (row, tile) in rows.chunks_exact_mut(size).zip(&tile) {
                row[columns.clone()].iter_mut().zip(tile).for_each(|(x, product)| *x -= product);
            }
        }
    }
}

/// Replaces a matrix `[size, size]`, of which only the lower triangle is read, by its lower Cholesky
/// triangle `L`. Elements above the diagonal are undefined. `None` if the matrix is not positive
/// definite.
pub fn triangle(mut matrix: Vec<f64>, size: usize) -> Option<Vec<f64>> {
    let mut strip = vec![0.0; BLOCK.min(size) * size];
    for from in (0..size).step_by(BLOCK) {
        let count = BLOCK.min(size - from);
        let (above, below) = matrix.split_at_mut((from + count) * size);
        for column in from..from + count {
            let (done, rest) = above.split_at_mut(column * size);
            let row = &mut rest[..size];
            for before in from..column {
                row[before] /= done[before * size + before];
                let x = row[before];
                (before + 1..column).for_each(|at| row[at] -= x * done[at * size + before]);
                row[column] -= x * x;
            }
            let pivot = row[column];
            if pivot.is_nan() || pivot <= 0.0 {
                return None;
            }
            row[column] = pivot.sqrt();
        }
        let next = from + count;
        let transpose = |strip: &mut [f64], rows: &[f64], first: usize| {
            for (step, out) in strip.chunks_exact_mut(size).take(count).enumerate() {
                rows.chunks_exact(size).zip(&mut out[first..]).for_each(|(row, out)| *out = row[from + step]);
            }
        };
        transpose(&mut strip, &above[from * size..], from);
        below.par_chunks_mut(ROWS * size).for_each(|rows| rows.chunks_exact_mut(size).for_each(|row| forward(row, &strip, size, from, count)));
        transpose(&mut strip, below, next);
        below.par_chunks_mut(ROWS * size).enumerate().for_each(|(job, rows)| {
            let end = (next + (job + 1) * ROWS).min(size);
            eliminate(rows, size, from, count, next..end, &strip);
        });
    }
    Some(matrix)
}

simd! {
    /// The inverse of a lower triangle `[size, size]`; elements above the diagonal are not read.
    pub(super) fn inverse(lower: &[f64], size: usize) -> Vec<f32> {
        let mut inverse = vec![0f64; size * size];
        for (index, line) in lower.chunks_exact(size.max(1)).enumerate() {
            let (done, rest) = inverse.split_at_mut(index * size);
            let row = &mut rest[..=index];
            row[index] = 1.0;
            for (at, (factor, done)) in line[..index].iter().zip(done.chunks_exact(size)).enumerate() {
                row[..=at].iter_mut().zip(done).for_each(|(x, done)| *x -= factor * done);
            }
            row.iter_mut().for_each(|x| *x /= line[index]);
        }
        inverse.iter().map(|x| *x as f32).collect()
    }
}

impl Factor {
    /// Factorizes a matrix `[size, size]`. `None` if it is not positive definite.
    pub fn new(matrix: Vec<f64>, size: usize) -> Option<Factor> {
        let lower = triangle(matrix, size)?;
        let mut upper = vec![0.0; size * size];
        upper.par_chunks_mut(size.max(1)).enumerate().for_each(|(row, out)| (row..size).for_each(|column| out[column] = lower[column * size + row]));
        Some(Factor { size, lower, upper })
    }

    /// Solves `A x = b` in place for every row `b` of a matrix.
    pub fn solve(&self, rows: &mut [f64]) {
        let size = self.size;
        rows.par_chunks_mut((ROWS * size).max(1)).for_each(|rows| {
            for from in (0..size).step_by(BLOCK) {
                let count = BLOCK.min(size - from);
                rows.chunks_exact_mut(size).for_each(|row| forward(row, &self.upper[from * size..], size, from, count));
                eliminate(rows, size, from, count, from + count..size, &self.upper[from * size..]);
            }
            for from in (0..size).step_by(BLOCK).rev() {
                let count = BLOCK.min(size - from);
                rows.chunks_exact_mut(size).for_each(|row| backward(row, &self.lower[from * size..], size, from, count));
                eliminate(rows, size, from, count, 0..from, &self.lower[from * size..]);
            }
        });
    }
}

/// Forward substitution within a block, given its rows of the transposed triangle.
fn forward(row: &mut [f64], upper: &[f64], size: usize, from: usize, count: usize) {
    for step in 0..count {
        let line = &upper[step * size + from..][step..count];
        let (x, rest) = row[from + step..from + count].split_at_mut(1);
        x[0] /= line[0];
        rest.iter_mut().zip(&line[1..]).for_each(|(b, u)| *b -= x[0] * u);
    }
}

/// Backward substitution within a block, given its rows of the triangle.
fn backward(row: &mut [f64], lower: &[f64], size: usize, from: usize, count: usize) {
    for step in (0..count).rev() {
        let line = &lower[step * size + from..][..=step];
        let (rest, x) = row[from..=from + step].split_at_mut(step);
        x[0] /= line[step];
        rest.iter_mut().zip(line).for_each(|(b, l)| *b -= x[0] * l);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positive(size: usize) -> Vec<f64> {
        let root: Vec<f64> = (0..size * size).map(|i| ((i * 7919 % 101) as f64 / 50.0) - 1.0).collect();
        let entry = |i: usize, j: usize| (0..size).map(|k| root[i * size + k] * root[j * size + k]).sum::<f64>() + if i == j { 0.1 } else { 0.0 };
        (0..size * size).map(|at| entry(at / size, at % size)).collect()
    }

    #[test]
    fn solutions_satisfy_the_equations() {
        for (size, rows) in [(1, 1), (20, 3), (64, 5), (65, 40), (200, 70)] {
            let matrix = positive(size);
            let x: Vec<f64> = (0..rows * size).map(|i| (i % 13) as f64 - 7.0).collect();
            let product = |at: usize| (0..size).map(|j| matrix[at % size * size + j] * x[at / size * size + j]).sum::<f64>();
            let b: Vec<f64> = (0..rows * size).map(product).collect();
            let solve = |threads| {
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                    let mut solved = b.clone();
                    Factor::new(matrix.clone(), size).unwrap().solve(&mut solved);
                    solved
                })
            };
            let solved = solve(1);
            assert!(solved.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6 * size as f64), "{size}");
            assert_eq!(solved, solve(3));
        }
    }

    #[test]
    fn a_matrix_that_is_not_positive_definite_has_no_factor() {
        assert!(Factor::new(vec![1.0, 2.0, 2.0, 1.0], 2).is_none());
        assert!(Factor::new(vec![f64::NAN], 1).is_none());
        let mut matrix = positive(100);
        matrix[80 * 100 + 80] = -1.0;
        assert!(Factor::new(matrix, 100).is_none());
    }
}
