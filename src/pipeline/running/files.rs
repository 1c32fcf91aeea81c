//! Measuring what a run made of an ONNX file: both files run in ONNX Runtime, whatever operators they have.

use std::ops::ControlFlow;

use candle_core::Device;

use super::evaluate::{Run, is_large};
use crate::analysis;
use crate::data::{self, Batch};
use crate::error::{Error, Result};
use crate::evaluation::{FidelitySums, MeasuredFidelity, Runtime, SamplesFrom, Subject};
use crate::export::Exported;
use crate::pipeline::run::Measured;

/// Samples that are made up.
const SAMPLES: u64 = 4;
/// Samples that no pass has used, at most.
const HELD_OUT: usize = 16;

impl Run<'_> {
    /// Evaluates both files on data where some is named, else on samples that are made up.
    pub(super) fn measure_files(&self, exports: &mut [(&'static str, Exported)]) -> Result<Measured> {
        let mut measured = Measured::default();
        if let Ok(graph) = self.before.graph() {
            match analysis::uncounted(&graph) {
                None => measured.compute = self.compute(&graph),
                Some(node) => measured.notes.push(format!("multiply-accumulates are not counted: what `{node}` computes is known to ONNX Runtime alone")),
            }
        }
        if let Some(evaluate) = self.pipeline.evaluation() {
            self.evaluate(&evaluate, &[Runtime::OnnxRuntime], exports, &mut measured)?;
            return Ok(measured);
        }
        if !self.pipeline.measures {
            return Ok(measured);
        }
        let skipped = |reason: String| Some(format!("fidelity was not measured: {reason}"));
        let note = match crate::runtime::library() {
            Err(reason) => skipped(format!("{reason}; {}", reason.hint().unwrap_or_default())),
            Ok(_) if is_large(self.before) => skipped("the model is large; `data: { evaluation: ... }` asks for it".into()),
            Ok(_) => match self.compared_files() {
                Ok(found) => {
                    let unusable = found.fidelity.not_finite();
                    measured.fidelity = Some(found).filter(|_| unusable.is_none());
                    unusable.and_then(skipped)
                }
                Err(Error::Cancelled) => return Err(Error::Cancelled),
                Err(e) => skipped(e.to_string()),
            },
        };
        measured.notes.extend(note);
        Ok(measured)
    }

    fn compared_files(&self) -> Result<MeasuredFidelity> {
        let (mut before, mut after) = (Subject::file_of(self.before, self.work.threads)?, self.session(&self.folder.join(self.file))?);
        let target = before.target();
        let inputs = target.inputs.to_vec();
        let batches = |kind: usize| {
            (0..SAMPLES).map(|number| data::synthetic_for(&inputs, self.pipeline.seed.wrapping_add(number), kind)).collect::<Result<Vec<Batch>>>()
        };
        let (mut ours, mut theirs) = (before.load(&Device::Cpu, &self.work)?, after.load(&Device::Cpu, &self.work)?);
        let mut held_out = Vec::new();
        let data = self.held_out(&mut |sample| {
            held_out.push(sample);
            Ok(if held_out.len() < HELD_OUT { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        let mut compare = |samples: &[Batch]| {
            let mut sums = FidelitySums::default();
            for sample in samples {
                self.work.cancel.check()?;
                sums.add(sample, &ours.run(&sample.inputs)?, &theirs.run(&sample.inputs)?)?;
            }
            Ok(sums.finish())
        };
        if !held_out.is_empty() {
            let samples = held_out.iter().map(|sample| sample.samples).sum();
            return Ok(MeasuredFidelity { samples_from: SamplesFrom::HeldOut, samples, data, fidelity: compare(&held_out)? });
        }
        let mut refused = None;
        // What sizes and numbers a file takes, it does not say.
        for kind in 0..data::KINDS {
            let samples = batches(kind)?;
            match compare(&samples) {
                Ok(fidelity) => return Ok(MeasuredFidelity { samples_from: SamplesFrom::Synthetic, samples: samples.len(), data: None, fidelity }),
                Err(Error::Cancelled) => return Err(Error::Cancelled),
                Err(e) => refused = refused.or(Some(e)),
            }
        }
        Err(refused.unwrap_or(Error::Cancelled))
    }
}
