//! Measures the KL divergence of quantized models on samples that were not used for the search.

use std::ops::ControlFlow;

use super::formats::{Formats, Unit};
use crate::data::{Batch, Data};
use crate::error::{Error, Result};
use crate::evaluation::{self, FidelityAccumulator, Subject};
use crate::model::Model;
use crate::pass::{Context, Scores};

/// Largest number of held-out samples.
const MAX_SAMPLES: usize = 8;

/// The samples.
pub struct Measurement<'a> {
    model: &'a Model,
    context: &'a Context<'a>,
    formats: &'a dyn Formats,
    scores: &'a Scores,
    samples: Vec<Batch>,
    source: String,
}

impl<'a> Measurement<'a> {
    /// Reads the evaluation data, or samples of the calibration data that the search does not use.
    pub fn new(model: &'a Model, context: &'a Context<'a>, formats: &'a dyn Formats, scores: &'a Scores) -> Result<Measurement<'a>> {
        let data = context.data;
        let subject = Subject::from_model(model.clone())?;
        let mut samples = Vec::new();
        let mut take = |sample: Batch| {
            samples.push(sample);
            Ok(if samples.len() < MAX_SAMPLES { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        };
        let (set, kind, used, others): (&Data, _, _, Vec<&Data>) = match (&data.evaluation, &data.calibration) {
            (Some(evaluation), calibration) => (evaluation, "evaluation data", 0, calibration.iter().collect()),
            (None, Some(calibration)) => (calibration, "held-out samples of the calibration data", calibration.samples.unwrap_or(usize::MAX), Vec::new()),
            (None, None) => return Err(Error::option("auto", "needs `--calibration`")),
        };
        data.for_each_held_out(set, used, &others, subject.target(), &mut take)?;
        if samples.is_empty() {
            let reason = "samples to measure on are missing: all calibration samples are used by the search";
            return Err(Error::run("auto", reason, "specify `--eval`, or fewer `samples` in `--calibration`"));
        }
        let name = set.paths().next().map(|path| path.display().to_string()).unwrap_or_default();
        let source = format!("{} windows of {name} ({kind})", samples.len());
        Ok(Measurement { model, context, formats, scores, samples, source })
    }

    /// Description of the samples.
    pub fn description(&self) -> String {
        self.source.clone()
    }

    /// The KL divergence of the model with the units rounded in the formats with these indices from the
    /// original one, in nats per token; `None` if all units are floats.
    pub fn divergence(&self, units: &[Unit], options: &[usize]) -> Result<Option<f64>> {
        let context = self.context;
        context.work.cancel.check()?;
        let Some(changed) = self.formats.rounded(units, options, self.scores)? else { return Ok(None) };
        let mut subjects = [Subject::from_model(self.model.clone())?, Subject::from_model(changed)?];
        let first = self.samples.first().map(|sample| &sample.inputs);
        let mut runners = evaluation::load(&mut subjects, first, &context.device, context.memory, &context.work)?;
        let mut accumulator = FidelityAccumulator::default();
        for sample in &self.samples {
            context.work.cancel.check()?;
            let [before, after] = runners.as_mut_slice() else { break };
            before.prepare(std::slice::from_ref(sample))?;
            after.prepare(std::slice::from_ref(sample))?;
            accumulator.add(sample, &before.run(&sample.inputs)?, &after.run(&sample.inputs)?)?;
        }
        let fidelity = accumulator.finish();
        fidelity.kl.filter(|divergence| divergence.is_finite()).map(Some).ok_or_else(|| {
            Error::run("auto", "the KL divergence of the predictions is not defined for this model", "`auto` searches formats of models with logits")
        })
    }
}
