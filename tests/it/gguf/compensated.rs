//! Blocks whose codes `quantize` has chosen on calibration samples.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::export::{FileType, Gguf, Safetensors};
use compress::pass::{InputImportance, Quantize};
use compress::pipeline::Builder;
use compress::{Error, Model, Pipeline, Report};
use compress_core::store::gguf::GgufFile;
use compress_core::work::{Cancel, Event, Silent, Work};
use compress_engine::data::Data;
use compress_engine::exec::{Executor, Parameters, Residence};
use compress_graph::ir::Op;
use serde_json::{Value, json};

use super::importance::{Networks, tiny};

/// Number of calibration samples; as many are held out.
const SAMPLES: usize = 48;
const TOKENS: usize = 8;
/// Upper bound of the error of compensated codes on held-out samples, relative to codes by importance: a
/// tenth less, which the choice between both for each layer does not reach by chance.
const MAX_ERROR: f64 = 0.9;

/// Tokens of calibration and held-out samples.
fn tokens() -> Tensor {
    Tensor::from_vec((0..(2 * SAMPLES * TOKENS) as i64).map(|i| (i * i * 7 + i / 5) % 41).collect::<Vec<_>>(), (2 * SAMPLES, TOKENS), &Device::Cpu).unwrap()
}

/// Calibration samples in a file of the folder.
pub(super) fn calibration(folder: &Path) -> Data {
    let path = folder.join("tokens.safetensors");
    let ids = tokens();
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(), &path).unwrap();
    Data { samples: Some(SAMPLES), ..Data::at(&path) }
}

fn pass(options: Value) -> Quantize {
    serde_json::from_value(options).unwrap()
}

fn builder(folder: &Path, options: Value) -> Builder {
    Pipeline::builder().calibration(calibration(folder)).pass(pass(options)).measure(false).force(true)
}

/// Options of two objects.
fn merged(options: &Value, more: Value) -> Value {
    let objects = [options.clone(), more].into_iter().filter_map(|value| if let Value::Object(object) = value { Some(object) } else { None });
    Value::Object(objects.flatten().collect())
}

/// The types of the tensors of a file.
fn kinds(file: &Path) -> BTreeMap<String, String> {
    GgufFile::open(file).unwrap().stored().map(|(name, kind, ..)| (name.to_owned(), kind.to_string())).collect()
}

/// Sums of squared output errors of all layers for the held-out inputs of the original model.
fn held_out_error(model: &Model, found: &Model) -> f64 {
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let graph = model.graph().unwrap();
    let of = |node: &compress_graph::ir::Node, at: usize| graph.value(node.inputs[at]).name.clone();
    let layers: Vec<_> = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_))).map(|node| (of(node, 1), of(node, 0))).collect();
    let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, candle_core::DType::F32, Residence::Computed, &work).unwrap();
    let executor = Executor::new(&graph, parameters, Device::Cpu);
    let observation = executor.observation(|name| layers.iter().any(|(_, value)| value == name));
    let ids = tokens().narrow(0, SAMPLES, SAMPLES).unwrap();
    let inputs = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into();
    let mut error = 0.0;
    let mut look = |name: &str, value: &Tensor| {
        let rows = value.flatten(0, value.rank() - 2).unwrap();
        for (weight, _) in layers.iter().filter(|(weight, value)| value == name && weight.contains("layers.")) {
            let [before, now] = [model, found].map(|model| {
                let weight = model.weights.get(weight).unwrap();
                Tensor::from_vec(weight.floats("").unwrap(), weight.shape.clone(), &Device::Cpu).unwrap()
            });
            let outputs = rows.matmul(&(now - before).unwrap().t().unwrap()).unwrap();
            error += f64::from(outputs.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap());
        }
        Ok(())
    };
    executor.run_observed(&observation, &inputs, &mut look).unwrap();
    error
}

