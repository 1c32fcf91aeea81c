//! Runs other programs and captures their output. Nothing reaches the terminal.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// Returns a program's standard output. The error is the last line of its standard error.
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<String, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if output.status.success() {
        return String::from_utf8(output.stdout).map_err(|_| "the output is not UTF-8".into());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or("failed").to_owned())
}
