//! Matrix products in f32, a tile of registers at a time.
//!
//! The left matrix is packed in blocks of rows, the right one in panels of columns; a tile (`kernel/tile.rs`) of the result is a
//! block times a panel, summed over the whole inner axis. The right matrix is asked for panel by panel: it may be 16-bit
//! weights or the windows of an image that are never stored as a matrix (Goto and van de Geijn, 2008).

use std::ops::Range;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// Floats of packed panels that are held at a time.
const HELD: usize = 1 << 20;

/// A float as it is kept.
pub trait StoredFloat: Copy + Sync {
    /// Its value.
    fn value(self) -> f32;
}

impl StoredFloat for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}

impl StoredFloat for half::bf16 {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl StoredFloat for half::f16 {
    #[inline(always)]
    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// The left matrix, packed.
pub struct Left {
    rows: usize,
    inner: usize,
    values: Scratch,
}

impl Left {
    /// Packs rows of `inner` elements that begin `stride` apart.
    pub fn pack<T: StoredFloat>(values: &[T], rows: usize, inner: usize, stride: usize) -> Left {
        Left::packed(rows, inner, |first, block| {
            let last = rows - 1;
            // Rows beyond the last are never looked at.
            let lanes = std::array::from_fn(|lane| values[(first + lane).min(last) * stride..][..inner].as_chunks());
            turn(lanes, block.as_chunks_mut().0);
        })
    }

    /// Packs rows that lie in memory as columns: the elements of one inner index begin `stride` after those of the one before.
    pub fn pack_transposed(values: &[f32], rows: usize, inner: usize, stride: usize) -> Left {
        Left::packed(rows, inner, |first, block| {
            let count = BLOCK.min(rows - first);
            for (step, group) in block.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                let values = &values[step * stride + first..];
                match values.first_chunk::<BLOCK>() {
                    // A copy of known length, also where what follows belongs to no row.
                    Some(values) => *group = *values,
                    None => group[..count].copy_from_slice(&values[..count]),
                }
            }
        })
    }

    /// Blocks that `fill` packs, each given its first row.
    fn packed(rows: usize, inner: usize, fill: impl Fn(usize, &mut [f32]) + Sync) -> Left {
        let mut packed = Scratch::new(rows.div_ceil(BLOCK) * BLOCK * inner);
        let size = (BLOCK * inner).max(1);
        if packed.len() < 1 << 15 {
            packed.chunks_mut(size).enumerate().for_each(|(index, block)| fill(index * BLOCK, block));
        } else {
            packed.par_chunks_mut(size).enumerate().for_each(|(index, block)| fill(index * BLOCK, block));
        }
        Left { rows, inner, values: packed }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn block(&self, index: usize) -> &[f32] {
        &self.values[index * BLOCK * self.inner..][..BLOCK * self.inner]
    }
}

/// Elements of a row that are turned at once.
const RUN: usize = 16;

/// Writes the elements of all rows with one inner index side by side.
#[inline(always)]
fn turn<T: StoredFloat>(rows: [(&[[T; RUN]], &[T]); BLOCK], groups: &mut [[f32; BLOCK]]) {
    let full = rows[0].0.len();
    let (runs, rest) = groups.split_at_mut(full * RUN);
    for (at, groups) in runs.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
        for (step, group) in groups.iter_mut().enumerate() {
            for lane in 0..BLOCK {
                group[lane] = rows[lane].0[at][step].value();
            }
        }
    }
    for (step, group) in rest.iter_mut().enumerate() {
        for lane in 0..BLOCK {
            group[lane] = rows[lane].1[step].value();
        }
    }
}

/// The right matrix, given panel by panel.
pub trait Right: Sync {
    /// Writes a panel of columns from `first` on as `[inner][columns]`; what is beyond the last column does not matter.
    fn pack(&self, first: usize, panel: &mut [f32]);
}

/// A matrix whose columns lie in memory as rows that begin `stride` apart: the weight `[out, in]` of a linear layer.
pub struct Columns<'a, T> {
    /// The elements.
    pub values: &'a [T],
    /// Number of columns.
    pub count: usize,
    /// From one column to the next.
    pub stride: usize,
}

impl<T: StoredFloat> Right for Columns<'_, T> {
    fn pack(&self, first: usize, panel: &mut [f32]) {
        let groups = panel.as_chunks_mut::<PANEL>().0;
        // A stretch of the panel stays in the first-level cache while all columns are written into it.
        for (step, groups) in groups.chunks_mut(64).enumerate() {
            for lane in 0..PANEL.min(self.count - first) {
                let column = &self.values[(first + lane) * self.stride + step * 64..][..groups.len()];
                for (x, group) in column.iter().zip(groups.iter_mut()) {
                    group[lane] = x.value();
                }
            }
        }
    }
}

/// A matrix whose rows begin `stride` apart.
pub struct Rows<'a, T> {
    /// The elements.
    pub values: &'a [T],
    /// Number of columns.
    pub count: usize,
    /// From one row to the next.
    pub stride: usize,
}

