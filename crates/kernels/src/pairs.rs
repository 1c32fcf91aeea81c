//! Products of numbers that are rounded to bf16, in the registers of AVX-512.
//!
//! Operands are packed as those of float products (`matmul`), with two bf16 numbers of consecutive inner
//! indices in the place of a float. `vdpbf16ps` adds the products of both numbers to a float, and treats
//! subnormal numbers as zero (Intel, Architecture Instruction Set Extensions).

use super::tile::{BLOCK, PANEL, Tile};

/// The bf16 number that is nearest to a finite `x`, ties to even, in the upper half of a float.
#[inline(always)]
pub(super) fn rounded_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000
}

/// Rounds floats `[inner][N]` to pairs `[inner / 2][N]`. A missing last number is zero.
#[inline(always)]
fn pairs<const N: usize>(values: &[f32], out: &mut [f32]) {
    let rows = values.as_chunks::<N>().0;
    for (at, out) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let (even, odd) = (&rows[2 * at], rows.get(2 * at + 1).unwrap_or(&[0.0; N]));
        for ((out, even), odd) in out.iter_mut().zip(even).zip(odd) {
            *out = f32::from_bits(rounded_bits(*even) >> 16 | rounded_bits(*odd));
        }
    }
}

simd! {
    /// Rounds a packed block to pairs.
    pub(super) fn round_block(values: &[f32], out: &mut [f32]) {
        pairs::<BLOCK>(values, out);
    }
}

simd! {
    /// Rounds a panel to pairs.
    pub(super) fn round_panel(values: &[f32], out: &mut [f32]) {
        pairs::<PANEL>(values, out);
    }
}

/// Whether the processor has products of pairs that are faster than those of floats, and no tile registers
/// are used.
pub(super) fn is_faster() -> bool {
    instructions::are_faster()
}

/// The product of a block and a panel of pairs.
pub(super) fn multiply(block: &[f32], panel: &[f32], tile: &mut Tile) {
    if !instructions::multiply(block, panel, tile) {
        portable(block, panel, tile);
    }
}

/// The same sums as those of the instructions, except for the order of both products of a pair and for
/// subnormal numbers.
fn portable(block: &[f32], panel: &[f32], tile: &mut Tile) {
    let numbers = |pair: f32| [pair.to_bits() << 16, pair.to_bits() & 0xffff_0000].map(f32::from_bits);
    *tile = [[0.0; PANEL]; BLOCK];
    for (a, b) in block.as_chunks::<BLOCK>().0.iter().zip(panel.as_chunks::<PANEL>().0) {
        for (a, sums) in a.iter().zip(&mut *tile) {
            for (b, sum) in b.iter().zip(sums) {
                let ([a, second], [b, other]) = (numbers(*a), numbers(*b));
                *sum += a * b + second * other;
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[allow(unsafe_code)]
mod instructions {
    use std::arch::x86_64::{__cpuid, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps};
    use std::mem::transmute;
    use std::sync::LazyLock;

    use super::{BLOCK, PANEL, Tile};
    use crate::simd::{Level, level};

    /// Number of floats in a register.
    const LANES: usize = 16;

    /// Whether the processor has the instruction.
    pub fn are_available() -> bool {
        static AVAILABLE: LazyLock<bool> = LazyLock::new(|| level() == Level::Avx512 && is_x86_feature_detected!("avx512bf16"));
        *AVAILABLE
    }

    /// Whether the instruction computes more products per second than those for floats. On a Xeon of 2023, it
    /// computes two thirds as many (76 against 110 GFLOPS per core at 3 GHz).
    pub fn are_faster() -> bool {
        static FASTER: LazyLock<bool> = LazyLock::new(|| {
            let vendor = __cpuid(0);
            let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
            are_available() && name != b"GenuineIntel"
        });
        *FASTER
    }

    /// The product, if the processor has the instruction.
    pub fn multiply(block: &[f32], panel: &[f32], tile: &mut Tile) -> bool {
        // SAFETY: the processor has the features of the callee.
        are_available().then(|| unsafe { packed(block, panel, tile) }).is_some()
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn packed(block: &[f32], panel: &[f32], tile: &mut Tile) {
        let pairs = |values: __m512i| -> __m512bh {
            // SAFETY: both types have 64 bytes, of which all values are valid.
            unsafe { transmute(values) }
        };
        let mut sums = [[_mm512_setzero_ps(); PANEL / LANES]; BLOCK];
        for (a, b) in block.as_chunks::<BLOCK>().0.iter().zip(panel.as_chunks::<PANEL>().0) {
            let halves = b.as_chunks::<LANES>().0;
            // SAFETY: the load reads an array of 16 floats.
            let b: [__m512bh; PANEL / LANES] = std::array::from_fn(|half| unsafe { transmute(_mm512_loadu_ps(halves[half].as_ptr())) });
            for i in 0..BLOCK {
                let a = pairs(_mm512_set1_epi32(a[i].to_bits().cast_signed()));
                for half in 0..PANEL / LANES {
                    sums[i][half] = _mm512_dpbf16_ps(sums[i][half], a, b[half]);
                }
            }
        }
        for (out, sums) in tile.iter_mut().zip(&sums) {
            for (out, sum) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
                // SAFETY: the store writes an array of 16 floats.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
            }
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod instructions {
    use super::Tile;

    pub fn are_faster() -> bool {
        false
    }

    pub fn multiply(_block: &[f32], _panel: &[f32], _tile: &mut Tile) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_half() {
        for i in 0..40_000u32 {
            let x = f32::from_bits(i.wrapping_mul(107_374) & 0xff7f_ffff);
            assert_eq!(rounded_bits(x), u32::from(half::bf16::from_f32(x).to_bits()) << 16, "{x:e}");
        }
        assert_eq!(f32::from_bits(rounded_bits(f32::INFINITY)), f32::INFINITY);
    }

    #[test]
    fn instructions_compute_the_defined_sums() {
        let numbers =
            |count: usize, seed: usize| (0..count).map(|i| ((i + seed).wrapping_mul(2_654_435_761) % 4096) as f32 / 1000.0 - 2.0).collect::<Vec<f32>>();
        for inner in [1usize, 2, 7, 512] {
            let (mut block, mut panel) = (vec![0.0; inner.div_ceil(2) * BLOCK], vec![0.0; inner.div_ceil(2) * PANEL]);
            let (left, right) = (numbers(inner * BLOCK, 1), numbers(inner * PANEL, 77));
            round_block(&left, &mut block);
            round_panel(&right, &mut panel);
            let (mut have, mut want) = ([[1.5; PANEL]; BLOCK], [[1.5; PANEL]; BLOCK]);
            multiply(&block, &panel, &mut have);
            portable(&block, &panel, &mut want);
            let number = |x: f32| f64::from(f32::from_bits(rounded_bits(x)));
            for (row, column) in (0..BLOCK).flat_map(|row| (0..PANEL).map(move |column| (row, column))) {
                let products = (0..inner).map(|k| number(left[k * BLOCK + row]) * number(right[k * PANEL + column]));
                let exact = products.sum::<f64>();
                for found in [have[row][column], want[row][column]] {
                    assert!((f64::from(found) - exact).abs() < 1e-5 * inner as f64, "{inner} {row} {column}: {found} for {exact}");
                }
            }
        }
    }
}
