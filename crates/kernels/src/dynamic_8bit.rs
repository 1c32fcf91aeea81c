//! Dynamic 8-bit quantization of numbers from -1 to 1 (Dettmers et al. 2022, "8-bit Optimizers via
//! Block-wise Quantization").
//!
//! Band `i` of 7 covers the range from 0.1 · 10^(i-6) to 10^(i-6). The unsigned format has 2^(i+1)
//! evenly spaced values in it, the signed format 2^i for each sign. Zero and one have separate codes.
//! Code 0 is zero. In signed codes, the magnitude is below the sign bit, and the sign bit alone
//! represents one.

/// Number of elements per scale.
pub const BLOCK: usize = 256;

const BANDS: usize = 7;
const LANES: usize = 16;

/// Range of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// From -1 to 1. The most negative value is -0.993.
    Signed,
    /// From 0 to 1.
    Unsigned,
}

const fn values(first: usize) -> [f32; 256] {
    let mut values = [0f32; 256];
    let (mut band, mut unit, mut count, mut code) = (0, 1e-6f64, first, 1);
    while band < BANDS {
        let mut j = 0;
        while j < count {
            values[code] = (unit * (0.1 + 0.9 * (j as f64 + 0.5) / count as f64)) as f32;
            code += 1;
            j += 1;
        }
        band += 1;
        unit *= 10.0;
        count *= 2;
    }
    values[code] = 1.0;
    while code < 255 {
        code += 1;
        values[code] = -values[code - 128];
    }
    values
}

static SIGNED: [f32; 256] = values(1);
static UNSIGNED: [f32; 256] = values(2);

/// Lookup by exponent and seven mantissa bits: within a cell of this table, the nearest code changes at
/// most once.
const SHIFT: u32 = 16;
const LOWEST: u32 = (127 - 24) << 7;
const CELLS: usize = (127 << 7) - LOWEST as usize + 1;

struct Nearest {
    /// The code nearest to the smallest number of a cell.
    first: [u8; CELLS],
    /// Magnitude from which the next code is nearer.
    border: [f32; 256],
}

/// In the unsigned format, positive numbers never become zero, because optimizers divide by the root of
/// the second moment.
const fn nearest(values: &[f32; 256], signed: bool) -> Nearest {
    let mut nearest = Nearest { first: [0; CELLS], border: [f32::INFINITY; 256] };
    let codes = if signed { 129 } else { 256 };
    nearest.border[0] = if signed { values[1] / 2.0 } else { 0.0 };
    let mut code = 1;
    while code + 1 < codes {
        nearest.border[code] = (values[code] + values[code + 1]) / 2.0;
        code += 1;
    }
    let (mut cell, mut code) = (0, 0);
    while cell < CELLS {
        let low = f32::from_bits((LOWEST + cell as u32) << SHIFT);
        while low > nearest.border[code] {
            code += 1;
        }
        nearest.first[cell] = if cell == 0 { 0 } else { code as u8 };
        cell += 1;
    }
    nearest
}

static NEAREST_SIGNED: Nearest = nearest(&SIGNED, true);
static NEAREST_UNSIGNED: Nearest = nearest(&UNSIGNED, false);

impl Range {
    /// The value of each code.
    pub fn values(self) -> &'static [f32; 256] {
        match self {
            Range::Signed => &SIGNED,
            Range::Unsigned => &UNSIGNED,
        }
    }

    /// For the code of each magnitude, the magnitude from which the next code is nearer.
    pub fn borders(self) -> &'static [f32; 256] {
        match self {
            Range::Signed => &NEAREST_SIGNED.border,
            Range::Unsigned => &NEAREST_UNSIGNED.border,
        }
    }

    /// Upper end, number of values, and first code of each band.
    pub fn bands(self) -> [(f64, usize, usize); BANDS] {
        let first: usize = if self == Range::Signed { 1 } else { 2 };
        std::array::from_fn(|i| (10f64.powi(i as i32 - 6), first << i, 1 + first * ((1 << i) - 1)))
    }
}

simd! {
    /// Dequantizes the codes of a block with its scale.
    pub fn decode(range: Range, codes: &[u8], scale: f32, out: &mut [f32]) {
        let values = range.values();
        for (out, code) in out.iter_mut().zip(codes) {
            *out = values[usize::from(*code)] * scale;
        }
    }
}

#[inline(always)]
fn largest(numbers: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, tail) = numbers.as_chunks::<LANES>();
    let more = |most: f32, x: f32| if x.abs() > most { x.abs() } else { most };
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = more(lanes[lane], block[lane]);
        }
    }
    let most = lanes.into_iter().fold(0.0, more);
    tail.iter().fold(most, |most, x| more(most, *x))
}

