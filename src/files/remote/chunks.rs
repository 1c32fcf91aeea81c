//! Ranges of files in memory: fetched by several threads, ahead of who reads in order, and forgotten when they were read.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};

use super::content_hash::RunningHash;
use super::{Found, Known, invalid, lock};

/// The first chunk of a file: most headers fit.
const FIRST: u64 = 256 << 10;
/// Every other chunk.
const CHUNK: u64 = 4 << 20;
/// Ranges that are fetched at once.
const FETCHERS: usize = 16;
/// Chunks ahead of a reader.
const AHEAD: u64 = 4;
/// Memory for all chunks, those on their way among them.
const ROOM: u64 = 72 << 20;

/// A file of another machine, read in ranges.
#[derive(Clone)]
pub(in crate::files) struct Ranges {
    id: u64,
    known: Arc<Known>,
    file: Arc<Found>,
    /// Set if the server states a hash of the contents.
    hash: Option<Arc<RunningHash>>,
}

impl std::fmt::Debug for Ranges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ranges").field(&self.file.name).finish()
    }
}

/// A chunk, by the file and its number.
type Key = (u64, u64);

enum Slot {
    /// Asked for, and not there yet.
    Coming,
    Here {
        bytes: Arc<Vec<u8>>,
        /// When it was last of use.
        used: u64,
        /// Whether somebody has read to its end.
        done: bool,
        hash: Option<Arc<RunningHash>>,
    },
    Failed(io::ErrorKind, String),
}

#[derive(Default)]
struct State {
    slots: BTreeMap<Key, Slot>,
    /// Those that no thread fetches yet.
    queue: VecDeque<(Key, Ranges)>,
    /// Those that somebody waits for, and how many do.
    waited: BTreeMap<Key, usize>,
    /// Bytes of all chunks that are here or coming.
    bytes: u64,
    clock: u64,
    threads: usize,
    idle: usize,
    /// How often all chunks were given up.
    forgotten: u64,
}

struct Pool {
    state: Mutex<State>,
    /// Something came, or was asked for.
    changed: Condvar,
}

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool { state: Mutex::default(), changed: Condvar::new() });
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The chunk that holds a byte.
fn number(at: u64) -> u64 {
    at.checked_sub(FIRST).map_or(0, |at| (at / CHUNK).saturating_add(1))
}

/// The bytes of a chunk.
fn range(number: u64, length: u64) -> Range<u64> {
    let begin = |number: u64| number.checked_sub(1).map_or(0, |before| before.saturating_mul(CHUNK).saturating_add(FIRST));
    begin(number).min(length)..begin(number.saturating_add(1)).min(length)
}

