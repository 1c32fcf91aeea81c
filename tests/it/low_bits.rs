//! Low-bit weights and 8-bit KV caches: in ONNX, in folders, and in the executor.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::numbers::largest;
use crate::common::{golden, onnxruntime};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use compress::export::{Export, Onnx, Safetensors};
use compress::pass::{PruneStructured, Quantize, Step};
use compress::pipeline::ResultCache;
use compress::{Model, Pipeline, Report};
use compress_engine::data::Data;
use compress_engine::exec::{Executor, Inputs, MemoryNeed, Parameters, Residence, Rounding};
use compress_graph::analysis;
use compress_onnx::proto::{DataType, ModelProto, TensorProto};
use compress_onnx::runtime::{Options, Session};
use compress_onnx::{WeightOnly, file};
use prost::Message;
use serde_json::{Value, json};

/// A tokenizer that GGUF files can represent.
pub const BYTE_LEVEL: &str = r#"{
    "added_tokens": [], "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "c": 2, "ab": 3 }, "merges": ["a b"], "ignore_merges": false },
    "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }
}"#;

/// A small Llama with rows of 32 and 96 elements.
pub fn llama(folder: &Path) -> PathBuf {
    let (place, hidden, inner) = (folder.join("llama"), 32, 96);
    std::fs::create_dir_all(&place).unwrap();
    let mut shapes: Vec<(String, Vec<usize>)> = vec![("model.embed_tokens.weight".into(), vec![48, hidden]), ("model.norm.weight".into(), vec![hidden])];
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![16, hidden]),
            ("self_attn.v_proj", vec![16, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let tensors = shapes.into_iter().enumerate().map(|(at, (name, shape))| (name, crate::common::Tensor::random(crate::common::DType::F32, &shape, at as u64)));
    let tensors: BTreeMap<String, Tensor> = tensors
        .map(|(name, tensor)| {
            let values: Vec<f32> = tensor.values().into_iter().map(|v| if tensor.shape.len() == 1 { 1.0 + v as f32 / 4.0 } else { v as f32 / 3.0 }).collect();
            (name, Tensor::from_vec(values, tensor.shape.clone(), &Device::Cpu).unwrap())
        })
        .collect();
    candle_core::safetensors::save(&tensors.into_iter().collect(), place.join("model.safetensors")).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true
    });
    std::fs::write(place.join("config.json"), config.to_string()).unwrap();
    place
}

