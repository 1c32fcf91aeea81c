//! Passes the git commit to the crate, if it is known.

use std::path::Path;
use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
}

fn main() {
    // Cargo rebuilds at every invocation if a watched file is missing, so only existing files are listed.
    println!("cargo::rerun-if-changed=build.rs");
    // A repository that contains this folder, such as a workspace that vendors the crate, has unrelated
    // commits.
    let is_repository = Path::new(".git").exists();
    for name in ["HEAD", "logs/HEAD"].into_iter().filter(|_| is_repository) {
        if let Some(path) = git(&["rev-parse", "--git-path", name]).filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let commit = is_repository.then(|| git(&["rev-parse", "--short=12", "HEAD"])).flatten().unwrap_or_default();
    println!("cargo::rustc-env=COMPRESS_COMMIT={commit}");
}
