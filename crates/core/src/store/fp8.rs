//! FP8 weights of checkpoints with `quant_method: fp8`, as published for DeepSeek-V3, Qwen3 and MiniMax-M2.
//!
//! A matrix `x` F8_E4M3 `[out, in]` has scales in `x_scale_inv`, or `x_scale` in older files, with which
//! codes are multiplied: one for each block of `weight_block_size`, of which those at the end may be smaller,
//! one per row, or one for the matrix. Experts in one tensor `[experts, out, in]` have the scales of all
//! experts in one tensor.
//!
//! Matrices are quantized weights. If the last block of a row has fewer columns, their blocks are narrower,
//! and several of them share a scale of the file. [`Granularity`] has no blocks of a third axis, so experts
//! are dense weights, dequantized one expert at a time.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::block::greatest_common_divisor;
use super::checkpoint::INCOMPLETE;
use super::original_format::{StoredScalar, scale_shape};
use super::quantized_reader::positive;
use super::stored_experts::StoredExperts;
use super::{
    ActivationScheme, BlockSink, Checkpoint, Codes, DType, Encoding, FloatFormat, FloatScale, Fp8Config, Granularity, OriginalFormat, QuantizationSpec,
    QuantizedReader, RawTensor, Static, StoredFp8, Weight, WeightSource,
};
use crate::error::{Error, Result};
use crate::kernel::convert;

const FORMAT: FloatFormat = FloatFormat::E4m3;
/// Suffixes of scales.
const SUFFIXES: [&str; 2] = ["_scale_inv", "_scale"];
/// Names of the scales of static activations in a module.
const INPUTS: [&str; 2] = ["activation_scale", "input_scale"];

/// A projection of all experts.
struct Fp8Experts {
    stored: StoredExperts,
    /// Number of inputs.
    row: usize,
    /// Rows and inputs that share a scale.
    block: [usize; 2],
}

/// Removes all FP8 weights from a checkpoint that has a configuration for them. `floats` is the dtype of
/// their values if the configuration does not specify it.
pub(super) fn take(checkpoint: &mut Checkpoint, floats: DType) -> Result<Vec<(String, Weight)>> {
    let Some(config) = checkpoint.fp8 else { return Ok(Vec::new()) };
    let has_codes = |tensor: &RawTensor| tensor.dtype == DType::F8_E4M3 && tensor.elements() > 0;
    let names: Vec<String> = checkpoint.tensors.iter().filter(|(_, tensor)| has_codes(tensor)).map(|(name, _)| name.clone()).collect();
    let weights = names.into_iter().map(|name| weight(checkpoint, config, floats, &name).map(|weight| (name, weight))).collect::<Result<_>>()?;
    let [suffix, _] = SUFFIXES;
    if let Some((scales, name)) = checkpoint.tensors.keys().find_map(|scales| Some((scales, scales.strip_suffix(suffix)?))) {
        let found = checkpoint.tensors.get(name).map_or("is missing".to_owned(), |tensor| format!("is {}", tensor.dtype));
        return Err(Error::tensor(scales, format!("contains scales of FP8, but `{name}` {found}"), INCOMPLETE));
    }
    Ok(weights)
}

fn weight(checkpoint: &mut Checkpoint, config: Fp8Config, floats: DType, name: &str) -> Result<Weight> {
    let scale_name = |suffix: &str| format!("{name}{suffix}");
    let suffix = SUFFIXES.into_iter().find(|suffix| checkpoint.tensors.contains_key(&scale_name(suffix)));
    let parts = suffix.and_then(|suffix| Some((suffix, checkpoint.tensors.remove(name)?, checkpoint.tensors.remove(&scale_name(suffix))?)));
    let Some((suffix, codes, scales)) = parts else {
        let [expected, _] = SUFFIXES.map(scale_name);
        return Err(Error::tensor(&expected, format!("is missing, but `{name}` contains FP8 codes, and config.json describes weights in FP8"), INCOMPLETE));
    };
    let shape = codes.shape.clone();
    let is_stored = |granularity: &Granularity| scale_shape(&shape, *granularity, scales.shape.len()).is_some_and(|expected| expected == scales.shape);
    let Some(granularity) = config.granularities().find(is_stored).filter(|_| matches!(shape.len(), 2 | 3)) else {
        let blocks = config.block.map_or("one scale".to_owned(), |[high, wide]| format!("blocks of {high} x {wide}"));
        let reason = format!("scales of shape {:?} for FP8 codes of shape {shape:?}, and config.json specifies {blocks} (`weight_block_size`)", scales.shape);
        return Err(Error::tensor(name, reason, "correct `quantization_config` in config.json, or start from the original checkpoint"));
    };
    if !matches!(scales.dtype, DType::F32 | DType::BF16 | DType::F16) {
        let reason = format!("has scales of type {}, which is not supported", scales.dtype);
        return Err(Error::tensor(name, reason, "FP8 weights can have scales in F32, BF16 or F16; start from a checkpoint with one of these"));
    }
    let input = if config.has_static_inputs && shape.len() == 2 { input(checkpoint, name)? } else { None };
    let dtype = config.dtype.unwrap_or(floats);
    let stored = StoredFp8 { suffix, scale_dtype: scales.dtype, granularity, rank: scales.shape.len(), input };
    let original_format = OriginalFormat::Fp8(stored);
    let stored_as = original_format.parts(name, &shape).into_iter().map(|part| part.name).collect();
    let input_bytes = input.map_or(0, |input| input.dtype.bitsize() as u64 / 8);
    let bytes = codes.bytes().saturating_add(scales.bytes()).saturating_add(input_bytes);
    let (encoding, source): (Encoding, Arc<dyn WeightSource>) = match shape[..] {
        [experts, rows, row] => {
            let block = match granularity {
                Granularity::Block([high, wide]) => [high, wide],
                Granularity::Channel | Granularity::Group(_) => [1, row],
                Granularity::Tensor => [rows, row],
            };
            let stored = StoredExperts { codes, scales, experts, each: rows.saturating_mul(row), dtype };
            (Encoding::Dense, Arc::new(Fp8Experts { stored, row, block }))
        }
        _ => {
            let (spec, columns) = encoding(stored, &shape);
            let reader = QuantizedReader {
                values: codes,
                scales,
                zero_points: None,
                global_scale: 1.0,
                packed: false,
                shape: shape.clone(),
                affine: spec.clone(),
                columns,
                dtype,
            };
            (Encoding::Quantized(spec), Arc::new(reader))
        }
    };
    let mut weight = Weight::new(dtype, shape, encoding, source);
    weight.stored_type = (weight.encoding == Encoding::Dense).then_some(OriginalFormat::FP8);
    (weight.stored_bytes, weight.stored_as, weight.original_format) = (bytes, stored_as, Some(original_format));
    Ok(weight)
}