fn inputs() -> Inputs {
    let ids = Tensor::from_vec((0..144i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (12, 12), &Device::Cpu).unwrap();
    [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into()
}

pub fn samples(folder: &Path) -> Data {
    let path = folder.join("ids.safetensors");
    candle_core::safetensors::save(&inputs().into_iter().collect(), &path).unwrap();
    Data::at(&path)
}

fn written(folder: &Path, model: &Path, step: impl Into<Step>, exports: Vec<Export>) -> compress::Result<Report> {
    let out = folder.join("out");
    let _ = std::fs::remove_dir_all(&out);
    let builder = exports
        .into_iter()
        .fold(Pipeline::builder().calibration(samples(folder)).pass(step).threads(2).measure(false), |builder, export| builder.export(export));
    builder.build()?.run(Model::open(model)?, &out)
}

pub fn outputs(model: &Model, inputs: &Inputs, rounding: Rounding) -> Tensor {
    let graph = model.graph().unwrap();
    let parameters = crate::common::work(|work| Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, work)).unwrap();
    Executor::new(&graph, parameters, Device::Cpu).with_rounding(rounding).run(inputs).unwrap().remove("logits").unwrap()
}

/// The largest difference, relative to the largest value.
fn far(a: &Tensor, b: &Tensor) -> f32 {
    largest(&(a - b).unwrap()) / largest(b)
}

pub fn quantize(options: Value) -> Quantize {
    serde_json::from_value(options).unwrap()
}

pub const SCHEMES: [&str; 24] = [
    "W2A16",
    "W2A16-ASYM",
    "W3A16",
    "W3A16-ASYM",
    "W4A16",
    "W4A16-ASYM",
    "W5A16",
    "W6A16",
    "W7A16",
    "W8A16",
    "W8A8",
    "W8A8-STATIC",
    "W4A8",
    "W4AFP8",
    "FP8",
    "FP8-DYNAMIC",
    "FP8-BLOCK",
    "NVFP4A16",
    "NVFP4",
    "MXFP4A16",
    "MXFP4",
    "MXFP6A16",
    "MXFP8A16",
    "MXFP8",
];

/// Models whose integers stay in memory compute bitwise the same as with their values, in less memory.
#[test]
fn integers_in_memory_compute_the_same_as_their_values() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    let mut floats = Vec::new();
    let schemes = SCHEMES.iter().map(|scheme| json!({ "scheme": scheme })).chain([
        json!({ "scheme": "W4A16", "group_size": 8 }),
        json!({ "scheme": "W4A16-ASYM", "group_size": 32, "targets": ["re:.*(proj|embed_tokens).weight"] }),
        json!({ "scheme": "W8A16", "targets": ["re:.*(proj|embed_tokens).weight"] }),
    ]);
    for mut options in schemes {
        options["method"] = json!("rtn");
        written(folder.path(), &model, quantize(options.clone()), Vec::new()).unwrap();
        let model = Model::open(folder.path().join("out")).unwrap();
        let graph = model.graph().unwrap();
        let parameters = |residence| crate::common::work(|work| Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, residence, work)).unwrap();
        let [coded, computed] = [Residence::Coded, Residence::Computed].map(parameters);
        let need = |residence| MemoryNeed::estimate(&graph, &model.weights, DType::F32, residence, &analysis::usual_sizes(&graph)).parameters;
        let is_exact = !options["scheme"].as_str().unwrap().contains("ASYM");
        assert!(coded.bytes() <= need(Residence::Coded) && (!is_exact || coded.bytes() == need(Residence::Coded)), "{options}");
        assert_eq!(computed.bytes(), need(Residence::Computed), "{options}");
        if coded.bytes() == computed.bytes() {
            floats.push(options["scheme"].to_string());
        }
        let [coded, computed] = [coded, computed].map(|parameters| Executor::new(&graph, parameters, Device::Cpu));
        for (texts, tokens) in [(1, 1), (1, 5), (12, 12)] {
            let inputs: Inputs = inputs().into_iter().map(|(name, ids)| (name, ids.narrow(0, 0, texts).unwrap().narrow(1, 0, tokens).unwrap())).collect();
            let [ours, plain] = [&coded, &computed].map(|executor| executor.run(&inputs).unwrap().remove("logits").unwrap().flatten_all().unwrap());
            assert_eq!(ours.to_vec1::<f32>().unwrap(), plain.to_vec1::<f32>().unwrap(), "{options} {texts} {tokens}");
        }
    }
    assert_eq!(floats, ["FP8", "FP8-DYNAMIC", "FP8-BLOCK", "MXFP8A16", "MXFP8"].map(|scheme| format!("{scheme:?}")));
}

