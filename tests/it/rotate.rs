//! Rotations of the residual stream and of the values of attention heads.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use candle_core::{Device, Tensor};
use compress::recipe::Recipe;
use compress::{Model, Pipeline, Report};
use serde_json::{Value, json};

use crate::parity::differences;
use crate::properties::draws::{Draw, golden, outputs};
use crate::split_experts::tensors;

/// The folder with the output `out` of these passes.
fn written(model: &Path, seed: u64, passes: Value) -> compress::Result<(tempfile::TempDir, Report)> {
    let folder = tempfile::tempdir().unwrap();
    let recipe = json!({ "model": model, "seed": seed, "passes": passes }).to_string();
    let recipe = Recipe::parse(&recipe, Path::new("recipe.yaml"))?;
    let report = Pipeline::builder().recipe(&recipe).threads(2).build()?.run(Model::open(model)?, folder.path().join("out"))?;
    Ok((folder, report))
}

fn rotate(options: Value) -> Value {
    json!([{ "rotate": options }])
}

/// Families with RMS normalizations before each layer: grouped queries, biases, fused projections, offsets of
/// normalizations, multipliers, experts, latent attention, state spaces.
#[test]
fn outputs_are_those_of_transformers() {
    for (name, untie) in [
        ("llama", false),
        ("llama-biases", false),
        ("llama-grouped-tied", true),
        ("gemma", true),
        ("granite", true),
        ("mistral", false),
        ("phi3", false),
        ("phi3-tied-partial", true),
        ("qwen2", true),
        ("qwen2-moe", false),
        ("qwen3", true),
        ("deepseek-v3", false),
        ("lfm2", true),
        ("mamba2-tied", true),
        ("nemotron-h", false),
    ] {
        let (folder, report) = written(&golden(name), 3, rotate(json!({ "untie": untie }))).unwrap_or_else(|error| panic!("{name}: {error}"));
        let out = folder.path().join("out");
        let (before, after) = (tensors(&golden(name)), tensors(&out));
        let table = before.keys().find(|name| name.ends_with("embed_tokens.weight") || name.ends_with("embeddings.weight")).unwrap();
        let changed = |name: &str| (&before[name] - &after[name]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(changed(table) > 1e-3, "{name}: `{table}` is not rotated");
        let untied = after.len() - before.len();
        assert_eq!(untied, usize::from(untie), "{name}: {:?}", after.keys());
        assert_eq!(report.notes.iter().any(|note| note.contains("is no longer tied to")), untie, "{name}: {:?}", report.notes);
        std::fs::copy(golden(name).join("golden.safetensors"), out.join("golden.safetensors")).unwrap();
        let worst = differences(&out, "golden.safetensors").unwrap();
        assert!(worst.len() == 1 && worst[0].1 < 1e-4, "{name}: {worst:?}");
        // The fidelity compares logits only, because hidden states have another basis.
        let fidelity = report.fidelity.unwrap().fidelity;
        assert!(fidelity.cosine > 0.99999 && fidelity.not_compared.contains_key("last_hidden_state"), "{name}: {fidelity:?}");
    }
}

/// The factors of normalizations become neutral, also with the offset of Gemma, and the head has its own
/// tensor.
#[test]
fn factors_of_normalizations_are_folded_and_the_head_is_untied() {
    for (name, neutral) in [("llama-grouped-tied", 1.0), ("gemma", 0.0)] {
        let (folder, _) = written(&golden(name), 3, rotate(json!({ "untie": true }))).unwrap();
        let out = folder.path().join("out");
        let after = tensors(&out);
        let norms = after.iter().filter(|(name, _)| name.contains("norm"));
        for (norm, factors) in norms {
            assert!(factors.to_vec1::<f32>().unwrap().iter().all(|factor| *factor == neutral), "{name}: `{norm}`");
        }
        let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["tie_word_embeddings"], false, "{name}");
        let [table, head] = ["model.embed_tokens.weight", "lm_head.weight"].map(|name| after[name].flatten_all().unwrap().to_vec1::<f32>().unwrap());
        assert!(table.len() == head.len() && table != head, "{name}");
    }
}

