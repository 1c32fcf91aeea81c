//! Measuring what a run made of an ONNX file: both files run in ONNX Runtime, whatever operators they have.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::Device;

use super::evaluate::Run;
use super::free::lack_for_onnx_runtime;
use crate::analysis;
use crate::data::{self, Batch};
use crate::error::{Error, Result};
use crate::evaluation::{FidelitySums, MeasuredFidelity, Runtime, SamplesFrom, Subject};
use crate::export::Exported;
use crate::pipeline::run::Measured;
use crate::runtime::Limits;

/// Samples that are made up.
const SAMPLES: u64 = 4;
/// Limits of one run of the input where no evaluation was requested.
const LIMITS: Limits = Limits { time: Duration::from_secs(60), memory: u64::MAX };
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
        let skipped = |reason: String| Some(format!("fidelity was not measured: {reason}"));
        let lack = lack_for_onnx_runtime(&[self.before, self.after], self.pipeline.running.memory);
        let note = match (crate::runtime::library(), lack) {
            (Err(reason), _) => skipped(format!("{reason}; {}", reason.hint().unwrap_or_default())),
            (Ok(_), Some(lack)) => skipped(lack),
            (Ok(_), None) => match self.compared_files() {
                Ok(found) => {
                    let unusable = found.as_ref().and_then(|found| found.fidelity.not_finite());
                    measured.fidelity = found.filter(|_| unusable.is_none());
                    unusable.and_then(skipped)
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
    /// [`Error::Verification`] where ONNX Runtime opens or runs the input and not the output.
    fn compared_files(&self) -> Result<Option<MeasuredFidelity>> {
        let refused = |e: Error| match e {
            Error::Cancelled => e,
            e => Error::Verification { path: self.file.into(), reason: format!("ONNX Runtime accepts the input and not the output: {e}") },
        };
        let mut before = Subject::file_of(self.before, self.work.threads)?.with_limits(LIMITS);
        let mut after = self.session(&self.folder.join(self.file)).map_err(refused)?;
        if let (Some(before), Some(after)) = (before.session_mut(), after.session_mut())
            && before.has_exact_sums()
            && !after.has_exact_sums()
        {
            after.require_exact_sums().map_err(refused)?;
        }
        if !self.pipeline.measures {
            return Ok(None);
        }
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
                let outputs = ours.run(&sample.inputs)?;
                sums.add(sample, &outputs, &theirs.run(&sample.inputs).map_err(refused)?)?;
            }
            Ok(sums.finish())
        };
        if !held_out.is_empty() {
            let samples = held_out.iter().map(|sample| sample.samples).sum();
            return Ok(Some(MeasuredFidelity { samples_from: SamplesFrom::HeldOut, samples, data, fidelity: compare(&held_out)? }));
        }
        let (mut unfit, begun) = (None, Instant::now());
        // What sizes and numbers a file takes, it does not say.
        for kind in 0..data::KINDS {
            let samples = batches(kind)?;
            match compare(&samples) {
                Ok(fidelity) => return Ok(Some(MeasuredFidelity { samples_from: SamplesFrom::Synthetic, samples: samples.len(), data: None, fidelity })),
                Err(e @ (Error::Cancelled | Error::Verification { .. })) => return Err(e),
                Err(e) => unfit = unfit.or(Some(e)),
            }
            if begun.elapsed() > LIMITS.time {
                break;
            }
        }
        Err(unfit.unwrap_or(Error::Cancelled))
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

    /// A model that computes `op` of two numbers.
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
    fn a_file_that_onnx_runtime_refuses_is_an_error_if_it_opens_the_input() {
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
            match run.measure_files(&mut []) {
                Ok(measured) => {
                    assert!(verified, "{before}, {after}, {measures}");
                    assert_eq!(measured.fidelity.is_some(), before == "Relu", "{:?}", measured.notes);
                }
                Err(e) => assert!(!verified && matches!(e, Error::Verification { .. }), "{before}, {after}, {measures}: {e}"),
            }
        }
    }
}
