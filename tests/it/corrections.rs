//! `correct` of `quantize`: low-rank corrections in a LoRA adapter, and figures of the model with it.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use candle_core::{Device, Tensor};
use compress::export::{Gguf, Layout, Onnx, Safetensors};
use compress::pass::{Cast, Dequantize, FloatFormat, PruneUnstructured, Quantize, Step};
use compress::pipeline::{Builder, ResultCache, verify};
use compress::{Error, Model, Pipeline, Report};
use compress_core::store::{Encoding, Weight};
use compress_core::work::{Cancel, Event};
use compress_engine::data::{Data, synthetic};
use compress_engine::model::Config;
use compress_kernels::low_rank::LowRank;
use compress_kernels::{dense, gram};
use compress_onnx::file;
use compress_onnx::runtime::{Options, Session};
use serde_json::{Value, json};

use crate::common::{golden_model as golden, onnxruntime};

const WEIGHT: &str = "model.layers.1.mlp.up_proj.weight";
const FACTORS: [&str; 2] = ["lora_A", "lora_B"];

fn quantize(options: Value) -> Quantize {
    serde_json::from_value(options).unwrap()
}

/// Options of 3-bit weights with a correction.
fn corrected(method: &str, correction: Value) -> Quantize {
    quantize(json!({ "scheme": "W3A16", "group_size": 16, "method": method, "correct": correction }))
}

fn tokens(folder: &Path) -> Data {
    let ids = Tensor::from_vec((0..384i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (48, 8), &Device::Cpu).unwrap();
    let path = folder.join("ids.safetensors");
    if !path.exists() {
        let tensors = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
        candle_core::safetensors::save(&tensors.into(), &path).unwrap();
    }
    Data::at(&path)
}

fn builder(folder: &Path, passes: impl IntoIterator<Item = Step>) -> Builder {
    Pipeline::builder().calibration(tokens(folder)).passes(passes.into_iter().collect::<Vec<_>>()).threads(2)
}

fn run(folder: &Path, name: &str, builder: Builder) -> compress::Result<Report> {
    builder.build()?.run(Model::open(golden(name))?, folder.join("out"))
}

fn outputs(model: &Model, inputs: &BTreeMap<String, Tensor>) -> Tensor {
    crate::common::outputs(model, inputs).into_values().next().unwrap()
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    f64::from((a - b).unwrap().sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap())
}

/// The quantized model without its corrections.
fn without_corrections(model: &Model) -> Model {
    let mut plain = model.clone();
    let mut values = model.config.values().clone();
    values.shift_remove("low_rank_correction");
    plain.config = Config::from_values(values);
    plain.weights.by_name.retain(|name, _| !name.starts_with("adapter/"));
    plain
}

/// The model in which weights are the sums of quantized weights and corrections, without an adapter.
fn merged(model: &Model) -> Model {
    let mut plain = without_corrections(model);
    for (weight, names) in model.corrections() {
        let matrix = |name: &String| {
            let factor = model.weights.get(name).unwrap();
            Tensor::from_vec(factor.floats(name).unwrap(), factor.shape.clone(), &Device::Cpu).unwrap()
        };
        let [inner, outer] = [matrix(&names[0]), matrix(&names[1])];
        let term = outer.matmul(&inner).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let base = model.weights.get(&weight).unwrap();
        let values: Vec<f32> = base.floats(&weight).unwrap().iter().zip(term).map(|(base, term)| base + term).collect();
        let sum = Weight::computed(&weight, crate::common::DType::F32, base.shape.clone(), &values).unwrap();
        plain.weights.by_name.insert(weight, sum);
    }
    plain
}

/// Error of the outputs of a folder on the calibration samples.
fn error(folder: &Path) -> f64 {
    let inputs = candle_core::safetensors::load(folder.join("ids.safetensors"), &Device::Cpu).unwrap().into_iter().collect();
    distance(&outputs(&Model::open(golden("llama")).unwrap(), &inputs), &outputs(&Model::open(folder.join("out")).unwrap(), &inputs))
}

/// `scripts/goldens low-rank` writes the terms. A correction is the best low-rank approximation of the
/// error.
#[test]
fn corrections_equal_those_of_numpy() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/low-rank.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    for case in golden["corrections"].as_array().unwrap() {
        let [rank, size] = ["rank", "size"].map(|key| case[key].as_u64().unwrap() as usize);
        let numbers = |key: &str| case[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<f32>>();
        let [matrix, quantized, inputs] = ["matrix", "quantized", "inputs"].map(numbers);
        let error: Vec<f32> = matrix.iter().zip(quantized).map(|(a, b)| a - b).collect();
        let mut products = vec![0f32; size * size];
        gram::add(&inputs, size, &mut products);
        for (key, products) in [("term", Some(&*products)), ("term_without_inputs", None)] {
            let found = LowRank::new(&error, size, rank, products).unwrap();
            let term = dense::product(&found.outer, &found.inner, rank, size);
            let largest = term.iter().zip(numbers(key)).map(|(a, b)| (a - f64::from(b)).abs()).fold(0.0, f64::max);
            assert!(largest < 1e-3, "{key}: {largest}");
        }
    }
}

#[test]
fn corrections_reduce_the_error_with_every_method() {
    for (method, scheme) in [("rtn", "W3A16"), ("gptq", "W3A16"), ("awq", "W3A16"), ("smoothquant", "W4A8"), ("rtn", "NVFP4A16"), ("gptq", "NVFP4A16")] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = json!({ "scheme": scheme, "method": method, "ignore": ["*down_proj*"] });
        let errors = [Value::Null, json!({ "rank": 4 })].map(|correction| {
            options["correct"] = correction;
            let report = run(folder.path(), "llama", builder(folder.path(), [quantize(options.clone()).into()]).force(true)).unwrap();
            (error(folder.path()), report)
        });
        let [(plain, _), (with, report)] = errors;
        assert!(with < 0.9 * plain, "{method} {scheme}: {with} of {plain}");
        let details = &report.passes[0].details["correction"];
        let layers = details["layers"].as_array().unwrap();
        assert_eq!((layers.len(), details["rank"].as_u64()), (12, Some(4)), "{method} {scheme}");
        for layer in layers {
            let [before, after] = ["before", "after"].map(|key| layer[key].as_f64().unwrap());
            assert!(after < before && before < 0.5, "{method} {scheme}: {layer}");
        }
        assert!(report.notes.iter().any(|note| note.contains("folder `adapter` has corrections of rank 4 for 12 layers")), "{:?}", report.notes);
    }
}

