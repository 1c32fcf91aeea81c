//! Layers of a checkpoint that its configuration does not contain.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::error::counted;
use crate::model::Model;

/// Configuration keys of the number of layers.
const LAYERS: [&str; 4] = ["num_hidden_layers", "n_layer", "num_layers", "encoder_layers"];
/// Configuration keys of the layers that predict further tokens, which follow the others in checkpoints.
const PREDICTING: [&str; 2] = ["num_nextn_predict_layers", "num_mtp_layers"];

/// Describes layers of the checkpoint that the graph of the model does not contain, although it contains the
/// layers before them.
pub(in crate::pipeline) fn unused_layers(model: &Model) -> Option<String> {
    if model.onnx.is_some() || model.config.model_type().is_empty() {
        return None;
    }
    let graph = model.graph().ok()?;
    let counts = layer_counts(graph.params().map(|(_, value)| value.name.as_str()));
    let unused = model.unused(&graph);
    let mut extra = BTreeMap::<(&str, usize), usize>::new();
    for (prefix, index) in unused.iter().filter_map(|name| layer(name)) {
        if counts.get(prefix).is_some_and(|count| index >= *count) {
            *extra.entry((prefix, index)).or_default() += 1;
        }
    }
    let number = |key: &str| model.config.get(key).and_then(Value::as_u64);
    let predicting = PREDICTING.into_iter().filter_map(number).max().unwrap_or(0);
    let ((first_prefix, first), (last_prefix, last)) = (*extra.keys().next()?, *extra.keys().next_back()?);
    if extra.len() as u64 <= predicting {
        return None;
    }
    let count = *counts.get(first_prefix)?;
    let key = LAYERS.into_iter().find(|key| number(key) == Some(count as u64));
    let names = if extra.len() == 1 { format!("`{first_prefix}{first}`") } else { format!("`{first_prefix}{first}` to `{last_prefix}{last}`") };
    let config = key.map_or_else(|| "config.json describes fewer layers".to_owned(), |key| format!("`{key}` in config.json is {count}"));
    Some(format!("{config}, but the checkpoint also contains {names} ({})", counted(extra.values().sum(), "tensor")))
}

/// The number of layers with each prefix in the names of weights.
fn layer_counts<'n>(names: impl Iterator<Item = &'n str>) -> BTreeMap<&'n str, usize> {
    let mut counts = BTreeMap::<&str, usize>::new();
    for (prefix, index) in names.filter_map(layer) {
        let count = counts.entry(prefix).or_default();
        // The index may be any number.
        *count = (*count).max(index.saturating_add(1));
    }
    counts
}

/// The prefix of a weight's name up to the index of its layer, which is its first number, and the index.
fn layer(name: &str) -> Option<(&str, usize)> {
    let mut start = 0;
    for part in name.split('.') {
        if let Ok(index) = part.parse() {
            return Some((&name[..start], index));
        }
        start += part.len() + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{layer, layer_counts};

    #[test]
    fn layers_are_counted_by_their_largest_index() {
        let names = ["h.3.weight", "h.1.weight", "18446744073709551615.weight", "18446744073709551616.weight"];
        assert_eq!(layer_counts(names.into_iter()), [("h.", 4), ("", usize::MAX)].into());
    }

    #[test]
    fn the_first_number_of_a_name_is_the_index_of_its_layer() {
        assert_eq!(layer("model.layers.3.mlp.experts.7.up_proj.weight"), Some(("model.layers.", 3)));
        assert_eq!(layer("h.12.attn.c_attn.weight"), Some(("h.", 12)));
        assert_eq!(layer("model.embed_tokens.weight"), None);
        assert_eq!(layer("0.weight"), Some(("", 0)));
    }
}
