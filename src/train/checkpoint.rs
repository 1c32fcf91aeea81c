//! Where training can go on from: one file, replaced in one step.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::batches::Cursor;
use super::run::{Evaluation, Row};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// Name of the file.
pub const FILE: &str = "checkpoint.safetensors";
const KEY: &str = "training";

/// How far training is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// What is trained, on what, and how: a hash.
    pub identity: String,
    /// Steps that are done.
    pub step: u64,
    /// Where the next step begins.
    pub data: Cursor,
    /// Samples that fit into memory at a time, where that has been found out.
    pub part: Option<usize>,
    /// The factor on the loss, for 16-bit floats, and steps since it changed.
    pub scale: (f64, u64),
    /// Evaluations since the best one.
    pub waited: u64,
    /// Loss and figures of some steps.
    pub curve: Vec<Row>,
    /// Scores on the way.
    pub evaluations: Vec<Evaluation>,
}

/// Tensors of a checkpoint: masters, optimizer, average and best weights, each under its own name.
pub type Tensors = BTreeMap<String, Tensor>;

/// The file of a process in a folder.
pub fn path(folder: &Path, rank: usize) -> PathBuf {
    if rank == 0 { folder.join(FILE) } else { folder.join(format!("{rank}-{FILE}")) }
}

/// Writes a checkpoint: whole, or not at all.
///
/// # Errors
/// The disk is full, or memory runs out.
pub fn save(folder: &Path, rank: usize, position: &Position, tensors: &Tensors) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let path = path(folder, rank);
    let unfinished = path.with_extension("unfinished");
    let text = serde_json::to_string(position).map_err(|e| Error::malformed(&path, e))?;
    let home = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), transfer::to_host(tensor, Cause::State)?.contiguous()?));
    let tensors = tensors.iter().map(home).collect::<candle_core::Result<Vec<_>>>().map_err(|e| Error::computed("the checkpoint", e))?;
    let written = safetensors::serialize_to_file(tensors.iter().map(|(name, t)| (name, t)), Some(HashMap::from([(KEY.to_owned(), text)])), &unfinished);
    written.map_err(|e| match e {
        safetensors::SafeTensorError::IoError(source) => Error::io("write", &unfinished)(source),
        other => Error::malformed(&unfinished, other),
    })?;
    File::open(&unfinished).and_then(|file| file.sync_all()).map_err(Error::io("write", &unfinished))?;
    std::fs::rename(&unfinished, &path).map_err(Error::io("write", &path))
}

/// Reads a checkpoint, if there is one.
///
/// # Errors
/// The file is damaged.
pub fn load(folder: &Path, rank: usize) -> Result<Option<(Position, Tensors)>> {
    let path = path(folder, rank);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("read", &path)(e)),
    };
    let wrong = |e: &dyn std::fmt::Display| Error::malformed(&path, format!("is no checkpoint of a training: {e}"));
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).map_err(|e| wrong(&e))?;
    let text = metadata.metadata().as_ref().and_then(|map| map.get(KEY)).ok_or_else(|| wrong(&"it does not say how far it is"))?;
    let position = serde_json::from_str(text).map_err(|e| wrong(&e))?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|e| wrong(&e))?;
    Ok(Some((position, tensors.into_iter().collect())))
}

/// Tensors whose names begin with a prefix, without it.
pub fn under(tensors: &Tensors, prefix: &str) -> Tensors {
    tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_owned(), tensor.clone()))).collect()
}

/// The same with a prefix.
pub fn prefixed(tensors: Tensors, prefix: &str) -> impl Iterator<Item = (String, Tensor)> {
    tensors.into_iter().map(move |(name, tensor)| (format!("{prefix}{name}"), tensor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        assert!(load(folder.path(), 0).unwrap().is_none());
        let position = Position { step: 7, data: Cursor { epoch: 1, batches: 2 }, part: Some(4), scale: (1024.0, 3), ..Position::default() };
        let tensors = Tensors::from([("weight/a".to_owned(), Tensor::new(&[1f32, f32::MIN_POSITIVE / 2.0], &Device::Cpu).unwrap())]);
        save(folder.path(), 0, &position, &tensors).unwrap();
        save(folder.path(), 0, &position, &tensors).unwrap();
        let (found, loaded) = load(folder.path(), 0).unwrap().unwrap();
        assert_eq!(found, position);
        assert_eq!(under(&loaded, "weight/")["a"].to_vec1::<f32>().unwrap(), [1.0, f32::MIN_POSITIVE / 2.0]);
        let file = path(folder.path(), 0);
        let bytes = std::fs::read(&file).unwrap();
        for bytes in [&bytes[..bytes.len() - 1], &bytes[..20], b"".as_slice()] {
            std::fs::write(&file, bytes).unwrap();
            assert!(load(folder.path(), 0).unwrap_err().to_string().contains("checkpoint"), "{} bytes", bytes.len());
        }
    }
}