/// transformers dequantizes all layers by one scheme, so that PEFT cannot load the adapter if there are
/// several.
#[test]
fn cards_of_models_with_several_schemes_do_not_load_the_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let pass = quantize(json!({ "scheme": "W4A16", "group_size": 16, "correct": { "rank": 3 } }));
    run(folder.path(), "llama", builder(folder.path(), [pass.into()])).unwrap();
    let card = std::fs::read_to_string(folder.path().join("out/README.md")).unwrap();
    assert!(card.contains("layers have different schemes") && !card.contains("PeftModel"), "{card}");
}

/// The file that PEFT loads, and a model that opens with its adapter and equals the sum of both.
#[test]
fn the_adapter_is_part_of_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let pass = quantize(json!({ "scheme": "W4A16", "group_size": 8, "method": "gptq", "correct": { "rank": 3 } }));
    let onnx: Onnx = serde_json::from_value(json!({ "opset": 21 })).unwrap();
    let report = run(folder.path(), "llama", builder(folder.path(), [pass.into()]).export(Safetensors::default()).export(onnx));
    let report = report.unwrap();
    let card = std::fs::read_to_string(out.join("README.md")).unwrap();
    assert!(card.contains("(run_compressed=False))") && card.contains("model = PeftModel.from_pretrained(model, \"path/to/model/adapter\")"), "{card}");
    let adapter = candle_core::safetensors::load(out.join("adapter/adapter_model.safetensors"), &Device::Cpu).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"], &config["peft_type"]), (&json!(3), &json!(3), &json!("LORA")));
    let modules = config["target_modules"].as_array().unwrap();
    assert_eq!(adapter.len(), 2 * modules.len());
    for module in modules {
        let shapes = FACTORS.map(|factor| adapter[&format!("base_model.model.{}.{factor}.weight", module.as_str().unwrap())].dims().to_vec());
        assert!(shapes[0][0] == 3 && shapes[1][1] == 3, "{module}: {shapes:?}");
    }
    let bytes: u64 = adapter.values().map(|tensor| tensor.elem_count() as u64 * 4).sum();
    assert_eq!(report.passes[0].details["correction"]["bytes"], bytes);
    // The size in the report includes the adapter.
    let size: u64 = ["model.safetensors", "adapter/adapter_model.safetensors"].iter().map(|name| std::fs::metadata(out.join(name)).unwrap().len()).sum();
    assert_eq!(report.size.after.bytes, size);
    assert!(crate::common::work(|work| verify(&out, work)).unwrap().iter().all(|check| check.ok));
    let model = Model::open(&out).unwrap();
    assert!(matches!(model.weights.get(WEIGHT).unwrap().encoding, Encoding::Quantized(_)));
    let inputs = synthetic(&model.graph().unwrap(), 3).unwrap().inputs;
    let (found, wanted) = (outputs(&model, &inputs), outputs(&merged(&model), &inputs));
    assert!(distance(&found, &wanted) < 1e-9, "{}", distance(&found, &wanted));
    if onnxruntime::has_onnx_runtime() {
        let theirs = Session::open(&out.join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap().into_values().next().unwrap();
        assert!(distance(&found, &theirs) < 1e-8, "{}", distance(&found, &theirs));
    }
    // Without the key in config.json, the folder contains only the quantized model.
    let path = out.join("config.json");
    let mut values: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(values.as_object_mut().unwrap().shift_remove("low_rank_correction"), Some(json!("adapter")));
    std::fs::write(&path, values.to_string()).unwrap();
    std::fs::remove_file(out.join("model.onnx")).unwrap();
    let base = Model::open(&out).unwrap();
    assert!(!base.is_corrected() && base.weights.by_name.keys().all(|name| !name.starts_with("adapter/")));
    assert!(distance(&outputs(&base, &inputs), &found) > 1e-7);
}

