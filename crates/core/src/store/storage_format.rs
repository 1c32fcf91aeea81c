//! Representation of a logical weight as tensors of a file. The module `assemble` contains the inverse.
//!
//! | format | tensors of `x.weight` |
//! | --- | --- |
//! | plain | `x.weight` |
//! | integer | `x.weight` I8, `x.weight_scale`, for asymmetric schemes `x.weight_zero_point` I8; for static activations `x.input_scale`, `x.input_zero_point` I8 |
//! | FP8 | `x.weight` F8_E4M3, `x.weight_scale` `[1]`, `[out, 1]` or one per block; for static activations `x.input_scale` |
//! | FP6 | `x.weight_packed` U8 `[out, in · 3 / 4]`, `x.weight_scale` U8 (E8M0) |
//! | FP4 | `x.weight_packed` U8 `[out, in / 2]`, `x.weight_scale` F8_E4M3 with `x.weight_global_scale` F32 (NVFP4; for static activations `x.input_global_scale`), or U8 (E8M0, MXFP4) |
//! | packed | `x.weight_packed` I32 `[out, ceil(in · bits / 32)]`, `x.weight_shape` I64, `x.weight_scale`, for asymmetric schemes `x.weight_zero_point` I32 `[ceil(out · bits / 32), groups]` |
//! | palettes | `x.weight_packed` I32 `[rows, ceil(row · bits / 32)]`, `x.weight_shape` I64, `x.weight_palette` `[palettes, 2^bits]` in the dtype of the values |
//! | sparse | `x.weight.bitmask`, `x.weight.values`, `x.weight.shape`, and scales as for integer |
//!
//! Integer and packed are the formats `int-quantized` and `pack-quantized` of compressed-tensors, FP8 is
//! `float-quantized` or, with U8 (E8M0) scales, `mxfp8-quantized`, FP6 is `mxfp6-pack-quantized`, FP4 is
//! `nvfp4-pack-quantized` and `mxfp4-pack-quantized`. The words of palettized weights contain indices,
//! element `i` of a row at bit `i · bits`. With `p` palettes for `n` rows, each applies to `ceil(n / p)`
//! consecutive rows. `original_format` describes the formats of other tools that are copied from the input.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::borrow::Cow;

use super::block_packing::{Blocks, Halves};
use super::stored_tensor::{PartSink, StoredTensor};
use super::{Codes, DType, Encoding, Granularity, OriginalFormat, Packing, View, Weight};
use crate::error::{Error, Result};
use crate::kernel::ggml::BlockType;
use crate::kernel::{bitmask, packing};

/// Storage format of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageFormat {
    /// Unchanged: dense elements, or codes with their scales.
    Plain,
    /// Codes packed into 32-bit words, see [`packing`]; zero points are packed along the outputs. Codes
    /// of four bits are packed two per byte.
    Packed,
    /// A bitmask and the nonzero elements.
    Sparse {
        /// Number of set bits.
        nonzeros: u64,
    },
    /// The transposed matrix, `[in, out]` instead of `[out, in]`, with transposed scales.
    Transposed,
    /// Four-bit integers or palette indices, two per byte; zero points likewise.
    Halves {
        /// Whether the matrix and its scales are [transposed](StorageFormat::Transposed).
        transposed: bool,
    },
    /// Rows in blocks with one scale each, see `store/block_packing.rs`.
    Blocks(Blocks),
    /// Blocks of a GGUF file, for weights of [`BlockQuantized`](super::gguf::BlockQuantized).
    Gguf(BlockType),
    /// The codes and scales of a weight with this [original format](Weight::original_format), as in the
    /// input.
    Original(OriginalFormat),
}

