//! Extracts the language model of a model with a vision tower, as a model of its own.
//!
//! ```yaml
//! passes:
//!   - extract-language-model
//! export:
//!   - gguf: { type: Q4_K_M }
//! ```

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::arch;
use crate::error::{Error, Result, counted};
use crate::ir::{GraphFile, difference};
use crate::model::{Config, ExclusionReason, Model};
use crate::pass::{Pass, Plan, options_of};
use crate::run_state::{Applied, RunState};

/// Keep only the language model of a model with a vision tower, with the configuration and the names of a
/// text model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ExtractLanguageModel {}

const NAME: &str = "extract-language-model";

/// Files that describe the preprocessing of images.
const OF_IMAGES: [&str; 3] = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

/// Keys that a text model shares with the model that contains it.
const SHARED: [&str; 6] = ["bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version"];

impl Pass for ExtractLanguageModel {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn plan(&self, model: &Model, _state: &RunState) -> Result<Plan<'static>> {
        let model = &model.on_texts();
        let model_type = model.config.model_type();
        let Some(text) = arch::extracted(model.config.values()) else {
            let reason = if arch::has_tower(model_type) {
                let of_text = arch::text_values(model.config.values()).get("model_type").cloned().unwrap_or_default();
                format!("the language model {of_text} in `text_config` of config.json cannot be extracted")
            } else if model_type.is_empty() {
                "the model has no `model_type` in config.json".to_owned()
            } else {
                format!("`{model_type}` in config.json is not a model with a vision tower")
            };
            return Err(Error::option(NAME, reason));
        };
        if !model.has_derived_graph() {
            return Err(Error::option(NAME, "the model has a graph of its own: use this pass before passes that change the graph"));
        }
        let graph = model.graph()?;
        let mut planned = model.clone();
        let (mut removed, mut applied) = (0usize, Applied::new(NAME, self.options()));
        planned.weights.by_name.clear();
        for (name, weight) in &model.weights.by_name {
            if arch::is_of_tower(name) {
                removed += 1;
                continue;
            }
            let new = arch::name_in_text_model(name);
            if new != *name {
                applied.tensors.insert(name.clone());
            }
            if planned.weights.by_name.insert(new.clone(), weight.clone()).is_some() {
                return Err(Error::tensor(name, format!("becomes `{new}`, and so does another tensor"), "remove one of them"));
            }
        }
        let ties_head = !model.tied_names().is_empty() || !planned.weights.by_name.contains_key("lm_head.weight");
        configure(&mut planned.config, text, ties_head);
        planned.auxiliary.exclude(ExclusionReason::Described, |file| OF_IMAGES.iter().any(|name| file == Path::new(name)));
        // The class of the text model may have other defaults than its configuration relied on.
        let before = GraphFile::from(&graph).edited(&|_| false, &arch::name_in_text_model).build(&planned.weights)?;
        if let Some([one, two]) = difference(&before, &planned.graph()?, &planned.weights)? {
            let reason = format!("`{}` in config.json would compute `{two}` instead of `{one}`", planned.config.model_type());
            return Err(Error::run(NAME, reason, "specify the values in config.json on which the language model relies"));
        }
        applied.rule = "all tensors except those of the vision tower".into();
        applied.details = json!({ "removed": removed, "model_type": planned.config.model_type() });
        applied.notes =
            vec![format!("the language model is stored as `{}`; {} of the vision tower are removed", planned.config.model_type(), counted(removed, "tensor"))];
        Ok(Plan::new(planned, applied))
    }

    fn remedy(&self) -> &'static str {
        ""
    }
}

/// Replaces the configuration of the whole model by that of the text model.
fn configure(config: &mut Config, text: arch::TextModel, ties_head: bool) {
    let whole = config.values().clone();
    let mut values = text.values;
    let shared = SHARED.iter().filter_map(|key| Some(((*key).to_owned(), whole.get(*key).filter(|value| !value.is_null())?.clone())));
    values.extend(shared);
    values.insert("tie_word_embeddings".to_owned(), json!(ties_head));
    values.insert("architectures".to_owned(), json!([text.class]));
    values.insert("model_type".to_owned(), json!(text.model_type));
    whole.keys().for_each(|key| config.remove(key));
    values.into_iter().for_each(|(key, value)| config.set(&key, value));
}
