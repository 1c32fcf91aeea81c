//! `compress auto`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use super::args::{Global, Records, TextFile, open_input};
use super::output;
use super::rates::{rates, record_times, with_rates};
use super::samples::parse_data;
use crate::contract::Target;
use crate::data::{Data, DataSets};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::export::Export;
use crate::model::Model;
use crate::output::{ResumeFolder, free_space};
use crate::pass::{Context, Method, Quantize};
use crate::pipeline::search::{Budget, Checkpoint, Found, LoadedBy, Point, Search, Writing, calibration_part, parse_time};
use crate::pipeline::{Builder, StageWork, memory_limit, sum_of};
use crate::report::format::{bytes, figure, milliseconds};
use crate::report::search::{FormatSearch, LatencyTable, SearchLoss};
use crate::report::terminal::table;
use crate::train::communicator::RankConfig;

/// Extension of the file of the front.
const FRONT: [&str; 1] = ["json"];

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress auto llama -o out --max-size 4.5bits --calibration book.txt             the best mixture of 4.5 bits per weight
  compress auto llama -o out --max-size 4.5bits                                    without samples, by the errors of the weights
  compress auto llama -o out --max-kl 0.05 --calibration book.txt                  the smallest with this divergence
  compress auto llama -o out --max-size 4.5bits --time 30m --calibration book.txt  the same size, with a slower method if it is better
  compress auto llama -o out --formats W4A16:64 --time 30m --calibration book.txt  one format, with the best method in this time
  compress auto llama -o small.gguf --max-size 80MB --calibration book.txt         a GGUF file of this size
  compress auto vit -o out --for onnxruntime --max-loss 0.5% --calibration train --eval val   the smallest with this accuracy
  compress auto vit -o out --for onnxruntime --latency 5ms --calibration train     the closest model that is this fast
  compress auto llama --front front.json --calibration book.txt                    only search, and write the front
  compress auto llama -o out --max-size 25% --for transformers --calibration '{ text: book.txt, samples: 32, max_length: 512 }'

