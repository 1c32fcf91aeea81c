//! stdout contains data, stderr progress and errors: JSON output, colors only on a terminal, broken pipes.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::cli::support::{Run, command, compress, data, file, floats, model, names, ok, read_json};

/// A folder with a model `in`, a recipe, and an output `done`.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    fs::write(folder.path().join("recipe.yaml"), "model: in\npasses: [prune-unstructured, cast]\n").unwrap();
    ok(folder.path(), "cast in -o done");
    folder
}

const WITH_DATA: [&str; 11] = [
    "run recipe.yaml -o out",
    "run recipe.yaml -o other --dry-run",
    "plan recipe.yaml",
    "chain in -o chained -- cast",
    "prune-unstructured in -o pruned",
    "quantize-dynamic in -o int8",
    "cast in -o bf16",
    "densify in -o dense",
    "inspect in",
    "diff in done",
    "verify done",
];

fn lines(stderr: &str) -> Vec<Value> {
    stderr.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[test]
fn json_on_stdout_is_one_value_and_stderr_is_silent() {
    let folder = prepared();
    for args in WITH_DATA {
        let run = ok(folder.path(), &format!("--json {args}"));
        assert!(serde_json::from_str::<Value>(&run.stdout).is_ok(), "{args}\n{}", run.stdout);
        assert_eq!(run.stderr, "", "{args}");
    }
    for args in ["schema", "doctor --json"] {
        data(folder.path(), args);
    }
}

#[test]
fn progress_for_scripts_is_one_json_object_a_line() {
    let folder = prepared();
    let run = ok(folder.path(), "--log-format json run recipe.yaml -o out --json");
    assert!(serde_json::from_str::<Value>(&run.stdout).is_ok());
    let events = lines(&run.stderr);
    let stages: Vec<&str> = events.iter().filter(|e| e["event"] == "begin").map(|e| e["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["Writing", "Compressing", "Compressing"]);
    assert_eq!(events.iter().filter(|e| e["event"] == "end").count(), stages.len());
    assert!(events.iter().all(|e| e["event"] != "begin" || e["bytes"].as_u64().unwrap() > 0));

    let inspected = lines(&ok(folder.path(), "inspect in --log-format json").stderr);
    assert_eq!(inspected.first().map(|event| &event["event"]), Some(&Value::from("begin")), "{inspected:?}");

    let failed = compress(folder.path(), "cast in -o done --log-format json");
    let told = lines(&failed.stderr);
    assert_eq!((failed.code, told.len(), &told[0]["event"]), (1, 1, &Value::from("error")));
    assert!(told[0]["message"].as_str().unwrap().ends_with("done: exists") && told[0]["hint"].as_str().unwrap().contains("--force"), "{}", told[0]);
}

#[test]
fn quiet_prints_only_errors() {
    let folder = prepared();
    assert_eq!(ok(folder.path(), "-q --log-format json cast in -o out").stderr, "");
    let failed = compress(folder.path(), "cast in -o out --quiet");
    assert!(failed.code == 1 && failed.stderr.contains("out: exists"), "{}", failed.stderr);
}

#[test]
fn exit_codes() {
    let folder = prepared();
    for (args, code) in [
        ("inspect in", 0),
        ("plan recipe.yaml", 0),
        ("--help", 0),
        ("--version", 0),
        ("help cast", 0),
        ("inspect nowhere", 1),
        ("cast in -o done", 1),
        ("verify in", 1),
        ("run nowhere.yaml", 1),
        ("", 2),
        ("squeeze in", 2),
        ("cast in", 2),
        ("cast in -o out --to int4", 2),
        ("cast in -o out --targets nothing", 2),
        ("prune-unstructured in -o out --amount 100000", 2),
        ("run recipe.yaml", 2),
        ("run recipe.yaml -o out --set no=1", 2),
    ] {
        let run = compress(folder.path(), args);
        assert_eq!(run.code, code, "compress {args}\n{}", run.stderr);
        assert!(code == 0 || run.stdout.is_empty(), "{args}\n{}", run.stdout);
    }
    assert_eq!(names(folder.path()), ["done", "in", "recipe.yaml"]);
}

#[test]
fn names_of_every_kind_are_valid_in_json_and_in_markdown() {
    let folder = tempfile::tempdir().unwrap();
    let name = "a\u{7f}\u{85}\u{9f}\u{202e}\u{2066}\n| x |\u{2028}`<b>`.weight";
    file(&folder.path().join("in"), &[("format", "pt")], &[floats(name, &[2, 2]), floats("b", &[2])]);
    let steers = |text: &str| text.contains(['\u{7f}', '\u{85}', '\u{9f}', '\u{202e}', '\u{2066}', '\u{2028}']);
    let run = ok(folder.path(), "inspect in --json");
    assert!(!steers(&run.stdout), "{:?}", run.stdout);
    assert_eq!(data(folder.path(), "inspect in --json")["tensors"][0]["name"], name);
    let report = data(folder.path(), "cast in -o out --to bf16 --json");
    assert_eq!(report["layers"][0]["name"], name);
    let text = ok(folder.path(), "inspect in");
    assert!(!steers(&text.stdout) && text.stdout.contains("\\u{202e}") && text.stdout.contains("\\n| x |"), "{:?}", text.stdout);
    let markdown = fs::read_to_string(folder.path().join("out/report.md")).unwrap();
    let rows: Vec<&str> = markdown.lines().filter(|line| line.contains("\\u{202e}")).collect();
    assert!(!steers(&markdown) && rows.len() == 1 && rows[0].ends_with(" |"), "{markdown:?}");
    assert!(!steers(&fs::read_to_string(folder.path().join("out/report.html")).unwrap()));
    let failed = compress(folder.path(), "cast in -o new --targets \u{9b}x");
    assert!(failed.code > 0 && !failed.stderr.contains('\u{9b}'), "{:?}", failed.stderr);
}

#[test]
fn names_in_files_cannot_control_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder.path().join("in"), &[("format", "pt")], &[floats("a\u{1b}[31m\u{7}.weight", &[2, 2]), floats("b", &[2])]);
    for args in ["inspect in", "cast in -o out", "diff in out", "cast in -o out2 --targets c"] {
        let run = compress(folder.path(), args);
        assert!(!run.stdout.contains('\u{1b}') && !run.stderr.contains(['\u{1b}', '\u{7}']), "{args}\n{:?}{:?}", run.stdout, run.stderr);
    }
    assert!(ok(folder.path(), "inspect in").stdout.contains("a\\u{1b}[31m\\u{7}.weight"));
    assert_eq!(data(folder.path(), "inspect in --json")["tensors"][0]["name"], "a\u{1b}[31m\u{7}.weight");
}

/// Runs the binary on a terminal created by `script`, which merges both streams.
#[cfg(target_os = "linux")]
fn on_a_terminal(folder: &Path, environment: &[(&str, &str)]) -> Run {
    let line = format!("{} cast nowhere -o out", env!("CARGO_BIN_EXE_compress"));
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).current_dir(folder).env_remove("NO_COLOR").envs(environment.iter().copied()).stdin(Stdio::null());
    script.output().expect("this test needs `script` (package bsdutils or util-linux)").into()
}

