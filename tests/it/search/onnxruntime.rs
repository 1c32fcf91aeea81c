//! `compress auto --for onnxruntime`.

use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use crate::cli::support::{compress, data, ok, read_json};
use crate::common::onnxruntime::has_onnx_runtime;

/// A classifier `bert` of one layer with matrices of 64 or 128 rows, and 48 samples without labels.
pub(super) fn encoder(folder: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/bert-sequence-classification");
    std::fs::create_dir(folder.join("bert")).unwrap();
    let mut config = read_json(&golden.join("config.json"));
    for (key, size) in [("hidden_size", 64), ("intermediate_size", 128), ("num_hidden_layers", 1)] {
        config[key] = size.into();
    }
    std::fs::write(folder.join("bert/config.json"), config.to_string()).unwrap();
    let golden = candle_core::safetensors::load(golden.join("model.safetensors"), &Device::Cpu).unwrap();
    let wider = golden.into_iter().filter(|(name, _)| !name.contains("layer.1.")).map(|(name, tensor)| {
        // The positions have 16 rows, like the hidden size of the golden model.
        let size = |(axis, size): (usize, &usize)| match size {
            16 if axis == 0 && name.contains("position_embeddings") => 16,
            16 => 64,
            28 => 128,
            other => *other,
        };
        let shape: Vec<usize> = tensor.dims().iter().enumerate().map(size).collect();
        let seed = name.bytes().map(u64::from).sum();
        let values = crate::common::Tensor::random(crate::common::DType::F32, &shape, seed).values();
        let values: Vec<f32> = values.into_iter().map(|value| if shape.len() == 1 { 1.0 + value as f32 / 8.0 } else { value as f32 / 4.0 }).collect();
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    });
    candle_core::safetensors::save(&wider.collect(), folder.join("bert/model.safetensors")).unwrap();
    let ids = Tensor::from_vec((0..576i64).map(|i| (i * i * 11 + i * 5 + 3) % 47 + 1).collect::<Vec<_>>(), (48, 12), &Device::Cpu).unwrap();
    candle_core::safetensors::save(
        &[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(),
        folder.join("texts.safetensors"),
    )
    .unwrap();
}

/// The expected loss and size of the units in formats with these indices.
pub(super) fn totals(units: &[Value], formats: &[usize]) -> (f64, u64) {
    let options = units.iter().zip(formats).map(|(unit, format)| &unit["options"][*format]);
    options.fold((0.0, 0), |(loss, bytes), option| (loss + option["loss"].as_f64().unwrap(), bytes + option["bytes"].as_u64().unwrap()))
}

/// Indices of the options that a unit has.
fn possible(unit: &Value) -> Vec<usize> {
    (0..unit["options"].as_array().unwrap().len()).filter(|option| !unit["options"][*option].is_null()).collect()
}

/// The expected loss and size of the choices of formats on the Pareto front: no other choice has less loss
/// without being larger.
pub(super) fn best(units: &[Value]) -> Vec<(f64, u64)> {
    let extend = |all: Vec<(f64, u64)>, unit: &Value| {
        let options: Vec<(f64, u64)> = possible(unit).into_iter().map(|option| totals(std::slice::from_ref(unit), &[option])).collect();
        let mut extended: Vec<(f64, u64)> = all.iter().flat_map(|(loss, bytes)| options.iter().map(move |(more, size)| (loss + more, bytes + size))).collect();
        extended.sort_by(|a, b| a.1.cmp(&b.1).then(a.0.total_cmp(&b.0)));
        let mut least = f64::INFINITY;
        extended.retain(|(loss, _)| {
            let is_better = *loss < least;
            least = least.min(*loss);
            is_better
        });
        extended
    };
    units.iter().fold(vec![(0.0, 0)], extend)
}

/// Indices of the formats of a point.
pub(super) fn indices(search: &Value, point: &Value) -> Vec<usize> {
    let names = search["formats"].as_array().unwrap();
    point["formats"].as_array().unwrap().iter().map(|name| names.iter().position(|other| other == name).unwrap()).collect()
}

/// All choices of formats.
pub(super) fn every(units: &[Value]) -> Vec<Vec<usize>> {
    let extend = |all: Vec<Vec<usize>>, unit: &Value| {
        let with = |formats: &Vec<usize>| possible(unit).into_iter().map(|format| [formats.as_slice(), &[format]].concat()).collect::<Vec<_>>();
        all.iter().flat_map(with).collect()
    };
    units.iter().fold(vec![Vec::new()], extend)
}

pub(super) const ONNX: &str = "auto bert --for onnxruntime --json --data texts.safetensors";

#[test]
fn int8_layers_of_an_onnx_file_meet_a_limit_of_the_loss() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let found = data(folder, &format!("{ONNX} --front front.json"))["search"].clone();
    assert_eq!(
        (&found["formats"], &found["loss"]),
        (&json!(["int4-weights", "int8-static", "int8-dynamic", "int8-weights", "float16", "floats"]), &json!("cosine-distance"))
    );
    // Integer weights with float arithmetic are options only for the tables, which have no other one.
    for unit in found["units"].as_array().unwrap() {
        let has: Vec<bool> = (0..6).map(|option| !unit["options"][option].is_null()).collect();
        let is_table = unit["name"].as_str().unwrap().contains("embeddings");
        assert_eq!(has, if is_table { [false, false, false, true, true, true] } else { [false, true, true, false, true, true] }, "{unit}");
    }
    let points = found["points"].as_array().unwrap();
    let reference =
        |name: &str| points.iter().find(|point| point["reference"] == name).unwrap_or_else(|| panic!("{name}: {points:?}"))["measured"].as_f64().unwrap();
    let limit = 100.0 * reference("int8-static").min(reference("int8-dynamic")) / 3.0;
    // Few formats, so that all choices can be enumerated.
    let arguments = format!("--max-loss {limit:.9}% --formats int8-static,int8-dynamic");
    let found = data(folder, &format!("{ONNX} {arguments} -o out"));
    let (chosen, units) = (&found["search"]["chosen"], found["search"]["units"].as_array().unwrap());
    assert!(chosen["drop"].as_f64().unwrap() <= limit / 100.0 && chosen["drop"] == chosen["measured"], "{limit} {chosen}");
    // Measured points that are smaller exceed the limit.
    for point in found["search"]["points"].as_array().unwrap() {
        assert!(point["bytes"].as_u64() >= chosen["bytes"].as_u64() || point["drop"].as_f64().unwrap() > limit / 100.0, "{point}");
    }
    // Of all choices of formats, none has less expected loss than the points of the front of its size.
    let all: Vec<(f64, u64)> = every(units).iter().map(|formats| totals(units, formats)).collect();
    assert!(all.len() > 1000, "{}", all.len());
    let (report, others) = (read_json(&folder.join("out/report.json")), found["search"]["other_bytes"].as_u64().unwrap());
    let front = report["search"]["front"].as_array().unwrap();
    assert!(front.len() > 10, "{front:?}");
    for point in front {
        let (loss, bytes) = (point["predicted"].as_f64().unwrap(), point["bytes"].as_u64().unwrap() - others);
        let least = all.iter().filter(|(_, other)| *other <= bytes).map(|(loss, _)| *loss).fold(f64::INFINITY, f64::min);
        assert!(loss <= 1.01 * least + 1e-12, "{loss} instead of {least} at {bytes} bytes");
    }
    // The file has the stated size, and its recipe writes it again.
    let written = |name: &str| std::fs::read(folder.join(name).join("model.onnx")).unwrap();
    assert_eq!(chosen["bytes"].as_u64(), Some(written("out").len() as u64), "{chosen}");
    ok(folder, "verify out");
    ok(folder, "run out/recipe.yaml -o again");
    assert!(written("out") == written("again"));
    for threads in [1, 2, 4] {
        data(folder, &format!("{ONNX} {arguments} -o threads-{threads} --threads {threads}"));
        assert!(written("out") == written(&format!("threads-{threads}")), "{threads} threads");
    }
    assert_eq!((&report["search"]["runtime"], &report["search"]["loss"]), (&json!("ONNX Runtime"), &json!("cosine-distance")));
    assert!((report["search"]["max_loss"].as_f64().unwrap() - limit).abs() < 1e-8, "{}", report["search"]);
    assert_eq!(report["loads"][0]["runtime"], "onnxruntime");
    let page = std::fs::read_to_string(folder.join("out/report.html")).unwrap();
    assert!(page.contains("Size and distance") && page.contains("measured distance"), "{page}");
}

