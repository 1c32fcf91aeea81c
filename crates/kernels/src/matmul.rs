//! Matrix products in f32 with register tiling.
//!
//! The left matrix is packed into blocks of rows, the right matrix into panels of columns. A tile of the
//! result (`kernel/tile.rs`) is the product of a block and a panel. Some inner indices of some columns are
//! packed at a time, so that panels stay in the L3 cache, and the blocks that a thread multiplies with them
//! in its L2 cache (Goto and van de Geijn, 2008). The right matrix is provided panel by panel, so that it may
//! consist of 16-bit weights or of image windows that are never stored as a matrix.

use std::ops::Range;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::operands::{Left, LeftRows, Right};
use super::pairs;
use super::pool::on_pool_thread;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// Maximum number of floats in packed panels at a time.
const PACKED: usize = 1 << 20;
/// Maximum number of inner indices that are packed at a time.
const DEPTH: usize = 1 << 10;
/// Maximum number of floats in the packed blocks of a job.
const BLOCKS: usize = 1 << 17;
/// A part of a result, computed from packed operands.
#[derive(Clone, Copy)]
struct Part<'e> {
    /// Its first row and column in the result, and the number of columns of the result.
    position: [usize; 3],
    /// Whether it contains the sums over earlier inner indices, which are continued.
    continues: bool,
    epilogue: Epilogue<'e>,
}

simd! {
    /// Multiplies blocks by consecutive panels. `out` contains the rows of the blocks, from the first column
    /// of the panels on, at a distance of `stride`.
    fn multiply(left: &Left, blocks: Range<usize>, panels: &[f32], part: Part, out: &mut [f32], stride: usize) {
        let [top, from, width] = part.position;
        let mut tile = [[0f32; PANEL]; BLOCK];
        for (number, panel) in panels.chunks_exact((PANEL * left.inner).max(1)).enumerate() {
            let column = from + number * PANEL;
            let columns = PANEL.min(width - column);
            for (at, index) in blocks.clone().enumerate() {
                let rows = BLOCK.min(left.rows - index * BLOCK);
                let out = &mut out[at * BLOCK * stride + number * PANEL..];
                if part.continues {
                    for (values, out) in tile[..rows].iter_mut().zip(out.chunks(stride)) {
                        match out.first_chunk() {
                            // Values beyond the last column belong to the next row, and are not stored.
                            Some(out) => *values = *out,
                            None => values[..columns].copy_from_slice(&out[..columns]),
                        }
                    }
                    tile::add(left.block(index), panel, rows, &mut tile);
                } else if left.is_paired {
                    pairs::multiply(left.block(index), panel, &mut tile);
                } else {
                    tile::multiply(left.block(index), Panel::Packed(panel), [rows, PANEL], &mut tile);
                }
                for ((lane, values), out) in tile[..rows].iter_mut().enumerate().zip(out.chunks_mut(stride)) {
                    let position = [top + at * BLOCK + lane, column, width];
                    match out.first_chunk_mut::<PANEL>().filter(|_| columns == PANEL) {
                        // Loops of fixed length are faster.
                        Some(out) => part.epilogue.store(values, position, out),
                        None => part.epilogue.store(&mut values[..columns], position, &mut out[..columns]),
                    }
                }
            }
        }
    }
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
                right.pack(number * PANEL, 0, &mut floats);
                pairs::round_panel(&floats, panel);
            } else {
                right.pack(number * PANEL, 0, panel);
            }
        });
        Operands { left, panels, width }
    }

    /// Adds rows of the product, as many as `out` has, from `first` on, and columns from `column` on:
    /// multiples of [`BLOCK`] and of [`PANEL`].
    pub fn add_to(&self, first: usize, column: usize, out: &mut [f32]) {
        let blocks = first / BLOCK..(first + out.len() / self.width).div_ceil(BLOCK);
        let part = Part { position: [first, column, self.width], continues: false, epilogue: Epilogue::ACCUMULATE };
        multiply(&self.left, blocks, &self.panels[column * self.left.inner..], part, &mut out[column..], self.width);
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
    let out = &mut out[..left.rows * width];
    if left.inner == 0 {
        return by_panels(left.rows, [width, PANEL], epilogue, out, |_, _, _| {});
    }
    if left.rows * width * left.inner < SERIAL {
        return product_serial(&left.pack(), right, width, epilogue, out, width);
    }
    on_pool_thread(|| product_parallel(left, right, width, epilogue, out));
}

/// Ranges of inner indices of about the same length, at least one, that are packed at a time.
fn depths(inner: usize) -> impl Iterator<Item = Range<usize>> {
    let depth = inner.div_ceil(inner.div_ceil(DEPTH));
    (0..inner).step_by(depth).map(move |from| from..(from + depth).min(inner))
}

