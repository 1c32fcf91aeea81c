//! Fake quantization of weights in training: the values that a weight has once it is written.

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::fixed_codes::FixedCodes;
use super::floats::failed;
use super::{floats, scales};
use crate::error::{Error, Result};
use crate::exec::Residence;
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::{ScalarOps, round_half_even};
use crate::kernel::quantize;
use crate::store::{Codes, DType as Stored, Encoding, FloatFormat, Granularity, QuantizationSpec, ScaleFormat, Scales, Weight};

/// Fake quantization of a weight with a straight-through estimator (Bengio et al., *Estimating or
/// Propagating Gradients Through Stochastic Neurons*, 2013; Jacob et al., *Quantization and Training of
/// Neural Networks*, 2018). Weights beyond the range of their scale keep their gradient, so that they can
/// return.
pub(super) struct Rounding {
    /// The stored scales before training.
    scales: Scales,
    /// Stored scales as a column, one row for each run of elements with the same scale.
    scale: Tensor,
    /// Zero points, in the shape of `scale`.
    zero: Tensor,
    codes: Codes,
    scale_format: ScaleFormat,
    /// Dtype of floating-point scales.
    scale_dtype: DType,
    /// Dtype that the executor keeps the values in.
    value_dtype: DType,
    learned: ScaleRuns,
}

/// Which runs share a learned scale.
struct ScaleRuns {
    /// Number of learned scales.
    count: usize,
    /// Number of elements per learned scale.
    elements: usize,
    /// For each run, the index of its learned scale; `None` if each run has its own.
    of_run: Option<Tensor>,
}

impl ScaleRuns {
    fn new(spec: &QuantizationSpec, shape: &[usize], scales: &Scales, device: &Device) -> candle_core::Result<ScaleRuns> {
        let (runs, rows) = (scales.scales.len(), shape.first().copied().unwrap_or(1));
        // A weight in memory has a scale for each row of a block.
        let Granularity::Block([high, _]) = spec.granularity else { return Ok(ScaleRuns { count: runs, elements: scales.run, of_run: None }) };
        let (high, groups) = (high.clamp(1, rows.max(1)), runs / rows.max(1));
        let of_run: Vec<u32> = (0..runs).map(|run| (run / groups.max(1) / high * groups + run % groups.max(1)) as u32).collect();
        let of_run = transfer::to_device(&Tensor::from_vec(of_run, runs, &Device::Cpu)?, device, Cause::Weights)?;
        Ok(ScaleRuns { count: rows.div_ceil(high) * groups, elements: scales.run * high, of_run: Some(of_run) })
    }
}

impl Rounding {
    /// The rounding of a weight that is written as codes with scales; `None` for floats. Fails for palettes,
    /// whose values do not depend on scales.
    pub(super) fn from_weight(name: &str, weight: &Weight, device: &Device) -> Result<Option<Rounding>> {
        let Encoding::Quantized(spec) = &weight.encoding else { return Ok(None) };
        require_trainable(name, weight)?;
        let Some(scales) = weight.scales()? else { return Ok(None) };
        let value_dtype = Residence::Stored.dtype(weight, DType::F32);
        let rounding = Rounding::new(scales, spec, (&weight.shape, value_dtype), device).map_err(|e| Error::candle(format!("tensor `{name}`"), e))?;
        rounding.require_scales(name, &rounding.scales.scales, "quantize the floats again, or add the tensor to `ignore`")?;
        Ok(Some(rounding))
    }

    fn new(scales: Scales, spec: &QuantizationSpec, (shape, value_dtype): (&[usize], DType), device: &Device) -> candle_core::Result<Rounding> {
        let column = |values: &[f32]| Tensor::from_slice(values, (values.len(), 1), device);
        let scale_dtype = match spec.scale_dtype {
            Stored::BF16 => DType::BF16,
            Stored::F16 => DType::F16,
            _ => DType::F32,
        };
        Ok(Rounding {
            scale: column(&scales.scales)?,
            zero: column(&scales.zero_points)?,
            codes: spec.codes,
            scale_format: spec.scale_format(),
            scale_dtype,
            value_dtype,
            learned: ScaleRuns::new(spec, shape, &scales, device)?,
            scales,
        })
    }

