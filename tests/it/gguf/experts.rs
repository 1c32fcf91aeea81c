//! Experts in separate tensors and stacked in one tensor.

use std::fs;

use compress::export::{FileType, Gguf};
use compress::pass::{Amount, Amounts, PruneStructured, PrunedPart, SplitExperts};
use compress::{Error, Model, Pipeline};
use compress_core::store::gguf;
use compress_core::store::{BlockSink, Bytes, DType, Encoding, Weight, WeightSource};
use serde_json::Value;

use super::importance::{Networks, tiny};
use super::{export, golden, rewritten, same_weights, source, written};

/// Qwen 3, which has experts in all layers in GGUF.
#[test]
fn experts_are_written_and_read() {
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
        assert!(error.contains(words), "`{error}` does not contain `{words}`");
    };
    refused(opened(&|json| json["norm_topk_prob"] = false.into()), "`norm_topk_prob` of false");
    refused(opened(&|json| json["mlp_only_layers"] = serde_json::json!([1])), "`mlp_only_layers` of [1]");
    for missing in ["1", "3"] {
        let (source, mut model) = opened(&|_| {});
        model.weights.by_name.remove(&format!("model.layers.0.mlp.experts.{missing}.up_proj.weight"));
        refused((source, model), &format!("experts.{missing}.up_proj.weight`: is missing"));
    }
    // The specified number of experts.
    let (_folder, model) = rewritten("mixtral", |values, _| drop(values.insert("llama.expert_count".into(), gguf::Value::Unsigned(3))));
    assert!(model.err().unwrap().to_string().contains("has the shape [4, 16, 12], but there are 3 experts"));
}

/// The stacked layout of transformers 5, compared with separate tensors.
#[test]
fn stacked_experts_are_written() {
    for (name, architecture) in [("mixtral-fused", "llama"), ("qwen2-moe-fused", "qwen2moe")] {
        let source = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_str(&fs::read_to_string(golden(&format!("models/{name}/config.json"))).unwrap()).unwrap();
        (json["use_sliding_window"], json["sliding_window"]) = (false.into(), Value::Null);
        json.as_object_mut().unwrap().remove("layer_types");
        json.as_object_mut().unwrap().remove("norm_topk_prob");
        if architecture == "qwen2moe" {
            // As saved by transformers 5.
            json["sliding_window"] = 0.into();
            json["num_local_experts"] = json.as_object_mut().unwrap().remove("num_experts").unwrap();
        }
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
        // The file reads back with separate tensors and the same outputs.
        assert!(found.weights.by_name.keys().any(|name| name.contains("experts.3.")));
        assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
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
    assert!(error.contains("but the model has 4 experts"), "{error}");
}

/// Files of Llama 4 have the same tensors, and are read back as stacked experts.
#[test]
fn separate_experts_of_input_major_families_are_written() {
    let (_source, expected) = source("llama4-plain");
    let out = tempfile::tempdir().unwrap();
    let run = Pipeline::builder().pass(SplitExperts::default()).export(Gguf { file_type: FileType::F32, ..Gguf::default() }).measure(false).build().unwrap();
    run.run(expected.clone(), out.path().join("out")).unwrap();
    let path = out.path().join("out/model.gguf");
    same_weights(&Model::open(&path).unwrap(), &expected, "llama4");
    let [ours, theirs] = [path, golden("gguf/llama4-plain.gguf")].map(|path| gguf::GgufFile::open(&path).unwrap().tensors);
    assert!(ours.keys().eq(theirs.keys()), "{:?}", ours.keys());
    for (name, weight) in &theirs {
        assert_eq!((&ours[name].shape, ours[name].floats(name).unwrap()), (&weight.shape, weight.floats(name).unwrap()), "{name}");
    }
}

/// After a pass that changes the graph and config.json.
#[test]
fn stacked_experts_are_written_after_passes_that_change_the_graph() {
    for (dims, amount, layers) in [(PrunedPart::Layers, Amount::Count(1), 1), (PrunedPart::Heads, Amount::fraction(0.5), 2)] {
        let folder = tempfile::tempdir().unwrap();
        let prune = PruneStructured { dims: vec![dims], amount: Some(Amounts::All(amount)), ..Default::default() };
        let builder = Pipeline::builder().pass(prune).export(Gguf { file_type: FileType::F32, ..Gguf::default() });
        let report = builder.build().unwrap().run(Model::open(golden("models/mixtral-fused")).unwrap(), folder.path().join("out")).unwrap();
        assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
        assert!(report.fidelity.is_some(), "{:?}", report.notes);
        let found = Model::open(folder.path().join("out/model.gguf")).unwrap();
        assert_eq!(found.config.get("num_hidden_layers"), Some(&Value::from(layers)));
    }
}

/// llama.cpp has no sliding windows for these families. They are not needed for texts of up to
/// `sliding_window` tokens.
#[test]
fn unsupported_windows_are_a_note() {
    let (folder, _) = source("mixtral");
    let path = folder.path().join("config.json");
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    json["sliding_window"] = 24.into();
    fs::write(path, json.to_string()).unwrap();
    let (_out, found, report) = written(Model::open(folder.path()).unwrap(), FileType::F32);
    assert!(report.notes.iter().any(|note| note.contains("a sliding window of 24 tokens")), "{:?}", report.notes);
    assert_eq!(found.config.get("sliding_window").and_then(Value::as_u64), None);
}

/// Modules have the same name in files, independent of the names in the checkpoint.
#[test]
fn experts_under_either_name_are_written() {
    let (_source, mut model) = source("mixtral");
    let router = "model.layers.1.block_sparse_moe.gate.weight";
    let weights = std::mem::take(&mut model.weights.by_name);
    let mut both = model.clone();
    both.weights.by_name.clone_from(&weights);
    model.weights.by_name = weights.into_iter().map(|(name, weight)| (name.replace("block_sparse_moe", "mlp"), weight)).collect();
    let (_folder, found, report) = written(model, FileType::F32);
    assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
    same_weights(&found, &both, "mixtral");
    let twice = both.weights.by_name[router].clone();
    both.weights.by_name.insert(router.replace("block_sparse_moe", "mlp"), twice);
    let folder = tempfile::tempdir().unwrap();
    let error = export(both, folder.path(), FileType::F16).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains(router) && error.contains("mlp.gate") && error.contains("`blk.1.ffn_gate_inp.weight`"), "{error}");
    assert!(!folder.path().join("out").exists());
}

