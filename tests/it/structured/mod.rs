//! Structured pruning of model folders.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod indirect;
mod search;
mod targets;
mod whole;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::export::{Layout, Onnx, Safetensors};
use compress::pass::{
    ActivationRounding, Amount, Amounts, PruneStructured, PruneUnstructured, PrunedPart, PruningTarget, QuantizeDynamic, Repair, Scope, UnitImportance,
};
use compress::pipeline::Builder;
use compress::{Model, Pipeline, Report};
use compress_engine::data::{Data, synthetic};

use crate::common::{golden_model as golden, outputs as outputs_of};

fn half(dims: &[PrunedPart]) -> PruneStructured {
    let usual = PruneStructured { dims: dims.to_vec(), amount: Some(Amounts::All(Amount::fraction(0.5))), ..Default::default() };
    // Removed layers and experts have no widths to round.
    let widths = dims.iter().any(|part| part.unit().is_some());
    PruneStructured { round_to: if widths { 2 } else { usual.round_to }, ..usual }
}

struct Done {
    folder: tempfile::TempDir,
    report: Report,
}

fn run(name: &str, builder: Builder) -> Done {
    let folder = tempfile::tempdir().unwrap();
    let report = builder.build().unwrap().run(Model::open(golden(name)).unwrap(), folder.path().join("out")).unwrap();
    Done { folder, report }
}

impl Done {
    fn model(&self) -> Model {
        Model::open(self.folder.path().join("out")).unwrap()
    }

    fn config(&self, key: &str) -> u64 {
        self.model().config.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0)
    }

    fn described(&self) -> bool {
        !self.folder.path().join("out/graph.json").exists()
    }

    fn macs(&self) -> f64 {
        let compute = self.report.compute.as_ref().unwrap();
        compute.after.macs as f64 / compute.before.macs as f64
    }
}

/// Outputs on synthetic samples of the original.
fn outputs(model: &Model, like: &Model) -> BTreeMap<String, Tensor> {
    outputs_of(model, &synthetic(&like.graph().unwrap(), 3).unwrap().inputs)
}

fn error(done: &Done, name: &str, inputs: &BTreeMap<String, Tensor>) -> f64 {
    let original = Model::open(golden(name)).unwrap();
    let (before, after) = (outputs_of(&original, inputs), outputs_of(&done.model(), inputs));
    let (key, expected) = before.iter().next().unwrap();
    f64::from((&after[key] - expected).unwrap().sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap())
}

