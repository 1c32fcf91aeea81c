//! `compress auto`: predicted and measured losses, limits, and the recipe of the result.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod onnxruntime;
mod pruned;
mod without_samples;

use std::path::Path;

use candle_core::{Device, Tensor};
use compress_engine::exec::{Inputs, Rounding};
use serde_json::{Value, json};

use crate::cli::support::{command, compress, data, ok, read_json};
use crate::low_bits::{BYTE_LEVEL, llama, outputs, samples};

/// A model `llama`, and two files of samples.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    llama(folder.path());
    // vLLM loads a tokenizer.
    std::fs::write(folder.path().join("llama/tokenizer.model"), "").unwrap();
    samples(folder.path());
    let ids = candle_core::Tensor::from_vec((0..96i64).map(|i| (i * i * 11 + 3) % 43 % 40).collect::<Vec<_>>(), (8, 12), &candle_core::Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&arrays.into(), folder.path().join("held-out.safetensors")).unwrap();
    folder
}

const SETS: &str = "--calibration ids.safetensors --eval held-out.safetensors";

/// A plan of a search counts its work: one run over the held-out samples for each mixture, and one for the
/// original model. It writes nothing.
#[test]
fn a_plan_counts_the_work_of_a_search() {
    let folder = prepared();
    let folder = folder.path();
    let macs = |points: usize| {
        let plan = data(folder, &format!("auto llama --for transformers --plan --json --points {points} {SETS}"));
        let stages: Vec<&str> = plan["work"].as_array().unwrap().iter().map(|stage| stage["name"].as_str().unwrap()).collect();
        assert_eq!(stages, ["scores of layers", "measured units", "mixtures"]);
        plan["work"][2]["macs"].as_u64().unwrap()
    };
    let (four, eight) = (macs(4), macs(8));
    let each = (eight - four) / 4;
    // `samples` limits the evaluation data, of which eight are measured otherwise.
    let two = r#"--calibration ids.safetensors --eval {"arrays":"held-out.safetensors","samples":2}"#;
    assert_eq!(4 * data(folder, &format!("auto llama --for transformers --plan --json --points 4 {two}"))["work"][2]["macs"].as_u64().unwrap(), four);
    let found = data(folder, &format!("auto llama --for transformers --front front.json --json {SETS}"));
    let references = found["search"]["points"].as_array().unwrap().iter().filter(|point| !point["reference"].is_null()).count() as u64;
    // Four points, the chosen one, and the original model.
    assert_eq!(four, each * (references + 6), "{references} reference mixtures");
    // With rates of the machine, a plan has times, and the report of a run compares them.
    let timed = |arguments: &str| {
        let output = command(folder).env("COMPRESS_RATES", folder.join("rates.json")).args(arguments.split_whitespace()).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|e| panic!("{arguments}: {e}\n{}", String::from_utf8_lossy(&output.stderr)))
    };
    let plan = timed(&format!("auto llama --for transformers --plan --json {SETS}"));
    assert!(plan["estimated_seconds"].as_f64() > Some(0.0) && plan["work"][0]["estimated_seconds"].as_f64() > Some(0.0), "{plan}");
    let report = timed("quantize llama -o out --scheme W8A8 --json");
    let stages = report["timing"]["stages"].as_array().unwrap();
    assert_eq!(stages[0]["name"], "read and write");
    assert!(stages.iter().all(|stage| stage["seconds"].as_f64() > Some(0.0) && stage["estimated_seconds"].as_f64() > Some(0.0)), "{stages:?}");
}

fn numbers(points: &Value, key: &str) -> Vec<f64> {
    points.as_array().unwrap().iter().map(|point| point[key].as_f64().unwrap()).collect()
}

