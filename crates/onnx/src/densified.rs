//! Sparse initializers as dense tensors, for passes that run the model.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::elements;
use super::model_file::ModelFile;
use super::proto::{DataType, SparseTensorProto, TensorProto};

/// Maximum number of elements of all sparse initializers: 1 GiB of floats.
const MAX_ELEMENTS: u64 = 1 << 28;

impl ModelFile {
    /// The sparse initializers of the graph. Fails if an index is out of range or a tensor is too large.
    pub(super) fn dense_initializers(&self) -> Result<Vec<TensorProto>, String> {
        let (sparse, mut left) = (self.model.graph.iter().flat_map(|graph| &graph.sparse_initializer), MAX_ELEMENTS);
        sparse.map(|sparse| self.dense(sparse, &mut left).map_err(|reason| format!("sparse initializer `{}`: {reason}", name(sparse)))).collect()
    }

    /// A sparse initializer as a dense tensor. `left` is the number of elements that it and all later ones
    /// may have.
    fn dense(&self, sparse: &SparseTensorProto, left: &mut u64) -> Result<TensorProto, String> {
        let (Some(values), Some(indices)) = (&sparse.values, &sparse.indices) else { return Err("its values or indices are missing".into()) };
        let dense = TensorProto { name: values.name.clone(), data_type: values.data_type, dims: sparse.dims.clone(), ..TensorProto::default() };
        let (shape, count) = elements::shape(&dense)?;
        let too_large = || format!("it has {count} elements, and all sparse initializers may have {MAX_ELEMENTS}");
        *left = left.checked_sub(count).ok_or_else(too_large)?;
        let ty = values.data_type();
        let width = elements::raw_bytes(ty, 8).and_then(|bytes| usize::try_from(bytes / 8).ok()).filter(|width| *width > 0 && ty.bits() >= 8);
        let width = width.ok_or_else(|| format!("its elements are {ty:?}"))?;
        let bytes = self.all_elements(values)?;
        let places = self.all_elements(indices)?;
        let places: Vec<i64> = places.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        // Positions in row-major order, or one index per axis.
        let per_element = if indices.dims.len() == 2 { shape.len() } else { 1 };
        let sizes = if indices.dims.len() == 2 { shape } else { vec![usize::try_from(count).map_err(|e| e.to_string())?] };
        let stored = bytes.len().checked_div(width).unwrap_or(0);
        if indices.data_type() != DataType::Int64 || per_element == 0 || places.len() != stored.saturating_mul(per_element) {
            return Err(format!("it has {stored} values and {} indices of type {:?}", places.len(), indices.data_type()));
        }
        let mut raw = vec![0u8; usize::try_from(count).map_err(|e| e.to_string())?.saturating_mul(width)];
        for (place, value) in places.chunks_exact(per_element).zip(bytes.chunks_exact(width)) {
            let position = place.iter().zip(&sizes).try_fold(0usize, |position, (at, size)| {
                let at = usize::try_from(*at).ok().filter(|at| at < size).ok_or_else(|| format!("index {at} is out of range for {size} elements"))?;
                Ok::<usize, String>(position.saturating_mul(*size).saturating_add(at))
            })?;
            let start = position.saturating_mul(width);
            raw.get_mut(start..start.saturating_add(width)).into_iter().for_each(|element| element.copy_from_slice(value));
        }
        Ok(TensorProto { raw_data: Some(raw), ..dense })
    }

    /// The bytes of all elements of a tensor.
    fn all_elements(&self, tensor: &TensorProto) -> Result<Vec<u8>, String> {
        if let Some(bytes) = self.out_of_line_elements(tensor) {
            return bytes;
        }
        let (_, count) = elements::shape(tensor)?;
        elements::inline(tensor, tensor.data_type(), count)?.ok_or_else(|| "it has no elements".into())
    }
}

fn name(sparse: &SparseTensorProto) -> &str {
    sparse.values.as_ref().map_or("", |values| values.name())
}
