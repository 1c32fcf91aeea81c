//! Batches of samples.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::Tensor;

use super::shaped;
use crate::error::{Error, Result};

/// Targets of the samples of a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum References {
    /// No targets.
    None,
    /// The class of each sample; `None` for the label -100, which losses and metrics ignore.
    Classes(Vec<Option<usize>>),
    /// A score for each pair of texts; the batch contains the first texts of all pairs, then the second
    /// texts.
    Scores(Vec<f64>),
    /// The number of matching texts of each sample, two or three. The batch contains the first texts of all
    /// samples, then the texts that match them, then texts that do not, if there are any.
    Matches(usize),
    /// For each window, the positions whose tokens are predicted from the preceding ones.
    Next(Vec<Range<usize>>),
    /// For each sample, the target token of the logits at each position; `None` for the label -100.
    Tokens(Vec<Vec<Option<i64>>>),
}

/// A batch of samples.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Model inputs by name, possibly including ones that the model does not have.
    pub inputs: BTreeMap<String, Tensor>,
    /// The targets.
    pub references: References,
    /// Number of samples.
    pub samples: usize,
}

impl Batch {
    /// Number of rows of the inputs.
    pub fn rows(&self) -> usize {
        let texts = match self.references {
            References::Scores(_) => 2,
            References::Matches(texts) => texts,
            _ => 1,
        };
        self.samples.saturating_mul(texts)
    }

    /// Truncates texts to their first tokens; drops the targets.
    pub fn shortened(self, length: usize) -> Result<Batch> {
        self.tokens_within(0..length)
    }

    /// Number of tokens per text, if all inputs are token sequences of one length.
    pub fn token_count(&self) -> Option<usize> {
        let mut lengths = self.inputs.values().map(|tensor| if let [_, length] = tensor.dims() { Some(*length) } else { None });
        let first = lengths.next()??;
        lengths.all(|length| length == Some(first)).then_some(first)
    }

    /// Selects a range of tokens in each text; drops the targets.
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

    /// Selects `count` samples, of a batch without pairs. Fails if the range exceeds the batch.
    pub fn narrow(&self, from: usize, count: usize) -> Result<Batch> {
        if from == 0 && count == self.samples {
            return Ok(self.clone());
        }
        let inputs = self.inputs.iter().map(|(name, tensor)| Ok((name.clone(), tensor.narrow(0, from, count)?))).collect::<candle_core::Result<_>>();
        let some = from..from.saturating_add(count);
        let references = match &self.references {
            References::None => Some(References::None),
            References::Matches(_) => {
                return Err(Error::option(
                    "batch_size",
                    "a batch of matching texts cannot be divided, because each text is compared with all others: lower it",
                ));
            }
            References::Classes(classes) => classes.get(some).map(|some| References::Classes(some.to_vec())),
            References::Scores(scores) => scores.get(some).map(|some| References::Scores(some.to_vec())),
            References::Next(ranges) => ranges.get(some).map(|some| References::Next(some.to_vec())),
            References::Tokens(rows) => rows.get(some).map(|some| References::Tokens(some.to_vec())),
        };
        let references =
            references.ok_or_else(|| Error::option("data", format!("samples {from} to {} exceed a batch of {}", from.saturating_add(count), self.samples)))?;
        Ok(Batch { inputs: inputs.map_err(shaped)?, references, samples: count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_rejects_ranges_outside_the_batch() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::Classes(vec![Some(3), None, Some(5)]), samples: 3 };
        assert_eq!(batch.narrow(1, 2).unwrap().references, References::Classes(vec![None, Some(5)]));
        for (from, count) in [(2, 2), (4, 0), (1, usize::MAX)] {
            assert!(batch.narrow(from, count).is_err(), "{from} {count}");
        }
    }
}
