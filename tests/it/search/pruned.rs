//! `compress auto --prune`: structured pruning as options of units.

use serde_json::json;

use super::onnxruntime::{ONNX, encoder, every, totals};
use super::recipe;
use crate::cli::support::{compress, data, ok, read_json};

#[test]
fn pruned_layers_are_options_that_are_measured_with_their_format() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let whole = data(folder, &format!("{ONNX} --formats int8-static --front whole.json"))["search"].clone();
    let smallest = whole["points"].as_array().unwrap().iter().map(|point| point["bytes"].as_u64().unwrap()).min().unwrap();
    // A limit below the smallest file without pruning.
    let limit = smallest - smallest / 20;
    let without = compress(folder, &format!("{ONNX} --formats int8-static --max-size {limit}B -o out"));
    assert!(without.code > 0 && without.stderr.contains("nearest possible limit") && !folder.join("out").exists(), "{}", without.stderr);
    let found = data(folder, &format!("{ONNX} --formats int8-static --prune 0.5 --max-size {limit}B -o out"))["search"].clone();
    assert_eq!(found["formats"], json!(["int8-static, 50 % pruned", "floats, 50 % pruned", "int8-static", "floats"]));
    let (chosen, units) = (&found["chosen"], found["units"].as_array().unwrap());
    assert_eq!(chosen["bytes"].as_u64(), Some(std::fs::metadata(folder.join("out/model.onnx")).unwrap().len()));
    assert!(chosen["bytes"].as_u64() <= Some(limit), "{chosen}");
    let pruned: Vec<_> = units.iter().filter(|unit| !unit["options"][1].is_null()).collect();
    // The heads of the attention and the neurons of the network.
    assert_eq!(pruned.len(), 2, "{units:?}");
    for unit in &pruned {
        let loss = |option: usize| unit["options"][option]["loss"].as_f64().unwrap();
        let bytes = |option: usize| unit["options"][option]["bytes"].as_u64().unwrap();
        assert!(unit["measured"] == true && unit["weights"].as_array().unwrap().len() >= 2, "{unit}");
        assert!(bytes(0) < bytes(2) && bytes(1) < bytes(3) && loss(0) > 0.0 && loss(1) > 0.0 && loss(2) > 0.0 && loss(3) == 0.0, "{unit}");
        // The joint score is not the sum of both losses.
        assert!((loss(0) / (loss(1) + loss(2)) - 1.0).abs() > 1e-9, "{unit}");
    }
    let passes = recipe(folder, "out");
    assert!(passes[0]["prune-structured"]["repair"] == "least-squares", "{passes}");
    // No choice of options has less expected loss than the front.
    let all: Vec<(f64, u64)> = every(units).iter().map(|options| totals(units, options)).collect();
    let (report, others) = (read_json(&folder.join("out/report.json")), found["other_bytes"].as_u64().unwrap());
    for point in report["search"]["front"].as_array().unwrap() {
        let (loss, bytes) = (point["predicted"].as_f64().unwrap(), point["bytes"].as_u64().unwrap() - others);
        let least = all.iter().filter(|(_, other)| *other <= bytes).map(|(loss, _)| *loss).fold(f64::INFINITY, f64::min);
        assert!(loss <= 1.01 * least + 1e-12, "{loss} instead of {least} at {bytes} bytes");
    }
    ok(folder, "verify out");
    ok(folder, "run out/recipe.yaml -o again");
    let written = |name: &str| std::fs::read(folder.join(name).join("model.onnx")).unwrap();
    assert!(written("out") == written("again"));
}

#[test]
fn pruning_needs_samples_fractions_and_onnx_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    for (arguments, part) in [
        ("--for onnxruntime --prune 0.5", "--prune: needs `--calibration`"),
        ("--for onnxruntime --prune 50 --data texts.safetensors", "`50` is not a fraction: write `0.5` or `50%`"),
        ("--for onnxruntime --prune 100% --data texts.safetensors", "--prune: 1 is not between 0 and 1"),
        ("--for transformers --prune 0.5 --data texts.safetensors", "--prune: is not supported for transformers"),
    ] {
        let run = compress(folder, &format!("auto bert {arguments} --max-size 50% -o out"));
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("out").exists(), "{arguments}: {}", run.stderr);
    }
}
