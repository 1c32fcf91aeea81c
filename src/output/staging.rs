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
//! An output that is a file is made in a folder too. The file appears last, in one step, behind the file with its weights, if it has one,
//! and the folder of its report; if one of them cannot be put where it belongs, those before it are taken back.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::lock::{Attempt, Lock};
use super::place::{DATA, absolute, check_place, data_file, exists, file_name, refuse, report_folder};
use crate::error::{Error, Result, tellable};
use crate::files::{self, Destination};

/// An unfinished output folder; dropped without [`commit`](Staging::commit), it is removed.
#[derive(Debug)]
pub struct Staging {
    work: PathBuf,
    destination: Destination,
    target: PathBuf,
    force: bool,
    /// The outermost folder that was made to hold the output.
    made: Option<PathBuf>,
    _lock: Lock,
    notes: Vec<String>,
}

const LOCK: &str = "lock";
const NEW: &str = "new";
const OLD: &str = "old";

/// Others can take a folder away between two steps of this process, but not often in a row.
const ATTEMPTS: usize = 100;

impl Staging {
    /// Starts an output folder beside its final place.
    ///
    /// # Errors
    /// The final place exists (without `force`) or cannot be written beside, or is inside `input` or around it.
    pub fn new(target: &Path, force: bool, input: &Path) -> Result<Staging> {
        let target = absolute(target)?;
        check_place(&target, force, input)?;
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
                let mut staging = Staging { work, destination, target, force, made, _lock: lock, notes };
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
            Some(name) => self.put_file(&name)?,
            None => drop(self.put(self.path(), &self.target)?),
        }
        self.made = None;
        if let Some(parent) = self.target.parent() {
            sync_folder(parent);
        }
        Ok(())
    }

    /// Puts a file where it belongs, and what lies beside it before.
    fn put_file(&self, name: &str) -> Result<()> {
        let (model, data) = (self.work.join("model"), self.work.join(DATA));
        let made = self.path().to_owned();
        fs::rename(made.join(name), &model).map_err(Error::io("move", &model))?;
        let mut steps = Vec::new();
        if let Some(data_target) = data_file(&self.target) {
            let inner = made.join(data_target.file_name().unwrap_or_default());
            if inner.exists() {
                fs::rename(&inner, &data).map_err(Error::io("move", &data))?;
                steps.push((data, data_target));
            } else if self.force && data_target.symlink_metadata().is_ok() {
                // Those of the file that is replaced.
                let _ = fs::rename(&data_target, self.work.join("replaced"));
            }
        }
        steps.extend([(made, report_folder(&self.target)), (model, self.target.clone())]);
        let mut done: Vec<(&PathBuf, &PathBuf, bool)> = Vec::new();
        for (new, target) in &steps {
            match self.put(new, target) {
                Ok(exchanged) => done.push((new, target, exchanged)),
                Err(error) => {
                    for (new, target, exchanged) in done.into_iter().rev() {
                        let _ = if exchanged {
                            renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE)
                        } else {
                            renameat_with(CWD, target, CWD, new, RenameFlags::NOREPLACE)
                        };
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Moves something to its place; whether what was there before lies in its own place now.
    fn put(&self, new: &Path, target: &Path) -> Result<bool> {
        for _ in 0..ATTEMPTS {
            let (moved, exchanged) = match renameat_with(CWD, new, CWD, target, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) if !self.force => return Err(exists(target)),
                // The old one changes places with the new one, and goes when `self` is dropped.
                Err(Errno::EXIST) => (renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE), true),
                moved => (moved, false),
            };
            match moved {
                Ok(()) => return Ok(exchanged),
                // The old one went away meanwhile.
                Err(Errno::NOENT) if new.exists() => {}
                Err(Errno::INVAL | Errno::NOSYS) => return self.put_plainly(new, target).map(|()| false),
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
        if !self.force {
            return Err(exists(target));
        }
        let old = if *target == self.target { self.work.join(OLD) } else { self.work.join("old beside") };
        fs::rename(target, &old).map_err(Error::io("replace", target))?;
        fs::rename(new, target).map_err(|e| {
            let _ = fs::rename(&old, target);
            Error::io("replace", target)(e)
        })?;
        // The next one that is replaced takes its place.
        if *target != self.target {
            discard(&old);
        }
        Ok(())
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

    #[test]
    fn appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/out"));
        let staging = Staging::new(&out, false, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        assert!(!out.exists());
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        drop(Staging::new(&out.with_file_name("other"), false, &input).unwrap());
        assert_eq!(hidden(&folder.path().join("a")), 0);
        drop(Staging::new(&folder.path().join("b/c/out"), false, &input).unwrap());
        assert!(!folder.path().join("b").exists());
    }

    #[test]
    fn replaces_only_when_told_to() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "old").unwrap();
        assert!(Staging::new(&out, false, &input).unwrap_err().to_string().contains("exists"));
        let staging = Staging::new(&out, true, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        assert_eq!(hidden(folder.path()), 0);
    }

    #[test]
    fn a_file_appears_with_what_belongs_to_it_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/small.onnx"));
        let [data, report] = ["small.onnx.data", "small.onnx.report"].map(|name| out.with_file_name(name));
        let write = |staging: &Staging, text: &str, data: bool| {
            fs::write(staging.path().join("report.json"), text).unwrap();
            fs::write(staging.path().join("small.onnx"), text).unwrap();
            if data {
                fs::write(staging.path().join("small.onnx.data"), text).unwrap();
            }
        };
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let staging = Staging::new(&out, false, &input).unwrap();
        write(&staging, "first", true);
        assert!(!out.exists() && !report.exists());
        staging.commit().unwrap();
        assert_eq!([read(&out), read(&data), read(&report.join("report.json"))], ["first"; 3]);
        assert!(!report.join("small.onnx").exists() && Staging::new(&out, false, &input).is_err());
        let staging = Staging::new(&out, true, &input).unwrap();
        write(&staging, "second", false);
        staging.commit().unwrap();
        assert_eq!([read(&out), read(&report.join("report.json"))], ["second"; 2]);
        assert!(!data.exists(), "weights of the file that was replaced");
        fs::remove_file(&out).unwrap();
        fs::remove_dir_all(&report).unwrap();
        let staging = Staging::new(&out, false, &input).unwrap();
        write(&staging, "third", true);
        fs::write(&out, "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!((read(&out), data.exists(), report.exists()), ("theirs".into(), false, false));
        assert_eq!(hidden(&folder.path().join("a")), 0);
        // Only ONNX keeps weights beside itself.
        let [gguf, unrelated] = ["small.gguf", "small.gguf.data"].map(|name| out.with_file_name(name));
        fs::write(&unrelated, "theirs").unwrap();
        for force in [false, true] {
            let staging = Staging::new(&gguf, force, &input).unwrap();
            fs::write(staging.path().join("small.gguf"), "mine").unwrap();
            staging.commit().unwrap();
            assert_eq!([read(&gguf), read(&unrelated)], ["mine", "theirs"]);
        }
        let clash = out.with_file_name("other.onnx.data");
        fs::write(&clash, "").unwrap();
        assert!(Staging::new(&out.with_file_name("other.onnx"), true, &clash).unwrap_err().to_string().contains("part of the input"));
    }

    #[test]
    fn a_folder_that_appears_meanwhile_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        let staging = Staging::new(&out, false, &input).unwrap();
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
        let _staging = Staging::new(&folder.path().join("out"), false, &input).unwrap();
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
        }
        fs::write(work.join(LOCK), "").unwrap();
        drop(Staging::new(&out, true, &input).unwrap());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "old");
        assert_eq!(hidden(folder.path()), 0);
    }

    #[test]
    fn without_exchange_in_one_step_it_is_replaced_in_two() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        for text in ["first", "second"] {
            let staging = Staging::new(&out, true, &input).unwrap();
            fs::write(staging.path().join("file"), text).unwrap();
            staging.put_plainly(staging.path(), &staging.target).unwrap();
            drop(staging);
            assert_eq!(fs::read_to_string(out.join("file")).unwrap(), text);
        }
        let mut staging = Staging::new(&out, true, &input).unwrap();
        staging.force = false;
        assert!(staging.put_plainly(staging.path(), &staging.target).unwrap_err().to_string().contains("exists"));
        drop(staging);
        assert_eq!(hidden(folder.path()), 0);
    }
}
