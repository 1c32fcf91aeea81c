//! Products of bf16 matrices in the tile registers of x86-64 processors with AMX (Intel, Architecture
//! Instruction Set Extensions, chapter 3).
//!
//! A tile has 16 rows of 64 bytes. `tdpbf16ps` adds the product of a tile of 16 rows by 32 elements and a
//! tile of 32 elements by 16 columns to a tile of 16 × 16 floats. It sums the products of even and of odd
//! elements separately, adds both sums to the result, and treats subnormal numbers as zero.

use std::marker::PhantomData;

use crate::simd::{self, Level};

/// Number of rows, and of columns, of a block of the result: two tiles.
pub const BLOCK: usize = 32;
/// Number of rows, and of columns, of a tile.
const TILE: usize = BLOCK / 2;
/// Number of inner elements per instruction.
pub const STEP: usize = 32;
/// Number of elements of [`STEP`] inner elements of a block.
pub const OPERAND: usize = BLOCK * STEP;

/// A block of the result.
pub type Block = [[f32; BLOCK]; BLOCK];

/// The configured tile registers of a thread. Without such registers, products are computed by loops, which
/// define them.
pub struct Tiles {
    has_registers: bool,
    /// Registers belong to a thread.
    thread: PhantomData<*const ()>,
}

impl Tiles {
    /// Configures the registers of this thread.
    pub fn new() -> Tiles {
        let has_registers = simd::level() == Level::Amx;
        if has_registers {
            instructions::configure();
        }
        Tiles { has_registers, thread: PhantomData }
    }

