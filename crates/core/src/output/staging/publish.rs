//! Publishes the staged files in recoverable steps.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::journal::Journal;
use super::work_folder::sync_folder;
use super::{ATTEMPTS, MODEL, OLD, OLD_REPORT, Staging};
use crate::error::{Error, Result};
use crate::output::listing::Listing;
use crate::output::names::{JOURNAL, file_name, report_folder};
use crate::output::target::{Replace, check_replaceable, exists, is_empty_folder, refuse};

impl Staging {
    /// Publishes a single-file output with its data file and report, in the steps that the parent module
    /// describes.
    pub(super) fn publish_file(&self, name: &str, after_step: &dyn Fn(&str)) -> Result<()> {
        check_replaceable(&self.target, self.replace, &self.inputs)?;
        let (new, model) = (self.path(), self.work.join(MODEL));
        fs::rename(new.join(name), &model).map_err(Error::io("move", &model))?;
        let inode = |path: &Path| fs::symlink_metadata(path).map(|about| about.ino()).map_err(Error::io("open", path));
        let data = self.data_name.as_deref().filter(|data| new.join(data).exists());
        let data = data.map(|data| Ok::<_, Error>((data.to_owned(), inode(&new.join(data))?))).transpose()?;
        let old = Listing::open(&report_folder(&self.target)).filter(|_| self.replace != Replace::Never);
        let old = old.into_iter().flat_map(|listing| listing.data_files(&self.target));
        let old_data = old.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), inode(&path).ok()?))).collect();
        let journal = Journal { target: name.to_owned(), model: inode(&model)?, report: inode(new)?, data, old_data };
        let path = self.work.join(JOURNAL);
        fs::write(&path, serde_json::to_vec(&journal).unwrap_or_default()).map_err(Error::io("write", &path))?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("sync", &path))?;
        sync_folder(&self.work);
        let done = self.put_parts(&journal, after_step);
        journal.finish(&self.work);
        done
    }

    fn put_parts(&self, journal: &Journal, after_step: &dyn Fn(&str)) -> Result<()> {
        after_step("nothing");
        if let Some((data, _)) = &journal.data {
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
            // The data file and the report are synced before the file that references them.
            sync_folder(folder);
        }
        self.put(&self.work.join(MODEL), &self.target)?;
        after_step("model");
        Ok(())
    }

    /// Moves a file or folder to its target. Existing data at the target is exchanged with it, or moved
    /// aside.
    pub(super) fn put(&self, new: &Path, target: &Path) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let moved = match renameat_with(CWD, new, CWD, target, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) if self.replace == Replace::Never => return self.put_over_empty(new, target),
                // The old data ends up in the staging folder, which is removed when `self` is dropped.
                Err(Errno::EXIST) => {
                    self.check_lost(target)?;
                    renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE)
                }
                moved => moved,
            };
            match moved {
                Ok(()) => return Ok(()),
                // Another process removed the old target in the meantime.
                Err(Errno::NOENT) if new.exists() => {}
                Err(Errno::INVAL | Errno::NOSYS) => return self.put_plainly(new, target),
                Err(e) => return Err(Error::io("create", target)(e.into())),
            }
        }
        Err(refuse(target, "is repeatedly created and removed", "choose a location that no other program uses"))
    }

    /// Replaces an empty folder. Renaming fails if the folder contains files that were added since it was
    /// checked.
    fn put_over_empty(&self, new: &Path, target: &Path) -> Result<()> {
        if *target != self.target || !is_empty_folder(target) {
            return Err(exists(target));
        }
        rustix::fs::rename(new, target).map_err(|e| match e {
            Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR => exists(target),
            Errno::BUSY => refuse(target, "is a mount point, which cannot be replaced", "choose a folder inside it"),
            e => Error::io("create", target)(e.into()),
        })
    }

    /// Fallback for file systems without atomic exchange.
    pub(super) fn put_plainly(&self, new: &Path, target: &Path) -> Result<()> {
        if !target.exists() {
            return fs::rename(new, target).map_err(Error::io("create", target));
        }
        if self.replace == Replace::Never {
            return self.put_over_empty(new, target);
        }
        self.check_lost(target)?;
        let old = self.work.join(if *target == self.target { OLD } else { OLD_REPORT });
        fs::rename(target, &old).map_err(Error::io("replace", target))?;
        fs::rename(new, target).map_err(|e| {
            let _ = fs::rename(&old, target);
            Error::io("replace", target)(e)
        })
    }

    /// Checks the target again before it is replaced, because files may have been added since the run
    /// started.
    fn check_lost(&self, target: &Path) -> Result<()> {
        if *target == self.target && file_name(target).is_none() { check_replaceable(target, self.replace, &self.inputs) } else { Ok(()) }
    }
}

