//! `eval`, and evaluation in runs, on tiny models with scores from transformers
//! (`scripts/goldens evaluation`).

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::cli::support::{command, compress, data, golden_model, names, ok, read_json};

const RECIPE: &str = "
model: in
data:
  evaluation: { text: labelled.csv, label_column: label }
passes: [quantize-dynamic]
evaluate: { runtime: [candle], latency: false }
output: out
";

/// The accuracy measured with transformers.
fn accuracy() -> f64 {
    let expected = read_json(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/expected.json"));
    expected["classification"]["accuracy"].as_f64().unwrap()
}

/// A classifier `in` with its tokenizer, and `labelled.csv`.
pub fn classifier(folder: &Path) {
    golden_model(folder, "bert-sequence-classification", &[("word-pieces.json", "tokenizer.json")]);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/labelled.csv"), folder.join("labelled.csv")).unwrap();
}

fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    classifier(folder.path());
    folder
}

#[test]
fn a_folder_is_scored() {
    let folder = prepared();
    let run = ok(folder.path(), "eval in --data labelled.csv --label-column label");
    assert!(run.stdout.starts_with("in on labelled.csv: classification, 19 samples, built-in executor, "), "{}", run.stdout);
    assert!(run.stdout.contains("accuracy") && run.stdout.contains("0.4211") && run.stdout.contains(" .. "), "{}", run.stdout);
    let json = data(folder.path(), "eval in --text labelled.csv --label-column label --json");
    assert_eq!((json["score"]["metric"].as_str(), json["score"]["value"].as_f64()), (Some("accuracy"), Some(accuracy())));
    assert_eq!((json["samples"].as_u64(), json["runtime"].as_str(), &json["fidelity"]), (Some(19), Some("candle"), &Value::Null));
}

/// The other model has the same score as in an evaluation by itself, with its own preprocessing.
#[test]
fn each_model_is_scored_on_its_own_samples() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "torchvision-resnet18", &[]);
    let prepare = |name: &str, mean: f64| {
        fs::rename(folder.path().join("in"), folder.path().join(name)).unwrap();
        let preprocessor = serde_json::json!({ "image_mean": [mean, mean, mean], "image_std": [0.1, 0.1, 0.1], "size": { "height": 32, "width": 32 } });
        fs::write(folder.path().join(name).join("preprocessor_config.json"), preprocessor.to_string()).unwrap();
    };
    prepare("a", 0.1);
    golden_model(folder.path(), "torchvision-resnet18", &[]);
    prepare("b", 0.9);
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/images");
    let set = format!("--images {} --task classification --json", images.display());
    let [a, b, both] = ["a", "b", "a --against b"].map(|models| data(folder.path(), &format!("eval {models} {set}")));
    assert_ne!(a["score"], b["score"]);
    assert_eq!([&both["score"], &both["against"], &both["fidelity"]], [&a["score"], &b["score"], &Value::Null], "{both}");
    let refused = compress(folder.path(), &format!("eval a --against b {}", set.replace("classification", "fidelity")));
    assert!(refused.code == 2 && refused.stderr.contains("differ in preprocessing or labels"), "{}", refused.stderr);
}

/// Models with the same classes in another order have no outputs in common: an evaluation does not compare
/// them, and the classes of a teacher must have the same order.
#[test]
fn classes_in_another_order_are_not_compared() {
    let folder = prepared();
    fs::create_dir(folder.path().join("other")).unwrap();
    for file in fs::read_dir(folder.path().join("in")).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, folder.path().join("other").join(file.file_name().unwrap())).unwrap();
    }
    for (name, classes) in
        [("in", serde_json::json!({ "0": "yes", "1": "no", "2": "maybe" })), ("other", serde_json::json!({ "0": "no", "1": "yes", "2": "maybe" }))]
    {
        let path = folder.path().join(name).join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        config["id2label"] = classes;
        config.as_object_mut().unwrap().remove("label2id");
        fs::write(&path, config.to_string()).unwrap();
    }
    let samples = fs::read_to_string(folder.path().join("labelled.csv")).unwrap();
    let samples = samples.replace("LABEL_0", "yes").replace("LABEL_1", "no").replace("LABEL_2", "maybe");
    fs::write(folder.path().join("labelled.csv"), samples).unwrap();
    let both = data(folder.path(), "eval in --against other --data labelled.csv --label-column label --json");
    assert!(both["fidelity"].is_null() && both["notes"][0].as_str().unwrap().contains("class 0 is `yes` and `no`"), "{both}");
    let train = r#"--train {"text":"labelled.csv","label_column":"label"} --max-steps 1 --no-measure"#;
    let refused = compress(folder.path(), &format!("distill in -o out --teacher other --losses soft=1 {train}"));
    assert!(refused.code == 2 && refused.stderr.contains("another order of classes than the student: class 0 is `yes` and `no`"), "{}", refused.stderr);
}