    /// The products of the parts of both operands, summed over all steps, and added to `out` if `adds`.
    /// Part `i` of the left and part `j` of the right operand are multiplied if `i + j < left_parts`. Left
    /// operands are `[step][part][row][element]`, right operands `[step][part][half][pair][column][2]`, with
    /// halves of 16 columns and pairs of elements.
    pub fn multiply(&self, left: &[u16], left_parts: usize, right: &[u16], right_parts: usize, adds: bool, out: &mut Block) {
        assert!((1..=left_parts).contains(&right_parts));
        let steps = right.len() / (right_parts * OPERAND);
        assert!(steps > 0 && left.len() >= steps * left_parts * OPERAND);
        match self.has_registers {
            true => instructions::multiply(left, left_parts, right, right_parts, steps, adds, out),
            false => portable(left, left_parts, right, right_parts, adds, out),
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        if self.has_registers {
            instructions::release();
        }
    }
}

/// The same sums as those of the instructions, except for subnormal numbers.
fn portable(left: &[u16], left_parts: usize, right: &[u16], right_parts: usize, adds: bool, out: &mut Block) {
    let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    if !adds {
        *out = [[0.0; BLOCK]; BLOCK];
    }
    let (left, right) = (left.chunks_exact(left_parts * OPERAND), right.chunks_exact(right_parts * OPERAND));
    for (left, right) in left.zip(right) {
        for (pass, right) in right.chunks_exact(OPERAND).enumerate() {
            for left in left.chunks_exact(OPERAND).take(left_parts - pass) {
                for (row, out) in left.chunks_exact(STEP).zip(&mut *out) {
                    for (half, out) in right.chunks_exact(OPERAND / 2).zip(out.chunks_exact_mut(TILE)) {
                        let mut sums = [[0f32; TILE]; 2];
                        for (elements, columns) in row.as_chunks::<2>().0.iter().zip(half.as_chunks::<2>().0.as_chunks::<TILE>().0) {
                            for (column, right) in columns.iter().enumerate() {
                                sums[0][column] += value(elements[0]) * value(right[0]);
                                sums[1][column] += value(elements[1]) * value(right[1]);
                            }
                        }
                        out.iter_mut().zip(&sums[0]).zip(&sums[1]).for_each(|((out, even), odd)| *out += even + odd);
                    }
                }
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
#[allow(unsafe_code)]
mod instructions {
    use std::arch::asm;

    use super::{Block, OPERAND};
    use crate::simd::has_tiles;

    /// Size of an operand of a step in bytes: two tiles.
    const BYTES: usize = 2 * OPERAND;

    #[repr(C, align(64))]
    struct Configuration([u8; 64]);

    /// Palette 1: eight tiles of 16 rows of 64 bytes.
    const CONFIGURATION: Configuration = {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = 64;
            bytes[48 + tile] = 16;
            tile += 1;
        }
        Configuration(bytes)
    };

    /// Configures the registers, which must be available.
    pub fn configure() {
        assert!(has_tiles());
        // SAFETY: the processor has the instruction, and the operand has 64 bytes in the defined format.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly)) };
    }

    /// Releases the registers, which must be available.
    pub fn release() {
        assert!(has_tiles());
        // SAFETY: the processor has the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    /// As [`Tiles::multiply`](super::Tiles::multiply), with configured registers and `steps` steps.
    pub fn multiply(left: &[u16], left_parts: usize, right: &[u16], right_parts: usize, steps: usize, adds: bool, out: &mut Block) {
        assert!(steps > 0 && right_parts > 0 && right_parts <= left_parts);
        assert!(left.len() >= steps * left_parts * OPERAND && right.len() >= steps * right_parts * OPERAND);
        // SAFETY: the caller has configured the registers; otherwise, the first instruction raises a signal.
        // The loads read `steps * right_parts` operands of `right`. Pass `j` of a step reads its first
        // `left_parts - j` operands of `left`. The stores write the 4 KiB of `out`.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {part:e}, {part:e}",
                "jz 2f",
                "tileloadd tmm0, [{out} + 2 * {row}]",
                "tileloadd tmm1, [{out} + 2 * {row} + 64]",
                "tileloadd tmm2, [{out} + 2 * {row} + 2048]",
                "tileloadd tmm3, [{out} + 2 * {row} + 2112]",
                // For each step:
                "2:",
                "mov {count:e}, {left_parts:e}",
                "mov {passes:e}, {right_parts:e}",
                // For each part of the right operand:
                "3:",
                "tileloadd tmm6, [{right} + {row}]",
                "tileloadd tmm7, [{right} + {row} + 1024]",
                "add {right}, {bytes}",
                "mov {from}, {left}",
                "mov {part:e}, {count:e}",
                // For each part of the left operand:
                "4:",
                "tileloadd tmm4, [{from} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{from} + {row} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {from}, {bytes}",
                "dec {part:e}",
                "jnz 4b",
                "dec {count:e}",
                "dec {passes:e}",
                "jnz 3b",
                "add {left}, {step}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{out} + 2 * {row}], tmm0",
                "tilestored [{out} + 2 * {row} + 64], tmm1",
                "tilestored [{out} + 2 * {row} + 2048], tmm2",
                "tilestored [{out} + 2 * {row} + 2112], tmm3",
                left = inout(reg) left.as_ptr() => _,
                right = inout(reg) right.as_ptr() => _,
                steps = inout(reg) steps => _,
                part = inout(reg) usize::from(adds) => _,
                row = in(reg) 64usize,
                from = out(reg) _,
                count = out(reg) _,
                passes = out(reg) _,
                step = in(reg) left_parts * BYTES,
                left_parts = in(reg) left_parts,
                right_parts = in(reg) right_parts,
                out = in(reg) out.as_mut_ptr(),
                bytes = const BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", not(miri))))]
mod instructions {
    use super::Block;

    pub fn configure() {}

    pub fn release() {}

    pub fn multiply(_left: &[u16], _left_parts: usize, _right: &[u16], _right_parts: usize, _steps: usize, _adds: bool, _out: &mut Block) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_compute_the_defined_sums() {
        let number = |i: usize| half::bf16::from_f32(((i.wrapping_mul(2_654_435_761) >> 20) % 4096) as f32 / 1024.0 - 2.0).to_bits();
        for (steps, left_parts, right_parts) in [(1, 1, 1), (3, 3, 1), (2, 3, 2), (5, 3, 3)] {
            let left: Vec<u16> = (0..steps * left_parts * OPERAND).map(number).collect();
            let right: Vec<u16> = (0..steps * right_parts * OPERAND).map(|i| number(i + 12_345)).collect();
            for adds in [false, true] {
                let (mut have, mut want) = ([[1.5; BLOCK]; BLOCK], [[1.5; BLOCK]; BLOCK]);
                Tiles::new().multiply(&left, left_parts, &right, right_parts, adds, &mut have);
                portable(&left, left_parts, &right, right_parts, adds, &mut want);
                assert_eq!(have, want, "{steps} {left_parts} {right_parts} {adds}");
            }
        }
    }

    #[test]
    fn sums_match_the_definition() {
        let number = |i: usize| half::bf16::from_f32((i % 61) as f32 - 30.0);
        let (left, right): (Vec<_>, Vec<_>) = ((0..2 * OPERAND).map(number).collect(), (0..2 * OPERAND).map(|i| number(7 * i)).collect());
        let bits = |values: &[half::bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let mut out = [[f32::NAN; BLOCK]; BLOCK];
        Tiles::new().multiply(&bits(&left), 1, &bits(&right), 1, false, &mut out);
        for (row, column) in [(0, 0), (3, 15), (16, 16), (31, 1), (17, 31)] {
            let product = |k: usize| {
                let at = k / STEP * OPERAND + column / 16 * 512 + (k % STEP / 2 * 16 + column % 16) * 2 + k % 2;
                left[k / STEP * OPERAND + row * STEP + k % STEP].to_f32() * right[at].to_f32()
            };
            assert_eq!(out[row][column], (0..2 * STEP).map(product).sum::<f32>(), "{row} {column}");
        }
    }
}
