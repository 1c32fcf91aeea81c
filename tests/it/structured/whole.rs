//! Removal of whole layers and whole experts.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::export::Onnx;
use compress::pass::{Amount, Amounts, PruneStructured, PrunedPart, Repair, UnitImportance};
use compress::{Model, Pipeline};
use compress_engine::exec::{Executor, Parameters, Residence};
use compress_engine::model::Config;
use serde_json::json;

use super::{golden, half, outputs, run, tokens};

#[test]
fn layers_are_removed_by_influence() {
    let folder = tempfile::tempdir().unwrap();
    let pass = PruneStructured { amount: Some(Amounts::All(Amount::Count(1))), ..half(&[PrunedPart::Layers]) };
    let done = run("llama", Pipeline::builder().calibration(tokens(folder.path())).pass(pass));
    let influence = done.report.passes[0].details["layers"]["influence"].as_array().unwrap().clone();
    assert_eq!(influence.len(), 2);
    let gone = done.report.passes[0].details["layers"]["gone"][0].as_u64().unwrap() as usize;
    assert!(influence[gone].as_f64() <= influence[1 - gone].as_f64());
    assert!(done.described());
    let has_note = |start: &str| done.report.notes.iter().any(|note| note.starts_with(start));
    assert!(has_note("passes use the first 11 calibration samples") && !has_note("no pass uses"), "{:?}", done.report.notes);
}

/// The plan removes the first of two layers. If they have different dtypes, it is an estimate, because
/// samples can rank the second one last.
#[test]
fn layers_of_different_dtypes_are_removed_by_influence() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = candle_core::safetensors::load(golden("llama").join("model.safetensors"), &Device::Cpu).unwrap();
    for (name, tensor) in &mut tensors {
        if name.starts_with("model.layers.0.") {
            *tensor = tensor.to_dtype(DType::BF16).unwrap();
        } else if ["model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"].contains(&name.as_str()) {
            *tensor = tensor.zeros_like().unwrap();
        }
    }
    let input = folder.path().join("in");
    std::fs::create_dir(&input).unwrap();
    candle_core::safetensors::save(&tensors, input.join("model.safetensors")).unwrap();
    std::fs::copy(golden("llama").join("config.json"), input.join("config.json")).unwrap();
    let pipeline = || {
        let pass = PruneStructured { amount: Some(Amounts::All(Amount::Count(1))), ..half(&[PrunedPart::Layers]) };
        Pipeline::builder().calibration(tokens(folder.path())).pass(pass).build().unwrap()
    };
    assert!(pipeline().plan(&Model::open(&input).unwrap()).unwrap().output_estimated);
    assert!(!pipeline().plan(&Model::open(golden("llama")).unwrap()).unwrap().output_estimated);
    let out = folder.path().join("out");
    let report = pipeline().run(Model::open(&input).unwrap(), &out).unwrap();
    assert_eq!(report.passes[0].details["layers"]["gone"], json!([1]));
    let weights = Model::open(&out).unwrap().weights;
    assert_eq!(weights.get("model.layers.0.mlp.up_proj.weight").unwrap().dtype, crate::common::DType::BF16);
}

#[test]
fn amounts_of_layers_and_of_units_apply_together() {
    let amounts = Amounts::Each(BTreeMap::from([(PrunedPart::Layers, Amount::Count(1)), (PrunedPart::Mlp, Amount::fraction(0.5))]));
    let done = run("bert", Pipeline::builder().pass(PruneStructured { amount: Some(amounts), round_to: 2, ..half(&[]) }));
    assert_eq!((done.config("num_hidden_layers"), done.config("intermediate_size")), (1, 14));
}

/// A part that keeps all units is noted, unless the amount is 0.
#[test]
fn parts_without_removed_units_are_noted() {
    let notes = |mlp: f64| {
        let amounts = Amounts::Each([(PrunedPart::Heads, Amount::fraction(0.5)), (PrunedPart::Mlp, Amount::fraction(mlp))].into());
        run("llama", Pipeline::builder().pass(PruneStructured { amount: Some(amounts), ..PruneStructured::default() })).report.notes
    };
    let unchanged = "warning: prune-structured: no units of mlp were removed: the amount is too small, because the next width of";
    assert!(notes(0.05).iter().any(|note| note.starts_with(unchanged)));
    for mlp in [0.0, 0.5] {
        assert!(!notes(mlp).iter().any(|note| note.contains("no units")), "{mlp}");
    }
}

