//! Removes tokens from the vocabulary: the rows of the embedding and of the output head, the entries of the
//! tokenizer, and the ids in all files are those of the remaining tokens.
//!
//! The order of the remaining tokens does not change. Special tokens, all bytes or characters, and the
//! tokens that occur in the corpus remain, with the merges that produce them. Byte-pair encoding applies the
//! remaining merges in the same order, WordPiece finds the same longest tokens, and Unigram the same best
//! path. A text of remaining tokens is therefore split in the same way, and has the same logits in the
//! remaining rows.
//!
//! ```yaml
//! passes:
//!   - prune-vocabulary: { keep: corpus.txt, multiple_of: 64 }
//! ```

mod corpus;
mod files;
mod languages;
mod retained;
mod selection;
mod settings;
mod tables;
mod tokenizer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Pass, Plan, options_of};
use crate::data::Column;
use crate::error::{Error, Result, counted};
use crate::model::Model;
use crate::run_state::{Applied, RunState};
use crate::work::Meter;
use corpus::TokenizedCorpus;
use languages::Scripts;
use retained::Retained;
use selection::Selection;
use tables::{Reduced, TokenTables};
use tokenizer::TokenizerFile;

/// Remove tokens that a corpus does not need from the vocabulary.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PruneVocabulary {
    /// Texts whose tokens remain: .txt, .raw, .csv, .tsv or .jsonl
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE"))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<PathBuf>"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::data::one_or_several::one_or_several")]
    pub keep: Vec<PathBuf>,
    /// Languages whose tokens remain, such as en,de: all tokens in their scripts, and digits, punctuation and
    /// symbols
    #[cfg_attr(feature = "cli", arg(long, value_name = "CODE,...", value_delimiter = ','))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<String>"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::data::one_or_several::one_or_several")]
    pub languages: Vec<String>,
    /// Column of the text in .csv, .tsv and .jsonl [default: text, sentence, or messages (chats, in .jsonl)]
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_column: Option<Column>,
    /// Maximum number of tokens: the most frequent ones of the texts; without texts, the first by merge rank
    /// (BPE), score (Unigram) or id (WordPiece)
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// Number of occurrences below which a token of the texts is removed
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = Self::default().min_count))]
    pub min_count: u64,
    /// Round the number of rows up to a multiple of this number, by keeping more tokens, or the
    /// maximum number of tokens down
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = Self::default().multiple_of))]
    pub multiple_of: usize,
}

impl Default for PruneVocabulary {
    fn default() -> Self {
        Self { keep: Vec::new(), languages: Vec::new(), text_column: None, vocab_size: None, min_count: 1, multiple_of: 1 }
    }
}

const NAME: &str = "prune-vocabulary";

/// A model with only the tokens that another model retained, with which that one can be compared. Both must
/// descend from the same input.
///
/// # Errors
/// A file of the model is not supported.
pub(crate) fn with_tokens_of(input: &Model, other: &Model) -> Result<Model> {
    match &other.retained_tokens {
        None => Ok(input.clone()),
        Some(ids) => Ok(TokenTables::find(input)?.reduce(input, &TokenizerFile::open(input)?, ids, &Arc::new(Meter::default()))?.model),
    }
}

impl PruneVocabulary {
    /// The scripts of the languages, if there are any.
    fn scripts(&self) -> Result<Option<Scripts>> {
        if self.languages.is_empty() { Ok(None) } else { Scripts::of_languages(&self.languages).map(Some) }
    }

    /// The ids that remain, ascending. `counts` are the occurrences in the corpus, if there is one.
    fn remaining(&self, tokenizer: &TokenizerFile, rows: usize, required: Vec<usize>, counts: Option<&[u64]>) -> Result<Vec<usize>> {
        let mut selection = Selection::new(tokenizer, required);
        let least = selection.ids().len();
        let limit = self.vocab_size.map_or(usize::MAX, |size| size - size % self.multiple_of);
        if limit < least {
            let rounded = if self.vocab_size == Some(limit) { String::new() } else { format!(", rounded down to a multiple of {},", self.multiple_of) };
            let reason = format!(
                "{limit}{rounded} is less than the {least} tokens that always remain: special tokens, all bytes or characters, and tokens that files name"
            );
            return Err(Error::option(format!("{NAME}: vocab_size"), reason));
        }
        let count = |id: usize| counts.map_or(0, |counts| counts.get(id).copied().unwrap_or(0));
        let candidates = tokenizer.by_frequency(count);
        let scripts = self.scripts()?;
        let is_used = |id: usize| if counts.is_some() { count(id) >= self.min_count } else { scripts.is_none() };
        let remains = |id: usize| is_used(id) || scripts.as_ref().is_some_and(|scripts| scripts.contain(tokenizer, id));
        for id in candidates.iter().filter(|id| remains(**id)) {
            selection.add(*id, limit);
        }
        let target = selection.ids().len().next_multiple_of(self.multiple_of);
        for id in candidates {
            selection.add(id, target);
        }
        // Rows without tokens, which checkpoints have for the same reason.
        let tokens = tokenizer.all();
        for row in (0..rows).filter(|row| !tokens.contains(row)) {
            if selection.ids().len() < target {
                selection.add_row(row);
            }
        }
        if selection.ids().len() < target {
            let reason = format!("the embedding has only {rows} rows, of which {} remain: {target} rows are needed", selection.ids().len());
            return Err(Error::option(format!("{NAME}: multiple_of"), reason));
        }
        Ok(selection.ids().iter().copied().collect())
    }

