//! Location of the cache: libraries, downloaded models, results of passes.

use std::path::PathBuf;

/// The cache folder: `COMPRESS_CACHE`, or `compress` in the user's cache folder. `None` if no variable
/// is set.
pub fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let base = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    variable("COMPRESS_CACHE").or_else(|| base().map(|base| base.join("compress")))
}

/// A non-empty environment variable.
pub fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
