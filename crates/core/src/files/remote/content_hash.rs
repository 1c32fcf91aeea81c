//! Hash of a file that is read in ranges, computed while they arrive.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

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

/// A hash that a server states for a file, in lower-case hexadecimal digits.
#[derive(Debug, Clone)]
pub(super) enum Stated {
    Sha256(String),
    /// SHA-1 of the git blob of a file of this length.
    GitBlob(String, u64),
}

impl Stated {
    /// A hasher to which the contents of the file are added.
    fn hasher(&self) -> Context {
        let Stated::GitBlob(_, bytes) = self else { return sha256() };
        let mut hasher = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
        hasher.update(format!("blob {bytes}\0").as_bytes());
        hasher
    }

    /// Compares a finished hash with this one.
    fn compare(&self, hasher: Context) -> Result<(), String> {
        let found = digits(hasher);
        let (name, stated) = match self {
            Stated::Sha256(stated) => ("SHA-256", stated),
            Stated::GitBlob(stated, _) => ("git hash", stated),
        };
        if found == *stated {
            return Ok(());
        }
        Err(format!(
            "its {name} is {found}, but the server reports {stated}: the file was corrupted in transit or on the server; try again, or download another copy"
        ))
    }

    /// Compares the complete contents with this hash.
    pub fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        self.compare(hasher)
    }
}

/// Hash of the chunks received so far, which are processed in file order.
pub(super) struct RunningHash {
    stated: Stated,
    chunks: u64,
    /// Number of hashed chunks, readable without the lock.
    hashed: AtomicU64,
    state: Mutex<(Context, Option<Result<(), String>>)>,
}

impl RunningHash {
    /// A hash of a file of `chunks` chunks.
    pub fn new(stated: Stated, chunks: u64) -> RunningHash {
        let outcome = (chunks == 0).then(|| stated.compare(stated.hasher()));
        let state = Mutex::new((stated.hasher(), outcome));
        RunningHash { stated, chunks, hashed: AtomicU64::new(0), state }
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
            state.1 = Some(self.stated.compare(state.0.clone()));
        }
        self.hashed.store(hashed, Ordering::Release);
    }

    /// The result, once all chunks are hashed.
    pub fn outcome(&self) -> Option<Result<(), String>> {
        lock(&self.state).1.clone()
    }
}