    /// Rejects scales that their format cannot represent, or with which values are not numbers.
    fn require_scales(&self, name: &str, scales: &[f32], hint: &str) -> Result<()> {
        // Groups of zeros have the smallest power of two, which is subnormal.
        let is_exempt = |scale: f32| self.scale_format == ScaleFormat::PowerOfTwo && scale > 0.0;
        scales.iter().filter(|scale| !is_exempt(**scale)).try_for_each(|scale| scales::require_scale(name, *scale, hint))
    }

    /// The stored scales, multiplied by the exponentials of the learned logarithms and rounded to the format
    /// that they are written in.
    pub(super) fn scale(&self, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let Some(logarithms) = learned else { return Ok(self.scale.clone()) };
        let factors = match &self.learned.of_run {
            Some(of_run) => logarithms.exp()?.index_select(of_run, 0)?,
            None => logarithms.exp()?,
        };
        let scale = (&self.scale * factors.reshape(self.scale.dims())?)?;
        match self.scale_format {
            ScaleFormat::Float => scale.to_dtype(self.scale_dtype)?.to_dtype(DType::F32),
            format => on_host(&scale, |values| values.iter_mut().for_each(|scale| *scale = format.nearest(*scale))),
        }
    }

    /// Values of a step of the codes with these stored scales.
    fn steps_of(&self, scale: &Tensor) -> candle_core::Result<Tensor> {
        if self.scales.global_scale == 1.0 { Ok(scale.clone()) } else { scale.div_scalar(self.scales.global_scale.into()) }
    }

    /// The nearest numbers that the codes represent, minus the zero points, of a weight in units of its steps
    /// `[runs, elements of a run]`.
    fn nearest(&self, units: &Tensor) -> candle_core::Result<Tensor> {
        match self.codes {
            Codes::Float(format) => on_host(units, |values| values.par_chunks_mut(floats::CHUNK).for_each(|values| nearest_floats(format, values))),
            codes => {
                let [least, most] = quantize::bounds(codes.bits());
                round_half_even(units)?.broadcast_add(&self.zero)?.clamp_scalar(least.into(), most.into())?.broadcast_sub(&self.zero)
            }
        }
    }

    /// 1 where rounding changes a weight in units of its steps by at most half of a step, so that the scale
    /// determines its rounding error, and 0 where the weight is clipped.
    fn is_in_range(&self, units: &Tensor, nearest: &Tensor) -> candle_core::Result<Tensor> {
        match self.codes {
            Codes::Float(format) => units.abs()?.le_scalar(format.codec().clipping_limit().into()),
            _ => round_half_even(units)?.eq(nearest),
        }
    }

    /// The nearest numbers of the codes, in the shape of the weight. BF16 represents them exactly, because
    /// they have at most 8 significant bits.
    pub(super) fn codes(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        let units = self.runs(weight)?.broadcast_div(&self.steps_of(&self.scale)?)?;
        self.nearest(&units)?.reshape(weight.dims())?.to_dtype(DType::BF16)
    }

    /// Quantizes and dequantizes a weight.
    pub(super) fn apply(&self, weight: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let step = self.steps_of(&self.scale(learned)?)?;
        self.values(&self.nearest(&self.runs(weight)?.broadcast_div(&step)?)?, &step)?.reshape(weight.dims())
    }

    /// The values of codes, as the executor reads them from a file.
    fn values(&self, numbers: &Tensor, step: &Tensor) -> candle_core::Result<Tensor> {
        numbers.broadcast_mul(step)?.to_dtype(self.value_dtype)?.to_dtype(DType::F32)
    }

