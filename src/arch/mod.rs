//! From `config.json` to a graph, one file for each family.
//!
//! Parameters have the names of the checkpoint, nodes those of the modules.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod bert;
mod config;
mod distilbert;
mod gpt2;
mod keys;
mod llama;
mod mobilenet;
mod parts;
mod resize;
mod resnet;
mod roberta;
mod sentence;
mod vit;

pub use config::{ReadKeys, Settings};
pub use keys::Keys;
pub use resize::{Shapes, heads_fill_the_stream, layers_key, one_width, resized};
pub use sentence::Pooling;

use crate::error::{Error, Result};
use crate::ir::{Builder, Graph};

/// A family of models.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Adds inputs, nodes and outputs.
    pub build: fn(&Settings, &mut Builder) -> Result<()>,
    /// Keys of the family that `build` does not read.
    pub keys: Keys,
}

/// All families.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture { model_type: "bert", build: bert::build, keys: bert::KEYS },
    Architecture { model_type: "roberta", build: roberta::build, keys: bert::KEYS },
    Architecture { model_type: "xlm-roberta", build: roberta::build, keys: bert::KEYS },
    Architecture { model_type: "distilbert", build: distilbert::build, keys: distilbert::KEYS },
    Architecture { model_type: "gpt2", build: gpt2::build, keys: gpt2::KEYS },
    Architecture { model_type: "llama", build: llama::build, keys: llama::KEYS },
    Architecture { model_type: "mistral", build: llama::build, keys: llama::KEYS },
    Architecture { model_type: "qwen2", build: llama::build, keys: llama::KEYS },
    Architecture { model_type: "qwen3", build: llama::build, keys: llama::KEYS },
    Architecture { model_type: "vit", build: vit::build, keys: vit::KEYS },
    Architecture { model_type: "resnet", build: resnet::build, keys: resnet::KEYS },
    Architecture { model_type: "torchvision", build: torchvision, keys: mobilenet::KEYS },
];

fn torchvision(settings: &Settings, builder: &mut Builder) -> Result<()> {
    match settings.text("variant")? {
        "mobilenet_v2" => mobilenet::build(settings, builder),
        _ => resnet::build_torchvision(settings, builder),
    }
}

/// Builds the graph of a model.
///
/// # Errors
/// The family is not known, the configuration lacks something or asks for something that is not supported, or the weights do not fit it.
pub fn build(settings: &Settings, pooling: &[Pooling], builder: Builder) -> Result<Graph> {
    describe(settings, pooling, builder).map(|(graph, _)| graph)
}

/// The graph of a model, and the keys of its configuration that are not known.
///
/// # Errors
/// As [`build`].
pub fn describe(settings: &Settings, pooling: &[Pooling], mut builder: Builder) -> Result<(Graph, Vec<String>)> {
    let read = ReadKeys::default();
    let settings = settings.noting(&read);
    let model_type = settings.text("model_type")?;
    let Some(architecture) = ARCHITECTURES.iter().find(|a| a.model_type == model_type) else {
        let known = ARCHITECTURES.iter().map(|a| a.model_type).collect::<Vec<_>>().join(", ");
        return Err(Error::Unsupported {
            what: format!("model_type `{model_type}`"),
            hint: format!("known families: {known}; a graph.json beside the weights describes any other, and passes over weights need neither"),
        });
    };
    (architecture.build)(&settings, &mut builder)?;
    let unknown = architecture.keys.sort_model(&settings)?;
    sentence::add(pooling, &mut builder)?;
    Ok((builder.finish()?, unknown))
}