#[test]
fn an_onnx_file_meets_a_limit_of_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let found = data(folder, &format!("{ONNX} -o small.onnx --max-size 60%"));
    let bytes = std::fs::metadata(folder.join("small.onnx")).unwrap().len();
    let input = std::fs::metadata(folder.join("bert/model.safetensors")).unwrap().len();
    assert_eq!(found["search"]["chosen"]["bytes"].as_u64(), Some(bytes));
    assert!(10 * bytes <= 6 * input && 10 * bytes > 5 * input, "{bytes} of {input}");
    // The input and the output of a file are compared on evaluation data.
    let ids = Tensor::from_vec((0..96i64).map(|i| (i * i * 7 + i * 3 + 1) % 47 + 1).collect::<Vec<_>>(), (8, 12), &Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&arrays.into(), folder.join("others.safetensors")).unwrap();
    data(folder, &format!("{ONNX} -o evaluated.onnx --max-size 60% --eval others.safetensors"));
    // The smallest file consists of int8 layers.
    let run = compress(folder, &format!("{ONNX} -o least.onnx --max-size 1%"));
    let nearest = run.stderr.split("the nearest possible limit is ").nth(1).unwrap_or_else(|| panic!("{}", run.stderr)).split_whitespace().next().unwrap();
    assert!(run.code == 1 && !folder.join("least.onnx").exists(), "{}", run.stderr);
    data(folder, &format!("{ONNX} -o least.onnx --max-size {}", nearest.parse::<f64>().unwrap() + 0.02));
    assert!(std::fs::metadata(folder.join("least.onnx")).unwrap().len() < bytes);
    // Named formats are options of all layers.
    let found = data(folder, &format!("{ONNX} --front few.json --formats int8-weights"));
    assert!(found["search"]["units"].as_array().unwrap().iter().all(|unit| unit["options"].as_array().unwrap().iter().all(|option| !option.is_null())));
    for (arguments, part) in [
        ("-o new --max-loss 0.0000000001% --formats int8-static,int8-dynamic", "the nearest possible limit is"),
        ("-o new --max-loss 2", "is not a percentage like `0.5%`"),
        ("-o new --max-loss 1% --max-size 50%", "cannot be used with"),
        ("-o new --max-kl 0.1", "--max-kl: is not supported for ONNX Runtime"),
        ("-o new --max-size 50% --method gptq", "has no effect on ONNX files"),
        ("-o new.gguf --max-size 50%", "loads an ONNX file or a folder: name an ONNX file or a folder, or specify `--for llama.cpp` for the formats"),
        ("-o new --max-size 50% --formats Q4_K", "`Q4_K` is not a format for ONNX Runtime; its formats are int4-weights, int8-static,"),
    ] {
        let run = compress(folder, &format!("{ONNX} {arguments}"));
        assert!(run.code > 0 && run.stderr.contains(part), "{arguments}: {}", run.stderr);
        assert!(!folder.join("new").exists());
    }
    // The limit that the error names can be met.
    let formats = "--formats int8-static,int8-dynamic";
    let run = compress(folder, &format!("{ONNX} -o close --max-loss 0.0000000001% {formats}"));
    let nearest = run.stderr.split("the nearest possible limit is ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    data(folder, &format!("{ONNX} -o close --max-loss {nearest} {formats}"));
}

