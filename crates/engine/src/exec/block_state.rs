//! Activations cached between the blocks of a graph.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::bytes_of;
use super::memory::{SpillFile, SpilledTensor};
use super::run::{PartialRun, Snapshot};
use crate::error::{Error, Result};
use crate::ir::ValueId;

/// The state of a run at the start of a block.
#[derive(Debug, Clone)]
pub(super) struct BlockState {
    snapshot: Snapshot,
    /// Spilled values with their indices.
    spilled: Vec<(usize, SpilledTensor)>,
}

impl BlockState {
    /// A state entirely in memory.
    pub fn new(snapshot: Snapshot) -> BlockState {
        BlockState { snapshot, spilled: Vec::new() }
    }

    /// Moves float values to a file.
    pub fn spill(&mut self, file: &Arc<SpillFile>) -> Result<()> {
        for (position, value) in self.snapshot.values.iter_mut().enumerate() {
            if let Some(tensor) = value.take_if(|tensor| tensor.dtype().is_float()) {
                self.spilled.push((position, file.write(&tensor)?));
            }
        }
        Ok(())
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> u64 {
        self.snapshot.values.iter().flatten().map(bytes_of).sum()
    }

    /// Whether the state contains a value.
    pub fn contains(&self, id: ValueId) -> bool {
        self.snapshot.values[id.index()].is_some() || self.spilled.iter().any(|(position, _)| *position == id.index())
    }

    /// A value of the state.
    pub fn get(&self, id: ValueId, device: &Device) -> Result<Tensor> {
        match (&self.snapshot.values[id.index()], self.spilled.iter().find(|(position, _)| *position == id.index())) {
            (Some(tensor), _) => Ok(tensor.clone()),
            (None, Some((_, spilled))) => spilled.read(device),
            (None, None) => Err(Error::graph("a state between blocks", "is missing a value")),
        }
    }

    /// The entire state, on a device.
    pub fn snapshot(&self, device: &Device) -> Result<Snapshot> {
        let mut snapshot = self.snapshot.clone();
        for (position, spilled) in &self.spilled {
            snapshot.values[*position] = Some(spilled.read(device)?);
        }
        Ok(snapshot)
    }
}

/// Bytes of a suspended run in addition to the state that it started from.
pub(super) fn run_bytes(run: &PartialRun, start: &BlockState) -> u64 {
    let own = run.values.iter().zip(&start.snapshot.values).filter(|(_, before)| before.is_none());
    own.filter_map(|(value, _)| value.as_ref()).map(bytes_of).sum()
}
