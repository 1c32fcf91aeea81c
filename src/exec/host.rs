//! Tensors in host memory as slices that are read and changed where they lie.

use std::cell::Cell;
use std::marker::PhantomData;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;

use super::transfer::{self, Cause};
use crate::ir::ops::contiguous;

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
    contiguous(&transfer::beside(tensor, &Device::Cpu, cause)?.to_dtype(DType::F32)?)
}

/// Bytes that the elements of a tensor take.
pub(crate) fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}

/// A type of elements that are changed in place.
pub(crate) trait Element: Sized {
    fn of(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

impl Element for f32 {
    fn of(storage: &mut CpuStorage) -> Option<&mut [f32]> {
        if let CpuStorage::F32(values) = storage { Some(values) } else { None }
    }
}

impl Element for u8 {
    fn of(storage: &mut CpuStorage) -> Option<&mut [u8]> {
        if let CpuStorage::U8(values) = storage { Some(values) } else { None }
    }
}

/// The bits of 16-bit floats.
impl Element for u16 {
    fn of(storage: &mut CpuStorage) -> Option<&mut [u16]> {
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
        let values = layout.contiguous_offsets().and_then(|(start, end)| T::of(storage)?.get_mut(start..end));
        match (values, self.function.take()) {
            (Some(values), Some(function)) => function(values),
            _ => bail!("it does not lie in one piece, or is of another type"),
        }
    }
}

/// Calls a function with the elements of a tensor in host memory. Others that share the memory see the change.
///
/// # Errors
/// The tensor is on another device, has another type or gaps; or the function's.
pub(crate) fn change<T: Element>(tensor: &Tensor, function: impl FnOnce(&mut [T]) -> Result<()>) -> Result<()> {
    tensor.inplace_op1(&Change { function: Cell::new(Some(function)), element: PhantomData })
}
