//! Placement of tensors between uses: in device memory, on the host next to a device, in a file, or
//! sharded across processes.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::collective::Pending;
use super::sharding::{Shard, Sharding};
use super::spill::{SpillFile, SpilledTensor};
use crate::error::{Error, Result};
use crate::exec::host::bytes_of;
use crate::exec::transfer::{self, Cause};

/// Placement of tensors between uses.
#[derive(Debug, Clone)]
pub enum Placement {
    /// In the memory of a device. Loading returns the tensor itself, which can be changed in place.
    Memory(Device),
    /// In host memory, next to another device. Loading copies it to the device.
    Host,
    /// In an anonymous temporary file. Each load reads it.
    File(Arc<SpillFile>),
    /// Sharded across processes, each rank with a part of the elements in its memory. Loading is a
    /// collective operation.
    Sharded(Arc<Sharding>),
}

/// A tensor with a placement between uses.
#[derive(Debug, Clone)]
pub struct ManagedTensor(Storage);

#[derive(Debug, Clone)]
enum Storage {
    Memory(Tensor),
    Host(Tensor),
    File(SpilledTensor),
    Shard(Shard),
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("a managed tensor", e)
}

impl Placement {
    /// Offloads from a device: from a GPU to the host, from the CPU to a file in a folder.
    pub fn offloaded_from(device: &Device, folder: &Path) -> Result<Placement> {
        if !device.is_cpu() || transfer::is_strict() {
            return Ok(Placement::Host);
        }
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        Ok(Placement::File(SpillFile::create(folder)?))
    }

    /// A placement of the same kind for a group of tensors that are dropped together: their disk space is
    /// released with the last of them.
    pub fn sibling(&self) -> Result<Placement> {
        match self {
            Placement::File(file) => Ok(Placement::File(SpillFile::create(file.folder())?)),
            other => Ok(other.clone()),
        }
    }

    /// Whether tensors remain in the memory of the device that uses them.
    pub fn is_memory(&self) -> bool {
        matches!(self, Placement::Memory(_))
    }

    /// Whether tensors are sharded across processes.
    pub fn is_sharded(&self) -> bool {
        matches!(self, Placement::Sharded(_))
    }

    /// Whether tensors are offloaded to the host or to a file.
    pub fn is_offloaded(&self) -> bool {
        matches!(self, Placement::Host | Placement::File(_))
    }

    /// The device on which tensors are updated.
    pub fn device(&self) -> &Device {
        match self {
            Placement::Memory(device) => device,
            Placement::Sharded(sharding) => sharding.device(),
            Placement::Host | Placement::File(_) => &Device::Cpu,
        }
    }

    /// Stores a tensor; not copied if it already is in the memory of the device.
    pub fn store(&self, tensor: &Tensor) -> Result<ManagedTensor> {
        self.store_in_units(tensor, 1)
    }

    /// As [`store`](Placement::store); parts of a sharded tensor consist of whole units of this many
    /// elements.
    pub fn store_in_units(&self, tensor: &Tensor, unit: usize) -> Result<ManagedTensor> {
        Ok(ManagedTensor(match self {
            Placement::Memory(device) => Storage::Memory(transfer::move_to(tensor, device, Cause::Offload).map_err(failed)?),
            Placement::Host => Storage::Host(own_on_host(tensor).map_err(failed)?),
            Placement::File(file) => Storage::File(file.write(tensor)?),
            Placement::Sharded(sharding) => Storage::Shard(sharding.store(tensor, unit)?),
        }))
    }

    /// Stores a tensor that belongs to another one; sharded tensors are split in the same way. The tensor may
    /// be the own part of a sharded one.
    pub fn store_with(&self, tensor: &Tensor, other: &ManagedTensor) -> Result<ManagedTensor> {
        if let Storage::Shard(share) = &other.0 { share.with_same_parts(tensor).map(|share| ManagedTensor(Storage::Shard(share))) } else { self.store(tensor) }
    }