/// After their correction, predictions are within a factor of 1.25 of the measurements for uniform formats,
/// and of 1.5 for mixtures.
#[test]
fn predictions_are_close_to_measurements() {
    let folder = prepared();
    let found = data(folder.path(), &format!("auto llama --front front.json --for transformers --json {SETS}"));
    assert_eq!(found["search"], read_json(&folder.path().join("front.json")));
    let points = &found["search"]["points"];
    let (predicted, measured) = (numbers(points, "predicted"), numbers(points, "measured"));
    assert!(predicted.len() >= 8, "{points}");
    for (point, (predicted, measured)) in points.as_array().unwrap().iter().zip(predicted.iter().zip(&measured)) {
        let bound: f64 = if point["reference"].is_null() { 1.5 } else { 1.25 };
        assert!((predicted / measured).ln().abs() < bound.ln(), "{predicted} and {measured}: {point}");
    }
    let uniform: Vec<&Value> = points.as_array().unwrap().iter().filter(|point| !point["reference"].is_null()).collect();
    assert!(uniform.windows(2).all(|pair| pair[0]["bytes"].as_u64() <= pair[1]["bytes"].as_u64()), "{points}");
    assert!(uniform.first().unwrap()["measured"].as_f64() > uniform.last().unwrap()["measured"].as_f64());
    // Mixtures are between uniform formats, and runtimes fuse layers of one unit.
    assert!(points.as_array().unwrap().iter().any(|point| point["reference"].is_null()));
    let names: Vec<&str> = found["search"]["units"].as_array().unwrap().iter().map(|unit| unit["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 8, "{names:?}");
}

#[test]
fn the_result_meets_the_limit_and_its_recipe_reproduces_it() {
    let folder = prepared();
    let folder = folder.path();
    for (name, limit) in [("bits", "--max-size 6bits"), ("ratio", "--max-size 45%"), ("loss", "--max-kl 0.01")] {
        let found = data(folder, &format!("auto llama -o {name} {limit} --json {SETS}"));
        let chosen = &found["search"]["chosen"];
        match name {
            "bits" => assert!(chosen["bits"].as_f64().unwrap() <= 6.0 && chosen["bits"].as_f64().unwrap() > 4.5, "{chosen}"),
            "ratio" => {
                let bytes = |name: &str| std::fs::metadata(folder.join(name).join("model.safetensors")).unwrap().len() as f64;
                // Headers and shapes of packed weights are not counted.
                assert!(chosen["bytes"].as_f64().unwrap() <= 0.45 * bytes("llama") && bytes("ratio") < 0.6 * bytes("llama"), "{chosen}");
            }
            _ => {
                assert!(chosen["measured"].as_f64().unwrap() <= 0.01, "{chosen}");
                // The written weights are measured again, and are better than those rounded to nearest.
                let report = read_json(&folder.join("loss/report.json"));
                let exceeds = report["fidelity"]["kl"].as_f64().unwrap() > 0.01;
                let notes = report["notes"].as_array().unwrap();
                assert_eq!(notes.iter().any(|note| note.as_str().unwrap().contains("exceeds `--max-kl 0.01`")), exceeds, "{notes:?}");
                assert_eq!((&report["search"]["max_kl"], &report["search"]["chosen"]["measured"]), (&json!(0.01), &chosen["measured"]));
            }
        }
        assert!(chosen["measured"].is_number(), "{chosen}");
        ok(folder, &format!("verify {name}"));
        ok(folder, &format!("run {name}/recipe.yaml -o {name}-again"));
        let weights = |name: &str| std::fs::read(folder.join(name).join("model.safetensors")).unwrap();
        assert!(weights(name) == weights(&format!("{name}-again")), "{name}");
    }
}

/// Repeated runs, with any number of threads, find the same front and write the same bytes.
#[test]
fn results_do_not_depend_on_threads_or_runs() {
    let folder = prepared();
    let folder = folder.path();
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    let read = |name: String| std::fs::read(folder.join(name)).unwrap();
    let mut first = None;
    for (run, threads) in [1, 2, 4, 1, 2].into_iter().enumerate() {
        let options = format!("--threads {threads} --quiet {SETS}");
        ok(folder, &format!("auto llama -o out-{run} --max-size 6bits --front front-{run}.json {options}"));
        ok(folder, &format!("auto llama -o {run}.gguf --max-size 6bits {options}"));
        // The recipes name their outputs.
        let recipe = |name: String| String::from_utf8(read(name)).unwrap().replace(&format!("out-{run}"), "out").replace(&format!("{run}.gguf"), "out.gguf");
        let found = [
            read(format!("front-{run}.json")),
            read(format!("out-{run}/model.safetensors")),
            recipe(format!("out-{run}/recipe.yaml")).into_bytes(),
            read(format!("{run}.gguf")),
            recipe(format!("{run}.gguf.report/recipe.yaml")).into_bytes(),
        ];
        let expected = first.get_or_insert_with(|| found.clone());
        let differing: Vec<usize> = (0..found.len()).filter(|at| found[*at] != expected[*at]).collect();
        assert!(differing.is_empty(), "run {run} with {threads} threads: {differing:?}");
    }
}

/// An interrupted search continues with its measurements, and so does one with another limit.
#[test]
fn a_checkpoint_replaces_measurements() {
    let folder = prepared();
    let folder = folder.path();
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    let search = format!("auto llama --for llama.cpp --json --checkpoint state.json {SETS}");
    let first = data(folder, &format!("{search} --front first.json"))["search"].clone();
    let mut state = read_json(&folder.join("state.json"));
    // Several points can have the same formats.
    let formats: std::collections::BTreeSet<String> = first["points"].as_array().unwrap().iter().map(|point| point["formats"].to_string()).collect();
    assert!(state["mixtures"].as_array().unwrap().len() >= formats.len() && !state["losses"].as_array().unwrap().is_empty(), "{state}");
    assert_eq!(data(folder, &format!("{search} --front again.json"))["search"], first);
    // The output is the same as without a checkpoint.
    let found = data(folder, &format!("{search} -o with.gguf --max-size 6bits"))["search"].clone();
    ok(folder, &format!("auto llama -o without.gguf --max-size 6bits --quiet {SETS}"));
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert!(bytes("with.gguf") == bytes("without.gguf"));
    let known = |found: &Value| {
        found["points"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|point| first["points"].as_array().unwrap().iter().any(|other| other["formats"] == point["formats"]))
            .count()
    };
    assert!(known(&found) >= 4, "{found}");
    // The stored values are used.
    let options = state["mixtures"][0]["options"].clone();
    state["mixtures"][0]["measured"] = json!(0.012345);
    std::fs::write(folder.join("state.json"), state.to_string()).unwrap();
    let changed = data(folder, &format!("{search} --front changed.json"))["search"].clone();
    let names: Vec<&Value> = options.as_array().unwrap().iter().map(|option| &changed["formats"][option.as_u64().unwrap() as usize]).collect();
    let point = changed["points"].as_array().unwrap().iter().find(|point| point["formats"].as_array().unwrap().iter().eq(names.iter().copied()));
    assert_eq!(point.unwrap()["measured"], json!(0.012345));
    for (arguments, part) in [
        ("--for llama.cpp --formats Q8_0,Q5_0", "state.json has the measurements of another model, other data, formats"),
        ("--for transformers", "state.json has the measurements of another model"),
    ] {
        let run = compress(folder, &format!("auto llama {arguments} --front new.json --checkpoint state.json {SETS}"));
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("new.json").exists(), "{arguments}: {}", run.stderr);
    }
}

/// The passes of the recipe of an output.
fn recipe(folder: &Path, name: &str) -> Value {
    read_json(&folder.join(name).join("report.json"))["recipe"]["passes"].clone()
}

/// The targets of the search are drawn from the predictions: labels, even unusable ones, change nothing.
#[test]
fn labels_of_calibration_data_are_ignored() {
    let folder = prepared();
    let folder = folder.path();
    let mut arrays = candle_core::safetensors::load(folder.join("ids.safetensors"), &candle_core::Device::Cpu).unwrap();
    let labels = candle_core::Tensor::full(999i64, arrays["input_ids"].dims(), &candle_core::Device::Cpu).unwrap();
    arrays.insert("labels".to_owned(), labels);
    candle_core::safetensors::save(&arrays, folder.join("labelled.safetensors")).unwrap();
    let [plain, labelled] = ["ids", "labelled"].map(|name| {
        let arguments = format!("auto llama --front {name}.json --for transformers --json --calibration {name}.safetensors --eval held-out.safetensors");
        data(folder, &arguments)["search"]["points"].clone()
    });
    assert_eq!(plain, labelled);
    let held_out = data(folder, "auto llama --front own.json --for transformers --json --calibration labelled.safetensors");
    assert!(held_out["search"]["points"].as_array().is_some_and(|points| points.len() > 4), "{held_out}");
}

#[test]
fn impossible_limits_name_the_nearest_possible_one() {
    let folder = prepared();
    let folder = folder.path();
    let run = compress(folder, &format!("auto llama -o out --max-size 3bits {SETS}"));
    assert!(run.code == 1 && !folder.join("out").exists(), "{}", run.stderr);
    let nearest =
        run.stderr.split("the nearest possible limit is ").nth(1).unwrap_or_else(|| panic!("{}", run.stderr)).split_whitespace().next().unwrap().to_owned();
    ok(folder, &format!("auto llama -o out --max-size {nearest} --quiet {SETS}"));
    // A limit of loss that only floats meet.
    let run = compress(folder, &format!("auto llama -o close --max-kl 0.000000001 {SETS}"));
    assert!(run.code == 1 && !folder.join("close").exists(), "{}", run.stderr);
    let nearest =
        run.stderr.split("the nearest possible limit is ").nth(1).unwrap_or_else(|| panic!("{}", run.stderr)).split_whitespace().next().unwrap().to_owned();
    ok(folder, &format!("auto llama -o close --max-kl {nearest} --quiet {SETS}"));
    for (arguments, part) in [
        ("auto llama --calibration ids.safetensors", "specify `-o DIR`"),
        ("auto llama -o new --calibration ids.safetensors", "specify a limit"),
        (
            "auto llama -o new.gguf --for vllm --max-size 6bits --calibration ids.safetensors",
            "vLLM loads a folder: name a folder, or specify `--for llama.cpp` for the formats of this file",
        ),
        ("auto llama -o out --max-size 6bits --calibration ids.safetensors", "exists"),
        ("auto llama -o new --max-kl -1 --calibration ids.safetensors", "not a positive number"),
        ("auto llama -o new --max-size 99bits --calibration ids.safetensors --eval held-out.safetensors", "nothing to do"),
        ("auto llama -o new --max-size 6bits --calibration {\"arrays\":\"ids.safetensors\",\"samples\":5}", ""),
    ] {
        let run = compress(folder, arguments);
        assert!(run.stderr.contains(part), "{arguments}: {}", run.stderr);
        assert_eq!(run.code == 0, part.is_empty(), "{arguments}: {}", run.stderr);
    }
    let report = json!(read_json(&folder.join("new/report.json")));
    assert_eq!(report["passes"][0]["name"], "quantize");
    // Rules that do not depend on the formats are checked before the search.
    assert_eq!((&report["loads"][0]["runtime"], &report["recipe"]["loads"]), (&json!("vllm"), &json!(["vllm@0.33"])));
    std::fs::remove_file(folder.join("llama/tokenizer.model")).unwrap();
    let run = compress(folder, &format!("auto llama -o other --max-size 6bits {SETS}"));
    assert!(run.code == 1 && run.stdout.is_empty() && run.stderr.contains("rules of vllm 0.33: tokenizer: "), "{}", run.stderr);
}

/// The size of a GGUF file is predicted to the byte, and its recipe reproduces it.
#[test]
fn types_of_a_gguf_file_meet_a_limit_of_its_size() {
    let folder = prepared();
    let folder = folder.path();
    let run = compress(folder, "auto llama --for llama.cpp -o small.gguf --max-size 80% --calibration ids.safetensors --eval held-out.safetensors");
    assert!(run.code == 1 && run.stderr.contains("`no_vocab`: the file has no vocabulary"), "{}", run.stderr);
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    let search = "auto llama --for llama.cpp --json --calibration ids.safetensors --eval held-out.safetensors";
    let found = data(folder, &format!("{search} --front front.json"))["search"].clone();
    let formats: Vec<&str> = found["formats"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let points = found["points"].as_array().unwrap();
    let reference = |name: &str| points.iter().find(|point| point["reference"] == name).unwrap_or_else(|| panic!("{name}: {points:?}")).clone();
    // llama.cpp's own mixtures are written with the predicted size.
    for (name, at) in [("Q8_0", formats.iter().position(|name| *name == "Q8_0").unwrap()), ("Q4_K_M", usize::MAX)] {
        std::fs::write(folder.join("recipe.yaml"), format!("model: llama\npasses: []\nexport: [{{ gguf: {{ type: {name} }} }}]\noutput: {name}\n")).unwrap();
        ok(folder, "run recipe.yaml");
        let bytes = std::fs::metadata(folder.join(name).join("model.gguf")).unwrap().len();
        assert_eq!(reference(name)["bytes"].as_u64(), Some(bytes), "{name}");
        assert!(at == usize::MAX || reference(name)["formats"].as_array().unwrap().iter().all(|format| format == formats[at]), "{name}");
    }
    // The backward pass does not score the embedding, which is also the head.
    let units = found["units"].as_array().unwrap();
    assert_eq!(units.iter().filter(|unit| unit["measured"] == true).map(|unit| &unit["name"]).collect::<Vec<_>>(), ["token_embd.weight"]);
    assert_eq!(units.len(), 1 + 2 * 7, "{units:?}");
    let limit = reference("Q8_0")["bytes"].as_u64().unwrap() * 4 / 5;
    let found = data(folder, &format!("{search} -o small.gguf --max-size {limit}B"));
    let chosen = &found["search"]["chosen"];
    let bytes = std::fs::read(folder.join("small.gguf")).unwrap();
    assert_eq!(chosen["bytes"].as_u64(), Some(bytes.len() as u64), "{chosen}");
    assert!(bytes.len() as u64 <= limit && bytes.len() as u64 * 10 > limit * 9, "{} of {limit}", bytes.len());
    ok(folder, "verify small.gguf");
    let report = read_json(&folder.join("small.gguf.report/report.json"));
    let section = &report["search"];
    assert_eq!((&section["chosen"]["bytes"], &section["runtime"]), (&chosen["bytes"], &json!("llama.cpp")));
    let front = numbers(&section["front"], "predicted");
    assert!(front.len() <= 200 && front.windows(2).all(|pair| pair[0] > pair[1]), "{front:?}");
    // The front ends with floats, and has a point for 5 % more bytes.
    assert!(front.last() == Some(&0.0) && section["larger"]["predicted"].as_f64() < section["chosen"]["predicted"].as_f64(), "{section}");
    assert!(section["units"].as_array().unwrap().iter().any(|unit| !unit["larger"].is_null()), "{section}");
    let page = std::fs::read_to_string(folder.join("small.gguf.report/report.html")).unwrap();
    assert!(page.contains("id=\"search\"") && page.contains("With 5 % more bytes"), "{page}");
    let recipe = folder.join("small.gguf.report/recipe.yaml");
    ok(folder, &format!("run {} -o again.gguf", recipe.display()));
    assert!(std::fs::read(folder.join("again.gguf")).unwrap() == bytes);
    let found = data(folder, &format!("{search} --front few.json --formats Q8_0,Q5_0,F16"));
    assert_eq!(found["search"]["formats"], json!(["Q5_0", "Q8_0", "F16"]));
    assert_eq!(found["search"]["units"][0]["options"].as_array().unwrap().len(), 3);
    for (arguments, part) in [
        ("-o new.gguf --max-size 70% --method gptq", "has no effect on GGUF files"),
        ("-o new.onnx --max-size 70%", "loads a GGUF file or a folder"),
        ("-o new.gguf --max-size 3%", "the nearest possible limit is"),
        ("-o new.gguf --max-size 70% --formats Q5_0,Q9", "`Q9` is not a format for llama.cpp; its formats are Q2_K,"),
        ("-o new.gguf --max-size 70% --formats Q4_K", "no format of `--formats` for llama.cpp except F16 fits the weights of this model, such as `"),
        ("-o new.gguf --max-size 70% --formats F16", "names no format besides floats"),
    ] {
        let run = compress(folder, &format!("{search} {arguments}"));
        assert!(run.code > 0 && run.stderr.contains(part), "{arguments}: {}", run.stderr);
    }
}

/// The backward pass does not score fused experts. They are measured, and have one type in all layers.
#[test]
fn fused_experts_of_a_gguf_file_have_a_type() {
    let folder = prepared();
    let folder = folder.path();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/mixtral-fused");
    std::fs::create_dir(folder.join("mixtral")).unwrap();
    std::fs::write(folder.join("mixtral/tokenizer.json"), BYTE_LEVEL).unwrap();
    let mut config = read_json(&golden.join("config.json"));
    for (key, size) in [("hidden_size", 32), ("intermediate_size", 32)] {
        config[key] = size.into();
    }
    std::fs::write(folder.join("mixtral/config.json"), config.to_string()).unwrap();
    // Rows of the golden model are shorter than a block.
    let device = candle_core::Device::Cpu;
    let golden = candle_core::safetensors::load(golden.join("model.safetensors"), &device).unwrap();
    let wider = golden.into_iter().map(|(name, tensor)| {
        let size = |size: &usize| [(16, 32), (12, 32), (24, 64), (8, 16)].into_iter().find(|(from, _)| from == size).map_or(*size, |(_, to)| to);
        let shape: Vec<usize> = tensor.dims().iter().map(size).collect();
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|at| ((at * 7919 + name.len() * 31) % 1009) as f32 / 1009.0 - 0.5).collect();
        (name, candle_core::Tensor::from_vec(values, shape, &device).unwrap())
    });
    candle_core::safetensors::save(&wider.collect(), folder.join("mixtral/model.safetensors")).unwrap();
    let search = "auto mixtral --for llama.cpp --json --calibration ids.safetensors --eval held-out.safetensors";
    let found = data(folder, &format!("{search} -o small.gguf --max-size 30%"));
    let chosen = &found["search"]["chosen"];
    assert_eq!(chosen["bytes"].as_u64(), Some(std::fs::metadata(folder.join("small.gguf")).unwrap().len()), "{chosen}");
    let units = found["search"]["units"].as_array().unwrap();
    let fused = units.iter().position(|unit| unit["name"] == "blk.*.ffn_up_exps.weight").unwrap_or_else(|| panic!("{units:?}"));
    assert_eq!(units[fused]["measured"], true);
    let format = chosen["formats"][fused].as_str().unwrap();
    assert_ne!(format, "F16", "{chosen}");
    let recipe = read_json(&folder.join("small.gguf.report/report.json"))["recipe"].clone();
    let types = &recipe["export"][0]["gguf"]["types"];
    for tensor in ["ffn_up_exps", "ffn_gate_exps"] {
        for layer in 0..2 {
            assert_eq!(types[format!("blk.{layer}.{tensor}.weight")], format, "{types}");
        }
    }
}

/// The score of a language model is its perplexity on labels.
#[test]
fn the_smallest_language_model_within_a_loss_of_the_score_is_chosen() {
    let folder = prepared();
    let folder = folder.path();
    // The most likely next tokens: quantization increases the perplexity.
    let ids = candle_core::safetensors::load(folder.join("held-out.safetensors"), &Device::Cpu).unwrap();
    let inputs: Inputs = ids.into_iter().collect();
    let logits = outputs(&compress::Model::open(folder.join("llama")).unwrap(), &inputs, Rounding::Token);
    let likely: Vec<Vec<u32>> = logits.argmax(2).unwrap().to_vec2().unwrap();
    let next = |row: &Vec<u32>| [-100].into_iter().chain(row[..row.len() - 1].iter().map(|token| i64::from(*token))).collect::<Vec<i64>>();
    let labels = Tensor::from_vec(likely.iter().flat_map(next).collect::<Vec<_>>(), (8, 12), &Device::Cpu).unwrap();
    let arrays = inputs.into_iter().chain([("labels".to_owned(), labels)]).collect();
    candle_core::safetensors::save(&arrays, folder.join("labelled.safetensors")).unwrap();
    let search = "auto llama --for transformers --json --calibration ids.safetensors";
    let found = data(folder, &format!("{search} --eval labelled.safetensors -o out --max-loss 1%"));
    let (chosen, metric) = (&found["search"]["chosen"], &found["search"]["metric"]);
    let original = metric["original"].as_f64().unwrap();
    assert_eq!((&metric["name"], &found["search"]["loss"]), (&json!("perplexity"), &json!("kl-divergence")));
    let drop = chosen["drop"].as_f64().unwrap();
    assert!(drop <= 0.01 && (chosen["score"].as_f64().unwrap() / original - 1.0 - drop).abs() < 1e-9, "{chosen} {original}");
    for point in found["search"]["points"].as_array().unwrap() {
        assert!(point["bytes"].as_u64() >= chosen["bytes"].as_u64() || point["drop"].as_f64().unwrap() > 0.01, "{point}");
    }
    // The limit matters.
    assert!(found["search"]["points"].as_array().unwrap().iter().any(|point| point["drop"].as_f64() > Some(0.01)), "{found}");
    let report = read_json(&folder.join("out/report.json"));
    assert_eq!((&report["search"]["max_loss"], &report["search"]["metric"]["original"]), (&json!(1.0), &metric["original"]));
    let run = compress(folder, &format!("{search} --eval held-out.safetensors -o new --max-loss 1%"));
    assert!(run.code > 0 && run.stderr.contains("needs data with labels") && !folder.join("new").exists(), "{}", run.stderr);
    // Missing labels are reported before the layers are scored, which fails here.
    let mut broken = candle_core::safetensors::load(folder.join("ids.safetensors"), &Device::Cpu).unwrap();
    let shape = broken["input_ids"].dims().to_vec();
    let ids: Vec<i64> = broken["input_ids"].flatten_all().unwrap().to_vec1().unwrap();
    let ids = Tensor::from_vec(ids.into_iter().enumerate().map(|(at, id)| if at == 0 { 99_999 } else { id }).collect::<Vec<_>>(), shape, &Device::Cpu);
    broken.insert("input_ids".to_owned(), ids.unwrap());
    candle_core::safetensors::save(&broken, folder.join("broken.safetensors")).unwrap();
    let search_broken = "auto llama --for transformers --calibration broken.safetensors --eval held-out.safetensors";
    let run = compress(folder, &format!("{search_broken} -o new --max-loss 1%"));
    assert!(run.code > 0 && run.stderr.contains("needs data with labels"), "{}", run.stderr);
    let run = compress(folder, &format!("{search_broken} -o new --max-size 6bits"));
    assert!(run.code > 0 && !run.stderr.contains("needs data with labels") && !folder.join("new").exists(), "{}", run.stderr);
    let run = compress(folder, "auto llama --for transformers -o new --max-loss 1% --calibration {\"arrays\":\"ids.safetensors\",\"samples\":9}");
    assert!(run.stderr.contains("needs `--eval`, because calibration uses 9 of the 12 samples"), "{}", run.stderr);
}

/// A slower method is kept only if the divergence on the held-out samples falls.
#[test]
fn a_time_allows_better_methods() {
    let folder = prepared();
    let folder = folder.path();
    let found = data(folder, &format!("auto llama -o out --max-size 5bits --time 1h --json {SETS}"));
    let methods = found["search"]["methods"].as_array().unwrap();
    assert_eq!(methods.iter().map(|method| &method["method"]).take(3).collect::<Vec<_>>(), ["gptq", "gptq, guide: loss", "autoround"]);
    let measured: Vec<f64> = methods.iter().map(|method| method["measured"].as_f64().unwrap()).collect();
    assert!(measured.len() == 5 && measured.iter().any(|other| *other != measured[0]), "{measured:?}");
    let chosen: Vec<usize> = (0..5).filter(|at| methods[*at]["chosen"] == true).collect();
    let least = measured.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!((chosen.len(), measured[chosen[0]]), (1, least), "{methods:?}");
    let report = read_json(&folder.join("out/report.json"));
    assert_eq!(report["search"]["methods"], found["search"]["methods"]);
    // The output is the measured one.
    let pass = &report["recipe"]["passes"][0]["quantize"];
    assert!(methods[chosen[0]]["method"].as_str().unwrap().starts_with(pass["method"].as_str().unwrap()), "{pass}");
    let written = report["fidelity"]["kl"].as_f64().unwrap();
    assert!((written / least - 1.0).abs() < 0.01, "{written} {least}");
    ok(folder, "run out/recipe.yaml -o again");
    let weights = |name: &str| std::fs::read(folder.join(name).join("model.safetensors")).unwrap();
    assert!(weights("out") == weights("again"));
    // A time in which nothing ends leaves the default method.
    let found = data(folder, &format!("auto llama -o short --max-size 5bits --time 1us --json {SETS}"));
    assert_eq!(found["search"]["methods"].as_array().unwrap().iter().map(|method| &method["measured"]).collect::<Vec<_>>(), [&Value::Null]);
    assert_eq!(recipe(folder, "short")[0]["quantize"]["method"], "gptq");
    // A single format needs no limit: all weights have it.
    let found = data(folder, &format!("auto llama -o single --formats W4A16:32 --time 1us --json {SETS}"));
    let point = &found["search"]["chosen"];
    assert!(point["formats"].as_array().unwrap().iter().all(|format| format == "W4A16:32"), "{point}");
    let pass = &recipe(folder, "single")[0]["quantize"];
    assert_eq!((&pass["scheme"], &pass["method"], pass.get("rules")), (&Value::from("W4A16"), &Value::from("gptq"), None), "{pass}");
    for (arguments, part) in [
        ("auto llama -o new --formats W4A16:32,W4A16:64", "specify a limit"),
        ("auto llama -o new --max-size 5bits --time 10", "`10` is not a time like"),
        ("auto llama -o new --max-size 5bits --time 10m --method rtn", "cannot be used with"),
        ("auto llama --front new.json --max-size 5bits --time 10m", "--output"),
        ("auto llama --front new.json --max-size 5bits --method rtn", "--method: has no effect without an output"),
        ("auto llama --front new.json --max-size 5bits --sign key.pem", "--sign: has no effect without an output"),
        ("auto llama --front new.json --max-size 5bits --no-card", "--no-card: has no effect without an output"),
        ("auto llama --for llama.cpp -o new --max-size 90% --time 10m --prune 0.5", "--time: is not supported for GGUF files with `--prune`"),
    ] {
        let run = compress(folder, &format!("{arguments} {SETS}"));
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("new").exists(), "{arguments}: {}", run.stderr);
    }
}

