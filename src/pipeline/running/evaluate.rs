//! Evaluates the result of a run: the output against the input, and ONNX files against the built-in
//! executor.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use candle_core::Device;

use crate::analysis;
use crate::data::{self, Batch, Data, Task};
use crate::error::{Error, Result, counted};
use crate::evaluation::{self, Compute, Evaluate, Fidelity, MeasuredFidelity, Precision, Runner, Runs, Runtime, SamplesFrom, Subject, quantized_values};
use crate::exec::{Inputs, Rounding};
use crate::export::{Export, Exported};
use crate::files::Destination;
use crate::ir::Graph;
use crate::model::Model;
use crate::onnx::file::entry;
use crate::pass::prune_vocabulary::with_tokens_of;
use crate::pipeline::running::Running;
use crate::pipeline::running::agreement::{explanation, judge};
use crate::pipeline::running::memory::{lack_for_onnx_runtime, memory_limit};
use crate::pipeline::running::onnx_comparison::{SYNTHETIC, compare_quantized_values, has_integers, onnx_fidelity};
use crate::pipeline::{Pipeline, measured::Measured};
use crate::report::WARNING;
use crate::run_state::RunState;
use crate::work::Work;

/// Subfolder to which the input is exported as ONNX for comparison.
const INPUT_FOLDER: &str = ".before";
/// Why perplexities of vocabularies of different sizes are not comparable.
const FEWER_ROWS: &str = "perplexities of input and output are not comparable: the output's softmax has fewer rows, so that the remaining tokens are more \
                          probable even if the model is otherwise unchanged; `task: fidelity` in the evaluation data compares the same rows";
/// Number of batches on which a static int8 file is verified.
const VERIFICATION_BATCHES: usize = 2;

impl Pipeline {
    /// The evaluation options, if evaluation data is configured.
    pub(super) fn evaluation(&self) -> Option<Evaluate> {
        self.running.data.evaluation.as_ref().map(|_| self.running.evaluate.clone().unwrap_or_default())
    }

    /// The ONNX export, if there is one.
    pub(super) fn onnx(&self) -> Option<&Export> {
        self.export.iter().find(|export| export.format().name() == "onnx")
    }
}

/// Role of a model in the evaluation of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Input,
    Output,
    /// The output, with the activations of int8 layers quantized as the ONNX file does.
    OutputAsOnnx,
}

/// The models to evaluate, in the order in which they run.
struct Subjects {
    subjects: Vec<(Role, Runtime, Subject)>,
}

impl Subjects {
    fn position(&self, role: Role, runtime: Runtime) -> Option<usize> {
        self.subjects.iter().position(|(r, t, _)| (*r, *t) == (role, runtime))
    }

    /// Pairs of positions to compare: input and output in each runtime, and the output in both runtimes.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let pair = |a: (Role, Runtime), b: (Role, Runtime)| Some((self.position(a.0, a.1)?, self.position(b.0, b.1)?));
        let pairs = [
            pair((Role::Input, Runtime::Candle), (Role::Output, Runtime::Candle)),
            pair((Role::Input, Runtime::OnnxRuntime), (Role::Output, Runtime::OnnxRuntime)),
            pair((Role::OutputAsOnnx, Runtime::Candle), (Role::Output, Runtime::OnnxRuntime)),
        ];
        pairs.into_iter().flatten().collect()
    }

    /// Loads the models for samples of the shapes of `inputs`.
    fn load<'s>(&'s mut self, inputs: &Inputs, runs: Runs, running: &Running, work: &Work<'s>) -> Result<Vec<Box<dyn Runner + 's>>> {
        let subjects = self.subjects.iter_mut().map(|(_, _, subject)| subject);
        evaluation::load(subjects, (inputs, &running.device()?), running.memory()?, runs, work)
    }
}

/// A finished run to evaluate: the input, the output, and where it was written.
pub(super) struct Run<'r> {
    pub pipeline: &'r Pipeline,
    pub before: &'r Model,
    pub after: &'r Model,
    pub destination: &'r Destination,
    /// Name of the ONNX file in the local folder.
    pub file: &'r str,
    pub work: Work<'r>,
    /// When the run began.
    pub start: Instant,
}