/// Fidelity of a run is that of the model with its adapter.
#[test]
fn figures_include_the_correction() {
    let folder = tempfile::tempdir().unwrap();
    let report = run(folder.path(), "llama", builder(folder.path(), [corrected("rtn", json!({ "rank": 4 })).into()])).unwrap();
    let plain = tempfile::tempdir().unwrap();
    let options = json!({ "scheme": "W3A16", "group_size": 16 });
    let without = run(plain.path(), "llama", builder(plain.path(), [quantize(options).into()])).unwrap();
    let distance = |report: &Report| 1.0 - report.fidelity.as_ref().unwrap().fidelity.cosine;
    assert!(distance(&report) < 0.9 * distance(&without), "{}, {}", distance(&report), distance(&without));
}

#[test]
fn without_samples_the_error_is_that_of_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let pass = corrected("rtn", json!({ "rank": 2, "importance": "none" }));
    let report = run(folder.path(), "llama", Pipeline::builder().pass(pass).threads(2)).unwrap();
    let (original, model) = (Model::open(golden("llama")).unwrap(), Model::open(folder.path().join("out")).unwrap());
    let sum = merged(&model);
    let squares = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    for layer in report.passes[0].details["correction"]["layers"].as_array().unwrap() {
        let name = layer["weight"].as_str().unwrap();
        let [target, base, sum] = [&original, &model, &sum].map(|model| model.weights.get(name).unwrap().floats(name).unwrap());
        let all = squares(&target, &vec![0.0; target.len()]);
        for (key, values) in [("before", base), ("after", sum)] {
            let (found, wanted) = (layer[key].as_f64().unwrap(), squares(&target, &values) / all);
            assert!((found / wanted - 1.0).abs() < 1e-3, "{name}, {key}: {found}, {wanted}");
        }
    }
}

/// Floats and dequantized weights keep the meaning of the model; other passes would change corrected
/// weights.
#[test]
fn later_passes_keep_the_correction_or_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), "llama", builder(folder.path(), [corrected("rtn", json!({ "rank": 4 })).into()])).unwrap();
    let again = |builder: Builder, out: &str| builder.build()?.run(Model::open(folder.path().join("out"))?, folder.path().join(out));
    let model = Model::open(folder.path().join("out")).unwrap();
    let inputs = synthetic(&model.graph().unwrap(), 3).unwrap().inputs;
    let before = outputs(&model, &inputs);
    // The effect of the correction, compared with which the rounding to 16 bits is small.
    let effect = distance(&outputs(&without_corrections(&model), &inputs), &before);
    for (out, builder, tolerance) in [
        ("dense", Pipeline::builder().export(Safetensors::with_layout(Layout::Dense)), 1e-10),
        ("half", Pipeline::builder().pass(Cast { to: FloatFormat::Bf16, ..Cast::default() }), 0.1 * effect),
    ] {
        again(builder, out).unwrap();
        let model = Model::open(folder.path().join(out)).unwrap();
        assert!(folder.path().join(out).join("adapter/adapter_config.json").is_file() && model.is_corrected(), "{out}");
        assert!(distance(&outputs(&model, &inputs), &before) < tolerance, "{out}");
    }
    let error = again(Pipeline::builder().pass(PruneUnstructured::default()), "pruned").unwrap_err().to_string();
    assert!(error.contains("low-rank corrections") && error.contains("before `quantize`"), "{error}");
    let error = again(Pipeline::builder().export(Gguf::default()), "gguf").unwrap_err().to_string();
    assert!(error.contains("low-rank corrections"), "{error}");
}

