//! Graphs of EAGLE-3 heads: as stored, in one step of decoding, and unrolled over several steps in the graph
//! of their target for training.

use crate::arch::running::Settings;
use crate::arch::running::decoder::{Decoder, HeadNorms, Layer, LayerNames};
use crate::arch::running::parts::{linear_with, text_inputs};
use crate::arch::running::rope::{RopeDefaults, rotary};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Attention, ChunkBias, Clip, Concat, CumSum, Embedding, MergeHeads, Pad, Scale, Slice, Softmax};
use crate::ir::{Builder, Dim, Graph, Op, TensorType, ValueId};

/// Input of a head: hidden states of the target, or its own, `[batch, sequence, width]`.
pub const HIDDEN_STATES: &str = "hidden_states";
/// Prefix of the parameters and nodes of a head in the graph of its target.
pub const PREFIX: &str = "draft.";
/// The group with the configuration of the layer.
const LAYER: &str = "transformer_layer_config";
/// Added to scores of hidden keys: probabilities are zero, also with 16-bit floats.
const HIDDEN: f64 = -1e4;

/// Sizes and layers that a head requires of its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirements {
    /// Layers whose inputs are read; the number of layers selects the output of the last one.
    pub layers: Vec<usize>,
    /// Width of the hidden states.
    pub width: usize,
    /// Size of the vocabulary of the target.
    pub vocabulary: usize,
    /// Size of the vocabulary of the head.
    pub draft_vocabulary: usize,
}

impl Requirements {
    /// Reads the configuration of a head.
    pub fn new(s: &Settings) -> Result<Requirements> {
        let layer = s.group_or_empty(LAYER)?;
        let width = layer.size("hidden_size")?;
        let layers = match s.get("eagle_aux_hidden_state_layer_ids") {
            None => return Err(Error::graph("config.json", "`eagle_aux_hidden_state_layer_ids` is missing: the layers of the target are unknown")),
            Some(list) => {
                list.as_array().and_then(|list| list.iter().map(|id| id.as_u64().and_then(|id| usize::try_from(id).ok())).collect::<Option<Vec<_>>>())
            }
        };
        let layers = layers.filter(|layers| !layers.is_empty());
        let layers = layers.ok_or_else(|| Error::graph("config.json", "`eagle_aux_hidden_state_layer_ids` is not a list of layers"))?;
        if s.size_or("target_hidden_size", width)? != width {
            return Err(unsupported("`target_hidden_size` other than `hidden_size`"));
        }
        let vocabulary = layer.size("vocab_size")?;
        Ok(Requirements { layers, width, vocabulary, draft_vocabulary: s.size_or("draft_vocab_size", 32_000)? })
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { what: format!("config.json: {what}"), hint: "supported are heads with one Llama or Qwen3 layer of the width of the target".into() }
}

/// Adds the graph of a head: logits over its vocabulary and its hidden states, of hidden states of the
/// target.
pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let layer = s.group_or_empty(LAYER)?;
    let head = Head::new(s, &layer, "")?;
    let (tokens, mask) = text_inputs(b)?;
    let states = hidden_input(b, head.needs.width.saturating_mul(head.needs.layers.len()))?;
    let hidden = head.fused(b, states)?;
    head.finish(b, tokens, hidden, mask)
}

/// The graph of a head that reads its own hidden states, or fused ones of the target
/// ([`with_fused_states`]).
pub fn step_graph(s: &Settings) -> Result<Graph> {
    let layer = s.group_or_empty(LAYER)?;
    let (head, mut b) = (Head::new(s, &layer, "")?, Builder::unchecked());
    let (tokens, mask) = text_inputs(&mut b)?;
    let hidden = hidden_input(&mut b, head.needs.width)?;
    head.finish(&mut b, tokens, hidden, mask)?;
    b.finish()
}

/// The graph of a target with the additional output [`HIDDEN_STATES`]: its hidden states with these names,
/// fused for the head. The parameters have the prefix [`PREFIX`].
pub fn with_fused_states(s: &Settings, target: Graph, states: &[String]) -> Result<Graph> {
    let layer = s.group_or_empty(LAYER)?;
    let (head, mut b) = (Head::new(s, &layer, PREFIX)?, Builder::continuing(target));
    let fused = head.fused_of(&mut b, states)?;
    b.output(HIDDEN_STATES, fused);
    b.finish()
}

