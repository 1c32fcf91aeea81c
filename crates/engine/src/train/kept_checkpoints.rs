//! Earlier checkpoints of a training, next to the last one.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Path of the checkpoint of a step.
fn path(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("checkpoint-{step}.safetensors"))
}

/// The steps of kept checkpoints, ascending.
pub(super) fn steps(folder: &Path) -> Vec<u64> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let step = |name: String| name.strip_prefix("checkpoint-")?.strip_suffix(".safetensors")?.parse().ok();
    let mut steps: Vec<u64> = names.filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// Keeps the last checkpoint, a file of this step that the next one replaces, and removes the oldest ones, so
/// that there are `count`.
pub(super) fn retain(folder: &Path, last: &Path, step: u64, count: usize) -> Result<()> {
    // Files with such names are then copies that the user has made.
    if count <= 1 {
        return Ok(());
    }
    let kept = path(folder, step);
    if kept.exists() {
        fs::remove_file(&kept).map_err(Error::io("replace", &kept))?;
    }
    // The file is never changed, only replaced. Not all file systems have links.
    fs::hard_link(last, &kept).or_else(|_| fs::copy(last, &kept).map(drop)).map_err(Error::io("write", &kept))?;
    // Later steps are from before the run went back to an earlier checkpoint.
    let (earlier, later): (Vec<u64>, Vec<u64>) = steps(folder).into_iter().partition(|other| *other <= step);
    let excess = earlier.len().saturating_sub(count);
    for step in earlier.into_iter().take(excess).chain(later) {
        let removed = path(folder, step);
        fs::remove_file(&removed).map_err(Error::io("remove", &removed))?;
    }
    Ok(())
}

/// The checkpoint to resume from: the last one, or if it was removed, the kept one of the latest step.
pub(super) fn latest(folder: &Path, last: PathBuf) -> PathBuf {
    let newest = || steps(folder).last().map(|step| path(folder, *step));
    if last.exists() { last } else { newest().unwrap_or(last) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_checkpoints_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let last = folder.join("checkpoint.safetensors");
        fs::write(folder.join("checkpoint-4-1.safetensors"), "shard").unwrap();
        for step in [2u64, 4, 10, 12] {
            // Replaced, as by a rename.
            let new = folder.join("new");
            fs::write(&new, step.to_string()).unwrap();
            fs::rename(&new, &last).unwrap();
            retain(folder, &last, step, 3).unwrap();
        }
        assert_eq!(steps(folder), [4, 10, 12]);
        assert_eq!([4, 10, 12].map(|step| fs::read_to_string(path(folder, step)).unwrap()), ["4", "10", "12"]);
        assert_eq!(latest(folder, last.clone()), last);
        fs::remove_file(&last).unwrap();
        fs::remove_file(path(folder, 12)).unwrap();
        assert_eq!(latest(folder, last.clone()), path(folder, 10));
        fs::write(&last, "11").unwrap();
        retain(folder, &last, 11, 1).unwrap();
        assert_eq!(steps(folder), [4, 10]);
        fs::write(path(folder, 30), "left").unwrap();
        retain(folder, &last, 11, 3).unwrap();
        assert!(steps(folder) == [4, 10, 11] && folder.join("checkpoint-4-1.safetensors").exists());
        fs::remove_file(&last).unwrap();
        assert_eq!(latest(folder, last.clone()), path(folder, 11));
    }
}
