//! Where the library is: in `ORT_DYLIB_PATH`, in this project's cache, in the Python environment that is active, beside this program,
//! in the Python that a shell would start, in the system.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort::environment::Environment;

use crate::error::{Error, Result};
use crate::program;

/// Names the library; nothing else is tried then.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// What brings the library where there is none.
pub(super) const HINT: &str = "`compress doctor --fetch` brings it; ORT_DYLIB_PATH names one that is elsewhere";
const SYSTEM: [&str; 6] = ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/opt/onnxruntime/lib"];

/// Asks a Python where its package is, without importing it, and without looking into the folder that this program was started in.
const ASK: &str = "import sys; sys.path[:] = [p for p in sys.path if p]; import importlib.util as u; s = u.find_spec('onnxruntime'); \
                   print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')";

/// The library that is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// Its file.
    pub path: PathBuf,
    /// Its version, where the file's name or the library itself tells.
    pub version: Option<String>,
}

/// Libraries that could be loaded, best first: those that are found without starting another program.
pub fn candidates(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let [first, last] = places(&variable);
    first.into_iter().chain(last).collect()
}

/// The candidates before a Python on the path is asked, and those behind it.
fn places(variable: &impl Fn(&str) -> Option<PathBuf>) -> [Vec<PathBuf>; 2] {
    if let Some(path) = variable(LIBRARY_VARIABLE) {
        return [if path.is_dir() { libraries(&path) } else { vec![path] }, Vec::new()];
    }
    let cache = crate::cache::folder(variable);
    let mut first: Vec<PathBuf> = cache.iter().flat_map(|cache| below(cache, "onnxruntime-")).flat_map(|folder| libraries(&folder)).collect();
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    for folder in environments.chain(cache.iter().map(|cache| cache.join("venv-reference"))) {
        first.extend(below(&folder.join("lib"), "python3").iter().flat_map(|python| packaged(&python.join("site-packages/onnxruntime"))));
        first.extend(libraries(&folder.join("lib")));
    }
    let program = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.to_owned()));
    first.extend(program.iter().flat_map(|folder| [folder.clone(), folder.join("../lib")]).flat_map(|folder| libraries(&folder)));
    let user = variable("HOME").map(|home| home.join(".local/lib"));
    let mut last: Vec<PathBuf> =
        user.iter().flat_map(|user| below(user, "python3")).flat_map(|python| packaged(&python.join("site-packages/onnxruntime"))).collect();
    let linked = variable("LD_LIBRARY_PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    last.extend(linked.into_iter().chain(SYSTEM.map(PathBuf::from)).filter(|folder| folder.is_absolute()).flat_map(|folder| libraries(&folder)));
    [first, last]
}

/// Libraries of a Python package.
fn packaged(package: &Path) -> Vec<PathBuf> {
    libraries(&package.join("capi"))
}

/// Libraries of the package that `python3`, or `python`, would import.
fn asked() -> Vec<PathBuf> {
    let ask = |python: &str| {
        let package = PathBuf::from(program::ask(python, ["-c", ASK]).ok()?.trim());
        package.is_absolute().then(|| packaged(&package))
    };
    ["python3", "python"].into_iter().filter_map(ask).flatten().collect()
}

/// Entries of a folder whose names begin so, the last in the order of names first.
fn below(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let name = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(prefix));
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(name).collect();
    found.sort();
    found.reverse();
    found
}

/// Libraries in a folder.
pub(super) fn libraries(folder: &Path) -> Vec<PathBuf> {
    let mut found = below(folder, "libonnxruntime.so");
    found.extend(below(folder, "libonnxruntime.").into_iter().filter(|path| path.extension() == Some(OsStr::new("dylib"))));
    found
}

/// The version in the name of a library, or of what the name links to: `libonnxruntime.so.1.31.1`, `libonnxruntime.1.31.1.dylib`.
fn named_version(path: &Path) -> Option<String> {
    let in_name = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_prefix("libonnxruntime.")?;
        let version = name.strip_prefix("so.").or_else(|| name.strip_suffix(".dylib"))?;
        version.contains('.').then(|| version.to_owned())
    };
    in_name(path).or_else(|| in_name(&path.canonicalize().ok()?))
}

/// Whether a version is too old for this program, as far as it can be read.
fn is_old(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    matches!((parts.next().flatten(), parts.next().flatten()), (Some(major), Some(minor)) if (major, minor) < (1, ort::MINOR_VERSION))
}

/// Loads the library, once a process, and says which it was.
///
/// # Errors
/// None is found, or none can be loaded or is new enough; the error names each that was tried.
pub fn library() -> Result<&'static Path> {
    Ok(&loaded()?.0.path)
}

/// The library, if this process has loaded it.
pub fn in_use() -> Option<&'static Library> {
    LOADED.get()?.as_ref().ok().map(|(library, _)| library)
}

