//! The house rules, read off the source files.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

/// Top to bottom: a line uses the lines below it.
const LAYERS: [&[&str]; 12] = [
    &["cli", "prelude"],
    &["recipe", "pipeline", "report"],
    &["pass", "export"],
    &["train"],
    &["evaluation", "calibration", "generation"],
    &["analysis", "exec", "data"],
    &["model", "arch", "onnx"],
    &["runtime"],
    &["ir", "store", "kernel", "run_state"],
    &["work", "output"],
    &["files"],
    &["cache", "error", "entry", "program"],
];

/// What a line may use of itself.
const BESIDE: [(&str, &str); 9] = [
    ("pipeline", "report"),
    ("pipeline", "recipe"),
    ("exec", "analysis"),
    ("exec", "data"),
    ("model", "arch"),
    ("model", "onnx"),
    ("run_state", "store"),
    ("store", "kernel"),
    ("ir", "kernel"),
];

struct Source {
    /// Path inside `src`.
    path: String,
    text: String,
    /// The text without comments and without its tests.
    code: String,
}

impl Source {
    /// Modules from the crate's root to this file: `store`, `writer`.
    fn modules(&self) -> Vec<&str> {
        let path = self.path.strip_suffix(".rs").unwrap();
        path.strip_suffix("/mod").unwrap_or(path).split('/').filter(|part| !["lib", "main"].contains(part)).collect()
    }
}

fn sources() -> Vec<Source> {
    fn collect(folder: &Path, inside: &str, sources: &mut Vec<Source>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{inside}{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                collect(&entry.path(), &format!("{path}/"), sources);
            } else if path.ends_with(".rs") {
                let text = fs::read_to_string(entry.path()).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap_or("");
                let code = code.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
                sources.push(Source { path, text, code });
            }
        }
    }
    let mut sources = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut sources);
    assert!(sources.len() > 20, "only {} files found", sources.len());
    sources
}

/// Collects what every file has to be told, and fails with all of it.
fn check(complaints: impl Fn(&Source) -> Vec<String>) {
    let found: Vec<String> = sources().iter().flat_map(|s| complaints(s).into_iter().map(|c| format!("src/{}: {c}", s.path))).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

/// Complains of every one of these words in the code.
fn without(source: &Source, words: &[&str]) -> Vec<String> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let holds = |word: &str| {
        source.code.match_indices(word).any(|(at, _)| {
            let open = word.starts_with(|c: char| c.is_alphanumeric()) && part(source.code[..at].chars().next_back());
            let goes_on = word.ends_with(|c: char| c.is_alphanumeric()) && part(source.code[at + word.len()..].chars().next());
            !open && !goes_on
        })
    };
    words.iter().filter(|word| holds(word)).map(|word| format!("`{word}`")).collect()
}

fn is_identifier(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Modules carry the `cfg`, and not items: what needs a feature lies in a module of its own, with another in its place where it is missing.
#[test]
fn features_are_asked_for_by_modules() {
    let asked = sources().iter().flat_map(|source| source.text.lines()).filter(|line| line.contains("cfg(") && line.contains("feature")).count();
    assert!(asked < 60, "{asked} lines ask for a feature");
}

/// The modules of the crate's root that a path prefix is followed by, groups in braces included.
fn heads<'a>(code: &'a str, prefix: &str) -> Vec<&'a str> {
    let mut heads = Vec::new();
    for (at, _) in code.match_indices(prefix) {
        if code[..at].ends_with(is_identifier) || (!prefix.starts_with("crate") && code[..at].ends_with("::")) {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            heads.push(rest);
            continue;
        };
        let (mut depth, mut from) = (0usize, 0);
        for (i, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => {
                    heads.push(&group[from..i]);
                    break;
                }
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    heads.push(&group[from..i]);
                    from = i + 1;
                }
                _ => {}
            }
        }
    }
    let word = |text: &'a str| text.trim_start().split(|c| !is_identifier(c)).next().unwrap_or("");
    heads.into_iter().map(word).filter(|head| head.starts_with(char::is_lowercase) && *head != "super").collect()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|line| line.contains(&module))
}

