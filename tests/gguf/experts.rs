//! Experts, in a tensor each and all in one.

use std::fs;

use compress::export::{FileType, Gguf};
use compress::store::gguf;
use compress::store::{Bytes, DType, Encoding, Weight};
use compress::{Model, Pipeline};
use serde_json::Value;

use super::{export, golden, rewritten, same_weights, source, written};

/// Of Qwen 3, whose experts are in all layers there.
#[test]
fn experts_come_and_go() {
    let experts = |json: &mut Value| {
        json["mlp_only_layers"] = serde_json::json!([]);
        json["num_hidden_layers"] = 1.into();
    };
    let opened = |change: &dyn Fn(&mut Value)| {
        let folder = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_str(&fs::read_to_string(golden("models/qwen3-moe/config-4.json")).unwrap()).unwrap();
        experts(&mut json);
        change(&mut json);
        fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        fs::copy(golden("models/qwen3-moe/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let mut model = Model::open(folder.path()).unwrap();
        model.weights.by_name.retain(|name, _| !name.starts_with("model.layers.1."));
        (folder, model)
    };
    let (_source, model) = opened(&|_| {});
    let (folder, found, report) = written(model.clone(), FileType::F32);
    same_weights(&found, &model, "qwen3-moe");
    assert!(found.graph().unwrap().to_string() == model.graph().unwrap().to_string());
    assert!(report.layers.iter().any(|layer| layer.name == "model.layers.0.mlp.experts.3.up_proj.weight"));
    let file = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
    assert_eq!(file.tensors["blk.0.ffn_up_exps.weight"].shape, [4, 12, 16]);
    assert_eq!(file.values["qwen3moe.expert_feed_forward_length"], gguf::Value::Unsigned(12));
    let refused = |(folder, model): (tempfile::TempDir, Model), words: &str| {
        let error = export(model, folder.path(), FileType::F16).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "`{error}` does not say `{words}`");
    };
    refused(opened(&|json| json["norm_topk_prob"] = false.into()), "`norm_topk_prob` of false");
    refused(opened(&|json| json["mlp_only_layers"] = serde_json::json!([1])), "`mlp_only_layers` of [1]");
    for missing in ["1", "3"] {
        let (source, mut model) = opened(&|_| {});
        model.weights.by_name.remove(&format!("model.layers.0.mlp.experts.{missing}.up_proj.weight"));
        refused((source, model), "4 experts");
    }
    // As many as are said.
    let (_folder, model) = rewritten("mixtral", |values, _| drop(values.insert("llama.expert_count".into(), gguf::Value::Unsigned(3))));
    assert!(model.err().unwrap().to_string().contains("has the shape [4, 16, 12], where there are 3 experts"));
}

/// The layout of transformers 5: against the tensors that were taken apart here.
#[test]
fn experts_of_one_tensor_become_those_of_a_file() {
    for (name, architecture) in [("mixtral-fused", "llama"), ("qwen2-moe-fused", "qwen2moe")] {
        let source = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_str(&fs::read_to_string(golden(&format!("models/{name}/config.json"))).unwrap()).unwrap();
        (json["use_sliding_window"], json["sliding_window"]) = (false.into(), Value::Null);
        json.as_object_mut().unwrap().remove("layer_types");
        json.as_object_mut().unwrap().remove("norm_topk_prob");
        fs::write(source.path().join("config.json"), json.to_string()).unwrap();
        fs::copy(golden(&format!("models/{name}/model.safetensors")), source.path().join("model.safetensors")).unwrap();
        let expected = Model::open(source.path()).unwrap();
        let (folder, found, report) = written(expected.clone(), FileType::F32);
        let file = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
        assert_eq!(file.values["general.architecture"], gguf::Value::Text(architecture.into()));
        let floats = |model: &Model, name: &str| model.weights.get(name).unwrap().floats(name).unwrap();
        for layer in 0..2 {
            let of = |part: &str| floats(&expected, &format!("model.layers.{layer}.mlp.experts.{part}"));
            let (both, down) = (of("gate_up_proj"), of("down_proj"));
            let there = |part: &str| file.tensors[&format!("blk.{layer}.ffn_{part}_exps.weight")].floats("").unwrap();
            let halves = |half: usize| both.chunks(24 * 16).flat_map(|expert| expert[half * 12 * 16..(half + 1) * 12 * 16].to_vec()).collect::<Vec<f32>>();
            assert!(there("gate") == halves(0) && there("up") == halves(1) && there("down") == down, "{name} {layer}");
        }
        // What is read back has a tensor for each expert, and computes the same.
        assert!(found.weights.by_name.keys().any(|name| name.contains("experts.3.")));
        assert!(report.outputs[0].verified.how.contains("computes what the one computes"), "{}", report.outputs[0].verified.how);
        let out = folder.path().join("measured");
        let report = Pipeline::builder().export(Gguf { file_type: FileType::F32, ..Gguf::default() }).build().unwrap().run(expected.clone(), &out).unwrap();
        assert!(report.fidelity.is_some_and(|fidelity| fidelity.fidelity.cosine > 0.999_999));
    }
    let mut model = Model::open(golden("models/mixtral-fused")).unwrap();
    let name = "model.layers.0.mlp.experts.down_proj";
    let weight = model.weights.by_name[name].clone();
    let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; weight.elements() / 4 * 3 * 4] });
    model.weights.by_name.insert(name.into(), Weight::new(DType::F32, vec![3, weight.shape[1], weight.shape[2]], Encoding::Dense, bytes));
    let folder = tempfile::tempdir().unwrap();
    let error = export(model, folder.path(), FileType::F16).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("where there are 4 experts"), "{error}");
}

/// A head that is stored and tied is left out: llama.cpp takes the embedding.
#[test]
fn a_tied_head_is_not_written() {
    let (_source, mut model) = source("llama-grouped-tied");
    let embedding = model.weights.by_name["model.embed_tokens.weight"].clone();
    model.weights.by_name.insert("lm_head.weight".into(), embedding.clone());
    let (folder, _, report) = written(model.clone(), FileType::F32);
    let tensors = |folder: &tempfile::TempDir| gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap().tensors;
    assert!(!tensors(&folder).contains_key("output.weight"));
    assert!(report.notes.iter().all(|note| !note.contains("lm_head")), "{:?}", report.notes);
    // One that differs is what the model computes with.
    let zeros = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; embedding.elements() * 4] });
    model.weights.by_name.insert("lm_head.weight".into(), Weight::new(DType::F32, embedding.shape.clone(), Encoding::Dense, zeros));
    let (folder, _, _) = written(model, FileType::F32);
    assert!(tensors(&folder).contains_key("output.weight"));
}