/// The weights of a dequantized model contain the corrections, so that later passes can process them.
#[test]
fn corrections_are_added_to_dequantized_weights() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), "llama", builder(folder.path(), [corrected("rtn", json!({ "rank": 4 })).into()])).unwrap();
    let model = Model::open(folder.path().join("out")).unwrap();
    let inputs = synthetic(&model.graph().unwrap(), 3).unwrap().inputs;
    let (before, effect) = (outputs(&model, &inputs), distance(&outputs(&model, &inputs), &outputs(&without_corrections(&model), &inputs)));
    let check = |out: &str, corrected: usize| {
        let dense = Model::open(folder.path().join(out)).unwrap();
        assert_eq!((dense.corrections().len(), dense.is_corrected()), (corrected, corrected > 0), "{out}");
        assert_eq!(folder.path().join(out).join("adapter").exists(), corrected > 0, "{out}");
        let error = distance(&outputs(&dense, &inputs), &before);
        assert!(error < 1e-6 * effect, "{out}: {error} of {effect}");
        assert_eq!(dense.weights.get(WEIGHT).unwrap().encoding, Encoding::Dense, "{out}");
    };
    let run = crate::cli::support::ok(folder.path(), "densify out -o dense");
    assert!(run.stderr.contains("corrections of 14 layers") || run.stdout.contains("corrections of 14 layers"), "{}{}", run.stdout, run.stderr);
    check("dense", 0);
    let pass = |targets: &str| Dequantize { targets: vec![targets.parse().unwrap()], ..Dequantize::default() };
    let again = |builder: Builder, out: &str| builder.build().unwrap().run(Model::open(folder.path().join("out")).unwrap(), folder.path().join(out)).unwrap();
    again(Pipeline::builder().pass(pass("*up_proj*")), "part");
    check("part", 12);
    again(
        Pipeline::builder().pass(Dequantize::default()).pass(PruneUnstructured { targets: vec!["*q_proj*".parse().unwrap()], ..Default::default() }),
        "pruned",
    );
    assert!(!Model::open(folder.path().join("pruned")).unwrap().is_corrected());
}

/// A `graph.json` contains the corrections until they are part of the weights.
#[test]
fn corrections_are_removed_from_a_changed_graph() {
    let folder = tempfile::tempdir().unwrap();
    let [corrected, dense] = ["corrected", "dense"].map(|name| folder.path().join(name));
    let passes = json!([{ "prune-structured": { "dims": ["heads"], "amount": 0.5 } }, { "quantize": { "scheme": "W8A16", "group_size": -1, "correct": { "rank": 2 } } }]);
    let passes: Vec<Step> = serde_json::from_value(passes).unwrap();
    Pipeline::builder().passes(passes).measure(false).build().unwrap().run(Model::open(golden("bert")).unwrap(), &corrected).unwrap();
    let before = Model::open(&corrected).unwrap();
    assert!(corrected.join("graph.json").exists() && !before.corrections().is_empty());
    Pipeline::builder().pass(Dequantize::default()).measure(false).build().unwrap().run(before.clone(), &dense).unwrap();
    let after = Model::open(&dense).unwrap();
    assert!(dense.join("graph.json").exists() && after.corrections().is_empty() && !dense.join("adapter").exists());
    let inputs = synthetic(&before.graph().unwrap(), 3).unwrap().inputs;
    let error = distance(&outputs(&before, &inputs), &outputs(&after, &inputs));
    assert!(error < 1e-10, "{error}");
}

/// ONNX files contain the corrections, so that the configuration next to them names no adapter.
#[test]
fn onnx_outputs_have_no_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let pass = quantize(json!({ "scheme": "W8A16", "group_size": -1, "correct": { "rank": 2 } }));
    run(folder.path(), "llama", builder(folder.path(), [pass.into()]).export(Onnx::default())).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(folder.path().join("out/config.json")).unwrap()).unwrap();
    assert!(config["model_type"] == "llama" && config.get("low_rank_correction").is_none(), "{config}");
    assert!(!folder.path().join("out/adapter").exists());
}