/// Exports every scheme, with and without groups, in every form and opset. The file computes the same as
/// the folder, or the export fails with an error that names the weight and a fix.
#[test]
fn every_scheme_is_right_in_onnx_or_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    let (mut failures, mut refused) = (Vec::new(), 0);
    for scheme in SCHEMES {
        let groups: &[Option<i64>] = if scheme.starts_with('W') && !scheme.starts_with("W8A8") { &[None, Some(16), Some(8), Some(-1)] } else { &[None] };
        let forms = [(WeightOnly::Dequantize, 17), (WeightOnly::Dequantize, 21), (WeightOnly::MatmulNbits, 17)];
        let forms = if groups.len() > 1 { &forms[..] } else { &forms[..1] };
        for (group, weight_only, opset) in groups.iter().flat_map(|group| forms.iter().map(move |(form, opset)| (group, *form, *opset))) {
            let mut options = json!({ "scheme": scheme, "method": "rtn" });
            group.iter().for_each(|size| options["group_size"] = json!(size));
            let case = format!("{options} as {weight_only:?} at opset {opset}");
            let onnx = Onnx { opset: Some(opset), weight_only, ..Onnx::default() };
            let grouped = groups.len() > 1 && *group != Some(-1);
            let can = opset >= 21 || !grouped || (weight_only == WeightOnly::MatmulNbits && *group != Some(8));
            let outputs_of = || outputs(&Model::open(folder.path().join("out")).unwrap(), &inputs(), Rounding::Tensor);
            // ONNX has no integer products with group scales: activations stay floats, as in W4A16.
            let reference = (scheme == "W4A8" && grouped).then(|| {
                let twin = json!({ "scheme": "W4A16", "method": "rtn", "group_size": group });
                written(folder.path(), &model, quantize(twin), vec![Safetensors::default().into()]).map(|_| outputs_of()).unwrap()
            });
            match written(folder.path(), &model, quantize(options), vec![Safetensors::default().into(), onnx.into()]) {
                Err(error) => {
                    refused += 1;
                    let error = error.to_string();
                    if can || !error.contains("proj.weight`") || !error.contains("opset") {
                        failures.push(format!("{case}: {error}"));
                    }
                }
                Ok(_) if !can => failures.push(format!("{case}: is not refused")),
                Ok(_) => {
                    if !onnxruntime::has_onnx_runtime() {
                        continue;
                    }
                    let theirs = Session::open(&folder.path().join("out").join(file::MODEL), Options::default()).and_then(|mut session| session.run(&inputs()));
                    // Values halfway between two integers may be rounded either way.
                    let rounds_activations = ["W8A8", "W8A8-STATIC", "W4A8"].contains(&scheme) && reference.is_none();
                    let limit = if rounds_activations { 5e-2 } else { 1e-4 };
                    let ours = reference.unwrap_or_else(outputs_of);
                    match theirs {
                        Ok(theirs) if far(&theirs["logits"], &ours) <= limit => {}
                        Ok(theirs) => failures.push(format!("{case}: {:e}", far(&theirs["logits"], &ours))),
                        Err(error) => failures.push(format!("{case}: {error}")),
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(refused, 48);
}

/// The tensors of the ONNX file and of the safetensors file in the same folder.
fn both(folder: &Path, options: Value, onnx: Onnx) -> (Vec<TensorProto>, BTreeMap<String, crate::common::Tensor>, Report) {
    let report = written(folder, &llama(folder), quantize(options), vec![Safetensors::default().into(), onnx.into()]).unwrap();
    let bytes = std::fs::read(folder.join("out").join(file::MODEL)).unwrap();
    let tensors = ModelProto::decode(bytes.as_slice()).unwrap().graph.unwrap().initializer;
    let stored = crate::common::read(&folder.join("out/model.safetensors"));
    (tensors, stored, report)
}

#[test]
fn four_bits_are_packed_as_each_operator_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let name = "model.layers.0.mlp.down_proj.weight";
    let find = |tensors: &[TensorProto], what: &str| tensors.iter().find(|t| t.name() == format!("{name}{what}")).unwrap().clone();
    let options = json!({ "scheme": "W4A16-ASYM", "group_size": 32 });
    let (blocks, stored, _) = both(folder.path(), options.clone(), Onnx { weight_only: WeightOnly::MatmulNbits, ..Onnx::default() });
    let codes = find(&blocks, "");
    assert_eq!((codes.data_type(), codes.dims.as_slice()), (DataType::Uint8, [32, 3, 16].as_slice()));
    // Rows of complete blocks equal the packed words of compressed-tensors.
    assert!(codes.raw_data() == stored[&format!("{name}_packed")].bytes);
    let zero_points = find(&blocks, "_zero_point");
    assert_eq!(zero_points.dims, [32, 2]);
    let (halves, ..) = both(folder.path(), options, Onnx { opset: Some(21), ..Onnx::default() });
    let [half, half_zero] = ["", "_zero_point"].map(|what| find(&halves, what));
    assert_eq!((half.data_type(), half.dims.as_slice(), half.raw_data().len()), (DataType::Int4, [96, 32].as_slice(), 96 * 16));
    assert_eq!((half_zero.data_type(), half_zero.dims.as_slice()), (DataType::Int4, [3, 32].as_slice()));
    let nibble = |bytes: &[u8], at: usize| bytes[at / 2] >> (4 * (at % 2)) & 15;
    for row in 0..32 {
        for column in 0..96 {
            // Unsigned in blocks, two's complement in INT4.
            assert_eq!(nibble(codes.raw_data(), row * 96 + column) ^ 8, nibble(half.raw_data(), column * 32 + row));
        }
        for block in 0..3 {
            assert_eq!(nibble(zero_points.raw_data(), row * 4 + block) ^ 8, nibble(half_zero.raw_data(), block * 32 + row));
        }
    }
}

#[test]
fn layers_that_read_one_value_share_the_global_scale_of_nvfp4() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("m");
    std::fs::create_dir(&place).unwrap();
    let weight = |seed| {
        let values = crate::common::Tensor::random(crate::common::DType::F32, &[32, 32], seed).values();
        Tensor::from_vec(values.into_iter().map(|v| (v * seed as f64) as f32).collect::<Vec<_>>(), (32, 32), &Device::Cpu).unwrap()
    };
    let tensors = [("first", 1), ("second", 2), ("third", 3)].map(|(name, seed)| (format!("{name}.weight"), weight(seed)));
    candle_core::safetensors::save(&tensors.into(), place.join("model.safetensors")).unwrap();
    std::fs::write(place.join("config.json"), "{}").unwrap();
    let ty = "float[batch, 2, 32]";
    let text = format!(
        "input x: {ty}\nparam first.weight: float[32, 32]\nparam second.weight: float[32, 32]\nparam third.weight: float[32, 32]\na = Linear(x, first.weight) -> {ty}\nb = Linear(x, second.weight) -> {ty}\ns = Add(a, b) -> {ty}\nc = Linear(s, third.weight) -> {ty}\noutput y = c\n"
    );
    let graph: compress_graph::ir::Graph = text.parse().unwrap();
    std::fs::write(place.join("graph.json"), serde_json::to_string(&compress_graph::ir::GraphFile::from(&graph)).unwrap()).unwrap();
    let out = folder.path().join("out");
    let pipeline = Pipeline::builder().pass(quantize(json!({ "scheme": "NVFP4A16" }))).build().unwrap();
    pipeline.run(Model::open(&place).unwrap(), &out).unwrap();
    let stored = crate::common::read(&out.join("model.safetensors"));
    let [first, second, third] = ["first", "second", "third"].map(|name| stored[&format!("{name}.weight_global_scale")].values()[0]);
    assert!(first == second && second != third, "{first} {second} {third}");
}

/// Without a graph, the table of families lists the layers that runtimes fuse.
#[test]
fn fused_layers_of_families_without_a_graph_share_the_global_scale_of_nvfp4() {
    let desk = crate::common::Desk::new();
    let names = ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"].map(|layer| format!("model.layers.0.self_attn.{layer}"));
    let weight = |factor: usize| {
        let values: Vec<f64> = (0..32 * 32).map(|at| (at % 7) as f64 * factor as f64).collect();
        crate::common::Tensor::floats(crate::common::DType::F32, &[32, 32], &values)
    };
    let input = desk.weights(&names.iter().enumerate().map(|(at, name)| (format!("{name}.weight"), weight(at + 1))).collect());
    std::fs::write(input.join("config.json"), r#"{ "model_type": "deepseek_v32" }"#).unwrap();
    assert!(Model::open(&input).unwrap().graph().is_err());
    let output = desk.run(&input, Pipeline::builder().pass(quantize(json!({ "scheme": "NVFP4A16" })))).unwrap();
    let stored = crate::common::read(&output.path);
    let [first, second, third] = names.map(|name| stored[&format!("{name}.weight_global_scale")].values()[0]);
    assert!(first == second && second != third, "{first} {second} {third}");
}

#[test]
fn scattered_groups_are_rejected_and_an_order_without_effect_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path(), &llama(folder.path()), quantize(json!({ "scheme": "W4A16", "group_size": 32 })), vec![Safetensors::default().into()]).unwrap();
    let path = folder.path().join("out/model.safetensors");
    let name = "model.layers.0.mlp.down_proj.weight";
    let opened = |order: &dyn Fn(i32) -> i32| {
        let mut tensors = crate::common::read(&path);
        let bytes = (0..96).flat_map(|at| order(at).to_le_bytes()).collect();
        tensors.insert(format!("{name}_g_idx"), crate::common::Tensor::new(crate::common::DType::I32, &[96], bytes));
        crate::common::write(&path, &tensors);
        Model::open(folder.path().join("out")).map(|model| model.weights.by_name.contains_key(&format!("{name}_g_idx")))
    };
    assert_eq!((opened(&|at| at / 32).unwrap(), opened(&|_| -1).unwrap()), (false, false));
    let error = opened(&|at| at % 3).unwrap_err().to_string();
    assert!(error.contains("down_proj.weight_g_idx") && error.contains("actorder"), "{error}");
}

#[test]
fn inputs_of_tables_are_not_rounded() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    let options = |scheme: &str| json!({ "scheme": scheme, "targets": ["*_proj.weight", "*embed_tokens.weight"] });
    for scheme in ["W8A8", "FP8-DYNAMIC"] {
        written(folder.path(), &model, quantize(options(scheme)), vec![Safetensors::default().into()]).unwrap();
        let config: Value = serde_json::from_slice(&std::fs::read(folder.path().join("out/config.json")).unwrap()).unwrap();
        let groups = config["quantization_config"]["config_groups"].as_object().unwrap();
        let rounds =
            |class: &str| groups.values().filter(|group| group["targets"][0] == class).map(|group| !group["input_activations"].is_null()).collect::<Vec<_>>();
        assert_eq!((rounds("Embedding"), rounds("Linear")), (vec![false], vec![true]), "{scheme}");
    }
    let refused = written(folder.path(), &model, quantize(options("MXFP4A16")), vec![Safetensors::default().into()]).unwrap_err().to_string();
    assert!(refused.contains("model.embed_tokens.weight") && refused.contains("FP4"), "{refused}");
}

