//! Fake quantization of weights in training.

use candle_core::{DType, Device, Tensor};

use super::scales;
use crate::error::{Error, Result};
use crate::ir::ops::{ScalarOps, round_half_even};
use crate::kernel::quantize;
use crate::store::{DType as Stored, Encoding, Scales, Weight};

/// Fake quantization of a weight with a straight-through estimator (Bengio et al., *Estimating or
/// Propagating Gradients Through Stochastic Neurons*, 2013; Jacob et al., *Quantization and Training of
/// Neural Networks*, 2018).
pub(super) struct Rounding {
    pub(super) scales: Scales,
    /// Scales as a column, one row for each run of elements with the same scale.
    scale: Tensor,
    /// Dtype that the scales are written with.
    stored: DType,
    /// Zero points, in the shape of `scale`.
    zero: Tensor,
    /// Smallest and largest integer.
    bounds: [f32; 2],
}

impl Rounding {
    /// The rounding of a weight that is written as integers; `None` for other weights.
    pub(super) fn from_weight(name: &str, weight: &Weight, device: &Device) -> Result<Option<Rounding>> {
        let (Some(scales), Encoding::Quantized(affine)) = (weight.scales()?, &weight.encoding) else { return Ok(None) };
        if !affine.codes.is_integer() {
            return Err(Error::tensor(
                name,
                format!("is {}, but training supports only weights quantized to integers", weight.describe()),
                "train before quantizing, or add it to `ignore`",
            ));
        }
        let stored = match affine.scale_dtype {
            Stored::BF16 => DType::BF16,
            Stored::F16 => DType::F16,
            _ => DType::F32,
        };
        scales.scales.iter().try_for_each(|scale| scales::require_scale(name, *scale, "quantize the floats again, or add the tensor to `ignore`"))?;
        Rounding::new(scales, stored, quantize::bounds(affine.codes.bits()), device).map(Some).map_err(|e| Error::candle(format!("tensor `{name}`"), e))
    }

    fn new(scales: Scales, stored: DType, bounds: [f32; 2], device: &Device) -> candle_core::Result<Rounding> {
        let column = |values: &[f32]| Tensor::from_slice(values, (values.len(), 1), device);
        Ok(Rounding { scale: column(&scales.scales)?, stored, zero: column(&scales.zero_points)?, bounds, scales })
    }

    /// The scales, multiplied by the exponentials of the learned logarithms and rounded to the dtype
    /// that they are written with.
    pub(super) fn scale(&self, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        match learned {
            Some(logarithms) => (&self.scale * logarithms.exp()?.reshape(self.scale.dims())?)?.to_dtype(self.stored)?.to_dtype(DType::F32),
            None => Ok(self.scale.clone()),
        }
    }

    /// The weight divided by its scales, `[runs, elements of a run]`.
    fn steps(&self, weight: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        self.runs(weight)?.broadcast_div(scale)
    }

    /// The quantized integers as floats, `[runs, elements of a run]`.
    pub(super) fn integers(&self, weight: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        let [least, most] = self.bounds;
        round_half_even(&self.steps(weight, scale)?)?.broadcast_add(&self.zero)?.clamp_scalar(least.into(), most.into())
    }

    /// Quantizes and dequantizes a weight.
    pub(super) fn apply(&self, weight: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let scale = self.scale(learned)?;
        self.rounded(weight, &scale)?.broadcast_mul(&scale)?.reshape(weight.dims())
    }

    /// The quantized integers minus their zero points, `[runs, elements of a run]`.
    fn rounded(&self, weight: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        self.integers(weight, scale)?.broadcast_sub(&self.zero)
    }

    /// The integers of a quantized weight minus their zero points, in the shape of the weight. BF16
    /// represents them exactly, because their magnitudes are at most 255.
    pub(super) fn codes(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        self.rounded(weight, &self.scale)?.reshape(weight.dims())?.to_dtype(DType::BF16)
    }

    /// The integers that [`codes`](Rounding::codes) were computed from, `[runs, elements of a run]`.
    pub(super) fn integers_of(&self, codes: &Tensor) -> candle_core::Result<Tensor> {
        self.runs(codes)?.broadcast_add(&self.zero)
    }

    /// The weight with these codes.
    pub(super) fn dequantize(&self, codes: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        self.runs(codes)?.broadcast_mul(&self.scale(learned)?)?.reshape(codes.dims())
    }

    fn runs(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        weight.to_dtype(DType::F32)?.reshape((self.scales.scales.len(), self.scales.run))
    }

    /// Gradient with respect to the logarithms of the scales of a weight with fixed codes.
    pub(super) fn code_scale_gradient(&self, codes: &Tensor, learned: Option<&Tensor>, gradient: &Tensor) -> candle_core::Result<Tensor> {
        self.logarithm_gradient(gradient, &self.runs(codes)?, &self.scale(learned)?)
    }

    /// Gradient with respect to the logarithms of the scales, from that of the rounded weight. See
    /// [`LearnedFakeQuantize`](crate::ir::ops::LearnedFakeQuantize).
    pub(super) fn scale_gradient(&self, weight: &Tensor, learned: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let scale = self.scale(Some(learned))?;
        let (steps, rounded) = (self.steps(weight, &scale)?, self.rounded(weight, &scale)?);
        let passes = round_half_even(&steps)?.eq(&rounded)?.to_dtype(steps.dtype())?;
        self.logarithm_gradient(gradient, &(rounded - (steps * passes)?)?, &scale)
    }

    /// Gradient with respect to the logarithms of the scales, from that of the weight and the derivatives
    /// `[runs, elements of a run]` of the weight with respect to its scales.
    fn logarithm_gradient(&self, gradient: &Tensor, derivatives: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        (self.runs(gradient)? * derivatives.broadcast_mul(scale)?)?.sum(1)?.affine(scales::gradient_factor(self.scales.run), 0.0)
    }
}