    /// The codes to write, one byte each, of a weight or of its fixed codes, with their scales.
    fn encode(&self, weight: &Tensor, is_fixed: bool, learned: Option<&Tensor>) -> candle_core::Result<(Vec<i8>, Vec<f32>)> {
        let scale = self.scale(learned)?;
        let numbers = match is_fixed {
            true => self.runs(weight)?,
            false => self.nearest(&self.runs(weight)?.broadcast_div(&self.steps_of(&scale)?)?)?,
        };
        let codes = match self.codes {
            Codes::Float(format) => {
                let numbers = transfer::values::<f32>(&numbers, Cause::State)?;
                numbers.into_iter().map(|number| signed_code(format, number) as i8).collect()
            }
            _ => transfer::values::<f32>(&numbers.broadcast_add(&self.zero)?, Cause::State)?.into_iter().map(|number| number as i8).collect(),
        };
        Ok((codes, transfer::values(&scale, Cause::State)?))
    }

    /// A weight of a model with the codes of trained values or with fixed codes, and with their scales.
    pub(super) fn write(&self, (name, weight): (&str, &Weight), values: &Tensor, is_fixed: bool, learned: Option<&Tensor>) -> Result<Weight> {
        let (codes, scales) = self.encode(values, is_fixed, learned).map_err(failed(name))?;
        self.require_scales(name, &scales, scales::LEARNED)?;
        weight.with_integers(name, codes, &Scales { scales, ..self.scales.clone() })
    }

    fn runs(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        weight.to_dtype(DType::F32)?.reshape((self.scales.scales.len(), self.scales.run))
    }

    /// Gradient with respect to the logarithms of the scales, from that of the rounded weight. Rounding of
    /// the scales to their format passes it unchanged. See
    /// [`LearnedFakeQuantize`](crate::ir::ops::LearnedFakeQuantize).
    pub(super) fn scale_gradient(&self, weight: &Tensor, learned: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let step = self.steps_of(&self.scale(Some(learned))?)?;
        let units = self.runs(weight)?.broadcast_div(&step)?;
        let nearest = self.nearest(&units)?;
        // Units of a group of zeros can be infinite.
        let inside = self.is_in_range(&units, &nearest)?.where_cond(&units, &units.zeros_like()?)?;
        self.logarithm_gradient(gradient, &(nearest - inside)?, &step)
    }

    /// Gradient with respect to the logarithms of the scales, from that of the weight and the derivatives
    /// `[runs, elements of a run]` of the weight with respect to its steps.
    fn logarithm_gradient(&self, gradient: &Tensor, derivatives: &Tensor, step: &Tensor) -> candle_core::Result<Tensor> {
        let of_runs = (self.runs(gradient)? * derivatives.broadcast_mul(step)?)?.sum(1)?;
        let sums = match &self.learned.of_run {
            Some(of_run) => Tensor::zeros(self.learned.count, DType::F32, of_runs.device())?.index_add(of_run, &of_runs, 0)?,
            None => of_runs,
        };
        sums.affine(scales::gradient_factor(self.learned.elements), 0.0)
    }
}

impl FixedCodes for Rounding {
    fn learned_scales(&self) -> usize {
        self.learned.count
    }

    fn dequantize(&self, codes: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        self.values(&self.runs(codes)?, &self.steps_of(&self.scale(learned)?)?)?.reshape(codes.dims())
    }

    fn code_scale_gradient(&self, codes: &Tensor, learned: Option<&Tensor>, gradient: &Tensor) -> candle_core::Result<Tensor> {
        self.logarithm_gradient(gradient, &self.runs(codes)?, &self.steps_of(&self.scale(learned)?)?)
    }

    fn written(&self, (name, weight): (&str, &Weight), codes: &Tensor, learned: Option<&Tensor>) -> Result<Weight> {
        self.write((name, weight), codes, true, learned)
    }
}

/// Rejects weights whose codes are not trained: indices into palettes.
pub(super) fn require_trainable(name: &str, weight: &Weight) -> Result<()> {
    match &weight.encoding {
        Encoding::Quantized(spec) if spec.codes.is_palette() => Err(Error::tensor(
            name,
            format!("is {}, whose indices and palettes are not trained", weight.describe()),
            "train before `palettize`, exclude it with `ignore`, or train `adapter: { rank: 16, merge: false }`",
        )),
        _ => Ok(()),
    }
}

