//! Records of vLLM and of servers with the API of OpenAI, one JSON object per line: requests' outputs with
//! `prompt_logprobs`, and completions with `logprobs`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Distribution, Record, Source};
use crate::error::{Error, Result};
use crate::files::File;

/// Prefix of tokens with `return_tokens_as_token_ids` of vLLM.
const ID: &str = "token_id:";

pub(super) struct JsonLines {
    path: PathBuf,
    file: File,
    /// Byte offset, size and line number of each record.
    lines: Vec<(u64, usize, u64)>,
}

impl JsonLines {
    pub fn open(path: &Path) -> Result<JsonLines> {
        let mut lines = Vec::new();
        let file = File::open(path).map_err(Error::io("open", path))?;
        let mut reader = BufReader::new(file.reader());
        let (mut offset, mut number, mut line) = (0u64, 0u64, Vec::new());
        loop {
            line.clear();
            let size = reader.read_until(b'\n', &mut line).map_err(Error::io("read", path))?;
            if size == 0 {
                return Ok(JsonLines { path: path.to_owned(), file, lines });
            }
            number = number.saturating_add(1);
            if !line.trim_ascii().is_empty() {
                lines.push((offset, size, number));
            }
            offset = offset.saturating_add(size as u64);
        }
    }
}

impl Source for JsonLines {
    fn for_each(&self, each: &mut dyn FnMut(u64, &[i64]) -> Result<()>) -> Result<()> {
        (0..self.lines.len() as u64).try_for_each(|location| each(location, &self.read(location)?.tokens))
    }

    fn read(&self, location: u64) -> Result<Record> {
        let line = usize::try_from(location).ok().and_then(|location| self.lines.get(location));
        let Some((offset, size, number)) = line else { return Err(Error::malformed(&self.path, "has fewer lines than before")) };
        let mut line = vec![0; *size];
        self.file.read_exact_at(&mut line, *offset).map_err(Error::io("read", &self.path))?;
        let wrong = |e: &dyn std::fmt::Display| Error::malformed(&self.path, format!("line {number}: {e}"));
        record(&serde_json::from_slice(&line).map_err(|e| wrong(&e))?).map_err(|e| wrong(&e))
    }

    fn describe(&self, location: u64) -> String {
        let line = usize::try_from(location).ok().and_then(|location| self.lines.get(location));
        format!("{}, line {}", self.path.display(), line.map_or(0, |(_, _, number)| *number))
    }
}

/// The tokens and distributions of a response.
fn record(value: &Value) -> Result<Record, String> {
    // The output of a batch of requests contains the response of each.
    let body = value.pointer("/response/body").unwrap_or(value);
    let outputs = ["choices", "outputs"].into_iter().find_map(|name| body.get(name)?.as_array());
    let output = match outputs.map(Vec::as_slice) {
        None => body,
        Some([output]) => output,
        Some(outputs) => return Err(format!("has {} completions of one prompt: request one (`n: 1`)", outputs.len())),
    };
    let find = |name: &str| output.get(name).or_else(|| body.get(name)).filter(|value| !value.is_null());
    let mut record = Record::default();
    if let Some(tokens) = find("prompt_token_ids") {
        record.tokens = ids(tokens, "prompt_token_ids")?;
        record.rows = match find("prompt_logprobs") {
            Some(rows) => distributions(rows, "prompt_logprobs")?,
            None => vec![None; record.tokens.len()],
        };
        require_equal_lengths(&record, "`prompt_token_ids` and `prompt_logprobs`")?;
    }
    let Some(logprobs) = output.get("logprobs").filter(|value| !value.is_null()) else { return non_empty(record) };
    let (tokens, rows) = if let Some(content) = logprobs.get("content").and_then(Value::as_array) {
        let tokens = content.iter().map(|entry| id_of(entry.get("token"))).collect::<Result<Vec<i64>, String>>();
        (tokens, content.iter().map(|entry| distribution(entry.get("top_logprobs").unwrap_or(&Value::Null))).collect::<Result<_, _>>()?)
    } else if let Some(rows) = logprobs.get("top_logprobs") {
        let names = logprobs.get("tokens").and_then(Value::as_array).ok_or("`logprobs` has no list `tokens`");
        (names.map_err(str::to_owned).and_then(|names| names.iter().map(|name| id_of(Some(name))).collect()), distributions(rows, "top_logprobs")?)
    } else {
        (Err("has no `token_ids`".to_owned()), distributions(logprobs, "logprobs")?)
    };
    let tokens = match output.get("token_ids").filter(|value| !value.is_null()) {
        Some(tokens) => ids(tokens, "token_ids")?,
        None => tokens?,
    };
    let generated = Record { tokens, rows };
    require_equal_lengths(&generated, "tokens and `logprobs`")?;
    record.tokens.extend(generated.tokens);
    record.rows.extend(generated.rows);
    non_empty(record)
}

