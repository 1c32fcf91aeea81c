//! The job scripts of `configs/cluster`, with the variables that Slurm and Kubernetes set.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::cli::support::{compress, data, ok};

fn config(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/cluster").join(name)
}

/// A folder with a model, a recipe, and `compress` in `PATH`.
fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama");
    fs::create_dir(folder.path().join("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), folder.path().join("model").join(name)).unwrap();
    }
    fs::write(folder.path().join("recipe.yaml"), "model: model\nmeasure: false\npasses: [quantize-dynamic]\n").unwrap();
    ok(folder.path(), "run recipe.yaml -o whole");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_compress"), folder.path().join("compress")).unwrap();
    folder
}

fn succeeds(command: &mut Command, folder: &Path, variables: &[(&str, String)]) {
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let output = command.current_dir(folder).env("PATH", path).envs(variables.iter().map(|(name, value)| (name, value))).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn same(folder: &Path, output: &str) {
    for name in ["model.safetensors", "config.json"] {
        assert!(fs::read(folder.join(output).join(name)).unwrap() == fs::read(folder.join("whole").join(name)).unwrap(), "{name}");
    }
    ok(folder, &format!("verify {output}"));
}

#[test]
fn slurm_tasks_write_all_parts() {
    let folder = place();
    for task in 1..=3 {
        let set = [("SLURM_ARRAY_TASK_ID", task.to_string()), ("SLURM_ARRAY_TASK_COUNT", "3".into()), ("SLURM_CPUS_PER_TASK", "1".into())];
        succeeds(Command::new("sh").arg(config("parts.sbatch")).args(["recipe.yaml", "out"]), folder.path(), &set);
    }
    ok(folder.path(), "merge out");
    same(folder.path(), "out");
}

#[test]
fn kubernetes_pods_write_and_merge_all_parts() {
    let folder = place();
    let command = |name: &str| {
        let job: Value = serde_saphyr::from_str(&fs::read_to_string(config(name)).unwrap()).unwrap();
        let words = job["spec"]["template"]["spec"]["containers"][0]["command"].as_array().unwrap().clone();
        let words: Vec<String> = words.iter().map(|word| word.as_str().unwrap().replace("/models/", "")).collect();
        (words, job["spec"]["completions"].as_u64())
    };
    let (words, completions) = command("kubernetes.yaml");
    for index in 0..completions.unwrap() {
        succeeds(Command::new(&words[0]).args(&words[1..]), folder.path(), &[("JOB_COMPLETION_INDEX", index.to_string())]);
    }
    let (words, _) = command("kubernetes-merge.yaml");
    succeeds(Command::new(&words[0]).args(&words[1..]), folder.path(), &[]);
    same(folder.path(), "out");
}

#[test]
fn the_outcome_of_a_part_is_reported() {
    let folder = place();
    let part = |number: usize| data(folder.path(), &format!("run recipe.yaml -o out --part {number}/2 --json --quiet"));
    assert_eq!(part(1)["outcome"], "written");
    assert_eq!(part(1)["outcome"], "found");
    let run = compress(folder.path(), "merge out");
    assert!(run.code == 1 && run.stderr.contains("1 of 2 parts are missing: 2"), "{}", run.stderr);
    for (args, said) in [
        ("run recipe.yaml -o out --part 3/2", "part 3 of 2 does not exist"),
        ("run recipe.yaml -o out --part auto", "this is not a job of an array"),
        ("run recipe.yaml -o out --part 1/2 --sweep seed=1,2", "cannot be used with"),
        ("prune-structured model -o out --amount 0.5 --part 1/2", "runs the model and cannot be run in parts"),
        ("merge nothing", "has no finished part"),
        ("merge out.parts", "out.parts: is the folder of the parts, not the output\nhint: specify the output: `out`"),
    ] {
        let run = compress(folder.path(), args);
        assert!(run.code != 0 && run.stderr.contains(said), "{args}: {}", run.stderr);
    }
}