/// Name of the value with the logits of a step of [`unrolled`].
pub fn step_logits(step: usize) -> String {
    format!("{PREFIX}step{step}.lm_head")
}

/// The graph of a target with a head that is applied `steps` times (training-time test): in each step but
/// the first, it reads its hidden states of the step before, and the next token of the text. Row `i` of
/// the logits of step `k` predicts token `i + k + 2`. The parameters of the head have the prefix
/// [`PREFIX`], except for the embedding table, which is that of the target.
pub fn unrolled(s: &Settings, target: Graph, states: &[String], steps: usize) -> Result<Graph> {
    let layer = s.group_or_empty(LAYER)?;
    let (table, [tokens, mask]) = (embedding_table(&target)?, text_inputs_of(&target)?);
    let (head, mut b) = (Head::new(s, &layer, PREFIX)?, Builder::continuing(target));
    if b.width(table)? != head.needs.width {
        return Err(unsupported("`hidden_size` other than the width of the embeddings"));
    }
    let (mut hidden, mut next) = (head.fused_of(&mut b, states)?, tokens);
    let (mut keys, mut masks) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let node = format!("{PREFIX}step{step}.");
        next = rolled(&mut b, &format!("{node}input_ids"), next)?;
        let bias = bias(&mut b, &node, tokens, step)?;
        masks.push(mask);
        let all_masks = if step == 0 { mask } else { b.node(&format!("{node}mask"), Concat { axis: 1 }, &masks)? };
        let inputs = StepInputs { tokens: next, hidden, table, visible: vec![all_masks].into_iter().chain(bias).collect() };
        (hidden, _) = head.step(&mut b, &node, &inputs, &mut keys)?;
    }
    b.finish()
}

/// Adds the input of hidden states.
fn hidden_input(b: &mut Builder, width: usize) -> Result<ValueId> {
    b.input(HIDDEN_STATES, TensorType::float([Dim::named("batch"), Dim::named("sequence"), Dim::Fixed(width)]))
}

/// The embedding table of the token ids.
fn embedding_table(graph: &Graph) -> Result<ValueId> {
    let is_of_tokens = |id: &ValueId| graph.value(*id).name == "input_ids";
    let tables = graph.nodes().iter().filter(|node| matches!(node.op, Op::Embedding(_)) && node.inputs.first().is_some_and(is_of_tokens));
    tables.filter_map(|node| node.inputs.get(1).copied()).next().ok_or_else(|| Error::graph("the model", "has no embeddings of `input_ids`"))
}

fn text_inputs_of(graph: &Graph) -> Result<[ValueId; 2]> {
    let find = |name: &str| graph.inputs().find(|(_, value)| value.name == name).map(|(id, _)| id);
    find("input_ids").zip(find("attention_mask")).map(Into::into).ok_or_else(|| Error::graph("the model", "has no inputs `input_ids` and `attention_mask`"))
}

/// Tokens `[batch, sequence]` moved to the left by one; the first one becomes the last.
fn rolled(b: &mut Builder, node: &str, tokens: ValueId) -> Result<ValueId> {
    let rest = b.node(&format!("{node}.rest"), Slice { start: 1, length: None, axis: 1, ..Slice::default() }, &[tokens])?;
    let first = b.node(&format!("{node}.first"), Slice { start: 0, length: Some(1), axis: 1, ..Slice::default() }, &[tokens])?;
    b.node(node, Concat { axis: 1 }, &[rest, first])
}

/// The attention bias of a step after the first, `[1, sequence, (step + 1) · sequence]`: a query attends to
/// the keys of the first step up to its position, and to those of later steps at its position.
fn bias(b: &mut Builder, node: &str, tokens: ValueId, step: usize) -> Result<Option<ValueId>> {
    if step == 0 {
        return Ok(None);
    }
    let name = |part: &str| format!("{PREFIX}distance{part}");
    // The parts are common to all steps.
    let [ahead, apart] = match [".ahead", ".apart"].map(|part| b.find(&name(part))) {
        [Some(ahead), Some(apart)] => [ahead, apart],
        _ => {
            let apart = b.node(&name(".chunks"), ChunkBias { size: 1 }, &[tokens])?;
            let apart = b.node(&name(".apart"), Clip { min: HIDDEN, max: 0.0 }, &[apart])?;
            // 1 for the key at the position of the query, then for all keys after it. Position numbers would
            // be rounded in 16 bits.
            let same = b.node(&name(".same"), Softmax::default(), &[apart])?;
            let after = b.node(&name(".after"), CumSum { exclusive: true, ..CumSum::default() }, &[same])?;
            [b.node(&name(".ahead"), Scale { factor: HIDDEN }, &[after])?, apart]
        }
    };
    let blocks: Vec<ValueId> = std::iter::once(ahead).chain(std::iter::repeat_n(apart, step)).collect();
    b.node(&format!("{node}bias"), Concat { axis: 2 }, &blocks).map(Some)
}

