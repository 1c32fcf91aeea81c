//! Cache of remote file ranges in memory: fetched by several threads, prefetched for sequential readers,
//! and evicted after use.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};

use super::content_hash::RunningHash;
use super::{CachedBackend, Found, invalid, lock};

/// Size of a file's first chunk in bytes. Most headers fit into it.
const FIRST: u64 = 256 << 10;
/// Size of the other chunks.
const CHUNK: u64 = 4 << 20;
/// Maximum number of concurrent requests.
const FETCHERS: usize = 16;
/// Chunks prefetched for a reader.
const READ_AHEAD: u64 = 4;
/// Memory budget of all chunks, including those being fetched, in bytes.
const MEMORY_BUDGET: u64 = 72 << 20;

/// A remote file that is read in ranges.
#[derive(Clone)]
pub(in crate::files) struct Ranges {
    id: u64,
    backend: Arc<CachedBackend>,
    file: Arc<Found>,
    /// Set if the server reports a hash of the contents.
    hash: Option<Arc<RunningHash>>,
}

impl std::fmt::Debug for Ranges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ranges").field(&self.file.name).finish()
    }
}

/// File id and chunk number.
type Key = (u64, u64);

enum Slot {
    /// Requested, but not received yet.
    Pending,
    Ready {
        bytes: Arc<Vec<u8>>,
        /// Time of the last use.
        used: u64,
        /// Whether a reader has reached its end.
        done: bool,
        hash: Option<Arc<RunningHash>>,
    },
    Failed(io::ErrorKind, String),
}

#[derive(Default)]
struct State {
    slots: BTreeMap<Key, Slot>,
    /// Chunks that no thread fetches yet.
    queue: VecDeque<(Key, Ranges)>,
    /// Number of waiting readers per chunk.
    waiters: BTreeMap<Key, usize>,
    /// Total size of the chunks that are ready or pending.
    bytes: u64,
    clock: u64,
    threads: usize,
    idle: usize,
    /// Number of times that all chunks were evicted.
    evictions: u64,
}

struct Pool {
    state: Mutex<State>,
    /// Signals that a chunk was received or requested.
    changed: Condvar,
}

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool { state: Mutex::default(), changed: Condvar::new() });
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The number of the chunk that contains a byte.
fn number(at: u64) -> u64 {
    at.checked_sub(FIRST).map_or(0, |at| (at / CHUNK).saturating_add(1))
}

/// The byte range of a chunk.
fn range(number: u64, length: u64) -> Range<u64> {
    let begin = |number: u64| number.checked_sub(1).map_or(0, |before| before.saturating_mul(CHUNK).saturating_add(FIRST));
    begin(number).min(length)..begin(number.saturating_add(1)).min(length)
}

fn size(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

impl Ranges {
    /// A file that is not open yet. Clones share its chunks.
    pub(super) fn new(backend: Arc<CachedBackend>, file: Found) -> Ranges {
        let chunks = file.bytes.checked_sub(1).map_or(0, |last| number(last).saturating_add(1));
        let hash = backend.backend.stated(&file).map(|stated| Arc::new(RunningHash::new(stated, chunks)));
        Ranges { id: NEXT.fetch_add(1, Ordering::Relaxed), backend, file: Arc::new(file), hash }
    }

    fn length(&self) -> u64 {
        self.file.bytes
    }

    /// Requests the first chunk, without waiting.
    pub(super) fn prefetch(&self) {
        lock(&POOL.state).prefetch(0, self);
    }

    /// Fills a buffer with the bytes at an offset.
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

    /// Fills a buffer with a separate request, without prefetching or caching.
    pub fn sample_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let bytes = self.backend.read(&self.file, at..at.saturating_add(buffer.len() as u64))?;
        buffer.copy_from_slice(&bytes);
        Ok(())
    }

    /// Hashes the chunks in memory that follow those hashed so far.
    fn update_hash(&self) {
        let Some(hash) = &self.hash else { return };
        loop {
            let next = hash.next();
            let bytes = match lock(&POOL.state).slots.get(&(self.id, next)) {
                Some(Slot::Ready { bytes, .. }) => bytes.clone(),
                _ => return,
            };
            hash.update(next, &bytes);
        }
    }

    /// Compares the contents with the hash that the server reports. Ranges that were not hashed when they
    /// arrived are read again.
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

    /// Waits for a chunk. `done` marks it as read to its end.
    fn chunk(&self, number: u64, done: bool) -> io::Result<Arc<Vec<u8>>> {
        let key = (self.id, number);
        let mut state = lock(&POOL.state);
        let mut has_waited = false;
        loop {
            state.clock = state.clock.saturating_add(1);
            let clock = state.clock;
            let found = match state.slots.get_mut(&key) {
                Some(Slot::Ready { bytes, used, done: end, .. }) => {
                    (*used, *end) = (clock, *end || done);
                    Some(Ok(bytes.clone()))
                }
                Some(Slot::Failed(kind, reason)) => Some(Err(io::Error::new(*kind, std::mem::take(reason)))),
                Some(Slot::Pending) => None,
                None => {
                    // If the memory is taken by chunks that other readers wait for, the request is
                    // repeated when one of them arrives.
                    state.request(number, self, true);
                    None
                }
            };
            if number > 0 {
                // Prefetches for sequential readers.
                (1..=READ_AHEAD).for_each(|step| state.prefetch(number.saturating_add(step), self));
            }
            match found {
                Some(found) => {
                    if found.is_err() {
                        state.slots.remove(&key);
                    }
                    if has_waited {
                        // Other readers may wait for its memory.
                        POOL.changed.notify_all();
                    }
                    return found;
                }
                None => {
                    has_waited = true;
                    let count = state.waiters.entry(key).or_default();
                    *count = count.saturating_add(1);
                    state = POOL.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    let left = state.waiters.remove(&key).unwrap_or(0).saturating_sub(1);
                    if left > 0 {
                        state.waiters.insert(key, left);
                    }
                }
            }
        }
    }
}

