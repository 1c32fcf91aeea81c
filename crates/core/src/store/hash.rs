//! BLAKE3 hash of a file, computed in parallel. Equals the output of `b3sum`.

use std::path::Path;

use blake3::hazmat::{ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};

use crate::error::{Error, Result};
use crate::files::File;
use crate::work::Work;

/// Bytes hashed by one job: a power of two, so that they form a subtree of BLAKE3.
const SEGMENT: u64 = 16 << 20;
const BUFFER: usize = 256 << 10;

/// The hash of a file, computed by several threads.
pub fn hash_file(path: &Path, work: &Work) -> Result<blake3::Hash> {
    segments(path, SEGMENT, work).map(|values| root(&values))
}

/// Size of a leaf of BLAKE3's tree in bytes.
pub(super) const CHUNK: usize = blake3::CHUNK_LEN;

/// A complete subtree of BLAKE3's tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subtree {
    /// Number of bytes it covers.
    pub bytes: u64,
    /// Its chaining value.
    pub value: ChainingValue,
}

/// Hashes a range of bytes of a longer input.
pub(super) struct RunHasher {
    subtrees: Vec<Subtree>,
    hasher: blake3::Hasher,
    /// Start of the current subtree, and number of its bytes hashed so far.
    start: u64,
    filled: u64,
    size: u64,
    end: u64,
}

impl RunHasher {
    /// A hasher for the bytes `start..end` of a longer input. `start` must be a multiple of [`CHUNK`].
    pub fn new(start: u64, end: u64) -> RunHasher {
        let mut run = RunHasher { subtrees: Vec::new(), hasher: blake3::Hasher::new(), start, filled: 0, size: 0, end };
        run.begin();
        run
    }

    /// Starts the largest possible subtree at the current position.
    fn begin(&mut self) {
        let left = self.end.saturating_sub(self.start);
        let power = 1u64.checked_shl(left.checked_ilog2().unwrap_or(0)).unwrap_or(left);
        let aligned = 1u64.checked_shl(self.start.trailing_zeros()).unwrap_or(u64::MAX);
        self.size = if left <= CHUNK as u64 { left } else { power.min(aligned) };
        self.filled = 0;
        if left > 0 {
            self.hasher = blake3::Hasher::new();
            self.hasher.set_input_offset(self.start);
        }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.size > 0 {
            let (now, rest) = bytes.split_at(bytes.len().min((self.size - self.filled) as usize));
            self.hasher.update(now);
            self.filled += now.len() as u64;
            if self.filled == self.size {
                self.subtrees.push(Subtree { bytes: self.size, value: self.hasher.finalize_non_root() });
                self.start += self.size;
                self.begin();
            }
            bytes = rest;
        }
        if !bytes.is_empty() {
            // More bytes than specified: makes `finish` fail.
            self.end = u64::MAX;
        }
    }

    /// The subtrees in order. `None` if the number of bytes differs from the specified one.
    pub fn finish(self) -> Option<Vec<Subtree>> {
        (self.start == self.end).then_some(self.subtrees)
    }
}

/// Merges all subtrees of an input, at least two, into its hash. `None` if they do not form one tree.
pub(super) fn merge(subtrees: &[Subtree]) -> Option<blake3::Hash> {
    let bytes = subtrees.iter().try_fold(0u64, |sum, subtree| sum.checked_add(subtree.bytes))?;
    let mut rest = subtrees;
    if subtrees.len() < 2 || bytes <= CHUNK as u64 {
        return None;
    }
    let left = left_subtree_len(bytes);
    let (left, right) = (node(&mut rest, left)?, node(&mut rest, bytes - left)?);
    rest.is_empty().then(|| merge_subtrees_root(&left, &right, Mode::Hash))
}

/// The chaining value of the next `bytes` bytes, merged from the next subtrees.
fn node(rest: &mut &[Subtree], bytes: u64) -> Option<ChainingValue> {
    let (first, others) = rest.split_first()?;
    if first.bytes == bytes {
        *rest = others;
        return Some(first.value);
    }
    if first.bytes > bytes || bytes <= CHUNK as u64 {
        return None;
    }
    let left = left_subtree_len(bytes);
    let (left, right) = (node(rest, left)?, node(rest, bytes - left)?);
    Some(merge_subtrees_non_root(&left, &right, Mode::Hash))
}

/// The chaining values of a file's segments, from which [`root`] computes the hash. `segment` must be a
/// power of two.
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

/// The chaining value of a segment, or the hash if it is the only segment.
pub(super) fn chaining_value(hasher: &blake3::Hasher, only: bool) -> ChainingValue {
    if only { *hasher.finalize().as_bytes() } else { hasher.finalize_non_root() }
}

/// The hash of an input from the chaining values of its segments, all of which except the last cover the
/// same power of two of bytes.
pub(super) fn root(values: &[ChainingValue]) -> blake3::Hash {
    match values {
        [] => blake3::hash(&[]),
        [only] => (*only).into(),
        _ => {
            let (left, right) = halves(values);
            merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// The left half of a BLAKE3 tree covers the largest power of two that leaves at least one element for
/// the right half.
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
    fn subtrees_of_ranges_merge_to_the_hash() {
        let bytes: Vec<u8> = (0..300 * CHUNK).map(|i| (i * 31 % 251) as u8).collect();
        for length in [CHUNK + 1, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK, 7 * CHUNK + 5, 256 * CHUNK, 300 * CHUNK] {
            for cuts in [vec![1], vec![1, 2], vec![2, 3, 5], vec![64, 128], vec![7, 131, 132, 255]] {
                let cuts: Vec<usize> = cuts.into_iter().map(|cut| cut * CHUNK).filter(|cut| *cut < length).collect();
                let ends = cuts.iter().copied().chain([length]);
                let mut found = Vec::new();
                for (start, end) in [0].into_iter().chain(cuts.iter().copied()).zip(ends).filter(|run| *run != (0, length)) {
                    let mut run = RunHasher::new(start as u64, end as u64);
                    bytes[start..end].chunks(777).for_each(|part| run.update(part));
                    found.extend(run.finish().unwrap());
                }
                if found.is_empty() {
                    continue;
                }
                assert_eq!(merge(&found), Some(blake3::hash(&bytes[..length])), "{length} bytes, cut at {cuts:?}");
                found.pop();
                assert_ne!(merge(&found), Some(blake3::hash(&bytes[..length])));
            }
        }
        assert!(RunHasher::new(CHUNK as u64, 3 * CHUNK as u64).finish().is_none());
    }

    #[test]
    fn equals_the_plain_hash() {
        let folder = tempfile::tempdir().unwrap();
        for length in [0, 1, SEGMENT as usize, SEGMENT as usize + 1, 5 * SEGMENT as usize - 77] {
            let path = folder.path().join("file");
            let bytes: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
            let hash = hash_file(&path, &work).unwrap();
            assert_eq!(hash, blake3::hash(&bytes), "{length} bytes");
        }
    }
}
