//! Trained rounding to a grid: an offset for each weight before rounding, in units of the distance between
//! the levels around it, and a factor for each end of the range of a group. Both move against the sign of
//! their gradients (Cheng et al. 2024, SignRound, <https://arxiv.org/abs/2309.05516>). Rounding passes
//! gradients through (straight-through estimator).

use crate::grid::{IntegerGrid, Levels, QuantizationParams};
use crate::quantize::ROUND;

/// Number of independent sums per loop. Fixed, so that results do not depend on the instruction set.
const LANES: usize = 16;

/// Trained range of a group of weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainedRange {
    /// Scale and zero point before training.
    start: QuantizationParams,
    /// Factors of the lower and the upper end. A symmetric range, such as that of floats, uses only the
    /// second one.
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
    pub fn params(&self, levels: Levels, store: impl Fn(f64) -> f32) -> QuantizationParams {
        if self.factors == [1.0; 2] {
            return self.start;
        }
        // Scales that underflow are replaced by other ones when they are stored.
        let near = |scale: f32| if (0.5..=2.0).contains(&(scale / self.start.scale)) { scale } else { self.start.scale };
        let Some(integers) = asymmetric(levels) else {
            return QuantizationParams { scale: near(store(f64::from(self.start.scale) * f64::from(self.factors[1]))), zero: 0.0 };
        };
        let (lowest, highest) = integers.bounds();
        let [low, high] = self.ends(integers);
        let (low, high) = (f64::from(low * self.factors[0]), f64::from(high * self.factors[1]));
        let scale = near(store((high - low) / f64::from(highest - lowest)));
        let zero = (f64::from(lowest) - low / f64::from(scale)).round_ties_even().clamp(lowest.into(), highest.into());
        QuantizationParams { scale, zero: zero as f32 }
    }

    /// Moves the factors against the signs of their gradients, from those of the scale and the zero point.
    pub fn step(&mut self, levels: Levels, [scale, zero]: [f32; 2], rate: f32) {
        let gradients = if let Some(integers) = asymmetric(levels) {
            // scale = (high · f₁ - low · f₀) / steps, zero = lowest - low · f₀ / scale
            let ((lowest, highest), [low, high]) = (integers.bounds(), self.ends(integers));
            let steps = highest - lowest;
            let current = (high * self.factors[1] - low * self.factors[0]) / steps;
            let of_scale = scale + zero * low * self.factors[0] / (current * current);
            [-of_scale * low / steps - zero * low / current, of_scale * high / steps]
        } else {
            [0.0, scale * self.start.scale]
        };
        for (factor, gradient) in self.factors.iter_mut().zip(gradients) {
            *factor = (*factor - rate * sign(gradient)).clamp(1.0 - MAX_CHANGE, 1.0 + MAX_CHANGE);
        }
    }
}

