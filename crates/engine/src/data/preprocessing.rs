//! Comparison of the preprocessing of two models.

use super::held_out::identity;
use super::{Batch, DataSet, References, Target};
use crate::error::{Error, Result};
use crate::model::read_auxiliary_text;

/// Files of a folder that define the preprocessing of samples.
const PREPARATION: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
    "config_sentence_transformers.json",
];

/// Whether two models have the same inputs and the same preprocessing.
pub fn has_same_preprocessing([a, b]: [Target; 2]) -> Result<bool> {
    let text = |target: Target, name: &str| read_auxiliary_text(target.folder, target.synthesized, name);
    let differs = |name: &str| Ok::<_, Error>(text(a, name)? != text(b, name)?);
    Ok(a.inputs == b.inputs && !PREPARATION.into_iter().map(differs).collect::<Result<Vec<_>>>()?.contains(&true))
}

impl DataSet {
    /// Whether another data set contains the same samples with the same preprocessing, judged by the
    /// description of the preprocessing and the shared inputs of the first sample.
    pub fn is_prepared_like(&self, other: &DataSet) -> Result<bool> {
        if self.preprocessing() != other.preprocessing() {
            return Ok(false);
        }
        let (a, b) = (self.first()?, other.first()?);
        let shared = |batch: &Batch, other: &Batch| {
            let inputs = batch.inputs.iter().filter(|(name, _)| other.inputs.contains_key(*name));
            let inputs = inputs.map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
            identity(&Batch { inputs, references: References::None, samples: batch.samples }.narrow(0, 1)?)
        };
        Ok(shared(&a, &b)? == shared(&b, &a)?)
    }
}