/// Per-layer entries of `config.json` of DINOv2.
#[test]
fn stages_of_a_backbone_follow_its_layers() {
    let pass = || PruneStructured { amount: Some(Amounts::All(Amount::Count(1))), ..half(&[PrunedPart::Layers]) };
    // Without data, the first of two layers is removed.
    let done = run("dinov2", Pipeline::builder().pass(pass()));
    let config = done.model().config;
    let of = |key: &str| config.get(key).cloned().unwrap();
    assert_eq!([of("stage_names"), of("out_features"), of("out_indices")], [json!(["stem", "stage1"]), json!(["stage1"]), json!([1])]);

    let folder = tempfile::tempdir().unwrap();
    let mut model = Model::open(golden("dinov2")).unwrap();
    model.config.set("out_features", json!(["stem", "stage1", "stage2"]));
    model.config.set("out_indices", json!([0, 1, -1]));
    let out = folder.path().join("out");
    Pipeline::builder().pass(pass()).build().unwrap().run(model, &out).unwrap();
    let config = Model::open(&out).unwrap().config;
    let of = |key: &str| config.get(key).cloned().unwrap();
    // The output of a removed layer equals its input.
    assert_eq!([of("out_features"), of("out_indices")], [json!(["stem", "stage1"]), json!([0, 1])]);
}

/// Keys that state which layers have experts or a sliding window. Without data, the first of two layers is
/// removed; the default of a missing key would describe another layer.
#[test]
fn remaining_layers_keep_their_experts_and_windows() {
    for (name, key, is_missing, value) in [
        ("qwen3-moe", "mlp_only_layers", false, json!([0])),
        ("glm4-moe-lite", "mlp_layer_types", false, json!(["dense"])),
        ("glm4-moe", "first_k_dense_replace", false, json!(0)),
        ("glm4-moe", "first_k_dense_replace", true, json!(0)),
        ("cohere2", "layer_types", false, json!(["full_attention"])),
        ("gemma2", "layer_types", true, json!(["full_attention"])),
        ("llama4", "moe_layers", false, json!([])),
        ("llama4", "layer_types", true, json!(["full_attention"])),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut model = Model::open(golden(name)).unwrap();
        if is_missing {
            let mut values = model.config.values().clone();
            values.shift_remove(key).unwrap();
            model.config = Config::from_values(values);
        }
        let pass = PruneStructured { amount: Some(Amounts::All(Amount::Count(1))), ..half(&[PrunedPart::Layers]) };
        let out = folder.path().join("out");
        let report = Pipeline::builder().pass(pass).build().unwrap().run(model, &out).unwrap();
        let config = Model::open(&out).unwrap().config;
        assert_eq!((config.get(key), config.get("num_hidden_layers")), (Some(&value), Some(&json!(1))), "{name}");
        assert!(!out.join("graph.json").exists(), "{name}: {:?}", report.notes);
    }
}

/// Published configurations of Nemotron-H have a letter for each layer. Without data, the second and the
/// third of four layers are removed.
#[test]
fn the_letters_of_layers_follow_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Model::open(golden("nemotron-h")).unwrap();
    let mut values = model.config.values().clone();
    values.shift_remove("layers_block_type").unwrap();
    values.extend([("hybrid_override_pattern".to_owned(), json!("M-*E")), ("num_hidden_layers".to_owned(), json!(4))]);
    model.config = Config::from_values(values);
    let out = folder.path().join("out");
    let report = Pipeline::builder().pass(half(&[PrunedPart::Layers])).build().unwrap().run(model, &out).unwrap();
    assert!(!out.join("graph.json").exists(), "{:?}", report.notes);
    let pruned = Model::open(&out).unwrap();
    let keys = ["hybrid_override_pattern", "num_hidden_layers", "layer_types"].map(|key| pruned.config.get(key));
    assert_eq!(keys, [Some(&json!("ME")), Some(&json!(2)), None]);
    assert!(outputs(&pruned, &Model::open(golden("nemotron-h")).unwrap()).contains_key("logits"));
}

