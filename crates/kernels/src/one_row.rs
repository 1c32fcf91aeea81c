//! Products of one row, or of a few that are bitwise the same as one by one, with the weight of a linear
//! layer, as in incremental decoding and in the verification of drafted tokens. They are bound by reading
//! the weight, so nothing is packed, and the weight is read in its order in memory, which the processor
//! recognizes: reading four columns in turns takes several times as long. Sums have a fixed number of lanes
//! without fused multiply-add, so results are equal on every processor.

use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::dots::{self, Stored};
use super::epilogue::Epilogue;
use super::interleaved::{Interleaved, LANES, MAX_ROWS, PREFETCHED, by_number, padded, total};
use super::matmul::by_panels;
use super::operands::{Columns, Rows, StoredFloat, for_stored_floats};
use super::scratch::Scratch;
use crate::simd::prefetch;

/// Number of result columns computed in parallel if the weight is stored row by row.
const STRIPE: usize = 64;
/// Approximate number of weight elements read by one job.
const JOB: usize = 1 << 16;

/// Applies the epilogue to the columns that `multiply` computes, with several threads if it is
/// worthwhile.
pub(super) fn by_columns(inner: usize, unit: usize, epilogue: Epilogue, out: &mut [f32], multiply: impl Fn(usize, &mut [f32]) + Sync) {
    let width = out.len();
    let columns = (JOB / inner.max(1)).max(1).next_multiple_of(unit);
    let job = |(index, out): (usize, &mut [f32])| {
        let mut sums = vec![0f32; out.len()];
        multiply(index * columns, &mut sums);
        store(epilogue, &mut sums, index * columns, width, out);
    };
    if width <= columns { out.chunks_mut(columns).enumerate().for_each(job) } else { out.par_chunks_mut(columns).enumerate().for_each(job) }
}

simd! {
    fn store(epilogue: Epilogue, sums: &mut [f32], column: usize, width: usize, out: &mut [f32]) {
        epilogue.store(sums, [0, column, width], out);
    }
}

/// A stored float type, with the inner loops of its products, which are compiled in this crate like those of
/// [`FewRows`](super::few_rows::FewRows).
pub trait OneRow: StoredFloat {
    /// Dot products of up to [`MAX_ROWS`] rows with columns at a distance of `stride`, the columns of each
    /// row one after another.
    fn dots(x: &Interleaved, values: &[Self], stride: usize, out: &mut [f32]);

    /// Sums of a few adjacent columns, for a weight that is stored row by row.
    fn stripe(x: &[f32], values: &[Self], position: [usize; 2], out: &mut [f32]);
}

for_stored_floats! { OneRow {
    fn dots(x: &Interleaved, values: &[Self], stride: usize, out: &mut [f32]) {
        dots(x, values, stride, out);
    }

    fn stripe(x: &[f32], values: &[Self], position: [usize; 2], out: &mut [f32]) {
        stripe(x, values, position, out);
    }
} }

/// `x Wᵀ` for one row, with a weight whose rows are the columns of the result.
pub fn product<T: OneRow>(x: &[f32], weight: &Columns<T>, epilogue: Epilogue, out: &mut [f32]) {
    let x = Interleaved::new(x, 1);
    by_columns(x.inner, 1, epilogue, out, |first, sums| T::dots(&x, &weight.values[first * weight.stride..], weight.stride, sums));
}

/// `x Wᵀ` for 2 to [`MAX_ROWS`] rows `x` `[rows, inner]`.
pub fn product_of_rows<T: OneRow>(x: &[f32], rows: usize, weight: &Columns<T>, epilogue: Epilogue, out: &mut [f32]) {
    by_rows(x, [rows, weight.count], epilogue, out, |x, first, out| T::dots(x, &weight.values[first * weight.stride..], weight.stride, out));
}

/// Multiplies all rows with a group of columns at a time. The function receives the rows, the first column,
/// and its part of the result, row by row.
pub(super) fn by_rows(x: &[f32], [rows, width]: [usize; 2], epilogue: Epilogue, out: &mut [f32], multiply: impl Fn(&Interleaved, usize, &mut [f32]) + Sync) {
    let x = Interleaved::new(x, rows);
    by_panels(rows, [width, (JOB / x.inner.max(1)).max(1)], epilogue, out, |first, _, tile| multiply(&x, first, tile));
}

