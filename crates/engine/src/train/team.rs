//! The processes of a data-parallel training, or of a pass that shares its calibration samples.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::communicator::{self, Communicator, Queue, RankConfig, SingleProcess, TIMEOUT};
use super::floats;
use super::objective::Items;
use super::optimizer::{self, Optimizer};
use crate::error::{Error, Result};
use crate::exec::{Collective, ManagedTensor, Pending, Segment};
use crate::work::{Cancel, lock};

/// Timeout while other ranks evaluate or write a checkpoint.
const LONG_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Processes that work together, as seen by this one; usually there is only one.
pub struct Team {
    queue: Arc<Queue>,
    /// Elements of each parameter by rank, which holds their optimizer state and updates them; empty unless
    /// the state is sharded.
    parts: Mutex<BTreeMap<String, Vec<Range<usize>>>>,
}

impl Team {
    /// Connects to the processes of the launcher's environment variables; without them, there is only
    /// this process.
    pub fn from_environment(device: &Device) -> Result<Team> {
        let config = RankConfig::from_environment()?;
        Team::new(match config {
            Some(config) => communicator::open(&config, device, TIMEOUT)?,
            None => Box::new(SingleProcess),
        })
    }

    /// A team that uses an open communicator.
    pub fn new(communicator: Box<dyn Communicator>) -> Result<Team> {
        Ok(Team { queue: Arc::new(Queue::new(communicator)?), parts: Mutex::default() })
    }

    /// The collectives for sharded tensors.
    pub fn pool(&self) -> Arc<dyn Collective> {
        self.queue.clone()
    }

