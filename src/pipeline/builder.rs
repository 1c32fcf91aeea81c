//! What a pipeline consists of.

use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "run")]
use std::time::Instant;

#[cfg(feature = "run")]
use super::kept::Shelf;
use super::{plan, run};
#[cfg(feature = "run")]
use crate::data::{Data, DataSets};
use crate::error::{Error, Result};
#[cfg(feature = "run")]
use crate::evaluation::Evaluate;
#[cfg(feature = "run")]
use crate::exec::Choice;
use crate::export::Export;
use crate::model::Model;
#[cfg(feature = "run")]
use crate::pass::Context;
use crate::pass::Step;
use crate::recipe::Recipe;
use crate::report::{Peak, Report};
use crate::store::{Cancel, Progress, Silent, Sweep};

/// Passes and formats, ready to be run on models.
#[derive(Clone)]
pub struct Pipeline {
    pub(super) steps: Vec<Step>,
    pub(super) export: Vec<Export>,
    #[cfg(feature = "run")]
    pub(super) data: DataSets,
    #[cfg(feature = "run")]
    pub(super) evaluate: Option<Evaluate>,
    #[cfg(feature = "run")]
    pub(super) device: Choice,
    pub(super) seed: u64,
    pub(super) allow_nonfinite: bool,
    pub(super) force: bool,
    pub(super) resume: bool,
    /// Where results of passes are kept, and whether those of earlier runs may be used without asking.
    #[cfg(feature = "run")]
    pub(super) shelf: Option<(Shelf, bool)>,
    threads: usize,
    progress: Arc<dyn Progress>,
    cancel: Cancel,
}

/// Puts a [`Pipeline`] together.
#[must_use]
pub struct Builder(Pipeline);

