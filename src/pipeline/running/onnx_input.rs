//! Evaluates a run whose input is an ONNX file: both files run in ONNX Runtime, which supports all
//! operators.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::Device;

use super::evaluate::Run;
use super::fidelity::{HeldOut, not_finite_note};
use super::memory::lack_for_onnx_runtime;
use crate::analysis;
use crate::data::{self, Batch};
use crate::error::{Error, Result};
use crate::evaluation::{FidelityAccumulator, MeasuredFidelity, Runtime, SamplesFrom, Subject};
use crate::export::Exported;
use crate::pipeline::run::Measured;
use crate::runtime::Limits;

/// Number of synthetic samples.
const SYNTHETIC_SAMPLES: u64 = 4;
/// Time limit of one run of a file where no evaluation was requested.
pub(super) const TIME: Duration = Duration::from_secs(60);
/// Maximum number of held-out samples.
const MAX_HELD_OUT: usize = 16;

impl Run<'_> {
    /// Evaluates both files on the evaluation data if it is configured, otherwise on held-out or
    /// synthetic samples.
    pub(super) fn measure_onnx_input(&self, exports: &mut [(&'static str, Exported)]) -> Result<Measured> {
        let mut measured = Measured::default();
        if let Ok(graph) = self.before.graph() {
            match analysis::uncounted(&graph) {
                None => measured.compute = self.compute(&graph),
                Some(node) => measured.notes.push(format!("multiply-accumulates are not counted: `{node}` is an operator that only ONNX Runtime can run")),
            }
        }
        if let Some(evaluate) = self.pipeline.evaluation() {
            self.evaluate(&evaluate, &[Runtime::OnnxRuntime], exports, &mut measured)?;
            return Ok(measured);
        }
        let skipped = |reason: String| Some(format!("fidelity was not measured: {reason}"));
        let lack = lack_for_onnx_runtime(&[self.before, self.after], self.pipeline.running.memory);
        let note = match (crate::runtime::library(), lack) {
            (Err(reason), _) => skipped(format!("{reason}; {}", reason.hint().unwrap_or_default())),
            (Ok(_), Some(lack)) => skipped(lack),
            (Ok(_), None) => match self.compare_onnx_files() {
                Ok((found, note)) => {
                    let unusable = found.as_ref().and_then(|found| not_finite_note(&found.fidelity));
                    measured.fidelity = found.filter(|_| unusable.is_none());
                    unusable.or(note)
                }
                Err(e @ (Error::Cancelled | Error::Verification { .. })) => return Err(e),
                Err(e) => skipped(e.to_string()),
            },
        };
        measured.notes.extend(note.filter(|_| self.pipeline.measures));
        Ok(measured)
    }

    /// Loads both files in ONNX Runtime and, if fidelity is to be measured, compares their outputs.
    ///
    /// # Errors
    /// [`Error::Verification`] if ONNX Runtime accepts the input but not the output.
    fn compare_onnx_files(&self) -> Result<(Option<MeasuredFidelity>, Option<String>)> {
        let verification_error = |e: Error| match e {
            // A file that exceeds a limit is not wrong.
            Error::Cancelled | Error::Run { .. } => e,
            e => Error::Verification { path: self.file.into(), reason: format!("ONNX Runtime accepts the input but not the output: {e}") },
        };
        let [limits, limits_after] = [self.before, self.after].map(|model| Limits::for_size(TIME, model.stored_bytes()));
        let mut before = Subject::open_original_file(self.before, self.work.threads)?.with_limits(limits);
        let mut after = self.session(&self.folder.join(self.file)).map_err(verification_error)?.with_limits(limits_after);
        if let (Some(before), Some(after)) = (before.session_mut(), after.session_mut())
            && before.has_exact_sums()
            && !after.has_exact_sums()
        {
            after.require_exact_sums().map_err(verification_error)?;
        }
        if !self.pipeline.measures {
            return Ok((None, None));
        }
        let target = before.target();
        let inputs = target.inputs.to_vec();
        let batches = |kind: usize| {
            (0..SYNTHETIC_SAMPLES)
                .map(|number| data::synthetic_for_ports(&inputs, self.pipeline.seed.wrapping_add(number), kind))
                .collect::<Result<Vec<Batch>>>()
        };
        let (mut input_model, mut output_model) = (before.load(&Device::Cpu, &self.work)?, after.load(&Device::Cpu, &self.work)?);
        let mut held_out = Vec::new();
        let HeldOut { data, note } = self.held_out(&mut |sample| {
            held_out.push(sample);
            Ok(if held_out.len() < MAX_HELD_OUT { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        let mut compare = |samples: &[Batch]| {
            let mut accumulator = FidelityAccumulator::default();
            for sample in samples {
                self.work.cancel.check()?;
                let outputs = input_model.run(&sample.inputs)?;
                accumulator.add(sample, &outputs, &output_model.run(&sample.inputs).map_err(verification_error)?)?;
            }
            Ok(accumulator.finish())
        };
        if !held_out.is_empty() {
            let samples = held_out.iter().map(|sample| sample.samples).sum();
            return Ok((Some(MeasuredFidelity { samples_from: SamplesFrom::HeldOut, samples, data, fidelity: compare(&held_out)? }), None));
        }
        let (mut rejection, start) = (None, Instant::now());
        // An ONNX file does not specify which sizes and values it accepts, so several kinds are tried.
        for kind in 0..data::KINDS {
            let samples = batches(kind)?;
            match compare(&samples) {
                Ok(fidelity) => {
                    return Ok((Some(MeasuredFidelity { samples_from: SamplesFrom::Synthetic, samples: samples.len(), data: None, fidelity }), note));
                }
                // Samples of other kinds would exceed the limit too, with the memory of this run still
                // taken.
                Err(e @ (Error::Cancelled | Error::Verification { .. } | Error::Run { .. })) => return Err(e),
                Err(e) => rejection = rejection.or(Some(e)),
            }
            if start.elapsed() > TIME {
                break;
            }
        }
        Err(rejection.unwrap_or(Error::Cancelled))
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::model::Model;
    use crate::onnx::proto::{
        Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    };
    use crate::pipeline::Pipeline;
    use crate::work::{Cancel, Silent, Work};

    /// A model that applies the operator `op` to a vector of length 2.
    fn model(op: &str) -> Vec<u8> {
        let shape = Some(TensorShapeProto { dim: vec![DimensionProto { value: Some(Dimension::DimValue(2)), denotation: None }] });
        let ty = TypeProto { tensor_type: Some(TensorTypeProto { elem_type: Some(1), shape }), ..TypeProto::default() };
        let port = |name: &str| ValueInfoProto { name: Some(name.into()), r#type: Some(ty.clone()), ..ValueInfoProto::default() };
        let node = NodeProto { input: vec!["x".into()], output: vec!["y".into()], op_type: Some(op.into()), ..NodeProto::default() };
        let graph = GraphProto { name: Some("one".into()), node: vec![node], input: vec![port("x")], output: vec![port("y")], ..GraphProto::default() };
        let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(17) }];
        ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() }.encode_to_vec()
    }

    #[test]
    fn it_is_an_error_if_onnx_runtime_accepts_the_input_but_not_the_output() {
        if crate::runtime::library().is_err() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in.onnx"), folder.path().join("out.onnx"));
        for (before, after, measures, verified) in
            [("Relu", "Relu", true, true), ("Relu", "Unknown", true, false), ("Relu", "Unknown", false, false), ("Unknown", "Unknown", true, true)]
        {
            std::fs::write(&input, model(before)).unwrap();
            std::fs::write(&output, model(after)).unwrap();
            let (model, cancel) = (Model::open(&input).unwrap(), Cancel::default());
            let pipeline = Pipeline::builder().measure(measures).build().unwrap();
            let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
            let start = std::time::Instant::now();
            let run = Run { pipeline: &pipeline, before: &model, after: &model, folder: folder.path(), file: "out.onnx", work, start };
            match run.measure_onnx_input(&mut []) {
                Ok(measured) => {
                    assert!(verified, "{before}, {after}, {measures}");
                    assert_eq!(measured.fidelity.is_some(), before == "Relu", "{:?}", measured.notes);
                }
                Err(e) => assert!(!verified && matches!(e, Error::Verification { .. }), "{before}, {after}, {measures}: {e}"),
            }
        }
    }
}