    /// Rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.queue.rank()
    }

    /// Number of processes.
    pub fn size(&self) -> usize {
        self.queue.size()
    }

    /// Checks that `text` is equal on all processes; `what` names it in the error message.
    pub fn agree(&self, what: &str, text: &str) -> Result<()> {
        let (what, text) = (what.to_owned(), text.to_owned());
        self.queue.run(move |communicator| communicator::agree(communicator, &what, text.as_bytes()))
    }

    /// Barrier with a long timeout.
    pub fn wait(&self) -> Result<()> {
        self.gather(&[]).map(drop)
    }

    /// Reports to the other processes why this one stops.
    pub fn stop(&self, error: &Error) {
        let reason = error.to_string();
        // Fails only if the connection is closed already.
        let _ = self.queue.run(move |communicator| {
            communicator.stop(&reason);
            Ok(())
        });
    }

    /// All-gather with a long timeout: the bytes of every process, in rank order.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let bytes = bytes.to_vec();
        self.queue.run(move |communicator| {
            communicator.set_timeout(LONG_TIMEOUT)?;
            let all = communicator.gather_bytes(&bytes)?;
            communicator.set_timeout(TIMEOUT)?;
            Ok(all)
        })
    }

    fn gather_soon(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.queue.run(move |communicator| communicator.gather_bytes(&bytes))
    }

    /// Averages scalars, such as losses and item counts, over all processes.
    pub fn means(&self, items: Items) -> Result<Items> {
        if self.size() == 1 {
            return Ok(items);
        }
        let all = self.gather_soon(items.values().flat_map(|count| count.to_le_bytes()).collect())?;
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
        let mut own = std::mem::take(gradients);
        *gradients = self.queue.run(move |communicator| communicator::average_gradients(communicator, &mut own).map(|()| own))?;
        Ok(())
    }

    /// Returns whether any process was interrupted, and the value of `due` on rank 0.
    pub fn poll_interruption(&self, cancel: &Cancel, due: bool) -> Result<(bool, bool)> {
        let is_interrupted = cancel.check().is_err();
        let all = self.gather_soon(vec![u8::from(is_interrupted), u8::from(due)])?;
        Ok((all.iter().any(|bytes| bytes.first() == Some(&1)), all.first().is_some_and(|bytes| bytes.get(1) == Some(&1))))
    }

    /// Calls `compute` on rank 0 and broadcasts its result. The other processes wait with a long timeout.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, compute: impl FnOnce() -> Result<T>) -> Result<T> {
        let failed = |e| Error::run("the result of rank 0", e, "");
        let own = if self.rank() == 0 { serde_json::to_vec(&compute()?).map_err(failed)? } else { Vec::new() };
        let all = self.gather(&own)?;
        serde_json::from_slice(all.first().map_or(&[], Vec::as_slice)).map_err(failed)
    }

    /// Shards the optimizer state within tensors, such that all ranks have about the same number of bytes.
    pub fn shard_optimizer(&self, parameters: &BTreeMap<String, ManagedTensor>, optimizer: &dyn Optimizer) {
        let dims = parameters.iter().map(|(name, kept)| (name.as_str(), kept.dims()));
        *lock(&self.parts) = optimizer::shard(optimizer, dims, self.size()).0;
    }

    /// Whether the optimizer state is sharded.
    pub fn is_optimizer_sharded(&self) -> bool {
        !lock(&self.parts).is_empty()
    }

    /// The elements of a parameter that this process updates, as a part of the flat tensor; `None` if it
    /// updates all.
    pub fn own_part(&self, name: &str) -> Option<Range<usize>> {
        lock(&self.parts).get(name)?.get(self.rank()).cloned()
    }

    /// Segments of concatenated parameters; `None` unless the optimizer state is sharded.
    fn segments<'n>(&self, names: impl Iterator<Item = &'n String>) -> Option<Vec<Segment>> {
        let parts = lock(&self.parts);
        let (mut start, mut segments) = (0, Vec::new());
        for ranges in names.map(|name| parts.get(name)) {
            let ranges = ranges?;
            segments
                .extend(ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()).map(|(rank, range)| (rank, start + range.start..start + range.end)));
            start += ranges.last().map_or(0, |range| range.end);
        }
        Some(segments)
    }

    /// Starts the sum of the gradients of a bucket over all processes. The result is flat; if the optimizer
    /// state is sharded, it has the elements that this process updates.
    pub fn start_sum(&self, gradients: &BTreeMap<String, Tensor>) -> Result<Pending<Tensor>> {
        let flat = communicator::flat(gradients.values())?;
        Ok(match self.segments(gradients.keys()) {
            Some(segments) => self.queue.start_reduce_scatter(&flat, segments),
            None => self.queue.start(move |communicator| communicator.sum(&flat)),
        })
    }

    /// Gathers updated parameters from the processes that updated their elements, in place.
    pub fn gather_parameters(&self, parameters: &BTreeMap<String, Tensor>) -> Result<()> {
        if !self.is_optimizer_sharded() {
            return Ok(());
        }
        let unassigned = || Error::run("a parameter", "is not assigned to processes", "");
        let (mut rest, mut pending) = (parameters.iter(), Vec::new());
        for length in communicator::buckets(&parameters.values().map(Tensor::elem_count).collect::<Vec<_>>()) {
            let bucket: Vec<(&String, &Tensor)> = rest.by_ref().take(length).collect();
            let segments = self.segments(bucket.iter().map(|(name, _)| *name)).ok_or_else(unassigned)?;
            let flat = communicator::flat(bucket.iter().map(|(_, tensor)| *tensor))?;
            pending.push((bucket, self.queue.start_all_gather(&flat, segments)));
        }
        for (bucket, gathered) in pending {
            let (gathered, mut start) = (gathered.wait()?, 0);
            for (name, parameter) in bucket {
                let count = parameter.elem_count();
                let part = gathered.narrow(0, start, count).and_then(|part| part.reshape(parameter.dims()));
                part.and_then(|part| floats::assign(parameter, &part)).map_err(|e| Error::candle(format!("parameter `{name}` of all processes"), e))?;
                start += count;
            }
        }
        Ok(())
    }
}