/// The integers of a grid with zero points.
fn asymmetric(levels: Levels) -> Option<IntegerGrid> {
    match levels {
        Levels::Integers(integers) if !integers.symmetric => Some(integers),
        Levels::Integers(_) | Levels::Floats(_) | Levels::Uneven => None,
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

/// The position of the level of a weight, before clipping.
#[inline(always)]
fn unclipped(levels: Levels, value: f32, offset: f32, params: QuantizationParams) -> f32 {
    ((levels.position(value, params) + offset) + ROUND) - ROUND
}

#[inline(always)]
fn clipped(position: f32, (lowest, highest): (f32, f32)) -> f32 {
    let position = if position >= lowest { position } else { lowest };
    if position <= highest { position } else { highest }
}

/// The offset nearest to zero with which a weight is rounded to the grid value `rounded`, with a distance of
/// `margin` from the ends of its rounding interval.
pub fn offset(levels: Levels, [value, rounded]: [f32; 2], params: QuantizationParams, margin: f32) -> f32 {
    let (lowest, highest) = levels.bounds();
    let position = clipped(unclipped(levels, rounded, 0.0, params), (lowest, highest));
    let exact = position - levels.position(value, params);
    // Levels at the ends of the grid are also those of all values beyond.
    let least = if position <= lowest { f32::NEG_INFINITY } else { exact - 0.5 + margin };
    let most = if position >= highest { f32::INFINITY } else { exact + 0.5 - margin };
    0f32.clamp(least, most)
}

simd! {
    /// Rounds the weights of a group to grid values.
    pub fn round(levels: Levels, values: &[f32], offsets: &[f32], params: QuantizationParams, out: &mut [f32]) {
        let bounds = levels.bounds();
        for ((value, offset), out) in values.iter().zip(offsets).zip(out) {
            *out = levels.level_at(clipped(unclipped(levels, *value, *offset, params), bounds), params) * params.scale;
        }
    }
}

simd! {
    /// Moves the offsets of a group against the signs of their gradients. `gradients` are those of the
    /// rounded weights. Returns the gradients of the scale and of the zero point.
    pub fn step(levels: Levels, values: &[f32], offsets: &mut [f32], gradients: &[f32], params: QuantizationParams, rate: f32) -> [f32; 2] {
        let bounds = levels.bounds();
        // With a negative scale, higher levels are lower values.
        let rate = rate.copysign(params.scale);
        let (mut scales, mut zeros) = ([0f32; LANES], [0f32; LANES]);
        for ((values, offsets), gradients) in values.chunks(LANES).zip(offsets.chunks_mut(LANES)).zip(gradients.chunks(LANES)) {
            for lane in 0..values.len() {
                let gradient = gradients[lane];
                let free = unclipped(levels, values[lane], offsets[lane], params);
                let position = clipped(free, bounds);
                let inside = free == position;
                // Inside the grid, the scale changes the rounding error; outside, the end of the range.
                let of_scale = levels.level_at(position, params) - if inside { values[lane] / params.scale } else { 0.0 };
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
    use crate::minifloat::Minifloat;

    const INT2: Levels = Levels::Integers(IntegerGrid { bits: 2, symmetric: true });

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
        round(INT2, &values, &offsets, params, &mut rounded);
        assert_eq!(rounded, [0.0, -1.0, 0.0, 0.5, 0.0, -0.5, 0.5, -1.0]);
        // With a negative scale, offsets move in the other direction.
        let (mut offsets, params) = ([0.0; 8], QuantizationParams { scale: -0.5, zero: 0.0 });
        step(INT2, &values, &mut offsets, &gradients, params, 0.25);
        assert_eq!(offsets, [0.25, 0.0, 0.0, 0.0, -0.25, 0.25, 0.25, 0.0]);
    }

    /// The same with FP4, whose levels are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    #[test]
    fn offsets_are_in_units_of_the_local_step() {
        let (levels, params) = (Levels::Floats(Minifloat::E2m1), QuantizationParams { scale: 0.5, zero: 0.0 });
        // In units of the scale, these are 2.75, -4.5, 0.2 and 8.
        let (values, mut offsets, gradients) = ([1.375f32, -2.25, 0.1, 4.0], [0.0, 0.0, 0.5, 0.0], [2.0f32, 1.0, -1.0, 1.0]);
        let of_scale = step(levels, &values, &mut offsets, &gradients, params, 0.25);
        // The last weight is outside of the grid.
        assert_eq!(offsets, [-0.25, -0.25, 0.75, 0.0]);
        // 2·(3 - 2.75) + 1·(-4 + 4.5) - 1·(0.5 - 0.2) + 1·6
        assert!((of_scale[0] - 6.7).abs() < 1e-5, "{of_scale:?}");
        // A quarter of the step of 1 below 2.75 is 2.5, halfway between 2 and 3, and the even code is that of
        // 2. A quarter of the step of 2 below -4.5 is -5, halfway between -4 and -6.
        let mut rounded = [0f32; 4];
        round(levels, &values, &offsets, params, &mut rounded);
        assert_eq!(rounded, [1.0, -2.0, 0.25, 3.0]);
        assert_eq!(rounded.map(|value| levels.code(value, params)), [4, 8 | 6, 1, 7]);
        let mut range = TrainedRange::new(params);
        range.step(levels, of_scale, 0.25);
        assert_eq!(range.params(levels, |scale| scale as f32), QuantizationParams { scale: 0.375, zero: 0.0 });
        assert_eq!(range.params(levels, |_| 0.125 * 0.125), params, "a scale that underflows");
    }

    fn any_levels() -> impl Strategy<Value = Levels> {
        let integers = (2u32..9, any::<bool>()).prop_map(|(bits, symmetric)| Levels::Integers(IntegerGrid { bits, symmetric }));
        let floats = prop::sample::select(vec![Minifloat::E4m3, Minifloat::E2m3, Minifloat::E2m1]).prop_map(Levels::Floats);
        prop_oneof![integers, floats]
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
            let levels = Levels::Integers(integers);
            let found = step(levels, &values, &mut [0.0; 40], &gradients, start, 0.1);
            let mut range = TrainedRange::new(start);
            range.step(levels, found, 0.1);
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
        fn offsets_lead_to_the_given_levels(levels in any_levels(), value in -3f32..3.0, position in 0f32..1.0, zero in -2f32..1.0) {
            let params = QuantizationParams { scale: 0.13, zero: if asymmetric(levels).is_some() { zero.round() } else { 0.0 } };
            let (lowest, highest) = levels.bounds();
            let position = (lowest + position * (highest - lowest)).round() + 0.0;
            let level = levels.level_at(position, params) * params.scale;
            let offset = offset(levels, [value, level], params, 0.05);
            let mut rounded = [0f32];
            round(levels, &[value], &[offset], params, &mut rounded);
            prop_assert_eq!(rounded[0], level);
            if levels.nearest(value, params) != level {
                prop_assert!(offset != 0.0);
            }
        }
    }
}