One backward pass over the calibration samples predicts the loss of each format of each layer; several mixtures are then
measured on held-out samples, and the predictions are corrected. For ONNX Runtime, each layer is quantized separately
instead. Without samples, the errors of the weights are compared, and nothing is measured. `compress run` with the
recipe in the output folder writes the same weights again.")]
pub(in crate::cli) struct Args {
    /// Model folder or file: a language model; for ONNX Runtime, any model that the built-in executor runs
    model: PathBuf,
    /// Output folder, or a `.gguf` file for llama.cpp or an `.onnx` file for ONNX Runtime; without it,
    /// nothing is written
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
    /// The runtime that loads the output, which determines the formats [default: llama.cpp for `.gguf` files,
    /// onnxruntime for `.onnx` files, otherwise vllm]
    #[arg(long = "for", value_name = "RUNTIME", value_enum)]
    target: Option<LoadedBy>,
    /// Formats to choose from, such as the fastest ones of your machine; a single one needs no limit
    /// [default: all that the runtime loads]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    formats: Vec<String>,
    /// Also remove heads, neurons and channels. Fractions of them that may remain, whose losses are measured:
    /// 0.75,0.5. For ONNX Runtime, they are options of each layer; other runtimes load one width of all
    /// layers
    #[arg(long, value_name = "FRACTIONS", value_delimiter = ',', value_parser = crate::ratio::parse)]
    prune: Vec<f64>,
    /// Largest size: bits per quantized weight with scales (4.5bits), the size of all weights or of the GGUF
    /// or ONNX file (300MB), or a fraction of the size of the input (0.25, 25%)
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["max_kl", "max_loss"])]
    max_size: Option<Budget>,
    /// Largest KL divergence of the predictions from those of the original model, in nats per token, measured
    /// with weights rounded to nearest
    #[arg(long, value_name = "NATS", allow_negative_numbers = true, conflicts_with = "max_loss")]
    max_kl: Option<f64>,
    /// Largest loss of the score (accuracy, rank correlation, perplexity) relative to the original model, on
    /// samples that do not calibrate (0.5%); for ONNX Runtime without labels, of the cosine similarity
    #[arg(long, value_name = "PERCENT", value_parser = Budget::parse_drop, allow_hyphen_values = true)]
    max_loss: Option<Budget>,
    /// Largest latency of one calibration sample in ONNX Runtime, measured on this machine with `--threads`:
    /// 5ms
    #[arg(long, value_name = "TIME", value_parser = Budget::parse_latency, conflicts_with_all = ["max_size", "max_kl", "max_loss"])]
    latency: Option<Budget>,
    /// File of the times that `--latency` measures, which is read first if it exists: with the same times,
    /// the choice is the same
    #[arg(long, value_name = "FILE")]
    times: Option<PathBuf>,
    /// File of the scores and measurements of the search, which is read first if it exists: an interrupted
    /// search continues, and one with another limit measures only new mixtures
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    /// Calibration data: a file, or `{text: book.txt, samples: 32, max_length: 512, ...}` as in a recipe.
    /// Without it, the errors of the weights are compared, and only the size can be limited
    #[arg(long, visible_alias = "data", value_name = "DATA", value_parser = parse_data)]
    calibration: Option<Data>,
    /// Data on which mixtures are measured, with labels for `--max-loss` [default: calibration samples that
    /// are not used otherwise]
    #[arg(long, value_name = "DATA", value_parser = parse_data)]
    eval: Option<Data>,
    /// Algorithm that quantizes the output, for vLLM and transformers [default: gptq; rtn without samples]
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// Time for better methods, which quantize the chosen point and are kept if the loss on held-out samples
    /// falls: 10m [default: gptq only; for ONNX Runtime, the default options; for llama.cpp, scales by
    /// importance]
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "output", conflicts_with = "method")]
    time: Option<Duration>,
    /// Number of points of the front that are measured, besides uniform formats and llama.cpp's own mixtures
    #[arg(long, value_name = "N", default_value_t = 4)]
    points: usize,
    /// Write the front, with the formats and scores of all layers, to a JSON file
    #[arg(long, value_name = "FILE")]
    front: Option<PathBuf>,
    /// Only estimate the time of the search, which includes neither measured latencies nor writing the output
    #[arg(long)]
    plan: bool,
    /// Replace existing output
    #[arg(long)]
    force: bool,
    /// Continue the quantization that follows the search from its finished blocks, after an interruption
    #[arg(long, requires = "output")]
    resume: bool,
    #[command(flatten)]
    records: Records,
}

