//! Ownership of a folder through a locked file inside it. The operating system releases the lock when
//! the process ends, for whatever reason, so that leftovers of a killed process are recognized without
//! its process id.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::statfs;

use crate::error::{Error, Result};

/// Time in which a process that another thread starts executes its program.
const STARTING: Duration = Duration::from_millis(400);

/// A lock file, locked until it is dropped. On file systems without locks, the file exists but is not
/// locked.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
    /// Whether the file system supports locks.
    pub supported: bool,
}

/// Result of an attempt to lock a file.
pub(super) enum Attempt {
    /// This process holds the lock.
    Taken(Lock),
    /// Another process holds the lock.
    Busy,
    /// The file does not exist, or was removed before it was locked.
    Missing,
    /// On this file system, the lock state does not show whether a process on another machine holds it.
    Unknown,
}

impl Lock {
    /// Creates the file if it is missing, and locks it. A process that another thread starts holds a copy of
    /// the locks of this one until it executes its program, so a locked file is tried again for a moment.
    pub fn take(path: &Path) -> Result<Attempt> {
        let start = Instant::now();
        loop {
            let attempt = match File::options().create(true).append(true).open(path) {
                Ok(file) => Lock::from_file(file, path),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Attempt::Missing),
                Err(e) => return Err(Error::io("create", path)(e)),
            };
            if !matches!(attempt, Attempt::Busy) || start.elapsed() > STARTING {
                return Ok(attempt);
            }
            std::thread::sleep(STARTING / 20);
        }
    }

    /// Locks the file if its owner has ended for certain.
    pub fn take_over(path: &Path) -> Attempt {
        let Ok(file) = File::options().append(true).open(path) else {
            return if path.exists() { Attempt::Unknown } else { Attempt::Missing };
        };
        let owner = fs::read_to_string(path).unwrap_or_default();
        match Lock::from_file(file, path) {
            Attempt::Taken(lock) if !lock.supported || !is_conclusive(is_local(path), &owner) => Attempt::Unknown,
            attempt => attempt,
        }
    }

    fn from_file(file: File, path: &Path) -> Attempt {
        let supported = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => return Attempt::Busy,
            Err(TryLockError::Error(_)) => false,
        };
        // A process that removes a folder holds its lock until the file is unlinked, so a lock on an
        // unlinked file is worthless.
        let own = file.metadata().map(|own| (own.dev(), own.ino())).ok();
        if own.is_none() || fs::symlink_metadata(path).map(|now| (now.dev(), now.ino())).ok() != own {
            return Attempt::Missing;
        }
        Attempt::Taken(Lock { _file: file, supported })
    }

    /// Writes the identity of the running kernel into the file. Without it, leftovers are removed only
    /// on local file systems.
    pub fn sign(&self, path: &Path) {
        if self.supported {
            let _ = fs::write(path, system());
        }
    }
}

/// Whether a lock of this owner that is free on this machine is free on all machines.
fn is_conclusive(local: bool, owner: &str) -> bool {
    local || (!owner.is_empty() && owner == system())
}

/// Identifies the running kernel. All its processes, in all namespaces, see each other's locks on every
/// file system.
fn system() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Whether only this kernel can use the file system, so that a free lock is free everywhere: ext, XFS,
/// Btrfs, ZFS, F2FS, tmpfs, overlayfs. Other file systems may be mounted on several machines, where a
/// lock may be visible on one machine only.
fn is_local(path: &Path) -> bool {
    const LOCAL: [i128; 7] = [0xef53, 0x5846_5342, 0x9123_683e, 0x2fc1_2fc1, 0xf2f5_2010, 0x0102_1994, 0x794c_7630];
    statfs(path).is_ok_and(|system| LOCAL.contains(&i128::from(system.f_type)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_lock_is_inconclusive_for_other_machines() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        assert!(is_local(folder.path()) && !is_local(Path::new("/proc")));
        assert!(is_conclusive(true, "") && is_conclusive(true, "another system") && is_conclusive(false, &system()));
        assert!(!is_conclusive(false, "") && !is_conclusive(false, "another system"));
    }

    #[test]
    fn one_process_owns_a_lock_and_a_removed_file_has_no_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(matches!(Lock::take_over(&path), Attempt::Missing));
        let Attempt::Taken(lock) = Lock::take(&path).unwrap() else { panic!("a new file is free") };
        lock.sign(&path);
        assert!(lock.supported && !fs::read_to_string(&path).unwrap().is_empty());
        assert!(matches!(Lock::take(&path).unwrap(), Attempt::Busy));
        assert!(matches!(Lock::take_over(&path), Attempt::Busy));
        let opened = File::options().append(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        drop(lock);
        assert!(matches!(Lock::from_file(opened, &path), Attempt::Missing));
        let Attempt::Taken(lock) = Lock::take(&path).unwrap() else { panic!("a new file is free") };
        drop(lock);
        assert!(matches!(Lock::take_over(&path), Attempt::Taken(_)));
        assert!(matches!(Lock::take(&folder.path().join("none/lock")).unwrap(), Attempt::Missing));
    }
}