/// A note if outputs are not finite; a warning if those of the input are.
pub(super) fn not_finite_note(fidelity: &Fidelity) -> Option<String> {
    let reason = fidelity.not_finite()?;
    Some(if fidelity.lost_finite_values() {
        format!("{WARNING}{reason}, and that of the input only finite ones: the result is not usable")
    } else {
        format!("fidelity was not measured: {reason}")
    })
}

impl<'r> Run<'r> {
    /// The input reduced to the output's tokens, if a pass has removed tokens. The same ids are then the same
    /// tokens in both models.
    pub(super) fn with_tokens_of_output(&self) -> Result<Option<Model>> {
        let differs = self.after.has_renumbered_tokens(self.before);
        differs.then(|| with_tokens_of(self.before, self.after)).transpose()
    }

    /// The same run with another input.
    pub(super) fn compared_with(&self, before: &'r Model) -> Run<'r> {
        Run { before, ..*self }
    }
}

impl Run<'_> {
    /// Evaluates the result, and adds the verification of ONNX files to the exports.
    pub fn measure(&self, exports: &mut [(&'static str, Exported)]) -> Result<Measured> {
        if self.before.onnx.is_some() {
            return self.measure_onnx_input(exports);
        }
        let graph = self.before.graph();
        let mut measured = Measured { compute: graph.as_ref().ok().and_then(|graph| self.compute(graph)), ..Measured::default() };
        let requested = self.pipeline.evaluation();
        let onnx = self.pipeline.onnx().is_some();
        if requested.is_none() && self.pipeline.measures {
            let (fidelity, note) = self.fidelity(graph, exports)?;
            measured.fidelity = fidelity;
            measured.notes.extend(note);
            if measured.fidelity.as_ref().is_some_and(|measured| measured.samples_from == SamplesFrom::HeldOut) {
                let input = self.with_tokens_of_output()?;
                let (continuations, note) = input.as_ref().map_or_else(|| self.continuations(), |input| self.compared_with(input).continuations())?;
                measured.continuations = continuations;
                measured.notes.extend(note);
            }
        }
        if requested.is_none() && !onnx {
            return Ok(measured);
        }
        let library = crate::runtime::library();
        let runtimes = match &requested {
            Some(evaluate) if !evaluate.runtime.is_empty() => evaluate.runtime.clone(),
            _ if onnx && library.is_ok() => vec![Runtime::Candle, Runtime::OnnxRuntime],
            _ => vec![Runtime::Candle],
        };
        if onnx
            && !runtimes.contains(&Runtime::OnnxRuntime)
            && let Err(reason) = &library
        {
            measured.notes.push(format!("{} was verified byte by byte but not run: {reason}; {}", self.file, reason.hint().unwrap_or_default()));
        }
        match requested {
            Some(evaluate) => {
                self.evaluate(&evaluate, &runtimes, exports, &mut measured)?;
                // The evaluation runs whole texts, so decoding with the KV cache is verified separately.
                if runtimes.len() > 1 && self.option("cache").is_some_and(|cache| cache == true) {
                    self.compare(true, exports, &mut measured)?;
                }
            }
            None if runtimes.len() > 1 => self.compare(false, exports, &mut measured)?,
            None => {}
        }
        Ok(measured)
    }

    /// Cost of the input and of the output; `None` if the output has no graph.
    pub(super) fn compute(&self, before: &Graph) -> Option<Compute> {
        let after = self.after.graph().ok()?;
        let sizes = analysis::usual_sizes(before);
        let costs = [before, &after].map(|graph| analysis::cost(graph, &sizes));
        Some(Compute::new(sizes, costs))
    }

    /// Opens the models to evaluate.
    fn subjects(&self, precision: Precision, roles: impl IntoIterator<Item = (Role, Runtime)>) -> Result<Subjects> {
        let mut subjects = Vec::new();
        for (role, runtime) in roles {
            let subject = match (role, runtime) {
                (Role::Input, Runtime::Candle) => Subject::from_model(self.before.clone())?.with_precision(precision),
                (Role::Output, Runtime::Candle) => Subject::from_model(self.written()?)?.with_precision(precision),
                (Role::OutputAsOnnx, Runtime::Candle) => Subject::from_model(self.written()?)?.with_rounding(Rounding::Tensor),
                (Role::Input, Runtime::OnnxRuntime) if self.before.onnx.is_some() => Subject::open_original_file(self.before, self.work.threads)?,
                // The input is exported under the default name.
                (Role::Input, Runtime::OnnxRuntime) => self.session(&entry(&self.folder().join(INPUT_FOLDER)))?,
                (Role::Output | Role::OutputAsOnnx, Runtime::OnnxRuntime) => self.session(&self.folder().join(self.file))?,
                (_, other) => return Err(Error::option("runtime", format!("`{other}` cannot be evaluated"))),
            };
            subjects.push((role, runtime, subject));
        }
        Ok(Subjects { subjects })
    }

    /// The local folder of the output. Weights of an output in a bucket are not in it.
    pub(super) fn folder(&self) -> &Path {
        self.destination.path()
    }

    /// The output, read from the written files if the built-in executor can read their format.
    pub(super) fn written(&self) -> Result<Model> {
        if self.writes_safetensors() { self.after.open_like(self.destination.readable()?) } else { Ok(self.after.clone()) }
    }

    /// Whether safetensors is one of the output formats.
    pub(super) fn writes_safetensors(&self) -> bool {
        self.pipeline.export.iter().any(|export| export.format().name() == "safetensors")
    }

    /// Opens an ONNX file in ONNX Runtime.
    pub(super) fn session(&self, path: &Path) -> Result<Subject> {
        let open = if self.before.onnx.is_some() { Subject::open_onnx } else { Subject::open_written };
        open(path, self.folder(), self.after.config.values().clone(), self.work.threads)
    }

    /// Compares the ONNX file with the built-in executor. If memory is short, the comparison is skipped
    /// unless `required`.
    fn compare(&self, required: bool, exports: &mut [(&'static str, Exported)], measured: &mut Measured) -> Result<()> {
        if self.pipeline.allow_nonfinite {
            measured.notes.push(format!("{} was not run: with weights that are not finite, outputs cannot be compared", self.file));
            return Ok(());
        }
        let lack = lack_for_onnx_runtime(&[self.after], self.pipeline.running.memory);
        if let Some(lack) = lack.filter(|_| !required) {
            measured.notes.push(format!("{} was not run: {lack}", self.file));
            return Ok(());
        }
        let model = self.written()?;
        let (samples, description) = self.verification_samples(&model)?;
        let (batch, memory) = (&samples[0], memory_limit(self.pipeline.running.memory, &Device::Cpu));
        let fidelity = onnx_fidelity(model, &self.folder().join(self.file), batch, memory, &self.work)?;
        self.require_agreement(Some(&fidelity), &counted(batch.samples, description), &samples, exports, measured)
    }

    /// Samples on which a file is verified, and their description. For a static int8 model: held-out
    /// samples if there are any, otherwise calibration samples. For other models: synthetic samples.
    pub(super) fn verification_samples(&self, model: &Model) -> Result<(Vec<Batch>, &'static str)> {
        let graph = model.graph()?;
        let data = self.pipeline.running.data.calibration.as_ref().filter(|_| quantized_values::is_static(&graph));
        let mut samples = Vec::new();
        let mut take = |sample| {
            samples.push(sample);
            Ok(if samples.len() < VERIFICATION_BATCHES { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        };
        if let Some(data) = data {
            if self.held_out(&mut take)?.data.is_some() {
                return Ok((samples, "held-out sample"));
            }
            let subject = Subject::from_model(self.after.for_samples(self.before).clone())?;
            self.pipeline.running.data.for_each_held_out(data, 0, &[], subject.target(), take)?;
            if !samples.is_empty() {
                return Ok((samples, "calibration sample"));
            }
        }
        Ok((vec![data::synthetic(&graph, self.pipeline.seed)?], SYNTHETIC))
    }

    /// Evaluates the input and the output on the evaluation data.
    pub(super) fn evaluate(&self, evaluate: &Evaluate, runtimes: &[Runtime], exports: &mut [(&'static str, Exported)], measured: &mut Measured) -> Result<()> {
        let Some(options) = &self.pipeline.running.data.evaluation else { return Ok(()) };
        let renumbered = self.after.has_renumbered_tokens(self.before);
        if options.task == Some(Task::Fidelity)
            && let Some(input) = self.with_tokens_of_output()?
        {
            return self.compared_with(&input).evaluate(evaluate, runtimes, exports, measured);
        }
        // If the output has a new head, the labels belong to it, and the input cannot be scored.
        let roles = if self.after.has_new_classes(self.before) { &[Role::Output][..] } else { &[Role::Input, Role::Output] };
        let first_after = (roles.len() - 1) * runtimes.len();
        let exports_input = first_after > 0 && runtimes.contains(&Runtime::OnnxRuntime) && self.before.onnx.is_none();
        if let (true, Some(onnx)) = (exports_input, self.pipeline.onnx()) {
            let folder = self.folder().join(INPUT_FOLDER);
            std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
            onnx.format().write(self.before, &RunState::default(), &Destination::local(&folder), None, &self.work)?;
        }
        let both = roles.iter().flat_map(|role| runtimes.iter().map(move |runtime| (*role, *runtime)));
        let check = Some((Role::OutputAsOnnx, Runtime::Candle)).filter(|_| runtimes.len() > 1);
        let mut models_to_run = self.subjects(evaluate.precision, both.chain(check))?;
        let sets = &self.pipeline.running.data;
        let targets = [0, first_after].map(|number| models_to_run.subjects[number].2.target());
        for (key, other) in self.read_by_passes() {
            let (shared, of) = sets.overlap(options, other, targets[0])?;
            if shared > 0 {
                measured.notes.push(format!(
                    "{WARNING}{shared} of the first {of} evaluation samples share content with the {key} data of the passes: the score overestimates the quality on new data"
                ));
            }
        }
        let subjects = models_to_run.subjects.iter().map(|(_, _, subject)| subject);
        let smaller = evaluation::smaller_batch(options, &*sets.open(options, targets[0])?, subjects)?;
        let options = &Data { batch_size: smaller.or(options.batch_size), ..options.clone() };
        let data = sets.open(options, targets[0])?;
        // A student from another folder may preprocess samples differently. Each model is then scored on
        // its own samples.
        let own = if self.after.path == self.before.path && !renumbered { None } else { Some(sets.open(options, targets[1])?) };
        let difference = own.as_ref().map_or(Ok(None), |own| data.difference_from(own))?;
        let own = own.filter(|_| renumbered || difference.is_some());
        let pairs = models_to_run.pairs();
        let batch = data.first()?;
        // Without a safetensors export, every reading of the output's weights computes them again.
        let measures_latency = evaluate.latency && first_after > 0;
        let runs = if measures_latency || !self.writes_safetensors() { Runs::Repeated } else { Runs::Once };
        let mut models = models_to_run.load(&batch.inputs, runs, &self.pipeline.running, &self.work)?;
        let outcomes = match &own {
            None => evaluation::evaluate(&data, &mut models, &pairs, &self.work)?,
            Some(own) => {
                let reason = match difference {
                    _ if renumbered => "the output has other tokens than the input".to_owned(),
                    difference => format!("input and output differ in preprocessing or labels ({})", difference.unwrap_or_default()),
                };
                measured.notes.push(format!("{reason}: each model was scored with its own samples, and their outputs were not compared"));
                if renumbered && data.task() == Task::LanguageModelling {
                    measured.notes.push(FEWER_ROWS.into());
                }
                let (before, after) = models.split_at_mut(runtimes.len());
                let before = evaluation::evaluate(&data, before, &[], &self.work)?;
                let shifted = |(a, b): &(usize, usize)| Some((a.checked_sub(runtimes.len())?, b.checked_sub(runtimes.len())?));
                evaluation::evaluate(own, after, &pairs.iter().filter_map(shifted).collect::<Vec<_>>(), &self.work)?.after(before)
            }
        };
        if models.iter().any(|model| model.group_size(&batch.inputs).is_some()) {
            let why = if measures_latency { "because they do not fit into memory; latency was not measured" } else { "to save memory" };
            measured.notes.push(format!("models ran block by block, {why}"));
        } else if measures_latency {
            let runtime = runtimes.iter().rposition(|r| *r == Runtime::OnnxRuntime).unwrap_or(0);
            let (before, after) = models.split_at_mut(runtimes.len());
            let first_own = own.as_ref().map(|own| own.first()).transpose()?;
            let inputs = [&batch, first_own.as_ref().unwrap_or(&batch)].map(|batch| &batch.inputs);
            measured.latency = Some(evaluation::latency(&mut *before[runtime], &mut *after[runtime], inputs, self.work.threads)?);
            if first_own.is_some() {
                measured.notes.push("latency of each model was measured on its own first batch, whose size can differ".into());
            }
        }
        drop(models);
        let fidelity = outcomes.pairs.first().filter(|_| own.is_none() && first_after > 0);
        measured.notes.extend(fidelity.and_then(not_finite_note));
        let fidelity = fidelity.filter(|fidelity| fidelity.not_finite().is_none()).cloned();
        let mut accuracy = outcomes.accuracy(runtimes, &data, first_after);
        accuracy.data_blake3 = Some(options.contents(&self.work)?);
        accuracy.fidelity.clone_from(&fidelity);
        measured.fidelity = fidelity.map(|found| MeasuredFidelity::new(SamplesFrom::Evaluation, accuracy.samples, Some(accuracy.data.clone()), found));
        measured.accuracy = Some(accuracy);
        let folder = self.folder().join(INPUT_FOLDER);
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
        }
        if runtimes.len() > 1 {
            let description = format!("{} of {}", counted(outcomes.samples, "sample"), data.description());
            self.require_agreement(outcomes.pairs.last(), &description, &[batch], exports, measured)?;
        }
        Ok(())
    }

    /// The value of an option of the ONNX export.
    fn option(&self, name: &str) -> Option<serde_json::Value> {
        self.pipeline.onnx()?.format().options().get(name).cloned()
    }

    /// Checks that the outputs of ONNX Runtime agree with those of the built-in executor, and adds the
    /// result to the exports. For a static int8 model, each quantized value is also compared, on the
    /// batches `verified`.
    fn require_agreement(
        &self,
        fidelity: Option<&Fidelity>,
        samples: &str,
        verified: &[Batch],
        exports: &mut [(&'static str, Exported)],
        measured: &mut Measured,
    ) -> Result<()> {
        let Some(fidelity) = fidelity else { return Ok(()) };
        let half = self.option("precision").is_some_and(|precision| precision == "float16");
        let (agree, difference) = judge(fidelity, half || has_integers(self.after), None);
        let differ = format!("outputs of ONNX Runtime and the built-in executor differ on {samples}: {difference}");
        let failure = |reason| Error::Verification { path: self.file.into(), reason };
        let mut how = format!("; run in ONNX Runtime on {samples}: {difference}");
        let written = self.written()?;
        let values = compare_quantized_values(&written, &self.folder().join(self.file), verified, half, &self.work)?;
        match &values {
            Some((false, found)) => return Err(failure(found.clone())),
            Some((true, found)) => how += &format!("; {found}"),
            None => {}
        }
        if !agree {
            let explanation = explanation(values.is_some(), quantized_values::is_static(&written.graph()?)).ok_or_else(|| failure(differ.clone()))?;
            measured.notes.push(format!("{differ}. {explanation}"));
        }
        for (_, exported) in exports.iter_mut().filter(|(format, _)| *format == "onnx") {
            exported.how += &how;
            exported.max_abs_error = exported.max_abs_error.max(fidelity.max_abs_error);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::Tensor;

    use super::*;
    use crate::data::References;
    use crate::evaluation::FidelityAccumulator;

    /// Outputs that become infinite or NaN are a warning; outputs that already were are a note.
    #[test]
    fn lost_finite_values_are_a_warning() {
        let note = |before: [f32; 2], after: [f32; 2]| {
            let outputs = |values: [f32; 2]| [("x".to_owned(), Tensor::new(&[values], &candle_core::Device::Cpu).unwrap())].into();
            let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 1 };
            let mut accumulator = FidelityAccumulator::default();
            accumulator.add(&batch, &outputs(before), &outputs(after)).unwrap();
            not_finite_note(&accumulator.finish())
        };
        assert_eq!(note([1.0, 2.0], [1.0, 3.0]), None);
        for lost in [f32::NAN, f32::INFINITY] {
            assert!(note([1.0, 2.0], [1.0, lost]).unwrap().starts_with(WARNING), "{lost}");
            for after in [2.0, f32::NAN] {
                assert!(note([1.0, lost], [1.0, after]).unwrap().starts_with("fidelity was not measured"), "{lost} {after}");
            }
        }
    }
}
