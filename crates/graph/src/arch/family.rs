//! Descriptions of model families: everything that is known about a family.

use serde_json::{Map, Value};

use super::gguf::GgufFamily;
use super::running::GraphBuilder;
use crate::store::Role;

/// Inputs and outputs of a model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// Text to embeddings or classes.
    Encoder,
    /// Text to next-token logits.
    Decoder,
    /// Images to features or classes, with attention.
    VisionTransformer,
    /// Images to features or classes, with convolutions.
    Convolutional,
    /// Images to boxes and their classes.
    Detector,
    /// Images and texts to similarity scores (dual encoder).
    DualEncoder,
    /// Encoder-decoder: text or audio to text.
    EncoderDecoder,
    /// Hidden states of another model to next-token logits (speculative decoding).
    DraftHead,
}

/// A pair (alias, original) of tensor names.
pub type Tie = (&'static str, &'static str);

/// A model family. Modules are listed by consecutive components of their names: `mlp.gate` is
/// `model.layers.3.mlp.gate`, and also contains `model.layers.3.mlp.gate.wg`.
#[derive(Clone, Copy)]
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Inputs and outputs.
    pub kind: ModelKind,
    /// Adds inputs, nodes and outputs to a graph; `None` for families that cannot be run, and in builds
    /// without the feature `run`.
    pub graph: Option<GraphBuilder>,
    /// Configuration keys that `graph` does not read.
    pub keys: Keys,
    /// Configuration keys of the sizes that structured pruning changes.
    pub sizes: Option<&'static Sizes>,
    /// Configuration keys that change the meaning of `sizes`.
    pub indirect_sizes: Option<IndirectSizes>,
    /// Whether `config.json` has one width per stage of convolutions, in `hidden_sizes`.
    pub has_stage_widths: bool,
    /// The classification head.
    pub classifier: Option<ClassificationHead>,
    /// Weights that are tied unless `config.json` unties them.
    pub tied: &'static [Tie],
    /// Names of the same table, regardless of the configuration.
    pub shared_tables: &'static [Tie],
    /// Linear layers of one module that read the same value, and that runtimes fuse into one.
    pub fused: &'static [&'static [&'static str]],
    /// Modules that contain the embedding tables.
    pub embeddings: &'static [&'static str],
    /// Modules that compute logits or scores from hidden states.
    pub heads: &'static [&'static str],
    /// Routers of mixtures of experts, and gates of shared experts.
    pub routers: &'static [&'static str],
    /// Other modules that are not quantized, with the role of their matrices, in addition to those of all
    /// families.
    pub exempt: &'static [(&'static str, Role)],
    /// Tensors that transformers 5 keeps in float32 if the model has a 16-bit dtype
    /// (`_keep_in_fp32_modules_strict`), by consecutive components of their names.
    pub float32: &'static [&'static str],
    /// Mixture-of-experts layout, if the family has experts.
    pub experts: Option<ExpertLayout>,
    /// Whether transformers replaces experts in one tensor with a linear layer each in quantized folders.
    pub splits_experts: bool,
    /// Whether transformers 5 does not stack experts that are separate tensors in a file, as it does for
    /// other families.
    pub needs_stacked_experts: bool,
    /// Maximum length of a text.
    pub positions: Positions,
    /// Whether linear weights are stored as `[in, out]` (transformers' `Conv1D`).
    pub is_input_major: bool,
    /// Whether transformers computes the number of rotated elements, and thereby the number of `longrope`
    /// factors that it accepts, from the width of the residual stream, even if the head width is separate.
    pub counts_rope_factors: bool,
    /// Initial layer scale, if `config.json` specifies none.
    pub layer_scale: f64,
    /// Replacements within module names, applied in order, that transformers 5 makes when it loads a
    /// checkpoint (its `conversion_mapping.py`).
    pub renames: &'static [(&'static str, &'static str)],
    /// The language model of a model that also has a vision tower. Its graph, which reads texts without
    /// images, is that of the whole model.
    pub language_model: Option<LanguageModel>,
    /// Names in GGUF files, if llama.cpp supports the family.
    pub gguf: Option<&'static GgufFamily>,
    /// Model type of onnxruntime-genai 0.18; `decoder` for decoders that it does not list.
    pub genai: &'static str,
}

/// The language model of a multimodal model, described by `text_config` in `config.json`.
#[derive(Debug, Clone, Copy)]
pub struct LanguageModel {
    /// `model_type`, if `text_config` does not specify it.
    pub model_type: &'static str,
    /// Sizes that `text_config` of published models does not specify.
    pub sizes: &'static [(&'static str, usize)],
    /// Whether the first published configurations have its keys next to `vision_config`.
    pub is_flat: bool,
    /// The vision tower, if it can be run.
    pub tower: Option<Tower>,
}

/// The vision tower of a model whose texts contain images.
#[derive(Debug, Clone, Copy)]
pub struct Tower {
    /// `model_type` of the tower as a model of its own.
    pub model_type: &'static str,
    /// Default of `patch_size`.
    pub patch: usize,
    /// Default of `image_token_id`.
    pub image_token: i64,
    /// Default of `mrope_section`: the number of pairs of elements of a head for each axis of positions.
    pub sections: [usize; 3],
    /// Whether the axes of neighboring pairs alternate.
    pub interleaved: bool,
    /// JSON values of keys that its configuration does not have.
    pub values: &'static [(&'static str, &'static str)],
}

