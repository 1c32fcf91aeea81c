//! The Python package and the pages of docs/reference have the options of this program, and the tests of the
//! package pass. They need Python 3.11, and use only its standard library.
#![cfg(all(feature = "cli", feature = "run"))]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_compress");

/// Runs Python in the folder of the package, if it is new enough.
fn python(arguments: &[&str]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let run = |arguments: &[&str]| {
        let variables = [("PYTHONPATH", folder.to_str().unwrap()), ("COMPRESS_PROGRAM", PROGRAM), ("PYTHONDONTWRITEBYTECODE", "1")];
        Command::new("python3").args(arguments).envs(variables).current_dir(&folder).output().unwrap()
    };
    let check = |output: Output| if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) };
    if compress_testing::available("Python 3.11", check(run(&["-c", "import sys; sys.exit(sys.version_info < (3, 11) and sys.version)"]))) {
        check(run(arguments)).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn generated_modules_match_the_schemas() {
    python(&["generate.py", "--check", "--program", PROGRAM]);
}

#[test]
fn generated_pages_match_the_program() {
    python(&["../scripts/book", "--pages", "--check", "--program", PROGRAM]);
}

#[test]
fn tests_of_the_package_pass() {
    python(&["-m", "unittest", "discover", "-s", "tests"]);
}
