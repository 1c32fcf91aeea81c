//! SHA-256 of a file that is read in ranges, computed while they arrive.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::digest::{Context, SHA256};

use super::lock;

/// Chunks after the next one to hash that are worth keeping in memory until it arrives.
const WINDOW: u64 = 8;

pub(super) fn sha256() -> Context {
    Context::new(&SHA256)
}

/// Compares a finished hash with the stated one, in lower-case hexadecimal digits.
pub(super) fn compare(hasher: Context, stated: &str) -> Result<(), String> {
    let found: String = hasher.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    if found == stated {
        return Ok(());
    }
    Err(format!("its hash is {found}, and the server states {stated}: it was damaged on the way or on the server, read it again or download another copy"))
}

/// The hash of the chunks so far: SHA-256 takes them in the order of the file only.
pub(super) struct RunningHash {
    stated: String,
    chunks: u64,
    /// Chunks that are hashed, readable without the lock.
    hashed: AtomicU64,
    state: Mutex<(Context, Option<Result<(), String>>)>,
}

impl RunningHash {
    /// Of a file of so many chunks.
    pub fn new(stated: String, chunks: u64) -> RunningHash {
        let outcome = (chunks == 0).then(|| compare(sha256(), &stated));
        RunningHash { stated, chunks, hashed: AtomicU64::new(0), state: Mutex::new((sha256(), outcome)) }
    }

    /// The next chunk to hash.
    pub fn next(&self) -> u64 {
        self.hashed.load(Ordering::Acquire)
    }

    /// Whether a chunk will be hashed soon, so that it should stay in memory.
    pub fn awaits(&self, chunk: u64) -> bool {
        chunk.checked_sub(self.next()).is_some_and(|ahead| ahead < WINDOW)
    }

    /// Hashes a chunk if it is the next one.
    pub fn update(&self, chunk: u64, bytes: &[u8]) {
        let mut state = lock(&self.state);
        if chunk != self.next() || state.1.is_some() {
            return;
        }
        state.0.update(bytes);
        let hashed = chunk.saturating_add(1);
        if hashed == self.chunks {
            state.1 = Some(compare(state.0.clone(), &self.stated));
        }
        self.hashed.store(hashed, Ordering::Release);
    }

    /// The result, once all chunks are hashed.
    pub fn outcome(&self) -> Option<Result<(), String>> {
        lock(&self.state).1.clone()
    }
}
