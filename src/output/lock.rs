//! Ownership of a folder by a locked file inside it. The system frees the lock when its process ends, however it ends, so that
//! what a killed process has left is recognised without knowing who it was.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::statfs;

use crate::error::{Error, Result};

/// A file that stays locked as long as this lives; where the file system has no locks, only the file.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
    /// Whether the file system has locks.
    pub held: bool,
}

/// What became of an attempt to lock a file.
pub(super) enum Attempt {
    /// This process has it.
    Taken(Lock),
    /// Another process has it.
    Busy,
    /// The file is not there, or was removed before it was locked.
    Gone,
    /// The locks of this file system do not tell whether another process has it.
    Unknown,
}

impl Lock {
    /// Locks a file, which is made where it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn take(path: &Path) -> Result<Attempt> {
        match File::options().create(true).append(true).open(path) {
            Ok(file) => Ok(Lock::of(file, path)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Attempt::Gone),
            Err(e) => Err(Error::io("create", path)(e)),
        }
    }

    /// Locks the file of a process that has ended for sure.
    pub fn take_over(path: &Path) -> Attempt {
        let Ok(file) = File::options().append(true).open(path) else {
            return if path.exists() { Attempt::Unknown } else { Attempt::Gone };
        };
        let owner = fs::read_to_string(path).unwrap_or_default();
        match Lock::of(file, path) {
            Attempt::Taken(lock) if !lock.held || !tells(is_local(path), &owner) => Attempt::Unknown,
            attempt => attempt,
        }
    }

    fn of(file: File, path: &Path) -> Attempt {
        let held = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => return Attempt::Busy,
            Err(TryLockError::Error(_)) => false,
        };
        // Who removes a folder holds its lock until the file is gone: a lock on a file without a name owns nothing.
        let own = file.metadata().map(|own| (own.dev(), own.ino())).ok();
        if own.is_none() || fs::symlink_metadata(path).map(|now| (now.dev(), now.ino())).ok() != own {
            return Attempt::Gone;
        }
        Attempt::Taken(Lock { _file: file, held })
    }

    /// Says in the file whose locks it is among; without that, what is left of it is only removed from local file systems.
    pub fn sign(&self, path: &Path) {
        if self.held {
            let _ = fs::write(path, system());
        }
    }
}

/// Whether a lock of this owner that is free here is free everywhere.
fn tells(local: bool, owner: &str) -> bool {
    local || (!owner.is_empty() && owner == system())
}

/// Names the running kernel: its processes, in whatever namespaces, see each other's locks on any file system.
fn system() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Whether one kernel alone uses the file system, so that a free lock is free everywhere: ext, XFS, Btrfs, ZFS, F2FS, tmpfs, overlays.
/// Others may be mounted on several machines, where locks may count on one machine alone.
fn is_local(path: &Path) -> bool {
    const LOCAL: [i128; 7] = [0xef53, 0x5846_5342, 0x9123_683e, 0x2fc1_2fc1, 0xf2f5_2010, 0x0102_1994, 0x794c_7630];
    statfs(path).is_ok_and(|system| LOCAL.contains(&i128::from(system.f_type)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_lock_tells_nothing_of_other_machines() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        assert!(is_local(folder.path()) && !is_local(Path::new("/proc")));
        assert!(tells(true, "") && tells(true, "another system") && tells(false, &system()));
        assert!(!tells(false, "") && !tells(false, "another system"));
    }

    #[test]
    fn one_process_has_it_and_a_removed_file_is_nobodys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(matches!(Lock::take_over(&path), Attempt::Gone));
        let Attempt::Taken(lock) = Lock::take(&path).unwrap() else { panic!("a new file is free") };
        lock.sign(&path);
        assert!(lock.held && !fs::read_to_string(&path).unwrap().is_empty());
        assert!(matches!(Lock::take(&path).unwrap(), Attempt::Busy));
        assert!(matches!(Lock::take_over(&path), Attempt::Busy));
        let opened = File::options().append(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        drop(lock);
        assert!(matches!(Lock::of(opened, &path), Attempt::Gone));
        let Attempt::Taken(lock) = Lock::take(&path).unwrap() else { panic!("a new file is free") };
        drop(lock);
        assert!(matches!(Lock::take_over(&path), Attempt::Taken(_)));
        assert!(matches!(Lock::take(&folder.path().join("none/lock")).unwrap(), Attempt::Gone));
    }
}