/// Convolutions have static formats only, and folded normalizations are part of the size.
#[test]
fn convolutional_networks_are_searched_for_onnx_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/resnet-basic");
    std::fs::create_dir(folder.join("resnet")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(file), folder.join("resnet").join(file)).unwrap();
    }
    let pixels: Vec<f32> =
        crate::common::Tensor::random(crate::common::DType::F32, &[40, 3, 19, 13], 7).values().into_iter().map(|value| value as f32).collect();
    let images = Tensor::from_vec(pixels, (40, 3, 19, 13), &Device::Cpu).unwrap();
    let labels = Tensor::from_vec((0..40i64).map(|at| at % 5).collect::<Vec<_>>(), 40, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("pixel_values".to_owned(), images), ("labels".to_owned(), labels)].into(), folder.join("images.safetensors")).unwrap();
    let found = data(folder, "auto resnet --for onnxruntime -o out --max-loss 99% --json --data images.safetensors")["search"].clone();
    let convolutions = found["units"].as_array().unwrap().iter().filter(|unit| unit["name"].as_str().unwrap().contains("convolution")).collect::<Vec<_>>();
    assert!(!convolutions.is_empty() && convolutions.iter().all(|unit| [0, 2, 3].iter().all(|option| unit["options"][*option].is_null())), "{convolutions:?}");
    // Ten of the 40 samples may calibrate: the first batch of eight. The others measure the accuracy.
    assert_eq!(
        (&found["metric"]["name"], &found["metric"]["measured_on"]),
        (&json!("accuracy"), &json!("32 samples of images.safetensors that calibration does not use"))
    );
    let recipe = read_json(&folder.join("out/report.json"))["recipe"].clone();
    assert_eq!(recipe["data"]["calibration"]["samples"], 8);
    assert!(found["points"].as_array().unwrap().iter().chain([&found["chosen"]]).all(|point| point["score"].is_number()), "{found}");
    assert_eq!(found["chosen"]["bytes"].as_u64(), Some(std::fs::metadata(folder.join("out/model.onnx")).unwrap().len()));
}