/// Without data, the only layer of `lfm2` with attention is removed.
#[test]
fn a_hybrid_model_without_attention_has_a_warning() {
    let pass = || PruneStructured { amount: Some(Amounts::All(Amount::Count(1))), ..half(&[PrunedPart::Layers]) };
    for (name, warns) in [("lfm2", true), ("llama", false)] {
        let notes = run(name, Pipeline::builder().pass(pass())).report.notes;
        assert_eq!(notes.iter().any(|note| note.contains("no attention layer remains")), warns, "{name}: {notes:?}");
    }
}

/// The values of a tensor at these indices of its first axis.
fn rows(weights: &BTreeMap<String, Tensor>, name: &str, numbers: &[u32]) -> Vec<f32> {
    let numbers = Tensor::new(numbers, &Device::Cpu).unwrap();
    weights[name].index_select(&numbers, 0).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn experts_are_removed_by_usage() {
    let folder = tempfile::tempdir().unwrap();
    let weights = |folder: &Path| -> BTreeMap<String, Tensor> {
        candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap().into_iter().collect()
    };
    for (name, amount, key, layer) in [
        ("mixtral", 1, "num_local_experts", "layers.0.block_sparse_moe"),
        ("mixtral-fused", 2, "num_local_experts", "layers.1.mlp"),
        ("qwen2-moe", 2, "num_experts", "layers.1.mlp"),
        ("qwen3-moe", 1, "num_local_experts", "layers.0.mlp"),
        ("deepseek-v2-lite", 2, "n_routed_experts", "layers.1.mlp"),
        ("deepseek-v2", 4, "n_routed_experts", "layers.0.mlp"),
    ] {
        let amount = Amount::Count(amount);
        let pass = PruneStructured { amount: Some(Amounts::All(amount)), ..half(&[PrunedPart::Experts]) };
        let done = run(name, Pipeline::builder().calibration(tokens(folder.path())).pass(pass));
        assert!(done.described(), "{name}: {:?}", done.report.notes);
        let detail = |at: &str| {
            let mixtures = done.report.passes[0].details["experts"].as_array().unwrap();
            mixtures.iter().find(|mixture| mixture["mixture"].as_str().unwrap().starts_with(layer)).unwrap()[at].clone()
        };
        let count = detail("before").as_u64().unwrap() as u32;
        let importance: Vec<f64> = serde_json::from_value(detail("importance")).unwrap();
        let gone: Vec<u32> = serde_json::from_value(detail("gone")).unwrap();
        let stay: Vec<u32> = (0..count).filter(|number| !gone.contains(number)).collect();
        assert_eq!((done.config(key), stay.len()), (stay.len() as u64, count as usize - amount.of(u64::from(count)).unwrap() as usize), "{name}");

        // Manually computed frequencies and weights of the router.
        let original = Model::open(golden(name)).unwrap();
        let graph = original.graph().unwrap();
        let last = |expert: u32| if name == "mixtral" { format!("{layer}.experts.{expert}.w2") } else { format!("{layer}.experts.{expert}.down_proj") };
        let wanted: Vec<String> = (0..count).map(last).chain([format!("{layer}.routing")]).collect();
        let part = compress_graph::ir::subgraph(&graph, &wanted, &|op| op.clone()).unwrap();
        let parameters = crate::common::work(|work| Parameters::load(&part, &original.weights, &Device::Cpu, DType::F32, Residence::Computed, work)).unwrap();
        // The last sample is held out for the fidelity.
        let samples = candle_core::safetensors::load(folder.path().join("ids.safetensors"), &Device::Cpu).unwrap();
        let seen = samples.into_iter().map(|(name, values)| (name, values.narrow(0, 0, 11).unwrap())).collect();
        let found = Executor::new(&part, parameters, Device::Cpu).run(&seen).unwrap();
        for (expert, importance) in (0..count).zip(&importance) {
            let length = found[&last(expert)].sqr().unwrap().sum(2).unwrap().sqrt().unwrap();
            let weight = found[&format!("{layer}.routing")].narrow(2, expert as usize, 1).unwrap().squeeze(2).unwrap();
            let sum = f64::from((length * weight).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap());
            assert!((sum - importance).abs() <= 1e-4 * sum.max(1.0), "{name}, expert {expert}: {sum} {importance}");
        }
        // Experts are removed from each group.
        let groups = if name == "deepseek-v2" { 2 } else { 1 };
        for group in 0..groups {
            let of_group = |numbers: &[u32]| -> Vec<f64> {
                numbers.iter().filter(|number| **number / (count / groups) == group).map(|number| importance[*number as usize]).collect()
            };
            let (gone, stay) = (of_group(&gone), of_group(&stay));
            assert!(!gone.is_empty(), "{name}");
            assert!(gone.iter().all(|gone| stay.iter().all(|stay| gone <= stay)), "{name}: {gone:?} {stay:?}");
        }

        let (before, after) = (weights(&golden(name)), weights(&done.folder.path().join("out")));
        let all: Vec<u32> = (0..stay.len() as u32).collect();
        let mut compared = 0;
        for tensor in before.keys().filter(|tensor| tensor.starts_with(&format!("model.{layer}."))) {
            let part = tensor.strip_prefix(&format!("model.{layer}.")).unwrap();
            if part == "gate.weight" || ["experts.gate_up_proj", "experts.down_proj"].contains(&part) {
                assert_eq!(rows(&before, tensor, &stay), rows(&after, tensor, &all), "{name}: {tensor}");
                compared += 1;
            } else if let Some((expert, rest)) = part.strip_prefix("experts.").and_then(|part| part.split_once('.')) {
                let Some(now) = stay.iter().position(|stay| stay.to_string() == expert) else { continue };
                let whole = |weights: &BTreeMap<String, Tensor>, name: &str| weights[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(whole(&before, tensor), whole(&after, &format!("model.{layer}.experts.{now}.{rest}")), "{name}: {tensor}");
                compared += 1;
            }
        }
        assert!(compared >= 3 && after.len() <= before.len(), "{name}: {compared}");
        outputs(&done.model(), &original);
    }
}

#[test]
fn experts_and_heads_are_removed_in_one_pass() {
    let folder = tempfile::tempdir().unwrap();
    let amounts = Amounts::Each(BTreeMap::from([(PrunedPart::Experts, Amount::Count(1)), (PrunedPart::Heads, Amount::fraction(0.5))]));
    let pass = PruneStructured { amount: Some(amounts), ..half(&[PrunedPart::Experts, PrunedPart::Heads]) };
    let heads = Model::open(golden("mixtral")).unwrap().config.get("num_attention_heads").unwrap().as_u64().unwrap();
    let done = run("mixtral", Pipeline::builder().calibration(tokens(folder.path())).pass(pass));
    assert_eq!((done.config("num_local_experts"), done.config("num_attention_heads")), (3, heads / 2));
}

#[test]
fn experts_needed_by_the_router_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let failure = |name: &str, amount: Amount, data: bool| {
        let pass = PruneStructured { amount: Some(Amounts::All(amount)), ..half(&[PrunedPart::Experts]) };
        let builder = if data { Pipeline::builder().calibration(tokens(folder.path())) } else { Pipeline::builder() };
        let built = builder.pass(pass).build();
        built.and_then(|pipeline| pipeline.run(Model::open(golden(name)).unwrap(), folder.path().join("out"))).unwrap_err().to_string()
    };
    assert!(failure("mixtral", Amount::Count(3), true).contains("leaves 1 experts to select from, but the router selects 2 per token"));
    assert!(failure("deepseek-v2", Amount::Count(3), true).contains("is 3, which is not a multiple of the 2 expert groups"));
    // Each token is routed to two experts of one of two groups.
    assert!(failure("deepseek-v2", Amount::Count(6), true).contains("leaves 1 experts to select from, but the router selects 2 per token"));
    assert!(failure("llama", Amount::Count(1), true).contains("the model has no experts"));
    assert!(failure("mixtral", Amount::Count(1), false).contains("calibration"));
    assert!(!folder.path().join("out").exists());
    // Options for units do not apply to whole layers and experts.
    for pass in [
        PruneStructured { ignore: vec!["*".parse().unwrap()], ..half(&[PrunedPart::Experts]) },
        PruneStructured { repair: Repair::Bias, ..half(&[PrunedPart::Layers]) },
        PruneStructured { importance: UnitImportance::Taylor, ..half(&[PrunedPart::Layers, PrunedPart::Experts]) },
    ] {
        let message = Pipeline::builder().calibration(tokens(folder.path())).pass(pass).build().map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("`dims` lists none of them"), "{message}");
    }
}