/// Renames without replacing an existing target. On file systems without an atomic check, the target is
/// checked beforehand.
fn rename_new(from: &Path, to: &Path) -> std::result::Result<(), Errno> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) if to.symlink_metadata().is_err() => rustix::fs::rename(from, to),
        Err(Errno::INVAL | Errno::NOSYS) => Err(Errno::EXIST),
        renamed => renamed,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::check_output;
    use super::super::tests::listing;
    use super::*;

    #[test]
    fn changed_files_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out, file) = (folder.path().join("input"), folder.path().join("out"), folder.path().join("small.onnx"));
        let report = report_folder(&file);
        [&input, &out, &report].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
        let check = |target: &Path, replace| check_output(target, replace, &(&input).into()).map_err(|error| error.to_string());
        // A copied report that lists a file of the user, also one of the same size.
        fs::write(out.join("report.json"), listing(&[("weights", "1"), ("thesis.docx", "text")])).unwrap();
        fs::write(out.join("weights"), "1").unwrap();
        for (text, is_changed) in [("years of work", true), ("TEXT", true), ("text", false)] {
            fs::write(out.join("thesis.docx"), text).unwrap();
            let found = check(&out, Replace::Output);
            assert_eq!(found.is_err_and(|error| error.contains(": thesis.docx would be lost, and they were changed after")), is_changed, "{text}");
            // Only cached results may be damaged.
            assert_eq!(check(&out, Replace::Cached("key")).is_err(), is_changed);
            assert!(check(&out, Replace::Cached("weights")).is_ok());
        }
        fs::remove_file(out.join("weights")).unwrap();
        assert!(check(&out, Replace::Output).is_ok(), "nothing is lost with a missing file");
        // Of the files next to a single-file output, only the model and its data are removed.
        fs::write(report.join("report.json"), listing(&[("small.onnx", "new"), ("small.onnx.data", "data"), ("thesis.docx", "")])).unwrap();
        for (model, data, changed) in [("new", "data", None), ("old", "data", Some("small.onnx")), ("new", "atad", Some("small.onnx.data"))] {
            fs::write(&file, model).unwrap();
            fs::write(file.with_file_name("small.onnx.data"), data).unwrap();
            fs::write(file.with_file_name("thesis.docx"), "years").unwrap();
            let found = check(&file, Replace::Output);
            assert_eq!(found.err().map(|error| error.contains(&format!(": {} would be lost", changed.unwrap()))), changed.map(|_| true), "{changed:?}");
        }
        // Another process is between two steps, which it completes.
        let work = folder.path().join(".small.onnx.compress-0123456789abcdef");
        fs::create_dir(&work).unwrap();
        fs::write(work.join(JOURNAL), "").unwrap();
        fs::write(file.with_file_name("small.onnx.data"), "data").unwrap();
        fs::write(&file, "old").unwrap();
        std::thread::scope(|scope| {
            let checked = scope.spawn(|| check(&file, Replace::Output));
            std::thread::sleep(std::time::Duration::from_millis(50));
            fs::write(&file, "new").unwrap();
            fs::remove_dir_all(&work).unwrap();
            checked.join().unwrap().unwrap();
        });
        // A change while the run works.
        fs::write(file.with_file_name("small.onnx.data"), "data").unwrap();
        let staging = Staging::new(&file, Replace::Output, &input).unwrap();
        fs::write(staging.path().join("small.onnx"), "newer").unwrap();
        fs::write(&file, "edited").unwrap();
        assert!(staging.commit().unwrap_err().to_string().contains("small.onnx would be lost"));
        assert_eq!(fs::read_to_string(&file).unwrap(), "edited");
    }
}
