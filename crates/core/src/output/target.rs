//! Validation of output locations.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::listing::Listing;
use super::names::{JOURNAL, file_format, file_name, named_format, report_folder, work_location};
use crate::error::{Error, Result, UNEXPANDED, redact_path};
use crate::files;

/// Existing data that an output may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// No existing data.
    Never,
    /// The output of an earlier run, all of whose files are listed in its report and unchanged.
    Output,
    /// As [`Replace::Output`]. If the report lists a file with this name, the output is a cached result,
    /// whose files may be damaged.
    Cached(&'static str),
    /// A folder of unfinished or cached work, recognized by a file with this name.
    Work(&'static str),
}

impl Replace {
    /// The permission that `--force` grants.
    pub fn with_force(force: bool) -> Replace {
        if force { Replace::Output } else { Replace::Never }
    }
}

/// Files and folders that a run reads and must not replace.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The model's folder or file.
    pub model: PathBuf,
    /// Other inputs: copied files, data sets, teachers.
    pub files: Vec<PathBuf>,
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Inputs {
    fn from(model: &P) -> Inputs {
        Inputs { model: model.as_ref().to_owned(), files: Vec::new() }
    }
}

/// Checks whether an output can be written to the absolute path `target`, without modifying anything.
pub(super) fn check_target(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    if files::is_remote(target) {
        return check_remote(target, replace != Replace::Never);
    }
    let input = &inputs.model;
    // Remote inputs cannot overlap a local output.
    let input = if files::is_remote(input) { input.to_owned() } else { fs::canonicalize(input).map_err(Error::io("open", input))? };
    if let Some((parent, real)) = files::nearest_existing(target)
        && *parent != *target
        && !real.is_dir()
    {
        return Err(refuse(target, &format!("cannot be created inside {}, which is not a folder", parent.display()), "choose another location"));
    }
    let real = files::real_path(target);
    if real == input {
        return Err(refuse(target, "is the input", "choose another folder; the input is never modified"));
    }
    if files::is_dir(&input) && real.starts_with(&input) {
        return Err(refuse(target, "lies inside the input folder", "choose a folder outside it"));
    }
    if input.starts_with(&real) {
        return Err(refuse(target, "contains the input", "choose another folder"));
    }
    let file = file_name(target).is_some();
    match fs::symlink_metadata(target) {
        Ok(m) if file && !m.is_file() => return Err(refuse(target, "exists and is not a file", "choose another name")),
        Ok(m) if !file && m.is_symlink() => {
            let hint = "choose another name, or the folder that the link leads to";
            return Err(refuse(target, "exists and is not a folder but a link, which is not replaced", hint));
        }
        Ok(m) if !file && !m.is_dir() => return Err(refuse(target, "exists and is not a folder", "choose another name")),
        _ => {}
    }
    let data = target.with_file_name(format!("{}.data", file_name(target).unwrap_or_default()));
    if replace == Replace::Never && file_format(target) == Some("onnx") && data.symlink_metadata().is_ok() {
        return Err(exists(&data));
    }
    check_replaceable(target, replace, inputs)
}

/// Checks that all existing data at the output's locations may be deleted.
pub(super) fn check_replaceable(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    let report = file_name(target).map(|_| report_folder(target));
    let mut paths: Vec<PathBuf> = report.iter().cloned().chain([target.to_owned()]).filter(|path| path.symlink_metadata().is_ok()).collect();
    let (Some(first), folder) = (paths.first(), report.as_deref().unwrap_or(target)) else { return Ok(()) };
    if is_empty_folder(target) {
        return obstacle(target).map_or(Ok(()), |reason| Err(refuse(target, reason, "choose a folder inside it")));
    }
    if replace == Replace::Never {
        let is_leftover = report.as_ref() == Some(first) && target.symlink_metadata().is_err();
        let reason = format!("its report exists: {}", redact_path(first).display());
        return Err(if is_leftover { refuse(target, &reason, "set `force` to replace it, or choose another name") } else { exists(target) });
    }
    // While another process replaces the output, its report may not describe its files.
    let state = || [target, folder].map(|path| fs::symlink_metadata(path).ok().map(|about| (about.dev(), about.ino())));
    let mut attempts = 0;
    let Found { listing, lost, why } = loop {
        let before = state();
        let found = Found::new(target, folder, replace);
        attempts += 1;
        if found.lost.is_empty() || attempts == ATTEMPTS || (before == state() && !is_being_published(target)) {
            break found;
        }
        std::thread::sleep(PAUSE);
    };
    require_no_loss(target, &lost, why)?;
    paths.extend(listing.into_iter().flat_map(|listing| listing.data_files(target)));
    let paths: Vec<PathBuf> = paths.iter().filter_map(|path| fs::canonicalize(path).ok()).collect();
    for input in inputs.files.iter().chain([&inputs.model]).filter(|path| !files::is_remote(path)) {
        if let Some(found) = linked(input, DEEPEST).find(|real| paths.iter().any(|path| real.starts_with(path))) {
            let reason = format!("cannot be replaced: it contains {}, which this run reads as {}", found.display(), input.display());
            return Err(refuse(target, &reason, "choose another name"));
        }
    }
    Ok(())
}

/// Whether the output is a folder that exists and is empty, and does not have the name of a file. It is
/// replaced, because nothing is lost.
pub(super) fn is_empty_folder(target: &Path) -> bool {
    named_format(target).is_none() && fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none())
}