/// A weight source that must not be read.
struct Unread;

impl WeightSource for Unread {
    fn visit(&self, _unit: usize, _sink: BlockSink) -> Result<(), Error> {
        Err(Error::tensor("lm_head.weight", "was read", ""))
    }
}

/// For a tied head, a plan states an upper bound of the size, and fidelity is measured with the head of
/// the file.
#[test]
fn a_tied_head_is_planned_without_reading_and_measured_as_written() {
    let folder = tempfile::tempdir().unwrap();
    let alone = tiny(folder.path(), Networks::Plain, 64);
    let embedding = alone.weights.by_name["model.embed_tokens.weight"].clone();
    let pipeline = |file_type| Pipeline::builder().export(Gguf { file_type, ..Gguf::default() }).force(true).build().unwrap();
    let with = |head: Weight| {
        let mut model = alone.clone();
        model.weights.by_name.insert("lm_head.weight".into(), head);
        model
    };
    let unread = with(Weight::new(DType::F32, embedding.shape.clone(), Encoding::Dense, std::sync::Arc::new(Unread)));
    let [most, least] = [&unread, &alone].map(|model| pipeline(FileType::F32).plan(model).unwrap());
    assert!(!most.output_exact && least.output_exact && most.output_bytes > least.output_bytes);
    assert!(pipeline(FileType::F32).run(unread, folder.path().join("out")).is_err());
    let measured = |model: &Model| pipeline(FileType::Q8_0).run(model.clone(), folder.path().join("out")).unwrap().fidelity.unwrap();
    assert_eq!(measured(&with(embedding.clone())), measured(&alone));
}

/// A stored head that is tied is not written: llama.cpp uses the embedding.
#[test]
fn a_tied_head_is_not_written() {
    let (_source, mut model) = source("llama-grouped-tied");
    let embedding = model.weights.by_name["model.embed_tokens.weight"].clone();
    model.weights.by_name.insert("lm_head.weight".into(), embedding.clone());
    let (folder, _, report) = written(model.clone(), FileType::F32);
    let tensors = |folder: &tempfile::TempDir| gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap().tensors;
    assert!(!tensors(&folder).contains_key("output.weight"));
    assert!(report.notes.iter().all(|note| !note.contains("lm_head")), "{:?}", report.notes);
    // A head that differs from the embedding is used by the model.
    let zeros = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; embedding.elements() * 4] });
    model.weights.by_name.insert("lm_head.weight".into(), Weight::new(DType::F32, embedding.shape.clone(), Encoding::Dense, zeros));
    let (folder, _, _) = written(model, FileType::F32);
    assert!(tensors(&folder).contains_key("output.weight"));
}
