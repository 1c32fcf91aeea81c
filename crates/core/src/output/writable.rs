//! Checks before long work that its results can be written when it ends.

use std::fs::{self, File};
use std::path::Path;

use super::staging::{Staging, check_output};
use super::target::{Inputs, Replace, absolute};
use crate::error::{Error, Result};
use crate::files;

/// Checks that an output can be written to `target`: as [`check_output`], and creates a staging folder next
/// to it, which is removed again. Remote outputs are not created.
pub fn check_writable(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    if files::is_remote(target) { check_output(target, replace, inputs) } else { Staging::new(target, replace, inputs.clone()).map(drop) }
}

/// Free bytes of the disk of a local output, which need not exist; `None` if they are not known.
pub fn free_space(target: &Path) -> Option<u64> {
    let target = absolute(target).ok().filter(|target| !files::is_remote(target))?;
    let space = rustix::fs::statvfs(target.ancestors().find(|folder| folder.is_dir())?).ok()?;
    Some(space.f_bavail.saturating_mul(space.f_frsize))
}

/// Checks that a file can be created or replaced, without changing an existing one.
pub fn check_file_writable(path: &Path) -> Result<()> {
    if path.is_file() {
        return File::options().append(true).open(path).map(drop).map_err(Error::io("write", path));
    }
    // Links to missing files, pipes and devices are not opened.
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    File::options().write(true).create_new(true).open(path).and_then(|_| fs::remove_file(path)).map_err(Error::io("create", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/proc` is not writable for any user.
    #[test]
    fn locations_are_tried_without_a_trace() {
        let folder = tempfile::tempdir().unwrap();
        let (input, folder) = (Inputs::from(&folder.path().join("in")), folder.path());
        fs::create_dir(&input.model).unwrap();
        check_writable(&folder.join("new/out"), Replace::Never, &input).unwrap();
        check_file_writable(&folder.join("front.json")).unwrap();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
        fs::write(folder.join("front.json"), "old").unwrap();
        check_file_writable(&folder.join("front.json")).unwrap();
        assert_eq!(fs::read_to_string(folder.join("front.json")).unwrap(), "old");
        for error in [check_writable(Path::new("/proc/out"), Replace::Never, &input), check_file_writable(Path::new("/proc/front.json"))] {
            let error = error.unwrap_err();
            assert!(error.to_string().starts_with("cannot create /proc") && error.hint().is_some(), "{error}");
        }
        assert!(check_writable(&input.model, Replace::Never, &input).unwrap_err().to_string().contains("is the input"));
    }
}
