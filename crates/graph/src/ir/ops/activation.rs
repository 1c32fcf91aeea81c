//! Elementwise functions of one tensor.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Deserializer, Serialize};

use super::constants::ScalarOps;
use super::gradient::wide;
use super::rounding::round_half_even;
use super::{Backward, OpSpec, require};
use crate::ir::{Element, TensorType};
use crate::kernel::activation::ActivationFunction;

macro_rules! activation {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident : $ty:ty = $default:expr),* $(,)? }, |$op:ident, $x:ident| $kernel:expr, $eval:expr, $derivative:expr) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $ty,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }

        impl OpSpec for $name {
            fn arity(&self) -> Range<usize> {
                1..2
            }

            fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
                require(inputs[0], Element::Float, "the input")?;
                Ok(inputs[0].clone())
            }

            fn axes(&self, _inputs: &[&TensorType]) -> String {
                "* c -> * c".into()
            }

            fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
                let ($op, $x) = (self, &inputs[0]);
                let _ = $op;
                $eval
            }

            fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
                let of_input = backward.gradient_of(0, || {
                    let ($op, $x) = (self, &wide(derivative_operand(self.function(), backward)?)?);
                    let _ = $op;
                    let derivative: candle_core::Result<Tensor> = $derivative;
                    (derivative? * wide(backward.gradient)?)?.to_dtype(backward.gradient.dtype())
                })?;
                Ok(vec![of_input])
            }

            fn reads_input(&self, _input: usize) -> bool {
                !self.reads_output()
            }

            fn reads_output(&self) -> bool {
                self.function().is_some_and(ActivationFunction::derivative_reads_result)
            }
        }

        impl $name {
            /// The function for kernels, if it has a kernel.
            pub fn function(&self) -> Option<ActivationFunction> {
                let $op = self;
                let _ = $op;
                $kernel
            }
        }
    };
}

/// The tensor from which the derivative is computed: the argument or the result.
pub(super) fn derivative_operand<'b>(function: Option<ActivationFunction>, backward: &'b Backward) -> candle_core::Result<&'b Tensor> {
    if function.is_some_and(ActivationFunction::derivative_reads_result) { backward.output } else { &backward.inputs[0] }.tensor()
}

/// Deserializes a lower bound; `null` means no bound.
fn lower<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NEG_INFINITY))
}

/// Deserializes an upper bound; `null` means no bound.
fn upper<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

/// 1 where both comparisons hold, else 0.
pub(super) fn between(low: Tensor, high: Tensor, like: &Tensor) -> candle_core::Result<Tensor> {
    (low * high)?.to_dtype(like.dtype())
}

