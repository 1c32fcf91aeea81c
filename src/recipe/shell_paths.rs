//! Paths in recipes that only a shell expands.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use serde::Serialize;
use serde_json::Value;

/// Keys whose values are paths.
const PATHS: [&str; 9] = ["model", "output", "text", "images", "arrays", "labels", "keep", "teacher", "imatrix"];

/// The paths in a recipe, at any depth.
fn path_values(value: &Value) -> Vec<&str> {
    match value {
        Value::Object(entries) => entries
            .iter()
            .flat_map(|(key, value)| match value {
                Value::String(path) if PATHS.contains(&key.as_str()) => vec![path.as_str()],
                _ => path_values(value),
            })
            .collect(),
        Value::Array(items) => items.iter().flat_map(path_values).collect(),
        _ => Vec::new(),
    }
}

/// Rejects paths with `~` or variables. `text` is that of the recipe.
pub(super) fn require_none(recipe: &impl Serialize, text: &str) -> Result<(), String> {
    let values = serde_json::to_value(recipe).unwrap_or_default();
    let is_unexpanded = |name: &&str| name.starts_with("~/") || name.starts_with('$');
    let Some(name) = path_values(&values).into_iter().find(is_unexpanded) else { return Ok(()) };
    let line = text.lines().zip(1..).find(|(line, _)| line.contains(name)).map_or(String::new(), |(_, number)| format!("line {number}: "));
    Err(format!("{line}`{name}`: `~` and variables are not expanded in recipes; write the whole path, or one relative to the recipe"))
}
