//! Quantization grids for rounding of weights.

use crate::minifloat::Minifloat;
use crate::quantize::{self, ROUND};
use crate::weighted_error::{Rounding, weighted_error};

/// Number of independent sums per loop. Fixed, so that results do not depend on the instruction set.
const LANES: usize = 16;

/// An integer grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntegerGrid {
    /// Bit width, 2 to 8.
    pub bits: u32,
    /// Whether the zero point is always zero.
    pub symmetric: bool,
}

/// Scale and zero point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizationParams {
    /// The scale, positive; in blocks of GGUF files, of any sign.
    pub scale: f32,
    /// The zero point, an integer within the bounds; for blocks of GGUF files with a minimum, any number.
    pub zero: f32,
}

impl IntegerGrid {
    /// The smallest and largest integer.
    #[inline(always)]
    pub fn bounds(self) -> (f32, f32) {
        let half = (1u32 << (self.bits - 1)) as f32;
        (-half, half - 1.0)
    }

    /// The nearest grid value, ties to even. NaN becomes zero.
    #[inline(always)]
    pub fn nearest(self, value: f32, params: QuantizationParams) -> f32 {
        (self.integer(value, params) - params.zero) * params.scale
    }

    /// The integer of the nearest grid value.
    #[inline(always)]
    pub fn integer(self, value: f32, params: QuantizationParams) -> f32 {
        if value.is_nan() { params.zero } else { self.rounded(value / params.scale + params.zero) }
    }

    /// The nearest integer within the bounds.
    #[inline(always)]
    fn rounded(self, q: f32) -> f32 {
        let (lowest, highest) = self.bounds();
        let q = if q >= lowest { q } else { lowest };
        let q = if q <= highest { q } else { highest };
        (q + ROUND) - ROUND
    }

    /// The parameters for a range as in compressed-tensors: the scale is `absmax / ((2ᵇ − 1) / 2)` if
    /// symmetric, otherwise `(high − low) / (2ᵇ − 1)` with the range extended to include zero. `store`
    /// rounds a scale to its storage dtype.
    pub fn params(self, (low, high): (f32, f32), store: impl Fn(f64) -> f32) -> QuantizationParams {
        let (lowest, highest) = self.bounds();
        let steps = f64::from(highest - lowest);
        let (low, high) = (f64::from(low.min(0.0)), f64::from(high.max(0.0)));
        let exact = if self.symmetric { high.max(-low) / (steps / 2.0) } else { (high - low) / steps };
        let zero =
            if self.symmetric || exact == 0.0 { 0.0 } else { (f64::from(lowest) - low / exact).round_ties_even().clamp(lowest.into(), highest.into()) as f32 };
        let scale = store(exact);
        QuantizationParams { scale: if scale > 0.0 { scale } else { f32::EPSILON }, zero }
    }
}

simd! {
    /// The smallest and largest value.
    pub fn range(values: &[f32]) -> (f32, f32) {
        let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        let (blocks, tail) = values.as_chunks::<LANES>();
        for block in blocks {
            for lane in 0..LANES {
                low[lane] = if block[lane] < low[lane] { block[lane] } else { low[lane] };
                high[lane] = if block[lane] > high[lane] { block[lane] } else { high[lane] };
            }
        }
        let (low, high) = (low.iter().chain(tail), high.iter().chain(tail));
        (low.fold(f32::INFINITY, |a, b| a.min(*b)), high.fold(f32::NEG_INFINITY, |a, b| a.max(*b)))
    }
}

/// Rounding to the nearest grid value, except that values halfway between two may be rounded to either:
/// values are multiplied with the reciprocal of the scale, which is faster than a division.
#[derive(Clone, Copy)]
struct NearlyNearest {
    integers: IntegerGrid,
    params: QuantizationParams,
    reciprocal: f32,
}

impl NearlyNearest {
    fn new(integers: IntegerGrid, params: QuantizationParams) -> NearlyNearest {
        NearlyNearest { integers, params, reciprocal: params.scale.recip() }
    }
}