impl StorageFormat {
    /// The tensors that represent the weight `name`, starting with the elements.
    pub fn parts(self, name: &str, weight: &Weight) -> Vec<StoredTensor> {
        let part = |suffix: &str, dtype, shape| StoredTensor { name: format!("{name}{suffix}"), dtype, shape };
        let integers = match &weight.encoding {
            Encoding::Dense => None,
            Encoding::Quantized(affine) => Some(affine),
        };
        let codes = integers.map(|affine| affine.codes);
        let dtype = codes.map_or(weight.dtype, Codes::dtype);
        let shape = weight.shape.clone();
        let mut parts = match self {
            StorageFormat::Blocks(blocks) => return blocks.parts(name, weight),
            StorageFormat::Original(format) => return format.parts(name, &weight.shape),
            StorageFormat::Gguf(kind) => return vec![part("", DType::U8, vec![weight.elements().div_ceil(kind.elements()).saturating_mul(kind.bytes())])],
            StorageFormat::Plain => vec![part("", dtype, shape)],
            StorageFormat::Halves { .. } => vec![part("", DType::U8, vec![weight.elements().div_ceil(2)])],
            StorageFormat::Transposed => vec![part("", dtype, shape.into_iter().rev().collect())],
            StorageFormat::Packed => {
                let packing = packing_of(codes);
                let (dtype, columns) = packing.row(weight.row(), weight.code_bits());
                let mut parts = vec![part("_packed", dtype, vec![shape.first().copied().unwrap_or(1), columns])];
                parts.extend(packing.has_shape().then(|| part("_shape", DType::I64, vec![shape.len()])));
                parts
            }
            StorageFormat::Sparse { nonzeros } => vec![
                part(".values", dtype, vec![nonzeros as usize]),
                part(".shape", DType::I64, vec![shape.len()]),
                part(".bitmask", DType::U8, vec![weight.elements().div_ceil(8)]),
            ],
        };
        if let Some(affine) = integers {
            let mut shape = affine.scale_shape(&weight.shape);
            if matches!(self, StorageFormat::Transposed | StorageFormat::Halves { transposed: true }) {
                shape.reverse();
            }
            let scale_dtype = affine.scale_format().stored_dtype(affine.scale_dtype);
            parts.push(part(if affine.codes.is_palette() { "_palette" } else { "_scale" }, scale_dtype, shape.clone()));
            if affine.has_global_scale() {
                parts.push(part("_global_scale", DType::F32, vec![1]));
            }
            if !affine.symmetric {
                let packed = self == StorageFormat::Packed;
                if let (true, Some(rows)) = (packed, shape.first_mut()) {
                    *rows = packing::words(*rows, affine.codes.bits());
                }
                if let StorageFormat::Halves { .. } = self {
                    let count = shape.iter().fold(1, |count: usize, size| count.saturating_mul(*size));
                    parts.push(part("_zero_point", DType::U8, vec![count.div_ceil(2)]));
                } else {
                    parts.push(part("_zero_point", if packed { DType::I32 } else { DType::I8 }, shape));
                }
            }
        }
        parts
    }

    /// The contents of a part that only contains the shape of the weight. `None` for other parts.
    pub fn shape_part(self, part: usize, weight: &Weight) -> Option<Vec<u8>> {
        let codes = if let Encoding::Quantized(affine) = &weight.encoding { Some(affine.codes) } else { None };
        (part == 1 && self.value_parts(codes) > 1).then(|| shape_bytes(&weight.shape))
    }

    fn value_parts(self, codes: Option<Codes>) -> usize {
        match self {
            StorageFormat::Plain
            | StorageFormat::Transposed
            | StorageFormat::Halves { .. }
            | StorageFormat::Blocks(_)
            | StorageFormat::Gguf(_)
            | StorageFormat::Original(_) => 1,
            StorageFormat::Packed if packing_of(codes).has_shape() => 2,
            StorageFormat::Packed => 1,
            StorageFormat::Sparse { .. } => 3,
        }
    }
}

/// Packing of codes; integers for weights without an encoding.
fn packing_of(codes: Option<Codes>) -> Packing {
    codes.map_or(Packing::Words, Codes::packing)
}

fn shape_bytes(shape: &[usize]) -> Vec<u8> {
    shape.iter().flat_map(|&size| (size as i64).to_le_bytes()).collect()
}

/// Converts the blocks of a weight to the bytes of its parts.
pub(super) struct Emitter {
    name: String,
    storage_format: StorageFormat,
    shape: Vec<usize>,
    bits: u8,
    codes: Option<Codes>,
    /// Number of rows that share their scales.
    high: usize,
    /// Number of rows received.
    rows: usize,
    row: usize,
    /// Scales per row.
    groups: usize,
    size: usize,
    scale_size: usize,
    started: bool,
    pending: Vec<u8>,
    /// Scales and zero points buffered until they can be transposed, and zero points buffered for
    /// complete words.
    parameters: [Vec<u8>; 2],
    /// State of packing codes and zero points of four bits.
    halves: [Halves; 2],
    mask: Vec<u8>,
    values: Vec<u8>,
}

/// Number of rows whose packed zero points fill complete words for any bit width.
pub(super) const WORD_ROWS: usize = 32;

