//! Gathering elements of an axis by indices that depend only on sizes.

use candle_core::{Device, Result, Tensor};

use super::constants::constant;
use super::gradient::wide;

/// Indices into an axis as a tensor, cached by device and key.
pub(super) fn cached_indices(key: String, device: &Device, make: impl FnOnce() -> Vec<u32>) -> Result<Tensor> {
    constant(key, device, |device| {
        let indices = make();
        let count = indices.len();
        Tensor::from_vec(indices, count, device)
    })
}

/// Gathers elements of an axis by index.
pub(super) fn gather(x: &Tensor, indices: &Tensor, axis: usize) -> Result<Tensor> {
    x.contiguous()?.index_select(indices, axis)
}

/// The gradient of [`gather`] with respect to a tensor whose axis has this size.
pub(super) fn gather_gradient(gradient: &Tensor, indices: &Tensor, axis: usize, size: usize) -> Result<Tensor> {
    let mut dims = gradient.dims().to_vec();
    dims[axis] = size;
    let rows = wide(gradient)?.contiguous()?;
    Tensor::zeros(dims, rows.dtype(), rows.device())?.index_add(indices, &rows, axis)?.to_dtype(gradient.dtype())
}
