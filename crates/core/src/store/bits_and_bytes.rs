//! Weights of bitsandbytes, with the tensors of [`StoredBits`].
//!
//! With 4 bits (NF4 and FP4), a block of consecutive elements of the matrix, which may span several rows,
//! shares a scale. No [`Granularity`](super::Granularity) describes such blocks, and the 8-bit integers are
//! multiplied with their scales in another order than here. Weights are therefore dense, and dequantized
//! block by block to the same values as in bitsandbytes.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use serde::Deserialize;

use super::checkpoint::INCOMPLETE;
use super::stored_bits::{EIGHT, FOUR, NESTED_VALUES, StoredBits, StoredFour, VALUES};
use super::{Block, BlockSink, Checkpoint, DType, Encoding, OriginalFormat, RawTensor, View, Weight, WeightSource, block_elements, least_common_multiple};
use crate::error::{Error, Result};
use crate::kernel::convert;

/// Suffixes of the JSON objects, and the types that they describe.
const STATES: [(&str, &str); 2] = [(".quant_state.bitsandbytes__nf4", "nf4"), (".quant_state.bitsandbytes__fp4", "fp4")];
/// Type of weights of 8 bits, as in the list of their formats in reports.
const INT8: &str = "int8 (bitsandbytes)";
/// The reciprocal of the largest integer, as bitsandbytes rounds it.
const RECIPROCAL: f32 = 7.874_016e-3;
/// Largest size of a JSON object in bytes.
const STATE_BYTES: u64 = 1 << 16;

/// The JSON object of a weight of 4 bits.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

/// A weight of 4 bits.
struct Four {
    indices: RawTensor,
    absmax: RawTensor,
    nested: Option<Nested>,
    /// Values of the indices.
    map: Vec<f32>,
    /// Bytes of the other parts, which the first block contains.
    constants: Vec<u8>,
    elements: usize,
    /// Elements per scale.
    block: usize,
    dtype: DType,
}

/// Quantization of the scales.
struct Nested {
    map: Vec<f32>,
    factors: Vec<f32>,
    /// Scales per factor.
    block: usize,
    offset: f32,
}

/// A weight of 8 bits.
struct Eight {
    integers: RawTensor,
    scales: RawTensor,
    format: Vec<u8>,
    row: usize,
    dtype: DType,
}

/// Removes all weights of bitsandbytes from a checkpoint. `floats` is the dtype of the values of 8 bits.
pub(super) fn take(checkpoint: &mut Checkpoint, floats: DType) -> Result<Vec<(String, Weight)>> {
    let mut found = Vec::new();
    for (suffix, kind) in STATES {
        let names: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(suffix)).map(str::to_owned).collect();
        for name in names {
            let weight = four(checkpoint, &name, (suffix, kind))?;
            found.push((name, weight));
        }
    }
    let [absmax, map, ..] = FOUR;
    let has_both = |name: &&str| checkpoint.tensors.contains_key(&format!("{name}{map}"));
    if let Some(name) = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(absmax)).find(has_both) {
        let reason = format!("has no `quant_state` of bitsandbytes, which describes its shape, but `{absmax}` and `{map}`");
        return Err(Error::tensor(name, reason, INCOMPLETE));
    }
    let [scales, _] = EIGHT;
    let modules: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(scales)).map(str::to_owned).collect();
    for module in modules.into_iter().filter(|module| module.ends_with('.')) {
        let name = format!("{module}weight");
        let weight = eight(checkpoint, &module, &name, floats)?;
        found.push((name, weight));
    }
    Ok(found)
}

/// Removes a tensor of a weight, of a type and a number of elements.
fn part(checkpoint: &mut Checkpoint, name: &str, dtype: DType, elements: usize) -> Result<RawTensor> {
    let Some(tensor) = checkpoint.tensors.remove(name) else {
        return Err(Error::tensor(name, "is missing, but other tensors of its weight are quantized by bitsandbytes", INCOMPLETE));
    };
    if (tensor.dtype, tensor.elements()) != (dtype, elements) {
        let reason = format!("is {} {:?}, but its weight by bitsandbytes requires {elements} elements of type {dtype}", tensor.dtype, tensor.shape);
        return Err(Error::tensor(name, reason, INCOMPLETE));
    }
    Ok(tensor)
}

/// The values of a tensor in float32, and its bytes.
fn floats_of(tensor: &RawTensor) -> Result<(Vec<f32>, Vec<u8>)> {
    let bytes = tensor.read_all()?;
    Ok((bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect(), bytes))
}

