//! An output folder that appears whole or not at all.
//!
//! Work happens in a hidden folder beside the final place, which holds a lock for as long as its process
//! lives: what a killed process leaves behind is recognised by its free lock and removed by the next run.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{Pid, test_kill_process};

use crate::error::{Error, Result};

/// An unfinished output folder; dropped without [`commit`](Staging::commit), it is removed.
#[derive(Debug)]
pub struct Staging {
    work: PathBuf,
    target: PathBuf,
    force: bool,
    /// The outermost folder that was made to hold the output.
    made: Option<PathBuf>,
    lock: Option<File>,
}

const LOCK: &str = ".lock";

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
        let made = parent.ancestors().take_while(|p| !p.exists()).last().map(Path::to_owned);
        let prefix = format!(".{}.compress-", name.to_string_lossy());
        let work = parent.join(format!("{prefix}{}", std::process::id()));
        let create = || {
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
            remove_stale(parent, &prefix);
            fs::create_dir(&work).map_err(Error::io("create", &work))
        };
        if let Err(error) = create() {
            remove_made(parent, made.as_deref());
            return Err(error);
        }
        let mut staging = Staging { work, target, force, made, lock: None };
        let path = staging.work.join(LOCK);
        let lock = File::create(&path).map_err(Error::io("create", &path))?;
        lock.lock().map_err(Error::io("lock", &path))?;
        staging.lock = Some(lock);
        Ok(staging)
    }

    /// Where to write meanwhile.
    pub fn path(&self) -> &Path {
        &self.work
    }

    /// Where the folder will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Moves the folder to its final place, in one step.
    ///
    /// # Errors
    /// The place was taken meanwhile, or the move fails; then nothing has changed.
    pub fn commit(mut self) -> Result<()> {
        let lock = self.work.join(LOCK);
        fs::remove_file(&lock).map_err(Error::io("remove", &lock))?;
        sync_files(&self.work)?;
        let moved = renameat_with(CWD, &self.work, CWD, &self.target, RenameFlags::NOREPLACE);
        match moved {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) if self.force => {
                // The old folder changes places with the new one, and goes when `self` is dropped.
                renameat_with(CWD, &self.work, CWD, &self.target, RenameFlags::EXCHANGE).map_err(|e| Error::io("replace", &self.target)(e.into()))?;
            }
            Err(rustix::io::Errno::EXIST) => return Err(exists(&self.target)),
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => self.commit_plainly()?,
            Err(e) => return Err(Error::io("create", &self.target)(e.into())),
        }
        self.made = None;
        if let Some(parent) = self.target.parent() {
            // A folder that cannot be synced (some network file systems) is still whole.
            let _ = File::open(parent).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }

    /// For file systems without atomic exchange.
    fn commit_plainly(&self) -> Result<()> {
        if !self.target.exists() {
            return fs::rename(&self.work, &self.target).map_err(Error::io("create", &self.target));
        }
        if !self.force {
            return Err(exists(&self.target));
        }
        let aside = self.work.with_extension("old");
        fs::rename(&self.target, &aside).map_err(Error::io("replace", &self.target))?;
        if let Err(e) = fs::rename(&self.work, &self.target) {
            let _ = fs::rename(&aside, &self.target);
            return Err(Error::io("replace", &self.target)(e));
        }
        fs::remove_dir_all(&aside).map_err(Error::io("remove", &aside))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.work);
        if let Some(parent) = self.work.parent() {
            remove_made(parent, self.made.as_deref());
        }
    }
}

/// Removes folders that were made for nothing, from the inside out, as long as they are empty.
fn remove_made(parent: &Path, made: Option<&Path>) {
    let Some(made) = made else { return };
    for folder in parent.ancestors().take_while(|p| p.starts_with(made)) {
        let _ = fs::remove_dir(folder);
    }
}

