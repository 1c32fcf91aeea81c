//! Target tokens of an encoder-decoder model, and the decoder inputs derived from them: the targets
//! shifted right by one (teacher forcing).

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::Value;

use super::labels::IGNORED;
use super::sequence_role::{DECODER_ATTENTION_MASK, DECODER_INPUT_IDS};
use super::{Target, shaped};
use crate::error::{Error, Result};
use crate::model::open_auxiliary_config;

/// Special tokens and length limit of a decoder.
#[derive(Debug, Clone)]
pub(super) struct DecoderTargets {
    /// Start token of the decoder.
    start: i64,
    /// Padding token.
    pad: i64,
    /// Whether the padding token is not also an end token, so that it is never a target.
    is_pad_only: bool,
    /// Maximum number of tokens, from the position embeddings.
    max_length: Option<usize>,
}

impl DecoderTargets {
    /// Reads `config.json`, and `generation_config.json` for missing keys. Fails without a valid start
    /// token.
    pub fn from_target(target: &Target) -> Result<DecoderTargets> {
        let generation = open_auxiliary_config(target.folder, target.synthesized, "generation_config.json")?;
        let value = |key: &str| [target.config, generation.values()].into_iter().find_map(|values| values.get(key).filter(|value| !value.is_null()));
        let wrong = |key: &str, value: &Value| Error::graph("config.json", format!("`{key}` is {value}, but must be a token id"));
        let token = |key: &str| value(key).map(|value| value.as_i64().ok_or_else(|| wrong(key, value))).transpose();
        let missing = || {
            let reason = "config.json has no `decoder_start_token_id`, the first input token of the decoder: add it to config.json (for T5 the `pad_token_id`)";
            Error::graph(target.folder.display(), reason)
        };
        let start = token("decoder_start_token_id")?.ok_or_else(missing)?;
        let pad = token("pad_token_id")?;
        let ends = |pad: &i64| match value("eos_token_id") {
            Some(Value::Array(ends)) => ends.iter().any(|end| end.as_i64() == Some(*pad)),
            end => end.and_then(Value::as_i64) == Some(*pad),
        };
        let max_length = target.config.get("max_target_positions").and_then(Value::as_u64).and_then(|length| usize::try_from(length).ok());
        Ok(DecoderTargets { start, pad: pad.unwrap_or(0), is_pad_only: pad.is_some_and(|pad| !ends(&pad)), max_length })
    }

    /// Rejects more tokens than the decoder has positions for; the error message begins with `what`.
    pub fn require_room(&self, path: &Path, what: &str, tokens: usize) -> Result<()> {
        match self.max_length {
            Some(limit) if tokens > limit => Err(Error::malformed(
                path,
                format!("{what} has {tokens} tokens, but the decoder has only {limit} positions (`max_target_positions`): shorten it"),
            )),
            _ => Ok(()),
        }
    }

    /// Converts labels to targets: `None` for -100 and for padding.
    pub fn targets(&self, labels: &[i64]) -> Vec<Option<i64>> {
        labels.iter().map(|label| Some(*label).filter(|label| *label != IGNORED && !(self.is_pad_only && *label == self.pad))).collect()
    }

    /// Adds the decoder's input ids for rows of targets of one length, shifted right by one, and the
    /// attention mask, which ends at the last target. Inputs that are already present are kept.
    pub fn add_inputs(&self, inputs: &mut BTreeMap<String, Tensor>, rows: &[Vec<Option<i64>>]) -> Result<()> {
        let width = rows.first().map_or(0, Vec::len);
        let shifted = |row: &Vec<Option<i64>>| {
            let earlier = row.iter().take(width.saturating_sub(1)).map(|token| token.unwrap_or(self.pad));
            std::iter::once(self.start).chain(earlier).take(width).collect::<Vec<_>>()
        };
        let mask = |row: &Vec<Option<i64>>| {
            let last = row.iter().rposition(Option::is_some);
            (0..width).map(move |at| i64::from(last.is_some_and(|last| at <= last))).collect::<Vec<_>>()
        };
        let tensor = |values: Vec<i64>| Tensor::from_vec(values, (rows.len(), width), &Device::Cpu).map_err(shaped);
        if !inputs.contains_key(DECODER_INPUT_IDS) {
            inputs.insert(DECODER_INPUT_IDS.to_owned(), tensor(rows.iter().flat_map(shifted).collect())?);
        }
        if !inputs.contains_key(DECODER_ATTENTION_MASK) {
            inputs.insert(DECODER_ATTENTION_MASK.to_owned(), tensor(rows.iter().flat_map(mask).collect())?);
        }
        Ok(())
    }