fn non_empty(record: Record) -> Result<Record, String> {
    if record.tokens.is_empty() { Err("has neither `prompt_token_ids` with `prompt_logprobs` nor `logprobs`".into()) } else { Ok(record) }
}

fn require_equal_lengths(record: &Record, what: &str) -> Result<(), String> {
    let (tokens, rows) = (record.tokens.len(), record.rows.len());
    if tokens == rows { Ok(()) } else { Err(format!("{what} have different lengths: {tokens} and {rows}")) }
}

fn ids(value: &Value, name: &str) -> Result<Vec<i64>, String> {
    let ids = value.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
    ids.ok_or_else(|| format!("`{name}` is not a list of token ids"))
}

/// The id of a token that is named by its id.
fn id_of(token: Option<&Value>) -> Result<i64, String> {
    let text = token.and_then(Value::as_str).unwrap_or_default();
    let id = text.strip_prefix(ID).and_then(|id| id.parse().ok());
    id.ok_or_else(|| format!("the token `{text}` is a text, which does not determine its id: request `return_tokens_as_token_ids`"))
}

fn distributions(value: &Value, name: &str) -> Result<Vec<Option<Distribution>>, String> {
    value.as_array().ok_or_else(|| format!("`{name}` is not a list"))?.iter().map(distribution).collect()
}

/// The log-probabilities of tokens: an object by token ids, or a list of objects. `None` for null and if it
/// is empty.
fn distribution(value: &Value) -> Result<Option<Distribution>, String> {
    let number = |value: &Value| value.as_f64().or_else(|| value.get("logprob")?.as_f64()).map(|number| number as f32);
    let entry = |id: &str, value: &Value| {
        let id = id.strip_prefix(ID).unwrap_or(id);
        let id = id.parse::<u32>().map_err(|_| format!("the token `{id}` is a text, which does not determine its id: request `return_tokens_as_token_ids`"))?;
        Ok((id, number(value).ok_or_else(|| format!("the token {id} has no number `logprob`"))?))
    };
    let row: Distribution = match value {
        Value::Null => return Ok(None),
        Value::Object(entries) => entries.iter().map(|(id, value)| entry(id, value)).collect::<Result<_, String>>()?,
        Value::Array(entries) => {
            let named = |value: &Value| entry(value.get("token").and_then(Value::as_str).unwrap_or_default(), value);
            entries.iter().map(named).collect::<Result<_, String>>()?
        }
        _ => return Err("log-probabilities of a token are neither an object nor a list".into()),
    };
    Ok((!row.is_empty()).then_some(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_servers_are_read() {
        let expected = Record { tokens: vec![5, 6, 7], rows: vec![None, Some(vec![(6, -0.5), (9, -1.5)]), Some(vec![(7, -0.25)])] };
        let (prompt, generated) =
            (r#""prompt_token_ids": [5, 6], "prompt_logprobs": [null, {"6": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.5}}]"#, -0.25);
        let chat =
            format!(r#"{{"logprobs": {{"content": [{{"token": "token_id:7", "top_logprobs": [{{"token": "token_id:7", "logprob": {generated}}}]}}]}}}}"#);
        let legacy = format!(r#"{{"logprobs": {{"tokens": ["token_id:7"], "top_logprobs": [{{"token_id:7": {generated}}}]}}}}"#);
        let ids = format!(
            r#"{{"token_ids": [7], "logprobs": {{"content": [{{"token": "seven", "top_logprobs": [{{"token": "token_id:7", "logprob": {generated}}}]}}]}}}}"#
        );
        let texts = [
            format!(r#"{{{prompt}, "choices": [{chat}]}}"#),
            format!(r#"{{"custom_id": "a", "response": {{"body": {{{prompt}, "choices": [{legacy}]}}}}}}"#),
            format!(r#"{{"choices": [{{{prompt}, {}]}}"#, ids.strip_prefix('{').unwrap()),
            format!(r#"{{{prompt}, "outputs": [{{"token_ids": [7], "logprobs": [{{"7": {{"logprob": {generated}}}}}]}}]}}"#),
        ];
        for text in texts {
            assert_eq!(record(&serde_json::from_str(&text).unwrap()).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn incomplete_records_are_refused() {
        let refused = |text: &str| record(&serde_json::from_str(text).unwrap()).unwrap_err();
        assert!(refused("{}").contains("has neither"));
        assert!(refused(r#"{"prompt_token_ids": [5, 6], "prompt_logprobs": [null]}"#).contains("different lengths: 2 and 1"));
        assert!(refused(r#"{"choices": [{}, {}]}"#).contains("has 2 completions"));
        let text = r#"{"choices": [{"logprobs": {"content": [{"token": "the", "top_logprobs": [{"token": "the", "logprob": -1}]}]}}]}"#;
        assert!(refused(text).contains("the token `the` is a text"));
        assert!(refused(r#"{"prompt_token_ids": [5], "prompt_logprobs": [{"6": "x"}]}"#).contains("the token 6 has no number"));
    }
}
