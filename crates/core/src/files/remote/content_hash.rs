//! SHA-256 of a file that is read in ranges, computed while they arrive.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::digest::{Context, SHA256};

use super::lock;

/// Number of chunks after the next one to hash that are worth retaining in memory.
const WINDOW: u64 = 8;

pub(super) fn sha256() -> Context {
    Context::new(&SHA256)
}

/// The digits of a finished hash, hexadecimal and in lower case.
pub(super) fn digits(hasher: Context) -> String {
    hasher.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compares a finished hash with the expected one, in lower-case hexadecimal digits.
pub(super) fn compare(hasher: Context, expected: &str) -> Result<(), String> {
    let found = digits(hasher);
    if found == expected {
        return Ok(());
    }
    Err(format!(
        "its SHA-256 is {found}, but the server reports {expected}: the file was corrupted in transit or on the server; try again, or download another copy"
    ))
}

/// Hash of the chunks received so far. SHA-256 must process them in file order.
pub(super) struct RunningHash {
    expected: String,
    chunks: u64,
    /// Number of hashed chunks, readable without the lock.
    hashed: AtomicU64,
    state: Mutex<(Context, Option<Result<(), String>>)>,
}

impl RunningHash {
    /// A hash of a file of `chunks` chunks.
    pub fn new(expected: String, chunks: u64) -> RunningHash {
        let outcome = (chunks == 0).then(|| compare(sha256(), &expected));
        RunningHash { expected, chunks, hashed: AtomicU64::new(0), state: Mutex::new((sha256(), outcome)) }
    }

    /// The next chunk to hash.
    pub fn next(&self) -> u64 {
        self.hashed.load(Ordering::Acquire)
    }

    /// Whether a chunk will be hashed soon, so that it should be retained in memory.
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
            state.1 = Some(compare(state.0.clone(), &self.expected));
        }
        self.hashed.store(hashed, Ordering::Release);
    }

    /// The result, once all chunks are hashed.
    pub fn outcome(&self) -> Option<Result<(), String>> {
        lock(&self.state).1.clone()
    }
}
