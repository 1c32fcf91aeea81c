//! The hidden staging folder: creation with a lock, removal, and cleanup after killed runs.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use super::journal::{Journal, discard};
use super::{ATTEMPTS, LOCK, OLD};
use crate::error::{Error, Result};
use crate::files;
use crate::output::lock::{Attempt, Lock};
use crate::output::names::JOURNAL;

/// Creates a folder with a locked file inside, and its parents. If another process removes one of them
/// before the file is locked, creation is retried under another name.
pub(super) fn begin(parent: &Path, prefix: &str) -> Result<(PathBuf, Lock)> {
    let mut last = ErrorKind::NotFound.into();
    for _ in 0..ATTEMPTS {
        let work = parent.join(format!("{prefix}{:016x}", RandomState::new().build_hasher().finish()));
        let created = fs::create_dir_all(parent).map_err(|e| (parent, e)).and_then(|()| fs::create_dir(&work).map_err(|e| (&*work, e)));
        if let Err((path, e)) = created {
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

/// Removes a staging folder by its owner. The lock file is removed last.
pub(super) fn remove(work: &Path) {
    let parts = fs::read_dir(work).into_iter().flatten().flatten().filter(|part| part.file_name() != LOCK);
    parts.for_each(|part| discard(&part.path()));
    let _ = fs::remove_file(work.join(LOCK));
    let _ = fs::remove_dir(work);
}

/// Whether a path is a folder of this user, or of the owner of the folder that contains it, who can replace
/// all its files anyway: on network and container file systems, all files may have the same owner. In folders
/// such as that for temporary files, other users may create links and folders of any name.
pub(super) fn is_own_folder(path: &Path) -> bool {
    let owner = path.parent().and_then(|parent| fs::metadata(parent).ok()).map(|about| about.uid());
    let is_trusted = |user: u32| user == rustix::process::geteuid().as_raw() || owner == Some(user);
    fs::symlink_metadata(path).is_ok_and(|about| about.is_dir() && is_trusted(about.uid()))
}

/// Removes the staging folders of killed processes of this user. Returns notes on folders that may be
/// leftovers and were not removed.
pub(super) fn remove_stale(parent: &Path, prefix: &str, target: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    let Ok(entries) = fs::read_dir(parent) else { return notes };
    let random = |name: &str| name.strip_prefix(prefix).is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
    for work in entries.flatten().filter(|entry| random(&entry.file_name().to_string_lossy())).map(|entry| entry.path()) {
        if !is_own_folder(&work) {
            notes.push(format!("{} does not belong to this user; if it is left over from a killed run, its owner can remove it", work.display()));
            continue;
        }
        match Lock::take_over(&work.join(LOCK)) {
            Attempt::Taken(_lock) => {
                // Remote outputs are not renamed.
                let journal = fs::read(work.join(JOURNAL)).ok().filter(|_| !files::is_remote(target));
                if let Some(journal) = journal.and_then(|text| serde_json::from_slice::<Journal>(&text).ok()) {
                    journal.finish(&work);
                }
                let old = work.join(OLD);
                // Killed between the two steps of a non-atomic exchange.
                let restored = || !files::is_remote(target) && (target.exists() || fs::rename(&old, target).is_ok());
                if old.symlink_metadata().is_err() || restored() {
                    remove(&work);
                } else {
                    notes.push(format!("{} holds the previous output of a killed run and could not be restored; move it back manually", old.display()));
                }
            }
            Attempt::Unknown => notes.push(format!("{} may be left over from a killed run; remove it if no run on any machine writes to it", work.display())),
            // Killed while creating or removing the folder. A folder that is not empty is left
            // unchanged.
            Attempt::Missing => drop(fs::remove_dir(&work)),
            Attempt::Busy => {}
        }
    }
    notes
}

/// Removes the folders that were created for an output that was not published, innermost first, if they
/// are empty.
pub(super) fn remove_created(parent: &Path, created: Option<&Path>) {
    let Some(created) = created else { return };
    for folder in parent.ancestors().take_while(|p| p.starts_with(created)) {
        let _ = fs::remove_dir(folder);
    }
}

/// Number of files that are synced at the same time: file systems commit their changes together.
const SYNCED_TOGETHER: usize = 8;

/// Syncs the contents before the rename, so that a power failure leaves no empty file under the final
/// name.
pub(super) fn sync(folder: &Path) -> Result<()> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    let mut at = 0;
    while let Some(folder) = folders.get(at).cloned() {
        for entry in fs::read_dir(&folder).map_err(Error::io("list", &folder))? {
            let path = entry.map_err(Error::io("list", &folder))?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
        at += 1;
    }
    let sync = |path: &PathBuf| File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("sync", path));
    for together in files.chunks(SYNCED_TOGETHER) {
        thread::scope(|scope| {
            let started: Vec<_> = together.iter().map(|path| (path, thread::Builder::new().spawn_scoped(scope, || sync(path)))).collect();
            // A file without another thread is synced by this one.
            started.into_iter().try_for_each(|(path, thread)| thread.map_or_else(|_| sync(path), |thread| thread.join().unwrap_or_else(|e| resume_unwind(e))))
        })?;
    }
    folders.iter().rev().for_each(|folder| sync_folder(folder));
    Ok(())
}

/// Total size of all files in a folder, in bytes.
pub(super) fn bytes(folder: &Path) -> Result<u64> {
    let mut sum = 0u64;
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        sum += if path.is_dir() { bytes(&path)? } else { files::length(&path).map_err(Error::io("open", &path))? };
    }
    Ok(sum)
}

/// Syncs the directory entries. Some network file systems cannot sync a folder; this is ignored.
pub(super) fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    const NAME: &str = ".out.compress-0123456789abcdef";

    /// A folder of a killed run that had replaced a model file. The data file of the old model is `name`,
    /// with the inode of `victim`.
    fn planted(work: &Path, victim: &Path, name: &str) {
        fs::create_dir(work).unwrap();
        fs::write(work.join(LOCK), "").unwrap();
        fs::write(victim, "theirs").unwrap();
        let journal =
            Journal { target: "out.onnx".into(), model: 0, report: 0, data: None, old_data: vec![(name.into(), fs::metadata(victim).unwrap().ino())] };
        fs::write(work.join(JOURNAL), serde_json::to_vec(&journal).unwrap()).unwrap();
    }

    #[test]
    fn journals_apply_only_to_files_next_to_a_local_output() {
        let folder = tempfile::tempdir().unwrap();
        let parent = folder.path().join("parent");
        for (victim, name, target, is_removed) in [
            ("parent/victim", "victim", "parent/out.onnx", true),
            ("parent/victim", "victim", "s3://bucket/out.onnx", false),
            ("victim", "../victim", "parent/out.onnx", false),
        ] {
            fs::create_dir(&parent).unwrap();
            let (work, victim) = (parent.join(NAME), folder.path().join(victim));
            planted(&work, &victim, name);
            let target = if files::is_remote(Path::new(target)) { target.into() } else { folder.path().join(target) };
            assert_eq!(remove_stale(&parent, ".out.compress-", &target), Vec::<String>::new());
            assert_eq!((work.exists(), victim.exists()), (false, !is_removed), "{name} {}", target.display());
            fs::remove_dir_all(&parent).unwrap();
        }
    }

    #[test]
    fn folders_of_others_are_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let (theirs, victim) = (folder.path().join("theirs"), folder.path().join("victim"));
        planted(&theirs, &victim, "victim");
        let work = folder.path().join(NAME);
        symlink(&theirs, &work).unwrap();
        let check = || {
            let notes = remove_stale(folder.path(), ".out.compress-", &folder.path().join("out.onnx"));
            assert!(notes.len() == 1 && notes[0].contains("does not belong to this user"), "{notes:?}");
            assert!(victim.exists() && work.join(JOURNAL).exists());
        };
        check();
        // Only root can give a folder to another user.
        if rustix::process::geteuid().is_root() {
            fs::remove_file(&work).unwrap();
            fs::rename(&theirs, &work).unwrap();
            chown(&work, Some(1), None).unwrap();
            check();
            // The owner of the folder that contains it can replace its files anyway.
            chown(folder.path(), Some(1), None).unwrap();
            assert_eq!(remove_stale(folder.path(), ".out.compress-", &folder.path().join("out.onnx")), Vec::<String>::new());
            assert!(!work.exists());
        }
    }
}