    fn prune(&self, model: &Model) -> Result<(Model, Applied)> {
        let mut applied = Applied::new(NAME, self.options());
        let tables = TokenTables::find(model)?;
        let tokenizer = TokenizerFile::open(model)?;
        let rows = tables.rows;
        let all = tokenizer.all();
        if let Some(id) = all.last().filter(|id| **id >= rows) {
            let token = tokenizer.token(*id).unwrap_or_default();
            let reason = format!("{NAME}: the token `{token}` has the id {id}, but the embedding has only {rows} rows");
            return Err(Error::run(model.path.display(), reason, "remove the token from tokenizer.json, or resize the embedding in transformers"));
        }
        let mut required = tokenizer.required();
        required.extend(files::required(model, &tokenizer, rows)?.into_iter().filter(|id| *id < rows));
        required.extend(0..tables.fixed.min(rows));
        let corpus = (!self.keep.is_empty()).then(|| TokenizedCorpus::open(model, &self.keep, self.text_column.as_ref())).transpose()?;
        let counts = corpus.as_ref().map(|corpus| corpus.counts(rows)).transpose()?;
        let ids = self.remaining(&tokenizer, rows, required.into_iter().collect(), counts.as_deref())?;
        let Reduced { model: smaller, weights, notes } = tables.reduce(model, &tokenizer, &ids, &applied.meter)?;
        let retained = Retained(&ids);
        if let Some(corpus) = &corpus {
            corpus.require_same_tokens(&smaller, &retained)?;
        }
        let removed = all.iter().filter(|id| !retained.contains(**id)).count();
        let mut details = json!({ "tokenizer": tokenizer.kind(), "tokens": all.len(), "removed": removed, "rows": rows, "rows_after": ids.len() });
        if let Some(counts) = &counts {
            let sum = |is_counted: &dyn Fn(usize) -> bool| counts.iter().enumerate().filter(|(id, _)| is_counted(*id)).map(|(_, count)| count).sum::<u64>();
            let (occurrences, lost) = (sum(&|_| true), sum(&|id| !retained.contains(id)));
            details["occurrences"] = json!(occurrences);
            details["removed_occurrences"] = json!(lost);
            if lost > 0 {
                let percent = 100.0 * lost as f64 / occurrences.max(1) as f64;
                applied.notes.push(format!("{percent:.2} % of the tokens in the texts are removed: they are split into shorter tokens"));
            }
        }
        applied.notes.push(match removed {
            0 => {
                let is_renumbered = all.iter().any(|id| ids.get(*id) != Some(id));
                let new = if is_renumbered {
                    "; rows without a token were removed, so that ids are new, and caches of tokens and of logits do not apply"
                } else {
                    ""
                };
                format!("no token was removed: all {} are necessary or requested{new}", counted(all.len(), "token"))
            }
            _ => format!("{} of {} removed: ids of tokens are new, so caches of tokens and of logits do not apply", counted(removed, "token"), all.len()),
        });
        applied.notes.extend(notes);
        applied.tensors = weights;
        applied.rule = "embeddings of tokens and output heads".into();
        applied.details = details;
        Ok((smaller, applied))
    }
}

impl Pass for PruneVocabulary {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: &str, reason: &str| Err(Error::option(format!("{NAME}: {what}"), reason));
        match () {
            () if self.keep.is_empty() && self.languages.is_empty() && self.vocab_size.is_none() => {
                wrong("keep", "is missing: specify texts whose tokens remain, `languages`, or a `vocab_size`")
            }
            () if self.vocab_size == Some(0) => wrong("vocab_size", "must be at least 1"),
            () if self.min_count == 0 => wrong("min_count", "must be at least 1"),
            () if self.min_count > 1 && self.keep.is_empty() => wrong("min_count", "counts tokens in the texts of `keep`, which is missing"),
            () if self.text_column.is_some() && self.keep.is_empty() => wrong("text_column", "is a column of the texts of `keep`, which is missing"),
            () if self.multiple_of == 0 => wrong("multiple_of", "must be at least 1"),
            () => self.scripts().map(drop),
        }
    }

    fn resolve(&mut self, folder: &Path) {
        self.keep.iter_mut().for_each(|path| *path = crate::files::resolve(folder, path));
    }

    fn reads(&self) -> Vec<PathBuf> {
        self.keep.clone()
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let (mut smaller, applied) = self.prune(&model.on_texts())?;
        smaller.image_size.clone_from(&model.image_size);
        Ok(Plan::new(smaller, applied))
    }

    fn remedy(&self) -> &'static str {
        "texts in `keep` that are typical of the model's input, or a larger `vocab_size`"
    }
}
