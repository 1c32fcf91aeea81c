//! Gram matrices of features over rows: the second moments of a layer's inputs.

use rayon::prelude::*;

use super::matmul::Operands;
use super::operands::{LeftRows, Rows};
use super::pairs;
use super::pool::on_pool_thread;
use super::split::{self, Rounded};

/// Number of rows whose products are summed in registers.
const CHUNK: usize = 512;
/// Number of features whose products are computed by one job: a multiple of the sizes of all blocks and
/// panels.
const GROUP: usize = 96;
/// Minimum number of features that are rounded to bf16 numbers.
const ROUNDED: usize = 128;

/// Adds `Xᵀ X` of rows `X` `[n, size]` to the upper triangle of `sums` `[size, size]`. Elements below
/// the diagonal are undefined.
///
/// On processors with fast products of bf16 numbers, `X` is rounded to bf16, unless `size` is small, and
/// products are summed in f32. The result is that of inputs with a relative error of at most 2⁻⁹.
pub fn add(rows: &[f32], size: usize, sums: &mut [f32]) {
    on_pool_thread(|| add_chunks([rows, rows], size, |first| first, sums));
}

/// Adds `Xᵀ Y` of rows `X` and `Y` `[n, size]` to `sums` `[size, size]`, rounded as by [`add`].
pub fn add_cross(left: &[f32], right: &[f32], size: usize, sums: &mut [f32]) {
    on_pool_thread(|| add_chunks([left, right], size, |_| 0, sums));
}

/// Adds the products of left features with right features, from the feature `begin(first)` on.
fn add_chunks([left, right]: [&[f32]; 2], size: usize, begin: impl Fn(usize) -> usize + Sync, sums: &mut [f32]) {
    if size == 0 {
        return;
    }
    for (left, right) in left.chunks(CHUNK * size).zip(right.chunks(CHUNK * size)) {
        let count = left.len() / size;
        let (left, right) = (LeftRows::transposed(left, size, count, size), Rows { values: right, count: size, stride: size });
        let groups = sums.par_chunks_mut(GROUP * size).enumerate().map(|(group, sums)| (group * GROUP, sums));
        match (size >= ROUNDED && split::is_available()).then(|| Rounded::pack(&left, &right, size)).flatten() {
            Some(operands) => groups.for_each(|(first, sums)| operands.add_to(first, begin(first), sums)),
            None => {
                let operands = Operands::pack(&left, &right, size, size >= ROUNDED && pairs::is_faster());
                groups.for_each(|(first, sums)| operands.add_to(first, begin(first), sums));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that bf16 represents exactly.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| (((i + seed) * 7919 % 251) as f32 - 125.0) / 64.0).collect()
    }

    #[test]
    fn sums_match_the_definition() {
        for (count, size) in [(0, 3), (5, 1), (37, 70), (600, 400), (1, 130)] {
            let rows = numbers(count * size, 0);
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

    /// All operands, also those for other processors.
    #[test]
    fn operands_agree() {
        for (count, size) in [(3, 33), (70, 200), (512, 130)] {
            let (one, other) = (numbers(count * size, 1), numbers(count * size, 99));
            let left = LeftRows::transposed(&one, size, count, size);
            let right = Rows { values: &other, count: size, stride: size };
            let part = |add_to: &dyn Fn(usize, usize, &mut [f32])| {
                let mut sums = vec![0.5; size * size];
                sums.chunks_mut(GROUP * size).enumerate().for_each(|(group, sums)| add_to(group * GROUP, group * GROUP, sums));
                sums
            };
            let tiles = Rounded::pack(&left, &right, size).unwrap();
            let [floats, pairs] = [false, true].map(|is_paired| Operands::pack(&left, &right, size, is_paired));
            let want = part(&|first, column, sums| floats.add_to(first, column, sums));
            let found = [part(&|first, column, sums| pairs.add_to(first, column, sums)), part(&|first, column, sums| tiles.add_to(first, column, sums))];
            for at in 0..size * size {
                let is_computed = at % size >= at / size / GROUP * GROUP;
                assert!(is_computed || want[at] == 0.5, "{size} {at}");
                for found in &found {
                    assert!((found[at] - want[at]).abs() < 1e-5 * count as f32, "{count} {size} {at}: {} for {}", found[at], want[at]);
                }
            }
        }
    }

    #[test]
    fn inputs_have_errors_of_rounding_at_most() {
        let (count, size) = (700, 200);
        let rows: Vec<f32> = (0..count * size).map(|i| ((i * 7919 % 10_007) as f32 - 5003.0) / 3001.0).collect();
        let mut sums = vec![0.0; size * size];
        add(&rows, size, &mut sums);
        for (one, other) in (0..size).flat_map(|one| (one..size).map(move |other| (one, other))) {
            let products = || rows.chunks_exact(size).map(|row| f64::from(row[one]) * f64::from(row[other]));
            let (exact, magnitudes) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
            assert!((f64::from(sums[one * size + other]) - exact).abs() < magnitudes * 2f64.powi(-8), "{one} {other}");
        }
    }
}
