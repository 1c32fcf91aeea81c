//! Handling of configuration keys that graph construction does not read. Some never affect the computation,
//! others are only accepted with a value that does not.

use serde_json::Value;

use super::{Keys, Settings};
use crate::error::{Error, Result};

/// Keys that any transformers configuration may have.
const COMMON: Keys = Keys {
    harmless: &[
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_last_hidden_states",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    ],
    neutral: &[
        ("add_cross_attention", "false"),
        ("auto_map", "{}"),
        ("cross_attention_hidden_size", "null"),
        ("is_encoder_decoder", "false"),
        ("per_layer_config", "{}"),
        ("pruned_heads", "{}"),
    ],
};

impl Keys {
    /// Checks the keys that have not been read: refuses values that change the computation and returns
    /// unknown keys.
    pub fn check(&self, settings: &Settings, file: &str) -> Result<Vec<String>> {
        sort(self.harmless, self.neutral, settings, file)
    }

    /// As [`check`](Self::check), also accepting the keys of any transformers configuration; the keys of
    /// the family take precedence.
    pub fn check_model(&self, settings: &Settings) -> Result<Vec<String>> {
        let unknown = self.check(settings, "config.json")?;
        let own = |(name, _): &&(&str, &str)| !self.harmless.contains(name) && !self.neutral.iter().any(|(other, _)| other == name);
        let neutral: Vec<_> = COMMON.neutral.iter().filter(own).copied().collect();
        let rest = sort(COMMON.harmless, &neutral, settings, "config.json")?;
        Ok(unknown.into_iter().filter(|key| rest.contains(key)).collect())
    }
}

/// Returns the unread keys that are in neither list.
fn sort(harmless: &[&str], known: &[(&str, &str)], settings: &Settings, file: &str) -> Result<Vec<String>> {
    let mut unknown = Vec::new();
    for (key, value) in settings.unread() {
        let same = |text: &str| {
            serde_json::from_str::<Value>(text).is_ok_and(|neutral| neutral == *value || neutral.as_f64().is_some_and(|n| value.as_f64() == Some(n)))
        };
        // The towers of a model, a backbone, and the layer of a draft head have separate configurations.
        let own = ["backbone_config.", "text_config.", "vision_config.", "text_config_dict.", "vision_config_dict.", "transformer_layer_config."]
            .iter()
            .find_map(|tower| key.strip_prefix(tower))
            .unwrap_or(&key);
        match known.iter().find(|(name, _)| *name == own) {
            Some((_, neutral)) if same(neutral) => {}
            Some((_, neutral)) => {
                return Err(Error::Unsupported {
                    what: format!("{file}: `{key}` of {value}"),
                    hint: format!("it changes what the model computes, and only {neutral} is supported; passes that only read weights do not need it"),
                });
            }
            None if harmless.contains(&own) => {}
            None => unknown.push(key),
        }
    }
    Ok(unknown)
}
