//! An EAGLE-3 head as the student of its target: a head for speculative decoding in the format of the package
//! `speculators`. For training, its steps are nodes of the target's graph, whose weights are frozen.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::analysis;
use crate::arch::draft_head::{PREFIX, step_logits, unrolled};
use crate::arch::{self, Settings};
use crate::data::{Data, DataSets};
use crate::error::{Error, Result};
use crate::ir::ops::Linear;
use crate::ir::{Builder, Dim, Graph, Kind, Op, ValueId};
use crate::model::{Config, Model};
use crate::pass::fresh_weights::fresh_weights;
use crate::pass::tower;
use crate::store::{Block, BlockSink, DType, Encoding, Origin, Pattern, View, Weight, WeightSource};
use crate::train::losses::{DraftSteps, Losses, Soft};
use crate::work::Meter;

/// An EAGLE-3 head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DraftHead {
    /// File with the ids of the tokens that the head proposes, one per line [default: all tokens]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<PathBuf>,
    /// Layers of the input model whose inputs the head reads [default: 2, the middle, and the third last]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub layers: Vec<usize>,
    /// Number of steps in training: in each one but the first, the head reads its own hidden states
    pub steps: usize,
    /// Factor on the loss of a step, relative to that of the step before
    pub decay: f64,
}

impl Default for DraftHead {
    fn default() -> Self {
        Self { vocabulary: None, layers: Vec::new(), steps: 3, decay: 1.0 }
    }
}

/// A version of `speculators` that has all keys of the configuration.
const VERSION: &str = "0.9.0";
/// From this number of layers on, the outer ones are not read.
const MANY_LAYERS: usize = 7;
/// Keys of the target that the layer of the head has too.
const KEPT_KEYS: [&str; 12] = [
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
];

fn wrong(reason: impl std::fmt::Display) -> Error {
    Error::option("distill: student: eagle3", reason)
}

/// A head that is attached to its target for training.
#[derive(Clone)]
pub(in crate::pass) struct AttachedHead {
    /// The head to write, with initial weights.
    written: Model,
    /// The target with the head.
    pub model: Model,
    /// The loss.
    pub steps: DraftSteps,
}

impl DraftHead {
    /// Validates the options.
    pub(super) fn check(&self) -> Result<()> {
        if self.steps == 0 || self.steps > 16 {
            return Err(wrong(format!("`steps` is {}, but must be from 1 to 16", self.steps)));
        }
        if !(self.decay > 0.0 && self.decay <= 1.0) {
            return Err(wrong("`decay` must be greater than 0 and at most 1"));
        }
        Ok(())
    }

    /// Attaches a new head to a model. `losses` may specify the divergence.
    pub(super) fn attach(&self, target: &Model, losses: &Losses, seed: u64) -> Result<AttachedHead> {
        tower::require_none(target, "a draft head")?;
        let graph = target.graph()?;
        let tables = Tables::find(target, &graph)?;
        let layers = analysis::layers(&graph).ok_or_else(|| wrong("the model has no repeated layers"))?;
        let ids = self.layers(layers.layers.len())?;
        let states: Vec<String> = ids.iter().filter_map(|id| layers.state(*id)).cloned().collect();
        let tokens = self.tokens(tables.tokens)?;
        let config = Config::from_values(self.config(target, &tables, &ids, tokens.len()));
        let settings = Settings::new(config.values());
        let head = arch::build(&settings, &[], Builder::unchecked())?;
        let mut weights: BTreeMap<String, Weight> = fresh_weights(&head, &layer_config(&config), seed, "distill: student", |_| true)?.into_iter().collect();
        weights.insert("embed_tokens.weight".into(), target.weights.get(&tables.embedding)?.clone());
        weights.insert("lm_head.weight".into(), target.weights.get(&tables.head)?.index_select(&tables.head, 0, &tokens, Arc::new(Meter::default()))?);
        let training = unrolled(&settings, graph.clone(), &states, self.steps)?;
        let mut model = target.clone();
        let prefixed = weights.iter().filter(|(name, _)| *name != "embed_tokens.weight").map(|(name, weight)| (format!("{PREFIX}{name}"), weight.clone()));
        model.weights.by_name.extend(prefixed);
        model.changed_graph = Some(Arc::new(training));
        weights.extend(vocabulary_maps(&tokens, tables.tokens));
        let mut written = target.clone();
        written.weights.by_name = weights.into_iter().collect();
        (written.config, written.changed_graph) = (config, Some(Arc::new(head)));
        let steps = DraftSteps {
            soft: Soft::from(losses.soft.as_ref().unwrap_or(&Default::default())),
            decay: self.decay,
            steps: (0..self.steps).map(step_logits).collect(),
            target: tables.logits,
            tokens: tokens.iter().map(|token| *token as u32).collect(),
        };
        Ok(AttachedHead { written, model, steps })
    }

