//! Importance matrices of llama.cpp: sums of squares of the inputs of matrices, as `llama-imatrix` writes
//! them.
//!
//! A file is a GGUF file with the tensors `NAME.in_sum2` and `NAME.counts`, or has the older binary form
//! (`common/imatrix-loader.cpp`). Values of the older form are already divided by the number of rows.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{GgufFile, Kind, MARK, Outline, Value, header, is_continuation};
use crate::error::{Error, Result};
use crate::files;
use crate::store::{DType, Encoding};

const DATASETS: &str = "imatrix.datasets";
const CHUNK_COUNT: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";
/// Suffixes of the names of the tensors.
const SQUARES: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// Sums of squares of the inputs of a matrix, or of several matrices of the same width.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InputSums {
    /// Sum of the squares of each column, matrix by matrix.
    pub squares: Vec<f32>,
    /// Number of rows of each matrix.
    pub counts: Vec<f32>,
}

impl InputSums {
    /// Mean square of each column. Matrices without rows have means of 1.
    #[must_use]
    pub fn means(&self) -> Vec<f32> {
        let width = self.squares.len().checked_div(self.counts.len()).unwrap_or(0).max(1);
        let matrices = self.squares.chunks(width).zip(&self.counts);
        matrices.flat_map(|(squares, count)| squares.iter().map(move |square| if *count > 0.0 { square / count } else { 1.0 })).collect()
    }
}

/// An importance matrix.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImportanceFile {
    /// The sums, by the name of the tensor in GGUF files.
    pub sums: BTreeMap<String, InputSums>,
    /// Names of the texts from which they were computed.
    pub datasets: Vec<String>,
    /// Number of texts of `chunk_size` tokens.
    pub chunks: u64,
    /// Tokens per text; 0 if unknown.
    pub chunk_size: u64,
}

impl ImportanceFile {
    /// Value of `general.type`.
    pub const TYPE: &str = "imatrix";

    /// Reads a file in either form.
    ///
    /// # Errors
    /// The file cannot be read, is malformed, or contains values that are not finite.
    pub fn open(path: &Path) -> Result<ImportanceFile> {
        let mut start = [0; 4];
        let file = files::File::open(path).map_err(Error::io("open", path))?;
        let is_gguf = file.read_exact_at(&mut start, 0).is_ok() && start == *MARK;
        let opened = if is_gguf {
            ImportanceFile::from_gguf(&GgufFile::open(path)?)?
        } else {
            let bytes = files::read(path).map_err(Error::io("read", path))?;
            ImportanceFile::from_binary(&bytes).map_err(|reason| Error::malformed(path, reason))?
        };
        match opened.sums.iter().find(|(_, sums)| sums.means().iter().any(|mean| !mean.is_finite())) {
            Some((name, _)) => Err(Error::malformed(path, format!("the importance of `{name}` contains values that are not finite"))),
            None if opened.sums.is_empty() => Err(Error::malformed(path, "contains no importance of a tensor")),
            None => Ok(opened),
        }
    }

    fn from_gguf(file: &GgufFile) -> Result<ImportanceFile> {
        let wrong = |reason: String| Error::malformed(&file.path, reason);
        let missing = |key: &str| wrong(format!("is not an importance matrix: `{key}` is missing"));
        let number = |key: &str| match file.values.get(key) {
            Some(Value::Unsigned(number)) => Ok(*number),
            _ => Err(missing(key)),
        };
        let datasets = match file.values.get(DATASETS) {
            Some(Value::Texts(texts)) => texts.clone(),
            _ => return Err(missing(DATASETS)),
        };
        let mut found = ImportanceFile { sums: BTreeMap::new(), datasets, chunks: number(CHUNK_COUNT)?, chunk_size: number(CHUNK_SIZE)? };
        let values = |name: &str| match file.tensors.get(name) {
            Some(tensor) if tensor.dtype == DType::F32 && tensor.encoding == Encoding::Dense && tensor.stored_type.is_none() => tensor.floats(name),
            Some(_) => Err(wrong(format!("tensor `{name}` is not F32"))),
            None => Err(wrong(format!("tensor `{name}` is missing"))),
        };
        for name in file.tensors.keys() {
            let Some(stem) = name.strip_suffix(SQUARES).or_else(|| name.strip_suffix(COUNTS)) else { continue };
            let (squares, mut counts) = (values(&format!("{stem}{SQUARES}"))?, values(&format!("{stem}{COUNTS}"))?);
            counts.iter_mut().for_each(|count| *count = count.round());
            if counts.is_empty() || !squares.len().is_multiple_of(counts.len()) {
                return Err(wrong(format!("`{stem}` has {} sums of squares for {} matrices", squares.len(), counts.len())));
            }
            found.sums.insert(stem.to_owned(), InputSums { squares, counts });
        }
        Ok(found)
    }

