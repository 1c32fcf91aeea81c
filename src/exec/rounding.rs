//! What the consumer of quantized weights does to the inputs of their layers.

use candle_core::{D, DType, Tensor};

use super::transfer::{self, Cause};
use crate::ir::ops::{on_host, round_half_even};
use crate::kernel::narrow;
use crate::store::ActivationScheme;

/// How inputs of layers with int8 weights are rounded while the model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Int8 with a scale for each token, as compressed-tensors computes it. The largest value of a token is 127.5 steps: a negative one
    /// becomes -127 or -128 with the last bit of a division, so that two runs of a whole model whose sums differ by a bit can differ by
    /// such steps. vLLM's kernels take 127 steps.
    Token,
    /// Uint8 with a scale and a zero point for the whole tensor: ONNX's `DynamicQuantizeLinear`.
    Tensor,
}

impl Rounding {
    /// What a layer computes with whose weight asks for this scheme. ONNX has none of FP8 and FP4: there, activations stay floats.
    pub(crate) fn of(self, scheme: ActivationScheme, x: &Tensor) -> candle_core::Result<Tensor> {
        match (scheme, self) {
            (ActivationScheme::DynamicToken, _) => self.apply(x),
            (ActivationScheme::None | ActivationScheme::Static(_), _) | (_, Rounding::Tensor) => Ok(x.clone()),
            (_, Rounding::Token) => {
                // On the host, wherever the rest is computed: no device has all of these formats.
                let mut values = transfer::values::<f32>(x, Cause::Answers)?;
                floats(scheme, x.dim(D::Minus1)?.max(1), &mut values);
                let rounded = Tensor::from_vec(values, x.dims(), &candle_core::Device::Cpu)?.to_dtype(x.dtype())?;
                transfer::beside(&rounded, x.device(), Cause::Answers)
            }
        }
    }

    /// The numbers that the integers stand for.
    fn apply(self, x: &Tensor) -> candle_core::Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?;
        if !on_host(x.device()) {
            return self.by_operations(&wide)?.to_dtype(x.dtype());
        }
        let mut values = transfer::read::<f32>(&wide)?;
        match self {
            Rounding::Token => values.chunks_mut(x.dim(D::Minus1)?.max(1)).for_each(token),
            Rounding::Tensor => tensor(&mut values),
        }
        Tensor::from_vec(values, x.dims(), x.device())?.to_dtype(x.dtype())
    }

    /// The same in tensor operations.
    fn by_operations(self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Rounding::Token => {
                let scale = (x.abs()?.max_keepdim(D::Minus1)? / 127.5)?;
                // Only where all values are zero.
                let scale = (&scale + (scale.eq(0.0)?.to_dtype(DType::F32)? * f64::from(f32::EPSILON))?)?;
                round_half_even(&x.broadcast_div(&scale)?)?.clamp(-128f32, 127f32)?.broadcast_mul(&scale)
            }
            Rounding::Tensor => {
                let (low, high) = (x.min_all()?.minimum(0.0)?, x.max_all()?.maximum(0.0)?);
                let scale = ((high - &low)? / 255.0)?;
                // A tensor of zeros has steps of one.
                let scale = (&scale + scale.eq(0.0)?.to_dtype(DType::F32)?)?;
                let zero = round_half_even(&(low.neg()? / &scale)?)?.clamp(0f32, 255f32)?;
                let integers = round_half_even(&x.broadcast_div(&scale)?)?.broadcast_add(&zero)?.clamp(0f32, 255f32)?;
                integers.broadcast_sub(&zero)?.broadcast_mul(&scale)
            }
        }
    }
}

fn token(row: &mut [f32]) {
    let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = if largest / 127.5 > 0.0 { largest / 127.5 } else { f32::EPSILON };
    for x in row {
        *x = (*x / scale).round_ties_even().clamp(-128.0, 127.0) * scale;
    }
}