/// The codes of a GGUF file are chosen by the method with the least divergence on the held-out samples. The
/// types and the size remain.
#[test]
fn a_time_compensates_the_codes_of_a_gguf_file() {
    let folder = prepared();
    let folder = folder.path();
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    let search = format!("auto llama --for llama.cpp --json --max-size 50% {SETS}");
    let plain = data(folder, &format!("{search} -o plain.gguf"));
    let found = data(folder, &format!("{search} -o small.gguf --time 1h"));
    let methods = found["search"]["methods"].as_array().unwrap();
    let names: Vec<&str> = methods.iter().map(|method| method["method"].as_str().unwrap()).collect();
    let trained = ["autoround", "autoround, guide: loss", "autoround, guide: loss, iterations: 1000"];
    assert_eq!(names, [&["importance", "gptq", "gptq, guide: loss"][..], &trained].concat());
    let measured: Vec<f64> = methods.iter().map(|method| method["measured"].as_f64().unwrap()).collect();
    let chosen = (0..names.len()).fold(0, |best, at| if measured[at] < measured[best] { at } else { best });
    let is_better = chosen > 0;
    assert_eq!(methods.iter().map(|method| method["chosen"] == true).collect::<Vec<_>>(), (0..names.len()).map(|at| at == chosen).collect::<Vec<_>>());
    assert_eq!(found["search"]["chosen"]["bytes"], plain["search"]["chosen"]["bytes"]);
    let [plain, small] = ["plain.gguf", "small.gguf"].map(|name| std::fs::read(folder.join(name)).unwrap());
    assert_eq!((plain.len(), plain == small), (small.len(), !is_better));
    let passes = read_json(&folder.join("small.gguf.report/report.json"))["recipe"]["passes"].clone();
    let method = names[chosen].split(',').next().unwrap();
    assert_eq!(passes.as_array().unwrap().iter().map(|pass| &pass["quantize"]["method"]).collect::<Vec<_>>(), vec![method; usize::from(is_better)]);
    ok(folder, "run small.gguf.report/recipe.yaml -o again.gguf");
    assert!(std::fs::read(folder.join("again.gguf")).unwrap() == small);
}
