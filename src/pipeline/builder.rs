//! What a pipeline consists of.

use std::path::Path;
use std::sync::Arc;

use super::running::Running;
use super::{plan, run};
use crate::error::{Error, Result};
use crate::export::Export;
use crate::model::{Model, stacked_experts};
use crate::output::{Inputs, Replace, check_place};
use crate::pass::{Samples, Step};
use crate::recipe::Recipe;
use crate::report::Report;
use crate::run_state::RunState;
use crate::store::{OpenSizes, Weight};
use crate::work::{Cancel, Progress, Silent, Work};

/// Passes and formats, ready to be run on models.
#[derive(Clone)]
pub struct Pipeline {
    pub(super) steps: Vec<Step>,
    pub(super) export: Vec<Export>,
    pub(super) running: Running,
    pub(super) seed: u64,
    pub(super) allow_nonfinite: bool,
    /// Sizes that models leave open.
    sizes: OpenSizes,
    pub(super) force: bool,
    pub(super) resume: bool,
    /// Bytes of a weight below which parts of a run do not cut it.
    pub(super) least_cut: u64,
    /// Whether fidelity is measured where no evaluation data is named.
    pub(super) measures: bool,
    /// What a run begins with, before its first pass.
    pub(super) start: RunState,
    threads: usize,
    progress: Arc<dyn Progress>,
    cancel: Cancel,
}

/// What follows all passes: tied weights are brought together, and what no pass took is said.
pub(super) fn close(after: &mut Model, before: &Model, run: &mut RunState) -> Result<()> {
    run.notes.extend(after.settle_ties(before)?);
    run.notes.extend(left_experts(after, run));
    Ok(())
}

/// Tensors that hold all experts of a layer, where passes changed others and none of these.
fn left_experts(model: &Model, run: &RunState) -> Option<String> {
    let taken = |name: &str| run.history.iter().any(|applied| applied.tensors.contains(name));
    let holds = |name: &str, weight: &Weight| stacked_experts(name, weight).is_some() && !taken(name);
    let sizes: Vec<f64> = model.weights.by_name.iter().filter(|(name, weight)| holds(name, weight)).map(|(_, weight)| weight.elements() as f64).collect();
    if sizes.is_empty() || run.history.iter().all(|applied| applied.tensors.is_empty()) {
        return None;
    }
    let part = 100.0 * sizes.iter().sum::<f64>() / model.weights.parameters().max(1) as f64;
    Some(format!(
        "{} tensors that hold all experts of a layer stay as they are, {part:.0} % of the parameters: passes take experts that are tensors of their own",
        sizes.len()
    ))
}

/// Bytes of a weight below which parts of a run do not cut it, unless the pipeline says otherwise: a moment's work.
const LEAST_CUT: u64 = 4 << 20;

/// Puts a [`Pipeline`] together.
#[must_use]
pub struct Builder(pub(super) Pipeline);

