//! What samples hold between blocks: tensors, in memory or in a file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor};

use super::run::Snapshot;
use super::transfer::{self, Cause};
use super::{PartialRun, bytes_of};
use crate::error::{Error, Result};
use crate::ir::ValueId;

/// A file without a name: it is gone when nobody refers to it, however the process ends.
#[derive(Debug)]
pub(super) struct SpillFile {
    path: PathBuf,
    file: File,
    length: AtomicU64,
}

/// A tensor in a file.
#[derive(Debug, Clone)]
struct SpilledTensor {
    file: Arc<SpillFile>,
    offset: u64,
    dtype: DType,
    shape: Vec<usize>,
}

impl SpillFile {
    /// Makes a file in a folder.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn create(folder: &Path) -> Result<Arc<SpillFile>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".hidden-states-{}-{number}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(Error::io("create", &path))?;
        std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        Ok(Arc::new(SpillFile { path, file, length: AtomicU64::new(0) }))
    }

    /// Writes a tensor.
    ///
    /// # Errors
    /// The disk is full.
    fn write(self: &Arc<SpillFile>, tensor: &Tensor) -> Result<SpilledTensor> {
        let mut bytes = Vec::with_capacity(tensor.elem_count() * tensor.dtype().size_in_bytes());
        transfer::to_host(tensor, Cause::Offload).and_then(|tensor| tensor.write_bytes(&mut bytes)).map_err(|e| self.unusable(e))?;
        let offset = self.length.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.file.write_all_at(&bytes, offset).map_err(Error::io("write", &self.path))?;
        Ok(SpilledTensor { file: self.clone(), offset, dtype: tensor.dtype(), shape: tensor.dims().to_vec() })
    }

    fn unusable(&self, e: candle_core::Error) -> Error {
        Error::computed(self.path.display(), e)
    }
}

impl SpilledTensor {
    /// The tensor, on a device.
    ///
    /// # Errors
    /// Reading fails, or memory runs out.
    pub fn read(&self, device: &Device) -> Result<Tensor> {
        let size = self.shape.iter().product::<usize>() * self.dtype.size_in_bytes();
        let mut bytes = vec![0; size];
        self.file.file.read_exact_at(&mut bytes, self.offset).map_err(Error::io("read", &self.file.path))?;
        let host = Tensor::from_raw_buffer(&bytes, self.dtype, &self.shape, &Device::Cpu);
        host.and_then(|tensor| transfer::to_device(&tensor, device, Cause::Offload)).map_err(|e| self.file.unusable(e))
    }
}

/// A run at the beginning of a block.
#[derive(Debug, Clone)]
pub(super) struct State {
    snapshot: Snapshot,
    /// Values that are in a file, by position.
    spilled: Vec<(usize, SpilledTensor)>,
}

impl State {
    /// All of it in memory.
    pub fn new(snapshot: Snapshot) -> State {
        State { snapshot, spilled: Vec::new() }
    }

    /// Moves floats to a file.
    ///
    /// # Errors
    /// The disk is full.
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

    /// Whether it holds a value.
    pub fn holds(&self, id: ValueId) -> bool {
        self.snapshot.values[id.index()].is_some() || self.spilled.iter().any(|(position, _)| *position == id.index())
    }

    /// A value that it holds.
    ///
    /// # Errors
    /// It does not; reading fails.
    pub fn get(&self, id: ValueId, device: &Device) -> Result<Tensor> {
        match (&self.snapshot.values[id.index()], self.spilled.iter().find(|(position, _)| *position == id.index())) {
            (Some(tensor), _) => Ok(tensor.clone()),
            (None, Some((_, spilled))) => spilled.read(device),
            (None, None) => Err(Error::graph("a state between blocks", "lacks a value")),
        }
    }

    /// All of it, on a device.
    ///
    /// # Errors
    /// Reading fails.
    pub fn snapshot(&self, device: &Device) -> Result<Snapshot> {
        let mut snapshot = self.snapshot.clone();
        for (position, spilled) in &self.spilled {
            snapshot.values[*position] = Some(spilled.read(device)?);
        }
        Ok(snapshot)
    }
}

/// Bytes of a stopped run beside the state that it began with.
pub(super) fn run_bytes(run: &PartialRun, start: &State) -> u64 {
    let own = run.values.iter().zip(&start.snapshot.values).filter(|(_, before)| before.is_none());
    own.filter_map(|(value, _)| value.as_ref()).map(bytes_of).sum()
}
