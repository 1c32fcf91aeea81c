//! Elements of an axis by their places, which follow from sizes alone.

use candle_core::{Device, Result, Tensor};

use super::constants::constant;
use super::gradient::wide;

/// Which elements of one axis another one has: made once for each device and key.
pub(super) fn places(key: String, device: &Device, make: impl FnOnce() -> Vec<u32>) -> Result<Tensor> {
    constant(key, device, |device| {
        let places = make();
        let count = places.len();
        Tensor::from_vec(places, count, device)
    })
}

/// The elements at these places.
pub(super) fn taken(x: &Tensor, places: &Tensor, axis: usize) -> Result<Tensor> {
    x.contiguous()?.index_select(places, axis)
}

/// The gradient of what [`taken`] gives, for a tensor with an axis of this size.
pub(super) fn given_back(gradient: &Tensor, places: &Tensor, axis: usize, size: usize) -> Result<Tensor> {
    let mut dims = gradient.dims().to_vec();
    dims[axis] = size;
    let rows = wide(gradient)?.contiguous()?;
    Tensor::zeros(dims, rows.dtype(), rows.device())?.index_add(places, &rows, axis)?.to_dtype(gradient.dtype())
}