#[test]
fn a_layer_uses_only_what_lies_below() {
    check(|source| {
        let modules = source.modules();
        let Some(&own) = modules.first() else { return Vec::new() };
        let Some(line) = layer(own) else { return vec![format!("`{own}` has no layer: give it one in tests/tidy.rs")] };
        let mut used = heads(&source.code, "crate::");
        used.extend(heads(&source.code, &"super::".repeat(modules.len())));
        used.retain(|head| *head != own);
        used.sort_unstable();
        used.dedup();
        let allowed = |head: &str| layer(head).is_some_and(|other| other > line) || BESIDE.contains(&(own, head));
        used.into_iter().filter(|head| !allowed(head)).map(|head| format!("`{own}` uses `{head}`")).collect()
    });
}

#[test]
fn paths_are_found_in_every_form() {
    let code = "use crate::store::{Weight, hash::x};\nuse crate::{error::Error, pass::{A, b}, kernel};\nlet x = $crate::kernel::f(); crate::Result; mycrate::no; super::super::model::X; super::y";
    assert_eq!(heads(code, "crate::"), ["store", "error", "pass", "kernel", "kernel"]);
    assert_eq!(heads(code, "super::super::"), ["model"]);
    assert_eq!(heads(code, "super::"), ["y"]);
}

#[test]
fn every_file_says_what_it_is() {
    check(|source| {
        // The crate says what README.md says.
        let said = source.text.starts_with("//! ") || (source.path == "lib.rs" && source.text.starts_with("#![doc = include_str!"));
        if said { Vec::new() } else { vec!["does not start with `//!`".into()] }
    });
}

#[test]
fn only_the_command_line_prints_and_exits() {
    check(|source| match source.path.starts_with("cli/") {
        true => Vec::new(),
        // What other programs write is read in one place.
        false if source.path == "program.rs" => without(source, &["println!", "eprintln!", "print!", "eprint!", "dbg!"]),
        false => without(source, &["println!", "eprintln!", "print!", "eprint!", "dbg!", "stdout", "stderr", "process::exit", "process::abort"]),
    });
}

#[test]
fn unsafe_code_has_one_place() {
    check(|source| if source.path == "kernel/simd.rs" { Vec::new() } else { without(source, &["unsafe", "unsafe_code"]) });
}

#[test]
fn values_leave_and_reach_devices_in_one_place() {
    let words = [".to_vec0", ".to_vec1", ".to_vec2", ".to_vec3", ".to_scalar", ".to_device"];
    // What `data` and `runtime` hold, and what answers become, is on the host.
    let free = ["exec/transfer.rs", "data/", "runtime/", "evaluation/"];
    check(|source| if free.iter().any(|path| source.path.starts_with(path)) { Vec::new() } else { without(source, &words) });
}

#[test]
fn gradients_come_from_ops_alone() {
    check(|source| without(source, &["Var::", ".detach()", "GradStore", "backprop"]));
}

#[test]
fn what_ops_mean_is_the_same_on_every_device() {
    let words = ["is_cpu()", "is_cuda()", "is_metal()", "Device::Cpu", "Device::Cuda", "on_host("];
    check(|source| {
        let meaning = source.path.starts_with("ir/ops/") && !source.path.starts_with("ir/ops/kernels/");
        if meaning { without(source, &words) } else { Vec::new() }
    });
}

#[test]
fn nothing_panics_on_purpose() {
    check(|source| without(source, &[".unwrap()", ".expect(", ".unwrap_err()", ".expect_err(", "panic!", "todo!", "unimplemented!", "unreachable!"]));
}

#[test]
fn files_are_short() {
    const LINES: usize = 500;
    check(|source| {
        let lines = source.text.lines().count();
        if lines > LINES { vec![format!("{lines} lines, {LINES} are enough")] } else { Vec::new() }
    });
}

/// What is behind the tests of a file would be read by nobody here.
#[test]
fn tests_come_last() {
    check(|source| match source.text.split_once("#[cfg(test)]\n") {
        None => Vec::new(),
        Some((_, tests)) if tests.starts_with("mod tests {\n") && tests.find("\n}\n") == Some(tests.len() - 3) => Vec::new(),
        Some(_) => vec!["`#[cfg(test)]` marks something else than one `mod tests` at the end".into()],
    });
}

#[test]
fn the_store_knows_no_pass_and_no_architecture() {
    let mut words = vec!["llama", "bert", "gpt2", "vit", "resnet", "candle", "onnx", "Linear", "Graph"];
    // Two passes are named by verbs that kernels have too.
    words.extend(compress::pass::PASSES.iter().filter(|name| !["quantize", "dequantize"].contains(*name)));
    check(|source| if source.path.starts_with("store/") { without(source, &words) } else { Vec::new() });
}
