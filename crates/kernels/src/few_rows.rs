//! Products of a few rows with the weight of a linear layer. The weight is read once in its original
//! order and not packed, because packing would take longer than the product. Results are bitwise equal
//! to those of `kernel/matmul.rs`.

use super::epilogue::Epilogue;
use super::matmul::by_panels;
use super::operands::{Columns, StoredFloat, for_stored_floats};
use super::scratch::Scratch;
use super::tile::PANEL;
use crate::simd::{self, Level, prefetch};

/// Number of rows that are multiplied by a weight element at once.
const LANES: usize = 16;
/// Number of result columns computed in parallel.
const COLUMNS: usize = 4;
/// Number of column elements per bounds check.
const RUN: usize = 8;
/// Maximum number of rows.
pub const MAX_ROWS: usize = 2 * LANES;

type Sums = [[f32; LANES]; COLUMNS];

/// Runs of columns with their remainders.
type ColumnRuns<'w, T> = [(&'w [[T; RUN]], &'w [T]); COLUMNS];

#[inline(always)]
fn sums<const FUSED: bool, T: StoredFloat>(columns: &ColumnRuns<T>, x: &[[f32; LANES]]) -> Sums {
    let mut sums = [[0f32; LANES]; COLUMNS];
    let (runs, rest) = x.as_chunks::<RUN>();
    // The next group of columns.
    let ahead = size_of_val(columns[0].0) * COLUMNS;
    for (at, x) in runs.iter().enumerate() {
        let [a, b, c, d] = [&columns[0].0[at], &columns[1].0[at], &columns[2].0[at], &columns[3].0[at]];
        [a, b, c, d].into_iter().for_each(|weights| prefetch(weights, ahead));
        for k in 0..RUN {
            add::<FUSED>(&mut sums, [a[k].value(), b[k].value(), c[k].value(), d[k].value()], &x[k]);
        }
    }
    for (k, x) in rest.iter().enumerate() {
        add::<FUSED>(&mut sums, [columns[0].1[k].value(), columns[1].1[k].value(), columns[2].1[k].value(), columns[3].1[k].value()], x);
    }
    sums
}

/// A plain loop over arrays, which the compiler keeps in registers.
#[inline(always)]
fn add<const FUSED: bool>(sums: &mut Sums, weights: [f32; COLUMNS], x: &[f32; LANES]) {
    for i in 0..COLUMNS {
        for j in 0..LANES {
            // Without hardware support, `mul_add` would be a function call.
            sums[i][j] = if FUSED { weights[i].mul_add(x[j], sums[i][j]) } else { sums[i][j] + weights[i] * x[j] };
        }
    }
}

macro_rules! fused {
    ($($name:ident: $fused:expr;)+) => {
        $(mod $name {
            use super::{ColumnRuns, LANES, StoredFloat, Sums};

            simd! {
                // Not inlined, so that the sums stay in registers.
                #[inline(never)]
                pub fn sums[T: StoredFloat](columns: &ColumnRuns<T>, x: &[[f32; LANES]], out: &mut Sums) {
                    *out = super::sums::<{ $fused }, T>(columns, x);
                }
            }
        })+
    };
}

fused! {
    with: true;
    without: cfg!(target_arch = "aarch64");
}

/// A stored float type, with the inner loop of its products. Generic functions are compiled in the crates
/// that use them, with their level of optimization, which is low in builds of tests; this function is
/// compiled here.
pub trait FewRows: StoredFloat {
    /// Sums of a few columns, with fused multiply-adds if the processor has them.
    fn sums(columns: &ColumnRuns<Self>, x: &[[f32; LANES]], fused: bool, out: &mut Sums);
}

for_stored_floats! { FewRows {
    fn sums(columns: &ColumnRuns<Self>, x: &[[f32; LANES]], fused: bool, out: &mut Sums) {
        if fused { with::sums(columns, x, out) } else { without::sums(columns, x, out) }
    }
} }