/// Inputs of a step.
struct StepInputs {
    tokens: ValueId,
    hidden: ValueId,
    table: ValueId,
    /// Inputs of attention after queries, keys and values.
    visible: Vec<ValueId>,
}

/// A head, described by its configuration.
struct Head<'s, 'c> {
    needs: Requirements,
    /// The layer, with the sizes of its group.
    decoder: Decoder<'s, 'c>,
    rotary: crate::ir::ops::Rotary,
    /// Prefix of parameters.
    prefix: &'static str,
    /// Whether the residual stream begins with normalized hidden states.
    norm_before_residual: bool,
    /// Whether the concatenated hidden states are normalized.
    norm_before_fc: bool,
    /// Whether the hidden states of each layer are normalized.
    fc_norm: bool,
    /// Whether a step returns normalized hidden states.
    norm_output: bool,
}

impl<'s, 'c> Head<'s, 'c> {
    fn new(s: &Settings, layer: &'s Settings<'c>, prefix: &'static str) -> Result<Self> {
        if layer.size_or("num_hidden_layers", 1)? != 1 {
            return Err(unsupported("`num_hidden_layers` other than 1"));
        }
        let decoder = match layer.text_or("model_type", "qwen3")? {
            "llama" => Decoder::new(layer, None)?,
            "qwen3" => Decoder { head_norms: HeadNorms::Head, ..Decoder::new(layer, Some(128))? },
            other => return Err(unsupported(&format!("`{LAYER}` of model_type `{other}`"))),
        };
        let slides = layer.get("layer_types").and_then(|types| types.get(0)).is_some_and(|kind| kind == "sliding_attention");
        if slides {
            return Err(unsupported("a sliding window"));
        }
        Ok(Head {
            needs: Requirements::new(s)?,
            rotary: rotary(layer, decoder.head_dim, RopeDefaults::default())?,
            decoder,
            prefix,
            norm_before_residual: s.flag_or("norm_before_residual", false)?,
            norm_before_fc: s.flag_or("norm_before_fc", false)?,
            fc_norm: s.flag_or("fc_norm", false)?,
            norm_output: s.flag_or("norm_output", false)?,
        })
    }

    /// The fused hidden states of these values.
    fn fused_of(&self, b: &mut Builder, states: &[String]) -> Result<ValueId> {
        let find = |name: &String| b.find(name).ok_or_else(|| Error::graph(format!("graph value `{name}`"), "does not exist"));
        let states = states.iter().map(find).collect::<Result<Vec<_>>>()?;
        let all = b.node(&format!("{}states", self.prefix), Concat { axis: -1 }, &states)?;
        self.fused(b, all)
    }

    /// Fuses the concatenated hidden states of the layers.
    fn fused(&self, b: &mut Builder, states: ValueId) -> Result<ValueId> {
        let (prefix, width, norm, mut states) = (self.prefix, self.needs.width, self.decoder.norm, states);
        if self.norm_before_fc {
            states = norm.add(b, &format!("{prefix}input_norm"), &format!("{prefix}input_norm"), states)?;
        }
        if self.fc_norm {
            let mut parts = Vec::new();
            for index in 0..self.needs.layers.len() {
                let name = format!("{prefix}fc_norm.{index}");
                let part = b.node(&format!("{name}.state"), Slice::last_axis(index.saturating_mul(width), width), &[states])?;
                parts.push(norm.add(b, &name, &name, part)?);
            }
            states = b.node(&format!("{prefix}fc_norm"), Concat { axis: -1 }, &parts)?;
        }
        linear_with(b, &format!("{prefix}fc"), &format!("{prefix}fc"), states, width, false)
    }

