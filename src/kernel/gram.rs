//! Sums of products of features over rows: the second moments of what a layer reads.

use super::matmul::{Left, Rows};
use super::matmul_gradient::long_product;

/// Features whose products with all later ones are made at once.
const STRIP: usize = 384;

/// Adds `Xᵀ X` of rows `X` `[n, size]` to the upper triangle of `sums` `[size, size]`; what is below is left as it is.
pub fn add(rows: &[f32], size: usize, sums: &mut [f32]) {
    let count = rows.len() / size.max(1);
    for first in (0..size).step_by(STRIP) {
        let (height, width) = (STRIP.min(size - first), size - first);
        let mut products = vec![0f32; height * width];
        let left = |range: std::ops::Range<usize>| Left::pack_transposed(&rows[range.start * size + first..], height, range.len(), size);
        let right = |range: std::ops::Range<usize>| Rows { values: &rows[range.start * size + first..], count: width, stride: size };
        long_product([height, count, width], left, right, &mut products);
        for (row, products) in products.chunks_exact(width).enumerate() {
            let sums = &mut sums[(first + row) * size + first..][..width];
            sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_products_of_features() {
        for (count, size) in [(0, 3), (5, 1), (37, 70), (600, 400)] {
            let rows: Vec<f32> = (0..count * size).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 300.0).collect();
            let mut sums = vec![1.0; size * size];
            add(&rows, size, &mut sums);
            for (at, have) in sums.iter().enumerate().step_by(7).filter(|(at, _)| at / size <= at % size) {
                let want = 1.0 + (0..count).map(|row| f64::from(rows[row * size + at / size]) * f64::from(rows[row * size + at % size])).sum::<f64>();
                assert!((f64::from(*have) - want).abs() < 1e-4 * (1.0 + want.abs()), "{count} {size} {at}: {have} for {want}");
            }
        }
    }
}
