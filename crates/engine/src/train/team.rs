//! The processes of a data-parallel training, or of a pass that shares its calibration samples.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::communicator::{self, Communicator, RankConfig, SingleProcess, TIMEOUT};
use super::objective::Items;
use crate::error::{Error, Result};
use crate::exec::{Collective, ManagedTensor};
use crate::work::{Cancel, lock};

/// Timeout while other ranks evaluate or write a checkpoint.
const LONG_TIMEOUT: Duration = Duration::from_secs(86_400);

/// The communicator of a team.
struct Connection(Mutex<Box<dyn Communicator>>);

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Collective for Connection {
    fn rank(&self) -> usize {
        lock(&self.0).rank()
    }

    fn size(&self) -> usize {
        lock(&self.0).size()
    }

    fn broadcast(&self, tensor: &Tensor, from: usize) -> Result<Tensor> {
        lock(&self.0).broadcast(tensor, from)
    }

    fn sum(&self, tensor: &Tensor) -> Result<Tensor> {
        lock(&self.0).sum(tensor)
    }
}

/// Processes that work together, as seen by this one; usually there is only one.
pub struct Team {
    communicator: Arc<Connection>,
    /// Rank that holds the optimizer state of each parameter; empty unless the state is sharded.
    owners: RefCell<BTreeMap<String, usize>>,
}

impl Team {
    /// Connects to the processes of the launcher's environment variables; without them, there is only
    /// this process.
    pub fn from_environment(device: &Device) -> Result<Team> {
        let config = RankConfig::from_environment()?;
        Ok(Team::new(match config {
            Some(config) => communicator::open(&config, device, TIMEOUT)?,
            None => Box::new(SingleProcess),
        }))
    }

    /// A team that uses an open communicator.
    pub fn new(communicator: Box<dyn Communicator>) -> Team {
        Team { communicator: Arc::new(Connection(Mutex::new(communicator))), owners: RefCell::default() }
    }

    fn connection(&self) -> MutexGuard<'_, Box<dyn Communicator>> {
        lock(&self.communicator.0)
    }

    /// The collectives for sharded tensors.
    pub fn pool(&self) -> Arc<dyn Collective> {
        self.communicator.clone()
    }

    /// Rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.connection().rank()
    }

    /// Number of processes.
    pub fn size(&self) -> usize {
        self.connection().size()
    }

    /// Checks that `text` is equal on all processes; `what` names it in the error message.
    pub fn agree(&self, what: &str, text: &str) -> Result<()> {
        communicator::agree(&mut **self.connection(), what, text.as_bytes())
    }

    /// Barrier with a long timeout.
    pub fn wait(&self) -> Result<()> {
        self.gather(&[]).map(drop)
    }

    /// Reports to the other processes why this one stops.
    pub fn stop(&self, error: &Error) {
        self.connection().stop(&error.to_string());
    }

    /// All-gather with a long timeout: the bytes of every process, in rank order.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut communicator = self.connection();
        communicator.set_timeout(LONG_TIMEOUT)?;
        let all = communicator.gather_bytes(bytes)?;
        communicator.set_timeout(TIMEOUT)?;
        Ok(all)
    }

    /// Averages scalars, such as losses and item counts, over all processes.
    pub fn means(&self, items: Items) -> Result<Items> {
        let mut communicator = self.connection();
        if communicator.size() == 1 {
            return Ok(items);
        }
        let counts: Vec<u8> = items.values().flat_map(|count| count.to_le_bytes()).collect();
        let all = communicator.gather_bytes(&counts)?;
        let mut sums = vec![0.0; items.len()];
        for bytes in &all {
            for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *sum += f64::from_le_bytes(*bytes);
            }
        }
        Ok(items.into_keys().zip(sums).map(|(name, sum)| (name, sum / all.len() as f64)).collect())
    }

    /// Averages gradients over all processes.
    pub fn average(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        communicator::average_gradients(&mut **self.connection(), gradients)
    }

    /// Returns whether any process was interrupted, and the value of `due` on rank 0.
    pub fn poll_interruption(&self, cancel: &Cancel, due: bool) -> Result<(bool, bool)> {
        let is_interrupted = cancel.check().is_err();
        let all = self.connection().gather_bytes(&[u8::from(is_interrupted), u8::from(due)])?;
        Ok((all.iter().any(|bytes| bytes.first() == Some(&1)), all.first().is_some_and(|bytes| bytes.get(1) == Some(&1))))
    }

    /// Calls `compute` on rank 0 and broadcasts its result. The other processes wait with a long timeout.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, compute: impl FnOnce() -> Result<T>) -> Result<T> {
        let failed = |e| Error::run("the result of rank 0", e, "");
        let own = if self.rank() == 0 { serde_json::to_vec(&compute()?).map_err(failed)? } else { Vec::new() };
        let all = self.gather(&own)?;
        serde_json::from_slice(all.first().map_or(&[], Vec::as_slice)).map_err(failed)
    }

    /// Shards the optimizer's state across ranks.
    pub fn shard_optimizer(&self, parameters: &BTreeMap<String, ManagedTensor>) {
        let bytes = parameters.iter().map(|(name, kept)| (name.clone(), kept.size())).collect();
        *self.owners.borrow_mut() = communicator::assign_owners(&bytes, self.size());
    }

    /// Whether the optimizer state is sharded.
    pub fn is_optimizer_sharded(&self) -> bool {
        !self.owners.borrow().is_empty()
    }

    /// Whether this process updates a parameter.
    pub fn owns(&self, name: &str) -> bool {
        self.owners.borrow().get(name).is_none_or(|owner| *owner == self.rank())
    }

    /// Broadcasts updated parameters from their owners, in place.
    pub fn broadcast_parameters(&self, parameters: &BTreeMap<String, Tensor>) -> Result<()> {
        let owners = self.owners.borrow();
        if owners.is_empty() {
            return Ok(());
        }
        communicator::broadcast_parameters(&mut **self.connection(), parameters, &owners)
    }
}
