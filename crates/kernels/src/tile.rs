//! A tile of a matrix product, accumulated in registers: the inner loop of matrix products, convolutions
//! and attention.
//!
//! A tile is the product of a block of rows and a panel of columns. Every element is one chain of
//! multiply-adds along the inner dimension, in the same order for any number of threads. With fused
//! multiply-add (AVX2, AVX-512, NEON), results are equal on every processor. The x86-64 baseline has no
//! such instruction and rounds each product, so its results differ in the last bits.

use crate::simd::{self, Level};

/// Number of rows per block.
pub const BLOCK: usize = 12;
/// Number of columns per panel.
pub const PANEL: usize = 32;

pub(super) type Tile = [[f32; PANEL]; BLOCK];

/// The right operand of a tile.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// Contiguous rows, `[inner][PANEL]`.
    Packed(&'a [f32]),
    /// Rows at arbitrary offsets in `values`. At least [`PANEL`] values must follow the last offset.
    Shifted { values: &'a [f32], offsets: &'a [usize] },
}

/// Adds products to an `R × C` part of a tile, starting at row `top`: for each inner index, an element of
/// each row of the block times a row of the panel.
#[inline(always)]
fn part<'p, const FUSED: bool, const R: usize, const C: usize, T>(
    mut sums: [[f32; C]; R],
    (block, top): (&[f32], usize),
    panel: &'p [T],
    row: impl Fn(&'p T) -> Option<&'p [f32; C]>,
) -> [[f32; C]; R] {
    for (a, b) in block.as_chunks::<BLOCK>().0.iter().zip(panel) {
        // With arrays of fixed length, the loops are unrolled, and the sums stay in registers.
        let (Some(a), Some(b)) = (a[top..].first_chunk::<R>(), row(b)) else { break };
        for i in 0..R {
            for j in 0..C {
                // Without hardware support, `mul_add` would be a function call.
                sums[i][j] = if FUSED { a[i].mul_add(b[j], sums[i][j]) } else { sums[i][j] + a[i] * b[j] };
            }
        }
    }
    sums
}

/// Writes a part of a tile.
#[inline(always)]
fn put<const R: usize, const C: usize>(sums: &[[f32; C]; R], tile: &mut Tile, [top, left]: [usize; 2]) {
    for (out, sums) in tile[top..].iter_mut().zip(sums) {
        out[left..left + C].copy_from_slice(sums);
    }
}

macro_rules! strips {
    ($($name:ident: $fused:expr, $rows:literal, $columns:literal;)+) => {
        $(mod $name {
            use super::{PANEL, Panel, Tile, part, put};

            const _: () = assert!(PANEL.is_multiple_of($columns));
            pub const ROWS: usize = $rows;

            /// Computes the rows from `top` on, or adds to them.
            pub fn multiply(block: &[f32], panel: Panel, top: usize, columns: usize, adds: bool, tile: &mut Tile) {
                match panel {
                    Panel::Packed(panel) => packed(block, panel, top, adds, tile),
                    Panel::Shifted { values, offsets } => shifted(block, values, offsets, top, columns, tile),
                }
            }

            simd! {
                // Not inlined: inside a larger function, the sums would be spilled from registers.
                #[inline(never)]
                fn packed(block: &[f32], panel: &[f32], top: usize, adds: bool, tile: &mut Tile) {
                    let panel = panel.as_chunks::<PANEL>().0;
                    for left in (0..PANEL).step_by($columns) {
                        let mut before = [[0f32; $columns]; $rows];
                        // Two loops: a common one would read the zeros from memory.
                        if adds {
                            before.iter_mut().zip(&tile[top..]).for_each(|(before, tile)| before.copy_from_slice(&tile[left..left + $columns]));
                            let sums = part::<{ $fused }, $rows, $columns, _>(before, (block, top), panel, |row| row[left..].first_chunk());
                            put(&sums, tile, [top, left]);
                        } else {
                            let sums = part::<{ $fused }, $rows, $columns, _>(before, (block, top), panel, |row| row[left..].first_chunk());
                            put(&sums, tile, [top, left]);
                        }
                    }
                }
            }

            simd! {
                #[inline(never)]
                fn shifted(block: &[f32], values: &[f32], offsets: &[usize], top: usize, columns: usize, tile: &mut Tile) {
                    for left in (0..columns).step_by($columns) {
                        let values = values.get(left..).unwrap_or_default();
                        // Missing values are zero. With another exit of the loop, the sums would not
                        // stay in registers.
                        let row = |offset: &usize| values.get(*offset..).and_then(|values| values.first_chunk()).or(Some(&[0.0; $columns]));
                        let sums = part::<{ $fused }, $rows, $columns, _>([[0f32; $columns]; $rows], (block, top), offsets, row);
                        put(&sums, tile, [top, left]);
                    }
                }
            }
        })+
    };
}

// Sizes that use the registers best, and smaller strips for blocks with fewer rows. With eight rows, the
// sums would be spilled.
strips! {
    wide: true, 12, 32;
    wide_4: true, 4, 32;
    narrow: true, 6, 16;
    narrow_4: true, 4, 16;
    small: cfg!(target_arch = "aarch64"), 4, 8;
}

/// Computes at least the first `rows` rows and `columns` columns of the product of a packed block and a
/// panel.
pub(super) fn multiply(block: &[f32], panel: Panel, sizes: [usize; 2], tile: &mut Tile) {
    strips(block, panel, sizes, false, tile);
}

/// Adds the product of a packed block and a packed panel to at least the first `rows` rows. The sums are
/// those of a single product over the inner indices of the operands of all calls.
pub(super) fn add(block: &[f32], panel: &[f32], rows: usize, tile: &mut Tile) {
    strips(block, Panel::Packed(panel), [rows, PANEL], true, tile);
}

fn strips(block: &[f32], panel: Panel, [rows, columns]: [usize; 2], adds: bool, tile: &mut Tile) {
    let level = simd::level();
    let mut top = 0;
    while top < rows {
        macro_rules! strip {
            ($name:ident) => {{
                $name::multiply(block, panel, top, columns, adds, tile);
                top += $name::ROWS;
            }};
        }
        match (level, rows - top) {
            (Level::Avx512 | Level::Amx, ..=8) => strip!(wide_4),
            (Level::Avx512 | Level::Amx, _) => strip!(wide),
            (Level::Avx2, ..=4 | 7 | 8) => strip!(narrow_4),
            (Level::Avx2, _) => strip!(narrow),
            (Level::Baseline, _) => strip!(small),
        }
    }
}