    /// Pads rows of targets to one length.
    pub fn pad_rows(rows: impl IntoIterator<Item = Vec<i64>>) -> Vec<Vec<Option<i64>>> {
        let mut rows: Vec<Vec<Option<i64>>> = rows.into_iter().map(|row| row.into_iter().map(Some).collect()).collect();
        let width = rows.iter().map(Vec::len).max().unwrap_or(0);
        rows.iter_mut().for_each(|row| row.resize(width, None));
        rows
    }
}

/// Checks that labels are -100 or token ids within the vocabulary, if its size is known. The error
/// message begins with `what`.
pub(super) fn require_tokens(vocabulary: Option<i64>, path: &Path, what: &str, labels: &[i64]) -> Result<()> {
    let is_valid = |label: i64| label == IGNORED || (label >= 0 && vocabulary.is_none_or(|count| label < count));
    let Some(wrong) = labels.iter().find(|label| !is_valid(**label)) else { return Ok(()) };
    let vocabulary = vocabulary.map_or_else(String::new, |count| format!(" and below {count} (`vocab_size`)"));
    Err(Error::malformed(path, format!("{what} has label {wrong}: labels are token ids, at least 0{vocabulary}, or {IGNORED} for ignored tokens")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(is_pad_only: bool) -> DecoderTargets {
        DecoderTargets { start: 2, pad: 0, is_pad_only, max_length: Some(4) }
    }

    #[test]
    fn decoder_inputs_are_shifted_targets() {
        let mut inputs = BTreeMap::new();
        let rows = [decoder(true).targets(&[7, -100, 8, 1]), decoder(true).targets(&[9, 1, 0, -100])];
        assert_eq!(rows, [vec![Some(7), None, Some(8), Some(1)], vec![Some(9), Some(1), None, None]]);
        decoder(true).add_inputs(&mut inputs, &rows).unwrap();
        let read = |name: &str| inputs[name].to_vec2::<i64>().unwrap();
        assert_eq!(read(DECODER_INPUT_IDS), [[2, 7, 0, 8], [2, 9, 1, 0]]);
        assert_eq!(read(DECODER_ATTENTION_MASK), [[1, 1, 1, 1], [1, 1, 0, 0]]);
        // A padding token that is also the end token can be a target.
        assert_eq!(decoder(false).targets(&[9, 0]), [Some(9), Some(0)]);
        assert_eq!(DecoderTargets::pad_rows([vec![1], vec![2, 3]]), [vec![Some(1), None], vec![Some(2), Some(3)]]);
    }

    #[test]
    fn targets_longer_than_the_positions_are_rejected() {
        decoder(true).require_room(Path::new("a"), "line 3", 4).unwrap();
        let refused = decoder(true).require_room(Path::new("a"), "line 3", 5).unwrap_err().to_string();
        assert!(refused.contains("line 3 has 5 tokens") && refused.contains("`max_target_positions`"), "{refused}");
    }

    #[test]
    fn labels_are_token_ids_or_ignored() {
        require_tokens(Some(10), Path::new("a"), "row 3", &[0, 9, -100]).unwrap();
        for wrong in [10, -1] {
            let refused = require_tokens(Some(10), Path::new("a"), "row 3", &[9, wrong]).unwrap_err().to_string();
            assert!(refused.contains(&format!("row 3 has label {wrong}:")) && refused.contains("below 10"), "{refused}");
        }
    }
}
