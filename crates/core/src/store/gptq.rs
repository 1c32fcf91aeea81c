//! Weights of GPTQ and AWQ checkpoints, as written by AutoGPTQ and GPTQModel (`qlinear`) and AutoAWQ
//! (`modules/linear/gemm.py`).
//!
//! Matrices are stored as `[in, out]`, with several codes `q` per word. The value is `(q - z) · s`:
//!
//! | | `x.qweight` I32 | `x.qzeros` I32 | `x.scales` | `x.g_idx` I32 |
//! | --- | --- | --- | --- | --- |
//! | GPTQ | `[in · bits / 32, out]`, consecutive inputs per word, low bits first | `[groups, out · bits / 32]`, consecutive outputs, low bits first; version 1, as GPTQModel writes it, subtracts 1 from each z, as one subtraction from the word | `[groups, out]` | group of each input |
//! | AWQ (GEMM) | `[in, out / 8]`, outputs per word in the order 0 2 4 6 1 3 5 7 | `[groups, out / 8]` in the same order | `[groups, out]` | |
//!
//! Readers of version 1 differ if the stored bits of a z are all ones. This module follows GPTQModel:
//!
//! - GPTQModel, which transformers uses, adds the ones to complete words
//!   (`convert_gptq_v1_to_v2_format_module`). It reads every z that it writes, including 0.
//! - AutoGPTQ (`forward` in `qlinear_cuda.py`) and vLLM (`zero_offset` in `gptq/q_gemm.cu`) add 1 to each z
//!   without wrapping, and read `2^bits` instead of 0. Quantizers do not compute this z.
//! - AutoGPTQ (`pack` in `qlinear_cuda.py`) subtracts 1 from a z of 0 in 32 bits, which sets all higher bits
//!   of the word: the later z of the word are lost.
//!
//! Both formats become weights `x.weight`, `[out, in]`. The last group may be shorter than the others. The
//! weight then has groups of a size that divides the rows, several of which share a scale of the file. If
//! `g_idx` assigns inputs to groups out of order, the weight is dequantized to floats, because
//! [`Granularity`] cannot represent scattered groups.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::block::greatest_common_divisor;
use super::{
    ActivationScheme, Block, BlockSink, Checkpoint, Codes, DType, Decoded, Encoding, Granularity, QuantizationSpec, RawTensor, View, Weight, WeightSource,
    block_elements, least_common_multiple,
};
use crate::error::{Error, Result};

/// Smallest group of a weight that stays quantized.
const SMALLEST_GROUP: usize = 16;

/// Order of the outputs in a word of AWQ: nibble i contains output `ORDER[i]`.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Approximate number of outputs that are transposed at a time, so that reads are long.
const BAND: usize = 1024;

/// Packing format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Words {
    Gptq,
    Awq,
}

impl Words {
    /// The output, relative to the word, at an index within a word.
    fn output(self, index: usize) -> usize {
        if self == Words::Awq { ORDER.get(index).copied().unwrap_or(index) } else { index }
    }
}

/// A packed matrix in a file, exposed as `[out, in]`.
#[derive(Debug, Clone)]
struct WordsFile {
    name: String,
    words: Words,
    values: RawTensor,
    zeros: RawTensor,
    scales: RawTensor,
    /// Group of the file of each group of `affine`, if they differ.
    order: Option<Vec<usize>>,
    /// Offset added to stored zero points.
    offset: u8,
    rows: usize,
    row: usize,
    /// Number of groups of the file.
    groups: usize,
    affine: QuantizationSpec,
}

/// Removes all GPTQ and AWQ weights from a checkpoint. Fails if the parts of a weight do not match, or if the
/// model divides activations by scales (`ScaledActivation` of AutoAWQ), which the weights do not contain.
pub(super) fn take(checkpoint: &mut Checkpoint) -> Result<Vec<(String, Weight)>> {
    let modules: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(".qweight")).map(str::to_owned).collect();
    let is_complete =
        |checkpoint: &Checkpoint, module: &str| ["scales", "qzeros"].iter().all(|part| checkpoint.tensors.contains_key(&format!("{module}.{part}")));
    let mut weights = Vec::new();
    for module in modules {
        if is_complete(checkpoint, &module) {
            weights.push(weight(checkpoint, &module)?);
        }
    }
    let is_activation = |name: &&String| name.strip_suffix(".scales").is_some_and(|module| !checkpoint.tensors.contains_key(&format!("{module}.qweight")));
    if let Some(name) = checkpoint.tensors.keys().find(is_activation).filter(|_| !weights.is_empty()) {
        let reason = "contains scales by which AutoAWQ divides the activations of a layer, which is not supported";
        return Err(Error::tensor(name, reason, "start from the original checkpoint"));
    }
    Ok(weights)
}

