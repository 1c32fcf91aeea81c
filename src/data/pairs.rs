//! Pairs of texts for a decoder behind an encoder: what is read, and what is to be said of it.

use std::path::{Path, PathBuf};

use super::options::{Data, Task};
use super::records::{self, Record};
use super::said::Decoder;
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, Order, PendingBatches, References, SampleSource, Target, counted, in_batches};
use crate::error::{Error, Result};

/// About what a record takes in memory.
const RECORD: usize = 512;

pub(super) struct Pairs {
    options: Data,
    path: PathBuf,
    task: Task,
    tokenizer: Tokenizer,
    decoder: Decoder,
}

impl Pairs {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Pairs> {
        let missing = || Error::Unsupported {
            what: format!("{}: texts for a model that takes no `input_ids`", path.display()),
            hint: "give `arrays` with what its encoder reads, and with `labels`, the tokens of the texts that its decoder is to say".into(),
        };
        target.inputs.iter().find(|port| port.name == "input_ids").ok_or_else(missing)?;
        if !matches!(task, Task::LanguageModelling | Task::Fidelity) {
            return Err(Error::option("task", format!("{task} of texts: a decoder behind an encoder is asked for language-modelling or fidelity")));
        }
        if options.label_column.is_some() {
            return Err(Error::option(
                "data",
                "`label_column`: a decoder behind an encoder learns no classes: name the texts that it is to say as `pair_column`",
            ));
        }
        if options.pair_column.is_none() {
            let reason = "the model makes texts of texts: name the column of those that it is to say as `pair_column`, in a file .csv, .tsv or .jsonl";
            return Err(Error::option("data", format!("{}: {reason}", path.display())));
        }
        if options.stride.is_some() {
            return Err(Error::option("data", "`stride`: pairs of texts are no windows, and are cut at `max_length`: leave it out"));
        }
        let (tokenizer, decoder) = (Tokenizer::open(&target, options.max_length)?, Decoder::of(&target)?);
        let pairs = Pairs { options: options.clone(), path: path.to_owned(), task, tokenizer, decoder };
        // What is wrong with the columns is said before a model is loaded.
        drop(pairs.records()?);
        Ok(pairs)
    }

    fn records(&self) -> Result<impl Iterator<Item = Result<Record>> + Send + use<>> {
        Ok(records::open(&self.options, &self.path, false)?.take(self.options.samples.unwrap_or(usize::MAX)))
    }

    fn batch(&self, records: &[Record]) -> Result<Batch> {
        let read = records.iter().map(|record| self.tokenizer.encode(&record.written(None, &self.path)?.0, None)).collect::<Result<Vec<Tokens>>>()?;
        let mut inputs = self.tokenizer.collate(&read)?;
        let mut said = Vec::with_capacity(records.len());
        for record in records {
            let tokens = self.tokenizer.encode(record.pair.as_deref().unwrap_or_default(), None)?.ids;
            let place = format!("line {}, the second text,", record.line);
            if tokens.is_empty() {
                return Err(Error::malformed(&self.path, format!("{place} has no token: there is nothing to be said")));
            }
            self.decoder.require_room(&self.path, &place, tokens.len())?;
            said.push(tokens);
        }
        let said = Decoder::even(said);
        self.decoder.give(&mut inputs, &said)?;
        let references = if self.task == Task::LanguageModelling { References::Tokens(said) } else { References::None };
        Ok(Batch { inputs, references, samples: records.len() })
    }
}

impl SampleSource for Pairs {
    fn works(&self, order: Order) -> Result<PendingBatches<'_>> {
        Ok(in_batches(self.records()?, self.options.batch(self.task, None), RECORD, order, |records| self.batch(records)))
    }

    fn count(&self) -> Result<usize> {
        counted(self.records()?)
    }
}
