//! Fine-tuning on labels, to recover accuracy after pruning or for quantization-aware training.
//!
//! ```yaml
//! data:
//!   train: { images: train-images.gz, labels: train-labels.gz }
//! passes:
//!   - prune-structured: { target: { macs: 0.5 } }
//!   - finetune: { epochs: 3, batch_size: 128, learning_rate: 1e-3 }
//! ```
//!
//! `classes: [ham, spam]` or `labels: 2` first adds a classification head to an encoder or a CNN without
//! one.

use std::collections::BTreeSet;

use serde_json::Value;

use super::new_head::add_head;
use super::{Context, Pass, Samples, distill, options_of};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::run_state::RunState;
use crate::store::{ByteSize, Pattern};
use crate::train::losses::Losses;
use crate::train::optimizer::Kind;
use crate::train::schedule::Schedule;
use crate::train::{BatchNorm, BatchSize, Checkpointing, Every, Offload, Precision, QuantizerScales, Training, training_pass};

training_pass! {
    /// Train the model on labels, or on the next token.
    Finetune {
        /// Names of the classes of a new classification head, for an encoder or a CNN without one
        #[cfg_attr(feature = "cli", arg(long, value_name = "NAME,...", value_delimiter = ',', conflicts_with = "labels"))]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<String>"))]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
        classes: Vec<String>,
        /// Number of classes of a new classification head, instead of their names
        #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
        #[serde(skip_serializing_if = "Option::is_none")]
        labels: Option<usize>,
    }
}

const NAME: &str = "finetune";

/// Upper bound of the number of classes.
const MAX_CLASSES: usize = 1 << 20;

impl Finetune {
    /// The classes of the new head; empty if none is requested.
    fn new_classes(&self) -> Vec<String> {
        let names = || self.classes.iter().map(|name| name.trim().to_owned()).collect();
        self.labels.map_or_else(names, |count| (0..count).map(|id| format!("LABEL_{id}")).collect())
    }

    /// The option that requests a new head.
    fn head_option(&self) -> String {
        format!("{NAME}: {}", if self.labels.is_some() { "labels" } else { "classes" })
    }
}

impl Pass for Finetune {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        let count = self.labels.unwrap_or(self.classes.len());
        let names: BTreeSet<&str> = self.classes.iter().map(|name| name.trim()).collect();
        let reason = if self.labels.is_some() && !self.classes.is_empty() {
            Some("`labels` and `classes` exclude each other")
        } else if names.len() < self.classes.len() || names.contains("") {
            Some("names of classes must differ and not be empty")
        } else if (self.labels.is_some() || !self.classes.is_empty()) && !(2..=MAX_CLASSES).contains(&count) {
            Some("a classification head needs 2 to 1048576 classes")
        } else {
            None
        };
        reason.map_or(Ok(()), |reason| Err(Error::option(self.head_option(), reason)))?;
        self.training().check(NAME)
    }

    fn has_checkpoints(&self) -> bool {
        true
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(Samples::Train)
    }

    fn apply(&self, model: Model, run: &mut RunState, context: Option<&Context>) -> Result<Model> {
        let train = |model, run: &mut RunState| distill::train(NAME, model, run, self.options(), &self.training(), (None, None), context);
        let classes = self.new_classes();
        if classes.is_empty() {
            return train(model, run);
        }
        let with_head = add_head(&self.head_option(), model, run, &classes, context.map_or(0, |context| context.seed))?;
        let model = train(with_head.model, run)?;
        if let Some(applied) = run.history.last_mut() {
            // Reports name the tensors of the input.
            let tensors = std::mem::take(&mut applied.tensors).into_iter();
            applied.tensors = tensors.map(|name| with_head.renamed.get(&name).cloned().unwrap_or(name)).collect();
        }
        Ok(model)
    }

    fn remedy(&self) -> &'static str {
        distill::REMEDY
    }
}
