//! Checks the rules of the source code.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

/// Layers from top to bottom: a layer may use the layers below it.
const LAYERS: [&[&str]; 21] = [
    &["build", "cli", "plugin", "prelude"],
    &["pipeline"],
    &["provenance"],
    &["recipe", "report"],
    &["pass"],
    &["export"],
    &["contract"],
    &["train"],
    &["evaluation", "calibration", "generation"],
    &["exec"],
    &["analysis", "data"],
    &["model"],
    &["arch", "onnx"],
    &["runtime", "yaml_text"],
    &["aliases", "run_state"],
    &["ir", "store"],
    &["gpu"],
    &["kernel"],
    &["entry", "work", "output"],
    &["files", "ratio"],
    &["cache", "error", "heap", "one_or_several", "program", "registry"],
];

/// Crates in `crates`, and the module that their root is imported as, if it is one.
const CRATES: [(&str, &str); 5] = [("core", ""), ("engine", ""), ("graph", ""), ("kernels", "kernel/"), ("onnx", "onnx/")];

pub struct Source {
    /// Folder of the crate in `crates`; empty for the root package.
    pub package: &'static str,
    /// Path in `src` of the crate.
    pub file: String,
    /// Modules from the root of the crate to this file.
    pub module: Vec<String>,
    /// Path in `src` of a crate; files of [`CRATES`] begin with the module that the other crates use them as.
    pub path: String,
    pub text: String,
    /// The text without comments and without its tests.
    pub code: String,
}

/// Modules from the crate's root to a file: `store`, `writer`.
fn modules(path: &str) -> Vec<&str> {
    let path = path.strip_suffix(".rs").unwrap();
    path.strip_suffix("/mod").unwrap_or(path).split('/').filter(|part| !["lib", "main", "mod"].contains(part)).collect()
}