impl<T: StoredFloat> Right for Rows<'_, T> {
    fn pack(&self, first: usize, panel: &mut [f32]) {
        let width = PANEL.min(self.count - first);
        for (row, group) in panel.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            for (out, x) in group.iter_mut().zip(&self.values[row * self.stride + first..][..width]) {
                *out = x.value();
            }
        }
    }
}

simd! {
    /// Some blocks times consecutive panels, the first of which begins at `column` of a result `width` wide; `out`
    /// holds the rows of the blocks from its column `place` on, `stride` apart.
    #[allow(clippy::too_many_arguments)]
    fn multiply_into(left: &Left, blocks: Range<usize>, panels: &[f32], column: usize, epilogue: Epilogue, out: &mut [f32], width: usize, place: usize, stride: usize) {
        let size = PANEL * left.inner;
        let mut tile = [[0f32; PANEL]; BLOCK];
        for (number, panel) in panels.chunks_exact(size.max(1)).enumerate() {
            let (column, place) = (column + number * PANEL, place + number * PANEL);
            let columns = PANEL.min(width - column);
            for index in blocks.clone() {
                let first = index * BLOCK;
                let rows = BLOCK.min(left.rows - first);
                tile::multiply(left.block(index), Panel::Packed(panel), [rows, PANEL], &mut tile);
                for (lane, values) in tile[..rows].iter_mut().enumerate() {
                    let out = &mut out[(first - blocks.start * BLOCK + lane) * stride + place..][..columns];
                    epilogue.store(&mut values[..columns], [first + lane, column, width], out);
                }
            }
        }
    }
}

/// Some blocks times consecutive panels, the first of which begins at `column` of a result `width` wide; `out` holds the rows of
/// the blocks, `stride` apart.
#[allow(clippy::too_many_arguments)]
pub fn multiply(left: &Left, blocks: Range<usize>, panels: &[f32], column: usize, epilogue: Epilogue, out: &mut [f32], width: usize, stride: usize) {
    multiply_into(left, blocks, panels, column, epilogue, out, width, column, stride);
}

/// The product of a left matrix with a right one of `width` columns, by all threads; rows of `out` are contiguous.
pub fn product(left: &Left, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    let (blocks, panels) = (left.rows.div_ceil(BLOCK), width.div_ceil(PANEL));
    if blocks == 0 || panels == 0 {
        return;
    }
    if left.inner == 0 {
        return by_panels(left.rows, width, epilogue, out, |_, _, _| {});
    }
    if left.rows * width * left.inner < 1 << 17 {
        return product_here(left, right, width, epilogue, out, width);
    }
    let size = (PANEL * left.inner).max(1);
    if blocks < 2 * rayon::current_num_threads() {
        return by_columns(left, right, width, epilogue, out);
    }
    let together = (HELD / size).clamp(1, panels);
    let mut packed = Scratch::new(together * size);
    // Blocks of one job: few enough to stay in the second-level cache while panel after panel passes by.
    let group = (HELD / 8 / (BLOCK * left.inner).max(1)).clamp(2, blocks.div_ceil(2 * rayon::current_num_threads()).max(2));
    for first in (0..panels).step_by(together) {
        let count = together.min(panels - first);
        let packed = &mut packed[..count * size];
        packed.par_chunks_mut(size).enumerate().for_each(|(i, panel)| right.pack((first + i) * PANEL, panel));
        out.par_chunks_mut(group * BLOCK * width).enumerate().for_each(|(i, out)| {
            let blocks = i * group..((i + 1) * group).min(blocks);
            multiply(left, blocks, packed, first * PANEL, epilogue, out, width, width);
        });
    }
}

/// [`product`] with few rows: jobs are panels.
fn by_columns(left: &Left, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    by_panels(left.rows, width, epilogue, out, |column, columns, tile| {
        let mut panel = Scratch::new(PANEL * left.inner);
        right.pack(column, &mut panel);
        multiply_into(left, 0..left.rows.div_ceil(BLOCK), &panel, column, Epilogue::NONE, tile, width, 0, columns);
    });
}

simd! {
    /// Finishes some columns of all rows.
    fn finish(tile: &mut [f32], column: usize, columns: usize, width: usize, epilogue: Epilogue) {
        for (row, values) in tile.chunks_exact_mut(columns).enumerate() {
            epilogue.apply(values, [row, column, width]);
        }
    }
}

/// A product of few rows by all threads: `multiply` is given the first of some columns, how many they are, and zeros `[rows, columns]` that it
/// replaces; results are finished and put in place.
pub(super) fn by_panels(rows: usize, width: usize, epilogue: Epilogue, out: &mut [f32], multiply: impl Fn(usize, usize, &mut [f32]) + Sync) {
    let tile = |index: usize| {
        let column = index * PANEL;
        let columns = PANEL.min(width - column);
        let mut tile = vec![0.0; rows * columns];
        multiply(column, columns, &mut tile);
        finish(&mut tile, column, columns, width, epilogue);
        tile
    };
    let tiles: Vec<Vec<f32>> = (0..width.div_ceil(PANEL)).into_par_iter().map(tile).collect();
    for (row, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
        for (tile, out) in tiles.iter().zip(out.chunks_mut(PANEL)) {
            epilogue.put(&tile[row * out.len()..][..out.len()], out);
        }
    }
}

