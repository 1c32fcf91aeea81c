//! Matrix products in f32, a tile of registers at a time.
//!
//! The left matrix is packed in blocks of rows, the right one in panels of columns; a tile of the result is a block
//! times a panel, summed over the whole inner axis without leaving registers, so every element is one chain of
//! multiply-adds, in the same order with any number of threads. The right matrix is asked for panel by panel: it may
//! be 16-bit weights or the windows of an image that are never stored as a matrix (Goto and van de Geijn, 2008).

use std::ops::Range;

use rayon::prelude::*;

use super::activation::{self, ActivationFunction};
use super::scratch::Scratch;
use super::simd::{self, Level};

/// Rows of a block.
pub const BLOCK: usize = 12;
/// Columns of a panel.
pub const PANEL: usize = 32;
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
        let mut packed = Scratch::new(rows.div_ceil(BLOCK) * BLOCK * inner);
        let fill = |(index, block): (usize, &mut [f32])| {
            let first = index * BLOCK;
            for lane in 0..BLOCK.min(rows - first) {
                let row = &values[(first + lane) * stride..][..inner];
                for (x, group) in row.iter().zip(block.as_chunks_mut::<BLOCK>().0) {
                    group[lane] = x.value();
                }
            }
        };
        if packed.len() < 1 << 15 {
            packed.chunks_mut((BLOCK * inner).max(1)).enumerate().for_each(fill);
        } else {
            packed.par_chunks_mut((BLOCK * inner).max(1)).enumerate().for_each(fill);
        }
        Left { rows, inner, values: packed }
    }

    /// Packs rows that lie in memory as columns: the elements of one inner index begin `stride` after those of the one before.
    pub fn pack_transposed(values: &[f32], rows: usize, inner: usize, stride: usize) -> Left {
        let mut packed = Scratch::new(rows.div_ceil(BLOCK) * BLOCK * inner);
        let fill = |(index, block): (usize, &mut [f32])| {
            let first = index * BLOCK;
            let count = BLOCK.min(rows - first);
            for (step, group) in block.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                let values = &values[step * stride + first..];
                match values.first_chunk::<BLOCK>() {
                    // A copy of known length, also where what follows belongs to no row.
                    Some(values) => *group = *values,
                    None => group[..count].copy_from_slice(&values[..count]),
                }
            }
        };
        if packed.len() < 1 << 15 {
            packed.chunks_mut((BLOCK * inner).max(1)).enumerate().for_each(fill);
        } else {
            packed.par_chunks_mut((BLOCK * inner).max(1)).enumerate().for_each(fill);
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

/// The right matrix, given panel by panel.
pub trait Right: Sync {
    /// Writes [`PANEL`] columns from `first` on as `[inner][PANEL]`; what is beyond the last column does not matter.
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

/// A step that is done with a tile of the result before it is stored; of several, one after the other.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue<T> {
    /// Adds a number to each column.
    AddToColumns(T),
    /// Adds a number to each row; rows of a convolution are its channels.
    AddToRows(T),
    /// Multiplies each row by a number.
    MultiplyRows(T),
    /// Adds a matrix like the result.
    Add(T),
    /// Multiplies with a matrix like the result.
    Multiply(T),
    /// Applies a function.
    Activate(ActivationFunction),
    /// Adds what the result held before; the last step.
    Accumulate,
}

impl<T> Epilogue<T> {
    /// The same step with something else in the place of its numbers, if that can be had.
    pub fn map<'t, U>(&'t self, of: impl FnOnce(&'t T) -> Option<U>) -> Option<Epilogue<U>> {
        Some(match self {
            Epilogue::AddToColumns(values) => Epilogue::AddToColumns(of(values)?),
            Epilogue::AddToRows(values) => Epilogue::AddToRows(of(values)?),
            Epilogue::MultiplyRows(values) => Epilogue::MultiplyRows(of(values)?),
            Epilogue::Add(values) => Epilogue::Add(of(values)?),
            Epilogue::Multiply(values) => Epilogue::Multiply(of(values)?),
            Epilogue::Activate(function) => Epilogue::Activate(*function),
            Epilogue::Accumulate => Epilogue::Accumulate,
        })
    }
}

impl Epilogue<&[f32]> {
    /// The same for a result that begins at a row of this one.
    pub fn from_row(self, row: usize, width: usize) -> Self {
        match self {
            Epilogue::AddToRows(values) => Epilogue::AddToRows(&values[row..]),
            Epilogue::MultiplyRows(values) => Epilogue::MultiplyRows(&values[row..]),
            Epilogue::Add(values) => Epilogue::Add(&values[row * width..]),
            Epilogue::Multiply(values) => Epilogue::Multiply(&values[row * width..]),
            Epilogue::AddToColumns(_) | Epilogue::Activate(_) | Epilogue::Accumulate => self,
        }
    }
}

#[inline(always)]
fn combine(out: &mut [f32], other: &[f32], function: impl Fn(f32, f32) -> f32) {
    for (out, other) in out.iter_mut().zip(other) {
        *out = function(*out, *other);
    }
}

#[inline(always)]
pub(super) fn finish_row(steps: &[Epilogue<&[f32]>], out: &mut [f32], row: usize, column: usize, width: usize) {
    for step in steps {
        match step {
            Epilogue::AddToColumns(values) => combine(out, &values[column..], |a, b| a + b),
            Epilogue::AddToRows(values) => out.iter_mut().for_each(|x| *x += values[row]),
            Epilogue::MultiplyRows(values) => out.iter_mut().for_each(|x| *x *= values[row]),
            Epilogue::Add(values) => combine(out, &values[row * width + column..], |a, b| a + b),
            Epilogue::Multiply(values) => combine(out, &values[row * width + column..], |a, b| a * b),
            Epilogue::Activate(function) => activation::apply(*function, out),
            Epilogue::Accumulate => {}
        }
    }
}

pub(super) type Tile = [[f32; PANEL]; BLOCK];

/// `R × C` of a tile, from row `top` and column `left` on.
#[inline(always)]
fn part<const FUSED: bool, const R: usize, const C: usize>(block: &[f32], panel: &[f32], top: usize, left: usize) -> [[f32; C]; R] {
    let mut sums = [[0f32; C]; R];
    for (a, b) in block.as_chunks::<BLOCK>().0.iter().zip(panel.as_chunks::<PANEL>().0) {
        // Arrays of known length: the loops below unroll, and the sums stay in registers.
        let (Some(a), Some(b)) = (a[top..].first_chunk::<R>(), b[left..].first_chunk::<C>()) else { break };
        for i in 0..R {
            for j in 0..C {
                // Without the instruction, `mul_add` would be a call.
                sums[i][j] = if FUSED { a[i].mul_add(b[j], sums[i][j]) } else { sums[i][j] + a[i] * b[j] };
            }
        }
    }
    sums
}

macro_rules! tiles {
    ($($name:ident: $fused:expr, $rows:literal, $columns:literal;)+) => {
        $(simd! {
            // Stands alone: as a part of a larger function, its sums have been seen to leave the registers.
            #[inline(never)]
            fn $name(block: &[f32], panel: &[f32], rows: usize, tile: &mut Tile) {
                for top in (0..rows).step_by($rows) {
                    for left in (0..PANEL).step_by($columns) {
                        let sums = part::<{ $fused }, $rows, $columns>(block, panel, top, left);
                        for (out, sums) in tile[top..].iter_mut().zip(&sums) {
                            out[left..left + $columns].copy_from_slice(sums);
                        }
                    }
                }
            }
        })+
    };
}

tiles! {
    wide: true, 12, 32;
    narrow: true, 6, 16;
    small: cfg!(target_arch = "aarch64"), 4, 8;
}

simd! {
    /// Some blocks times consecutive panels, the first of which begins at `column` of a result `width` wide; `out`
    /// holds the rows of the blocks, `stride` apart.
    #[allow(clippy::too_many_arguments)]
    pub fn multiply(left: &Left, blocks: Range<usize>, panels: &[f32], column: usize, steps: &[Epilogue<&[f32]>], out: &mut [f32], width: usize, stride: usize) {
        let size = PANEL * left.inner;
        let mut tile = [[0f32; PANEL]; BLOCK];
        let level = simd::level();
        let accumulate = matches!(steps.last(), Some(Epilogue::Accumulate));
        for (number, panel) in panels.chunks_exact(size.max(1)).enumerate() {
            let column = column + number * PANEL;
            let columns = PANEL.min(width - column);
            for index in blocks.clone() {
                let (block, first) = (left.block(index), index * BLOCK);
                let rows = BLOCK.min(left.rows - first);
                match level {
                    Level::Avx512 => wide(block, panel, rows, &mut tile),
                    Level::Avx2 => narrow(block, panel, rows, &mut tile),
                    Level::Baseline => small(block, panel, rows, &mut tile),
                }
                for (lane, values) in tile[..rows].iter_mut().enumerate() {
                    let values = &mut values[..columns];
                    finish_row(steps, values, first + lane, column, width);
                    let out = &mut out[(first - blocks.start * BLOCK + lane) * stride + column..][..columns];
                    if accumulate {
                        combine(out, values, |a, b| a + b);
                    } else {
                        out.copy_from_slice(values);
                    }
                }
            }
        }
    }
}

/// The product of a left matrix with a right one of `width` columns, by all threads; rows of `out` are contiguous.
pub fn product(left: &Left, right: &impl Right, width: usize, steps: &[Epilogue<&[f32]>], out: &mut [f32]) {
    let (blocks, panels) = (left.rows.div_ceil(BLOCK), width.div_ceil(PANEL));
    if blocks == 0 || panels == 0 {
        return;
    }
    if left.rows * width * left.inner < 1 << 17 {
        return product_here(left, right, width, steps, out, width);
    }
    let size = (PANEL * left.inner).max(1);
    if blocks < 2 * rayon::current_num_threads() {
        return by_columns(left, right, width, steps, out);
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
            multiply(left, blocks, packed, first * PANEL, steps, out, width, width);
        });
    }
}

