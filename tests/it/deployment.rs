//! The GitHub action, the container image and the pre-commit hook: their commands run, and they refer to
//! files and inputs that exist.
#![cfg(all(feature = "cli", feature = "run"))]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fancy_regex::Regex;
use serde_json::Value;

const RECIPE: &str = "model: model\nmeasure: false\npasses: [quantize-dynamic]\n";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn yaml(name: &str) -> Value {
    serde_saphyr::from_str(&fs::read_to_string(root().join(name)).unwrap()).unwrap()
}

/// A folder with a model, a recipe, and `compress` in the subfolder `bin`.
fn workspace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("model")).unwrap();
    fs::create_dir(folder.path().join("bin")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(root().join("tests/golden/models/bert").join(name), folder.path().join("model").join(name)).unwrap();
    }
    fs::write(folder.path().join("recipe.yaml"), RECIPE).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_compress"), folder.path().join("bin/compress")).unwrap();
    folder
}

/// Runs a program with `bin` of the folder before `PATH`.
fn start(program: &str, args: &[&str], folder: &Path, variables: &[(&str, String)]) -> Output {
    let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
    Command::new(program).args(args).current_dir(folder).env("PATH", path).envs(variables.iter().cloned()).output().unwrap()
}

/// The inputs that an expression or a text of the action refers to.
fn inputs(text: &str) -> BTreeSet<String> {
    let pattern = Regex::new(r"\$\{\{[^}]*\binputs\.([a-z-]+)[^}]*\}\}").unwrap();
    pattern.captures_iter(text).map(|found| found.unwrap()[1].to_owned()).collect()
}

/// The step of the action with a name.
fn step<'a>(action: &'a Value, name: &str) -> &'a Value {
    action["runs"]["steps"].as_array().unwrap().iter().find(|step| step["name"] == name).unwrap()
}

/// Runs a step of the action as a runner does, with these inputs.
fn run_step(action: &Value, name: &str, folder: &Path, given: &[(&str, &str)]) -> Output {
    let step = step(action, name);
    let value = |expression: &str| {
        let name = inputs(expression).into_iter().next().unwrap();
        let given = given.iter().find(|(input, _)| *input == name).map(|(_, value)| (*value).to_owned());
        given.unwrap_or_else(|| action["inputs"][&name]["default"].as_str().unwrap().to_owned())
    };
    let mut variables: Vec<(&str, String)> =
        step["env"].as_object().unwrap().iter().map(|(key, expression)| (key.as_str(), value(expression.as_str().unwrap()))).collect();
    variables.extend([("GITHUB_STEP_SUMMARY", "summary.md".to_owned()), ("GITHUB_ACTION_PATH", "/action".to_owned())]);
    assert_eq!(step["shell"], "bash", "{name}");
    start("bash", &["--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"].as_str().unwrap()], folder, &variables)
}

#[test]
fn inputs_of_the_action_are_declared_and_used() {
    let action = yaml("action.yml");
    let declared: BTreeSet<String> = action["inputs"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(inputs(&fs::read_to_string(root().join("action.yml")).unwrap()), declared);
    for step in action["runs"]["steps"].as_array().unwrap() {
        // Expressions in scripts would run the text of an input.
        assert!(!step["run"].as_str().unwrap_or("").contains("${{"), "{step}");
    }
}

#[test]
fn the_action_runs_a_recipe_and_checks_its_budgets() {
    let (action, folder) = (yaml("action.yml"), workspace());
    let run = |name: &str, given: &[(&str, &str)]| run_step(&action, name, folder.path(), given);
    let text = |output: &Output| format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let outcome = run("Run the recipe", &[("recipe", "recipe.yaml"), ("arguments", "--set quantize-dynamic.embeddings=true --quiet")]);
    assert!(outcome.status.success(), "{}", text(&outcome));
    assert!(fs::read_to_string(folder.path().join("summary.md")).unwrap().contains("quantize-dynamic"));
    let report: Value = serde_json::from_str(&fs::read_to_string(folder.path().join("out/compressed/report.json")).unwrap()).unwrap();
    assert_eq!(report["passes"][0]["options"]["embeddings"], true);
    let uploaded = step(&action, "Upload the report")["with"]["path"].as_str().unwrap().replace("${{ inputs.output }}", "out/compressed");
    // Those of a folder, and those of a single file.
    let (single, of_folder): (Vec<&str>, Vec<&str>) = uploaded.lines().partition(|file| file.contains(".report/"));
    assert!(single.len() == 2 && of_folder.len() == 2 && of_folder.iter().all(|file| folder.path().join(file).is_file()), "{uploaded}");
    for (budgets, code) in [("--max-size-ratio 90% --max-bytes 1GB", 0), ("--max-bytes 1KB", 1)] {
        let outcome = run("Check the budgets", &[("budgets", budgets)]);
        assert_eq!(outcome.status.code(), Some(code), "{}", text(&outcome));
    }
    let outcome = run("Run the recipe", &[("recipe", "missing.yaml")]);
    assert!(text(&outcome).contains("missing.yaml") && !outcome.status.success());
}

#[test]
fn the_action_installs_its_own_sources_or_a_wheel() {
    let (action, folder) = (yaml("action.yml"), workspace());
    let python = folder.path().join("bin/python");
    fs::write(&python, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for (given, packages) in
        [(&[][..], "/action onnxruntime"), (&[("package", "https://example.org/compress.whl"), ("onnxruntime", "")], "https://example.org/compress.whl")]
    {
        let output = run_step(&action, "Install compress", folder.path(), given);
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), format!("-m pip install --quiet {packages}"));
    }
}

