//! Files on their way to a bucket, a part after the other, in whatever order their bytes are made.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;
use super::session::{Part, Sent, Session, State};

/// A file that is being written, at any place by any thread.
#[derive(Debug)]
pub(in crate::files) struct Outgoing {
    session: Arc<Session>,
    file: String,
    length: u64,
    part: u64,
    /// What the place calls the upload, once there is one.
    upload: Mutex<Option<String>>,
    /// Parts that are not full yet, by their numbers.
    buffers: Mutex<BTreeMap<u64, Buffer>>,
    /// Bytes that are as they are meant, in all parts.
    settled: AtomicU64,
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    /// Bytes of it that are as they are meant.
    settled: u64,
}

impl Outgoing {
    /// A file of so many bytes in parts of so many.
    pub(super) fn new(session: Arc<Session>, file: &str, length: u64, part: u64) -> Outgoing {
        let (upload, buffers) = (Mutex::default(), Mutex::default());
        Outgoing { session, file: file.to_owned(), length, part, upload, buffers, settled: AtomicU64::new(0) }
    }

    /// The bytes of a part.
    fn range(&self, number: u64) -> Range<u64> {
        let begin = number.saturating_mul(self.part);
        begin.min(self.length)..begin.saturating_add(self.part).min(self.length)
    }

    /// The parts of a range: the number of each, and the bytes of it, counted from the beginning of the file.
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        let first = range.start.checked_div(self.part).unwrap_or(0);
        let numbered = (first..).map(|number| (number, self.range(number))).take_while(move |(_, part)| part.start < range.end && part.start < part.end);
        numbered.map(move |(number, part)| (number, part.start.max(range.start)..part.end.min(range.end)))
    }

    /// Does something with every piece of a range: the place in the part, and the one in the range.
    fn each(&self, at: u64, count: usize, mut piece: impl FnMut(&mut Buffer, Range<usize>, Range<usize>) -> Option<()>) -> io::Result<()> {
        let end = at.checked_add(count as u64).filter(|end| *end <= self.length).ok_or(ErrorKind::InvalidInput)?;
        let mut buffers = lock(&self.buffers);
        for (number, range) in self.parts(at..end) {
            let part = self.range(number);
            let size = |range: &Range<u64>, from: u64| -> Option<Range<usize>> {
                Some(usize::try_from(range.start.checked_sub(from)?).ok()?..usize::try_from(range.end.checked_sub(from)?).ok()?)
            };
            let new = || Buffer { bytes: vec![0; usize::try_from(part.end.saturating_sub(part.start)).unwrap_or(0)], settled: 0 };
            let buffer = buffers.entry(number).or_insert_with(new);
            size(&range, part.start).zip(size(&range, at)).and_then(|(inner, outer)| piece(buffer, inner, outer)).ok_or(ErrorKind::InvalidInput)?;
        }
        Ok(())
    }

    /// Writes bytes from a place on.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        drop(self.session.wait(&self.file, |_| true)?);
        self.each(at, bytes.len(), |buffer, inner, outer| {
            buffer.bytes.get_mut(inner)?.copy_from_slice(bytes.get(outer)?);
            Some(())
        })
    }

    /// Reads what was written and is not settled.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.each(at, bytes.len(), |buffer, inner, outer| {
            bytes.get_mut(outer)?.copy_from_slice(buffer.bytes.get(inner)?);
            Some(())
        })
    }

    /// Says that bytes are as they are meant: parts that are full of them go.
    pub fn settled(&self, range: Range<u64>) -> io::Result<()> {
        self.settled.fetch_add(range.end.saturating_sub(range.start), Ordering::Relaxed);
        for (number, settled) in self.parts(range) {
            let part = self.range(number);
            let full = {
                let mut buffers = lock(&self.buffers);
                let buffer = buffers.get_mut(&number).ok_or(ErrorKind::InvalidInput)?;
                buffer.settled = buffer.settled.saturating_add(settled.end.saturating_sub(settled.start));
                // What fits into one part is written in one step.
                let full = buffer.settled >= part.end.saturating_sub(part.start) && self.length > self.part;
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

    /// What the place calls the upload, which is begun by who asks first.
    fn upload(&self) -> io::Result<String> {
        let mut known = lock(&self.upload);
        if let Some(upload) = known.as_ref() {
            return Ok(upload.clone());
        }
        let opened = |state: &mut State, upload: &String| {
            state.open.insert(self.file.clone(), Sent { upload: upload.clone(), parts: BTreeMap::new() });
        };
        let upload = self.session.change(&self.file, |writable| writable.begin(&self.session.name(&self.file)), opened)?;
        *known = Some(upload.clone());
        Ok(upload)
    }

    /// Ends it, when all bytes are settled: from now on it is there.
    pub fn finish(&self) -> io::Result<()> {
        let left = std::mem::take(&mut *lock(&self.buffers)).into_values().next();
        let done = match left {
            _ if self.settled.load(Ordering::Relaxed) != self.length => Err(io::Error::other("was not written whole, or some of it twice")),
            left if self.length <= self.part => self.session.put_new(&self.file, left.map(|buffer| buffer.bytes).unwrap_or_default()),
            _ => {
                let count = self.length.div_ceil(self.part.max(1));
                self.session.complete(&self.file, usize::try_from(count).unwrap_or(usize::MAX))
            }
        };
        self.session.forget();
        done.map_err(|error| self.session.given_up(error))
    }
}
