//! Checkpoint files of a training: written atomically, read tensor by tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::View;
use serde::Serialize;
use serde::de::DeserializeOwned;
use twox_hash::XxHash3_64;

use crate::error::{Error, Result};
use crate::exec::ManagedTensor;
use crate::exec::transfer::{self, Cause};
use crate::store::header::Header;
use crate::store::{self, RawTensor};

const KEY: &str = "training";
/// Tensor with the checksums (XXH3, little-endian) of all other tensors, in the order of their names.
const CHECKSUMS: &str = "checksums";

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
    let entries = entries.chain([(CHECKSUMS.to_owned(), store::DType::U8, vec![8 * tensors.len()])]);
    let header = Header::layout(entries, BTreeMap::from([(KEY.to_owned(), text)])).map_err(|name| Error::tensor(&name, "is too large for a file", ""))?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    let unfinished = path.with_extension("unfinished");
    let failed = || Error::io("write", &unfinished);
    let mut file = BufWriter::new(File::create(&unfinished).map_err(failed())?);
    let begin = header.to_bytes();
    file.write_all(&begin).map_err(failed())?;
    let (mut checksums, mut checksums_at) = (BTreeMap::new(), 0);
    // Copies one tensor at a time to the host.
    for entry in &header.tensors {
        let name = &entry.name;
        let Some(tensor) = tensors.get(name) else {
            checksums_at = begin.len() as u64 + entry.begin;
            file.write_all(&vec![0; 8 * tensors.len()]).map_err(failed())?;
            continue;
        };
        let tensor = tensor.open()?;
        let copy = || transfer::to_host(&tensor, Cause::State)?.contiguous();
        let copy = copy().map_err(|e| Error::candle(format!("tensor `{name}`"), e))?;
        let bytes = copy.data();
        checksums.insert(name, XxHash3_64::oneshot(&bytes));
        file.write_all(&bytes).map_err(failed())?;
    }
    let checksums: Vec<u8> = checksums.into_values().flat_map(u64::to_le_bytes).collect();
    file.seek(SeekFrom::Start(checksums_at)).and_then(|_| file.write_all(&checksums)).map_err(failed())?;
    file.into_inner().map_err(std::io::IntoInnerError::into_error).and_then(|file| file.sync_all()).map_err(failed())?;
    std::fs::rename(&unfinished, path).map_err(Error::io("write", path))
}

/// An open checkpoint file.
pub struct Saved {
    tensors: BTreeMap<String, (RawTensor, u64)>,
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
    let mut tensors = file.tensors;
    let checksums = tensors.remove(CHECKSUMS).ok_or_else(|| wrong(&format!("it has no tensor `{CHECKSUMS}`")))?.read_all()?;
    let checksums = checksums.as_chunks().0;
    if checksums.len() != tensors.len() {
        return Err(wrong(&format!("it has {} checksums for {} tensors", checksums.len(), tensors.len())));
    }
    let tensors = tensors.into_iter().zip(checksums).map(|((name, tensor), checksum)| (name, (tensor, u64::from_le_bytes(*checksum))));
    Ok(Some((about, Saved { tensors: tensors.collect() })))
}

impl Saved {
    /// Fails if a tensor is damaged.
    pub fn check(&self) -> Result<()> {
        self.under("").try_for_each(|tensor| tensor.map(drop))
    }

    /// Names of the tensors with a prefix, without that prefix.
    pub fn names<'s>(&'s self, prefix: &'s str) -> BTreeSet<&'s str> {
        self.tensors.keys().filter_map(|name| name.strip_prefix(prefix)).collect()
    }

    /// Reads the tensors with a prefix one by one; their names are returned without it. Fails if one is
    /// damaged.
    pub fn under<'s>(&'s self, prefix: &'s str) -> impl Iterator<Item = Result<(String, Tensor)>> + 's {
        let read = move |name: &str, (tensor, checksum): &(RawTensor, u64)| {
            let wrong = |e| Error::malformed(tensor.path(), e);
            let bytes = tensor.read_all()?;
            if XxHash3_64::oneshot(&bytes) != *checksum {
                return Err(Error::malformed(tensor.path(), format!("the tensor `{prefix}{name}` is damaged")));
            }
            let kind = DType::try_from(tensor.dtype).map_err(wrong)?;
            Tensor::from_raw_buffer(&bytes, kind, &tensor.shape, &Device::Cpu).map_err(wrong)
        };
        let named = self.tensors.iter().filter_map(move |(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)));
        named.map(move |(name, tensor)| read(name, tensor).map(|read| (name.to_owned(), read)))
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
        let mut bytes = std::fs::read(&path).unwrap();
        // The last element of `b`.
        let at = bytes.windows(8).rposition(|window| window == 4i64.to_le_bytes()).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let damaged = open::<u64>(&path).unwrap().unwrap().1.under("weight/").find_map(Result::err).unwrap().to_string();
        assert!(damaged.contains("`weight/b` is damaged"), "{damaged}");
        for bytes in [&bytes[..bytes.len() - 1], &bytes[..20], b"".as_slice()] {
            std::fs::write(&path, bytes).unwrap();
            assert!(open::<u64>(&path).err().unwrap().to_string().contains("checkpoint"), "{} bytes", bytes.len());
        }
    }
}
