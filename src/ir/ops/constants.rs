//! Tensors that follow from an op and sizes alone: made once for each device, and kept while they are in use.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};

/// How many are kept.
const MOST: usize = 24;

/// The ones asked for last stand at the end.
static KEPT: Mutex<Vec<(String, Tensor)>> = Mutex::new(Vec::new());

/// Returns the tensor cached under `key` on this device, or computes and caches it. The key must contain everything that `make` depends on.
pub(crate) fn constant(key: String, device: &Device, make: impl FnOnce(&Device) -> Result<Tensor>) -> Result<Tensor> {
    let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    {
        let mut kept = kept();
        // Not by location: a GPU that is opened twice is two devices, whose tensors candle refuses to combine.
        if let Some(at) = kept.iter().position(|(other, tensor)| *other == key && tensor.device().same_device(device)) {
            let entry = kept.remove(at);
            let tensor = entry.1.clone();
            kept.push(entry);
            return Ok(tensor);
        }
    }
    let tensor = make(device)?;
    let mut kept = kept();
    if kept.len() >= MOST {
        kept.remove(0);
    }
    kept.push((key, tensor.clone()));
    Ok(tensor)
}
