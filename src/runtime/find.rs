//! Where the library is: in `ORT_DYLIB_PATH`, in this project's cache, in a Python package, in the system.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort::environment::Environment;

use crate::error::{Error, Result};

/// Names the library; nothing else is tried then.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

const HINT: &str = "version 1.31 or newer is needed: run `scripts/fetch onnxruntime`, or set ORT_DYLIB_PATH to its libonnxruntime.so";
const SYSTEM: [&str; 6] = ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/opt/onnxruntime/lib"];

/// Libraries that could be loaded, best first.
pub fn candidates(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    if let Some(path) = variable(LIBRARY_VARIABLE) {
        return vec![path];
    }
    let mut found = Vec::new();
    let cache = crate::cache::folder(&variable);
    for folder in cache.iter().flat_map(|cache| below(cache, "onnxruntime-")) {
        found.extend(libraries(&folder));
    }
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&variable);
    let environments = environments.chain(cache.iter().map(|cache| cache.join("venv-reference")));
    for python in environments.flat_map(|folder| below(&folder.join("lib"), "python3")) {
        found.extend(libraries(&python.join("site-packages/onnxruntime/capi")));
    }
    found.extend(SYSTEM.iter().flat_map(|folder| libraries(Path::new(folder))));
    found
}

/// Entries of a folder whose names begin so, the last in the order of names first.
fn below(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let name = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(prefix));
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(name).collect();
    found.sort();
    found.reverse();
    found
}

fn libraries(folder: &Path) -> Vec<PathBuf> {
    let mut found = below(folder, "libonnxruntime.so");
    found.extend(below(folder, "libonnxruntime.").into_iter().filter(|path| path.extension() == Some(OsStr::new("dylib"))));
    found
}

/// Loads the library, once a process, and says which it was.
///
/// # Errors
/// None is found, or none can be loaded or is new enough; the error names each that was tried.
pub fn library() -> Result<&'static Path> {
    Ok(&loaded()?.0)
}

/// The library's environment.
pub(super) fn environment() -> Result<&'static Environment> {
    Ok(&loaded()?.1)
}

fn loaded() -> Result<&'static (PathBuf, Environment)> {
    static LOADED: OnceLock<Result<(PathBuf, Environment), String>> = OnceLock::new();
    let found = LOADED.get_or_init(|| load(&candidates(crate::cache::variable)));
    found.as_ref().map_err(|tried| Error::option("ONNX Runtime", format!("cannot be loaded ({tried}); {HINT}")))
}

fn load(candidates: &[PathBuf]) -> Result<(PathBuf, Environment), String> {
    let mut tried = Vec::new();
    for path in candidates {
        if !path.is_file() {
            tried.push(format!("{}: there is no such file", path.display()));
            continue;
        }
        let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        match ort::init_from(&path)
            .map_err(|e| e.to_string())
            .and_then(|builder| builder.with_name("compress").with_telemetry(false).build().map_err(|e| e.to_string()))
        {
            Ok(environment) => return Ok((path, environment)),
            Err(reason) => tried.push(reason),
        }
    }
    Err(if tried.is_empty() { "no library was found".into() } else { tried.join("; ") })
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
        let set = |name: &str| match name {
            "COMPRESS_CACHE" => Some(folder.path().join("cache")),
            "VIRTUAL_ENV" => Some(folder.path().join("venv")),
            _ => None,
        };
        assert_eq!(candidates(set)[..3], [new, old, python]);
        let named = |name: &str| (name == LIBRARY_VARIABLE).then(|| PathBuf::from("/nowhere/libonnxruntime.so"));
        assert_eq!(candidates(named), [Path::new("/nowhere/libonnxruntime.so")]);
        let error = load(&candidates(named)).unwrap_err();
        assert!(error.contains("/nowhere/libonnxruntime.so"), "{error}");
        assert!(load(&[]).unwrap_err().contains("no library"));
    }
}
