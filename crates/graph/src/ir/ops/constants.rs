//! A cache of tensors that depend only on an op and sizes, for each device.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

/// Cached tensors by key, least recently used first.
type Cache<K> = Mutex<Vec<(K, Tensor)>>;

static TENSORS: Cache<String> = Mutex::new(Vec::new());
/// Scalars by dtype and the bits of the number.
static SCALARS: Cache<(DType, u64)> = Mutex::new(Vec::new());

/// Maximum number of cached tensors.
const MAX_TENSORS: usize = 24;
/// Maximum number of cached scalars.
const MAX_SCALARS: usize = 256;

/// Returns the tensor cached under `key` for this device, or computes and caches it. The key must contain
/// everything that `make` depends on.
pub fn constant(key: String, device: &Device, make: impl FnOnce(&Device) -> Result<Tensor>) -> Result<Tensor> {
    cached(&TENSORS, MAX_TENSORS, key, device, make)
}

fn cached<K: PartialEq>(cache: &Cache<K>, capacity: usize, key: K, device: &Device, make: impl FnOnce(&Device) -> Result<Tensor>) -> Result<Tensor> {
    let cache = || cache.lock().unwrap_or_else(PoisonError::into_inner);
    {
        let mut cached = cache();
        // Compares device handles instead of locations: candle refuses to combine tensors of two handles
        // of the same GPU.
        if let Some(at) = cached.iter().position(|(other, tensor)| *other == key && tensor.device().same_device(device)) {
            let entry = cached.remove(at);
            let tensor = entry.1.clone();
            cached.push(entry);
            return Ok(tensor);
        }
    }
    let tensor = make(device)?;
    let mut cached = cache();
    if cached.len() >= capacity {
        cached.remove(0);
    }
    cached.push((key, tensor.clone()));
    Ok(tensor)
}

/// A number in the dtype and on the device of a tensor, broadcast to its shape.
fn scalar(value: f64, like: &Tensor) -> Result<Tensor> {
    let make = |device: &Device| {
        let number = if like.dtype().is_float() { Tensor::new(value, device) } else { Tensor::new(value as i64, device) };
        number?.to_dtype(like.dtype())
    };
    cached(&SCALARS, MAX_SCALARS, (like.dtype(), value.to_bits()), like.device(), make)?.broadcast_as(like.shape())
}

macro_rules! scalar_ops {
    ($($name:ident $with_tensor:ident),+) => {
        /// Elementwise functions of a tensor and a number. Candle's methods without the suffix upload the
        /// number at every call; these upload it once per device. Candle's `/` multiplies by the reciprocal,
        /// which rounds differently from this division.
        pub trait ScalarOps {
            $(
                #[doc = concat!("`", stringify!($with_tensor), "` of each element and a number.")]
                fn $name(&self, value: f64) -> Result<Tensor>;
            )+
            /// Each element, limited to the range from `low` to `high`.
            fn clamp_scalar(&self, low: f64, high: f64) -> Result<Tensor>;
        }

        impl ScalarOps for Tensor {
            $(fn $name(&self, value: f64) -> Result<Tensor> {
                self.$with_tensor(&scalar(value, self)?)
            })+

            fn clamp_scalar(&self, low: f64, high: f64) -> Result<Tensor> {
                self.maximum_scalar(low)?.minimum_scalar(high)
            }
        }
    };
}

scalar_ops!(
    div_scalar div, maximum_scalar maximum, minimum_scalar minimum, eq_scalar eq, ne_scalar ne, lt_scalar lt, le_scalar le, gt_scalar gt, ge_scalar ge
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_ops_equal_candles() {
        let x = Tensor::new(&[[-2f32, 0.0, 0.5], [3.0, f32::NAN, 127.0]], &Device::Cpu).unwrap();
        let bits = |tensor: Tensor| tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap().iter().map(|x| x.to_bits()).collect();
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let x = x.to_dtype(dtype).unwrap();
            let ours: [Vec<u64>; 4] = [x.maximum_scalar(0.3), x.clamp_scalar(-1.0, f64::MAX), x.le_scalar(0.5), x.ne_scalar(0.0)].map(|x| bits(x.unwrap()));
            let expected = [x.maximum(0.3), x.clamp(-1.0, f64::MAX), x.le(0.5), x.ne(0.0)].map(|x| bits(x.unwrap()));
            assert_eq!(ours, expected, "{dtype:?}");
        }
        let x = Tensor::new(&[127.3f32, 0.1, -3.7], &Device::Cpu).unwrap();
        assert_eq!(x.div_scalar(127.5).unwrap().to_vec1::<f32>().unwrap(), [127.3f32 / 127.5, 0.1 / 127.5, -3.7 / 127.5]);
        let ids = Tensor::new(&[-1i64, 0, 7], &Device::Cpu).unwrap();
        assert_eq!(ids.ne_scalar(-1.0).unwrap().to_vec1::<u8>().unwrap(), [0, 1, 1]);
    }
}