fn product_parallel(left: &LeftRows, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    let (blocks, panels, threads) = (left.rows.div_ceil(BLOCK), width.div_ceil(PANEL), rayon::current_num_threads());
    if blocks < 2 * threads {
        return by_columns(left, right, width, epilogue, out);
    }
    if epilogue.accumulate && left.inner > DEPTH {
        // Incomplete sums cannot replace the values to which the product is added.
        let mut sums = Scratch::new(out.len());
        product_parallel(left, right, width, Epilogue { accumulate: false, ..epilogue }, &mut sums);
        return out.par_chunks_mut(width).zip(sums.par_chunks(width)).for_each(|(out, sums)| epilogue.put(sums, out));
    }
    let depth = depths(left.inner).next().map_or(1, |range| range.len());
    let chunk = (PACKED / (PANEL * depth)).clamp(1, panels);
    let mut packed = Scratch::new(chunk * PANEL * depth);
    let jobs = blocks.div_ceil((BLOCKS / (BLOCK * depth)).max(1)).next_multiple_of(2 * threads);
    let rows = blocks.div_ceil(jobs) * BLOCK;
    for first in (0..panels).step_by(chunk) {
        for range in depths(left.inner) {
            let size = PANEL * range.len();
            let packed = &mut packed[..chunk.min(panels - first) * size];
            packed.par_chunks_mut(size).enumerate().for_each(|(i, panel)| right.pack((first + i) * PANEL, range.start, panel));
            let epilogue = if range.end == left.inner { epilogue } else { Epilogue::NONE };
            out.par_chunks_mut(rows * width).enumerate().for_each(|(job, out)| {
                let top = job * rows;
                let left = left.part(top..top + out.len() / width, range.clone()).pack_serial();
                let part = Part { position: [top, first * PANEL, width], continues: range.start > 0, epilogue };
                multiply(&left, left.blocks(), packed, part, &mut out[first * PANEL..], width);
            });
        }
    }
}

/// [`product`] for few rows: parallel over panels.
fn by_columns(left: &LeftRows, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    let parts: Vec<(Range<usize>, Left)> = depths(left.inner).map(|range| (range.clone(), left.part(0..left.rows, range).pack())).collect();
    by_panels(left.rows, [width, PANEL], epilogue, out, |column, columns, tile| {
        for (range, left) in &parts {
            let mut panel = Scratch::new(PANEL * range.len());
            right.pack(column, range.start, &mut panel);
            let part = Part { position: [0, column, width], continues: range.start > 0, epilogue: Epilogue::NONE };
            multiply(left, left.blocks(), &panel, part, tile, columns);
        }
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
        right.pack(column, 0, &mut panel);
        let part = Part { position: [0, column, width], continues: false, epilogue };
        multiply(left, left.blocks(), &panel, part, &mut out[column..], stride);
    }
}

#[cfg(test)]
mod tests {
    use super::super::activation::ActivationFunction;
    use super::super::epilogue::Fused;
    use super::super::operands::{Columns, Rows};
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 1024.0).collect()
    }

    #[test]
    fn products_are_correct() {
        for (rows, inner, width) in
            [(1, 1, 1), (3, 5, 33), (12, 7, 32), (13, 64, 100), (100, 130, 65), (300, 20, 40), (5, 0, 3), (29, 3000, 70), (131, 2100, 70), (30, 2000, 1100)]
        {
            let (a, b, c) = (numbers(rows * inner, 1), numbers(width * inner, 2), numbers(rows * width, 3));
            let left = LeftRows::new(&a, rows, inner, inner);
            let transposed: Vec<f32> = (0..inner * width).map(|i| b[(i % width) * inner + i / width]).collect();
            let mut one = vec![0.0; rows * width];
            let mut other = one.clone();
            let steps =
                [Fused::AddToColumns(&c[..width]), Fused::Activate(ActivationFunction::Relu), Fused::Add(&c), Fused::MultiplyRows(&a[..rows.min(a.len())])];
            let epilogue = Epilogue::new(if inner == 0 { &[] } else { &steps });
            let by_rows = Rows { values: &transposed, count: width, stride: width };
            product_serial(&left.pack(), &by_rows, width, epilogue, &mut other, width);
            let left_columns: Vec<f32> = (0..inner * rows).map(|i| a[(i % rows) * inner + i / rows]).collect();
            for threads in [1, 2, 16] {
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                    product(&LeftRows::transposed(&left_columns, rows, inner, rows), &by_rows, width, epilogue, &mut one);
                    assert_eq!(one, other, "{rows} {inner} {width}");
                    product(&left, &Columns { values: &b, count: width, stride: inner }, width, epilogue, &mut one);
                    assert_eq!(one, other, "{rows} {inner} {width}");
                });
            }
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
        // Code paths: few rows with many threads, few rows with one thread, many rows, and more inner indices
        // than are packed at a time.
        for (rows, inner, width) in [(2, 3, 5), (30, 400, 70), (600, 64, 40), (200, 2500, 40), (20, 2500, 70)] {
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
}
