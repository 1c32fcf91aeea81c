//! Tensors in host memory as slices that are read and changed where they lie.

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use crate::exec::transfer::{self, Cause};
pub(super) use crate::exec::{change, read};

/// Elements of one job of a loop over single elements, a multiple of [`codes::BLOCK`](crate::kernel::codes::BLOCK).
pub(super) const CHUNK: usize = 1 << 14;

/// The tensor as f32 in one piece of host memory; itself where it is that.
///
/// # Errors
/// Memory runs out.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    crate::exec::floats_on_host(tensor, Cause::Offload)
}

/// Puts other elements into a tensor, on whichever device.
pub(super) fn assign(tensor: &Tensor, value: &Tensor) -> Result<()> {
    if tensor.dims() != value.dims() || !tensor.is_contiguous() {
        bail!("{:?} cannot take the place of {:?}", value.dims(), tensor.dims());
    }
    let value = transfer::beside(value, tensor.device(), Cause::Offload)?.to_dtype(tensor.dtype())?;
    tensor.flatten_all()?.slice_set(&value.flatten_all()?.contiguous()?, 0, 0)
}

/// Sum of squares; the same with any number of threads.
pub(super) fn squares(values: &[f32]) -> f64 {
    values.par_chunks(CHUNK).map(crate::kernel::update::squares).collect::<Vec<_>>().iter().sum()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn changes_stay() {
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
