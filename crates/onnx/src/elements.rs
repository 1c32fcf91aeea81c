//! Elements of tensors: element types, and conversion of all storage variants to plain bytes.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::proto::{DataType, TensorProto};
use super::wire::{data, take_varint};
use crate::error::{Error, Result};
use crate::store::header::element_count;
use crate::store::{Block, BlockSink, Bytes, DType, RawTensor, View, WeightSource, block_elements};

/// The dtype of a weight with these elements; `None` for types that are only copied.
pub(super) fn dtype(of: DataType) -> Option<DType> {
    Some(match of {
        DataType::Float => DType::F32,
        DataType::Uint8 => DType::U8,
        DataType::Int8 => DType::I8,
        DataType::Uint16 => DType::U16,
        DataType::Int16 => DType::I16,
        DataType::Int32 => DType::I32,
        DataType::Int64 => DType::I64,
        DataType::Bool => DType::BOOL,
        DataType::Float16 => DType::F16,
        DataType::Double => DType::F64,
        DataType::Uint32 => DType::U32,
        DataType::Uint64 => DType::U64,
        DataType::Bfloat16 => DType::BF16,
        _ => return None,
    })
}

/// The ONNX type for a dtype; `None` if ONNX has none.
pub(super) fn data_type(of: DType) -> Option<DataType> {
    let all = [
        DataType::Float,
        DataType::Uint8,
        DataType::Int8,
        DataType::Uint16,
        DataType::Int16,
        DataType::Int32,
        DataType::Int64,
        DataType::Bool,
        DataType::Float16,
        DataType::Double,
        DataType::Uint32,
        DataType::Uint64,
        DataType::Bfloat16,
    ];
    all.into_iter().find(|ty| dtype(*ty) == Some(of))
}

/// Shape of a tensor and its number of elements. Fails for negative sizes and overflow.
pub(super) fn shape(tensor: &TensorProto) -> Result<(Vec<usize>, u64), String> {
    let sizes: Option<Vec<usize>> = tensor.dims.iter().map(|size| usize::try_from(*size).ok()).collect();
    let sizes = sizes.ok_or_else(|| format!("its shape {:?} has a negative size", tensor.dims))?;
    let count = element_count(&sizes).filter(|count| *count <= i64::MAX as u64 / 16);
    let count = count.ok_or_else(|| format!("its shape {sizes:?} has more elements than can be counted"))?;
    Ok((sizes, count))
}

/// Size in bytes of `count` elements in `raw_data`; `None` for types without a fixed size.
pub(super) fn raw_bytes(of: DataType, count: u64) -> Option<u64> {
    (of.bits() > 0).then(|| count.saturating_mul(of.bits()).div_ceil(8))
}

/// Elements that are stored in the message, as bytes; `None` if it has no elements. Fails if they are in
/// the wrong field, in several fields, or do not match the shape.
pub(super) fn inline(tensor: &TensorProto, ty: DataType, count: u64) -> Result<Option<Vec<u8>>, String> {
    let raw = tensor.raw_data.as_ref();
    let filled = [
        raw.is_some_and(|raw| !raw.is_empty()),
        !tensor.float_data.is_empty(),
        !tensor.int32_data.is_empty(),
        !tensor.int64_data.is_empty(),
        !tensor.double_data.is_empty(),
        !tensor.uint64_data.is_empty(),
    ];
    if filled.iter().filter(|filled| **filled).count() > 1 {
        return Err("it stores elements in several fields".into());
    }
    let width = ty.bits().div_ceil(8) as usize;
    let low = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes().into_iter().take(width)).collect::<Vec<u8>>();
    let bytes = match filled {
        [true, ..] => raw.cloned().unwrap_or_default(),
        [_, true, ..] if ty == DataType::Float => tensor.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        [_, _, true, ..] if is_valid_field(data::INT32, ty) => low(&tensor.int32_data),
        [_, _, _, true, ..] if is_valid_field(data::INT64, ty) => tensor.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        [_, _, _, _, true, _] if ty == DataType::Double => tensor.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        [_, _, _, _, _, true] if is_valid_field(data::UINT64, ty) => tensor.uint64_data.iter().flat_map(|v| v.to_le_bytes().into_iter().take(width)).collect(),
        _ if filled.contains(&true) => return Err(format!("its elements are {ty:?}, but are stored in the field of another type")),
        _ => return Ok((count == 0).then(Vec::new)),
    };
    let wanted = raw_bytes(ty, count).unwrap_or(0);
    if bytes.len() as u64 == wanted {
        Ok(Some(bytes))
    } else {
        Err(format!("has {} bytes of elements, but its shape {:?} requires {wanted}", bytes.len(), tensor.dims))
    }
}