impl Rounding for NearlyNearest {
    #[inline(always)]
    fn round(self, value: f32) -> f32 {
        (self.integers.rounded(value * self.reciprocal + self.params.zero) - self.params.zero) * self.params.scale
    }
}

/// The numbers that a scale is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// Integers, which a zero point is subtracted from.
    Integers(IntegerGrid),
    /// The values of a float format; zero points are zero.
    Floats(Minifloat),
    /// The [uneven levels](UNEVEN_LEVELS); zero points are zero.
    Uneven,
}

/// Values of the sixteen codes of the IQ4 types of GGUF files.
pub const UNEVEN_LEVELS: [f32; 16] = [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// Centers between neighbouring uneven levels. Values from a center on have the higher code.
pub(crate) const UNEVEN_CENTERS: [f32; 15] = {
    let mut centers = [0.0; 15];
    let mut code = 0;
    while code < 15 {
        centers[code] = 0.5 * (UNEVEN_LEVELS[code] + UNEVEN_LEVELS[code + 1]);
        code += 1;
    }
    centers
};

/// The number of numbers in ascending order that do not exceed a value.
#[inline(always)]
fn rank(numbers: &[f32], value: f32) -> usize {
    numbers.iter().fold(0, |rank, number| rank + usize::from(value >= *number))
}

/// Rounds to the uneven levels times a scale.
#[derive(Clone, Copy)]
struct Uneven(f32);

impl Rounding for Uneven {
    #[inline(always)]
    fn round(self, value: f32) -> f32 {
        UNEVEN_LEVELS[rank(&UNEVEN_CENTERS, value / self.0)] * self.0
    }
}

impl Levels {
    /// The nearest grid value.
    #[inline(always)]
    pub fn nearest(self, value: f32, params: QuantizationParams) -> f32 {
        self.level(value, params) * params.scale
    }

    /// The number that the scale of the nearest grid value is multiplied with.
    #[inline(always)]
    pub fn level(self, value: f32, params: QuantizationParams) -> f32 {
        match self {
            Levels::Integers(integers) => integers.integer(value, params) - params.zero,
            Levels::Floats(format) => format.nearest(value / params.scale),
            Levels::Uneven => UNEVEN_LEVELS[rank(&UNEVEN_CENTERS, value / params.scale)],
        }
    }

    /// The code of the nearest grid value: an integer, the bits of a float, or the index of a level.
    #[inline(always)]
    pub fn code(self, value: f32, params: QuantizationParams) -> i8 {
        match self {
            Levels::Integers(integers) => integers.integer(value, params) as i8,
            Levels::Floats(format) => format.encode(value / params.scale) as i8,
            Levels::Uneven => rank(&UNEVEN_CENTERS, value / params.scale) as i8,
        }
    }

    /// The [positions](Self::position) of the smallest and the largest level.
    #[inline(always)]
    pub fn bounds(self) -> (f32, f32) {
        match self {
            Levels::Integers(integers) => integers.bounds(),
            Levels::Floats(format) => {
                let last = f32::from(format.encode(format.largest()));
                (-last, last)
            }
            Levels::Uneven => (0.0, 15.0),
        }
    }

    /// The position of a value among the levels, which have consecutive integers as positions. It is linear
    /// between two levels, and beyond the outermost ones.
    #[inline(always)]
    pub fn position(self, value: f32, params: QuantizationParams) -> f32 {
        match self {
            Levels::Integers(_) => value / params.scale + params.zero,
            Levels::Floats(format) => format.position(value / params.scale),
            Levels::Uneven => {
                let value = value / params.scale;
                let below = rank(&UNEVEN_LEVELS[1..15], value);
                let [low, high] = [below, below + 1].map(|code| UNEVEN_LEVELS[code]);
                below as f32 + (value - low) / (high - low)
            }
        }
    }

    /// The number that the scale is multiplied with, at an integer position within the bounds.
    #[inline(always)]
    pub fn level_at(self, position: f32, params: QuantizationParams) -> f32 {
        match self {
            Levels::Integers(_) => position - params.zero,
            Levels::Floats(format) => format.decode(position.abs() as u8).copysign(position),
            Levels::Uneven => UNEVEN_LEVELS[position as usize & 15],
        }
    }

    /// The parameters for a range; for floats, the scale with which the largest magnitude is the largest
    /// value.
    pub fn params(self, (low, high): (f32, f32), store: impl Fn(f64) -> f32) -> QuantizationParams {
        match self {
            Levels::Integers(integers) => integers.params((low, high), store),
            Levels::Floats(format) => {
                let scale = store(f64::from(high.max(-low).max(0.0)) / f64::from(format.largest()));
                QuantizationParams { scale: if scale > 0.0 { scale } else { f32::EPSILON }, zero: 0.0 }
            }
            Levels::Uneven => {
                let scale = store((f64::from(low) / f64::from(UNEVEN_LEVELS[0])).max(f64::from(high) / f64::from(UNEVEN_LEVELS[15])));
                QuantizationParams { scale: if scale > 0.0 { scale } else { f32::EPSILON }, zero: 0.0 }
            }
        }
    }

    /// Sum of `cost · error²` of the rounding errors.
    fn error(self, values: &[f32], costs: &[f32], params: QuantizationParams) -> f32 {
        match self {
            Levels::Integers(integers) => weighted_error(NearlyNearest::new(integers, params), values, costs),
            Levels::Floats(format) => format.error(values, costs, params.scale),
            Levels::Uneven => weighted_error(Uneven(params.scale), values, costs),
        }
    }

    /// The parameters with the least error among [shrunken ranges](quantize::parts), down to the percentage
    /// `least`. The largest magnitude of floats is also rounded to smaller values than the largest one, down
    /// to the second largest (as in four over six, Cook et al. 2025, <https://arxiv.org/abs/2512.02010>).
    pub fn search(self, values: &[f32], costs: &[f32], least: u32, store: impl Fn(f64) -> f32) -> QuantizationParams {
        let (low, high) = range(values);
        let (bounds, symmetric, most) = match self {
            Levels::Integers(integers) => (integers.bounds().into(), integers.symmetric, 100),
            Levels::Floats(format) => ([-format.largest(), format.largest()], false, (100.0 * format.largest_ratio()).round() as u32),
            Levels::Uneven => ([UNEVEN_LEVELS[0], UNEVEN_LEVELS[15]], false, 100),
        };
        let (mut best, mut last) = ((f32::INFINITY, self.params((low, high), &store)), None);
        let (largest, costs_of_largest) = largest_terms(values, costs);
        for part in quantize::parts(bounds, symmetric, (low, high), least).chain((101..=most).map(|percent| percent as f32 / 100.0)) {
            let params = self.params((low * part, high * part), &store);
            // Scales of few bits are often equal to the previous one.
            if last.replace(params) == Some(params) {
                continue;
            }
            // In most ranges that are too small, these few values have a larger error than all values in the
            // best range.
            if self.error(&largest, &costs_of_largest, params) >= best.0 {
                continue;
            }
            let error = self.error(values, costs, params);
            if error < best.0 {
                best = (error, params);
            }
        }
        best.1
    }
}

/// Some of the values with the largest costs times squares, and their costs; none of few values.
fn largest_terms(values: &[f32], costs: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let term = |(value, cost): &(&f32, &f32)| *cost * *value * *value;
    let terms = || values.iter().zip(costs);
    let largest = terms().map(|pair| term(&pair)).fold(0f32, f32::max);
    let count = if values.len() < 4 * LANES { 0 } else { LANES };
    terms().filter(|pair| term(pair) >= 0.3 * largest).take(count).map(|(value, cost)| (*value, *cost)).unzip()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INT4: IntegerGrid = IntegerGrid { bits: 4, symmetric: true };

    #[test]
    fn params_match_compressed_tensors() {
        let exact = |scale| scale as f32;
        assert_eq!(INT4.params((-4.0, 3.0), exact), QuantizationParams { scale: 4.0 / 7.5, zero: 0.0 });
        // The example in its documentation: groups of [-4, -3.5, -.5, 0] and [.5, 1, 3, 3.5].
        let asymmetric = IntegerGrid { symmetric: false, ..INT4 };
        assert_eq!(asymmetric.params((-4.0, 0.0), exact), QuantizationParams { scale: 4.0 / 15.0, zero: 7.0 });
        assert_eq!(asymmetric.params((0.5, 3.5), exact), QuantizationParams { scale: 3.5 / 15.0, zero: -8.0 });
        assert_eq!(INT4.params((0.0, 0.0), exact), QuantizationParams { scale: f32::EPSILON, zero: 0.0 });
        let rounded: Vec<f32> = [0.5, 1.5, 2.5, -9.0, 9.0, f32::NAN].map(|value| INT4.integer(value, QuantizationParams { scale: 1.0, zero: 0.0 })).to_vec();
        assert_eq!(rounded, [0.0, 2.0, 2.0, -8.0, 7.0, 0.0]);
    }

    #[test]
    fn the_largest_value_can_be_an_integer_number_of_steps() {
        for (value, steps) in [(1.0, 127.0), (-1.0, 128.0)] {
            let found = Levels::Integers(IntegerGrid { bits: 8, symmetric: true }).search(&[value], &[1.0], 80, |scale| scale as f32);
            assert!((found.scale * steps - 1.0).abs() < 1e-6, "{value}: {found:?}");
        }
    }

    fn any_levels() -> impl Strategy<Value = Levels> {
        let integers = (2u32..9, any::<bool>()).prop_map(|(bits, symmetric)| Levels::Integers(IntegerGrid { bits, symmetric }));
        prop_oneof![integers, Just(Levels::Floats(Minifloat::E4m3)), Just(Levels::Floats(Minifloat::E2m1)), Just(Levels::Uneven)]
    }

    proptest! {
        #[test]
        fn a_searched_range_is_never_worse(values in prop::collection::vec(-3f32..3.0, 1..200), levels in any_levels(), seed in 1u32..100) {
            let costs: Vec<f32> = (0..values.len() as u32).map(|at| (at * seed % 7) as f32 + 0.1).collect();
            let exact = |scale| scale as f32;
            let found = levels.search(&values, &costs, 40, exact);
            let usual = levels.params(range(&values), exact);
            let least = levels.error(&values, &costs, found);
            prop_assert!(least <= levels.error(&values, &costs, usual));
            let (low, high) = range(&values);
            for part in (40..=100).map(|percent| percent as f32 / 100.0) {
                let other = levels.error(&values, &costs, levels.params((low * part, high * part), exact));
                prop_assert!(least <= other * (1.0 + 1e-5), "a range that is skipped is not better");
            }
            let at = |value: f32| levels.nearest(value, found);
            prop_assert!(values.iter().all(|value| at(at(*value)) == at(*value)), "grid values are not changed by rounding");
            let (lowest, highest) = levels.bounds();
            for position in lowest as i32..=highest as i32 {
                let value = levels.level_at(position as f32, found) * found.scale;
                prop_assert!((levels.position(value, found) - position as f32).abs() < 1e-3, "levels have consecutive positions");
                let code = levels.code(value, found);
                let level = match levels {
                    Levels::Floats(format) => format.decode(code as u8),
                    Levels::Integers(_) | Levels::Uneven => levels.level_at(code.into(), found),
                };
                prop_assert_eq!(level * found.scale, value, "codes represent their levels");
            }
        }
    }

    /// Four over six: three quarters of the largest value are between two codes with the usual scale, but
    /// exact if the largest value is stored as 4.
    #[test]
    fn the_largest_float_can_be_smaller_than_the_largest_value() {
        let values = [4.0, 3.0, 2.0, 1.0];
        let found = Levels::Floats(Minifloat::E2m1).search(&values, &[1.0; 4], 80, |scale| scale as f32);
        assert!(values.iter().all(|value| (Levels::Floats(Minifloat::E2m1).nearest(*value, found) - value).abs() < 1e-6), "{found:?}");
        // Of the powers of two, the same one is the best.
        let power = |exact: f64| exact.log2().floor().exp2() as f32;
        assert_eq!(Levels::Floats(Minifloat::E2m1).search(&values, &[1.0; 4], 40, power).scale, 1.0);
    }
}
