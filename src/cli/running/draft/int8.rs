//! `compress draft --method int8`

use super::Args;
use crate::cli::args::Global;
use crate::cli::output;
use crate::error::{Error, Result, counted};
use crate::generation::LanguageModel;
use crate::model::Model;
use crate::pass::{ActivationRounding, QuantizeDynamic};
use crate::pipeline::draft::Prompts;

impl Args {
    /// Rejects options of continuations and of the training.
    pub(super) fn require_no_continuations(&self) -> Result<()> {
        if self.writing.no_measure {
            let command = "compress quantize-dynamic MODEL --embeddings --activations none";
            return Err(Error::option("--no-measure", format!("has no use with `--method int8`: without a measurement, run `{command}`")));
        }
        if self.test.is_some() {
            return Err(Error::option("--test", "has no effect with `--method int8`, which is measured on all prompts: specify them with `--prompts`"));
        }
        let options =
            [(self.samples.is_some(), "--samples"), (self.temperature.is_some(), "--temperature"), (self.seed.is_some(), "--seed"), (self.resume, "--resume")];
        match options.into_iter().find_map(|(is_set, name)| is_set.then_some(name)).or_else(|| self.training_option()) {
            Some(name) => Err(Error::option(name, "has no effect with `--method int8`, which trains nothing: remove it")),
            None => Ok(()),
        }
    }

    /// Writes the model with int8 weights, and measures it as a draft on all prompts.
    pub(super) fn quantize(&self, model: Model, language: &LanguageModel, global: &Global) -> Result<()> {
        self.check_output(&model, global)?;
        let prompts = Prompts::measured((&model, language), self.source()?)?;
        // Only the bytes of the weights limit the speed of a draft: rounded activations would gain nothing.
        let pass = QuantizeDynamic { activations: ActivationRounding::None, embeddings: true, ..QuantizeDynamic::default() };
        let note = format!("the model with int8 weights, measured on {}", counted(prompts.test.len(), "prompt"));
        let builder = global.builder()?.pass(pass).note(note).measure(false).draft_test(self.test(&prompts));
        let report = self.formats(builder)?.build()?.run(model, &self.output)?;
        output::report(&report, &self.output, global)
    }
}
