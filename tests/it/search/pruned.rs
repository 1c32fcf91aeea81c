//! `compress auto --prune`: structured pruning as options of units.

use std::path::Path;

use serde_json::{Value, json};

use super::onnxruntime::{ONNX, best, encoder, every, indices, invent, invented, totals};
use super::{SETS, prepared, recipe};
use crate::cli::support::{compress, data, ok, read_json};
use crate::common::onnxruntime::has_onnx_runtime;
use crate::low_bits::BYTE_LEVEL;

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
    let all = best(units);
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

/// Bytes of the values in a safetensors file, without the shapes of packed weights.
fn value_bytes(path: &Path) -> u64 {
    let file = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let tensors = header.iter().filter(|(name, _)| !name.starts_with("__") && !name.ends_with("_shape"));
    tensors.map(|(_, tensor)| tensor["data_offsets"][1].as_u64().unwrap() - tensor["data_offsets"][0].as_u64().unwrap()).sum()
}

/// All layers have the same widths. No choice of widths and formats has less expected loss than the front.
#[test]
fn widths_of_all_layers_are_options_for_other_runtimes() {
    let folder = prepared();
    let folder = folder.path();
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    for (runtime, formats, output) in [("transformers", "W2A16:32,W4A16:32", "out"), ("llama.cpp", "Q5_0,Q8_0", "small.gguf"), ("vllm", "W4A16:32", "packed")] {
        let search = format!("auto llama --for {runtime} --json --formats {formats} {SETS}");
        let whole = data(folder, &format!("{search} --front {runtime}.json"))["search"].clone();
        let bytes = |unit: &Value| unit["options"].as_array().unwrap().iter().filter_map(|option| option["bytes"].as_u64()).min().unwrap();
        let smallest = whole["units"].as_array().unwrap().iter().map(bytes).sum::<u64>() + whole["other_bytes"].as_u64().unwrap();
        let limit = smallest - smallest / 50;
        let without = compress(folder, &format!("{search} --max-size {limit}B -o {output}"));
        assert!(without.code > 0 && without.stderr.contains("nearest possible limit"), "{}", without.stderr);
        let found = data(folder, &format!("{search} --prune 0.667,0.5 --max-size {limit}B -o {output}"))["search"].clone();
        let (chosen, units) = (&found["chosen"], found["units"].as_array().unwrap());
        let (names, each) = (found["formats"].as_array().unwrap(), whole["formats"].as_array().unwrap().len());
        // Half of the heads, two thirds or half of the neurons, and both. A third of the heads is not a
        // number of heads.
        assert_eq!((names.len(), &names[5 * each..]), (6 * each, &whole["formats"].as_array().unwrap()[..]), "{names:?}");
        assert_eq!(names[each - 1], format!("{}, 50 % of heads and 50 % of neurons pruned", names[6 * each - 1].as_str().unwrap()));
        // Losses of the structures are measured, and all units have the same one.
        let widths = &units[0];
        assert!(widths["name"] == "widths" && widths["weights"] == json!([]) && widths["measured"] == true, "{widths}");
        let losses: Vec<f64> = (0..6).map(|at| widths["options"][(at + 1) * each - 1]["loss"].as_f64().unwrap()).collect();
        assert!(losses[..5].iter().all(|loss| *loss > 0.0) && losses[5] == 0.0, "{losses:?}");
        let position = |name: &Value| names.iter().position(|other| other == name).unwrap() / each;
        for point in found["points"].as_array().unwrap().iter().chain([chosen]) {
            let formats = point["formats"].as_array().unwrap();
            assert!(formats.iter().all(|format| position(format) == position(&formats[0])), "{point}");
        }
        let structure = position(&chosen["formats"][0]);
        assert!(structure < 5 && chosen["bytes"].as_u64() <= Some(limit), "{chosen}");
        let mut all: Vec<(f64, u64)> = Vec::new();
        for at in 0..6 {
            let options = |unit: &Value| json!({ "options": unit["options"].as_array().unwrap()[at * each..(at + 1) * each] });
            let own: Vec<Value> = units.iter().map(options).collect();
            all.extend(best(&own));
        }
        let place = if runtime == "llama.cpp" { "small.gguf.report".to_owned() } else { output.to_owned() };
        let (report, others) = (read_json(&folder.join(&place).join("report.json")), found["other_bytes"].as_u64().unwrap());
        for point in report["search"]["front"].as_array().unwrap() {
            let (loss, bytes) = (point["predicted"].as_f64().unwrap(), point["bytes"].as_u64().unwrap() - others);
            let least = all.iter().filter(|(_, other)| *other <= bytes).map(|(loss, _)| *loss).fold(f64::INFINITY, f64::min);
            assert!(loss <= 1.01 * least + 1e-12, "{loss} instead of {least} at {bytes} bytes");
        }
        // Predicted bytes are those of the output, which the runtime loads, and which the recipe writes
        // again.
        let file = |name: &str| if runtime == "llama.cpp" { folder.join(name) } else { folder.join(name).join("model.safetensors") };
        let written = if runtime == "llama.cpp" { std::fs::metadata(file(output)).unwrap().len() } else { value_bytes(&file(output)) };
        assert_eq!(chosen["bytes"].as_u64(), Some(written), "{chosen}");
        ok(folder, &format!("check {output} --loads {runtime}"));
        ok(folder, &format!("verify {output}"));
        let again = format!("again-{output}");
        ok(folder, &format!("run {place}/recipe.yaml -o {again}"));
        assert!(std::fs::read(file(output)).unwrap() == std::fs::read(file(&again)).unwrap(), "{runtime}");
        let passes = &report["recipe"]["passes"];
        assert!(passes[0]["prune-structured"]["uniform"] == true && passes[0]["prune-structured"]["repair"] == "least-squares", "{passes}");
    }
    let refused = compress(folder, &format!("auto llama --for transformers --max-size 50% -o new --prune 0.99 {SETS}"));
    assert!(refused.code > 0 && refused.stderr.contains("a fraction of 0.99 of the heads or neurons of all layers is not possible"), "{}", refused.stderr);
}