activation!(
    /// `max(x, 0)`
    Relu {}, |op, x| Some(ActivationFunction::Relu), x.relu(), x.gt_scalar(0.0)?.to_dtype(x.dtype())
);
activation!(
    /// `x Φ(x)` with the normal distribution's Φ (Hendrycks and Gimpel, 2016).
    Gelu {
        /// Whether Φ is approximated by a hyperbolic tangent.
        tanh: bool = false,
    }, |op, x| Some(if op.tanh { ActivationFunction::GeluTanh } else { ActivationFunction::Gelu }), if op.tanh { x.gelu() } else { x.gelu_erf() }, if op.tanh {
        let inner = (std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2, 0.044_715);
        let tanh = ((x + (x.powf(3.0)? * inner.1)?)? * inner.0)?.tanh()?;
        let steepness = ((x * (1.0 - tanh.sqr()?)?)? * (((x.sqr()? * (3.0 * inner.1))? + 1.0)? * inner.0)?)?;
        ((tanh + 1.0)? + steepness)? * 0.5
    } else {
        let density = ((x.sqr()? * -0.5)?.exp()? * (0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2))?;
        (((x * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)? * 0.5)? + (x * density)?
    }
);
activation!(
    /// `x · sigmoid(x)`
    Silu {}, |op, x| Some(ActivationFunction::Silu), x.silu(), {
        let sigmoid = candle_nn::ops::sigmoid(x)?;
        &sigmoid * ((x * (1.0 - &sigmoid)?)? + 1.0)?
    }
);
activation!(
    /// `1 / (1 + exp(-x))`
    Sigmoid {}, |op, x| Some(ActivationFunction::Sigmoid), candle_nn::ops::sigmoid(x), x * (1.0 - x)?
);
activation!(
    /// Hyperbolic tangent.
    Tanh {}, |op, x| Some(ActivationFunction::Tanh), x.tanh(), 1.0 - x.sqr()?
);
activation!(
    /// Clamps values between two bounds; 0 and 6 give ReLU6.
    Clip {
        /// Lower bound; minus infinity for none, which is `null` in files.
        #[serde(deserialize_with = "lower")]
        min: f64 = 0.0,
        /// Upper bound; infinity for none, which is `null` in files.
        #[serde(deserialize_with = "upper")]
        max: f64 = 6.0,
    }, |op, x| Some(ActivationFunction::Clip { min: op.min as f32, max: op.max as f32 }), x.clamp_scalar(op.min, op.max),
    between(x.gt_scalar(op.min)?, x.lt_scalar(op.max)?, x)
);
activation!(
    /// Fake quantization to 8 bits: `QuantizeLinear` followed by `DequantizeLinear`. The straight-through
    /// estimator passes gradients of values that are not clipped.
    FakeQuantize {
        /// Quantization step.
        scale: f32 = 1.0,
        /// The integer that represents zero, in -128..=127.
        zero_point: i32 = 0,
    }, |op, x| Some(ActivationFunction::Round { scale: op.scale, zero_point: op.zero_point as f32 }), {
        let (low, high) = op.integer_range();
        let rounded = round_half_even(&op.in_units_of_scale(x)?.clamp_scalar(low, high)?)? * f64::from(op.scale);
        rounded?.to_dtype(x.dtype())
    }, op.gradient_mask(&op.in_units_of_scale(x)?)
);
activation!(
    /// `max(0, min(1, alpha · x + beta))`
    HardSigmoid {
        /// Slope.
        alpha: f64 = 0.2,
        /// Value at zero.
        beta: f64 = 0.5,
    }, |op, x| Some(ActivationFunction::HardSigmoid { alpha: op.alpha as f32, beta: op.beta as f32 }), x.affine(op.alpha, op.beta)?.clamp_scalar(0.0, 1.0),
    between(x.affine(op.alpha, op.beta)?.gt_scalar(0.0)?, x.affine(op.alpha, op.beta)?.lt_scalar(1.0)?, x)? * op.alpha
);
activation!(
    /// `x · max(0, min(1, x / 6 + 1 / 2))` (Howard et al., 2019).
    HardSwish {}, |op, x| Some(ActivationFunction::HardSwish), x * x.affine(1.0 / 6.0, 0.5)?.clamp_scalar(0.0, 1.0)?, {
        let inside = between(x.gt_scalar(-3.0)?, x.lt_scalar(3.0)?, x)?;
        (inside * x.affine(1.0 / 3.0, 0.5)?)? + x.ge_scalar(3.0)?.to_dtype(x.dtype())?
    }
);
activation!(
    /// `x` where it is positive, else `alpha · x`.
    LeakyRelu {
        /// Slope below zero.
        alpha: f64 = 0.01,
    }, |op, x| Some(ActivationFunction::LeakyRelu { alpha: op.alpha as f32 }), x.relu()? - (x.neg()?.relu()? * op.alpha)?,
    x.ge_scalar(0.0)?.to_dtype(x.dtype())?.affine(1.0 - op.alpha, op.alpha)
);
activation!(
    /// `x` where it is positive, else `alpha · (exp(x) - 1)` (Clevert et al., 2016).
    Elu {
        /// Minus the limit below zero.
        alpha: f64 = 1.0,
    }, |op, x| None, x.relu()? + x.minimum_scalar(0.0)?.exp()?.affine(op.alpha, -op.alpha)?, {
        let positive = x.ge_scalar(0.0)?.to_dtype(x.dtype())?;
        &positive + (x.minimum_scalar(0.0)?.exp()? * positive.affine(-op.alpha, op.alpha)?)?
    }
);
activation!(
    /// `ln(1 + exp(x))`
    Softplus {}, |op, x| None, softplus(x), candle_nn::ops::sigmoid(x)
);
activation!(
    /// `x · tanh(ln(1 + exp(x)))` (Misra, 2020).
    Mish {}, |op, x| None, x * softplus(x)?.tanh()?, {
        let tanh = softplus(x)?.tanh()?;
        &tanh + ((x * (1.0 - tanh.sqr()?)?)? * candle_nn::ops::sigmoid(x)?)?
    }
);
activation!(
    /// A power with a fixed exponent; powers of negative numbers require an integer exponent.
    Power {
        /// The exponent.
        exponent: f64 = 2.0,
    }, |op, x| None, x.powf(op.exponent), x.powf(op.exponent - 1.0)? * op.exponent
);
activation!(
    /// Square root.
    Sqrt {}, |op, x| None, x.sqrt(), x.sqrt()?.recip()? * 0.5
);
activation!(
    /// `exp(x)`
    Exp {}, |op, x| None, x.exp(), x.exp()
);
activation!(
    /// Natural logarithm.
    Log {}, |op, x| None, x.log(), x.recip()
);
activation!(
    /// The error function.
    Erf {}, |op, x| None, x.erf(), x.sqr()?.neg()?.exp()? * std::f64::consts::FRAC_2_SQRT_PI
);
activation!(
    /// Sine.
    Sin {}, |op, x| None, x.sin(), x.cos()
);
activation!(
    /// Cosine.
    Cos {}, |op, x| None, x.cos(), x.sin()?.neg()
);
activation!(
    /// `-x`
    Neg {}, |op, x| None, x.neg(), x.ones_like()?.neg()
);
activation!(
    /// The value times a constant.
    Scale {
        /// The constant.
        factor: f64 = 1.0,
    }, |op, x| None, x * op.factor, x.ones_like()? * op.factor
);
activation!(
    /// Absolute value; the gradient at zero is zero.
    Abs {}, |op, x| None, x.abs(), x.gt_scalar(0.0)?.to_dtype(x.dtype())? - x.lt_scalar(0.0)?.to_dtype(x.dtype())?
);
activation!(
    /// `1 / x`
    Reciprocal {}, |op, x| None, x.recip(), x.recip()?.sqr()?.neg()
);

/// `ln(1 + exp(x))` without overflow, in at least 32 bits.
pub(super) fn softplus(x: &Tensor) -> candle_core::Result<Tensor> {
    let wide = wide(x)?;
    let small = wide.abs()?.neg()?.exp()?;
    // `ln(1 + y)`, corrected for the rounding of `1 + y` (Goldberg, *What Every Computer Scientist Should
    // Know About Floating-Point Arithmetic*, 1991, theorem 4).
    let sum = (&small + 1.0)?;
    let rounded = (&sum - 1.0)?;
    let rest = rounded.eq_scalar(0.0)?.where_cond(&small, &((&small * sum.log()?)? / &rounded)?)?;
    (wide.relu()? + rest)?.to_dtype(x.dtype())
}

impl FakeQuantize {
    /// The smallest and the largest integer, relative to the zero point.
    pub(super) fn integer_range(&self) -> (f64, f64) {
        (f64::from(-128 - self.zero_point), f64::from(127 - self.zero_point))
    }

    /// Values in units of the scale, in at least 32 bits. Divides, because a product with the reciprocal
    /// rounds differently.
    fn in_units_of_scale(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = wide(x)?;
        x.broadcast_div(&Tensor::full(self.scale, 1, x.device())?.to_dtype(x.dtype())?)
    }

    /// 1 where a value rounds to an integer in range, so that the gradient passes; else 0.
    pub(super) fn gradient_mask(&self, steps: &Tensor) -> candle_core::Result<Tensor> {
        let (low, high) = self.integer_range();
        let rounded = round_half_even(&steps.clamp_scalar(low - 1.0, high + 1.0)?)?;
        between(rounded.ge_scalar(low)?, rounded.le_scalar(high)?, steps)
    }

    /// The smallest and the largest value that can be represented.
    pub fn range(&self) -> (f32, f32) {
        let zero = self.zero_point as f32;
        ((-128.0 - zero) * self.scale, (127.0 - zero) * self.scale)
    }

    /// The quantizer with the smallest scale that covers `low..=high` and represents zero exactly; scale
    /// 1 for an empty range.
    pub fn from_range(low: f32, high: f32) -> FakeQuantize {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let scale = high / 255.0 - low / 255.0;
        if scale.is_nan() || scale < f32::MIN_POSITIVE {
            return FakeQuantize::default();
        }
        let zero_point = (-128.0 - low / scale).round_ties_even().clamp(-128.0, 127.0);
        FakeQuantize { scale, zero_point: zero_point as i32 }
    }

    /// The smallest quantizer that covers the ranges of both; stays symmetric if both are.
    pub fn union(self, other: FakeQuantize) -> FakeQuantize {
        let [(low, high), (other_low, other_high)] = [self.range(), other.range()];
        match (self.zero_point, other.zero_point) {
            (a, b) if a == b => FakeQuantize { scale: self.scale.max(other.scale), zero_point: a },
            _ => FakeQuantize::from_range(low.min(other_low), high.max(other_high)),
        }
    }

    /// The symmetric quantizer (zero point 0) that covers `low..=high`.
    pub fn symmetric(low: f32, high: f32) -> FakeQuantize {
        let scale = low.abs().max(high.abs()) / 127.5;
        if scale >= f32::MIN_POSITIVE { FakeQuantize { scale, zero_point: 0 } } else { FakeQuantize::default() }
    }
}
