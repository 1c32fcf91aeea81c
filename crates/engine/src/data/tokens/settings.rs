//! Keys of `tokenizer_config.json` that take precedence over `tokenizer.json`.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{PreTokenizerWrapper, Tokenizer, TruncationDirection};

use super::class::tokenizer_class;
use crate::error::{Error, Result};

/// Applies `split_special_tokens`, and `add_prefix_space` for the tokenizer classes that use it.
///
/// These classes replace the pre-tokenizer of `tokenizer.json` in transformers. Here, the other steps of a
/// stored sequence remain, such as the separation of digits in SmolLM2, because the model was trained with
/// them. If the class itself has no sequence, its default does not apply to a stored one.
pub(super) fn configure_splitting(tokenizer: &mut Tokenizer, settings: &Map<String, Value>, config: &Map<String, Value>) {
    let flag = |key: &str| settings.get(key).and_then(Value::as_bool);
    tokenizer.set_encode_special_tokens(flag("split_special_tokens").unwrap_or(false));
    let Some(class) = tokenizer_class(settings, config) else { return };
    let (Some(default), Some(mut pre_tokenizer)) = (class.prefix_space, tokenizer.get_pre_tokenizer().cloned()) else { return };
    let prefix_space = flag("add_prefix_space");
    match &mut pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(bytes) => bytes.add_prefix_space = prefix_space.unwrap_or(default),
        PreTokenizerWrapper::Sequence(sequence) => {
            let Some(prefix_space) = prefix_space.or(class.is_sequence.then_some(default)) else { return };
            let parts: &mut [PreTokenizerWrapper] = sequence.as_mut();
            for part in parts {
                if let PreTokenizerWrapper::ByteLevel(bytes) = part {
                    bytes.add_prefix_space = prefix_space;
                }
            }
        }
        _ => return,
    }
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
}

/// The end of a text that truncation removes: that of `truncation_side`, or else of the truncation stored
/// in `tokenizer.json`. `path` is that of the settings, for errors.
pub(super) fn truncation_direction(settings: &Map<String, Value>, stored: Option<TruncationDirection>, path: &Path) -> Result<TruncationDirection> {
    let Some(side) = settings.get("truncation_side") else { return Ok(stored.unwrap_or_default()) };
    match side.as_str() {
        Some("left") => Ok(TruncationDirection::Left),
        Some("right") => Ok(TruncationDirection::Right),
        _ => Err(Error::malformed(path, format!("`truncation_side` is {side}: set it to \"left\" or \"right\", or remove it"))),
    }
}

