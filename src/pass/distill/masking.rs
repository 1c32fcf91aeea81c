//! Masked language modelling on texts without labels.

use std::collections::BTreeSet;

use serde_json::Value;

use super::vocabulary;
use crate::aliases::suggestion;
use crate::data::{SequenceRole, Task, special_tokens, token_text};
use crate::error::{Error, Result};
use crate::exec::SequenceCache;
use crate::ir::{Graph, Node, Op};
use crate::model::{Model, open_auxiliary_config, read_auxiliary_text};
use crate::train::{MaskToken, Masker, Masking, Objective};

const SETTINGS: &str = "tokenizer_config.json";
/// Names of the mask token if the settings of the tokenizer do not contain it.
const USUAL: [&str; 2] = ["[MASK]", "<mask>"];
/// Maximum number of special tokens in messages.
const LISTED: usize = 20;

/// The task of samples of which random tokens are predicted.
pub(super) fn task(options: Option<&Masking>, task: Task) -> Task {
    if options.is_some() { Task::LanguageModelling } else { task }
}

/// Masks random tokens, if that is requested. Fails if the model is not a masked language model, or its
/// tokenizer has no mask token.
pub(super) fn masker(options: Option<&Masking>, (student, graph): (&Model, &Graph), objective: &Objective) -> Result<Option<Masker>> {
    let Some(options) = options else { return Ok(None) };
    let wrong = |reason: String| Error::option("masking", reason);
    let Some(logits) = objective.over_logits().filter(|logits| logits.tokens == Some(SequenceRole::Input)) else {
        return Err(wrong("needs a `hard` or `soft` loss over logits for each token in `input_ids`".to_owned()));
    };
    if is_causal(graph) {
        return Err(wrong("needs a masked language model, but each token of this one reads only previous tokens: remove it".to_owned()));
    }
    let text = read_auxiliary_text(&student.path, &student.auxiliary.synthesized, vocabulary::FILE)?;
    let text = text.ok_or_else(|| {
        let missing = "copy the file of the original model into the folder, because it determines the mask token and the special tokens";
        wrong(format!("{} has no {}: {missing}", student.path.display(), vocabulary::FILE))
    })?;
    let ids = vocabulary::tokens(&student.path.join(vocabulary::FILE), &text)?;
    let settings = open_auxiliary_config(&student.path, &student.auxiliary.synthesized, SETTINGS)?;
    let id = |token: &str| ids.get(token).and_then(|id| i64::try_from(*id).ok());
    let named = special_tokens(&student.path, &student.auxiliary.synthesized, settings.values())?;
    let text_of = |key: &str| named.get(key).and_then(token_text).map(str::to_owned);
    let usual = || USUAL.into_iter().find(|token| ids.contains_key(*token)).map(str::to_owned);
    let mask = match options.mask_token.clone().or_else(|| text_of("mask_token").or_else(usual).map(MaskToken::Text)) {
        Some(MaskToken::Id(mask)) => i64::from(mask),
        Some(MaskToken::Text(mask)) => id(&mask).ok_or_else(|| {
            let near = suggestion(&mask, special_texts(&text).iter().map(String::as_str)).map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
            wrong(format!("the mask token `{mask}` is not in the vocabulary of {}{near}", student.path.join(vocabulary::FILE).display()))
        })?,
        None => {
            let special = special_texts(&text);
            let listed = if special.is_empty() { String::new() } else { format!("; its special tokens are {}", special.join(", ")) };
            let hint = "specify the text or the id of a token, as in `masking: { fraction: 0.15, mask_token: \"<mask>\" }`";
            return Err(wrong(format!("{} has no `mask_token`: {hint}{listed}", student.path.join(SETTINGS).display())));
        }
    };
    if usize::try_from(mask).is_ok_and(|mask| mask >= logits.classes) {
        let reason = format!("needs a masked language model, but this one has logits of {} classes, and the mask token has the id {mask}", logits.classes);
        return Err(wrong(reason));
    }
    let mut special: BTreeSet<i64> = named.values().filter_map(|token| id(token_text(token)?)).collect();
    special.extend(special_ids(&serde_json::from_str(&text).unwrap_or_default()));
    special.insert(mask);
    Ok(Some(Masker { fraction: options.fraction, mask, special, tokens: logits.classes }))
}

