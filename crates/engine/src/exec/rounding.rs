//! Quantization of the inputs of layers with quantized weights, as the runtime of the model performs it.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use super::transfer::{self, Cause};
use crate::ir::ops::{ScalarOps, on_host, round_half_even};
use crate::kernel::{grid, quantize};
use crate::store::{ActivationScheme, FloatFormat, FloatScale};

/// Dynamic quantization of the inputs of layers with int8 weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Int8 with a scale per token, as compressed-tensors computes it. The largest magnitude of a token
    /// is 127.5 steps: a negative one rounds to -127 or -128 depending on the last bit of the division,
    /// so that two runs with sums that differ in one bit can differ by a step. vLLM's kernels use 127
    /// steps.
    Token,
    /// Uint8 with a scale and a zero point per tensor, as ONNX's `DynamicQuantizeLinear`.
    Tensor,
}

/// Number of values that a thread rounds at a time.
const CHUNK: usize = 1 << 14;

impl Rounding {
    /// Quantizes and dequantizes the input of a layer whose weight specifies this scheme. ONNX does not
    /// support the schemes of low-bit floats, and activations stay in floating point there.
    pub fn round_input(self, scheme: ActivationScheme, x: &Tensor) -> candle_core::Result<Tensor> {
        match (scheme, self) {
            (ActivationScheme::DynamicToken, _) => self.apply(x),
            (ActivationScheme::None | ActivationScheme::Static(_), _) | (ActivationScheme::Float(..), Rounding::Tensor) => Ok(x.clone()),
            (ActivationScheme::Float(format, scale), Rounding::Token) => {
                // On the host for every device, because no device supports all of these formats.
                let mut values = transfer::values::<f32>(x, Cause::Answers)?;
                for_each_group(format, scale, x.dim(D::Minus1)?.max(1), &mut values, |values, scale| format.round(values, scale));
                let rounded = Tensor::from_vec(values, x.dims(), &candle_core::Device::Cpu)?.to_dtype(x.dtype())?;
                transfer::move_to(&rounded, x.device(), Cause::Answers)
            }
        }
    }

    /// The gradient of the input, from that of the quantized input `gradient`: a straight-through estimator
    /// that treats scales as constants. Dynamic scales cover all values, and pass gradients unchanged. Static
    /// ones, including the global scale of NVFP4, clip values beyond their range, whose gradient is zero.
    pub fn input_gradient(self, scheme: ActivationScheme, x: &Tensor, gradient: Tensor) -> candle_core::Result<Tensor> {
        let (ActivationScheme::Float(format, scale @ (FloatScale::Static(_) | FloatScale::Relative(_))), Rounding::Token) = (scheme, self) else {
            return Ok(gradient);
        };
        let limit = format.codec().clipping_limit();
        let mut values = transfer::values::<f32>(x, Cause::Answers)?;
        for_each_group(format, scale, x.dim(D::Minus1)?.max(1), &mut values, |values, scale| {
            values.iter_mut().for_each(|x| *x = if (*x / scale).abs() <= limit { 1.0 } else { 0.0 });
        });
        let mask = Tensor::from_vec(values, x.dims(), &candle_core::Device::Cpu)?.to_dtype(gradient.dtype())?;
        gradient * transfer::move_to(&mask, x.device(), Cause::Answers)?
    }

    /// Quantizes to int8 and dequantizes.
    fn apply(self, x: &Tensor) -> candle_core::Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?;
        if !on_host(x.device()) {
            return self.by_operations(&wide)?.to_dtype(x.dtype());
        }
        let mut values = transfer::read::<f32>(&wide)?;
        match self {
            Rounding::Token => values.par_chunks_mut(x.dim(D::Minus1)?.max(1)).for_each(token),
            Rounding::Tensor => tensor(&mut values),
        }
        Tensor::from_vec(values, x.dims(), x.device())?.to_dtype(x.dtype())
    }

    /// As [`apply`](Self::apply), in tensor operations.
    fn by_operations(self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Rounding::Token => {
                let scale = x.abs()?.max_keepdim(D::Minus1)?.div_scalar(127.5)?;
                // Only for tokens that are entirely zero.
                let scale = (&scale + (scale.eq_scalar(0.0)?.to_dtype(DType::F32)? * f64::from(f32::EPSILON))?)?;
                round_half_even(&x.broadcast_div(&scale)?)?.clamp_scalar(-128.0, 127.0)?.broadcast_mul(&scale)
            }
            Rounding::Tensor => {
                let (low, high) = (x.min_all()?.minimum_scalar(0.0)?, x.max_all()?.maximum_scalar(0.0)?);
                let scale = (high - &low)?.div_scalar(255.0)?;
                // A tensor of zeros has scale 1.
                let scale = (&scale + scale.eq_scalar(0.0)?.to_dtype(DType::F32)?)?;
                let zero = round_half_even(&(low.neg()? / &scale)?)?.clamp_scalar(0.0, 255.0)?;
                let integers = round_half_even(&x.broadcast_div(&scale)?)?.broadcast_add(&zero)?.clamp_scalar(0.0, 255.0)?;
                integers.broadcast_sub(&zero)?.broadcast_mul(&scale)
            }
        }
    }
}

