//! Samples that run together.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::Tensor;

use super::shaped;
use crate::error::{Error, Result};

/// Targets of the samples of a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum References {
    /// Nothing.
    None,
    /// The class of each sample; none where its label is -100, which counts in no loss and no metric.
    Classes(Vec<Option<usize>>),
    /// A score for each pair; the first texts of all pairs come first, then the second texts.
    Scores(Vec<f64>),
    /// For each window, the places `from..to` whose tokens are to be predicted from the preceding ones.
    Next(Vec<Range<usize>>),
    /// For each sample, the token that the logits at each place predict; none where the label is -100.
    Tokens(Vec<Vec<Option<i64>>>),
}

/// Samples that run together.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Values of the model's inputs, and possibly of others that a model may take.
    pub inputs: BTreeMap<String, Tensor>,
    /// The targets.
    pub references: References,
    /// How many samples.
    pub samples: usize,
}

impl Batch {
    /// The first tokens of texts, without targets.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn shortened(self, length: usize) -> Result<Batch> {
        self.tokens_within(0..length)
    }

    /// How many tokens each text has, if all inputs are texts of one length.
    pub fn token_count(&self) -> Option<usize> {
        let mut lengths = self.inputs.values().map(|tensor| if let [_, length] = tensor.dims() { Some(*length) } else { None });
        let first = lengths.next()??;
        lengths.all(|length| length == Some(first)).then_some(first)
    }

    /// Some of the tokens of each text, without targets.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn tokens_within(self, tokens: Range<usize>) -> Result<Batch> {
        let first = |(name, tensor): (String, Tensor)| match tensor.dims().get(1) {
            Some(length) => {
                let from = tokens.start.min(*length);
                Ok((name, tensor.narrow(1, from, tokens.end.min(*length).saturating_sub(from))?))
            }
            None => Ok((name, tensor)),
        };
        let inputs = self.inputs.into_iter().map(first).collect::<candle_core::Result<_>>().map_err(shaped)?;
        Ok(Batch { inputs, references: References::None, ..self })
    }

    /// Some of the samples, of a batch without pairs.
    ///
    /// # Errors
    /// There are not so many.
    pub fn narrow(&self, from: usize, count: usize) -> Result<Batch> {
        if from == 0 && count == self.samples {
            return Ok(self.clone());
        }
        let inputs = self.inputs.iter().map(|(name, tensor)| Ok((name.clone(), tensor.narrow(0, from, count)?))).collect::<candle_core::Result<_>>();
        let some = from..from.saturating_add(count);
        let references = match &self.references {
            References::None => Some(References::None),
            References::Classes(classes) => classes.get(some).map(|some| References::Classes(some.to_vec())),
            References::Scores(scores) => scores.get(some).map(|some| References::Scores(some.to_vec())),
            References::Next(ranges) => ranges.get(some).map(|some| References::Next(some.to_vec())),
            References::Tokens(rows) => rows.get(some).map(|some| References::Tokens(some.to_vec())),
        };
        let references = references.ok_or_else(|| Error::option("data", format!("a batch of {} has no {count} samples from {from}", self.samples)))?;
        Ok(Batch { inputs: inputs.map_err(shaped)?, references, samples: count })
    }
}