/// Without `residual`, a tied model stays tied, and only values and the layers that read them change.
#[test]
fn values_of_heads_are_rotated_without_the_residual_stream() {
    let (folder, _) = written(&golden("llama-grouped-tied"), 3, rotate(json!({ "parts": ["heads"] }))).unwrap();
    let out = folder.path().join("out");
    let (before, after) = (tensors(&golden("llama-grouped-tied")), tensors(&out));
    for (name, weight) in &before {
        let is_equal = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap() == after[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(is_equal, !name.contains("v_proj") && !name.contains("o_proj"), "{name}");
    }
    std::fs::copy(golden("llama-grouped-tied").join("golden.safetensors"), out.join("golden.safetensors")).unwrap();
    assert!(differences(&out, "golden.safetensors").unwrap()[0].1 < 1e-4);
}

#[test]
fn the_seed_determines_the_rotation() {
    let weights = |seed: u64| {
        let (folder, _) = written(&golden("llama"), seed, rotate(json!({}))).unwrap();
        std::fs::read(folder.path().join("out/model.safetensors")).unwrap()
    };
    let first = weights(1);
    assert!(first == weights(1) && first != weights(2));
}

/// A graph that `config.json` does not describe is rewritten, and passes before and after the rotation apply.
#[test]
fn rotations_combine_with_other_passes() {
    let draw = Draw::family(1, "llama-grouped-tied");
    let inputs = draw.samples(3, 5);
    let decompose = json!({ "decompose": { "rank": 0.9, "importance": "none", "targets": ["*mlp*"] } });
    let run = |passes: Value| draw.run(passes, json!(["safetensors"]), |builder| builder).unwrap().path;
    let [before, after] = [json!([decompose]), json!([decompose, { "rotate": { "untie": true } }])].map(|passes| outputs(&run(passes), &inputs));
    let worst = (&before["logits"] - &after["logits"]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    assert!(worst < 1e-4, "{worst}");
    for scheme in ["W8A8", "W4A8", "FP8-DYNAMIC", "NVFP4A16"] {
        let path = run(json!([{ "rotate": { "untie": true } }, { "quantize": { "scheme": scheme } }]));
        let model = Model::open(&path).unwrap();
        let head = model.weights.get("lm_head.weight").unwrap();
        assert_eq!(head.encoding, compress_core::store::Encoding::Dense, "{scheme}: the untied head is a head");
        let logits = &outputs(&path, &inputs)["logits"];
        assert!(logits.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|value| value.is_finite()), "{scheme}");
    }
}

/// A feature of the residual stream with large values determines the scales of int8 activations; a rotation
/// distributes it over all features.
#[test]
fn a_rotation_reduces_the_error_of_rounded_activations() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("llama").join("config.json"), folder.path().join("config.json")).unwrap();
    let mut weights = tensors(&golden("llama"));
    let table = weights["model.embed_tokens.weight"].clone();
    let factors: Vec<f32> = (0..table.dims()[1]).map(|feature| if feature == 3 { 60.0 } else { 1.0 }).collect();
    let factors = Tensor::new(factors, &Device::Cpu).unwrap();
    weights.insert("model.embed_tokens.weight".into(), table.broadcast_mul(&factors).unwrap());
    candle_core::safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
    let quality = |passes: Value| written(folder.path(), 3, passes).unwrap().1.fidelity.unwrap().fidelity.sqnr_db.unwrap();
    let quantize = json!({ "quantize": { "scheme": "W8A8" } });
    let [plain, rotated] = [json!([quantize]), json!([{ "rotate": {} }, quantize])].map(quality);
    assert!(rotated > plain + 3.0, "{rotated} instead of {plain}");
}

#[test]
fn models_that_cannot_be_rotated_are_refused() {
    let both = json!({ "untie": true });
    for (name, options, reason) in [
        ("llama-grouped-tied", json!({}), "set `untie: true`, which stores it separately"),
        ("llama", both.clone(), "the output head is not tied to the embedding table: remove the option"),
        ("llama", json!({ "parts": ["heads"], "untie": true }), "has no effect without the rotation of the residual stream"),
        ("olmo2", json!({}), "the factors of a normalization after a layer cannot be folded"),
        ("gemma2", both.clone(), "the factors of a normalization after a layer cannot be folded"),
        ("gpt2", both.clone(), "subtracts the mean of all features"),
        ("phi", json!({}), "subtracts the mean of all features"),
        ("mixtral-fused", json!({}), "use `split-experts` first"),
        ("bert", json!({}), "the model has no output head that computes logits from each token"),
        ("deepseek-v3", json!({ "parts": ["heads"] }), "the values of no attention layer can be rotated"),
    ] {
        let error = written(&golden(name), 3, rotate(options)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(reason), "{name}: {error}");
    }
    let error = written(&golden("llama"), 3, json!([{ "quantize": { "scheme": "W8A16" } }, { "rotate": {} }])).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("but rotate needs floats"), "{error}");
}

/// A matrix that the graph does not use, such as one of a module for multi-token prediction, may read the
/// residual stream.
#[test]
fn matrices_outside_the_graph_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("llama").join("config.json"), folder.path().join("config.json")).unwrap();
    let mut weights = tensors(&golden("llama"));
    weights.insert("model.layers.2.eh_proj.weight".into(), Tensor::zeros((16, 32), candle_core::DType::F32, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
    let error = written(folder.path(), 3, rotate(json!({}))).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`model.layers.2.eh_proj.weight`") && error.contains("is not part of the graph"), "{error}");
    assert!(written(folder.path(), 3, rotate(json!({ "parts": ["heads"] }))).is_ok());
}