/// Whether token type ids distinguish the texts of a pair: the tokenizer passes them according to
/// `model_input_names`, or else by default of its class. Otherwise transformers passes none, which means
/// that all are zero.
pub(super) fn has_token_types(settings: &Map<String, Value>, config: &Map<String, Value>, path: &Path) -> Result<bool> {
    if let Some(names) = settings.get("model_input_names") {
        let names = names.as_array().ok_or_else(|| Error::malformed(path, format!("`model_input_names` is {names}: store a list of names, or remove it")))?;
        return Ok(names.iter().any(|name| name.as_str() == Some("token_type_ids")));
    }
    // Models with token types usually have tokenizers with them.
    Ok(tokenizer_class(settings, config).is_none_or(|class| class.has_token_types))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(values: &Value) -> Map<String, Value> {
        values.as_object().cloned().unwrap()
    }

    /// The values of `AutoTokenizer` of transformers 5.
    #[test]
    fn texts_are_truncated_at_the_side_of_the_settings() {
        use TruncationDirection::{Left, Right};
        let direction = |settings: Value, stored| truncation_direction(&object(&settings), stored, Path::new("tokenizer_config.json"));
        for (settings, stored, expected) in [
            (json!({}), None, Right),
            (json!({}), Some(Left), Left),
            (json!({ "truncation_side": "left" }), None, Left),
            (json!({ "truncation_side": "right" }), Some(Left), Right),
        ] {
            assert_eq!(direction(settings.clone(), stored).unwrap(), expected, "{settings}");
        }
        for wrong in [json!("middle"), Value::Null] {
            let error = direction(json!({ "truncation_side": wrong }), None).unwrap_err().to_string();
            assert!(error.contains("tokenizer_config.json: `truncation_side` is "), "{error}");
        }
    }

    /// The values of `AutoTokenizer` of transformers 5 for the model type `bert`.
    #[test]
    fn token_types_follow_from_names_of_inputs_or_the_class() {
        let found = |settings: &Value, config: &Value| has_token_types(&object(settings), &object(config), Path::new("tokenizer_config.json"));
        let none = json!({});
        for (class, expected) in [
            ("BertTokenizer", true),
            ("BertTokenizerFast", true),
            ("ElectraTokenizer", true),
            ("DebertaV2TokenizerFast", true),
            ("RobertaTokenizer", false),
            ("DistilBertTokenizer", false),
            ("PreTrainedTokenizerFast", false),
            ("TokenizersBackend", false),
            ("FooTokenizer", false),
        ] {
            let settings = json!({ "tokenizer_class": class });
            assert_eq!(found(&settings, &none).unwrap(), expected, "{class}");
            assert_eq!(found(&none, &settings).unwrap(), expected, "{class} in config.json");
            for (names, listed) in [(json!(["input_ids", "attention_mask"]), false), (json!(["input_ids", "token_type_ids"]), true)] {
                assert_eq!(found(&json!({ "tokenizer_class": class, "model_input_names": names }), &none).unwrap(), listed, "{class}");
            }
        }
        for (model_type, expected) in [("bert", true), ("distilbert", true), ("deberta", true), ("roberta", false), ("phi3", false)] {
            assert_eq!(found(&none, &json!({ "model_type": model_type })).unwrap(), expected, "{model_type}");
        }
        assert!(!found(&json!({ "tokenizer_class": "BertTokenizer" }), &json!({ "model_type": "modernbert" })).unwrap());
        assert!(found(&none, &none).unwrap());
        assert!(found(&json!({ "tokenizer_class": "FooTokenizer", "auto_map": {} }), &none).unwrap());
        let error = found(&json!({ "model_input_names": null }), &none).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json: `model_input_names` is null"), "{error}");
    }

    const DIGITS: &str = "Digits";
    const SPLIT: &str = "Split";

    /// Whether a space is added before a text by a tokenizer whose pre-tokenizer is byte-level (`first` is
    /// empty), or a sequence of `first` and a byte-level pre-tokenizer.
    fn adds_space(settings: &Value, config: &Value, first: &str, stored: bool) -> bool {
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": stored, "trim_offsets": true, "use_regex": first != SPLIT });
        let pre_tokenizer = match first {
            DIGITS => json!({ "type": "Sequence", "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes] }),
            SPLIT => {
                let split = json!({ "type": "Split", "pattern": { "Regex": "\\s?\\w+" }, "behavior": "Isolated", "invert": false });
                json!({ "type": "Sequence", "pretokenizers": [split, bytes] })
            }
            _ => bytes,
        };
        let model = json!({ "type": "BPE", "vocab": {}, "merges": [] });
        let mut tokenizer: Tokenizer = json!({ "version": "1.0", "pre_tokenizer": pre_tokenizer, "model": model }).to_string().parse().unwrap();
        configure_splitting(&mut tokenizer, &object(settings), &object(config));
        let found = match tokenizer.get_pre_tokenizer().unwrap() {
            PreTokenizerWrapper::Sequence(sequence) => {
                let parts: &[PreTokenizerWrapper] = sequence.as_ref();
                assert!(matches!(parts.first(), Some(PreTokenizerWrapper::Digits(_) | PreTokenizerWrapper::Split(_))), "{settings} {config}");
                assert_eq!(parts.len(), 2);
                parts.last().unwrap()
            }
            bytes => bytes,
        };
        let PreTokenizerWrapper::ByteLevel(bytes) = found else { panic!("{found:?}") };
        assert_eq!(bytes.use_regex, first != SPLIT);
        bytes.add_prefix_space
    }

    /// The values of `AutoTokenizer` of transformers 5.23 for the model type `llama`.
    #[test]
    fn prefix_spaces_follow_from_the_key_or_the_class() {
        let config = json!({ "model_type": "llama" });
        for (class, default) in [
            ("GPT2", false),
            ("Roberta", false),
            ("Bart", false),
            ("LED", false),
            ("Longformer", false),
            ("Mvp", false),
            ("GPTNeoX", false),
            ("CodeGen", false),
            ("Cohere", false),
            ("Qwen2", false),
            ("Qwen3_5", false),
            ("Whisper", false),
            ("Luke", false),
            ("Deberta", false),
            ("MarkupLM", false),
            ("Blenderbot", true),
            ("LayoutLMv3", true),
        ] {
            for (ending, stored) in [("Tokenizer", true), ("Tokenizer", false), ("TokenizerFast", true), ("TokenizerFast", false)] {
                let name = format!("{class}{ending}");
                let settings = json!({ "tokenizer_class": name });
                assert_eq!(adds_space(&settings, &config, "", stored), default, "{name} {stored}");
                // Only the default of a class whose pre-tokenizer is a sequence applies to sequences.
                let expected = if ["Cohere", "Qwen2", "Qwen3_5"].contains(&class) { default } else { stored };
                for first in [DIGITS, SPLIT] {
                    assert_eq!(adds_space(&settings, &config, first, stored), expected, "{name} {first} {stored}");
                }
                for key in [true, false] {
                    let settings = json!({ "tokenizer_class": name, "add_prefix_space": key });
                    for first in ["", DIGITS, SPLIT] {
                        assert_eq!(adds_space(&settings, &config, first, stored), key, "{settings} {first} {stored}");
                    }
                }
            }
        }
    }

    /// The values of `AutoTokenizer` of transformers 5.23, except with `auto_map`.
    #[test]
    fn prefix_spaces_follow_from_the_effective_class() {
        let gpt2 = json!({ "tokenizer_class": "GPT2Tokenizer" });
        let (none, key) = (json!({}), json!({ "add_prefix_space": true }));
        for (settings, config, stored, expected) in [
            // The class follows from the model type.
            (&none, json!({ "model_type": "gpt2" }), true, false),
            (&key, json!({ "model_type": "gpt2" }), false, true),
            (&key, json!({ "model_type": "roberta" }), false, true),
            (&none, json!({ "model_type": "gpt_neox" }), true, false),
            (&key, json!({ "model_type": "opt" }), false, true),
            (&none, json!({ "model_type": "bart" }), true, false),
            (&none, json!({ "model_type": "longformer" }), true, false),
            (&none, json!({ "model_type": "gpt_neo" }), true, false),
            (&none, json!({ "model_type": "blenderbot" }), true, true),
            (&none, json!({ "model_type": "qwen3" }), true, false),
            (&json!({ "add_prefix_space": null }), json!({ "model_type": "qwen3" }), true, false),
            (&none, json!({ "model_type": "llama" }), true, true),
            (&key, json!({ "model_type": "llama" }), false, false),
            (&none, json!({}), true, true),
            // The class is stored.
            (&gpt2, json!({}), true, false),
            (&gpt2, json!({ "model_type": "unknown" }), true, false),
            (&none, json!({ "model_type": "llama", "tokenizer_class": "GPT2Tokenizer" }), true, false),
            (&json!({ "tokenizer_class": "PreTrainedTokenizerFast" }), gpt2.clone(), true, true),
            (&json!({ "tokenizer_class": "PreTrainedTokenizerFast" }), json!({ "model_type": "gpt2" }), true, true),
            (&json!({ "tokenizer_class": "FooTokenizer" }), json!({ "model_type": "gpt2" }), true, true),
            // The stored class is ignored.
            (&gpt2, json!({ "model_type": "modernbert" }), true, true),
            (&gpt2, json!({ "model_type": "phi3" }), true, true),
            (&none, json!({ "model_type": "modernbert", "tokenizer_class": "GPT2Tokenizer" }), true, true),
            (&json!({ "tokenizer_class": "GPTNeoXTokenizer" }), json!({ "model_type": "stablelm" }), true, true),
            (&json!({ "tokenizer_class": "PreTrainedTokenizerFast" }), json!({ "model_type": "qwen2" }), true, false),
            // The class may be in the repository of the model.
            (&json!({ "tokenizer_class": "GPT2Tokenizer", "auto_map": {} }), json!({ "model_type": "gpt2" }), true, true),
        ] {
            assert_eq!(adds_space(settings, &config, "", stored), expected, "{settings} {config}");
        }
    }
}