/// The file has the types of the file type, with the values of the pass, and a lower error on held-out
/// samples than scales and codes by importance.
#[test]
fn files_have_compensated_codes() {
    let [gptq, guided, trained] = ["gptq", "gptq", "autoround"].map(|method| json!({ "method": method }));
    let guided = merged(&guided, json!({ "guide": "loss" }));
    let trained = merged(&trained, json!({ "iterations": 200 }));
    for (networks, width, file_type, options) in [
        (Networks::Plain, 64, FileType::Q4_K_M, &gptq),
        (Networks::Plain, 256, FileType::Q4_K_M, &gptq),
        (Networks::Plain, 256, FileType::Q3_K_S, &guided),
        (Networks::Plain, 256, FileType::IQ4_XS, &gptq),
        (Networks::Plain, 256, FileType::Q2_K, &trained),
        (Networks::Plain, 64, FileType::Q4_0, &trained),
        (Networks::Apart, 64, FileType::Q4_0, &gptq),
        (Networks::Apart, 64, FileType::Q4_0, &guided),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), networks, width);
        let scheme = format!("{file_type:?}");
        let builder = builder(folder.path(), merged(options, json!({ "scheme": scheme })));
        let both = builder.export(Gguf::default()).export(Safetensors::default()).build().unwrap();
        let report = both.run(model.clone(), folder.path().join("gptq")).unwrap();
        assert_eq!(report.recipe["export"][0]["gguf"]["type"], scheme.as_str());
        assert_eq!(report.recipe["export"][0]["gguf"]["importance"], "none");
        let notes = &report.notes;
        assert!(notes.iter().any(|note| note.contains("in blocks of a GGUF file as 32-bit floats")), "{notes:?}");
        assert!(notes.iter().any(|note| note.contains("written with the blocks of `quantize`")), "{notes:?}");
        let by_importance = Gguf { file_type, importance: InputImportance::Activation, ..Gguf::default() };
        let pipeline = Pipeline::builder().calibration(calibration(folder.path())).export(by_importance).measure(false).build().unwrap();
        pipeline.run(model.clone(), folder.path().join("out")).unwrap();
        let [gptq, importance] = ["gptq", "out"].map(|name| folder.path().join(name).join("model.gguf"));
        assert_eq!(kinds(&gptq), kinds(&importance), "{scheme}");
        let [gptq, importance, floats] = [gptq, importance, folder.path().join("gptq")].map(|path| Model::open(path).unwrap());
        let choices: Vec<&str> = report.passes[0].details["layers"].as_array().unwrap().iter().filter_map(|layer| layer["choice"].as_str()).collect();
        assert!(choices.contains(&"gptq"), "{scheme} {options}: {choices:?}");
        // Trained rounding keeps the result of `gptq` where it is not better, which a note states.
        let is_trained = choices.contains(&"autoround") || notes.iter().any(|note| note.contains("instead of autoround"));
        assert_eq!(is_trained, options["method"] == "autoround", "{scheme} {options}: {notes:?}");
        let quantized = report.passes[0].details["quantized"].as_u64().unwrap();
        assert_eq!(quantized, model.weights.by_name.keys().filter(|name| name.contains("proj") || name.contains("experts.")).count() as u64);
        for (name, weight) in model.weights.by_name.keys().filter(|name| name.contains("proj")).map(|name| (name, floats.weights.get(name).unwrap())) {
            assert_eq!(weight.floats(name).unwrap(), gptq.weights.get(name).unwrap().floats(name).unwrap(), "{scheme}: {name}");
        }
        if networks == Networks::Plain {
            let [with, without] = [&gptq, &importance].map(|found| held_out_error(&model, found));
            assert!(with < MAX_ERROR * without, "{scheme} {width} {options}: {with} and {without}");
        }
    }
}

/// Without samples, the file equals that of the export.
#[test]
fn rounding_equals_the_encoder() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 256);
    let pipeline = |builder: Builder| builder.export(Gguf { file_type: FileType::Q4_K_M, ..Gguf::default() }).measure(false).build().unwrap();
    pipeline(Pipeline::builder()).run(model.clone(), folder.path().join("plain.gguf")).unwrap();
    pipeline(Pipeline::builder().pass(pass(json!({ "scheme": "Q4_K_M" })))).run(model, folder.path().join("pass.gguf")).unwrap();
    let [plain, found] = ["plain.gguf", "pass.gguf"].map(|name| fs::read(folder.path().join(name)).unwrap());
    assert!(plain == found);
}

