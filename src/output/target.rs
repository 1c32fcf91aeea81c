//! Where an output may be.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

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

/// A name for the file that holds the weights of a large ONNX file, which exists under none so far: `out.onnx.data`, then `out.onnx.2.data`.
/// A model file names its data file, so that the old pair stays whole until the new model file takes the place of the old one.
pub(super) fn free_data_name(file: &Path) -> Option<String> {
    let name = file_name(file).filter(|_| file_format(file) == Some("onnx"))?;
    let numbered = (2u32..).map(|number| format!("{name}.{number}.data"));
    std::iter::once(format!("{name}.data")).chain(numbered).find(|data| file.with_file_name(data).symlink_metadata().is_err())
}

/// The folder beside a file that holds what a run tells about it.
pub fn report_folder(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".report");
    file.with_file_name(name)
}

/// Existing data that an output may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Nothing.
    Nothing,
    /// The output of an earlier run, whose report lists every file of it.
    Output,
    /// A folder of unfinished or cached work, recognized by a file of this name.
    Work(&'static str),
}

impl Replace {
    /// What `--force` allows.
    pub fn with_force(force: bool) -> Replace {
        if force { Replace::Output } else { Replace::Nothing }
    }
}

/// Files and folders that a run reads, and must not replace.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The model's folder or file.
    pub model: PathBuf,
    /// Other files and folders: carried files, data sets, teachers.
    pub files: Vec<PathBuf>,
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Inputs {
    fn from(model: &P) -> Inputs {
        Inputs { model: model.as_ref().to_owned(), files: Vec::new() }
    }
}

/// Checks an output place without touching it.
///
/// # Errors
/// It exists and may not be replaced, is not a folder where it should be one, overlaps the model, or holds something that the run reads.
pub fn check_place(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    let target = absolute(target)?;
    if files::is_remote(&target) {
        return check_remote(&target, replace != Replace::Nothing);
    }
    let input = &inputs.model;
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
    match fs::symlink_metadata(&target) {
        Ok(m) if file && !m.is_file() => return Err(refuse(&target, "exists and is not a file", "choose another name")),
        Ok(m) if !file && !m.is_dir() => return Err(refuse(&target, "exists and is not a folder", "choose another name")),
        _ => {}
    }
    let data = target.with_file_name(format!("{}.data", file_name(&target).unwrap_or_default()));
    if replace == Replace::Nothing && file_format(&target) == Some("onnx") && data.symlink_metadata().is_ok() {
        return Err(exists(&data));
    }
    check_replaceable(&target, replace, inputs)
}

/// Checks that everything at the places of an output may be lost.
pub(super) fn check_replaceable(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    let report = file_name(target).map(|_| report_folder(target));
    let mut places: Vec<PathBuf> = report.iter().cloned().chain([target.to_owned()]).filter(|path| path.symlink_metadata().is_ok()).collect();
    let (Some(first), folder) = (places.first(), report.as_deref().unwrap_or(target)) else { return Ok(()) };
    let (listing, lost) = match replace {
        Replace::Nothing => return Err(exists(first)),
        Replace::Work(marker) if folder.join(marker).is_file() => (None, Vec::new()),
        Replace::Work(_) => (None, Listing::default().missing(folder)),
        Replace::Output => {
            let listing = Listing::open(folder);
            let mut lost = listing.as_ref().unwrap_or(&Listing::default()).missing(folder);
            let name = file_name(target).filter(|name| target.exists() && !listing.as_ref().is_some_and(|listing| listing.files.contains(name)));
            lost.extend(name);
            (listing, lost)
        }
    };
    if let [first, rest @ ..] = lost.as_slice() {
        let names = rest.iter().take(NAMED - 1).fold(first.clone(), |names, name| format!("{names}, {name}"));
        let more = lost.len().checked_sub(NAMED).filter(|more| *more > 0).map(|more| format!(" and {more} more")).unwrap_or_default();
        let why = if replace == Replace::Output && listing.is_none() { "no report of compress lists them" } else { "compress did not write them there" };
        let reason = format!("cannot be replaced: {names}{more} would be lost, and {why}");
        return Err(refuse(target, &reason, "move what you need and remove the rest, or choose another name with -o"));
    }
    places.extend(listing.into_iter().flat_map(|listing| listing.data_files(target)));
    let places: Vec<PathBuf> = places.iter().filter_map(|place| fs::canonicalize(place).ok()).collect();
    for input in inputs.files.iter().chain([&inputs.model]).filter(|path| !files::is_remote(path)) {
        if let Some(found) = linked(input, DEEPEST).find(|real| places.iter().any(|place| real.starts_with(place))) {
            let reason = format!("cannot be replaced: it holds {}, which this run reads as {}", found.display(), input.display());
            return Err(refuse(target, &reason, "choose another name with -o"));
        }
    }
    Ok(())
}

