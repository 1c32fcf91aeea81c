//! Tensors in host memory as slices.

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};

use super::transfer::{self, Cause};

/// Calls a function with the elements of an f32 tensor in host memory that has no gaps.
///
/// # Errors
/// The tensor is none of that; or the function's.
pub(crate) fn read<R>(tensor: &Tensor, function: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("not f32 in one piece of host memory")
    };
    match values.get(start..end) {
        Some(values) => function(values),
        None => bail!("it is longer than its memory"),
    }
}

/// The tensor as f32 in one piece of host memory; itself where it is that.
///
/// # Errors
/// Memory runs out.
pub(crate) fn floats_on_host(tensor: &Tensor, cause: Cause) -> Result<Tensor> {
    transfer::beside(tensor, &Device::Cpu, cause)?.to_dtype(DType::F32)?.contiguous()
}

/// Bytes that the elements of a tensor take.
pub(crate) fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}