fn size(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

impl Ranges {
    /// A file that is not open yet: those that are have the same chunks.
    pub(super) fn new(known: Arc<Known>, file: Found) -> Ranges {
        let chunks = file.bytes.checked_sub(1).map_or(0, |last| number(last).saturating_add(1));
        let hash = file.sha256.clone().map(|stated| Arc::new(RunningHash::new(stated, chunks)));
        Ranges { id: NEXT.fetch_add(1, Ordering::Relaxed), known, file: Arc::new(file), hash }
    }

    fn length(&self) -> u64 {
        self.file.bytes
    }

    /// Asks for the first chunk, without waiting.
    pub(super) fn begin(&self) {
        lock(&POOL.state).ahead(0, self);
    }

    /// Fills a buffer from a place on.
    pub fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let (mut at, mut rest) = (at, buffer);
        while !rest.is_empty() {
            let number = number(at);
            let range = range(number, self.length());
            let skip = usize::try_from(at.saturating_sub(range.start)).unwrap_or(usize::MAX);
            let count = rest.len().min(usize::try_from(range.end.saturating_sub(at)).unwrap_or(usize::MAX));
            let end = at.saturating_add(count as u64);
            let bytes = self.chunk(number, end >= range.end)?;
            let from = bytes.get(skip..skip.saturating_add(count)).filter(|from| !from.is_empty()).ok_or(io::ErrorKind::UnexpectedEof)?;
            let (to, left) = rest.split_at_mut(count);
            to.copy_from_slice(from);
            (at, rest) = (end, left);
        }
        Ok(())
    }

    /// Fills a buffer by a request of its own: nothing is read ahead, and nothing kept.
    pub fn sample_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let bytes = self.known.read(&self.file, at..at.saturating_add(buffer.len() as u64))?;
        buffer.copy_from_slice(&bytes);
        Ok(())
    }

    /// Hashes the chunks in memory that follow those hashed so far.
    fn update_hash(&self) {
        let Some(hash) = &self.hash else { return };
        loop {
            let next = hash.next();
            let bytes = match lock(&POOL.state).slots.get(&(self.id, next)) {
                Some(Slot::Here { bytes, .. }) => bytes.clone(),
                _ => return,
            };
            hash.update(next, &bytes);
        }
    }

    /// Compares the contents with the hash that the server states, reading the ranges that were not hashed as they arrived.
    pub(super) fn check_content(&self, step: &dyn Fn(u64) -> bool) -> io::Result<()> {
        let Some(hash) = &self.hash else { return Ok(()) };
        loop {
            if let Some(outcome) = hash.outcome() {
                return outcome.map_err(invalid);
            }
            let next = hash.next();
            let bytes = self.chunk(next, true)?;
            hash.update(next, &bytes);
            if !step(bytes.len() as u64) {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
    }

    /// A chunk, waited for; `done` says that it is read to its end.
    fn chunk(&self, number: u64, done: bool) -> io::Result<Arc<Vec<u8>>> {
        let key = (self.id, number);
        let mut state = lock(&POOL.state);
        let mut waited = false;
        loop {
            state.clock = state.clock.saturating_add(1);
            let clock = state.clock;
            let found = match state.slots.get_mut(&key) {
                Some(Slot::Here { bytes, used, done: end, .. }) => {
                    (*used, *end) = (clock, *end || done);
                    Some(Ok(bytes.clone()))
                }
                Some(Slot::Failed(kind, reason)) => Some(Err(io::Error::new(*kind, std::mem::take(reason)))),
                Some(Slot::Coming) => None,
                None => {
                    // Where all memory is for chunks that others wait for, it is asked for again when one came.
                    state.ask(number, self, true);
                    None
                }
            };
            if number > 0 {
                // Who has come this far in order goes on.
                (1..=AHEAD).for_each(|step| state.ahead(number.saturating_add(step), self));
            }
            match found {
                Some(found) => {
                    if found.is_err() {
                        state.slots.remove(&key);
                    }
                    if waited {
                        // Its memory may be what others wait for.
                        POOL.changed.notify_all();
                    }
                    return found;
                }
                None => {
                    waited = true;
                    let count = state.waited.entry(key).or_default();
                    *count = count.saturating_add(1);
                    state = POOL.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    let left = state.waited.remove(&key).unwrap_or(0).saturating_sub(1);
                    if left > 0 {
                        state.waited.insert(key, left);
                    }
                }
            }
        }
    }
}

impl State {
    /// Asks for a chunk that nobody waits for yet, if there is room without those that are still to be read.
    fn ahead(&mut self, number: u64, open: &Ranges) {
        if !self.slots.contains_key(&(open.id, number)) && size(&range(number, open.length())) > 0 {
            self.ask(number, open, false);
        }
    }

    fn ask(&mut self, number: u64, open: &Ranges, urgent: bool) {
        let wanted = size(&range(number, open.length()));
        while self.bytes.saturating_add(wanted) > ROOM {
            let old = |(key, slot): (&Key, &Slot)| match slot {
                Slot::Here { used, done, bytes, hash } if !self.waited.contains_key(key) => {
                    let unhashed = hash.as_ref().is_some_and(|hash| hash.awaits(key.1));
                    (urgent || (*done && !unhashed)).then(|| (unhashed, !*done, *used, *key, bytes.len() as u64))
                }
                _ => None,
            };
            let Some((_, _, _, key, bytes)) = self.slots.iter().filter_map(old).min() else { return };
            self.slots.remove(&key);
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        let key = (open.id, number);
        self.bytes = self.bytes.saturating_add(wanted);
        self.slots.insert(key, Slot::Coming);
        if urgent {
            self.queue.push_front((key, open.clone()))
        } else {
            self.queue.push_back((key, open.clone()))
        }
        if self.queue.len() > self.idle && self.threads < FETCHERS {
            self.start();
        }
        POOL.changed.notify_all();
    }

    fn start(&mut self) {
        match std::thread::Builder::new().name("fetch".into()).spawn(fetch) {
            Ok(_) => self.threads = self.threads.saturating_add(1),
            // Without any thread nobody would come.
            Err(e) if self.threads == 0 => {
                for (key, open) in std::mem::take(&mut self.queue) {
                    self.put(key, &open, Err(io::Error::new(e.kind(), e.to_string())));
                }
            }
            Err(_) => {}
        }
    }

    fn put(&mut self, key: Key, open: &Ranges, came: io::Result<Vec<u8>>) {
        self.clock = self.clock.saturating_add(1);
        let slot = match came {
            Ok(bytes) => Slot::Here { bytes: Arc::new(bytes), used: self.clock, done: false, hash: open.hash.clone() },
            Err(e) => {
                self.bytes = self.bytes.saturating_sub(size(&range(key.1, open.length())));
                Slot::Failed(e.kind(), e.to_string())
            }
        };
        self.slots.insert(key, slot);
    }
}

/// Gives back the memory of what was fetched.
pub(super) fn forget() {
    let mut state = lock(&POOL.state);
    let here = |slot: &Slot| if let Slot::Here { bytes, .. } = slot { bytes.len() as u64 } else { 0 };
    let freed = state.slots.values().map(here).sum();
    state.slots.retain(|_, slot| !matches!(slot, Slot::Here { .. }));
    state.bytes = state.bytes.saturating_sub(freed);
    state.forgotten = state.forgotten.saturating_add(1);
}

/// Fetches what is asked for, as long as the process runs.
fn fetch() {
    let mut state = lock(&POOL.state);
    loop {
        let Some((key, open)) = state.queue.pop_front() else {
            state.idle = state.idle.saturating_add(1);
            state = POOL.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle = state.idle.saturating_sub(1);
            continue;
        };
        drop(state);
        let came = open.known.read(&open.file, range(key.1, open.length()));
        lock(&POOL.state).put(key, &open, came);
        POOL.changed.notify_all();
        open.update_hash();
        state = lock(&POOL.state);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Place;
    use super::*;

    #[test]
    fn chunks_are_the_file_without_gaps() {
        for length in [0, 1, FIRST, FIRST + 1, FIRST + 2 * CHUNK + 7] {
            let ranges: Vec<_> = (0..5).map(|number| range(number, length)).collect();
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start) && ranges[4].end == length, "{length}");
            for at in [0, FIRST - 1, FIRST, FIRST + CHUNK, length.saturating_sub(1)].into_iter().filter(|at| *at < length) {
                assert!(range(number(at), length).contains(&at), "{at} of {length}");
            }
        }
    }

    /// Bytes that tell where they lie, and how many were asked for at once.
    struct Pattern {
        asked: Mutex<(u64, u64)>,
    }

    fn byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    impl Place for Arc<Pattern> {
        fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
            Ok(Vec::new())
        }

        fn find(&self, _name: &str) -> io::Result<Option<Found>> {
            Ok(None)
        }

        fn read(&self, _file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
            let mut asked = self.asked.lock().unwrap();
            asked.0 += 1;
            asked.1 += range.end - range.start;
            drop(asked);
            Ok(range.map(byte).collect())
        }
    }

    /// How many ranges of a file four readers ask for, and their bytes.
    fn read_by_four(length: u64) -> (u64, u64) {
        let pattern = Arc::new(Pattern { asked: Mutex::default() });
        let known = Arc::new(Known::new(Box::new(pattern.clone())));
        let open = Ranges::new(known, Found { name: "file".into(), bytes: length, version: None, sha256: None, here: None });
        std::thread::scope(|scope| {
            for reader in 0..4 {
                let open = &open;
                scope.spawn(move || {
                    let (quarter, mut buffer) = (length / 4, vec![0; 1_000_003]);
                    let mut at = reader * quarter;
                    while at < (reader + 1) * quarter {
                        let count = buffer.len().min(((reader + 1) * quarter - at) as usize);
                        open.read_exact_at(&mut buffer[..count], at).unwrap();
                        assert!((0..count).step_by(997).all(|i| buffer[i] == byte(at + i as u64)), "near {at}");
                        at += count as u64;
                    }
                });
            }
        });
        *pattern.asked.lock().unwrap()
    }

    #[test]
    fn several_readers_see_the_file_and_read_it_about_once() {
        const LENGTH: u64 = 40 << 20;
        let forgotten = || lock(&POOL.state).forgotten;
        // Uploads of other tests have what is here forgotten: one reading without that tells.
        let undisturbed = (0..100).find_map(|_| {
            let before = forgotten();
            let asked = read_by_four(LENGTH);
            (forgotten() == before).then_some(asked)
        });
        let (ranges, bytes) = undisturbed.expect("other tests go on and on");
        assert!((LENGTH..2 * LENGTH).contains(&bytes), "{bytes} bytes in {ranges} ranges");
        assert!(lock(&POOL.state).bytes <= ROOM);
    }
}
