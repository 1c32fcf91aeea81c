//! Trained rounding to integer grids: an offset for each weight before rounding, and a factor for each end of
//! the range of a group, which move against the sign of their gradients (Cheng et al. 2024, SignRound,
//! <https://arxiv.org/abs/2309.05516>). Rounding passes gradients through (straight-through estimator).

use crate::grid::{IntegerGrid, QuantizationParams};
use crate::quantize::ROUND;

/// Number of independent sums per loop. Fixed, so that results do not depend on the instruction set.
const LANES: usize = 16;

/// Trained range of a group of weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainedRange {
    /// Scale and zero point before training.
    start: QuantizationParams,
    /// Factors of the lower and the upper end. A symmetric range uses only the second one.
    factors: [f32; 2],
}

/// Largest change of a factor.
const MAX_CHANGE: f32 = 0.5;

impl TrainedRange {
    /// The range of a scale and a zero point.
    pub fn new(start: QuantizationParams) -> TrainedRange {
        TrainedRange { start, factors: [1.0; 2] }
    }

    /// Lower and upper end before training.
    fn ends(&self, integers: IntegerGrid) -> [f32; 2] {
        let (lowest, highest) = integers.bounds();
        [lowest, highest].map(|end| (end - self.start.zero) * self.start.scale)
    }

    /// Scale and zero point of the current range. `store` rounds a scale to its storage dtype.
    pub fn params(&self, integers: IntegerGrid, store: impl Fn(f64) -> f32) -> QuantizationParams {
        if self.factors == [1.0; 2] {
            return self.start;
        }
        let (lowest, highest) = integers.bounds();
        let positive = |scale: f32| if scale > 0.0 { scale } else { self.start.scale };
        if integers.symmetric {
            return QuantizationParams { scale: positive(store(f64::from(self.start.scale) * f64::from(self.factors[1]))), zero: 0.0 };
        }
        let [low, high] = self.ends(integers);
        let (low, high) = (f64::from(low * self.factors[0]), f64::from(high * self.factors[1]));
        let scale = positive(store((high - low) / f64::from(highest - lowest)));
        let zero = (f64::from(lowest) - low / f64::from(scale)).round_ties_even().clamp(lowest.into(), highest.into());
        QuantizationParams { scale, zero: zero as f32 }
    }

    /// Moves the factors against the signs of their gradients, from those of the scale and the zero point.
    pub fn step(&mut self, integers: IntegerGrid, [scale, zero]: [f32; 2], rate: f32) {
        let (lowest, highest) = integers.bounds();
        let [low, high] = self.ends(integers);
        let gradients = if integers.symmetric {
            [0.0, scale * self.start.scale]
        } else {
            // scale = (high · f₁ - low · f₀) / steps, zero = lowest - low · f₀ / scale
            let steps = highest - lowest;
            let current = (high * self.factors[1] - low * self.factors[0]) / steps;
            let of_scale = scale + zero * low * self.factors[0] / (current * current);
            [-of_scale * low / steps - zero * low / current, of_scale * high / steps]
        };
        for (factor, gradient) in self.factors.iter_mut().zip(gradients) {
            *factor = (*factor - rate * sign(gradient)).clamp(1.0 - MAX_CHANGE, 1.0 + MAX_CHANGE);
        }
    }
}

/// 1, -1, or 0 for 0 and NaN.
#[inline(always)]
fn sign(value: f32) -> f32 {
    if value > 0.0 {
        1.0
    } else if value < 0.0 {
        -1.0
    } else {
        0.0
    }
}

/// The integer of a weight before clipping.
#[inline(always)]
fn unclipped(value: f32, offset: f32, params: QuantizationParams) -> f32 {
    ((value / params.scale + offset + params.zero) + ROUND) - ROUND
}

#[inline(always)]
fn clipped(integer: f32, (lowest, highest): (f32, f32)) -> f32 {
    let integer = if integer >= lowest { integer } else { lowest };
    if integer <= highest { integer } else { highest }
}