impl Pipeline {
    /// An empty pipeline: no passes, dense safetensors, all cores.
    pub fn builder() -> Builder {
        Builder(Pipeline {
            steps: Vec::new(),
            export: Vec::new(),
            running: Running::default(),
            seed: 0,
            allow_nonfinite: false,
            sizes: OpenSizes::new(),
            force: false,
            resume: false,
            least_cut: LEAST_CUT,
            measures: true,
            start: RunState::default(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            progress: Arc::new(Silent),
            cancel: Cancel::default(),
        })
    }

    /// What a run would do, from headers alone.
    ///
    /// # Errors
    /// Whatever can be known to fail before the first tensor is read.
    pub fn plan(&self, model: &Model) -> Result<plan::Plan> {
        plan::plan(self, model)
    }

    /// What is to be known beforehand of writing a model to an output: formats that are made on this machine before they go to another.
    pub fn made_here_first(&self, model: &Model, output: &Path) -> Option<String> {
        let exports = self.exports(model);
        let formats: Vec<&str> = exports.iter().map(Export::format).filter(|format| !format.streams()).map(crate::export::Format::name).collect();
        (crate::files::is_remote(output) && !formats.is_empty()).then(|| {
            let (formats, folder) = (formats.join(", "), std::env::temp_dir());
            format!(
                "{formats}: made in {} first, which needs room for it (TMPDIR names another folder), and put to {} from there",
                folder.display(),
                crate::error::tellable(output).display()
            )
        })
    }

    /// What runs the model, by name, and the samples that it runs on: passes, then formats.
    pub(super) fn runs(&self) -> impl Iterator<Item = (&'static str, Samples)> {
        let passes = self.steps.iter().map(Step::pass).filter_map(|pass| Some((pass.name(), pass.runs_on()?)));
        passes.chain(self.export.iter().map(Export::format).filter_map(|format| Some((format.name(), format.runs_on()?))))
    }

    /// Whether a pass keeps unfinished work that an interrupted run can go on with.
    pub(super) fn keeps_work(&self) -> bool {
        self.steps.iter().any(|step| step.pass().keeps_work())
    }

    /// The files that a run of a model reads.
    pub(super) fn inputs(&self, model: &Model) -> Inputs {
        let read = self.steps.iter().flat_map(|step| step.pass().reads());
        Inputs { model: model.path.clone(), files: model.inputs().into_iter().chain(read).chain(self.running.data_paths()).collect() }
    }

    /// Checks that an output of a model can be written, or replaced where [`force`](Builder::force) is set, without touching it.
    ///
    /// # Errors
    /// It exists and is not an output that may be replaced, or overlaps with an input of the run.
    pub fn check_output(&self, model: &Model, output: &Path) -> Result<()> {
        check_place(output, Replace::with_force(self.force), &self.inputs(model))
    }

    /// Runs everything and writes the output folder, which appears whole or not at all.
    ///
    /// # Errors
    /// Anything that goes wrong; then nothing is left behind.
    pub fn run(&self, model: Model, output: impl AsRef<Path>) -> Result<Report> {
        run::run(self, model, output.as_ref(), None)
    }

    /// The pipeline with what its options leave to the model and to the data written out, and the model after its passes as far as can be
    /// told without reading a tensor.
    pub(super) fn settled(&self, model: &Model) -> Result<(Pipeline, Model, RunState)> {
        model.tell_sizes(&self.sizes)?;
        let mut settled = self.clone();
        settled.export = self.exports(model);
        settled.running.begin();
        let sets = settled.running.sets();
        let (mut after, mut run) = (model.clone(), RunState { input: Some(model.path.clone()), ..self.start.clone() });
        for step in &mut settled.steps {
            step.pass_mut().settle(&after, &sets);
            let before = run.history.len();
            after = step.pass().apply(after, &mut run, None)?;
            let kept: u64 = run.history.iter().skip(before).map(|applied| step.pass().kept_bytes(&applied.tensors, &after.weights)).sum();
            run.kept_bytes = run.kept_bytes.saturating_add(kept);
        }
        close(&mut after, model, &mut run)?;
        settled.export.iter_mut().for_each(|export| export.format_mut().settle(&sets));
        let calibrates = settled.runs().any(|(_, samples)| samples == Samples::Calibration);
        settled.running.lend(calibrates);
        Ok((settled, after, run))
    }

    /// The formats that are written: where none is named, the one that the model is of.
    fn exports(&self, model: &Model) -> Vec<Export> {
        match (self.export.as_slice(), &model.onnx) {
            ([], Some(_)) => Export::of_name("onnx").into_iter().collect(),
            ([], None) => vec![Export::default()],
            (named, _) => named.to_vec(),
        }
    }

    /// The pipeline for an output: a file is of one format.
    ///
    /// # Errors
    /// Other formats are named.
    pub(super) fn writing(&self, output: &Path) -> Result<(Pipeline, Option<String>)> {
        let (Some(name), Some(format)) = (crate::output::file_name(output), crate::output::file_format(output)) else { return Ok((self.clone(), None)) };
        let mut pipeline = self.clone();
        if pipeline.export.is_empty() {
            pipeline.export.extend(Export::of_name(format));
        }
        match pipeline.export.as_slice() {
            [only] if only.format().name() == format => Ok((pipeline, Some(name))),
            _ => Err(Error::Output {
                path: output.to_owned(),
                reason: format!("is a file of the format {format}, and other formats are to be written"),
                hint: format!("name a folder, or write `{format}` alone"),
            }),
        }
    }

    /// The recipe of this pipeline for a model.
    pub(super) fn recipe(&self, model: &Model) -> Recipe {
        let path = crate::files::absolute(&model.path);
        let mut recipe = Recipe {
            seed: self.seed,
            allow_nonfinite: self.allow_nonfinite,
            sizes: self.sizes.clone(),
            measure: self.measures,
            passes: self.steps_at(&std::env::current_dir().unwrap_or_default()),
            export: self.exports(model),
            output: Some(".".into()),
            // YAML and JSON are text: what a path holds beyond UTF-8 cannot be kept.
            ..Recipe::new(path.to_string_lossy().as_ref())
        };
        self.running.tell(&mut recipe);
        recipe
    }

    /// The steps, with paths that hold wherever the recipe is.
    fn steps_at(&self, folder: &Path) -> Vec<Step> {
        let mut steps = self.steps.clone();
        steps.iter_mut().for_each(|step| step.pass_mut().resolve(folder));
        steps
    }

    pub(super) fn work(&self) -> Work<'_> {
        Work { threads: self.threads, progress: &*self.progress, cancel: &self.cancel }
    }
}

