//! Matrix products in f64 with a fixed order of summation: block by block along the inner dimension,
//! without fused multiply-add, so results depend on neither threads nor instruction set.

use rayon::prelude::*;

/// Number of inner elements summed at once.
const BLOCK: usize = 64;
/// Number of rows computed at once.
const HEIGHT: usize = 6;
/// Number of columns computed at once.
const WIDTH: usize = 8;
/// Number of rows per job.
const ROWS: usize = 10 * HEIGHT;

simd! {
    // Not inlined, so that the sums stay in registers.
    #[inline(never)]
    fn tile(factors: &[[f64; HEIGHT]], panel: &[[f64; WIDTH]], sums: &mut [[f64; WIDTH]; HEIGHT]) {
        let mut acc = [[0f64; WIDTH]; HEIGHT];
        for (factors, values) in factors.iter().zip(panel) {
            for lane in 0..HEIGHT {
                for column in 0..WIDTH {
                    acc[lane][column] += factors[lane] * values[column];
                }
            }
        }
        *sums = acc;
    }
}

/// `A B` for `A` `[rows, inner]` and `B` `[inner, columns]`.
pub fn product(a: &[f64], b: &[f64], inner: usize, columns: usize) -> Vec<f64> {
    let rows = a.len() / inner.max(1);
    let mut product = vec![0.0; rows * columns];
    if inner > 0 && columns > 0 {
        let jobs = product.par_chunks_mut(ROWS * columns).zip(a.par_chunks(ROWS * inner));
        jobs.for_each(|(product, a)| band(product, a, b, [inner, columns, columns]));
    }
    product
}

/// `A Aᵀ` for `A` `[rows, inner]`.
pub fn gram(a: &[f64], inner: usize) -> Vec<f64> {
    let rows = a.len() / inner.max(1);
    let mut product = vec![0.0; rows * rows];
    if rows > 0 && inner > 0 {
        let transposed = transposed(a, inner);
        let jobs = product.par_chunks_mut(ROWS * rows).zip(a.par_chunks(ROWS * inner)).enumerate();
        jobs.for_each(|(job, (product, a))| band(product, a, &transposed, [inner, rows, ((job + 1) * ROWS).min(rows)]));
    }
    for row in 0..rows {
        for column in row + 1..rows {
            product[row * rows + column] = product[column * rows + row];
        }
    }
    product
}

/// Computes the first `limit` columns of some rows of a product.
fn band(product: &mut [f64], a: &[f64], b: &[f64], [inner, columns, limit]: [usize; 3]) {
    let (mut panel, mut sums) = ([[0f64; WIDTH]; BLOCK], [[0f64; WIDTH]; HEIGHT]);
    for from in (0..inner).step_by(BLOCK) {
        let count = BLOCK.min(inner - from);
        let mut factors = vec![[[0f64; HEIGHT]; BLOCK]; (a.len() / inner).div_ceil(HEIGHT)];
        for (row, values) in a.chunks_exact(inner).enumerate() {
            values[from..from + count].iter().zip(&mut factors[row / HEIGHT]).for_each(|(value, factors)| factors[row % HEIGHT] = *value);
        }
        for left in (0..limit).step_by(WIDTH) {
            let width = WIDTH.min(limit - left);
            for (panel, row) in panel[..count].iter_mut().zip(b[from * columns..].chunks(columns)) {
                panel[..width].copy_from_slice(&row[left..left + width]);
            }
            for (rows, factors) in product.chunks_mut(HEIGHT * columns).zip(&factors) {
                tile(&factors[..count], &panel[..count], &mut sums);
                for (row, sums) in rows.chunks_exact_mut(columns).zip(&sums) {
                    row[left..left + width].iter_mut().zip(sums).for_each(|(x, sum)| *x += sum);
                }
            }
        }
    }
}

/// The transpose of a matrix with `columns` columns.
pub fn transposed<T: Copy + Default + Send + Sync>(matrix: &[T], columns: usize) -> Vec<T> {
    const SIDE: usize = 32;
    let rows = matrix.len() / columns.max(1);
    let mut out = vec![T::default(); matrix.len()];
    out.par_chunks_mut((SIDE * rows).max(1)).enumerate().for_each(|(job, band)| {
        let left = job * SIDE;
        for top in (0..rows).step_by(SIDE) {
            for (column, line) in band.chunks_exact_mut(rows).enumerate() {
                for row in top..rows.min(top + SIDE) {
                    line[row] = matrix[row * columns + left + column];
                }
            }
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(count: usize, seed: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 7919 + seed) % 1013) as f64 / 500.0 - 1.0).collect()
    }

    #[test]
    fn products_are_correct_and_independent_of_threads() {
        for (rows, inner, columns) in [(1, 1, 1), (7, 65, 9), (130, 200, 61), (3, 0, 4)] {
            let (a, b) = (matrix(rows * inner, 1), matrix(inner * columns, 2));
            let made =
                |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| (product(&a, &b, inner, columns), gram(&a, inner)));
            let (found, squares) = made(1);
            if inner > 0 {
                let entry = |row: usize, column: usize| (0..inner).map(|i| a[row * inner + i] * b[i * columns + column]).sum::<f64>();
                assert!(found.iter().enumerate().all(|(at, x)| (x - entry(at / columns, at % columns)).abs() < 1e-9), "{rows} {inner} {columns}");
                let square = |row: usize, column: usize| (0..inner).map(|i| a[row * inner + i] * a[column * inner + i]).sum::<f64>();
                assert!(squares.iter().enumerate().all(|(at, x)| (x - square(at / rows, at % rows)).abs() < 1e-9));
            }
            assert_eq!((found, squares), made(3));
        }
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