    /// The layers whose inputs the head reads.
    fn layers(&self, count: usize) -> Result<Vec<usize>> {
        if self.layers.is_empty() {
            let mut ids = if count >= MANY_LAYERS { vec![2, count / 2, count - 3] } else { vec![0, count / 2, count - 1] };
            ids.dedup();
            return Ok(ids);
        }
        if self.layers.windows(2).any(|pair| pair[0] >= pair[1]) || self.layers.iter().any(|layer| *layer >= count) {
            return Err(wrong(format!("`layers` is {:?}: list layers below {count} in ascending order, without duplicates", self.layers)));
        }
        Ok(self.layers.clone())
    }

    /// The vocabulary of the head: ascending ids.
    fn tokens(&self, count: usize) -> Result<Vec<usize>> {
        let Some(path) = &self.vocabulary else { return Ok((0..count).collect()) };
        let text = crate::files::read_to_string(path).map_err(Error::io("read", path))?;
        let ids = text.lines().map(|line| line.trim().parse().ok().filter(|id| *id < count)).collect::<Option<Vec<usize>>>();
        let ids = ids.filter(|ids| !ids.is_empty() && ids.windows(2).all(|pair| pair[0] < pair[1]));
        ids.ok_or_else(|| wrong(format!("{}: expected ascending token ids below {count}, one per line", path.display())))
    }

