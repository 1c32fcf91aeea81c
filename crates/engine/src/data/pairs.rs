//! Pairs of input and target texts for encoder-decoder models.

use std::path::{Path, PathBuf};

use super::decoder_targets::DecoderTargets;
use super::largest::BatchSizes;
use super::options::{Data, Task};
use super::record::reject_empty_texts;
use super::records::{self, Record};
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, Order, PendingBatches, References, SampleSource, Target, counted, in_batches};
use crate::error::{Error, Result};

/// Approximate memory of a record, in bytes.
const RECORD_BYTES: usize = 512;

pub(super) struct Pairs {
    options: Data,
    path: PathBuf,
    task: Task,
    tokenizer: Tokenizer,
    decoder: DecoderTargets,
}

impl Pairs {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Pairs> {
        let missing = || Error::Unsupported {
            what: format!("{}: text for a model without the input `input_ids`", path.display()),
            hint: "use `arrays` with the encoder's inputs, and with `labels`, the target tokens of the decoder".into(),
        };
        target.inputs.iter().find(|port| port.name == "input_ids").ok_or_else(missing)?;
        if !matches!(task, Task::LanguageModelling | Task::Fidelity) {
            return Err(Error::option("task", format!("{task}: texts for an encoder-decoder model support language-modelling and fidelity")));
        }
        if options.label_column.is_some() {
            return Err(Error::option(
                "data",
                "`label_column`: encoder-decoder models do not use class labels: specify the column of the target texts as `pair_column`",
            ));
        }
        if options.pair_column.is_none() {
            let reason = "an encoder-decoder model requires target texts: specify their column as `pair_column`, in a .csv, .tsv or .jsonl file";
            return Err(Error::option("data", format!("{}: {reason}", path.display())));
        }
        options.reject_window_options("does not apply to pairs of texts, which are not split into windows, but truncated at `max_length`")?;
        let (tokenizer, decoder) = (Tokenizer::open(&target, options.max_length)?, DecoderTargets::from_target(&target)?);
        let pairs = Pairs { options: options.clone(), path: path.to_owned(), task, tokenizer, decoder };
        // Reports errors in the columns before a model is loaded.
        drop(pairs.records()?);
        Ok(pairs)
    }

    fn records(&self) -> Result<impl Iterator<Item = Result<Record>> + Send + use<>> {
        Ok(records::open(&self.options, &self.path, false)?.take(self.options.samples.unwrap_or(usize::MAX)))
    }

    fn batch(&self, records: &[Record]) -> Result<Batch> {
        let tokens = records.iter().map(|record| self.tokenizer.encode(&record.rendered(None, &self.path)?.0, None)).collect::<Result<Vec<Tokens>>>()?;
        reject_empty_texts(&self.path, records, &tokens)?;
        let mut inputs = self.tokenizer.collate(&tokens)?;
        let mut targets = Vec::with_capacity(records.len());
        for record in records {
            let tokens = self.tokenizer.encode(record.pair.as_deref().unwrap_or_default(), None)?.ids;
            let location = format!("line {}, the second text,", record.line);
            if tokens.is_empty() {
                return Err(Error::malformed(&self.path, format!("{location} has no tokens: the target text is empty")));
            }
            self.decoder.require_room(&self.path, &location, tokens.len())?;
            targets.push(tokens);
        }
        let targets = DecoderTargets::pad_rows(targets);
        self.decoder.add_inputs(&mut inputs, &targets)?;
        let references = if self.task == Task::LanguageModelling { References::Tokens(targets) } else { References::None };
        Ok(Batch { inputs, references, samples: records.len() })
    }
}

impl SampleSource for Pairs {
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
        // The lengths of inputs and of targets differ.
        BatchSizes::Varying { tokens: None }
    }
}