impl Emitter {
    pub(super) fn new(name: &str, storage_format: StorageFormat, weight: &Weight) -> Self {
        let (size, scale_size, groups) = match &weight.encoding {
            Encoding::Dense => ((weight.dtype.bitsize() / 8).max(1), 0, 0),
            Encoding::Quantized(affine) => (1, affine.scale_dtype.bitsize() / 8, affine.scale_shape(&weight.shape).get(1).copied().unwrap_or(1)),
        };
        let affine = if let Encoding::Quantized(affine) = &weight.encoding { Some(affine) } else { None };
        Self {
            codes: affine.map(|affine| affine.codes),
            high: affine.map_or(1, |affine| if let Granularity::Block([high, _]) = affine.granularity { high.max(1) } else { 1 }),
            rows: 0,
            name: name.to_owned(),
            storage_format,
            shape: weight.shape.clone(),
            bits: weight.code_bits(),
            row: weight.row(),
            groups,
            size,
            scale_size,
            started: false,
            pending: Vec::new(),
            parameters: Default::default(),
            halves: Default::default(),
            mask: Vec::new(),
            values: Vec::new(),
        }
    }

    pub(super) fn emit(&mut self, view: &View, sink: PartSink) -> Result<()> {
        let first = !std::mem::replace(&mut self.started, true);
        if first && self.storage_format.value_parts(self.codes) > 1 {
            sink(1, &shape_bytes(&self.shape))?;
        }
        match self.storage_format {
            StorageFormat::Plain => sink(0, view.values)?,
            StorageFormat::Blocks(blocks) => return blocks.emit(view, self.row, sink),
            StorageFormat::Gguf(_) => return sink(0, view.blocks),
            StorageFormat::Original(format) => return format.emit(view, &mut self.rows, sink),
            StorageFormat::Transposed | StorageFormat::Halves { transposed: true } => self.pending.extend_from_slice(view.values),
            StorageFormat::Halves { transposed: false } => sink(0, self.halves[0].put(view.values))?,
            StorageFormat::Packed => {
                let packing = packing_of(self.codes);
                let is_integer = packing == Packing::Words;
                if is_integer && !(packing::fits(view.values, self.bits) && packing::fits(view.zero_points, self.bits)) {
                    return Err(Error::tensor(
                        &self.name,
                        format!("contains integers that do not fit the {} bits of its encoding", self.bits),
                        "set `num_bits: 8` in the quantization_config of the input, or start from the original checkpoint",
                    ));
                }
                self.values.clear();
                view.values.chunks_exact(self.row.max(1)).for_each(|row| packing.pack(row, self.bits, &mut self.values));
                sink(0, &self.values)?;
            }
            StorageFormat::Sparse { .. } => self.sparse(view.values, sink)?,
        }
        if let Some((affine, _)) = view.affine
            && (first || affine.granularity != Granularity::Tensor)
        {
            let at = self.storage_format.value_parts(self.codes);
            let transposed = matches!(self.storage_format, StorageFormat::Transposed | StorageFormat::Halves { transposed: true });
            if transposed && matches!(affine.granularity, Granularity::Group(_)) {
                let [scales, zero_points] = &mut self.parameters;
                scales.extend_from_slice(view.scales);
                zero_points.extend_from_slice(view.zero_points);
                return Ok(());
            }
            let (scales, zero_points) = self.of_blocks_of_rows(view);
            sink(at, &scales)?;
            if first && affine.has_global_scale() {
                sink(at.saturating_add(1), &view.global_scale.to_le_bytes())?;
            }
            if !affine.symmetric && self.storage_format == StorageFormat::Packed {
                let [_, buffered] = &mut self.parameters;
                buffered.extend_from_slice(&zero_points);
                self.pack_zero_points(WORD_ROWS, sink)?;
            } else if !affine.symmetric {
                let narrow = matches!(self.storage_format, StorageFormat::Halves { .. });
                sink(at.saturating_add(1), if narrow { self.halves[1].put(&zero_points) } else { &zero_points })?;
            }
        }
        Ok(())
    }

