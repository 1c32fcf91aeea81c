//! Blocked Cholesky factorization in f32, several times as fast as that in f64.
//!
//! Squares on the diagonal are factorized in f64; everything else consists of matrix products.

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::matmul::{Columns, Left, LeftRows, product_serial};
use super::product::product;
use super::solve;

/// Number of columns eliminated at once.
const WIDTH: usize = 256;
/// Number of rows per job.
const ROWS: usize = 240;

/// Replaces a matrix `[size, size]`, of which only the lower triangle is read, by its lower Cholesky
/// triangle. Elements above the diagonal are undefined. `None` if the matrix is not positive definite in
/// f32.
pub fn triangle(mut matrix: Vec<f32>, size: usize) -> Option<Vec<f32>> {
    for from in (0..size).step_by(WIDTH) {
        let count = WIDTH.min(size - from);
        let (above, below) = matrix.split_at_mut((from + count) * size);
        let square: Vec<f64> = above[from * size..].chunks_exact(size).flat_map(|row| &row[from..from + count]).map(|x| f64::from(*x)).collect();
        let square = solve::triangle(square, count)?;
        for (row, found) in above[from * size..].chunks_exact_mut(size).zip(square.chunks_exact(count)) {
            row[from..from + count].iter_mut().zip(found).for_each(|(x, found)| *x = *found as f32);
        }
        let height = below.len() / size;
        if height == 0 {
            break;
        }
        let inverse = inverse(&square, count);
        let mut panel = vec![0f32; height * count];
        let divisor = Columns { values: &inverse, count, stride: count };
        product(&LeftRows::new(&below[from..], height, count, size), &divisor, count, Epilogue::NONE, &mut panel);
        let negative: Vec<f32> = panel.par_iter().map(|x| -x).collect();
        below.par_chunks_mut(ROWS * size).enumerate().for_each(|(job, rows)| {
            let (first, height) = (job * ROWS, rows.len() / size);
            for (row, found) in rows.chunks_exact_mut(size).zip(panel[first * count..].chunks_exact(count)) {
                row[from..from + count].copy_from_slice(found);
            }
            let width = first + height;
            let left = Left::pack(&negative[first * count..], height, count, count);
            let right = Columns { values: &panel, count: width, stride: count };
            product_serial(&left, &right, width, Epilogue::ACCUMULATE, &mut rows[from + count..], size);
        });
    }
    Some(matrix)
}

/// The inverse of a lower triangle `[size, size]`.
fn inverse(lower: &[f64], size: usize) -> Vec<f32> {
    let mut inverse = vec![0f32; size * size];
    // Columns of the inverse are the solutions of `L x = e`.
    let columns: Vec<Vec<f64>> = (0..size).into_par_iter().map(|column| solution(lower, size, column)).collect();
    for (column, values) in columns.iter().enumerate() {
        (column..size).for_each(|row| inverse[row * size + column] = values[row] as f32);
    }
    inverse
}

/// The solution of `L x = e` for a unit vector.
fn solution(lower: &[f64], size: usize, unit: usize) -> Vec<f64> {
    let mut x = vec![0f64; size];
    for row in unit..size {
        let line = &lower[row * size..][..=row];
        let known: f64 = line[unit..row].iter().zip(&x[unit..]).map(|(l, x)| l * x).sum();
        x[row] = (if row == unit { 1.0 } else { 0.0 } - known) / line[row];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_triangle_is_that_in_f64() {
        for size in [1, 40, WIDTH, WIDTH + 1, 2 * WIDTH + 37, WIDTH + 2 * ROWS + 5] {
            let number = |i: usize| f64::from((i as u32).wrapping_mul(2_654_435_761) >> 20) / 2048.0 - 1.0;
            let root: Vec<f64> = (0..size * size).map(number).collect();
            let entry =
                |i: usize, j: usize| (0..size).map(|k| root[i * size + k] * root[j * size + k]).sum::<f64>() + if i == j { 0.3 * size as f64 } else { 0.0 };
            let matrix: Vec<f64> = (0..size * size).map(|at| if at % size <= at / size { entry(at / size, at % size) } else { f64::NAN }).collect();
            let expected = solve::triangle(matrix.clone(), size).unwrap();
            let mut matrix: Vec<f32> = matrix.iter().map(|x| *x as f32).collect();
            let factorize =
                |threads: usize| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| triangle(matrix.clone(), size).unwrap());
            let found = factorize(1);
            let lower = |at: &usize| at % size <= at / size;
            for at in (0..size * size).filter(lower) {
                assert!((f64::from(found[at]) - expected[at]).abs() < 1e-5 * (size as f64).sqrt(), "{size}: {} for {}", found[at], expected[at]);
            }
            let bits = |values: &[f32]| (0..size * size).filter(lower).map(|at| values[at].to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&factorize(3)));
            let last = matrix.len() - 1;
            matrix[last] = -1.0;
            assert!(triangle(matrix, size).is_none());
        }
    }
}
