//! A cache of tensors that depend only on an op and sizes, for each device.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};

/// How many are cached.
const MOST: usize = 24;

/// Least recently used first.
static CACHE: Mutex<Vec<(String, Tensor)>> = Mutex::new(Vec::new());

/// Returns the tensor cached under `key` on this device, or computes and caches it. The key must contain everything that `make` depends on.
pub(crate) fn constant(key: String, device: &Device, make: impl FnOnce(&Device) -> Result<Tensor>) -> Result<Tensor> {
    let cache = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    {
        let mut cached = cache();
        // Not by location: a GPU that is opened twice is two devices, whose tensors candle refuses to combine.
        if let Some(at) = cached.iter().position(|(other, tensor)| *other == key && tensor.device().same_device(device)) {
            let entry = cached.remove(at);
            let tensor = entry.1.clone();
            cached.push(entry);
            return Ok(tensor);
        }
    }
    let tensor = make(device)?;
    let mut cached = cache();
    if cached.len() >= MOST {
        cached.remove(0);
    }
    cached.push((key, tensor.clone()));
    Ok(tensor)
}