/// `x W` for one row.
pub fn product_by_rows<T: OneRow>(x: &[f32], weight: &Rows<T>, epilogue: Epilogue, out: &mut [f32]) {
    by_columns(x.len(), STRIPE, epilogue, out, |first, sums| {
        for (index, sums) in sums.chunks_mut(STRIPE).enumerate() {
            T::stripe(x, weight.values, [first + index * STRIPE, weight.stride], sums);
        }
    });
}

/// A plain loop over arrays of fixed length, which the compiler vectorizes.
#[inline(always)]
fn add<T: StoredFloat>(sums: &mut [f32; LANES], weights: &[T; LANES], x: &[f32; LANES]) {
    for lane in 0..LANES {
        sums[lane] += weights[lane].value() * x[lane];
    }
}

/// Dot products that are converted in registers. False if the processor lacks the instructions, or no
/// conversion is needed.
trait InRegisters: StoredFloat {
    fn dots(_x: &Interleaved, _values: &[Self], _stride: usize, _out: &mut [f32]) -> bool {
        false
    }
}

impl InRegisters for f32 {}

impl InRegisters for half::bf16 {
    fn dots(x: &Interleaved, values: &[Self], stride: usize, out: &mut [f32]) -> bool {
        dots::of_bf16(x, Stored::floats(values.reinterpret_cast(), stride), out)
    }
}

impl InRegisters for half::f16 {
    fn dots(x: &Interleaved, values: &[Self], stride: usize, out: &mut [f32]) -> bool {
        dots::of_f16(x, Stored::floats(values.reinterpret_cast(), stride), out)
    }
}

fn dots<T: InRegisters>(x: &Interleaved, values: &[T], stride: usize, out: &mut [f32]) {
    if <T as InRegisters>::dots(x, values, stride, out) {
        return;
    }
    match (x.rows, T::as_f32(values)) {
        (1, _) => of_rows::<T, 1>(&x.values, x.inner, values, stride, out),
        (_, Some(values)) => of_floats(x, values, stride, out),
        _ => of_decoded(x, out, |first, column| decode(&values[first * stride..][..column.len()], column)),
    }
}

/// Dot products of several rows with columns that are decoded before they are multiplied, because each row
/// would convert them again. `decode` computes a column.
pub(super) fn of_decoded(x: &Interleaved, out: &mut [f32], decode: impl Fn(usize, &mut [f32])) {
    let count = out.len() / x.rows;
    let (mut values, mut sums) = (Scratch::new(x.inner), [0f32; MAX_ROWS]);
    for column in 0..count {
        decode(column, &mut values);
        of_floats(x, &values, values.len(), &mut sums[..x.rows]);
        sums.iter().zip(out[column..].iter_mut().step_by(count)).for_each(|(sum, out)| *out = *sum);
    }
}

/// Dot products of several rows with columns of f32.
fn of_floats(x: &Interleaved, values: &[f32], stride: usize, out: &mut [f32]) {
    if dots::of_f32(x, Stored::floats(values, stride), out) {
        return;
    }
    x.by_groups(out, |rows, number, out| by_number!(number, N => of_rows::<f32, N>(rows, x.inner, values, stride, out)));
}

simd! {
    fn decode[T: StoredFloat](stored: &[T], values: &mut [f32]) {
        prefetch(stored, PREFETCHED);
        for (stored, value) in stored.iter().zip(values) {
            *value = stored.value();
        }
    }
}

simd! {
    fn of_rows[T: StoredFloat; N](x: &[f32], inner: usize, values: &[T], stride: usize, out: &mut [f32]) {
        let count = out.len() / N;
        let runs = x.as_chunks::<LANES>().0.as_chunks::<N>().0;
        for column in 0..count {
            let (weights, last) = values[column * stride..][..inner].as_chunks::<LANES>();
            let mut sums = [[0f32; LANES]; N];
            for (weights, x) in weights.iter().zip(runs) {
                prefetch(weights, PREFETCHED);
                for row in 0..N {
                    add(&mut sums[row], weights, &x[row]);
                }
            }
            if !last.is_empty() {
                let (last, x) = (padded(last), &runs[weights.len()]);
                for row in 0..N {
                    add(&mut sums[row], &last, &x[row]);
                }
            }
            for row in 0..N {
                out[row * count + column] = total(&sums[row]);
            }
        }
    }
}