fn four(checkpoint: &mut Checkpoint, name: &str, (suffix, kind): (&'static str, &'static str)) -> Result<Weight> {
    let state_name = format!("{name}{suffix}");
    let broken = |reason: String| Error::tensor(&state_name, reason, INCOMPLETE);
    let stored = checkpoint.tensors.remove(&state_name).filter(|tensor| tensor.dtype == DType::U8 && tensor.bytes() <= STATE_BYTES);
    let text = stored.ok_or_else(|| broken("is not a short text of type U8".into()))?.read_all()?;
    let state: State = serde_json::from_slice(&text).map_err(|e| broken(format!("is not a JSON object of bitsandbytes: {e}")))?;
    let dtype = match state.dtype.as_str() {
        "bfloat16" => DType::BF16,
        "float16" => DType::F16,
        "float32" => DType::F32,
        other => return Err(broken(format!("has `dtype` of {other:?}"))),
    };
    if state.shape.len() != 2 {
        let reason = format!("describes a weight of shape {:?}, but only matrices are supported", state.shape);
        return Err(Error::tensor(&state_name, reason, "start from the original checkpoint"));
    }
    let elements = state.shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size)).filter(|count| *count > 0);
    let Some(elements) = elements.filter(|_| state.quant_type == kind && state.blocksize > 0 && state.blocksize.is_multiple_of(2)) else {
        return Err(broken(format!("describes `{}` of shape {:?} in blocks of {}", state.quant_type, state.shape, state.blocksize)));
    };
    let [absmax_name, map_name, nested_absmax, nested_map] = FOUR.map(|suffix| format!("{name}{suffix}"));
    let indices = checkpoint.tensors.remove(name).filter(|tensor| tensor.bytes() == elements.div_ceil(2) as u64);
    let shape = indices.as_ref().and_then(|indices| <[usize; 2]>::try_from(&indices.shape[..]).ok());
    let (Some(indices), Some(stored_shape)) = (indices, shape) else {
        return Err(Error::tensor(name, format!("does not contain the indices of {elements} elements, which `{state_name}` describes"), INCOMPLETE));
    };
    let scales = elements.div_ceil(state.blocksize);
    let (map, mut constants) = floats_of(&part(checkpoint, &map_name, DType::F32, VALUES)?)?;
    constants.extend_from_slice(&text);
    let nested = match (state.nested_blocksize.filter(|block| *block > 0), state.nested_offset, state.nested_dtype.as_deref()) {
        (None, None, None) => None,
        (Some(block), Some(offset), Some("float32")) => {
            let (factors, factor_bytes) = floats_of(&part(checkpoint, &nested_absmax, DType::F32, scales.div_ceil(block))?)?;
            let (map, map_bytes) = floats_of(&part(checkpoint, &nested_map, DType::F32, NESTED_VALUES)?)?;
            constants.extend([factor_bytes, map_bytes].concat());
            Some(Nested { map, factors, block, offset: offset as f32 })
        }
        _ => return Err(broken("describes quantized scales incompletely".into())),
    };
    let absmax = part(checkpoint, &absmax_name, if nested.is_some() { DType::U8 } else { DType::F32 }, scales)?;
    let factors = nested.as_ref().map(|nested| nested.factors.len());
    let format = StoredFour { suffix, indices: (indices.dtype, stored_shape), block: state.blocksize, nested: factors, state: text.len() };
    let bytes = indices.bytes().saturating_add(absmax.bytes()).saturating_add(constants.len() as u64);
    let source = Four { indices, absmax, nested, map, constants, elements, block: state.blocksize, dtype };
    Ok(dense(name, (dtype, state.shape), StoredBits::Four(format), (kind, bytes), Arc::new(source)))
}

fn eight(checkpoint: &mut Checkpoint, module: &str, name: &str, floats: DType) -> Result<Weight> {
    let [scales_name, format_name] = EIGHT.map(|part| format!("{module}{part}"));
    let integers = checkpoint.tensors.remove(name).filter(|tensor| tensor.dtype == DType::I8 && tensor.elements() > 0);
    let shape = integers.as_ref().and_then(|integers| <[usize; 2]>::try_from(&integers.shape[..]).ok());
    let (Some(integers), Some([rows, row])) = (integers, shape) else {
        return Err(Error::tensor(name, format!("is not a matrix of int8, but `{scales_name}` contains its scales by bitsandbytes"), INCOMPLETE));
    };
    let scales = part(checkpoint, &scales_name, DType::F32, rows)?;
    let format_tensor = checkpoint.tensors.remove(&format_name);
    let format = format_tensor.as_ref().map(|tensor| tensor.shape.len());
    let format_bytes = format_tensor.as_ref().map_or_else(|| Ok(Vec::new()), RawTensor::read_all)?;
    if format_tensor.is_some_and(|tensor| tensor.dtype != DType::U8) || format_bytes.iter().any(|format| *format != 0) || format_bytes.len() > 1 {
        let reason = "is not 0: the integers are in the order of a GPU's tiles, which is not supported";
        return Err(Error::tensor(&format_name, reason, "start from the original checkpoint, or save it again with bitsandbytes 0.45 or newer"));
    }
    let bytes = integers.bytes().saturating_add(scales.bytes()).saturating_add(format_bytes.len() as u64);
    let source = Eight { integers, scales, format: format_bytes, row, dtype: floats };
    Ok(dense(name, (floats, vec![rows, row]), StoredBits::Eight { format }, (INT8, bytes), Arc::new(source)))
}

