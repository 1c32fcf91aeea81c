//! Search for the ONNX Runtime library: in `ORT_DYLIB_PATH`, in the cache, in the Python environment that
//! this program is installed in, in the active one, next to this program, in the default Python of the
//! shell, in the system.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort::environment::Environment;

use crate::error::{Error, Result};
use crate::program;

/// Path of the library, or its folder. If set, no other location is searched.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// Hint for a missing library.
pub(super) const HINT: &str = "run `compress doctor --fetch` to download it, or set ORT_DYLIB_PATH to the path of an installed one";
const SYSTEM: [&str; 6] = ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/opt/onnxruntime/lib"];

/// Prints the folder of the `onnxruntime` package without importing it. The current working directory is
/// not searched.
const PACKAGE_QUERY: &str = "import sys; sys.path[:] = [p for p in sys.path if p]; import importlib.util as u; s = u.find_spec('onnxruntime'); \
                   print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')";

/// The loaded library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// Its file.
    pub path: PathBuf,
    /// Version, from the file name or from the library itself.
    pub version: Option<String>,
}

/// Candidate libraries, best first. Does not start a Python on the path to locate more.
pub fn candidates(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let [first, last] = search_path(&variable);
    first.into_iter().chain(last).collect()
}

/// Candidates to try before the libraries of the default Python, and after them.
fn search_path(variable: &impl Fn(&str) -> Option<PathBuf>) -> [Vec<PathBuf>; 2] {
    if let Some(path) = variable(LIBRARY_VARIABLE) {
        return [if path.is_dir() { libraries(&path) } else { vec![path] }, Vec::new()];
    }
    let cache = crate::cache::folder(variable);
    let mut first: Vec<PathBuf> = cache.iter().flat_map(|cache| below(cache, "onnxruntime-")).flat_map(|folder| libraries(&folder)).collect();
    let program = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.to_owned()));
    let own = program.as_deref().and_then(Path::parent).map(Path::to_owned);
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    for folder in own.into_iter().chain(environments).chain(cache.iter().map(|cache| cache.join("venv-reference"))) {
        first.extend(below(&folder.join("lib"), "python3").iter().flat_map(|python| package_libraries(&python.join("site-packages/onnxruntime"))));
        first.extend(libraries(&folder.join("lib")));
    }
    first.extend(program.iter().flat_map(|folder| libraries(folder)));
    let user = variable("HOME").map(|home| home.join(".local/lib"));
    let mut last: Vec<PathBuf> =
        user.iter().flat_map(|user| below(user, "python3")).flat_map(|python| package_libraries(&python.join("site-packages/onnxruntime"))).collect();
    let linked = variable("LD_LIBRARY_PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    last.extend(linked.into_iter().chain(SYSTEM.map(PathBuf::from)).filter(|folder| folder.is_absolute()).flat_map(|folder| libraries(&folder)));
    [first, last]
}

/// Libraries in a Python package.
fn package_libraries(package: &Path) -> Vec<PathBuf> {
    libraries(&package.join("capi"))
}

/// Libraries of the package that `python3` or `python` imports.
fn python_libraries() -> Vec<PathBuf> {
    let query = |python: &str| {
        let package = PathBuf::from(program::run(python, ["-c", PACKAGE_QUERY]).ok()?.trim());
        package.is_absolute().then(|| package_libraries(&package))
    };
    ["python3", "python"].into_iter().filter_map(query).flatten().collect()
}

/// Entries of a folder with a name prefix, in descending order of names.
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

/// The version in the name of a library or of its link target: `libonnxruntime.so.1.31.1`,
/// `libonnxruntime.1.31.1.dylib`.
fn named_version(path: &Path) -> Option<String> {
    let in_name = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_prefix("libonnxruntime.")?;
        let version = name.strip_prefix("so.").or_else(|| name.strip_suffix(".dylib"))?;
        version.contains('.').then(|| version.to_owned())
    };
    in_name(path).or_else(|| in_name(&path.canonicalize().ok()?))
}

/// Whether a version is too old for this program. Versions that cannot be parsed are not.
fn is_old(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    matches!((parts.next().flatten(), parts.next().flatten()), (Some(major), Some(minor)) if (major, minor) < (1, ort::MINOR_VERSION))
}

/// Loads the library, once per process, and returns its path. The error lists the reason for each candidate.
pub fn library() -> Result<&'static Path> {
    Ok(&loaded()?.0.path)
}

/// The library, if this process has loaded it.
pub fn in_use() -> Option<&'static Library> {
    LOADED.get()?.as_ref().ok().map(|(library, _)| library)
}

/// Version and path of the library, if this process has loaded it.
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
        let [first, last] = search_path(&variable);
        let named = variable(LIBRARY_VARIABLE).is_some();
        load(first.into_iter().chain(std::iter::once_with(|| if named { Vec::new() } else { python_libraries() }).flatten()).chain(last))
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
        return Err(format!("{}: no such file", path.display()));
    }
    let version = named_version(path);
    if let Some(old) = version.as_ref().filter(|version| is_old(version)) {
        return Err(format!("{} is version {old}, but 1.{} or newer is required", path.display(), ort::MINOR_VERSION));
    }
    let builder = ort::init_from(path).map_err(|e| e.to_string())?;
    let environment = builder.with_name("compress").with_telemetry(false).build().map_err(|e| e.to_string())?;
    let build_info = || ort::info().split_once("git-branch=rel-")?.1.split([',', ' ']).next().map(str::to_owned);
    Ok((Library { path: path.to_owned(), version: version.or_else(build_info) }, environment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_searched_in_order() {
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
