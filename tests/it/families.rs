//! The table of families: agreement with the graphs of the reference models, and families without a graph.
#![cfg(feature = "run")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use crate::common::pipeline;
use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress::pass::{Cast, Quantize, QuantizeDynamic, Step};
use compress_core::store::{Role, Weight};
use compress_engine::model::{exempt_layers, is_convolution, is_embedding, is_linear, is_prunable, stacked_experts};
use compress_graph::analysis::mixtures;
use compress_graph::arch::{self, Family};
use compress_graph::ir::{Graph, Node, Op, ValueId};
use serde_json::{Value, json};

/// A reference model of a family.
struct Sample {
    name: String,
    family: &'static Family,
    model: Model,
    graph: Graph,
}

fn samples() -> Vec<Sample> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut samples = Vec::new();
    let models = std::fs::read_dir(folder.join("models")).unwrap().map(|entry| entry.unwrap().path());
    for path in models.chain([folder.join("draft-head")]) {
        let model = Model::open(&path).unwrap();
        let (name, family) = (path.file_name().unwrap().to_string_lossy().into_owned(), arch::family(model.config.model_type()).unwrap());
        let graph = Graph::clone(&model.graph().unwrap());
        samples.push(Sample { name, family, model, graph });
    }
    samples
}

impl Sample {
    fn role(&self, weight: &str) -> Option<Role> {
        self.model.weights.by_name.get(weight).and_then(|weight| weight.role)
    }

    /// Whether the family has experts, of which the number may be zero.
    fn has_experts(&self) -> bool {
        let config = self.model.config.values();
        self.family.experts_key(config).is_some_and(|key| arch::text_values(config).get(key) != Some(&json!(0)))
    }

    /// The family, or that of the language model in a model with a vision tower.
    fn graph_family(&self) -> &'static Family {
        let Some(language_model) = self.family.language_model else { return self.family };
        let stated = arch::text_values(self.model.config.values()).get("model_type").and_then(Value::as_str);
        let of_text = stated.filter(|name| *name != self.family.model_type);
        arch::family(of_text.unwrap_or(language_model.model_type)).unwrap()
    }

    fn name(&self, id: ValueId) -> &str {
        &self.graph.value(id).name
    }

    /// Nodes with a stored weight as their second input, with its name.
    fn linears(&self) -> impl Iterator<Item = (&Node, &str)> {
        let stored = |node: &&Node| matches!(node.op, Op::Linear(_)) && self.model.weights.by_name.contains_key(self.name(node.inputs[1]));
        self.graph.nodes().iter().filter(stored).map(|node| (node, self.name(node.inputs[1])))
    }

    /// The names of the linear layers that compute a value, through operations on single elements.
    fn computed_by(&self, id: ValueId) -> Vec<&str> {
        match self.graph.producer(id) {
            Some(node) if matches!(node.op, Op::Linear(_)) => vec![self.name(node.inputs[1])],
            Some(node) if matches!(node.op, Op::Add(_) | Op::Scale(_) | Op::Tanh(_)) => node.inputs.iter().flat_map(|id| self.computed_by(*id)).collect(),
            _ => Vec::new(),
        }
    }
}