/// The largest magnitude.
fn largest(values: &[f32]) -> f32 {
    let (low, high) = grid::range(values);
    high.max(-low).max(0.0)
}

fn token(row: &mut [f32]) {
    let scale = largest(row) / 127.5;
    quantize::round_symmetric(row, if scale > 0.0 { scale } else { f32::EPSILON });
}

/// Calls a function with each group of values that share a scale, and with the scale, as compressed-tensors
/// computes it. A token has `width` values.
fn for_each_group(format: FloatFormat, scale: FloatScale, width: usize, values: &mut [f32], each: impl Fn(&mut [f32], f32) + Sync) {
    let group = match scale {
        FloatScale::Token | FloatScale::Static(_) => width,
        FloatScale::Group(size) => size.max(1),
        FloatScale::PowerOfTwo | FloatScale::Relative(_) => scale.format().group().unwrap_or(width),
    };
    let scale_of = |values: &[f32]| match scale {
        FloatScale::Static(by) => by.scale(),
        FloatScale::PowerOfTwo => format.power_of_two_scale(largest(values)),
        FloatScale::Relative(by) => format.relative_scale(largest(values), by.scale()) / by.scale(),
        FloatScale::Token | FloatScale::Group(_) => {
            let scale = largest(values) / format.row().max;
            if scale > 0.0 { scale } else { f32::EPSILON }
        }
    };
    values.par_chunks_mut(width).for_each(|token| {
        for values in token.chunks_mut(group) {
            let scale = scale_of(values);
            each(values, scale);
        }
    });
}

fn tensor(values: &mut [f32]) {
    let ranges = values.par_chunks(CHUNK).map(grid::range);
    let (low, high) = ranges.reduce(|| (0.0, 0.0), |a, b| (a.0.min(b.0), a.1.max(b.1)));
    let (scale, zero) = range(low, high);
    values.par_chunks_mut(CHUNK).for_each(|values| quantize::round_affine(values, scale, zero));
}

