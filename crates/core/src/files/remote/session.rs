//! Changes made to a backend during an upload, which can be rolled back.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{CachedBackend, Found, Writable, lock, secrets};
use crate::files::UNFINISHED;

/// Maximum number of concurrent part uploads.
const MAX_IN_FLIGHT: usize = 8;
/// Bytes compared at once with an uploaded file.
const READ: u64 = 4 << 20;
/// Delays between attempts to write a small file. The store's client does not retry conditional writes.
const WAITS: [Duration; 3] = [Duration::from_millis(100), Duration::from_millis(300), Duration::from_millis(900)];

/// Upload session of a folder.
pub(super) struct Session {
    pub(super) cached: Arc<CachedBackend>,
    /// Prefix of all names: the folder and a `/`.
    prefix: String,
    /// Contents of the lock file, which are unique.
    lock_text: String,
    state: Mutex<State>,
    changed: Condvar,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Session").field(&self.prefix).finish()
    }
}

#[derive(Default)]
pub(super) struct State {
    /// Part uploads in flight.
    parts: usize,
    /// Requests in flight that change the backend.
    busy: usize,
    /// Incomplete multipart uploads.
    pub(super) open: BTreeMap<String, MultipartUpload>,
    /// Files that were written, or may have been written. The first is the lock file.
    written: Vec<Written>,
    /// The first failure: file name and error.
    failed: Option<(String, ErrorKind, String)>,
    ended: bool,
    /// Whether the backend supports conditional writes.
    conditional: bool,
}

/// A file of this run.
struct Written {
    name: String,
    /// Version as reported by the server when the file was written.
    version: Option<String>,
}

/// A multipart upload.
pub(super) struct MultipartUpload {
    pub upload: String,
    /// Ids of the uploaded parts.
    pub parts: BTreeMap<usize, String>,
}

/// A part to upload.
pub(super) struct Part {
    pub file: String,
    pub upload: String,
    pub number: usize,
    pub bytes: Mutex<Vec<u8>>,
}

/// Counts a request that changes the backend, until it is dropped.
struct RequestGuard<'s> {
    session: &'s Session,
    file: &'s str,
    /// Whether the request uploads a part.
    part: bool,
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.session.state);
        (state.busy, state.parts) = (state.busy.saturating_sub(1), state.parts.saturating_sub(usize::from(self.part)));
        if std::thread::panicking() {
            state.failed.get_or_insert_with(|| (self.file.to_owned(), ErrorKind::Other, "the thread of a request panicked".into()));
        }
        self.session.changed.notify_all();
    }
}

impl Session {
    /// A session for names with this prefix.
    pub(super) fn new(cached: Arc<CachedBackend>, prefix: String, lock_text: String) -> Session {
        let state = Mutex::new(State { conditional: true, ..State::default() });
        Session { cached, prefix, lock_text, state, changed: Condvar::new() }
    }

    /// Whether the backend supports conditional writes.
    pub(super) fn is_conditional(&self) -> bool {
        lock(&self.state).conditional
    }

    /// Ends the session successfully: nothing is rolled back.
    pub(super) fn end(&self) {
        lock(&self.state).ended = true;
    }

    pub(super) fn writable(&self) -> io::Result<&dyn Writable> {
        self.cached.backend.writable()
    }

    pub(super) fn name(&self, file: &str) -> String {
        format!("{}{file}", self.prefix)
    }

    /// Drops everything cached about the folder.
    pub(super) fn forget(&self) {
        self.cached.forget(self.prefix.trim_end_matches('/'));
    }

    /// Until the next [`forget`](Session::forget), lists local files in addition to the uploaded ones, and
    /// reads them from the disk.
    pub(super) fn overlay(&self, staged: Vec<(String, PathBuf)>) -> io::Result<()> {
        let folder = self.prefix.trim_end_matches('/');
        let uploaded = self.cached.backend.list(folder).map_err(secrets::redact_error)?;
        let mut files: BTreeMap<String, Found> = uploaded.into_iter().map(|found| (found.name.clone(), found)).collect();
        files.remove(&self.name(UNFINISHED));
        for (file, path) in staged {
            let (name, bytes) = (self.name(&file), path.metadata()?.len());
            files.insert(name.clone(), Found { name, bytes, version: None, sha256: None, local: Some(path) });
        }
        self.forget();
        lock(&self.cached.folders).insert(folder.to_owned(), Arc::new(files));
        Ok(())
    }

