//! Matrix products in f32 with register tiling.
//!
//! The left matrix is packed into blocks of rows, the right matrix into panels of columns. A tile of the
//! result (`kernel/tile.rs`) is the product of a block and a panel over the complete inner dimension.
//! The right matrix is provided panel by panel, so that it may consist of 16-bit weights or of image
//! windows that are never stored as a matrix (Goto and van de Geijn, 2008).

use std::ops::Range;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::pairs;
use super::pool::on_pool_thread;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};
use crate::{F16, Float};

/// Maximum number of floats in packed panels at a time.
const PACKED: usize = 1 << 20;
/// Minimum number of elements of a left matrix that is packed in parallel.
const PARALLEL: usize = 1 << 15;
/// The same for a transposed matrix, whose elements are copied in groups, which is faster. While a thread
/// waits for others, it may start other jobs, whose buffers stay in memory.
const PARALLEL_TRANSPOSED: usize = 1 << 17;

/// A stored float type.
pub trait StoredFloat: Copy + Default + Sync {
    /// Number of bf16 numbers whose sum is any value of this type.
    const PARTS: usize;

    /// Converts the value to f32.
    fn value(self) -> f32;

    /// The values, if they are stored as f32.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl StoredFloat for f32 {
    const PARTS: usize = 3;

    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    fn as_f32(values: &[f32]) -> Option<&[f32]> {
        Some(values)
    }
}

impl StoredFloat for half::bf16 {
    const PARTS: usize = 1;

    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl StoredFloat for half::f16 {
    const PARTS: usize = 2;

    #[inline(always)]
    fn value(self) -> f32 {
        F16::to_f32(self.to_le_bytes())
    }
}

/// Implements a trait for all stored float types. Functions of such an implementation are compiled in this
/// crate, with its level of optimization.
macro_rules! for_stored_floats {
    ($trait:ident $body:tt) => {
        impl $trait for f32 $body
        impl $trait for half::bf16 $body
        impl $trait for half::f16 $body
    };
}

pub(super) use for_stored_floats;

/// A left matrix that is not packed.
#[derive(Clone, Copy)]
pub struct LeftRows<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) inner: usize,
    pub(super) stride: usize,
    pub(super) is_transposed: bool,
}

impl<'a> LeftRows<'a> {
    /// Rows of `inner` elements with the given stride.
    pub fn new(values: &'a [f32], rows: usize, inner: usize, stride: usize) -> LeftRows<'a> {
        LeftRows { values, rows, inner, stride, is_transposed: false }
    }

    /// A transposed matrix: the elements of consecutive inner indices have a distance of `stride`.
    pub fn transposed(values: &'a [f32], rows: usize, inner: usize, stride: usize) -> LeftRows<'a> {
        LeftRows { values, rows, inner, stride, is_transposed: true }
    }

    /// Some of the rows.
    pub(super) fn rows(&self, first: usize, count: usize) -> LeftRows<'a> {
        let skipped = if self.is_transposed { first } else { first * self.stride };
        LeftRows { values: &self.values[skipped..], rows: count, ..*self }
    }

    pub(super) fn pack(&self) -> Left {
        let LeftRows { values, rows, inner, stride, is_transposed } = *self;
        if is_transposed { Left::pack_transposed(values, rows, inner, stride) } else { Left::pack(values, rows, inner, stride) }
    }
}

/// A packed left matrix.
pub struct Left {
    rows: usize,
    /// Number of inner indices, or of pairs of them.
    inner: usize,
    values: Scratch,
    /// Whether the operands are pairs of bf16 numbers.
    is_paired: bool,
}

impl Left {
    /// Packs rows of `inner` elements with the given stride.
    pub fn pack<T: StoredFloat>(values: &[T], rows: usize, inner: usize, stride: usize) -> Left {
        Left::packed(rows, inner, PARALLEL, |first, block| {
            let last = rows - 1;
            // Lanes beyond the last row are ignored.
            let rows: [_; BLOCK] = std::array::from_fn(|lane| &values[(first + lane).min(last) * stride..][..inner]);
            transpose(rows, block.as_chunks_mut::<BLOCK>().0, 0);
        })
    }

    /// Packs a transposed matrix: the elements of consecutive inner indices have a distance of `stride`.
    pub fn pack_transposed(values: &[f32], rows: usize, inner: usize, stride: usize) -> Left {
        Left::packed(rows, inner, PARALLEL_TRANSPOSED, |first, block| {
            let count = BLOCK.min(rows - first);
            for (step, group) in block.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                let values = &values[step * stride + first..];
                match values.first_chunk::<BLOCK>() {
                    // A copy of fixed length is faster, even if the elements beyond the last row are
                    // meaningless.
                    Some(values) => *group = *values,
                    None => group[..count].copy_from_slice(&values[..count]),
                }
            }
        })
    }

