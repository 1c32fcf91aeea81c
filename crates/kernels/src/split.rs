//! Products of floats in tile registers for bf16 numbers, with the accuracy of f32.
//!
//! A float has a significand of 24 bits, so it is the sum of three bf16 numbers of 8 bits, without error.
//! The products of these parts are exact in f32, and are accumulated in f32 (Henry, Tang and Heinecke,
//! "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019).
//! Products with bf16 weights, which have one part, differ from those of floats only in the order of the
//! sums. For weights with more parts, products of parts below 2⁻²² of the largest one are omitted.
//! Products with infinite weights are NaN.

use std::ops::{Deref, DerefMut, Range};

use rayon::prelude::*;

use super::amx::{BLOCK, Block, OPERAND, STEP, Tiles};
use super::epilogue::Epilogue;
use super::matmul;
use super::operands::{LeftRows, Right, StoredFloat};
use super::pairs::rounded_bits;
use super::scratch::Scratch;
use super::tile::PANEL;
use crate::simd::{self, Level};

/// Number of bf16 numbers whose sum is a float.
const PARTS: usize = f32::PARTS;
/// Number of elements of rows that are packed at a time, if these are enough rows.
const ROWS: usize = 3 << 21;
/// Maximum number of elements of packed panels at a time.
const PANELS: usize = 1 << 21;
/// Number of elements of rows that are multiplied with a panel before the next one, in the L2 cache.
const CACHED: usize = 3 << 17;
/// Maximum number of steps that are multiplied before the next panel.
const RUN: usize = 64;
/// The bits of a float without its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// The bits of infinity.
const INFINITE: u32 = 0x7f80_0000;
/// Number of floats per cache line.
const LINE: usize = 16;

const _: () = assert!(PANEL == BLOCK);

/// A buffer of bf16 numbers, at the beginning of a cache line.
struct Buffer {
    values: Scratch,
    skipped: usize,
    count: usize,
}

impl Buffer {
    fn new(count: usize) -> Buffer {
        let values = Scratch::new(count.div_ceil(2) + LINE);
        let skipped = values.as_ptr().align_offset(4 * LINE).min(LINE);
        Buffer { values, skipped, count }
    }
}

impl Deref for Buffer {
    type Target = [u16];

    fn deref(&self) -> &[u16] {
        &bytemuck::cast_slice(&self.values[self.skipped..])[..self.count]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u16] {
        &mut bytemuck::cast_slice_mut(&mut self.values[self.skipped..])[..self.count]
    }
}

