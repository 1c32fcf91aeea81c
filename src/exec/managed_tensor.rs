//! Where tensors live between uses: in the memory of a device, on the host beside a device, in a file, or in one of several processes.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::bytes_of;
use super::shares::{Share, Shares};
use super::spill::{SpillFile, SpilledTensor};
use super::transfer::{self, Cause};
use crate::error::{Error, Result};

/// Where tensors live between uses.
#[derive(Debug, Clone)]
pub enum Home {
    /// In the memory of a device. What is loaded there is the tensor itself, which changes in place.
    Memory(Device),
    /// On the host. A device that uses a tensor gets a copy of it.
    Host,
    /// In a file without a name. Each use reads it.
    File(Arc<SpillFile>),
    /// Each in the memory of one of several processes, which use it together.
    Shared(Arc<Shares>),
}

/// A tensor that lives somewhere between uses.
#[derive(Debug, Clone)]
pub struct Kept(Place);

#[derive(Debug, Clone)]
enum Place {
    Memory(Tensor),
    Host(Tensor),
    File(SpilledTensor),
    Share(Share),
}

fn failed(e: candle_core::Error) -> Error {
    Error::computed("a tensor that is used again", e)
}

impl Home {
    /// Away from a device: on the host beside a GPU, or beside the CPU in a file in a folder.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn away_from(device: &Device, folder: &Path) -> Result<Home> {
        if !device.is_cpu() || transfer::is_strict() {
            return Ok(Home::Host);
        }
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        Ok(Home::File(SpillFile::create(folder)?))
    }

    /// A home of this kind for tensors that go together: their room is free again when the last of them goes.
    ///
    /// # Errors
    /// As [`away_from`](Home::away_from).
    pub fn another(&self) -> Result<Home> {
        match self {
            Home::File(file) => Ok(Home::File(SpillFile::create(file.folder())?)),
            other => Ok(other.clone()),
        }
    }

    /// Whether tensors are always in memory, where they are used.
    pub fn is_memory(&self) -> bool {
        matches!(self, Home::Memory(_))
    }

    /// Whether each tensor is in one of several processes.
    pub fn is_shared(&self) -> bool {
        matches!(self, Home::Shared(_))
    }

    /// Whether tensors are on the host beside a device, or in a file.
    pub fn is_away(&self) -> bool {
        matches!(self, Home::Host | Home::File(_))
    }

    /// Where tensors are changed.
    pub fn device(&self) -> &Device {
        match self {
            Home::Memory(device) => device,
            Home::Shared(shares) => shares.device(),
            Home::Host | Home::File(_) => &Device::Cpu,
        }
    }

    /// Takes a tensor in; in memory it is no copy where it is there already.
    ///
    /// # Errors
    /// Memory runs out, or the disk is full.
    pub fn keep(&self, tensor: &Tensor) -> Result<Kept> {
        Ok(Kept(match self {
            Home::Memory(device) => Place::Memory(transfer::beside(tensor, device, Cause::Offload).map_err(failed)?),
            Home::Host => Place::Host(own_on_host(tensor).map_err(failed)?),
            Home::File(file) => Place::File(file.write(tensor)?),
            Home::Shared(shares) => Place::Share(shares.keep(tensor)?),
        }))
    }

    /// The same for a tensor that belongs to another one: it is kept in the same process.
    ///
    /// # Errors
    /// As [`keep`](Home::keep).
    pub fn keep_with(&self, tensor: &Tensor, other: &Kept) -> Result<Kept> {
        if let Place::Share(share) = &other.0 { share.alike(tensor).map(|share| Kept(Place::Share(share))) } else { self.keep(tensor) }
    }

    /// Names that are worked on together: all of them, where all tensors are in memory anyhow, else one after the other.
    pub fn together<'n>(&self, names: impl Iterator<Item = &'n String>) -> Vec<Vec<String>> {
        let names = names.cloned();
        if self.is_memory() { vec![names.collect()] } else { names.map(|name| vec![name]).collect() }
    }
}

fn own_on_host(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let host = transfer::to_host(tensor, Cause::Offload)?;
    if tensor.device().is_cpu() { host.copy()?.contiguous() } else { host.contiguous() }
}

impl From<Tensor> for Kept {
    /// In memory, where it is.
    fn from(tensor: Tensor) -> Kept {
        Kept(Place::Memory(tensor))
    }
}

impl Kept {
    /// Its shape.
    pub fn dims(&self) -> &[usize] {
        match &self.0 {
            Place::Memory(tensor) | Place::Host(tensor) => tensor.dims(),
            Place::File(spilled) => &spilled.shape,
            Place::Share(share) => &share.shape,
        }
    }

