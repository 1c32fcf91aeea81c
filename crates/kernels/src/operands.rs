//! The operands of matrix products, and their packing into blocks of rows and panels of columns.

use std::ops::Range;

use rayon::prelude::*;

use super::pairs;
use super::scratch::Scratch;
use super::tile::{BLOCK, PANEL};
use crate::{F16, Float};

/// Minimum number of elements of a left matrix that is packed in parallel.
const PARALLEL: usize = 1 << 15;
/// The same for a transposed matrix, whose elements are copied in groups, which is faster. While a thread
/// waits for others, it may start other jobs, whose buffers stay in memory.
const PARALLEL_TRANSPOSED: usize = 1 << 17;

/// A stored float type.
pub trait StoredFloat: PackedFloat {
    /// Number of bf16 numbers whose sum is any value of this type.
    const PARTS: usize;

    /// Converts the value to f32.
    fn value(self) -> f32;

    /// The bits of the value, the others being zero.
    fn bits(self) -> u32;

    /// The value with the lowest bits of a number.
    fn of_bits(bits: u32) -> Self;

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

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn of_bits(bits: u32) -> f32 {
        f32::from_bits(bits)
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

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits().into()
    }

    #[inline(always)]
    fn of_bits(bits: u32) -> half::bf16 {
        half::bf16::from_bits(bits as u16)
    }
}

impl StoredFloat for half::f16 {
    const PARTS: usize = 2;

    #[inline(always)]
    fn value(self) -> f32 {
        F16::to_f32(self.to_le_bytes())
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits().into()
    }

    #[inline(always)]
    fn of_bits(bits: u32) -> half::f16 {
        half::f16::from_bits(bits as u16)
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

/// The packing of blocks and panels. Generic functions are compiled in the crates that use them, which then
/// call functions for copies of a few elements; these functions are compiled here.
pub trait PackedFloat: Copy + Default + Sync {
    /// Packs the block that begins with the row `first`. `sizes` are the number of rows, their length and
    /// their distance.
    fn pack_rows(values: &[Self], first: usize, sizes: [usize; 3], block: &mut [f32]);

    /// Packs the panel that begins with a column of a matrix with contiguous columns. `position` is this
    /// column, the number of columns, and their distance.
    fn pack_panel_of_columns(values: &[Self], position: [usize; 3], panel: &mut [f32]);

    /// As `pack_panel_of_columns`, for a matrix with contiguous rows at the given distance.
    fn pack_panel_of_rows(values: &[Self], position: [usize; 3], panel: &mut [f32]);
}

for_stored_floats! { PackedFloat {
    fn pack_rows(values: &[Self], first: usize, sizes: [usize; 3], block: &mut [f32]) {
        pack_rows(values, first, sizes, block);
    }

    fn pack_panel_of_columns(values: &[Self], position: [usize; 3], panel: &mut [f32]) {
        pack_panel_of_columns(values, position, panel);
    }

    fn pack_panel_of_rows(values: &[Self], position: [usize; 3], panel: &mut [f32]) {
        pack_panel_of_rows(values, position, panel);
    }
} }

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

    /// Some inner indices of some rows.
    pub(super) fn part(&self, rows: Range<usize>, inner: Range<usize>) -> LeftRows<'a> {
        let (row, step) = if self.is_transposed { (1, self.stride) } else { (self.stride, 1) };
        LeftRows { values: &self.values[rows.start * row + inner.start * step..], rows: rows.len(), inner: inner.len(), ..*self }
    }

    pub(super) fn pack(&self) -> Left {
        self.pack_above(if self.is_transposed { PARALLEL_TRANSPOSED } else { PARALLEL })
    }

    /// Packs the matrix with the calling thread only.
    pub(super) fn pack_serial(&self) -> Left {
        self.pack_above(usize::MAX)
    }

    /// Packs the matrix, with all threads if it has at least `parallel` elements.
    fn pack_above(&self, parallel: usize) -> Left {
        let LeftRows { values, rows, inner, stride, is_transposed } = *self;
        Left::packed(rows, inner, parallel, |first, block| match is_transposed {
            true => pack_columns(values, first, [rows, inner, stride], block),
            false => pack_rows(values, first, [rows, inner, stride], block),
        })
    }
}

/// A packed left matrix.
pub struct Left {
    pub(super) rows: usize,
    /// Number of inner indices, or of pairs of them.
    pub(super) inner: usize,
    values: Scratch,
    /// Whether the operands are pairs of bf16 numbers.
    pub(super) is_paired: bool,
}

impl Left {
    /// Packs rows of `inner` elements with the given stride.
    pub fn pack<T: StoredFloat>(values: &[T], rows: usize, inner: usize, stride: usize) -> Left {
        Left::packed(rows, inner, PARALLEL, |first, block| T::pack_rows(values, first, [rows, inner, stride], block))
    }

