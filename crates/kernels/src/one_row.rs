//! Products of a single row with the weight of a linear layer, as in incremental decoding. They are
//! bound by reading the weight, so nothing is packed, and several rows or columns are read in parallel.
//! Sums have a fixed number of lanes without fused multiply-add, so results are equal on every
//! processor.

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::matmul::{Columns, Rows, StoredFloat, for_stored_floats};

/// Number of independent sums along the inner dimension.
const LANES: usize = 16;
/// Number of result columns computed in parallel.
const COLUMNS: usize = 4;
/// Number of result columns computed in parallel if the weight is stored row by row.
const STRIPE: usize = 64;
/// Approximate number of weight elements read by one job.
const JOB: usize = 1 << 16;

/// Applies the epilogue to the columns that `multiply` computes, with several threads if it is
/// worthwhile.
fn by_columns(inner: usize, unit: usize, epilogue: Epilogue, out: &mut [f32], multiply: impl Fn(usize, &mut [f32]) + Sync) {
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
    /// Dot products of a row with a few columns.
    fn dots(columns: &[&[Self]; COLUMNS], x: &[f32], out: &mut [f32; COLUMNS]);

    /// Sums of a few adjacent columns, for a weight that is stored row by row.
    fn stripe(x: &[f32], values: &[Self], position: [usize; 2], out: &mut [f32]);
}

for_stored_floats! { OneRow {
    fn dots(columns: &[&[Self]; COLUMNS], x: &[f32], out: &mut [f32; COLUMNS]) {
        dots(columns, x, out);
    }

    fn stripe(x: &[f32], values: &[Self], position: [usize; 2], out: &mut [f32]) {
        stripe(x, values, position, out);
    }
} }

/// `x Wᵀ` for one row, with a weight whose rows are the columns of the result.
pub fn product<T: OneRow>(x: &[f32], weight: &Columns<T>, epilogue: Epilogue, out: &mut [f32]) {
    by_columns(x.len(), COLUMNS, epilogue, out, |first, sums| {
        let last = first + sums.len() - 1;
        for (index, sums) in sums.chunks_mut(COLUMNS).enumerate() {
            // Lanes beyond the last column are ignored.
            let columns = std::array::from_fn(|column| &weight.values[(first + index * COLUMNS + column).min(last) * weight.stride..][..x.len()]);
            let mut found = [0f32; COLUMNS];
            T::dots(&columns, x, &mut found);
            sums.copy_from_slice(&found[..sums.len()]);
        }
    });
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

#[inline(always)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

simd! {
    // Not inlined, so that the sums stay in registers.
    #[inline(never)]
    fn dots[T: StoredFloat](columns: &[&[T]; COLUMNS], x: &[f32], out: &mut [f32; COLUMNS]) {
        let [mut a, mut b, mut c, mut d] = [[0f32; LANES]; COLUMNS];
        let (runs, rest) = x.as_chunks::<LANES>();
        let runs_of = |column: usize| columns[column].as_chunks::<LANES>().0;
        for ((((x, first), second), third), fourth) in runs.iter().zip(runs_of(0)).zip(runs_of(1)).zip(runs_of(2)).zip(runs_of(3)) {
            add(&mut a, first, x);
            add(&mut b, second, x);
            add(&mut c, third, x);
            add(&mut d, fourth, x);
        }
        for (sums, column) in [&mut a, &mut b, &mut c, &mut d].into_iter().zip(columns) {
            for ((sum, weight), x) in sums.iter_mut().zip(column.as_chunks::<LANES>().1).zip(rest) {
                *sum += weight.value() * x;
            }
        }
        *out = [total(a), total(b), total(c), total(d)];
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
    use super::super::matmul::{self, Left};
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
                    matmul::product(&Left::pack(&x, 1, inner, inner), &Columns { values: weight, count: width, stride: inner }, width, epilogue, &mut out);
                    out
                };
                let mut have = c.clone();
                product(&x, &Columns { values: &w, count: width, stride: inner }, epilogue, &mut have);
                assert!(close(&have, &want(&w)), "{inner} {width}");
                let mut have = c.clone();
                product(&x, &Columns { values: &half, count: width, stride: inner }, epilogue, &mut have);
                assert!(close(&have, &want(&rounded)), "{inner} {width} of bf16");
                let mut have = c.clone();
                product_by_rows(&x, &Rows { values: &transposed, count: width, stride: width }, epilogue, &mut have);
                assert!(close(&have, &want(&w)), "{inner} {width} by rows");
            }
        }
    }
}
