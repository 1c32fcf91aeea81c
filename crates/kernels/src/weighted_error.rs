//! Weighted errors of rounding.

/// Number of independent sums per loop. Fixed, so that results do not depend on the instruction set.
const LANES: usize = 16;

/// Rounding to the values that a grid and a scale represent.
pub trait Rounding: Copy {
    /// The nearest value.
    fn round(self, value: f32) -> f32;
}

simd! {
    /// Sum of `cost · error²` of the rounding errors.
    pub fn weighted_error[R: Rounding](rounding: R, values: &[f32], costs: &[f32]) -> f32 {
        let mut sums = [0f32; LANES];
        let term = |value: f32, cost: f32| {
            let error = rounding.round(value) - value;
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