/// [`product`] with few rows: jobs are panels, and their tiles are put in place afterwards.
fn by_columns(left: &Left, right: &impl Right, width: usize, steps: &[Epilogue<&[f32]>], out: &mut [f32]) {
    let size = (PANEL * left.inner).max(1);
    let tiles: Vec<Vec<f32>> = (0..width.div_ceil(PANEL))
        .into_par_iter()
        .map_init(
            || Scratch::new(size),
            |panel, index| {
                let column = index * PANEL;
                let columns = PANEL.min(width - column);
                right.pack(column, panel);
                let mut tile = vec![0.0; left.rows * columns];
                multiply(left, 0..left.rows.div_ceil(BLOCK), panel, 0, &[], &mut tile, columns, columns);
                tile
            },
        )
        .collect();
    for (row, out) in out.chunks_exact_mut(width).enumerate() {
        let accumulate = matches!(steps.last(), Some(Epilogue::Accumulate));
        for (tile, out) in tiles.iter().zip(out.chunks_mut(PANEL)) {
            let tile = &tile[row * out.len()..][..out.len()];
            if accumulate {
                combine(out, tile, |a, b| a + b);
            } else {
                out.copy_from_slice(tile);
            }
        }
        finish(steps, out, row, width);
    }
}

simd! {
    fn finish(steps: &[Epilogue<&[f32]>], out: &mut [f32], row: usize, width: usize) {
        finish_row(steps, out, row, 0, width);
    }
}