/// A folder of DeepSeek-V3 or GLM-4.5 with a copy of the last layer that predicts a further token.
fn with_token_prediction(name: &str, folder: &Path) {
    let mut tensors = candle_core::safetensors::load(golden(name).join("model.safetensors"), &Device::Cpu).unwrap();
    let last = tensors.clone().into_iter().filter_map(|(name, tensor)| Some((format!("model.layers.2.{}", name.strip_prefix("model.layers.1.")?), tensor)));
    tensors.extend(last.collect::<Vec<_>>());
    tensors.insert("model.layers.2.eh_proj.weight".to_owned(), Tensor::ones((16, 32), DType::F32, &Device::Cpu).unwrap());
    std::fs::create_dir(folder).unwrap();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    std::fs::copy(golden(name).join("config.json"), folder.join("config.json")).unwrap();
}

/// Layers that predict further tokens follow those of the graph. Only whole layers can be removed.
#[test]
fn layers_that_predict_tokens_keep_their_sizes() {
    for name in ["deepseek-v3", "glm4-moe"] {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (folder.path().join("in"), folder.path().join("out"));
        with_token_prediction(name, &input);
        let run = |part: PrunedPart, amount: Amount| {
            let pass = PruneStructured { amount: Some(Amounts::All(amount)), ..half(&[part]) };
            Pipeline::builder().calibration(tokens(folder.path())).pass(pass).build().unwrap().run(Model::open(&input).unwrap(), &out)
        };
        for (part, amount) in [(PrunedPart::Hidden, Amount::fraction(0.5)), (PrunedPart::Mlp, Amount::fraction(0.5)), (PrunedPart::Experts, Amount::Count(2))] {
            let error = run(part, amount).unwrap_err().to_string();
            assert!(error.contains("predicts further tokens") && error.contains("`model.layers.2.eh_proj.weight`"), "{name}: {error}");
            assert!(!out.exists(), "{name}");
        }
        run(PrunedPart::Layers, Amount::Count(1)).unwrap();
        let names: Vec<String> = Model::open(&out).unwrap().weights.by_name.into_keys().collect();
        assert!(names.iter().any(|name| name == "model.layers.1.eh_proj.weight") && !names.iter().any(|name| name.contains("layers.2.")), "{names:?}");
    }
}