/// Time of units in formats with these indices, relative to the original model: an invented part for each
/// parameter and format. Pruned units take half of it.
pub(super) fn invented(units: &[Value], names: &[String], options: &[usize]) -> f64 {
    let parameters = |unit: &Value| unit["parameters"].as_u64().unwrap() as f64;
    let all: f64 = units.iter().map(parameters).sum();
    let saved = |(unit, option): (&Value, &usize)| {
        let (format, is_pruned) = names[*option].split_once(", ").map_or((names[*option].as_str(), false), |(format, _)| (format, true));
        let part = match format {
            "int8-static" => 0.9,
            "int8-dynamic" => 0.6,
            "int4-weights" => -0.1,
            _ => 0.0,
        };
        (if is_pruned { (1.0 + part) / 2.0 } else { part }) * parameters(unit) / all
    };
    1.0 - units.iter().zip(options).map(saved).sum::<f64>()
}

/// Replaces the measured times of a file by invented ones. Returns the number of mixtures.
pub(super) fn invent(path: &Path, units: &[Value]) -> usize {
    let mut table = read_json(path);
    let names: Vec<String> = serde_json::from_value(table["formats"].clone()).unwrap();
    table["original_ms"] = json!(10.0);
    for mixture in table["mixtures"].as_array_mut().unwrap() {
        let options: Vec<usize> = serde_json::from_value(mixture["options"].clone()).unwrap();
        mixture["ratio"] = json!(invented(units, &names, &options));
        mixture["uncertainty"] = json!(0.0);
    }
    std::fs::write(path, table.to_string()).unwrap();
    table["mixtures"].as_array().unwrap().len()
}

