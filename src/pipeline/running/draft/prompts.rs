//! The prompts that a draft is trained and measured on.

use std::collections::BTreeSet;
use std::path::Path;

use crate::data::{Batch, Corpus, Data, DataSet, Task, WindowSampling};
use crate::error::{Error, Result, counted, redact_path};
use crate::evaluation::Subject;
use crate::exec::transfer;
use crate::generation::{LanguageModel, Message};
use crate::model::Model;

/// Default length of prompts from a text, in tokens.
const PROMPT_TOKENS: usize = 32;
/// Of this many prompts, one is held out, at most [`MAX_HELD_OUT`] in total.
const HELD_OUT_RATIO: usize = 10;
const MAX_HELD_OUT: usize = 16;

/// Source of prompts.
#[derive(Debug, Clone, Copy)]
pub enum PromptSource<'a> {
    /// Records of a file: lines, columns, or chats. With the flag, texts are messages of the user in a chat.
    Records(&'a Path, bool),
    /// Beginnings of windows of a text; for chats, the messages before the first one of the assistant.
    Windows(&'a Data),
}

/// Prompts as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompts {
    /// Prompts whose continuations train the draft, without duplicates.
    pub train: Vec<Vec<i64>>,
    /// Held-out prompts, none of which is in `train`.
    pub test: Vec<Vec<i64>>,
    /// File of the held-out prompts.
    pub tested_on: String,
}

/// A prompt with its location for messages.
type Located = (Vec<i64>, String);

/// Reads prompts for a model.
struct Reader<'m> {
    model: &'m Model,
    language: &'m LanguageModel,
    /// Default limit of the number of prompts from a text.
    count: usize,
}

impl Prompts {
    /// Reads prompts, and holds out those of `test`, or else a tenth of them. A text has at most `count`
    /// prompts, unless its options set another limit.
    ///
    /// # Errors
    /// The file has no prompts, or too few to hold out one, or the model has no tokenizer, or a prompt leaves
    /// no room for a continuation.
    pub fn read((model, language): (&Model, &LanguageModel), source: PromptSource, test: Option<&Path>, count: usize) -> Result<Prompts> {
        let reader = Reader { model, language, count };
        let mut train = reader.read(source, source.option())?;
        let is_chat = matches!(source, PromptSource::Records(_, true));
        let (test, tested_on) = match test {
            Some(path) => {
                let source = PromptSource::Records(path, is_chat);
                (reader.read(source, "--test")?, source.name())
            }
            None => (hold_out(&mut train).ok_or_else(|| too_few(source))?, source.name()),
        };
        train.retain(|prompt| !test.contains(prompt));
        if train.is_empty() {
            return Err(Error::option("--test", format!("contains all prompts of {}: training needs other prompts", source.name())));
        }
        Ok(Prompts { train, test, tested_on })
    }

    /// Reads prompts for the measurement of a draft that is not trained: up to `count`, evenly spread. The
    /// second result is the number of the others.
    ///
    /// # Errors
    /// As of [`read`](Prompts::read).
    pub fn measured((model, language): (&Model, &LanguageModel), source: PromptSource, count: usize) -> Result<(Prompts, usize)> {
        let all = Reader { model, language, count }.read(source, source.option())?;
        let (total, kept) = (all.len(), all.len().min(count));
        let is_kept = |at: usize| (at * kept) / total != ((at + 1) * kept) / total;
        let test = all.into_iter().enumerate().filter_map(|(at, prompt)| is_kept(at).then_some(prompt)).collect();
        Ok((Prompts { train: Vec::new(), test, tested_on: source.name() }, total - kept))
    }
}

/// Removes evenly spread prompts; `None` if there are fewer than two.
fn hold_out(prompts: &mut Vec<Vec<i64>>) -> Option<Vec<Vec<i64>>> {
    let count = (prompts.len() / HELD_OUT_RATIO).clamp(1, MAX_HELD_OUT);
    if prompts.len() < 2 {
        return None;
    }
    let distance = prompts.len() / count;
    let (test, train): (Vec<_>, Vec<_>) =
        std::mem::take(prompts).into_iter().enumerate().partition(|(at, _)| at % distance == distance - 1 && at / distance < count);
    *prompts = train.into_iter().map(|(_, prompt)| prompt).collect();
    Some(test.into_iter().map(|(_, prompt)| prompt).collect())
}

fn too_few(source: PromptSource) -> Error {
    let reason = format!("{} contains only one prompt, and one is held out to measure the draft: add prompts, or specify held-out prompts", source.name());
    Error::option(source.option(), reason + " with `--test`")
}

impl PromptSource<'_> {
    fn name(self) -> String {
        match self {
            PromptSource::Records(path, _) => redact_path(path).display().to_string(),
            PromptSource::Windows(data) => data.names().unwrap_or_default(),
        }
    }

    fn option(self) -> &'static str {
        if matches!(self, PromptSource::Records(..)) { "--prompts" } else { "--data" }
    }
}

