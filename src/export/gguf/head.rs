//! Heads that may be tied to the embedding table.

use crate::arch::{GgufFamily, GgufHead};
use crate::error::{Error, Result};
use crate::model::Model;

/// Names of the head and of the embedding to which it may be tied.
pub(super) const HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Whether the checkpoint contains a head that `config.json` ties to the embedding.
pub(super) fn ties_head(model: &Model) -> bool {
    model.weights.by_name.contains_key(HEAD) && model.tied_names().contains(&(HEAD, EMBEDDING))
}

/// Whether the head is stored as a separate tensor. Without `read_values`, heads that may be equal to
/// the embedding count as separate.
pub(super) fn stores_head(model: &Model, family: &GgufFamily, read_values: bool) -> Result<bool> {
    let (stored, tied) = (model.weights.by_name.contains_key(HEAD), ties_head(model));
    if family.head == GgufHead::Separate {
        return Ok(stored);
    }
    if !stored || family.head == GgufHead::Any {
        return Ok(stored && !(tied && read_values && model.same_bytes(HEAD, EMBEDDING)?));
    }
    if tied || !read_values || model.same_bytes(HEAD, EMBEDDING)? {
        return Ok(false);
    }
    Err(Error::tensor(HEAD, "differs from the embedding", format!("llama.cpp uses the embedding as the head of `{}`", family.architecture)))
}
