//! The tokens that a decoder behind an encoder is to say, and those that it is given for that: the same, one place later.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::Value;

use super::labels::IGNORED;
use super::side::{DECODED, DECODED_MASK};
use super::{Target, shaped};
use crate::error::{Error, Result};
use crate::model::config_beside;

/// What the configuration says of a decoder's tokens.
#[derive(Debug, Clone)]
pub(super) struct Decoder {
    /// The token that texts begin with.
    start: i64,
    /// The token that fills rows up.
    pad: i64,
    /// Whether that token means nothing else, so that nobody is to say it.
    pads_alone: bool,
    /// Most tokens, where there are positions for so many.
    most: Option<usize>,
}

impl Decoder {
    /// What `config.json` says, or `generation_config.json` where it does not.
    ///
    /// # Errors
    /// No token is named that texts begin with, or something else stands there.
    pub fn of(target: &Target) -> Result<Decoder> {
        let generation = config_beside(target.folder, target.made, "generation_config.json")?;
        let said = |key: &str| [target.config, generation.values()].into_iter().find_map(|values| values.get(key).filter(|value| !value.is_null()));
        let wrong = |key: &str, value: &Value| Error::graph("config.json", format!("`{key}` is {value}, expected a token"));
        let token = |key: &str| said(key).map(|value| value.as_i64().ok_or_else(|| wrong(key, value))).transpose();
        let missing = || {
            let reason =
                "config.json names no `decoder_start_token_id`, which texts of a decoder begin with: add it to config.json (for T5 the `pad_token_id`)";
            Error::graph(target.folder.display(), reason)
        };
        let start = token("decoder_start_token_id")?.ok_or_else(missing)?;
        let pad = token("pad_token_id")?;
        let ends = |pad: &i64| match said("eos_token_id") {
            Some(Value::Array(ends)) => ends.iter().any(|end| end.as_i64() == Some(*pad)),
            end => end.and_then(Value::as_i64) == Some(*pad),
        };
        let most = target.config.get("max_target_positions").and_then(Value::as_u64).and_then(|most| usize::try_from(most).ok());
        Ok(Decoder { start, pad: pad.unwrap_or(0), pads_alone: pad.is_some_and(|pad| !ends(&pad)), most })
    }

    /// Refuses more tokens than there are positions for; `what` has them.
    ///
    /// # Errors
    /// There are more.
    pub fn require_room(&self, path: &Path, what: &str, tokens: usize) -> Result<()> {
        match self.most {
            Some(most) if tokens > most => {
                Err(Error::malformed(path, format!("{what} has {tokens} tokens, and the decoder has positions for {most} (`max_target_positions`): cut it")))
            }
            _ => Ok(()),
        }
    }

    /// What an array of labels asks for: -100 stands where it asks for nothing, and padding asks for nothing.
    pub fn asked(&self, labels: &[i64]) -> Vec<Option<i64>> {
        labels.iter().map(|label| Some(*label).filter(|label| *label != IGNORED && !(self.pads_alone && *label == self.pad))).collect()
    }

    /// Puts into `inputs` what the decoder is given to say these tokens, rows of one length, and which of it is no padding: all up to the last
    /// token that is asked for. What is there already stays.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn give(&self, inputs: &mut BTreeMap<String, Tensor>, rows: &[Vec<Option<i64>>]) -> Result<()> {
        let width = rows.first().map_or(0, Vec::len);
        let before = |row: &Vec<Option<i64>>| {
            let earlier = row.iter().take(width.saturating_sub(1)).map(|token| token.unwrap_or(self.pad));
            std::iter::once(self.start).chain(earlier).take(width).collect::<Vec<_>>()
        };
        let seen = |row: &Vec<Option<i64>>| {
            let last = row.iter().rposition(Option::is_some);
            (0..width).map(move |at| i64::from(last.is_some_and(|last| at <= last))).collect::<Vec<_>>()
        };
        let tensor = |values: Vec<i64>| Tensor::from_vec(values, (rows.len(), width), &Device::Cpu).map_err(shaped);
        if !inputs.contains_key(DECODED) {
            inputs.insert(DECODED.to_owned(), tensor(rows.iter().flat_map(before).collect())?);
        }
        if !inputs.contains_key(DECODED_MASK) {
            inputs.insert(DECODED_MASK.to_owned(), tensor(rows.iter().flat_map(seen).collect())?);
        }
        Ok(())
    }

    /// Rows filled up to one length.
    pub fn even(rows: impl IntoIterator<Item = Vec<i64>>) -> Vec<Vec<Option<i64>>> {
        let mut rows: Vec<Vec<Option<i64>>> = rows.into_iter().map(|row| row.into_iter().map(Some).collect()).collect();
        let width = rows.iter().map(Vec::len).max().unwrap_or(0);
        rows.iter_mut().for_each(|row| row.resize(width, None));
        rows
    }
}

/// Checks that labels are token ids of the vocabulary, where its size is known, or -100.
///
/// # Errors
/// One is neither; the message begins with `what`.
pub(super) fn require_tokens(vocabulary: Option<i64>, path: &Path, what: &str, labels: &[i64]) -> Result<()> {
    let known = |label: i64| label == IGNORED || (label >= 0 && vocabulary.is_none_or(|count| label < count));
    let Some(wrong) = labels.iter().find(|label| !known(**label)) else { return Ok(()) };
    let vocabulary = vocabulary.map_or_else(String::new, |count| format!(" and below {count} (`vocab_size`)"));
    Err(Error::malformed(path, format!("{what} has label {wrong}: labels are token ids, at least 0{vocabulary}, or {IGNORED} for tokens that do not count")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(pads_alone: bool) -> Decoder {
        Decoder { start: 2, pad: 0, pads_alone, most: Some(4) }
    }

    #[test]
    fn a_decoder_is_given_what_it_is_to_say_one_place_later() {
        let mut inputs = BTreeMap::new();
        let rows = [decoder(true).asked(&[7, -100, 8, 1]), decoder(true).asked(&[9, 1, 0, -100])];
        assert_eq!(rows, [vec![Some(7), None, Some(8), Some(1)], vec![Some(9), Some(1), None, None]]);
        decoder(true).give(&mut inputs, &rows).unwrap();
        let read = |name: &str| inputs[name].to_vec2::<i64>().unwrap();
        assert_eq!(read(DECODED), [[2, 7, 0, 8], [2, 9, 1, 0]]);
        assert_eq!(read(DECODED_MASK), [[1, 1, 1, 1], [1, 1, 0, 0]]);
        // A token that ends texts and fills them up is to be said.
        assert_eq!(decoder(false).asked(&[9, 0]), [Some(9), Some(0)]);
        assert_eq!(Decoder::even([vec![1], vec![2, 3]]), [vec![Some(1), None], vec![Some(2), Some(3)]]);
    }

    #[test]
    fn positions_bound_what_is_said() {
        decoder(true).require_room(Path::new("a"), "line 3", 4).unwrap();
        let refused = decoder(true).require_room(Path::new("a"), "line 3", 5).unwrap_err().to_string();
        assert!(refused.contains("line 3 has 5 tokens") && refused.contains("`max_target_positions`"), "{refused}");
    }

    #[test]
    fn labels_are_tokens_or_nothing() {
        require_tokens(Some(10), Path::new("a"), "row 3", &[0, 9, -100]).unwrap();
        for wrong in [10, -1] {
            let refused = require_tokens(Some(10), Path::new("a"), "row 3", &[9, wrong]).unwrap_err().to_string();
            assert!(refused.contains(&format!("row 3 has label {wrong}:")) && refused.contains("below 10"), "{refused}");
        }
    }
}