pub fn sources() -> Vec<Source> {
    fn collect(folder: &Path, (package, prefix, inside): (&'static str, &str, &str), sources: &mut Vec<Source>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{inside}{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                collect(&entry.path(), (package, prefix, &format!("{path}/")), sources);
            } else if path.ends_with(".rs") {
                let text = fs::read_to_string(entry.path()).unwrap();
                let file = path.strip_prefix(prefix).unwrap_or(&path).to_owned();
                let module = modules(&file).into_iter().map(str::to_owned).collect();
                // One module of the crate `compress-onnx` is below the others.
                let path = path.strip_prefix("onnx/").filter(|path| path.starts_with("runtime/")).map(str::to_owned).unwrap_or(path);
                let code = text.split("#[cfg(test)]").next().unwrap_or("");
                let code = code.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
                sources.push(Source { package, file, module, path, text, code });
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    collect(&root.join("src"), ("", "", ""), &mut sources);
    for (name, module) in CRATES {
        collect(&root.join("crates").join(name).join("src"), (name, module, module), &mut sources);
    }
    assert!(sources.len() > 20, "only {} files found", sources.len());
    sources
}

/// Collects the violations of all files, and fails if there are any.
fn check(complaints: impl Fn(&Source) -> Vec<String>) {
    let found: Vec<String> = sources().iter().flat_map(|s| complaints(s).into_iter().map(|c| format!("{}: {c}", s.path))).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

/// Reports each occurrence of these words in the code.
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

pub fn is_identifier(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Features are attributes of modules named `running`, not of items: code that needs a feature is in a
/// separate module, with a stand-in for builds without it.
#[test]
fn features_are_attributes_of_modules() {
    let mut asked = 0;
    for source in sources() {
        let lines: Vec<&str> = source.text.lines().collect();
        for (at, _) in lines.iter().enumerate().filter(|(_, line)| line.contains("cfg(") && line.contains("feature")) {
            let item = lines[at + 1..].iter().find(|line| !line.trim_start().starts_with("#["));
            asked += usize::from(!item.is_some_and(|item| item.contains("mod running")));
        }
    }
    assert!(asked < 55, "{asked} lines use a feature");
}

/// The root modules that follow a path prefix, including groups in braces.
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
fn a_layer_uses_only_lower_layers() {
    check(|source| {
        let modules = modules(&source.path);
        let Some(&own) = modules.first() else { return Vec::new() };
        let Some(line) = layer(own) else { return vec![format!("`{own}` has no layer: add it to tests/it/tidy.rs")] };
        let mut used = heads(&source.code, "crate::");
        used.extend(heads(&source.code, &"super::".repeat(modules.len())));
        // In a crate that is one module, `crate::` is followed by its own modules.
        let single = CRATES.iter().any(|(_, module)| module.strip_suffix('/') == Some(own));
        used.retain(|head| *head != own && !(single && layer(head).is_none()));
        used.sort_unstable();
        used.dedup();
        let allowed = |head: &str| layer(head).is_some_and(|other| other > line);
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
fn every_file_has_a_module_comment() {
    check(|source| if source.text.starts_with("//! ") { Vec::new() } else { vec!["does not start with `//!`".into()] });
}

#[test]
fn only_the_command_line_prints_and_exits() {
    check(|source| match source.path.starts_with("cli/") {
        true => Vec::new(),
        // Cargo reads the output of build scripts.
        false if source.path == "build.rs" => without(source, &["eprintln!", "print!", "eprint!", "dbg!", "process::exit"]),
        // Files of other programs are read in one module.
        false if source.path == "program.rs" => without(source, &["println!", "eprintln!", "print!", "eprint!", "dbg!"]),
        false => without(source, &["println!", "eprintln!", "print!", "eprint!", "dbg!", "stdout", "stderr", "process::exit", "process::abort"]),
    });
}

/// One file dispatches to instruction sets, one multiplies in tile registers, and one launches kernels on
/// GPUs. Another declares a function of the C library as safe to call: it contains the declaration, its
/// attribute, and no call of unsafe code.
#[test]
fn unsafe_code_is_in_five_files() {
    check(|source| match source.path.as_str() {
        "kernel/simd.rs" | "kernel/amx.rs" | "kernel/pairs.rs" | "gpu/launch.rs" => Vec::new(),
        "heap.rs" if source.code.matches("unsafe").count() == 2 && source.code.contains("unsafe extern") => Vec::new(),
        _ => without(source, &["unsafe", "unsafe_code"]),
    });
}

#[test]
fn transfers_are_in_one_module() {
    let words = [".to_vec0", ".to_vec1", ".to_vec2", ".to_vec3", ".to_scalar", ".to_device"];
    // Values of `data` and `runtime`, and outputs, are on the host.
    let free = ["exec/transfer.rs", "data/", "runtime/", "evaluation/"];
    check(|source| if free.iter().any(|path| source.path.starts_with(path)) { Vec::new() } else { without(source, &words) });
}

#[test]
fn gradients_are_computed_only_by_ops() {
    check(|source| without(source, &["Var::", ".detach()", "GradStore", "backprop"]));
}

/// Candle uploads the number at every call of these methods; `ScalarOps` uploads it once per device.
#[test]
fn scalar_operands_are_uploaded_once() {
    let methods = [".maximum(", ".minimum(", ".clamp(", ".eq(", ".ne(", ".lt(", ".le(", ".gt(", ".ge("];
    let literal = |arguments: &str| {
        let word: String = arguments.trim_start_matches('-').chars().take_while(|c| c.is_alphanumeric() || "._".contains(*c)).collect();
        word.starts_with(|c: char| c.is_ascii_digit()) && !word.contains("..")
    };
    // Numbers also have a method `clamp`, which is allowed.
    let fails = |arguments: &str| {
        let mut depth = 1;
        let end = arguments.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        end.is_some_and(|end| arguments[end..].starts_with(")?"))
    };
    check(|source| {
        if !["ir/ops/", "train/", "exec/", "calibration/"].iter().any(|path| source.path.starts_with(path)) {
            return Vec::new();
        }
        let calls = methods.iter().flat_map(|method| source.code.match_indices(method).map(move |(at, _)| (*method, &source.code[at + method.len()..])));
        let uploads = calls.filter(|(method, arguments)| if *method == ".clamp(" { fails(arguments) } else { literal(arguments) });
        uploads.map(|(method, arguments)| format!("`{method}{}`", arguments.lines().next().unwrap_or(""))).collect()
    });
}

#[test]
fn ops_are_defined_independently_of_devices() {
    let words = ["is_cpu()", "is_cuda()", "is_metal()", "Device::Cpu", "Device::Cuda", "on_host("];
    check(|source| {
        let meaning = source.path.starts_with("ir/ops/") && !source.path.starts_with("ir/ops/kernels/");
        if meaning { without(source, &words) } else { Vec::new() }
    });
}

#[test]
fn code_does_not_panic() {
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

/// Comments end before column 110, and Markdown before 120. Tables, links, code, and the entries of the
/// changelog are one line each.
#[test]
fn prose_is_wrapped() {
    let mut found = Vec::new();
    for (ending, limit) in [(".rs", 110), (".md", 120)] {
        let mut paths = Vec::new();
        crate::language::files(Path::new(env!("CARGO_MANIFEST_DIR")), ending, &mut paths);
        for path in paths.iter().filter(|path| !path.ends_with("CHANGELOG.md")) {
            let mut is_code = false;
            for (at, line) in fs::read_to_string(path).unwrap().lines().enumerate() {
                let text = if ending == ".rs" { line.trim_start().strip_prefix("//").map(|text| text.trim_start_matches(['/', '!'])) } else { Some(line) };
                let text = text.map(str::trim_start);
                is_code = text.is_some_and(|text| is_code != text.starts_with("```"));
                let is_prose = !is_code && text.is_some_and(|text| !text.starts_with(['|', '[']));
                if is_prose && line.chars().count() > limit {
                    found.push(format!("{}:{}", path.display(), at + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Code after the tests of a file would not be checked by these tests.
#[test]
fn tests_come_last() {
    check(|source| match source.text.split_once("#[cfg(test)]\n") {
        None => Vec::new(),
        Some((_, tests)) if tests.starts_with("mod tests {\n") && tests.find("\n}\n") == Some(tests.len() - 3) => Vec::new(),
        Some(_) => vec!["`#[cfg(test)]` is not on a single `mod tests` at the end".into()],
    });
}

#[test]
fn the_store_does_not_depend_on_passes_and_architectures() {
    let mut words = vec!["llama", "bert", "gpt2", "vit", "resnet", "candle", "onnx", "Linear", "Graph"];
    // Two passes have the names of kernel functions.
    words.extend(compress::pass::PASSES.iter().filter(|name| !["quantize", "dequantize"].contains(*name)));
    check(|source| if source.path.starts_with("store/") { without(source, &words) } else { Vec::new() });
}

/// Test code of all crates, and of `tests/it`: path and text.
fn test_code() -> Vec<(String, String)> {
    fn collect(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, found);
            } else {
                found.push((path.to_string_lossy().into_owned(), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let unit = sources().into_iter().filter_map(|source| Some((source.path, source.text.split_once("#[cfg(test)]")?.1.to_owned())));
    let mut found = unit.collect();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it"), &mut found);
    found.retain(|(path, _)| !path.ends_with("tests/it/tidy.rs"));
    found
}

/// Lines that end a test early, or print instead of failing, without a check that can fail in the gate.
fn silent_skips(text: &str) -> Vec<&str> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let (mut test, mut found) = (None, Vec::new());
    for (at, line) in lines.iter().enumerate() {
        match test {
            None if line.trim() == "#[test]" => test = Some(indent(line)),
            Some(outer) if *line == format!("{:outer$}}}", "") => test = None,
            _ => {}
        }
        // The blocks around the line, from the innermost to the test.
        let mut blocks = vec![*line];
        for before in lines[..at].iter().rev().take_while(|before| test.is_some_and(|outer| indent(before) > outer)) {
            if indent(before) < indent(blocks[blocks.len() - 1]) {
                blocks.push(before);
            }
        }
        // A `return` in a closure does not end the test.
        let checks = ["has_onnx_runtime()", "available(", "var_os(", "| {"];
        let checks = checks.iter().any(|check| blocks.iter().any(|block| block.contains(check)));
        let ends = [" return;", "{ return }", "{ return; }"].iter().any(|end| line.contains(end));
        if test.is_some() && ends && !checks || line.contains("print!(") || line.contains("println!(") || line.contains("library().is_") {
            found.push(line.trim());
        }
    }
    found
}

/// A test that needs a program or a library of the machine asks `compress_testing::available`, which fails in
/// the gate.
#[test]
fn no_test_is_skipped_silently() {
    // Tests that are started by other programs print their results.
    let prints = ["cached_results.rs", "mutated.rs", "onnx_in/mutations.rs", "files/remote/http.rs"];
    let found: Vec<String> = test_code()
        .iter()
        .flat_map(|(path, text)| silent_skips(text).into_iter().map(move |line| (path, line)))
        .filter(|(path, line)| !(line.starts_with("println!") && prints.iter().any(|file| path.ends_with(file))))
        .map(|(path, line)| format!("{path}: {line}"))
        .collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    let test = |body: &str| format!("#[test]\nfn t() {{\n{body}\n}}\nfn helper() {{\n    return;\n}}\n");
    for body in [
        "    if old {\n        return;\n    }",
        "    let Ok(x) = find() else { return };",
        "    eprintln!(\"not run\");",
        "    if runtime::library().is_err() {}",
    ] {
        assert_eq!(silent_skips(&test(body)).len(), 1, "{body}");
    }
    assert!(silent_skips(&test("    if !has_onnx_runtime() {\n        return;\n    }")).is_empty());
}

/// Default features are enabled for the packages of `cargo test --workspace`, and not for the dependencies of
/// `cargo test --test it`, which would then compile these crates and all that use them once more.
#[test]
fn crates_have_no_default_features() {
    for (package, _) in CRATES {
        let manifest = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("crates").join(package).join("Cargo.toml")).unwrap();
        assert!(!manifest.lines().any(|line| line.starts_with("default =")), "crates/{package} has default features");
    }
}
