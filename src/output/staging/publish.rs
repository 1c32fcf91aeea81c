//! Puts finished files in place, step by step, so that a crash between two steps can be repaired.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::work_folder::{discard, sync_folder};
use super::{ATTEMPTS, MODEL, NEW, OLD, OLD_REPORT, PLACING, Staging};
use crate::error::{Error, Result};
use crate::output::place::{Listing, Replace, check_replaceable, exists, file_name, refuse, report_folder};

impl Staging {
    /// Puts a file and what belongs to it in place, as the head of this module describes.
    pub(super) fn put_file(&self, name: &str, after_step: &dyn Fn(&str)) -> Result<()> {
        let (new, model) = (self.path(), self.work.join(MODEL));
        fs::rename(new.join(name), &model).map_err(Error::io("move", &model))?;
        let inode = |path: &Path| fs::symlink_metadata(path).map(|about| about.ino()).map_err(Error::io("open", path));
        let data = self.data_name.as_deref().filter(|data| new.join(data).exists());
        let data = data.map(|data| Ok::<_, Error>((data.to_owned(), inode(&new.join(data))?))).transpose()?;
        let old = Listing::open(&report_folder(&self.target)).filter(|_| self.replace == Replace::Output);
        let old = old.into_iter().flat_map(|listing| listing.data_files(&self.target));
        let old_data = old.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), inode(&path).ok()?))).collect();
        let placing = Placing { target: name.to_owned(), model: inode(&model)?, report: inode(new)?, data, old_data };
        let path = self.work.join(PLACING);
        fs::write(&path, serde_json::to_vec(&placing).unwrap_or_default()).map_err(Error::io("write", &path))?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("sync", &path))?;
        sync_folder(&self.work);
        let done = self.put_parts(&placing, after_step);
        placing.finish(&self.work);
        done
    }

    fn put_parts(&self, placing: &Placing, after_step: &dyn Fn(&str)) -> Result<()> {
        after_step("nothing");
        if let Some((data, _)) = &placing.data {
            let target = self.target.with_file_name(data);
            rename_new(&self.path().join(data), &target).map_err(|e| match e {
                Errno::EXIST => exists(&target),
                e => Error::io("create", &target)(e.into()),
            })?;
            after_step("data");
        }
        self.put(self.path(), &report_folder(&self.target))?;
        after_step("report");
        if let Some(folder) = self.target.parent() {
            // The data file and the report reach the disk before the file that names them.
            sync_folder(folder);
        }
        self.put(&self.work.join(MODEL), &self.target)?;
        after_step("model");
        Ok(())
    }

    /// Moves something to its place; what it replaces takes its own place, or is moved away.
    pub(super) fn put(&self, new: &Path, target: &Path) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let moved = match renameat_with(CWD, new, CWD, target, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) if self.replace == Replace::Nothing => return Err(exists(target)),
                // The old one changes places with the new one, and goes when `self` is dropped.
                Err(Errno::EXIST) => {
                    self.check_lost(target)?;
                    renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE)
                }
                moved => moved,
            };
            match moved {
                Ok(()) => return Ok(()),
                // Another process has removed the old one in the meantime.
                Err(Errno::NOENT) if new.exists() => {}
                Err(Errno::INVAL | Errno::NOSYS) => return self.put_plainly(new, target),
                Err(e) => return Err(Error::io("create", target)(e.into())),
            }
        }
        Err(refuse(target, "appears and disappears", "choose a place that no other program uses"))
    }

    /// For file systems without atomic exchange.
    pub(super) fn put_plainly(&self, new: &Path, target: &Path) -> Result<()> {
        if !target.exists() {
            return fs::rename(new, target).map_err(Error::io("create", target));
        }
        if self.replace == Replace::Nothing {
            return Err(exists(target));
        }
        self.check_lost(target)?;
        let old = self.work.join(if *target == self.target { OLD } else { OLD_REPORT });
        fs::rename(target, &old).map_err(Error::io("replace", target))?;
        fs::rename(new, target).map_err(|e| {
            let _ = fs::rename(&old, target);
            Error::io("replace", target)(e)
        })
    }

    /// Checks a folder again before it is replaced: files may have been added since the run began.
    fn check_lost(&self, target: &Path) -> Result<()> {
        if *target == self.target && file_name(target).is_none() { check_replaceable(target, self.replace, &self.inputs) } else { Ok(()) }
    }
}

/// The parts of a single-file output by inode number, which renaming does not change.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Placing {
    target: String,
    model: u64,
    report: u64,
    data: Option<(String, u64)>,
    /// Files of weights that the replaced file names.
    old_data: Vec<(String, u64)>,
}

impl Placing {
    /// Removes the old files of weights if the new file is in place, and takes back everything else if it is not.
    pub(super) fn finish(&self, work: &Path) {
        let Some(folder) = work.parent() else { return };
        let target = folder.join(&self.target);
        let has = |path: &Path, inode: u64| fs::symlink_metadata(path).is_ok_and(|about| about.ino() == inode);
        let remove = |(name, inode): &(String, u64)| {
            let path = folder.join(name);
            if has(&path, *inode) {
                discard(&path);
            }
        };
        // The new file is either still here, or in place: whatever others have done to it since.
        if !has(&work.join(MODEL), self.model) {
            return self.old_data.iter().for_each(remove);
        }
        let (report, new) = (report_folder(&target), work.join(NEW));
        if has(&report, self.report) {
            let old = [new.clone(), work.join(OLD_REPORT)].into_iter().find(|old| old.exists());
            let _ = match old {
                Some(old) if renameat_with(CWD, &old, CWD, &report, RenameFlags::EXCHANGE).is_ok() => Ok(()),
                Some(old) => fs::rename(&report, work.join("taken back")).and_then(|()| fs::rename(old, &report)),
                None => fs::rename(&report, &new),
            };
        }
        self.data.iter().for_each(remove);
    }
}

/// Renames to a name that does not exist; on file systems that cannot refuse an existing one in the same step, it is looked for first.
fn rename_new(from: &Path, to: &Path) -> std::result::Result<(), Errno> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) if to.symlink_metadata().is_err() => rustix::fs::rename(from, to),
        Err(Errno::INVAL | Errno::NOSYS) => Err(Errno::EXIST),
        renamed => renamed,
    }
}