/// Replaces values by the nearest numbers of a format, with their signs, also those of zeros.
fn nearest_floats(format: FloatFormat, values: &mut [f32]) {
    let units = values.to_vec();
    format.round(values, 1.0);
    values.iter_mut().zip(units).for_each(|(value, unit)| *value = value.copysign(unit));
}

/// The code of a number of a format. Negative zeros have the code of small negative numbers, which formats
/// without a negative zero round to it.
fn signed_code(format: FloatFormat, number: f32) -> u8 {
    let is_negative_zero = number == 0.0 && number.is_sign_negative();
    format.codec().encode(if is_negative_zero { -f32::MIN_POSITIVE } else { number })
}

/// Changes the values of a tensor on the host, because no device has kernels for all formats.
fn on_host(tensor: &Tensor, change: impl FnOnce(&mut [f32])) -> candle_core::Result<Tensor> {
    let mut values = transfer::values::<f32>(tensor, Cause::Weights)?;
    change(&mut values);
    transfer::move_to(&Tensor::from_vec(values, tensor.dims(), &Device::Cpu)?, tensor.device(), Cause::Weights)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ActivationScheme;

    fn spec(codes: Codes, granularity: Granularity, scale_dtype: Stored) -> QuantizationSpec {
        QuantizationSpec { codes, granularity, symmetric: true, scale_dtype, activations: ActivationScheme::None }
    }

    /// PyTorch's gradients in float64 (`scripts/goldens fake-quantization`).
    #[test]
    fn weights_and_gradients_are_those_of_pytorch() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/fake-quantization.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let float = |format, granularity, scale_dtype| spec(Codes::Float(format), granularity, scale_dtype);
        for (name, spec) in [
            ("int4", spec(Codes::Integer(4), Granularity::Group(16), Stored::F32)),
            ("int8", spec(Codes::INT8, Granularity::Channel, Stored::F32)),
            ("fp8-tensor", float(FloatFormat::E4m3, Granularity::Tensor, Stored::F32)),
            ("fp8-channel", float(FloatFormat::E4m3, Granularity::Channel, Stored::F32)),
            ("fp8-block", float(FloatFormat::E4m3, Granularity::Block([4, 32]), Stored::F32)),
            ("nvfp4", float(FloatFormat::E2m1, Granularity::Group(16), Stored::F8_E4M3)),
            ("mxfp4", float(FloatFormat::E2m1, Granularity::Group(32), Stored::F8_E8M0)),
            ("mxfp6", float(FloatFormat::E2m3, Granularity::Group(32), Stored::F8_E8M0)),
            ("mxfp8", float(FloatFormat::E4m3, Granularity::Group(32), Stored::F8_E8M0)),
        ] {
            let tensor = |part: &str| golden[&format!("weights/{name}/{part}")].clone();
            let wide = |tensor: &Tensor| tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            let (weight, gradient) = (golden["weights/in"].to_dtype(DType::F32).unwrap(), golden["weights/gradient"].to_dtype(DType::F32).unwrap());
            let stored: Vec<f32> = wide(&tensor("scales")).into_iter().map(|scale| scale as f32).collect();
            let count = stored.len();
            let scales = Scales {
                run: weight.elem_count() / count,
                scales: stored,
                zero_points: vec![0.0; count],
                global_scale: golden.get(&format!("weights/{name}/global")).map_or(1.0, |global| wide(global)[0] as f32),
            };
            let rounding = Rounding::new(scales, &spec, (weight.dims(), DType::F32), &Device::Cpu).unwrap();
            let logarithms = tensor("logarithms").to_dtype(DType::F32).unwrap();
            assert_eq!(rounding.learned_scales(), logarithms.elem_count(), "{name}");
            let factor = scales::gradient_factor(weight.elem_count() / logarithms.elem_count());
            let close = |what: &str, found: Vec<f64>, expected: Vec<f64>, room: f64| {
                let largest = expected.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                assert!(largest > 0.0 && found.len() == expected.len(), "{name}: {what}");
                let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far <= room * largest, "{name}: {what} differs by {far} of {largest}");
            };
            close("the weight", wide(&rounding.apply(&weight, Some(&logarithms)).unwrap()), wide(&tensor("rounded")), 1e-6);
            let of_scales = rounding.scale_gradient(&weight, &logarithms, &gradient).unwrap();
            close("the gradient", wide(&of_scales).into_iter().map(|x| x / factor).collect(), wide(&tensor("scale-gradient")), 1e-4);
            // The written weight equals the trained one, also if the codes are fixed.
            let (codes, scales) = rounding.encode(&weight, false, Some(&logarithms)).unwrap();
            assert!(scales.iter().all(|scale| *scale > 0.0), "{name}");
            let source = Weight::computed(name, Stored::F32, weight.dims().to_vec(), &vec![0.0; weight.elem_count()]).unwrap();
            let kept = Scales { scales, ..rounding.scales.clone() };
            let written = source.quantized(name, spec.clone(), codes, &kept).unwrap();
            let values: Vec<f64> = written.floats(name).unwrap().into_iter().map(f64::from).collect();
            assert_eq!(values, wide(&rounding.apply(&weight, Some(&logarithms)).unwrap()), "{name}");
            let fixed = rounding.codes(&weight).unwrap();
            assert_eq!(wide(&rounding.dequantize(&fixed, None).unwrap()), wide(&rounding.apply(&weight, None).unwrap()), "{name}");
            assert_eq!(rounding.encode(&fixed, true, None).unwrap(), rounding.encode(&weight, false, None).unwrap(), "{name}");
        }
    }

    /// Scales that the formats of one byte represent are not changed.
    #[test]
    fn scales_in_training_have_the_format_of_files() {
        for (format, scale, nearest) in [
            (ScaleFormat::PowerOfTwo, 0.3, 0.25),
            (ScaleFormat::Relative, 1e6, 448.0),
            (ScaleFormat::Relative, 17.1, 18.0),
            (ScaleFormat::Relative, 1e-9, 2f32.powi(-9)),
        ] {
            assert_eq!((format.nearest(scale), format.nearest(nearest)), (nearest, nearest), "{format:?} {scale}");
        }
    }

    /// A weight whose codes are fixed is written with the same bytes.
    #[test]
    fn numbers_have_one_code() {
        for format in FloatFormat::ALL {
            let row = format.row();
            let codes: Vec<u8> = (0..=u8::MAX).take(1 << format.bits()).filter(|code| !row.nans.contains(code)).collect();
            let mut numbers = vec![0.0; codes.len()];
            format.dequantize(&codes, &mut numbers, 1.0);
            nearest_floats(*format, &mut numbers);
            assert_eq!(numbers.into_iter().map(|number| signed_code(*format, number)).collect::<Vec<_>>(), codes, "{format:?}");
        }
    }

    /// The scale of a group of zeros is the smallest power of two, with which other weights are clipped.
    #[test]
    fn weights_leave_a_group_of_zeros_without_infinities() {
        let spec = spec(Codes::Float(FloatFormat::E2m1), Granularity::Group(32), Stored::F8_E8M0);
        let scales = Scales { run: 32, scales: vec![2f32.powi(-127)], zero_points: vec![0.0], global_scale: 1.0 };
        let rounding = Rounding::new(scales, &spec, (&[1, 32], DType::F32), &Device::Cpu).unwrap();
        rounding.require_scales("w", &rounding.scales.scales, "").unwrap();
        let weight = (Tensor::ones((1, 32), DType::F32, &Device::Cpu).unwrap() * 3.0).unwrap();
        let logarithms = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        for tensor in [rounding.apply(&weight, None).unwrap(), rounding.scale_gradient(&weight, &logarithms, &weight).unwrap()] {
            assert!(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|value| value.is_finite()), "{tensor}");
        }
    }
}
