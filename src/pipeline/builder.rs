//! The pipeline: its configuration, its builder, and the resolution of defaults.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::running::Running;
use super::time::Rates;
use crate::contract::Target;
use crate::error::{Error, Result};
use crate::export::Export;
use crate::model::Model;
use crate::output::{self, Inputs, Replace};
use crate::pass::{Plan, Samples, Step};
use crate::provenance::{Provenance, SigningKey};
use crate::recipe::{Recipe, Sbom};
use crate::report::FormatSearch;
use crate::run_state::RunState;
use crate::store::OpenSizes;
use crate::work::{Cancel, Progress, Silent, Work};

/// A compression pipeline: passes, output formats and settings, ready to be run on models.
#[derive(Clone)]
pub struct Pipeline {
    pub(super) steps: Vec<Step>,
    pub(super) export: Vec<Export>,
    /// Runtimes that must load the output.
    pub(super) loads: Vec<Target>,
    pub(super) running: Running,
    pub(super) seed: u64,
    pub(super) allow_nonfinite: bool,
    /// Fixed sizes for the dynamic axes of ONNX models.
    pub(super) sizes: OpenSizes,
    pub(super) force: bool,
    pub(super) resume: bool,
    /// Minimum size of a weight in bytes for it to be split across parts of a run.
    pub(super) min_split_bytes: u64,
    pub(super) provenance: Provenance,
    /// Whether fidelity is measured if no evaluation data is configured.
    pub(super) measures: bool,
    /// Whether output folders have a model card.
    pub(super) card: bool,
    /// Whether the settings of a recipe were added.
    pub(super) has_recipe: bool,
    /// Recipe files whose settings were added.
    recipes: Vec<PathBuf>,
    /// The search that chose the passes and formats.
    pub(super) search: Option<Arc<FormatSearch>>,
    /// Rates of the machine, from which times are estimated.
    pub(super) rates: Option<Arc<Rates>>,
    /// Data files that are copied to the output, whose recipe refers to the copies.
    pub(super) enclosed: Vec<PathBuf>,
    /// Initial state of a run, before its first pass.
    pub(super) start: RunState,
    /// Notes about resolved defaults.
    pub(super) notes: Vec<String>,
    threads: usize,
    progress: Arc<dyn Progress>,
    cancel: Cancel,
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (passes, export, seed, threads) = (&self.steps, &self.export, self.seed, self.threads);
        f.debug_struct("Pipeline").field("passes", passes).field("export", export).field("seed", &seed).field("threads", &threads).finish_non_exhaustive()
    }
}

/// Passes that preserve what the weights of a model represent, so that low-rank corrections remain valid.
const PRESERVING: [&str; 2] = ["cast", "dequantize"];

/// Checks that a pass does not change weights that have low-rank corrections.
fn require_uncorrected(pass: &str, model: &Model) -> Result<()> {
    match model.is_corrected() && !PRESERVING.contains(&pass) {
        false => Ok(()),
        true => Err(Error::option(
            pass,
            "changes weights that have low-rank corrections (`adapter`), which would no longer fit: run it before `quantize` or the training that adds them, or after `dequantize`, which adds the corrections to the weights",
        )),
    }
}

/// An error about a tensor whose planned shape can differ from the actual one.
fn with_estimated_shapes(error: Error) -> Error {
    let Error::Tensor { name, reason, hint } = error else { return error };
    let advice =
        "the planned shape is an estimate, because an earlier pass distributes the widths by importance: run that pass separately, and this one on its output";
    let hint = if hint.is_empty() { advice.to_owned() } else { format!("{hint}; {advice}") };
    Error::Tensor { name, reason, hint }
}

/// Default of [`Builder::min_split_bytes`]: smaller weights take too little time to be worth splitting.
const MIN_SPLIT_BYTES: u64 = 4 << 20;

/// Builds a [`Pipeline`].
#[derive(Debug)]
#[must_use]
pub struct Builder(pub(super) Pipeline);

