//! Tokens of the corpus: how often each occurs, and whether a smaller vocabulary splits the texts in the same
//! way.

use std::path::PathBuf;

use super::NAME;
use super::retained::Retained;
use crate::data::{Column, Corpus, Data, Target, Tokenizer};
use crate::error::{Error, Result};
use crate::model::Model;

/// Texts of files, and the tokenizer that splits them.
pub(super) struct TokenizedCorpus {
    files: Vec<Corpus>,
    tokenizer: Tokenizer,
}

impl TokenizedCorpus {
    /// Opens files for the tokenizer of a model. Fails if a column is selected and no file has columns.
    pub fn open(model: &Model, paths: &[PathBuf], column: Option<&Column>) -> Result<TokenizedCorpus> {
        let target = target(model);
        let options = Data { text_column: column.cloned(), ..Data::default() };
        let files = paths.iter().map(|path| Corpus::open(&options, path, &target)).collect::<Result<Vec<_>>>()?;
        let plain = files.iter().map(Corpus::is_plain).collect::<Result<Vec<_>>>()?;
        if column.is_some() && !plain.contains(&false) {
            return Err(Error::option(format!("{NAME}: text_column"), "applies only to texts in columns (.csv, .tsv or .jsonl): remove it"));
        }
        Ok(TokenizedCorpus { files, tokenizer: Tokenizer::open(&target, None)? })
    }

    /// How often each of the first `rows` tokens occurs. A plain text is tokenized line by line, and as a
    /// whole, so that line breaks are tokens: the larger number of each token counts.
    ///
    /// # Errors
    /// A text contains a token beyond these, or a file contains none.
    pub fn counts(&self, rows: usize) -> Result<Vec<u64>> {
        let mut counts = vec![0u64; rows];
        for file in &self.files {
            let texts = file.texts()?.map(|text| {
                let text = text?;
                self.tokenizer.untruncated(&text.text, !text.has_special_tokens)
            });
            let in_texts = occurrences(file, texts, rows)?;
            if in_texts.iter().all(|count| *count == 0) {
                return Err(Error::option(format!("{NAME}: keep"), format!("{} contains no tokens: specify a file with texts", file.path().display())));
            }
            let in_whole = occurrences(file, file.entire_text(&self.tokenizer)?.into_iter().flatten(), rows)?;
            for (count, (one, other)) in counts.iter_mut().zip(in_texts.into_iter().zip(in_whole)) {
                *count += one.max(other);
            }
        }
        Ok(counts)
    }

    /// Checks that the tokenizer of a model with fewer tokens splits every text into the same tokens, if all
    /// of them remain.
    ///
    /// # Errors
    /// It splits a text differently.
    pub fn require_same_tokens(&self, smaller: &Model, retained: &Retained) -> Result<()> {
        let other = Tokenizer::open(&target(smaller), None)?;
        let new_ids = |tokens: &[i64]| tokens.iter().map(|token| retained.new_id(usize::try_from(*token).ok()?)).collect::<Option<Vec<usize>>>();
        let differs = |file: &Corpus, text: String, found: &[i64]| {
            let names = |tokenizer: &Tokenizer, ids: &[i64]| ids.iter().map(|id| tokenizer.token(*id).unwrap_or_default()).collect::<Vec<_>>().join(" ");
            let what = format!("{NAME}: {}: {text} would become `{}`", file.path().display(), names(&other, found));
            Error::run(what, "the tokenizer with fewer tokens splits it differently", "remove it from the corpus")
        };
        for file in &self.files {
            for text in file.texts()? {
                let text = text?;
                let tokens = |tokenizer: &Tokenizer| tokenizer.untruncated(&text.text, !text.has_special_tokens);
                let Some(expected) = new_ids(&tokens(&self.tokenizer)?) else { continue };
                let found = tokens(&other)?;
                if !is_equal(&found, &expected) {
                    return Err(differs(file, format!("line {}", text.line), &found));
                }
            }
            let (Some(before), Some(mut after)) = (file.entire_text(&self.tokenizer)?, file.entire_text(&other)?) else { continue };
            let (mut expected, mut found, mut is_complete) = (Vec::new(), Vec::new(), true);
            for tokens in before {
                let Some(tokens) = new_ids(&tokens?) else {
                    is_complete = false;
                    break;
                };
                expected.extend(tokens);
                while found.len() < expected.len() {
                    let Some(part) = after.next() else { break };
                    found.extend(part?);
                }
                let common = expected.len().min(found.len());
                if !is_equal(&found[..common], &expected[..common]) {
                    return Err(differs(file, "the whole text".into(), &found[..common]));
                }
                (expected, found) = (expected.split_off(common), found.split_off(common));
            }
            if is_complete && (!expected.is_empty() || !found.is_empty() || after.next().is_some()) {
                return Err(differs(file, "the end of the text".into(), &found));
            }
        }
        Ok(())
    }
}

/// How often each of the first `rows` tokens occurs in parts of a file.
fn occurrences(file: &Corpus, parts: impl Iterator<Item = Result<Vec<i64>>>, rows: usize) -> Result<Vec<u64>> {
    let mut counts = vec![0u64; rows];
    for tokens in parts {
        for token in tokens? {
            let count = usize::try_from(token)
                .ok()
                .and_then(|token| counts.get_mut(token))
                .ok_or_else(|| Error::malformed(file.path(), format!("contains the token {token}, but the embedding of the model has only {rows} rows")))?;
            *count += 1;
        }
    }
    Ok(counts)
}

fn is_equal(found: &[i64], expected: &[usize]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(found, expected)| usize::try_from(*found) == Ok(*expected))
}

/// The target of a tokenizer, which depends only on the files of a model.
fn target(model: &Model) -> Target<'_> {
    Target::new(&model.path, &model.auxiliary.synthesized, model.config.values())
}