/// Version and file of the library that this process has loaded.
pub fn description() -> Option<(String, String)> {
    let library = in_use()?;
    Some((library.version.clone().unwrap_or_else(|| "of unknown version".into()), library.path.display().to_string()))
}

/// The library's environment.
pub(super) fn environment() -> Result<&'static Environment> {
    Ok(&loaded()?.1)
}

static LOADED: OnceLock<Result<(Library, Environment), String>> = OnceLock::new();

fn loaded() -> Result<&'static (Library, Environment)> {
    let found = LOADED.get_or_init(|| {
        let variable = crate::cache::variable;
        let [first, last] = places(&variable);
        let named = variable(LIBRARY_VARIABLE).is_some();
        load(first.into_iter().chain(std::iter::once_with(|| if named { Vec::new() } else { asked() }).flatten()).chain(last))
    });
    found.as_ref().map_err(|tried| Error::run("ONNX Runtime", format!("cannot be loaded: {tried}"), HINT))
}

fn load(candidates: impl IntoIterator<Item = PathBuf>) -> Result<(Library, Environment), String> {
    let mut tried: Vec<String> = Vec::new();
    for path in candidates {
        let path = std::path::absolute(&path).unwrap_or(path);
        match open(&path) {
            Ok(found) => return Ok(found),
            Err(reason) if tried.contains(&reason) => {}
            Err(reason) => tried.push(reason),
        }
    }
    Err(if tried.is_empty() { format!("no library of version 1.{} or newer was found", ort::MINOR_VERSION) } else { tried.join("; ") })
}

fn open(path: &Path) -> Result<(Library, Environment), String> {
    if !path.is_file() {
        return Err(format!("{}: there is no such file", path.display()));
    }
    let version = named_version(path);
    if let Some(old) = version.as_ref().filter(|version| is_old(version)) {
        return Err(format!("{} is version {old}, 1.{} or newer is needed", path.display(), ort::MINOR_VERSION));
    }
    let builder = ort::init_from(path).map_err(|e| e.to_string())?;
    let environment = builder.with_name("compress").with_telemetry(false).build().map_err(|e| e.to_string())?;
    let told = || ort::info().split_once("git-branch=rel-")?.1.split([',', ' ']).next().map(str::to_owned);
    Ok((Library { path: path.to_owned(), version: version.or_else(told) }, environment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_tried_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        let old = make("cache/onnxruntime-1.30.0/libonnxruntime.so.1.30.0");
        let new = make("cache/onnxruntime-1.31.1/libonnxruntime.so.1.31.1");
        make("cache/onnxruntime-1.31.1/libonnxruntime_providers_shared.so");
        let python = make("venv/lib/python3.12/site-packages/onnxruntime/capi/libonnxruntime.so.1.31.1");
        let conda = make("conda/lib/libonnxruntime.so");
        let user = make("home/.local/lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime.so.1.32.0");
        let linked = make("linked/libonnxruntime.so.1");
        let set = |name: &str| match name {
            "COMPRESS_CACHE" => Some(folder.path().join("cache")),
            "VIRTUAL_ENV" => Some(folder.path().join("venv")),
            "CONDA_PREFIX" => Some(folder.path().join("conda")),
            "HOME" => Some(folder.path().join("home")),
            "LD_LIBRARY_PATH" => Some(std::env::join_paths([Path::new("relative"), &folder.path().join("linked")]).unwrap().into()),
            _ => None,
        };
        let found: Vec<PathBuf> = candidates(set).into_iter().filter(|path| path.starts_with(folder.path())).collect();
        assert_eq!(found, [new, old, python, conda, user, linked]);
        let named = |name: &str| (name == LIBRARY_VARIABLE).then(|| PathBuf::from("/nowhere/libonnxruntime.so"));
        assert_eq!(candidates(named), [Path::new("/nowhere/libonnxruntime.so")]);
        let error = load(candidates(named)).unwrap_err();
        assert!(error.contains("/nowhere/libonnxruntime.so"), "{error}");
        assert!(load(Vec::new()).unwrap_err().contains("no library"));
    }

    #[test]
    fn versions_are_read_before_anything_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let old = folder.path().join("libonnxruntime.so.1.2.0");
        std::fs::write(&old, "").unwrap();
        let link = folder.path().join("libonnxruntime.so");
        std::os::unix::fs::symlink(&old, &link).unwrap();
        for path in [&old, &link] {
            assert_eq!(named_version(path).as_deref(), Some("1.2.0"));
            let error = load([path.clone()]).unwrap_err();
            assert!(error.contains("is version 1.2.0") && error.contains(&format!("1.{} or newer", ort::MINOR_VERSION)), "{error}");
        }
        assert_eq!(named_version(Path::new("/a/libonnxruntime.1.31.1.dylib")).as_deref(), Some("1.31.1"));
        assert_eq!(named_version(Path::new("/a/libonnxruntime.so.1")), None);
        assert!(!is_old("2.0") && !is_old(&format!("1.{}.0", ort::MINOR_VERSION)) && !is_old("new"));
    }
}
