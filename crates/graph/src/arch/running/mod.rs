//! Graphs of the families.

pub(super) mod block;
mod catalog;
mod classification;
mod config;
pub(super) mod decoder;
pub mod draft_head;
pub(super) mod experts;
mod images;
mod keys;
pub(super) mod latent;
mod layout;
pub(super) mod mobilenet;
pub(super) mod parts;
mod resize;
pub(super) mod rope;
mod sentence;
pub(super) mod state_space;

pub use config::{GraphBuilder, ReadKeys, Settings, indivisible, is_indivisible, unknown_layer_type};
pub use images::with_images;
pub use resize::{
    Shapes, dense_layers, derives_head_dim, has_stage_widths, has_uniform_widths, layers_key, refuses_rope_factors, residual_stream_axes, resized,
};
pub use sentence::{SentenceModule, is_of_module};

use super::{ClassificationHead, DenseLayers, Family, Groups, IndirectSizes, Keys, LanguageModel, ModelKind, Sizes, families, family};
use crate::error::{Error, Result};
use crate::ir::{Builder, Graph};

/// The graph of a family, in builds that run models.
macro_rules! graph {
    ($build:path) => {
        Some($build)
    };
}

impl Family {
    /// Whether models of this family can be run.
    pub fn is_run(&self) -> bool {
        self.graph.is_some() || self.language_model.is_some()
    }

    fn add_graph(&self, settings: &Settings, builder: &mut Builder) -> Result<()> {
        self.graph.map_or(Ok(()), |graph| graph(settings, builder))
    }

    /// The kind of a model with this configuration; an encoder-decoder family can also consist of its
    /// encoder.
    pub fn kind_of(&self, settings: &Settings) -> ModelKind {
        if self.kind == ModelKind::EncoderDecoder && settings.class().ends_with("EncoderModel") { ModelKind::Encoder } else { self.kind }
    }
}

/// Builds the graph of a model.
pub fn build(settings: &Settings, modules: &[SentenceModule], builder: Builder) -> Result<Graph> {
    describe(settings, modules, builder).map(|(graph, _)| graph)
}

/// Builds the graph of a model, and returns the unknown keys of its configuration.
pub fn describe(settings: &Settings, modules: &[SentenceModule], mut builder: Builder) -> Result<(Graph, Vec<String>)> {
    let read = ReadKeys::default();
    let settings = settings.recording(&read);
    let head = settings.get("speculators_model_type").is_some();
    let model_type = settings.text(if head { "speculators_model_type" } else { "model_type" })?;
    let Some(family) = family(model_type).filter(|family| family.is_run()) else {
        let supported = families().filter(|family| family.is_run()).map(|family| family.model_type).collect::<Vec<_>>().join(", ");
        return Err(Error::Unsupported {
            what: format!("model_type `{model_type}`"),
            hint: format!(
                "supported families: {supported}; other models need a graph.json next to the weights, and passes that only read weights need neither"
            ),
        });
    };
    let unknown = match family.language_model {
        Some(language_model) => {
            let text = language_model.build(&settings, &mut builder)?;
            let unknown = family.keys.check_model(&settings)?;
            let rest = text.keys.check_model(&settings)?;
            unknown.into_iter().filter(|key| rest.contains(key)).collect()
        }
        None => {
            family.add_graph(&settings, &mut builder)?;
            family.keys.check_model(&settings)?
        }
    };
    sentence::add(modules, &mut builder)?;
    Ok((builder.finish()?, unknown))
}

impl LanguageModel {
    /// Adds the graph of the language model with the configuration of the whole model, and returns its
    /// family.
    fn build(&self, settings: &Settings, builder: &mut Builder) -> Result<&'static Family> {
        const GROUP: &str = "text_config";
        let is_flat = self.is_flat && settings.get(GROUP).is_none();
        let text = if is_flat { *settings } else { settings.group_or_empty(GROUP)? };
        let model_type = if is_flat { self.model_type } else { text.text_or("model_type", self.model_type)? };
        let Some(family) = family(model_type).filter(|family| family.graph.is_some()) else {
            return Err(Error::Unsupported {
                what: format!("config.json: `{GROUP}` with the model_type `{model_type}`"),
                hint: "the language model cannot be run; passes that only read weights do not need it".into(),
            });
        };
        family.add_graph(&text.with_sizes(self.sizes).inside(settings), builder)?;
        if self.is_flat && !is_flat {
            // Some versions of transformers wrote the keys twice.
            text.mark_repeated(settings);
        }
        Ok(family)
    }
}
