//! Checkpoints that an interrupted run can be resumed from: a folder `OUT.unfinished` beside the output, used by one run at a time.

use std::fs;
use std::path::{Path, PathBuf};

use super::lock::{Attempt, Lock};
use super::place::{refuse, require_here};
use crate::error::{Error, Result};

/// The folder, owned until this is dropped. Its files stay for `--resume`; an empty folder is removed.
#[derive(Debug)]
pub struct Workplace {
    path: PathBuf,
    _lock: Lock,
}

/// Marks a folder as made by this tool, and is locked by its owner.
const MARKER: &str = "compress.lock";

impl Workplace {
    /// The folder of an output.
    pub fn beside(output: &Path) -> PathBuf {
        let mut name = output.file_name().unwrap_or_default().to_owned();
        name.push(".unfinished");
        output.with_file_name(name)
    }

    /// Opens the folder of an output: with the files of an interrupted run if `resume`, else empty. `force` removes such files.
    ///
    /// # Errors
    /// Another run has it, it holds files and neither is asked for, or nothing in it says that compress made it.
    pub fn open(output: &Path, resume: bool, force: bool) -> Result<Workplace> {
        require_here(output, "unfinished work is kept beside the output")?;
        let path = Workplace::beside(output);
        let marker = path.join(MARKER);
        if !marker.exists() && fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(refuse(
                &path,
                "is where a training keeps its checkpoints, and holds other files",
                "move it away, or choose another output folder with -o",
            ));
        }
        fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        let Attempt::Taken(lock) = Lock::take(&marker)? else {
            return Err(refuse(&path, "is used by another run", "wait until that has ended, or choose another output folder with -o"));
        };
        lock.sign(&marker);
        let workplace = Workplace { path, _lock: lock };
        let left = workplace.left()?;
        if !left.is_empty() && !resume && !force {
            return Err(refuse(&workplace.path, "was left by an interrupted run", "continue it with --resume, or start again with --force"));
        }
        if !resume {
            left.iter().try_for_each(|path| remove(path))?;
        }
        Ok(workplace)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it with all that is in it.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn remove(self) -> Result<()> {
        self.left()?.iter().try_for_each(|path| remove(path))
    }

    fn left(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.path).map_err(Error::io("list", &self.path))?;
        let paths: std::io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
        Ok(paths.map_err(Error::io("list", &self.path))?.into_iter().filter(|path| !path.ends_with(MARKER)).collect())
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if self.left().is_ok_and(|left| left.is_empty()) {
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
    fn one_run_has_it_and_what_it_leaves_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("a/out");
        let path = Workplace::beside(&out);
        let workplace = Workplace::open(&out, false, false).unwrap();
        for (resume, force) in [(false, false), (true, false), (false, true)] {
            let error = Workplace::open(&out, resume, force).unwrap_err().to_string();
            assert!(error.contains("out.unfinished") && error.contains("another run"), "{error}");
        }
        drop(workplace);
        assert!(!path.exists(), "nothing is left of nothing");
        let workplace = Workplace::open(&out, false, false).unwrap();
        fs::create_dir(path.join("1-distill")).unwrap();
        fs::write(path.join("1-distill/checkpoint"), "").unwrap();
        drop(workplace);
        assert!(Workplace::open(&out, false, false).unwrap_err().hint().unwrap().contains("--resume"));
        drop(Workplace::open(&out, true, false).unwrap());
        assert!(path.join("1-distill/checkpoint").exists());
        let workplace = Workplace::open(&out, false, true).unwrap();
        assert!(!path.join("1-distill").exists());
        fs::write(path.join("file"), "").unwrap();
        workplace.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_of_somebody_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let path = Workplace::beside(&out);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("thesis.tex"), "years").unwrap();
        for (resume, force) in [(false, false), (true, false), (false, true)] {
            let error = Workplace::open(&out, resume, force).unwrap_err().to_string();
            assert!(error.contains("out.unfinished") && error.contains("other files"), "{error}");
        }
        assert_eq!(fs::read_to_string(path.join("thesis.tex")).unwrap(), "years");
    }
}
