//! What is refused, and how: exit code, message and hint; nothing is written and nothing is changed.

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

use crate::support::{compress, snapshot};

/// A run that must be refused.
struct Case {
    name: &'static str,
    make: Box<dyn Fn(&Path)>,
    args: &'static str,
    code: i32,
    message: &'static str,
    hint: &'static str,
}

/// What is hinted at whenever a message holds these words, where a case names nothing better.
const GENERAL: [(&str, &str); 8] = [
    ("No such file or directory", "check the name"),
    ("is a folder, and a recipe is a YAML file", "`compress init MODEL` writes a recipe"),
    ("File name too long", "choose a shorter name"),
    ("did not contain valid UTF-8", "is it the right file?"),
    ("error: recipe.yaml: line", "`compress init MODEL` writes a recipe"),
    ("a value is needed", "`compress init MODEL` writes a recipe"),
    (".safetensors: ", "download or write it again"),
    (".json: ", "take the file that these weights were saved with"),
];

/// `make` prepares a folder in which `args` are run. The message must hold the parts of `message` between
/// ellipses, in order. Without a `hint`, none but the general one may be given.
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