/// The result of a search with the passes that write the chosen point, or the planned work of a search.
enum Outcome {
    Planned(Vec<StageWork>),
    Found(Box<Found>, Option<Writing>),
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let checkpoint = self.checkpoint.clone();
        self.execute(global).map_err(|error| if let Error::Cancelled = error { interrupted(checkpoint.as_deref()) } else { error })
    }

    fn execute(self, global: &Global) -> Result<()> {
        if RankConfig::from_environment().ok().flatten().is_some_and(|rank| rank.size > 1) {
            return Err(Error::option("auto", "searches in one process: run the recipe of its report in several processes"));
        }
        let budget = self.budget()?;
        self.check_files()?;
        let front = TextFile { output: self.front.clone(), force: self.force };
        front.check(&FRONT)?;
        let times = TextFile { output: self.times.clone(), force: true };
        times.check(&FRONT)?;
        TextFile { output: self.checkpoint.clone(), force: true }.check(&FRONT)?;
        self.checkpoint.as_deref().map_or(Ok(()), Checkpoint::check_writable)?;
        let mut measured = self.times.as_deref().map(read_times).transpose()?.flatten();
        let mut data = self.data();
        let mut calibration = data.calibration.clone();
        calibration.as_ref().map_or(Ok(()), |set| set.require_unpacked("--calibration"))?;
        self.eval.as_ref().map_or(Ok(()), |eval| eval.require_unpacked("--eval"))?;
        let model = open_input(&self.model, self.output.as_deref())?;
        global.models.configure_model(&model)?;
        self.target().require_loads(&model)?;
        let builder = |writing: Writing, search: Option<FormatSearch>, calibration: &Option<Data>| -> Result<_> {
            let builder = with_rates(global.builder()?, global, false).passes(writing.passes).force(self.force).resume(self.resume);
            let builder = calibration.iter().fold(builder, |builder, set| builder.calibration(set.clone()));
            let builder = builder.loads([self.runtime()]);
            let builder = search.into_iter().fold(builder, Builder::search);
            let builder = writing.exports.into_iter().fold(builder, Builder::export);
            let builder = self.eval.iter().fold(builder, |builder, eval| builder.evaluation(eval.clone()));
            self.records.configure(builder)?.build()
        };
        if let Some(output) = &self.output {
            builder(Writing { passes: vec![Quantize::default().into()], exports: Vec::new() }, None, &calibration)?.check_writable(&model, output)?;
            self.check_resume_folder(output)?;
            self.check_space(&model, output, budget)?;
            // Rules that no choice of formats can meet are violated before the search.
            let floats = global.builder()?.loads([self.runtime()]).measure(false);
            let export = Export::from_name(self.runtime().runtime().format());
            export.into_iter().fold(floats, Builder::export).build()?.plan_output(&model, output)?;
        }
        let subject = Subject::from_model(model.clone())?;
        // Without `--eval`, the part of the calibration data that is not used measures the mixtures.
        if let Some(set) = calibration.clone() {
            let used = if self.eval.is_none() && self.max_loss.is_some() {
                calibration.insert(calibration_part(&data, &set, subject.target())?).clone()
            } else {
                // The samples with which the output is quantized, with `--eval` too.
                data.reserve_held_out(&set, subject.target())?
            };
            data.open(&used, subject.target())?;
            data.calibration = Some(used);
        }
        let device = global.models.device.open()?;
        let memory = memory_limit(global.models.memory, &device);
        let outcome = global.work(|work| {
            let context = Context { work: *work, seed: 0, data: &data, device, memory, memory_tracker: None, checkpoints: None };
            let labelled = self.calibration.as_ref();
            let sizes = global.models.sizes()?;
            let pruned = if self.prune.is_empty() { String::new() } else { format!(" {:?}", self.prune) };
            let options = format!("{:?} {:?} {:?} {labelled:?} {:?} {sizes:?}{pruned}", self.target(), self.formats, self.latency.is_some(), context.device);
            let checkpoint = self.checkpoint.as_deref().map(|path| Checkpoint::open(path, &model, &data, &options, work)).transpose()?;
            let (target, checkpoint) = (self.target(), checkpoint.as_ref());
            let (formats, fractions) = (&self.formats, &self.prune);
            let search = Search { model: &model, target, formats, fractions, budget, points: self.points, labelled, checkpoint, context: &context };
            if self.plan {
                return Ok(Outcome::Planned(search.planned_work(rates(global).as_ref())?));
            }
            let known = measured.clone();
            let found = search.run(&mut measured);
            // Measurements of a search that fails are kept too.
            if measured != known {
                times.write(&FRONT, || text_of("--times", &measured))?;
            }
            let mut found = found?;
            let chosen = found.chosen.clone().filter(|_| self.output.is_some());
            let writing = chosen.map(|point| match self.time {
                Some(time) => search.finish(&mut found, time),
                None => search.writing(&found, &point, self.method),
            });
            let writing = writing.transpose()?;
            Ok::<_, Error>(Outcome::Found(Box::new(found), writing))
        })?;
        let (found, writing) = match outcome {
            Outcome::Planned(work) if global.json => return output::json(&json!({ "estimated_seconds": sum_of(&work), "work": work })),
            Outcome::Planned(work) => return output::print(&output::work(&work)),
            Outcome::Found(found, writing) => (found, writing),
        };
        front.write(&FRONT, || text_of("--front", &front_of(&found)))?;
        let section = found.report(self.target(), budget);
        if !global.json {
            output::print(&text(&found, self.target(), section.as_ref()))?;
        }
        let (Some(output), Some(writing)) = (&self.output, writing) else {
            return if global.json { output::json(&json!({ "search": front_of(&found) })) } else { Ok(()) };
        };
        let report = builder(writing, section, &calibration)?.run(model, output)?;
        if global.json {
            record_times(&report, global);
            return output::json(&json!({ "search": front_of(&found), "report": report }));
        }
        output::report(&report, output, global)
    }

    /// The runtime that loads the output: if it is not specified, that of the format of the output file.
    fn target(&self) -> LoadedBy {
        let file = self.output.as_deref().and_then(crate::output::file_name).unwrap_or_default();
        self.target.or_else(|| loader(&file)).unwrap_or_default()
    }

    /// The runtime whose rules the output must comply with.
    fn runtime(&self) -> Target {
        Target::newest(self.target().runtime())
    }

    /// The data sets. The search draws its targets from the predictions, and ignores labels of calibration
    /// data like other passes.
    fn data(&self) -> DataSets {
        let mut data = DataSets { calibration: self.calibration.clone(), evaluation: self.eval.clone(), ..DataSets::default() };
        data.ignore_labels(false);
        data
    }

    /// Checks the folder of the finished blocks, which the run opens after the search.
    fn check_resume_folder(&self, output: &Path) -> Result<()> {
        let rounds = self.calibration.is_none() || self.method == Some(Method::Rtn);
        let is_new = !crate::files::is_remote(output) && !ResumeFolder::path_for(output).exists();
        if rounds || is_new || self.target().is_file() {
            return Ok(());
        }
        // Only the run removes finished blocks.
        ResumeFolder::open(output, self.resume || self.force, false).map(drop)
    }

    /// Checks that the disk has space for an output of the largest allowed size.
    fn check_space(&self, model: &Model, output: &Path, budget: Option<Budget>) -> Result<()> {
        let (Some(needed), Some(free)) = (budget.and_then(|budget| budget.largest(model)), free_space(output)) else { return Ok(()) };
        if needed <= free {
            return Ok(());
        }
        let reason = format!("needs up to {}, but only {} are free on this disk", bytes(needed), bytes(free));
        Err(Error::Output { path: output.to_owned(), reason, hint: "free some space, choose a folder on another disk, or lower `--max-size`".to_owned() })
    }

    /// Checks that the files which a search writes differ.
    fn check_files(&self) -> Result<()> {
        let files = [("--front", &self.front), ("--times", &self.times), ("--checkpoint", &self.checkpoint)];
        let mut named = BTreeMap::new();
        for (option, path) in files.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?))) {
            if let Some(other) = named.insert(crate::files::absolute(path), option) {
                return Err(Error::option(option, format!("is also the file of `{other}`, which would be overwritten: name another file")));
            }
        }
        Ok(())
    }

    fn check_pruning(&self) -> Result<()> {
        let wrong = |reason: String| Err(Error::option("--prune", reason));
        match self.prune.iter().find(|fraction| !(**fraction > 0.0 && **fraction < 1.0)) {
            Some(fraction) => wrong(format!("{fraction} is not between 0 and 1: it is the fraction that remains, such as 0.5")),
            None if self.prune.is_empty() => Ok(()),
            None if self.calibration.is_none() => wrong("needs `--calibration`: without samples, the remaining layers cannot be refitted".into()),
            None => Ok(()),
        }
    }

    fn budget(&self) -> Result<Option<Budget>> {
        let budget = match (self.max_size, self.max_kl) {
            (_, Some(limit)) if !(limit.is_finite() && limit > 0.0) => return Err(Error::option("--max-kl", format!("{limit} is not a positive number"))),
            (_, Some(limit)) => Some(Budget::Loss(limit)),
            (size, None) => size.or(self.max_loss).or(self.latency),
        };
        let runtime = self.target();
        if self.times.is_some() && self.latency.is_none() {
            return Err(Error::option("--times", "contains the times that a search with `--latency` measures: specify `--latency`, or omit it"));
        }
        if self.latency.is_some() && runtime != LoadedBy::OnnxRuntime {
            return Err(Error::option(
                "--latency",
                format!("is measured in ONNX Runtime only, and not in {runtime}: use `--for onnxruntime`, or limit the size"),
            ));
        }
        self.check_pruning()?;
        let format = runtime.runtime().format();
        let file = self.output.as_deref().and_then(crate::output::file_name);
        if let Some(file) = file.filter(|file| !runtime.is_file() || !file.ends_with(&format!(".{format}"))) {
            let what = match format {
                "gguf" => "a GGUF file or a folder",
                "onnx" => "an ONNX file or a folder",
                _ => "a folder",
            };
            let hint = loader(&file).map_or_else(String::new, |other| format!(", or specify `--for {}` for the formats of this file", other.runtime().name()));
            return Err(Error::option("--output", format!("`{file}` is a file, but {runtime} loads {what}: name {what}{hint}")));
        }
        if self.max_kl.is_some() && runtime == LoadedBy::OnnxRuntime {
            let reason = format!("is not supported for {runtime}, whose formats are compared by the cosine similarity of all outputs: use `--max-loss`");
            return Err(Error::option("--max-kl", reason));
        }
        if runtime == LoadedBy::LlamaCpp && self.time.is_some() && !self.prune.is_empty() {
            return Err(Error::option("--time", "is not supported for GGUF files with `--prune`: omit one of them"));
        }
        if let Some(option) = self.method.filter(|_| runtime.is_file()).map(|_| "--method") {
            let reason = match runtime {
                LoadedBy::LlamaCpp => {
                    "has no effect on GGUF files, whose scales are searched by the importance of the columns: `--time` tries methods that choose codes"
                }
                _ => "has no effect on ONNX files, whose int8 weights are rounded to nearest",
            };
            return Err(Error::option(option, reason));
        }
        if self.calibration.is_none() {
            let is_free = |method: Method| matches!(method, Method::Rtn | Method::Best);
            if let Some(option) = self.time.map(|_| "--time").or(self.method.filter(|method| !is_free(*method)).map(|_| "--method")) {
                return Err(Error::option(option, "needs `--calibration`: without samples, weights are rounded to nearest"));
            }
        }
        if let Some(option) = self.records.specified().or(self.method.map(|_| "--method")).filter(|_| self.output.is_none() && !self.plan) {
            return Err(Error::option(option, "has no effect without an output: specify `-o DIR`, or omit it"));
        }
        match (&self.output, &self.front, budget) {
            (None, None, _) if self.plan => Ok(budget),
            (None, None, _) => Err(Error::option("auto", "specify `-o DIR` for the output, or `--front FILE` for the front only")),
            // All weights have the only format, and the method is chosen.
            (Some(_), _, None) if self.formats.len() == 1 && self.prune.is_empty() => Ok(None),
            (Some(_), _, None) => Err(Error::option(
                "auto",
                "specify a limit: `--max-size 4.5bits`, `--max-size 300MB`, `--max-size 25%`, `--max-kl 0.05`, `--max-loss 1%`, or `--latency 5ms`; or a single format with `--formats`",
            )),
            _ => Ok(budget),
        }
    }
}