simd! {
    /// Computes a few adjacent columns.
    #[inline(never)]
    fn stripe[T: StoredFloat](x: &[f32], values: &[T], position: [usize; 2], out: &mut [f32]) {
        let [first, stride] = position;
        if let Some(out) = out.first_chunk_mut::<STRIPE>() {
            let mut sums = [0f32; STRIPE];
            for (row, x) in x.iter().enumerate() {
                let Some(weights) = values[row * stride + first..].first_chunk::<STRIPE>() else { break };
                for column in 0..STRIPE {
                    sums[column] += weights[column].value() * x;
                }
            }
            *out = sums;
            return;
        }
        for (row, x) in x.iter().enumerate() {
            for (sum, weight) in out.iter_mut().zip(&values[row * stride + first..]) {
                *sum += weight.value() * x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::activation::ActivationFunction;
    use super::super::epilogue::Fused;
    use super::super::matmul;
    use super::super::operands::LeftRows;
    use super::*;

    #[test]
    fn one_row_equals_the_general_product() {
        let numbers = |count: usize, seed: usize| (0..count).map(|i| (((i + seed) * 7919 % 4093) as f32 - 2046.0) / 1021.0).collect::<Vec<f32>>();
        for (inner, width) in [(1, 1), (576, 70), (7, 33), (64, 100), (131, 5), (0, 3), (1536, 300), (20, 128), (70_000, 5)] {
            let (x, w, c) = (numbers(inner, 1), numbers(width * inner, 2), numbers(width, 3));
            let half: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            let rounded: Vec<f32> = half.iter().map(|w| w.to_f32()).collect();
            let transposed: Vec<f32> = (0..inner * width).map(|i| w[(i % width) * inner + i / width]).collect();
            let steps = [Fused::AddToColumns(&c[..]), Fused::Activate(ActivationFunction::Silu), Fused::Add(&c)];
            let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * (1.0 + b.abs()) * (inner.max(1) as f32).sqrt());
            for accumulate in [false, true] {
                let epilogue = Epilogue { steps: &steps, accumulate };
                let want = |weight: &[f32]| {
                    let mut out = c.clone();
                    matmul::product(&LeftRows::new(&x, 1, inner, inner), &Columns { values: weight, count: width, stride: inner }, width, epilogue, &mut out);
                    out
                };
                let mut have = c.clone();
                product(&x, &Columns { values: &w, count: width, stride: inner }, epilogue, &mut have);
                assert!(close(&have, &want(&w)), "{inner} {width}");
                let mut have = c.clone();
                product(&x, &Columns { values: &half, count: width, stride: inner }, epilogue, &mut have);
                assert!(close(&have, &want(&rounded)), "{inner} {width} of bf16");
                let weight = Columns { values: &half[..], count: width, stride: inner };
                for rows in 2..=MAX_ROWS {
                    let x = numbers(rows * inner, 7);
                    let (mut have, mut want) = (vec![0.5; rows * width], vec![0.5; rows * width]);
                    let epilogue = Epilogue { steps: &steps[..2], accumulate };
                    product_of_rows(&x, rows, &weight, epilogue, &mut have);
                    want.chunks_exact_mut(width).enumerate().for_each(|(row, out)| product(&x[row * inner..][..inner], &weight, epilogue, out));
                    assert_eq!(have, want, "{rows} {inner} {width} of bf16");
                    let weight = Columns { values: &w[..], count: width, stride: inner };
                    product_of_rows(&x, rows, &weight, epilogue, &mut have);
                    want.chunks_exact_mut(width).enumerate().for_each(|(row, out)| product(&x[row * inner..][..inner], &weight, epilogue, out));
                    assert_eq!(have, want, "{rows} {inner} {width}");
                }
                let mut have = c.clone();
                product_by_rows(&x, &Rows { values: &transposed, count: width, stride: width }, epilogue, &mut have);
                assert!(close(&have, &want(&w)), "{inner} {width} by rows");
            }
        }
    }
}