impl State {
    /// Requests a chunk that no reader waits for yet, if only chunks that were already read have to be
    /// evicted.
    fn prefetch(&mut self, number: u64, open: &Ranges) {
        if !self.slots.contains_key(&(open.id, number)) && size(&range(number, open.length())) > 0 {
            self.request(number, open, false);
        }
    }

    fn request(&mut self, number: u64, open: &Ranges, urgent: bool) {
        let needed = size(&range(number, open.length()));
        while self.bytes.saturating_add(needed) > MEMORY_BUDGET {
            let evictable = |(key, slot): (&Key, &Slot)| match slot {
                Slot::Ready { used, done, bytes, hash } if !self.waiters.contains_key(key) => {
                    let unhashed = hash.as_ref().is_some_and(|hash| hash.awaits(key.1));
                    (urgent || (*done && !unhashed)).then(|| (unhashed, !*done, *used, *key, bytes.len() as u64))
                }
                _ => None,
            };
            let Some((_, _, _, key, bytes)) = self.slots.iter().filter_map(evictable).min() else { return };
            self.slots.remove(&key);
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        let key = (open.id, number);
        self.bytes = self.bytes.saturating_add(needed);
        self.slots.insert(key, Slot::Pending);
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
            // Without any thread, the requests would never be answered.
            Err(e) if self.threads == 0 => {
                for (key, open) in std::mem::take(&mut self.queue) {
                    self.put(key, &open, Err(io::Error::new(e.kind(), e.to_string())));
                }
            }
            Err(_) => {}
        }
    }

    fn put(&mut self, key: Key, open: &Ranges, result: io::Result<Vec<u8>>) {
        self.clock = self.clock.saturating_add(1);
        let slot = match result {
            Ok(bytes) => Slot::Ready { bytes: Arc::new(bytes), used: self.clock, done: false, hash: open.hash.clone() },
            Err(e) => {
                self.bytes = self.bytes.saturating_sub(size(&range(key.1, open.length())));
                Slot::Failed(e.kind(), e.to_string())
            }
        };
        self.slots.insert(key, slot);
    }
}

/// Evicts all received chunks.
pub(super) fn evict_all() {
    let mut state = lock(&POOL.state);
    let size = |slot: &Slot| if let Slot::Ready { bytes, .. } = slot { bytes.len() as u64 } else { 0 };
    let freed = state.slots.values().map(size).sum();
    state.slots.retain(|_, slot| !matches!(slot, Slot::Ready { .. }));
    state.bytes = state.bytes.saturating_sub(freed);
    state.evictions = state.evictions.saturating_add(1);
}

/// Worker thread: fetches requested chunks until the process ends.
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
        let result = open.backend.read(&open.file, range(key.1, open.length()));
        lock(&POOL.state).put(key, &open, result);
        POOL.changed.notify_all();
        open.update_hash();
        state = lock(&POOL.state);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Backend;
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

    /// Bytes that depend on their offset, with a record of the concurrent requests.
    struct Pattern {
        requested: Mutex<(u64, u64)>,
    }

    fn byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    impl Backend for Arc<Pattern> {
        fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
            Ok(Vec::new())
        }

        fn find(&self, _name: &str) -> io::Result<Option<Found>> {
            Ok(None)
        }

        fn read(&self, _file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
            let mut requested = self.requested.lock().unwrap();
            requested.0 += 1;
            requested.1 += range.end - range.start;
            drop(requested);
            Ok(range.map(byte).collect())
        }
    }

    /// Reads a file with four readers. Returns the number of requested ranges and their total size.
    fn read_by_four(length: u64) -> (u64, u64) {
        let pattern = Arc::new(Pattern { requested: Mutex::default() });
        let backend = Arc::new(CachedBackend::new(Box::new(pattern.clone())));
        let open = Ranges::new(backend, Found { name: "file".into(), bytes: length, version: None, sha256: None, local: None });
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
        *pattern.requested.lock().unwrap()
    }

    #[test]
    fn several_readers_fetch_a_file_about_once() {
        const LENGTH: u64 = 40 << 20;
        let evictions = || lock(&POOL.state).evictions;
        // Uploads of other tests evict all chunks. One run without evictions is sufficient.
        let undisturbed = (0..100).find_map(|_| {
            let before = evictions();
            let requested = read_by_four(LENGTH);
            (evictions() == before).then_some(requested)
        });
        let (ranges, bytes) = undisturbed.expect("every run was disturbed by other tests");
        assert!((LENGTH..2 * LENGTH).contains(&bytes), "{bytes} bytes in {ranges} ranges");
        assert!(lock(&POOL.state).bytes <= MEMORY_BUDGET);
    }
}
