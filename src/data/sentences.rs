//! What files of a sentence-transformers folder say of texts.

use std::path::Path;

use crate::arch::{Keys, ReadKeys, Settings};
use crate::error::Result;
use crate::files;
use crate::model::Config;

/// One of these holds the settings; the name is that of the model class of its time.
const FILES: [&str; 7] = ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"];
const KEYS: Keys = Keys {
    harmless: &["modality_config", "model_args", "config_args", "tokenizer_args"],
    neutral: &[("module_output_name", "\"token_embeddings\""), ("transformer_task", "\"feature-extraction\"")],
};

const PROMPTS: &str = "config_sentence_transformers.json";
const PROMPT_KEYS: Keys = Keys { harmless: &["__version__", "model_type", "prompts", "similarity_fn_name"], neutral: &[("default_prompt_name", "null")] };

/// How texts become tokens.
#[derive(Debug, Default)]
pub(super) struct Sentences {
    /// Whether texts are written in lower case before anything else.
    pub lower_case: bool,
    /// Most tokens of a text.
    pub max_length: Option<usize>,
    /// Keys that are not known, behind the names of their files.
    pub unknown: Vec<String>,
}

impl Sentences {
    /// Reads the files that are there.
    ///
    /// # Errors
    /// A file cannot be read, or asks for something that is not supported.
    pub fn open(folder: &Path) -> Result<Sentences> {
        let mut found = Sentences::default();
        let file = FILES.iter().map(|kind| format!("sentence_{kind}_config.json")).find(|file| files::is_file(&folder.join(file)));
        if let Some(file) = file {
            let (config, read) = (Config::open(&folder.join(&file))?, ReadKeys::default());
            let settings = Settings::new(config.values()).noting(&read);
            found.lower_case = settings.flag_or("do_lower_case", false)?;
            found.max_length = if settings.get("max_seq_length").is_some() { Some(settings.size("max_seq_length")?) } else { None };
            found.unknown.extend(KEYS.sort(&settings, &file)?.into_iter().map(|key| format!("{file}: {key}")));
        }
        let (config, read) = (Config::open(&folder.join(PROMPTS))?, ReadKeys::default());
        let unknown = PROMPT_KEYS.sort(&Settings::new(config.values()).noting(&read), PROMPTS)?;
        found.unknown.extend(unknown.into_iter().map(|key| format!("{PROMPTS}: {key}")));
        Ok(found)
    }
}