/// The product by the calling thread alone; rows of `out` begin `stride` apart.
pub fn product_here(left: &Left, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32], stride: usize) {
    let mut panel = Scratch::new(PANEL * left.inner);
    for column in (0..width).step_by(PANEL) {
        right.pack(column, &mut panel);
        multiply(left, 0..left.rows.div_ceil(BLOCK), &panel, column, epilogue, out, width, stride);
    }
}

#[cfg(test)]
mod tests {
    use super::super::activation::ActivationFunction;
    use super::super::epilogue::Fused;
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 1024.0).collect()
    }

    #[test]
    fn products_are_sums_of_products() {
        for (rows, inner, width) in [(1, 1, 1), (3, 5, 33), (12, 7, 32), (13, 64, 100), (100, 130, 65), (300, 20, 40), (5, 0, 3), (29, 3000, 70)] {
            let (a, b, c) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let left = Left::pack(&a, rows, inner, inner);
            let transposed: Vec<f32> = (0..inner * width).map(|i| b[(i % width) * inner + i / width]).collect();
            let mut one = vec![0.0; rows * width];
            let mut other = one.clone();
            let steps =
                [Fused::AddToColumns(&c[..width]), Fused::Activate(ActivationFunction::Relu), Fused::Add(&c), Fused::MultiplyRows(&a[..rows.min(a.len())])];
            let epilogue = Epilogue::of(if inner == 0 { &[] } else { &steps });
            product(&left, &Columns { values: &b, count: width, stride: inner }, width, epilogue, &mut one);
            product_here(&left, &Rows { values: &transposed, count: width, stride: width }, width, epilogue, &mut other, width);
            assert_eq!(one, other, "{rows} {inner} {width}");
            for row in 0..rows {
                for column in 0..width {
                    let sum: f64 = (0..inner).map(|k| f64::from(a[row * inner + k]) * f64::from(b[column * inner + k])).sum();
                    let want = if inner == 0 { 0.0 } else { ((sum + f64::from(c[column])).max(0.0) + f64::from(c[row * width + column])) * f64::from(a[row]) };
                    let have = f64::from(one[row * width + column]);
                    assert!((have - want).abs() < 1e-4 * (1.0 + inner as f64).sqrt() * (1.0 + want.abs()), "{rows} {inner} {width}: {have} for {want}");
                }
            }
        }
    }

    #[test]
    fn what_is_added_to_is_not_finished_again() {
        // Few rows go another way on many threads than on one, and many rows a third.
        for (rows, inner, width) in [(2, 3, 5), (30, 200, 70), (600, 64, 40)] {
            let (a, b, old) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let left = Left::pack(&a, rows, inner, inner);
            let right = Columns { values: &b, count: width, stride: inner };
            let steps = [Fused::AddToColumns(&b[..width]), Fused::Activate(ActivationFunction::Relu)];
            let mut finished = vec![0.0; rows * width];
            product_here(&left, &right, width, Epilogue::of(&steps), &mut finished, width);
            let wanted: Vec<f32> = old.iter().zip(&finished).map(|(old, new)| old + new).collect();
            for threads in [1, 2, 16] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut out = old.clone();
                pool.install(|| product(&left, &right, width, Epilogue { steps: &steps, accumulate: true }, &mut out));
                assert_eq!(out, wanted, "{rows} {inner} {width} on {threads} threads");
            }
        }
    }

    #[test]
    fn rows_are_packed_side_by_side() {
        for (rows, inner, stride) in [(1, 1, 1), (5, 16, 20), (12, 33, 33), (25, 40, 41)] {
            let values = numbers(rows * stride, 4);
            let transposed: Vec<f32> = (0..inner * rows).map(|i| values[i % rows * stride + i / rows]).collect();
            let halves: Vec<half::bf16> = values.iter().map(|x| half::bf16::from_f32(*x)).collect();
            let (left, other) = (Left::pack(&values, rows, inner, stride), Left::pack_transposed(&transposed, rows, inner, rows));
            let half = Left::pack(&halves, rows, inner, stride);
            for (row, step) in (0..rows).flat_map(|row| (0..inner).map(move |step| (row, step))) {
                let at = |left: &Left| left.block(row / BLOCK)[step * BLOCK + row % BLOCK];
                assert_eq!((at(&left), at(&other)), (values[row * stride + step], values[row * stride + step]), "{rows} {inner} {row} {step}");
                assert_eq!(at(&half), halves[row * stride + step].to_f32());
            }
        }
    }
}
