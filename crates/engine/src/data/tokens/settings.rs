//! Keys of `tokenizer_config.json` that take precedence over `tokenizer.json`.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{PreTokenizerWrapper, Tokenizer, TruncationDirection};

use crate::error::{Error, Result};

/// Tokenizer classes of transformers that pass token type ids by default, without `Tokenizer` or
/// `TokenizerFast` at the end.
const WITH_TOKEN_TYPES: [&str; 16] = [
    "Bert",
    "Canine",
    "ConvBert",
    "DPRContextEncoder",
    "DPRQuestionEncoder",
    "Deberta",
    "DebertaV2",
    "Electra",
    "FNet",
    "LayoutLM",
    "LayoutLMv2",
    "Lxmert",
    "MarkupLM",
    "MobileBert",
    "SqueezeBert",
    "Tapas",
];

/// Byte-level tokenizer classes of transformers whose key `add_prefix_space`, by default false, takes
/// precedence over `tokenizer.json`, without `Tokenizer` or `TokenizerFast` at the end.
const WITH_PREFIX_SPACE: [&str; 7] = ["Bart", "CodeGen", "Deberta", "GPT2", "GPTNeoX", "LED", "Roberta"];

/// The tokenizer class without `Tokenizer` or `TokenizerFast` at the end.
fn class_name(class: &str) -> Option<&str> {
    class.strip_suffix("Fast").unwrap_or(class).strip_suffix("Tokenizer")
}

/// Applies `split_special_tokens`, and `add_prefix_space` for the tokenizer classes that use it.
pub(super) fn configure_splitting(tokenizer: &mut Tokenizer, settings: &Map<String, Value>) {
    let flag = |key: &str| settings.get(key).and_then(Value::as_bool).unwrap_or(false);
    tokenizer.set_encode_special_tokens(flag("split_special_tokens"));
    let class = settings.get("tokenizer_class").and_then(Value::as_str).and_then(class_name);
    if !class.is_some_and(|class| WITH_PREFIX_SPACE.contains(&class)) {
        return;
    }
    let Some(PreTokenizerWrapper::ByteLevel(stored)) = tokenizer.get_pre_tokenizer() else { return };
    let mut bytes = *stored;
    bytes.add_prefix_space = flag("add_prefix_space");
    tokenizer.with_pre_tokenizer(Some(bytes));
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
    let class = [settings, config].into_iter().find_map(|values| values.get("tokenizer_class")?.as_str());
    // Without a class, it follows from the model, and models with token types have tokenizers with them.
    // Classes in the repository of a model are not known.
    let Some(class) = class.filter(|_| !settings.contains_key("auto_map")) else { return Ok(true) };
    Ok(class_name(class).is_some_and(|name| WITH_TOKEN_TYPES.contains(&name)))
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
        assert!(found(&none, &none).unwrap());
        assert!(found(&json!({ "tokenizer_class": "FooTokenizer", "auto_map": {} }), &none).unwrap());
        let error = found(&json!({ "model_input_names": null }), &none).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json: `model_input_names` is null"), "{error}");
    }
}