#[test]
fn an_interrupted_run_writes_the_same_adapter() {
    for method in ["rtn", "gptq"] {
        let passes = || [Cast { to: FloatFormat::Bf16, ..Cast::default() }.into(), corrected(method, json!({ "rank": 2 })).into()];
        let files =
            |folder: &Path| ["model.safetensors", "adapter/adapter_model.safetensors"].map(|name| std::fs::read(folder.join("out").join(name)).unwrap());
        let whole = tempfile::tempdir().unwrap();
        run(whole.path(), "llama", builder(whole.path(), passes())).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let cancel = Cancel::default();
        let watched = cancel.clone();
        let watch = move |event: Event| {
            if let Event::Begin { stage, .. } = event
                && stage.starts_with("Block 4 of")
            {
                watched.cancel();
            }
        };
        let stopped = run(folder.path(), "llama", builder(folder.path(), passes()).progress(watch).cancel(cancel));
        assert!(matches!(stopped.unwrap_err(), Error::Paused { .. } | Error::Interrupted { .. } | Error::Cancelled));
        let report = run(folder.path(), "llama", builder(folder.path(), passes()).resume(true)).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("loaded from the checkpoints")), "{:?}", report.notes);
        assert!(files(folder.path()) == files(whole.path()), "{method}");
    }
}

#[test]
fn a_result_that_is_used_again_has_its_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let run = |out: &str| {
        let results = ResultCache::new(folder.path().join("results"), Duration::ZERO);
        let pass = corrected("rtn", json!({ "rank": 2 }));
        let pipeline = builder(folder.path(), [pass.into()]).cache(results, true).build().unwrap();
        pipeline.run(Model::open(golden("llama")).unwrap(), folder.path().join(out)).unwrap()
    };
    run("first");
    let notes = run("second").notes;
    assert!(notes.iter().any(|note| note.contains("was reused")), "{notes:?}");
    for name in ["config.json", "model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"] {
        let [first, second] = ["first", "second"].map(|out| std::fs::read(folder.path().join(out).join(name)).unwrap());
        assert!(first == second, "{name}");
    }
}

#[test]
fn impossible_corrections_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, pass: Quantize| run(folder.path(), name, builder(folder.path(), [pass.into()])).unwrap_err().to_string();
    assert!(refused("llama", corrected("rtn", json!({ "rank": 0 }))).contains("at least 1"));
    assert!(refused("llama", corrected("autoround", json!({ "rank": 2 }))).contains("`method: autoround`"));
    let refusal = refused("llama", corrected("rtn", json!({ "rank": 100 })));
    assert!(refusal.contains("not larger than their correction: choose a smaller rank") && !refusal.contains("correct: quantize:"), "{refusal}");
    assert!(refused("gpt2", quantize(json!({ "scheme": "W8A16", "correct": { "rank": 2 } }))).contains("[out, in]"));
    // Experts have no correction, and a note names them.
    let pass = quantize(json!({ "scheme": "W8A16", "group_size": -1, "correct": { "rank": 2 } }));
    let report = run(folder.path(), "mixtral", builder(folder.path(), [pass.into()])).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("without a correction") && note.contains("experts")), "{:?}", report.notes);
}

/// An adapter that someone else wrote does not replace the factors of this run.
#[test]
fn a_foreign_adapter_in_the_input_is_not_copied() {
    let folder = tempfile::tempdir().unwrap();
    let pass = quantize(json!({ "scheme": "W4A16", "group_size": 16, "correct": { "rank": 3 } }));
    let input = folder.path().join("in");
    std::fs::create_dir_all(input.join("adapter")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama").join(file), input.join(file)).unwrap();
    }
    std::fs::write(input.join("adapter/adapter_model.safetensors"), "foreign").unwrap();
    std::fs::write(input.join("adapter/notes.txt"), "foreign").unwrap();
    let out = folder.path().join("out");
    let report = Pipeline::builder().pass(pass).measure(false).build().unwrap().run(Model::open(&input).unwrap(), &out).unwrap();
    assert!(candle_core::safetensors::load(out.join("adapter/adapter_model.safetensors"), &Device::Cpu).unwrap().len() > 4);
    assert!(!out.join("adapter/notes.txt").exists() && report.notes.iter().any(|note| note.contains("adapter/notes.txt")), "{:?}", report.notes);
    crate::common::work(|work| verify(&out, work)).unwrap();
}