#[test]
fn files_of_four_bits_are_small_if_operators_support_them() {
    let folder = tempfile::tempdir().unwrap();
    let size = |report: &Report| report.outputs.iter().find(|o| o.path.ends_with(file::MODEL)).unwrap().bytes;
    let options = |group: i64| json!({ "scheme": "W4A16", "group_size": group });
    let bytes = both(folder.path(), options(-1), Onnx::default()).2;
    assert!(bytes.notes.iter().any(|note| note.contains("stored as int8")), "{:?}", bytes.notes);
    let halves = both(folder.path(), options(-1), Onnx { opset: Some(21), ..Onnx::default() }).2;
    let blocks = both(folder.path(), options(32), Onnx { weight_only: WeightOnly::MatmulNbits, ..Onnx::default() }).2;
    assert!(size(&halves) + 10_000 < size(&bytes) && size(&blocks) + 9000 < size(&bytes));
    let odd = both(folder.path(), options(8), Onnx { opset: Some(21), weight_only: WeightOnly::MatmulNbits, ..Onnx::default() }).2;
    assert!(odd.notes.iter().any(|note| note.contains("MatMulNBits requires")), "{:?}", odd.notes);
}

const FORMATS: [&str; 4] = ["fp8", "int8", "fp8-head", "int8-head"];

