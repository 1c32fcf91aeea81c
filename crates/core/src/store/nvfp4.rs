//! NVFP4 weights of ModelOpt (`quant_method: modelopt`).
//!
//! A matrix `x` U8 `[out, in / 2]` contains two E2M1 codes per byte, and `x_scale` F8_E4M3 `[out, in / 16]`
//! the scales of groups. A value is the product of its code, its scale and `x_scale_2`. The input of the
//! layer is quantized relative to `input_scale` of the module, if that is stored. compressed-tensors stores
//! the reciprocals of both numbers.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::checkpoint::INCOMPLETE;
use super::original_format::{NVFP4_GROUP, StoredScalar};
use super::quantized_reader::positive;
use super::{
    ActivationScheme, Checkpoint, Codes, DType, Encoding, FloatFormat, Granularity, Nvfp4Config, OriginalFormat, QuantizationSpec, QuantizedReader, RawTensor,
    Static, StoredNvfp4, Weight,
};
use crate::error::{Error, Result};

const SCALE: &str = "_scale";
const FACTOR: &str = "_scale_2";
const INPUT: &str = "input_scale";

/// Removes all NVFP4 weights from a checkpoint that has a configuration for them. `floats` is the dtype of
/// their values if the configuration does not specify it.
pub(super) fn take(checkpoint: &mut Checkpoint, floats: DType) -> Result<Vec<(String, Weight)>> {
    let Some(config) = checkpoint.nvfp4 else { return Ok(Vec::new()) };
    let names: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(FACTOR)).map(str::to_owned).collect();
    names.into_iter().map(|name| weight(checkpoint, config, floats, &name).map(|weight| (name, weight))).collect()
}

fn weight(checkpoint: &mut Checkpoint, config: Nvfp4Config, floats: DType, name: &str) -> Result<Weight> {
    let names = ["", SCALE, FACTOR].map(|suffix| format!("{name}{suffix}"));
    let [_, _, factor_name] = &names;
    let missing = |part: &String| Error::tensor(part, format!("is missing, but `{factor_name}` is the factor of its scales"), INCOMPLETE);
    let [codes, scales, factor] = names.each_ref().map(|part| checkpoint.tensors.remove(part).ok_or_else(|| missing(part)));
    let (codes, scales, factor) = (codes?, scales?, factor?);
    let shape = match (&codes.shape[..], &scales.shape[..]) {
        ([rows, half], [scaled, groups]) if rows == scaled && codes.elements() > 0 && half.checked_mul(2) == groups.checked_mul(NVFP4_GROUP) => {
            half.checked_mul(2).map(|row| vec![*rows, row])
        }
        _ => None,
    };
    let Some(shape) = shape.filter(|_| (codes.dtype, scales.dtype) == (DType::U8, DType::F8_E4M3)) else {
        let reason = format!("is not packed as NVFP4: codes {} {:?}, scales {} {:?}", codes.dtype, codes.shape, scales.dtype, scales.shape);
        return Err(Error::tensor(name, reason, INCOMPLETE));
    };
    let (factor, global_scale) = scalar(factor_name, "weight_scale_2", &factor)?;
    let module = name.strip_suffix("weight").unwrap_or(name);
    let input_name = format!("{module}{INPUT}");
    let codes_of = Codes::Float(FloatFormat::E2m1);
    let (input, activations) = match checkpoint.tensors.remove(&input_name) {
        Some(tensor) => {
            let (input, reciprocal) = scalar(&input_name, INPUT, &tensor)?;
            (Some(input), codes_of.static_activations(Static::new(reciprocal, None)))
        }
        None if config.requires_inputs => {
            let reason = "is missing, but config.json specifies quantization of this layer's input (`quant_algo` of NVFP4)";
            return Err(Error::tensor(&input_name, reason, INCOMPLETE));
        }
        None => (None, ActivationScheme::None),
    };
    let dtype = config.dtype.unwrap_or(floats);
    let granularity = Granularity::Group(NVFP4_GROUP);
    let spec = QuantizationSpec { codes: codes_of, granularity, symmetric: true, scale_dtype: DType::F8_E4M3, activations };
    let original_format = OriginalFormat::Nvfp4(StoredNvfp4 { factor, input });
    let scalars = [Some(factor), input].into_iter().flatten().map(|scalar| scalar.dtype.bitsize() as u64 / 8).sum::<u64>();
    let bytes = codes.bytes().saturating_add(scales.bytes()).saturating_add(scalars);
    let stored_as = original_format.parts(name, &shape).into_iter().map(|part| part.name).collect();
    let reader = QuantizedReader {
        values: codes,
        scales,
        zero_points: None,
        global_scale,
        packed: true,
        shape: shape.clone(),
        affine: spec.clone(),
        columns: NVFP4_GROUP,
        dtype,
    };
    let mut weight = Weight::new(dtype, shape, Encoding::Quantized(spec), Arc::new(reader));
    (weight.stored_bytes, weight.stored_as, weight.original_format) = (bytes, stored_as, Some(original_format));
    Ok(weight)
}

/// A stored number, and its reciprocal.
fn scalar(name: &str, part: &'static str, tensor: &RawTensor) -> Result<(StoredScalar, f32)> {
    let value = positive(name, tensor)?;
    let reciprocal = value.recip();
    if !reciprocal.is_normal() {
        return Err(Error::tensor(name, format!("is {value:e}, whose reciprocal is not a number of 32 bits"), INCOMPLETE));
    }
    Ok((StoredScalar { name: part, dtype: tensor.dtype, rank: tensor.shape.len(), bits: value.to_bits() }, reciprocal))
}
