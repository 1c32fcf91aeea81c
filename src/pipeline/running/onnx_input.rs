//! Evaluates a run whose input is an ONNX file: both files run in ONNX Runtime, which supports all
//! operators.

use std::ops::ControlFlow;
use std::time::Instant;

use candle_core::Device;

use super::evaluate::Run;
use super::evaluate::not_finite_note;
use super::fidelity::HeldOut;
use super::memory::lack_for_onnx_runtime;
use super::onnx_comparison::{Comparison, SYNTHETIC, TIME, compare_onnx_model, fix_sizes};
use crate::analysis;
use crate::data::{self, Batch};
use crate::error::{Error, Result};
use crate::evaluation::{FidelityAccumulator, MeasuredFidelity, Runtime, SamplesFrom, Subject, quantized_values};
use crate::export::Exported;
use crate::model::{LogitKind, Model};
use crate::pipeline::measured::Measured;
use crate::report::{NOT_VERIFIED, WARNING};
use crate::runtime::Limits;

/// Number of synthetic samples.
const SYNTHETIC_SAMPLES: u64 = 4;
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
                Some(node) => measured.notes.push(format!("multiply-accumulates are not counted: `{node}` has no typed form")),
            }
        }
        if let Some(evaluate) = self.pipeline.evaluation() {
            self.evaluate(&evaluate, &[Runtime::OnnxRuntime], exports, &mut measured)?;
            self.verify_onnx_file(exports, &mut measured)?;
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
                // The comparison with the built-in executor would exceed the limit too.
                Err(e @ Error::Run { .. }) => {
                    measured.notes.push(format!("{}{NOT_VERIFIED}, and fidelity was not measured: {e}", self.file));
                    return Ok(measured);
                }
                Err(e) => skipped(e.to_string()),
            },
        };
        measured.notes.extend(note.filter(|_| self.pipeline.measures));
        self.verify_onnx_file(exports, &mut measured)?;
        Ok(measured)
    }

    /// Compares the output in ONNX Runtime with the built-in executor, and adds the result to the exports.
    ///
    /// # Errors
    /// [`Error::Verification`] if they differ.
    fn verify_onnx_file(&self, exports: &mut [(&'static str, Exported)], measured: &mut Measured) -> Result<()> {
        let path = self.folder().join(self.file);
        let model = Model::open(&path)?;
        fix_sizes(&model, &self.pipeline.sizes);
        if crate::runtime::library().is_err() || lack_for_onnx_runtime(&[&model], self.pipeline.running.memory).is_some() {
            return Ok(());
        }
        if self.pipeline.allow_nonfinite {
            measured.notes.push(format!("{} was not run: with weights that are not finite, outputs cannot be compared", self.file));
            return Ok(());
        }
        // The graph of an output is not built if the input has none, because the trial runs of a subgraph
        // that exceed their time limit would do so again.
        let samples = match self.before.graph().and_then(|_| model.graph()) {
            Ok(graph) if quantized_values::is_static(&graph) => Some(self.verification_samples(&model)?),
            _ => None,
        };
        // An ONNX file does not specify which synthetic samples it accepts.
        let samples = samples.as_ref().filter(|(_, description)| *description != SYNTHETIC);
        let samples = samples.map_or((&[][..], SYNTHETIC), |(samples, description)| (samples.as_slice(), *description));
        let (warning, incomplete) = match compare_onnx_model(model, &path, samples, &self.work) {
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            // ONNX Runtime does not accept the input either.
            Err(e) => (WARNING, e.to_string()),
            Ok(Comparison::Incomplete(reason)) => ("", reason),
            Ok(Comparison::Differs(reason)) => return Err(Error::Verification { path: self.file.into(), reason }),
            Ok(Comparison::Agrees(found)) => {
                for (_, exported) in exports.iter_mut().filter(|(format, _)| *format == "onnx") {
                    exported.how += &format!("; {found}");
                }
                return Ok(());
            }
        };
        // The staging folder does not exist after the run.
        let path = path.to_string_lossy();
        let incomplete = incomplete.replace(&format!("{path}: "), "").replace(&*path, self.file);
        measured.notes.push(format!("{warning}{}{NOT_VERIFIED}: {incomplete}", self.file));
        Ok(())
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
        let mut after = self.session(&self.folder().join(self.file)).map(|after| after.with_limits(limits_after));
        // The input is loaded only if it is compared, or decides whether the output has an error.
        if !self.pipeline.measures && after.as_mut().is_ok_and(|after| after.session_mut().is_some_and(|session| session.has_exact_sums())) {
            return Ok((None, None));
        }
        let mut before = Subject::open_original_file(self.before, self.work.threads)?.with_limits(limits);
        let mut after = after.map_err(verification_error)?;
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
        let (inputs, logits) = (target.inputs.to_vec(), LogitKind::from_config(target.config));
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
            let mut accumulator = FidelityAccumulator::new(logits);
            for sample in samples {
                self.work.cancel.check()?;
                let outputs = input_model.run(&sample.inputs)?;
                accumulator.add(sample, &outputs, &output_model.run(&sample.inputs).map_err(verification_error)?)?;
            }
            Ok(accumulator.finish())
        };
        if !held_out.is_empty() {
            let samples = held_out.iter().map(|sample| sample.samples).sum();
            let mut measured = MeasuredFidelity::new(SamplesFrom::HeldOut, samples, data, compare(&held_out)?);
            measured.first_sample = held_out.first().and_then(|sample| self.fingerprint(sample));
            return Ok((Some(measured), None));
        }
        let (mut rejection, start) = (None, Instant::now());
        // An ONNX file does not specify which sizes and values it accepts, so several kinds are tried.
        for kind in 0..data::KINDS {
            let samples = batches(kind)?;
            match compare(&samples) {
                Ok(fidelity) => {
                    return Ok((Some(MeasuredFidelity::new(SamplesFrom::Synthetic, samples.len(), None, fidelity)), note));
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
    use candle_core::Tensor;
    use prost::Message;

    use super::*;
    use crate::data::References;
    use crate::files::Destination;
    use crate::onnx::proto::{
        AttributeProto, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto,
        TypeProto, ValueInfoProto,
    };
    use crate::pipeline::Pipeline;
    use crate::pipeline::running::onnx_comparison::compare_quantized_values;
    use crate::work::{Cancel, Silent, Work};

    fn node(op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
        let input = inputs.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { input, output: vec![output.into()], op_type: Some(op.into()), attribute, ..NodeProto::default() }
    }

    fn port(name: &str, ty: i32, dims: &[i64]) -> ValueInfoProto {
        let dim = dims.iter().map(|size| DimensionProto { value: Some(Dimension::DimValue(*size)), denotation: None }).collect();
        let tensor_type = Some(TensorTypeProto { elem_type: Some(ty), shape: Some(TensorShapeProto { dim }) });
        ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
    }

    /// A model that computes a vector `y` of length 2 from `x`.
    fn model(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> Vec<u8> {
        model_of(1, nodes, initializer)
    }

    /// With this type of the output.
    fn model_of(ty: i32, nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> Vec<u8> {
        let (input, output) = (vec![port("x", 1, &[2])], vec![port("y", ty, &[2])]);
        let graph = GraphProto { name: Some("one".into()), node: nodes, initializer, input, output, ..GraphProto::default() };
        let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(17) }];
        ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() }.encode_to_vec()
    }

    fn measured(before: &[u8], after: &[u8], measures: bool) -> Result<Measured> {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in.onnx");
        std::fs::write(&input, before).unwrap();
        std::fs::write(folder.path().join("out.onnx"), after).unwrap();
        let (model, cancel) = (Model::open(&input).unwrap(), Cancel::default());
        let pipeline = Pipeline::builder().measure(measures).build().unwrap();
        let (work, start) = (Work { threads: 1, progress: &Silent, cancel: &cancel }, Instant::now());
        Run { pipeline: &pipeline, before: &model, after: &model, destination: &Destination::local(folder.path()), file: "out.onnx", work, start }
            .measure_onnx_input(&mut [])
    }

    #[test]
    fn it_is_an_error_if_onnx_runtime_accepts_the_input_but_not_the_output() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let single = |op: &str| model(vec![node(op, &["x"], "y", vec![])], vec![]);
        for (before, after, measures, verified) in
            [("Relu", "Relu", true, true), ("Relu", "Unknown", true, false), ("Relu", "Unknown", false, false), ("Unknown", "Unknown", true, true)]
        {
            match measured(&single(before), &single(after), measures) {
                Ok(measured) => {
                    assert!(verified, "{before}, {after}, {measures}");
                    assert_eq!(measured.fidelity.is_some(), before == "Relu", "{:?}", measured.notes);
                    let refusal = "warning: out.onnx was not verified end to end: ONNX Runtime refuses the model: ";
                    let is_refused = |note: &String| note.starts_with(refusal) && !note.contains("/out.onnx");
                    assert_eq!(measured.notes.iter().any(is_refused), before == "Unknown", "{:?}", measured.notes);
                }
                Err(e) => assert!(!verified && matches!(e, Error::Verification { .. }), "{before}, {after}, {measures}: {e}"),
            }
        }
    }

    /// ONNX Runtime rounds outputs to float16 (10) and bfloat16 (16), the built-in executor computes them in
    /// 32 bits. The tolerance for other outputs of the file remains that of float32.
    #[test]
    fn outputs_of_16_bits_may_be_rounded() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        for ty in [10, 16] {
            let half = model_of(ty, vec![node("Cast", &["x"], "y", vec![AttributeProto::int("to", ty.into())])], vec![]);
            for measures in [true, false] {
                let found = measured(&half, &half, measures).map(|measured| measured.notes);
                assert!(found.is_ok(), "{ty}: {found:?}");
            }
        }
        let constant = |name: &str, value: f32| TensorProto { name: Some(name.into()), data_type: Some(1), float_data: vec![value], ..TensorProto::default() };
        let folder = tempfile::tempdir().unwrap();
        // A static int8 file with `y`, halfway between two values of bfloat16, and `z` in 32 bits.
        let written = |name: &str, ty: i32, offset: f32| {
            let nodes = vec![
                node("QuantizeLinear", &["x", "scale", "zero"], "q/integers", vec![]),
                node("DequantizeLinear", &["q/integers", "scale", "zero"], "q", vec![]),
                node("Add", &["q", "one"], "h", vec![]),
                node("Cast", &["h"], "y", vec![AttributeProto::int("to", ty.into())]),
                node("Add", &["q", "offset"], "z", vec![]),
            ];
            let zero = TensorProto { name: Some("zero".into()), data_type: Some(3), int32_data: vec![0], ..TensorProto::default() };
            let mut file =
                ModelProto::decode(&*model_of(ty, nodes, vec![constant("scale", 1e-4), zero, constant("one", 1.03125), constant("offset", offset)])).unwrap();
            file.graph.get_or_insert_default().output.push(port("z", 1, &[2]));
            let path = folder.path().join(name);
            std::fs::write(&path, file.encode_to_vec()).unwrap();
            path
        };
        let (cancel, x) = (Cancel::default(), Tensor::new(&[1f32, -1.0], &Device::Cpu).unwrap());
        let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
        let samples = [Batch { inputs: [("x".to_owned(), x)].into(), references: References::None, samples: 1 }];
        for ty in [10, 16] {
            let (right, wrong) = (written("right.onnx", ty, 1.0), written("wrong.onnx", ty, 1.0015));
            let model = Model::open(&right).unwrap();
            for (path, agrees) in [(right, true), (wrong, false)] {
                let (ok, found) = compare_quantized_values(&model, &path, &samples, false, &work).unwrap().unwrap();
                assert_eq!(ok, agrees, "{ty}: {found}");
                assert!(found.starts_with("1 quantized values are within one step") && found.contains("differ: ") != agrees, "{ty}: {found}");
            }
        }
    }

    /// Files whose only output consists of integers (int64 is 7).
    #[test]
    fn outputs_of_integers_are_compared() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let rounded = model_of(7, vec![node("Cast", &["x"], "y", vec![AttributeProto::int("to", 7)])], vec![]);
        for measures in [true, false] {
            let notes = measured(&rounded, &rounded, measures).unwrap().notes;
            assert!(!notes.iter().any(|note| note.contains(NOT_VERIFIED)), "{notes:?}");
        }
    }

    /// ONNX Runtime 1.31 computes the layer normalization of `x` instead of that of the mean minus `x`.
    #[test]
    fn it_is_an_error_if_onnx_runtime_and_the_executor_differ() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let float = |name: &str, values: &[f32]| TensorProto {
            name: Some(name.into()),
            data_type: Some(1),
            dims: if values.len() == 1 { vec![] } else { vec![values.len() as i64] },
            float_data: values.to_vec(),
            ..TensorProto::default()
        };
        let one = |op: &str, inputs: &[&str], output: &str| node(op, inputs, output, vec![]);
        let mean = |x: &str, y: &str| node("ReduceMean", &[x], y, vec![AttributeProto::ints("axes", [-1])]);
        let norm = |square: NodeProto| {
            let mut nodes = vec![mean("x", "m"), one("Sub", &["m", "x"], "d"), square, mean("q", "v"), one("Add", &["v", "e"], "w"), one("Sqrt", &["w"], "s")];
            nodes.extend([one("Div", &["d", "s"], "n"), one("Mul", &["n", "g"], "p"), one("Add", &["p", "b"], "y")]);
            model(nodes, vec![float("two", &[2.0]), float("e", &[1e-2]), float("g", &[0.7, -1.3]), float("b", &[0.1, 0.2])])
        };
        let (right, wrong) = (norm(one("Mul", &["d", "d"], "q")), norm(one("Pow", &["d", "two"], "q")));
        for measures in [true, false] {
            assert!(measured(&right, &right, measures).is_ok());
            let error = measured(&right, &wrong, measures).unwrap_err();
            assert!(matches!(&error, Error::Verification { reason, .. } if reason.contains("against the built-in executor")), "{error}");
        }
    }

    /// A file whose run exceeds the time limit is not wrong, but it was not verified.
    #[test]
    fn a_run_that_exceeds_the_time_limit_is_noted() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let body = GraphProto {
            name: Some("body".into()),
            node: vec![node("Identity", &["go"], "goes", vec![]), node("Neg", &["a"], "c", vec![])],
            input: vec![port("i", 7, &[]), port("go", 9, &[]), port("a", 1, &[2])],
            output: vec![port("goes", 9, &[]), port("c", 1, &[2])],
            ..GraphProto::default()
        };
        let body = AttributeProto { g: Some(body), i: None, r#type: Some(5), ..AttributeProto::int("body", 0) };
        // The trial runs that determine output sizes use zeros and ones, for which the loop is short.
        let factor = TensorProto { name: Some("factor".into()), data_type: Some(1), float_data: vec![2f32.powi(62)], ..TensorProto::default() };
        let nodes = vec![
            node("Abs", &["x"], "size", vec![]),
            node("ReduceMax", &["size"], "largest", vec![AttributeProto::int("keepdims", 0)]),
            node("Mul", &["largest", "factor"], "count", vec![]),
            node("Cast", &["count"], "trips", vec![AttributeProto::int("to", 7)]),
            node("Loop", &["trips", "", "x"], "y", vec![body]),
        ];
        let endless = model(nodes, vec![factor]);
        for measures in [true, false] {
            let notes = measured(&endless, &endless, measures).unwrap().notes;
            let noted = |note: &String| note.starts_with("out.onnx was not verified end to end") && note.contains("it takes longer than 2 s");
            assert!(notes.iter().any(noted), "{notes:?}");
        }
    }
}
