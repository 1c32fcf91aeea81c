//! The bytes of one tensor on their way into a file, hashed as they go.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use xxhash_rust::xxh3::Xxh3Default;

use super::hash::SEGMENT;
use crate::error::{Error, Result};

pub(super) struct Target {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

/// A run of bytes of a file and the hash that it must have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) hash: u64,
}

const PENDING: usize = 64 << 10;

/// Writes the bytes of one tensor, in order.
pub(super) struct PartWriter<'a> {
    target: &'a Target,
    offset: u64,
    pub(super) length: u64,
    position: u64,
    pending: Vec<u8>,
    hasher: Xxh3Default,
    hashed_from: u64,
    stretches: Vec<Stretch>,
}

impl<'a> PartWriter<'a> {
    pub(super) fn new(target: &'a Target, offset: u64, length: u64) -> Self {
        Self { target, offset, length, position: 0, pending: Vec::new(), hasher: Xxh3Default::new(), hashed_from: offset, stretches: Vec::new() }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if self.pending.is_empty() && bytes.len() >= PENDING {
            return self.put(bytes);
        }
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= PENDING { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let mut pending = std::mem::take(&mut self.pending);
        self.put(&pending)?;
        pending.clear();
        self.pending = pending;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let at = self.offset + self.position;
        self.position += bytes.len() as u64;
        if self.position > self.length {
            return Err(Error::Verification {
                path: self.target.path.clone(),
                reason: "a tensor turned out longer than its header says; did the input change?".into(),
            });
        }
        self.hash(at, bytes);
        self.target.file.write_all_at(bytes, at).map_err(Error::io("write", &self.target.path))
    }

    /// Hashes are cut where the verifier's segments are.
    fn hash(&mut self, mut at: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (head, tail) = bytes.split_at(bytes.len().min((SEGMENT - at % SEGMENT) as usize));
            self.hasher.update(head);
            at += head.len() as u64;
            if at.is_multiple_of(SEGMENT) {
                self.close(at);
            }
            bytes = tail;
        }
    }

    fn close(&mut self, end: u64) {
        if end > self.hashed_from {
            self.stretches.push(Stretch { offset: self.hashed_from, length: end - self.hashed_from, hash: self.hasher.digest() });
        }
        self.hasher.reset();
        self.hashed_from = end;
    }

    pub(super) fn finish(mut self, name: &str) -> Result<Vec<Stretch>> {
        self.flush()?;
        if self.position != self.length {
            return Err(Error::tensor(
                name,
                format!("{} bytes were made where {} were announced", self.position, self.length),
                "did the input change while it was read?",
            ));
        }
        self.close(self.offset + self.length);
        Ok(self.stretches)
    }
}