/// The runtime that loads a file with this name.
fn loader(file: &str) -> Option<LoadedBy> {
    let loads_file = |other: &&LoadedBy| other.is_file() && file.ends_with(&format!(".{}", other.runtime().format()));
    LoadedBy::value_variants().iter().find(loads_file).copied()
}

/// The error of an interrupted search: what was kept, and how to continue.
fn interrupted(checkpoint: Option<&Path>) -> Error {
    let (kept, next) = match checkpoint {
        Some(path) if path.exists() => (
            format!("no output was written; the measurements of the search are saved in {}", path.display()),
            "run the same command again: it continues with them",
        ),
        Some(path) => (format!("nothing had been measured yet, so {} was not written", path.display()), "run the same command again"),
        None => (
            "nothing was written, and the measurements of the search are lost".to_owned(),
            "with `--checkpoint FILE`, the same command continues an interrupted search",
        ),
    };
    Error::run("interrupted", kept, next)
}

/// Recorded times; `None` if the file does not exist.
fn read_times(path: &Path) -> Result<Option<LatencyTable>> {
    let text = match std::fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(Error::io("read", path))?,
    };
    let table = serde_json::from_str(&text).map_err(|e| Error::option("--times", format!("{} does not contain the times of a search: {e}", path.display())))?;
    Ok(Some(table))
}