    /// Packs blocks, in parallel if there are at least `parallel` elements. `fill` receives the first row of
    /// each block.
    fn packed(rows: usize, inner: usize, parallel: usize, fill: impl Fn(usize, &mut [f32]) + Sync) -> Left {
        let mut packed = Scratch::new(rows.div_ceil(BLOCK) * BLOCK * inner);
        let size = (BLOCK * inner).max(1);
        if packed.len() < parallel {
            packed.chunks_mut(size).enumerate().for_each(|(index, block)| fill(index * BLOCK, block));
        } else {
            packed.par_chunks_mut(size).enumerate().for_each(|(index, block)| fill(index * BLOCK, block));
        }
        Left { rows, inner, values: packed, is_paired: false }
    }

    /// Rounds the elements to pairs of bf16 numbers.
    fn rounded(&self) -> Left {
        let inner = self.inner.div_ceil(2);
        let rounded = Left::packed(self.rows, inner, PARALLEL, |first, block| pairs::round_block(self.block(first / BLOCK), block));
        Left { is_paired: true, ..rounded }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn block(&self, index: usize) -> &[f32] {
        &self.values[index * BLOCK * self.inner..][..BLOCK * self.inner]
    }
}

/// Number of elements of a row that are transposed at once.
const RUN: usize = 8;

/// Interleaves the elements of some rows: those with the same inner index are the lanes from `top` on of one
/// group. Each row is read from its beginning to its end, so that the processor fetches the next elements in
/// advance.
#[inline(always)]
fn transpose<T: StoredFloat, const LANES: usize, const WIDTH: usize>(rows: [&[T]; LANES], groups: &mut [[f32; WIDTH]], top: usize) {
    let runs = rows.map(|row| row.as_chunks::<RUN>().0);
    let (full, rest) = groups.as_chunks_mut::<RUN>();
    let done = full.len() * RUN;
    for (at, groups) in full.iter_mut().enumerate() {
        let values = runs.map(|runs| &runs[at]);
        for (step, group) in groups.iter_mut().enumerate() {
            for (out, values) in group[top..].iter_mut().zip(values) {
                *out = values[step].value();
            }
        }
    }
    for (step, group) in rest.iter_mut().enumerate() {
        for (out, row) in group[top..].iter_mut().zip(rows) {
            *out = row[done + step].value();
        }
    }
}

/// A right matrix, provided panel by panel.
pub trait Right: Sync {
    /// Writes the panel of columns starting at `first` as `[inner][columns]`. Elements beyond the last
    /// column may have any value.
    fn pack(&self, first: usize, panel: &mut [f32]);

    /// Number of bf16 numbers whose sum is any element.
    fn parts(&self) -> usize {
        f32::PARTS
    }
}

/// A right matrix with contiguous columns at a distance of `stride`: the weight `[out, in]` of a linear
/// layer.
pub struct Columns<'a, T> {
    /// The elements.
    pub values: &'a [T],
    /// Number of columns.
    pub count: usize,
    /// Distance between columns.
    pub stride: usize,
}

impl<T: StoredFloat> Right for Columns<'_, T> {
    fn parts(&self) -> usize {
        T::PARTS
    }

    fn pack(&self, first: usize, panel: &mut [f32]) {
        const LANES: usize = 8;
        let groups = panel.as_chunks_mut::<PANEL>().0;
        let last = self.count - 1;
        for top in (0..PANEL.min(self.count - first)).step_by(LANES) {
            let columns: [_; LANES] = std::array::from_fn(|lane| &self.values[(first + top + lane).min(last) * self.stride..][..groups.len()]);
            transpose(columns, groups, top);
        }
    }
}

/// A right matrix with contiguous rows at a distance of `stride`.
pub struct Rows<'a, T> {
    /// The elements.
    pub values: &'a [T],
    /// Number of columns.
    pub count: usize,
    /// Distance between rows.
    pub stride: usize,
}

impl<T: StoredFloat> Right for Rows<'_, T> {
    fn parts(&self) -> usize {
        T::PARTS
    }

    fn pack(&self, first: usize, panel: &mut [f32]) {
        let width = PANEL.min(self.count - first);
        for (row, group) in panel.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            let values = &self.values[row * self.stride + first..];
            match values.first_chunk::<PANEL>() {
                // Loops of fixed length are faster, even if they include elements beyond the last column.
                Some(values) => *group = values.map(StoredFloat::value),
                None => group.iter_mut().zip(&values[..width]).for_each(|(out, x)| *out = x.value()),
            }
        }
    }
}