/// A matrix outside of the graph that reads the hidden state keeps its size: a warning names it. If the model
/// has a head, such as a classifier's or one next to its logits, no library could load the result, so that
/// the pass fails. An ONNX file without the classifier has a warning.
#[test]
fn heads_outside_of_the_graph_are_not_left_behind() {
    for (class, is_refused) in [("LlamaForSequenceClassification", true), ("LlamaModel", false), ("LlamaForCausalLM", true)] {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (folder.path().join("in"), folder.path().join("out"));
        let mut tensors = candle_core::safetensors::load(golden("llama").join("model.safetensors"), &Device::Cpu).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("llama").join("config.json")).unwrap()).unwrap();
        config["architectures"] = json!([class]);
        if class != "LlamaForCausalLM" {
            tensors.remove("lm_head.weight");
        }
        tensors.insert("score.weight".to_owned(), Tensor::ones((3, 16), DType::F32, &Device::Cpu).unwrap());
        std::fs::create_dir(&input).unwrap();
        candle_core::safetensors::save(&tensors, input.join("model.safetensors")).unwrap();
        std::fs::write(input.join("config.json"), config.to_string()).unwrap();
        let exported = Pipeline::builder().export(Onnx::default()).build().unwrap().run(Model::open(&input).unwrap(), folder.path().join("onnx")).unwrap();
        let is_warned = exported.notes.iter().any(|note| note.starts_with("warning: ") && note.contains("without `score.weight`"));
        assert_eq!(is_warned, class == "LlamaForSequenceClassification", "{class}: {:?}", exported.notes);
        let run = |part: PrunedPart| Pipeline::builder().pass(half(&[part])).build().unwrap().run(Model::open(&input).unwrap(), &out);
        let hidden = run(PrunedPart::Hidden);
        let message = hidden.as_ref().map_or_else(ToString::to_string, |report| report.notes.join("\n"));
        assert!(hidden.is_err() == is_refused && message.contains("`score.weight`") && message.contains("is not part of the graph"), "{class}: {message}");
        assert!(!is_refused || !out.exists());
        if is_refused {
            run(PrunedPart::Mlp).unwrap();
        }
    }
}
