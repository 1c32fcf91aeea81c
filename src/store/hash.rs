//! BLAKE3 of a file, read in parallel; the same value that `b3sum` prints.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::error::{Error, Result};
use crate::work::Work;

/// Bytes that one job hashes: a whole subtree of BLAKE3, so a power of two.
pub const SEGMENT: u64 = 16 << 20;
const BUFFER: usize = 256 << 10;

enum Piece {
    Inner(ChainingValue),
    Whole(blake3::Hash),
}

/// The hash of a file.
///
/// # Errors
/// The file cannot be read.
pub fn hash_of(path: &Path, work: &Work) -> Result<blake3::Hash> {
    hash_file(path, work, |_| (), |(), _| Ok(()), |()| Ok(()))
}

/// Hashes a file that is looked at on the way. `see` is called with every run of bytes and its offset, in order inside each segment;
/// segments are read by several threads.
///
/// # Errors
/// The file cannot be read, or `see` says so.
pub fn hash_file<S>(
    path: &Path,
    work: &Work,
    begin: impl Fn(u64) -> S + Sync,
    see: impl Fn(&mut S, &[u8]) -> Result<()> + Sync,
    end: impl Fn(S) -> Result<()> + Sync,
) -> Result<blake3::Hash> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let length = file.metadata().map_err(Error::io("open", path))?.len();
    let count = length.div_ceil(SEGMENT).max(1);
    let jobs: Vec<u64> = (0..count).map(|i| i * SEGMENT).collect();
    let size = |start: &u64| SEGMENT.min(length - start);
    let mut pieces = work.run("Verifying", &jobs, size, |&start| {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(start);
        let mut state = begin(start);
        let mut buffer = vec![0; BUFFER];
        let stop = start + size(&start);
        let mut at = start;
        while at < stop {
            let run = &mut buffer[..BUFFER.min((stop - at) as usize)];
            file.read_exact_at(run, at).map_err(Error::io("read", path))?;
            hasher.update(run);
            see(&mut state, run)?;
            at += run.len() as u64;
            work.advance(run.len() as u64)?;
        }
        end(state)?;
        Ok(if count == 1 { Piece::Whole(hasher.finalize()) } else { Piece::Inner(hasher.finalize_non_root()) })
    })?;
    if let [Piece::Whole(hash)] = pieces[..] {
        return Ok(hash);
    }
    let inner: Vec<ChainingValue> = pieces.drain(..).filter_map(|p| if let Piece::Inner(value) = p { Some(value) } else { None }).collect();
    let (left, right) = halves(&inner);
    Ok(merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash))
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
