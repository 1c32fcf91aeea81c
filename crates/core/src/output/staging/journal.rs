//! The journal of a publication, by which an interrupted one is reverted or completed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};

use super::{MODEL, NEW, OLD_REPORT};
use crate::output::names::report_folder;

/// The parts of a single-file output by inode number, which a rename preserves.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Journal {
    pub target: String,
    pub model: u64,
    pub report: u64,
    pub data: Option<(String, u64)>,
    /// Data files of the replaced model file.
    pub old_data: Vec<(String, u64)>,
}

impl Journal {
    /// Removes the old data files if the new model file was committed, and reverts all other steps
    /// otherwise.
    pub(super) fn finish(&self, work: &Path) {
        let Some(folder) = work.parent() else { return };
        let names = self.data.iter().chain(&self.old_data).map(|(name, _)| name).chain([&self.target]);
        if !names.into_iter().all(|name| Path::new(name).file_name().is_some_and(|file| file == name.as_str())) {
            return;
        }
        let target = folder.join(&self.target);
        let has = |path: &Path, inode: u64| fs::symlink_metadata(path).is_ok_and(|about| about.ino() == inode);
        let remove = |(name, inode): &(String, u64)| {
            let path = folder.join(name);
            if has(&path, *inode) {
                discard(&path);
            }
        };
        // The new model file is either still in the staging folder or was committed, whatever happened
        // to it afterwards.
        if !has(&work.join(MODEL), self.model) {
            return self.old_data.iter().for_each(remove);
        }
        let (report, new) = (report_folder(&target), work.join(NEW));
        let old_report = work.join(OLD_REPORT);
        if report.symlink_metadata().is_err() && old_report.exists() {
            // Killed between the two steps of a non-atomic exchange.
            let _ = fs::rename(&old_report, &report);
        } else if has(&report, self.report) {
            let old = [new.clone(), old_report].into_iter().find(|old| old.exists());
            let _ = match old {
                Some(old) if renameat_with(CWD, &old, CWD, &report, RenameFlags::EXCHANGE).is_ok() => Ok(()),
                Some(old) => fs::rename(&report, work.join("taken back")).and_then(|()| fs::rename(old, &report)),
                None => fs::rename(&report, &new),
            };
        }
        self.data.iter().for_each(remove);
    }
}

/// Removes a file or a folder, ignoring errors.
pub(super) fn discard(path: &Path) {
    let folder = path.is_dir() && !path.is_symlink();
    let _ = if folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}
