//! Resume folder `OUT.unfinished` next to the output: checkpoints of an interrupted run, used by one run
//! at a time.

use std::fs;
use std::path::{Path, PathBuf};

use super::lock::{Attempt, Lock};
use super::target::{refuse, require_local};
use crate::error::{Error, Result};

/// An owned resume folder. On drop, its files stay for `--resume`; an empty folder is removed.
#[derive(Debug)]
pub struct ResumeFolder {
    path: PathBuf,
    _lock: Lock,
}

/// Marks a folder as created by this tool, and is locked by its owner.
const MARKER: &str = "compress.lock";
/// File in the folder of a pass that describes the run.
pub const IDENTITY: &str = "identity";
/// Extensions of the logs of a training.
const LOGS: [&str; 2] = ["csv", "tfevents"];

const USED: &str = "is used by another run";
const USED_HINT: &str = "wait until that run has ended, or choose another output folder";

impl ResumeFolder {
    /// The path of an output's resume folder.
    pub fn path_for(output: &Path) -> PathBuf {
        let mut name = output.file_name().unwrap_or_default().to_owned();
        name.push(".unfinished");
        output.with_file_name(name)
    }

    /// Name of the folder in which a pass, given by its index and its name, stores its work.
    pub fn name_of_pass(index: usize, name: &str) -> String {
        format!("{}-{name}", index.saturating_add(1))
    }

    /// Opens the resume folder of an output: with the files of an interrupted run if `resume`, otherwise
    /// empty. `force` permits removing such files. Fails if another run uses the folder, it contains files
    /// and neither `resume` nor `force` is set, or it was not created by this tool.
    pub fn open(output: &Path, resume: bool, force: bool) -> Result<ResumeFolder> {
        require_local(output, "unfinished work is stored next to the output")?;
        let path = ResumeFolder::path_for(output);
        let marker = path.join(MARKER);
        if !marker.exists() && fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(refuse(&path, "is the checkpoint folder of a training run, and contains other files", "move it, or choose another output folder"));
        }
        fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        let Attempt::Taken(lock) = Lock::take(&marker)? else {
            return Err(refuse(&path, USED, USED_HINT));
        };
        lock.sign(&marker);
        let resume_folder = ResumeFolder { path, _lock: lock };
        let left = resume_folder.leftovers()?;
        if !left.is_empty() && !resume && !force {
            return Err(refuse(&resume_folder.path, "was left by an interrupted run", "set `resume` to continue it, or `force` to start again"));
        }
        if !resume {
            left.iter().try_for_each(|path| remove(path))?;
        }
        Ok(resume_folder)
    }

    /// Fails if another run uses the resume folder of an output: its work would be lost if this run wrote
    /// the output first.
    pub fn require_unused(output: &Path) -> Result<()> {
        let path = ResumeFolder::path_for(output);
        match Lock::take_over(&path.join(MARKER)) {
            Attempt::Busy => Err(refuse(&path, USED, USED_HINT)),
            _ => Ok(()),
        }
    }

    /// Fails if the folder contains work that this run will not continue, because `is_own` does not accept
    /// its name: the run would remove it.
    pub fn require_own_work(&self, is_own: impl Fn(&str) -> bool) -> Result<()> {
        let names = self.leftovers()?.into_iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let Some(name) = names.into_iter().find(|name| !is_own(name)) else { return Ok(()) };
        let reason = format!("contains `{name}` of a run with other passes");
        Err(refuse(&self.path, &reason, "resume with the passes of that run, or set `force` instead of `resume` to start again"))
    }

    /// Removes the folders of passes that have saved no work, and returns whether others remain.
    pub fn has_work(&self) -> bool {
        let Ok(left) = self.leftovers() else { return true };
        // A later run cannot continue from logs, the identity of the run, and empty folders.
        let is_empty_folder = |path: &Path| fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        let is_record = |path: &Path| {
            path.ends_with(IDENTITY) || is_empty_folder(path) || LOGS.iter().any(|extension| path.extension().is_some_and(|found| found == *extension))
        };
        let is_empty = |path: &&PathBuf| fs::read_dir(path).is_ok_and(|mut entries| entries.all(|entry| entry.is_ok_and(|entry| is_record(&entry.path()))));
        let removed = left.iter().filter(is_empty).filter(|path| remove(path).is_ok()).count();
        removed < left.len()
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the folder with its contents.
    pub fn remove(self) -> Result<()> {
        self.leftovers()?.iter().try_for_each(|path| remove(path))
    }

    fn leftovers(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.path).map_err(Error::io("list", &self.path))?;
        let paths: std::io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
        Ok(paths.map_err(Error::io("list", &self.path))?.into_iter().filter(|path| !path.ends_with(MARKER)).collect())
    }
}

