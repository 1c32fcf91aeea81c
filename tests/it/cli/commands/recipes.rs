//! `run`, `chain` and `plan`: the output folder, the report, and plans.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::support::{compress, data, model, names, ok, read_json, snapshot};

pub const FULL: &str = r#"
model: in
seed: 7
allow_nonfinite: false
passes:
  - prune-unstructured:
      amount: 0.25
      scope: global
      ignore: ["*embeddings*"]
      rules: [{ targets: ["*.output.dense.weight"], amount: 100 units }]
  - cast: { to: bf16, overflow: saturate }
  - quantize-dynamic: { granularity: group, group_size: 8, symmetric: false, observer: mse, targets: ["re:.*layer\\.1"], ignore: ["*bias"] }
export:
  - safetensors: { layout: auto, shard_size: 1MB }
output: out
"#;

pub const SHORT: &str = "model: in\npasses: [cast, prune-unstructured: { pattern: \"2:4\" }]\nexport: [safetensors]\noutput: out\n";

const FILES: [&str; 9] =
    ["1_Pooling", "README.md", "config.json", "model.safetensors", "recipe.yaml", "report.html", "report.json", "report.md", "tokenizer.json"];

/// A folder with a model `in` and a recipe.
fn prepared(recipe: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    fs::write(folder.path().join("recipe.yaml"), recipe).unwrap();
    folder
}

#[test]
fn a_recipe_becomes_a_folder() {
    let folder = prepared(FULL);
    let input = snapshot(&folder.path().join("in"));
    let run = ok(folder.path(), "run recipe.yaml");
    assert!(run.stdout.contains("x smaller, in") && run.stdout.contains(" written and verified: out\n"), "{}", run.stdout);
    assert_eq!(run.stderr, "");
    let out = folder.path().join("out");
    assert_eq!(names(&out), FILES);
    assert_eq!(names(folder.path()), ["in", "out", "recipe.yaml"]);
    assert_eq!(snapshot(&folder.path().join("in")), input);
    for same in ["tokenizer.json", "1_Pooling/config.json"] {
        assert_eq!(fs::read(out.join(same)).unwrap(), fs::read(folder.path().join("in").join(same)).unwrap());
    }
    assert_eq!(read_json(&out.join("config.json"))["quantization_config"]["quant_method"], "compressed-tensors");
}

#[test]
fn the_written_recipe_reproduces_the_run() {
    let folder = prepared(FULL);
    ok(folder.path(), "run recipe.yaml");
    ok(folder.path(), "run out/recipe.yaml -o again");
    assert_eq!(without_reports(&folder.path().join("out")), without_reports(&folder.path().join("again")));
}