    /// Groups of names to process together: a single group if tensors are in device memory, else one
    /// group per name.
    pub fn name_groups<'n>(&self, names: impl Iterator<Item = &'n String>) -> Vec<Vec<String>> {
        let names = names.cloned();
        if self.is_memory() { vec![names.collect()] } else { names.map(|name| vec![name]).collect() }
    }
}

fn own_on_host(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let host = transfer::to_host(tensor, Cause::Offload)?;
    if tensor.device().is_cpu() { host.copy()?.contiguous() } else { host.contiguous() }
}

impl From<Tensor> for ManagedTensor {
    /// In memory, on its current device.
    fn from(tensor: Tensor) -> ManagedTensor {
        ManagedTensor(Storage::Memory(tensor))
    }
}

impl ManagedTensor {
    /// Shape of the tensor.
    pub fn dims(&self) -> &[usize] {
        match &self.0 {
            Storage::Memory(tensor) | Storage::Host(tensor) => tensor.dims(),
            Storage::File(spilled) => &spilled.shape,
            Storage::Shard(share) => &share.shape,
        }
    }

    /// Shape of the part that this process stores, which [`open`](ManagedTensor::open) returns: flat for a
    /// part of a sharded tensor, otherwise the shape of the tensor.
    pub fn local_dims(&self) -> &[usize] {
        if let Storage::Shard(share) = &self.0 { &share.own_shape } else { self.dims() }
    }

