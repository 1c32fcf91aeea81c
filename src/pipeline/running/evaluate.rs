//! Measuring what a run made: ONNX files against the built-in executor, and the output against the input.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use candle_core::Device;

use crate::analysis;
use crate::data::{self, Batch, DataSet};
use crate::error::{Error, Result};
use crate::evaluation::{
    self, Accuracy, Compute, Cost, Evaluate, Fidelity, MeasuredFidelity, Outcomes, Precision, Runner, Runtime, SamplesFrom, Score, Subject, quantized_values,
};
use crate::exec::{Inputs, Rounding};
use crate::export::{Export, Exported};
use crate::files::{self, Destination};
use crate::ir::Graph;
use crate::model::Model;
use crate::onnx::file::MODEL;
use crate::pipeline::running::Running;
use crate::pipeline::running::free::{lack_for_onnx_runtime, memory_limit};
use crate::pipeline::{Check, Pipeline, run::Measured};
use crate::report::{OutputFile, Report, WARNING};
use crate::run_state::RunState;
use crate::runtime::{self, Session};
use crate::store::{ActivationScheme, Encoding};
use crate::work::{MemoryLimit, Work};

/// Where the input is written as ONNX for comparison.
const BEFORE: &str = ".before";
/// Tokens of synthetic samples that decoders with a cache are given one by one.
const STEPS: usize = 4;
/// What is run where there is no evaluation data.
const SYNTHETIC: &str = "synthetic samples";
/// Batches that a static int8 file is verified on.
const VERIFIED: usize = 2;

/// How far ONNX Runtime's answers may be from the built-in executor's, for numbers of usual size.
const TOLERANCE: f64 = 1e-3;
/// The mean cosine to the built-in executor's answers that is asked for where integers or 16-bit floats are multiplied: a number that
/// lies between two integers may go either way.
const MEAN_COSINE: f64 = 0.99;

impl Pipeline {
    /// How to evaluate, if evaluation data is named.
    pub(super) fn evaluation(&self) -> Option<Evaluate> {
        self.running.data.evaluation.as_ref().map(|_| self.running.evaluate.clone().unwrap_or_default())
    }

    pub(super) fn onnx(&self) -> Option<&Export> {
        self.export.iter().find(|export| export.format().name() == "onnx")
    }
}

/// Which side of a run a model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Before,
    After,
    /// The output, inputs of int8 layers rounded as ONNX says.
    AsOnnx,
}

/// Models in the order in which they run.
struct Subjects {
    subjects: Vec<(Side, Runtime, Subject)>,
}

impl Subjects {
    fn position(&self, side: Side, runtime: Runtime) -> Option<usize> {
        self.subjects.iter().position(|(s, r, _)| (*s, *r) == (side, runtime))
    }

    /// Pairs of positions to compare: before and after by runtime, and both runtimes of the output.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let pair = |a: (Side, Runtime), b: (Side, Runtime)| Some((self.position(a.0, a.1)?, self.position(b.0, b.1)?));
        let wanted = [
            pair((Side::Before, Runtime::Candle), (Side::After, Runtime::Candle)),
            pair((Side::Before, Runtime::OnnxRuntime), (Side::After, Runtime::OnnxRuntime)),
            pair((Side::AsOnnx, Runtime::Candle), (Side::After, Runtime::OnnxRuntime)),
        ];
        wanted.into_iter().flatten().collect()
    }

    /// Loads them, to run on samples like those of a batch.
    fn load<'s>(&'s mut self, inputs: &Inputs, running: &Running, work: &Work<'s>) -> Result<Vec<Box<dyn Runner + 's>>> {
        let subjects = self.subjects.iter_mut().map(|(_, _, subject)| subject);
        evaluation::load(subjects, Some(inputs), &running.device()?, running.memory()?, work)
    }
}

/// What a run starts from, what came of it, and where it was written.
pub(super) struct Run<'r> {
    pub pipeline: &'r Pipeline,
    pub before: &'r Model,
    pub after: &'r Model,
    pub folder: &'r Path,
    /// Name of the ONNX file in it.
    pub file: &'r str,
    pub work: Work<'r>,
    /// When the run began.
    pub start: Instant,
}