/// The upper half of a float: the number rounded toward zero, which cannot overflow.
#[inline(always)]
fn truncated(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

/// The bf16 numbers whose sum is a finite `x`, in the upper halves of floats; if there is only one, `x` is
/// rounded to it.
#[inline(always)]
fn parts<const N: usize>(x: f32) -> [u32; PARTS] {
    if N == 1 {
        return [rounded_bits(x), 0, 0];
    }
    let first = truncated(x);
    let second = truncated(x - first);
    [first, second, x - first - second].map(f32::to_bits)
}

simd! {
    /// Packs at most [`BLOCK`] rows as `[step][part][row][element]`, with the given number of parts. Returns
    /// whether all elements are finite.
    fn pack_block(x: &[f32], sizes: [usize; 3], is_transposed: bool, parts: usize, block: &mut [u16]) -> bool {
        match (is_transposed, parts) {
            (false, 1) => pack_rows::<1>(x, sizes, block),
            (false, _) => pack_rows::<PARTS>(x, sizes, block),
            (true, 1) => pack_transposed::<1>(x, sizes, block),
            (true, _) => pack_transposed::<PARTS>(x, sizes, block),
        }
    }
}

#[inline(always)]
fn pack_rows<const N: usize>(x: &[f32], [count, inner, stride]: [usize; 3], block: &mut [u16]) -> bool {
    if count < BLOCK {
        block.fill(0);
    }
    let mut largest = 0;
    for row in 0..count {
        let (whole, rest) = x[row * stride..][..inner].as_chunks::<STEP>();
        let (full, last) = block.split_at_mut(whole.len() * N * OPERAND);
        for (step, x) in full.chunks_exact_mut(N * OPERAND).zip(whole) {
            largest = largest.max(split_row::<N>(x, row, step));
        }
        if !rest.is_empty() {
            let mut padded = [0.0; STEP];
            padded[..rest.len()].copy_from_slice(rest);
            largest = largest.max(split_row::<N>(&padded, row, last));
        }
    }
    largest < INFINITE
}

#[inline(always)]
fn pack_transposed<const N: usize>(x: &[f32], [count, inner, stride]: [usize; 3], block: &mut [u16]) -> bool {
    let mut largest = 0;
    for (number, step) in block.chunks_exact_mut(N * OPERAND).enumerate() {
        let mut rows = [[0.0; STEP]; BLOCK];
        for index in 0..STEP.min(inner - number * STEP) {
            let values = &x[(number * STEP + index) * stride..][..count];
            rows.iter_mut().zip(values).for_each(|(row, value)| row[index] = *value);
        }
        rows.iter().enumerate().for_each(|(row, values)| largest = largest.max(split_row::<N>(values, row, step)));
    }
    largest < INFINITE
}

/// Splits elements of a row into `N` parts. Returns the bits of the largest magnitude.
#[inline(always)]
fn split_row<const N: usize>(x: &[f32; STEP], row: usize, step: &mut [u16]) -> u32 {
    let mut split = [[0u16; STEP]; N];
    let mut largest = 0;
    for column in 0..STEP {
        largest = largest.max(x[column].to_bits() & MAGNITUDE);
        let parts = parts::<N>(x[column]);
        for part in 0..N {
            split[part][column] = (parts[part] >> 16) as u16;
        }
    }
    for (out, split) in step.chunks_exact_mut(OPERAND).zip(&split) {
        out[row * STEP..][..STEP].copy_from_slice(split);
    }
    largest
}

/// Packs a panel `[inner][column]` as `[step][part][half][pair][column][2]`.
fn pack_panel(panel: &[f32], parts: usize, out: &mut [u16]) {
    match parts {
        1 => split_panel_1(panel, out),
        2 => split_panel_2(panel, out),
        _ => split_panel_3(panel, out),
    }
}

#[inline(always)]
fn split_panel<const N: usize>(panel: &[f32], out: &mut [u16]) {
    const HALF: usize = BLOCK / 2;
    let rows = panel.as_chunks::<HALF>().0;
    for (step, out) in bytemuck::cast_slice_mut::<u16, u32>(out).chunks_exact_mut(N * OPERAND / 2).enumerate() {
        let out = out.as_chunks_mut::<HALF>().0;
        for pair in 0..STEP / 2 {
            for half in 0..2 {
                let row = |index: usize| rows.get((step * STEP + 2 * pair + index) * 2 + half).unwrap_or(&[0.0; HALF]);
                let (even, odd) = (row(0), row(1));
                for column in 0..HALF {
                    let (even, odd) = (parts::<N>(even[column]), parts::<N>(odd[column]));
                    for part in 0..N {
                        out[(part * 2 + half) * (STEP / 2) + pair][column] = even[part] >> 16 | odd[part] & 0xffff_0000;
                    }
                }
            }
        }
    }
}

simd! { fn split_panel_1(panel: &[f32], out: &mut [u16]) { split_panel::<1>(panel, out) } }
simd! { fn split_panel_2(panel: &[f32], out: &mut [u16]) { split_panel::<2>(panel, out) } }
simd! { fn split_panel_3(panel: &[f32], out: &mut [u16]) { split_panel::<3>(panel, out) } }

/// Whether the processor has tile registers.
pub(super) fn is_available() -> bool {
    simd::level() == Level::Amx
}

/// Whether [`product`] is faster than a product of floats. Packing takes more time for more parts of the
/// right matrix.
pub(super) fn is_faster(left: &LeftRows, width: usize, parts: usize) -> bool {
    is_available() && left.rows > BLOCK * parts && left.inner >= 4 * STEP && width >= 4 * BLOCK
}

/// The product of a left matrix and a right matrix of `width` columns, with all threads. Rows of `out` are
/// contiguous. Rows with infinities or NaN are multiplied as floats.
pub(super) fn product(left: &LeftRows, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    let most = BLOCK * (ROWS / (left.inner.div_ceil(STEP) * PARTS * OPERAND)).max(16);
    for (slab, out) in out[..left.rows * width].chunks_mut(most * width).enumerate() {
        let first = slab * most;
        let steps: Vec<_> = epilogue.steps.iter().map(|step| step.from_row(first, width)).collect();
        let epilogue = Epilogue { steps: &steps, accumulate: epilogue.accumulate };
        let left = left.part(first..first + out.len() / width, 0..left.inner);
        match Left::pack(&left, PARTS) {
            Some(packed) => packed.product(right, width, epilogue, out),
            None => matmul::product(&left, right, width, epilogue, out),
        }
    }
}

/// Packed operands of a product, rounded to bf16 numbers.
pub(super) struct Rounded {
    left: Left,
    panels: Buffer,
    width: usize,
}

impl Rounded {
    /// Packs matrices whose elements are finite.
    pub fn pack(left: &LeftRows, right: &impl Right, width: usize) -> Option<Rounded> {
        let left = Left::pack(left, 1)?;
        let mut panels = Buffer::new(width.div_ceil(BLOCK) * left.steps * OPERAND);
        left.pack_panels(right, 1, 0, &mut panels);
        Some(Rounded { left, panels, width })
    }

    /// Adds rows of the product, as many as `out` has, from `first` on, and columns from `column` on, both
    /// multiples of [`BLOCK`].
    pub fn add_to(&self, first: usize, column: usize, out: &mut [f32]) {
        let panels = Panels { values: &self.panels[column / BLOCK * self.left.steps * OPERAND..], parts: 1, column };
        self.left.multiply(first / BLOCK, &panels, self.width, Epilogue::ACCUMULATE, out);
    }
}

/// A packed left matrix.
struct Left {
    rows: usize,
    inner: usize,
    steps: usize,
    parts: usize,
    values: Buffer,
}

impl Left {
    /// Packs rows as this number of parts, if all their elements are finite.
    fn pack(left: &LeftRows, parts: usize) -> Option<Left> {
        let LeftRows { values: x, rows, inner, stride, is_transposed } = *left;
        let steps = inner.div_ceil(STEP);
        let size = steps * parts * OPERAND;
        let mut values = Buffer::new(rows.div_ceil(BLOCK) * size);
        let pack = |(index, block): (usize, &mut [u16])| {
            let first = index * BLOCK;
            let count = BLOCK.min(rows - first);
            pack_block(&x[if is_transposed { first } else { first * stride }..], [count, inner, stride], is_transposed, parts, block)
        };
        let are_finite = values.par_chunks_mut(size).enumerate().map(pack).reduce(|| true, |one, other| one && other);
        are_finite.then_some(Left { rows, inner, steps, parts, values })
    }

    /// Packs panels of a right matrix, from a column on, as this number of parts.
    fn pack_panels(&self, right: &impl Right, parts: usize, column: usize, packed: &mut [u16]) {
        packed.par_chunks_mut(self.steps * parts * OPERAND).enumerate().for_each(|(i, panel)| {
            let mut floats = Scratch::new(BLOCK * self.inner);
            right.pack(column + i * BLOCK, 0, &mut floats);
            pack_panel(&floats, parts, panel);
        });
    }

    fn product(&self, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
        let (parts, panels) = (right.parts(), width.div_ceil(BLOCK));
        let size = self.steps * parts * OPERAND;
        let chunk = (PANELS / size).clamp(1, panels);
        let blocks = self.rows.div_ceil(BLOCK);
        let group = (CACHED / (self.steps * self.parts * OPERAND)).clamp(1, blocks.div_ceil(2 * rayon::current_num_threads()));
        let mut packed = Buffer::new(chunk * size);
        for first in (0..panels).step_by(chunk) {
            let packed = &mut packed[..chunk.min(panels - first) * size];
            self.pack_panels(right, parts, first * BLOCK, packed);
            let panels = Panels { values: packed, parts, column: first * BLOCK };
            out.par_chunks_mut(group * BLOCK * width).enumerate().for_each(|(i, out)| self.multiply(i * group, &panels, width, epilogue, out));
        }
    }

    /// Multiplies blocks of rows, as many as `out` has, from `first` on.
    fn multiply(&self, first: usize, panels: &Panels, width: usize, epilogue: Epilogue, out: &mut [f32]) {
        let blocks = (out.len() / width).div_ceil(BLOCK);
        let count = panels.values.len() / (self.steps * panels.parts * OPERAND);
        // Few enough steps that the operands stay in the L2 cache.
        let runs = self.steps.div_ceil(RUN);
        let run = self.steps.div_ceil(runs);
        let mut sums = Buffer::new(2 * BLOCK * BLOCK * if runs > 1 { blocks * count } else { 1 });
        let sums = bytemuck::cast_slice_mut::<u16, f32>(&mut sums).as_chunks_mut::<BLOCK>().0.as_chunks_mut::<BLOCK>().0;
        let tiles = Tiles::new();
        for from in (0..self.steps).step_by(run) {
            let range = from..(from + run).min(self.steps);
            let part = |values, parts, index| operands(values, [self.steps, parts, index], &range);
            for (number, block) in (0..count).flat_map(|number| (0..blocks).map(move |block| (number, block))) {
                let sums = &mut sums[if runs > 1 { number * blocks + block } else { 0 }];
                let (left, right) = (part(&self.values, self.parts, first + block), part(panels.values, panels.parts, number));
                tiles.multiply(left, self.parts, right, panels.parts, from > 0, sums);
                if range.end == self.steps {
                    let at = [(first + block) * BLOCK, panels.column + number * BLOCK, width];
                    finish(sums, at, epilogue, &mut out[block * BLOCK * width..]);
                }
            }
        }
    }
}

/// Packed panels of a right matrix, from a column on.
struct Panels<'a> {
    values: &'a [u16],
    parts: usize,
    column: usize,
}