/// JSON text of a file that an option names.
fn text_of(option: &str, value: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|e| Error::option(option, e))
}

/// The result with the format of each unit of the chosen point.
fn front_of(found: &Found) -> serde_json::Value {
    let formats = |point: &Point| point.options.iter().map(|option| found.formats.get(*option)).collect::<Vec<_>>();
    let mut value = json!(found);
    if let Some(point) = &found.chosen {
        value["chosen"]["formats"] = json!(formats(point));
    }
    let points = value["points"].as_array_mut().into_iter().flatten();
    points.zip(&found.points).for_each(|(value, point)| value["formats"] = json!(formats(point)));
    value
}

fn text(found: &Found, target: LoadedBy, section: Option<&FormatSearch>) -> String {
    let loss = |value: f64| if found.loss == SearchLoss::KlDivergence { format!("{value:.4}") } else { format!("{value:.2e}") };
    let optional = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let row = |point: &Point, what: &str| {
        let cells = [what.to_owned(), format!("{:.3}", point.bits), bytes(point.bytes), loss(point.predicted), optional(point.measured.map(loss))];
        let scores = [optional(point.score.map(figure)), optional(point.drop.map(|drop| format!("{:.3} %", 100.0 * drop)))];
        let times = [point.predicted_ms, point.measured_ms].map(|time| optional(time.map(milliseconds)));
        let scores = scores.into_iter().filter(|_| found.metric.is_some());
        cells.into_iter().chain(scores).chain(times.into_iter().filter(|_| found.times.is_some())).collect::<Vec<String>>()
    };
    let points = found.points.iter().map(|point| row(point, point.reference.as_deref().unwrap_or("mixture")));
    let chosen = found.chosen.iter().map(|point| row(point, "chosen"));
    let size = if target.is_file() { "file" } else { "weights" };
    let name = match found.loss {
        SearchLoss::KlDivergence => "KL",
        SearchLoss::CosineDistance => "distance",
        SearchLoss::WeightError => "error",
    };
    let titles = [format!("predicted {name}"), format!("measured {name}")];
    let metric = found.metric.iter().flat_map(|metric| [metric.name.as_str(), "loss"]);
    let titles = ["", "bits", size].into_iter().chain(titles.iter().map(String::as_str)).chain(metric);
    let titles = titles.chain(found.times.iter().flat_map(|_| ["predicted latency", "measured latency"]));
    let table = table(&titles.collect::<Vec<_>>(), points.chain(chosen));
    let mut text = format!("{table}\n\n");
    if let Some(samples) = &found.measured_on {
        text += &format!("Measured with weights rounded to nearest, on {samples}; predictions are corrected by the measurements.\n");
    }
    if found.loss == SearchLoss::WeightError {
        text += "Without calibration samples, losses are the squared errors of the weights relative to their squares, and nothing is measured.\n";
    }
    if let Some(metric) = &found.metric {
        text += &format!("The {} of the original model is {}, on {}.\n", metric.name, figure(metric.original), metric.measured_on);
    }
    if let Some(times) = &found.times {
        text += &format!("{}\n", times.description());
    }
    if let Some(point) = &found.chosen {
        text += &format!("Chosen: {}\n", found.summary(point));
        for method in &found.methods {
            let measured = method.measured.map_or_else(|| method.without_loss(), |value| format!("measured {} {}", found.loss, loss(value)));
            let chosen = if method.chosen { "; the output is written with it" } else { "" };
            text += &format!("`{}` ({:.0} s): {measured}{chosen}.\n", method.method, method.seconds);
        }
        if let Some((section, larger)) = section.and_then(|section| Some((section, section.larger.as_ref()?))) {
            let (cost, before, after) = (section.cost_of(larger), loss(point.predicted), loss(larger.predicted));
            let what = if found.times.is_some() { "time" } else { "bytes" };
            text += &format!("With 5 % more {what} ({cost}), the predicted {} falls from {before} to {after}.\n", found.loss);
        }
        text += "\n";
    }
    text
}