fn scheme(format: &str) -> Value {
    let kind = if format.starts_with("fp8") { "float" } else { "int" };
    let strategy = if format.ends_with("-head") { "attn_head" } else { "tensor" };
    json!({ "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed", "config_groups": {}, "ignore": [],
        "kv_cache_scheme": { "num_bits": 8, "type": kind, "symmetric": true, "strategy": strategy, "dynamic": false, "observer": "static_minmax" } })
}

/// A golden model with KV cache scales from compressed-tensors (`scripts/goldens cache`).
fn with_cache(folder: &Path, name: &str, format: &str) -> PathBuf {
    let place = folder.join(format!("{name}-{format}"));
    std::fs::create_dir_all(&place).unwrap();
    let found = candle_core::safetensors::load(golden("cache.safetensors"), &Device::Cpu).unwrap();
    let mut tensors = candle_core::safetensors::load(golden("models").join(name).join("model.safetensors"), &Device::Cpu).unwrap();
    let scales = found.into_iter().filter_map(|(key, tensor)| Some((key.strip_prefix(&format!("{name}/{format}/"))?.to_owned(), tensor)));
    tensors.extend(scales.filter(|(key, _)| key.ends_with("_scale")));
    candle_core::safetensors::save(&tensors, place.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(golden("models").join(name).join("config.json")).unwrap()).unwrap();
    config["quantization_config"] = scheme(format);
    std::fs::write(place.join("config.json"), config.to_string()).unwrap();
    place
}

#[test]
fn keys_and_values_are_rounded_as_by_compressed_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let found = candle_core::safetensors::load(golden("cache.safetensors"), &Device::Cpu).unwrap();
    let inputs: Inputs = ["input_ids", "attention_mask"].map(|name| (name.to_owned(), found[name].clone())).into();
    for name in ["llama-grouped-tied", "qwen3"] {
        for format in FORMATS {
            let model = Model::open(with_cache(folder.path(), name, format)).unwrap();
            let ours = outputs(&model, &inputs, Rounding::Token);
            let wanted = &found[&format!("{name}/{format}/logits")];
            assert!(far(&ours, wanted) < 1e-5, "{name} {format}: {}", far(&ours, wanted));
            let floats = outputs(&Model::open(golden("models").join(name)).unwrap(), &inputs, Rounding::Token);
            assert!(far(&floats, wanted) > 1e-4, "{name} {format}");
        }
    }
}

#[test]
fn a_quantized_cache_survives_passes_and_export() {
    let folder = tempfile::tempdir().unwrap();
    let place = with_cache(folder.path(), "llama-grouped-tied", "fp8");
    let names = |model: &Model| model.weights.by_name.keys().filter(|name| name.ends_with("_scale")).cloned().collect::<Vec<_>>();
    let said = || -> Value { serde_json::from_str(&std::fs::read_to_string(folder.path().join("out/config.json")).unwrap()).unwrap() };
    written(folder.path(), &place, quantize(json!({ "scheme": "W8A16", "group_size": -1 })), vec![Safetensors::default().into()]).unwrap();
    let model = Model::open(folder.path().join("out")).unwrap();
    assert_eq!(names(&model).len(), 4);
    assert!(model.graph().unwrap().to_string().matches("CacheQuantize").count() == 4);
    assert_eq!(said()["quantization_config"]["kv_cache_scheme"]["observer"], "static_minmax");
    // If the second layer is removed, so are its scales.
    let layers: PruneStructured = serde_json::from_value(json!({ "dims": ["layers"], "amount": 1 })).unwrap();
    written(folder.path(), &place, layers, vec![Safetensors::default().into()]).unwrap();
    let model = Model::open(folder.path().join("out")).unwrap();
    assert_eq!(names(&model), ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]);
    assert!(model.is_described() && model.graph().unwrap().to_string().matches("CacheQuantize").count() == 2);
    // The file contains the quantization of the cache if the opset has the type.
    let heads: PruneStructured = serde_json::from_value(json!({ "dims": ["heads"], "amount": 0.5 })).unwrap();
    let error = written(folder.path(), &place, heads.clone(), vec![Onnx::default().into()]).unwrap_err().to_string();
    assert!(error.contains("opset 19") && error.contains("kv_cache"), "{error}");
    written(folder.path(), &place, heads, vec![Safetensors::default().into(), Onnx { opset: Some(19), ..Onnx::default() }.into()]).unwrap();
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let out = folder.path().join("out");
    let theirs = Session::open(&out.join(file::MODEL), Options::default()).unwrap().run(&inputs()).unwrap();
    let ours = outputs(&Model::open(&out).unwrap(), &inputs(), Rounding::Tensor);
    // Keys halfway between two codes may be rounded either way.
    assert!(far(&theirs["logits"], &ours) < 1e-2, "{}", far(&theirs["logits"], &ours));
}

