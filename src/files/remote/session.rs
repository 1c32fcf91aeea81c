//! What is changed in a place while a folder is written to it: all of it can be taken back.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Known, Writable, lock, secrets};

/// Parts that are on their way at once.
const ON_THE_WAY: usize = 8;
/// Bytes of a file of this machine that are compared at once with what was put.
const READ: u64 = 4 << 20;
/// Waits between the attempts to write a small file: one under a condition is not made again by the store's own client.
const WAITS: [Duration; 3] = [Duration::from_millis(100), Duration::from_millis(300), Duration::from_millis(900)];

/// A folder that is being written, with what is on its way there.
pub(super) struct Session {
    pub(super) known: Arc<Known>,
    /// What names in the place begin with: the folder, and a `/`.
    prefix: String,
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
    /// Parts on their way.
    parts: usize,
    /// Requests that change something in the place.
    busy: usize,
    /// Files of several parts that are not whole yet.
    pub(super) open: BTreeMap<String, Sent>,
    /// Files that are, or may be, there.
    written: Vec<String>,
    /// The first failure: the file, and what went wrong.
    failed: Option<(String, ErrorKind, String)>,
    ended: bool,
    /// Whether the place can refuse to write over a file in one step.
    conditional: bool,
}

/// What is known of a file of several parts.
pub(super) struct Sent {
    pub upload: String,
    /// What the place calls the parts that it has.
    pub parts: BTreeMap<usize, String>,
}

/// Bytes of a file on their way.
pub(super) struct Part {
    pub file: String,
    pub upload: String,
    pub number: usize,
    pub bytes: Mutex<Vec<u8>>,
}

/// A request that changes something in the place, until it is dropped.
struct Busy<'s> {
    session: &'s Session,
    file: &'s str,
    /// Whether it sends a part.
    part: bool,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.session.state);
        (state.busy, state.parts) = (state.busy.saturating_sub(1), state.parts.saturating_sub(usize::from(self.part)));
        if std::thread::panicking() {
            state.failed.get_or_insert_with(|| (self.file.to_owned(), ErrorKind::Other, "the thread of a request ended without an answer".into()));
        }
        self.session.changed.notify_all();
    }
}

impl Session {
    /// One whose names in the place begin so.
    pub(super) fn new(known: Arc<Known>, prefix: String) -> Session {
        let state = Mutex::new(State { conditional: true, ..State::default() });
        Session { known, prefix, state, changed: Condvar::new() }
    }

    /// Whether the place can refuse to write over a file.
    pub(super) fn is_conditional(&self) -> bool {
        lock(&self.state).conditional
    }

    /// Everything is as it is meant, and stays.
    pub(super) fn end(&self) {
        lock(&self.state).ended = true;
    }

    pub(super) fn writable(&self) -> io::Result<&dyn Writable> {
        self.known.place.writable()
    }

    pub(super) fn name(&self, file: &str) -> String {
        format!("{}{file}", self.prefix)
    }

    /// Asks anew from now on what is in the folder.
    pub(super) fn forget(&self) {
        self.known.forget(self.prefix.trim_end_matches('/'));
    }

