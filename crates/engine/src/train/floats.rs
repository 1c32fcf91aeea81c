//! In-place access to the elements of tensors in host memory.

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use crate::error::Error;
use crate::exec::transfer::{self, Cause};
pub(super) use crate::exec::{change, read};

/// Elements of one job of an elementwise loop, a multiple of
/// [`dynamic_8bit::BLOCK`](crate::kernel::dynamic_8bit::BLOCK).
pub(super) const CHUNK: usize = 1 << 14;

/// Converts an error of an operation on the tensor with this name.
pub(super) fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    let what = format!("tensor `{name}`");
    move |e| Error::candle(what, e)
}

/// Returns the tensor as contiguous f32 on the host, without a copy if it already is.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    crate::exec::floats_on_host(tensor, Cause::Offload)
}

/// Overwrites the elements of a tensor in place, with a value on any device.
pub(super) fn assign(tensor: &Tensor, value: &Tensor) -> Result<()> {
    if tensor.dims() != value.dims() || !tensor.is_contiguous() {
        bail!("a value of shape {:?} cannot replace a tensor of shape {:?}", value.dims(), tensor.dims());
    }
    let value = transfer::move_to(value, tensor.device(), Cause::Offload)?.to_dtype(tensor.dtype())?;
    tensor.flatten_all()?.slice_set(&value.flatten_all()?.contiguous()?, 0, 0)
}

/// Sum of squares, independent of the number of threads.
pub(super) fn squares(values: &[f32]) -> f64 {
    values.par_chunks(CHUNK).map(crate::kernel::update::squares).collect::<Vec<_>>().iter().sum()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn changes_are_in_place() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let rows = tensor.narrow(0, 1, 1).unwrap();
        let fill = |values: &mut [f32]| {
            values.fill(2.0);
            Ok(())
        };
        change(&rows, fill).unwrap();
        assert_eq!(tensor.to_vec2::<f32>().unwrap(), [[0.0; 3], [2.0; 3]]);
        assert_eq!(read(&tensor, |values| Ok(squares(values))).unwrap(), 12.0);
        assert!(change(&tensor.t().unwrap(), fill).is_err());
        assert!(change::<u8>(&tensor, |_| Ok(())).is_err());
        assign(&tensor, &tensor.ones_like().unwrap()).unwrap();
        assert_eq!(read(&rows, |values| Ok(values.to_vec())).unwrap(), [1.0; 3]);
        assert!(assign(&tensor, &rows).is_err());
        let scalar = Tensor::new(1f32, &Device::Cpu).unwrap();
        assign(&scalar, &Tensor::new(3f32, &Device::Cpu).unwrap()).unwrap();
        assert_eq!(scalar.to_scalar::<f32>().unwrap(), 3.0);
    }
}