/// A range of the steps of a block or panel.
fn operands<'a>(values: &'a [u16], [steps, parts, index]: [usize; 3], range: &Range<usize>) -> &'a [u16] {
    &values[(index * steps + range.start) * parts * OPERAND..][..range.len() * parts * OPERAND]
}

simd! {
    fn finish(sums: &mut Block, at: [usize; 3], epilogue: Epilogue, out: &mut [f32]) {
        let [row, column, width] = at;
        let columns = BLOCK.min(width - column);
        for ((lane, sums), out) in sums.iter_mut().enumerate().zip(out.chunks_exact_mut(width)) {
            let out = &mut out[column..][..columns];
            epilogue.apply(&mut sums[..columns], [row + lane, column, width]);
            match out.first_chunk_mut::<BLOCK>() {
                // A copy of fixed length is faster.
                Some(out) if !epilogue.accumulate => *out = *sums,
                _ => epilogue.put(&sums[..columns], out),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::epilogue::Fused;
    use super::super::matmul::product_serial;
    use super::super::operands::{Columns, Rows};
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 8) as f32 - 8_388_608.0) / 4_194_304.0).collect()
    }

    #[test]
    fn parts_sum_to_the_number() {
        for x in numbers(1000, 1).into_iter().chain([0.0, -0.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE * 1e7, 1.0 + f32::EPSILON]) {
            let [a, b, c] = parts::<PARTS>(x).map(|part| f32::from_bits(part & 0xffff_0000));
            assert_eq!(f64::from(a) + f64::from(b) + f64::from(c), f64::from(x));
        }
    }

    /// The largest error of all elements, relative to the sum of the magnitudes of their products.
    fn error(x: &[f32], w: &[f32], inner: usize, out: &[f32]) -> f64 {
        let width = w.len() / inner;
        let products = |at: usize| (0..inner).map(move |k| f64::from(x[at / width * inner + k]) * f64::from(w[at % width * inner + k]));
        let error = |(at, have): (usize, &f32)| (f64::from(*have) - products(at).sum::<f64>()).abs() / products(at).map(f64::abs).sum::<f64>();
        out.iter().enumerate().map(error).fold(0.0, f64::max)
    }

    #[test]
    fn products_have_the_accuracy_of_floats() {
        for (rows, inner, width) in [(1, 1, 1), (33, 70, 45), (70, 32, 64), (40, 2100, 33), (64, 4099, 40)] {
            let (x, w) = (numbers(rows * inner, 1), numbers(width * inner, 2));
            let left = LeftRows::new(&x, rows, inner, inner);
            let mut out = vec![f32::NAN; rows * width];
            let mut check = |right: &dyn Fn(&mut [f32]), w: &[f32], name: &str| {
                right(&mut out);
                let found = error(&x, w, inner, &out);
                product_serial(&left.pack(), &Columns { values: w, count: width, stride: inner }, width, Epilogue::NONE, &mut out, width);
                let floats = error(&x, w, inner, &out);
                // Both are errors of rounding sums, in different orders.
                assert!(found <= 1.2 * floats + 1e-7, "{rows} {inner} {width} {name}: {found:e} for {floats:e}");
            };
            check(&|out| product(&left, &Columns { values: &w, count: width, stride: inner }, width, Epilogue::NONE, out), &w, "f32");
            let half: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            let floats: Vec<f32> = half.iter().map(|w| w.to_f32()).collect();
            check(&|out| product(&left, &Columns { values: &half, count: width, stride: inner }, width, Epilogue::NONE, out), &floats, "bf16");
            let half: Vec<f16> = w.iter().map(|w| f16::from_f32(*w)).collect();
            let floats: Vec<f32> = half.iter().map(|w| w.to_f32()).collect();
            check(&|out| product(&left, &Columns { values: &half, count: width, stride: inner }, width, Epilogue::NONE, out), &floats, "f16");
        }
    }

    #[test]
    fn layouts_threads_and_slabs_do_not_change_the_product() {
        let (rows, inner, width) = (150, 75, 130);
        let (x, w, old) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
        let (x_transposed, w_transposed): (Vec<f32>, Vec<f32>) =
            ((0..rows * inner).map(|i| x[i % rows * inner + i / rows]).collect(), (0..width * inner).map(|i| w[i % width * inner + i / width]).collect());
        let (columns, by_rows) = (Columns { values: &w, count: width, stride: inner }, Rows { values: &w_transposed, count: width, stride: width });
        let (plain, transposed) = (LeftRows::new(&x, rows, inner, inner), LeftRows::transposed(&x_transposed, rows, inner, rows));
        let mut want = vec![f32::NAN; rows * width];
        product(&plain, &columns, width, Epilogue::NONE, &mut want);
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (mut one, mut other) = (want.clone(), want.clone());
            pool.install(|| product(&transposed, &columns, width, Epilogue::NONE, &mut one));
            pool.install(|| product(&plain, &by_rows, width, Epilogue::NONE, &mut other));
            assert!(one == want && other == want, "{threads} threads");
        }
        let steps = [Fused::AddToColumns(&w[..width]), Fused::Add(&old[..]), Fused::MultiplyRows(&x[..rows])];
        let mut finished = old.clone();
        product(&plain, &columns, width, Epilogue { steps: &steps, accumulate: true }, &mut finished);
        for (at, have) in finished.iter().enumerate() {
            let (row, column) = (at / width, at % width);
            assert_eq!(*have, old[at] + (want[at] + w[column] + old[at]) * x[row], "{row} {column}");
        }
    }

    #[test]
    fn slabs_are_multiplied_separately_and_infinite_rows_as_floats() {
        // Two slabs, of 512 and 8 rows.
        let (rows, inner, width) = (520, 4200, 33);
        let (x, w) = (numbers(rows * inner, 1), numbers(width * inner, 2));
        let columns = Columns { values: &w, count: width, stride: inner };
        let steps = [Fused::MultiplyRows(&x[..rows]), Fused::AddToRows(&w[..rows])];
        let compute = |x: &[f32]| {
            let mut out = vec![f32::NAN; rows * width];
            product(&LeftRows::new(x, rows, inner, inner), &columns, width, Epilogue::new(&steps), &mut out);
            out
        };
        let finite = compute(&x);
        let mut last = vec![f32::NAN; width];
        product(&LeftRows::new(&x[519 * inner..], 1, inner, inner), &columns, width, Epilogue::NONE, &mut last);
        let last: Vec<f32> = last.iter().map(|value| value * x[519] + w[519]).collect();
        assert_eq!(finite[519 * width..], last);
        let mut changed = x.clone();
        changed[515 * inner + 5] = f32::INFINITY;
        let found = compute(&changed);
        assert_eq!(found[..512 * width], finite[..512 * width]);
        assert!(found[515 * width..516 * width].iter().all(|value| value.is_infinite()));
    }
}
