//! Likeness of texts.

use super::{Metric, Outputs, Score, answer, computed, statistics};
use crate::data::{Batch, References};
use crate::error::{Error, Result};
use crate::exec::floats_on_host;
use crate::exec::transfer::Cause;

/// Names of outputs that stand for a whole text, best first.
pub(super) const EMBEDDINGS: [&str; 3] = ["sentence_embedding", "text_embeds", "pooler_output"];

/// The cosine of each pair, and its score.
#[derive(Debug, Default)]
pub(super) struct Similarity {
    cosines: Vec<f64>,
    scores: Vec<f64>,
}

impl Metric for Similarity {
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()> {
        let References::Scores(scores) = &batch.references else { return Ok(()) };
        let (name, embeddings) = answer(outputs, &EMBEDDINGS, 2)?;
        let rows = floats_on_host(embeddings, Cause::Answers).and_then(|rows| rows.to_vec2::<f32>()).map_err(computed)?;
        if rows.len() != 2 * scores.len() {
            return Err(Error::option("evaluation", format!("output `{name}` has {} rows for {} pairs", rows.len(), scores.len())));
        }
        let (first, second) = rows.split_at(scores.len());
        self.cosines.extend(first.iter().zip(second).map(|(a, b)| cosine(a, b)));
        self.scores.extend(scores);
        Ok(())
    }

    fn score(&self) -> Result<Score> {
        let flat = || Error::option("evaluation", "all pairs are equally alike, or have the same score: there is no correlation");
        let spearman = statistics::spearman(&self.cosines, &self.scores).ok_or_else(flat)?;
        let pearson = statistics::pearson(&self.cosines, &self.scores).ok_or_else(flat)?;
        let ci95 = statistics::correlation(spearman, self.scores.len());
        Ok(Score { metric: "spearman".into(), value: spearman, ci95, more: [("pearson".to_owned(), pearson)].into() })
    }
}

/// Cosine of the angle between two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let (mut ab, mut aa, mut bb) = (0f64, 0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (f64::from(*x), f64::from(*y));
        (ab, aa, bb) = (ab + x * y, aa + x * x, bb + y * y);
    }
    cosine_of(ab, aa, bb)
}

/// Cosine of the angle between two vectors by their product and their squares; 1 for two of no length, 0 for one.
pub(super) fn cosine_of(ab: f64, aa: f64, bb: f64) -> f64 {
    match (aa > 0.0, bb > 0.0) {
        (true, true) => ab / (aa * bb).sqrt(),
        (false, false) => 1.0,
        _ => 0.0,
    }
}
