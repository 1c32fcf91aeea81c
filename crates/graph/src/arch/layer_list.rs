//! Keys of `config.json` with the kind of each layer.

use serde_json::Value;

/// A list of the types of all layers.
pub const LAYER_TYPES: &str = "layer_types";
/// The same list in Nemotron-H; transformers reads it in Granite 4 too.
pub const BLOCK_TYPES: &str = "layers_block_type";
/// A string with a letter for each layer, in published files of Nemotron-H.
pub const LAYER_PATTERN: &str = "hybrid_override_pattern";

/// The keys of lists in the order in which Nemotron-H reads them, before the pattern.
pub(super) const TYPE_LISTS: [&str; 2] = [BLOCK_TYPES, LAYER_TYPES];

/// The number of layers in a configuration that has no other value for it.
pub fn listed_layers<'v>(get: impl Fn(&'static str) -> Option<&'v Value>) -> Option<usize> {
    let list = TYPE_LISTS.into_iter().find_map(|key| get(key).and_then(Value::as_array));
    list.map(Vec::len).or_else(|| get(LAYER_PATTERN).and_then(Value::as_str).map(|pattern| pattern.chars().count()))
}