#[test]
fn config_json_is_rewritten_where_it_can_describe_the_result() {
    for (name, dims, keys) in [
        ("bert", vec![PrunedPart::Mlp], vec![("intermediate_size", 14)]),
        ("bert-masked-lm", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8), ("num_attention_heads", 1)]),
        ("roberta-sequence-classification", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8), ("num_attention_heads", 1)]),
        ("distilbert-sequence-classification", vec![PrunedPart::Heads, PrunedPart::Hidden, PrunedPart::Mlp], vec![("dim", 8), ("n_heads", 1)]),
        ("gpt2", vec![PrunedPart::Mlp], vec![("n_inner", 32)]),
        ("gpt2", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("n_embd", 8), ("n_head", 1)]),
        ("llama-grouped-tied", vec![PrunedPart::Heads], vec![("num_attention_heads", 2), ("num_key_value_heads", 1), ("head_dim", 4)]),
        ("mistral", vec![PrunedPart::Heads, PrunedPart::Mlp], vec![]),
        ("qwen2", vec![PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Hidden], vec![("hidden_size", 8)]),
        ("qwen3", vec![PrunedPart::Heads], vec![]),
        ("vit-image-classification", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8)]),
        ("resnet-basic", vec![PrunedPart::Channels], vec![]),
        ("resnet-bottleneck", vec![PrunedPart::Channels], vec![]),
        ("torchvision-mobilenet-v2", vec![PrunedPart::Channels], vec![]),
        ("bert", vec![PrunedPart::Layers], vec![("num_hidden_layers", 1)]),
        ("gpt2", vec![PrunedPart::Layers], vec![("n_layer", 1)]),
        ("llama", vec![PrunedPart::Layers], vec![("num_hidden_layers", 1)]),
        ("phi3", vec![PrunedPart::Heads, PrunedPart::Mlp], vec![("num_attention_heads", 2), ("num_key_value_heads", 1), ("intermediate_size", 12)]),
        ("gpt-neox", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("num_attention_heads", 1), ("hidden_size", 8)]),
        ("opt", vec![PrunedPart::Mlp], vec![("ffn_dim", 14)]),
        ("gemma2", vec![PrunedPart::Heads], vec![("num_attention_heads", 2), ("num_key_value_heads", 1)]),
        ("granite", vec![PrunedPart::Heads], vec![("num_attention_heads", 2), ("num_key_value_heads", 1)]),
        ("lfm2", vec![PrunedPart::Heads, PrunedPart::Mlp], vec![("num_attention_heads", 2), ("num_key_value_heads", 1), ("intermediate_size", 14)]),
        ("lfm2-biases", vec![PrunedPart::Layers], vec![]),
        ("granite-hybrid", vec![PrunedPart::Heads], vec![("num_attention_heads", 2), ("num_key_value_heads", 1)]),
        ("granite-hybrid", vec![PrunedPart::Layers], vec![]),
        ("granite-moe-shared", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8), ("num_attention_heads", 2)]),
        ("granite-hybrid-dense", vec![PrunedPart::Mlp], vec![("shared_intermediate_size", 10)]),
        ("nemotron-h", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("num_attention_heads", 2), ("num_key_value_heads", 1), ("hidden_size", 8)]),
        ("nemotron-h", vec![PrunedPart::Mlp], vec![("moe_intermediate_size", 6), ("moe_shared_expert_intermediate_size", 10), ("intermediate_size", 12)]),
        ("nemotron-h", vec![PrunedPart::Layers], vec![]),
        ("qwen3-next", vec![PrunedPart::Heads], vec![("num_attention_heads", 2), ("num_key_value_heads", 1)]),
        ("qwen3-next", vec![PrunedPart::Mlp], vec![("moe_intermediate_size", 6), ("shared_expert_intermediate_size", 10), ("intermediate_size", 12)]),
        ("qwen3_5", vec![PrunedPart::Mlp, PrunedPart::Hidden], vec![("hidden_size", 8), ("intermediate_size", 12)]),
        ("qwen3_5-moe", vec![PrunedPart::Layers], vec![]),
        ("smollm3", vec![PrunedPart::Layers], vec![("num_hidden_layers", 1)]),
        ("cohere2", vec![PrunedPart::Hidden], vec![("hidden_size", 8), ("head_dim", 4)]),
        ("deepseek-v3", vec![PrunedPart::Layers], vec![("num_hidden_layers", 1), ("first_k_dense_replace", 0)]),
        ("mixtral", vec![PrunedPart::Mlp], vec![("intermediate_size", 6)]),
        ("qwen2-moe", vec![PrunedPart::Mlp], vec![("moe_intermediate_size", 6), ("shared_expert_intermediate_size", 10)]),
        ("qwen3-moe", vec![PrunedPart::Mlp], vec![("moe_intermediate_size", 6), ("intermediate_size", 12)]),
        ("deepseek-v2-lite", vec![PrunedPart::Mlp, PrunedPart::Hidden], vec![("hidden_size", 8), ("moe_intermediate_size", 6), ("intermediate_size", 12)]),
        ("opt-narrow-embeddings", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8), ("num_attention_heads", 1)]),
        ("qwen3-moe", vec![PrunedPart::Heads], vec![("num_attention_heads", 2), ("num_key_value_heads", 1)]),
        (
            "mpnet-sequence-classification",
            vec![PrunedPart::Heads, PrunedPart::Hidden, PrunedPart::Mlp],
            vec![("hidden_size", 8), ("num_attention_heads", 2), ("intermediate_size", 14)],
        ),
        (
            "modernbert-masked-lm",
            vec![PrunedPart::Heads, PrunedPart::Hidden, PrunedPart::Mlp],
            vec![("hidden_size", 8), ("num_attention_heads", 1), ("intermediate_size", 14)],
        ),
        ("dinov2", vec![PrunedPart::Heads, PrunedPart::Hidden, PrunedPart::Mlp], vec![("hidden_size", 8), ("num_attention_heads", 1)]),
        ("dinov2-image-classification", vec![PrunedPart::Layers], vec![("num_hidden_layers", 1)]),
        ("deberta", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8), ("pooler_hidden_size", 8), ("num_attention_heads", 1)]),
        // All layers share one table, which belongs to the first layer of T5.
        ("mpnet", vec![PrunedPart::Layers], vec![("num_hidden_layers", 1)]),
        ("t5-encoder", vec![PrunedPart::Layers], vec![("num_layers", 1)]),
        ("t5-encoder", vec![PrunedPart::Heads], vec![("num_heads", 2), ("d_kv", 6)]),
        ("t5", vec![PrunedPart::Heads, PrunedPart::Mlp], vec![("num_heads", 2), ("d_kv", 6), ("d_ff", 14)]),
        ("t5", vec![PrunedPart::Layers], vec![("num_layers", 1), ("num_decoder_layers", 3)]),
        (
            "whisper",
            vec![PrunedPart::Heads, PrunedPart::Hidden, PrunedPart::Mlp],
            vec![("d_model", 8), ("encoder_attention_heads", 1), ("decoder_attention_heads", 1), ("encoder_ffn_dim", 14), ("decoder_ffn_dim", 10)],
        ),
        ("mt5-encoder", vec![PrunedPart::Hidden, PrunedPart::Mlp], vec![("d_model", 8), ("d_ff", 14)]),
        ("sentence-dense", vec![PrunedPart::Heads, PrunedPart::Hidden], vec![("hidden_size", 8), ("num_attention_heads", 1)]),
        ("torchvision-mobilenet-v3", vec![PrunedPart::Channels], vec![]),
        ("torchvision-efficientnet", vec![PrunedPart::Channels], vec![]),
    ] {
        let done = run(name, Pipeline::builder().pass(half(&dims)));
        assert!(done.described(), "{name} {dims:?}: {:?}", done.report.notes);
        for (key, value) in keys {
            assert_eq!(done.config(key), value, "{name} {dims:?}: {key}");
        }
        assert!(done.macs() < 0.95, "{name} {dims:?}: {}", done.macs());
        outputs(&done.model(), &Model::open(golden(name)).unwrap());
        if name == "dinov2" {
            // It is not part of the graph, but transformers loads it.
            let widths = ["mask_token", "cls_token"].map(|token| done.model().weights.by_name[&format!("embeddings.{token}")].shape.last().copied());
            assert_eq!(widths, [Some(8); 2]);
        }
    }
}

