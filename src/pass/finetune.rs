//! Fine-tuning: training on labels alone, to recover what pruning took, or with a model's quantizers in place.
//!
//! ```yaml
//! data:
//!   train: { images: train-images.gz, labels: train-labels.gz }
//! passes:
//!   - prune-structured: { target: { macs: 0.5 } }
//!   - finetune: { epochs: 3, batch_size: 128, learning_rate: 1e-3 }
//! ```

use serde_json::Value;

use super::{Context, Pass, Samples, distill, options_of};
use crate::error::Result;
use crate::model::Model;
use crate::run_state::RunState;
use crate::store::{ByteSize, Pattern};
use crate::train::losses::Losses;
use crate::train::optimizer::Kind;
use crate::train::schedule::Schedule;
use crate::train::{BatchNorm, BatchSize, Checkpointing, Every, Offload, Precision, QuantizerScales, Training, training_pass};

training_pass! {
    /// Train the model on labels, or on the next token.
    Finetune {}
}

const NAME: &str = "finetune";

impl Pass for Finetune {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        self.training().check(NAME)
    }

    fn keeps_work(&self) -> bool {
        true
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(Samples::Train)
    }

    fn apply(&self, model: Model, run: &mut RunState, context: Option<&Context>) -> Result<Model> {
        distill::train(NAME, model, run, self.options(), &self.training(), (None, None), context)
    }

    fn remedy(&self) -> &'static str {
        distill::REMEDY
    }
}
