//! Comparison of the preprocessing of two models.

use std::collections::BTreeMap;

use super::held_out::identity;
use super::{Batch, DataSet, References, Target, Tokenizer};
use crate::error::{Error, Result};
use crate::model::read_auxiliary_text;

/// Files of a folder with the vocabulary.
const VOCABULARIES: [&str; 2] = ["tokenizer.json", "tiktoken.model"];
/// Other files of a folder that define the preprocessing of samples.
const PREPARATION: [&str; 7] = [
    "tokenization_kimi.py",
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
    Ok(a.inputs == b.inputs && !VOCABULARIES.into_iter().chain(PREPARATION).map(differs).collect::<Result<Vec<_>>>()?.contains(&true))
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
        let target = |folder| Target { folder, synthesized: &synthesized, config: &config, inputs: &[], outputs: &[], branches: false };
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
