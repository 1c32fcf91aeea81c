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

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::distill::{Job, with_previous_names};
use super::new_head::{WithHead, add_head};
use super::{Pass, Plan, Samples, distill, options_of};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pass::training_options::training_pass;
use crate::run_state::{Applied, RunState};
use crate::train::Offload;

training_pass! {
    /// Train the model on labels, or on the next token.
    Finetune {
        /// Names of the classes of a new classification head, for an encoder or a CNN without one
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "NAME,...", value_delimiter = ',', conflicts_with = "labels"))]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<String>"))]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
        classes: Vec<String>,
        /// Number of classes of a new classification head, instead of their names
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
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

    fn fixed_options(&self) -> Value {
        self.fixed()
    }

    fn check(&self) -> Result<()> {
        let count = self.labels.unwrap_or(self.classes.len());
        let names: BTreeSet<&str> = self.classes.iter().map(|name| name.trim()).collect();
        let adds_head = self.labels.is_some() || !self.classes.is_empty();
        let reason = if adds_head && self.training.adapter.is_some() {
            Some("cannot be combined with `adapter`, which does not train a new head: train the head first, in a pass without `adapter`")
        } else if self.labels.is_some() && !self.classes.is_empty() {
            Some("`labels` and `classes` exclude each other")
        } else if names.len() < self.classes.len() || names.contains("") {
            Some("names of classes must differ and not be empty")
        } else if adds_head && !(2..=MAX_CLASSES).contains(&count) {
            Some("a classification head needs 2 to 1048576 classes")
        } else {
            None
        };
        reason.map_or(Ok(()), |reason| Err(Error::option(self.head_option(), reason)))?;
        if self.training.offload.contains(&Offload::Teacher) {
            return Err(Error::option(format!("{NAME}: offload"), "`teacher` has no effect, because only `distill` has a teacher: remove it"));
        }
        self.training.check(NAME)
    }

    fn resolve(&mut self, folder: &std::path::Path) {
        self.training.final_checkpoint.iter_mut().for_each(|path| *path = crate::files::resolve(folder, path));
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(Samples::Train)
    }

    fn trains_codes(&self, weight: &str) -> bool {
        self.training.trains_codes(weight)
    }

    fn plan<'a>(&'a self, model: &'a Model, state: &'a RunState) -> Result<Plan<'a>> {
        let (mut applied, classes, mut training) = (Applied::new(NAME, self.options()), self.new_classes(), self.training.clone());
        let (mut student, mut renamed) = (model.clone(), BTreeMap::new());
        if !classes.is_empty() {
            WithHead { model: student, renamed } = add_head(&self.head_option(), student, &mut applied.notes, &classes, state.seed)?;
            let graph = student.graph()?;
            let names: Vec<&str> = graph.params().map(|(_, value)| value.name.as_str()).collect();
            let groups = training.groups.iter_mut().map(|group| &mut group.targets);
            for patterns in [&mut training.targets, &mut training.ignore].into_iter().chain(groups) {
                *patterns = with_previous_names(std::mem::take(patterns), &names, &renamed);
            }
        }
        Job { renamed, ..Job::new(applied, student, training, state) }.plan()
    }

    fn remedy(&self) -> &'static str {
        distill::REMEDY
    }
}
