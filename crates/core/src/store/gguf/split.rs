//! Models split over several files by `llama-gguf-split` of llama.cpp: `name-00001-of-00003.gguf`
//! contains the metadata and some of the tensors, the other files contain the remaining tensors.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{EXTENSION, GgufFile, Value};
use crate::error::{Error, Result};
use crate::store::shard_name;

/// Prefix of the keys that describe the split.
const SPLIT: &str = "split.";

/// Base name, file number and number of files of a name like `name-00001-of-00003.gguf`.
fn numbered(path: &Path) -> Option<(&str, u64, u64)> {
    shard_name::parse(path, EXTENSION)
}

/// Whether a file name denotes a file of a split model other than the first.
pub fn is_continuation(path: &Path) -> bool {
    numbered(path).is_some_and(|(_, number, _)| number > 1)
}

fn number(values: &BTreeMap<String, Value>, key: &str) -> Option<u64> {
    match values.get(&format!("{SPLIT}{key}"))? {
        Value::Unsigned(number) => Some(*number),
        Value::Signed(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// The paths of all files of a model, given one of them and its metadata.
///
/// # Errors
/// The model is split over several files, and the name of this one does not have its number.
pub fn all_parts(path: &Path, values: &BTreeMap<String, Value>) -> Result<Vec<PathBuf>> {
    let Some(count) = number(values, "count").filter(|count| *count > 1) else { return Ok(vec![path.to_owned()]) };
    let Some((name, ..)) = numbered(path).filter(|(.., stated)| *stated == count) else {
        let reason = format!("is one of {count} files of a model (`split.count`), but its name does not end like -00001-of-{count:05}.gguf");
        return Err(Error::malformed(path, reason));
    };
    Ok((1..=count).map(|number| path.with_file_name(format!("{name}-{number:05}-of-{count:05}.{EXTENSION}"))).collect())
}

impl GgufFile {
    /// Opens a model that consists of one file or is split over several files, given any of them.
    /// Returns their paths too. Fails if a file is missing or inconsistent with the others.
    pub fn open_all_parts(path: &Path) -> Result<(GgufFile, Vec<PathBuf>)> {
        let mut file = GgufFile::open(path)?;
        let paths = all_parts(path, &file.values)?;
        let count = paths.len() as u64;
        if count < 2 {
            return Ok((file, paths));
        }
        let (mut values, mut tensors, mut stored) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (path, index) in paths.iter().zip(0..) {
            if file.path != *path {
                file = GgufFile::open(path)?;
            }
            let stated = (number(&file.values, "no"), number(&file.values, "count"));
            if stated != (Some(index), Some(count)) {
                return Err(Error::malformed(
                    path,
                    format!("is file {index} of {count} (from 0) according to its name, but not according to its metadata (`split.no`, `split.count`)"),
                ));
            }
            let new = std::mem::take(&mut file.values);
            if index == 0 {
                values = new;
            } else if let Some((key, _)) = new.iter().find(|(key, value)| !key.starts_with(SPLIT) && values.get(*key) != Some(value)) {
                return Err(Error::malformed(path, format!("contains the key `{key}`, which is missing or different in the first file of the model")));
            }
            stored.append(&mut file.stored);
            for (name, weight) in std::mem::take(&mut file.tensors) {
                if tensors.insert(name.clone(), weight).is_some() {
                    return Err(Error::malformed(path, format!("tensor `{name}` is also in another file of the model")));
                }
            }
        }
        if let Some(stated) = number(&values, "tensors.count").filter(|stated| *stated != tensors.len() as u64) {
            return Err(Error::malformed(path, format!("the {count} files contain {} tensors, but `split.tensors.count` is {stated}", tensors.len())));
        }
        values.retain(|key, _| !key.starts_with(SPLIT));
        Ok((GgufFile { path: path.to_owned(), values, tensors, stored }, paths))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_of_split_models_are_parsed() {
        let of = |name: &'static str| numbered(Path::new(name));
        assert_eq!(of("a/b-Q4-00002-of-00010.gguf"), Some(("b-Q4", 2, 10)));
        for none in ["b.gguf", "b-00000-of-00002.gguf", "b-00003-of-00002.gguf", "b-1-of-2.gguf", "b-00001-of-00002.bin", "b-+0001-of-00002.gguf"] {
            assert_eq!(of(none), None, "{none}");
        }
        assert!(
            is_continuation(Path::new("b-00002-of-00002.gguf"))
                && !is_continuation(Path::new("b-00001-of-00002.gguf"))
                && !is_continuation(Path::new("b.gguf"))
        );
    }
}