/// For some families, transformers requires that the number of heads divides the hidden size, even if
/// the head size is separate.
#[test]
fn head_counts_that_transformers_rejects_are_named() {
    let pass = || PruneStructured { amount: Some(Amounts::All(Amount::Count(2))), ..half(&[PrunedPart::Hidden]) };
    let refused = |name: &str| run(name, Pipeline::builder().pass(pass())).report.notes.iter().any(|note| note.contains("`num_attention_heads` 4, because"));
    assert!(refused("llama-grouped-tied") && !refused("qwen3"));
}

#[test]
fn graph_json_describes_the_rest() {
    for (name, dims) in [
        ("bert", PrunedPart::Heads),
        ("gpt2", PrunedPart::Heads),
        ("vit", PrunedPart::Heads),
        ("torchvision-resnet18", PrunedPart::Channels),
        ("gpt2-inverse-layer-scale", PrunedPart::Layers),
        ("dinov2-gated", PrunedPart::Mlp),
        ("siglip", PrunedPart::Heads),
        ("convnext", PrunedPart::Mlp),
        ("swin", PrunedPart::Heads),
        ("swin", PrunedPart::Hidden),
        // The convolutions would have to be as wide as the residual stream.
        ("lfm2", PrunedPart::Hidden),
        // The state space layers would have to be twice as wide as the residual stream.
        ("granite-hybrid-dense", PrunedPart::Hidden),
        // transformers would expect one `longrope` factor instead of three.
        ("phi3-longrope", PrunedPart::Hidden),
        // transformers would expect norms of heads of 4 elements instead of 8.
        ("phi-head-norms", PrunedPart::Hidden),
        // The pooler would have to be as wide as the residual stream.
        ("deberta-sequence-classification", PrunedPart::Hidden),
    ] {
        let done = run(name, Pipeline::builder().pass(half(&[dims])));
        let said = done.report.notes.iter().any(|note| note.contains("graph.json describes it"));
        // The first layer is removed, so the remaining layer has the scales of the second one.
        assert!(!done.described() && said, "{name}: {:?}", done.report.notes);
        outputs(&done.model(), &Model::open(golden(name)).unwrap());
        // The result can be pruned again.
        let again = tempfile::tempdir().unwrap();
        if dims != PrunedPart::Layers {
            let pass = PruneStructured { amount: Some(Amounts::All(Amount::Count(0))), ..half(&[]) };
            Pipeline::builder().pass(pass).build().unwrap().run(done.model(), again.path().join("out")).unwrap();
        }
    }
}

