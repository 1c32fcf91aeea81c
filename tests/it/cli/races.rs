//! Concurrent runs with the same output: one of them writes it, the others report an error, and no data
//! is lost.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::cli::support::{METADATA, Run, file, floats, names};

const ROUNDS: usize = 50;

/// Arguments of one round: the number of processes, and whether the first one uses `--force`.
fn round(folder: &Path, launcher: &[&str], count: usize, force: bool) -> Vec<Run> {
    let start = |number: usize| -> Child {
        let program = [launcher, &[env!("CARGO_BIN_EXE_compress")]].concat();
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).args(["cast", "in", "-o", "deep/out", "--quiet", "--threads", "1"]).current_dir(folder);
        command.args((force && number > 0).then_some("--force")).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..count).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap().into()).collect()
}

/// Runs `ROUNDS` races for one output.
fn race(launcher: &[&str], count: usize) {
    // Outputs are synced, which is fast on a memory-backed disk.
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let path = folder.path();
    file(&path.join("in/model.safetensors"), METADATA, &[floats("a.weight", &[8, 8])]);
    fs::write(path.join("in/tokenizer.json"), "{}").unwrap();
    let mut first: Option<Vec<u8>> = None;
    for number in 0..ROUNDS {
        let force = number % 5 == 4;
        let runs = round(path, launcher, count, force);
        let won = runs.iter().filter(|run| run.code == 0).count();
        for run in runs.iter().filter(|run| run.code != 0) {
            assert!(run.code == 1 && run.stderr.contains("deep/out: exists"), "round {number}: exit code {}\n{}", run.code, run.stderr);
        }
        assert!(if force { won >= count - 1 } else { won == 1 }, "round {number}: {won} of {count} have written");
        let weights = fs::read(path.join("deep/out/model.safetensors")).unwrap_or_default();
        assert_eq!(
            names(&path.join("deep/out")),
            ["README.md", "model.safetensors", "recipe.yaml", "report.html", "report.json", "report.md", "tokenizer.json"],
            "round {number}"
        );
        assert!(!weights.is_empty() && *first.get_or_insert_with(|| weights.clone()) == weights, "round {number}: the weights are incomplete");
        assert_eq!(names(&path.join("deep")), ["out"], "round {number}: temporary files remain");
        fs::remove_dir_all(path.join("deep")).unwrap();
    }
}

#[test]
fn twelve_processes_race_for_one_output() {
    race(&[], 12);
}

/// As in containers with a shared volume: both processes have id 1.
#[test]
fn two_pid_namespaces_race_for_one_output() {
    let launcher = ["unshare", "--pid", "--fork"];
    let started = match Command::new(launcher[0]).args(&launcher[1..]).arg("true").output() {
        Ok(output) if output.status.success() => Ok(()),
        refused => Err(format!("{refused:?}")),
    };
    if compress_testing::available("unshare --pid", started) {
        race(&launcher, 2);
    }
}