/// The offset nearest to zero with which a weight is rounded to this integer, with a distance of `margin`
/// from the ends of its rounding interval.
pub fn offset(value: f32, integer: f32, params: QuantizationParams, integers: IntegerGrid, margin: f32) -> f32 {
    let exact = integer - params.zero - value / params.scale;
    let (lowest, highest) = integers.bounds();
    // Integers at the ends of the grid are also those of all values beyond.
    let least = if integer <= lowest { f32::NEG_INFINITY } else { exact - 0.5 + margin };
    let most = if integer >= highest { f32::INFINITY } else { exact + 0.5 - margin };
    0f32.clamp(least, most)
}

simd! {
    /// Rounds the weights of a group to grid values.
    pub fn round(integers: IntegerGrid, values: &[f32], offsets: &[f32], params: QuantizationParams, out: &mut [f32]) {
        let bounds = integers.bounds();
        for ((value, offset), out) in values.iter().zip(offsets).zip(out) {
            *out = (clipped(unclipped(*value, *offset, params), bounds) - params.zero) * params.scale;
        }
    }
}

/// The integers of the weights of a group.
pub fn integers_of(integers: IntegerGrid, values: &[f32], offsets: &[f32], params: QuantizationParams) -> impl Iterator<Item = i8> {
    let integer = move |(value, offset): (&f32, &f32)| clipped(unclipped(*value, *offset, params), integers.bounds()) as i8;
    values.iter().zip(offsets).map(integer)
}