    /// Element type of the tensor.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Storage::Memory(tensor) | Storage::Host(tensor) => tensor.dtype(),
            Storage::File(spilled) => spilled.dtype,
            Storage::Shard(share) => share.dtype,
        }
    }

    /// Size of the elements in bytes, regardless of the placement.
    pub fn size(&self) -> u64 {
        (self.dims().iter().product::<usize>() * self.dtype().size_in_bytes()) as u64
    }

    /// Bytes in the memory of the device that uses the tensor.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Storage::Memory(tensor) => bytes_of(tensor),
            Storage::Shard(share) => share.own().map_or(0, bytes_of),
            Storage::Host(_) | Storage::File(_) => 0,
        }
    }

    /// Whether this process stores elements of the tensor; true for tensors that are not sharded.
    pub fn is_local(&self) -> bool {
        !matches!(&self.0, Storage::Shard(share) if share.own().is_none())
    }

    /// Whether the tensor is only in a file.
    pub fn is_in_file(&self) -> bool {
        matches!(self.0, Storage::File(_))
    }

    /// The tensor at its placement: itself, the own part of a sharded one, or read into host memory. Changes
    /// take effect with [`put`](ManagedTensor::put). Fails if only other ranks have elements.
    pub fn open(&self) -> Result<Tensor> {
        match &self.0 {
            Storage::Memory(tensor) | Storage::Host(tensor) => Ok(tensor.clone()),
            Storage::File(spilled) => spilled.read(&Device::Cpu),
            Storage::Shard(share) => share.own().cloned().ok_or_else(|| failed(candle_core::Error::Msg("only other ranks have elements of it".into()))),
        }
    }

    /// As [`load`](ManagedTensor::load), but of a sharded tensor only the own part, if it has elements; not a
    /// collective operation.
    pub fn load_own(&self, device: &Device) -> Result<Option<Tensor>> {
        match &self.0 {
            Storage::Shard(share) => share.own().map(|own| transfer::move_to(own, device, Cause::Offload)).transpose().map_err(failed),
            _ => self.load(device).map(Some),
        }
    }

    /// Starts the sum over all ranks of a tensor with the shape of a sharded one, of which this rank
    /// receives its part (reduce-scatter); `None` if this one is not sharded.
    pub fn start_sum(&self, tensor: &Tensor) -> Result<Option<Pending<Tensor>>> {
        if let Storage::Shard(share) = &self.0 { share.start_sum(tensor).map(Some) } else { Ok(None) }
    }

    /// Loads the tensor onto a device; not copied if it is in the memory of that device. A collective
    /// operation for sharded tensors.
    pub fn load(&self, device: &Device) -> Result<Tensor> {
        match &self.0 {
            Storage::Memory(tensor) => transfer::move_to(tensor, device, Cause::Offload).map_err(failed),
            Storage::Host(tensor) => {
                let loaded = transfer::to_device(tensor, device, Cause::Offload);
                loaded.and_then(|loaded| if device.is_cpu() { loaded.copy() } else { Ok(loaded) }).map_err(failed)
            }
            Storage::File(spilled) => spilled.read(device),
            Storage::Shard(share) => share.load().and_then(|tensor| transfer::move_to(&tensor, device, Cause::Offload).map_err(failed)),
        }
    }

    /// Replaces the tensor by one of the same shape and type; that of a sharded one may be its own part. Does
    /// nothing for a tensor that was changed in place. Fails if the shape or type differs.
    pub fn put(&mut self, tensor: Tensor) -> Result<()> {
        match &mut self.0 {
            Storage::Memory(own) | Storage::Host(own) if own.id() == tensor.id() => Ok(()),
            Storage::Memory(own) => {
                *own = transfer::move_to(&tensor, own.device(), Cause::Offload).map_err(failed)?;
                Ok(())
            }
            Storage::Host(own) => {
                let put = || own.flatten_all()?.slice_set(&own_on_host(&tensor)?.flatten_all()?, 0, 0);
                if own.dims() == tensor.dims() { put().map_err(failed) } else { Err(failed(candle_core::Error::Msg("the shape differs".into()))) }
            }
            Storage::File(spilled) => spilled.overwrite(&tensor),
            Storage::Shard(share) => share.put(&tensor),
        }
    }

    /// Copies the tensor to a placement. A sharded tensor is copied part by part if the placement is
    /// sharded.
    pub fn copied_to(&self, home: &Placement) -> Result<ManagedTensor> {
        let tensor = match (&self.0, home) {
            (Storage::Shard(share), Placement::Sharded(_)) => return share.copied().map(|share| ManagedTensor(Storage::Shard(share))),
            (Storage::Shard(share), _) => share.load()?,
            _ => self.open()?,
        };
        match home {
            Placement::Memory(device) => home.store(&transfer::move_to(&tensor, device, Cause::State).and_then(|tensor| tensor.copy()).map_err(failed)?),
            _ => home.store(&tensor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes are visible through all handles, for every placement.
    #[test]
    fn put_tensors_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..600_000).map(|i| i as f32 * 0.5).collect();
        let tensor = Tensor::from_vec(values, (2, 300_000), &Device::Cpu).unwrap();
        for home in [Placement::Memory(Device::Cpu), Placement::Host, Placement::offloaded_from(&Device::Cpu, &folder.path().join("new")).unwrap()] {
            let mut managed = home.store(&tensor.t().unwrap().contiguous().unwrap()).unwrap();
            let (other, before) = (managed.clone(), home.store(&Tensor::new(&[7i64], &Device::Cpu).unwrap()).unwrap());
            assert_eq!((managed.dims(), managed.dtype(), managed.size(), managed.bytes() > 0), (&[300_000, 2][..], DType::F32, 2_400_000, home.is_memory()));
            let opened = managed.open().unwrap();
            crate::exec::change(&opened, |values: &mut [f32]| {
                values[1] = -1.0;
                Ok(())
            })
            .unwrap();
            managed.put(opened).unwrap();
            assert_eq!(other.load(&Device::Cpu).unwrap().get(0).unwrap().to_vec1::<f32>().unwrap(), [0.0, -1.0]);
            managed.put(managed.load(&Device::Cpu).unwrap().affine(2.0, 0.0).unwrap()).unwrap();
            assert_eq!(managed.open().unwrap().get(299_999).unwrap().to_vec1::<f32>().unwrap(), [299_999.0, 599_999.0]);
            assert_eq!(before.open().unwrap().to_vec1::<i64>().unwrap(), [7]);
            assert!(home.is_memory() || managed.put(tensor.clone()).is_err());
        }
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 0, "the file is anonymous");
    }
}