/// Scales per head follow from the samples, survive head pruning, and equal the executor in ONNX Runtime.
#[test]
fn caches_have_a_scale_for_each_head() {
    let folder = tempfile::tempdir().unwrap();
    let place = golden("models/llama-grouped-tied");
    for (format, kind) in [("fp8", "float"), ("int8", "int")] {
        let pass = quantize(json!({ "scheme": "W8A16", "group_size": -1, "kv_cache": { "type": format, "scales": "head" } }));
        let exports = vec![Safetensors::default().into(), Onnx { opset: Some(19), ..Onnx::default() }.into()];
        written(folder.path(), &place, pass, exports).unwrap();
        let out = folder.path().join("out");
        let model = Model::open(&out).unwrap();
        let config: Value = serde_json::from_str(&std::fs::read_to_string(out.join("config.json")).unwrap()).unwrap();
        let scheme = &config["quantization_config"]["kv_cache_scheme"];
        assert_eq!((&scheme["type"], &scheme["strategy"]), (&json!(kind), &json!("attn_head")));
        let heads = model.config.get("num_key_value_heads").unwrap().as_u64().unwrap() as usize;
        let mut differ = 0;
        for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| name.ends_with(".k_scale") || name.ends_with(".v_scale")) {
            assert_eq!(weight.shape, [heads, 1, 1], "{name}");
            let scales = weight.floats(name).unwrap();
            differ += usize::from(scales.iter().any(|scale| *scale != scales[0]));
        }
        assert!(heads > 1 && differ == 4, "{heads} heads, {differ} different");
        if onnxruntime::has_onnx_runtime() {
            let theirs = Session::open(&out.join(file::MODEL), Options::default()).unwrap().run(&inputs()).unwrap();
            let ours = outputs(&model, &inputs(), Rounding::Tensor);
            assert!(far(&theirs["logits"], &ours) < 1e-2, "{format}: {}", far(&theirs["logits"], &ours));
        }
        // A scale of another shape contradicts config.json.
        let path = out.join("config.json");
        let text = std::fs::read_to_string(&path).unwrap().replace("attn_head", "tensor");
        std::fs::write(&path, text).unwrap();
        std::fs::remove_file(out.join(file::MODEL)).unwrap();
        let error = Model::open(&out).unwrap().graph().unwrap_err().to_string();
        assert!(error.contains("k_scale") && error.contains("strategy tensor"), "{error}");
        // Pruned heads have no scales.
        let place = with_cache(folder.path(), "llama-grouped-tied", &format!("{format}-head"));
        let pass: PruneStructured = serde_json::from_value(json!({ "dims": ["heads"], "amount": 0.5 })).unwrap();
        written(folder.path(), &place, pass, vec![Safetensors::default().into()]).unwrap();
        let name = "model.layers.0.self_attn.k_scale";
        let pruned = Model::open(folder.path().join("out")).unwrap();
        assert!(pruned.graph().is_ok() && pruned.weights.get(name).unwrap().shape[0] < heads);
    }
}

