//! Models split over several files by `llama-gguf-split` of llama.cpp: `name-00001-of-00003.gguf`
//! contains the metadata and some of the tensors, the other files contain the remaining tensors.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::header::{ALIGNMENT_KEY, alignment};
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
            } else {
                // As in llama.cpp, each file has its own alignment.
                let is_own = |key: &str| key.starts_with(SPLIT) || key == ALIGNMENT_KEY;
                if let Some((key, _)) = new.iter().find(|(key, value)| !is_own(key) && values.get(*key) != Some(value)) {
                    return Err(Error::malformed(path, format!("contains the key `{key}`, which is missing or different in the first file of the model")));
                }
                let refused = |reason| Error::malformed(path, reason);
                let (own, first) = (alignment(&new).map_err(refused)?, alignment(&values).map_err(refused)?);
                if !new.contains_key(ALIGNMENT_KEY) && file.is_laid_out_for(first, own) {
                    let reason = format!(
                        "lacks the key `{ALIGNMENT_KEY}`, but its data seem to be aligned to {first} bytes like those of the first file, so that runtimes would read them at wrong offsets; write the model again with the default alignment of {own}"
                    );
                    return Err(refused(reason));
                }
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

    /// Whether the data of a file that is read with the alignment `own` seem to be written with another one:
    /// their section would start elsewhere, and the file is longer than its tensors. `GGUFWriter` of the
    /// `gguf` package writes the key of the alignment only to the first file of a model.
    fn is_laid_out_for(&self, alignment: u64, own: u64) -> bool {
        let begin = self.stored.values().map(|stored| stored.begin).min();
        let end = self.stored.values().map(|stored| stored.begin.saturating_add(stored.bytes)).max();
        let length = self.stored.values().next().map(|stored| stored.file.length());
        begin.is_some_and(|begin| !begin.is_multiple_of(alignment)) && length.zip(end).is_some_and(|(length, end)| length.saturating_sub(end) >= own)
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

    #[test]
    fn files_have_their_own_alignment() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [1, 2].map(|number| folder.path().join(format!("a-0000{number}-of-00002.gguf")));
        let keys = |number: u64, alignment: Option<u64>| {
            let split = [("split.no", Some(number)), ("split.count", Some(2)), (ALIGNMENT_KEY, alignment)];
            split.into_iter().filter_map(|(key, value)| Some((key.to_owned(), Value::Unsigned(value?)))).collect::<Vec<_>>()
        };
        let first = |alignment| super::super::header(&keys(0, alignment), &[]).unwrap().0;
        let tensor = ("a".repeat(40), super::super::Kind::Plain(crate::store::DType::F32), vec![16]);
        let second = |alignment, data: usize| {
            let (mut bytes, _) = super::super::header(&keys(1, alignment), std::slice::from_ref(&tensor)).unwrap();
            // Otherwise both alignments have the same offsets.
            assert!(alignment.is_some() || !bytes.len().is_multiple_of(128));
            bytes.resize(bytes.len().next_multiple_of(data), 0);
            bytes.extend((0..16).flat_map(|value| (value as f32).to_le_bytes()));
            bytes
        };
        for (of_first, of_second, data, is_read) in
            [(None, Some(128), 128, true), (Some(128), None, 32, true), (Some(128), Some(32), 32, true), (Some(128), None, 128, false)]
        {
            std::fs::write(&paths[0], first(of_first)).unwrap();
            std::fs::write(&paths[1], second(of_second, data)).unwrap();
            match GgufFile::open_all_parts(&paths[0]) {
                Ok((file, _)) => assert!(is_read && file.tensors[&tensor.0].floats("a").unwrap()[3] == 3.0, "{of_first:?} {of_second:?}"),
                Err(e) => assert!(!is_read && e.to_string().contains("-00002-of-00002.gguf: lacks the key `general.alignment`"), "{e}"),
            }
        }
    }
}