/// With recorded times, the choice has the least expected loss of all that are as fast, and is repeated.
#[test]
fn layers_of_an_onnx_file_meet_a_limit_of_the_latency() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    for (arguments, part) in [
        ("auto bert -o out --for onnxruntime --latency 5 --data texts.safetensors", "`5` is not a time like `5ms`"),
        ("auto bert -o out --for onnxruntime --latency 5ms --max-size 50% --data texts.safetensors", "cannot be used with"),
        ("auto bert -o out --for llama.cpp --latency 5ms --data texts.safetensors", "is measured in ONNX Runtime only, and not in llama.cpp"),
        ("auto bert -o out --for onnxruntime --max-size 50% --times times.json --data texts.safetensors", "--latency"),
    ] {
        let run = compress(folder, arguments);
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("out").exists(), "{arguments}: {}", run.stderr);
    }
    if !has_onnx_runtime() {
        return;
    }
    let times = folder.join("times.json");
    let formats = "--formats int4-weights,int8-static,int8-dynamic";
    let search = format!("{ONNX} --threads 2 --points 2 --times times.json {formats}");
    let units = data(folder, &format!("{ONNX} --front front.json --points 0 {formats}"))["search"]["units"].as_array().unwrap().clone();
    // A limit that cannot be met. The times are recorded.
    let run = compress(folder, &format!("{search} -o out --latency 1us"));
    assert!(run.code == 1 && run.stderr.contains("meets the limit `0.001ms`") && run.stderr.contains("the nearest possible limit is "), "{}", run.stderr);
    let table = read_json(&times);
    assert_eq!((&table["threads"], &table["inputs"]["input_ids"]), (&json!(2), &json!([1, 12])));
    assert!(table["runtime"].as_str().unwrap().starts_with("ONNX Runtime 1.") && table["original_ms"].as_f64() > Some(0.0), "{table}");
    let run = compress(folder, &format!("{search} -o out --latency 1h"));
    assert!(run.code == 1 && run.stderr.contains("the original model takes") && run.stderr.contains("within the limit"), "{}", run.stderr);
    let (mut known, mut found) = (invent(&times, &units), Value::Null);
    // Only mixtures of new times are measured.
    for round in 0..8 {
        let _ = std::fs::remove_dir_all(folder.join("out"));
        found = data(folder, &format!("{search} -o out --latency 7ms"));
        let count = invent(&times, &units);
        if count == known {
            break;
        }
        assert!(round < 7, "{count} mixtures");
        known = count;
    }
    let search_of = &found["search"];
    let (chosen, units) = (&search_of["chosen"], search_of["units"].as_array().unwrap());
    let names: Vec<String> = serde_json::from_value(search_of["formats"].clone()).unwrap();
    let formats = indices(search_of, chosen);
    let time = 10.0 * invented(units, &names, &formats);
    assert!(time <= 7.0 && (chosen["measured_ms"].as_f64().unwrap() - time).abs() < 1e-6, "{time} {chosen}");
    assert!((chosen["predicted_ms"].as_f64().unwrap() / time - 1.0).abs() < 0.05, "{time} {chosen}");
    let is_fast = |options: &&Vec<usize>| 10.0 * invented(units, &names, options) <= 7.0;
    let least = every(units).iter().filter(is_fast).map(|options| totals(units, options).0).fold(f64::INFINITY, f64::min);
    let (loss, _) = totals(units, &formats);
    assert!(loss <= 1.01 * least && loss > 0.0, "{loss} instead of {least}");
    // The same times lead to the same bytes, and so does the recipe.
    ok(folder, &format!("{search} -o again --latency 7ms --quiet"));
    ok(folder, "run out/recipe.yaml -o recipe");
    let written = |name: &str| std::fs::read(folder.join(name).join("model.onnx")).unwrap();
    assert!(written("out") == written("again") && written("out") == written("recipe"));
    let report = read_json(&folder.join("out/report.json"));
    let section = &report["search"];
    assert_eq!(
        (&section["max_latency_ms"], &section["times"]["original_ms"], &section["chosen"]["measured_ms"]),
        (&json!(7.0), &json!(10.0), &chosen["measured_ms"])
    );
    assert_eq!(section["times"]["mixtures"], read_json(&times)["mixtures"]);
    let page = std::fs::read_to_string(folder.join("out/report.html")).unwrap();
    assert!(page.contains("Latency and distance") && page.contains("measured latency"), "{page}");
    // Times of other searches are refused before any work.
    for (arguments, part) in
        [("--threads 1", "the times were measured with 2 threads"), ("--threads 2 --formats int8-static", "the times are those of the formats")]
    {
        let run = compress(folder, &format!("{ONNX} {arguments} --times times.json -o new --latency 7ms"));
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("new").exists(), "{arguments}: {}", run.stderr);
    }
    std::fs::write(folder.join("other.json"), "{}").unwrap();
    let run = compress(folder, &format!("{ONNX} --times other.json -o new --latency 7ms"));
    assert!(run.code > 0 && run.stderr.contains("other.json does not contain the times of a search"), "{}", run.stderr);
}