/// The first layer of ModernBERT has no normalization before attention, unlike the others. If it is
/// removed, no configuration describes the model.
#[test]
fn another_first_layer_keeps_its_normalization() {
    let pass = PruneStructured { amount: Some(Amounts::All(Amount::Count(2))), ..half(&[PrunedPart::Layers]) };
    let done = run("modernbert", Pipeline::builder().pass(pass));
    assert!(!done.described() && done.model().weights.by_name.contains_key("layers.0.attn_norm.weight"), "{:?}", done.report.notes);
    outputs(&done.model(), &Model::open(golden("modernbert")).unwrap());
}

/// A block whose input becomes as wide as its output does not gain a residual connection.
#[test]
fn equal_widths_do_not_add_a_residual_connection() {
    let sums = |model: &Model| model.graph().unwrap().nodes().iter().filter(|node| node.op.name() == "Add").count();
    for name in ["torchvision-mobilenet-v2", "torchvision-mobilenet-v3", "torchvision-efficientnet"] {
        let done = run(name, Pipeline::builder().pass(PruneStructured { round_to: 4, ..half(&[PrunedPart::Channels]) }));
        assert_eq!(sums(&done.model()), sums(&Model::open(golden(name)).unwrap()), "{name}");
        assert!(!done.described() || name != "torchvision-mobilenet-v2");
        outputs(&done.model(), &Model::open(golden(name)).unwrap());
    }
}

