//! Activation functions as loops that the compiler can vectorize.
//!
//! Absolute errors are below the maximum of 3e-7 and two units in the last place.

use crate::quantize::ROUND;

/// An elementwise function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ActivationFunction {
    /// `max(x, 0)`
    Relu,
    /// `x Φ(x)`
    Gelu,
    /// `x Φ(x)` with the tanh approximation of Φ.
    GeluTanh,
    /// `x · sigmoid(x)`
    Silu,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// Values clamped to a range.
    Clip {
        /// Lower bound.
        min: f32,
        /// Upper bound.
        max: f32,
    },
    /// `max(0, min(1, alpha · x + beta))`
    HardSigmoid {
        /// Slope.
        alpha: f32,
        /// Value at zero.
        beta: f32,
    },
    /// `x · max(0, min(1, x / 6 + 1 / 2))`
    HardSwish,
    /// `x` if it is positive, otherwise `alpha · x`.
    LeakyRelu {
        /// Slope for negative inputs.
        alpha: f32,
    },
    /// Fake quantization to 8 bits, ties to even, as `QuantizeLinear` and `DequantizeLinear` of ONNX.
    Round {
        /// The scale.
        scale: f32,
        /// The zero point, -128 to 127.
        zero_point: f32,
    },
}

simd! {
    /// Applies a function in place.
    pub fn activate(function: ActivationFunction, values: &mut [f32]) {
        apply(function, values);
    }
}

/// As [`activate`], for inlining into a larger loop.
#[inline(always)]
pub(super) fn apply(function: ActivationFunction, values: &mut [f32]) {
    match function {
        ActivationFunction::Relu => each(values, |x| if x < 0.0 { 0.0 } else { copied(x) }),
        ActivationFunction::Gelu => each(values, |x| 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))),
        ActivationFunction::GeluTanh => each(values, |x| 0.5 * x * (1.0 + tanh(GELU_INNER * (x + 0.044_715 * x * x * x)))),
        ActivationFunction::Silu => each(values, |x| x * sigmoid(x)),
        ActivationFunction::Sigmoid => each(values, sigmoid),
        ActivationFunction::Tanh => each(values, tanh),
        ActivationFunction::Clip { min, max } => each(values, |x| {
            let x = if x < min { min } else { x };
            if x > max { max } else { x }
        }),
        ActivationFunction::HardSigmoid { alpha, beta } => each(values, |x| between_zero_and_one(alpha * x + beta)),
        ActivationFunction::HardSwish => each(values, |x| x * between_zero_and_one(x * (1.0 / 6.0) + 0.5)),
        ActivationFunction::LeakyRelu { alpha } => each(values, |x| if x < 0.0 { alpha * x } else { copied(x) }),
        ActivationFunction::Round { scale, zero_point } => {
            let (lowest, highest) = (-128.0 - zero_point, 127.0 - zero_point);
            each(values, |x| {
                let steps = x / scale;
                let steps = if steps < lowest { lowest } else { steps };
                let steps = if steps > highest { highest } else { steps };
                ((steps + ROUND) - ROUND) * scale
            });
        }
    }
}

/// The same number; -0 becomes 0. Without the sum, the compiler skips the numbers of a vector that a function
/// leaves unchanged, with masked stores, which are slow on AMD processors without AVX-512.
#[inline(always)]
pub(super) fn copied(x: f32) -> f32 {
    x + 0.0
}

/// `sqrt(2 / π)`
pub(super) const GELU_INNER: f32 = 0.797_884_6;

#[inline(always)]
fn between_zero_and_one(x: f32) -> f32 {
    let x = if x < 0.0 { 0.0 } else { x };
    if x > 1.0 { 1.0 } else { x }
}

#[inline(always)]
fn each(values: &mut [f32], function: impl Fn(f32) -> f32) {
    for value in values {
        *value = function(*value);
    }
}

