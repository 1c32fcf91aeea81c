//! Derivatives of the functions in [`activation`](super::activation), multiplied by a gradient.

use super::activation::{ActivationFunction, GELU_INNER, erf_and_decay, sigmoid, tanh};
use crate::quantize::ROUND;

impl ActivationFunction {
    /// Whether the derivative is computed from the function's result instead of its argument.
    pub fn derivative_reads_result(self) -> bool {
        matches!(self, ActivationFunction::Relu | ActivationFunction::Sigmoid | ActivationFunction::Tanh | ActivationFunction::Clip { .. })
    }
}

simd! {
    /// The gradient times the derivative. `values` are results or arguments, see
    /// [`ActivationFunction::derivative_reads_result`].
    pub fn derivative(function: ActivationFunction, values: &[f32], gradient: &[f32], out: &mut [f32]) {
        match function {
            ActivationFunction::Relu => each(values, gradient, out, |y, g| if y > 0.0 { g } else { 0.0 }),
            ActivationFunction::Gelu => each(values, gradient, out, |x, g| {
                let (erf, decay) = erf_and_decay(x * std::f32::consts::FRAC_1_SQRT_2);
                g * (0.5 * (1.0 + erf) + x * decay * DENSITY)
            }),
            ActivationFunction::GeluTanh => each(values, gradient, out, |x, g| {
                let t = tanh(GELU_INNER * (x + 0.044_715 * x * x * x));
                g * 0.5 * (1.0 + t + x * (1.0 - t * t) * GELU_INNER * (1.0 + 0.134_145 * x * x))
            }),
            ActivationFunction::Silu => each(values, gradient, out, |x, g| {
                let s = sigmoid(x);
                g * s * (1.0 + x * (1.0 - s))
            }),
            ActivationFunction::Sigmoid => each(values, gradient, out, |y, g| g * y * (1.0 - y)),
            ActivationFunction::Tanh => each(values, gradient, out, |y, g| g * (1.0 - y * y)),
            ActivationFunction::Clip { min, max } => each(values, gradient, out, |y, g| if y > min && y < max { g } else { 0.0 }),
            ActivationFunction::HardSigmoid { alpha, beta } => each(values, gradient, out, |x, g| {
                let y = alpha * x + beta;
                if y > 0.0 && y < 1.0 { g * alpha } else { 0.0 }
            }),
            ActivationFunction::HardSwish => each(values, gradient, out, |x, g| {
                let slope = if x < 3.0 { x * (1.0 / 3.0) + 0.5 } else { 1.0 };
                if x > -3.0 { g * slope } else { 0.0 }
            }),
            ActivationFunction::LeakyRelu { alpha } => each(values, gradient, out, |x, g| if x < 0.0 { g * alpha } else { g }),
            ActivationFunction::Round { scale, zero_point } => {
                each(values, gradient, out, |x, g| {
                    let (steps, clamped) = rounded(x / scale, zero_point);
                    if steps == clamped { g } else { 0.0 }
                });
            }
        }
    }
}

simd! {
    /// Gradient with respect to the logarithm of the scale of 8-bit fake quantization: the rounding error, or
    /// the clipped value if it was clipped.
    pub fn scale_derivative(scale: f32, zero_point: f32, values: &[f32], gradient: &[f32], out: &mut [f32]) {
        each(values, gradient, out, |x, g| {
            let (steps, clamped) = rounded(x / scale, zero_point);
            let change = if steps == clamped { clamped - x / scale } else { clamped };
            g * change * scale
        });
    }
}

/// The rounded number of steps, before and after clamping. Far beyond the range, the former is one step
/// beyond.
#[inline(always)]
fn rounded(steps: f32, zero_point: f32) -> (f32, f32) {
    let (lowest, highest) = (-128.0 - zero_point, 127.0 - zero_point);
    let near = if steps < lowest - 1.0 { lowest - 1.0 } else { steps };
    let near = if near > highest + 1.0 { highest + 1.0 } else { near };
    let rounded = (near + ROUND) - ROUND;
    let clamped = if rounded < lowest { lowest } else { rounded };
    (rounded, if clamped > highest { highest } else { clamped })
}

/// `1 / sqrt(2 π)`
const DENSITY: f32 = 0.398_942_3;

#[inline(always)]
fn each(values: &[f32], gradient: &[f32], out: &mut [f32], function: impl Fn(f32, f32) -> f32) {
    for ((out, x), g) in out.iter_mut().zip(values).zip(gradient) {
        *out = function(*x, *g);
    }
}

#[cfg(test)]
mod tests {
    use super::super::activation::activate;
    use super::*;

    #[test]
    fn derivatives_equal_finite_differences() {
        for function in [
            ActivationFunction::Relu,
            ActivationFunction::Gelu,
            ActivationFunction::GeluTanh,
            ActivationFunction::Silu,
            ActivationFunction::Sigmoid,
            ActivationFunction::Tanh,
            ActivationFunction::Clip { min: -1.0, max: 6.0 },
            ActivationFunction::HardSigmoid { alpha: 0.25, beta: 0.5 },
            ActivationFunction::HardSwish,
            ActivationFunction::LeakyRelu { alpha: 0.1 },
        ] {
            for step in -160..160 {
                let (x, h) = (step as f32 / 20.0 + 0.013, 1e-2);
                let at = |x: f32| {
                    let mut value = [x];
                    activate(function, &mut value);
                    value[0]
                };
                let difference = (at(x + h) - at(x - h)) / (2.0 * h);
                let mut ours = [0.0];
                derivative(function, &[if function.derivative_reads_result() { at(x) } else { x }], &[2.0], &mut ours);
                let kinks: &[f32] = match function {
                    ActivationFunction::Relu | ActivationFunction::LeakyRelu { .. } => &[0.0],
                    ActivationFunction::Clip { .. } => &[-1.0, 6.0],
                    ActivationFunction::HardSigmoid { .. } => &[-2.0, 2.0],
                    ActivationFunction::HardSwish => &[-3.0, 3.0],
                    _ => &[],
                };
                let kink = kinks.iter().any(|k| (k - x).abs() <= h);
                assert!(kink || (ours[0] / 2.0 - difference).abs() < 2e-4, "{function:?} at {x}: {} for {difference}", ours[0] / 2.0);
            }
        }
        let mut ours = [0.0; 3];
        derivative(ActivationFunction::Round { scale: 0.1, zero_point: -128.0 }, &[-0.1, 3.0, 25.6], &[1.0; 3], &mut ours);
        assert_eq!(ours, [0.0, 1.0, 0.0]);
    }
}
