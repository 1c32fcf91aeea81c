//! Changes that a model with a vision tower does not support, because its tower is not part of the graph.

use crate::arch;
use crate::error::{Error, Result};
use crate::model::Model;

/// Why a pass does not change a weight that no node of the graph reads.
pub(in crate::pass) fn unread(name: &str) -> &'static str {
    if arch::is_of_tower(name) { "part of a vision tower, which is copied" } else { "not used by the model" }
}

/// Rejects a model with a vision tower.
pub(in crate::pass) fn require_none(model: &Model, change: &str) -> Result<()> {
    let model_type = model.config.model_type();
    if !arch::has_tower(model_type) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{change} of `{model_type}`, a model with a vision tower,"),
        hint: "use `extract-language-model` first, for a text model without the tower".into(),
    })
}
