//! A temporary folder.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Number of folders that this process has created.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A folder that only this user can read. Its contents are deleted when it is dropped.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Result<Scratch> {
        let name = format!("compress-try-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(Error::io("create", &path))?;
        Ok(Scratch(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be deleted is not an error of the trial.
        drop(std::fs::remove_dir_all(&self.0));
    }
}