/// `dequantize` removes a quantized cache, `quantize` replaces it, and GGUF files do not contain its scales.
#[test]
fn a_quantized_cache_can_be_removed_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let kind = || -> Value {
        let config: Value = serde_json::from_str(&std::fs::read_to_string(out.join("config.json")).unwrap()).unwrap();
        config["quantization_config"]["kv_cache_scheme"]["type"].clone()
    };
    let scales = || Model::open(&out).unwrap().weights.by_name.keys().filter(|name| name.ends_with("_scale")).count();
    let place = with_cache(folder.path(), "llama-grouped-tied", "int8");
    let report = written(folder.path(), &place, compress::pass::Dequantize::default(), vec![Safetensors::default().into()]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("`kv_cache_scheme` and its scales are removed")));
    assert!(kind().is_null() && scales() == 0);
    let cast: compress::pass::Cast = serde_json::from_value(json!({ "to": "f32" })).unwrap();
    let gguf = compress::export::Gguf::default();
    let report = written(folder.path(), &place, cast, vec![gguf.into()]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("the scales of the quantized KV cache are not written")), "{:?}", report.notes);
    let model = llama(folder.path());
    let both = |format: &str| quantize(json!({ "scheme": "W8A16", "kv_cache": format, "targets": ["*layers.0*down_proj.weight"] }));
    written(folder.path(), &model, both("int8"), vec![Safetensors::with_layout(compress::export::Layout::Dense).into()]).unwrap();
    assert_eq!(kind(), "int");
    let dense = folder.path().join("dense");
    std::fs::rename(&out, &dense).unwrap();
    written(folder.path(), &dense, both("fp8"), vec![Safetensors::default().into()]).unwrap();
    assert!(kind() == "float" && scales() == 4);
}

#[test]
fn scales_of_caches_are_found_and_written_for_every_method() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    for (options, format) in [
        (json!({ "scheme": "W8A16", "kv_cache": "fp8" }), "float"),
        (json!({ "scheme": "FP8-DYNAMIC", "kv_cache": "int8" }), "int"),
        (json!({ "scheme": "W4A16", "group_size": 32, "method": "gptq", "kv_cache": "fp8" }), "float"),
    ] {
        let pass = quantize(options.clone());
        let report = written(folder.path(), &model, pass.clone(), vec![Safetensors::default().into()]).unwrap();
        assert_eq!(report.passes[0].details["caches"], 2, "{options}");
        let out = folder.path().join("out");
        let stored = crate::common::read(&out.join("model.safetensors"));
        for layer in 0..2 {
            for name in ["k_scale", "v_scale"] {
                let scale = &stored[&format!("model.layers.{layer}.self_attn.{name}")];
                assert!(scale.shape == [1] && scale.dtype == crate::common::DType::F32 && (1e-4..0.1).contains(&scale.values()[0]), "{scale:?}");
            }
        }
        let config: Value = serde_json::from_str(&std::fs::read_to_string(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["quantization_config"]["kv_cache_scheme"]["type"], format);
        let opened = Model::open(&out).unwrap();
        let (first, again) = (outputs(&opened, &inputs(), Rounding::Token), outputs(&opened, &inputs(), Rounding::Token));
        assert_eq!(far(&first, &again), 0.0);
        let plain = quantize({
            let mut options = options.clone();
            options.as_object_mut().unwrap().remove("kv_cache");
            options
        });
        written(folder.path(), &model, plain, vec![Safetensors::default().into()]).unwrap();
        let floats = outputs(&Model::open(&out).unwrap(), &inputs(), Rounding::Token);
        let change = far(&first, &floats);
        assert!(change > 0.0 && change < 0.2, "{options}: {change}");
        written(folder.path(), &model, pass, vec![Safetensors::default().into()]).unwrap();
        std::fs::create_dir_all(folder.path().join("again")).unwrap();
        let error = written(&folder.path().join("again"), &out, quantize(options), vec![Safetensors::default().into()]);
        assert!(error.is_err());
    }
}

/// Padding of shorter texts does not affect the scales of caches.
#[test]
fn scales_of_caches_do_not_depend_on_the_batch_size() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    std::fs::copy(golden("evaluation/characters.json"), model.join("tokenizer.json")).unwrap();
    let path = folder.path().join("texts.jsonl");
    let letters = "the quick brown fox jumps over";
    let lines: String = [3, 21, 8, 15, 26, 5, 12, 19].iter().map(|length| format!("{}\n", json!({ "text": letters[30 - length..] }))).collect();
    std::fs::write(&path, lines).unwrap();
    let scales = |batch_size: usize| {
        let data = Data { text: Some(path.clone()), batch_size: Some(batch_size), ..Data::default() };
        let out = folder.path().join(format!("out-{batch_size}"));
        let pipeline = Pipeline::builder().calibration(data).pass(quantize(json!({ "scheme": "W8A16", "kv_cache": "fp8" }))).build().unwrap();
        pipeline.run(Model::open(&model).unwrap(), &out).unwrap();
        let stored = crate::common::read(&out.join("model.safetensors")).into_iter();
        let caches = stored.filter(|(name, _)| name.ends_with(".k_scale") || name.ends_with(".v_scale"));
        caches.map(|(name, scale)| (name, scale.values()[0])).collect::<BTreeMap<String, f64>>()
    };
    let (four, one) = (scales(4), scales(1));
    assert_eq!(four.len(), 4);
    // Sums over other numbers of rows may be rounded differently.
    assert!(four.iter().all(|(name, scale)| (scale / one[name] - 1.0).abs() < 1e-5), "{four:?} {one:?}");
}