/// Experts in one tensor, which the pass leaves to the export, are rounded by importance.
#[test]
fn experts_that_a_pass_leaves_are_rounded_by_importance() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Together, 64);
    for method in ["gptq", "rtn"] {
        let pipeline = builder(folder.path(), json!({ "scheme": "Q4_0", "method": method })).export(Gguf::default()).build().unwrap();
        let report = pipeline.run(model.clone(), folder.path().join("out")).unwrap();
        assert_eq!(report.recipe["export"][0]["gguf"]["importance"], "activation", "{method}");
        let encodings: Vec<(&str, &str)> = report.layers.iter().map(|layer| (layer.name.as_str(), layer.encoding.as_str())).collect();
        let of = |part: &str| encodings.iter().filter(|(name, _)| name.contains(part)).map(|(_, encoding)| *encoding).collect::<Vec<_>>();
        assert_eq!((of("experts"), of("self_attn")), (vec!["q4_0 by importance"; 4], vec!["q4_0"; 8]), "{method}: {encodings:?}");
    }
}

/// Rules and schemes that are types select the types of matrices, and the export keeps them.
#[test]
fn rules_select_types_of_matrices() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 256);
    let options = json!({ "scheme": "Q4_0", "rules": [{ "targets": ["*down_proj*"], "scheme": "Q6_K" }, { "targets": ["*up_proj*"], "scheme": "Q5_K" }] });
    let pipeline = Pipeline::builder().pass(pass(options)).measure(false).build().unwrap();
    let report = pipeline.run(model, folder.path().join("out.gguf")).unwrap();
    assert_eq!(report.passes[0].details["types"], json!({ "Q4_0": 5, "Q5_K": 1, "Q6_K": 1 }));
    let kinds = kinds(&folder.path().join("out.gguf"));
    let found = ["attn_q", "ffn_gate", "ffn_up", "ffn_down"].map(|name| kinds[&format!("blk.0.{name}.weight")].as_str());
    assert_eq!((found, kinds["token_embd.weight"].as_str()), (["Q4_0", "Q4_0", "Q5_K", "Q6_K"], "Q6_K"));
}

/// The file states the type of most matrices, also where no name of a file type was given.
#[test]
fn files_state_the_type_of_most_matrices() {
    for (scheme, id) in [("Q4_K", 14), ("Q5_K", 16), ("Q3_K", 11), ("Q2_K", 10), ("Q6_K", 18), ("Q4_K_M", 15)] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), Networks::Plain, 256);
        let options = json!({ "scheme": scheme, "method": "rtn" });
        let out = folder.path().join("out.gguf");
        Pipeline::builder().pass(pass(options)).measure(false).build().unwrap().run(model, &out).unwrap();
        let found = GgufFile::open(&out).unwrap().values["general.file_type"].clone();
        assert_eq!(found, compress_core::store::gguf::Value::Unsigned(id), "{scheme}");
        // The export stores the remaining matrices in the same type or a larger one.
        assert!(kinds(&out)["token_embd.weight"].contains('K'), "{scheme}: {:?}", kinds(&out));
    }
}

/// Rows of 64 elements have no blocks of 256: the pass and the export choose another type, and a note states
/// it.
#[test]
fn types_that_do_not_fit_rows_are_replaced_with_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let (model, out) = (tiny(folder.path(), Networks::Plain, 64), folder.path().join("out.gguf"));
    let options = json!({ "scheme": "Q4_K", "method": "rtn" });
    let report = Pipeline::builder().pass(pass(options)).measure(false).build().unwrap().run(model, &out).unwrap();
    let note = "quantize: 14 weights with rows that are not a multiple of the block size have blocks of a larger type";
    let first = "(the first: `model.layers.0.mlp.down_proj.weight`: Q5_0, not Q4_K)";
    assert!(report.notes.iter().any(|found| found.starts_with(note) && found.ends_with(first)), "{:?}", report.notes);
    assert_eq!((kinds(&out)["blk.0.attn_q.weight"].as_str(), kinds(&out)["token_embd.weight"].as_str()), ("Q5_0", "Q8_0"));
}

