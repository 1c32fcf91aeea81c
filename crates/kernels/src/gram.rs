//! Gram matrices of features over rows: the second moments of a layer's inputs.

use super::matmul::{LeftRows, Rows};
use super::matmul_gradient::long_product;
use super::pool::on_pool_thread;

/// Number of features whose products with all later ones are computed at once.
const STRIP: usize = 384;

/// Adds `Xᵀ X` of rows `X` `[n, size]` to the upper triangle of `sums` `[size, size]`. Elements below
/// the diagonal are undefined.
pub fn add(rows: &[f32], size: usize, sums: &mut [f32]) {
    on_pool_thread(|| strips([rows, rows], size, |first| first, sums));
}

/// Adds `Xᵀ Y` of rows `X` and `Y` `[n, size]` to `sums` `[size, size]`.
pub fn add_cross(left: &[f32], right: &[f32], size: usize, sums: &mut [f32]) {
    on_pool_thread(|| strips([left, right], size, |_| 0, sums));
}

/// Products of strips of left features with right features, starting at the feature `begin(first)`.
fn strips([left, right]: [&[f32]; 2], size: usize, begin: impl Fn(usize) -> usize, sums: &mut [f32]) {
    let count = left.len() / size.max(1);
    for first in (0..size).step_by(STRIP) {
        let (height, begin) = (STRIP.min(size - first), begin(first));
        let width = size - begin;
        let mut products = vec![0f32; height * width];
        let left = |range: std::ops::Range<usize>| LeftRows::transposed(&left[range.start * size + first..], height, range.len(), size);
        let right = |range: std::ops::Range<usize>| Rows { values: &right[range.start * size + begin..], count: width, stride: size };
        long_product([height, count, width], left, right, &mut products);
        for (row, products) in products.chunks_exact(width).enumerate() {
            let sums = &mut sums[(first + row) * size + begin..][..width];
            sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_match_the_definition() {
        for (count, size) in [(0, 3), (5, 1), (37, 70), (600, 400)] {
            let rows: Vec<f32> = (0..count * size).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 300.0).collect();
            let others: Vec<f32> = rows.iter().map(|x| 1.0 - x).collect();
            let (mut sums, mut cross) = (vec![1.0; size * size], vec![1.0; size * size]);
            add(&rows, size, &mut sums);
            add_cross(&rows, &others, size, &mut cross);
            for at in (0..size * size).step_by(7) {
                let want =
                    |other: &[f32]| 1.0 + (0..count).map(|row| f64::from(rows[row * size + at / size]) * f64::from(other[row * size + at % size])).sum::<f64>();
                // Below the diagonal, the transposed sums.
                let upper = if at / size <= at % size { sums[at] } else { sums[at % size * size + at / size] };
                for (have, want) in [(upper, want(&rows)), (cross[at], want(&others))] {
                    assert!(
                        (f64::from(have) - want).abs() < 1e-6 * (1000.0 + want.abs()) * (1.0 + count as f64).sqrt(),
                        "{count} {size} {at}: {have} for {want}"
                    );
                }
            }
        }
    }
}
