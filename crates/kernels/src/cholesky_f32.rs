//! Blocked Cholesky factorization in f32, several times as fast as that in f64.
//!
//! Squares on the diagonal are factorized in f64; everything else consists of matrix products. The products
//! of all earlier columns are subtracted from a block of columns at once, so that the matrix is only read.

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::operands::{Columns, LeftRows};
use super::product::product;
use super::solve;

/// Number of columns eliminated at once.
const WIDTH: usize = 256;
/// Number of earlier columns whose products are summed in registers. Longer sums have larger rounding errors.
const SUMMED: usize = 1024;

/// Replaces a matrix `[size, size]`, of which only the lower triangle is read, by its lower Cholesky
/// triangle. Elements above the diagonal are undefined. `None` if the matrix is not positive definite in
/// f32.
pub fn triangle(mut matrix: Vec<f32>, size: usize) -> Option<Vec<f32>> {
    let mut block = vec![0f32; size * WIDTH.min(size)];
    let mut panel = block.clone();
    for from in (0..size).step_by(WIDTH) {
        let (count, height) = (WIDTH.min(size - from), size - from);
        let rows = &mut matrix[from * size..];
        let block = &mut block[..height * count];
        for start in (0..from).step_by(SUMMED) {
            let inner = SUMMED.min(from - start);
            let epilogue = if start == 0 { Epilogue::NONE } else { Epilogue::ACCUMULATE };
            let right = Columns { values: &rows[start..], count, stride: size };
            product(&LeftRows::new(&rows[start..], height, inner, size), &right, count, epilogue, block);
        }
        block.par_chunks_mut(count).zip(rows.par_chunks(size)).for_each(|(block, row)| {
            block.iter_mut().zip(&row[from..]).for_each(|(sum, x)| *sum = x - *sum);
        });
        let (square, below) = block.split_at(count * count);
        let square = solve::triangle(square.iter().map(|x| f64::from(*x)).collect(), count)?;
        let panel = &mut panel[..below.len()];
        let divisor = Columns { values: &solve::inverse(&square, count), count, stride: count };
        product(&LeftRows::new(below, height - count, count, count), &divisor, count, Epilogue::NONE, panel);
        let (first, others) = rows.split_at_mut(count * size);
        for (row, found) in first.chunks_exact_mut(size).zip(square.chunks_exact(count)) {
            row[from..from + count].iter_mut().zip(found).for_each(|(x, found)| *x = *found as f32);
        }
        others.par_chunks_mut(size).zip(panel.par_chunks(count)).for_each(|(row, found)| row[from..from + count].copy_from_slice(found));
    }
    Some(matrix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_triangle_is_that_in_f64() {
        for size in [1, 40, WIDTH, WIDTH + 1, 2 * WIDTH + 37, 5 * WIDTH + 5] {
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