/// Modules of sentence-transformers keep their folders.
#[test]
fn modules_keep_their_folders() {
    let original = |name: &str| Model::open(golden(name)).unwrap();
    let worst = |a: &Model, b: &Model, like: &Model| {
        let (a, b) = (outputs(a, like), outputs(b, like));
        let distance = |name: &String| (&a[name] - &b[name]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        a.keys().map(distance).fold(0.0, f32::max)
    };
    let stored = |done: &Done, file: &str| candle_core::safetensors::load(done.folder.path().join("out").join(file), &Device::Cpu);
    for (name, folders) in [("sentence-dense", vec!["2_Dense", "3_LayerNorm", "4_Dense"]), ("sentence-dense-of-tokens", vec!["1_Dense_bin", "3_Dense_bin"])] {
        let done = run(name, Pipeline::builder());
        assert!(folders.iter().all(|folder| stored(&done, &format!("{folder}/model.safetensors")).is_ok()));
        assert!(stored(&done, "model.safetensors").unwrap().keys().all(|name| !name.contains('/')));
        assert!(!folders.iter().any(|folder| done.folder.path().join("out").join(folder).join("pytorch_model.bin").exists()));
        assert_eq!(worst(&done.model(), &original(name), &original(name)), 0.0);
        assert_eq!(done.report.outputs.len(), 1 + folders.len());

        let pruned = run(name, Pipeline::builder().pass(PruneUnstructured::default()));
        let layer = pruned.report.layers.iter().find(|layer| layer.name == format!("{}/linear.weight", folders[0])).unwrap();
        assert!(layer.zeros > 0);
        let sparse = Pipeline::builder().pass(PruneUnstructured::default()).export(Safetensors::with_layout(Layout::Sparse));
        assert_eq!(worst(&run(name, sparse).model(), &pruned.model(), &original(name)), 0.0);

        let rounded = run(name, Pipeline::builder().pass(QuantizeDynamic::default()));
        let file = stored(&rounded, &format!("{}/model.safetensors", folders[0])).unwrap();
        assert!(file["linear.weight"].dtype() == DType::F32 && !file.contains_key("linear.weight_scale"));
        assert!(rounded.report.notes.iter().any(|note| note.contains("sentence-transformers supports only floats")), "{:?}", rounded.report.notes);
        let config = rounded.model().config.render().unwrap() + &std::fs::read_to_string(rounded.folder.path().join("out/config.json")).unwrap();
        assert!(config.contains("int-quantized") && !config.contains("_Dense"));
        assert!(worst(&rounded.model(), &original(name), &original(name)) < 0.5);
    }
    let done = run("sentence-dense", Pipeline::builder().pass(half(&[PrunedPart::Heads, PrunedPart::Hidden])));
    let says = |done: &Done, folder: &str, widths: &[&str]| {
        let config = std::fs::read_to_string(done.folder.path().join("out").join(folder).join("config.json")).unwrap();
        assert!(widths.iter().all(|width| config.contains(width)), "{config}");
    };
    says(&done, "1_Pooling", &["\"embedding_dimension\": 8"]);
    says(&done, "2_Dense", &["\"in_features\": 8", "\"out_features\": 6"]);
    says(&done, "3_LayerNorm", &["\"dimension\": 6"]);
    for (name, folder, width) in
        [("sentence-mean", "1_Pooling", "\"word_embedding_dimension\": 8"), ("sentence-dense-of-tokens", "2_Pooling", "\"embedding_dimension\": 10")]
    {
        says(&run(name, Pipeline::builder().pass(half(&[PrunedPart::Hidden]))), folder, &[width]);
    }
    let checks = crate::common::work(|work| compress::pipeline::verify(&done.folder.path().join("out"), work)).unwrap();
    assert!(checks.iter().all(|check| check.ok));
}

/// The written modules are evaluated: floats without quantized activations.
#[test]
fn modules_are_measured_as_they_are_written() {
    let measured = |activations| {
        let pass = QuantizeDynamic { activations, targets: vec!["2_Dense/linear.weight".parse().unwrap()], ..Default::default() };
        let done = run("sentence-dense", Pipeline::builder().pass(pass));
        assert!(done.report.notes.iter().any(|note| note.contains("sentence-transformers supports only floats")), "{:?}", done.report.notes);
        serde_json::to_value(done.report.fidelity.unwrap().fidelity).unwrap()
    };
    assert_eq!(measured(ActivationRounding::Token), measured(ActivationRounding::None));
}

/// Checkpoints of T5 may contain the shared embedding under several names.
#[test]
fn an_embedding_with_two_names_is_stored_once() {
    for (name, factor) in [("encoder.embed_tokens.weight", 1.0), ("decoder.embed_tokens.weight", 1.0), ("encoder.embed_tokens.weight", 2.0)] {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (folder.path().join("in"), folder.path().join("out"));
        std::fs::create_dir(&input).unwrap();
        std::fs::copy(golden("t5-encoder").join("config.json"), input.join("config.json")).unwrap();
        let mut tensors = candle_core::safetensors::load(golden("t5-encoder").join("model.safetensors"), &Device::Cpu).unwrap();
        tensors.insert(name.to_owned(), (&tensors["shared.weight"] * factor).unwrap());
        candle_core::safetensors::save(&tensors, input.join("model.safetensors")).unwrap();
        let pipeline = Pipeline::builder().pass(half(&[PrunedPart::Hidden])).build().unwrap();
        let done = pipeline.run(Model::open(&input).unwrap(), &out);
        if factor == 1.0 {
            let note = format!("`{name}` is tied to `shared.weight`");
            assert!(done.unwrap().notes.iter().any(|said| said.contains(&note)));
            let written = Model::open(&out).unwrap();
            assert!(!written.weights.by_name.contains_key(name) && written.weights.get("shared.weight").unwrap().shape[1] == 8);
            outputs(&written, &Model::open(golden("t5-encoder")).unwrap());
        } else {
            let error = done.unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("with different values"), "{error}");
        }
    }
}