fn weight(checkpoint: &mut Checkpoint, module: &str) -> Result<(String, Weight)> {
    let name = format!("{module}.weight");
    let broken = |reason: String| Error::tensor(&name, reason, "start from the original checkpoint, or save it again with GPTQModel or AutoAWQ");
    let part = |what: &str| format!("{module}.{what}");
    let mut stored_as = Vec::new();
    let mut take = |what: &str| {
        let tensor = checkpoint.tensors.remove(&part(what));
        stored_as.extend(tensor.is_some().then(|| part(what)));
        tensor
    };
    let (Some(values), Some(zeros), Some(scales), order) = (take("qweight"), take("qzeros"), take("scales"), take("g_idx")) else {
        return Err(broken("a part is missing".into()));
    };
    let bytes = [Some(&values), Some(&zeros), Some(&scales), order.as_ref()].into_iter().flatten().fold(0u64, |sum, t| sum.saturating_add(t.bytes()));
    let shapes =
        || format!("qweight {} {:?}, qzeros {} {:?}, scales {} {:?}", values.dtype, values.shape, zeros.dtype, zeros.shape, scales.dtype, scales.shape);
    let ([high, wide], [zero_rows, zero_wide], [groups, rows]) = (&values.shape[..], &zeros.shape[..], &scales.shape[..]) else {
        return Err(broken(format!("its parts are not matrices: {}", shapes())));
    };
    let (high, wide, groups, rows) = (*high, *wide, *groups, *rows);
    let bits = |words: usize| words.checked_mul(32).filter(|bits| rows > 0 && bits.is_multiple_of(rows)).and_then(|bits| bits.checked_div(rows));
    let (words, bits, row) = match bits(*zero_wide) {
        Some(bits @ (2 | 4 | 8)) if wide == rows => (Words::Gptq, bits, high.saturating_mul(32).checked_div(bits).unwrap_or(0)),
        Some(4) if wide == *zero_wide => (Words::Awq, 4, high),
        _ => return Err(broken(format!("is packed neither as GPTQ of 2, 4 or 8 bits nor as AWQ (GEMM): {}", shapes()))),
    };
    let fits = values.dtype == DType::I32 && zeros.dtype == DType::I32 && matches!(scales.dtype, DType::F16 | DType::BF16 | DType::F32);
    if !fits || *zero_rows != groups || groups == 0 || row == 0 {
        return Err(broken(format!("its parts do not match: {}", shapes())));
    }
    let config = checkpoint.gptq;
    if let Some(size) = config.group_size
        && row.div_ceil(size.inputs(row).max(1)) != groups
    {
        let reason = format!("has {groups} groups of scales for {row} inputs, which contradicts `group_size` of {size} in its quantization_config");
        return Err(Error::tensor(&name, reason, "correct `group_size`, or start from the original checkpoint"));
    }
    let stated = config.group_size.map(|size| size.inputs(row));
    let (size, scattered) = match &order {
        Some(order) => input_groups(order, row, groups, stated)
            .ok_or_else(|| broken(format!("its g_idx {} {:?} does not assign a group to each input", order.dtype, order.shape)))?,
        None if words == Words::Gptq && config.is_ordered && groups > 1 => {
            let reason = format!("has {groups} groups of inputs in the order of `desc_act`, which is true in its quantization_config, but no `g_idx`");
            return Err(Error::tensor(&part("g_idx"), reason, "start from the original checkpoint, or set `desc_act` to false if the groups are consecutive"));
        }
        None => {
            let even = || row.checked_div(groups).filter(|_| row.is_multiple_of(groups));
            let size = stated.or_else(even);
            (size.ok_or_else(|| broken(format!("without `group_size` in its quantization_config, its parts do not match: {}", shapes())))?, None)
        }
    };
    // Groups that all have the same size.
    let common = greatest_common_divisor(row, size);
    let floats = scattered.is_some() || common < size.min(SMALLEST_GROUP);
    let split = || (0..row).step_by(common.max(1)).map(|input| input.checked_div(size).unwrap_or(0)).collect();
    let order = scattered.or_else(|| (common < size).then(split));
    let middle = 1u8.wrapping_shl(bits.saturating_sub(1) as u32);
    let sampled = sample(&zeros)?;
    let all = |zero: u8| (0..8usize).step_by(bits.max(1)).fold(0u8, |byte, at| byte | zero.wrapping_shl(at as u32));
    // For a symmetric file, the zero points reveal the version, whatever the configuration specifies.
    let is = |zero: u8| sampled.iter().all(|byte| *byte == all(zero));
    let (symmetric, offset) = match words {
        Words::Awq => (config.symmetric != Some(false) && is(middle), 0),
        Words::Gptq if config.symmetric != Some(false) && is(middle) => (true, 0),
        Words::Gptq if config.symmetric != Some(false) && is(middle.wrapping_sub(1)) => (true, 1),
        Words::Gptq => (false, u8::from(!config.second_version)),
    };
    let granularity = if groups == 1 { Granularity::Channel } else { Granularity::Group(common) };
    let affine = QuantizationSpec { codes: Codes::Integer(bits as u8), granularity, symmetric, scale_dtype: scales.dtype, activations: ActivationScheme::None };
    let dtype = scales.dtype;
    let file = WordsFile { name: name.clone(), words, values, zeros, scales, order, offset, rows, row, groups, affine: affine.clone() };
    let (encoding, source): (Encoding, Arc<dyn WeightSource>) = if floats {
        let affine = QuantizationSpec { symmetric: false, ..affine };
        (Encoding::Dense, Arc::new(Decoded { upstream: Arc::new(WordsFile { affine, ..file }), dtype, name: name.clone() }))
    } else {
        (Encoding::Quantized(affine), Arc::new(file))
    };
    let mut weight = Weight::new(dtype, vec![rows, row], encoding, source);
    (weight.stored_bytes, weight.stored_as) = (bytes, stored_as);
    Ok((name, weight))
}