/// Tokens of `width` values as the floats of eight or four bits that they are rounded to, as compressed-tensors computes them.
fn floats(scheme: ActivationScheme, width: usize, values: &mut [f32]) {
    let e4m3 = |values: &mut [f32], scale: f32| values.iter_mut().for_each(|x| *x = narrow::from_e4m3(narrow::to_e4m3(*x / scale)) * scale);
    let e2m1 = |values: &mut [f32], scale: f32| values.iter_mut().for_each(|x| *x = narrow::from_e2m1(narrow::to_e2m1(*x / scale)) * scale);
    let largest = |values: &[f32]| values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let or = |scale: f32, least: f32| if scale > 0.0 { scale } else { least };
    match scheme {
        ActivationScheme::Float8Static(by) => e4m3(values, by.scale()),
        ActivationScheme::Float8Token | ActivationScheme::Float8Group(_) => {
            let group = if let ActivationScheme::Float8Group(size) = scheme { size.max(1) } else { width };
            for values in values.chunks_mut(width).flat_map(|token| token.chunks_mut(group)) {
                e4m3(values, or(largest(values) / narrow::E4M3_MAX, f32::EPSILON));
            }
        }
        ActivationScheme::Mxfp4 => {
            for values in values.chunks_mut(width).flat_map(|token| token.chunks_mut(32)) {
                e2m1(values, narrow::from_e8m0(narrow::e8m0_scale(largest(values), 2)));
            }
        }
        ActivationScheme::Nvfp4(by) => {
            for values in values.chunks_mut(width).flat_map(|token| token.chunks_mut(16)) {
                let scale = narrow::from_e4m3(narrow::to_e4m3(by.scale() * (largest(values) / narrow::E2M1_MAX)));
                e2m1(values, or(scale, 0.125) / by.scale());
            }
        }
        ActivationScheme::DynamicToken | ActivationScheme::Static(_) | ActivationScheme::None => {}
    }
}

fn tensor(values: &mut [f32]) {
    let (low, high) = values.iter().fold((0f32, 0f32), |(low, high), x| (low.min(*x), high.max(*x)));
    let (scale, zero) = range(low, high);
    for x in values {
        *x = (((*x / scale).round_ties_even() + zero).clamp(0.0, 255.0) - zero) * scale;
    }
}