/// The mapping is the same as in a recipe and for `--train` and `--calibration`.
#[test]
fn samples_are_named_by_options_or_by_a_mapping() {
    let folder = prepared();
    let score = |args: &str| {
        let mut found = data(folder.path(), &format!("eval in {args} --json"));
        found["seconds"] = Value::Null;
        found
    };
    let options = score("--text labelled.csv --label-column label --samples 10");
    assert_eq!(options["samples"], 10);
    assert_eq!(score(r#"--data {"text":"labelled.csv","label_column":"label","samples":10}"#), options);
    assert_eq!(score(r#"--data {"text":"labelled.csv","label_column":"label"} --samples 10"#), options);
    let refused = compress(folder.path(), r#"eval in --data {"txt":"labelled.csv"}"#);
    assert!(refused.code == 2 && refused.stderr.contains("unknown key `txt`, did you mean `text`?"), "{} {}", refused.code, refused.stderr);
}

/// The bytes that an error reports as needed block by block.
fn least(stderr: &str) -> u64 {
    let (before, _) = stderr.split_once(" block by block").unwrap_or_else(|| panic!("{stderr}"));
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// If the model exceeds `--memory`, it runs block by block with the same score.
#[test]
fn memory_decides_how_a_model_runs() {
    let folder = prepared();
    let eval = "eval in --data labelled.csv --label-column label --batch-size 1 --json";
    let whole = data(folder.path(), eval);
    let refused = compress(folder.path(), &format!("{eval} --memory 1KB"));
    assert!(refused.code != 0 && refused.stderr.contains("family `bert`") && refused.stderr.contains("the limit is 1000"), "{}", refused.stderr);
    let mut parts = data(folder.path(), &format!("{eval} --memory {}", least(&refused.stderr)));
    parts["seconds"] = whole["seconds"].clone();
    assert_eq!(parts, whole);

    let recipe = |memory: &str| {
        fs::write(folder.path().join("recipe.yaml"), format!("{}memory: {memory}\n", RECIPE.replace("label_column", "batch_size: 1, label_column"))).unwrap()
    };
    recipe("1GB");
    let plan = data(folder.path(), "plan recipe.yaml --json");
    let bytes = |key: &str| plan["model_memory"][key].as_u64().unwrap();
    assert!(bytes("blockwise_bytes") < bytes("whole_bytes") && bytes("limit_bytes") == 1_000_000_000, "{plan}");
    assert_eq!(plan["model_memory"]["blockwise"], false);
    least(&compress(folder.path(), "plan recipe.yaml --memory 1KB").stderr);
    recipe("1KB");
    let refused = compress(folder.path(), "run recipe.yaml").stderr;
    recipe(&least(&refused).to_string());
    ok(folder.path(), "run recipe.yaml");
    let report = read_json(&folder.path().join("out/report.json"));
    assert_eq!(report["accuracy"]["before"]["candle"].as_f64(), Some(accuracy()));
    assert!(report["notes"].to_string().contains("ran block by block"), "{}", report["notes"]);
}

#[test]
fn a_model_is_compared_with_another() {
    let folder = prepared();
    ok(folder.path(), "quantize-dynamic in -o out");
    let same = data(folder.path(), "eval in --data labelled.csv --task fidelity --against in --json");
    assert_eq!((same["score"].clone(), same["fidelity"]["top1_agreement"].as_f64()), (Value::Null, Some(1.0)));
    assert_eq!((same["fidelity"]["max_abs_error"].as_f64(), same["fidelity"]["sqnr_db"].clone()), (Some(0.0), Value::Null));
    let other = data(folder.path(), "eval out --data labelled.csv --label-column label --against in --json");
    let cosine = other["fidelity"]["cosine"].as_f64().unwrap();
    assert!(cosine > 0.99 && cosine < 1.0, "{cosine}");
    assert_eq!(other["against"]["value"].as_f64(), Some(accuracy()));
    let table = ok(folder.path(), "eval out --data labelled.csv --label-column label --against in").stdout;
    assert!(table.contains("original") && table.contains("outputs, against in") && table.contains("`logits`") && table.contains("same top class"), "{table}");
}

#[test]
fn every_output_is_compared_with_that_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "bert", &[("word-pieces.json", "tokenizer.json")]);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/labelled.csv"), folder.path().join("labelled.csv")).unwrap();
    ok(folder.path(), "quantize-dynamic in -o out");
    let fidelity = &data(folder.path(), "eval out --data labelled.csv --task fidelity --against in --json")["fidelity"];
    let outputs = fidelity["outputs"].as_object().unwrap();
    let cosines: Vec<f64> = outputs.values().map(|figures| figures["cosine"].as_f64().unwrap()).collect();
    let worst = cosines.iter().copied().fold(f64::MAX, f64::min);
    assert!(cosines.len() == 2 && cosines[0] != cosines[1] && fidelity["cosine"].as_f64() == Some(worst), "{fidelity}");
    assert_eq!(outputs[fidelity["output"].as_str().unwrap()]["cosine"].as_f64(), Some(worst));
}

#[test]
fn a_recipe_measures_before_and_after() {
    let folder = prepared();
    fs::write(folder.path().join("recipe.yaml"), RECIPE).unwrap();
    let run = ok(folder.path(), "run recipe.yaml");
    assert!(run.stdout.contains("accuracy, built-in executor") && run.stdout.contains("19 samples of labelled.csv"), "{}", run.stdout);
    let report = read_json(&folder.path().join("out/report.json"));
    let measured = &report["accuracy"];
    assert_eq!((measured["task"].as_str(), measured["metric"].as_str()), (Some("classification"), Some("accuracy")));
    assert_eq!(measured["before"]["candle"].as_f64(), Some(accuracy()));
    assert_eq!(measured["data_blake3"].as_str().map(str::len), Some(64));
    let after = measured["after"]["candle"].as_f64().unwrap();
    assert!((measured["drop"].as_f64().unwrap() - (accuracy() - after)).abs() < 1e-12);
    for key in ["cosine", "sqnr_db", "kl", "top1_agreement"] {
        assert!(measured["fidelity"][key].is_number(), "{key}: {measured}");
    }
    assert!(report["compute"]["before"]["macs"].as_u64().unwrap() > 0);
    assert_eq!(report.get("latency"), None);
    assert!(fs::read_to_string(folder.path().join("out/report.md")).unwrap().contains("## Measured"));
    // The paths of the written recipe are valid in the output folder.
    ok(folder.path(), "run out/recipe.yaml -o again");
    let again = || read_json(&folder.path().join("again/report.json"))["accuracy"].clone();
    assert_eq!([&again()["after"], &again()["data_blake3"]], [&measured["after"], &measured["data_blake3"]]);
    // The same number of other samples.
    let data = fs::read_to_string(folder.path().join("labelled.csv")).unwrap();
    fs::write(folder.path().join("labelled.csv"), data.replace("jhdja", "jhdjb")).unwrap();
    ok(folder.path(), "run recipe.yaml -o again --force");
    assert_eq!(again()["samples"], measured["samples"]);
    assert_ne!(again()["data_blake3"], measured["data_blake3"]);
    assert!(ok(folder.path(), "report out again").stdout.contains("note: not ranked by accuracy: the runs were measured on different samples"));
}

#[test]
fn a_run_without_evaluation_data_measures_fidelity() {
    let folder = prepared();
    let run = ok(folder.path(), "quantize-dynamic in -o out");
    assert!(
        run.stdout.contains("cosine, mean of the worst of") && run.stdout.contains("`logits`: cosine") && run.stdout.contains("KL divergence of `logits`"),
        "{}",
        run.stdout
    );
    assert!(run.stdout.contains("16 synthetic samples (random inputs): a rough estimate; `--eval FILE` measures on your data"), "{}", run.stdout);
    let report = read_json(&folder.path().join("out/report.json"));
    let measured = &report["fidelity"];
    assert_eq!((measured["samples_from"].as_str(), measured["samples"].as_u64()), (Some("synthetic"), Some(16)), "{report}");
    let cosine = measured["cosine"].as_f64().unwrap();
    assert!(cosine > 0.99 && cosine < 1.0 && measured["kl"].is_number() && measured["top1_agreement"].is_number(), "{measured}");
    assert!(fs::read_to_string(folder.path().join("out/report.md")).unwrap().contains("Fidelity on 16 synthetic samples"));
    assert!(fs::read_to_string(folder.path().join("out/report.html")).unwrap().contains("id=\"fidelity\""));
    // Budgets are not checked on synthetic samples.
    let check = compress(folder.path(), "check out --min-cosine 0.9");
    assert!(check.code == 2 && check.stderr.contains("data: { evaluation"), "{} {}", check.code, check.stderr);
    ok(folder.path(), "quantize-dynamic in -o quick --no-measure");
    fs::write(folder.path().join("recipe.yaml"), "model: in\nmeasure: false\npasses: [quantize-dynamic]\noutput: out\n").unwrap();
    ok(folder.path(), "run recipe.yaml -o off");
    for off in ["quick", "off"] {
        assert_eq!(read_json(&folder.path().join(off).join("report.json")).get("fidelity"), None);
        let bytes = |out: &str| fs::read(folder.path().join(out).join("model.safetensors")).unwrap();
        assert!(bytes(off) == bytes("out"), "measuring changes what is written");
    }
}

#[test]
fn fidelity_is_measured_on_held_out_samples() {
    let folder = prepared();
    let run = |out: &str, calibration: &str, more: &str| {
        let data = format!("{{ text: labelled.csv, task: fidelity{calibration} }}");
        let mut args = vec!["quantize-static", "in", "-o", out, "--calibration", &data];
        args.extend(more.split_whitespace());
        let output = command(folder.path()).args(&args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        read_json(&folder.path().join(out).join("report.json"))
    };
    let some = run("some", ", samples: 16", "");
    assert_eq!((some["fidelity"]["samples_from"].as_str(), some["fidelity"]["samples"].as_u64()), (Some("held-out"), Some(2)), "{some}");
    ok(folder.path(), "check some --min-cosine 0.5");
    // If a pass would use a whole set, a tenth is held out, whether it is measured on or not.
    let all = run("all", "", "");
    assert_eq!(all["fidelity"]["samples_from"], "held-out");
    assert_eq!(all["recipe"]["data"]["calibration"]["samples"], 18);
    assert!(all["notes"].to_string().contains("the first 18 calibration samples"), "{}", all["notes"]);
    run("capped", ", samples: 18", "--no-measure");
    run("quick", "", "--no-measure");
    let bytes = |out: &str| fs::read(folder.path().join(out).join("model.safetensors")).unwrap();
    assert!(bytes("all") == bytes("quick") && bytes("all") == bytes("capped"), "measuring changes what is written");
}

/// Training, calibration and evaluation read the same file: its samples are not held out, and the score
/// overestimates the quality.
#[test]
fn data_sets_that_share_a_file_are_named() {
    let folder = prepared();
    let run = |out: &str, evaluation: &str| {
        let (labelled, passes) =
            ("{ text: labelled.csv, label_column: label }", "passes:\n  - finetune: { max_steps: 1, batch_size: 4 }\n  - quantize-static\n");
        let data = format!("data:\n  train: {labelled}\n  calibration: {{ text: labelled.csv, task: fidelity }}\n");
        fs::write(folder.path().join("recipe.yaml"), format!("model: in\n{data}{}{passes}output: {out}\n", evaluation.replace("SET", labelled))).unwrap();
        ok(folder.path(), "run recipe.yaml");
        read_json(&folder.path().join(out).join("report.json"))
    };
    let scored = run("scored", "  evaluation: SET\nevaluate: { runtime: [candle], latency: false }\n");
    for key in ["train", "calibration"] {
        let shared = |note: &Value| note.as_str().unwrap().contains(&format!("share content with the {key} data"));
        assert!(scored["notes"].as_array().unwrap().iter().any(shared), "{key}: {}", scored["notes"]);
    }
    assert_eq!(scored["fidelity"]["samples_from"], "evaluation");
    assert_eq!(run("measured", "")["fidelity"]["samples_from"], "synthetic");
}

/// The same for images of one folder.
#[test]
fn data_sets_that_share_a_folder_of_images_are_named() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "resnet-basic", &[("resnet-basic.json", "preprocessor_config.json")]);
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/images");
    let data = format!("data:\n  calibration: {{ images: '{0}', task: fidelity }}\n  evaluation: {{ images: '{0}' }}\n", images.display());
    let recipe = format!("model: in\n{data}passes:\n  - quantize-static\nevaluate: {{ runtime: [candle], latency: false }}\noutput: out\n");
    fs::write(folder.path().join("recipe.yaml"), recipe).unwrap();
    ok(folder.path(), "run recipe.yaml");
    let notes = read_json(&folder.path().join("out/report.json"))["notes"].to_string();
    assert!(notes.contains("of the first 10 evaluation samples share content with the calibration data"), "{notes}");
}

#[test]
fn a_ruined_result_is_reported_with_remedies() {
    let folder = prepared();
    golden_model(folder.path(), "llama", &[]);
    let run = ok(folder.path(), "prune-unstructured in -o out --amount 1.0 --targets *_proj* --force");
    let note = run.stdout.lines().find(|line| line.contains("the outputs differ strongly from the original")).unwrap_or_else(|| panic!("{}", run.stdout));
    for part in ["synthetic samples", "the mean cosine of `logits` is 0.0", "after `prune-unstructured`: `importance: sparsegpt`", "a smaller `amount`"] {
        assert!(note.contains(part), "{part}: {note}");
    }
    assert!(!ok(folder.path(), "cast in -o out --to f16 --force").stdout.contains("outputs differ strongly"));
}

#[test]
fn a_chain_measures_and_times() {
    let folder = prepared();
    let args = ["chain", "in", "-o", "out", "--eval", "{text: labelled.csv, label_column: label}", "--", "cast", "--to", "f16"];
    let output = command(folder.path()).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = read_json(&folder.path().join("out/report.json"));
    let latency = &report["latency"];
    for side in ["before_ms", "after_ms"] {
        assert!(latency[side]["p50"].as_f64().unwrap() <= latency[side]["p95"].as_f64().unwrap(), "{latency}");
    }
    assert!(latency["speedup"].is_number() && latency["threads"].as_u64().unwrap() > 0 && latency["runtime"] == "candle", "{latency}");
}

#[test]
fn an_exported_file_is_run_and_scored() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = prepared();
    assert!(data(folder.path(), "doctor --json")["onnxruntime"].as_str().unwrap().starts_with('/'));
    let recipe = RECIPE.replace("evaluate: { runtime: [candle], latency: false }", "export: [safetensors, onnx]");
    fs::write(folder.path().join("recipe.yaml"), recipe.replace("passes: [quantize-dynamic]", "")).unwrap();
    ok(folder.path(), "run recipe.yaml");
    let report = read_json(&folder.path().join("out/report.json"));
    for side in ["before", "after"] {
        assert_eq!(report["accuracy"][side]["onnxruntime"].as_f64(), Some(accuracy()), "{side}");
    }
    assert_eq!(report["latency"]["runtime"], "onnxruntime");
    let environment = &report["environment"];
    let library = environment["onnxruntime_path"].as_str().unwrap();
    assert!(library.contains("onnxruntime") && !library.contains('/'), "{environment}");
    assert!(environment["onnxruntime"].as_str().unwrap().starts_with("1."), "{environment}");
    let file = report["outputs"].as_array().unwrap().iter().find(|o| o["path"] == "model.onnx").unwrap();
    assert!(file["verified"]["how"].as_str().unwrap().contains("run in ONNX Runtime on 19 samples"), "{file}");
    assert!(file["verified"]["max_abs_error"].as_f64().unwrap() < 1e-4, "{file}");
    assert!(!names(&folder.path().join("out")).iter().any(|name| name.starts_with(".before")));
    for model in ["out/model.onnx", "out --runtime onnxruntime"] {
        let json = data(folder.path(), &format!("eval {model} --data labelled.csv --label-column label --json"));
        assert_eq!((json["runtime"].as_str(), json["score"]["value"].as_f64()), (Some("onnxruntime"), Some(accuracy())), "{model}");
    }
    // Specified sizes apply to the ONNX file, whether it is the model or the reference.
    for (model, told, wanted) in [
        ("out/model.onnx", "--size depth=4", "`depth` is neither an open dimension nor an input"),
        ("out/model.onnx", "--against out/model.onnx --size depth=4", "`depth` is neither an open dimension nor an input"),
        ("out --runtime onnxruntime", "--size depth=4", "`depth` is neither an open dimension nor an input"),
        ("in", "--size depth=4", "is not an .onnx file"),
        ("out/model.onnx", "--size sequence=4 --size sequence=5", "`sequence` is specified twice"),
    ] {
        let refused = compress(folder.path(), &format!("eval {model} {told} --data labelled.csv --label-column label"));
        assert!(refused.code != 0 && refused.stderr.contains(wanted), "{model} {told}: {} {}", refused.code, refused.stderr);
    }
    ok(folder.path(), "eval out/model.onnx --size batch=19 --data labelled.csv --label-column label --batch-size 19");
    let checks = data(folder.path(), "verify out --json");
    let run = checks.as_array().unwrap().iter().find(|check| check["path"] == "model.onnx, run").unwrap();
    assert!(run["ok"] == true && run["finding"].as_str().unwrap().contains("largest difference"), "{checks}");
    // Without data, the file is run on synthetic samples.
    ok(folder.path(), "cast in --to f32 -o plain --export onnx");
    let file = &read_json(&folder.path().join("plain/report.json"))["outputs"][0];
    assert!(file["verified"]["how"].as_str().unwrap().contains("synthetic sample"), "{file}");
}

#[test]
fn a_library_that_is_missing_is_named() {
    let folder = prepared();
    let run = |args: &[&str]| command(folder.path()).env("ORT_DYLIB_PATH", "/nowhere/libonnxruntime.so").args(args).output().unwrap();
    let written = run(&["cast", "in", "--to", "f32", "-o", "out", "--export", "onnx"]);
    assert!(written.status.success());
    let text = String::from_utf8(written.stdout).unwrap();
    assert!(text.contains("note: model.onnx was verified byte by byte but not run: ") && text.contains("compress doctor --fetch"), "{text}");
    let refused = run(&["eval", "out/model.onnx", "--data", "labelled.csv"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && error.contains("/nowhere/libonnxruntime.so"), "{error}");
    fs::write(folder.path().join("libonnxruntime.so"), "no library").unwrap();
    let broken = command(folder.path()).env("ORT_DYLIB_PATH", "libonnxruntime.so").args(["eval", "out/model.onnx", "--data", "labelled.csv"]).output().unwrap();
    let error = String::from_utf8(broken.stderr).unwrap();
    assert!(!broken.status.success() && error.contains("cannot be loaded") && !error.contains("panicked"), "{error}");
    // All other functions work without the library.
    assert_eq!(compress(folder.path(), "eval in --data labelled.csv --label-column label").code, 0);
}
