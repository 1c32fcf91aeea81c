//! Builds graphs from `config.json`, one file per model family.
//!
//! Parameters have the tensor names of the checkpoint, nodes those of the modules.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod bert;
mod block;
mod catalog;
mod classification;
mod clip;
mod config;
mod convnext;
mod deberta;
mod decoder;
mod deepseek;
mod dinov2;
mod distilbert;
mod efficientnet;
mod experts;
mod gemma;
mod gpt2;
mod gpt_neox;
mod keys;
mod latent;
mod llama;
mod mobilenet;
mod modernbert;
mod mpnet;
mod olmo2;
mod opt;
mod parts;
mod phi3;
mod resize;
mod resnet;
mod roberta;
mod rope;
mod sentence;
mod smollm3;
mod swin;
mod t5;
mod torchvision;
mod vit;
mod whisper;

pub use classification::ClassificationHead;
pub use config::{ReadKeys, Settings};
pub use experts::experts_key;
pub use keys::Keys;
pub use resize::{Shapes, Sizes, derives_head_dim, has_uniform_widths, layers_key, residual_stream_axes, resized, unsupported_heads_reason};
pub use sentence::SentenceModule;
pub use sentence::is_of_module;

use crate::error::{Error, Result};
use crate::ir::{Builder, Graph};

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
    /// Images and texts to similarity scores (dual encoder).
    DualEncoder,
    /// Encoder-decoder: text or audio to text.
    EncoderDecoder,
}

/// A model family.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Inputs and outputs.
    pub kind: ModelKind,
    /// Adds inputs, nodes and outputs to a graph.
    pub build: fn(&Settings, &mut Builder) -> Result<()>,
    /// Configuration keys of the family that `build` does not read.
    pub keys: Keys,
    /// Configuration keys of the sizes that structured pruning changes.
    pub sizes: Option<&'static Sizes>,
}

impl Architecture {
    /// The kind of a model with this configuration; an encoder-decoder family can also consist of its
    /// encoder.
    pub fn kind_of(&self, settings: &Settings) -> ModelKind {
        if self.kind == ModelKind::EncoderDecoder && settings.class().ends_with("EncoderModel") { ModelKind::Encoder } else { self.kind }
    }
}

