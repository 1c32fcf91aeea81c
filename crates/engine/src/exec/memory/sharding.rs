//! Tensors sharded across processes: each is stored by one rank and broadcast when all ranks use it.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::spill::SpillFile;
use crate::error::{Error, Result};
use crate::exec::host::bytes_of;
use crate::exec::transfer::{self, Cause};
use crate::work::lock;

/// Collective operations of processes, which all ranks call in the same order.
pub trait Collective: Send + Sync + fmt::Debug {
    /// The rank of this process.
    fn rank(&self) -> usize;

    /// The number of processes.
    fn size(&self) -> usize;

    /// Broadcasts the f32 tensor of rank `from`; on other ranks only the shape of `tensor` is read.
    fn broadcast(&self, tensor: &Tensor, from: usize) -> Result<Tensor>;

    /// The sum of the f32 tensors of all ranks (all-reduce).
    fn sum(&self, tensor: &Tensor) -> Result<Tensor>;
}

/// A group of processes across which tensors are sharded.
#[derive(Debug)]
pub struct Sharding {
    collective: Arc<dyn Collective>,
    device: Device,
    /// Entire tensors that only one process uses.
    unsharded: Arc<SpillFile>,
    /// Bytes stored by each rank; equal on all ranks.
    loads: Mutex<Vec<u64>>,
}

impl Sharding {
    /// Creates the group, with a spill file for unsharded tensors in a folder.
    pub fn new(collective: Arc<dyn Collective>, device: &Device, folder: &Path) -> Result<Sharding> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let loads = Mutex::new(vec![0; collective.size()]);
        Ok(Sharding { collective, device: device.clone(), unsharded: SpillFile::create(folder)?, loads })
    }

    /// A new file for entire tensors that only one process uses.
    pub fn spill_file(&self) -> Result<Arc<SpillFile>> {
        SpillFile::create(self.unsharded.folder())
    }

    /// The number of processes.
    pub fn processes(&self) -> usize {
        self.collective.size()
    }

    /// The device that uses the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Stores a tensor that all ranks have on the rank with the fewest bytes so far.
    pub(super) fn store(self: &Arc<Sharding>, tensor: &Tensor) -> Result<Shard> {
        let owner = {
            let mut loads = lock(&self.loads);
            let owner = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
            loads[owner] += bytes_of(tensor);
            owner
        };
        Shard { sharding: self.clone(), owner, own: None, shape: tensor.dims().to_vec(), dtype: tensor.dtype() }.with_same_owner(tensor)
    }
}

/// A tensor that is stored on one rank.
#[derive(Debug, Clone)]
pub(super) struct Shard {
    sharding: Arc<Sharding>,
    owner: usize,
    /// The tensor, on the rank that owns it.
    own: Option<Tensor>,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("a sharded tensor", e)
}

impl Shard {
    /// The tensor, on the rank that owns it.
    pub fn own(&self) -> Option<&Tensor> {
        self.own.as_ref()
    }

    /// Stores another tensor on the same rank.
    pub fn with_same_owner(&self, tensor: &Tensor) -> Result<Shard> {
        let is_owner = self.sharding.collective.rank() == self.owner;
        let own = is_owner.then(|| transfer::move_to(tensor, &self.sharding.device, Cause::Offload)).transpose().map_err(failed)?;
        Ok(Shard { own, shape: tensor.dims().to_vec(), dtype: tensor.dtype(), ..self.clone() })
    }

    /// Copies the tensor on the same rank.
    pub fn copied(&self) -> Result<Shard> {
        Ok(Shard { own: self.own.as_ref().map(Tensor::copy).transpose().map_err(failed)?, ..self.clone() })
    }

    /// Broadcasts the tensor; a collective operation.
    pub fn load(&self) -> Result<Tensor> {
        let sent = match &self.own {
            Some(own) => own.to_dtype(DType::F32),
            None => Tensor::zeros(self.shape.as_slice(), DType::F32, &self.sharding.device),
        };
        let all = self.sharding.collective.broadcast(&sent.map_err(failed)?, self.owner)?;
        // The owner returns its own tensor instead of a copy.
        self.own.clone().map_or_else(|| all.to_dtype(self.dtype).map_err(failed), Ok)
    }

    /// The sum over all ranks of a tensor of this shape; a collective operation.
    pub fn sum(&self, tensor: &Tensor) -> Result<Tensor> {
        self.sharding.collective.sum(tensor)
    }

    /// Replaces the tensor, on the rank that owns it.
    pub fn put(&mut self, tensor: &Tensor) -> Result<()> {
        if tensor.dims() != self.shape || tensor.dtype() != self.dtype {
            return Err(failed(candle_core::Error::Msg(format!("{:?} cannot replace {:?}", tensor.dims(), self.shape))));
        }
        if self.own.as_ref().is_some_and(|own| own.id() != tensor.id()) {
            *self = self.with_same_owner(tensor)?;
        }
        Ok(())
    }
}
