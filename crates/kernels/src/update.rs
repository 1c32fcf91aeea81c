//! Elementwise optimizer updates of one parameter, and the sums that they need.

const LANES: usize = 16;

/// Coefficients of an AdamW step.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// Factor of the parameter due to weight decay.
    pub shrink: f32,
    /// Weight of the gradient in the first moment, `1 - β₁`.
    pub mean_share: f32,
    /// Decay of the second moment, `β₂`.
    pub square_left: f32,
    /// Weight of the squared gradient in the second moment, `1 - β₂`.
    pub square_share: f32,
    /// `√(1 - β₂ᵗ)`
    pub root: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Learning rate divided by `1 - β₁ᵗ`.
    pub size: f32,
}

simd! {
    /// One step of AdamW: updates the moments and the parameter.
    pub fn adamw(step: &AdamW, parameter: &mut [f32], gradient: &[f32], mean: &mut [f32], square: &mut [f32]) {
        for (((x, g), m), v) in parameter.iter_mut().zip(gradient).zip(mean).zip(square) {
            *m += step.mean_share * (g - *m);
            *v = *v * step.square_left + step.square_share * (g * g);
            *x = *x * step.shrink - step.size * (*m / (v.sqrt() / step.root + step.epsilon));
        }
    }
}

/// Coefficients of an SGD step.
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    /// Weight decay, added to the gradient.
    pub decay: f32,
    /// Momentum, the decay of the velocity.
    pub momentum: f32,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Learning rate.
    pub rate: f32,
}

simd! {
    /// One step of SGD without momentum.
    pub fn sgd(step: &Sgd, parameter: &mut [f32], gradient: &[f32]) {
        for (x, g) in parameter.iter_mut().zip(gradient) {
            *x -= step.rate * (g + step.decay * *x);
        }
    }
}

simd! {
    /// One step of SGD with momentum.
    pub fn sgd_momentum(step: &Sgd, parameter: &mut [f32], gradient: &[f32], velocity: &mut [f32]) {
        for ((x, g), u) in parameter.iter_mut().zip(gradient).zip(velocity) {
            let g = g + step.decay * *x;
            *u = *u * step.momentum + g;
            *x -= step.rate * if step.nesterov { g + step.momentum * *u } else { *u };
        }
    }
}

simd! {
    /// `average += share · (x - average)`
    pub fn approach(average: &mut [f32], share: f32, x: &[f32]) {
        for (a, x) in average.iter_mut().zip(x) {
            *a += share * (x - *a);
        }
    }
}

simd! {
    /// `average = average · left + share · (x² + epsilon)`
    pub fn approach_squares(average: &mut [f32], left: f32, share: f32, x: &[f32], epsilon: f32) {
        for (a, x) in average.iter_mut().zip(x) {
            *a = *a * left + share * (x * x + epsilon);
        }
    }
}

simd! {
    /// `x · factor`
    pub fn scale(x: &[f32], factor: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }
}

simd! {
    /// Adds the squares of floats to the corresponding sums.
    pub fn add_squares(sums: &mut [f64], x: &[f32]) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
}

simd! {
    /// Sum of squares. It is not finite if and only if one of the numbers is not finite.
    pub fn squares(x: &[f32]) -> f64 {
        let mut lanes = [0f64; LANES];
        let (blocks, tail) = x.as_chunks::<LANES>();
        for block in blocks {
            for lane in 0..LANES {
                lanes[lane] += f64::from(block[lane]) * f64::from(block[lane]);
            }
        }
        for (lane, x) in tail.iter().enumerate() {
            lanes[lane] += f64::from(*x) * f64::from(*x);
        }
        lanes.iter().sum()
    }
}

simd! {
    /// Sum of squared products.
    pub fn squared_products(x: &[f32], factors: &[f32]) -> f64 {
        let square = |x: f32, factor: f32| f64::from(x * factor) * f64::from(x * factor);
        let mut lanes = [0f64; LANES];
        let ((blocks, tail), (others, other_tail)) = (x.as_chunks::<LANES>(), factors.as_chunks::<LANES>());
        for (block, other) in blocks.iter().zip(others) {
            for lane in 0..LANES {
                lanes[lane] += square(block[lane], other[lane]);
            }
        }
        for (lane, (x, factor)) in tail.iter().zip(other_tail).enumerate() {
            lanes[lane] += square(*x, *factor);
        }
        lanes.iter().sum()
    }
}

simd! {
    /// `x = x · shrink - size · (direction · factor)`
    pub fn descend(x: &mut [f32], shrink: f32, size: f32, direction: &[f32], factors: &[f32]) {
        for ((x, g), factor) in x.iter_mut().zip(direction).zip(factors) {
            *x = *x * shrink - size * (g * factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_for_small_integers() {
        let x: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(squares(&x), (0..37).map(|i| f64::from(i * i)).sum::<f64>());
        assert_eq!(squared_products(&x, &[2.0; 37]), 4.0 * squares(&x));
        let mut sums = [1.0; 2];
        add_squares(&mut sums, &[3.0, -2.0]);
        assert_eq!(sums, [10.0, 5.0]);
    }

    #[test]
    fn nonfinite_values_propagate() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 20];
            x[17] = bad;
            assert!(!squares(&x).is_finite());
        }
        assert!(squares(&[f32::MAX; 20]).is_finite());
    }

    #[test]
    fn steps_by_hand() {
        let (mut x, mut u) = ([1.0], [2.0]);
        sgd_momentum(&Sgd { decay: 0.5, momentum: 0.5, nesterov: false, rate: 0.25 }, &mut x, &[0.5], &mut u);
        assert_eq!((x, u), ([0.5], [2.0]));
        sgd_momentum(&Sgd { decay: 0.0, momentum: 0.5, nesterov: true, rate: 0.25 }, &mut x, &[1.0], &mut u);
        assert_eq!((x, u), ([0.0], [2.0]));
        let mut average = [4.0];
        approach(&mut average, 0.25, &[0.0]);
        assert_eq!(average, [3.0]);
        approach_squares(&mut average, 0.5, 0.5, &[2.0], 1.0);
        assert_eq!(average, [4.0]);
        let mut out = [0.0];
        scale(&average, 0.5, &mut out);
        descend(&mut out, 0.5, 2.0, &[1.0], &[0.25]);
        assert_eq!(out, [0.5]);
    }
}