/// Weights of 4 bits are half as large, and are options of matrices only.
#[test]
fn matrices_of_an_onnx_file_have_4_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let search = format!("{ONNX} --formats int4-weights,int8-weights -o out --max-size");
    let run = compress(folder, &format!("{search} 1%"));
    let nearest = run.stderr.split("the nearest possible limit is ").nth(1).unwrap_or_else(|| panic!("{}", run.stderr)).split_whitespace().next().unwrap();
    let found = data(folder, &format!("{search} {}", nearest.parse::<f64>().unwrap() + 0.02))["search"].clone();
    assert_eq!(found["formats"], json!(["int4-weights", "int8-weights", "floats"]));
    let units = found["units"].as_array().unwrap();
    for unit in units {
        let is_table = unit["name"].as_str().unwrap().contains("embeddings");
        assert_eq!(unit["options"][0].is_null(), is_table, "{unit}");
        let bytes = |option: usize| unit["options"][option]["bytes"].as_u64().unwrap();
        assert!(is_table || bytes(0) < bytes(1) && bytes(1) < bytes(2), "{unit}");
    }
    let chosen = &found["chosen"];
    let formats = chosen["formats"].as_array().unwrap();
    assert!(formats.contains(&json!("int4-weights")) && chosen["measured"].as_f64() > Some(0.0), "{chosen}");
    assert_eq!(chosen["bytes"].as_u64(), Some(std::fs::metadata(folder.join("out/model.onnx")).unwrap().len()), "{chosen}");
    ok(folder, "verify out");
    let report = read_json(&folder.join("out/report.json"));
    assert_eq!(report["recipe"]["export"][0]["onnx"]["weight_only"], "matmul-nbits");
    ok(folder, "run out/recipe.yaml -o again");
    let written = |name: &str| std::fs::read(folder.join(name).join("model.onnx")).unwrap();
    assert!(written("out") == written("again"));
    // The graph of an ONNX file has no such operators.
    std::fs::write(folder.join("plain.yaml"), "model: bert\npasses: []\nexport: [onnx]\noutput: plain\n").unwrap();
    ok(folder, "run plain.yaml");
    let run = compress(folder, "auto plain/model.onnx --for onnxruntime --front other.json --formats int4-weights --data texts.safetensors");
    assert!(run.code > 0 && run.stderr.contains("no format of `--formats` for ONNX Runtime except floats"), "{}", run.stderr);
}

