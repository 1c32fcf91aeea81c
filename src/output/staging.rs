//! An output folder that appears whole or not at all.
//!
//! Work happens in a hidden folder beside the final place, under a name that nobody else has:
//!
//! ```text
//! .OUT.compress-0123456789abcdef/
//!     lock    held from before there is anything else until everything else is gone
//!     new     renamed to OUT in one step
//!     old     what OUT was, where the file system cannot exchange two folders in one step
//! ```
//!
//! An output that is a file is made in a folder too, and three things are put in place: a file with the weights, if the format has one, under
//! a name that did not exist; the folder of the report; and last, in one step, the file itself. That step decides: the file names its file of
//! weights, so that before it the old file is paired with the old weights, and after it the new one with the new. Old weights are removed
//! after it. `placing.json`, written before the first step, records what is put where by inode numbers. If a step fails, those before it are
//! taken back; if the process is killed, the next run for this output takes them back, or removes the old weights if the file is the new one.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use std::os::unix::fs::MetadataExt;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::lock::{Attempt, Lock};
use super::place::{Inputs, Listing, Replace, absolute, check_place, check_replaceable, exists, file_name, free_data_name, refuse, report_folder};
use crate::error::{Error, Result, tellable};
use crate::files::{self, Destination};

/// An unfinished output folder; dropped without [`commit`](Staging::commit), it is removed.
#[derive(Debug)]
pub struct Staging {
    work: PathBuf,
    destination: Destination,
    target: PathBuf,
    replace: Replace,
    inputs: Inputs,
    data_name: Option<String>,
    /// The outermost folder that was made to hold the output.
    made: Option<PathBuf>,
    _lock: Lock,
    notes: Vec<String>,
}

const LOCK: &str = "lock";
const NEW: &str = "new";
const OLD: &str = "old";
const OLD_REPORT: &str = "old report";
/// The new model file, and what it replaced afterwards.
const MODEL: &str = "model";
const PLACING: &str = "placing.json";

/// Others can take a folder away between two steps of this process, but not often in a row.
const ATTEMPTS: usize = 100;

