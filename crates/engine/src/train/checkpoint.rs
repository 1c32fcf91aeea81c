//! Checkpoint files of a training: written atomically, read tensor by tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::View;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use crate::exec::ManagedTensor;
use crate::exec::transfer::{self, Cause};
use crate::store::header::Header;
use crate::store::{self, RawTensor};

const KEY: &str = "training";

/// Tensors by name.
pub type Tensors = BTreeMap<String, ManagedTensor>;

/// A state as a stream of tensors, so that only its destination holds all of it in memory.
pub type Stream<'a> = dyn Iterator<Item = Result<(String, Tensor)>> + 'a;

/// Adds a prefix to the names of tensors.
pub fn prefixed(tensors: Tensors, prefix: &str) -> impl Iterator<Item = (String, ManagedTensor)> {
    tensors.into_iter().map(move |(name, tensor)| (format!("{prefix}{name}"), tensor))
}

/// Writes a checkpoint: tensors, and `about` as JSON in its metadata.
pub fn save(path: &Path, about: &impl Serialize, tensors: &Tensors) -> Result<()> {
    let text = serde_json::to_string(about).map_err(|e| Error::malformed(path, e))?;
    let entries = tensors.iter().map(|(name, tensor)| (name.clone(), store::DType::from(tensor.dtype()), tensor.local_dims().to_vec()));
    let header = Header::layout(entries, BTreeMap::from([(KEY.to_owned(), text)])).map_err(|name| Error::tensor(&name, "is too large for a file", ""))?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    let unfinished = path.with_extension("unfinished");
    let failed = || Error::io("write", &unfinished);
    let mut file = BufWriter::new(File::create(&unfinished).map_err(failed())?);
    file.write_all(&header.to_bytes()).map_err(failed())?;
    // Copies one tensor at a time to the host.
    for name in header.tensors.iter().map(|entry| &entry.name) {
        let tensor = tensors[name].open()?;
        let copy = || transfer::to_host(&tensor, Cause::State)?.contiguous();
        let copy = copy().map_err(|e| Error::candle(format!("tensor `{name}`"), e))?;
        file.write_all(&copy.data()).map_err(failed())?;
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error).and_then(|file| file.sync_all()).map_err(failed())?;
    std::fs::rename(&unfinished, path).map_err(Error::io("write", path))
}

/// An open checkpoint file.
pub struct Saved {
    tensors: BTreeMap<String, RawTensor>,
}

/// Opens a checkpoint and parses its metadata; `None` if the file does not exist.
pub fn open<T: DeserializeOwned>(path: &Path) -> Result<Option<(T, Saved)>> {
    if !path.exists() {
        return Ok(None);
    }
    let wrong = |e: &dyn std::fmt::Display| Error::malformed(path, format!("is not a valid training checkpoint: {e}"));
    let file = store::Checkpoint::open(path).map_err(|e| wrong(&e))?;
    let text = file.metadata.get(KEY).ok_or_else(|| wrong(&"its metadata has no key `training`"))?;
    let about = serde_json::from_str(text).map_err(|e| wrong(&e))?;
    Ok(Some((about, Saved { tensors: file.tensors })))
}

impl Saved {
    /// Names of the tensors with a prefix, without that prefix.
    pub fn names<'s>(&'s self, prefix: &'s str) -> BTreeSet<&'s str> {
        self.tensors.keys().filter_map(|name| name.strip_prefix(prefix)).collect()
    }

    /// Reads the tensors with a prefix one by one; their names are returned without it.
    pub fn under<'s>(&'s self, prefix: &'s str) -> impl Iterator<Item = Result<(String, Tensor)>> + 's {
        let read = |tensor: &RawTensor| {
            let wrong = |e| Error::malformed(tensor.path(), e);
            let kind = DType::try_from(tensor.dtype).map_err(wrong)?;
            Tensor::from_raw_buffer(&tensor.read_all()?, kind, &tensor.shape, &Device::Cpu).map_err(wrong)
        };
        let named = self.tensors.iter().filter_map(move |(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)));
        named.map(move |(name, tensor)| read(tensor).map(|read| (name.to_owned(), read)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_checkpoint_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/checkpoint.safetensors");
        assert!(open::<u64>(&path).unwrap().is_none());
        let small = Tensor::new(&[1f32, f32::MIN_POSITIVE / 2.0], &Device::Cpu).unwrap();
        let transposed = Tensor::new(&[[1i64, 2], [3, 4]], &Device::Cpu).unwrap().t().unwrap();
        let tensors = Tensors::from([
            ("weight/a".to_owned(), small.into()),
            ("weight/b".to_owned(), transposed.into()),
            ("best/a".to_owned(), Tensor::new(&[7u8], &Device::Cpu).unwrap().into()),
        ]);
        save(&path, &41u64, &tensors).unwrap();
        save(&path, &42u64, &tensors).unwrap();
        let (about, saved) = open::<u64>(&path).unwrap().unwrap();
        assert_eq!((about, saved.names("weight/")), (42, BTreeSet::from(["a", "b"])));
        let weights: BTreeMap<String, Tensor> = saved.under("weight/").collect::<Result<_>>().unwrap();
        assert_eq!(weights["a"].to_vec1::<f32>().unwrap(), [1.0, f32::MIN_POSITIVE / 2.0]);
        assert_eq!(weights["b"].to_vec2::<i64>().unwrap(), [[1, 3], [2, 4]]);
        assert_eq!((weights.len(), saved.under("best/").count(), saved.under("none/").count()), (2, 1, 0));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let bytes = std::fs::read(&path).unwrap();
        for bytes in [&bytes[..bytes.len() - 1], &bytes[..20], b"".as_slice()] {
            std::fs::write(&path, bytes).unwrap();
            assert!(open::<u64>(&path).err().unwrap().to_string().contains("checkpoint"), "{} bytes", bytes.len());
        }
    }
}
