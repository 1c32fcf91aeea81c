//! `compress draft --method int8`

use super::{Args, first_set, of_argument, unused_note};
use crate::arch::role;
use crate::cli::args::Global;
use crate::cli::output;
use crate::error::{Error, Result, counted};
use crate::generation::LanguageModel;
use crate::model::Model;
use crate::pass::{ActivationRounding, QuantizeDynamic};
use crate::pipeline::Builder;
use crate::pipeline::draft::Prompts;
use crate::store::{Pattern, Role};

/// Default number of prompts to measure.
const PROMPTS: usize = 16;

impl Args {
    /// Checks options that do not depend on the model, and rejects those of the training.
    pub(super) fn check_int8(&self) -> Result<()> {
        let options = [
            (self.writing.no_measure, ("--no-measure", "of which the prompts are measured: `--samples 1` measures a single one")),
            (self.test.is_some(), ("--test", "which is measured on `--prompts`: specify the file there")),
            (self.temperature.is_some(), ("--temperature", "which is measured greedily: remove it")),
            (self.seed.is_some(), ("--seed", "which has no random numbers: remove it")),
            (self.resume, ("--resume", "which has no unfinished work: remove it")),
        ];
        match first_set(options).or_else(|| self.training_option().map(|name| (name, "which trains nothing: remove it"))) {
            Some((name, reason)) => Err(Error::option(name, format!("has no effect with `--method int8`, {reason}"))),
            None => self.samples().check().map_err(of_argument),
        }
    }

    /// Writes the model with int8 weights, and measures it as a draft.
    pub(super) fn quantize(&self, model: Model, language: &LanguageModel, global: &Global) -> Result<()> {
        self.check_output(&model, quantizing(&model, global.builder()?))?;
        let count = self.samples.unwrap_or(PROMPTS);
        let (prompts, unused) = Prompts::measured((&model, language), self.source()?, count)?;
        let note = format!("the model with int8 weights, measured on {}", counted(prompts.test.len(), "prompt"));
        let unused = unused_note(unused, "measured", count);
        let builder = quantizing(&model, global.builder()?).note(note).draft_test(self.test(&prompts));
        let report = self.formats(unused.into_iter().fold(builder, Builder::note))?.build()?.run(model, &self.output)?;
        output::report(&report, &self.output, global)
    }
}

/// Adds the passes that quantize linear weights, the embedding table and an output head. Only the bytes of
/// the weights limit the speed of a draft, so that rounded activations would gain nothing.
fn quantizing(model: &Model, builder: Builder) -> Builder {
    let linear = QuantizeDynamic { activations: ActivationRounding::None, embeddings: true, ..QuantizeDynamic::default() };
    let heads = model.weights.by_name.iter().filter(|(name, weight)| role(name, weight) == Some(Role::Head) && weight.shape.len() == 2);
    let targets: Vec<Pattern> = heads.filter_map(|(name, _)| name.parse().ok()).collect();
    let heads = (!targets.is_empty()).then(|| QuantizeDynamic { embeddings: false, targets, ..linear.clone() });
    heads.into_iter().fold(builder.pass(linear), Builder::pass).measure(false)
}
