//! Several processes that make one step together.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::communicator::{self, Alone, Communicator, PATIENCE, Place};
use super::objective::Items;
use crate::error::{Error, Result};
use crate::exec::{Kept, Pool};
use crate::work::{Cancel, lock};

/// How long others may write a checkpoint or evaluate.
const ENDLESS: Duration = Duration::from_secs(86_400);

/// What a team's processes talk over.
struct Connection(Mutex<Box<dyn Communicator>>);

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Pool for Connection {
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

/// This process among others; most often there are none.
pub struct Team {
    communicator: Arc<Connection>,
    /// Who keeps the optimizer's state of which parameter, where it is shared out.
    owners: RefCell<BTreeMap<String, usize>>,
}

impl Team {
    /// The processes that the environment names, or this one alone.
    ///
    /// # Errors
    /// Variables contradict each other, or processes do not come.
    pub fn from_environment(device: &Device) -> Result<Team> {
        let place = Place::from_environment()?;
        Ok(Team::of(match place {
            Some(place) => communicator::open(&place, device, PATIENCE)?,
            None => Box::new(Alone),
        }))
    }

    /// Over a connection that is there.
    pub fn of(communicator: Box<dyn Communicator>) -> Team {
        Team { communicator: Arc::new(Connection(Mutex::new(communicator))), owners: RefCell::default() }
    }

    fn connection(&self) -> MutexGuard<'_, Box<dyn Communicator>> {
        lock(&self.communicator.0)
    }

    /// Its processes, for tensors that they share out.
    pub fn pool(&self) -> Arc<dyn Pool> {
        self.communicator.clone()
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.connection().rank()
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.connection().size()
    }

    /// Holds all processes to the same: what it is, and a text that stands for it.
    ///
    /// # Errors
    /// Another process has something else, or is gone.
    pub fn agree(&self, what: &str, text: &str) -> Result<()> {
        communicator::agree(&mut **self.connection(), what, text.as_bytes())
    }

    /// Returns when all processes have come here, however long each has had to work before.
    ///
    /// # Errors
    /// Another process is gone.
    pub fn wait(&self) -> Result<()> {
        self.gather_patiently(&[]).map(drop)
    }

    /// Tells the others why this process stops.
    pub fn stop(&self, error: &Error) {
        self.connection().stop(&error.to_string());
    }

    fn gather_patiently(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut communicator = self.connection();
        communicator.set_patience(ENDLESS)?;
        let all = communicator.gather_bytes(bytes)?;
        communicator.set_patience(PATIENCE)?;
        Ok(all)
    }

    /// Means of figures over all processes: of losses, and of items, by which the mean of gradients is divided.
    ///
    /// # Errors
    /// Another process is gone.
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

    /// Means of gradients over all processes.
    ///
    /// # Errors
    /// Another process is gone.
    pub fn average(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        communicator::average_gradients(&mut **self.connection(), gradients)
    }

    /// Whether any process has been told to stop, and what the first one says of something that is `due`.
    ///
    /// # Errors
    /// Another process is gone.
    pub fn stopped(&self, cancel: &Cancel, due: bool) -> Result<(bool, bool)> {
        let here = cancel.check().is_err();
        let all = self.connection().gather_bytes(&[u8::from(here), u8::from(due)])?;
        Ok((all.iter().any(|bytes| bytes.first() == Some(&1)), all.first().is_some_and(|bytes| bytes.get(1) == Some(&1))))
    }

    /// What the first process finds, on all of them; the others do not look for it, and wait however long it takes.
    ///
    /// # Errors
    /// Those of `find`; another process is gone.
    pub fn told<T: Serialize + DeserializeOwned>(&self, find: impl FnOnce() -> Result<T>) -> Result<T> {
        let failed = |e| Error::run("what the first process has found", e, "");
        let own = if self.rank() == 0 { serde_json::to_vec(&find()?).map_err(failed)? } else { Vec::new() };
        let all = self.gather_patiently(&own)?;
        serde_json::from_slice(all.first().map_or(&[], Vec::as_slice)).map_err(failed)
    }

    /// Shares the optimizer's state out.
    pub fn share_out(&self, parameters: &BTreeMap<String, Kept>) {
        let bytes = parameters.iter().map(|(name, kept)| (name.clone(), kept.size())).collect();
        *self.owners.borrow_mut() = communicator::owners(&bytes, self.size());
    }

    /// Whether the optimizer's state is shared out.
    pub fn shares_out(&self) -> bool {
        !self.owners.borrow().is_empty()
    }

    /// Whether this process changes a parameter.
    pub fn owns(&self, name: &str) -> bool {
        self.owners.borrow().get(name).is_none_or(|owner| *owner == self.rank())
    }

    /// Gives every process what the owners of parameters have made of them.
    ///
    /// # Errors
    /// Another process is gone.
    pub fn share(&self, parameters: &BTreeMap<String, Tensor>) -> Result<()> {
        let owners = self.owners.borrow();
        if owners.is_empty() {
            return Ok(());
        }
        communicator::share_parameters(&mut **self.connection(), parameters, &owners)
    }
}
