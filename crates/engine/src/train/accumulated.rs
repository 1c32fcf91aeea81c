//! Losses and gradients of the micro-batches of a step.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::Weights;
use super::trainer::{MASTER, accumulate};
use crate::error::{Error, Result};
use crate::exec::{ManagedTensor, MemoryCategory, MemoryTracker, Pending, Placement, bytes_of};

/// Losses and gradients accumulated over the micro-batches of a step. They stay on the device, unless
/// parameters are offloaded.
pub(super) struct Accumulated {
    pub losses: BTreeMap<&'static str, Tensor>,
    pub gradients: BTreeMap<String, ManagedTensor>,
    /// Placement of the gradients until the optimizer step.
    pub home: Placement,
    /// The last gradient of a sharded parameter, which is being summed over the processes, and its bytes.
    pub reducing: Option<(String, u64, Pending<Tensor>)>,
    pub statistics: Vec<(String, Tensor)>,
}

impl Accumulated {
    /// Adds the gradient of a trained parameter. If it is sharded, the sum over processes runs in the
    /// background until the next gradient.
    pub fn add(&mut self, tracker: &MemoryTracker, weights: &Weights, name: String, gradient: &Tensor) -> Result<()> {
        let gradient = gradient.to_dtype(MASTER).map_err(|e| Error::candle(format!("gradient of `{name}`"), e))?;
        let pending = weights.trained.get(&name).map(|parameter| parameter.start_sum(&gradient)).transpose()?.flatten();
        let Some(pending) = pending else { return self.add_own(tracker, weights, &name, gradient) };
        self.settle(tracker, weights)?;
        let bytes = bytes_of(&gradient);
        tracker.allocate_named(MemoryCategory::Gradients, &name, bytes)?;
        self.reducing = Some((name, bytes, pending));
        Ok(())
    }

    /// Waits for the sum over processes that runs in the background.
    pub fn settle(&mut self, tracker: &MemoryTracker, weights: &Weights) -> Result<()> {
        let Some((name, bytes, pending)) = self.reducing.take() else { return Ok(()) };
        let dims = weights.trained.get(&name).map_or(&[][..], ManagedTensor::local_dims);
        let own = pending.wait()?.reshape(dims).map_err(|e| Error::candle(format!("gradient of `{name}`"), e))?;
        tracker.release_named(MemoryCategory::Gradients, &name, bytes);
        self.add_own(tracker, weights, &name, own)
    }

    /// Adds the part of a gradient that this process stores.
    fn add_own(&mut self, tracker: &MemoryTracker, weights: &Weights, name: &str, gradient: Tensor) -> Result<()> {
        let (bytes, retained) = accumulate(&mut self.gradients, &self.home, weights.trained.get(name), name, gradient)?;
        tracker.allocate_named(MemoryCategory::Gradients, name, bytes)?;
        tracker.release_named(MemoryCategory::Gradients, name, bytes - retained);
        Ok(())
    }
}
