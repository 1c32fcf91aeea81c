//! Access to tensors in host memory as slices, also in place.

use std::cell::Cell;
use std::marker::PhantomData;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;

use super::transfer::{self, Cause};
use crate::ir::ops::contiguous;

/// Calls a function with the elements of a contiguous f32 tensor in host memory.
pub fn read<R>(tensor: &Tensor, function: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("the tensor is not contiguous f32 in host memory")
    };
    match values.get(start..end) {
        Some(values) => function(values),
        None => bail!("the tensor is longer than its storage"),
    }
}

/// The tensor as contiguous f32 in host memory; not copied if it already is.
pub fn floats_on_host(tensor: &Tensor, cause: Cause) -> Result<Tensor> {
    contiguous(&transfer::move_to(tensor, &Device::Cpu, cause)?.to_dtype(DType::F32)?)
}

/// Size of the elements of a tensor in bytes.
pub fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}

/// An element type that can be changed in place.
pub trait Element: Sized {
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

impl Element for f32 {
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [f32]> {
        if let CpuStorage::F32(values) = storage { Some(values) } else { None }
    }
}

impl Element for u8 {
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [u8]> {
        if let CpuStorage::U8(values) = storage { Some(values) } else { None }
    }
}

/// The bits of 16-bit floats.
impl Element for u16 {
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [u16]> {
        match storage {
            CpuStorage::BF16(values) => Some(values.reinterpret_cast_mut()),
            CpuStorage::F16(values) => Some(values.reinterpret_cast_mut()),
            _ => None,
        }
    }
}

struct Change<T, F> {
    function: Cell<Option<F>>,
    element: PhantomData<T>,
}

impl<T: Element, F: FnOnce(&mut [T]) -> Result<()>> InplaceOp1 for Change<T, F> {
    fn name(&self) -> &'static str {
        "change"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let values = layout.contiguous_offsets().and_then(|(start, end)| T::slice_mut(storage)?.get_mut(start..end));
        match (values, self.function.take()) {
            (Some(values), Some(function)) => function(values),
            _ => bail!("the tensor is not contiguous, or has another type"),
        }
    }
}

/// Calls a function with the mutable elements of a tensor in host memory. Tensors that share the storage
/// change, too. Fails if the tensor is on another device, has another type or is not contiguous.
pub fn change<T: Element>(tensor: &Tensor, function: impl FnOnce(&mut [T]) -> Result<()>) -> Result<()> {
    tensor.inplace_op1(&Change { function: Cell::new(Some(function)), element: PhantomData })
}