/// The last steps for a matrix that was not made by a product.
pub fn finish_rows(steps: &[Epilogue<&[f32]>], out: &mut [f32], width: usize) {
    out.par_chunks_mut(width.max(1)).enumerate().for_each(|(row, out)| finish(steps, out, row, width));
}

/// The product by the calling thread alone; rows of `out` begin `stride` apart.
pub fn product_here(left: &Left, right: &impl Right, width: usize, steps: &[Epilogue<&[f32]>], out: &mut [f32], stride: usize) {
    let mut panel = Scratch::new(PANEL * left.inner);
    for column in (0..width).step_by(PANEL) {
        right.pack(column, &mut panel);
        multiply(left, 0..left.rows.div_ceil(BLOCK), &panel, column, steps, out, width, stride);
    }
}

#[cfg(test)]
mod tests {
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
            let steps = [
                Epilogue::AddToColumns(&c[..width]),
                Epilogue::Activate(ActivationFunction::Relu),
                Epilogue::Add(&c[..]),
                Epilogue::MultiplyRows(&a[..rows.min(a.len())]),
            ];
            let steps = if inner == 0 { &steps[..0] } else { &steps[..] };
            product(&left, &Columns { values: &b, count: width, stride: inner }, width, steps, &mut one);
            product_here(&left, &Rows { values: &transposed, count: width, stride: width }, width, steps, &mut other, width);
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
}
