//! `compress run`

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::args::{Global, Records, Runtimes, TextFile, write_file};
use super::output;
use super::running::{with_cache, with_rates};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pipeline::{Pipeline, Plan};
use crate::recipe::{Recipe, Variant};
use crate::report::{Comparison, Report};
use crate::run_state::PartIndex;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress run recipe.yaml -o out/small
  compress run recipe.yaml --set amount=0.3
  compress run recipe.yaml -o out/tried --sweep amount=0.3,0.5,0.7     three runs, out/tried/amount=0.3 and so on

A sweep ends with a table of all runs, and writes comparison.html to the output folder, with a plot of size against quality.")]
pub(super) struct Args {
    /// The recipe; `-` reads it from the standard input
    recipe: PathBuf,
    /// Output folder, instead of the recipe's
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Change a value of the recipe: `seed=1`, `prune-unstructured.amount=0.3`, `passes.0.cast.to=f16`
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_set)]
    set: Vec<(String, String)>,
    /// Run with each of several values, each in a subfolder of the output folder: `amount=0.3,0.5,0.7`; if
    /// the option is repeated, run every combination
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = parse_sweep)]
    sweep: Vec<(String, Vec<Value>)>,
    #[command(flatten)]
    runtimes: Runtimes,
    /// Replace the output of an earlier run; files that its report does not list are never deleted
    #[arg(long)]
    force: bool,
    /// Continue an earlier run after the last pass with a cached result, or from the last checkpoint of a
    /// training
    #[arg(long)]
    resume: bool,
    /// Do not cache results of passes
    #[arg(long, conflicts_with = "resume")]
    no_cache: bool,
    /// Do not measure the fidelity to the original model if no evaluation data is given
    #[arg(long)]
    no_measure: bool,
    #[command(flatten)]
    records: Records,
    /// Write only a part of the weights, to OUT.parts: `2/16`, or `auto` in a Slurm job array, `auto/16` in a
    /// Kubernetes indexed job; `compress merge` merges the parts
    #[arg(long, value_name = "I/N", conflicts_with_all = ["sweep", "dry_run", "resume"])]
    part: Option<PartIndex>,
    /// Show the plan without running it
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn parse_set(text: &str) -> Result<(String, String), String> {
    text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).ok_or_else(|| format!("`{text}` is not KEY=VALUE"))
}

fn parse_sweep(text: &str) -> Result<(String, Vec<Value>), String> {
    let (key, values) = parse_set(text)?;
    let list = format!("[{}]", values.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&values));
    serde_saphyr::from_str(&list).map(|values| (key, values)).map_err(|_| format!("`{values}` is not a list of values like 0.3,0.5,0.7"))
}

/// Opens the model of a recipe. The error about a missing one names the recipe.
pub(super) fn open_model(path: &Path, recipe: &Recipe) -> Result<Model> {
    Model::open(&recipe.model).map_err(|e| {
        let is_missing = matches!(&e, Error::Io { source, .. } if source.kind() == ErrorKind::NotFound);
        let hint = e.hint().unwrap_or_default();
        if is_missing && path != Path::new("-") { Error::run(format!("{}: `model`", path.display()), e, hint) } else { e }
    })
}

/// An error about a missing file, with the line of the recipe that names it.
pub(super) fn with_line(recipe: &Path, error: Error) -> Error {
    let name = match &error {
        Error::Io { source, path, .. } if source.kind() == ErrorKind::NotFound => path.file_name().map(|name| name.to_string_lossy().into_owned()),
        _ => None,
    };
    let text = std::fs::read_to_string(recipe).unwrap_or_default();
    let is_whole = |before: &str, after: &str| {
        let continues = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        let is_key = after.trim_start_matches(['"', '\'', ' ']).starts_with(':');
        !before.ends_with(continues) && !after.starts_with(continues) && !is_key
    };
    let has_name = |line: &str, name: &str| line.match_indices(name).any(|(at, found)| is_whole(&line[..at], &line[at + found.len()..]));
    let is_named = |line: &str| name.as_deref().is_some_and(|name| has_name(line, name)) && !line.trim_start().starts_with('#');
    match text.lines().position(is_named) {
        Some(line) => Error::run(format!("{}: line {}", recipe.display(), line + 1), &error, error.hint().unwrap_or_default()),
        None => error,
    }
}