    /// Waits until `ready` returns true. Fails if a request has failed or the session has ended.
    pub(super) fn wait(&self, file: &str, ready: impl Fn(&State) -> bool) -> io::Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.state);
        loop {
            match &state.failed {
                Some((failed, kind, reason)) => {
                    let reason = if failed == file { reason.clone() } else { format!("{failed}: {reason}") };
                    let error = io::Error::new(*kind, reason);
                    drop(state);
                    return Err(self.roll_back_after(error));
                }
                None if state.ended => return Err(ErrorKind::Interrupted.into()),
                None if ready(&state) => return Ok(state),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Runs a request that changes the backend. A rollback waits for it.
    pub(super) fn change<T>(&self, file: &str, change: impl FnOnce(&dyn Writable) -> io::Result<T>, then: impl FnOnce(&mut State, &T)) -> io::Result<T> {
        let mut state = self.wait(file, |_| true)?;
        state.busy = state.busy.saturating_add(1);
        drop(state);
        let _guard = RequestGuard { session: self, file, part: false };
        let done = self.writable().and_then(change);
        if let Ok(done) = &done {
            then(&mut lock(&self.state), done);
        }
        done
    }

    /// Writes a small file that must not exist yet.
    pub(super) fn put_new(&self, file: &str, bytes: Vec<u8>) -> io::Result<()> {
        let name = self.name(file);
        let same = || match self.cached.backend.find(&name)? {
            Some(found) if found.bytes == bytes.len() as u64 => self.cached.read(&found, 0..found.bytes).map(|found| found == bytes),
            _ => Ok(false),
        };
        let put = |writable: &dyn Writable| {
            let (mut conditional, mut lost, mut waits) = (self.is_conditional(), false, WAITS.iter());
            if !conditional {
                self.require_absent(file)?;
            }
            loop {
                let error = match writable.put(&name, bytes.clone(), conditional) {
                    Ok(version) => return Ok((conditional, version)),
                    Err(error) => error,
                };
                // The write may have succeeded in spite of the error.
                lost |= [ErrorKind::Other, ErrorKind::AlreadyExists].contains(&error.kind());
                let retry = error.kind() == ErrorKind::Other && conditional && !lock(&self.state).ended;
                if error.kind() == ErrorKind::Unsupported && conditional {
                    self.require_absent(file)?;
                    conditional = false;
                    continue;
                }
                if !lost {
                    return Err(error);
                }
                if let Some(wait) = waits.next().filter(|_| retry) {
                    std::thread::sleep(*wait);
                    continue;
                }
                return match same() {
                    // An earlier attempt succeeded, but its response was lost.
                    Ok(true) => Ok((conditional, None)),
                    _ if error.kind() == ErrorKind::AlreadyExists => Err(already_exists(file)),
                    Ok(false) => Err(error),
                    Err(_) => Err(io::Error::new(error.kind(), format!("{error}; {name} may have been written nevertheless"))),
                };
            }
        };
        // Files of other processes are never recorded, and thus never removed.
        let written = |state: &mut State, (conditional, version): &(bool, Option<String>)| {
            state.conditional &= *conditional;
            state.written.push(Written { name: name.clone(), version: version.clone() });
        };
        self.change(file, put, written).map(drop)
    }

    /// Writes the lock file, which excludes other runs.
    pub(super) fn lock(&self) -> io::Result<()> {
        self.put_new(UNFINISHED, self.lock_text.clone().into())?;
        if self.is_conditional() {
            // A second write must fail. Otherwise, the store ignores the condition.
            let put = |writable: &dyn Writable| Ok(writable.put(&self.name(UNFINISHED), self.lock_text.clone().into(), true).ok());
            let replaced = |state: &mut State, version: &Option<Option<String>>| {
                if let (Some(version), Some(lock_file)) = (version, state.written.first_mut()) {
                    (state.conditional, lock_file.version) = (false, version.clone());
                }
            };
            self.change(UNFINISHED, put, replaced)?;
        }
        self.compare_lock()
    }

    fn compare_lock(&self) -> io::Result<()> {
        self.compare(UNFINISHED, self.lock_text.len() as u64, &|_| Ok(self.lock_text.clone().into()))
    }

    /// Removes the lock file. Without conditional writes, fails if another run has replaced it.
    pub(super) fn unlock(&self) -> io::Result<()> {
        if !self.is_conditional() {
            self.compare_lock().map_err(|e| io::Error::new(e.kind(), format!("{UNFINISHED}: {e}; another run may write to the same folder")))?;
        }
        self.writable()?.remove(&self.name(UNFINISHED))
    }

    /// Whether a file is known to have been written by this run; `None` if it does not exist. Without
    /// conditional writes, another run may have replaced it.
    fn is_own(&self, file: &Written) -> Option<bool> {
        if self.is_conditional() {
            return Some(true);
        }
        let found = self.cached.backend.find(&file.name);
        found.map_or(Some(false), |found| found.map(|found| found.version.is_some() && found.version == file.version))
    }

    /// Fails if the file exists, because another process must have written it.
    fn require_absent(&self, file: &str) -> io::Result<()> {
        if self.cached.backend.find(&self.name(file))?.is_some() { Err(already_exists(file)) } else { Ok(()) }
    }

    /// Uploads a part on a separate thread. Waits while too many parts are in flight.
    pub(super) fn send(self: &Arc<Self>, part: Part) -> io::Result<()> {
        let mut state = self.wait(&part.file, |state| state.parts < MAX_IN_FLIGHT)?;
        (state.parts, state.busy) = (state.parts.saturating_add(1), state.busy.saturating_add(1));
        drop(state);
        let (session, part) = (self.clone(), Arc::new(part));
        let sent = part.clone();
        if std::thread::Builder::new().name("send".into()).spawn(move || session.deliver(&sent)).is_err() {
            // If no more threads can be spawned, this one uploads the part.
            self.deliver(&part);
        }
        Ok(())
    }

    fn deliver(&self, part: &Part) {
        let _guard = RequestGuard { session: self, file: &part.file, part: true };
        let bytes = std::mem::take(&mut *lock(&part.bytes));
        let sent = self.writable().and_then(|writable| writable.put_part(&self.name(&part.file), &part.upload, part.number, bytes));
        let mut state = lock(&self.state);
        match sent {
            Ok(id) => drop(state.open.get_mut(&part.file).and_then(|file| file.parts.insert(part.number, id))),
            Err(e) => drop(state.failed.get_or_insert((part.file.clone(), e.kind(), secrets::redact_error(e).to_string()))),
        }
    }

    /// Completes a multipart upload of `count` parts with `bytes` in total.
    pub(super) fn complete(&self, file: &str, count: usize, bytes: u64) -> io::Result<()> {
        let state = self.wait(file, |state| state.open.get(file).is_some_and(|sent| sent.parts.len() >= count))?;
        let Some((upload, parts)) = state.open.get(file).map(|sent| (sent.upload.clone(), sent.parts.values().cloned().collect())) else {
            return Err(ErrorKind::NotFound.into());
        };
        drop(state);
        let name = self.name(file);
        self.require_absent(file)?;
        let complete = |writable: &dyn Writable| {
            // The file may exist even if the response is lost.
            lock(&self.state).written.push(Written { name: name.clone(), version: None });
            writable.complete(&name, &upload, parts).or_else(|error| match self.cached.backend.find(&name) {
                // An earlier attempt succeeded, but its response was lost. The contents are compared later.
                Ok(Some(found)) if found.bytes == bytes => Ok(None),
                // The upload was not found, rather than a file that the user has named.
                _ if error.kind() == ErrorKind::NotFound => Err(io::Error::other(error.to_string())),
                _ => Err(error),
            })
        };
        let completed = |state: &mut State, version: &Option<String>| {
            state.open.remove(file);
            state.written.iter_mut().filter(|written| written.name == name).for_each(|written| written.version.clone_from(version));
        };
        self.change(file, complete, completed).map(drop)
    }

    /// Verifies an uploaded file against its expected contents.
    pub(super) fn compare(&self, file: &str, bytes: u64, expected: &dyn Fn(Range<u64>) -> io::Result<Vec<u8>>) -> io::Result<()> {
        let found = self.cached.backend.find(&self.name(file))?.ok_or_else(|| io::Error::other("was written but does not exist"))?;
        if found.bytes != bytes {
            return Err(io::Error::other(format!("has {} bytes, but {bytes} were written", found.bytes)));
        }
        for range in ranges(bytes, READ) {
            if self.cached.read(&found, range.clone())? != expected(range.clone())? {
                return Err(io::Error::other(format!("bytes {} to {} read back differently", range.start, range.end)));
            }
        }
        Ok(())
    }

    /// Ends the session and removes everything that was written. Returns the names of files that were
    /// not removed.
    pub(super) fn roll_back(&self) -> Vec<String> {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.ended, true) {
            return Vec::new();
        }
        self.changed.notify_all();
        while state.busy > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (open, written) = (std::mem::take(&mut state.open), std::mem::take(&mut state.written));
        drop(state);
        self.forget();
        let Ok(backend) = self.writable() else { return written.into_iter().map(|file| file.name).collect() };
        // The parts of an incomplete multipart upload are stored, and charged for, until it is aborted.
        let parts = open.into_iter().filter(|(file, sent)| backend.abort(&self.name(file), &sent.upload).is_err()).map(|(file, _)| format!("parts of {file}"));
        let mut left: Vec<String> = parts.collect();
        // The lock file, which marks the folder as incomplete, was written first and is removed last.
        let kept = written.into_iter().rev().filter(|file| self.is_own(file) == Some(false) || backend.remove(&file.name).is_err());
        left.extend(kept.map(|file| file.name));
        left
    }

    /// Rolls back and returns the error, extended by the files that were not removed.
    pub(super) fn roll_back_after(&self, error: io::Error) -> io::Error {
        match self.roll_back().as_slice() {
            [] => error,
            left @ [first, ..] => io::Error::new(error.kind(), format!("{error}; {} files were not removed, the first is {first}", left.len())),
        }
    }
}

pub(super) fn already_exists(what: &str) -> io::Error {
    io::Error::new(ErrorKind::AlreadyExists, format!("{what} was created by another process: choose another name"))
}

/// Splits `0..bytes` into ranges of `size` bytes.
pub(super) fn ranges(bytes: u64, size: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes).step_by(usize::try_from(size).unwrap_or(usize::MAX)).map(move |begin| begin..begin.saturating_add(size).min(bytes))
}