impl Drop for ResumeFolder {
    fn drop(&mut self) {
        if !self.has_work() {
            let _ = fs::remove_file(self.path.join(MARKER));
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_symlink() || !path.is_dir() { fs::remove_file(path) } else { fs::remove_dir_all(path) };
    removed.map_err(Error::io("remove", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_owns_it_and_leftovers_require_resume_or_force() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("a/out");
        let path = ResumeFolder::path_for(&out);
        let resume_folder = ResumeFolder::open(&out, false, false).unwrap();
        for (resume, force) in [(false, false), (true, false), (false, true)] {
            let error = ResumeFolder::open(&out, resume, force).unwrap_err().to_string();
            assert!(error.contains("out.unfinished") && error.contains("another run"), "{error}");
        }
        drop(resume_folder);
        assert!(!path.exists(), "an empty folder is removed");
        let resume_folder = ResumeFolder::open(&out, false, false).unwrap();
        fs::create_dir(path.join("1-distill")).unwrap();
        fs::write(path.join("1-distill/checkpoint"), "").unwrap();
        drop(resume_folder);
        assert!(ResumeFolder::open(&out, false, false).unwrap_err().hint().unwrap().contains("`resume`"));
        let resume_folder = ResumeFolder::open(&out, true, false).unwrap();
        assert!(resume_folder.has_work() && ResumeFolder::require_unused(&out).unwrap_err().to_string().contains("another run"));
        drop(resume_folder);
        ResumeFolder::require_unused(&out).unwrap();
        let resume_folder = ResumeFolder::open(&out, true, false).unwrap();
        resume_folder.require_own_work(|name| name == "1-distill").unwrap();
        assert!(resume_folder.require_own_work(|name| name == "2-distill").unwrap_err().to_string().contains("`1-distill` of a run with other passes"));
        drop(resume_folder);
        assert!(path.join("1-distill/checkpoint").exists());
        let resume_folder = ResumeFolder::open(&out, false, true).unwrap();
        assert!(!path.join("1-distill").exists());
        fs::write(path.join("file"), "").unwrap();
        resume_folder.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_run_that_fails_before_its_first_checkpoint_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        for (file, remains) in [(IDENTITY, false), ("training.csv", false), ("block-0", true)] {
            let resume_folder = ResumeFolder::open(&out, false, true).unwrap();
            fs::create_dir(resume_folder.path().join("1-quantize")).unwrap();
            fs::write(resume_folder.path().join("1-quantize").join(file), "").unwrap();
            assert_eq!(resume_folder.has_work(), remains, "{file}");
            drop(resume_folder);
            assert_eq!(ResumeFolder::path_for(&out).exists(), remains, "{file}");
        }
    }

    #[test]
    fn a_foreign_folder_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let path = ResumeFolder::path_for(&out);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("thesis.tex"), "years").unwrap();
        for (resume, force) in [(false, false), (true, false), (false, true)] {
            let error = ResumeFolder::open(&out, resume, force).unwrap_err().to_string();
            assert!(error.contains("out.unfinished") && error.contains("other files"), "{error}");
        }
        assert_eq!(fs::read_to_string(path.join("thesis.tex")).unwrap(), "years");
    }
}