/// Scale and zero point of 8 bits for a range that contains zero.
fn range(low: f32, high: f32) -> (f32, f32) {
    let scale = (high - low) / 255.0;
    if scale > 0.0 { (scale, (-low / scale).round_ties_even().clamp(0.0, 255.0)) } else { (1.0, 0.0) }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn e4m3(scale: FloatScale) -> ActivationScheme {
        ActivationScheme::Float(FloatFormat::E4m3, scale)
    }

    fn e2m1(scale: FloatScale) -> ActivationScheme {
        ActivationScheme::Float(FloatFormat::E2m1, scale)
    }

    fn rounded(rounding: Rounding, rows: &[[f32; 3]; 2]) -> Vec<f32> {
        let x = Tensor::new(rows, &Device::Cpu).unwrap();
        let fast = rounding.apply(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let slow = rounding.by_operations(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(fast, slow);
        fast
    }

    #[test]
    fn tokens_are_rounded_bit_for_bit_as_by_compressed_tensors() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/int8/rows.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let bits = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let found = Rounding::Token.apply(&golden["in"]).unwrap();
        assert_eq!(bits(&found), bits(&golden["out"]));
        // Except for the sign of zeros.
        let numbers = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(numbers(&Rounding::Token.by_operations(&golden["in"]).unwrap()), numbers(&golden["out"]));
    }

    #[test]
    fn floats_are_rounded_by_token_group_or_stored_scale() {
        use crate::store::Static;
        let rounded = |scheme, width, values: &[f32]| {
            let mut values = values.to_vec();
            let ActivationScheme::Float(format, scale) = scheme else { panic!("{scheme:?}") };
            for_each_group(format, scale, width, &mut values, |values, scale| format.round(values, scale));
            values
        };
        // The largest value of a token is 448 steps.
        assert_eq!(rounded(e4m3(FloatScale::Token), 2, &[448.0, 17.0, -4.48, 0.0]), [448.0, 16.0, -4.48, 0.0]);
        assert_eq!(rounded(e4m3(FloatScale::Group(1)), 2, &[448.0, 17.0, 0.0, 1.0]), [448.0, 17.0, 0.0, 1.0]);
        assert_eq!(rounded(e4m3(FloatScale::Static(Static::new(1.0, None))), 2, &[1000.0, 17.0, 18.0, -19.0]), [448.0, 16.0, 18.0, -20.0]);
        let example = [0.5, -1.0, 6.0, 0.0, -6.0, 3.0, 1.5, -0.5, 2.0, 4.0, -2.0, -3.0, -4.0, 1.0, 0.25, 0.3];
        let wanted = [0.5, -1.0, 6.0, 0.0, -6.0, 3.0, 1.5, -0.5, 2.0, 4.0, -2.0, -3.0, -4.0, 1.0, 0.0, 0.5];
        assert_eq!(rounded(e2m1(FloatScale::Relative(Static::new(448.0, None))), 16, &example), wanted);
        assert_eq!(rounded(e2m1(FloatScale::PowerOfTwo), 16, &example), wanted);
        // Unchanged with the rounding of ONNX.
        let x = Tensor::new(&[[448f32, 17.0]], &Device::Cpu).unwrap();
        let of = |rounding: Rounding| rounding.round_input(e4m3(FloatScale::Token), &x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!((of(Rounding::Tensor), of(Rounding::Token)), (vec![448.0, 17.0], vec![448.0, 16.0]));
    }

    /// Generated by `scripts/goldens narrow`.
    #[test]
    fn floats_are_rounded_bit_for_bit_as_by_compressed_tensors() {
        use crate::store::Static;
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/narrow-rows.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let values = |name: &str| golden[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let stored = |name: &str| Static::new(values(name)[0], None);
        for (name, scheme) in [
            ("FP8_DYNAMIC", e4m3(FloatScale::Token)),
            ("FP8_BLOCK", e4m3(FloatScale::Group(128))),
            ("FP8", e4m3(FloatScale::Static(stored("FP8_scale")))),
            ("MXFP8", e4m3(FloatScale::PowerOfTwo)),
            ("MXFP4", e2m1(FloatScale::PowerOfTwo)),
            ("NVFP4", e2m1(FloatScale::Relative(stored("NVFP4_scale")))),
        ] {
            let mut found = values("in");
            let ActivationScheme::Float(format, scale) = scheme else { panic!("{name}") };
            for_each_group(format, scale, 256, &mut found, |values, scale| format.round(values, scale));
            for (at, (found, wanted)) in found.iter().zip(values(name)).enumerate() {
                assert!(*found == wanted, "{name} at {at}: {found} is not {wanted}");
            }
        }
    }

    #[test]
    fn each_row_has_its_own_scale_or_all_share_one() {
        let rows = [[1.275, -0.5, 0.004], [0.0, 0.0, 0.0]];
        // The largest value would be 127.5 steps and is clipped to 127.
        let token = rounded(Rounding::Token, &rows);
        assert!((token[0] - 1.27).abs() < 1e-6 && (token[1] + 0.5).abs() < 1e-6 && token[2] == 0.0 && token[3..] == [0.0; 3]);
        rounded(Rounding::Tensor, &[[0.1, 2.0, -3.0], [-2.4, 1.34, 0.5]]);
        // Ties round to even.
        assert_eq!(rounded(Rounding::Token, &[[127.5, 0.5, -2.5], [127.5, 1.5, 6.5]]), [127.0, 0.0, -2.0, 127.0, 2.0, 6.0]);
        assert_eq!(rounded(Rounding::Tensor, &[[0.0, 255.0, 0.5], [2.5, 1.5, 6.5]]), [0.0, 255.0, 0.0, 2.0, 2.0, 6.0]);
        // The example in ONNX's documentation of DynamicQuantizeLinear: 153, 255, 0, 26, 221, 179 with
        // zero point 153.
        let x = Tensor::new(&[0.0f32, 2.0, -3.0, -2.5, 1.34, 0.5], &Device::Cpu).unwrap();
        let tensor = Rounding::Tensor.apply(&x).unwrap().to_vec1::<f32>().unwrap();
        let wanted = [153, 255, 0, 26, 221, 179].map(|q: i32| (q - 153) as f32 * 0.019_607_844);
        assert!(tensor.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{tensor:?} {wanted:?}");
    }
}
