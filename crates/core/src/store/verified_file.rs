//! A file that several threads write in any order, with verification by reading back.
//!
//! The thread that completes a segment reads it back immediately, while it is still cached. Uploaded
//! files are read again at the end.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use blake3::hazmat::{ChainingValue, HasherExt};
use twox_hash::XxHash3_64;

use super::hash::{chaining_value, root, segments};
use crate::error::{Error, Result};
use crate::files::{Destination, NewFile};
use crate::work::{Work, lock};

/// Size of a segment in bytes: a power of two, so that each segment is a subtree of BLAKE3. Fits into
/// the L2 cache.
pub(super) const SEGMENT: u64 = 512 << 10;
const BUFFER: usize = 128 << 10;

/// Consecutive bytes within a segment, with their expected hash.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) hash: u64,
}

/// A file of known length that is being written.
pub(super) struct VerifiedFile {
    path: PathBuf,
    file: NewFile,
    length: u64,
    state: Mutex<State>,
}

/// State of the segments, by number.
struct State {
    /// Written extents of incomplete segments.
    open: BTreeMap<usize, Vec<Extent>>,
    /// Hashes of the segments that were read back.
    hashes: Vec<Option<ChainingValue>>,
}

impl VerifiedFile {
    pub(super) fn create(folder: &Destination, name: &str, length: u64) -> Result<VerifiedFile> {
        let (path, file) = folder.create(name, length).map_err(Error::io("create", &folder.path().join(name)))?;
        let hashes = vec![None; length.div_ceil(SEGMENT) as usize];
        Ok(VerifiedFile { path, file, length, state: Mutex::new(State { open: BTreeMap::new(), hashes }) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(Error::io("write", &self.path))
    }

    /// Records written bytes. If they complete a segment, it is read back through `buffer`.
    pub(super) fn written(&self, extent: Extent, buffer: &mut Vec<u8>) -> Result<()> {
        let index = extent.offset / SEGMENT;
        let start = index * SEGMENT;
        let length = SEGMENT.min(self.length.saturating_sub(start));
        let index = index as usize;
        let complete = {
            let state = &mut *lock(&self.state);
            let extents = state.open.entry(index).or_default();
            extents.push(extent);
            if extents.iter().map(|s| s.length).sum::<u64>() < length {
                return Ok(());
            }
            state.open.remove(&index).unwrap_or_default()
        };
        let hash = self.read_back(start, length, complete, buffer)?;
        match lock(&self.state).hashes.get_mut(index) {
            Some(slot @ None) => *slot = Some(hash),
            _ => return Err(self.failed(&format!("bytes {start} to {} were written twice", start + length))),
        }
        self.file.mark_final(start..start + length).map_err(Error::io("write", &self.path))
    }

    /// Reads a segment back, verifies its extents, and hashes it.
    fn read_back(&self, start: u64, length: u64, mut extents: Vec<Extent>, buffer: &mut Vec<u8>) -> Result<ChainingValue> {
        extents.sort_by_key(|s| s.offset);
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(start);
        buffer.resize(BUFFER, 0);
        let mut expected = extents.iter();
        let (mut extent, mut left, mut sum) = (None::<&Extent>, 0, XxHash3_64::new());
        let mut at = start;
        while at < start + length {
            let run = &mut buffer[..BUFFER.min((start + length - at) as usize)];
            self.file.read_exact_at(run, at).map_err(Error::io("read", &self.path))?;
            hasher.update(run);
            let mut rest: &[u8] = run;
            while !rest.is_empty() {
                if left == 0 {
                    extent = expected.next();
                    let here = at + (run.len() - rest.len()) as u64;
                    left = extent.filter(|s| s.offset == here).map_or(0, |s| s.length as usize);
                    if left == 0 {
                        return Err(self.failed(&format!("byte {here} was written twice or not at all")));
                    }
                    sum = XxHash3_64::new();
                }
                let (head, tail) = rest.split_at(rest.len().min(left));
                sum.write(head);
                left -= head.len();
                if left == 0
                    && let Some(Extent { offset, length, hash }) = extent
                    && sum.finish() != *hash
                {
                    return Err(self.failed(&format!("bytes {offset} to {} read back differently; the disk or the memory is faulty", offset + length)));
                }
                rest = tail;
            }
            at += run.len() as u64;
        }
        Ok(chaining_value(&hasher, self.length <= SEGMENT))
    }

    /// The hash of the file, computed while it was read back.
    pub(super) fn finish(self, work: &Work) -> Result<blake3::Hash> {
        let state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let hashes = state.hashes.iter().copied().collect::<Option<Vec<ChainingValue>>>().filter(|_| state.open.is_empty());
        let Some(hashes) = hashes else {
            return Err(Error::Verification { path: self.path.clone(), reason: format!("not all of the {} bytes were written and verified", self.length) });
        };
        if self.file.finish().map_err(Error::io("write", &self.path))? {
            let back = segments(&self.path, SEGMENT, work)?;
            if let Some(at) = (0..hashes.len().max(back.len())).find(|at| hashes.get(*at) != back.get(*at)) {
                let start = at as u64 * SEGMENT;
                return Err(self.failed(&format!("bytes {start} to {} read back differently", (start + SEGMENT).min(self.length))));
            }
        }
        Ok(root(&hashes))
    }

    fn failed(&self, reason: &str) -> Error {
        Error::Verification { path: self.path.clone(), reason: reason.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    const LENGTH: u64 = 3 * SEGMENT + 777;

    fn bytes() -> Vec<u8> {
        (0..LENGTH).map(|i| (i * 31 % 251) as u8).collect()
    }

    /// The extents between these offsets.
    fn extents(bytes: &[u8], cuts: &[u64]) -> Vec<Extent> {
        let hash = |begin: u64, end: u64| XxHash3_64::oneshot(&bytes[begin as usize..end as usize]);
        cuts.windows(2).map(|cut| Extent { offset: cut[0], length: cut[1] - cut[0], hash: hash(cut[0], cut[1]) }).collect()
    }

    fn file(folder: &Path, bytes: &[u8]) -> VerifiedFile {
        let file = VerifiedFile::create(&Destination::local(folder), "file", bytes.len() as u64).unwrap();
        file.write(bytes, 0).unwrap();
        file
    }

    fn finished(file: VerifiedFile) -> Result<blake3::Hash> {
        file.finish(&Work { threads: 1, progress: &Silent, cancel: &Cancel::default() })
    }

    #[test]
    fn the_hash_does_not_depend_on_the_write_order() {
        for length in [0, 1, SEGMENT, SEGMENT + 1, LENGTH] {
            let folder = tempfile::tempdir().unwrap();
            let bytes = &bytes()[..length as usize];
            let file = file(folder.path(), bytes);
            let mut cuts: Vec<u64> = (0..length).step_by(200_001).chain((0..length).step_by(SEGMENT as usize)).chain([length]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            for extent in extents(bytes, &cuts).into_iter().rev() {
                file.written(extent, &mut Vec::new()).unwrap();
            }
            assert_eq!(finished(file).unwrap(), blake3::hash(bytes), "{length} bytes");
        }
    }

    #[test]
    fn a_flipped_bit_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = bytes();
        let meant = extents(&bytes, &[0, 1000, SEGMENT, 2 * SEGMENT]);
        bytes[SEGMENT as usize - 1] ^= 1;
        let file = file(folder.path(), &bytes);
        file.written(meant[0], &mut Vec::new()).unwrap();
        let error = file.written(meant[1], &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("bytes 1000 to 524288 read back differently"), "{error}");
        file.written(meant[2], &mut Vec::new()).unwrap();
    }

    #[test]
    fn gaps_and_overlaps_are_detected() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = bytes();
        let file = file(folder.path(), &bytes);
        let parts = extents(&bytes, &[0, 1000, SEGMENT - 1000, SEGMENT, SEGMENT + 1000]);
        for extent in [parts[1], parts[2]] {
            file.written(extent, &mut Vec::new()).unwrap();
        }
        assert!(file.written(parts[2], &mut Vec::new()).unwrap_err().to_string().contains("byte 0 was written twice or not at all"));
        for extent in &parts[..2] {
            file.written(*extent, &mut Vec::new()).unwrap();
        }
        file.written(parts[2], &mut Vec::new()).unwrap();
        assert!(
            file.written(Extent { offset: 0, length: SEGMENT, hash: XxHash3_64::oneshot(&bytes[..SEGMENT as usize]) }, &mut Vec::new())
                .unwrap_err()
                .to_string()
                .contains("written twice")
        );
        assert!(finished(file).unwrap_err().to_string().contains("not all of the"));
    }
}