/// The time of each option is measured, and with recorded times, no choice that is as fast has less expected
/// loss.
#[test]
fn pruned_layers_meet_a_limit_of_the_latency() {
    if !has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let formats = "--formats int8-static --prune 0.5";
    let search = format!("{ONNX} --threads 2 --points 2 --times times.json {formats}");
    let units = data(folder, &format!("{ONNX} --front front.json --points 0 {formats}"))["search"]["units"].as_array().unwrap().clone();
    let run = compress(folder, &format!("{search} -o out --latency 1us"));
    assert!(run.code == 1 && run.stderr.contains("the nearest possible limit is "), "{}", run.stderr);
    let times = folder.join("times.json");
    // Each option of the heads and of the neurons has a measured time.
    let measured = read_json(&times)["mixtures"].as_array().unwrap().iter().map(|mixture| mixture["options"].clone()).collect::<Vec<_>>();
    for (at, _) in units.iter().enumerate().filter(|(_, unit)| !unit["options"][1].is_null()) {
        for option in 0..3 {
            let alone = |options: &&Value| options.as_array().unwrap().iter().enumerate().all(|(unit, other)| *other == if unit == at { option } else { 3 });
            assert_eq!(measured.iter().filter(alone).count(), 1, "{option}: {measured:?}");
        }
    }
    let names: Vec<String> = serde_json::from_value(read_json(&times)["formats"].clone()).unwrap();
    let time = |options: &[usize]| 10.0 * invented(&units, &names, options);
    // Between the fastest choices with and without pruning.
    let first = |from: usize| -> Vec<usize> { units.iter().map(|unit| (from..4).find(|option| !unit["options"][*option].is_null()).unwrap()).collect() };
    let limit = (500.0 * (time(&first(0)) + time(&first(2)))).round() / 1000.0;
    let mut known = invent(&times, &units);
    // Only mixtures of new times are measured. The others may exceed the limit until they have invented times
    // too.
    for round in 0..12 {
        let _ = std::fs::remove_dir_all(folder.join("out"));
        compress(folder, &format!("{search} -o out --latency {limit}ms"));
        let count = invent(&times, &units);
        if count == known {
            break;
        }
        assert!(round < 11, "{count} mixtures");
        known = count;
    }
    let _ = std::fs::remove_dir_all(folder.join("out"));
    let found = data(folder, &format!("{search} -o out --latency {limit}ms"))["search"].clone();
    let (chosen, units) = (&found["chosen"], found["units"].as_array().unwrap());
    let options = indices(&found, chosen);
    assert!(time(&options) <= limit && (chosen["measured_ms"].as_f64().unwrap() - time(&options)).abs() < 1e-6, "{chosen}");
    assert!(options.iter().any(|option| *option < 2), "nothing is pruned: {chosen}");
    let least = every(units).iter().filter(|options| time(options) <= limit).map(|options| totals(units, options).0).fold(f64::INFINITY, f64::min);
    let (loss, _) = totals(units, &options);
    assert!(loss <= 1.01 * least && loss > 0.0, "{loss} instead of {least}");
    assert_eq!(recipe(folder, "out")[0]["prune-structured"]["repair"], "least-squares");
    assert_eq!(chosen["bytes"].as_u64(), Some(std::fs::metadata(folder.join("out/model.onnx")).unwrap().len()));
    ok(folder, "check out --loads onnxruntime");
}

#[test]
fn pruning_needs_samples_and_fractions() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    for (arguments, part) in [
        ("--for onnxruntime --prune 0.5", "--prune: needs `--calibration`"),
        ("--for onnxruntime --prune 50 --data texts.safetensors", "`50` is not a fraction: write `0.5` or `50%`"),
        ("--for onnxruntime --prune 100% --data texts.safetensors", "--prune: 1 is not between 0 and 1"),
    ] {
        let run = compress(folder, &format!("auto bert {arguments} --max-size 50% -o out"));
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("out").exists(), "{arguments}: {}", run.stderr);
    }
}