/// The error of an interrupted sweep, which names the runs that are written.
fn after_runs(error: Error, written: &[(String, Report)], count: usize) -> Error {
    match error {
        Error::Cancelled if !written.is_empty() => {
            let names: Vec<&str> = written.iter().map(|(name, _)| name.as_str()).collect();
            let kept = format!("{} of {count} runs of the sweep are written: {}", names.len(), names.join(", "));
            Error::run("interrupted", kept, "run the other values with `--sweep`, and compare all outputs with `compress report`")
        }
        error => error,
    }
}

/// One run of a recipe or of a sweep.
struct Job {
    name: String,
    pipeline: Pipeline,
    model: Model,
    output: PathBuf,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let recipe = self.recipe.clone();
        self.execute(global).map_err(|error| with_line(&recipe, error))
    }

    fn execute(self, global: &Global) -> Result<()> {
        let variants = Recipe::open_variants(&self.recipe, &self.set, &self.sweep)?;
        // All runs are checked before the first one starts.
        let jobs = variants.into_iter().map(|variant| self.job(variant, global)).collect::<Result<Vec<Job>>>()?;
        if self.dry_run {
            return output::plans(&self.plans(&jobs)?, global);
        }
        match jobs.as_slice() {
            [job] if job.name.is_empty() => output::run(&job.pipeline, &job.model, &job.output, self.part, global),
            _ if self.part.is_some() => Err(Error::option("--part", "a sweep consists of several runs: select one value with --set")),
            [job, ..] if !job.pipeline.is_leader()? => jobs.iter().try_for_each(|job| output::run(&job.pipeline, &job.model, &job.output, None, global)),
            _ => self.run_sweep(jobs, global),
        }
    }

    fn job(&self, variant: Variant, global: &Global) -> Result<Job> {
        let Variant { name, recipe } = variant;
        let output = self.output.clone().or(recipe.output.clone());
        let builder = global.builder()?.recipe(&recipe).measure(recipe.measure && !self.no_measure).force(self.force).resume(self.resume);
        let builder = builder.loads(self.runtimes.loads.iter().copied());
        // Runs of a sweep share their first passes, so they use cached results.
        let builder = if self.no_cache { builder } else { with_cache(builder, !name.is_empty()) };
        let builder = with_rates(builder, global, self.dry_run);
        let pipeline = self.records.configure(builder)?.build()?;
        let output = output.ok_or_else(|| Error::option(self.recipe.display(), "no `output`: add one to the recipe, or use -o"))?;
        let model = open_model(&self.recipe, &recipe)?;
        let output = if name.is_empty() { output } else { output.join(&name) };
        Ok(Job { name, pipeline, model, output })
    }

    /// Checks the outputs of all runs and plans them.
    fn plans(&self, jobs: &[Job]) -> Result<Vec<(String, Plan)>> {
        let plan = |job: &Job| {
            job.pipeline.check_output(&job.model, &job.output)?;
            Ok((job.name.clone(), job.pipeline.plan_output(&job.model, &job.output)?))
        };
        jobs.iter().map(plan).collect()
    }

    /// Runs all variants of a sweep and compares their reports.
    fn run_sweep(&self, jobs: Vec<Job>, global: &Global) -> Result<()> {
        self.plans(&jobs)?;
        jobs.iter().try_for_each(|job| crate::output::require_local(&job.output, "the comparison of a sweep is written next to its outputs"))?;
        jobs.iter().try_for_each(|job| job.pipeline.check_writable(&job.model, &job.output))?;
        let mut reports = Vec::with_capacity(jobs.len());
        let folder = jobs.first().and_then(|job| job.output.parent()).unwrap_or(Path::new("")).to_owned();
        let page = folder.join("comparison.html");
        let is_earlier = std::fs::read_to_string(&page).is_ok_and(|text| text.contains(&format!("<title>{}", Comparison::TITLE)));
        if page.exists() && !is_earlier {
            TextFile { output: Some(page.clone()), force: self.force }.check(&["html"])?;
        }
        let count = jobs.len();
        for job in jobs {
            output::begin_run(&job.name, global);
            let report = job.pipeline.run(job.model, &job.output).map_err(|error| after_runs(error, &reports, count))?;
            reports.push((job.name, report));
        }
        let comparison = Comparison::new(&reports);
        write_file(&page, &comparison.to_html())?;
        if global.json { output::json(&comparison) } else { output::print(&format!("\n{}\n written: {}\n", comparison.to_terminal(), page.display())) }
    }
}