/// Texts of the special tokens that were added to the vocabulary of a `tokenizer.json`.
fn special_texts(text: &str) -> Vec<String> {
    let file: Value = serde_json::from_str(text).unwrap_or_default();
    let added = file.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let special = added.filter(|token| token.get("special").and_then(Value::as_bool) == Some(true));
    special.filter_map(|token| token.get("content")?.as_str().map(str::to_owned)).take(LISTED).collect()
}

/// Whether each token reads only previous tokens.
pub(super) fn is_causal(graph: &Graph) -> bool {
    let has_causal_attention = |node: &Node| matches!(&node.op, Op::Attention(attention) if attention.causal);
    SequenceCache::new(graph).is_ok() || graph.nodes().iter().any(has_causal_attention)
}

/// Returns an error if one of two models predicts masked tokens and the other the next token, so that their
/// logits at a position belong to different tokens.
pub(super) fn require_same_positions(student: &Model, teacher: &Model) -> Result<()> {
    let is_masked = |model: &Model| model.config.class().ends_with("ForMaskedLM");
    let (masked, causal) = match (is_masked(student), is_masked(teacher)) {
        (true, false) => (student, teacher),
        (false, true) => (teacher, student),
        _ => return Ok(()),
    };
    if is_causal(&masked.graph()?) || !is_causal(&causal.graph()?) {
        return Ok(());
    }
    let reason = format!(
        "predicts other tokens than the student: {} predicts masked tokens, and {} the next token, so that `soft` cannot compare their logits; \
         use two models of the same kind, or a loss of other values, such as `hidden: 1`",
        masked.path.display(),
        causal.path.display()
    );
    Err(Error::option("distill: teacher", reason))
}

/// Ids of the special tokens in a `tokenizer.json`: special added tokens, and tokens that the post-processor
/// inserts.
fn special_ids(file: &Value) -> Vec<i64> {
    let list = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
    let added = list(file.get("added_tokens")).into_iter().filter(|token| token.get("special").and_then(Value::as_bool) == Some(true));
    let mut ids: Vec<i64> = added.filter_map(|token| token.get("id")?.as_i64()).collect();
    let processor = file.get("post_processor").cloned().unwrap_or_default();
    for processor in list(processor.get("processors")).into_iter().chain([processor]) {
        let template = processor.get("special_tokens").and_then(Value::as_object).into_iter().flat_map(|tokens| tokens.values());
        ids.extend(template.flat_map(|token| list(token.get("ids"))).filter_map(|id| id.as_i64()));
        ids.extend(["cls", "sep"].into_iter().filter_map(|key| processor.get(key)?.get(1)?.as_i64()));
    }
    ids
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn special_tokens_are_listed() {
        let added = json!([{ "id": 7, "special": true, "content": "<s>" }, { "id": 8, "special": false, "content": "word" }]);
        assert_eq!(special_texts(&json!({ "added_tokens": added }).to_string()), ["<s>"]);
        assert!(special_texts("{}").is_empty());
    }

    #[test]
    fn special_tokens_are_found() {
        let template = json!({ "type": "TemplateProcessing", "special_tokens": { "[CLS]": { "ids": [2] }, "[SEP]": { "ids": [3, 4] } } });
        let added = json!([{ "id": 7, "special": true, "content": "<s>" }, { "id": 8, "special": false, "content": "word" }]);
        assert_eq!(special_ids(&json!({ "added_tokens": added, "post_processor": template })), [7, 2, 3, 4]);
        let bert = json!({ "type": "BertProcessing", "sep": ["[SEP]", 5], "cls": ["[CLS]", 6] });
        assert_eq!(special_ids(&json!({ "post_processor": { "type": "Sequence", "processors": [bert, { "type": "ByteLevel" }] } })), [6, 5]);
        assert!(special_ids(&json!({ "post_processor": null })).is_empty());
    }
}
