//! Comparison of the vocabularies of student and teacher.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::data::{class_difference, class_names};
use crate::error::{Error, Result};
use crate::model::{Model, read_auxiliary_text};

pub(super) const FILE: &str = "tokenizer.json";

/// Returns an error if the vocabularies of student and teacher differ, which names the first difference.
/// Models without a tokenizer are not compared.
pub(super) fn require_same(student: &Model, teacher: &Model) -> Result<()> {
    let (ours, theirs) = (student.path.join(FILE), teacher.path.join(FILE));
    let text = |model: &Model| read_auxiliary_text(&model.path, &model.auxiliary.synthesized, FILE);
    let (Some(a), Some(b)) = (text(student)?, text(teacher)?) else { return Ok(()) };
    if a == b {
        return Ok(());
    }
    let (a, b) = (tokens(&ours, &a)?, tokens(&theirs, &b)?);
    let Some((token, one, other)) = difference(&a, &b) else { return Ok(()) };
    let remedy = if student.has_renumbered_tokens(teacher) {
        "the teacher is the input before `prune-vocabulary`: set `teacher` to a model with the remaining tokens, or use `finetune`"
    } else {
        "student and teacher must have the same vocabulary"
    };
    let describe = |number: Option<&u64>| number.map_or("is missing".to_owned(), |number| format!("has the id {number}"));
    Err(Error::option(
        "distill: teacher",
        format!("has a different tokenizer: `{token}` {} in {} and {} in {}; {remedy}", describe(one), ours.display(), describe(other), theirs.display()),
    ))
}

/// Returns an error if the classes of a teacher of a loss over logits are in another order.
pub(super) fn require_same_classes(student: &Model, teacher: &Model) -> Result<()> {
    let [ours, theirs] = [student, teacher].map(|model| class_names(model.config.values()));
    class_difference([&ours, &theirs]).map_or(Ok(()), |reason| {
        let hint = "reorder `id2label` and the rows of the classifier of one of them";
        Err(Error::option("distill: teacher", format!("has another order of classes than the student: {reason} ({}); {hint}", teacher.path.display())))
    })
}

pub(super) type Tokens = BTreeMap<String, u64>;

fn difference<'t>(a: &'t Tokens, b: &'t Tokens) -> Option<(&'t str, Option<&'t u64>, Option<&'t u64>)> {
    a.keys().chain(b.keys()).find(|token| a.get(*token) != b.get(*token)).map(|token| (token.as_str(), a.get(token), b.get(token)))
}

/// Token ids of the vocabulary and of added tokens.
pub(super) fn tokens(path: &Path, text: &str) -> Result<Tokens> {
    let file: Value = serde_json::from_str(text).map_err(|e| Error::malformed(path, e))?;
    let mut tokens = Tokens::new();
    match file.pointer("/model/vocab") {
        Some(Value::Object(vocabulary)) => tokens.extend(vocabulary.iter().filter_map(|(token, number)| Some((token.clone(), number.as_u64()?)))),
        Some(Value::Array(vocabulary)) => {
            let token = |(number, entry): (usize, &Value)| Some((entry.get(0)?.as_str()?.to_owned(), number as u64));
            tokens.extend(vocabulary.iter().enumerate().filter_map(token));
        }
        _ => return Err(Error::malformed(path, "has no vocabulary under `model.vocab`")),
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
    fn different_tokens_are_reported() {
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
        assert!(error.contains("`c` has the id 2") && error.contains("is missing"), "{error}");
    }
}