#[test]
fn a_report_has_every_key() {
    let folder = prepared(FULL);
    let printed = data(folder.path(), "run recipe.yaml --json");
    let report = read_json(&folder.path().join("out/report.json"));
    assert_eq!(printed, report);
    let missing = |value: &Value, keys: &[&str]| -> Vec<String> { keys.iter().filter(|key| value.get(key).is_none()).map(|key| (*key).to_owned()).collect() };
    for (at, keys) in [
        ("", &["schema", "tool", "environment", "model", "seed", "recipe", "passes", "size", "layers", "outputs", "notes", "totals"][..]),
        ("/tool", &["name", "version", "commit"]),
        ("/environment", &["cpu", "cores", "memory_bytes", "gpu", "onnxruntime", "simd"]),
        ("/model", &["source", "architecture", "blake3"]),
        ("/recipe", &["model", "seed", "passes", "export"]),
        ("/passes/0", &["name", "options", "seconds", "peak_rss_bytes", "peak_vram_bytes", "tensors_changed", "rule", "unselected", "details"]),
        ("/size", &["before", "after", "ratio"]),
        ("/size/before", &["parameters", "nonzero", "tensors", "bytes", "bytes_zstd"]),
        ("/size/after", &["parameters", "nonzero", "tensors", "bytes", "bytes_zstd"]),
        ("/layers/0", &["name", "shape", "encoding", "bytes_before", "bytes_after", "zeros", "sqnr_db"]),
        ("/outputs/0", &["format", "path", "bytes", "blake3", "verified"]),
        ("/outputs/0/verified", &["how", "max_abs_error", "ok"]),
        ("/totals", &["seconds", "peak_rss_bytes"]),
    ] {
        let value = report.pointer(at).unwrap_or_else(|| panic!("no {at}"));
        assert_eq!(missing(value, keys), Vec::<String>::new(), "{at}");
    }
    assert_eq!(report["schema"], 1);
    assert_eq!(report["seed"], 7);
    assert_eq!(report["model"]["architecture"], "bert");
    let environment = &report["environment"];
    // Keys that are empty because no model was run: a device other than the CPU, its memory, ONNX Runtime.
    assert_eq!((environment["device"].as_str(), &environment["onnxruntime"], &environment["onnxruntime_path"]), (Some("cpu"), &Value::Null, &Value::Null));
    assert_eq!((&report["passes"][0]["peak_vram_bytes"], &report["totals"]["peak_vram_bytes"]), (&Value::Null, &Value::Null));
    assert_eq!(environment["gpu"].is_string(), Path::new("/proc/driver/nvidia/version").exists(), "{environment}");
    let passes: Vec<_> = report["passes"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(passes, ["prune-unstructured", "cast", "quantize-dynamic"]);
    assert_eq!(report["layers"].as_array().unwrap().len(), 7);
    let file = folder.path().join("out/model.safetensors");
    assert_eq!(report["outputs"][0]["bytes"], fs::metadata(&file).unwrap().len());
    assert_eq!(report["outputs"][0]["blake3"], blake3::hash(&fs::read(&file).unwrap()).to_string());
    assert_eq!(report["size"]["after"]["bytes"], report["outputs"][0]["bytes"]);
    let text = fs::read_to_string(folder.path().join("out/report.md")).unwrap();
    assert!(text.contains("`prune-unstructured`") && text.contains("`encoder.layer.1.output.dense.weight`"), "{text}");
}

/// Contents of a folder without files that contain times.
fn without_reports(folder: &Path) -> std::collections::BTreeMap<std::path::PathBuf, String> {
    let mut content = snapshot(folder);
    for report in ["report.json", "report.md", "report.html"] {
        assert!(content.remove(Path::new(report)).is_some());
    }
    content
}

#[test]
fn a_chain_equals_its_recipe() {
    let folder = prepared(
        "model: in\npasses:\n  - prune-unstructured: { amount: 0.5, scope: global }\n  - quantize-dynamic: { observer: mse, ignore: [\"*layer.0*\"] }\noutput: out\n",
    );
    ok(folder.path(), "run recipe.yaml");
    ok(folder.path(), "chain in -o chained -- prune-unstructured --amount 0.5 --scope global -- quantize-dynamic --observer mse --ignore *layer.0*");
    ok(
        folder.path(),
        "--threads 1 chain in -o flags-first --quiet -- prune-unstructured --amount 0.5 --scope global -- quantize-dynamic --observer mse --ignore *layer.0*",
    );
    let wanted = without_reports(&folder.path().join("out"));
    assert_eq!(without_reports(&folder.path().join("chained")), wanted);
    assert_eq!(without_reports(&folder.path().join("flags-first")), wanted);
}

#[test]
fn values_are_set_and_the_output_is_chosen() {
    let folder = prepared(SHORT);
    ok(folder.path(), "run recipe.yaml -o other --set cast.to=f16 --set passes.1.prune-unstructured.pattern=1:4 --set seed=3 --set safetensors.layout=sparse");
    assert_eq!(names(folder.path()), ["in", "other", "recipe.yaml"]);
    let report = read_json(&folder.path().join("other/report.json"));
    assert_eq!((&report["seed"], &report["passes"][0]["options"]["to"]), (&json!(3), &json!("f16")));
    assert_eq!(report["passes"][1]["options"]["pattern"], "1:4");
    assert_eq!(report["recipe"]["export"][0]["safetensors"]["layout"], "sparse");
}

#[test]
fn paths_are_relative_to_the_recipe() {
    let folder = prepared(SHORT);
    fs::create_dir(folder.path().join("elsewhere")).unwrap();
    ok(&folder.path().join("elsewhere"), "run ../recipe.yaml");
    assert!(folder.path().join("out/report.json").exists());
    ok(&folder.path().join("elsewhere"), "run ../recipe.yaml -o here");
    assert_eq!(names(&folder.path().join("elsewhere")), ["here"]);
}

#[test]
fn a_dry_run_writes_nothing_and_prints_the_plan() {
    let folder = prepared(FULL);
    let before = snapshot(folder.path());
    let dry = ok(folder.path(), "run recipe.yaml --dry-run");
    assert_eq!(dry.stdout, ok(folder.path(), "plan recipe.yaml").stdout);
    for said in [
        "3.10 k parameters",
        "1. prune-unstructured",
        "2. cast",
        "3. quantize-dynamic",
        "encoder.layer.1.output.dense.weight",
        "model.safetensors",
        "peak memory",
    ] {
        assert!(dry.stdout.contains(said), "`{said}` is missing in\n{}", dry.stdout);
    }
    let plan = data(folder.path(), "plan recipe.yaml --json");
    assert_eq!(data(folder.path(), "run recipe.yaml --dry-run --json"), plan);
    assert_eq!(snapshot(folder.path()), before);
    ok(folder.path(), "run recipe.yaml");
    let written = fs::metadata(folder.path().join("out/model.safetensors")).unwrap().len();
    assert_eq!((&plan["output_exact"], &plan["output_bytes"]), (&json!(true), &json!(written)));
    assert_eq!(plan["files"], json!(["model.safetensors"]));
    assert_eq!(plan["passes"][2]["selected"].as_array().unwrap().len(), 2);
    let sparse = data(folder.path(), "plan recipe.yaml --json --set safetensors.layout=sparse");
    assert_eq!(sparse["output_exact"], false);
    assert!(ok(folder.path(), "plan recipe.yaml --set safetensors.layout=sparse").stdout.contains("at most"));
}

#[test]
fn several_recipes_are_planned_or_checked_at_once() {
    let folder = prepared(SHORT);
    fs::write(folder.path().join("swept.yaml"), format!("{FULL}sweep: {{ prune-unstructured.amount: [0.25, 0.5] }}\n")).unwrap();
    let plans = data(folder.path(), "plan recipe.yaml swept.yaml --json");
    let names = ["recipe.yaml", "swept.yaml prune-unstructured.amount=0.25", "swept.yaml prune-unstructured.amount=0.5"];
    assert_eq!(plans.as_object().unwrap().keys().map(String::as_str).collect::<Vec<_>>(), names);
    assert_eq!(plans[names[0]], data(folder.path(), "plan recipe.yaml --json"));
    fs::remove_dir_all(folder.path().join("in")).unwrap();
    assert_eq!(compress(folder.path(), "plan recipe.yaml").code, 1);
    let checked = json!([{ "recipe": "recipe.yaml", "runs": 1 }, { "recipe": "swept.yaml", "runs": 2 }]);
    assert_eq!(data(folder.path(), "plan recipe.yaml swept.yaml --recipe-only --json"), checked);
    assert_eq!(ok(folder.path(), "plan swept.yaml --recipe-only").stdout, "swept.yaml: valid, 2 runs\n");
    let broken = compress(folder.path(), "plan recipe.yaml --recipe-only --set cast.to=f17");
    assert!(broken.code == 2 && broken.stderr.contains("recipe.yaml: --set cast.to=f17"), "{}", broken.stderr);
    // Formats that no model makes valid.
    for (text, reason) in [
        ("loads: [llama.cpp]\n", "`export` does not contain `gguf`"),
        ("export: [safetensors]\nloads: [vllm, llama.cpp]\n", "`export` does not contain `gguf`"),
        ("export: [gguf]\noutput: a.onnx\n", "is of the format onnx, but other formats are configured"),
    ] {
        fs::write(folder.path().join("formats.yaml"), format!("model: in\n{text}")).unwrap();
        let run = compress(folder.path(), "plan formats.yaml --recipe-only");
        assert!(run.code == 1 && run.stderr.contains(reason), "{text}{}", run.stderr);
    }
    fs::write(folder.path().join("formats.yaml"), "model: in\nloads: [llama.cpp]\noutput: a.gguf\n").unwrap();
    ok(folder.path(), "plan formats.yaml --recipe-only");
}

#[test]
fn force_replaces_the_whole_folder() {
    let folder = prepared(SHORT);
    ok(folder.path(), "run recipe.yaml");
    fs::write(folder.path().join("out/notes.txt"), "of the user").unwrap();
    let first = snapshot(&folder.path().join("out"));
    for force in ["", " --force"] {
        let refused = compress(folder.path(), &format!("run recipe.yaml --set cast.to=f16{force}"));
        assert_eq!(refused.code, 1);
        assert!(force.is_empty() || refused.stderr.contains("notes.txt"), "{}", refused.stderr);
        assert_eq!(snapshot(&folder.path().join("out")), first);
    }
    fs::remove_file(folder.path().join("out/notes.txt")).unwrap();
    ok(folder.path(), "run recipe.yaml --force --set cast.to=f16");
    assert_eq!(names(&folder.path().join("out")), FILES);
    assert_eq!(names(folder.path()), ["in", "out", "recipe.yaml"]);
    assert_eq!(read_json(&folder.path().join("out/report.json"))["passes"][0]["options"]["to"], "f16");
}
