//! Other programs, asked for an answer; nothing that they write reaches the terminal.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// What a program writes as its answer; else why there is none: the last line of its complaint.
pub fn ask<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<String, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if output.status.success() {
        return String::from_utf8(output.stdout).map_err(|_| "answers no text".into());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or("failed").to_owned())
}
