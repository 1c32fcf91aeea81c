//! Writes the bytes of one tensor into a file, and hashes them.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use super::verified_file::{Extent, SEGMENT, VerifiedFile};
use crate::error::{Error, Result};

const PENDING: usize = 64 << 10;

/// Sequential writer for the bytes of one tensor.
pub(super) struct PartWriter<'a> {
    file: &'a VerifiedFile,
    offset: u64,
    pub(super) length: u64,
    position: u64,
    pending: Vec<u8>,
    hasher: XxHash3_64,
    hashed_from: u64,
    buffer: Vec<u8>,
}

impl<'a> PartWriter<'a> {
    pub(super) fn new(file: &'a VerifiedFile, offset: u64, length: u64) -> Self {
        Self { file, offset, length, position: 0, pending: Vec::new(), hasher: XxHash3_64::new(), hashed_from: offset, buffer: Vec::new() }
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

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        let mut at = self.offset + self.position;
        self.position += bytes.len() as u64;
        if self.position > self.length {
            return Err(Error::Verification {
                path: self.file.path().to_owned(),
                reason: "a tensor is longer than specified in the header; did the input change?".into(),
            });
        }
        while !bytes.is_empty() {
            let (head, tail) = bytes.split_at(bytes.len().min((SEGMENT - at % SEGMENT) as usize));
            self.hasher.write(head);
            self.file.write(head, at)?;
            at += head.len() as u64;
            if at.is_multiple_of(SEGMENT) {
                self.close(at)?;
            }
            bytes = tail;
        }
        Ok(())
    }

    /// Ends an extent, at the end of a segment or of the tensor.
    fn close(&mut self, end: u64) -> Result<()> {
        let offset = std::mem::replace(&mut self.hashed_from, end);
        let hash = std::mem::replace(&mut self.hasher, XxHash3_64::new()).finish();
        if end > offset { self.file.written(Extent { offset, length: end - offset, hash }, &mut self.buffer) } else { Ok(()) }
    }

    pub(super) fn finish(mut self, name: &str) -> Result<()> {
        self.flush()?;
        if self.position != self.length {
            return Err(Error::tensor(
                name,
                format!("{} bytes were written instead of {}", self.position, self.length),
                "did the input change while it was read?",
            ));
        }
        self.close(self.offset + self.length)
    }
}