    /// Adds the only step of a graph, and its outputs.
    fn finish(&self, b: &mut Builder, tokens: ValueId, hidden: ValueId, mask: ValueId) -> Result<()> {
        let table = b.param("embed_tokens.weight", &[self.needs.vocabulary, self.needs.width])?;
        let inputs = StepInputs { tokens, hidden, table, visible: vec![mask] };
        let (hidden, logits) = self.step(b, "", &inputs, &mut Vec::new())?;
        b.output("last_hidden_state", hidden);
        b.output("logits", logits);
        Ok(())
    }

    /// Adds a step: its hidden states and logits. `node` is the prefix of its nodes, `earlier` contains
    /// the keys and values of all steps before, to which those of this step are added.
    fn step(&self, b: &mut Builder, node: &str, inputs: &StepInputs, earlier: &mut Vec<[ValueId; 2]>) -> Result<(ValueId, ValueId)> {
        let (decoder, step) = (&self.decoder, earlier.len());
        let at = LayerNames::with_nodes(format!("{node}layers.0"), format!("{}layers.0", self.prefix));
        let norm = |b: &mut Builder, name: &str, x: ValueId| decoder.norm.add(b, &at.node(name), &at.module(name), x);
        let embeddings = b.node(&format!("{node}embed_tokens"), Embedding {}, &[inputs.tokens, inputs.table])?;
        let embeddings = norm(b, "input_layernorm", embeddings)?;
        let normed = norm(b, "hidden_norm", inputs.hidden)?;
        let both = b.node(&at.node("self_attn.input"), Concat { axis: -1 }, &[embeddings, normed])?;
        let ([q, k, v], _) = decoder.split(b, &at, &Layer::default(), both)?;
        let [q, k] = [self.rotated(b, &at.node("self_attn.q"), q, step)?, self.rotated(b, &at.node("self_attn.k"), k, step)?];
        earlier.push([k, v]);
        let all = |b: &mut Builder, name: &str, part: usize| {
            let parts: Vec<ValueId> = earlier.iter().filter_map(|pair| pair.get(part).copied()).collect();
            if let [only] = parts.as_slice() { Ok(*only) } else { b.node(&at.node(name), Concat { axis: 2 }, &parts) }
        };
        let [k, v] = [all(b, "self_attn.all_k", 0)?, all(b, "self_attn.all_v", 1)?];
        let attention = Attention { scale: decoder.scale, causal: step == 0, ..Attention::default() };
        let values: Vec<ValueId> = [q, k, v].into_iter().chain(inputs.visible.iter().copied()).collect();
        let context = b.node(&at.node("self_attn.context_heads"), attention, &values)?;
        let context = b.node(&at.node("self_attn.context"), MergeHeads {}, &[context])?;
        let attended = decoder.linear(b, &at, "self_attn.o_proj", context, self.needs.width, decoder.out_bias)?;
        let residual = if self.norm_before_residual { normed } else { inputs.hidden };
        let x = b.node(&at.node("attended"), Add {}, &[residual, attended])?;
        let y = norm(b, "post_attention_layernorm", x)?;
        let y = decoder.dense(b, &at, y)?;
        let hidden = b.node(&at.node, Add {}, &[x, y])?;
        let last = decoder.norm.add(b, &format!("{node}norm"), &format!("{}norm", self.prefix), hidden)?;
        let logits = linear_with(b, &format!("{node}lm_head"), &format!("{}lm_head", self.prefix), last, self.needs.draft_vocabulary, false)?;
        Ok((if self.norm_output { last } else { hidden }, logits))
    }

    /// Heads with rotary embedding, at positions that begin at `offset`.
    fn rotated(&self, b: &mut Builder, node: &str, x: ValueId, offset: usize) -> Result<ValueId> {
        if offset == 0 {
            return b.node(&format!("{node}_rotary"), self.rotary.clone(), &[x]);
        }
        let before = i64::try_from(offset).unwrap_or(i64::MAX);
        let padded = b.node(&format!("{node}_padded"), Pad { pads: vec![0, 0, before, 0, 0, 0, 0, 0], ..Pad::default() }, &[x])?;
        let rotated = b.node(&format!("{node}_rotary"), self.rotary.clone(), &[padded])?;
        b.node(&format!("{node}_moved"), Slice { start: before, length: None, axis: 2, ..Slice::default() }, &[rotated])
    }
}
