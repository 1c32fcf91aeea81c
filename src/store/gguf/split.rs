//! Models in several files, as `llama-gguf-split` of llama.cpp writes them: `name-00001-of-00003.gguf` says what there is to say and holds some
//! of the tensors, the others hold the rest.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{EXTENSION, GgufFile, Value};
use crate::error::{Error, Result};

/// What the keys begin with that say which file of how many one is.
const SPLIT: &str = "split.";

/// What the name of a file begins with, its number and how many there are, of a name that ends like `-00001-of-00003.gguf`.
fn numbered(path: &Path) -> Option<(&str, u64, u64)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let number = |text: &str| if text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<u16>().ok().map(u64::from) } else { None };
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, first) = rest.rsplit_once('-')?;
    let (first, count) = (number(first)?, number(count)?);
    (1..=count).contains(&first).then_some((name, first, count))
}

/// Whether the name of a file says that it goes on with what another one begins.
pub fn continues(path: &Path) -> bool {
    numbered(path).is_some_and(|(_, number, _)| number > 1)
}

fn number(values: &BTreeMap<String, Value>, key: &str) -> Option<u64> {
    match values.get(&format!("{SPLIT}{key}"))? {
        Value::Unsigned(number) => Some(*number),
        Value::Signed(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

impl GgufFile {
    /// Opens the file of a model, or all files of one that is in several, of which any is named; with their places.
    ///
    /// # Errors
    /// A file is missing or malformed, or does not belong to the others.
    pub fn open_whole(path: &Path) -> Result<(GgufFile, Vec<PathBuf>)> {
        let mut file = GgufFile::open(path)?;
        let Some(count) = number(&file.values, "count").filter(|count| *count > 1) else { return Ok((file, vec![path.to_owned()])) };
        let Some((name, _, _)) = numbered(path).filter(|(.., named)| *named == count) else {
            let reason = format!("is one of {count} files of a model (`split.count`), and its name does not end like -00001-of-{count:05}.gguf");
            return Err(Error::malformed(path, reason));
        };
        let paths: Vec<PathBuf> = (1..=count).map(|number| path.with_file_name(format!("{name}-{number:05}-of-{count:05}.{EXTENSION}"))).collect();
        let (mut values, mut tensors, mut places) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (path, index) in paths.iter().zip(0..) {
            if file.path != *path {
                file = GgufFile::open(path)?;
            }
            let said = (number(&file.values, "no"), number(&file.values, "count"));
            if said != (Some(index), Some(count)) {
                return Err(Error::malformed(
                    path,
                    format!("is called number {index} of {count} from 0, and does not say that it is (`split.no`, `split.count`)"),
                ));
            }
            let new = std::mem::take(&mut file.values);
            if index == 0 {
                values = new;
            } else if let Some((key, _)) = new.iter().find(|(key, value)| !key.starts_with(SPLIT) && values.get(*key) != Some(value)) {
                return Err(Error::malformed(path, format!("says `{key}`, which the first file of the model does not")));
            }
            places.append(&mut file.places);
            for (name, weight) in std::mem::take(&mut file.tensors) {
                if tensors.insert(name.clone(), weight).is_some() {
                    return Err(Error::malformed(path, format!("tensor `{name}` is in another file of the model too")));
                }
            }
        }
        if let Some(said) = number(&values, "tensors.count").filter(|said| *said != tensors.len() as u64) {
            return Err(Error::malformed(path, format!("all {count} files hold {} tensors, and `split.tensors.count` is {said}", tensors.len())));
        }
        values.retain(|key, _| !key.starts_with(SPLIT));
        Ok((GgufFile { path: path.to_owned(), values, tensors, places }, paths))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_which_file_of_how_many_one_is() {
        let of = |name: &'static str| numbered(Path::new(name));
        assert_eq!(of("a/b-Q4-00002-of-00010.gguf"), Some(("b-Q4", 2, 10)));
        for none in ["b.gguf", "b-00000-of-00002.gguf", "b-00003-of-00002.gguf", "b-1-of-2.gguf", "b-00001-of-00002.bin", "b-+0001-of-00002.gguf"] {
            assert_eq!(of(none), None, "{none}");
        }
        assert!(continues(Path::new("b-00002-of-00002.gguf")) && !continues(Path::new("b-00001-of-00002.gguf")) && !continues(Path::new("b.gguf")));
    }
}
