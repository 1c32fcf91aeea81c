//! Texts or pairs of texts, one sample each.

use std::path::{Path, PathBuf};

use super::chat::ChatTemplate;
use super::labels::{Classes, IGNORED, Label};
use super::largest::BatchSizes;
use super::options::{Data, Task};
use super::record::reject_empty_texts;
use super::records::{self, Record};
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, Order, PendingBatches, References, SampleSource, Target, counted, in_batches};
use crate::error::{Error, Result};

/// Approximate memory of a record, in bytes.
const RECORD_BYTES: usize = 512;

pub(super) struct Sentences {
    options: Data,
    path: PathBuf,
    task: Task,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    classes: Classes,
}

impl Sentences {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Sentences> {
        if task == Task::Embedding && options.pair_column.is_none() {
            return Err(Error::option("data", "`task: embedding` requires pairs of texts with scores: specify `pair_column` and `label_column`"));
        }
        options.reject_window_options("applies only to the windows of `task: language-modelling`, but each text is one sample here")?;
        if options.is_spread() {
            return Err(Error::option(
                "data",
                "`sampling: spread` selects windows of `task: language-modelling`, and each text is a sample here: leave it out",
            ));
        }
        let tokenizer = Tokenizer::open(&target, options.max_length)?;
        let classes = Classes::from_target(options, &target);
        let sentences = Sentences { options: options.clone(), path: path.to_owned(), task, tokenizer, template: None, classes };
        // Reports errors in the columns before a model is loaded.
        let template = records::template(sentences.records()?, &target)?;
        if template.is_some() && matches!(task, Task::Embedding | Task::Contrastive) {
            return Err(Error::option("data", format!("{}: `task: {task}` requires texts, but the file contains chats", path.display())));
        }
        if task == Task::Embedding && sentences.records()?.next().is_none() {
            let reason = format!("contains no pair with a score: a score of {IGNORED} means that the pair has none; add scores, or set `task: fidelity`");
            return Err(Error::malformed(path, reason));
        }
        Ok(Sentences { template, ..sentences })
    }

    /// The records that are samples: without pairs that have no score.
    fn records(&self) -> Result<impl Iterator<Item = Result<Record>> + Send + use<>> {
        let records = records::open(&self.options, &self.path, matches!(self.task, Task::Classification | Task::Embedding))?;
        let scored = self.task == Task::Embedding;
        let is_sample = move |record: &Result<Record>| !scored || !record.as_ref().is_ok_and(|record| record.label.as_ref().is_some_and(is_ignored));
        Ok(records.filter(is_sample).take(self.options.samples.unwrap_or(usize::MAX)))
    }

    fn batch(&self, records: &[Record]) -> Result<Batch> {
        let references = match self.task {
            Task::Classification => References::Classes(self.labels(records, |label, location| self.classes.find(label, &self.path, location))?),
            Task::Embedding => References::Scores(self.labels(records, |label, location| {
                let score = label.text().parse::<f64>().ok().filter(|score| score.is_finite());
                score.ok_or_else(|| Error::malformed(&self.path, format!("{location}: the score `{}` is not a finite number", label.text())))
            })?),
            Task::Contrastive => References::Matches(if self.options.negative_column.is_some() { 3 } else { 2 }),
            Task::LanguageModelling | Task::Fidelity => References::None,
        };
        let rows: Vec<Tokens> = if matches!(self.task, Task::Embedding | Task::Contrastive) {
            let others = records.iter().filter_map(|r| r.pair.as_ref()).chain(records.iter().filter_map(|r| r.negative.as_ref()));
            let first = records.iter().map(|record| self.encode(record, None));
            first.chain(others.map(|text| self.tokenizer.encode(text, None))).collect::<Result<_>>()?
        } else {
            records.iter().map(|record| self.encode(record, record.pair.as_deref())).collect::<Result<_>>()?
        };
        reject_empty_texts(&self.path, records, &rows)?;
        Ok(Batch { inputs: self.tokenizer.collate(&rows)?, references, samples: records.len() })
    }

    fn encode(&self, record: &Record, pair: Option<&str>) -> Result<Tokens> {
        match record.rendered(self.template.as_ref(), &self.path)? {
            (text, true) => self.tokenizer.encode_rendered(&text),
            (text, false) => self.tokenizer.encode(&text, pair),
        }
    }

    fn labels<T>(&self, records: &[Record], read: impl Fn(&Label, &str) -> Result<T>) -> Result<Vec<T>> {
        // Records have labels if the task requires them.
        records.iter().filter_map(|record| Some(read(record.label.as_ref()?, &format!("line {}", record.line)))).collect()
    }
}

/// Whether a score means that the pair has none.
fn is_ignored(score: &Label) -> bool {
    score.text().parse() == Ok(IGNORED as f64)
}

impl SampleSource for Sentences {
    fn notes(&self) -> Vec<String> {
        records::header_note(&self.options, &self.path).into_iter().collect()
    }

    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        Ok(in_batches(self.records()?, self.options.batch(self.task, None), RECORD_BYTES, order, |records| self.batch(records)))
    }

    fn count(&self) -> Result<usize> {
        counted(self.records()?)
    }

    fn batch_sizes(&self) -> BatchSizes {
        BatchSizes::Varying { tokens: self.tokenizer.max_length() }
    }
}