/// Passes that change the weights again are warnings, also `quantize`; `cast` leaves the blocks unchanged.
#[test]
fn later_passes_that_change_blocks_are_warnings() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 64);
    for (step, warns) in [
        (json!({ "cast": { "to": "bf16" } }), false),
        (json!({ "quantize": { "scheme": "Q4_0" } }), true),
        (json!({ "prune-unstructured": { "amount": 0.5 } }), true),
    ] {
        let later = serde_json::from_value::<compress::pass::Step>(step.clone()).unwrap();
        let builder = Pipeline::builder().pass(pass(json!({ "scheme": "Q4_0" }))).pass(later).measure(false).force(true);
        let notes = builder.build().unwrap().run(model.clone(), folder.path().join("out.gguf")).unwrap().notes;
        let is_warning = |note: &String| note.contains("14 weights that `quantize` has stored in blocks");
        assert_eq!(notes.iter().any(is_warning), warns, "{step}: {notes:?}");
        let keeps = notes.iter().any(|note| note.contains("14 weights written with the blocks of `quantize`"));
        assert_eq!(keeps, !step.to_string().contains("prune"), "{step}: {notes:?}");
    }
}

/// A run that is interrupted and resumed writes the same bytes, with another number of threads.
#[test]
fn resumed_runs_write_the_same_bytes() {
    let trained = json!({ "method": "autoround", "iterations": 12, "guide": "loss" });
    for options in [json!({ "method": "gptq" }), trained] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), Networks::Plain, 64);
        let options = merged(&options, json!({ "scheme": "Q4_K_M" }));
        let builder = |threads| builder(folder.path(), options.clone()).force(false).threads(threads);
        let [whole, resumed] = ["whole.gguf", "resumed.gguf"].map(|name| folder.path().join(name));
        builder(4).build().unwrap().run(model.clone(), &whole).unwrap();
        let cancel = Cancel::default();
        let handle = cancel.clone();
        let watch = move |event: Event| {
            if let Event::Begin { stage, .. } = event
                && stage.starts_with("Block 3 of")
            {
                handle.cancel();
            }
        };
        let stopped = builder(2).progress(watch).cancel(cancel).build().unwrap().run(model.clone(), &resumed);
        assert!(matches!(stopped.unwrap_err(), Error::Paused { .. } | Error::Interrupted { .. } | Error::Cancelled));
        let report = builder(1).resume(true).build().unwrap().run(model.clone(), &resumed).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("loaded from the checkpoints of an interrupted run")), "{:?}", report.notes);
        assert!(fs::read(&whole).unwrap() == fs::read(&resumed).unwrap(), "{options}");
    }
}

/// A warning states which matrices the types of the file quantize although the pass excludes them.
#[test]
fn excluded_matrices_that_the_file_quantizes_are_noted() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 64);
    let warning = |options: Value, types: Value| {
        let export = serde_json::from_value::<compress::export::Export>(json!({ "gguf": { "types": types } })).unwrap();
        let pipeline = Pipeline::builder().pass(pass(options)).export(export).measure(false).force(true).build().unwrap();
        let notes = pipeline.run(model.clone(), folder.path().join("out")).unwrap().notes;
        notes.into_iter().find(|note| note.contains("the types of the file also quantize"))
    };
    let ignored = json!({ "scheme": "Q4_0", "ignore": ["*down_proj*"] });
    let found = warning(ignored.clone(), json!({})).unwrap();
    assert!(found.starts_with("warning: ") && found.contains("also quantize 2 weights") && found.contains("{ '*down_proj*': F16 }"), "{found}");
    assert_eq!(warning(ignored, json!({ "*down_proj*": "F16" })), None);
    let found = warning(json!({ "scheme": "Q4_0", "targets": ["*proj*"], "ignore": ["*q_proj*"] }), json!({ "*q_proj*": "F16" })).unwrap();
    assert!(found.contains("such as `model.embed_tokens.weight`"), "{found}");
    let found = warning(json!({ "scheme": "Q4_0", "targets": ["*q_proj*"] }), json!({ "token_embd": "F16" })).unwrap();
    assert!(found.contains("{ 'model.layers.*.mlp.down_proj.weight': F16 }"), "{found}");
    let found = warning(json!({ "scheme": "Q4_0", "targets": ["*.0.mlp.down_proj*"] }), json!({ "*attn*": "F16", "token_embd": "F16" })).unwrap();
    assert!(found.contains("{ 'model.layers.*.mlp.gate_proj.weight': F16 }"), "{found}");
    let found = warning(json!({ "scheme": "Q4_0", "targets": ["*.0.*down_proj*", "*.0.*gate_proj*"] }), json!({ "*.0.*": "Q4_0", "token_embd": "F16" }));
    assert!(found.unwrap().contains("{ 'model.layers.1.mlp.down_proj.weight': F16 }"));
    assert_eq!(warning(json!({ "scheme": "Q4_0" }), json!({})), None);
}