impl Pipeline {
    /// An empty pipeline: no passes, dense safetensors, all cores.
    pub fn builder() -> Builder {
        Builder(Pipeline {
            steps: Vec::new(),
            export: Vec::new(),
            #[cfg(feature = "run")]
            data: DataSets::default(),
            #[cfg(feature = "run")]
            evaluate: None,
            #[cfg(feature = "run")]
            device: Choice::default(),
            seed: 0,
            allow_nonfinite: false,
            force: false,
            resume: false,
            #[cfg(feature = "run")]
            shelf: None,
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

    /// Does the part of another process in a run: the same work on the model, and nothing is written.
    ///
    /// # Errors
    /// Anything that goes wrong.
    #[cfg(feature = "run")]
    pub fn follow(&self, model: &Model, output: impl AsRef<Path>) -> Result<()> {
        self.check_data(model)?;
        self.perform(model, &run::workplace(output.as_ref()), &mut Peak::start()).map(drop)
    }

    /// Runs everything and writes the output folder, which appears whole or not at all.
    ///
    /// # Errors
    /// Anything that goes wrong; then nothing is left behind.
    pub fn run(&self, model: Model, output: impl AsRef<Path>) -> Result<Report> {
        run::run(self, model, output.as_ref())
    }

    /// Applies the passes; no tensor is read.
    pub(super) fn apply(&self, model: &Model) -> Result<Model> {
        let mut after = model.clone();
        for step in &self.steps {
            after = step.pass().apply(after)?;
        }
        after.settle_ties(model)?;
        Ok(after)
    }

    /// No pass of this build runs a model.
    #[cfg(not(feature = "run"))]
    #[allow(clippy::unnecessary_wraps, clippy::unused_self)]
    pub(super) fn perform(&self, _model: &Model, _workplace: &Path, _peak: &mut Peak) -> Result<Option<Model>> {
        Ok(None)
    }

    /// Applies the passes with all that takes running the model; nothing where no pass does.
    #[cfg(feature = "run")]
    pub(super) fn perform(&self, model: &Model, workplace: &Path, peak: &mut Peak) -> Result<Option<Model>> {
        if self.steps.iter().all(|step| step.pass().runs_on().is_none()) {
            return Ok(None);
        }
        let mut context = Context { workplace: None, resume: self.resume, sweep: self.sweep(), seed: self.seed, data: &self.data, device: self.device.open()? };
        if let Some(reason) = self.device.reason() {
            context.sweep.progress.on(crate::store::Event::Message(&reason));
        }
        let mut kept = self.kept(model, &context.sweep)?;
        let found = kept.as_mut().and_then(|kept| kept.found.take());
        let (done, mut after) = found.map_or_else(|| (0, model.clone()), |(number, after)| (number + 1, after));
        for (number, step) in self.steps.iter().enumerate().skip(done) {
            let runs = step.pass().runs_on().is_some();
            if runs {
                after.prepare(&context.sweep)?;
            }
            context.workplace = Some(workplace.join(format!("{}-{}", number + 1, step.pass().name())));
            let start = Instant::now();
            peak.lap();
            after = step.pass().perform(after, &context)?;
            if let Some(applied) = after.history.last_mut().filter(|_| runs) {
                applied.peak_rss_bytes = peak.lap();
            }
            if let Some(kept) = kept.as_ref().filter(|_| runs) {
                kept.put(number, start.elapsed(), &mut after, &context.sweep);
            }
        }
        after.settle_ties(model)?;
        Ok(Some(after))
    }

    /// The recipe of this pipeline for a model.
    pub(super) fn recipe(&self, model: &Model) -> Recipe {
        let path = std::path::absolute(&model.path).unwrap_or_else(|_| model.path.clone());
        Recipe {
            // YAML and JSON are text: what a path holds beyond UTF-8 cannot be kept.
            model: path.to_string_lossy().as_ref().into(),
            seed: self.seed,
            allow_nonfinite: self.allow_nonfinite,
            #[cfg(feature = "run")]
            data: self.data.absolute(),
            passes: self.steps_at(&std::env::current_dir().unwrap_or_default()),
            #[cfg(feature = "run")]
            evaluate: self.evaluate.clone(),
            export: self.export.clone(),
            output: Some(".".into()),
            sweep: std::collections::BTreeMap::new(),
        }
    }

    /// The steps, with paths that hold wherever the recipe is.
    fn steps_at(&self, folder: &Path) -> Vec<Step> {
        let mut steps = self.steps.clone();
        steps.iter_mut().for_each(|step| step.resolve(folder));
        steps
    }

    pub(super) fn sweep(&self) -> Sweep<'_> {
        Sweep { threads: self.threads, progress: &*self.progress, cancel: &self.cancel }
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

    /// Adds a format; without any, safetensors are written.
    pub fn export(mut self, export: impl Into<Export>) -> Self {
        self.0.export.push(export.into());
        self
    }

    /// Takes passes, formats, seed and switches from a recipe.
    pub fn recipe(mut self, recipe: &Recipe) -> Self {
        self.0.steps.extend(recipe.passes.iter().cloned());
        self.0.export.extend(recipe.export.iter().cloned());
        #[cfg(feature = "run")]
        {
            self.0.data = recipe.data.clone();
            self.0.evaluate.clone_from(&recipe.evaluate);
        }
        self.seed(recipe.seed).allow_nonfinite(recipe.allow_nonfinite)
    }

    /// Measures before and after on these samples.
    #[cfg(feature = "run")]
    pub fn evaluation(mut self, data: Data) -> Self {
        self.0.data.evaluation = Some(data);
        self
    }

    /// Runs passes that need to see activations on these samples.
    #[cfg(feature = "run")]
    pub fn calibration(mut self, data: Data) -> Self {
        self.0.data.calibration = Some(data);
        self
    }

    /// Passes that train learn from these samples.
    #[cfg(feature = "run")]
    pub fn train(mut self, data: Data) -> Self {
        self.0.data.train = Some(data);
        self
    }

    /// How to measure before and after.
    #[cfg(feature = "run")]
    pub fn evaluate(mut self, evaluate: Evaluate) -> Self {
        self.0.evaluate = Some(evaluate);
        self
    }

    /// Where models run; passes over weights need no device.
    #[cfg(feature = "run")]
    pub fn device(mut self, device: Choice) -> Self {
        self.0.device = device;
        self
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

    /// Replaces an output folder that exists.
    pub fn force(mut self, force: bool) -> Self {
        self.0.force = force;
        self
    }

    /// Goes on with what an interrupted run has left beside the output folder.
    pub fn resume(mut self, resume: bool) -> Self {
        self.0.resume = resume;
        self
    }

    /// Keeps results of passes that run the model; one of an earlier run is used when resuming, and with `reuse` always.
    #[cfg(feature = "run")]
    pub fn keep(mut self, shelf: Shelf, reuse: bool) -> Self {
        self.0.shelf = Some((shelf, reuse));
        self
    }

    /// Threads that work at once; the output does not depend on it.
    pub fn threads(mut self, threads: usize) -> Self {
        self.0.threads = threads.max(1);
        self
    }

    /// Tells somebody what happens: a closure over [`Event`](crate::store::Event), or a [`Progress`].
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
    pub fn build(mut self) -> Result<Pipeline> {
        if self.0.export.is_empty() {
            self.0.export.push(Export::default());
        }
        #[cfg(feature = "run")]
        self.0.check_evaluation()?;
        #[cfg(feature = "run")]
        self.0.check_samples()?;
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