    /// Type of its elements.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Place::Memory(tensor) | Place::Host(tensor) => tensor.dtype(),
            Place::File(spilled) => spilled.dtype,
            Place::Share(share) => share.dtype,
        }
    }

    /// Bytes of its elements, wherever they are.
    pub fn size(&self) -> u64 {
        (self.dims().iter().product::<usize>() * self.dtype().size_in_bytes()) as u64
    }

    /// Bytes that it takes of the memory where tensors are used.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Place::Memory(tensor) => bytes_of(tensor),
            Place::Share(share) => share.own().map_or(0, bytes_of),
            Place::Host(_) | Place::File(_) => 0,
        }
    }

    /// Whether this process keeps it; of tensors that are not shared out, every process keeps its own.
    pub fn is_here(&self) -> bool {
        !matches!(&self.0, Place::Share(share) if share.own().is_none())
    }

    /// Whether it is in a file alone.
    pub fn is_in_file(&self) -> bool {
        matches!(self.0, Place::File(_))
    }

    /// The tensor where it lives: itself, or read onto the host. Changes count where it is put back.
    ///
    /// # Errors
    /// Reading fails, memory runs out, or another process keeps it.
    pub fn open(&self) -> Result<Tensor> {
        match &self.0 {
            Place::Memory(tensor) | Place::Host(tensor) => Ok(tensor.clone()),
            Place::File(spilled) => spilled.read(&Device::Cpu),
            Place::Share(share) => share.own().cloned().ok_or_else(|| failed(candle_core::Error::Msg("another process keeps it".into()))),
        }
    }

    /// As [`load`](Kept::load) in the process that keeps it, and nothing elsewhere; no process waits for another.
    ///
    /// # Errors
    /// As [`load`](Kept::load).
    pub fn load_own(&self, device: &Device) -> Result<Option<Tensor>> {
        match &self.0 {
            Place::Share(share) => share.own().map(|own| transfer::beside(own, device, Cause::Offload)).transpose().map_err(failed),
            _ => self.load(device).map(Some),
        }
    }

    /// The sum of what all processes have for a tensor that is shared out; else what this one has.
    ///
    /// # Errors
    /// Another process is gone.
    pub fn sum_of_all(&self, tensor: Tensor) -> Result<Tensor> {
        if let Place::Share(share) = &self.0 { share.sum(&tensor) } else { Ok(tensor) }
    }

    /// The tensor on a device: itself where it lives there, else a copy. All processes load what is shared out, in the same order.
    ///
    /// # Errors
    /// As [`open`](Kept::open).
    pub fn load(&self, device: &Device) -> Result<Tensor> {
        match &self.0 {
            Place::Memory(tensor) => transfer::beside(tensor, device, Cause::Offload).map_err(failed),
            Place::Host(tensor) => {
                let loaded = transfer::to_device(tensor, device, Cause::Offload);
                loaded.and_then(|loaded| if device.is_cpu() { loaded.copy() } else { Ok(loaded) }).map_err(failed)
            }
            Place::File(spilled) => spilled.read(device),
            Place::Share(share) => share.load().and_then(|tensor| transfer::beside(&tensor, device, Cause::Offload).map_err(failed)),
        }
    }

    /// Puts a tensor of its shape and type in its place; nothing is to be done for one that has changed where it lives.
    ///
    /// # Errors
    /// The shape or type is another one, or the disk is full.
    pub fn put(&mut self, tensor: Tensor) -> Result<()> {
        match &mut self.0 {
            Place::Memory(own) | Place::Host(own) if own.id() == tensor.id() => Ok(()),
            Place::Memory(own) => {
                *own = transfer::beside(&tensor, own.device(), Cause::Offload).map_err(failed)?;
                Ok(())
            }
            Place::Host(own) => {
                let put = || own.flatten_all()?.slice_set(&own_on_host(&tensor)?.flatten_all()?, 0, 0);
                if own.dims() == tensor.dims() { put().map_err(failed) } else { Err(failed(candle_core::Error::Msg("its shape has changed".into()))) }
            }
            Place::File(spilled) => spilled.overwrite(&tensor),
            Place::Share(share) => share.put(&tensor),
        }
    }

    /// A copy of its own, in a home. What is shared out is copied where it is, if the home is shared.
    ///
    /// # Errors
    /// As [`Home::keep`] and [`load`](Kept::load).
    pub fn copied_to(&self, home: &Home) -> Result<Kept> {
        let tensor = match (&self.0, home) {
            (Place::Share(share), Home::Shared(_)) => return share.copied().map(|share| Kept(Place::Share(share))),
            (Place::Share(share), _) => share.load()?,
            _ => self.open()?,
        };
        match home {
            Home::Memory(device) => home.keep(&transfer::beside(&tensor, device, Cause::State).and_then(|tensor| tensor.copy()).map_err(failed)?),
            _ => home.keep(&tensor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wherever a tensor lives, what is put is what is read, also by those who took a handle before.
    #[test]
    fn what_is_put_is_what_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..600_000).map(|i| i as f32 * 0.5).collect();
        let tensor = Tensor::from_vec(values, (2, 300_000), &Device::Cpu).unwrap();
        for home in [Home::Memory(Device::Cpu), Home::Host, Home::away_from(&Device::Cpu, &folder.path().join("new")).unwrap()] {
            let mut kept = home.keep(&tensor.t().unwrap().contiguous().unwrap()).unwrap();
            let (other, before) = (kept.clone(), home.keep(&Tensor::new(&[7i64], &Device::Cpu).unwrap()).unwrap());
            assert_eq!((kept.dims(), kept.dtype(), kept.size(), kept.bytes() > 0), (&[300_000, 2][..], DType::F32, 2_400_000, home.is_memory()));
            let opened = kept.open().unwrap();
            super::super::change(&opened, |values: &mut [f32]| {
                values[1] = -1.0;
                Ok(())
            })
            .unwrap();
            kept.put(opened).unwrap();
            assert_eq!(other.load(&Device::Cpu).unwrap().get(0).unwrap().to_vec1::<f32>().unwrap(), [0.0, -1.0]);
            kept.put(kept.load(&Device::Cpu).unwrap().affine(2.0, 0.0).unwrap()).unwrap();
            assert_eq!(kept.open().unwrap().get(299_999).unwrap().to_vec1::<f32>().unwrap(), [299_999.0, 599_999.0]);
            assert_eq!(before.open().unwrap().to_vec1::<i64>().unwrap(), [7]);
            assert!(home.is_memory() || kept.put(tensor.clone()).is_err());
        }
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 0, "the file has no name");
    }
}