simd! {
    /// Moves the offsets of a group against the signs of their gradients. `gradients` are those of the
    /// rounded weights. Returns the gradients of the scale and of the zero point.
    pub fn step(integers: IntegerGrid, values: &[f32], offsets: &mut [f32], gradients: &[f32], params: QuantizationParams, rate: f32) -> [f32; 2] {
        let bounds = integers.bounds();
        let (mut scales, mut zeros) = ([0f32; LANES], [0f32; LANES]);
        for ((values, offsets), gradients) in values.chunks(LANES).zip(offsets.chunks_mut(LANES)).zip(gradients.chunks(LANES)) {
            for lane in 0..values.len() {
                let gradient = gradients[lane];
                let free = unclipped(values[lane], offsets[lane], params);
                let integer = clipped(free, bounds);
                let inside = free == integer;
                // Inside the grid, the scale changes the rounding error; outside, the end of the range.
                let of_scale = integer - params.zero - if inside { values[lane] / params.scale } else { 0.0 };
                scales[lane] += gradient * of_scale;
                zeros[lane] -= if inside { 0.0 } else { gradient * params.scale };
                offsets[lane] -= if inside { rate * sign(gradient) } else { 0.0 };
            }
        }
        [scales.iter().sum(), zeros.iter().sum()]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INT2: IntegerGrid = IntegerGrid { bits: 2, symmetric: true };

    /// A step computed by hand: two rows of four weights with the scale 0.5.
    #[test]
    fn a_step_moves_against_the_signs_of_gradients() {
        let params = QuantizationParams { scale: 0.5, zero: 0.0 };
        let values = [0.3f32, -0.9, 0.2, 2.0, 0.1, -0.26, 0.5, -3.0];
        let gradients = [1.0f32, -2.0, 0.0, 4.0, -0.5, 3.0, 1.0, 2.0];
        let mut rounded = [0f32; 8];
        round(INT2, &values, &[0.0; 8], params, &mut rounded);
        assert_eq!(rounded, [0.5, -1.0, 0.0, 0.5, 0.0, -0.5, 0.5, -1.0]);
        let mut offsets = [0f32; 8];
        let of_scales: Vec<[f32; 2]> = (0..2)
            .map(|row| {
                let row = 4 * row..4 * row + 4;
                step(INT2, &values[row.clone()], &mut offsets[row.clone()], &gradients[row], params, 0.25)
            })
            .collect();
        // The fourth weight of each row is outside of the grid, and the third gradient is zero.
        assert_eq!(offsets, [-0.25, 0.25, 0.0, 0.0, 0.25, -0.25, -0.25, 0.0]);
        // Row 0: 1·(1 - 0.6) - 2·(-2 + 1.8) + 4·1; row 1: -0.5·(0 - 0.2) + 3·(-1 + 0.52) + 1·(1 - 1) +
        // 2·(-2).
        let expected = [[0.4 + 0.4 + 4.0, -2.0], [0.1 - 1.44 - 4.0, -1.0]];
        for (found, expected) in of_scales.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-6, "{of_scales:?}");
        }
        let mut range = TrainedRange::new(params);
        range.step(INT2, of_scales[0], 0.25);
        assert_eq!(range.params(INT2, |scale| scale as f32), QuantizationParams { scale: 0.375, zero: 0.0 });
        assert_eq!(integers_of(INT2, &values, &offsets, params).collect::<Vec<_>>(), [0, -2, 0, 1, 0, -1, 1, -2]);
    }

    proptest! {
        /// Gradients of the factors agree with differences of a linear loss, where no weight changes its
        /// integer.
        #[test]
        fn factors_have_the_gradient_of_the_range(bits in 2u32..9, symmetric: bool, zero in -2f32..1.0, seed in 1u32..1000) {
            let integers = IntegerGrid { bits, symmetric };
            let start = QuantizationParams { scale: 0.5, zero: if symmetric { 0.0 } else { zero.round() } };
            let (lowest, highest) = integers.bounds();
            // All weights are outside of the grid, so that they have the values of its ends.
            let values: Vec<f32> = (0..40u32).map(|at| if (at * seed) % 3 == 0 { 9.0 * lowest - 9.0 } else { 9.0 * highest + 9.0 }).collect();
            let gradients: Vec<f32> = (0..40u32).map(|at| ((at * seed * 7) % 11) as f32 - 4.0).collect();
            let ends = |params: QuantizationParams| [lowest, highest].map(|end| (end - params.zero) * params.scale);
            let loss = |factors: [f32; 2]| {
                let range = TrainedRange { start, factors };
                // Without rounding of the zero point.
                let [low, high] = range.ends(integers);
                let (low, high) = if symmetric { (low * factors[1], high * factors[1]) } else { (low * factors[0], high * factors[1]) };
                values.iter().zip(&gradients).map(|(value, gradient)| gradient * if *value < 0.0 { low } else { high }).sum::<f32>()
            };
            let found = step(integers, &values, &mut [0.0; 40], &gradients, start, 0.1);
            let mut range = TrainedRange::new(start);
            range.step(integers, found, 0.1);
            for at in 0..2 {
                let mut moved = [1.0; 2];
                moved[at] += 0.01;
                let slope = (loss(moved) - loss([1.0; 2])) / 0.01;
                let expected = if slope.abs() < 1e-2 { 1.0 } else { 1.0 - 0.1 * slope.signum() };
                if slope.abs() > 0.5 || slope == 0.0 {
                    prop_assert!((range.factors[at] - expected).abs() < 1e-6, "{slope} {range:?} {:?}", ends(start));
                }
            }
        }

        #[test]
        fn offsets_lead_to_the_given_integers(bits in 2u32..9, symmetric: bool, value in -3f32..3.0, position in 0f32..1.0, zero in -2f32..1.0) {
            let integers = IntegerGrid { bits, symmetric };
            let params = QuantizationParams { scale: 0.13, zero: if symmetric { 0.0 } else { zero.round() } };
            let (lowest, highest) = integers.bounds();
            let integer = (lowest + position * (highest - lowest)).round();
            let offset = offset(value, integer, params, integers, 0.05);
            prop_assert_eq!(integers_of(integers, &[value], &[offset], params).next(), Some(integer as i8));
            if integers.integer(value, params) != integer {
                prop_assert!(offset != 0.0);
            }
        }
    }
}