simd! {
    /// Multiplies blocks by consecutive panels. The first panel starts at `column` of a result with
    /// `width` columns. `out` contains the rows of the blocks at a distance of `stride`, and the results are
    /// written from its column `at` on.
    #[allow(clippy::too_many_arguments)]
    fn multiply_into(left: &Left, blocks: Range<usize>, panels: &[f32], column: usize, epilogue: Epilogue, out: &mut [f32], width: usize, at: usize, stride: usize) {
        let size = PANEL * left.inner;
        let mut tile = [[0f32; PANEL]; BLOCK];
        for (number, panel) in panels.chunks_exact(size.max(1)).enumerate() {
            let (column, at) = (column + number * PANEL, at + number * PANEL);
            let columns = PANEL.min(width - column);
            for index in blocks.clone() {
                let first = index * BLOCK;
                let rows = BLOCK.min(left.rows - first);
                match left.is_paired {
                    true => pairs::multiply(left.block(index), panel, &mut tile),
                    false => tile::multiply(left.block(index), Panel::Packed(panel), [rows, PANEL], &mut tile),
                }
                for (lane, values) in tile[..rows].iter_mut().enumerate() {
                    let out = &mut out[(first - blocks.start * BLOCK + lane) * stride + at..][..columns];
                    epilogue.store(&mut values[..columns], [first + lane, column, width], out);
                }
            }
        }
    }
}

/// Multiplies blocks by consecutive panels. The first panel starts at `column` of a result with `width`
/// columns. `out` contains the rows of the blocks at a distance of `stride`.
#[allow(clippy::too_many_arguments)]
pub fn multiply(left: &Left, blocks: Range<usize>, panels: &[f32], column: usize, epilogue: Epilogue, out: &mut [f32], width: usize, stride: usize) {
    multiply_into(left, blocks, panels, column, epilogue, out, width, column, stride);
}

/// Packed operands of a product, of which parts are computed.
pub(super) struct Operands {
    left: Left,
    panels: Scratch,
    width: usize,
}

impl Operands {
    /// Packs operands with all threads, as floats or rounded to pairs of bf16 numbers.
    pub fn pack(left: &LeftRows, right: &impl Right, width: usize, is_paired: bool) -> Operands {
        let (left, inner) = (left.pack(), left.inner);
        let left = if is_paired { left.rounded() } else { left };
        let mut panels = Scratch::new(width.div_ceil(PANEL) * PANEL * left.inner);
        panels.par_chunks_mut(PANEL * left.inner).enumerate().for_each(|(number, panel)| {
            if is_paired {
                let mut floats = Scratch::new(PANEL * inner);
                right.pack(number * PANEL, &mut floats);
                pairs::round_panel(&floats, panel);
            } else {
                right.pack(number * PANEL, panel);
            }
        });
        Operands { left, panels, width }
    }

    /// Adds rows of the product, as many as `out` has, from `first` on, and columns from `column` on:
    /// multiples of [`BLOCK`] and of [`PANEL`].
    pub fn add_to(&self, first: usize, column: usize, out: &mut [f32]) {
        let blocks = first / BLOCK..(first + out.len() / self.width).div_ceil(BLOCK);
        multiply(&self.left, blocks, &self.panels[column * self.left.inner..], column, Epilogue::ACCUMULATE, out, self.width, self.width);
    }
}

/// Products with fewer multiply-accumulates take less time than starting other threads.
const SERIAL: usize = 1 << 19;

/// Computes the product of a left matrix and a right matrix of `width` columns with all threads. Rows of
/// `out` are contiguous.
pub fn product(left: &LeftRows, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    if left.rows == 0 || width == 0 {
        return;
    }
    if left.inner == 0 {
        return by_panels(left.rows, [width, PANEL], epilogue, out, |_, _, _| {});
    }
    if left.rows * width * left.inner < SERIAL {
        return product_serial(&left.pack(), right, width, epilogue, out, width);
    }
    on_pool_thread(|| product_parallel(&left.pack(), right, width, epilogue, out));
}