/// Samples whose keys are all zero do not determine the range of the cache.
#[test]
fn caches_of_zeros_have_a_scale_of_one_and_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    let path = model.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let projection = tensors.get_mut("model.layers.1.self_attn.v_proj.weight").unwrap();
    *projection = projection.zeros_like().unwrap();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let pass = quantize(json!({ "scheme": "W8A16", "kv_cache": "fp8" }));
    let report = written(folder.path(), &model, pass, vec![Safetensors::default().into()]).unwrap();
    let stored = crate::common::read(&folder.path().join("out/model.safetensors"));
    let scale = |layer: usize| stored[&format!("model.layers.{layer}.self_attn.v_scale")].values()[0];
    assert!(scale(1) == 1.0 && scale(0) < 0.1, "{} {}", scale(0), scale(1));
    let is_named = |note: &String| note.contains("only zeros in 1 of the caches") && note.contains("`model.layers.1.self_attn.v_scale`");
    assert!(report.notes.iter().any(is_named), "{:?}", report.notes);
}

/// compressed-tensors recognizes attention by the names of its layers.
#[test]
fn caches_that_transformers_does_not_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let pass = || quantize(json!({ "scheme": "W8A16", "group_size": -1, "kv_cache": "fp8" }));
    for (name, said) in [("gpt-neox", true), ("olmo2", false), ("phi3", false), ("qwen3", false)] {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
        let report = written(folder.path(), &model, pass(), vec![Safetensors::default().into()]).unwrap();
        assert_eq!(report.notes.iter().any(|note| note.contains("transformers ignores those of")), said, "{name}: {:?}", report.notes);
    }
}

#[test]
fn a_result_that_is_used_again_has_its_cache() {
    let folder = tempfile::tempdir().unwrap();
    let model = llama(folder.path());
    let run = |out: &str| {
        let results = ResultCache::new(folder.path().join("results"), Duration::ZERO);
        let pass = quantize(json!({ "scheme": "W8A16", "kv_cache": "fp8" }));
        let pipeline = Pipeline::builder().calibration(samples(folder.path())).pass(pass).cache(results, true).build().unwrap();
        pipeline.run(Model::open(&model).unwrap(), folder.path().join(out)).unwrap()
    };
    run("first");
    let notes = run("second").notes;
    assert!(notes.iter().any(|note| note.contains("was reused")), "{notes:?}");
    for name in ["config.json", "model.safetensors"] {
        let [first, second] = ["first", "second"].map(|out| std::fs::read(folder.path().join(out).join(name)).unwrap());
        assert!(first == second, "{name}");
    }
}

#[test]
fn models_without_a_cache_or_samples_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let pass = || quantize(json!({ "scheme": "W8A16", "group_size": -1, "kv_cache": "fp8" }));
    let refused = |name: &str| written(folder.path(), &golden("models").join(name), pass(), vec![Safetensors::default().into()]).unwrap_err().to_string();
    assert!(refused("bert").contains("is not causal"), "{}", refused("bert"));
    assert!(refused("deepseek-v2").contains("latent"), "{}", refused("deepseek-v2"));
    let without =
        Pipeline::builder().pass(pass()).build().and_then(|pipeline| pipeline.run(Model::open(llama(folder.path())).unwrap(), folder.path().join("none")));
    let error = without.unwrap_err().to_string();
    assert!(error.contains("calibration"), "{error}");
    let place = with_cache(folder.path(), "qwen3", "fp8");
    let replaced = written(folder.path(), &place, pass(), vec![Safetensors::default().into()]).unwrap();
    assert!(replaced.notes.iter().any(|note| note.contains("are replaced")), "{:?}", replaced.notes);
    let path = place.join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in [("num_bits", json!(4)), ("symmetric", json!(false)), ("dynamic", json!(true))] {
        config["quantization_config"] = scheme("fp8");
        config["quantization_config"]["kv_cache_scheme"][key] = value;
        std::fs::write(&path, config.to_string()).unwrap();
        let error = Model::open(&place).unwrap().graph().unwrap_err().to_string();
        assert!(error.contains("kv_cache_scheme") && error.contains(key), "{error}");
    }
    config["quantization_config"] = scheme("fp8");
    std::fs::write(&path, config.to_string()).unwrap();
    std::fs::copy(golden("models/qwen3/model.safetensors"), place.join("model.safetensors")).unwrap();
    let error = Model::open(&place).unwrap().graph().unwrap_err().to_string();
    assert!(error.contains("k_scale`: is missing") && error.contains("kv_cache_scheme"), "{error}");
}
