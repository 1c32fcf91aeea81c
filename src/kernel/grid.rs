//! Values with equal distances: the grid of integers of a few bits that weights are rounded to.

use super::activation::ROUND;
use crate::kernel::quantize;

/// Independent running sums of one loop; fixed, so that results do not depend on the instruction set.
const LANES: usize = 16;

/// The integers of a number of bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Integers {
    /// From 2 to 8.
    pub bits: u32,
    /// Whether zero points are zero.
    pub symmetric: bool,
}

/// Distance of neighbouring values, and the integer that stands for zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The distance; positive.
    pub scale: f32,
    /// An integer within the bounds.
    pub zero: f32,
}

impl Integers {
    /// The smallest and the largest integer.
    #[inline(always)]
    pub fn bounds(self) -> (f32, f32) {
        let half = (1u32 << (self.bits - 1)) as f32;
        (-half, half - 1.0)
    }

    /// The nearest value of the grid; ties go to even integers. A value that is no number becomes zero.
    #[inline(always)]
    pub fn nearest(self, value: f32, step: Step) -> f32 {
        (self.integer(value, step) - step.zero) * step.scale
    }

    /// The integer of the nearest value.
    #[inline(always)]
    pub fn integer(self, value: f32, step: Step) -> f32 {
        let (least, most) = self.bounds();
        let q = value / step.scale + step.zero;
        let q = if q >= least { q } else { least };
        let q = if q <= most { q } else { most };
        if value.is_nan() { step.zero } else { (q + ROUND) - ROUND }
    }

    /// The step of a range, as compressed-tensors has it: symmetric `absmax / ((2ᵇ − 1) / 2)`, else `(high − low) / (2ᵇ − 1)`, the range
    /// widened to include zero. `store` rounds a scale to the format that it is kept in.
    pub fn step(self, (low, high): (f32, f32), store: impl Fn(f64) -> f32) -> Step {
        let (least, most) = self.bounds();
        let steps = f64::from(most - least);
        let (low, high) = (f64::from(low.min(0.0)), f64::from(high.max(0.0)));
        let exact = if self.symmetric { high.max(-low) / (steps / 2.0) } else { (high - low) / steps };
        let zero =
            if self.symmetric || exact == 0.0 { 0.0 } else { (f64::from(least) - low / exact).round_ties_even().clamp(least.into(), most.into()) as f32 };
        let scale = store(exact);
        Step { scale: if scale > 0.0 { scale } else { f32::EPSILON }, zero }
    }
}

simd! {
    /// Smallest and largest value of some.
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

simd! {
    /// Sum of `cost · error²` that rounding makes.
    pub fn error(integers: Integers, values: &[f32], costs: &[f32], step: Step) -> f32 {
        let mut sums = [0f32; LANES];
        let term = |value: f32, cost: f32| {
            let error = integers.nearest(value, step) - value;
            cost * error * error
        };
        let (values, rest) = values.as_chunks::<LANES>();
        let (costs, rest_costs) = costs.as_chunks::<LANES>();
        for (values, costs) in values.iter().zip(costs) {
            for lane in 0..LANES {
                sums[lane] += term(values[lane], costs[lane]);
            }
        }
        rest.iter().zip(rest_costs).fold(sums.iter().sum(), |sum, (value, cost)| sum + term(*value, *cost))
    }
}

/// The step of the least error among [the parts of minmax that are tried](quantize::parts).
pub fn best(integers: Integers, values: &[f32], costs: &[f32], least: u32, store: impl Fn(f64) -> f32) -> Step {
    let (low, high) = range(values);
    let bounds = integers.bounds().into();
    let mut best = (f32::INFINITY, integers.step((low, high), &store));
    for part in quantize::parts(bounds, integers.symmetric, (low, high), least) {
        let step = integers.step((low * part, high * part), &store);
        let error = error(integers, values, costs, step);
        if error < best.0 {
            best = (error, step);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INT4: Integers = Integers { bits: 4, symmetric: true };

    #[test]
    fn steps_are_those_of_compressed_tensors() {
        let exact = |scale| scale as f32;
        assert_eq!(INT4.step((-4.0, 3.0), exact), Step { scale: 4.0 / 7.5, zero: 0.0 });
        // The example of its documentation: groups of [-4, -3.5, -.5, 0] and [.5, 1, 3, 3.5].
        let asymmetric = Integers { symmetric: false, ..INT4 };
        assert_eq!(asymmetric.step((-4.0, 0.0), exact), Step { scale: 4.0 / 15.0, zero: 7.0 });
        assert_eq!(asymmetric.step((0.5, 3.5), exact), Step { scale: 3.5 / 15.0, zero: -8.0 });
        assert_eq!(INT4.step((0.0, 0.0), exact), Step { scale: f32::EPSILON, zero: 0.0 });
        let rounded: Vec<f32> = [0.5, 1.5, 2.5, -9.0, 9.0, f32::NAN].map(|value| INT4.integer(value, Step { scale: 1.0, zero: 0.0 })).to_vec();
        assert_eq!(rounded, [0.0, 2.0, 2.0, -8.0, 7.0, 0.0]);
    }

    #[test]
    fn the_largest_value_can_be_a_whole_number_of_steps() {
        for (value, steps) in [(1.0, 127.0), (-1.0, 128.0)] {
            let found = best(Integers { bits: 8, symmetric: true }, &[value], &[1.0], 80, |scale| scale as f32);
            assert!((found.scale * steps - 1.0).abs() < 1e-6, "{value}: {found:?}");
        }
    }

    proptest! {
        #[test]
        fn a_searched_range_is_never_worse(
            values in prop::collection::vec(-3f32..3.0, 1..70), bits in 2u32..9, symmetric: bool, seed in 1u32..100
        ) {
            let integers = Integers { bits, symmetric };
            let costs: Vec<f32> = (0..values.len() as u32).map(|at| (at * seed % 7) as f32 + 0.1).collect();
            let exact = |scale| scale as f32;
            let found = best(integers, &values, &costs, 40, exact);
            let usual = integers.step(range(&values), exact);
            prop_assert!(error(integers, &values, &costs, found) <= error(integers, &values, &costs, usual));
            let at = |value: f32| integers.integer(value, found);
            prop_assert!(values.iter().all(|value| at(integers.nearest(*value, found)) == at(*value)), "values of the grid are their own nearest");
        }
    }
}