#[test]
fn an_amount_of_zero_changes_nothing() {
    let pass = PruneStructured { amount: Some(Amounts::All(Amount::fraction(0.0))), ..half(&[]) };
    let done = run("llama", Pipeline::builder().pass(pass));
    let read = |path: &Path| std::fs::read(path.join("model.safetensors")).unwrap();
    assert_eq!(read(&done.folder.path().join("out")), read(&golden("llama")));
    assert!(done.report.notes.iter().any(|note| note.contains("no units were removed")));
}

/// The note names the option that allows no smaller width, or the next one.
#[test]
fn units_that_are_not_removed_are_explained() {
    for (round_to, amount, parts) in [
        (32, 0.5, ["(mlp) has 24 units, and no smaller width is possible with `round_to: 32`: lower `round_to`", "warning: prune-structured: no units"]),
        (8, 0.1, ["the amount is too small, because the next width of", "(mlp) below 24 is 16 with `round_to: 8`: increase `amount`, or lower `round_to`"]),
    ] {
        let pass = PruneStructured { round_to, amount: Some(Amounts::All(Amount::fraction(amount))), ..half(&[PrunedPart::Mlp]) };
        let notes = run("llama", Pipeline::builder().pass(pass)).report.notes;
        let note = notes.iter().find(|note| note.contains("no units were removed")).unwrap_or_else(|| panic!("{notes:?}"));
        assert!(parts.iter().all(|part| note.contains(part)), "{note}");
    }
}

#[test]
fn passes_compose_and_the_result_is_exported() {
    for name in ["bert", "llama", "vit", "torchvision-resnet18"] {
        let builder = Pipeline::builder().pass(PruneUnstructured::default()).pass(half(&[])).pass(QuantizeDynamic::default()).export(Onnx::default());
        let done = run(name, builder.export(Safetensors::default()));
        assert!(done.folder.path().join("out/model.onnx").exists());
        assert_eq!(done.report.passes.len(), 3);
        outputs(&done.model(), &Model::open(golden(name)).unwrap());
    }
}

#[test]
fn the_same_options_yield_the_same_bytes() {
    let bytes = || {
        let done = run("resnet-basic", Pipeline::builder().pass(half(&[PrunedPart::Channels])).threads(3));
        std::fs::read(done.folder.path().join("out/model.safetensors")).unwrap()
    };
    assert_eq!(bytes(), bytes());
}