/// The reason for which an empty folder cannot be replaced: a shell would remain in the removed folder, and
/// mount points cannot be renamed.
fn obstacle(folder: &Path) -> Option<&'static str> {
    let folder = fs::canonicalize(folder).ok()?;
    if std::env::current_dir().and_then(fs::canonicalize).is_ok_and(|working| working.starts_with(&folder)) {
        return Some("is the working directory, which cannot be replaced");
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    is_mounted(&mounts, &folder).then_some("is a mount point, which cannot be replaced")
}

/// Escapes in the names of mount points. The backslash is decoded last, because the others begin with it.
const ESCAPES: [(&str, &str); 4] = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];

/// Whether a folder is in the text of `/proc/self/mountinfo`, whose fifth column contains the mount points.
fn is_mounted(mounts: &str, folder: &Path) -> bool {
    let name = |escaped: &str| ESCAPES.iter().fold(escaped.to_owned(), |name, (escape, character)| name.replace(escape, character));
    mounts.lines().filter_map(|line| line.split(' ').nth(4)).any(|place| Path::new(&name(place)) == folder)
}

/// Fails if files would be lost.
pub(super) fn require_no_loss(target: &Path, lost: &[String], why: &str) -> Result<()> {
    let [first, rest @ ..] = lost else { return Ok(()) };
    let names = rest.iter().take(NAMED - 1).fold(first.clone(), |names, name| format!("{names}, {name}"));
    let more = lost.len().checked_sub(NAMED).filter(|more| *more > 0).map(|more| format!(" and {more} more")).unwrap_or_default();
    let reason = format!("cannot be replaced: {names}{more} would be lost, and {why}");
    Err(refuse(target, &reason, "move what you need and remove the rest, or choose another name"))
}

/// Reasons why files may not be replaced.
pub(super) const FOREIGN: &str = "compress did not write them";
pub(super) const UNREPORTED: &str = "no report of compress lists them";
pub(super) const CHANGED: &str = "they were changed after compress wrote them";

/// Existing data at the locations of an output.
struct Found {
    listing: Option<Listing>,
    /// Files that may not be replaced, and the reason.
    lost: Vec<String>,
    why: &'static str,
}

impl Found {
    fn new(target: &Path, folder: &Path, replace: Replace) -> Found {
        let (is_work, cache) = match replace {
            Replace::Work(marker) if folder.join(marker).is_file() => return Found { listing: None, lost: Vec::new(), why: "" },
            Replace::Work(_) => (true, None),
            Replace::Cached(marker) => (false, Some(marker)),
            Replace::Output | Replace::Never => (false, None),
        };
        let listing = Listing::open(folder).filter(|_| !is_work);
        let empty = Listing::default();
        let listed = listing.as_ref().unwrap_or(&empty);
        let file = file_name(target).filter(|name| target.exists() && !listed.contains(name));
        let unlisted: Vec<String> = listed.unlisted(folder).into_iter().chain(file).collect();
        let (lost, why) = if !unlisted.is_empty() {
            (unlisted, if listing.is_some() || is_work { FOREIGN } else { UNREPORTED })
        } else if cache.is_some_and(|marker| listed.contains(marker)) {
            (Vec::new(), "")
        } else {
            (listed.changed(target, folder), CHANGED)
        };
        Found { listing, lost, why }
    }
}

/// Whether the staging folder of a single-file output has a journal, between whose steps the report and
/// the file may not match.
fn is_being_published(target: &Path) -> bool {
    let Some((parent, prefix)) = work_location(target).filter(|_| file_name(target).is_some()) else { return false };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).any(|entry| entry.path().join(JOURNAL).exists())
}

/// Number of times that existing data is checked while another process replaces it, and the time in
/// between. In tests, the other process may be a thread that waits for a slow disk.
const ATTEMPTS: usize = if cfg!(test) { 1000 } else { 100 };
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum number of file names in an error message.
const NAMED: usize = 4;
/// Maximum depth of nested folders. Symbolic links may form cycles.
const DEEPEST: usize = 32;

/// The canonical paths of a file or folder and of the targets of all symbolic links inside it.
fn linked(path: &Path, depth: usize) -> Box<dyn Iterator<Item = PathBuf>> {
    let real = fs::canonicalize(path).ok();
    let entries = real.iter().filter(|_| depth > 0).filter_map(|real| fs::read_dir(real).ok()).flatten().flatten();
    let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink()));
    let inner: Vec<PathBuf> = inner.map(|entry| entry.path()).collect();
    Box::new(real.into_iter().chain(inner.into_iter().flat_map(move |path| linked(&path, depth - 1))))
}

