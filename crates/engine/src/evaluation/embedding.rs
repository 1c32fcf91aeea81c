//! Semantic textual similarity.

use super::{Metric, Outputs, Score, select_output, statistics, tensor_error};
use crate::data::{Batch, References};
use crate::error::{Error, Result, counted};
use crate::exec::floats_on_host;
use crate::exec::transfer::Cause;

/// Output names of text embeddings, in order of preference.
pub(super) const EMBEDDINGS: [&str; 3] = ["sentence_embedding", "text_embeds", "pooler_output"];

/// Cosine similarities of text pairs and their reference scores.
#[derive(Debug, Default)]
pub(super) struct Similarity {
    cosines: Vec<f64>,
    scores: Vec<f64>,
}

impl Metric for Similarity {
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()> {
        let References::Scores(scores) = &batch.references else { return Ok(()) };
        let (name, embeddings) = select_output(outputs, &EMBEDDINGS, 2)?;
        let rows = floats_on_host(embeddings, Cause::Answers).and_then(|rows| rows.to_vec2::<f32>()).map_err(tensor_error)?;
        if rows.len() != 2 * scores.len() {
            return Err(Error::option("evaluation", format!("output `{name}` has {} rows for {} pairs", rows.len(), scores.len())));
        }
        if rows.iter().flatten().any(|value| value.is_nan()) {
            return Err(Error::option("evaluation", format!("output `{name}` contains NaN: the correlation is undefined")));
        }
        let (first, second) = rows.split_at(scores.len());
        self.cosines.extend(first.iter().zip(second).map(|(a, b)| cosine(a, b)));
        self.scores.extend(scores);
        Ok(())
    }

    fn score(&self) -> Result<Score> {
        if self.scores.len() < 2 {
            let found = counted(self.scores.len(), "pair");
            return Err(Error::option("evaluation", format!("the correlation requires at least two pairs with a score, but the data has {found}: add pairs")));
        }
        let constant =
            || Error::option("evaluation", "the correlation is undefined, because all pairs have the same cosine similarity or the same reference score");
        let spearman = statistics::spearman(&self.cosines, &self.scores).ok_or_else(constant)?;
        let pearson = statistics::pearson(&self.cosines, &self.scores).ok_or_else(constant)?;
        let ci95 = statistics::correlation_interval(spearman, self.scores.len());
        Ok(Score { metric: "spearman".into(), value: spearman, ci95, more: [("pearson".to_owned(), pearson)].into() })
    }
}

/// Cosine similarity of two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let (mut ab, mut aa, mut bb) = (0f64, 0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (f64::from(*x), f64::from(*y));
        (ab, aa, bb) = (ab + x * y, aa + x * x, bb + y * y);
    }
    cosine_from_products(ab, aa, bb)
}

/// Cosine similarity from the dot product and the squared norms of two vectors: 1 if both are zero, 0 if
/// one is or contains NaN.
pub(super) fn cosine_from_products(ab: f64, aa: f64, bb: f64) -> f64 {
    if aa.is_nan() || bb.is_nan() {
        return 0.0;
    }
    match (aa > 0.0, bb > 0.0) {
        (true, true) => ab / (aa * bb).sqrt(),
        (false, false) => 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn a_correlation_requires_two_pairs() {
        let metric = Similarity { cosines: vec![0.5], scores: vec![1.0] };
        assert!(metric.score().unwrap_err().to_string().contains("at least two pairs with a score, but the data has 1 pair:"));
    }

    #[test]
    fn nan_is_not_similar_to_anything() {
        let batch = Batch { inputs: Default::default(), references: References::Scores(vec![0.1, 0.9]), samples: 4 };
        let rows = |first: f32| Tensor::new(&[[first, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.1]], &Device::Cpu).unwrap();
        let add = |rows: Tensor| Similarity::default().add(&batch, &[("sentence_embedding".to_owned(), rows)].into());
        add(rows(0.0)).unwrap();
        assert!(add(rows(f32::NAN)).unwrap_err().to_string().contains("`sentence_embedding` contains NaN"));
        assert_eq!([cosine_from_products(f64::NAN, f64::NAN, f64::NAN), cosine_from_products(0.0, 0.0, 0.0)], [0.0, 1.0]);
    }
}
