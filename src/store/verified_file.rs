//! A file that several threads write in any order, and that is read again piece by piece while it fills.
//!
//! Whoever writes the last bytes of a segment reads the segment back at once, while caches still hold it. What goes to another machine is read
//! again at the end too.

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

/// Bytes that are read back together: a whole subtree of BLAKE3, so a power of two. Small enough for a second-level cache.
pub(super) const SEGMENT: u64 = 512 << 10;
const BUFFER: usize = 128 << 10;

/// Consecutive bytes inside one segment and the hash that they must have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) hash: u64,
}

/// A file of known length on its way to where it is written.
pub(super) struct VerifiedFile {
    path: PathBuf,
    file: NewFile,
    length: u64,
    state: Mutex<State>,
}

/// Segments by number.
struct State {
    /// What is written of those that are not complete.
    open: BTreeMap<usize, Vec<Stretch>>,
    /// Hashes of those that were read back.
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

    /// Takes note of what was written. A segment that is complete is read back, through a buffer that the caller keeps.
    pub(super) fn written(&self, stretch: Stretch, buffer: &mut Vec<u8>) -> Result<()> {
        let index = stretch.offset / SEGMENT;
        let start = index * SEGMENT;
        let length = SEGMENT.min(self.length.saturating_sub(start));
        let index = index as usize;
        let complete = {
            let state = &mut *lock(&self.state);
            let stretches = state.open.entry(index).or_default();
            stretches.push(stretch);
            if stretches.iter().map(|s| s.length).sum::<u64>() < length {
                return Ok(());
            }
            state.open.remove(&index).unwrap_or_default()
        };
        let hash = self.read_back(start, length, complete, buffer)?;
        match lock(&self.state).hashes.get_mut(index) {
            Some(place @ None) => *place = Some(hash),
            _ => return Err(self.failed(&format!("bytes {start} to {} were written twice", start + length))),
        }
        self.file.settled(start..start + length).map_err(Error::io("write", &self.path))
    }

    /// Reads a segment, holds it to its stretches, and hashes it.
    fn read_back(&self, start: u64, length: u64, mut stretches: Vec<Stretch>, buffer: &mut Vec<u8>) -> Result<ChainingValue> {
        stretches.sort_by_key(|s| s.offset);
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(start);
        buffer.resize(BUFFER, 0);
        let mut expected = stretches.iter();
        let (mut stretch, mut left, mut sum) = (None::<&Stretch>, 0, XxHash3_64::new());
        let mut at = start;
        while at < start + length {
            let run = &mut buffer[..BUFFER.min((start + length - at) as usize)];
            self.file.read_exact_at(run, at).map_err(Error::io("read", &self.path))?;
            hasher.update(run);
            let mut rest: &[u8] = run;
            while !rest.is_empty() {
                if left == 0 {
                    stretch = expected.next();
                    let here = at + (run.len() - rest.len()) as u64;
                    left = stretch.filter(|s| s.offset == here).map_or(0, |s| s.length as usize);
                    if left == 0 {
                        return Err(self.failed(&format!("byte {here} was written twice or not at all")));
                    }
                    sum = XxHash3_64::new();
                }
                let (head, tail) = rest.split_at(rest.len().min(left));
                sum.write(head);
                left -= head.len();
                if left == 0
                    && let Some(Stretch { offset, length, hash }) = stretch
                    && sum.finish() != *hash
                {
                    return Err(self.failed(&format!("bytes {offset} to {} read back differently: the disk or the memory is faulty", offset + length)));
                }
                rest = tail;
            }
            at += run.len() as u64;
        }
        Ok(chaining_value(&hasher, self.length <= SEGMENT))
    }

    /// The hash of the whole file, as it was read back.
    pub(super) fn finish(self, work: &Work) -> Result<blake3::Hash> {
        let state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let hashes = state.hashes.iter().copied().collect::<Option<Vec<ChainingValue>>>().filter(|_| state.open.is_empty());
        let Some(hashes) = hashes else {
            return Err(Error::Verification { path: self.path.clone(), reason: format!("not all of the {} bytes are as they were meant", self.length) });
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

    /// The stretches between these places.
    fn stretches(bytes: &[u8], cuts: &[u64]) -> Vec<Stretch> {
        let hash = |begin: u64, end: u64| XxHash3_64::oneshot(&bytes[begin as usize..end as usize]);
        cuts.windows(2).map(|cut| Stretch { offset: cut[0], length: cut[1] - cut[0], hash: hash(cut[0], cut[1]) }).collect()
    }

    fn file(folder: &Path, bytes: &[u8]) -> VerifiedFile {
        let file = VerifiedFile::create(&Destination::here(folder), "file", bytes.len() as u64).unwrap();
        file.write(bytes, 0).unwrap();
        file
    }

    fn finished(file: VerifiedFile) -> Result<blake3::Hash> {
        file.finish(&Work { threads: 1, progress: &Silent, cancel: &Cancel::default() })
    }

    #[test]
    fn the_hash_is_that_of_the_file_in_whatever_order_it_is_written() {
        for length in [0, 1, SEGMENT, SEGMENT + 1, LENGTH] {
            let folder = tempfile::tempdir().unwrap();
            let bytes = &bytes()[..length as usize];
            let file = file(folder.path(), bytes);
            let mut cuts: Vec<u64> = (0..length).step_by(200_001).chain((0..length).step_by(SEGMENT as usize)).chain([length]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            for stretch in stretches(bytes, &cuts).into_iter().rev() {
                file.written(stretch, &mut Vec::new()).unwrap();
            }
            assert_eq!(finished(file).unwrap(), blake3::hash(bytes), "{length} bytes");
        }
    }

    #[test]
    fn a_flipped_bit_is_found_when_it_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = bytes();
        let meant = stretches(&bytes, &[0, 1000, SEGMENT, 2 * SEGMENT]);
        bytes[SEGMENT as usize - 1] ^= 1;
        let file = file(folder.path(), &bytes);
        file.written(meant[0], &mut Vec::new()).unwrap();
        let error = file.written(meant[1], &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("bytes 1000 to 524288 read back differently"), "{error}");
        file.written(meant[2], &mut Vec::new()).unwrap();
    }

    #[test]
    fn gaps_and_places_that_are_written_twice_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = bytes();
        let file = file(folder.path(), &bytes);
        let parts = stretches(&bytes, &[0, 1000, SEGMENT - 1000, SEGMENT, SEGMENT + 1000]);
        for stretch in [parts[1], parts[2]] {
            file.written(stretch, &mut Vec::new()).unwrap();
        }
        assert!(file.written(parts[2], &mut Vec::new()).unwrap_err().to_string().contains("byte 0 was written twice or not at all"));
        for stretch in &parts[..2] {
            file.written(*stretch, &mut Vec::new()).unwrap();
        }
        file.written(parts[2], &mut Vec::new()).unwrap();
        assert!(
            file.written(Stretch { offset: 0, length: SEGMENT, hash: XxHash3_64::oneshot(&bytes[..SEGMENT as usize]) }, &mut Vec::new())
                .unwrap_err()
                .to_string()
                .contains("written twice")
        );
        assert!(finished(file).unwrap_err().to_string().contains("not all of the"));
    }
}