/// Configuration keys that are not read but accepted.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Keys that never affect the computation: training, names, dtypes, generation.
    pub harmless: &'static [&'static str],
    /// Keys that can affect the computation, with the JSON values for which they do not. Null is always
    /// accepted.
    pub neutral: &'static [(&'static str, &'static str)],
}

impl Keys {
    /// No keys.
    pub const NONE: Keys = Keys { harmless: &[], neutral: &[] };
}

/// Configuration keys of sizes, each with a tensor and the axis that determines its value.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Possible prefixes of tensor names.
    pub prefixes: &'static [&'static str],
    /// Width of the residual stream.
    pub hidden: (&'static str, &'static str, usize),
    /// Number of heads; the axis has the total width of all heads.
    pub heads: (&'static str, &'static str, usize),
    /// Number of heads of the decoder in an encoder-decoder model, if it has a separate key.
    pub decoder_heads: Option<(&'static str, &'static str, usize)>,
    /// Number of key-value heads, with the projection of keys or the fused projection of queries, keys
    /// and values.
    pub groups: Option<(&'static str, &'static str, Groups)>,
    /// Width of a head, if it is not always the width of the residual stream divided by their number.
    pub head_dim: Option<&'static str>,
    /// Whether the default of `head_dim` is another value than that quotient.
    pub custom_head_dim_default: bool,
    /// Whether transformers requires the number of heads to divide the width of the residual stream,
    /// regardless of the head width.
    pub heads_must_divide: bool,
    /// Neurons of a layer and other sizes.
    pub other_sizes: &'static [(&'static str, &'static str, usize)],
    /// Number of layers.
    pub layers: &'static str,
    /// Tensors that the graph does not read, with the axis that has the width of the residual stream.
    pub unread: &'static [(&'static str, usize)],
}

/// Configuration keys that change the meaning of a size.
#[derive(Debug, Clone, Copy)]
pub struct IndirectSizes {
    /// A key that takes precedence over another one, and that key.
    pub replaced: (&'static str, &'static str),
    /// A flag, true by default, with which the size is computed from that key.
    pub adjusted: &'static str,
}

/// Contents of the projection of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Groups {
    /// Keys only.
    Separate,
    /// Queries, keys and values.
    Fused,
}

/// The classification head of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassificationHead {
    /// The class of a model with this head in `architectures`; empty if the family has no classes.
    pub class: &'static str,
    /// Prefix of the other tensors in this class.
    pub prefix: &'static str,
    /// Modules of the head; the last one computes the logits.
    pub modules: &'static [&'static str],
}

pub(super) const fn classifier(class: &'static str, prefix: &'static str, modules: &'static [&'static str]) -> Option<ClassificationHead> {
    Some(ClassificationHead { class, prefix, modules })
}

/// Mixture-of-experts layout.
#[derive(Debug, Clone, Copy)]
pub struct ExpertLayout {
    /// Keys of the number of experts in `config.json`, which differ between versions of transformers.
    pub keys: &'static [&'static str],
    /// Modules with one tensor for all experts, whose name does not contain `experts`.
    pub stacked: &'static [&'static str],
    /// Configuration keys of the layers with a dense network instead of experts; empty if there are none.
    pub dense: &'static [DenseLayers],
    /// Names of the gate, up and down projections of separate experts, if they are in the same module as the
    /// tensors `gate_up_proj` and `down_proj` of all experts, which have no biases.
    pub parts: Option<[&'static str; 3]>,
    /// The module of routers and experts in one tensor, and its name in files with separate experts, if they
    /// differ.
    pub renamed: Option<(&'static str, &'static str)>,
}

impl ExpertLayout {
    /// Experts whose names contain `experts`.
    pub(super) const SEPARATE: ExpertLayout =
        ExpertLayout { keys: &["num_experts"], stacked: &[], dense: &[], parts: Some(["gate_proj", "up_proj", "down_proj"]), renamed: None };
}

/// A configuration key of the layers with a dense network instead of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseLayers {
    /// The number of the first layers, which are dense.
    Count(&'static str),
    /// `dense` or `sparse` for each layer.
    Types(&'static str),
    /// The indices of the layers with experts.
    Experts(&'static str),
    /// The indices of dense layers, and the key of a step `n`: only every `n`-th layer has experts.
    Indices(&'static str, &'static str),
}

/// Maximum length of a text.
#[derive(Debug, Clone, Copy)]
pub struct Positions {
    /// Keys of the number of positions in `config.json`; the first that is present counts.
    pub keys: &'static [&'static str],
    /// Number of positions if no key is present.
    pub default: Option<usize>,
    /// Positions before that of the first token.
    pub offset: PositionOffset,
}

/// Number of positions before that of the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PositionOffset {
    /// A fixed number.
    Fixed(usize),
    /// The id of the padding token plus one.
    AfterPadding,
}