/// `2ⁿ · polynomial`, with `x = n ln 2 + r` and `|r| ≤ ln 2 / 2`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let clamped = if x > 88.0 { 88.0 } else { x };
    let clamped = if clamped < -87.0 { -87.0 } else { clamped };
    let value = power(clamped, clamped * std::f32::consts::LOG2_E + ROUND);
    let value = if x > 88.0 { value * (1.0 + (x - 88.0)) } else { value };
    if x < -87.0 { 0.0 } else { value }
}

#[inline(always)]
fn power(x: f32, shifted: f32) -> f32 {
    let n = shifted - ROUND;
    // ln 2 in two parts, so that n · ln 2 is exact.
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let polynomial = 1.0 + r * (1.0 + r * (0.5 + r * (0.166_666_66 + r * (0.041_666_53 + r * (0.008_333_45 + r * 0.001_388_9)))));
    polynomial * f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23)
}

/// [`exp`] for arguments that are not positive.
#[inline(always)]
pub(super) fn exp_below(x: f32) -> f32 {
    let clamped = if x < -87.0 { -87.0 } else { x };
    let value = power(clamped, clamped * std::f32::consts::LOG2_E + ROUND);
    if x < -87.0 { 0.0 } else { value }
}

#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let decay = exp(-2.0 * size);
    let large = ((1.0 - decay) / (1.0 + decay)).copysign(x);
    // Near zero, the difference above would lose its leading digits.
    let square = x * x;
    let small = x * (1.0 - square * (0.333_333_34 - square * (0.133_333_33 - square * (0.053_968_254 - square * 0.021_869_488))));
    if size < 0.25 { small } else { large }
}

#[inline(always)]
fn erf(x: f32) -> f32 {
    erf_and_decay(x).0
}

/// The error function (Abramowitz and Stegun, 7.1.26), and the `exp(-x²)` used in its computation.
#[inline(always)]
pub(super) fn erf_and_decay(x: f32) -> (f32, f32) {
    let size = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let polynomial = t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
    let decay = exp(-size * size);
    ((1.0 - polynomial * decay).copysign(x), decay)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(ours: impl Fn(f32) -> f32, truth: impl Fn(f64) -> f64) -> f64 {
        (-4000..=4000)
            .map(|i| {
                let x = i as f32 / 200.0;
                let want = truth(f64::from(x));
                (f64::from(ours(x)) - want).abs() / want.abs().max(1.0)
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn functions_are_accurate() {
        assert!(worst(exp, f64::exp) < 3e-7);
        assert!(worst(tanh, f64::tanh) < 3e-7);
        assert!(worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp())) < 3e-7);
        let table =
            [(0.0, 0.0), (0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (-2.0, -0.995_322_265_018_952_7), (4.0, 0.999_999_984_582_742_1)];
        for (x, want) in table {
            assert!((f64::from(erf(x)) - want).abs() < 3e-7, "erf({x})");
        }
    }

    #[test]
    fn rounding_matches_onnx() {
        // 0.5, 1.5, 2.5 are rounded to even; with a zero point of -128, negative values become 0.
        let mut values = [0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0];
        activate(ActivationFunction::Round { scale: 1.0, zero_point: 0.0 }, &mut values);
        assert_eq!(values, [0.0, 2.0, 2.0, 0.0, -2.0, 127.0, -128.0]);
        let mut values = [-1.0, 0.2, 12.8, 30.0];
        activate(ActivationFunction::Round { scale: 0.1, zero_point: -128.0 }, &mut values);
        assert_eq!(values, [0.0, 0.2, 12.8, 25.5]);
    }

    #[test]
    fn the_ends_of_the_range() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((tanh(100.0), tanh(-100.0)), (1.0, -1.0));
        for function in [
            ActivationFunction::Relu,
            ActivationFunction::Gelu,
            ActivationFunction::Silu,
            ActivationFunction::Tanh,
            ActivationFunction::Clip { min: 0.0, max: 6.0 },
            ActivationFunction::Round { scale: 0.1, zero_point: 3.0 },
        ] {
            let mut value = [f32::NAN];
            activate(function, &mut value);
            assert!(value[0].is_nan(), "{function:?}");
        }
    }
}