impl Staging {
    /// Starts an output folder beside its final place.
    ///
    /// # Errors
    /// As [`check_place`], or nothing can be written next to the final place.
    pub fn new(target: &Path, replace: Replace, inputs: impl Into<Inputs>) -> Result<Staging> {
        let (target, inputs) = (absolute(target)?, inputs.into());
        check_place(&target, replace, &inputs)?;
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(refuse(&target, "has no parent folder", "choose a folder inside another one"));
        };
        // What is small, or opened while it is made, is made on this machine first.
        let remote = files::is_remote(&target).then(std::env::temp_dir);
        let parent = remote.as_deref().unwrap_or(parent);
        let made = parent.ancestors().take_while(|p| !p.exists()).last().map(Path::to_owned);
        let prefix = format!(".{}.{}-", name.to_string_lossy(), if remote.is_some() { "upload" } else { "compress" });
        let mut notes = remove_left(parent, &prefix, &target);
        match begin(parent, &prefix) {
            Ok((work, lock)) => {
                if !lock.held {
                    notes.push(format!("{} is on a file system without locks: what a killed run leaves there has to be removed by hand", parent.display()));
                }
                let made = made.filter(|_| remote.is_none());
                let destination = Destination::here(work.join(NEW));
                let data_name = free_data_name(&target);
                let mut staging = Staging { work, destination, target, replace, inputs, data_name, made, _lock: lock, notes };
                fs::create_dir(staging.path()).map_err(Error::io("create", staging.path()))?;
                if remote.is_some() {
                    staging.begin_away()?;
                }
                Ok(staging)
            }
            Err(error) => {
                remove_made(parent, made.as_deref());
                Err(error)
            }
        }
    }

    /// Begins a folder of another machine, which weights go to as they are made.
    fn begin_away(&mut self) -> Result<()> {
        self.destination = Destination::away(&self.target, self.path()).map_err(Error::io("create", &self.target))?;
        if self.destination.is_shared() {
            let target = tellable(&self.target);
            let told = target.display();
            self.notes.push(format!("where {told} is, a file cannot be refused that is there already: of two runs that write it at once, both go on"));
        }
        Ok(())
    }

    /// The folder of this machine to write into.
    pub fn path(&self) -> &Path {
        self.destination.path()
    }

    /// Where weights are written.
    pub fn destination(&self) -> &Destination {
        &self.destination
    }

    /// Where the folder will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The name for a second file, with the weights of a large one, where the output is a file of a format that has such files.
    pub fn data_name(&self) -> Option<&str> {
        self.data_name.as_deref()
    }

    /// Bytes that go to another machine and come back to be compared; none where the folder stays here.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn uploads(&self) -> Result<u64> {
        if self.destination.is_away() { bytes(self.path()).map(|bytes| bytes.saturating_mul(2)) } else { Ok(0) }
    }

    /// Notes on what the file system cannot do.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Moves the folder to its final place, in one step.
    ///
    /// # Errors
    /// The place was taken meanwhile, or the move fails; then nothing has changed.
    pub fn commit(self) -> Result<()> {
        self.commit_telling(&|_| true)
    }

    /// The same, telling of every run of bytes that is done on the way to another machine, [`uploads`](Staging::uploads) in all; the answer is
    /// whether to go on.
    ///
    /// # Errors
    /// As [`commit`](Staging::commit), or the answer is no.
    pub fn commit_telling(mut self, told: &(dyn Fn(u64) -> bool + Sync)) -> Result<()> {
        if self.destination.is_away() {
            return self.destination.publish(told).map_err(|e| match e.kind() {
                ErrorKind::Interrupted => Error::Cancelled,
                _ => Error::io("write", &self.target)(e),
            });
        }
        sync(self.path())?;
        match file_name(&self.target) {
            Some(name) => self.put_file(&name, &|_| {})?,
            None => self.put(self.path(), &self.target)?,
        }
        self.made = None;
        if let Some(parent) = self.target.parent() {
            sync_folder(parent);
        }
        Ok(())
    }

    /// Puts a file and what belongs to it in place, as the head of this module describes.
    fn put_file(&self, name: &str, after_step: &dyn Fn(&str)) -> Result<()> {
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
    fn put(&self, new: &Path, target: &Path) -> Result<()> {
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
                // The old one went away meanwhile.
                Err(Errno::NOENT) if new.exists() => {}
                Err(Errno::INVAL | Errno::NOSYS) => return self.put_plainly(new, target),
                Err(e) => return Err(Error::io("create", target)(e.into())),
            }
        }
        Err(refuse(target, "appears and disappears", "choose a place that no other program uses"))
    }

    /// For file systems without atomic exchange.
    fn put_plainly(&self, new: &Path, target: &Path) -> Result<()> {
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
struct Placing {
    target: String,
    model: u64,
    report: u64,
    data: Option<(String, u64)>,
    /// Files of weights that the replaced file names.
    old_data: Vec<(String, u64)>,
}

impl Placing {
    /// Removes the old files of weights if the new file is in place, and takes back everything else if it is not.
    fn finish(&self, work: &Path) {
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

impl Drop for Staging {
    fn drop(&mut self) {
        remove(&self.work);
        if let Some(parent) = self.work.parent() {
            remove_made(parent, self.made.as_deref());
        }
    }
}

/// Makes a folder with a lock inside, and what it lies in. Others may remove either before it is locked: then under another name.
fn begin(parent: &Path, prefix: &str) -> Result<(PathBuf, Lock)> {
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
fn remove(work: &Path) {
    let parts = fs::read_dir(work).into_iter().flatten().flatten().filter(|part| part.file_name() != LOCK);
    parts.for_each(|part| discard(&part.path()));
    let _ = fs::remove_file(work.join(LOCK));
    let _ = fs::remove_dir(work);
}

/// Removes a file or a folder, if it can be removed.
fn discard(path: &Path) {
    let folder = path.is_dir() && !path.is_symlink();
    let _ = if folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Removes what killed processes have left, and returns notes on what may be such and was not removed.
fn remove_left(parent: &Path, prefix: &str, target: &Path) -> Vec<String> {
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
fn remove_made(parent: &Path, made: Option<&Path>) {
    let Some(made) = made else { return };
    for folder in parent.ancestors().take_while(|p| p.starts_with(made)) {
        let _ = fs::remove_dir(folder);
    }
}

/// Bytes reach the disk before the name does, so that a power cut leaves no empty file under the final name.
fn sync(folder: &Path) -> Result<()> {
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
fn bytes(folder: &Path) -> Result<u64> {
    let mut sum = 0u64;
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        sum += if path.is_dir() { bytes(&path)? } else { files::length(&path).map_err(Error::io("open", &path))? };
    }
    Ok(sum)
}

/// Names reach the disk; where a folder cannot be synced (some network file systems), it is still whole.
fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(folder: &Path) -> PathBuf {
        let input = folder.join("input");
        fs::create_dir(&input).unwrap();
        input
    }

    fn hidden(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.')).count()
    }

    /// A report that lists these files.
    fn listing(files: &[&str]) -> String {
        let outputs: Vec<_> = files.iter().map(|path| serde_json::json!({ "path": path })).collect();
        serde_json::json!({ "tool": { "name": "compress" }, "outputs": outputs }).to_string()
    }

    #[test]
    fn appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/out"));
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        assert!(!out.exists());
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        drop(Staging::new(&out.with_file_name("other"), Replace::Nothing, &input).unwrap());
        assert_eq!(hidden(&folder.path().join("a")), 0);
        drop(Staging::new(&folder.path().join("b/c/out"), Replace::Nothing, &input).unwrap());
        assert!(!folder.path().join("b").exists());
    }

    #[test]
    fn replaces_only_when_told_to() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "old").unwrap();
        assert!(Staging::new(&out, Replace::Nothing, &input).unwrap_err().to_string().contains("exists"));
        fs::write(out.join("report.json"), listing(&["file"])).unwrap();
        let staging = Staging::new(&out, Replace::Output, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        assert_eq!(hidden(folder.path()), 0);
    }

    #[test]
    fn foreign_files_and_inputs_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir_all(out.join("inner")).unwrap();
        fs::write(out.join("inner/thesis.tex"), "years").unwrap();
        let refused = |replace: Replace, inputs: &Inputs| Staging::new(&out, replace, inputs.clone()).unwrap_err().to_string();
        let model = Inputs::from(&input);
        let error = refused(Replace::Output, &model);
        assert!(error.contains("inner/thesis.tex would be lost") && error.contains("no report of compress"), "{error}");
        // A report does not cover what it does not list, nor does the report of another program.
        fs::write(out.join("weights"), "").unwrap();
        fs::write(out.join("report.json"), listing(&["weights"])).unwrap();
        let error = refused(Replace::Output, &model);
        assert!(error.contains(": inner/thesis.tex would be lost"), "{error}");
        fs::remove_dir_all(out.join("inner")).unwrap();
        fs::write(out.join("report.json"), listing(&["weights"]).replace("compress", "pytest")).unwrap();
        assert!(refused(Replace::Output, &model).contains("report.json, weights would be lost"));
        assert!(refused(Replace::Work("state.json"), &model).contains("report.json, weights would be lost"));
        fs::write(out.join("report.json"), listing(&["weights", "samples.csv"])).unwrap();
        // A symbolic link to weights of the input, and samples inside the old output.
        std::os::unix::fs::symlink(out.join("weights"), input.join("model.safetensors")).unwrap();
        let error = refused(Replace::Output, &model);
        assert!(error.contains("out/weights, which this run reads as") && error.contains("input"), "{error}");
        fs::remove_file(input.join("model.safetensors")).unwrap();
        fs::write(out.join("samples.csv"), "").unwrap();
        let data = Inputs { files: vec![out.join("samples.csv")], ..model.clone() };
        assert!(refused(Replace::Output, &data).contains("samples.csv, which this run reads as"));
        // Files that appear while the run works.
        let staging = Staging::new(&out, Replace::Output, model.clone()).unwrap();
        fs::write(staging.path().join("weights"), "new").unwrap();
        fs::write(out.join("notes.txt"), "").unwrap();
        assert!(staging.commit().unwrap_err().to_string().contains("notes.txt would be lost"));
        assert!(out.join("notes.txt").exists() && hidden(folder.path()) == 0);
        fs::remove_file(out.join("notes.txt")).unwrap();
        Staging::new(&out, Replace::Output, model).unwrap().commit().unwrap();
        assert!(!out.join("weights").exists());
    }

    #[test]
    fn a_file_appears_with_what_belongs_to_it_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/small.onnx"));
        let [data, report] = ["small.onnx.data", "small.onnx.report"].map(|name| out.with_file_name(name));
        let write = |staging: &Staging, text: &str, data: bool| {
            let data = staging.data_name().filter(|_| data);
            let listed: Vec<&str> = data.into_iter().chain(["small.onnx"]).collect();
            fs::write(staging.path().join("report.json"), listing(&listed)).unwrap();
            listed.into_iter().for_each(|name| fs::write(staging.path().join(name), text).unwrap());
        };
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        write(&staging, "first", true);
        assert!(!out.exists() && !report.exists());
        staging.commit().unwrap();
        assert_eq!([read(&out), read(&data)], ["first"; 2]);
        assert!(!report.join("small.onnx").exists() && Staging::new(&out, Replace::Nothing, &input).is_err());
        let staging = Staging::new(&out, Replace::Output, &input).unwrap();
        write(&staging, "second", false);
        staging.commit().unwrap();
        assert!(read(&out) == "second" && report.join("report.json").exists());
        assert!(!data.exists(), "weights of the file that was replaced");
        fs::remove_file(&out).unwrap();
        fs::remove_dir_all(&report).unwrap();
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        write(&staging, "third", true);
        fs::write(&out, "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!((read(&out), data.exists(), report.exists()), ("theirs".into(), false, false));
        assert_eq!(hidden(&folder.path().join("a")), 0);
        // Only ONNX keeps weights beside itself.
        let [gguf, unrelated] = ["small.gguf", "small.gguf.data"].map(|name| out.with_file_name(name));
        fs::write(&unrelated, "theirs").unwrap();
        for replace in [Replace::Nothing, Replace::Output] {
            let staging = Staging::new(&gguf, replace, &input).unwrap();
            fs::write(staging.path().join("small.gguf"), "mine").unwrap();
            fs::write(staging.path().join("report.json"), listing(&["small.gguf"])).unwrap();
            staging.commit().unwrap();
            assert_eq!([read(&gguf), read(&unrelated)], ["mine", "theirs"]);
        }
        // Files that no report lists are not replaced: a model file, and weights that may belong to the input.
        let [other, clash] = ["other.onnx", "other.onnx.data"].map(|name| out.with_file_name(name));
        fs::write(&clash, "theirs").unwrap();
        assert!(Staging::new(&other, Replace::Nothing, &clash).unwrap_err().to_string().contains("other.onnx.data: exists"));
        assert_eq!(Staging::new(&other, Replace::Output, &clash).unwrap().data_name(), Some("other.onnx.2.data"));
        fs::write(&other, "theirs").unwrap();
        assert!(Staging::new(&other, Replace::Output, &clash).unwrap_err().to_string().contains("other.onnx would be lost"));
        assert_eq!([read(&other), read(&clash)], ["theirs"; 2]);
    }

    /// Whenever the process is killed, the model file is paired with the weights that it names, and the next run cleans up.
    #[test]
    fn a_kill_between_two_steps_leaves_one_whole_pair() {
        for (replaces, stop) in [(true, "nothing"), (true, "data"), (true, "report"), (true, "model"), (false, "data"), (false, "report"), (false, "model")] {
            let folder = tempfile::tempdir().unwrap();
            let (input, out) = (input(folder.path()), folder.path().join("small.onnx"));
            // A model file is its text and the name of its weights.
            let write = |staging: &Staging, text: &str| {
                let data = staging.data_name().unwrap();
                fs::write(staging.path().join(data), text).unwrap();
                fs::write(staging.path().join("small.onnx"), format!("{text} {data}")).unwrap();
                fs::write(staging.path().join("report.json"), listing(&["small.onnx", data])).unwrap();
            };
            let begin = |text: &str| {
                let staging = Staging::new(&out, Replace::Output, &input).unwrap();
                write(&staging, text);
                staging
            };
            if replaces {
                begin("old").commit().unwrap();
            }
            let mut killed = std::mem::ManuallyDrop::new(begin("new"));
            // The system frees the lock of a process that is killed.
            let Attempt::Taken(other) = Lock::take(&folder.path().join("other lock")).unwrap() else { panic!("a new file is free") };
            killed._lock = other;
            let put = || {
                killed.put_file("small.onnx", &|step| {
                    if step == stop {
                        std::panic::resume_unwind(Box::new("killed"))
                    }
                })
            };
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(put)).is_err(), "{stop}");
            let expected = if stop == "model" { "new" } else { "old" };
            let check = |listed: bool| {
                let Ok(model) = fs::read_to_string(&out) else { return assert!(!replaces && expected == "old", "{stop}") };
                let (text, data) = model.split_once(' ').unwrap();
                assert_eq!((text, fs::read_to_string(out.with_file_name(data)).unwrap().as_str()), (expected, expected), "{stop}");
                assert!(!listed || Listing::open(&report_folder(&out)).unwrap().data_files(&out) == [out.with_file_name(data)], "{stop}");
            };
            check(false);
            // The next run, which fails.
            drop(begin("newer"));
            check(true);
            let data = fs::read_dir(folder.path()).unwrap().filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "data"));
            assert_eq!(data.count(), usize::from(out.exists()), "{stop}");
            assert!(hidden(folder.path()) == 0 && report_folder(&out).exists() == out.exists(), "{stop}");
            begin("newest").commit().unwrap();
            assert!(fs::read_to_string(&out).unwrap().starts_with("newest "));
        }
    }

    #[test]
    fn a_folder_that_appears_meanwhile_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "theirs");
    }

    #[test]
    fn what_a_killed_process_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let work = |name: &str| folder.path().join(format!(".out.compress-{name}"));
        let [dead, alive, beginning, other] = ["0123456789abcdef", "1123456789abcdef", "2123456789abcdef", "notes"].map(work);
        [&dead, &alive, &beginning, &other].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
        for path in [&dead, &alive, &other] {
            fs::create_dir(path.join(NEW)).unwrap();
            fs::write(path.join(LOCK), "").unwrap();
        }
        let held = File::open(alive.join(LOCK)).unwrap();
        held.lock().unwrap();
        let _staging = Staging::new(&folder.path().join("out"), Replace::Nothing, &input).unwrap();
        assert!(!dead.exists() && !beginning.exists() && alive.join(NEW).exists() && other.exists());
    }

    #[test]
    fn what_was_to_be_replaced_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let (work, out) = (folder.path().join(".out.compress-0123456789abcdef"), folder.path().join("out"));
        for (part, text) in [(OLD, "old"), (NEW, "new")] {
            fs::create_dir_all(work.join(part)).unwrap();
            fs::write(work.join(part).join("file"), text).unwrap();
            fs::write(work.join(part).join("report.json"), listing(&["file"])).unwrap();
        }
        fs::write(work.join(LOCK), "").unwrap();
        drop(Staging::new(&out, Replace::Output, &input).unwrap());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "old");
        assert_eq!(hidden(folder.path()), 0);
    }

    #[test]
    fn without_exchange_in_one_step_it_is_replaced_in_two() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        for text in ["first", "second"] {
            let staging = Staging::new(&out, Replace::Output, &input).unwrap();
            fs::write(staging.path().join("file"), text).unwrap();
            fs::write(staging.path().join("report.json"), listing(&["file"])).unwrap();
            staging.put_plainly(staging.path(), &staging.target).unwrap();
            drop(staging);
            assert_eq!(fs::read_to_string(out.join("file")).unwrap(), text);
        }
        let mut staging = Staging::new(&out, Replace::Output, &input).unwrap();
        staging.replace = Replace::Nothing;
        assert!(staging.put_plainly(staging.path(), &staging.target).unwrap_err().to_string().contains("exists"));
        drop(staging);
        assert_eq!(hidden(folder.path()), 0);
    }
}