/// Scale and zero point of 8 bits for a range that holds zero.
fn range(low: f32, high: f32) -> (f32, f32) {
    let scale = (high - low) / 255.0;
    if scale > 0.0 { (scale, (-low / scale).round_ties_even().clamp(0.0, 255.0)) } else { (1.0, 0.0) }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn rounded(rounding: Rounding, rows: &[[f32; 3]; 2]) -> Vec<f32> {
        let x = Tensor::new(rows, &Device::Cpu).unwrap();
        let fast = rounding.apply(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let slow = rounding.by_operations(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(fast.iter().zip(&slow).all(|(a, b)| (a - b).abs() < 1e-6), "{fast:?} {slow:?}");
        fast
    }

    #[test]
    fn tokens_are_rounded_bit_for_bit_as_by_compressed_tensors() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/int8/rows.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let bits = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let found = Rounding::Token.apply(&golden["in"]).unwrap();
        assert_eq!(bits(&found), bits(&golden["out"]));
    }

    #[test]
    fn floats_are_rounded_by_token_group_or_stored_scale() {
        use crate::store::Static;
        let rounded = |scheme, width, values: &[f32]| {
            let mut values = values.to_vec();
            floats(scheme, width, &mut values);
            values
        };
        // The largest value of a token is 448 steps.
        assert_eq!(rounded(ActivationScheme::Float8Token, 2, &[448.0, 17.0, -4.48, 0.0]), [448.0, 16.0, -4.48, 0.0]);
        assert_eq!(rounded(ActivationScheme::Float8Group(1), 2, &[448.0, 17.0, 0.0, 1.0]), [448.0, 17.0, 0.0, 1.0]);
        assert_eq!(rounded(ActivationScheme::Float8Static(Static::new(1.0, None)), 2, &[1000.0, 17.0, 18.0, -19.0]), [448.0, 16.0, 18.0, -20.0]);
        let example = [0.5, -1.0, 6.0, 0.0, -6.0, 3.0, 1.5, -0.5, 2.0, 4.0, -2.0, -3.0, -4.0, 1.0, 0.25, 0.3];
        let wanted = [0.5, -1.0, 6.0, 0.0, -6.0, 3.0, 1.5, -0.5, 2.0, 4.0, -2.0, -3.0, -4.0, 1.0, 0.0, 0.5];
        assert_eq!(rounded(ActivationScheme::Nvfp4(Static::new(448.0, None)), 16, &example), wanted);
        assert_eq!(rounded(ActivationScheme::Mxfp4, 16, &example), wanted);
        // Left as it is by ONNX.
        let x = Tensor::new(&[[448f32, 17.0]], &Device::Cpu).unwrap();
        let of = |rounding: Rounding| rounding.of(ActivationScheme::Float8Token, &x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!((of(Rounding::Tensor), of(Rounding::Token)), (vec![448.0, 17.0], vec![448.0, 16.0]));
    }

    /// `scripts/goldens-narrow` makes the file.
    #[test]
    fn floats_are_rounded_bit_for_bit_as_by_compressed_tensors() {
        use crate::store::Static;
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/narrow-rows.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let values = |name: &str| golden[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let stored = |name: &str| Static::new(values(name)[0], None);
        for (name, scheme) in [
            ("FP8_DYNAMIC", ActivationScheme::Float8Token),
            ("FP8_BLOCK", ActivationScheme::Float8Group(128)),
            ("FP8", ActivationScheme::Float8Static(stored("FP8_scale"))),
            ("MXFP4", ActivationScheme::Mxfp4),
            ("NVFP4", ActivationScheme::Nvfp4(stored("NVFP4_scale"))),
        ] {
            let mut found = values("in");
            floats(scheme, 256, &mut found);
            for (at, (found, wanted)) in found.iter().zip(values(name)).enumerate() {
                assert!(*found == wanted, "{name} at {at}: {found} is not {wanted}");
            }
        }
    }

    #[test]
    fn each_row_has_its_own_scale_or_all_share_one() {
        let rows = [[1.275, -0.5, 0.004], [0.0, 0.0, 0.0]];
        // The largest value would be 127.5 steps and is cut to 127.
        let token = rounded(Rounding::Token, &rows);
        assert!((token[0] - 1.27).abs() < 1e-6 && (token[1] + 0.5).abs() < 1e-6 && token[2] == 0.0 && token[3..] == [0.0; 3]);
        rounded(Rounding::Tensor, &[[0.1, 2.0, -3.0], [-2.4, 1.34, 0.5]]);
        // Halves go to even numbers.
        assert_eq!(rounded(Rounding::Token, &[[127.5, 0.5, -2.5], [127.5, 1.5, 6.5]]), [127.0, 0.0, -2.0, 127.0, 2.0, 6.0]);
        assert_eq!(rounded(Rounding::Tensor, &[[0.0, 255.0, 0.5], [2.5, 1.5, 6.5]]), [0.0, 255.0, 0.0, 2.0, 2.0, 6.0]);
        // The example of DynamicQuantizeLinear in ONNX's documentation: 153, 255, 0, 26, 221, 179 around 153.
        let x = Tensor::new(&[0.0f32, 2.0, -3.0, -2.5, 1.34, 0.5], &Device::Cpu).unwrap();
        let tensor = Rounding::Tensor.apply(&x).unwrap().to_vec1::<f32>().unwrap();
        let wanted = [153, 255, 0, 26, 221, 179].map(|q: i32| (q - 153) as f32 * 0.019_607_844);
        assert!(tensor.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{tensor:?} {wanted:?}");
    }
}
