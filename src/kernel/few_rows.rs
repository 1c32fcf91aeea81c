//! Products of a few rows with the weight of a linear layer, which is read once, in its own order, and never packed: with so few rows,
//! packing would take longer than the product. Results are those of `kernel/matmul.rs` to the last bit.

use super::epilogue::Epilogue;
use super::matmul::{Columns, StoredFloat, by_panels};
use super::scratch::Scratch;
use crate::kernel::simd::{self, Level};

/// Rows that a weight's element is multiplied with at once.
const LANES: usize = 16;
/// Columns of a result that are summed side by side.
const COLUMNS: usize = 4;
/// Elements of a column between two looks at where it ends.
const RUN: usize = 8;
/// Most rows.
pub const MOST: usize = 2 * LANES;

type Sums = [[f32; LANES]; COLUMNS];

/// Stretches of columns, and what is left of them.
type Stretches<'w, T> = [(&'w [[T; RUN]], &'w [T]); COLUMNS];

#[inline(always)]
fn sums<const FUSED: bool, T: StoredFloat>(columns: &Stretches<T>, x: &[[f32; LANES]]) -> Sums {
    let mut sums = [[0f32; LANES]; COLUMNS];
    let (runs, rest) = x.as_chunks::<RUN>();
    for (at, x) in runs.iter().enumerate() {
        let [a, b, c, d] = [&columns[0].0[at], &columns[1].0[at], &columns[2].0[at], &columns[3].0[at]];
        for k in 0..RUN {
            add::<FUSED>(&mut sums, [a[k].value(), b[k].value(), c[k].value(), d[k].value()], &x[k]);
        }
    }
    for (k, x) in rest.iter().enumerate() {
        add::<FUSED>(&mut sums, [columns[0].1[k].value(), columns[1].1[k].value(), columns[2].1[k].value(), columns[3].1[k].value()], x);
    }
    sums
}

/// Plain loops over arrays: only these stay in registers.
#[inline(always)]
fn add<const FUSED: bool>(sums: &mut Sums, weights: [f32; COLUMNS], x: &[f32; LANES]) {
    for i in 0..COLUMNS {
        for j in 0..LANES {
            // Without the instruction, `mul_add` would be a call.
            sums[i][j] = if FUSED { weights[i].mul_add(x[j], sums[i][j]) } else { sums[i][j] + weights[i] * x[j] };
        }
    }
}

macro_rules! fused {
    ($($name:ident: $fused:expr;)+) => {
        $(mod $name {
            use super::{LANES, StoredFloat, Stretches, Sums};

            simd! {
                // Stands alone, so that the sums stay in registers.
                #[inline(never)]
                pub fn sums[T: StoredFloat](columns: &Stretches<T>, x: &[[f32; LANES]], out: &mut Sums) {
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

/// `x Wᵀ` of rows `x` `[rows, inner]`, at most [`MOST`], with a weight whose rows are the columns of the result, by all threads.
pub fn product<T: StoredFloat>(x: &[f32], rows: usize, weight: &Columns<T>, inner: usize, epilogue: Epilogue, out: &mut [f32]) {
    let mut lanes = Scratch::new(rows.div_ceil(LANES) * inner * LANES);
    lanes.fill(0.0);
    for (row, x) in x.chunks_exact(inner.max(1)).take(rows).enumerate() {
        let group = &mut lanes[row / LANES * inner * LANES..][..inner * LANES];
        group.as_chunks_mut::<LANES>().0.iter_mut().zip(x).for_each(|(lanes, x)| lanes[row % LANES] = *x);
    }
    let fused = simd::level() != Level::Baseline;
    by_panels(rows, weight.count, epilogue, out, |first, width, tile| {
        let mut found = [[0f32; LANES]; COLUMNS];
        for at in (0..width).step_by(COLUMNS) {
            // Columns beyond the last are never looked at.
            let columns = std::array::from_fn(|lane| weight.values[(first + at + lane).min(first + width - 1) * weight.stride..][..inner].as_chunks());
            for (group, x) in lanes.chunks((inner * LANES).max(1)).enumerate() {
                let x = x.as_chunks::<LANES>().0;
                if fused {
                    with::sums(&columns, x, &mut found)
                } else {
                    without::sums(&columns, x, &mut found)
                }
                for (lane, tile) in tile.chunks_exact_mut(width).skip(group * LANES).take(LANES).enumerate() {
                    tile[at..].iter_mut().zip(&found).for_each(|(out, sums)| *out = sums[lane]);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::activation::ActivationFunction;
    use super::super::epilogue::Fused;
    use super::super::matmul::{self, Left};
    use super::*;

    #[test]
    fn few_rows_give_the_bits_that_many_give() {
        let numbers = |count: usize, seed: usize| (0..count).map(|i| (((i + seed) * 7919 % 4093) as f32 - 2046.0) / 1021.0).collect::<Vec<f32>>();
        for (rows, inner, width) in [(1, 1, 1), (1, 576, 70), (3, 7, 33), (16, 64, 100), (17, 131, 5), (5, 0, 3), (32, 576, 200)] {
            let (x, w, c) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let half: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            let steps = [Fused::AddToColumns(&c[..width]), Fused::Activate(ActivationFunction::Silu), Fused::Add(&c)];
            for accumulate in [false, true] {
                let epilogue = Epilogue { steps: &steps, accumulate };
                let (mut want, mut have) = (c.clone(), c.clone());
                let weight = Columns { values: &w, count: width, stride: inner };
                matmul::product(&Left::pack(&x, rows, inner, inner), &weight, width, epilogue, &mut want);
                product(&x, rows, &weight, inner, epilogue, &mut have);
                assert_eq!(have, want, "{rows} {inner} {width}");
                let (mut want, mut have) = (c.clone(), c.clone());
                let weight = Columns { values: &half, count: width, stride: inner };
                matmul::product(&Left::pack(&x, rows, inner, inner), &weight, width, epilogue, &mut want);
                product(&x, rows, &weight, inner, epilogue, &mut have);
                assert_eq!(have, want, "{rows} {inner} {width} of bf16");
            }
        }
    }
}