/// The encoding of a matrix, and the number of columns that share a scale in the file.
fn encoding(stored: StoredFp8, shape: &[usize]) -> (QuantizationSpec, usize) {
    let row = shape.last().copied().unwrap_or(1);
    let (granularity, columns) = match stored.granularity {
        Granularity::Block([high, wide]) => {
            let wide = wide.min(row);
            (Granularity::Block([high, greatest_common_divisor(row, wide)]), wide)
        }
        other => (other, other.run(row, row)),
    };
    let scale = match (stored.input, stored.granularity) {
        (Some(input), _) => FloatScale::Static(Static::new(f32::from_bits(input.bits), None)),
        // compressed-tensors requires groups of activations to divide a row.
        (None, Granularity::Block([_, wide])) if row.is_multiple_of(wide) => FloatScale::Group(wide),
        (None, _) => FloatScale::Token,
    };
    let activations = ActivationScheme::Float(FORMAT, scale);
    (QuantizationSpec { codes: Codes::Float(FORMAT), granularity, symmetric: true, scale_dtype: stored.scale_dtype, activations }, columns)
}

/// Removes the static scale of a layer's input from the checkpoint.
fn input(checkpoint: &mut Checkpoint, name: &str) -> Result<Option<StoredScalar>> {
    let module = name.strip_suffix("weight").unwrap_or(name);
    let found = INPUTS.into_iter().find_map(|input| Some((input, checkpoint.tensors.remove(&format!("{module}{input}"))?)));
    let Some((input, tensor)) = found else {
        let [expected, other] = INPUTS;
        let reason = format!("is missing, but config.json specifies static quantization of this layer's input, whose scale is this tensor or `{other}`");
        return Err(Error::tensor(&format!("{module}{expected}"), reason, INCOMPLETE));
    };
    let bits = positive(&format!("{module}{input}"), &tensor)?.to_bits();
    Ok(Some(StoredScalar { name: input, dtype: tensor.dtype, rank: tensor.shape.len(), bits }))
}

impl Fp8Experts {
    /// Dequantizes one expert.
    fn decode(&self, codes: &[u8], scales: &[u8], values: &mut [u8]) {
        let [high, wide] = self.block.map(|size| size.max(1));
        let columns = self.row.div_ceil(wide);
        let size = |dtype: DType| (dtype.bitsize() / 8).max(1);
        let (row, line) = (self.row.max(1), columns.saturating_mul(size(self.stored.scales.dtype)).max(1));
        let (mut floats, mut factors) = (vec![0f32; row], vec![0f32; columns]);
        let bands = codes.chunks(row.saturating_mul(high)).zip(values.chunks_mut(row.saturating_mul(high).saturating_mul(size(self.stored.dtype))));
        for ((codes, values), scales) in bands.zip(scales.chunks(line)) {
            let mut decoded = convert::decode(self.stored.scales.dtype, scales, &mut factors);
            for (codes, values) in codes.chunks(row).zip(values.chunks_mut(row.saturating_mul(size(self.stored.dtype)))) {
                for ((codes, floats), scale) in codes.chunks(wide).zip(floats.chunks_mut(wide)).zip(&factors) {
                    FORMAT.dequantize(codes, floats, *scale);
                }
                decoded &= convert::from_f32(self.stored.dtype, &floats, values);
            }
            debug_assert!(decoded, "values and scales are floats");
        }
    }
}

impl WeightSource for Fp8Experts {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.stored.visit(unit, sink, |codes, scales, values| self.decode(codes, scales, values))
    }
}