fn dense(name: &str, (dtype, shape): (DType, Vec<usize>), stored: StoredBits, (kind, bytes): (&'static str, u64), source: Arc<dyn WeightSource>) -> Weight {
    let stored_as = stored.parts(name, &shape).into_iter().map(|part| part.name).collect();
    let mut weight = Weight::new(dtype, shape, Encoding::Dense, source);
    (weight.stored_bytes, weight.stored_as, weight.stored_type) = (bytes, stored_as, Some(kind));
    weight.original_format = Some(OriginalFormat::Bits(stored));
    weight
}

impl Four {
    /// The scales from the number `first` on, from their stored bytes.
    fn scales(&self, first: usize, stored: &[u8]) -> Vec<f32> {
        let Some(nested) = &self.nested else {
            return stored.as_chunks::<4>().0.iter().map(|scale| f32::from_le_bytes(*scale)).collect();
        };
        let scale = |(number, index): (usize, &u8)| {
            let factor = number.checked_div(nested.block).and_then(|at| nested.factors.get(at)).copied().unwrap_or(f32::NAN);
            nested.map.get(usize::from(*index)).copied().unwrap_or(f32::NAN) * factor + nested.offset
        };
        (first..).zip(stored).map(scale).collect()
    }
}

impl WeightSource for Four {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let step = block_elements(least_common_multiple(unit, self.block)).min(self.elements);
        let size = if self.nested.is_some() { 1 } else { 4 };
        let (mut blocks, mut floats, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for start in (0..self.elements).step_by(step.max(1)) {
            let count = step.min(self.elements.saturating_sub(start));
            let (first, scales) = (start.checked_div(self.block).unwrap_or(0), count.div_ceil(self.block.max(1)));
            let indices = count.div_ceil(2);
            blocks.clear();
            blocks.resize(indices.saturating_add(scales.saturating_mul(size)), 0);
            let (packed, stored) = blocks.split_at_mut(indices);
            self.indices.read_at((start / 2) as u64, packed)?;
            self.absmax.read_at(first.saturating_mul(size) as u64, stored)?;
            let factors = self.scales(first, stored);
            floats.clear();
            let value = |index: u8| self.map.get(usize::from(index)).copied().unwrap_or(f32::NAN);
            floats.extend(packed.iter().flat_map(|byte| [value(byte >> 4), value(byte & 15)]));
            floats.truncate(count);
            for (floats, factor) in floats.chunks_mut(self.block.max(1)).zip(factors) {
                floats.iter_mut().for_each(|value| *value *= factor);
            }
            emit(self.dtype, &floats, &mut values, |values| {
                if start == 0 {
                    blocks.extend_from_slice(&self.constants);
                }
                sink(Block::untouched(View { blocks: &blocks, ..View::dense(self.dtype, values) }))
            })?;
        }
        Ok(())
    }
}

impl WeightSource for Eight {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = self.row.max(1);
        let elements = self.integers.elements();
        let step = block_elements(least_common_multiple(unit, row)).min(elements);
        let (mut blocks, mut floats, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for start in (0..elements).step_by(step.max(1)) {
            let count = step.min(elements.saturating_sub(start));
            let (first, rows) = (start.checked_div(row).unwrap_or(0), count.div_ceil(row));
            let format: &[u8] = if start == 0 { &self.format } else { &[] };
            blocks.clear();
            blocks.resize(count, 0);
            self.integers.read_at(start as u64, &mut blocks)?;
            let mut stored = vec![0; rows.saturating_mul(4)];
            self.scales.read_at(first.saturating_mul(4) as u64, &mut stored)?;
            floats.clear();
            for (integers, scale) in blocks.chunks(row).zip(stored.as_chunks::<4>().0) {
                let scale = f32::from_le_bytes(*scale);
                floats.extend(integers.iter().map(|integer| f32::from(*integer as i8) * scale * RECIPROCAL));
            }
            blocks.extend_from_slice(format);
            blocks.extend_from_slice(&stored);
            emit(self.dtype, &floats, &mut values, |values| sink(Block::untouched(View { blocks: &blocks, ..View::dense(self.dtype, values) })))?;
        }
        Ok(())
    }
}

/// Passes the bytes of values on.
fn emit(dtype: DType, floats: &[f32], values: &mut Vec<u8>, sink: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
    values.clear();
    values.resize(floats.len().saturating_mul(dtype.bitsize() / 8), 0);
    let written = convert::from_f32(dtype, floats, values);
    debug_assert!(written, "values are floats");
    sink(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The product of float32 numbers with a double in PyTorch uses the double rounded to float32.
    #[test]
    fn the_reciprocal_is_rounded_once() {
        assert_eq!(RECIPROCAL, 7.874015718698502e-3f64 as f32);
    }
}