    /// The state, once `ready` says that it is as it must be; an error where something has gone wrong meanwhile, or all is over.
    pub(super) fn wait(&self, file: &str, ready: impl Fn(&State) -> bool) -> io::Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.state);
        loop {
            match &state.failed {
                Some((failed, kind, reason)) => {
                    let reason = if failed == file { reason.clone() } else { format!("{failed}: {reason}") };
                    let error = io::Error::new(*kind, reason);
                    drop(state);
                    return Err(self.given_up(error));
                }
                None if state.ended => return Err(ErrorKind::Interrupted.into()),
                None if ready(&state) => return Ok(state),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Changes something in the place; what is given up is so behind it.
    pub(super) fn change<T>(&self, file: &str, change: impl FnOnce(&dyn Writable) -> io::Result<T>, then: impl FnOnce(&mut State, &T)) -> io::Result<T> {
        let mut state = self.wait(file, |_| true)?;
        state.busy = state.busy.saturating_add(1);
        drop(state);
        let _busy = Busy { session: self, file, part: false };
        let done = self.writable().and_then(change);
        if let Ok(done) = &done {
            then(&mut lock(&self.state), done);
        }
        done
    }

    /// Writes a small file whose name is free.
    pub(super) fn put_new(&self, file: &str, bytes: Vec<u8>) -> io::Result<()> {
        let name = self.name(file);
        let same = || match self.known.place.find(&name)? {
            Some(found) if found.bytes == bytes.len() as u64 => self.known.read(&found, 0..found.bytes).map(|there| there == bytes),
            _ => Ok(false),
        };
        let put = |writable: &dyn Writable| {
            let (mut conditional, mut lost, mut waits) = (true, false, WAITS.iter());
            loop {
                let Err(error) = writable.put(&name, bytes.clone(), conditional) else { return Ok(conditional) };
                // It may be there all the same.
                lost |= [ErrorKind::Other, ErrorKind::AlreadyExists].contains(&error.kind());
                let again = error.kind() == ErrorKind::Other && conditional && !lock(&self.state).ended;
                if error.kind() == ErrorKind::Unsupported && conditional {
                    self.free(file)?;
                    conditional = false;
                    continue;
                }
                if !lost {
                    return Err(error);
                }
                if let Some(wait) = waits.next().filter(|_| again) {
                    std::thread::sleep(*wait);
                    continue;
                }
                return match same() {
                    // An attempt whose answer was lost.
                    Ok(true) => Ok(conditional),
                    _ if error.kind() == ErrorKind::AlreadyExists => Err(taken(file)),
                    Ok(false) => Err(error),
                    Err(_) => Err(io::Error::new(error.kind(), format!("{error}; {name} may be there all the same"))),
                };
            }
        };
        // What others have put there is never taken away.
        let written = |state: &mut State, conditional: &bool| {
            state.conditional &= *conditional;
            state.written.push(name.clone());
        };
        self.change(file, put, written).map(drop)
    }

    /// Refuses to write over what others have put there.
    fn free(&self, file: &str) -> io::Result<()> {
        if self.known.place.find(&self.name(file))?.is_some() { Err(taken(file)) } else { Ok(()) }
    }

    /// Sends a part of a file by a thread of its own, once there are not too many on their way.
    pub(super) fn send(self: &Arc<Self>, part: Part) -> io::Result<()> {
        let mut state = self.wait(&part.file, |state| state.parts < ON_THE_WAY)?;
        (state.parts, state.busy) = (state.parts.saturating_add(1), state.busy.saturating_add(1));
        drop(state);
        let (session, part) = (self.clone(), Arc::new(part));
        let sent = part.clone();
        if std::thread::Builder::new().name("send".into()).spawn(move || session.deliver(&sent)).is_err() {
            // Where the system starts no more threads, this one sends it.
            self.deliver(&part);
        }
        Ok(())
    }

    fn deliver(&self, part: &Part) {
        let _busy = Busy { session: self, file: &part.file, part: true };
        let bytes = std::mem::take(&mut *lock(&part.bytes));
        let sent = self.writable().and_then(|writable| writable.put_part(&self.name(&part.file), &part.upload, part.number, bytes));
        let mut state = lock(&self.state);
        match sent {
            Ok(id) => drop(state.open.get_mut(&part.file).and_then(|file| file.parts.insert(part.number, id))),
            Err(e) => drop(state.failed.get_or_insert((part.file.clone(), e.kind(), secrets::without(e).to_string()))),
        }
    }

    /// Makes a file of its parts.
    pub(super) fn complete(&self, file: &str, count: usize) -> io::Result<()> {
        let state = self.wait(file, |state| state.open.get(file).is_some_and(|sent| sent.parts.len() >= count))?;
        let Some((upload, parts)) = state.open.get(file).map(|sent| (sent.upload.clone(), sent.parts.values().cloned().collect())) else {
            return Err(ErrorKind::NotFound.into());
        };
        drop(state);
        let name = self.name(file);
        self.free(file)?;
        let complete = |writable: &dyn Writable| {
            // It may be there even if the answer is lost.
            lock(&self.state).written.push(name.clone());
            writable.complete(&name, &upload, parts)
        };
        self.change(file, complete, |state, ()| drop(state.open.remove(file)))
    }

    /// Holds a file to what it was meant to be.
    pub(super) fn compare(&self, file: &str, bytes: u64, meant: &dyn Fn(Range<u64>) -> io::Result<Vec<u8>>) -> io::Result<()> {
        let found = self.known.place.find(&self.name(file))?.ok_or_else(|| io::Error::other("was written and is not there"))?;
        if found.bytes != bytes {
            return Err(io::Error::other(format!("has {} bytes there, and {bytes} were written", found.bytes)));
        }
        for range in ranges(bytes, READ) {
            if self.known.read(&found, range.clone())? != meant(range.clone())? {
                return Err(io::Error::other(format!("bytes {} to {} read back differently", range.start, range.end)));
            }
        }
        Ok(())
    }

    /// Ends everything, and takes away what was put; gives the names of what is left.
    pub(super) fn give_up(&self) -> Vec<String> {
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
        let Ok(place) = self.writable() else { return written };
        // Parts without an end are kept, and paid for, until somebody says that there is none.
        let parts = open.into_iter().filter(|(file, sent)| place.abort(&self.name(file), &sent.upload).is_err()).map(|(file, _)| format!("parts of {file}"));
        let mut left: Vec<String> = parts.collect();
        // What says that the folder is not finished goes last.
        left.extend(written.into_iter().rev().filter(|name| place.remove(name).is_err()));
        left
    }

    /// The error, once everything is taken away.
    pub(super) fn given_up(&self, error: io::Error) -> io::Error {
        match self.give_up().as_slice() {
            [] => error,
            left @ [first, ..] => io::Error::new(error.kind(), format!("{error}; {} files could not be removed again, the first: {first}", left.len())),
        }
    }
}

pub(super) fn taken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::AlreadyExists, format!("{what} appeared there meanwhile: choose another name"))
}

/// Parts of so many bytes.
pub(super) fn ranges(bytes: u64, size: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes).step_by(usize::try_from(size).unwrap_or(usize::MAX)).map(move |begin| begin..begin.saturating_add(size).min(bytes))
}