/// All families.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture { model_type: "bert", kind: ModelKind::Encoder, build: bert::build, keys: bert::KEYS, sizes: Some(&bert::SIZES) },
    Architecture { model_type: "roberta", kind: ModelKind::Encoder, build: roberta::build, keys: bert::KEYS, sizes: Some(&bert::SIZES) },
    Architecture { model_type: "xlm-roberta", kind: ModelKind::Encoder, build: roberta::build, keys: bert::KEYS, sizes: Some(&bert::SIZES) },
    Architecture { model_type: "distilbert", kind: ModelKind::Encoder, build: distilbert::build, keys: distilbert::KEYS, sizes: Some(&distilbert::SIZES) },
    Architecture { model_type: "mpnet", kind: ModelKind::Encoder, build: mpnet::build, keys: mpnet::KEYS, sizes: Some(&mpnet::SIZES) },
    Architecture { model_type: "modernbert", kind: ModelKind::Encoder, build: modernbert::build, keys: modernbert::KEYS, sizes: Some(&modernbert::SIZES) },
    Architecture { model_type: "deberta-v2", kind: ModelKind::Encoder, build: deberta::build, keys: deberta::KEYS, sizes: Some(&deberta::SIZES) },
    Architecture { model_type: "t5", kind: ModelKind::EncoderDecoder, build: t5::build, keys: t5::KEYS, sizes: Some(&t5::SIZES) },
    Architecture { model_type: "mt5", kind: ModelKind::EncoderDecoder, build: t5::build_multilingual, keys: t5::KEYS, sizes: Some(&t5::SIZES) },
    Architecture { model_type: "whisper", kind: ModelKind::EncoderDecoder, build: whisper::build, keys: whisper::KEYS, sizes: Some(&whisper::SIZES) },
    Architecture { model_type: "gpt2", kind: ModelKind::Decoder, build: gpt2::build, keys: gpt2::KEYS, sizes: Some(&gpt2::SIZES) },
    Architecture { model_type: "gpt_neox", kind: ModelKind::Decoder, build: gpt_neox::build, keys: gpt_neox::KEYS, sizes: Some(&gpt_neox::SIZES) },
    Architecture { model_type: "opt", kind: ModelKind::Decoder, build: opt::build, keys: opt::KEYS, sizes: Some(&opt::SIZES) },
    Architecture { model_type: "llama", kind: ModelKind::Decoder, build: llama::build, keys: llama::KEYS, sizes: Some(&llama::SIZES) },
    Architecture { model_type: "mistral", kind: ModelKind::Decoder, build: llama::build_mistral, keys: llama::KEYS, sizes: Some(&decoder::SIZES) },
    Architecture { model_type: "qwen2", kind: ModelKind::Decoder, build: llama::build_qwen2, keys: llama::KEYS, sizes: Some(&decoder::SIZES) },
    Architecture { model_type: "qwen3", kind: ModelKind::Decoder, build: llama::build_qwen3, keys: llama::KEYS, sizes: Some(&llama::QWEN3_SIZES) },
    Architecture { model_type: "phi3", kind: ModelKind::Decoder, build: phi3::build, keys: phi3::KEYS, sizes: Some(&phi3::SIZES) },
    Architecture { model_type: "olmo2", kind: ModelKind::Decoder, build: olmo2::build, keys: olmo2::KEYS, sizes: Some(&decoder::SIZES) },
    Architecture { model_type: "smollm3", kind: ModelKind::Decoder, build: smollm3::build, keys: smollm3::KEYS, sizes: Some(&decoder::SIZES) },
    Architecture { model_type: "gemma2", kind: ModelKind::Decoder, build: gemma::build, keys: gemma::KEYS, sizes: Some(&gemma::SIZES) },
    Architecture { model_type: "gemma3_text", kind: ModelKind::Decoder, build: gemma::build_3, keys: gemma::KEYS_3, sizes: Some(&gemma::SIZES) },
    Architecture { model_type: "mixtral", kind: ModelKind::Decoder, build: experts::build_mixtral, keys: experts::KEYS, sizes: Some(&experts::MIXTRAL_SIZES) },
    Architecture { model_type: "qwen2_moe", kind: ModelKind::Decoder, build: experts::build_qwen2, keys: experts::KEYS, sizes: Some(&experts::QWEN_SIZES) },
    Architecture { model_type: "qwen3_moe", kind: ModelKind::Decoder, build: experts::build_qwen3, keys: experts::KEYS, sizes: Some(&experts::QWEN_SIZES) },
    Architecture { model_type: "deepseek_v2", kind: ModelKind::Decoder, build: deepseek::build, keys: deepseek::KEYS, sizes: Some(&deepseek::SIZES) },
    Architecture { model_type: "vit", kind: ModelKind::VisionTransformer, build: vit::build, keys: vit::KEYS, sizes: Some(&vit::SIZES) },
    Architecture { model_type: "dinov2", kind: ModelKind::VisionTransformer, build: dinov2::build, keys: dinov2::KEYS, sizes: Some(&dinov2::SIZES) },
    Architecture { model_type: "swin", kind: ModelKind::VisionTransformer, build: swin::build, keys: swin::KEYS, sizes: None },
    Architecture { model_type: "clip", kind: ModelKind::DualEncoder, build: clip::build, keys: clip::KEYS, sizes: None },
    Architecture { model_type: "clip_text_model", kind: ModelKind::Encoder, build: clip::build_text, keys: clip::KEYS, sizes: None },
    Architecture { model_type: "clip_vision_model", kind: ModelKind::VisionTransformer, build: clip::build_vision, keys: clip::KEYS, sizes: None },
    Architecture { model_type: "siglip", kind: ModelKind::DualEncoder, build: clip::build_siglip, keys: clip::KEYS, sizes: None },
    Architecture { model_type: "siglip_text_model", kind: ModelKind::Encoder, build: clip::build_siglip_text, keys: clip::KEYS, sizes: None },
    Architecture { model_type: "siglip_vision_model", kind: ModelKind::VisionTransformer, build: clip::build_siglip_vision, keys: clip::KEYS, sizes: None },
    Architecture { model_type: "convnext", kind: ModelKind::Convolutional, build: convnext::build, keys: convnext::KEYS, sizes: None },
    Architecture { model_type: "efficientnet", kind: ModelKind::Convolutional, build: efficientnet::build, keys: efficientnet::KEYS, sizes: None },
    Architecture { model_type: "resnet", kind: ModelKind::Convolutional, build: resnet::build, keys: resnet::KEYS, sizes: None },
    Architecture { model_type: "torchvision", kind: ModelKind::Convolutional, build: torchvision::build, keys: mobilenet::KEYS, sizes: None },
];

/// The family with this `model_type`.
pub fn family(model_type: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.model_type == model_type)
}

/// Builds the graph of a model.
///
/// # Errors
/// The family is not supported, the configuration is incomplete or requests something unsupported, or the
/// weights do not match it.
pub fn build(settings: &Settings, modules: &[SentenceModule], builder: Builder) -> Result<Graph> {
    describe(settings, modules, builder).map(|(graph, _)| graph)
}

/// Builds the graph of a model, and returns the unknown keys of its configuration.
///
/// # Errors
/// As [`build`].
pub fn describe(settings: &Settings, modules: &[SentenceModule], mut builder: Builder) -> Result<(Graph, Vec<String>)> {
    let read = ReadKeys::default();
    let settings = settings.recording(&read);
    let model_type = settings.text("model_type")?;
    let Some(architecture) = family(model_type) else {
        let supported = ARCHITECTURES.iter().map(|a| a.model_type).collect::<Vec<_>>().join(", ");
        return Err(Error::Unsupported {
            what: format!("model_type `{model_type}`"),
            hint: format!(
                "supported families: {supported}; other models need a graph.json next to the weights, and passes that only read weights need neither"
            ),
        });
    };
    (architecture.build)(&settings, &mut builder)?;
    let unknown = architecture.keys.check_model(&settings)?;
    sentence::add(modules, &mut builder)?;
    Ok((builder.finish()?, unknown))
}