/// Rejects a remote output. `reason` completes the message "is on another machine, and …".
pub fn require_local(output: &Path, reason: &str) -> Result<()> {
    if files::is_remote(output) { Err(refuse(output, &format!("is on another machine, and {reason}"), "specify a local folder")) } else { Ok(()) }
}

/// As [`check_output`] for an output in a bucket. Object stores cannot replace a folder atomically, so
/// existing folders are never replaced.
fn check_remote(target: &Path, force: bool) -> Result<()> {
    require_remote_folder(target)?;
    if !files::remote_name(target).is_some_and(files::is_writable) {
        let hint = "specify a folder, a repository or a bucket: hf:org/name, s3://bucket/name, gs://bucket/name, az://container/name";
        return Err(refuse(target, "cannot be written to", hint));
    }
    match files::kind(target) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io("open", target)(e)),
        Ok(_) => Err(match files::unfinished_reason(target) {
            Some(reason) => refuse(target, &reason, "choose another name, or remove the folder if no run is writing to it"),
            None if force => refuse(
                target,
                "exists, and a remote folder cannot be replaced atomically",
                "choose another name, and remove the old folder when it is no longer in use",
            ),
            None => refuse(target, "exists", "choose another name"),
        }),
    }
}

/// Rejects a remote output that is a single file.
pub(super) fn require_remote_folder(target: &Path) -> Result<()> {
    match file_name(target) {
        Some(_) => Err(refuse(target, "is a single file, but only folders can be written to other machines", "specify a folder, and the format with `export`")),
        None => Ok(()),
    }
}

/// Rejects a path with a `~` that the shell has not expanded, which would be the name of a folder.
pub(super) fn require_expanded(path: &Path) -> Result<()> {
    if path.starts_with("~") && !Path::new("~").exists() { Err(refuse(path, "begins with `~`", UNEXPANDED)) } else { Ok(()) }
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    if files::is_remote(path) {
        return Ok(path.to_owned());
    }
    let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
    // `..` is resolved lexically, because the folder need not exist yet.
    Ok(path.components().fold(PathBuf::new(), |mut clean, part| {
        match part {
            Component::ParentDir => drop(clean.pop()),
            part => clean.push(part),
        }
        clean
    }))
}

pub(super) fn refuse(path: &Path, reason: &str, hint: &str) -> Error {
    Error::Output { path: redact_path(path), reason: reason.to_owned(), hint: hint.to_owned() }
}

pub(super) fn exists(path: &Path) -> Error {
    let place = if path.is_dir() { "folder" } else { "name" };
    refuse(path, "exists", &format!("set `force` to replace it, or choose another {place}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_a_file_is_named_with_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let (input, file) = (folder.path().join("input"), folder.path().join("q.gguf"));
        fs::create_dir(&input).unwrap();
        fs::create_dir(report_folder(&file)).unwrap();
        let told = || match check_target(&file, Replace::Never, &(&input).into()).unwrap_err() {
            Error::Output { path, reason, hint } => (path, reason, hint),
            other => panic!("{other}"),
        };
        let (path, reason, hint) = told();
        assert!(path == file && reason.starts_with("its report exists: ") && reason.ends_with("q.gguf.report"), "{reason}");
        assert!(hint.contains("`force`") && hint.contains("another name"), "{hint}");
        fs::write(&file, "").unwrap();
        assert_eq!(told(), (file.clone(), "exists".to_owned(), hint));
    }

    #[test]
    fn folders_with_the_name_of_a_file_are_not_empty_outputs() {
        let folder = tempfile::tempdir().unwrap();
        for (name, expected) in [("out", true), ("small.onnx", false), ("small.gguf", false)] {
            fs::create_dir(folder.path().join(name)).unwrap();
            assert_eq!(is_empty_folder(&folder.path().join(name)), expected, "{name}");
        }
    }

    #[test]
    fn mount_points_are_found_by_their_escaped_names() {
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 22 8:3 / /mnt/my\\040models\\134040 rw shared:5 - ext4 /dev/sdb1 rw\n";
        for (folder, expected) in
            [("/", true), ("/mnt/my models\\040", true), ("/mnt/my\\040models\\134040", false), ("/mnt/my models", false), ("/mnt", false)]
        {
            assert_eq!(is_mounted(mounts, Path::new(folder)), expected, "{folder}");
        }
    }

    #[test]
    fn rejects_outputs_that_overlap_the_input_or_cannot_be_created() {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("input");
        fs::create_dir(&input).unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        for place in [input.join("out"), input.clone(), folder.path().to_owned(), input.join("../input/x"), folder.path().join("file/out")] {
            assert!(check_target(&absolute(&place).unwrap(), Replace::Output, &(&input).into()).is_err(), "{}", place.display());
        }
        assert!(check_target(&folder.path().join("input2"), Replace::Never, &(&input).into()).is_ok());
        assert!(require_expanded(Path::new("~/out")).unwrap_err().hint().unwrap().contains("`$HOME`"));
        assert!(require_expanded(Path::new("a/~")).is_ok() && require_expanded(Path::new("~out")).is_ok());
    }
}
