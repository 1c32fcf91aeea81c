//! Language models of folders with a vision tower, which passes run on texts and copy without changes, or run
//! on texts with images.
#![cfg(feature = "run")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress::export::Export;
use compress::pass::{ExtractLanguageModel, Method, Quantize, Scheme, Step};
use compress_core::store::{OpenSize, OpenSizes};
use compress_engine::data::Data;
use compress_engine::model::Config;
use compress_onnx::runtime::{Options, Session};
use serde_json::{Value, json};

use crate::common::onnxruntime::has_onnx_runtime;
use crate::common::{Tensors, golden, golden_model, outputs, pipeline, read};
use crate::contract::violated;

const NAMES: [&str; 9] = ["gemma3-vl", "llama4-vl", "mistral3", "qwen2-vl", "qwen2_5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3_5-moe-vl", "qwen3_5-vl"];
const TOWERS: [&str; 4] = ["visual.", "vision_tower.", "vision_model.", "multi_modal_projector."];

type Inputs = BTreeMap<String, Tensor>;

/// The texts of the reference outputs.
fn inputs(name: &str) -> Inputs {
    let stored = candle_core::safetensors::load(golden_model(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    ["input_ids", "attention_mask"].map(|input| (input.to_owned(), stored[&format!("in/{input}")].clone())).into()
}

/// These texts as a data set in a folder.
fn texts(name: &str, folder: &Path) -> Data {
    let file = folder.join("texts.safetensors");
    candle_core::safetensors::save(&inputs(name).into_iter().collect(), &file).unwrap();
    Data { arrays: Some(file), ..Data::default() }
}

fn is_of_tower(name: &str) -> bool {
    TOWERS.iter().any(|part| name.contains(part))
}

/// The language model is quantized on texts, and the tower is copied.
#[test]
fn the_tower_is_copied_by_passes_that_run_the_language_model() {
    for name in NAMES {
        let folder = golden_model(name);
        let pass = Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, ..Quantize::default() };
        let written = tempfile::tempdir().unwrap();
        let data = texts(name, written.path());
        let output = written.path().join("out");
        let report = pipeline().calibration(data).pass(pass).build().unwrap().run(Model::open(&folder).unwrap(), &output).unwrap();
        let (before, after): (Tensors, Tensors) = (read(&folder.join("model.safetensors")), read(&output.join("model.safetensors")));
        let tower: BTreeSet<&String> = before.keys().filter(|name| is_of_tower(name)).collect();
        assert!(!tower.is_empty() && tower.iter().all(|name| after.get(*name) == before.get(*name)), "{name}");
        assert_eq!(after.keys().filter(|name| is_of_tower(name)).count(), tower.len(), "{name}");
        let packed: Vec<&String> = after.keys().filter(|name| name.ends_with("self_attn.q_proj.weight_packed")).collect();
        assert_eq!(packed.len(), if name.starts_with("qwen3_5") { 1 } else { 2 }, "{name}: {packed:?}");
        assert!(report.fidelity.is_some(), "{name}");
        // Of Llama 4, experts in one tensor must be split for quantized folders.
        assert_eq!(violated(&output, "transformers").contains("experts"), name == "llama4-vl", "{name}");
        let config: Value = serde_json::from_str(&fs::read_to_string(output.join("config.json")).unwrap()).unwrap();
        let ignored: Vec<&str> = config["quantization_config"]["ignore"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        assert!(ignored.iter().any(|name| is_of_tower(&format!("{name}."))), "{name}: {ignored:?}");
    }
}

/// A golden model with another value in `config.json`, after its path.
fn changed(name: &str, path: &str, value: Value) -> Model {
    let mut model = Model::open(golden_model(name)).unwrap();
    let mut config = Value::Object(model.config.values().clone());
    let (group, key) = path.rsplit_once('/').unwrap();
    config.pointer_mut(group).unwrap().as_object_mut().unwrap().insert(key.to_owned(), value);
    model.config = Config::from_values(config.as_object().unwrap().clone());
    model
}

#[test]
fn keys_of_the_language_model_are_used_or_refused() {
    for (name, path, value, reason) in [
        ("gemma3-vl", "/text_config/model_type", json!("gemma4_text"), "`text_config` with the model_type `gemma4_text`"),
        ("gemma3-vl", "/text_config/vocab_size", Value::Null, "262208"),
        ("gemma3-vl", "/text_config/use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
        ("gemma3-vl", "/text_config/final_logit_softcapping", json!(30.0), "`final_logit_softcapping` of a model with a vision tower"),
        ("qwen3-vl-moe", "/text_config/norm_topk_prob", json!(false), "`norm_topk_prob` of false"),
        ("mistral3", "/text_config/rope_parameters/rope_type", json!("mrope"), "rope scaling `mrope`"),
        ("mistral3", "/text_config/rope_parameters", json!("x"), "`rope_parameters` is \"x\", expected an object"),
        ("mistral3", "/text_config", json!(7), "`text_config` is 7, expected an object"),
        ("mistral3", "/text_config/hidden_act", json!("step"), "activation `step`"),
        ("qwen2-vl", "/num_key_value_heads", json!(3), "num_key_value_heads"),
        ("qwen2-vl", "/rope_scaling/type", json!("axial"), "rope scaling `axial`"),
        ("qwen3-vl", "/text_config/rope_parameters/rope_type", json!("axial"), "rope scaling `axial`"),
    ] {
        let error = changed(name, path, value).graph().err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(reason), "{name}: {path}: {error}");
    }
    for name in NAMES {
        let (_, unknown) = Model::open(golden_model(name)).unwrap().graph_and_unknown_keys().unwrap();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
        let mut model = Model::open(golden_model(name)).unwrap();
        model.config.set("window_of_images", json!(3));
        let (_, unknown) = model.graph_and_unknown_keys().unwrap();
        assert_eq!(unknown, ["config.json: window_of_images"], "{name}");
    }
}

/// Heads are tied as in transformers, and some versions wrote the keys of the language model twice.
#[test]
fn configurations_of_other_versions_describe_the_same_model() {
    for name in NAMES {
        let model = Model::open(golden_model(name)).unwrap();
        let stored = model.weights.by_name.keys().any(|name| name.ends_with("lm_head.weight"));
        assert_eq!(model.tied_names().is_empty(), stored, "{name}");
    }
    let mut model = Model::open(golden_model("qwen2-vl")).unwrap();
    let expected = model.graph().unwrap().to_string();
    let mut text = model.config.values().clone();
    text.shift_remove("vision_config");
    text.insert("model_type".to_owned(), json!("qwen2_vl_text"));
    text.insert("layer_types".to_owned(), json!(["full_attention", "full_attention"]));
    model.config.set("layer_types", text["layer_types"].clone());
    model.config.set("text_config", Value::Object(text));
    let (graph, unknown) = model.graph_and_unknown_keys().unwrap();
    assert_eq!((graph.to_string(), unknown), (expected, Vec::new()));
    model.config.untie();
    assert_eq!(model.config.get("text_config").unwrap()["tie_word_embeddings"], json!(false));
}

/// The tower is made for the widths of the language model.
#[test]
fn sizes_of_the_language_model_are_not_changed() {
    let steps = [
        json!({ "prune-structured": { "dims": ["mlp"], "amount": 0.5, "importance": "l1" } }),
        json!({ "prune-structured": { "dims": ["layers"], "amount": 0.5, "importance": "l1" } }),
        json!({ "search-structure": { "limit": { "layers": 0.6 } } }),
        json!({ "distill": { "student": { "layers": [1] }, "max_steps": 1 } }),
        json!({ "distill": { "student": { "config": golden_model("mistral3").join("config.json") }, "max_steps": 1 } }),
        json!({ "distill": { "student": { "eagle3": {} }, "losses": { "soft": { "temperature": 1, "divergence": "acceptance" } }, "max_steps": 1 } }),
        json!({ "rotate": { "parts": ["residual"] } }),
    ];
    let written = tempfile::tempdir().unwrap();
    let data = texts("mistral3", written.path());
    for step in steps {
        let parsed: Step = serde_json::from_value(step.clone()).unwrap();
        let run = pipeline().calibration(data.clone()).train(data.clone()).pass(parsed).build().unwrap();
        let error = run.run(Model::open(golden_model("mistral3")).unwrap(), written.path().join("out")).unwrap_err().to_string();
        assert!(error.contains("`mistral3`, a model with a vision tower"), "{step}: {error}");
    }
    // The tower is reported before stacked experts, which could be split.
    let rotate: Step = serde_json::from_value(json!("rotate")).unwrap();
    let run = pipeline().pass(rotate).build().unwrap();
    let error = run.run(Model::open(golden_model("llama4-vl")).unwrap(), written.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("a model with a vision tower"), "{error}");
}

/// The outputs for texts, and the outputs of the model as a text model without its tower.
#[test]
fn a_language_model_is_a_model_of_its_own() {
    for (name, model_type, class) in [
        ("gemma3-vl", "gemma3_text", "Gemma3ForCausalLM"),
        ("llama4-vl", "llama4_text", "Llama4ForCausalLM"),
        ("mistral3", "mistral", "MistralForCausalLM"),
        ("qwen2-vl", "qwen2", "Qwen2ForCausalLM"),
        ("qwen2_5-vl", "qwen2", "Qwen2ForCausalLM"),
        ("qwen3-vl", "qwen3", "Qwen3ForCausalLM"),
        ("qwen3-vl-moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
        ("qwen3_5-moe-vl", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        ("qwen3_5-vl", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    ] {
        let input = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden_model(name).join(file), input.path().join(file)).unwrap();
        }
        fs::write(input.path().join("preprocessor_config.json"), "{}").unwrap();
        let written = tempfile::tempdir().unwrap();
        let output = written.path().join("out");
        pipeline().pass(ExtractLanguageModel {}).build().unwrap().run(Model::open(input.path()).unwrap(), &output).unwrap();
        let model = Model::open(&output).unwrap();
        assert_eq!((model.config.model_type(), model.config.class()), (model_type, class));
        assert!(!model.weights.by_name.keys().any(|name| is_of_tower(name) || name.contains("language_model")), "{name}");
        assert!(!output.join("preprocessor_config.json").exists(), "{name}");
        let (_, unknown) = model.graph_and_unknown_keys().unwrap();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
        let inputs = inputs(name);
        let [before, after] = [Model::open(golden_model(name)).unwrap(), model].map(|model| outputs(&model, &inputs)["logits"].flatten_all().unwrap());
        assert!(before.to_vec1::<f32>().unwrap() == after.to_vec1::<f32>().unwrap(), "{name}");
    }
    let written = tempfile::tempdir().unwrap();
    let run = pipeline().pass(ExtractLanguageModel {}).build().unwrap();
    let error = run.run(Model::open(golden_model("llama")).unwrap(), written.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("`llama` in config.json is not a model with a vision tower"), "{error}");
    let other = changed("gemma3-vl", "/text_config/model_type", json!("gemma4_text"));
    let run = pipeline().pass(ExtractLanguageModel {}).build().unwrap();
    let error = run.run(other, written.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("the language model \"gemma4_text\" in `text_config`"), "{error}");
}

/// A head that is stored as a copy of the embedding, under the names of the input.
#[test]
fn ties_of_an_extracted_language_model_are_settled() {
    let written = tempfile::tempdir().unwrap();
    let (input, output) = (written.path().join("in"), written.path().join("out"));
    let pruned = |targets: &str| -> Vec<Step> {
        let passes = json!(["extract-language-model", { "prune-unstructured": { "amount": 0.5, "targets": [targets] } }]);
        serde_json::from_value(passes).unwrap()
    };
    fs::create_dir(&input).unwrap();
    fs::copy(golden_model("gemma3-vl").join("config.json"), input.join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(golden_model("gemma3-vl").join("model.safetensors"), &Device::Cpu).unwrap();
    let table = tensors["language_model.model.embed_tokens.weight"].clone();
    tensors.insert("language_model.lm_head.weight".to_owned(), table.copy().unwrap());
    candle_core::safetensors::save(&tensors, input.join("model.safetensors")).unwrap();
    let run = |targets: &str| pipeline().passes(pruned(targets)).build().unwrap().run(Model::open(&input).unwrap(), &output);
    let report = run("*embed_tokens*").unwrap();
    let note = "`lm_head.weight` is tied to `model.embed_tokens.weight` and has the same values: only one is stored";
    assert!(report.notes.iter().any(|found| found == note), "{:?}", report.notes);
    assert!(!read(&output.join("model.safetensors")).contains_key("lm_head.weight"));
    let error = run("lm_head*").unwrap_err().to_string();
    assert!(error.contains("`lm_head.weight`: is tied to `model.embed_tokens.weight`"), "{error}");
    // A head with other values is untied.
    tensors.insert("language_model.lm_head.weight".to_owned(), table.affine(2.0, 0.0).unwrap());
    candle_core::safetensors::save(&tensors, input.join("model.safetensors")).unwrap();
    fs::remove_dir_all(&output).unwrap();
    run("*embed_tokens*").unwrap();
    assert!(!Model::open(&output).unwrap().config.get("tie_word_embeddings").unwrap().as_bool().unwrap());
}

/// Outputs that transformers does not load: separate experts of families that it does not stack.
#[test]
fn experts_of_a_folder_are_those_that_transformers_reads() {
    for (name, passes, is_loaded) in [
        ("qwen3-vl-moe", vec![json!("split-experts")], false),
        ("qwen3-vl-moe", vec![json!("split-experts"), json!("extract-language-model")], true),
        ("llama4-vl", vec![json!("split-experts")], false),
        ("llama4-vl", vec![json!("split-experts"), json!({ "quantize": { "scheme": "W4A16", "group_size": -1, "method": "rtn" } })], true),
    ] {
        let written = tempfile::tempdir().unwrap();
        let output = written.path().join("out");
        let steps: Vec<Step> = passes.iter().map(|pass| serde_json::from_value(pass.clone()).unwrap()).collect();
        let report = pipeline().passes(steps).build().unwrap().run(Model::open(golden_model(name)).unwrap(), &output).unwrap();
        assert_eq!(violated(&output, "transformers").contains("experts"), !is_loaded, "{name}: {passes:?}");
        // Notes are about the output, not about each pass.
        assert_eq!(report.notes.iter().any(|note| note.contains("separate experts of this family")), !is_loaded, "{:?}", report.notes);
    }
}

/// As in transformers, the head is that next to the language model, also in a folder without `architectures`.
#[test]
fn the_head_is_that_of_the_language_model() {
    let golden = Model::open(golden_model("llama4-vl")).unwrap();
    let mut model = golden.clone();
    let head = model.weights.by_name["language_model.lm_head.weight"].clone();
    model.weights.by_name.insert("lm_head.weight".to_owned(), head);
    assert_eq!(model.graph().unwrap().to_string(), golden.graph().unwrap().to_string());
    let mut model = Model::open(golden_model("gemma3-vl")).unwrap();
    let expected = model.graph().unwrap().to_string();
    model.config.remove("architectures");
    assert_eq!(model.graph().unwrap().to_string(), expected);
}

#[test]
fn figures_that_do_not_include_the_tower_are_marked() {
    let written = tempfile::tempdir().unwrap();
    let output = written.path().join("out");
    let pass: Step = serde_json::from_value(json!({ "prune-unstructured": { "amount": 0.9, "targets": ["*visual*attn.qkv.weight"] } })).unwrap();
    let report = pipeline().pass(pass).build().unwrap().run(Model::open(golden_model("qwen3-vl")).unwrap(), &output).unwrap();
    assert!(report.fidelity.is_some());
    assert!(report.notes.iter().any(|note| note.starts_with("warning: fidelity does not include 1 changed weight")), "{:?}", report.notes);
    let card = fs::read_to_string(output.join("README.md")).unwrap();
    assert!(card.contains("AutoModelForImageTextToText.from_pretrained") && card.contains("pipeline_tag: image-text-to-text"), "{card}");
}

/// Published files of Qwen3-VL with experts have the other order of axes than those of transformers 5.
#[test]
fn experts_have_either_order_of_axes() {
    let folder = golden_model("qwen3-vl-moe");
    let copy = tempfile::tempdir().unwrap();
    fs::copy(folder.join("config.json"), copy.path().join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let experts = tensors.iter_mut().filter(|(name, _)| name.contains(".mlp.experts."));
    let transposed = experts.map(|(_, tensor)| *tensor = tensor.transpose(1, 2).unwrap().contiguous().unwrap()).count();
    assert_eq!(transposed, 2);
    candle_core::safetensors::save(&tensors, copy.path().join("model.safetensors")).unwrap();
    let inputs = inputs("qwen3-vl-moe");
    let [before, after] = [folder.as_path(), copy.path()].map(|folder| outputs(&Model::open(folder).unwrap(), &inputs)["logits"].flatten_all().unwrap());
    let (before, after) = (before.to_vec1::<f32>().unwrap(), after.to_vec1::<f32>().unwrap());
    assert!(before.iter().zip(&after).all(|(one, other)| (one - other).abs() < 1e-4));
}

const WITH_IMAGES: [&str; 6] = ["qwen2-vl", "qwen2_5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3_5-vl", "qwen3_5-moe-vl"];

/// A golden model with texts that contain images, for which its configuration was changed as in the metadata.
fn with_images(name: &str, folder: &Path) -> (std::path::PathBuf, Inputs, Tensor) {
    let file = golden("images-in-texts").join(format!("{name}.safetensors"));
    let bytes = fs::read(&file).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let stated = header.metadata().clone().unwrap();
    let model = folder.join(name);
    fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden_model(name).join(file), model.join(file)).unwrap();
    }
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["image_token_id"] = serde_json::from_str(&stated["token"]).unwrap();
    let (text, rope) = if config.get("text_config").is_some() { ("/text_config", "rope_parameters") } else { ("", "rope_scaling") };
    config.pointer_mut(text).unwrap()[rope]["mrope_section"] = serde_json::from_str(&stated["sections"]).unwrap();
    fs::write(path, config.to_string()).unwrap();
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let logits = tensors.remove("out/logits").unwrap();
    (model, tensors.into_iter().map(|(name, x)| (name.strip_prefix("in/").unwrap().to_owned(), x)).collect(), logits)
}

fn sizes(height: usize, width: usize) -> OpenSizes {
    [("height", height), ("width", width)].map(|(name, size)| (name.to_owned(), OpenSize::One(size))).into()
}

/// Samples with images as a data set in a folder.
fn samples(folder: &Path, given: &Inputs) -> Data {
    let file = folder.join("samples.safetensors");
    let several = given.iter().map(|(name, x)| (name.clone(), Tensor::cat(&[x; 4], 0).unwrap())).collect();
    candle_core::safetensors::save(&several, &file).unwrap();
    Data { arrays: Some(file), ..Data::default() }
}

/// The largest difference from the logits of transformers at tokens that are not padding.
fn difference(given: &Inputs, found: &Tensor, expected: &Tensor) -> f32 {
    let real = given["attention_mask"].to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
    let difference = (found - expected).unwrap().abs().unwrap().broadcast_mul(&real).unwrap();
    difference.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

#[test]
fn texts_with_images_match_transformers() {
    let written = tempfile::tempdir().unwrap();
    for name in WITH_IMAGES {
        let (folder, given, expected) = with_images(name, written.path());
        let model = Model::open(&folder).unwrap();
        model.fix_sizes(&sizes(8, 16)).unwrap();
        let (graph, unknown) = model.graph_and_unknown_keys().unwrap();
        assert!(model.unused(&graph).is_empty() && unknown.is_empty(), "{name}: {:?} {unknown:?}", model.unused(&graph));
        let found = difference(&given, &outputs(&model, &given)["logits"], &expected);
        assert!(found < 1e-4, "{name}: {found}");
        if !has_onnx_runtime() {
            continue;
        }
        let onnx = written.path().join(format!("{name}-onnx"));
        pipeline().sizes(sizes(8, 16)).export(Export::from_name("onnx").unwrap()).build().unwrap().run(Model::open(&folder).unwrap(), &onnx).unwrap();
        let found = Session::open(&onnx.join("model.onnx"), Options::default()).unwrap().run(&given).unwrap();
        let found = difference(&given, &found["logits"], &expected);
        assert!(found < 1e-4, "{name} in ONNX Runtime: {found}");
    }
}

/// Passes see the activations of images: the codes differ if only the images differ.
#[test]
fn language_models_are_calibrated_on_texts_with_images() {
    let written = tempfile::tempdir().unwrap();
    for name in ["qwen2-vl", "qwen3-vl"] {
        let (folder, mut given, _) = with_images(name, written.path());
        let pass = || Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, ..Quantize::default() };
        let mut run = |number: usize, targets: &[&str]| {
            let pass = Quantize { targets: targets.iter().map(|name| name.parse().unwrap()).collect(), ..pass() };
            let output = written.path().join(format!("{name}-{number}"));
            let data = samples(written.path(), &given);
            let report = pipeline().sizes(sizes(8, 16)).calibration(data).pass(pass).build().unwrap().run(Model::open(&folder).unwrap(), &output).unwrap();
            assert!(report.fidelity.is_some(), "{name}: {:?}", report.notes);
            let tensors: Tensors = read(&output.join("model.safetensors"));
            given.insert("pixel_values".to_owned(), (&given["pixel_values"] * 3.0).unwrap());
            tensors
        };
        let [first, second] = [run(0, &[]), run(1, &[])];
        assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
        assert!(first.iter().any(|(name, tensor)| second[name] != *tensor), "{name}");
        // The tower is part of the graph, so that its layers can be calibrated too.
        let tower = run(2, &["*visual.blocks.0.attn.*.weight"]);
        assert!(tower.keys().any(|name| name.contains("visual.blocks.0") && name.ends_with(".weight_packed")), "{name}: {:?}", tower.keys());
    }
}

#[test]
fn wrong_sizes_and_texts_without_their_image_are_refused() {
    let written = tempfile::tempdir().unwrap();
    let (folder, mut given, _) = with_images("qwen2-vl", written.path());
    let open = || Model::open(&folder).unwrap();
    let refused = |model: Model, sizes: OpenSizes| model.fix_sizes(&sizes).unwrap_err().to_string();
    assert!(refused(open(), sizes(8, 6)).contains("`image_size` 6 is not a multiple of 4"));
    let one = [("height".to_owned(), OpenSize::One(8))].into();
    assert!(refused(open(), one).contains("expected `height` and `width`"));
    assert!(refused(Model::open(golden_model("gemma3-vl")).unwrap(), sizes(8, 8)).contains("`gemma3` with images"));
    assert!(refused(Model::open(golden_model("llama")).unwrap(), sizes(8, 8)).contains("is not an .onnx file"));
    let model = open();
    model.fix_sizes(&sizes(8, 16)).unwrap();
    model.fix_sizes(&sizes(8, 16)).unwrap();
    assert!(refused(model, sizes(16, 8)).contains("was already opened with other sizes"));
    let tokens = given["input_ids"].zeros_like().unwrap();
    given.insert("input_ids".to_owned(), tokens);
    let run = |sizes: OpenSizes, data: Data| {
        let pass = Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, ..Quantize::default() };
        let run = pipeline().sizes(sizes).calibration(data).pass(pass).build().unwrap().run(open(), written.path().join("out"));
        run.unwrap_err().to_string()
    };
    assert!(run(sizes(8, 16), samples(written.path(), &given)).contains("row 0 has 0 image tokens (40), but an image has 8 patches"));
    assert!(run(sizes(8, 16), texts("qwen2-vl", written.path())).contains("pixel_values"));
    if has_onnx_runtime() {
        let onnx = written.path().join("onnx");
        pipeline().sizes(sizes(8, 16)).export(Export::from_name("onnx").unwrap()).build().unwrap().run(open(), &onnx).unwrap();
        let file = Model::open(onnx.join("model.onnx")).unwrap();
        assert!(refused(file.clone(), sizes(16, 8)).contains("`height` is neither an open dimension nor an input"));
        file.fix_sizes(&sizes(8, 16)).unwrap();
    }
}
