//! Whether student and teacher mean the same by a token.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::model::{Model, text_beside};

const FILE: &str = "tokenizer.json";

/// Refuses a student and a teacher that cut texts into other tokens; models without a tokenizer are not looked at.
///
/// # Errors
/// The tokenizers differ, by the first token that does; or one cannot be read.
pub(super) fn require_same(student: &Model, teacher: &Model) -> Result<()> {
    let (ours, theirs) = (student.path.join(FILE), teacher.path.join(FILE));
    let text = |model: &Model| text_beside(&model.path, &model.beside.made, FILE);
    let (Some(a), Some(b)) = (text(student)?, text(teacher)?) else { return Ok(()) };
    if student.path == teacher.path {
        return Ok(());
    }
    let (a, b) = (tokens(&ours, &a)?, tokens(&theirs, &b)?);
    let Some((token, one, other)) = difference(&a, &b) else { return Ok(()) };
    let place = |number: Option<&u64>| number.map_or("is missing".to_owned(), |number| format!("is number {number}"));
    Err(Error::option(
        "distill: teacher",
        format!(
            "its tokenizer is another one: `{token}` {} in {} and {} in {}; a student learns from a teacher that reads the same tokens",
            place(one),
            ours.display(),
            place(other),
            theirs.display()
        ),
    ))
}

type Tokens = BTreeMap<String, u64>;

fn difference<'t>(a: &'t Tokens, b: &'t Tokens) -> Option<(&'t str, Option<&'t u64>, Option<&'t u64>)> {
    a.keys().chain(b.keys()).find(|token| a.get(*token) != b.get(*token)).map(|token| (token.as_str(), a.get(token), b.get(token)))
}

/// Tokens and their numbers: of the model, and those that were added.
fn tokens(path: &Path, text: &str) -> Result<Tokens> {
    let file: Value = serde_json::from_str(text).map_err(|e| Error::malformed(path, e))?;
    let mut tokens = Tokens::new();
    match file.pointer("/model/vocab") {
        Some(Value::Object(vocabulary)) => tokens.extend(vocabulary.iter().filter_map(|(token, number)| Some((token.clone(), number.as_u64()?)))),
        Some(Value::Array(vocabulary)) => {
            let token = |(number, entry): (usize, &Value)| Some((entry.get(0)?.as_str()?.to_owned(), number as u64));
            tokens.extend(vocabulary.iter().enumerate().filter_map(token));
        }
        _ => return Err(Error::malformed(path, "lists no tokens under model.vocab")),
    }
    for added in file.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        if let (Some(token), Some(number)) = (added.get("content").and_then(Value::as_str), added.get("id").and_then(Value::as_u64)) {
            tokens.insert(token.to_owned(), number);
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::DType;

    #[test]
    fn other_tokens_are_named() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |folder: &Path, text: &str| std::fs::write(folder.join(FILE), text).unwrap();
        let weights = safetensors::serialize([("w", safetensors::tensor::TensorView::new(DType::U8, vec![1], &[0]).unwrap())], None).unwrap();
        for folder in [&one, &other] {
            std::fs::write(folder.path().join("model.safetensors"), &weights).unwrap();
        }
        let require_same = |one: &Path, other: &Path| require_same(&Model::open(one).unwrap(), &Model::open(other).unwrap());
        require_same(one.path(), other.path()).unwrap();
        write(one.path(), r#"{ "model": { "vocab": { "a": 0, "b": 1 } }, "added_tokens": [{ "id": 2, "content": "c" }] }"#);
        require_same(one.path(), other.path()).unwrap();
        write(other.path(), r#"{ "model": { "vocab": [["a", -1.0], ["b", -2.0], ["c", 0]] } }"#);
        require_same(one.path(), other.path()).unwrap();
        write(other.path(), r#"{ "model": { "vocab": { "a": 0, "b": 1 } } }"#);
        let error = require_same(one.path(), other.path()).unwrap_err().to_string();
        assert!(error.contains("`c` is number 2") && error.contains("is missing"), "{error}");
    }
}