#[test]
fn the_hook_checks_recipes_without_models() {
    let hook = yaml(".pre-commit-hooks.yaml")[0].clone();
    let files = Regex::new(hook["files"].as_str().unwrap()).unwrap();
    for (name, matches) in
        [("recipe.yaml", true), ("models/recipe-int8.yml", true), ("recipes/int8.yaml", true), ("notes.yaml", false), ("prerecipe.yaml", false)]
    {
        assert_eq!(files.is_match(name).unwrap(), matches, "{name}");
    }
    let folder = workspace();
    fs::remove_dir_all(folder.path().join("model")).unwrap();
    let words: Vec<&str> = hook["entry"].as_str().unwrap().split(' ').collect();
    let mut configs: Vec<PathBuf> = fs::read_dir(root().join("configs")).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect();
    configs.push("recipe.yaml".into());
    let check = |paths: &[&str]| start(words[0], &[&words[1..], paths].concat(), folder.path(), &[]);
    let valid = check(&configs.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>());
    let listed = String::from_utf8(valid.stdout).unwrap();
    assert!(valid.status.success() && listed.lines().count() == configs.len(), "{listed}{}", String::from_utf8_lossy(&valid.stderr));
    for (recipe, reason) in [
        ("model: m\npasses: [{ cast: { two: f16 } }]\n", "unknown key `two`"),
        ("model: m\npasses: [{ quantize: { method: gptq } }]\n", "needs samples to run the model on"),
        ("model: m\npasses: [{ prune-unstructured: { pattern: \"2:4\", amount: 0.5 } }]\n", "exclude each other"),
        ("model: m\npasses: [cast]\nsweep: { to: [f16, f17] }\n", "f17"),
    ] {
        fs::write(folder.path().join("broken.yaml"), recipe).unwrap();
        let broken = check(&["recipe.yaml", "broken.yaml"]);
        let message = String::from_utf8(broken.stderr).unwrap();
        assert!(broken.status.code() == Some(2) && message.contains("broken.yaml") && message.contains(reason), "{recipe}{message}");
    }
}

#[test]
fn scripts_of_the_workflows_exist() {
    for name in ["ci.yml", "release.yml"] {
        let workflow = yaml(&format!(".github/workflows/{name}"));
        let steps = workflow["jobs"].as_object().unwrap().values().flat_map(|job| job["steps"].as_array().unwrap());
        let text: String = steps.map(|step| format!("{} ", step["run"].as_str().unwrap_or(""))).collect();
        let scripts: Vec<&str> = text.split_whitespace().filter(|word| word.starts_with("scripts/") || word.starts_with(".ci/")).collect();
        assert!(!scripts.is_empty() && scripts.iter().all(|script| root().join(script).is_file()), "{name}: {scripts:?}");
    }
}

/// The paths that a line of `.dockerignore` excludes: those of its pattern, and everything below.
fn ignored_paths(line: &str) -> Regex {
    let pattern = regex::escape(line).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*");
    Regex::new(&format!("^{pattern}(/|$)")).unwrap()
}

/// The files of a folder of the project, and of its folders.
fn files(folder: &str, found: &mut Vec<String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let name = format!("{folder}/{}", entry.unwrap().file_name().into_string().unwrap());
        if root().join(&name).is_dir() { files(&name, found) } else { found.push(name) }
    }
}

#[test]
fn the_image_contains_the_program_and_its_minimum_rust_version() {
    let text = fs::read_to_string(root().join("Dockerfile")).unwrap();
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \"")).unwrap().trim_end_matches('"');
    assert!(text.contains(&format!("FROM rust:{version}-slim")), "the image is not built with Rust {version}");
    assert!(text.contains("COPY --from=build /src/target/release/compress /usr/local/bin/compress\n") && text.ends_with("ENTRYPOINT [\"compress\"]\n"));
    // The program of the empty image must not need files of a system.
    let from = |image: &str| text.split("FROM ").find_map(|stage| stage.strip_prefix(image)).unwrap_or_else(|| panic!("no stage {image}"));
    assert!(from(&format!("rust:{version}-alpine AS build-static\n")).contains("cargo build --release --locked --bin compress"));
    let stage = from("scratch AS static\n");
    assert!(stage.lines().all(|line| !line.starts_with("RUN ")) && stage.contains("/src/target/release/compress /usr/local/bin/compress\n"), "{stage}");
    assert!(stage.contains("ENV PATH=/usr/local/bin ") && stage.contains("/etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/"), "{stage}");
    let ignored = fs::read_to_string(root().join(".dockerignore")).unwrap();
    // Cargo needs the files of all targets that the manifest lists.
    let patterns: Vec<Regex> = ignored.lines().map(ignored_paths).collect();
    let mut needed = vec!["build.rs".to_owned(), "Cargo.toml".into(), "Cargo.lock".into(), "README.md".into()];
    ["src", "crates", "benches", "examples"].iter().for_each(|folder| files(folder, &mut needed));
    let is_kept = |path: &String| root().join(path).is_file() && !patterns.iter().any(|pattern| pattern.is_match(path).unwrap());
    let lost: Vec<&String> = needed.iter().filter(|path| !path.contains("/target/") && !is_kept(path)).collect();
    assert!(needed.len() > 400 && lost.is_empty(), "{lost:?}");
    assert!(
        patterns.iter().any(|pattern| pattern.is_match("target/release/compress").unwrap())
            && !patterns.iter().any(|pattern| pattern.is_match("src/target.rs").unwrap())
    );
    for name in ["kubernetes.yaml", "kubernetes-merge.yaml"] {
        let job = yaml(&format!("configs/cluster/{name}"));
        assert_eq!(job["spec"]["template"]["spec"]["containers"][0]["command"][0], "compress", "{name}");
    }
}
