//! The hidden folder in which an output is made: creation under a lock, removal, and what killed runs have left.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::placing::Placing;
use super::{ATTEMPTS, LOCK, OLD, PLACING};
use crate::error::{Error, Result};
use crate::files;
use crate::output::lock::{Attempt, Lock};

/// Makes a folder with a lock inside, and what it lies in. Others may remove either before it is locked: then under another name.
pub(super) fn begin(parent: &Path, prefix: &str) -> Result<(PathBuf, Lock)> {
    let mut last = ErrorKind::NotFound.into();
    for _ in 0..ATTEMPTS {
        let work = parent.join(format!("{prefix}{:016x}", RandomState::new().build_hasher().finish()));
        let made = fs::create_dir_all(parent).map_err(|e| (parent, e)).and_then(|()| fs::create_dir(&work).map_err(|e| (&*work, e)));
        if let Err((path, e)) = made {
            if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists) {
                return Err(Error::io("create", path)(e));
            }
            last = e;
            continue;
        }
        let path = work.join(LOCK);
        match Lock::take(&path) {
            Ok(Attempt::Taken(lock)) => {
                lock.sign(&path);
                return Ok((work, lock));
            }
            Ok(_) => {}
            Err(error) => {
                remove(&work);
                return Err(error);
            }
        }
    }
    Err(Error::io("create", parent)(last))
}

/// Removes a staging folder by its owner, the lock last.
pub(super) fn remove(work: &Path) {
    let parts = fs::read_dir(work).into_iter().flatten().flatten().filter(|part| part.file_name() != LOCK);
    parts.for_each(|part| discard(&part.path()));
    let _ = fs::remove_file(work.join(LOCK));
    let _ = fs::remove_dir(work);
}

/// Removes a file or a folder, if it can be removed.
pub(super) fn discard(path: &Path) {
    let folder = path.is_dir() && !path.is_symlink();
    let _ = if folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Removes what killed processes have left, and returns notes on what may be such and was not removed.
pub(super) fn remove_left(parent: &Path, prefix: &str, target: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    let Ok(entries) = fs::read_dir(parent) else { return notes };
    let random = |name: &str| name.strip_prefix(prefix).is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
    for work in entries.flatten().filter(|entry| random(&entry.file_name().to_string_lossy())).map(|entry| entry.path()) {
        match Lock::take_over(&work.join(LOCK)) {
            Attempt::Taken(_lock) => {
                if let Some(placing) = fs::read(work.join(PLACING)).ok().and_then(|text| serde_json::from_slice::<Placing>(&text).ok()) {
                    placing.finish(&work);
                }
                let old = work.join(OLD);
                // Killed between the two steps of an exchange.
                let back = || !files::is_remote(target) && (target.exists() || fs::rename(&old, target).is_ok());
                if old.symlink_metadata().is_err() || back() {
                    remove(&work);
                } else {
                    notes.push(format!("{} is what a killed run was to replace, and could not be put back: move it", old.display()));
                }
            }
            Attempt::Unknown => notes.push(format!("{} may be what a killed run has left: remove it if no run on any machine writes there", work.display())),
            // Killed between two steps at the very beginning or end; a folder with anything in it stays.
            Attempt::Gone => drop(fs::remove_dir(&work)),
            Attempt::Busy => {}
        }
    }
    notes
}

/// Removes folders that were made for an output that did not come about, innermost first, if they are empty.
pub(super) fn remove_made(parent: &Path, made: Option<&Path>) {
    let Some(made) = made else { return };
    for folder in parent.ancestors().take_while(|p| p.starts_with(made)) {
        let _ = fs::remove_dir(folder);
    }
}

/// Bytes reach the disk before the name does, so that a power cut leaves no empty file under the final name.
pub(super) fn sync(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        if path.is_dir() {
            sync(&path)?;
        } else {
            File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("sync", &path))?;
        }
    }
    sync_folder(folder);
    Ok(())
}

/// Bytes of all files of a folder.
pub(super) fn bytes(folder: &Path) -> Result<u64> {
    let mut sum = 0u64;
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        sum += if path.is_dir() { bytes(&path)? } else { files::length(&path).map_err(Error::io("open", &path))? };
    }
    Ok(sum)
}

/// Names reach the disk; where a folder cannot be synced (some network file systems), it is still whole.
pub(super) fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}