impl Pipeline {
    /// An empty pipeline: no passes, dense safetensors, all cores.
    pub fn builder() -> Builder {
        Builder(Pipeline {
            steps: Vec::new(),
            export: Vec::new(),
            loads: Vec::new(),
            running: Running::default(),
            seed: 0,
            allow_nonfinite: false,
            sizes: OpenSizes::new(),
            force: false,
            resume: false,
            min_split_bytes: MIN_SPLIT_BYTES,
            provenance: Provenance::default(),
            measures: true,
            card: true,
            has_recipe: false,
            recipes: Vec::new(),
            search: None,
            rates: None,
            enclosed: Vec::new(),
            start: RunState::default(),
            notes: Vec::new(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            progress: Arc::new(Silent),
            cancel: Cancel::default(),
        })
    }

    /// A note if the output is remote and some of its formats cannot be streamed to it: they are written to
    /// a local folder first, then uploaded.
    #[doc(hidden)]
    pub fn local_staging_note(&self, model: &Model, output: &Path) -> Option<String> {
        let exports = self.exports(model);
        let formats: Vec<&str> = exports
            .iter()
            .map(Export::format)
            .filter(|format| !(crate::files::is_streamed(output) && format.streams()))
            .map(crate::export::Format::name)
            .collect();
        (crate::files::is_remote(output) && !formats.is_empty()).then(|| {
            let (formats, folder) = (formats.join(", "), std::env::temp_dir());
            format!(
                "{formats}: written to {} first, which needs enough free space (set TMPDIR to use another folder), then uploaded to {}",
                folder.display(),
                crate::error::redact_path(output).display()
            )
        })
    }

    /// Names of the passes and formats that run the model, and the samples that each runs it on.
    pub(super) fn model_runs(&self) -> impl Iterator<Item = (&'static str, Samples)> {
        let passes = self.steps.iter().map(Step::pass).filter_map(|pass| Some((pass.name(), pass.runs_on()?)));
        passes.chain(self.export.iter().map(Export::format).filter_map(|format| Some((format.name(), format.runs_on()?))))
    }

    /// The state of a run before its first pass.
    pub(super) fn start(&self, model: &Model) -> RunState {
        RunState { input: Some(model.path.clone()), seed: self.seed, ..self.start.clone() }
    }

    /// The files and folders that a run reads: the model, its folder, recipes, data sets, and files that
    /// passes read, such as a teacher.
    pub fn inputs(&self, model: &Model) -> Vec<PathBuf> {
        [model.path.clone()].into_iter().chain(model.inputs()).chain(self.recipes.iter().cloned()).chain(self.other_inputs()).collect()
    }

    /// Files and folders that passes, formats and the evaluation read in addition to the model, and the key
    /// of the signature.
    pub(super) fn other_inputs(&self) -> impl Iterator<Item = PathBuf> {
        let exports = self.export.iter().flat_map(|export| export.format().reads());
        let key = self.provenance.key_path().map(Path::to_owned);
        self.steps.iter().flat_map(|step| step.pass().reads()).chain(exports).chain(self.running.data_paths()).chain(key)
    }

    /// The files that an output must not overlap with.
    pub(super) fn protected(&self, model: &Model) -> Inputs {
        Inputs { model: model.path.clone(), files: model.inputs().into_iter().chain(self.other_inputs()).collect() }
    }

    /// The existing data that the output may replace.
    pub(super) fn replace(&self) -> Replace {
        if self.start.attached.contains_key(Model::KEY) { Replace::Cached(Model::KEY) } else { Replace::with_force(self.force) }
    }

    /// Checks that the output can be written, or replaced if [`force`](Builder::force) is set. Leftovers
    /// of killed runs that would write it are removed.
    pub(crate) fn check_output(&self, model: &Model, output: &Path) -> Result<()> {
        self.provenance.check_output(output)?;
        output::check_output(output, self.replace(), &self.protected(model))
    }

    /// As `check_output`, and creates a folder next to a local output for a moment, for work that precedes
    /// the run.
    #[doc(hidden)]
    pub fn check_writable(&self, model: &Model, output: &Path) -> Result<()> {
        self.provenance.check_output(output)?;
        output::check_writable(output, self.replace(), &self.protected(model))
    }

    /// Resolves defaults that depend on the model and the data. Returns the pipeline with explicit
    /// options, the model after its passes, and the state of the run, as far as these can be determined
    /// without reading a tensor.
    pub(super) fn resolved(&self, model: &Model) -> Result<(Pipeline, Model, RunState)> {
        model.fix_sizes(&self.sizes)?;
        self.provenance.check_input(model)?;
        let mut resolved = self.clone();
        resolved.export = self.exports(model);
        resolved.running.reset_data();
        let sets = resolved.running.configured_sets();
        let (mut after, mut run) = (model.clone(), self.start(model));
        let mut steps = resolved.steps.as_mut_slice();
        while let Some((step, later)) = steps.split_first_mut() {
            require_uncorrected(step.pass().name(), &after)?;
            resolved.notes.extend(step.pass_mut().resolve_before(&after, &sets, later));
            let planned = step.pass().plan(&after, &run);
            let Plan { model, applied, .. } = planned.map_err(|error| if run.is_estimated() { with_estimated_shapes(error) } else { error })?;
            Pipeline::add_record(&mut run, applied, (&after, &model));
            after = model;
            steps = later;
        }
        resolved.finish_passes(&mut after, model, &mut run)?;
        resolved.export.iter_mut().for_each(|export| export.format_mut().resolve_defaults(&after, &sets));
        let calibrates = resolved.model_runs().any(|(_, samples)| samples == Samples::Calibration);
        let with_labels = resolved.steps.iter().any(|step| step.pass().reads_labels());
        resolved.running.default_data(calibrates, with_labels);
        Ok((resolved, after, run))
    }

    /// The output formats: if none is configured, ONNX for an ONNX model and safetensors for others.
    pub(super) fn exports(&self, model: &Model) -> Vec<Export> {
        match (self.export.as_slice(), &model.onnx) {
            ([], Some(_)) => Export::from_name("onnx").into_iter().collect(),
            ([], None) => vec![Export::default()],
            (named, _) => named.to_vec(),
        }
    }

    /// The pipeline for an output, and the file name if the output is a single file, whose extension
    /// selects the format.
    ///
    /// # Errors
    /// The output is a file, and another format is configured.
    pub(super) fn for_output(&self, output: &Path) -> Result<(Pipeline, Option<String>)> {
        self.provenance.check_output(output)?;
        let (Some(name), Some(format)) = (crate::output::file_name(output), crate::output::file_format(output)) else {
            crate::output::require_folder_name(output)?;
            return Ok((self.clone(), None));
        };
        let mut pipeline = self.clone();
        if pipeline.export.is_empty() {
            pipeline.export.extend(Export::from_name(format));
        }
        match pipeline.export.as_slice() {
            [only] if only.format().name() == format => Ok((pipeline, Some(name))),
            _ => Err(Error::Output {
                path: output.to_owned(),
                reason: format!("is of the format {format}, but other formats are configured"),
                hint: format!("choose a folder as the output, or export only `{format}`"),
            }),
        }
    }

    /// The recipe of this pipeline for a model.
    pub(super) fn recipe(&self, model: &Model) -> Recipe {
        let (path, folder) = (crate::files::absolute(&model.path), std::env::current_dir().unwrap_or_default());
        let mut recipe = Recipe {
            seed: self.seed,
            allow_nonfinite: self.allow_nonfinite,
            sizes: self.sizes.clone(),
            measure: self.measures,
            card: self.card,
            passes: self.steps_resolved_in(&folder),
            export: self.exports(model),
            sbom: self.provenance.sbom,
            loads: self.loads.clone(),
            output: Some(".".into()),
            // YAML and JSON cannot represent paths that are not UTF-8.
            ..Recipe::new(path.to_string_lossy().as_ref())
        };
        recipe.export.iter_mut().for_each(|export| export.format_mut().resolve(&folder));
        self.running.fill_recipe(&mut recipe);
        recipe
    }

    /// The steps, with relative paths resolved against a folder.
    fn steps_resolved_in(&self, folder: &Path) -> Vec<Step> {
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

    /// Adds an output format. Without any, the output is safetensors, or ONNX if the model is an ONNX file.
    pub fn export(mut self, export: impl Into<Export>) -> Self {
        self.0.export.push(export.into());
        self
    }

    /// Adds runtimes that must load the output. Their rules are checked on the plan, before any work, and
    /// again on the written files, before the output appears. See [`contract`](crate::contract).
    pub fn loads(mut self, runtimes: impl IntoIterator<Item = Target>) -> Self {
        for target in runtimes {
            if !self.0.loads.contains(&target) {
                self.0.loads.push(target);
            }
        }
        self
    }

    /// Sets the search that chose the passes and formats, for the report.
    #[doc(hidden)]
    pub fn search(mut self, search: FormatSearch) -> Self {
        self.0.search = Some(Arc::new(search));
        self
    }

    /// Sets the rates of the machine: plans and reports then have estimated times.
    #[doc(hidden)]
    pub fn rates(mut self, rates: Rates) -> Self {
        self.0.rates = Some(Arc::new(rates));
        self
    }

    /// Copies a small data file to the output folder, whose recipe and report refer to the copy.
    ///
    /// # Errors
    /// The file cannot be read.
    #[doc(hidden)]
    pub fn enclose(mut self, path: &Path) -> Result<Self> {
        let bytes = crate::files::read(path).map_err(Error::io("read", path))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.0.start.attached.insert(name, Arc::new(bytes));
        self.0.enclosed.push(path.to_owned());
        Ok(self)
    }

    /// Adds the passes, formats and settings of a recipe.
    pub fn recipe(mut self, recipe: &Recipe) -> Self {
        self.0.steps.extend(recipe.passes.iter().cloned());
        self.0.export.extend(recipe.export.iter().cloned());
        self.0.has_recipe = true;
        self.0.running.apply_recipe(recipe);
        self.0.provenance.sbom = recipe.sbom.or(self.0.provenance.sbom);
        // Sizes from the command line take precedence.
        let overrides = std::mem::take(&mut self.0.sizes);
        self.0.sizes = recipe.sizes.clone().into_iter().chain(overrides).collect();
        self.loads(recipe.loads.iter().copied()).seed(recipe.seed).allow_nonfinite(recipe.allow_nonfinite).measure(recipe.measure).card(recipe.card)
    }

    /// Adds the passes, formats and settings of a recipe file. Its model and output are not used.
    ///
    /// # Errors
    /// As [`Recipe::open`].
    pub fn recipe_file(mut self, path: impl AsRef<Path>) -> Result<Self> {
        self.0.recipes.push(path.as_ref().to_owned());
        Ok(self.recipe(&Recipe::open(path.as_ref(), &[])?))
    }

    /// Seed of all random number generators.
    pub fn seed(mut self, seed: u64) -> Self {
        self.0.seed = seed;
        self
    }

    /// Allows NaN and infinite weights instead of returning an error.
    pub fn allow_nonfinite(mut self, allow: bool) -> Self {
        self.0.allow_nonfinite = allow;
        self
    }

    /// Fixes the sizes of dynamic axes of ONNX files.
    pub fn sizes(mut self, sizes: OpenSizes) -> Self {
        self.0.sizes.extend(sizes);
        self
    }

    /// Replaces an existing output. Only files that an earlier run has written are replaced: the run
    /// fails if the output contains files that its report does not list, or files that the run reads.
    pub fn force(mut self, force: bool) -> Self {
        self.0.force = force;
        self
    }

    /// Resumes from the checkpoints that an interrupted run has left next to the output folder.
    pub fn resume(mut self, resume: bool) -> Self {
        self.0.resume = resume;
        self
    }

    /// Whether to measure the fidelity of the outputs to the input model's if no evaluation data is
    /// configured and the model can be run; on by default.
    pub fn measure(mut self, measure: bool) -> Self {
        self.0.measures = measure;
        self
    }

    /// Writes a software bill of materials. Needs the feature `provenance`.
    pub fn sbom(mut self, format: Sbom) -> Self {
        self.0.provenance.sbom = Some(format);
        self
    }

    /// Signs the output folder. [`verify_signature`](crate::provenance::verify_signature) checks the
    /// signature.
    pub fn sign(mut self, key: SigningKey) -> Self {
        self.0.provenance.key = Some(Arc::new(key));
        self
    }

    /// Whether to write a model card (`README.md`) to output folders, on by default. It replaces the
    /// `README.md` of the input, which is copied otherwise.
    pub fn card(mut self, card: bool) -> Self {
        self.0.card = card;
        self
    }

    /// Adds a note to the report.
    #[doc(hidden)]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.0.start.notes.push(note.into());
        self
    }

    /// Minimum size in bytes of weights that [`run_part`](Pipeline::run_part) splits across parts. It
    /// must be the same for all parts and for [`merge`](Pipeline::merge).
    #[doc(hidden)]
    pub fn min_split_bytes(mut self, bytes: u64) -> Self {
        self.0.min_split_bytes = bytes;
        self
    }

    /// Number of threads that compute, read and write weights, and of ONNX Runtime; the output does not
    /// depend on it. The built-in executor runs models on the global thread pool of rayon
    /// (`RAYON_NUM_THREADS`, `rayon::ThreadPoolBuilder::build_global`), and data sets have a few threads of
    /// their own.
    pub fn threads(mut self, threads: usize) -> Self {
        self.0.threads = threads.max(1);
        self
    }

    /// Sets the receiver of progress events: a closure over [`Event`](crate::work::Event), or a
    /// [`Progress`].
    pub fn progress(mut self, progress: impl Progress + 'static) -> Self {
        self.0.progress = Arc::new(progress);
        self
    }

    /// Sets the token by which the run can be cancelled.
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.0.cancel = cancel;
        self
    }

    /// Checks the options of every pass.
    ///
    /// # Errors
    /// The first invalid option, with the number of its pass.
    pub fn build(self) -> Result<Pipeline> {
        self.0.running.check(self.0.model_runs())?;
        self.0.provenance.check()?;
        for (index, export) in self.0.export.iter().enumerate() {
            if self.0.export[..index].iter().any(|other| other.format().name() == export.format().name()) {
                return Err(Error::option("export", format!("`{}` is listed twice, and both would write the same files", export.format().name())));
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
