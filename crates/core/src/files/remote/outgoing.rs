//! Files that are uploaded part by part, while their bytes are written in any order.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;
use super::session::{MultipartUpload, Part, Session, State};

/// A file that is being uploaded. Any thread can write at any offset.
#[derive(Debug)]
pub(in crate::files) struct Outgoing {
    session: Arc<Session>,
    file: String,
    length: u64,
    part: u64,
    /// Id of the multipart upload, once it is started.
    upload: Mutex<Option<String>>,
    /// Incomplete parts by number.
    buffers: Mutex<BTreeMap<u64, Buffer>>,
    /// Number of bytes marked as final.
    finalized: AtomicU64,
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    /// Number of its bytes marked as final.
    finalized: u64,
}

impl Outgoing {
    /// A file of `length` bytes, uploaded in parts of `part` bytes.
    pub(super) fn new(session: Arc<Session>, file: &str, length: u64, part: u64) -> Outgoing {
        let (upload, buffers) = (Mutex::default(), Mutex::default());
        Outgoing { session, file: file.to_owned(), length, part, upload, buffers, finalized: AtomicU64::new(0) }
    }

    /// The byte range of a part.
    fn range(&self, number: u64) -> Range<u64> {
        let begin = number.saturating_mul(self.part);
        begin.min(self.length)..begin.saturating_add(self.part).min(self.length)
    }

    /// The parts that overlap a range: number and overlap of each.
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        let first = range.start.checked_div(self.part).unwrap_or(0);
        let numbered = (first..).map(|number| (number, self.range(number))).take_while(move |(_, part)| part.start < range.end && part.start < part.end);
        numbered.map(move |(number, part)| (number, part.start.max(range.start)..part.end.min(range.end)))
    }

    /// Calls `piece` for each part that overlaps a range, with the overlap relative to the part and to
    /// the range.
    fn each(&self, at: u64, count: usize, mut piece: impl FnMut(&mut Buffer, Range<usize>, Range<usize>) -> Option<()>) -> io::Result<()> {
        let end = at.checked_add(count as u64).filter(|end| *end <= self.length).ok_or(ErrorKind::InvalidInput)?;
        let mut buffers = lock(&self.buffers);
        for (number, range) in self.parts(at..end) {
            let part = self.range(number);
            let size = |range: &Range<u64>, from: u64| -> Option<Range<usize>> {
                Some(usize::try_from(range.start.checked_sub(from)?).ok()?..usize::try_from(range.end.checked_sub(from)?).ok()?)
            };
            let new = || Buffer { bytes: vec![0; usize::try_from(part.end.saturating_sub(part.start)).unwrap_or(0)], finalized: 0 };
            let buffer = buffers.entry(number).or_insert_with(new);
            size(&range, part.start).zip(size(&range, at)).and_then(|(inner, outer)| piece(buffer, inner, outer)).ok_or(ErrorKind::InvalidInput)?;
        }
        Ok(())
    }

    /// Writes bytes at an offset.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        drop(self.session.wait(&self.file, |_| true)?);
        self.each(at, bytes.len(), |buffer, inner, outer| {
            buffer.bytes.get_mut(inner)?.copy_from_slice(bytes.get(outer)?);
            Some(())
        })
    }

    /// Reads bytes that were written and not yet marked as final.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.each(at, bytes.len(), |buffer, inner, outer| {
            bytes.get_mut(outer)?.copy_from_slice(buffer.bytes.get(inner)?);
            Some(())
        })
    }

    /// Marks bytes as final. Parts that are completely final are uploaded.
    pub fn mark_final(&self, range: Range<u64>) -> io::Result<()> {
        self.finalized.fetch_add(range.end.saturating_sub(range.start), Ordering::Relaxed);
        for (number, finalized) in self.parts(range) {
            let part = self.range(number);
            let full = {
                let mut buffers = lock(&self.buffers);
                let buffer = buffers.get_mut(&number).ok_or(ErrorKind::InvalidInput)?;
                buffer.finalized = buffer.finalized.saturating_add(finalized.end.saturating_sub(finalized.start));
                // A file that fits into one part is written with a single request.
                let full = buffer.finalized >= part.end.saturating_sub(part.start) && self.length > self.part;
                if full { buffers.remove(&number) } else { None }
            };
            if let Some(buffer) = full {
                let number = usize::try_from(number).map_err(|_| ErrorKind::InvalidInput)?;
                let upload = self.upload()?;
                self.session.send(Part { file: self.file.clone(), upload, number, bytes: Mutex::new(buffer.bytes) })?;
            }
        }
        Ok(())
    }

    /// The id of the multipart upload, which is started by the first call.
    fn upload(&self) -> io::Result<String> {
        let mut id = lock(&self.upload);
        if let Some(upload) = id.as_ref() {
            return Ok(upload.clone());
        }
        let opened = |state: &mut State, upload: &String| {
            state.open.insert(self.file.clone(), MultipartUpload { upload: upload.clone(), parts: BTreeMap::new() });
        };
        let upload = self.session.change(&self.file, |writable| writable.begin(&self.session.name(&self.file)), opened)?;
        *id = Some(upload.clone());
        Ok(upload)
    }

    /// Completes the file, once all bytes are final.
    pub fn finish(&self) -> io::Result<()> {
        let left = std::mem::take(&mut *lock(&self.buffers)).into_values().next();
        let done = match left {
            _ if self.finalized.load(Ordering::Relaxed) != self.length => {
                Err(io::Error::other("was not written completely, or parts of it were written twice"))
            }
            left if self.length <= self.part => self.session.put_new(&self.file, left.map(|buffer| buffer.bytes).unwrap_or_default()),
            _ => {
                let count = self.length.div_ceil(self.part.max(1));
                self.session.complete(&self.file, usize::try_from(count).unwrap_or(usize::MAX), self.length)
            }
        };
        self.session.forget();
        done.map_err(|error| self.session.roll_back_after(error))
    }
}