/// The elements of a float tensor with at most eight.
pub(super) fn small_floats(tensor: &TensorProto) -> Option<Vec<f32>> {
    let (_, count) = shape(tensor).ok().filter(|(_, count)| *count <= 8)?;
    let bytes = inline(tensor, DataType::Float, count).ok()??;
    Some(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Whether elements of this type can be stored in this field.
pub(super) fn is_valid_field(field: u64, ty: DataType) -> bool {
    match field {
        data::RAW => true,
        data::FLOATS => matches!(ty, DataType::Float | DataType::Complex64),
        data::DOUBLES => matches!(ty, DataType::Double | DataType::Complex128),
        data::INT64 => ty == DataType::Int64,
        data::UINT64 => matches!(ty, DataType::Uint32 | DataType::Uint64),
        data::INT32 => !matches!(ty, DataType::Float | DataType::Uint32) && ty.bits() <= 32,
        _ => false,
    }
}

/// Elements in memory.
pub(super) fn in_memory(dtype: DType, bytes: Vec<u8>) -> Arc<dyn WeightSource> {
    Arc::new(Bytes { dtype, bytes })
}

/// Elements that are stored as varints.
pub(super) struct Varints {
    /// The bytes.
    pub stored: RawTensor,
    /// Type and number of the elements.
    pub dtype: DType,
    pub count: usize,
    /// Name of the weight, for errors.
    pub name: String,
}

/// Decodes elements that are stored as varints.
pub(super) fn decode_varints(stored: &RawTensor, ty: DataType, count: u64) -> Result<Vec<u8>, String> {
    let dtype = dtype(ty).ok_or_else(|| format!("has elements of the unsupported type {ty:?}"))?;
    let count = usize::try_from(count).map_err(|e| e.to_string())?;
    let mut bytes = Vec::new();
    let source = Varints { stored: stored.clone(), dtype, count, name: String::new() };
    let mut take = |block: Block| {
        bytes.extend_from_slice(block.now.values);
        Ok(())
    };
    source.visit(1, &mut take).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// Size of a read.
const READ: usize = 64 << 10;

impl WeightSource for Varints {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let wrong = |reason: &str| Error::tensor(&self.name, reason, "the file is damaged: export it again");
        let width = self.dtype.bitsize() / 8;
        let step = block_elements(unit).min(self.count.max(1));
        let (mut waiting, mut read, mut left) = (Vec::new(), 0u64, self.count);
        let mut block: Vec<u8> = Vec::with_capacity(step.saturating_mul(width));
        loop {
            let some = self.stored.bytes().saturating_sub(read).min(READ as u64);
            let kept = waiting.len();
            waiting.resize(kept.saturating_add(some as usize), 0u8);
            if let Some(new) = waiting.get_mut(kept..) {
                self.stored.read_at(read, new)?;
            }
            read = read.saturating_add(some);
            let mut rest = waiting.as_slice();
            // A varint may continue in the next read.
            while !rest.is_empty() && (rest.len() >= 10 || read == self.stored.bytes()) {
                let value = take_varint(&mut rest).ok_or_else(|| wrong("has an unterminated varint"))?;
                left = left.checked_sub(1).ok_or_else(|| wrong("has more elements than its shape"))?;
                block.extend(value.to_le_bytes().into_iter().take(width));
                if block.len() >= step.saturating_mul(width) {
                    sink(Block::untouched(View::dense(self.dtype, &block)))?;
                    block.clear();
                }
            }
            waiting = rest.to_vec();
            if read == self.stored.bytes() {
                break;
            }
        }
        if left > 0 {
            return Err(wrong("has fewer elements than its shape"));
        }
        if block.is_empty() { Ok(()) } else { sink(Block::untouched(View::dense(self.dtype, &block))) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::varint;
    use super::*;
    use crate::store::DataFile;

    #[test]
    fn varints_are_decoded_block_by_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("numbers");
        let values: Vec<i64> = (0..200_000i64).map(|i| (i - 1000) * i * 7919).collect();
        let mut stored = Vec::new();
        values.iter().for_each(|number| varint(*number as u64, &mut stored));
        std::fs::write(&path, &stored).unwrap();
        let file = DataFile::from_file(&path, crate::files::File::open(&path).unwrap());
        let source = |count| Varints {
            stored: RawTensor::within(&file, DType::U8, vec![stored.len()], 0, stored.len() as u64),
            dtype: DType::I64,
            count,
            name: "numbers".into(),
        };
        let mut read = Vec::new();
        source(values.len())
            .visit(7, &mut |block| {
                assert!(block.now.elements() % 7 == 0 || read.len() + block.now.elements() == values.len());
                read.extend(block.now.values.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)));
                Ok(())
            })
            .unwrap();
        assert!(read == values);
        for (count, reason) in [(values.len() - 1, "more"), (values.len() + 1, "fewer")] {
            let error = source(count).visit(1, &mut |_| Ok(())).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn inline_elements_match_field_and_shape() {
        let of = |ty: DataType, tensor: TensorProto| {
            let (_, count) = shape(&tensor)?;
            inline(&tensor, ty, count)
        };
        let half = TensorProto { dims: vec![2], int32_data: vec![0x3c00, 0xc000], ..TensorProto::default() };
        assert_eq!(of(DataType::Float16, half.clone()), Ok(Some(vec![0, 0x3c, 0, 0xc0])));
        assert!(of(DataType::Float, half.clone()).is_err_and(|e| e.contains("field of another type")));
        assert!(of(DataType::Float16, TensorProto { dims: vec![3], ..half.clone() }).is_err_and(|e| e.contains("requires 6")));
        assert!(of(DataType::Float16, TensorProto { raw_data: Some(vec![0; 4]), ..half.clone() }).is_err_and(|e| e.contains("several fields")));
        assert!(of(DataType::Float16, TensorProto { dims: vec![-2], ..half.clone() }).is_err_and(|e| e.contains("negative")));
        assert!(of(DataType::Float16, TensorProto { dims: vec![1 << 40, 1 << 40], ..half }).is_err_and(|e| e.contains("counted")));
        assert_eq!(of(DataType::Float, TensorProto { dims: vec![0], ..TensorProto::default() }), Ok(Some(vec![])));
        assert_eq!(of(DataType::Float, TensorProto { dims: vec![2], ..TensorProto::default() }), Ok(None));
        assert_eq!((dtype(DataType::Int4), data_type(DType::BF16), data_type(DType::F8_E4M3)), (None, Some(DataType::Bfloat16), None));
    }
}
