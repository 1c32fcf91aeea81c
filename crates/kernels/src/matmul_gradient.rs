//! Products with a long inner dimension, such as weight gradients, which are sums over all rows of a
//! batch.
//!
//! The inner dimension is split into chunks of fixed length, so that packed chunks stay in the L2 cache.
//! If the result is large, it is distributed over the threads; if it is small, the chunks are, and their
//! sums are added in order. Both the choice and the grouping of chunks depend only on the sizes.

use std::ops::Range;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::matmul::product_serial;
use super::operands::{LeftRows, Right};
use super::product::product;
use super::scratch::Scratch;

/// Number of inner indices per chunk.
const CHUNK: usize = 512;
/// Maximum number of partial sums computed in parallel.
const PARTS: usize = 16;
/// Minimum number of elements of a result that is distributed over the threads.
const LARGE: usize = 1 << 16;

/// The product of two matrices that are provided in chunks along their inner dimension. Rows of `out`
/// are contiguous.
pub fn long_product<'a, R: Right>(
    [rows, inner, width]: [usize; 3],
    left: impl Fn(Range<usize>) -> LeftRows<'a> + Sync,
    right: impl Fn(Range<usize>) -> R + Sync,
    out: &mut [f32],
) {
    let epilogue = |range: &Range<usize>| if range.start == 0 { Epilogue::NONE } else { Epilogue::ACCUMULATE };
    if inner == 0 {
        return out.fill(0.0);
    }
    if is_large(rows * width) || inner <= CHUNK {
        for range in split_inner(0..inner) {
            product(&left(range.clone()), &right(range.clone()), width, epilogue(&range), out);
        }
        return;
    }
    in_parts(inner, |range, sum| product_serial(&left(range.clone()).pack(), &right(range), width, Epilogue::ACCUMULATE, sum, width), out);
}

/// Splits a range of inner indices into chunks.
pub(super) fn split_inner(inner: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = inner.end;
    inner.step_by(CHUNK).map(move |start| start..(start + CHUNK).min(end))
}

/// Whether a result of this size is distributed over the threads instead of the chunks.
pub(super) fn is_large(size: usize) -> bool {
    size >= LARGE
}

/// Sums over chunks, with several partial sums in parallel. `add` adds a chunk to a partial sum.
pub(super) fn in_parts(inner: usize, add: impl Fn(Range<usize>, &mut [f32]) + Sync, out: &mut [f32]) {
    let length = out.len();
    let each = inner.div_ceil(CHUNK).div_ceil(PARTS).max(1) * CHUNK;
    let sums: Vec<Scratch> = (0..inner.div_ceil(each))
        .into_par_iter()
        .map(|part| {
            let mut sum = Scratch::new(length);
            sum.fill(0.0);
            split_inner(part * each..((part + 1) * each).min(inner)).for_each(|range| add(range, &mut sum));
            sum
        })
        .collect();
    sum_parts(&sums.iter().map(|sum| &**sum).collect::<Vec<_>>(), out);
}

simd! {
    /// Sums vectors of equal length in order.
    pub fn sum_parts(vectors: &[&[f32]], out: &mut [f32]) {
        out.fill(0.0);
        for vector in vectors {
            for (out, x) in out.iter_mut().zip(*vector) {
                *out += x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::operands::Rows;
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 1024.0).collect()
    }

    #[test]
    fn long_sums_are_independent_of_threads() {
        for (rows, inner, width) in [(3, 5, 7), (20, 1500, 33), (16, 20_000, 40), (300, 1100, 260)] {
            let (a, b) = (numbers(rows * inner, 1), numbers(inner * width, 2));
            let compute = |threads| {
                let mut out = vec![f32::NAN; rows * width];
                let left = |range: Range<usize>| LeftRows::transposed(&a[range.start * rows..], rows, range.len(), rows);
                let right = |range: Range<usize>| Rows { values: &b[range.start * width..], count: width, stride: width };
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| long_product([rows, inner, width], left, right, &mut out));
                out
            };
            let ours = compute(1);
            assert_eq!(ours, compute(2), "{rows} {inner} {width}");
            assert_eq!(ours, compute(5), "{rows} {inner} {width}");
            for (at, have) in ours.iter().enumerate().step_by(7) {
                let (row, column) = (at / width, at % width);
                let want: f64 = (0..inner).map(|k| f64::from(a[k * rows + row]) * f64::from(b[k * width + column])).sum();
                assert!((f64::from(*have) - want).abs() < 1e-4 * (inner as f64).sqrt() * (1.0 + want.abs()), "{rows} {inner} {width}: {have} for {want}");
            }
        }
    }
}