    /// The scales and zero points of a view, once per block of rows.
    fn of_blocks_of_rows<'v>(&mut self, view: &View<'v>) -> (Cow<'v, [u8]>, Cow<'v, [u8]>) {
        if self.high <= 1 {
            return (view.scales.into(), view.zero_points.into());
        }
        let (groups, start, high) = (self.groups.max(1), self.rows, self.high);
        let scale_bytes = groups.saturating_mul(self.scale_size).max(1);
        self.rows = start.saturating_add(view.scales.len().checked_div(scale_bytes).unwrap_or(0));
        let first_rows = |bytes: &[u8], line: usize| -> Vec<u8> {
            let rows = bytes.chunks_exact(line).enumerate().filter(|(row, _)| start.saturating_add(*row).is_multiple_of(high));
            rows.flat_map(|(_, line)| line).copied().collect()
        };
        (first_rows(view.scales, scale_bytes).into(), first_rows(view.zero_points, groups).into())
    }

    /// Packs the zero points of complete multiples of `rows` rows into words along the outputs.
    fn pack_zero_points(&mut self, rows: usize, sink: PartSink) -> Result<()> {
        let groups = self.groups.max(1);
        let [_, zero_points] = &mut self.parameters;
        let complete = zero_points.len().checked_div(groups.saturating_mul(rows)).unwrap_or(0).saturating_mul(groups).saturating_mul(rows);
        let rest = zero_points.split_off(complete);
        self.values.clear();
        packing::pack_columns(zero_points, groups, self.bits, &mut self.values);
        *zero_points = rest;
        sink(self.storage_format.value_parts(self.codes).saturating_add(1), &self.values)
    }

    /// Packs complete groups of eight elements, as each mask byte requires. The remainder is buffered
    /// for the next block.
    fn sparse(&mut self, mut elements: &[u8], sink: PartSink) -> Result<()> {
        let eight = self.size.saturating_mul(8);
        if !self.pending.is_empty() {
            let missing = eight.saturating_sub(self.pending.len()).min(elements.len());
            let (first, others) = elements.split_at(missing);
            self.pending.extend(first);
            elements = others;
            if self.pending.len() < eight {
                return Ok(());
            }
            let pending = std::mem::take(&mut self.pending);
            self.pack(&pending, sink)?;
        }
        let rest = elements.chunks_exact(eight).remainder();
        let (complete, _) = elements.split_at(elements.len().saturating_sub(rest.len()));
        self.pack(complete, sink)?;
        self.pending.extend(rest);
        Ok(())
    }

    fn pack(&mut self, elements: &[u8], sink: PartSink) -> Result<()> {
        self.mask.clear();
        self.values.clear();
        bitmask::pack(elements, self.size, &mut self.mask, &mut self.values);
        sink(0, &self.values)?;
        sink(2, &self.mask)
    }

    pub(super) fn finish(&mut self, sink: PartSink) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        match self.storage_format {
            StorageFormat::Packed => {
                let [_, zero_points] = &self.parameters;
                let rows = zero_points.len().checked_div(self.groups.max(1)).unwrap_or(0);
                if rows > 0 { self.pack_zero_points(rows, sink) } else { Ok(()) }
            }
            StorageFormat::Transposed | StorageFormat::Halves { .. } => {
                let narrow = matches!(self.storage_format, StorageFormat::Halves { .. });
                let mut halves = std::mem::take(&mut self.halves);
                let rows = pending.len().checked_div(self.row.saturating_mul(self.size)).unwrap_or(0);
                self.transpose(&pending, self.size, self.row, &mut |bytes| sink(0, if narrow { halves[0].put(bytes) } else { bytes }))?;
                for (part, parameters) in std::mem::take(&mut self.parameters).into_iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
                    let size = if part == 0 { self.scale_size } else { 1 };
                    let width = parameters.len().checked_div(rows.saturating_mul(size)).unwrap_or(0);
                    let narrow = narrow && part == 1;
                    self.transpose(&parameters, size, width, &mut |bytes| sink(part.saturating_add(1), if narrow { halves[1].put(bytes) } else { bytes }))?;
                }
                let [codes, zero_points] = &mut halves;
                codes.rest().map_or(Ok(()), |byte| sink(0, &[byte]))?;
                zero_points.rest().map_or(Ok(()), |byte| sink(2, &[byte]))
            }
            _ if pending.is_empty() => Ok(()),
            _ => self.pack(&pending, sink),
        }
    }

    /// Transposes a matrix in bands of columns.
    fn transpose(&mut self, matrix: &[u8], size: usize, width: usize, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        const BAND: usize = 16;
        let line = width.saturating_mul(size);
        let rows = matrix.len().checked_div(line).unwrap_or(0);
        for start in (0..width).step_by(BAND) {
            let band = BAND.min(width.saturating_sub(start));
            self.values.clear();
            self.values.resize(band.saturating_mul(rows).saturating_mul(size), 0);
            #[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "hot; a row has `width` elements, a band `band` columns of `rows`")]
            for (row, elements) in matrix.chunks_exact(line).enumerate() {
                for column in 0..band {
                    let (from, to) = ((start + column) * size, (column * rows + row) * size);
                    self.values[to..to + size].copy_from_slice(&elements[from..from + size]);
                }
            }
            sink(&self.values)?;
        }
        Ok(())
    }
}
