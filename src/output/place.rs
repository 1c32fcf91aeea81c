//! Where an output may be.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result, tellable};
use crate::files;

/// Formats that are one file, whose name ends like them.
const OF_ONE_FILE: [&str; 2] = ["onnx", "gguf"];

/// The format of an output that is a file and no folder, by the end of its name.
pub fn file_format(target: &Path) -> Option<&'static str> {
    let end = target.extension()?;
    OF_ONE_FILE.into_iter().find(|format| end == *format).filter(|_| !target.is_dir())
}

/// The name of an output that is a file and no folder. What lies beside it begins with its name.
pub fn file_name(target: &Path) -> Option<String> {
    file_format(target).and_then(|_| target.file_name()?.to_str()).map(str::to_owned)
}

/// What the name of a file ends with that holds the weights of another.
pub(super) const DATA: &str = "data";

/// The file beside a file that holds its weights, in formats that have one.
pub(super) fn data_file(file: &Path) -> Option<PathBuf> {
    (file_format(file) == Some("onnx")).then(|| beside(file, DATA))
}

/// The folder beside a file that holds what a run tells about it.
pub fn report_folder(file: &Path) -> PathBuf {
    beside(file, "report")
}

/// A place beside a file, whose name is the file's and more.
pub(super) fn beside(file: &Path, more: &str) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(more);
    file.with_file_name(name)
}

/// Checks an output place without touching it.
///
/// # Errors
/// It exists (without `force`), is not a folder where it should be one, or overlaps the input.
pub fn check_place(target: &Path, force: bool, input: &Path) -> Result<()> {
    let target = absolute(target)?;
    if files::is_remote(&target) {
        return check_remote(&target, force);
    }
    // What is on another machine is no part of this one.
    let input = if files::is_remote(input) { input.to_owned() } else { fs::canonicalize(input).map_err(Error::io("open", input))? };
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
    if files::is_dir(&input) && real.starts_with(&input) {
        return Err(refuse(&target, "lies inside the input folder", "choose a folder beside it"));
    }
    if input.starts_with(&real) {
        return Err(refuse(&target, "contains the input", "choose another folder"));
    }
    let file = file_name(&target).is_some();
    let around = [Some(report_folder(&target)), data_file(&target)].into_iter().flatten();
    for path in around.filter(|path| file && path.symlink_metadata().is_ok()) {
        if fs::canonicalize(&path).is_ok_and(|path| input.starts_with(path)) {
            return Err(refuse(&path, "would be replaced, and is part of the input", "choose another name: the input is never changed"));
        }
        if !force {
            return Err(exists(&path));
        }
    }
    match fs::symlink_metadata(&target) {
        Ok(m) if file && !m.is_file() => Err(refuse(&target, "exists and is not a file", "choose another name")),
        Ok(m) if !file && !m.is_dir() => Err(refuse(&target, "exists and is not a folder", "choose another name")),
        Ok(_) if !force => Err(exists(&target)),
        _ => Ok(()),
    }
}

/// Refuses another machine where something lies beside the output that is worked on.
///
/// # Errors
/// The output is on another machine.
pub fn require_here(output: &Path, why: &str) -> Result<()> {
    if files::is_remote(output) { Err(refuse(output, &format!("is on another machine, and {why}"), "name a folder of this machine")) } else { Ok(()) }
}

/// The same for a place of another machine: a bucket has no step that replaces a folder.
fn check_remote(target: &Path, force: bool) -> Result<()> {
    if file_name(target).is_some() {
        return Err(refuse(target, "is one file, and folders are written to other machines", "name a folder, and the format with --export"));
    }
    if !files::remote_name(target).is_some_and(files::writes) {
        return Err(refuse(target, "cannot be written to", "name a folder, or a bucket: s3://bucket/name, gs://bucket/name, az://container/name"));
    }
    match files::kind(target) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io("open", target)(e)),
        Ok(_) if files::is_file(&target.join(files::UNFINISHED)) => {
            let reason = format!("is being written by another run, or holds what one has left that was killed ({} is there)", files::UNFINISHED);
            Err(refuse(target, &reason, "choose another name with -o, or remove all of it if no run writes it"))
        }
        Ok(_) if force => {
            Err(refuse(target, "exists, and nothing replaces a folder there in one step", "choose another name, and remove the old one when nobody reads it"))
        }
        Ok(_) => Err(refuse(target, "exists", "choose another name with -o")),
    }
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    if files::is_remote(path) {
        return Ok(path.to_owned());
    }
    let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
    // `..` is resolved by hand: the folder need not exist yet.
    Ok(path.components().fold(PathBuf::new(), |mut clean, part| {
        match part {
            Component::ParentDir => drop(clean.pop()),
            part => clean.push(part),
        }
        clean
    }))
}

pub(super) fn refuse(path: &Path, reason: &str, hint: &str) -> Error {
    Error::Output { path: tellable(path), reason: reason.to_owned(), hint: hint.to_owned() }
}

pub(super) fn exists(path: &Path) -> Error {
    let place = if path.is_dir() { "folder" } else { "name" };
    refuse(path, "exists", &format!("add --force to replace it, or choose another {place} with -o"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_places_that_overlap_the_input_or_cannot_be() {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("input");
        fs::create_dir(&input).unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        for place in [input.join("out"), input.clone(), folder.path().to_owned(), input.join("../input/x"), folder.path().join("file/out")] {
            assert!(check_place(&place, true, &input).is_err(), "{}", place.display());
        }
        assert!(check_place(&folder.path().join("input2"), false, &input).is_ok());
    }
}