#[test]
fn targets_are_met_and_a_global_ranking_yields_different_widths() {
    for (name, target) in [("torchvision-resnet18", 0.5), ("torchvision-mobilenet-v2", 0.6)] {
        for scope in [Scope::Tensor, Scope::Global] {
            let pass = PruneStructured { target: Some(PruningTarget::Macs(target)), scope: Some(scope), round_to: 1, ..Default::default() };
            let done = run(name, Pipeline::builder().pass(pass));
            assert!((done.macs() - target).abs() < 0.05, "{name} {scope:?}: {}", done.macs());
        }
    }
    let pass = PruneStructured { target: Some(PruningTarget::Params(0.7)), ..half(&[]) };
    let done = run("llama", Pipeline::builder().pass(PruneStructured { amount: None, ..pass }));
    let part = done.report.size.after.parameters as f64 / done.report.size.before.parameters as f64;
    assert!((part - 0.7).abs() < 0.06, "{part}");
}

/// Pixels with labels for a network of 3 x 32 x 32.
fn pictures(folder: &Path) -> Data {
    let values: Vec<f32> = (0..16 * 3 * 32 * 32u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32).collect();
    let pixels = Tensor::from_vec(values, (16, 3, 32, 32), &Device::Cpu).unwrap();
    let labels = Tensor::from_vec((0..16i64).map(|i| i % 5).collect::<Vec<_>>(), 16, &Device::Cpu).unwrap();
    let path = folder.join("pictures.safetensors");
    candle_core::safetensors::save(&[("pixel_values".to_owned(), pixels), ("labels".to_owned(), labels)].into(), &path).unwrap();
    Data::at(&path)
}

#[test]
fn data_ranks_and_repairs() {
    let folder = tempfile::tempdir().unwrap();
    let data = pictures(folder.path());
    let name = "torchvision-resnet18";
    for importance in [UnitImportance::Taylor, UnitImportance::Activation] {
        let pass = PruneStructured { importance, ..half(&[PrunedPart::Channels]) };
        run(name, Pipeline::builder().calibration(data.clone()).pass(pass));
    }
    let seen = candle_core::safetensors::load(folder.path().join("pictures.safetensors"), &Device::Cpu).unwrap().into_iter().collect();
    let with = |repair| {
        error(&run(name, Pipeline::builder().calibration(data.clone()).pass(PruneStructured { repair, ..half(&[PrunedPart::Channels]) })), name, &seen)
    };
    let [none, bias, least] = [Repair::None, Repair::Bias, Repair::LeastSquares].map(with);
    assert!(least < bias && bias < none, "{none} without repair, {bias} with means, {least} with least squares");
}

/// Only `taylor` reads labels of calibration data.
#[test]
fn labels_of_calibration_arrays_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    pictures(folder.path());
    let path = folder.path().join("pictures.safetensors");
    let mut arrays = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let count = arrays.values().next().unwrap().dim(0).unwrap();
    arrays.insert("labels".to_owned(), Tensor::full(0.5f32, count, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&arrays, &path).unwrap();
    let attempt = |importance: UnitImportance| {
        let pass = PruneStructured { importance, ..half(&[PrunedPart::Channels]) };
        let pipeline = Pipeline::builder().calibration(Data::at(&path)).pass(pass).build().unwrap();
        pipeline.run(Model::open(golden("torchvision-resnet18")).unwrap(), folder.path().join(format!("{importance:?}")))
    };
    attempt(UnitImportance::Activation).unwrap();
    let error = attempt(UnitImportance::Taylor).unwrap_err().to_string();
    assert!(error.contains("row 0 of array `labels` contains 0.5"), "{error}");
}

/// A repair on few samples does not overfit: the error on other tokens never increases.
#[test]
fn a_repair_by_few_samples_does_not_hurt_other_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ids.safetensors");
    let inputs = |seed: u64, rows: usize| {
        let mut random = fastrand::Rng::with_seed(seed);
        let ids = Tensor::from_vec((0..16 * rows).map(|_| random.i64(0..48)).collect::<Vec<_>>(), (rows, 16), &Device::Cpu).unwrap();
        BTreeMap::from([("attention_mask".to_owned(), ids.ones_like().unwrap()), ("input_ids".to_owned(), ids)])
    };
    for seed in 0..8 {
        candle_core::safetensors::save(&inputs(seed, 2).into_iter().collect(), &path).unwrap();
        let (data, others) = (Data { batch_size: Some(1), ..Data::at(&path) }, inputs(seed + 100, 64));
        let [none, least] = [Repair::None, Repair::LeastSquares].map(|repair| {
            let pass = PruneStructured { importance: UnitImportance::Activation, repair, ..half(&[PrunedPart::Mlp]) };
            error(&run("llama", Pipeline::builder().calibration(data.clone()).pass(pass)), "llama", &others)
        });
        assert!(least <= none, "seed {seed}: {none} without repair, {least} with");
    }
}