#[inline(always)]
fn nearest_codes(nearest: &Nearest, numbers: &[f32], scale: f32, codes: &mut [u8]) {
    let divisor = if scale > 0.0 { scale } else { 1.0 };
    let (mut magnitudes, mut cells) = ([0f32; BLOCK], [0u32; BLOCK]);
    for ((magnitude, cell), x) in magnitudes.iter_mut().zip(&mut cells).zip(numbers) {
        *magnitude = x.abs() / divisor;
        *cell = (magnitude.to_bits() >> SHIFT).clamp(LOWEST, LOWEST + CELLS as u32 - 1) - LOWEST;
    }
    for ((code, magnitude), cell) in codes.iter_mut().zip(magnitudes).zip(cells) {
        let first = nearest.first[cell as usize];
        *code = first + u8::from(magnitude > nearest.border[usize::from(first)]);
    }
}

simd! {
    /// Quantizes a block of at most [`BLOCK`] numbers to the nearest codes. Returns the scale, which is
    /// the largest magnitude. In the unsigned format, only zero becomes zero.
    pub fn encode(range: Range, numbers: &[f32], codes: &mut [u8]) -> f32 {
        let scale = largest(numbers);
        match range {
            Range::Unsigned => nearest_codes(&NEAREST_UNSIGNED, numbers, scale, codes),
            Range::Signed => {
                nearest_codes(&NEAREST_SIGNED, numbers, scale, codes);
                for (code, x) in codes.iter_mut().zip(numbers) {
                    let negative = *x < 0.0 && *code > 0;
                    *code = if negative { (*code).min(127) | 128 } else { *code };
                }
            }
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(range: Range, numbers: &[f32]) -> Vec<f32> {
        let (mut codes, mut back) = (vec![0; numbers.len()], vec![0.0; numbers.len()]);
        for ((numbers, codes), back) in numbers.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(back.chunks_mut(BLOCK)) {
            let scale = encode(range, numbers, codes);
            decode(range, codes, scale, back);
        }
        back
    }

    #[test]
    fn every_value_has_one_code() {
        for range in [Range::Signed, Range::Unsigned] {
            let mut sorted = range.values().to_vec();
            sorted.sort_by(f32::total_cmp);
            assert!(sorted.windows(2).all(|pair| pair[0] < pair[1]), "{range:?}");
            assert_eq!((range.values()[0], sorted[255]), (0.0, 1.0));
            for (unit, count, first) in range.bands() {
                let inside = range.values()[first..first + count].iter().all(|v| f64::from(*v) > unit * 0.1 && f64::from(*v) < unit);
                assert!(inside, "{range:?} {unit}");
            }
        }
        assert!((SIGNED[1] - 5.5e-7).abs() < 1e-12 && (SIGNED[127] - 0.992_968_75).abs() < 1e-6 && SIGNED[128] == 1.0);
    }

    #[test]
    fn the_nearest_code_is_chosen() {
        for range in [Range::Signed, Range::Unsigned] {
            let low = if range == Range::Signed { -1.0 } else { 0.0 };
            let even = (0..200_000).map(|i| low + (1.0 - low) * i as f32 / 200_000.0);
            let wide = (0..100_000).map(|i| 10f32.powf(-8.0 * i as f32 / 100_000.0));
            let numbers: Vec<f32> = even.chain(wide).collect();
            // A one in every block, so that its scale is one.
            let numbers: Vec<f32> = numbers.chunks(BLOCK - 1).flat_map(|block| [&[1.0], block].concat()).collect();
            for (x, back) in numbers.iter().zip(round(range, &numbers)) {
                let best = range.values().iter().map(|v| (v - x).abs()).fold(f32::INFINITY, f32::min);
                let raised = range == Range::Unsigned && *x > 0.0 && *x < UNSIGNED[1];
                assert!((back - x).abs() <= best * 1.000_1 + 1e-9 || raised && back == UNSIGNED[1], "{range:?}: {x} became {back}");
            }
        }
    }

    #[test]
    fn zero_blocks_and_tiny_numbers() {
        assert_eq!(round(Range::Signed, &[0.0, -0.0]), [0.0, 0.0]);
        assert_eq!(round(Range::Signed, &[1e-40, 0.0]), [1e-40, 0.0]);
        assert_eq!(round(Range::Signed, &[0.0, 3.0]), [0.0, 3.0]);
        assert!((round(Range::Signed, &[-3.0])[0] + 2.979).abs() < 1e-3);
        assert!(round(Range::Unsigned, &[1.0, 1e-12])[1] > 0.0);
    }
}
