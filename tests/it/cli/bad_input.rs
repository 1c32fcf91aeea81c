//! Invalid input: checks exit code, message and hint, and that no file is written or changed.

#[cfg(feature = "run")]
mod evaluation;
mod files;
mod folders;
mod noise;
mod options;
mod outputs;
mod recipes;
mod spellings;
#[cfg(feature = "run")]
mod structured;

use std::path::Path;

use crate::cli::support::{compress, snapshot};

/// A run that must fail.
struct Case {
    name: &'static str,
    make: Box<dyn Fn(&Path)>,
    args: &'static str,
    code: i32,
    message: &'static str,
    hint: &'static str,
}

/// Expected hints for messages that contain these words, if a case specifies no other hint.
const GENERAL: [(&str, &str); 8] = [
    ("No such file or directory", "check the name"),
    ("is a folder; a recipe is a YAML file", "`compress init MODEL` writes a commented recipe; `compress schema` prints all keys"),
    ("File name too long", "choose a shorter name"),
    ("did not contain valid UTF-8", "check that it is the right file"),
    ("error: recipe.yaml: line", "`compress init MODEL` writes a commented recipe; `compress schema` prints all keys"),
    ("expected a value, but the text ends", "`compress init MODEL` writes a commented recipe; `compress schema` prints all keys"),
    (".safetensors: ", "download or write it again"),
    (".json: ", "use the file that was saved together with these weights"),
];

/// `make` prepares a folder in which `args` are run. The message must contain the parts of `message` between
/// ellipses, in order. Without a `hint`, only a hint of the table above is allowed.
fn case(name: &'static str, make: impl Fn(&Path) + 'static, args: &'static str, code: i32, message: &'static str, hint: &'static str) -> Case {
    Case { name, make: Box::new(make), args, code, message, hint }
}

fn check(cases: impl IntoIterator<Item = Case>) {
    let failures: Vec<String> = cases.into_iter().filter_map(|case| failure(&case).map(|reason| format!("{}: {reason}", case.name))).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

fn failure(case: &Case) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    (case.make)(folder.path());
    let before = snapshot(folder.path());
    let run = compress(folder.path(), case.args);
    let after = snapshot(folder.path());
    let told = format!("compress {}\nexit code {}\n{}{}", case.args, run.code, run.stdout, run.stderr);
    if run.stderr.contains("panicked") {
        return Some(format!("a panic\n{told}"));
    }
    if before != after {
        let new: Vec<_> = after.keys().filter(|path| !before.contains_key(*path)).collect();
        return Some(format!("the folder has changed, new are {new:?}\n{told}"));
    }
    if run.code != case.code || !run.stderr.starts_with("error: ") || !run.stdout.is_empty() {
        return Some(format!("should exit with {}, print an error and nothing else\n{told}", case.code));
    }
    let mut rest = run.stderr.as_str();
    for part in case.message.split('…') {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return Some(format!("should say {:?}\n{told}", case.message)),
        }
    }
    let hint = run.stderr.lines().find_map(|line| line.strip_prefix("hint: "));
    let first = run.stderr.lines().next().unwrap_or_default();
    let general = GENERAL.iter().find(|(words, _)| first.contains(words)).map_or("", |(_, hint)| hint);
    match (if case.hint.is_empty() { general } else { case.hint }, hint) {
        ("", None) => None,
        (wanted, Some(hint)) if !wanted.is_empty() && hint.contains(wanted) => None,
        (wanted, _) => Some(format!("should hint {wanted:?}\n{told}")),
    }
}
