//! Tensors sharded across processes: each rank stores a part of the elements, which are gathered when all
//! ranks use the tensor.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::collective::{Collective, Pending, Segment, split_evenly};
use super::spill::SpillFile;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::work::lock;

/// A group of processes across which tensors are sharded.
#[derive(Debug)]
pub struct Sharding {
    collective: Arc<dyn Collective>,
    device: Device,
    /// Entire tensors that only one process uses.
    unsharded: Arc<SpillFile>,
    /// Bytes of the elements of each rank; equal on all ranks.
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

    /// Stores a tensor that all ranks have: each rank stores whole units of its elements, such that all ranks
    /// store about the same number of bytes.
    pub(super) fn store(self: &Arc<Sharding>, tensor: &Tensor, unit: usize) -> Result<Shard> {
        let unit = unit.clamp(1, tensor.elem_count().max(1));
        let unit_bytes = (unit * tensor.dtype().size_in_bytes()) as u64;
        let ranges = split_evenly(&mut lock(&self.loads), tensor.elem_count(), unit, unit_bytes);
        let shape = tensor.dims().to_vec();
        Shard { sharding: self.clone(), ranges: ranges.into(), own: None, own_shape: Vec::new(), shape, dtype: tensor.dtype() }.with_same_parts(tensor)
    }
}

/// A tensor of which each rank stores a range of the elements.
#[derive(Debug, Clone)]
pub(super) struct Shard {
    sharding: Arc<Sharding>,
    /// Elements of each rank.
    ranges: Arc<[Range<usize>]>,
    /// Elements of this rank, unless there are none: the tensor itself if these are all, otherwise flat.
    own: Option<Tensor>,
    /// Shape of `own`, or of an empty part.
    pub own_shape: Vec<usize>,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("a sharded tensor", e)
}

impl Shard {
    /// Elements of this rank, unless there are none.
    pub fn own(&self) -> Option<&Tensor> {
        self.own.as_ref()
    }

    fn own_range(&self) -> Range<usize> {
        self.ranges[self.sharding.collective.rank()].clone()
    }

    fn segments(&self) -> Vec<Segment> {
        self.ranges.iter().cloned().enumerate().filter(|(_, range)| !range.is_empty()).collect()
    }

    /// Stores the same elements of another tensor, which has the shape of this one or of its own part.
    pub fn with_same_parts(&self, tensor: &Tensor) -> Result<Shard> {
        let (own, count) = (self.own_range(), self.shape.iter().product::<usize>());
        let own_shape = if own.len() == count { self.shape.clone() } else { vec![own.len()] };
        let part = || {
            let part = if tensor.dims() == own_shape {
                tensor.clone()
            } else {
                tensor.flatten_all()?.narrow(0, own.start, own.len())?.copy()?.reshape(own_shape.as_slice())?
            };
            transfer::move_to(&part, &self.sharding.device, Cause::Offload)
        };
        let own = (!own.is_empty()).then(part).transpose().map_err(failed)?;
        Ok(Shard { own, own_shape, dtype: tensor.dtype(), ..self.clone() })
    }

    /// Copies the tensor with the same parts.
    pub fn copied(&self) -> Result<Shard> {
        Ok(Shard { own: self.own.as_ref().map(Tensor::copy).transpose().map_err(failed)?, ..self.clone() })
    }

    /// Gathers the tensor from all ranks; a collective operation.
    pub fn load(&self) -> Result<Tensor> {
        let sent = || {
            let sent = Tensor::zeros(self.shape.iter().product::<usize>(), DType::F32, &self.sharding.device)?;
            let own = self.own.as_ref().map(|own| own.to_dtype(DType::F32)?.flatten_all()?.contiguous());
            own.transpose()?.map_or(Ok(()), |own| sent.slice_set(&own, 0, self.own_range().start))?;
            Ok(sent)
        };
        let all = self.sharding.collective.start_all_gather(&sent().map_err(failed)?, self.segments()).wait()?;
        all.to_dtype(self.dtype).and_then(|all| all.reshape(self.shape.as_slice())).map_err(failed)
    }

    /// Starts the sum over all ranks of a tensor of this shape, of which this rank receives its part; a
    /// collective operation.
    pub fn start_sum(&self, tensor: &Tensor) -> Result<Pending<Tensor>> {
        Ok(self.sharding.collective.start_reduce_scatter(&tensor.flatten_all().map_err(failed)?, self.segments()))
    }

    /// Replaces the elements of this rank. The tensor has the shape of this one or of its own part.
    pub fn put(&mut self, tensor: &Tensor) -> Result<()> {
        if ![&self.shape, &self.own_shape].contains(&&tensor.dims().to_vec()) || tensor.dtype() != self.dtype {
            return Err(failed(candle_core::Error::Msg(format!("{:?} cannot replace {:?}", tensor.dims(), self.shape))));
        }
        if self.own.as_ref().is_some_and(|own| own.id() != tensor.id()) {
            *self = self.with_same_parts(tensor)?;
        }
        Ok(())
    }
}
