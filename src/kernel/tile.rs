//! A tile of a product, summed in registers: the loop that matrix products, convolutions and attention are made of.
//!
//! A tile is a block of rows times a panel of columns. Every element is one chain of multiply-adds along the inner axis, in
//! the same order with any number of threads. With fused multiply-add (AVX2, AVX-512, NEON) all elements come out the same on every
//! processor; the baseline of x86-64 has no such instruction and rounds each product, so its results differ in their last bits.

use crate::kernel::simd::{self, Level};

/// Rows of a block.
pub const BLOCK: usize = 12;
/// Columns of a panel.
pub const PANEL: usize = 32;

pub(super) type Tile = [[f32; PANEL]; BLOCK];

/// What a block is multiplied with.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// `[inner][PANEL]`, one row behind the other.
    Packed(&'a [f32]),
    /// Rows that begin anywhere in `values`; at least [`PANEL`] values are behind the last offset.
    Shifted { values: &'a [f32], offsets: &'a [usize] },
}

/// `R × C` of a tile, from row `top` on: for each inner index, an element of each row of the block times a row of the panel.
#[inline(always)]
fn part<'p, const FUSED: bool, const R: usize, const C: usize, T>(
    block: &[f32],
    top: usize,
    panel: &'p [T],
    row: impl Fn(&'p T) -> Option<&'p [f32; C]>,
) -> [[f32; C]; R] {
    let mut sums = [[0f32; C]; R];
    for (a, b) in block.as_chunks::<BLOCK>().0.iter().zip(panel) {
        // Arrays of known length: the loops below unroll, and the sums stay in registers.
        let (Some(a), Some(b)) = (a[top..].first_chunk::<R>(), row(b)) else { break };
        for i in 0..R {
            for j in 0..C {
                // Without the instruction, `mul_add` would be a call.
                sums[i][j] = if FUSED { a[i].mul_add(b[j], sums[i][j]) } else { sums[i][j] + a[i] * b[j] };
            }
        }
    }
    sums
}

macro_rules! strips {
    ($($name:ident: $fused:expr, $rows:literal, $columns:literal;)+) => {
        $(mod $name {
            use super::{PANEL, Panel, Tile, part};

            const _: () = assert!(PANEL.is_multiple_of($columns));
            pub const ROWS: usize = $rows;

            /// The rows from `top` on.
            pub fn multiply(block: &[f32], panel: Panel, top: usize, columns: usize, tile: &mut Tile) {
                match panel {
                    Panel::Packed(panel) => packed(block, panel, top, tile),
                    Panel::Shifted { values, offsets } => shifted(block, values, offsets, top, columns, tile),
                }
            }

            simd! {
                // Stands alone: as a part of a larger function, its sums have been seen to leave the registers.
                #[inline(never)]
                fn packed(block: &[f32], panel: &[f32], top: usize, tile: &mut Tile) {
                    let panel = panel.as_chunks::<PANEL>().0;
                    for left in (0..PANEL).step_by($columns) {
                        let sums = part::<{ $fused }, $rows, $columns, _>(block, top, panel, |row| row[left..].first_chunk());
                        for (out, sums) in tile[top..].iter_mut().zip(&sums) {
                            out[left..left + $columns].copy_from_slice(sums);
                        }
                    }
                }
            }

            simd! {
                #[inline(never)]
                fn shifted(block: &[f32], values: &[f32], offsets: &[usize], top: usize, columns: usize, tile: &mut Tile) {
                    for left in (0..columns).step_by($columns) {
                        let values = values.get(left..).unwrap_or_default();
                        // Zeros where nothing is: with another way out of the loop, the sums would not stay in registers.
                        let row = |offset: &usize| values.get(*offset..).and_then(|values| values.first_chunk()).or(Some(&[0.0; $columns]));
                        let sums = part::<{ $fused }, $rows, $columns, _>(block, top, offsets, row);
                        for (out, sums) in tile[top..].iter_mut().zip(&sums) {
                            out[left..left + $columns].copy_from_slice(sums);
                        }
                    }
                }
            }
        })+
    };
}

// What fills the registers best, and lower strips for blocks with fewer rows. Of eight rows, sums have been seen to leave the registers.
strips! {
    wide: true, 12, 32;
    wide_4: true, 4, 32;
    narrow: true, 6, 16;
    narrow_4: true, 4, 16;
    small: cfg!(target_arch = "aarch64"), 4, 8;
}

/// The first `rows` rows and `columns` columns, at least, of a packed block times a panel.
pub(super) fn multiply(block: &[f32], panel: Panel, [rows, columns]: [usize; 2], tile: &mut Tile) {
    let level = simd::level();
    let mut top = 0;
    while top < rows {
        macro_rules! strip {
            ($name:ident) => {{
                $name::multiply(block, panel, top, columns, tile);
                top += $name::ROWS;
            }};
        }
        match (level, rows - top) {
            (Level::Avx512, ..=8) => strip!(wide_4),
            (Level::Avx512, _) => strip!(wide),
            (Level::Avx2, ..=4 | 7 | 8) => strip!(narrow_4),
            (Level::Avx2, _) => strip!(narrow),
            (Level::Baseline, _) => strip!(small),
        }
    }
}
