//! BLAKE3 of a file, read in parallel; the same value that `b3sum` prints.

use std::path::Path;

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::error::{Error, Result};
use crate::files::File;
use crate::work::Work;

/// Bytes that one job hashes: a whole subtree of BLAKE3, so a power of two.
const SEGMENT: u64 = 16 << 20;
const BUFFER: usize = 256 << 10;

/// The hash of a file, which is read by several threads.
///
/// # Errors
/// The file cannot be read.
pub fn hash_of(path: &Path, work: &Work) -> Result<blake3::Hash> {
    segments(path, SEGMENT, work).map(|values| root(&values))
}

/// What segments of so many bytes, a power of two, of a file give to [`root`].
///
/// # Errors
/// The file cannot be read.
pub(super) fn segments(path: &Path, segment: u64, work: &Work) -> Result<Vec<ChainingValue>> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let length = file.length();
    let jobs: Vec<u64> = (0..length).step_by(segment as usize).collect();
    let size = |start: &u64| segment.min(length - start);
    work.run("Verifying", &jobs, size, |&start| {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(start);
        let mut buffer = vec![0; BUFFER];
        let stop = start + size(&start);
        let mut at = start;
        while at < stop {
            let run = &mut buffer[..BUFFER.min((stop - at) as usize)];
            file.read_exact_at(run, at).map_err(Error::io("read", path))?;
            hasher.update(run);
            at += run.len() as u64;
            work.advance(run.len() as u64)?;
        }
        Ok(chaining_value(&hasher, length <= segment))
    })
}

/// What a segment gives to [`root`]: the hash itself when there is only one segment.
pub(super) fn chaining_value(hasher: &blake3::Hasher, only: bool) -> ChainingValue {
    if only { *hasher.finalize().as_bytes() } else { hasher.finalize_non_root() }
}

/// The hash of a whole from those of its segments, all but the last of one power of two of bytes.
pub(super) fn root(values: &[ChainingValue]) -> blake3::Hash {
    match values {
        [] => blake3::hash(&[]),
        [whole] => (*whole).into(),
        _ => {
            let (left, right) = halves(values);
            merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// The left half of a BLAKE3 tree is the largest power of two that leaves something for the right.
fn halves(values: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    values.split_at(values.len().next_power_of_two() / 2)
}

fn subtree(values: &[ChainingValue]) -> ChainingValue {
    match values {
        [one] => *one,
        _ => {
            let (left, right) = halves(values);
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    #[test]
    fn equals_the_plain_hash() {
        let folder = tempfile::tempdir().unwrap();
        for length in [0, 1, SEGMENT as usize, SEGMENT as usize + 1, 5 * SEGMENT as usize - 77] {
            let path = folder.path().join("file");
            let bytes: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
            let hash = hash_of(&path, &work).unwrap();
            assert_eq!(hash, blake3::hash(&bytes), "{length} bytes");
        }
    }
}