impl Reader<'_> {
    /// The prompts of a source, without duplicates.
    fn read(&self, source: PromptSource, option: &'static str) -> Result<Vec<Vec<i64>>> {
        let located = match source {
            PromptSource::Records(path, as_chat) => self.records(&self.corpus(&Data::default(), path)?, None, as_chat)?,
            PromptSource::Windows(data) => {
                let Some(path) = data.text.as_deref() else {
                    return Err(Error::option("--data", "needs texts: a .txt, .raw, .csv, .tsv or .jsonl file, or `{ text: FILE, ... }`"));
                };
                data.require_unpacked("--data")?;
                let corpus = self.corpus(data, path)?;
                if corpus.has_chats() { self.chats(data, &corpus)? } else { self.windows(data, &corpus)? }
            }
        };
        let mut seen = BTreeSet::new();
        let mut prompts = Vec::new();
        for (prompt, location) in located {
            self.check(&prompt, &location)?;
            if seen.insert(prompt.clone()) {
                prompts.push(prompt);
            }
        }
        if prompts.is_empty() {
            return Err(Error::option(option, format!("{} contains no prompts", source.name())));
        }
        Ok(prompts)
    }

    fn corpus(&self, data: &Data, path: &Path) -> Result<Corpus> {
        Corpus::open(data, path, &Subject::from_model(self.model.clone())?.target())
    }

    /// One prompt per record.
    fn records(&self, corpus: &Corpus, limit: Option<usize>, as_chat: bool) -> Result<Vec<Located>> {
        let file = redact_path(corpus.path());
        if as_chat && corpus.has_chats() {
            return Err(Error::option("--chat", format!("has no effect on {}, which contains chats: remove it", file.display())));
        }
        let (vocabulary, template) = (self.language.vocabulary()?, as_chat.then(|| self.language.chat_template()).transpose()?);
        let mut prompts = Vec::new();
        for prompt in corpus.prompts()?.take(limit.unwrap_or(usize::MAX)) {
            let prompt = prompt?;
            let tokens = match &template {
                Some(template) => vocabulary.encode_chat(&template.render(&[Message { role: "user".into(), content: prompt.text }])?)?,
                None if prompt.has_special_tokens => vocabulary.encode_chat(&prompt.text)?,
                None => vocabulary.encode(&prompt.text)?,
            };
            prompts.push((tokens, format!("{}: line {}", file.display(), prompt.line)));
        }
        Ok(prompts)
    }

    /// The beginnings of chats. Options of windows do not apply to them.
    fn chats(&self, data: &Data, corpus: &Corpus) -> Result<Vec<Located>> {
        let read = Data { text: data.text.clone(), text_column: data.text_column.clone(), samples: data.samples, ..Data::default() };
        if *data != read {
            let reason = format!("{} contains chats, for which only `text_column` and `samples` apply: remove other options", corpus.path().display());
            return Err(Error::option("--data", reason));
        }
        self.records(corpus, data.samples.or(Some(self.count)), false)
    }

    /// Windows that are spread over a plain text, or the first windows of other texts.
    fn windows(&self, data: &Data, corpus: &Corpus) -> Result<Vec<Located>> {
        if let Some(task) = data.task.filter(|task| *task != Task::LanguageModelling) {
            return Err(Error::option("--data", format!("`task: {task}` has no effect on prompts, which are beginnings of texts: remove it")));
        }
        let room = self.language.positions().map_or(usize::MAX, |positions| (positions / 2).max(2));
        let is_spread = data.stride.is_none() && corpus.is_plain()?;
        let data = Data {
            task: Some(Task::LanguageModelling),
            max_length: Some(data.max_length.unwrap_or(PROMPT_TOKENS.min(room))),
            samples: Some(data.samples.unwrap_or(self.count)),
            sampling: data.sampling.or(is_spread.then_some(WindowSampling::Spread)),
            ..data.clone()
        };
        let subject = Subject::from_model(self.model.clone())?;
        let mut prompts = Vec::new();
        DataSet::open(&data, subject.target())?.for_each(|batch| {
            let location = data.names().unwrap_or_default();
            prompts.extend(rows(&batch)?.into_iter().filter(|row| row.len() > 1).map(|row| (row, location.clone())));
            Ok(())
        })?;
        Ok(prompts)
    }

    /// Checks that a prompt has tokens, and that a continuation fits after it.
    fn check(&self, prompt: &[i64], location: &str) -> Result<()> {
        match self.language.positions() {
            _ if prompt.is_empty() => Err(Error::option(location, "the prompt has no tokens")),
            Some(positions) if prompt.len() >= positions => {
                let reason = format!(
                    "the prompt has {}, but the model supports at most {positions} (`max_position_embeddings`) with the continuation: shorten it",
                    counted(prompt.len(), "token")
                );
                Err(Error::option(location, reason))
            }
            _ => Ok(()),
        }
    }
}

/// The texts of a batch as tokens, without padding.
fn rows(batch: &Batch) -> Result<Vec<Vec<i64>>> {
    let read = |name: &str| batch.inputs.get(name).map(transfer::read::<i64>).transpose().map_err(|e| Error::candle("a text", e));
    let (ids, mask) = (read("input_ids")?.unwrap_or_default(), read("attention_mask")?);
    let is_token = |at: usize| mask.as_ref().is_none_or(|mask| mask.get(at) != Some(&0));
    let width = batch.token_count().unwrap_or(0).max(1);
    let row = |(row, ids): (usize, &[i64])| ids.iter().enumerate().filter(|(at, _)| is_token(row * width + at)).map(|(_, id)| *id).collect();
    Ok(ids.chunks(width).enumerate().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_prompts_is_held_out() {
        for (count, expected) in [(2, 1), (19, 1), (20, 2), (95, 9), (1000, 16)] {
            let all: Vec<Vec<i64>> = (0..count).map(|token| vec![token]).collect();
            let mut train = all.clone();
            let test = hold_out(&mut train).unwrap();
            assert_eq!((test.len(), train.len()), (expected, all.len() - expected), "{count}");
            let mut both: Vec<Vec<i64>> = train.into_iter().chain(test).collect();
            both.sort();
            assert_eq!(both, all);
        }
        assert!(hold_out(&mut vec![vec![1]]).is_none() && hold_out(&mut Vec::new()).is_none());
    }
}