    fn from_binary(bytes: &[u8]) -> Result<ImportanceFile, String> {
        let mut rest = bytes;
        let mut found = ImportanceFile::default();
        let entries = integer(&mut rest, "the number of entries")?;
        if entries < 1 {
            return Err("is not an importance matrix: it has no entries".into());
        }
        for entry in 1..=entries {
            let what = format!("entry {entry} of {entries}");
            let name = text(&mut rest, &what)?;
            let calls = integer(&mut rest, &what)?;
            let count = usize::try_from(integer(&mut rest, &what)?).ok().filter(|count| *count > 0).ok_or_else(|| format!("{what} has no values"))?;
            let values = take(&mut rest, count.saturating_mul(4), &what)?;
            let squares = values.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
            let counts = vec![if calls > 0 { calls as f32 } else { 1.0 }];
            if found.sums.insert(name.clone(), InputSums { squares, counts }).is_some() {
                return Err(format!("tensor `{name}` occurs twice"));
            }
        }
        // Older versions of llama.cpp end the file here, or after the number of texts.
        if !rest.is_empty() {
            found.chunks = u64::try_from(integer(&mut rest, "the number of texts")?).unwrap_or(0);
        }
        if !rest.is_empty() {
            found.datasets = vec![text(&mut rest, "the name of the text")?];
        }
        Ok(found)
    }

    /// The bytes of a GGUF file; `None` if it is too large.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let number = |key: &str, number: u64| (key.to_owned(), Value::Unsigned(number));
        let values = [
            ("general.type".to_owned(), Value::Text(Self::TYPE.to_owned())),
            (DATASETS.to_owned(), Value::Texts(self.datasets.clone())),
            number(CHUNK_COUNT, self.chunks),
            number(CHUNK_SIZE, self.chunk_size),
        ];
        let (mut tensors, mut contents) = (Vec::new(), Vec::new());
        for (name, InputSums { squares, counts }) in &self.sums {
            let width = squares.len().checked_div(counts.len())?;
            tensors.push((format!("{name}{SQUARES}"), Kind::Plain(DType::F32), vec![counts.len(), width]));
            tensors.push((format!("{name}{COUNTS}"), Kind::Plain(DType::F32), vec![counts.len(), 1]));
            contents.extend([squares, counts]);
        }
        let (mut bytes, padding) = header(&values, &tensors)?;
        for (values, padding) in contents.into_iter().zip(padding) {
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            bytes.resize(bytes.len().checked_add(usize::try_from(padding).ok()?)?, 0);
        }
        Some(bytes)
    }
}

/// Takes bytes from the start of a slice.
fn take<'b>(rest: &mut &'b [u8], count: usize, what: &str) -> Result<&'b [u8], String> {
    let (taken, after) = rest.split_at_checked(count).ok_or_else(|| format!("ends within {what} (is it an importance matrix?)"))?;
    *rest = after;
    Ok(taken)
}

fn integer(rest: &mut &[u8], what: &str) -> Result<i32, String> {
    Ok(take(rest, 4, what)?.try_into().map_or(0, i32::from_le_bytes))
}

fn text(rest: &mut &[u8], what: &str) -> Result<String, String> {
    let length = usize::try_from(integer(rest, what)?).map_err(|_| format!("{what} has a name of negative length"))?;
    let bytes = take(rest, length, what)?;
    String::from_utf8(bytes.to_vec()).map_err(|_| format!("{what}: the name is not UTF-8"))
}