#[test]
fn every_family_with_a_graph_has_a_reference_model() {
    let sampled: BTreeSet<&str> = samples().iter().flat_map(|sample| [sample.family, sample.graph_family()].map(|family| family.model_type)).collect();
    let missing: Vec<&str> = arch::families().filter(|family| family.is_run()).map(|family| family.model_type).filter(|name| !sampled.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let mut names: Vec<&str> = arch::families().map(|family| family.model_type).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

/// Fused layers read the same value, and every entry occurs in a reference model.
#[test]
fn fused_layers_read_the_same_value() {
    let mut found: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for sample in samples() {
        let model_type = sample.family.model_type;
        let mut layers: BTreeMap<String, BTreeSet<BTreeSet<&str>>> = BTreeMap::new();
        let mut inputs: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (node, weight) in sample.linears() {
            inputs.entry(weight).or_default().insert(sample.name(node.inputs[0]));
        }
        for (weight, read) in inputs {
            let layer = arch::fused_layer(model_type, weight);
            let group = sample.family.fused.iter().position(|parts| layer.ends_with(&format!(".{}", parts.join("+"))));
            assert_eq!(group.is_none(), layer == weight, "{}: {layer}", sample.name);
            found.entry(sample.graph_family().model_type).or_default().extend(group);
            layers.entry(layer).or_default().insert(read);
        }
        for (layer, inputs) in layers {
            assert_eq!(inputs.len(), 1, "{}: the layers of {layer} read {inputs:?}", sample.name);
        }
    }
    for family in arch::families().filter(|family| family.graph.is_some()) {
        let unused: Vec<usize> = (0..family.fused.len()).filter(|group| !found[family.model_type].contains(group)).collect();
        assert!(unused.is_empty(), "{}: no reference model has the fused layers {unused:?}", family.model_type);
    }
}

/// Matrices have the role that the graph uses them in.
#[test]
fn roles_are_those_of_the_graph() {
    for sample in samples() {
        let name = &sample.name;
        let tables: BTreeSet<&str> =
            sample.graph.nodes().iter().filter(|node| matches!(node.op, Op::Embedding(_))).map(|node| sample.name(node.inputs[1])).collect();
        for table in tables.iter().filter(|table| sample.model.weights.by_name.contains_key(**table)) {
            assert_eq!(sample.role(table), Some(Role::Table), "{name}: {table}");
            assert!(is_embedding(table, &sample.model.weights.by_name[*table]));
        }
        let routers: BTreeSet<&str> =
            sample.graph.nodes().iter().filter(|node| matches!(node.op, Op::Route(_))).flat_map(|node| sample.computed_by(node.inputs[0])).collect();
        assert_eq!(routers.is_empty(), !sample.has_experts(), "{name}");
        for router in routers {
            assert_eq!(sample.role(router), Some(Role::Router), "{name}: {router}");
        }
        for (node, weight) in sample.linears() {
            let is_gate = || sample.graph.nodes().iter().any(|other| matches!(other.op, Op::Route(_) | Op::Sigmoid(_)) && other.inputs.contains(&node.output));
            match sample.role(weight) {
                Some(Role::Matrix) => assert!(is_linear(weight, &sample.model.weights.by_name[weight]), "{name}: {weight}"),
                Some(Role::Router) => assert!(is_gate(), "{name}: {weight} feeds no routing"),
                Some(Role::LinearAttentionGate) => assert!(sample.graph.nodes().iter().any(|node| matches!(node.op, Op::GatedDelta(_))), "{name}: {weight}"),
                Some(Role::Localization) => assert!(sample.graph.nodes().iter().any(|node| matches!(node.op, Op::DeformableAttention(_))), "{name}: {weight}"),
                Some(Role::Head | Role::Table) => {}
                None => assert!(!weight.ends_with(".weight"), "{name}: {weight}"),
                other => panic!("{name}: {weight} is {other:?}"),
            }
            if let Op::Linear(op) = &node.op {
                assert!(!op.input_major || sample.family.is_input_major, "{name}: {weight}");
            }
        }
        assert_eq!(sample.linears().any(|(node, _)| matches!(&node.op, Op::Linear(op) if op.input_major)), sample.family.is_input_major, "{name}");
        // No other matrix that the graph reads passes as a linear layer.
        let linear: BTreeSet<&str> = sample.linears().map(|(_, weight)| weight).collect();
        for (_, value) in sample.graph.params() {
            let selected = sample.model.weights.by_name.get(&value.name).is_some_and(|weight| is_linear(&value.name, weight));
            assert!(!selected || linear.contains(value.name.as_str()), "{name}: {}", value.name);
        }
    }
}

/// Logits are computed by the head, or by the table that the family ties it to.
#[test]
fn heads_compute_the_logits() {
    let mut heads: HashMap<&str, usize> = HashMap::new();
    for sample in samples() {
        let Some((_, logits)) = sample.graph.outputs().iter().find(|(output, _)| output == "logits") else { continue };
        let class = sample.model.config.get("architectures").and_then(|names| names[0].as_str()).unwrap_or("").to_owned();
        let [head] = sample.computed_by(*logits)[..] else { panic!("{}: no layer computes the logits", sample.name) };
        let is_classifier = sample.family.model_type == "torchvision" || class.ends_with("Classification");
        if is_classifier {
            let modules = sample.family.classifier.unwrap().modules;
            let variants = ["classifier.1.weight", "classifier.3.weight", "fc.weight"];
            assert!(head == format!("{}.weight", modules.last().unwrap()) || sample.family.model_type == "torchvision" && variants.contains(&head), "{head}");
            continue;
        }
        *heads.entry(sample.family.model_type).or_default() += 1;
        match sample.role(head) {
            Some(Role::Head) => {}
            Some(Role::Table) => {
                let alias = |tie: &&arch::Tie| tie.1 == head && sample.model.tied_names().contains(tie);
                assert!(sample.family.tied.iter().any(|tie| alias(&tie)), "{}: {head} computes the logits, but is not tied", sample.name);
            }
            other => panic!("{}: {head} computes the logits, but is {other:?}", sample.name),
        }
    }
    assert!(heads.len() > 20, "{heads:?}");
}

#[test]
fn the_key_of_the_number_of_experts_is_that_of_the_graph() {
    let mut checked = 0;
    for sample in samples() {
        let Some(key) = sample.family.experts_key(sample.model.config.values()).filter(|_| sample.has_experts()) else { continue };
        let count = mixtures(&sample.graph).unwrap().first().unwrap().experts.len();
        assert_eq!(arch::text_values(sample.model.config.values()).get(key).and_then(Value::as_u64), Some(count as u64), "{}", sample.name);
        checked += 1;
    }
    assert!(checked > 4, "{checked}");
}

/// A folder of zeros with these shapes.
fn folder(model_type: &str, shapes: &[(&str, &[usize])]) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let tensors: HashMap<&str, Tensor> = shapes.iter().map(|(name, shape)| (*name, Tensor::zeros(*shape, DType::F32, &Device::Cpu).unwrap())).collect();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let config = json!({ "model_type": model_type, "architectures": ["ModelForCausalLM"] });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let model = Model::open(folder.path()).unwrap();
    (folder, model)
}

/// Names of the linear layers of a model, in alphabetical order.
fn linear(model_type: &str, shapes: &[(&str, &[usize])]) -> Vec<String> {
    let (_folder, model) = folder(model_type, shapes);
    model.weights.by_name.iter().filter(|(name, weight)| is_linear(name, weight)).map(|(name, _)| name.clone()).collect()
}

const MATRIX: &[usize] = &[4, 8];

#[test]
fn heads_and_embeddings_of_families_without_a_graph_are_not_linear() {
    for (model_type, head, layer) in [
        ("rwkv", "head.weight", "rwkv.blocks.0.attention.key.weight"),
        ("xlnet", "lm_loss.weight", "transformer.layer.0.ff.layer_1.weight"),
        ("xlm", "pred_layer.proj.weight", "transformer.attentions.0.q_lin.weight"),
        ("flaubert", "pred_layer.proj.weight", "transformer.attentions.0.q_lin.weight"),
        ("albert", "predictions.decoder.weight", "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"),
        ("ctrl", "transformer.w.weight", "transformer.h.0.multi_head_attention.Wq.weight"),
        ("internlm2", "output.weight", "model.layers.0.attention.wqkv.weight"),
        ("chatglm", "transformer.output_layer.weight", "transformer.encoder.layers.0.self_attention.query_key_value.weight"),
        ("deepseek_v3", "model.layers.9.shared_head.head.weight", "model.layers.9.self_attn.q_a_proj.weight"),
        ("deepseek_v3", "model.layers.9.eh_proj.weight", "model.layers.9.mlp.experts.3.up_proj.weight"),
        ("deepseek_v32", "model.layers.0.self_attn.indexer.weights_proj.weight", "model.layers.0.self_attn.indexer.wk.weight"),
        ("glm_moe_dsa", "model.layers.0.self_attn.indexer.weights_proj.weight", "model.layers.0.self_attn.indexer.wk.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_experts.gate_proj.weight"),
        ("gpt_oss", "model.layers.0.mlp.router.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("llama4", "language_model.model.layers.0.feed_forward.router.weight", "language_model.model.layers.0.self_attn.q_proj.weight"),
        ("llama4", "vision_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.layers.0.feed_forward.up_proj.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen3_5", "model.language_model.layers.0.linear_attn.in_proj_a.weight", "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"),
        ("granitemoe", "model.layers.0.block_sparse_moe.router.layer.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("step3_text", "model.layers.4.moe.gate.weight", "model.layers.4.share_expert.up_proj.weight"),
        ("kimi_k2", "model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
        ("jamba", "model.layers.1.feed_forward.router.weight", "model.layers.0.mamba.in_proj.weight"),
        ("lfm2_moe", "model.layers.2.feed_forward.gate.weight", "model.layers.0.conv.in_proj.weight"),
        ("cohere", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.weight"),
    ] {
        assert_eq!(linear(model_type, &[(head, MATRIX), (layer, MATRIX)]), [layer], "{model_type}");
    }
}

/// Names by convention, which models without a row depend on, also suit the families with a graph.
#[test]
fn conventions_agree_with_the_table() {
    let mut differing = BTreeSet::new();
    for sample in samples() {
        let mut weights = sample.model.weights.by_name.clone();
        weights.values_mut().for_each(|weight| weight.role = None);
        // The names of some towers mean that of one only next to a language model.
        let config = if sample.family.language_model.is_some() { json!({ "text_config": {}, "vision_config": {} }) } else { json!({}) };
        arch::mark_roles(&mut weights, config.as_object().unwrap());
        for (name, weight) in &sample.model.weights.by_name {
            let by_name = &weights[name];
            // Towers have no tables that passes select.
            let is_table = |weight: &Weight| is_embedding(name, weight) && sample.role(name) != Some(Role::Vision);
            if (is_linear(name, weight), is_table(weight)) != (is_linear(name, by_name), is_table(by_name)) {
                differing.insert(format!("{}: {name}", sample.name));
            }
        }
    }
    assert!(differing.is_empty(), "{differing:?}");
}

/// Families whose models are not in transformers.
const CUSTOM_CODE: [&str; 10] = ["chatglm", "dbrx", "dots1", "exaone", "hunyuan_v1_moe", "internlm", "internlm2", "qwen", "step3_text", "step3_vl"];

/// Linear layers that are not quantized: the layers before the logits, gates, and projections of embeddings.
const EXEMPT: [&str; 9] = [
    "albert: albert.encoder.embedding_hidden_mapping_in.weight",
    "albert: predictions.dense.weight",
    "camembert: lm_head.dense.weight",
    "decision_transformer: embed_action.weight",
    "decision_transformer: embed_return.weight",
    "decision_transformer: embed_state.weight",
    "deepseek_v32: model.layers.0.self_attn.indexer.weights_proj.weight",
    "electra: electra.embeddings_project.weight",
    "electra: generator_predictions.dense.weight",
];

/// A family in `tests/golden/families.json`.
#[derive(serde::Deserialize)]
struct Described {
    model_type: String,
    tied: Vec<(String, String)>,
    tables: Vec<String>,
    heads: Vec<String>,
    routers: Vec<String>,
    others: Vec<String>,
}

/// Weights of families without a graph have the roles, and the ties, of transformers' modules.
#[test]
fn families_without_a_graph_agree_with_transformers() {
    let golden = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families.json")).unwrap();
    let described: Vec<Described> = serde_json::from_value(serde_json::from_str::<Value>(&golden).unwrap()["families"].take()).unwrap();
    let mut exempt = BTreeSet::new();
    for family in &described {
        let model_type = &family.model_type;
        let names: Vec<&String> = [&family.tables, &family.heads, &family.routers, &family.others].into_iter().flatten().collect();
        let shapes: Vec<(&str, &[usize])> = names.iter().map(|name| (name.as_str(), MATRIX)).collect();
        let (_folder, model) = folder(model_type, &shapes);
        let role = |name: &str| model.weights.by_name[name].role;
        for (names, expected) in [(&family.tables, Role::Table), (&family.heads, Role::Head), (&family.routers, Role::Router)] {
            for name in names {
                assert_eq!(role(name), Some(expected), "{model_type}: {name}");
            }
        }
        let others = family.others.iter().filter(|name| !matches!(role(name), Some(Role::Matrix | Role::LinearAttentionGate | Role::Vision)));
        exempt.extend(others.map(|name| format!("{model_type}: {name}")));
        for (alias, original) in &family.tied {
            assert!(arch::tied(model_type).contains(&(alias, original)), "{model_type}: {alias} is tied to {original}");
        }
    }
    assert_eq!(exempt.iter().map(String::as_str).collect::<Vec<_>>(), EXEMPT);
    let described = described.iter().map(|family| family.model_type.as_str());
    let listed: BTreeSet<&str> = described.chain(CUSTOM_CODE).collect();
    let rows: BTreeSet<&str> = arch::families().filter(|family| family.graph.is_none()).map(|family| family.model_type).collect();
    assert_eq!(rows, listed);
}

#[test]
fn experts_in_one_tensor_are_those_of_the_family() {
    let name = "model.layers.0.block_sparse_moe.input_linear.weight";
    let (_folder, model) = folder("granitemoe", &[(name, &[2, 4, 8]), ("model.layers.0.mamba.conv1d.weight", &[2, 4, 8])]);
    assert_eq!(stacked_experts(name, &model.weights.by_name[name]).as_deref(), Some("model.layers.0.block_sparse_moe.experts"));
    let kernels: Vec<&String> = model.weights.by_name.iter().filter(|(name, weight)| is_convolution(name, weight)).map(|(name, _)| name).collect();
    assert_eq!(kernels, ["model.layers.0.mamba.conv1d.weight"]);
}

/// No pass prunes or compresses them by default.
#[test]
fn filters_of_short_convolutions_are_left_unchanged() {
    for (model_type, name) in [
        ("lfm2", "model.layers.0.conv.conv.weight"),
        ("lfm2_moe", "model.layers.0.conv.conv.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.conv1d.weight"),
        ("granitemoehybrid", "model.layers.0.mamba.conv1d.weight"),
        ("mamba2", "backbone.layers.0.mixer.conv1d.weight"),
        ("nemotron_h", "backbone.layers.0.mixer.conv1d.weight"),
        ("qwen3_5_text", "model.layers.0.linear_attn.conv1d.weight"),
        ("qwen3_5", "model.language_model.layers.0.linear_attn.conv1d.weight"),
        ("qwen3_5_moe", "model.language_model.layers.0.linear_attn.conv1d.weight"),
        ("falcon_h1", "model.layers.0.mamba.conv1d.weight"),
        ("bamba", "model.layers.0.mamba.conv1d.weight"),
        ("jamba", "model.layers.0.mamba.conv1d.weight"),
    ] {
        let (_folder, model) = folder(model_type, &[(name, &[4, 1, 3])]);
        let weight = &model.weights.by_name[name];
        assert!(weight.role == Some(Role::Other) && !is_prunable(name, weight) && !is_convolution(name, weight), "{model_type}: {:?}", weight.role);
    }
}

#[test]
fn heads_of_families_without_a_graph_are_tied() {
    for (model_type, head, table) in [
        ("bloom", "lm_head.weight", "transformer.word_embeddings.weight"),
        ("mamba", "lm_head.weight", "backbone.embeddings.weight"),
        ("bart", "lm_head.weight", "model.shared.weight"),
        ("internlm2", "output.weight", "model.tok_embeddings.weight"),
        ("openai-gpt", "lm_head.weight", "transformer.tokens_embed.weight"),
        ("gemma", "lm_head.weight", "model.embed_tokens.weight"),
        ("falcon_h1", "lm_head.weight", "model.embed_tokens.weight"),
        ("jamba", "lm_head.weight", "model.embed_tokens.weight"),
    ] {
        let (_folder, model) = folder(model_type, &[(table, MATRIX)]);
        assert_eq!(model.tied_names(), [(head, table)], "{model_type}");
        assert!(is_embedding(table, &model.weights.by_name[table]), "{model_type}");
    }
    // transformers ignores `tie_word_embeddings` of this family.
    assert!(arch::tied("nemotron_h").is_empty());
}

/// The key of LFM2 decides whether a head that is not stored is the embedding.
#[test]
fn the_head_of_lfm2_is_tied_by_its_own_key() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/lfm2");
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    let expected = Model::open(&golden).unwrap().graph().unwrap().to_string();
    for (own, usual, is_tied) in [(json!(true), false, true), (json!(false), true, false), (Value::Null, true, true), (Value::Null, false, false)] {
        (config["tie_embedding"], config["tie_word_embeddings"]) = (own, Value::from(usual));
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let model = Model::open(folder.path()).unwrap();
        assert_eq!(!model.tied_names().is_empty(), is_tied, "{config}");
        match model.graph() {
            Ok(graph) => assert!(is_tied && graph.to_string() == expected, "{config}"),
            Err(e) => assert!(!is_tied && e.to_string().contains("lm_head.weight"), "{config}: {e}"),
        }
    }
}

#[test]
fn layers_of_families_without_a_graph_are_fused() {
    let fused = |model_type: &str, [a, b]: [&str; 2]| {
        let layer = |name: &str| arch::fused_layer(model_type, &format!("model.layers.0.{name}.weight"));
        layer(a) == layer(b)
    };
    for (model_type, pair, expected) in [
        // The gate and up projections of Qwen and EXAONE.
        ("qwen", ["mlp.w1", "mlp.w2"], true),
        ("exaone", ["mlp.c_fc_0", "mlp.c_fc_1"], true),
        ("deepseek_v3", ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], true),
        ("qwen3_5", ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"], true),
        ("minimax_m2", ["block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w3"], true),
        ("lfm2_moe", ["feed_forward.experts.0.w1", "feed_forward.experts.0.w3"], true),
        ("falcon_h1", ["mamba.in_proj", "self_attn.q_proj"], false),
        // Keys and values of RWKV read different inputs.
        ("rwkv", ["feed_forward.key", "feed_forward.value"], false),
        // Cross-attention reads queries from the decoder, keys and values from the encoder.
        ("bart", ["encoder_attn.q_proj", "encoder_attn.k_proj"], false),
        ("bart", ["encoder_attn.k_proj", "encoder_attn.v_proj"], true),
        ("whisper", ["encoder_attn.q_proj", "encoder_attn.k_proj"], false),
        ("t5", ["SelfAttention.q", "SelfAttention.k"], true),
        // Models without a row.
        ("unheard-of", ["self_attn.q_proj", "self_attn.k_proj"], true),
        ("unheard-of", ["mlp.w1", "mlp.w2"], false),
    ] {
        assert_eq!(fused(model_type, pair), expected, "{model_type}: {pair:?}");
    }
}

#[test]
fn exempt_layers_are_described() {
    let (_folder, model) = folder("rwkv", &[("head.weight", MATRIX), ("rwkv.blocks.0.attention.key.weight", MATRIX)]);
    let described = exempt_layers(model.weights.by_name.iter().map(|(name, weight)| (name.as_str(), weight)));
    assert_eq!(described.as_deref(), Some("the output head `head.weight`"));
}

#[test]
fn layers_that_are_selected_by_their_names_are_noted() {
    let notes = |model_type: &str| {
        let ((_folder, model), outputs) =
            (folder(model_type, &[("lm_head.weight", MATRIX), ("model.layers.0.self_attn.q_proj.weight", MATRIX)]), tempfile::tempdir().unwrap());
        let run = |(name, step): (&str, Step)| {
            let report = pipeline().pass(step).measure(false).build().unwrap().run(model.clone(), outputs.path().join(name)).unwrap();
            report.notes.into_iter().filter(|note| note.contains("table of families")).collect::<Vec<_>>()
        };
        [("weights", Quantize::default().into()), ("dynamic", QuantizeDynamic::default().into())].map(run).concat()
    };
    let unknown = notes("unheard-of");
    assert!(unknown.len() == 2 && unknown.iter().all(|note| note.contains("`model_type` unheard-of is not in the table")), "{unknown:?}");
    assert!(notes("llama").is_empty() && notes("deepseek_v3").is_empty());
}

/// Configurations of Command R7B state how it was trained.
#[test]
fn a_sharded_embedding_of_cohere_has_no_effect() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/cohere2");
    let mut model = Model::open(path).unwrap();
    let before = model.graph().unwrap();
    for value in [true, false] {
        model.config.set("use_parallel_embedding", value.into());
        assert_eq!(model.graph().unwrap().to_string(), before.to_string());
    }
}

/// transformers keeps the biases that select experts in float32, whatever the dtype of the model.
#[test]
fn casts_keep_what_transformers_keeps_in_float32() {
    for (name, biases) in [("deepseek-v3", 1), ("kimi-k2", 1), ("glm4-moe", 1), ("glm4-moe-lite", 1), ("minimax-m2", 0)] {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name), folder.path().join("out"));
        let pipeline = compress::Pipeline::builder().pass(Cast::default()).measure(false).build().unwrap();
        let report = pipeline.run(Model::open(input).unwrap(), &out).unwrap();
        let written = Model::open(&out).unwrap();
        let kept = written.weights.by_name.iter().filter(|(_, weight)| weight.dtype == crate::common::DType::F32);
        let kept: Vec<&str> = kept.map(|(name, _)| name.as_str()).collect();
        assert!(kept.len() == biases && kept.iter().all(|name| name.ends_with(".gate.e_score_correction_bias")), "{name}: {kept:?}");
        assert_eq!(report.notes.iter().any(|note| note.contains("kept in float32 by transformers")), biases > 0, "{name}: {:?}", report.notes);
    }
}

/// `Decay` computes in 32 bits in every precision, also with limits of step sizes.
#[test]
fn decays_are_not_rounded() {
    for (name, is_limited) in [("mamba2", false), ("granite-hybrid", false), ("qwen3-next", false), ("mamba2-tied", true), ("nemotron-h", true)] {
        let model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap();
        let graph = model.graph().unwrap();
        let recurrences: Vec<&Node> = graph.nodes().iter().filter(|node| matches!(node.op, Op::GatedDelta(_))).collect();
        assert!(!recurrences.is_empty(), "{name}");
        for recurrence in recurrences {
            let decay = graph.nodes().iter().find(|node| node.output == recurrence.inputs[3]).unwrap();
            assert!(matches!(decay.op, Op::Decay(op) if op.has_limits() == is_limited), "{name}: {:?}", decay.op);
        }
    }
}