#[test]
fn mismatches_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 64);
    let attempt = |options: Value, export: Value| -> Result<Report, Error> {
        let export = serde_json::from_value::<compress::export::Export>(export).unwrap();
        Pipeline::builder().pass(pass(options)).export(export).measure(false).force(true).build()?.run(model.clone(), folder.path().join("out"))
    };
    let gguf = |file_type: &str| json!({ "gguf": { "type": file_type } });
    for (options, export, words) in [
        (json!({ "scheme": "Q4_K_M", "group_size": 32 }), gguf("Q4_K_M"), "is not supported for Q4_K_M, a type of GGUF files"),
        (json!({ "scheme": "Q4_K_M", "observer": "mse" }), gguf("Q4_K_M"), "is not supported for Q4_K_M, a type of GGUF files"),
        (json!({ "scheme": "W4A16", "rules": [{ "targets": ["*mlp*"], "scheme": "Q6_K" }] }), gguf("Q4_K_M"), "which no file contains together"),
        (json!({ "scheme": "Q4_K_M" }), json!("safetensors"), "in blocks of a GGUF file as 32-bit floats"),
        (json!({ "scheme": "Q4_0" }), gguf("Q4_1"), "was quantized to Q4_0 by a pass with `scheme: Q4_0`, but it is Q4_1 in files of the type Q4_1"),
        // The default type of a file, if it is specified.
        (json!({ "scheme": "Q4_K_M" }), gguf("F16"), "by a pass with `scheme: Q4_K_M`, but it is F16 in files of the type F16"),
        (json!({ "scheme": "Q4_0" }), json!({ "gguf": { "type": "Q4_0", "types": { "blk.*.ffn_down": "Q8_0" } } }), "`types` requests Q8_0"),
    ] {
        let error = attempt(options.clone(), export).unwrap_err().to_string();
        assert!(error.contains(words), "{options}: {error}");
    }
    let error = builder(folder.path(), json!({ "scheme": "Q4_K_M", "method": "awq" })).build().unwrap_err().to_string();
    assert!(error.contains("which support `rtn`, `gptq` and `autoround`"), "{error}");
    let export = Gguf { importance: InputImportance::Activation, ..Gguf::default() };
    let unused = builder(folder.path(), json!({ "scheme": "Q4_0" })).export(export.clone()).build().unwrap();
    let error = unused.run(model.clone(), folder.path().join("unused.gguf")).unwrap_err().to_string();
    assert!(error.contains("gguf: importance") && error.contains("`quantize` has chosen the blocks of all matrices"), "{error}");
    let used = builder(folder.path(), json!({ "scheme": "Q4_0", "ignore": ["*down_proj*"] })).export(export).build().unwrap();
    used.run(model.clone(), folder.path().join("used.gguf")).unwrap();
    let two =
        Pipeline::builder().pass(pass(json!({ "scheme": "Q4_0", "targets": ["*q_proj*"] }))).pass(pass(json!({ "scheme": "Q8_0", "ignore": ["*q_proj*"] })));
    let error = two.measure(false).build().unwrap().run(model.clone(), folder.path().join("two.gguf")).unwrap_err();
    assert!(error.hint().unwrap().contains("quantize all matrices in one pass, with `rules` for those of other types"), "{error}");
    // Floats with the values of the blocks are not rounded again.
    attempt(json!({ "scheme": "Q4_0" }), gguf("F32")).unwrap();
    let found = Model::open(folder.path().join("out/model.gguf")).unwrap();
    attempt(json!({ "scheme": "Q4_0" }), gguf("Q4_0")).unwrap();
    let blocks = Model::open(folder.path().join("out/model.gguf")).unwrap();
    let name = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(found.weights.get(name).unwrap().floats(name).unwrap(), blocks.weights.get(name).unwrap().floats(name).unwrap());
}