impl Run<'_> {
    /// Measures, and adds what was found to the exports.
    pub fn measure(&self, exports: &mut [(&'static str, Exported)]) -> Result<Measured> {
        if self.before.onnx.is_some() {
            return self.measure_files(exports);
        }
        let graph = self.before.graph();
        let mut measured = Measured { compute: graph.as_ref().ok().and_then(|graph| self.compute(graph)), ..Measured::default() };
        let asked = self.pipeline.evaluation();
        let onnx = self.pipeline.onnx().is_some();
        if asked.is_none() && self.pipeline.measures {
            let (fidelity, note) = self.fidelity(graph, exports)?;
            measured.fidelity = fidelity;
            measured.notes.extend(note);
            if measured.fidelity.as_ref().is_some_and(|measured| measured.samples_from == SamplesFrom::HeldOut) {
                let (continuations, note) = self.continuations()?;
                measured.continuations = continuations;
                measured.notes.extend(note);
            }
        }
        if asked.is_none() && !onnx {
            return Ok(measured);
        }
        let ready = crate::runtime::library();
        let wanted = match &asked {
            Some(evaluate) if !evaluate.runtime.is_empty() => evaluate.runtime.clone(),
            _ if onnx && ready.is_ok() => vec![Runtime::Candle, Runtime::OnnxRuntime],
            _ => vec![Runtime::Candle],
        };
        if onnx
            && !wanted.contains(&Runtime::OnnxRuntime)
            && let Err(reason) = &ready
        {
            measured.notes.push(format!("{MODEL} was read back but not run: {reason}; {}", reason.hint().unwrap_or_default()));
        }
        match asked {
            Some(evaluate) => {
                self.evaluate(&evaluate, &wanted, exports, &mut measured)?;
                // Evaluation runs texts as a whole; that they go on is seen here.
                if wanted.len() > 1 && self.option("cache").is_some_and(|cache| cache == true) {
                    self.compare(true, exports, &mut measured)?;
                }
            }
            None if wanted.len() > 1 => self.compare(false, exports, &mut measured)?,
            None => {}
        }
        Ok(measured)
    }

    /// Cost before and after; nothing when it is not known what the model computes.
    pub(super) fn compute(&self, before: &Graph) -> Option<Compute> {
        let after = self.after.graph().ok()?;
        let sizes = analysis::usual_sizes(before);
        let cost = |graph: &Graph| {
            let (macs, activation_bytes) = analysis::cost(graph, &sizes);
            Cost { macs, activation_bytes }
        };
        Some(Compute { before: cost(before), after: cost(&after), sizes })
    }

    /// The models to run.
    fn subjects(&self, precision: Precision, roles: impl IntoIterator<Item = (Side, Runtime)>) -> Result<Subjects> {
        let mut subjects = Vec::new();
        for (side, runtime) in roles {
            let subject = match (side, runtime) {
                (Side::Before, Runtime::Candle) => Subject::of(self.before.clone())?.with_precision(precision),
                (Side::After, Runtime::Candle) => Subject::of(self.written()?)?.with_precision(precision),
                (Side::AsOnnx, Runtime::Candle) => Subject::of(self.written()?)?.with_rounding(Rounding::Tensor),
                (Side::Before, Runtime::OnnxRuntime) if self.before.onnx.is_some() => Subject::file_of(self.before, self.work.threads)?,
                (Side::Before, Runtime::OnnxRuntime) => self.session(&self.folder.join(BEFORE).join(self.file))?,
                (Side::After | Side::AsOnnx, Runtime::OnnxRuntime) => self.session(&self.folder.join(self.file))?,
            };
            subjects.push((side, runtime, subject));
        }
        Ok(Subjects { subjects })
    }

    /// The output as it was written, where the built-in executor can read it.
    pub(super) fn written(&self) -> Result<Model> {
        if self.writes_safetensors() { Model::open(self.folder) } else { Ok(self.after.clone()) }
    }

    pub(super) fn writes_safetensors(&self) -> bool {
        self.pipeline.export.iter().any(|export| export.format().name() == "safetensors")
    }

    pub(super) fn session(&self, path: &Path) -> Result<Subject> {
        let open = if self.before.onnx.is_some() { Subject::onnx } else { Subject::written };
        open(path, self.folder, self.after.config.values().clone(), self.work.threads)
    }

    /// Runs the ONNX file on synthetic samples; if memory is short, only if `asked` for.
    fn compare(&self, asked: bool, exports: &mut [(&'static str, Exported)], measured: &mut Measured) -> Result<()> {
        if self.pipeline.allow_nonfinite {
            measured.notes.push(format!("{MODEL} was not run: outputs of weights that are not finite cannot be compared"));
            return Ok(());
        }
        let lack = lack_for_onnx_runtime(&[self.after], self.pipeline.running.memory);
        if let Some(lack) = lack.filter(|_| !asked) {
            measured.notes.push(format!("{MODEL} was not run: {lack}"));
            return Ok(());
        }
        let model = self.written()?;
        let (samples, what) = self.verification_samples(&model)?;
        let (batch, memory) = (&samples[0], memory_limit(self.pipeline.running.memory, &Device::Cpu));
        let fidelity = run_both(model, &self.folder.join(self.file), batch, memory, &self.work)?;
        self.require_agreement(Some(&fidelity), batch.samples, &what, &samples, exports, measured)
    }

    /// Samples to verify a file on: of a static int8 model calibration samples, held-out ones if there are any; else random ones.
    fn verification_samples(&self, model: &Model) -> Result<(Vec<Batch>, String)> {
        let graph = model.graph()?;
        let data = self.pipeline.running.data.calibration.as_ref().filter(|_| quantized_values::is_static(&graph));
        let mut samples = Vec::new();
        let mut take = |sample| {
            samples.push(sample);
            Ok(if samples.len() < VERIFIED { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        };
        if let Some(data) = data {
            if self.held_out(&mut take)?.is_some() {
                return Ok((samples, "held-out samples".into()));
            }
            let subject = Subject::of(self.before.clone())?;
            self.pipeline.running.data.for_each_beyond(data, 0, &[], subject.target(), take)?;
            if !samples.is_empty() {
                return Ok((samples, "calibration samples".into()));
            }
        }
        Ok((vec![data::synthetic(&graph, self.pipeline.seed)?], SYNTHETIC.into()))
    }

    /// Runs everything on the evaluation data.
    pub(super) fn evaluate(&self, evaluate: &Evaluate, runtimes: &[Runtime], exports: &mut [(&'static str, Exported)], measured: &mut Measured) -> Result<()> {
        let Some(options) = &self.pipeline.running.data.evaluation else { return Ok(()) };
        let written = runtimes.contains(&Runtime::OnnxRuntime) && self.before.onnx.is_none();
        if let (true, Some(onnx)) = (written, self.pipeline.onnx()) {
            let folder = self.folder.join(BEFORE);
            std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
            onnx.format().write(self.before, &RunState::default(), &Destination::here(&folder), None, &self.work)?;
        }
        let both = [Side::Before, Side::After].into_iter().flat_map(|side| runtimes.iter().map(move |runtime| (side, *runtime)));
        let check = Some((Side::AsOnnx, Runtime::Candle)).filter(|_| runtimes.len() > 1);
        let mut models_to_run = self.subjects(evaluate.precision, both.chain(check))?;
        let sets = &self.pipeline.running.data;
        let targets = [0, runtimes.len()].map(|number| models_to_run.subjects[number].2.target());
        for (key, other) in self.read_by_passes() {
            let (shared, of) = sets.overlap(options, other, targets[0])?;
            if shared > 0 {
                measured.notes.push(format!(
                    "{WARNING}{shared} of the first {of} evaluation samples share content with the {key} data of the passes: the score overestimates the quality on new data"
                ));
            }
        }
        let data = sets.open(options, targets[0])?;
        // A student from another folder may prepare samples differently: each model is then scored on its own.
        let is_same = self.after.path == self.before.path || data::prepares_alike(targets)?;
        let own = if is_same { None } else { Some(sets.open(options, targets[1])?) };
        measured.notes.extend(data.note().map(str::to_owned));
        let pairs = models_to_run.pairs();
        let batch = data.first()?;
        let mut models = models_to_run.load(&batch.inputs, &self.pipeline.running, &self.work)?;
        let outcomes = match &own {
            None => evaluation::evaluate(&data, &mut models, &pairs, &self.work)?,
            Some(own) => {
                measured.notes.push("the student prepares samples differently from the input: each was scored on samples prepared its own way, and their outputs were not compared".into());
                let (before, after) = models.split_at_mut(runtimes.len());
                let before = evaluation::evaluate(&data, before, &[], &self.work)?;
                let within = |(a, b): &(usize, usize)| Some((a.checked_sub(runtimes.len())?, b.checked_sub(runtimes.len())?));
                let after = evaluation::evaluate(own, after, &pairs.iter().filter_map(within).collect::<Vec<_>>(), &self.work)?;
                Outcomes { models: before.models.into_iter().chain(after.models).collect(), ..after }
            }
        };
        if models.iter().any(|model| model.together(&batch.inputs).is_some()) {
            let more = if evaluate.latency { "; latency was not measured" } else { "" };
            measured.notes.push(format!("models ran block by block, since they do not fit into memory whole{more}"));
        } else if evaluate.latency && own.is_none() {
            let runtime = runtimes.iter().rposition(|r| *r == Runtime::OnnxRuntime).unwrap_or(0);
            let (before, after) = models.split_at_mut(runtimes.len());
            let latency = evaluation::latency(&mut *before[runtime], &mut *after[runtime], &batch.inputs, self.work.threads)?;
            measured.latency = Some(latency);
        }
        drop(models);
        let accuracy = Accuracy { fidelity: outcomes.pairs.first().filter(|_| own.is_none()).cloned(), ..accuracy(runtimes, &data, &outcomes) };
        measured.fidelity = accuracy.fidelity.clone().map(|fidelity| MeasuredFidelity {
            samples_from: SamplesFrom::Evaluation,
            samples: accuracy.samples,
            data: Some(accuracy.data.clone()),
            fidelity,
        });
        measured.accuracy = Some(accuracy);
        let folder = self.folder.join(BEFORE);
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
        }
        if runtimes.len() > 1 {
            let what = format!("samples of {}", data.description());
            self.require_agreement(outcomes.pairs.last(), outcomes.samples, &what, &[batch], exports, measured)?;
        }
        Ok(())
    }

    /// An option of the ONNX export, if there is one.
    fn option(&self, name: &str) -> Option<serde_json::Value> {
        self.pipeline.onnx()?.format().options().get(name).cloned()
    }

    /// Compares the outputs of ONNX Runtime with those of the built-in executor, of a static int8 model value by value on `verified`, and adds
    /// the result to the exports.
    fn require_agreement(
        &self,
        fidelity: Option<&Fidelity>,
        samples: usize,
        what: &str,
        verified: &[Batch],
        exports: &mut [(&'static str, Exported)],
        measured: &mut Measured,
    ) -> Result<()> {
        let Some(fidelity) = fidelity else { return Ok(()) };
        let half = self.option("precision").is_some_and(|precision| precision == "float16");
        let (agree, difference) = judge(fidelity, half || has_integers(self.after));
        let differ = format!("outputs of ONNX Runtime and the built-in executor differ on {samples} {what}: {difference}");
        let wrong = |reason| Error::Verification { path: MODEL.into(), reason };
        let mut how = format!("; run in ONNX Runtime on {samples} {what}: {difference}");
        match by_value(&self.written()?, &self.folder.join(self.file), verified, half, &self.work)? {
            Some((true, found)) => {
                how += &format!("; {found}");
                if !agree {
                    let reason = "each layer agrees, and rounding to eight bits amplifies differences of one step from layer to layer";
                    measured.notes.push(format!("{differ}. The file is correct: {reason}"));
                }
            }
            Some((false, found)) => return Err(wrong(found)),
            None if !agree => return Err(wrong(differ)),
            None => {}
        }
        for (_, exported) in exports.iter_mut().filter(|(format, _)| *format == "onnx") {
            exported.how += &how;
            exported.max_abs_error = exported.max_abs_error.max(fidelity.max_abs_error);
        }
        Ok(())
    }
}

/// Whether a static int8 file agrees with the built-in executor on each quantized value, and on the outputs that follow from them; `None` for
/// other files, for decoders with a cache, whose inputs differ from the graph's, and for mixtures of experts.
fn by_value(model: &Model, file: &Path, samples: &[Batch], half: bool, work: &Work) -> Result<Option<(bool, String)>> {
    let graph = model.graph()?;
    if !quantized_values::is_static(&graph) || Session::open(file, runtime::Options::default())?.keeps() {
        return Ok(None);
    }
    let Some(found) = quantized_values::compare(model, file, samples, work)? else { return Ok(None) };
    if let Some((name, steps)) = found.wrong {
        return Ok(Some((false, format!("`{name}` differs by {steps} steps between ONNX Runtime and the built-in executor, given the same inputs"))));
    }
    // Without integers computed while the model runs, outputs follow from quantized values by arithmetic of floats.
    let dynamic =
        model.weights.by_name.values().any(|w| matches!(&w.encoding, Encoding::Affine(affine) if matches!(affine.activations, ActivationScheme::DynamicToken)));
    let (ok, difference) = judge(&found.outputs, half || dynamic);
    let count = samples.iter().map(|sample| sample.samples).sum::<usize>();
    let difference = if ok { String::new() } else { format!("; outputs computed from them differ: {difference}") };
    Ok(Some((ok, format!("{} quantized values are within one step on {count} samples, each computed from the same inputs{difference}", found.values))))
}

/// Whether two runtimes agree, and how closely; `coarse` where they multiply integers or 16-bit floats.
fn judge(fidelity: &Fidelity, coarse: bool) -> (bool, String) {
    let ok = if coarse { fidelity.cosine >= MEAN_COSINE } else { fidelity.max_abs_error <= TOLERANCE * fidelity.largest.max(1.0) };
    let difference = format!("largest difference {:.1e} at numbers up to {:.1}, mean cosine {:.6}", fidelity.max_abs_error, fidelity.largest, fidelity.cosine);
    (ok, difference)
}

/// Runs an ONNX file and the built-in executor on a batch: how close their outputs are.
fn run_both(model: Model, file: &Path, batch: &Batch, memory: MemoryLimit, work: &Work) -> Result<Fidelity> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let theirs = Subject::written(file, folder, model.config.values().clone(), work.threads)?.with_steps(STEPS);
    let subjects = &mut [Subject::of(model)?.with_rounding(Rounding::Tensor), theirs];
    let mut models = evaluation::load(subjects, Some(&batch.inputs), &Device::Cpu, memory, work)?;
    let outputs = models.iter_mut().map(|model| model.run(&batch.inputs)).collect::<Result<Vec<_>>>()?;
    let pair = outputs.first().zip(outputs.last()).ok_or_else(|| Error::option("ONNX Runtime", "there is nothing to compare"))?;
    evaluation::closeness(batch, pair.0, pair.1)
}

fn has_integers(model: &Model) -> bool {
    // Palettes stand for the same floats everywhere.
    model.weights.by_name.values().any(|w| matches!(&w.encoding, Encoding::Affine(affine) if !affine.codes.is_palette()))
}

/// Runs the ONNX file of an output on synthetic samples, if there is one and ONNX Runtime is found: against the weights of the same folder,
/// else against the built-in executor's reading of the file.
pub(in crate::pipeline) fn check_onnx(output: &Path, folder: &Path, report: &Report, work: &Work) -> Result<Option<Check>> {
    let is_onnx = |file: &&OutputFile| file.path.ends_with(".onnx");
    let Some(file) = report.outputs.iter().find(is_onnx) else { return Ok(None) };
    let found = match crate::runtime::library() {
        _ if files::is_remote(folder) => Ok((true, "not run: it is on another machine".into())),
        Err(reason) => Ok((true, format!("not run: {reason}"))),
        Ok(_) => agreement(output, &folder.join(&file.path), half(report), work),
    };
    let (ok, finding) = match found {
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        found => found.unwrap_or_else(|error| (false, error.to_string())),
    };
    Ok(Some(Check { path: format!("{}, run", file.path), ok, finding }))
}

/// Whether the ONNX file of a run computes with 16-bit floats.
fn half(report: &Report) -> bool {
    let exports = report.recipe.get("export").and_then(serde_json::Value::as_array).into_iter().flatten();
    exports.filter_map(|export| export.get("onnx")?.get("precision")).any(|precision| precision == "float16")
}

fn agreement(output: &Path, file: &Path, half: bool, work: &Work) -> Result<(bool, String)> {
    let model = Model::open(output)?;
    if let Some(lack) = lack_for_onnx_runtime(&[&model], None) {
        return Ok((true, format!("not run: {lack}")));
    }
    if model.onnx.is_some() {
        return run_alone(model, file, work);
    }
    let coarse = half || has_integers(&model);
    let batch = data::synthetic(&model.graph()?, 0)?;
    if let Some(found) = by_value(&model, file, std::slice::from_ref(&batch), half, work)? {
        return Ok(found);
    }
    let fidelity = run_both(model, file, &batch, memory_limit(None, &Device::Cpu), work)?;
    let (ok, difference) = judge(&fidelity, coarse);
    Ok((ok, format!("ONNX Runtime against the built-in executor on {} {SYNTHETIC}: {difference}", batch.samples)))
}

/// Runs an ONNX file in ONNX Runtime and, if its operators have a typed form, in the built-in executor.
fn run_alone(model: Model, path: &Path, work: &Work) -> Result<(bool, String)> {
    let mut file = Subject::file_of(&model, work.threads)?;
    let inputs = file.target().inputs.to_vec();
    let mut runner = file.load(&Device::Cpu, work)?;
    let mut unfit = None;
    let mut run = |kind: usize| {
        let batch = data::synthetic_for(&inputs, 0, kind)?;
        let outputs = runner.run(&batch.inputs)?;
        Ok((batch, outputs))
    };
    let answered = (0..data::KINDS).find_map(|kind| match run(kind) {
        Err(e) if !matches!(e, Error::Cancelled) => {
            unfit.get_or_insert(e);
            None
        }
        found => Some(found),
    });
    let Some((batch, outputs)) = answered.transpose()? else {
        let reason = unfit.map_or_else(String::new, |e| e.to_string());
        return Ok((true, format!("ONNX Runtime opens it; not run, because no synthetic sample fits: {reason}")));
    };
    // The built-in executor has no cache to give a decoder.
    if model.onnx.as_ref().is_some_and(|file| file.keeps()) || model.graph().is_err() {
        return Ok((true, "ONNX Runtime runs it; not compared, because the built-in executor does not".into()));
    }
    // Fails for files of other tools, which name their codes differently.
    match by_value(&model, path, std::slice::from_ref(&batch), false, work) {
        Ok(Some(found)) => return Ok(found),
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        Ok(None) | Err(_) => {}
    }
    let has_integers = model.weights.by_name.values().any(|weight| !weight.is_float() || weight.encoding != Encoding::Dense);
    // Deep static int8 networks amplify a rounding difference of one step: a large difference does not imply a defect of the file.
    let amplifies = model.graph().is_ok_and(|graph| quantized_values::is_static(&graph));
    let subject = Subject::of(model).map(|subject| subject.with_rounding(Rounding::Tensor));
    let compared = subject.and_then(|mut subject| evaluation::closeness(&batch, &subject.load(&Device::Cpu, work)?.run(&batch.inputs)?, &outputs));
    Ok(match compared {
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        Err(e) => (true, format!("ONNX Runtime runs it; not compared with the built-in executor: {e}")),
        Ok(fidelity) => {
            let (ok, difference) = judge(&fidelity, has_integers);
            (ok || amplifies, format!("ONNX Runtime against the built-in executor on {} {SYNTHETIC}: {difference}", batch.samples))
        }
    })
}

fn accuracy(runtimes: &[Runtime], data: &DataSet, outcomes: &Outcomes) -> Accuracy {
    let (before, after) = outcomes.models.split_at(runtimes.len());
    // What stands behind both sides was run for comparison only.
    let values =
        |side: &[evaluation::Outcome]| runtimes.iter().zip(side).filter_map(|(runtime, outcome)| Some((*runtime, outcome.score.as_ref()?.value))).collect();
    let first: Option<(&Score, &Score)> = before.first().and_then(|o| o.score.as_ref()).zip(after.first().and_then(|o| o.score.as_ref()));
    let more =
        |(before, after): (&Score, &Score)| before.more.iter().filter_map(|(name, value)| Some((name.clone(), [*value, *after.more.get(name)?]))).collect();
    Accuracy {
        task: outcomes.task.to_string(),
        metric: first.map(|(score, _)| score.metric.clone()),
        data: data.description().to_owned(),
        samples: outcomes.samples,
        before: values(before),
        after: values(after),
        ci95: first.and_then(|(before, after)| Some([before.ci95?, after.ci95?])),
        drop: first.map(|(before, after)| before.drop_to(after)),
        fidelity: None,
        more: first.map(more).unwrap_or_default(),
    }
}