impl Builder {
    /// Adds a pass.
    pub fn pass(mut self, pass: impl Into<Step>) -> Self {
        self.0.steps.push(pass.into());
        self
    }

    /// Adds passes.
    pub fn passes(mut self, passes: impl IntoIterator<Item = Step>) -> Self {
        self.0.steps.extend(passes);
        self
    }

    /// Adds a format; without any, safetensors are written, and ONNX of an ONNX file.
    pub fn export(mut self, export: impl Into<Export>) -> Self {
        self.0.export.push(export.into());
        self
    }

    /// Takes passes, formats, seed and switches from a recipe.
    pub fn recipe(mut self, recipe: &Recipe) -> Self {
        self.0.steps.extend(recipe.passes.iter().cloned());
        self.0.export.extend(recipe.export.iter().cloned());
        self.0.running.take(recipe);
        // What the command line says stands.
        let told = std::mem::take(&mut self.0.sizes);
        self.0.sizes = recipe.sizes.clone().into_iter().chain(told).collect();
        self.seed(recipe.seed).allow_nonfinite(recipe.allow_nonfinite).measure(recipe.measure)
    }

    /// Start of every random choice.
    pub fn seed(mut self, seed: u64) -> Self {
        self.0.seed = seed;
        self
    }

    /// Carries NaN and infinite weights along instead of stopping at them.
    pub fn allow_nonfinite(mut self, allow: bool) -> Self {
        self.0.allow_nonfinite = allow;
        self
    }

    /// Fixes sizes that ONNX files leave open.
    pub fn sizes(mut self, sizes: OpenSizes) -> Self {
        self.0.sizes.extend(sizes);
        self
    }

    /// Replaces an output that exists. Only what an earlier run has written is replaced: whatever its report does not list, and whatever the
    /// run reads, is refused by name.
    pub fn force(mut self, force: bool) -> Self {
        self.0.force = force;
        self
    }

    /// Goes on with what an interrupted run has left beside the output folder.
    pub fn resume(mut self, resume: bool) -> Self {
        self.0.resume = resume;
        self
    }

    /// Whether to measure how close the answers are to the input's where no evaluation data is named and the model can be run; on by
    /// default.
    pub fn measure(mut self, measure: bool) -> Self {
        self.0.measures = measure;
        self
    }

    /// Adds a note to the report.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.0.start.notes.push(note.into());
        self
    }

    /// Bytes of a weight from which on [`run_part`](Pipeline::run_part) cuts it, where it is large beside a share; the same for all parts
    /// and for [`merge`](Pipeline::merge).
    pub fn least_cut(mut self, bytes: u64) -> Self {
        self.0.least_cut = bytes;
        self
    }

    /// Threads that work at once; the output does not depend on it.
    pub fn threads(mut self, threads: usize) -> Self {
        self.0.threads = threads.max(1);
        self
    }

    /// Tells somebody what happens: a closure over [`Event`](crate::work::Event), or a [`Progress`].
    pub fn progress(mut self, progress: impl Progress + 'static) -> Self {
        self.0.progress = Arc::new(progress);
        self
    }

    /// Lets somebody stop the run.
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.0.cancel = cancel;
        self
    }

    /// Checks the options of every pass.
    ///
    /// # Errors
    /// The first option that cannot be, with the number of its pass.
    pub fn build(self) -> Result<Pipeline> {
        self.0.running.check(self.0.runs())?;
        for (index, export) in self.0.export.iter().enumerate() {
            if self.0.export[..index].iter().any(|other| other.format().name() == export.format().name()) {
                return Err(Error::option("export", format!("`{}` is named twice, and both would write the same files", export.format().name())));
            }
        }
        for (index, step) in self.0.steps.iter().enumerate() {
            step.pass().check().map_err(|e| match e {
                Error::Option { what, reason } => Error::Option { what: format!("pass {} ({what})", index + 1), reason },
                other => other,
            })?;
        }
        Ok(self.0)
    }
}