/// Checks an output place without touching it.
///
/// # Errors
/// It exists (without `force`), is not a folder, or overlaps the input.
pub fn check_place(target: &Path, force: bool, input: &Path) -> Result<()> {
    let target = absolute(target)?;
    let input = fs::canonicalize(input).map_err(Error::io("open", input))?;
    let nearest = target.ancestors().find_map(|p| fs::canonicalize(p).ok().map(|real| (p, real)));
    if let Some((parent, real)) = &nearest
        && *parent != target
        && !real.is_dir()
    {
        return Err(refuse(&target, &format!("cannot be made inside {}, which is not a folder", parent.display()), "choose another place"));
    }
    let real = nearest.map_or_else(|| target.clone(), |(p, real)| real.join(target.strip_prefix(p).unwrap_or(Path::new(""))));
    if real == input {
        return Err(refuse(&target, "is the input", "choose another folder: the input is never changed"));
    }
    if input.is_dir() && real.starts_with(&input) {
        return Err(refuse(&target, "lies inside the input folder", "choose a folder beside it"));
    }
    if input.starts_with(&real) {
        return Err(refuse(&target, "contains the input", "choose another folder"));
    }
    match fs::symlink_metadata(&target) {
        Ok(m) if !m.is_dir() => Err(refuse(&target, "exists and is not a folder", "choose another name")),
        Ok(_) if !force => Err(exists(&target)),
        _ => Ok(()),
    }
}

/// Bytes reach the disk before the name does, so that a power cut leaves no empty file under the final name.
fn sync_files(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        if path.is_dir() {
            sync_files(&path)?;
        } else {
            File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("sync", &path))?;
        }
    }
    Ok(())
}

fn absolute(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
    // `..` is resolved by hand: the folder need not exist yet.
    Ok(path.components().fold(PathBuf::new(), |mut clean, part| {
        match part {
            std::path::Component::ParentDir => drop(clean.pop()),
            part => clean.push(part),
        }
        clean
    }))
}

fn refuse(path: &Path, reason: &str, hint: &str) -> Error {
    Error::Output { path: path.to_owned(), reason: reason.to_owned(), hint: hint.to_owned() }
}

fn exists(path: &Path) -> Error {
    refuse(path, "exists", "add --force to replace it, or choose another folder with -o")
}

fn remove_stale(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let Some(pid) = name.strip_prefix(prefix).filter(|pid| pid.bytes().all(|b| b.is_ascii_digit())).and_then(|pid| pid.parse().ok()) else { continue };
        // A lock that is still held belongs to a running process; without one, it was killed at the very
        // beginning, or at the end while it removed what it had replaced.
        let free = match File::open(path.join(LOCK)) {
            Ok(lock) => !matches!(lock.try_lock(), Err(TryLockError::WouldBlock)),
            Err(e) => e.kind() == std::io::ErrorKind::NotFound && is_dead(pid),
        };
        if free {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn is_dead(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
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
        assert!(!out.join(LOCK).exists());
        let staging = Staging::new(&out.with_file_name("other"), false, &input).unwrap();
        drop(staging);
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
    fn refuses_places_that_overlap_the_input_or_cannot_be() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        fs::write(folder.path().join("file"), "").unwrap();
        for place in [input.join("out"), input.clone(), folder.path().to_owned(), input.join("../input/x"), folder.path().join("file/out")] {
            assert!(check_place(&place, true, &input).is_err(), "{}", place.display());
        }
        assert!(check_place(&folder.path().join("input2"), false, &input).is_ok());
    }

    #[test]
    fn what_a_killed_process_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let (dead, alive, other) = (folder.path().join(".out.compress-1"), folder.path().join(".out.compress-2"), folder.path().join(".out.compress-notes"));
        for path in [&dead, &alive, &other] {
            fs::create_dir(path).unwrap();
            fs::write(path.join(LOCK), "").unwrap();
        }
        let held = File::open(alive.join(LOCK)).unwrap();
        held.lock().unwrap();
        let _staging = Staging::new(&folder.path().join("out"), false, &input).unwrap();
        assert!(!dead.exists() && alive.exists() && other.exists());
    }

    #[test]
    fn what_was_left_without_a_lock_goes_with_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let [ended, running] = [child.id(), 1].map(|pid| folder.path().join(format!(".out.compress-{pid}")));
        for path in [&ended, &running] {
            fs::create_dir(path).unwrap();
        }
        let _staging = Staging::new(&folder.path().join("out"), false, &input).unwrap();
        assert!(!ended.exists() && running.exists());
    }
}