/// Bytes from both ends of a tensor. In symmetric files, all bytes are equal.
fn sample(zeros: &RawTensor) -> Result<Vec<u8>> {
    let length = zeros.bytes().min(256);
    let mut bytes = vec![0; length as usize];
    let mut end = bytes.clone();
    zeros.read_at(0, &mut bytes)?;
    zeros.read_at(zeros.bytes().saturating_sub(length), &mut end)?;
    bytes.extend(end);
    Ok(bytes)
}

/// The size of consecutive groups; otherwise 1 and the group of each input. `None` if `order` is invalid.
fn input_groups(order: &RawTensor, row: usize, groups: usize, stated: Option<usize>) -> Option<(usize, Option<Vec<usize>>)> {
    if order.dtype != DType::I32 || order.elements() != row {
        return None;
    }
    let bytes = order.read_all().ok()?;
    let group = |bytes: &[u8; 4]| usize::try_from(i32::from_le_bytes(*bytes)).ok().filter(|group| *group < groups);
    let found: Vec<usize> = bytes.as_chunks::<4>().0.iter().map(group).collect::<Option<_>>()?;
    let first = found.iter().take_while(|group| **group == 0).count();
    let is_consecutive = |size: &usize| found.iter().enumerate().all(|(input, group)| input.checked_div(*size) == Some(*group));
    match stated.into_iter().chain([first]).find(is_consecutive) {
        Some(size) => Some((size, None)),
        None => Some((1, Some(found))),
    }
}

/// Adds an offset to each zero point of a word: 1 for version 1, in which a zero point of 0 has borrowed from
/// the next one. `mask` is that of one zero point.
fn word_of_zeros(stored: u32, mask: u32, offset: u8) -> u32 {
    let ones = u32::MAX.checked_div(mask).unwrap_or_default();
    stored.wrapping_add(ones.wrapping_mul(offset.into()))
}

impl WordsFile {
    /// Zero points relative to 2^(bits - 1), `[out, groups]`.
    #[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "hot; the sizes of all parts were validated")]
    fn zero_points(&self) -> Result<Vec<u8>> {
        let bits = usize::from(self.affine.codes.bits());
        let (each, mask, middle) = (32 / bits, (1u32 << bits) - 1, 1u32 << (bits - 1));
        let bytes = self.zeros.read_all()?;
        let mut zero_points = vec![0; self.rows * self.groups];
        for (at, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let (group, first) = (at / (self.rows / each), at % (self.rows / each) * each);
            let word = word_of_zeros(u32::from_le_bytes(*word), mask, self.offset);
            for index in 0..each {
                let output = first + self.words.output(index);
                let zero = (word >> (index * bits)) & mask;
                zero_points[output * self.groups + group] = zero.wrapping_sub(middle) as u8;
            }
        }
        if self.affine.symmetric && zero_points.iter().any(|zero| *zero != 0) {
            return Err(Error::tensor(
                &self.name,
                "has nonzero zero points, but its configuration or its first zero points indicate a symmetric weight",
                "set `sym` to false in its quantization_config",
            ));
        }
        Ok(zero_points)
    }