    /// The content of `config.json`.
    fn config(&self, target: &Model, tables: &Tables, layers: &[usize], tokens: usize) -> Map<String, Value> {
        let mut layer = Map::new();
        layer.insert("architectures".into(), json!(["LlamaForCausalLM"]));
        layer.insert("model_type".into(), json!("llama"));
        for key in KEPT_KEYS {
            layer.extend(target.config.get(key).filter(|value| !value.is_null()).map(|value| (key.to_owned(), value.clone())));
        }
        let heads = (tables.width / 64).max(1);
        for (key, default) in [("num_attention_heads", json!(heads)), ("intermediate_size", json!(4 * tables.width)), ("rms_norm_eps", json!(1e-6))] {
            layer.entry(key).or_insert(default);
        }
        for (key, value) in [("hidden_size", json!(tables.width)), ("vocab_size", json!(tables.tokens)), ("num_hidden_layers", json!(1))] {
            layer.insert(key.into(), value);
        }
        for (key, value) in [("hidden_act", json!("silu")), ("attention_bias", json!(false)), ("mlp_bias", json!(false)), ("tie_word_embeddings", json!(false))]
        {
            layer.insert(key.into(), value);
        }
        let method = json!({ "proposal_type": "greedy", "speculative_tokens": self.steps, "verifier_accept_k": 1, "accept_tolerance": 0.0 });
        let architectures = target.config.get("architectures").cloned().unwrap_or_else(|| json!([]));
        let name = target.path.file_name().map_or_else(|| target.path.display().to_string(), |name| name.to_string_lossy().into_owned());
        let values = [
            ("architectures", json!(["Eagle3DraftModel"])),
            ("speculators_model_type", json!("eagle3")),
            ("speculators_version", json!(VERSION)),
            ("draft_vocab_size", json!(tokens)),
            ("norm_before_residual", json!(true)),
            ("norm_before_fc", json!(false)),
            ("fc_norm", json!(false)),
            ("norm_output", json!(false)),
            ("eagle_aux_hidden_state_layer_ids", json!(layers)),
            ("tie_word_embeddings", json!(false)),
            ("transformer_layer_config", Value::Object(layer)),
            (
                "speculators_config",
                json!({
                    "algorithm": "eagle3",
                    "default_proposal_method": "greedy",
                    "proposal_methods": [method],
                    "verifier": { "name_or_path": name, "architectures": architectures },
                }),
            ),
        ];
        values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

/// The configuration of the layer, for initial values.
fn layer_config(config: &Config) -> Config {
    let layer = config.get("transformer_layer_config").and_then(Value::as_object);
    Config::from_values(layer.cloned().unwrap_or_default())
}

impl AttachedHead {
    /// The names of the trained tensors in the head, by those in the graph of the target.
    pub fn names(&self) -> BTreeMap<String, String> {
        let names = self.model.weights.by_name.keys();
        names.filter_map(|name| Some((name.clone(), name.strip_prefix(PREFIX)?.to_owned()))).collect()
    }

    /// Selects the trained weights.
    pub fn pattern(&self) -> Result<Pattern> {
        format!("{PREFIX}*").parse().map_err(wrong)
    }

    /// The head, with the weights of the trained model.
    pub fn finished(&self, trained: &Model) -> Model {
        let mut written = self.written.clone();
        for (name, weight) in &trained.weights.by_name {
            let own = name.strip_prefix(PREFIX).and_then(|name| written.weights.by_name.get_mut(name));
            own.into_iter().for_each(|own| *own = weight.clone());
        }
        written
    }
}

/// Rejects data on which a head cannot be trained or measured.
pub(super) fn check_data(data: &DataSets) -> Result<()> {
    if data.train.as_ref().is_some_and(Data::is_packed) {
        return Err(Error::option("data: train", "`packing` cannot be combined with `student: eagle3`, whose steps read tokens across texts: remove it"));
    }
    if data.evaluation.is_some() {
        let reason = "cannot be combined with `student: eagle3`: a head has no outputs without its model; measure it with `generate MODEL --draft HEAD`";
        return Err(Error::option("data: evaluation", reason));
    }
    Ok(())
}

/// The tables of a target with a row for each token.
struct Tables {
    /// Names of the weights.
    embedding: String,
    head: String,
    /// Name of the value with the logits.
    logits: String,
    width: usize,
    tokens: usize,
}

impl Tables {
    fn find(target: &Model, graph: &Graph) -> Result<Tables> {
        let unsupported = |reason: &str| {
            let hint = "supported are language models with an embedding and an output head of floats, in folders";
            Error::run(format!("{}: a draft head", target.path.display()), reason, hint)
        };
        if target.onnx.is_some() {
            return Err(unsupported("needs the weights of the model, not an .onnx file"));
        }
        let floats = |id: &ValueId| {
            let value = graph.value(*id);
            let weight = target.weights.by_name.get(&value.name).filter(|_| value.kind == Kind::Param);
            weight.filter(|weight| weight.encoding == Encoding::Dense && weight.shape.len() == 2).map(|weight| (value.name.clone(), weight.shape.clone()))
        };
        let embedding = graph.nodes().iter().find_map(|node| match (&node.op, node.inputs.as_slice()) {
            (Op::Embedding(_), [tokens, table]) if graph.value(*tokens).name == "input_ids" => floats(table),
            _ => None,
        });
        let (embedding, shape) = embedding.ok_or_else(|| unsupported("needs an embedding of `input_ids` with float weights"))?;
        let logits = graph.outputs().iter().find(|(name, _)| name == "logits").map(|(_, id)| *id);
        let logits = logits.filter(|id| graph.value(*id).ty.shape.len() == 3).ok_or_else(|| unsupported("needs logits of each token"))?;
        let head = analysis::head(graph, logits).and_then(|node| match (&node.op, node.inputs.as_slice()) {
            (Op::Linear(Linear { input_major: false }), [_, weight, ..]) => floats(weight),
            _ => None,
        });
        let (head, _) = head.ok_or_else(|| unsupported("needs an output head with float weights"))?;
        let columns = graph.value(logits).ty.shape.last().and_then(Dim::fixed);
        let [rows, width] = shape.as_slice() else { return Err(unsupported("needs an embedding with rows")) };
        if columns != Some(*rows) {
            return Err(unsupported("needs as many logits as embeddings"));
        }
        Ok(Tables { embedding, head, logits: graph.value(logits).name.clone(), width: *width, tokens: *rows })
    }
}

/// The maps between the vocabularies: `d2t` has the offset of each token of the head to its id in the target,
/// `t2d` whether the head has a token of the target.
fn vocabulary_maps(tokens: &[usize], count: usize) -> [(String, Weight); 2] {
    let offsets = tokens.iter().enumerate().flat_map(|(own, token)| (*token as i64 - own as i64).to_le_bytes()).collect();
    let mut known = vec![0u8; count];
    for token in tokens {
        known.get_mut(*token).into_iter().for_each(|known| *known = 1);
    }
    let weight = |dtype, bytes: Vec<u8>, size| Weight::new(dtype, vec![size], Encoding::Dense, Arc::new(Bytes { dtype, bytes })).with_origin(Origin::Rescaled);
    [("d2t".into(), weight(DType::I64, offsets, tokens.len())), ("t2d".into(), weight(DType::BOOL, known, count))]
}

/// A tensor in memory.
struct Bytes {
    dtype: DType,
    bytes: Vec<u8>,
}

impl WeightSource for Bytes {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        sink(Block::untouched(View::dense(self.dtype, &self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn target() -> Model {
        Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap()
    }

    #[test]
    fn a_head_reads_three_layers() {
        let layers = |count: usize| DraftHead::default().layers(count).unwrap();
        assert_eq!((layers(2), layers(4), layers(7), layers(30)), (vec![0, 1], vec![0, 2, 3], vec![2, 3, 4], vec![2, 15, 27]));
        let given = |layers: &[usize]| DraftHead { layers: layers.to_vec(), ..DraftHead::default() }.layers(4);
        assert_eq!(given(&[1, 3]).unwrap(), [1, 3]);
        for wrong in [&[3, 1][..], &[1, 1], &[1, 4]] {
            assert!(given(wrong).unwrap_err().to_string().contains("ascending"), "{wrong:?}");
        }
    }

    #[test]
    fn the_vocabulary_is_a_list_of_ascending_ids() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.txt");
        let tokens = |text: &str| {
            std::fs::write(&path, text).unwrap();
            DraftHead { vocabulary: Some(path.clone()), ..DraftHead::default() }.tokens(9).map_err(|e| e.to_string())
        };
        assert_eq!(tokens("0\n3\n8\n"), Ok(vec![0, 3, 8]));
        for wrong in ["", "3\n3\n", "5\n4\n", "9\n", "a\n", "1\n\n2\n"] {
            assert!(tokens(wrong).unwrap_err().contains("tokens.txt: expected ascending token ids below 9"), "{wrong:?}");
        }
    }

    #[test]
    fn packed_texts_and_evaluation_are_refused() {
        let packed = Data { packing: Some(true), ..Data::default() };
        let refused = |sets: DataSets| check_data(&sets).unwrap_err().to_string();
        assert!(refused(DataSets { train: Some(packed), ..DataSets::default() }).contains("packing"));
        assert!(refused(DataSets { evaluation: Some(Data::default()), ..DataSets::default() }).contains("data: evaluation"));
        check_data(&DataSets { train: Some(Data::default()), ..DataSets::default() }).unwrap();
    }

    /// The written head has the tensors that its configuration requires, and the vocabulary maps.
    #[test]
    fn a_head_is_described_by_its_configuration() {
        let target = target();
        let attached = DraftHead::default().attach(&target, &Losses::default(), 0).unwrap();
        let head = attached.finished(&attached.model);
        assert!(head.is_described() && head.config.model_type() == "eagle3");
        let unread: Vec<&String> = head.weights.by_name.keys().filter(|name| head.graph().unwrap().params().all(|(_, value)| value.name != **name)).collect();
        assert_eq!(unread, ["d2t", "t2d"]);
        assert_eq!(attached.names().len() + 3, head.weights.by_name.len());
        assert!(DraftHead { steps: 0, ..DraftHead::default() }.check().is_err() && DraftHead { decay: 0.0, ..DraftHead::default() }.check().is_err());
    }
}