/// `x Wᵀ` for at most [`MAX_ROWS`] rows `x` `[rows, inner]`, with a weight whose rows are the columns of
/// the result, with all threads.
pub fn product<T: FewRows>(x: &[f32], rows: usize, weight: &Columns<T>, inner: usize, epilogue: Epilogue, out: &mut [f32]) {
    product_by_columns(x, rows, [inner, weight.count], epilogue, out, |first, count, multiply| {
        multiply(&Columns { values: &weight.values[first * weight.stride..], count, stride: weight.stride });
    });
}

/// As [`product`], with a weight `[inner, width]` of which `columns` provides the given number of columns
/// from the given one on.
pub(super) fn product_by_columns<T: FewRows>(
    x: &[f32],
    rows: usize,
    [inner, width]: [usize; 2],
    epilogue: Epilogue,
    out: &mut [f32],
    columns: impl Fn(usize, usize, &mut dyn FnMut(&Columns<T>)) + Sync,
) {
    let mut lanes = Scratch::new(rows.div_ceil(LANES) * inner * LANES);
    lanes.fill(0.0);
    for (row, x) in x.chunks_exact(inner.max(1)).take(rows).enumerate() {
        let group = &mut lanes[row / LANES * inner * LANES..][..inner * LANES];
        group.as_chunks_mut::<LANES>().0.iter_mut().zip(x).for_each(|(lanes, x)| lanes[row % LANES] = *x);
    }
    let fused = simd::level() != Level::Baseline;
    by_panels(rows, [width, PANEL], epilogue, out, |first, width, tile| {
        columns(first, width, &mut |weight| {
            let mut found = [[0f32; LANES]; COLUMNS];
            for at in (0..width).step_by(COLUMNS) {
                // Lanes beyond the last column are ignored.
                let columns = std::array::from_fn(|lane| weight.values[(at + lane).min(width - 1) * weight.stride..][..inner].as_chunks());
                for (group, x) in lanes.chunks((inner * LANES).max(1)).enumerate() {
                    let x = x.as_chunks::<LANES>().0;
                    T::sums(&columns, x, fused, &mut found);
                    for (lane, tile) in tile.chunks_exact_mut(width).skip(group * LANES).take(LANES).enumerate() {
                        tile[at..].iter_mut().zip(&found).for_each(|(out, sums)| *out = sums[lane]);
                    }
                }
            }
        });
    });
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
    fn few_rows_are_bitwise_equal_to_the_general_product() {
        let numbers = |count: usize, seed: usize| (0..count).map(|i| (((i + seed) * 7919 % 4093) as f32 - 2046.0) / 1021.0).collect::<Vec<f32>>();
        for (rows, inner, width) in [(1, 1, 1), (1, 576, 70), (3, 7, 33), (16, 64, 100), (17, 131, 5), (5, 0, 3), (32, 576, 200)] {
            let (x, w, c) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let half: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            let steps = [Fused::AddToColumns(&c[..width]), Fused::Activate(ActivationFunction::Silu), Fused::Add(&c)];
            for accumulate in [false, true] {
                let epilogue = Epilogue { steps: &steps, accumulate };
                let (mut want, mut have) = (c.clone(), c.clone());
                let weight = Columns { values: &w, count: width, stride: inner };
                matmul::product(&LeftRows::new(&x, rows, inner, inner), &weight, width, epilogue, &mut want);
                product(&x, rows, &weight, inner, epilogue, &mut have);
                assert_eq!(have, want, "{rows} {inner} {width}");
                let (mut want, mut have) = (c.clone(), c.clone());
                let weight = Columns { values: &half, count: width, stride: inner };
                matmul::product(&LeftRows::new(&x, rows, inner, inner), &weight, width, epilogue, &mut want);
                product(&x, rows, &weight, inner, epilogue, &mut have);
                assert_eq!(have, want, "{rows} {inner} {width} of bf16");
            }
        }
    }
}