    /// The codes of `rows` outputs starting at `first`, relative to 2^(bits - 1), row by row.
    #[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "hot; the sizes of all parts were validated")]
    fn band(&self, first: usize, rows: usize, line: &mut Vec<u8>, codes: &mut Vec<u8>) -> Result<()> {
        let bits = usize::from(self.affine.codes.bits());
        let (each, mask, middle) = (32 / bits, (1u32 << bits) - 1, 1u32 << (bits - 1));
        let code = |word: u32, index: usize| (word >> (index * bits) & mask).wrapping_sub(middle) as u8;
        codes.clear();
        codes.resize(rows * self.row, 0);
        let (start, width, stride) = if self.words == Words::Awq { (first / each, rows / each, self.rows / each) } else { (first, rows, self.rows) };
        line.resize(4 * width, 0);
        for at in 0..self.values.shape[0] {
            self.values.read_at((4 * (at * stride + start)) as u64, line)?;
            for (column, word) in line.as_chunks::<4>().0.iter().enumerate() {
                let word = u32::from_le_bytes(*word);
                for index in 0..each {
                    let (output, input) = match self.words {
                        Words::Gptq => (column, at * each + index),
                        Words::Awq => (column * each + self.words.output(index), at),
                    };
                    codes[output * self.row + input] = code(word, index);
                }
            }
        }
        Ok(())
    }
}

impl WeightSource for WordsFile {
    #[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "hot; the sizes of all parts were validated")]
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (size, zeros, by_group) = (self.affine.scale_dtype.bitsize() / 8, self.zero_points()?, self.scales.read_all()?);
        // Blocks of complete units and rows; bands of complete blocks and words.
        let step = (block_elements(least_common_multiple(unit, self.row)) / self.row).min(self.rows);
        let least = least_common_multiple(step, 32 / usize::from(self.affine.codes.bits()));
        let height = (BAND / least * least).max(least);
        let (mut line, mut codes, mut scales, mut zero_points) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for first in (0..self.rows).step_by(height) {
            let band = height.min(self.rows - first);
            self.band(first, band, &mut line, &mut codes)?;
            for start in (0..band).step_by(step) {
                let count = step.min(band - start);
                scales.clear();
                zero_points.clear();
                for output in first + start..first + start + count {
                    let mut add = |group: usize| {
                        let at = (group * self.rows + output) * size;
                        scales.extend_from_slice(&by_group[at..at + size]);
                        zero_points.push(zeros[output * self.groups + group]);
                    };
                    match &self.order {
                        Some(order) => order.iter().for_each(|group| add(*group)),
                        None => (0..self.groups).for_each(&mut add),
                    }
                }
                sink(Block::untouched(View {
                    dtype: self.affine.scale_dtype,
                    values: &codes[start * self.row..(start + count) * self.row],
                    affine: Some((&self.affine, self.row)),
                    scales: &scales,
                    zero_points: if self.affine.symmetric { &[] } else { &zero_points },
                    global_scale: 1.0,
                    blocks: &[],
                }))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPTQModel subtracts `0x1111_1111` from a word of 4-bit zero points, and adds it to read them: 15 is
    /// read as 0, not as 16.
    #[test]
    fn zero_points_of_version_1_are_offset_by_words() {
        let read = |stored: u32, bits: u32, offset: u8| {
            let mask = u32::MAX >> (32 - bits);
            let word = word_of_zeros(stored, mask, offset);
            (0..32 / bits).map(|index| (word >> (index * bits)) & mask).collect::<Vec<u32>>()
        };
        let cases: [([u32; 8], u32); 4] =
            [([0; 8], 0xEEEE_EEEF), ([0, 1, 1, 1, 1, 1, 1, 1], 0xFFFF_FFFF), ([0, 7, 9, 8, 6, 8, 10, 15], 0xE975_785F), ([8; 8], 0x7777_7777)];
        for (zeros, stored) in cases {
            let packed = zeros.iter().rev().fold(0u32, |word, zero| (word << 4) | *zero);
            assert_eq!(packed.wrapping_sub(0x1111_1111), stored, "{zeros:?}");
            assert_eq!(read(stored, 4, 1), zeros);
            assert_eq!(read(packed, 4, 0), zeros, "version 2");
        }
        assert_eq!(read(0xFEFE_FEFF, 8, 1), vec![0; 4]);
        assert_eq!(read(0xAAAA_AAAB, 2, 1), vec![0; 16]);
    }
}
