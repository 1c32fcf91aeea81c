//! Samples that consist of several texts.

use crate::analysis::with_segments;
use crate::data::Data;
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::train::losses::Losses;

/// A graph for the samples of a training. Fails if the texts of a packed sample would affect each other.
pub(super) fn for_samples(graph: Graph, data: &Data) -> Result<Graph> {
    if !data.is_packed() {
        return Ok(graph);
    }
    with_segments(&graph).map_err(|e| Error::option("data: train", format!("`packing` requires causal attention and rotary position embeddings: {e}")))
}

/// Rejects losses that compare the texts of a packed sample with each other.
pub(super) fn require_separate_texts(losses: &Losses, data: &Data) -> Result<()> {
    if data.is_packed() && losses.attention.is_some() {
        let reason = "compares every token of a sample with all others, but different texts are unrelated with `packing`: remove one of them";
        return Err(Error::option("losses: attention", reason));
    }
    Ok(())
}
