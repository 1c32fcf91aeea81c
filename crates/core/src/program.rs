//! Runs other programs and captures their output. Nothing reaches the terminal.

use std::ffi::OsStr;
use std::io;
use std::process::{Command, Output, Stdio};

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Whether its exit code is 0.
    pub succeeded: bool,
    /// Lines of its standard output and then of its standard error.
    pub lines: Vec<String>,
}

/// Returns a program's standard output. The error is the last line of its standard error.
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<String, String> {
    let output = output(program.as_ref(), arguments).map_err(|e| e.to_string())?;
    if output.status.success() {
        return String::from_utf8(output.stdout).map_err(|_| "the output is not UTF-8".into());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or("failed").to_owned())
}

/// Waits for a program to end. Fails if it cannot be started.
pub fn finish<A: AsRef<OsStr>>(program: &OsStr, arguments: impl IntoIterator<Item = A>) -> io::Result<Finished> {
    let output = output(program, arguments)?;
    let lines = [output.stdout, output.stderr].iter().flat_map(|text| String::from_utf8_lossy(text).lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    Ok(Finished { succeeded: output.status.success(), lines })
}

fn output<A: AsRef<OsStr>>(program: &OsStr, arguments: impl IntoIterator<Item = A>) -> io::Result<Output> {
    Command::new(program).args(arguments).stdin(Stdio::null()).output()
}