/// The files that contain models: without later parts of split files and, if several remain, without
/// importance matrices.
pub fn model_files<'p>(files: &[&'p PathBuf]) -> Vec<&'p PathBuf> {
    let mut found: Vec<&PathBuf> = files.iter().copied().filter(|file| !is_continuation(file)).collect();
    let is_importance =
        |path: &Path| Outline::open(path).is_ok_and(|outline| outline.values.get("general.type") == Some(&Value::Text(ImportanceFile::TYPE.to_owned())));
    if found.len() > 1 {
        found.retain(|file| !is_importance(file));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An importance matrix with a matrix and three experts, of which one has no rows.
    fn example() -> ImportanceFile {
        let sums = BTreeMap::from([
            ("blk.0.attn_q.weight".to_owned(), InputSums { squares: vec![2.0, 3.0, 0.0, 8.0], counts: vec![4.0] }),
            ("blk.0.ffn_up_exps.weight".to_owned(), InputSums { squares: vec![1.0, 2.0, 3.0, 4.0, 0.0, 0.0], counts: vec![2.0, 5.0, 0.0] }),
        ]);
        ImportanceFile { sums, datasets: vec!["text".into()], chunks: 3, chunk_size: 8 }
    }

    fn opened(bytes: &[u8]) -> Result<ImportanceFile, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        ImportanceFile::open(file.path()).map_err(|error| error.to_string())
    }

    fn fails(bytes: &[u8], words: &str) {
        let error = opened(bytes).unwrap_err();
        assert!(error.contains(words), "`{error}` does not contain `{words}`");
    }

    #[test]
    fn files_are_read_as_written() {
        let bytes = example().to_bytes().unwrap();
        assert_eq!(opened(&bytes).unwrap(), example());
        let means: Vec<Vec<f32>> = example().sums.values().map(InputSums::means).collect();
        assert_eq!(means, [vec![0.5, 0.75, 0.0, 2.0], vec![0.5, 1.0, 0.6, 0.8, 1.0, 1.0]]);
    }

    #[test]
    fn inconsistent_files_are_rejected() {
        let with = |change: &dyn Fn(&mut ImportanceFile)| {
            let mut file = example();
            change(&mut file);
            file.to_bytes().unwrap()
        };
        fails(&with(&|file| file.sums.clear()), "contains no importance of a tensor");
        let replace = |value: f32| with(&|file| file.sums.values_mut().for_each(|sums| sums.squares[1] = value));
        fails(&replace(f32::NAN), "the importance of `blk.0.attn_q.weight` contains values that are not finite");
        let renamed = |from: &str, to: &str| {
            let bytes = example().to_bytes().unwrap();
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
            [&bytes[..at], to.as_bytes(), &bytes[at + to.len()..]].concat()
        };
        fails(&renamed("attn_q.weight.counts", "attn_q.weight.other_"), "tensor `blk.0.attn_q.weight.counts` is missing");
        fails(&renamed("imatrix.chunk_size", "imatrix.chunk_else"), "is not an importance matrix: `imatrix.chunk_size` is missing");
    }

    /// The older form of the example: means multiplied by the number of calls.
    fn binary() -> Vec<u8> {
        let mut bytes = 2i32.to_le_bytes().to_vec();
        let text = |text: &str| [&(text.len() as i32).to_le_bytes()[..], text.as_bytes()].concat();
        for ((name, sums), calls) in example().sums.iter().zip([3, 0]) {
            let means = sums.means();
            bytes.extend([text(name), i32::to_le_bytes(calls).to_vec(), (means.len() as i32).to_le_bytes().to_vec()].concat());
            bytes.extend(means.iter().flat_map(|mean| (mean * calls.max(1) as f32).to_le_bytes()));
        }
        [bytes, 3i32.to_le_bytes().to_vec(), text("text")].concat()
    }

    #[test]
    fn the_older_form_is_read() {
        let bytes = binary();
        let found = opened(&bytes).unwrap();
        let means = |file: &ImportanceFile| file.sums.iter().map(|(name, sums)| (name.clone(), sums.means())).collect::<Vec<_>>();
        assert_eq!((means(&found), found.chunks, &found.datasets[..]), (means(&example()), 3, &["text".to_owned()][..]));
        let trailer = 4 + 4 + 4;
        let short = opened(&bytes[..bytes.len() - trailer]).unwrap();
        assert_eq!((means(&short), short.chunks, short.datasets.len()), (means(&example()), 0, 0));
        assert!((1..bytes.len() - trailer).all(|length| opened(&bytes[..length]).is_err()));
        fails(&[0; 8], "it has no entries");
        fails(b"version https://git-lfs", "ends within");
        fails(&[], "ends within the number of entries");
        let name = example().sums.into_keys().next().unwrap();
        let twice =
            [&2i32.to_le_bytes()[..], &[&(name.len() as i32).to_le_bytes()[..], name.as_bytes(), &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]].concat().repeat(2)];
        fails(&twice.concat(), "occurs twice");
    }

    #[test]
    fn models_are_preferred_to_importance_matrices() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["a.gguf", "imatrix.gguf", "b-00002-of-00002.gguf"].map(|name| folder.path().join(name));
        std::fs::write(&paths[0], "GGUF").unwrap();
        std::fs::write(&paths[1], example().to_bytes().unwrap()).unwrap();
        let [model, importance, part] = &paths;
        assert_eq!(model_files(&[model, importance, part]), [model]);
        assert_eq!(model_files(&[importance]), [importance]);
    }
}
