//! Temporary folders.

use std::fs;
use std::path::{Path, PathBuf};

use super::LOCK;
use super::work_folder::{begin, is_own_folder, remove};
use crate::error::Result;
use crate::output::lock::{Attempt, Lock};

/// Prefix of the names of temporary folders.
const PREFIX: &str = ".compress-scratch-";

/// A temporary folder, in the folder for temporary files of the system (`TMPDIR`). It is removed on drop;
/// those of killed processes are removed when the next one is created.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    _lock: Lock,
}

impl ScratchFolder {
    /// Creates an empty folder.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub fn new() -> Result<ScratchFolder> {
        ScratchFolder::new_in(&std::env::temp_dir())
    }

    fn new_in(parent: &Path) -> Result<ScratchFolder> {
        let (path, lock) = begin(parent, PREFIX)?;
        remove_stale(parent, &path);
        Ok(ScratchFolder { path, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Removes the folders of killed processes of this user, except the folder `own`.
fn remove_stale(parent: &Path, own: &Path) {
    for path in fs::read_dir(parent).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let is_scratch = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        if is_scratch
            && path != own
            && is_own_folder(&path)
            && let Attempt::Taken(_lock) = Lock::take_over(&path.join(LOCK))
        {
            remove(&path);
        }
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_removed_with_their_contents() {
        let parent = tempfile::tempdir().unwrap();
        let [one, other] = [0, 1].map(|_| ScratchFolder::new_in(parent.path()).unwrap());
        std::fs::create_dir(one.path().join("model")).unwrap();
        std::fs::write(one.path().join("model/weights"), "x").unwrap();
        let path = one.path().to_owned();
        assert!(path != other.path() && path.exists());
        drop(one);
        assert!(!path.exists() && other.path().exists());
        // A killed process leaves its folder, whose lock is free.
        let stale = parent.path().join(format!("{PREFIX}0123456789abcdef"));
        std::fs::create_dir(&stale).unwrap();
        std::fs::write(stale.join("lock"), "").unwrap();
        // A link is not followed.
        let folder = parent.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("lock"), "").unwrap();
        std::os::unix::fs::symlink(&folder, parent.path().join(format!("{PREFIX}link"))).unwrap();
        drop(ScratchFolder::new_in(parent.path()).unwrap());
        assert!(!stale.exists() && other.path().exists() && folder.join("lock").exists());
    }
}
