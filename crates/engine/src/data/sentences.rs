//! Text settings of sentence-transformers folders.

use std::path::Path;

use crate::arch::{Keys, ReadKeys, Settings};
use crate::error::Result;
use crate::files;
use crate::model::{Config, auxiliary_path};

/// Model classes in the names of the settings file, `sentence_{class}_config.json`.
const FILES: [&str; 7] = ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"];
const KEYS: Keys = Keys {
    harmless: &["modality_config", "model_args", "config_args", "tokenizer_args"],
    neutral: &[("module_output_name", "\"token_embeddings\""), ("transformer_task", "\"feature-extraction\"")],
};

const PROMPTS: &str = "config_sentence_transformers.json";
const PROMPT_KEYS: Keys = Keys { harmless: &["__version__", "model_type", "prompts", "similarity_fn_name"], neutral: &[("default_prompt_name", "null")] };

/// Tokenization settings.
#[derive(Debug, Default)]
pub(super) struct Sentences {
    /// Whether texts are lowercased before tokenization.
    pub lower_case: bool,
    /// Maximum number of tokens of a text.
    pub max_length: Option<usize>,
    /// Unrecognized keys, prefixed with their file names.
    pub unknown: Vec<String>,
}

impl Sentences {
    /// Reads the settings files of a folder, if there are any.
    pub fn open(folder: &Path) -> Result<Sentences> {
        let mut found = Sentences::default();
        let file = FILES.iter().map(|kind| format!("sentence_{kind}_config.json")).find(|file| files::is_file(&auxiliary_path(folder, file)));
        if let Some(file) = file {
            let (config, read) = (Config::open(&auxiliary_path(folder, &file))?, ReadKeys::default());
            let settings = Settings::new(config.values()).recording(&read);
            found.lower_case = settings.flag_or("do_lower_case", false)?;
            found.max_length = if settings.get("max_seq_length").is_some() { Some(settings.size("max_seq_length")?) } else { None };
            found.unknown.extend(KEYS.check(&settings, &file)?.into_iter().map(|key| format!("{file}: {key}")));
        }
        let (config, read) = (Config::open(&auxiliary_path(folder, PROMPTS))?, ReadKeys::default());
        let unknown = PROMPT_KEYS.check(&Settings::new(config.values()).recording(&read), PROMPTS)?;
        found.unknown.extend(unknown.into_iter().map(|key| format!("{PROMPTS}: {key}")));
        Ok(found)
    }
}
