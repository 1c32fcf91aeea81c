//! Experts in one tensor that are stored as separate layers.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::pass::{Cast, Quantize, SplitExperts, Step};
use compress::{Model, Pipeline, Report};
use serde_json::json;

use crate::parity::differences;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)
}

fn tensors(folder: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap()
}

/// The folder with the output `out` of these passes.
fn written(name: &str, passes: Vec<Step>) -> compress::Result<(tempfile::TempDir, Report)> {
    let folder = tempfile::tempdir().unwrap();
    let pipeline = passes.into_iter().fold(Pipeline::builder(), |builder, pass| builder.pass(pass));
    let report = pipeline.build()?.run(Model::open(golden(name))?, folder.path().join("out"))?;
    Ok((folder, report))
}

fn split() -> Step {
    SplitExperts::default().into()
}

/// The weights of each expert are slices of the tensor of all experts, which transformers splits in the same
/// way, and the outputs stay those of transformers.
#[test]
fn separate_experts_have_the_values_and_outputs_of_all_experts() {
    for (name, block, is_input_major) in [
        ("llama4", "model.layers.0.feed_forward", true),
        ("llama4-plain", "model.layers.1.feed_forward", true),
        ("qwen2-moe-fused", "model.layers.1.mlp", false),
    ] {
        let (folder, report) = written(name, vec![split()]).unwrap();
        let out = folder.path().join("out");
        let (before, after) = (tensors(&golden(name)), tensors(&out));
        let all = |part: &str| before[&format!("{block}.experts.{part}")].clone();
        let (gate_up, down) = (all("gate_up_proj"), all("down_proj"));
        assert!(after.keys().all(|name| !name.ends_with("experts.gate_up_proj") && !name.ends_with("experts.down_proj")), "{name}");
        for expert in 0..4 {
            let rows = |all: &Tensor| {
                let one = all.get(expert).unwrap();
                if is_input_major { one.t().unwrap().contiguous().unwrap() } else { one }
            };
            let halves = rows(&gate_up).chunk(2, 0).unwrap();
            for (part, expected) in [("gate_proj", halves[0].clone()), ("up_proj", halves[1].clone()), ("down_proj", rows(&down))] {
                let found = &after[&format!("{block}.experts.{expert}.{part}.weight")];
                assert_eq!(found.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap(), "{name}: {part} of {expert}");
            }
        }
        std::fs::copy(golden(name).join("golden.safetensors"), out.join("golden.safetensors")).unwrap();
        let worst = differences(&out, "golden.safetensors").unwrap();
        assert!(worst.len() == 1 && worst[0].1 < 1e-4, "{name}: {worst:?}");
        assert!(report.notes.iter().any(|note| note.contains("are stored as") && note.contains("linear layers")), "{:?}", report.notes);
    }
}

/// After other passes, and quantized by later ones, which leave experts in one tensor unchanged.
#[test]
fn later_passes_quantize_separate_experts() {
    let quantize: Quantize = serde_json::from_value(json!({ "scheme": "W8A16", "group_size": -1 })).unwrap();
    let cast: Cast = serde_json::from_value(json!({ "to": "bf16" })).unwrap();
    let is_expert = |name: &str| name.contains(".experts.");
    let (_folder, whole) = written("llama4", vec![quantize.clone().into()]).unwrap();
    assert!(whole.layers.iter().filter(|layer| is_expert(&layer.name)).all(|layer| layer.encoding == "f32"));
    assert!(whole.notes.iter().any(|note| note.contains("leaves these uninitialized")), "{:?}", whole.notes);
    let (folder, report) = written("llama4", vec![cast.into(), split(), quantize.into()]).unwrap();
    let experts: Vec<_> = report.layers.iter().filter(|layer| is_expert(&layer.name)).collect();
    assert!(experts.len() == 12 && experts.iter().all(|layer| layer.encoding == "int8 channel"), "{experts:?}");
    assert!(!report.notes.iter().any(|note| note.contains("leaves these uninitialized")), "{:?}", report.notes);
    let stored = tensors(&folder.path().join("out"));
    assert!(
        stored.contains_key("model.layers.0.feed_forward.experts.3.up_proj.weight_packed")
            || stored.contains_key("model.layers.0.feed_forward.experts.3.up_proj.weight")
    );
}

#[test]
fn experts_that_cannot_be_split_are_refused() {
    for (name, reason) in [
        ("llama", "split-experts: the model has no experts in one tensor"),
        ("qwen2-moe", "split-experts: the model has no experts in one tensor"),
        ("gpt-oss", "the names of separate experts of model_type \"gpt_oss\" are not known"),
        ("mixtral-fused", "the names of separate experts of model_type \"mixtral\" are not known"),
    ] {
        let error = written(name, vec![split()]).unwrap_err().to_string();
        assert!(error.contains(reason), "{name}: {error}");
    }
}
