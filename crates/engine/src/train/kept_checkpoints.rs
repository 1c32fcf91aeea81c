//! Earlier checkpoints of a training, next to the last one.

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::checkpoint::{self, Saved};
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

/// Opens the checkpoint to resume from, and parses its metadata; `None` if there is none. The error of a
/// damaged one names an earlier one that is intact.
pub(super) fn open_latest<T: DeserializeOwned>(folder: &Path, last: PathBuf) -> Result<Option<(PathBuf, T, Saved)>> {
    let path = latest(folder, last);
    match open_intact(&path) {
        Ok(found) => Ok(found.map(|(about, saved)| (path, about, saved))),
        Err(Error::Malformed { reason, .. }) => Err(Error::run(path.display(), reason, repair::<T>(folder, &path))),
        Err(error) => Err(error),
    }
}

/// Opens a checkpoint, and checks that it is not damaged.
fn open_intact<T: DeserializeOwned>(path: &Path) -> Result<Option<(T, Saved)>> {
    let found = checkpoint::open(path)?;
    found.iter().try_for_each(|(_, saved): &(T, Saved)| saved.check())?;
    Ok(found)
}

/// How to resume although a checkpoint is damaged.
fn repair<T: DeserializeOwned>(folder: &Path, damaged: &Path) -> String {
    let mut removed = vec![damaged.display().to_string()];
    for step in steps(folder).into_iter().rev() {
        let earlier = path(folder, step);
        if earlier == damaged {
            continue;
        }
        if let Ok(Some(_)) = open_intact::<T>(&earlier) {
            let removed = removed.join(" and ");
            return format!("{}, the checkpoint of step {step}, is intact: remove {removed}, and continue from it with `resume`", earlier.display());
        }
        removed.push(earlier.display().to_string());
    }
    "all earlier checkpoints are damaged or missing: start again with `force` and without `resume`, and keep earlier ones with `keep_checkpoints: 3`".to_owned()
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
    fn the_error_of_a_damaged_checkpoint_names_an_intact_one() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let last = folder.join("checkpoint.safetensors");
        let open = || open_latest::<u64>(folder, last.clone());
        assert!(open().unwrap().is_none());
        for step in [2u64, 4, 6] {
            checkpoint::save(&last, &step, &checkpoint::Tensors::new()).unwrap();
            retain(folder, &last, step, 3).unwrap();
        }
        let Some((found, 6, _)) = open().unwrap() else { panic!("the last checkpoint") };
        assert_eq!(found, last);
        // The kept file of the same step is a link to the last one.
        fs::write(&last, "damaged").unwrap();
        fs::write(path(folder, 6), "damaged").unwrap();
        let error = open().err().unwrap();
        let (text, hint) = (error.to_string(), error.hint().unwrap());
        assert!(text.contains("checkpoint.safetensors: is not a valid training checkpoint"), "{text}");
        let removed = format!("remove {} and {}, and continue from it with `resume`", last.display(), path(folder, 6).display());
        assert!(hint.starts_with(&format!("{}, the checkpoint of step 4, is intact", path(folder, 4).display())) && hint.ends_with(&removed), "{hint}");
        fs::remove_file(&last).unwrap();
        fs::remove_file(path(folder, 6)).unwrap();
        assert!(matches!(open().unwrap(), Some((_, 4, _))));
        for step in [2, 4] {
            fs::write(path(folder, step), "damaged").unwrap();
        }
        assert!(open().err().unwrap().hint().unwrap().contains("start again with `force` and without `resume`"));
    }

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
