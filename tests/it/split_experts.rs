//! Experts in one tensor that are stored as separate layers.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::export::{FileType, Gguf};
use compress::pass::{Cast, Quantize, SplitExperts, Step};
use compress::{Model, Pipeline, Report};
use serde_json::json;

use crate::parity::differences;
use crate::properties::draws::golden;

pub fn tensors(folder: &Path) -> HashMap<String, Tensor> {
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
    const PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
    for (name, block, is_input_major, separate, parts) in [
        ("llama4", "model.layers.0.feed_forward", true, "model.layers.0.feed_forward", PARTS),
        ("llama4-plain", "model.layers.1.feed_forward", true, "model.layers.1.feed_forward", PARTS),
        ("qwen2-moe-fused", "model.layers.1.mlp", false, "model.layers.1.mlp", PARTS),
        // The names of the published files, which transformers 5 renames when it fuses experts.
        ("mixtral-fused", "model.layers.1.mlp", false, "model.layers.1.block_sparse_moe", ["w1", "w3", "w2"]),
    ] {
        let (folder, report) = written(name, vec![split()]).unwrap();
        let out = folder.path().join("out");
        let (before, after) = (tensors(&golden(name)), tensors(&out));
        let all = |part: &str| before[&format!("{block}.experts.{part}")].clone();
        let (gate_up, down) = (all("gate_up_proj"), all("down_proj"));
        assert!(after.keys().all(|name| !name.ends_with("experts.gate_up_proj") && !name.ends_with("experts.down_proj")), "{name}");
        assert!(block == separate || after.keys().all(|name| !name.contains(".mlp.")), "{name}");
        for expert in 0..4 {
            let rows = |all: &Tensor| {
                let one = all.get(expert).unwrap();
                if is_input_major { one.t().unwrap().contiguous().unwrap() } else { one }
            };
            let halves = rows(&gate_up).chunk(2, 0).unwrap();
            for (part, expected) in parts.into_iter().zip([halves[0].clone(), halves[1].clone(), rows(&down)]) {
                let found = &after[&format!("{separate}.experts.{expert}.{part}.weight")];
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
    assert!(experts.len() == 12 && experts.iter().all(|layer| layer.encoding == "int8 channel packed"), "{experts:?}");
    // transformers replaces experts of this family with linear layers in quantized folders.
    let fails = |note: &String| note.contains("leaves these uninitialized") || note.contains("transformers 5 fuses");
    assert!(!report.notes.iter().any(fails), "{:?}", report.notes);
    let opened = Model::open(folder.path().join("out")).unwrap();
    assert!(opened.weights.by_name.contains_key("model.layers.0.feed_forward.experts.3.up_proj.weight"));
}

/// If gate and up projections have as many outputs as inputs, the axes of down projections determine the
/// order.
#[test]
fn square_projections_have_the_order_of_the_other_tensor() {
    for is_input_major in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let numbers = |count: usize, shape: [usize; 3]| Tensor::arange(0f32, count as f32, &Device::Cpu).unwrap().reshape(&shape).unwrap();
        let (gate_up, down) = (numbers(72, [2, 6, 6]), numbers(36, if is_input_major { [2, 3, 6] } else { [2, 6, 3] }));
        let experts = "model.language_model.layers.0.mlp.experts";
        let stored = HashMap::from([(format!("{experts}.gate_up_proj"), gate_up.clone()), (format!("{experts}.down_proj"), down.clone())]);
        candle_core::safetensors::save(&stored, folder.path().join("model.safetensors")).unwrap();
        let config = json!({ "model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": { "hidden_size": 6 } });
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let (output, _) = written(folder.path().to_str().unwrap(), vec![split()]).unwrap();
        let found = tensors(&output.path().join("out"));
        let ordered = |all: &Tensor| if is_input_major { all.get(1).unwrap().t().unwrap().contiguous().unwrap() } else { all.get(1).unwrap() };
        let halves = ordered(&gate_up).chunk(2, 0).unwrap();
        for (part, expected) in [("gate_proj", &halves[0]), ("up_proj", &halves[1]), ("down_proj", &ordered(&down))] {
            let weight = &found[&format!("{experts}.1.{part}.weight")];
            assert_eq!(weight.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap(), "{is_input_major}: {part}");
        }
    }
}

#[test]
fn experts_that_cannot_be_split_are_refused() {
    for (name, reason) in [
        ("llama", "split-experts: the model has no experts in one tensor"),
        ("qwen2-moe", "split-experts: the model has no experts in one tensor"),
        ("gpt-oss", "the names of separate experts of model_type \"gpt_oss\" are not known; files for llama.cpp"),
        ("granite-moe", "the names of separate experts of model_type \"granitemoe\" are not known; files for llama.cpp"),
    ] {
        let error = written(name, vec![split()]).unwrap_err().to_string();
        assert!(error.contains(reason), "{name}: {error}");
    }
}

/// Plans, reports and notes of formats about passes after one that renames or replaces weights.
#[test]
fn records_of_passes_have_the_names_at_that_point() {
    let step = |value: serde_json::Value| serde_json::from_value::<Step>(value).unwrap();
    let quantize = || step(json!({ "quantize": { "scheme": "W8A16", "group_size": -1 } }));
    for (name, first) in [
        ("gemma3-vl", json!("extract-language-model")),
        ("mixtral-fused", json!("split-experts")),
        ("llama", json!({ "decompose": { "importance": "none" } })),
        ("llama", json!({ "prune-structured": { "dims": ["layers"], "amount": 1, "importance": "l1" } })),
    ] {
        let builder = || Pipeline::builder().pass(step(first.clone())).pass(quantize()).measure(false);
        let (folder, model) = (tempfile::tempdir().unwrap(), Model::open(golden(name)).unwrap());
        let plan = builder().build().unwrap().plan(&model).unwrap();
        let report = builder().build().unwrap().run(model.clone(), folder.path().join("out")).unwrap();
        let sizes: HashMap<&str, u64> = report.layers.iter().map(|layer| (layer.name.as_str(), layer.shape.iter().product::<usize>() as u64)).collect();
        assert!(plan.passes.iter().all(|pass| pass.parameters > 0), "{name}");
        for (pass, recorded) in plan.passes.iter().zip(&report.passes) {
            assert_eq!(pass.unselected, recorded.unselected, "{name}: {}", pass.name);
            assert!(pass.unselected.iter().all(|name| sizes.contains_key(name.as_str()) && !pass.selected.contains(name)), "{name}: {:?}", pass.unselected);
        }
        let quantized = &plan.passes[1];
        assert_eq!(quantized.parameters, quantized.selected.iter().map(|name| sizes[name.as_str()]).sum::<u64>(), "{name}");
        assert!(!quantized.unselected.is_empty(), "{name}");
        let decomposes = first.get("decompose").is_some();
        assert!(report.layers.iter().all(|layer| layer.bytes_before > 0 || decomposes), "{name}: {:?}", report.layers);
        // Weights of the input are identified by their names there.
        let copy = Pipeline::builder().measure(false).build().unwrap().run(model, folder.path().join("copy")).unwrap();
        assert_eq!((&report.model.blake3, report.size.before.nonzero), (&copy.model.blake3, copy.size.before.nonzero), "{name}");
    }
    let gguf = Gguf { file_type: FileType::Q4_0, ..Gguf::default() };
    let pipeline = Pipeline::builder().pass(quantize()).pass(step(json!("extract-language-model"))).export(gguf).measure(false).build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let notes = pipeline.run(Model::open(golden("mistral3")).unwrap(), folder.path().join("out")).unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("quantized twice")), "{notes:?}");
}
