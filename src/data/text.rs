//! Texts, or pairs of texts, each a sample.

use std::path::{Path, PathBuf};

use super::labels::Classes;
use super::options::{Data, Task};
use super::records::{self, Record};
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, Order, References, SampleSource, Target, Works, in_batches};
use crate::error::{Error, Result};

/// About what a record takes in memory.
const RECORD: usize = 512;

pub(super) struct Sentences {
    options: Data,
    path: PathBuf,
    task: Task,
    tokenizer: Tokenizer,
    classes: Classes,
}

impl Sentences {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Sentences> {
        if task == Task::Embedding && options.pair_column.is_none() {
            return Err(Error::option("data", "`task: embedding` compares pairs with scores: name `pair_column` and `label_column`"));
        }
        let tokenizer = Tokenizer::open(&target, options.max_length)?;
        let sentences = Sentences { options: options.clone(), path: path.to_owned(), task, tokenizer, classes: Classes::of(&target) };
        // What is wrong with the columns is said before a model is loaded.
        drop(sentences.records()?);
        Ok(sentences)
    }

    fn records(&self) -> Result<records::Records> {
        records::open(&self.options, &self.path, matches!(self.task, Task::Classification | Task::Embedding))
    }

    fn batch(&self, records: &[Record]) -> Result<Batch> {
        let references = match self.task {
            Task::Classification => References::Classes(self.labels(records, |label, place| self.classes.find(label, &self.path, place))?),
            Task::Embedding => References::Scores(self.labels(records, |label, place| {
                let score = label.trim().parse::<f64>().ok().filter(|score| score.is_finite());
                score.ok_or_else(|| Error::malformed(&self.path, format!("{place}: the score `{label}` is no number")))
            })?),
            Task::LanguageModelling | Task::Fidelity => References::None,
        };
        let rows: Vec<Tokens> = if self.task == Task::Embedding {
            let second = records.iter().filter_map(|r| r.pair.as_ref());
            records.iter().map(|r| &r.text).chain(second).map(|text| self.tokenizer.encode(text, None)).collect::<Result<_>>()?
        } else {
            records.iter().map(|r| self.tokenizer.encode(&r.text, r.pair.as_deref())).collect::<Result<_>>()?
        };
        Ok(Batch { inputs: self.tokenizer.collate(&rows)?, references, samples: records.len() })
    }

    fn labels<T>(&self, records: &[Record], read: impl Fn(&str, &str) -> Result<T>) -> Result<Vec<T>> {
        records.iter().map(|record| read(record.label.as_deref().unwrap_or(""), &format!("line {}", record.line))).collect()
    }
}

impl SampleSource for Sentences {
    fn works(&self, order: Order) -> Result<Works<'_>> {
        let records = self.records()?.take(self.options.samples.unwrap_or(usize::MAX));
        Ok(in_batches(records, self.options.batch(self.task), RECORD, order, |records| self.batch(records)))
    }

    fn samples(&self) -> Option<usize> {
        let header =
            usize::from(self.options.header.unwrap_or(true) && matches!(records::layout(&self.options, &self.path), Ok(records::TextFormat::Columns { .. })));
        let lines = records::count_lines(&self.path)?.saturating_sub(header);
        Some(lines.min(self.options.samples.unwrap_or(usize::MAX)))
    }
}