/// Names of lost files in an error.
const NAMED: usize = 4;
/// Folders in folders; links may lead in circles.
const DEEPEST: usize = 32;

/// The canonical paths of a file or folder and of the targets of all symbolic links inside it.
fn linked(path: &Path, depth: usize) -> Box<dyn Iterator<Item = PathBuf>> {
    let real = fs::canonicalize(path).ok();
    let entries = real.iter().filter(|_| depth > 0).filter_map(|real| fs::read_dir(real).ok()).flatten().flatten();
    let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink()));
    let inner: Vec<PathBuf> = inner.map(|entry| entry.path()).collect();
    Box::new(real.into_iter().chain(inner.into_iter().flat_map(move |path| linked(&path, depth - 1))))
}

/// Names of the report in all its forms.
pub const REPORT_FILES: [&str; 3] = ["report.json", "report.md", "report.html"];

/// The files of an output, as its report lists them.
#[derive(Default)]
pub(super) struct Listing {
    files: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Reported {
    tool: Named,
    outputs: Vec<Listed>,
    #[serde(default)]
    carried: Vec<Listed>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Listed {
    path: String,
}

impl Listing {
    /// The listing of a folder that holds a report of this tool.
    pub fn open(folder: &Path) -> Option<Listing> {
        let report: Reported = serde_json::from_slice(&fs::read(folder.join(REPORT_FILES[0])).ok()?).ok()?;
        let listed = report.outputs.into_iter().chain(report.carried).map(|file| file.path);
        (report.tool.name == env!("CARGO_PKG_NAME")).then(|| Listing { files: listed.chain(REPORT_FILES.map(str::to_owned)).collect() })
    }

    /// Files of a folder that are not listed.
    fn missing(&self, folder: &Path) -> Vec<String> {
        let mut missing = Vec::new();
        self.collect(folder, Path::new(""), &mut missing);
        missing.sort();
        missing
    }

    fn collect(&self, root: &Path, inside: &Path, missing: &mut Vec<String>) {
        for entry in fs::read_dir(root.join(inside)).into_iter().flatten().flatten() {
            let name = inside.join(entry.file_name());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.collect(root, &name, missing);
            } else if !name.to_str().is_some_and(|name| self.files.contains(name)) {
                missing.push(name.to_string_lossy().into_owned());
            }
        }
    }

    /// The listed data files of an ONNX file, wherever they are.
    pub fn data_files(&self, target: &Path) -> Vec<PathBuf> {
        let prefix = format!("{}.", file_name(target).unwrap_or_default());
        let data = self.files.iter().filter(|name| file_format(target) == Some("onnx") && name.starts_with(&prefix) && name.ends_with(".data"));
        data.map(|name| target.with_file_name(name)).collect()
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
            assert!(check_place(&place, Replace::Output, &(&input).into()).is_err(), "{}", place.display());
        }
        assert!(check_place(&folder.path().join("input2"), Replace::Nothing, &(&input).into()).is_ok());
    }
}
