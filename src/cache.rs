//! Where things are kept between runs: libraries, models, results of passes.

use std::path::PathBuf;

/// The folder, if the environment says where one could be: `COMPRESS_CACHE`, or `compress` in the user's cache folder.
pub fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let base = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    variable("COMPRESS_CACHE").or_else(|| base().map(|base| base.join("compress")))
}

/// A variable of the environment that holds something.
pub fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
