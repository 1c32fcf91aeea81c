//! The task of data, inferred from the files and the model.

use super::options::{Data, Task, is_masked, is_of_class};
use super::{Target, arrays, images, source_registry};
use crate::error::Result;

impl Data {
    /// The task: as specified, or inferred from the data and the model.
    pub(super) fn task(&self, target: &Target) -> Result<Task> {
        if let Some(task) = self.task {
            return Ok(task);
        }
        if let Some(name) = &self.source {
            let has_classes = source_registry::find(name)?.has_classes();
            return Ok(if has_classes { Task::Classification } else { Task::Fidelity });
        }
        let classifies = target.outputs.iter().any(|port| port.name == "logits" && port.shape.len() == 2);
        if target.is_encoder_decoder() && !classifies {
            let has_targets = self.pair_column.is_some() || self.label_column.is_some() || self.arrays.as_deref().map_or(Ok(false), arrays::has_labels)?;
            return Ok(if has_targets && has_logits_per_token(target) { Task::LanguageModelling } else { Task::Fidelity });
        }
        if let Some(arrays) = self.arrays.as_ref().filter(|_| predicts_tokens(target)) {
            return Ok(if self.label_column.is_some() || arrays::has_labels(arrays)? { Task::LanguageModelling } else { Task::Fidelity });
        }
        if self.label_column.is_some() {
            return Ok(if self.pair_column.is_some() && !has_logits(target) { Task::Embedding } else { Task::Classification });
        }
        if let Some(images) = &self.images {
            let labelled = self.labels.is_some() || images::has_classes(images)?;
            return Ok(if labelled { Task::Classification } else { Task::Fidelity });
        }
        if let Some(arrays) = &self.arrays {
            return Ok(if arrays::has_labels(arrays)? { Task::Classification } else { Task::Fidelity });
        }
        let next = predicts_tokens(target) && !is_masked(target);
        Ok(if next { Task::LanguageModelling } else { Task::Fidelity })
    }
}

fn has_logits(target: &Target) -> bool {
    target.outputs.iter().any(|port| port.name == "logits")
}

fn has_logits_per_token(target: &Target) -> bool {
    target.outputs.iter().any(|port| port.name == "logits" && port.shape.len() == 3)
}

/// Whether the logits of each token are over the vocabulary, not over classes.
fn predicts_tokens(target: &Target) -> bool {
    has_logits_per_token(target) && !is_of_class(target, "ForTokenClassification")
}
