//! Values computed from local files.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Identity of a local file at one time: device, inode, length, modification time and change time. Only
/// the kernel sets the change time, so preserving a modification time (`cp -p`, `touch -d`) cannot hide
/// changed contents.
type FileState = (u64, u64, u64, (i64, i64), (i64, i64));

/// A file changed more recently than this may change again within the resolution of its timestamps.
const SETTLED: Duration = Duration::from_secs(2);

/// Values that were computed from local files, each reused by this process while its file does not
/// change.
#[derive(Debug)]
pub struct FileCache<T>(Mutex<HashMap<FileState, T>>);

impl<T> Default for FileCache<T> {
    fn default() -> FileCache<T> {
        FileCache(Mutex::default())
    }
}

impl<T: Copy> FileCache<T> {
    /// The value of a file. It is computed every time for remote files, and for files that changed just
    /// now.
    pub fn get_or_compute<E>(&self, path: &Path, compute: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let values = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let state = file_state(path);
        if let Some(value) = state.and_then(|state| values().get(&state).copied()) {
            return Ok(value);
        }
        let value = compute()?;
        if let Some(state) = state.filter(|state| file_state(path) == Some(*state)) {
            values().insert(state, value);
        }
        Ok(value)
    }
}

fn file_state(path: &Path) -> Option<FileState> {
    let about = std::fs::metadata(path).ok().filter(|_| !super::is_remote(path))?;
    let changed = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(u64::try_from(about.ctime()).ok()?))?;
    let settled = SystemTime::now().duration_since(changed).is_ok_and(|age| age > SETTLED);
    settled.then(|| (about.dev(), about.ino(), about.len(), (about.mtime(), about.mtime_nsec()), (about.ctime(), about.ctime_nsec())))
}
