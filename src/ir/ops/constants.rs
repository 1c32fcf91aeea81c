//! Tensors that follow from an op and sizes alone: made once for each device, and kept while they are in use.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, DeviceLocation, Result, Tensor};

/// How many are kept.
const MOST: usize = 24;

/// The ones asked for last stand at the end.
static KEPT: Mutex<Vec<(String, DeviceLocation, Tensor)>> = Mutex::new(Vec::new());

/// What `make` makes on a device. The key says what it depends on.
pub(crate) fn constant(key: String, device: &Device, make: impl FnOnce(&Device) -> Result<Tensor>) -> Result<Tensor> {
    let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let place = device.location();
    {
        let mut kept = kept();
        if let Some(at) = kept.iter().position(|(other, location, _)| *other == key && *location == place) {
            let entry = kept.remove(at);
            let tensor = entry.2.clone();
            kept.push(entry);
            return Ok(tensor);
        }
    }
    let tensor = make(device)?;
    let mut kept = kept();
    if kept.len() >= MOST {
        kept.remove(0);
    }
    kept.push((key, place, tensor.clone()));
    Ok(tensor)
}
