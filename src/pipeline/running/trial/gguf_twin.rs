//! Twins of GGUF files.

use std::path::Path;

use super::folder_twin::write;
use super::layers::Layers;
use super::scratch::Scratch;
use super::{Candidate, Scope, Trial, is_full, without_twin};
use crate::error::{Error, Result};
use crate::files;
use crate::store::gguf::{GgufFile, Kind, Outline, Value, header};
use crate::work::Work;

/// Prefix of the names of tensors of layers.
const LAYER: &str = "blk.";
/// Key of the alignment, which the written file does not change.
const ALIGNMENT: &str = "general.alignment";
/// Ends of keys of lists that describe something else than layers even if they have as many elements.
const OTHER_LISTS: [&str; 1] = [".rope.dimension_sections"];
/// Number of files of a model.
const PARTS: &str = "split.count";

/// The first elements of a list with an element for each layer; `None` for other values.
fn cut(value: &Value, count: usize, first: usize) -> Option<Value> {
    fn begin<T: Clone>(list: &[T], count: usize, first: usize) -> Option<Vec<T>> {
        (list.len() == count).then(|| list.iter().take(first).cloned().collect())
    }
    match value {
        Value::Integers(list) => begin(list, count, first).map(Value::Integers),
        Value::Floats(list) => begin(list, count, first).map(Value::Floats),
        Value::Bools(list) => begin(list, count, first).map(Value::Bools),
        _ => None,
    }
}

/// The first elements of the list at a key of the model if it has an element for each layer.
fn shortened(key: &str, value: &Value, prefix: &str, count: usize, first: usize) -> Option<Value> {
    let describes_layers = key.starts_with(prefix) && !OTHER_LISTS.iter().any(|end| key.ends_with(end));
    cut(value, count, first).filter(|_| describes_layers)
}

/// The elements of a list as texts.
fn elements(value: &Value) -> Vec<String> {
    match value {
        Value::Integers(list) => list.iter().map(i64::to_string).collect(),
        Value::Floats(list) => list.iter().map(f64::to_string).collect(),
        Value::Bools(list) => list.iter().map(bool::to_string).collect(),
        _ => Vec::new(),
    }
}

/// The file to run: the output itself, or its twin or local copy in a temporary folder. The error is a trial
/// that states why the output cannot be run.
pub(super) fn candidate(path: &Path, scope: Scope, scratch: &Scratch, work: &Work) -> Result<std::result::Result<Candidate, Trial>> {
    let outline = Outline::open(path)?;
    let size = files::length(path).map_err(Error::io("open", path))?;
    let is_full_output = is_full(scope, size);
    if is_full_output && !files::is_remote(path) {
        return Ok(Ok(Candidate::full(path)));
    }
    if matches!(outline.values.get(PARTS), Some(Value::Unsigned(2..))) {
        return Ok(Err(without_twin(size, "its tensors are in several files")));
    }
    let prefix = match outline.values.get("general.architecture") {
        Some(Value::Text(name)) => format!("{name}."),
        _ => return Ok(Err(without_twin(size, "`general.architecture` is missing"))),
    };
    let count_key = format!("{prefix}block_count");
    let Some(Value::Unsigned(count)) = outline.values.get(&count_key) else {
        return Ok(Err(without_twin(size, &format!("`{count_key}` is missing"))));
    };
    let file = GgufFile::open(path)?;
    let layers = Layers::new(LAYER, usize::try_from(*count).unwrap_or(usize::MAX));
    let tensors = file.stored().filter_map(|(name, kind, shape, _)| {
        let (number, rest) = layers.split(name)?;
        Some((number, format!("{rest} {kind} {shape:?}")))
    });
    let lists = outline.values.iter().filter(|(key, value)| shortened(key, value, &prefix, layers.count, 0).is_some());
    let lists = lists.flat_map(|(key, value)| elements(value).into_iter().enumerate().map(move |(number, element)| (number, format!("{key} {element}"))));
    let first = if is_full_output { layers.count } else { layers.first(tensors.chain(lists)) };
    let mut values: Vec<(String, Value)> = Vec::new();
    for (key, value) in outline.values.iter().filter(|(key, _)| *key != ALIGNMENT) {
        let value = match shortened(key, value, &prefix, layers.count, first) {
            _ if *key == count_key => Value::Unsigned(first as u64),
            Some(shorter) => shorter,
            None => value.clone(),
        };
        values.push((key.clone(), value));
    }
    let kept: Vec<_> = file.stored().filter(|(name, ..)| is_full_output || layers.is_kept(name, first)).collect();
    let described: Vec<(String, Kind, Vec<usize>)> = kept.iter().map(|(name, kind, shape, _)| ((*name).to_owned(), *kind, shape.to_vec())).collect();
    let (header, paddings) = header(&values, &described).ok_or_else(|| Error::malformed(path, "a tensor is too large"))?;
    let twin = scratch.path().join("twin.gguf");
    let total = kept.iter().map(|(.., bytes)| bytes.bytes()).fold(0, u64::saturating_add);
    write(&twin, &header, kept.iter().map(|(.., bytes)| bytes).zip(paddings), total, work)?;
    let scope = if is_full_output { "the output".to_owned() } else { layers.describe(first) };
    Ok(Ok(Candidate { path: twin, scope }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lists_that_describe_layers_are_shortened() {
        let list = Value::Integers(vec![16, 24, 24, 0]);
        let length = |key: &str, count| match shortened(key, &list, "qwen3vl.", count, 2) {
            Some(Value::Integers(list)) => Some(list.len()),
            _ => None,
        };
        assert_eq!(length("qwen3vl.attention.head_count_kv", 4), Some(2));
        assert_eq!(length("qwen3vl.attention.head_count_kv", 5), None);
        assert_eq!(length("qwen3vl.rope.dimension_sections", 4), None);
        assert_eq!(length("tokenizer.ggml.token_type", 4), None);
    }
}