impl Positions {
    /// Positions of most families.
    pub const DEFAULT: Positions = Positions { keys: &["max_position_embeddings", "n_positions"], default: None, offset: PositionOffset::Fixed(0) };
}

/// Modules that are not quantized in any family: vision towers of multimodal models, layers that predict
/// further tokens, and the weights of heads in sparse attention, which runtimes keep in full precision.
pub(super) const EXEMPT: &[(&str, Role)] = &[
    ("visual", Role::Vision),
    ("vision_tower", Role::Vision),
    ("multi_modal_projector", Role::Vision),
    ("mtp", Role::TokenPrediction),
    ("eh_proj", Role::TokenPrediction),
    ("indexer.weights_proj", Role::Other),
];

/// Prefixes of the names of a language model next to a vision tower: in files of transformers 5, in published
/// ones, and in those of models without an output head.
pub(super) const PREFIXES: [&str; 3] = ["model.language_model.", "language_model.model.", "language_model."];

/// Bias for the selection of experts, whose differences bfloat16 does not resolve.
pub(super) const SELECTION_BIAS: &[&str] = &["e_score_correction_bias"];

/// A family without knowledge.
pub(super) const EMPTY: Family = Family {
    model_type: "",
    kind: ModelKind::Encoder,
    graph: None,
    keys: Keys::NONE,
    sizes: None,
    indirect_sizes: None,
    has_stage_widths: false,
    classifier: None,
    tied: &[],
    shared_tables: &[],
    fused: &[],
    embeddings: &[],
    heads: &[],
    routers: &[],
    exempt: &[],
    float32: &[],
    experts: None,
    splits_experts: false,
    needs_stacked_experts: false,
    positions: Positions::DEFAULT,
    is_input_major: false,
    counts_rope_factors: false,
    layer_scale: 1.0,
    renames: &[],
    language_model: None,
    gguf: None,
    genai: "decoder",
};

/// Encoders, in most families.
pub(super) const ENCODER: Family = Family { embeddings: &["embeddings"], ..EMPTY };

/// Vision transformers, in most families.
pub(super) const VISION_TRANSFORMER: Family =
    Family { kind: ModelKind::VisionTransformer, fused: &[&["query", "key", "value"]], embeddings: &["embeddings"], ..EMPTY };

/// Convolutional networks.
pub(super) const CONVOLUTIONAL: Family = Family { kind: ModelKind::Convolutional, ..EMPTY };

/// Sizes of decoders like Llama.
pub(super) const DECODER_SIZES: Sizes = Sizes {
    prefixes: &["model.", ""],
    hidden: ("hidden_size", "embed_tokens.weight", 1),
    heads: ("num_attention_heads", "layers.0.self_attn.o_proj.weight", 1),
    decoder_heads: None,
    groups: Some(("num_key_value_heads", "layers.0.self_attn.k_proj.weight", Groups::Separate)),
    head_dim: Some("head_dim"),
    custom_head_dim_default: false,
    heads_must_divide: false,
    other_sizes: &[("intermediate_size", "layers.0.mlp.down_proj.weight", 1)],
    layers: "num_hidden_layers",
    unread: &[],
};

/// Decoders like Llama.
pub(super) const DECODER: Family = Family {
    kind: ModelKind::Decoder,
    sizes: Some(&DECODER_SIZES),
    tied: &[("lm_head.weight", "model.embed_tokens.weight")],
    fused: &[&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"]],
    embeddings: &["embed_tokens"],
    heads: &["lm_head", "score"],
    ..EMPTY
};

impl Family {
    /// The role of the matrix of a module; `None` for the weight of a linear layer.
    pub(super) fn role(&self, module: &str) -> Option<Role> {
        let dotted = format!(".{module}.");
        let is_in = |pattern: &&str| dotted.contains(&format!(".{pattern}."));
        let listed = |patterns: &[&str], role: Role| patterns.iter().any(is_in).then_some(role);
        let is_norm = || module.rsplit('.').next().is_some_and(|last| last.contains("norm"));
        let exempt = || self.exempt.iter().chain(EXEMPT).find(|(pattern, _)| is_in(pattern)).map(|(_, role)| *role);
        listed(self.embeddings, Role::Table)
            .or_else(|| listed(self.heads, Role::Head))
            .or_else(|| listed(self.routers, Role::Router))
            .or_else(exempt)
            .or_else(|| is_norm().then_some(Role::Other))
    }

    /// Whether a tensor of rank 3 contains one projection of all experts.
    pub(super) fn is_stacked(&self, module: &str) -> bool {
        let dotted = format!(".{module}");
        self.experts.is_some_and(|experts| experts.stacked.iter().any(|part| dotted.ends_with(&format!(".{part}"))))
    }

    /// The configuration key of the number of experts, if the family has experts.
    pub fn experts_key(&self, config: &Map<String, Value>) -> Option<&'static str> {
        let keys = self.experts?.keys;
        let config = super::text_values(config);
        let is_present = |key: &&&str| config.get(**key).is_some_and(|value| !value.is_null());
        keys.iter().find(is_present).or(keys.first()).copied()
    }
}