#[cfg(target_os = "linux")]
#[test]
fn colors_are_used_on_terminals_without_no_color() {
    let folder = prepared();
    let coloured = on_a_terminal(folder.path(), &[("TERM", "xterm")]);
    assert!(coloured.code == 1 && coloured.stdout.contains("\u{1b}[1;31merror:\u{1b}[0m cannot open nowhere"), "{:?}", coloured.stdout);
    let plain = on_a_terminal(folder.path(), &[("TERM", "xterm"), ("NO_COLOR", "1")]);
    assert!(plain.code == 1 && plain.stdout.contains("error: cannot open nowhere") && !plain.stdout.contains('\u{1b}'), "{:?}", plain.stdout);
    assert!(!compress(folder.path(), "cast nowhere -o out").stderr.contains('\u{1b}'));
}

#[test]
fn a_broken_pipe_is_not_an_error() {
    let folder = prepared();
    for args in ["schema", "inspect in", "inspect in --json", "diff in done --all", "completions bash", "--help", "cast in -o gone"] {
        let mut child = command(folder.path()).args(args.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let run = Run::from(child.wait_with_output().unwrap());
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{args}");
    }
    ok(folder.path(), "verify gone");
}

#[cfg(target_os = "linux")]
#[test]
fn data_that_cannot_be_written_is_a_failure() {
    let folder = prepared();
    for args in ["schema", "inspect in", "inspect in --json", "doctor", "completions bash", "plan recipe.yaml", "verify done"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let run = Run::from(command(folder.path()).args(args.split(' ')).stdout(full).output().unwrap());
        assert!(run.code == 1 && run.stderr.starts_with("error: output stdout: No space left on device"), "{args}: {}\n{}", run.code, run.stderr);
    }
}

#[test]
fn paths_that_are_not_utf8() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join(OsStr::from_bytes(b"in\xff"));
    model(&input);
    let run = |args: &[&OsStr]| -> Run { command(folder.path()).args(args).output().unwrap().into() };
    let [inspect, cast, json, output] = ["inspect", "cast", "--json", "-o"].map(OsStr::new);
    let shown = run(&[inspect, input.as_os_str(), json]);
    assert!(shown.code == 0 && shown.stdout.contains("in\u{fffd}"), "{}{}", shown.stdout, shown.stderr);
    let cast = run(&[cast, input.as_os_str(), output, OsStr::from_bytes(b"out\xfe"), json]);
    assert_eq!(cast.code, 0, "{}", cast.stderr);
    let out = folder.path().join(OsStr::from_bytes(b"out\xfe"));
    assert!(read_json(&out.join("report.json"))["model"]["source"].as_str().unwrap().ends_with("in\u{fffd}"));
    assert!(fs::read_to_string(out.join("recipe.yaml")).unwrap().contains("cast"));
}