    /// Packs a transposed matrix: the elements of consecutive inner indices have a distance of `stride`.
    pub fn pack_transposed(values: &[f32], rows: usize, inner: usize, stride: usize) -> Left {
        LeftRows::transposed(values, rows, inner, stride).pack()
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
    pub(super) fn rounded(&self) -> Left {
        let inner = self.inner.div_ceil(2);
        let rounded = Left::packed(self.rows, inner, PARALLEL, |first, block| pairs::round_block(self.block(first / BLOCK), block));
        Left { is_paired: true, ..rounded }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn blocks(&self) -> Range<usize> {
        0..self.rows.div_ceil(BLOCK)
    }

    pub(super) fn block(&self, index: usize) -> &[f32] {
        &self.values[index * BLOCK * self.inner..][..BLOCK * self.inner]
    }
}

simd! {
    /// Packs the block that begins with a row of a matrix, given by its rows, their length and their
    /// distance.
    fn pack_rows[T: StoredFloat](values: &[T], first: usize, sizes: [usize; 3], block: &mut [f32]) {
        let [rows, inner, stride] = sizes;
        // Lanes beyond the last row are ignored.
        let rows: [_; BLOCK] = std::array::from_fn(|lane| &values[(first + lane).min(rows - 1) * stride..][..inner]);
        transpose(rows, block.as_chunks_mut::<BLOCK>().0, 0);
    }
}

simd! {
    /// As [`pack_rows`], for a matrix that is stored transposed.
    fn pack_columns(values: &[f32], first: usize, sizes: [usize; 3], block: &mut [f32]) {
        let [rows, _, stride] = sizes;
        let count = BLOCK.min(rows - first);
        for (step, group) in block.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let values = &values[step * stride + first..];
            match values.first_chunk::<BLOCK>() {
                // A copy of fixed length is faster, even if the elements beyond the last row are meaningless.
                Some(values) => *group = *values,
                None => group[..count].copy_from_slice(&values[..count]),
            }
        }
    }
}

/// Number of elements of a row that are transposed at once.
const RUN: usize = 8;

/// Interleaves the elements of some rows: those with the same inner index are the lanes from `top` on of one
/// group. Each row is read from its beginning to its end, so that the processor fetches the next elements in
/// advance. The bits of two elements are moved as one number, and separated in vector registers.
#[inline(always)]
fn transpose<T: StoredFloat, const LANES: usize, const WIDTH: usize>(rows: [&[T]; LANES], groups: &mut [[f32; WIDTH]], top: usize) {
    let runs = rows.map(|row| row.as_chunks::<RUN>().0);
    let (full, rest) = groups.as_chunks_mut::<RUN>();
    let done = full.len() * RUN;
    let bits = 8 * size_of::<T>();
    for (at, groups) in full.iter_mut().enumerate() {
        for (step, [first, second]) in groups.as_chunks_mut().0.iter_mut().enumerate() {
            let mut pairs = [0; LANES];
            for lane in 0..LANES {
                let [first, second] = runs[lane][at].as_chunks().0[step];
                pairs[lane] = u64::from(first.bits()) | u64::from(second.bits()) << bits;
            }
            for (number, group) in [first, second].into_iter().enumerate() {
                let mut values = [0.0; LANES];
                for lane in 0..LANES {
                    values[lane] = T::of_bits((pairs[lane] >> (bits * number)) as u32).value();
                }
                group[top..top + LANES].copy_from_slice(&values);
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
    /// Writes a panel of the columns starting at `first` as `[inner][columns]`, with as many inner indices as
    /// fit, starting at `from`. Elements beyond the last column may have any value.
    fn pack(&self, first: usize, from: usize, panel: &mut [f32]);

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

    fn pack(&self, first: usize, from: usize, panel: &mut [f32]) {
        T::pack_panel_of_columns(&self.values[from..], [first, self.count, self.stride], panel);
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

    fn pack(&self, first: usize, from: usize, panel: &mut [f32]) {
        T::pack_panel_of_rows(&self.values[from * self.stride..], [first, self.count, self.stride], panel);
    }
}

simd! {
    fn pack_panel_of_columns[T: StoredFloat](values: &[T], position: [usize; 3], panel: &mut [f32]) {
        const LANES: usize = 8;
        let [first, count, stride] = position;
        let groups = panel.as_chunks_mut::<PANEL>().0;
        for top in (0..PANEL.min(count - first)).step_by(LANES) {
            let columns: [_; LANES] = std::array::from_fn(|lane| &values[(first + top + lane).min(count - 1) * stride..][..groups.len()]);
            transpose(columns, groups, top);
        }
    }
}

simd! {
    fn pack_panel_of_rows[T: StoredFloat](values: &[T], position: [usize; 3], panel: &mut [f32]) {
        let [first, count, stride] = position;
        let width = PANEL.min(count - first);
        for (row, group) in panel.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            let values = &values[row * stride + first..];
            match values.first_chunk::<PANEL>() {
                // Loops of fixed length are faster, even if they include elements beyond the last column.
                // `map` is not inlined in other crates, which compile this function with their own options.
                Some(values) => (0..PANEL).for_each(|at| group[at] = values[at].value()),
                None => group.iter_mut().zip(&values[..width]).for_each(|(out, x)| *out = x.value()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 1024.0).collect()
    }

    fn check_panels<T: StoredFloat>(convert: impl Fn(f32) -> T) {
        for (count, inner, stride) in [(1, 1, 1), (33, 16, 20), (40, 27, 27), (64, 9, 12)] {
            let values: Vec<T> = numbers(count * stride, 8).into_iter().map(&convert).collect();
            let columns = Columns { values: &values, count, stride };
            for (first, from) in (0..count).step_by(PANEL).flat_map(|first| [(first, 0), (first, inner / 2)]) {
                let mut panel = vec![0.0; (inner - from) * PANEL];
                columns.pack(first, from, &mut panel);
                for (step, group) in panel.as_chunks::<PANEL>().0.iter().enumerate() {
                    let want: Vec<f32> = (first..count.min(first + PANEL)).map(|column| values[column * stride + from + step].value()).collect();
                    assert_eq!(group[..want.len()], want, "{count} {inner}, column {first}, element {}", from + step);
                }
            }
        }
    }

    #[test]
    fn panels_contain_the_elements_of_columns() {
        check_panels(|x| x);
        check_panels(half::bf16::from_f32);
        check_panels(half::f16::from_f32);
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