/// Random tokens for the tiny Llama.
fn tokens(folder: &Path) -> Data {
    let ids = Tensor::from_vec((0..96i64).map(|i| i * 7 % 40).collect::<Vec<_>>(), (12, 8), &Device::Cpu).unwrap();
    let path = folder.join("ids.safetensors");
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(), &path).unwrap();
    Data::at(&path)
}

/// The mean gradient of a batch of equal samples is that of one of them, so the batch counts as often.
#[test]
fn batches_count_by_their_samples() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [7, 7, 7, 7, 11].iter().flat_map(|step| (0..8i64).map(move |at| (at + 3) * step % 40)).collect();
    let ids = Tensor::from_vec::<_, i64>(rows, (5, 8), &Device::Cpu).unwrap();
    let path = folder.path().join("ids.safetensors");
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(), &path).unwrap();
    let [four, one] = [4, 1].map(|batch_size| {
        let data = Data { batch_size: Some(batch_size), ..Data::at(&path) };
        let pass = PruneStructured { importance: UnitImportance::Taylor, ..half(&[PrunedPart::Mlp]) };
        let done = run("llama", Pipeline::builder().calibration(data).pass(pass));
        std::fs::read(done.folder.path().join("out/model.safetensors")).unwrap()
    });
    assert!(four == one);
}

#[test]
fn transformers_are_ranked_by_activation_if_there_are_samples() {
    let folder = tempfile::tempdir().unwrap();
    let blind = |report: &Report| report.notes.iter().any(|note| note.contains("can severely damage a transformer"));
    let chosen = |done: &Done| {
        let written = &done.report.recipe["passes"][0]["prune-structured"]["importance"];
        assert_eq!(written, &done.report.passes[0].options["importance"]);
        written.as_str().unwrap().to_owned()
    };
    let pass = || half(&[PrunedPart::Mlp]);
    let bytes = |done: &Done| std::fs::read(done.folder.path().join("out/model.safetensors")).unwrap();
    let calibrated = |importance| run("llama", Pipeline::builder().calibration(tokens(folder.path())).pass(PruneStructured { importance, ..pass() }));
    let (auto, activation) = (calibrated(UnitImportance::Auto), calibrated(UnitImportance::Activation));
    assert_eq!(chosen(&auto), "activation");
    assert!(bytes(&auto) == bytes(&activation) && !blind(&auto.report));
    // Training data can be used instead, and the recipe states how many samples were used.
    let trained = run("llama", Pipeline::builder().train(tokens(folder.path())).pass(pass()));
    assert_eq!((chosen(&trained).as_str(), &trained.report.recipe["data"]["calibration"]["samples"]), ("activation", &serde_json::json!(11)));
    // Without samples, units are ranked by weights; the plan and the report state the risk.
    let alone = run("llama", Pipeline::builder().pass(pass()));
    assert_eq!(chosen(&alone), "l1");
    assert!(blind(&alone.report), "{:?}", alone.report.notes);
    let plan = Pipeline::builder().pass(pass()).build().unwrap().plan(&Model::open(golden("llama")).unwrap()).unwrap();
    assert!(plan.notes.iter().any(|note| note.contains("can severely damage a transformer")), "{:?}", plan.notes);
    let network = run("torchvision-resnet18", Pipeline::builder().calibration(pictures(folder.path())).pass(half(&[PrunedPart::Channels])));
    assert_eq!(chosen(&network), "l1");
    assert!(!blind(&network.report));
}
