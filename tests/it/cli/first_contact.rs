//! Likely mistakes of new users, which must not end in a result that they did not ask for.

mod long_runs;
mod requests;
mod values;

use std::fs;
use std::path::Path;

use serde_json::json;

use super::support::{compress, data, golden_model, model, names, ok, read_json};

/// A folder with a small decoder `in`, and token ids for it.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[]);
    folder
}

fn refused(folder: &Path, args: &str, message: &str) {
    let run = compress(folder, args);
    assert!(run.code != 0 && run.stderr.contains(message), "compress {args}\n{}{}", run.stdout, run.stderr);
}

#[test]
fn names_of_model_files_are_not_folders() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    for (name, hint) in [
        ("out.ggfu", "did you mean out.gguf?"),
        ("out.ONXX", "did you mean out.onnx?"),
        ("a.safetensors", "choose a name without"),
        ("a.bin", "choose a name without"),
    ] {
        refused(folder.path(), &format!("cast in -o {name} --to f16"), hint);
    }
    for name in ["llama-3.1", "llama-3.1-gguf", "qwen2.5-onnx"] {
        ok(folder.path(), &format!("cast in -o {name} --to f16"));
        assert!(folder.path().join(name).is_dir(), "{name}");
    }
    assert_eq!(names(folder.path()), ["in", "llama-3.1", "llama-3.1-gguf", "qwen2.5-onnx"]);
}

#[test]
fn bare_numbers_that_are_probably_meant_otherwise_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    refused(folder.path(), "prune-unstructured in -o out --amount 1", "1 needs a unit: write `0.01` or `1%`");
    refused(folder.path(), "cast in -o out --to f16 --shard-size 5", "`5` needs a unit: write 5GB, 5MB, or 5B");
    ok(folder.path(), "cast in -o out --to f16 --shard-size 5MB");
}

#[test]
fn damaged_inputs_end_in_warnings() {
    let folder = prepared();
    let path = folder.path();
    fs::write(path.join("in/tokenizer.json"), "{\"version\": ").unwrap();
    let mut config = read_json(&path.join("in/config.json"));
    config["num_hidden_layers"] = json!(3);
    fs::write(path.join("in/config.json"), config.to_string()).unwrap();
    let report = data(path, "quantize-dynamic in -o out --json");
    let notes: Vec<&str> = report["notes"].as_array().unwrap().iter().filter_map(|note| note.as_str()).filter(|note| note.starts_with("warning: ")).collect();
    let tokenizer = notes.iter().find(|note| note.contains("tokenizer.json was copied, but it is not valid JSON")).unwrap_or_else(|| panic!("{notes:?}"));
    assert!(tokenizer.contains("hf download ORG/NAME tokenizer.json") && tokenizer.contains("replace in/tokenizer.json"), "{tokenizer}");
    assert!(notes.iter().any(|note| note.contains("weights and config.json do not match: tensor `model.layers.2")), "{notes:?}");
    let card = fs::read_to_string(path.join("out/README.md")).unwrap();
    assert!(!card.contains("vllm serve") && card.contains("checks which runtimes load the model"), "{card}");
}

#[test]
fn coarser_scales_than_requested_are_a_warning() {
    let folder = prepared();
    let notes = |args: &str| data(folder.path(), &format!("quantize in --scheme W4A16 --json --force -o out {args}"))["notes"].to_string();
    // Rows have 16 and 24 values.
    assert!(notes("--group-size 16").contains("warning: quantize: the rows of"));
    refused(folder.path(), "quantize in -o new --group-size 7", "the group size 7 divides no row: the rows have lengths of 16, 24;");
    refused(folder.path(), "quantize in -o new --group-size 1000", "the group size 1000 divides no row");
    assert!(!notes("--group-size 8").contains("warning: quantize: the rows of"));
}

#[test]
fn unused_data_is_noted() {
    use candle_core::{Device, Tensor};
    let folder = prepared();
    let ids = Tensor::from_vec((0..64i64).map(|i| i * 7 % 40).collect::<Vec<_>>(), (8, 8), &Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&arrays.into(), folder.path().join("ids.safetensors")).unwrap();
    let notes =
        |method: &str| data(folder.path(), &format!("quantize in --json --force -o out --calibration ids.safetensors --method {method}"))["notes"].to_string();
    assert!(notes("rtn").contains("no pass uses the calibration samples"));
    assert!(!notes("gptq").contains("no pass uses the calibration samples"));
    let notes = |args: &str| data(folder.path(), &format!("{args} --json --force -o out --train ids.safetensors"))["notes"].to_string();
    assert!(notes("cast in --to bf16").contains("no pass uses the training samples"));
    // Without calibration data, the training data is used for calibration.
    for args in ["prune-structured in --dims mlp", "prune-structured in --dims layers --amount 1", "distill in --max-steps 1"] {
        assert!(!notes(args).contains("no pass uses the training samples"), "{args}");
    }
    let batches = r#"distill in -o new --train {"arrays":"ids.safetensors","batch_size":3}"#;
    refused(folder.path(), batches, "data: train: batch_size: has no effect on training: remove it, and set `batch_size: 3` in the options of `distill`");
    let notes = notes("distill in --max-steps 1 --batch-norm fixed --shard parameters");
    assert!(notes.contains("`batch_norm: fixed` has no effect") && notes.contains("`shard` has no effect, because the training has one process"), "{notes}");
}

#[test]
fn a_run_that_fails_at_its_start_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json")]);
    fs::write(folder.path().join("empty.txt"), "").unwrap();
    refused(folder.path(), "quantize in -o out --method gptq --calibration empty.txt", "contains no samples");
    assert_eq!(names(folder.path()), ["empty.txt", "in"]);
}

/// The first recipe of a model that is a file has another output, in a format that it can have.
#[test]
fn first_recipes_of_files_run() {
    let folder = prepared();
    ok(folder.path(), "cast in -o small.onnx --to f32");
    ok(folder.path(), "cast in -o small.gguf --to f16");
    for file in ["small.onnx", "small.gguf"] {
        ok(folder.path(), &format!("init {file} -o {file}.yaml"));
        ok(folder.path(), &format!("run {file}.yaml"));
        assert!(folder.path().join("out/small/report.html").is_file(), "{file}");
        fs::remove_dir_all(folder.path().join("out")).unwrap();
    }
}