/// Weights of 16 bits have half the size and nearly no loss, and layers compute in 32 bits.
#[test]
fn layers_of_an_onnx_file_have_16_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let found = data(folder, &format!("{ONNX} --formats int8-dynamic,float16 -o out --max-size 70%"))["search"].clone();
    assert_eq!(found["formats"], json!(["int8-dynamic", "float16", "floats"]));
    for unit in found["units"].as_array().unwrap() {
        let (half, floats) = (&unit["options"][1], unit["options"][2]["bytes"].as_u64().unwrap());
        // The nodes that convert the weight are part of its size.
        let bytes = half["bytes"].as_u64().unwrap();
        assert!(2 * bytes >= floats && bytes < floats / 2 + 400, "{unit}");
        let int8 = unit["options"][0]["loss"].as_f64();
        assert!(int8.is_none_or(|int8| half["loss"].as_f64().unwrap() < 0.01 * int8), "{unit}");
    }
    let point =
        |name: &str| found["points"].as_array().unwrap().iter().find(|point| point["reference"] == name).unwrap_or_else(|| panic!("{name}: {found}")).clone();
    let (half, int8) = (point("float16"), point("int8-dynamic"));
    assert!(half["measured"].as_f64().unwrap() < 0.01 * int8["measured"].as_f64().unwrap() && half["bytes"].as_u64() > int8["bytes"].as_u64(), "{half} {int8}");
    let formats = found["chosen"]["formats"].as_array().unwrap();
    assert!(formats.contains(&json!("float16")), "{formats:?}");
    assert_eq!(found["chosen"]["bytes"].as_u64(), Some(std::fs::metadata(folder.join("out/model.onnx")).unwrap().len()));
    ok(folder, "verify out");
    let report = read_json(&folder.join("out/report.json"));
    assert_eq!(report["recipe"]["export"][0]["onnx"]["float16_weights"], true);
    ok(folder, "run out/recipe.yaml -o again");
    let written = |name: &str| std::fs::read(folder.join(name).join("model.onnx")).unwrap();
    assert!(written("out") == written("again"));
    // The weights of an ONNX file are converted in its own graph.
    std::fs::write(folder.join("plain.yaml"), "model: bert\npasses: []\nexport: [onnx]\noutput: plain\n").unwrap();
    ok(folder, "run plain.yaml");
    let search = "auto plain/model.onnx --for onnxruntime --json --data texts.safetensors --formats float16";
    let found = data(folder, &format!("{search} -o half.onnx --max-size 75%"))["search"].clone();
    assert_eq!(found["chosen"]["bytes"].as_u64(), Some(std::fs::metadata(folder.join("half.onnx")).unwrap().len()));
    ok(folder, "verify half.onnx");
}

/// Options of int8 layers are kept if the loss on the held-out samples falls.
#[test]
fn a_time_allows_better_options_of_int8_layers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    encoder(folder);
    let arguments = "--formats int8-static,int8-dynamic --max-size 55%";
    let found = data(folder, &format!("{ONNX} {arguments} -o out --time 1h"));
    let methods = found["search"]["methods"].as_array().unwrap();
    assert_eq!(methods.iter().map(|method| &method["method"]).take(2).collect::<Vec<_>>(), ["default options", "weights: mse"]);
    let measured: Vec<f64> = methods.iter().map(|method| method["measured"].as_f64().unwrap()).collect();
    let chosen: Vec<usize> = (0..methods.len()).filter(|at| methods[*at]["chosen"] == true).collect();
    let least = measured.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(measured.len() >= 2 && chosen.len() == 1 && measured[chosen[0]] == least, "{methods:?}");
    // The first candidate is the measured mixture.
    let expected = found["search"]["chosen"]["measured"].as_f64().unwrap();
    assert!((measured[0] / expected - 1.0).abs() < 1e-9, "{} {expected}", measured[0]);
    let report = read_json(&folder.join("out/report.json"));
    assert_eq!(report["search"]["methods"], found["search"]["methods"]);
    ok(folder, "verify out");
    ok(folder, "run out/recipe.yaml -o again");
    let written = |name: &str| std::fs::read(folder.join(name).join("model.onnx")).unwrap();
    assert!(written("out") == written("again"));
    // A time in which nothing ends leaves the default options.
    let found = data(folder, &format!("{ONNX} {arguments} -o short --time 1us"));
    assert_eq!(found["search"]["methods"].as_array().unwrap().iter().map(|method| &method["measured"]).collect::<Vec<_>>(), [&Value::Null]);
    data(folder, &format!("{ONNX} {arguments} -o plain"));
    assert!(written("short") == written("plain"));
}
