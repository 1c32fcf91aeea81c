//! Comparison of the preprocessing of two models.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::held_out::identity;
use super::labels::{class_difference, class_names};
use super::{Batch, DataSet, Order, References, Target, Tokenizer};
use crate::error::{Error, Result};
use crate::model::read_auxiliary_text;

/// Files of a folder with the vocabulary.
const VOCABULARIES: [&str; 2] = ["tokenizer.json", "tiktoken.model"];
/// Other files of a folder that define the preprocessing of samples.
const PREPARATION: [&str; 9] = [
    "tokenization_kimi.py",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "config_sentence_transformers.json",
];

/// Whether two models have the same inputs, preprocessing and names of classes.
pub fn has_same_preprocessing([a, b]: [Target; 2]) -> Result<bool> {
    let text = |target: Target, name: &str| read_auxiliary_text(target.folder, target.synthesized, name);
    let differs = |name: &str| Ok::<_, Error>(text(a, name)? != text(b, name)?);
    let [classes, others] = [a, b].map(|target| class_names(target.config));
    Ok(a.inputs == b.inputs
        && class_difference([&classes, &others]).is_none()
        && !VOCABULARIES.into_iter().chain(PREPARATION).map(differs).collect::<Result<Vec<_>>>()?.contains(&true))
}

/// Whether a token has different ids in the tokenizers of two models, or the same id is another token.
/// False if one of them has no tokenizer.
pub fn has_renumbered_tokens([a, b]: [Target; 2]) -> Result<bool> {
    let vocabulary = |target: Target| {
        let read = |name| read_auxiliary_text(target.folder, target.synthesized, name);
        let stored = VOCABULARIES.into_iter().map(read).collect::<Result<Vec<_>>>()?;
        let exists = stored.iter().any(Option::is_some);
        exists.then(|| Tokenizer::open(&target, None).map(|tokenizer| tokenizer.vocabulary())).transpose()
    };
    let (Some(a), Some(b)) = (vocabulary(a)?, vocabulary(b)?) else { return Ok(false) };
    let tokens: BTreeMap<u32, &String> = a.iter().map(|(token, id)| (*id, token)).collect();
    Ok(b.iter().any(|(token, id)| a.get(token).is_some_and(|other| other != id) || tokens.get(id).is_some_and(|other| *other != token)))
}

/// Samples of two data sets that are compared. Preprocessing is expensive for images.
const MAX_TEXTS: usize = 256;
const MAX_IMAGES: usize = 8;

impl DataSet {
    /// Why another data set, for another model, contains other samples, preprocessing or labels; `None` if
    /// they are the same, judged by the names of classes, the description of the preprocessing, and the
    /// labels and shared inputs of the first samples.
    pub fn difference_from(&self, other: &DataSet) -> Result<Option<String>> {
        if let Some(reason) = class_difference([&self.classes, &other.classes]) {
            return Ok(Some(reason));
        }
        let description = |data: &DataSet| data.preprocessing().unwrap_or_else(|| "its own tokenizer".to_owned());
        let reason = || {
            let [ours, theirs] = [self, other].map(description);
            Some(if ours == theirs { "other tokens, samples or labels".to_owned() } else { format!("{ours}; {theirs}") })
        };
        if self.preprocessing() != other.preprocessing() {
            return Ok(reason());
        }
        let most = if self.preprocessing().is_some() { MAX_IMAGES } else { MAX_TEXTS };
        let (a, b) = (self.first_batches(most)?, other.first_batches(most)?);
        let (Some(first), Some(second)) = (a.first(), b.first()) else { return Ok(None) };
        let shared: Vec<&String> = first.inputs.keys().filter(|name| second.inputs.contains_key(*name)).collect();
        // Rows of batches of another size may be in another order, and such batches have other labels.
        let is_same = match first.samples == second.samples {
            true => {
                samples(&a, &shared, most)? == samples(&b, &shared, most)?
                    && a.iter().map(|batch| &batch.references).eq(b.iter().map(|batch| &batch.references))
            }
            false => samples(&a, &shared, 1)? == samples(&b, &shared, 1)?,
        };
        Ok(if is_same { None } else { reason() })
    }

    /// The first batches, up to the one with the row of this number.
    fn first_batches(&self, rows: usize) -> Result<Vec<Batch>> {
        let (mut batches, mut read) = (Vec::new(), 0);
        self.for_each_in(Order::default(), |batch| {
            read = rows_of(&batch).saturating_add(read);
            batches.push(batch);
            Ok(if read < rows { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(batches)
    }
}

fn rows_of(batch: &Batch) -> usize {
    batch.inputs.values().filter_map(|input| input.dims().first()).min().copied().unwrap_or(0)
}

/// Hashes of these inputs of the first rows.
fn samples(batches: &[Batch], inputs: &[&String], count: usize) -> Result<Vec<u64>> {
    let mut samples = Vec::new();
    for batch in batches {
        let shared = inputs.iter().filter_map(|name| Some(((*name).clone(), batch.inputs.get(*name)?.clone()))).collect();
        let batch = Batch { inputs: shared, references: References::None, samples: rows_of(batch) };
        for row in 0..batch.samples.min(count.saturating_sub(samples.len())) {
            samples.push(identity(&batch.narrow(row, 1)?)?);
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Map, Value, json};

    use super::*;
    use crate::model::SynthesizedFiles;

    #[test]
    fn renumbered_tokens_are_found() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let (config, synthesized) = (Map::new(), SynthesizedFiles::new());
        let target = |folder| Target::new(folder, &synthesized, &config);
        let renumbered = || has_renumbered_tokens(folders.each_ref().map(|folder| target(folder.path()))).unwrap();
        let write = |folder: &Path, vocabulary: Value| {
            let tokenizer = json!({ "version": "1.0", "model": { "type": "WordLevel", "unk_token": "a", "vocab": vocabulary } });
            std::fs::write(folder.join(VOCABULARIES[0]), tokenizer.to_string()).unwrap();
        };
        write(folders[0].path(), json!({ "a": 0, "b": 1, "c": 2 }));
        assert!(!renumbered(), "the second model has no tokenizer");
        for (vocabulary, expected) in [
            (json!({ "a": 0, "b": 1 }), false),
            (json!({ "a": 0, "b": 1, "c": 2, "d": 3 }), false),
            (json!({ "a": 0, "c": 1 }), true),
            (json!({ "a": 0, "d": 1 }), true),
        ] {
            write(folders[1].path(), vocabulary.clone());
            assert_eq!(renumbered(), expected, "{vocabulary}");
        }
    }
}
