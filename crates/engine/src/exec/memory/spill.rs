//! Tensors spilled to an anonymous temporary file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::exec::host::{change, floats_on_host, read};
use crate::exec::transfer::{self, Cause};

/// An anonymous temporary file, which is removed when its last handle is dropped, even if the process is
/// killed.
#[derive(Debug)]
pub struct SpillFile {
    path: PathBuf,
    file: File,
    length: AtomicU64,
}

/// A tensor in a spill file.
#[derive(Debug, Clone)]
pub(crate) struct SpilledTensor {
    file: Arc<SpillFile>,
    offset: u64,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// Chunk size in bytes for conversions of floats.
const CHUNK: usize = 1 << 20;

impl SpillFile {
    /// Creates a file in a folder.
    pub fn create(folder: &Path) -> Result<Arc<SpillFile>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".spilled-{}-{number}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(Error::io("create", &path))?;
        std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        Ok(Arc::new(SpillFile { path, file, length: AtomicU64::new(0) }))
    }

    /// The folder of the file.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Appends a tensor.
    pub(crate) fn write(self: &Arc<SpillFile>, tensor: &Tensor) -> Result<SpilledTensor> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let offset = self.length.fetch_add(bytes as u64, Ordering::Relaxed);
        let spilled = SpilledTensor { file: self.clone(), offset, dtype: tensor.dtype(), shape: tensor.dims().to_vec() };
        spilled.overwrite(tensor)?;
        Ok(spilled)
    }

    fn unusable(&self, e: candle_core::Error) -> Error {
        Error::candle(self.path.display(), e)
    }
}

impl SpilledTensor {
    /// Reads the tensor onto a device.
    pub fn read(&self, device: &Device) -> Result<Tensor> {
        let failed = |e| self.file.unusable(e);
        let host = if self.dtype == DType::F32 {
            let tensor = Tensor::zeros(self.shape.as_slice(), DType::F32, &Device::Cpu).map_err(failed)?;
            let mut done = Ok(());
            let filled = change(&tensor, |values: &mut [f32]| {
                done = self.read_floats(values);
                Ok(())
            });
            filled.map_err(failed)?;
            done.map(|()| tensor)?
        } else {
            let mut bytes = vec![0; self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()];
            self.file.file.read_exact_at(&mut bytes, self.offset).map_err(Error::io("read", &self.file.path))?;
            Tensor::from_raw_buffer(&bytes, self.dtype, &self.shape, &Device::Cpu).map_err(failed)?
        };
        transfer::to_device(&host, device, Cause::Offload).map_err(failed)
    }

    fn read_floats(&self, values: &mut [f32]) -> Result<()> {
        let mut bytes = vec![0; CHUNK.min(4 * values.len())];
        let mut offset = self.offset;
        for values in values.chunks_mut(CHUNK / 4) {
            let bytes = &mut bytes[..4 * values.len()];
            self.file.file.read_exact_at(bytes, offset).map_err(Error::io("read", &self.file.path))?;
            values.iter_mut().zip(bytes.as_chunks().0).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Overwrites the tensor with another one of the same shape and type.
    pub fn overwrite(&self, tensor: &Tensor) -> Result<()> {
        let failed = |e| self.file.unusable(e);
        if tensor.dims() != self.shape || tensor.dtype() != self.dtype {
            let reason = format!("{:?} {:?} cannot replace {:?} {:?}", tensor.dtype(), tensor.dims(), self.dtype, self.shape);
            return Err(failed(candle_core::Error::Msg(reason)));
        }
        if self.dtype == DType::F32 {
            let mut done = Ok(());
            let host = floats_on_host(tensor, Cause::Offload).map_err(failed)?;
            let seen = read(&host, |values| {
                done = self.write_floats(values);
                Ok(())
            });
            seen.map_err(failed)?;
            return done;
        }
        let mut bytes = Vec::with_capacity(tensor.elem_count() * tensor.dtype().size_in_bytes());
        transfer::to_host(tensor, Cause::Offload).and_then(|tensor| tensor.write_bytes(&mut bytes)).map_err(failed)?;
        self.file.file.write_all_at(&bytes, self.offset).map_err(Error::io("write", &self.file.path))
    }

    fn write_floats(&self, values: &[f32]) -> Result<()> {
        let mut bytes = Vec::with_capacity(CHUNK.min(4 * values.len()));
        let mut offset = self.offset;
        for values in values.chunks(CHUNK / 4) {
            bytes.clear();
            values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
            self.file.file.write_all_at(&bytes, offset).map_err(Error::io("write", &self.file.path))?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }
}