fn product_parallel(left: &Left, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    let (blocks, panels) = (left.rows.div_ceil(BLOCK), width.div_ceil(PANEL));
    let size = (PANEL * left.inner).max(1);
    if blocks < 2 * rayon::current_num_threads() {
        return by_columns(left, right, width, epilogue, out);
    }
    let chunk = (PACKED / size).clamp(1, panels);
    let mut packed = Scratch::new(chunk * size);
    // Blocks per job, few enough that they stay in the L2 cache while panels are streamed.
    let group = (PACKED / 8 / (BLOCK * left.inner).max(1)).clamp(2, blocks.div_ceil(2 * rayon::current_num_threads()).max(2));
    for first in (0..panels).step_by(chunk) {
        let count = chunk.min(panels - first);
        let packed = &mut packed[..count * size];
        packed.par_chunks_mut(size).enumerate().for_each(|(i, panel)| right.pack((first + i) * PANEL, panel));
        out.par_chunks_mut(group * BLOCK * width).enumerate().for_each(|(i, out)| {
            let blocks = i * group..((i + 1) * group).min(blocks);
            multiply(left, blocks, packed, first * PANEL, epilogue, out, width, width);
        });
    }
}

/// [`product`] for few rows: parallel over panels.
fn by_columns(left: &Left, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    by_panels(left.rows, [width, PANEL], epilogue, out, |column, columns, tile| {
        let mut panel = Scratch::new(PANEL * left.inner);
        right.pack(column, &mut panel);
        multiply_into(left, 0..left.rows.div_ceil(BLOCK), &panel, column, Epilogue::NONE, tile, width, 0, columns);
    });
}

simd! {
    /// Applies the epilogue to some columns of all rows.
    fn finish(tile: &mut [f32], column: usize, columns: usize, width: usize, epilogue: Epilogue) {
        for (row, values) in tile.chunks_exact_mut(columns).enumerate() {
            epilogue.apply(values, [row, column, width]);
        }
    }
}

/// Product with few rows, parallel over panels of `panel` columns. `multiply` receives the first column, the
/// number of columns, and zeros `[rows, columns]` to overwrite. The epilogue is applied to the results, which
/// are written to `out`.
pub(super) fn by_panels(rows: usize, [width, panel]: [usize; 2], epilogue: Epilogue, out: &mut [f32], multiply: impl Fn(usize, usize, &mut [f32]) + Sync) {
    let tile = |index: usize| {
        let column = index * panel;
        let columns = panel.min(width - column);
        let mut tile = vec![0.0; rows * columns];
        multiply(column, columns, &mut tile);
        finish(&mut tile, column, columns, width, epilogue);
        tile
    };
    let tiles: Vec<Vec<f32>> = (0..width.div_ceil(panel)).into_par_iter().map(tile).collect();
    for (row, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
        for (tile, out) in tiles.iter().zip(out.chunks_mut(panel)) {
            epilogue.put(&tile[row * out.len()..][..out.len()], out);
        }
    }
}

/// Computes the product on the calling thread. Rows of `out` have a distance of `stride`.
pub fn product_serial(left: &Left, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32], stride: usize) {
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
    fn products_are_correct() {
        for (rows, inner, width) in [(1, 1, 1), (3, 5, 33), (12, 7, 32), (13, 64, 100), (100, 130, 65), (300, 20, 40), (5, 0, 3), (29, 3000, 70)] {
            let (a, b, c) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let left = LeftRows::new(&a, rows, inner, inner);
            let transposed: Vec<f32> = (0..inner * width).map(|i| b[(i % width) * inner + i / width]).collect();
            let mut one = vec![0.0; rows * width];
            let mut other = one.clone();
            let steps =
                [Fused::AddToColumns(&c[..width]), Fused::Activate(ActivationFunction::Relu), Fused::Add(&c), Fused::MultiplyRows(&a[..rows.min(a.len())])];
            let epilogue = Epilogue::new(if inner == 0 { &[] } else { &steps });
            product(&left, &Columns { values: &b, count: width, stride: inner }, width, epilogue, &mut one);
            product_serial(&left.pack(), &Rows { values: &transposed, count: width, stride: width }, width, epilogue, &mut other, width);
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
    fn the_epilogue_is_applied_once_when_accumulating() {
        // Three code paths: few rows with many threads, few rows with one thread, and many rows.
        for (rows, inner, width) in [(2, 3, 5), (30, 400, 70), (600, 64, 40)] {
            let (a, b, old) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let left = LeftRows::new(&a, rows, inner, inner);
            let right = Columns { values: &b, count: width, stride: inner };
            let steps = [Fused::AddToColumns(&b[..width]), Fused::Activate(ActivationFunction::Relu)];
            let mut finished = vec![0.0; rows * width];
            product_serial(&left.pack(), &right, width, Epilogue::new(&steps), &mut finished, width);
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
    fn rows_are_packed_interleaved() {
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
