//! Tensors that several processes share out: each is whole in the memory of one of them, and the others get it when all of them use it.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::bytes_of;
use super::kept::Home;
use super::spill::SpillFile;
use super::transfer::{self, Cause};
use crate::error::{Error, Result};
use crate::work::lock;

/// What processes do together, all in the same order.
pub trait Pool: Send + Sync + fmt::Debug {
    /// The number of this process, from 0.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn size(&self) -> usize;

    /// The f32 tensor of one process, in all of them; elsewhere only its shape matters.
    ///
    /// # Errors
    /// Another process is gone.
    fn broadcast(&self, tensor: &Tensor, from: usize) -> Result<Tensor>;

    /// The sum of f32 tensors of all processes.
    ///
    /// # Errors
    /// Another process is gone.
    fn sum(&self, tensor: &Tensor) -> Result<Tensor>;
}

/// Processes among which tensors are shared out.
#[derive(Debug)]
pub struct Shares {
    pool: Arc<dyn Pool>,
    device: Device,
    /// Where whole tensors go that one process needs alone.
    aside: Home,
    /// Bytes that each process keeps so far: the same numbers in all of them.
    loads: Mutex<Vec<u64>>,
}

impl Shares {
    /// Of these processes, with a file for whole tensors in a folder.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn new(pool: Arc<dyn Pool>, device: &Device, folder: &Path) -> Result<Shares> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let loads = Mutex::new(vec![0; pool.size()]);
        Ok(Shares { pool, device: device.clone(), aside: Home::File(SpillFile::create(folder)?), loads })
    }

    /// Where whole tensors go that one process needs alone.
    pub fn aside(&self) -> &Home {
        &self.aside
    }

    /// How many processes there are.
    pub fn processes(&self) -> usize {
        self.pool.size()
    }

    /// Where tensors are used.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Takes in a tensor that all processes have: the one that keeps least so far keeps it.
    pub(super) fn keep(self: &Arc<Shares>, tensor: &Tensor) -> Result<Share> {
        let owner = {
            let mut loads = lock(&self.loads);
            let owner = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
            loads[owner] += bytes_of(tensor);
            owner
        };
        Share { shares: self.clone(), owner, own: None, shape: tensor.dims().to_vec(), dtype: tensor.dtype() }.alike(tensor)
    }
}

/// A tensor in one of several processes.
#[derive(Debug, Clone)]
pub(super) struct Share {
    shares: Arc<Shares>,
    owner: usize,
    /// The tensor, in the process that keeps it.
    own: Option<Tensor>,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

fn failed(e: candle_core::Error) -> Error {
    Error::computed("a tensor that processes share", e)
}

impl Share {
    /// The tensor, in the process that keeps it.
    pub fn own(&self) -> Option<&Tensor> {
        self.own.as_ref()
    }

    /// Another tensor, kept in the same process.
    pub fn alike(&self, tensor: &Tensor) -> Result<Share> {
        let here = self.shares.pool.rank() == self.owner;
        let own = here.then(|| transfer::beside(tensor, &self.shares.device, Cause::Offload)).transpose().map_err(failed)?;
        Ok(Share { own, shape: tensor.dims().to_vec(), dtype: tensor.dtype(), ..self.clone() })
    }

    /// A copy of its own in the same process.
    pub fn copied(&self) -> Result<Share> {
        Ok(Share { own: self.own.as_ref().map(Tensor::copy).transpose().map_err(failed)?, ..self.clone() })
    }

    /// The tensor in all processes, which ask for it together.
    pub fn load(&self) -> Result<Tensor> {
        let given = match &self.own {
            Some(own) => own.to_dtype(DType::F32),
            None => Tensor::zeros(self.shape.as_slice(), DType::F32, &self.shares.device),
        };
        let all = self.shares.pool.broadcast(&given.map_err(failed)?, self.owner)?;
        // The process that keeps it has the very tensor.
        self.own.clone().map_or_else(|| all.to_dtype(self.dtype).map_err(failed), Ok)
    }

    /// The sum of what all processes have for it.
    pub fn sum(&self, tensor: &Tensor) -> Result<Tensor> {
        self.shares.pool.sum(tensor)
    }

    /// Puts a tensor in its place, in the process that keeps it.
    pub fn put(&mut self, tensor: &Tensor) -> Result<()> {
        if tensor.dims() != self.shape || tensor.dtype() != self.dtype {
            return Err(failed(candle_core::Error::Msg(format!("{:?} cannot take the place of {:?}", tensor.dims(), self.shape))));
        }
        if self.own.as_ref().is_some_and(|own| own.id() != tensor.id()) {
            *self = self.alike(tensor)?;
        }
        Ok(())
    }
}
