//! `compress draft`

mod int8;
mod ngrams;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::args::{Global, Writing, open_input};
use super::output;
use super::samples::parse_data;
use crate::data::{Data, DataSets};
use crate::error::{Error, Result, counted, redact_path};
use crate::export::Safetensors;
use crate::generation::LanguageModel;
use crate::model::Model;
use crate::output::ResumeFolder;
use crate::pass::{Context, Distill, DraftHead, Pass, Student, Training};
use crate::pipeline::draft::{self, Continuations, DraftTest, PromptSource, Prompts, Samples, Steps};
use crate::pipeline::search::parse_time;
use crate::pipeline::{Builder, Pipeline, memory_limit};
use crate::train::communicator::RankConfig;
use crate::train::schedule::{Curve, Schedule};
use crate::train::{BatchSize, Precision};

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").args(["prompts", "data"]).required(true), after_help = "Examples:
  compress draft llama -o out/draft --prompts prompts.txt
  compress draft llama -o out/draft --layers 4 --data book.txt --samples 4000 --tokens 256 --time 2h
  compress draft llama-chat -o out/draft --prompts questions.txt --chat --test held-out.txt
  compress draft llama -o out/draft --data chats.jsonl --export 'gguf: { type: Q8_0 }'
  compress draft llama -o out/head --method eagle3 --vocabulary 16000 --prompts prompts.txt
  compress draft llama -o out/int8 --method int8 --prompts prompts.txt
  compress draft llama -o out/texts.npz --method ngrams --prompts prompts.txt
  compress draft llama -o out/draft --prompts prompts.txt --resume     continue an interrupted run

The output is a folder like that of the model, for `generate --draft`, vLLM and, with a GGUF file, llama.cpp. `compress
run` with the recipe in it trains the same weights again, on the same continuations (continuations.npz). With `--method
int8`, nothing is trained, and the prompts are those of the measurement. With `--method ngrams`, nothing is trained
either, and the output is a file with the continuations.")]
pub(in crate::cli) struct Args {
    /// Model folder or file: a language model that continues texts, with its tokenizer
    model: PathBuf,
    /// Output folder; with `--method ngrams`, a file FILE.npz
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Kind of the draft
    #[arg(long, value_enum, default_value_t)]
    method: Method,
    /// Number of layers of the draft: the first, the last, and evenly spread ones [default: a fifth of the
    /// model's]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Number of tokens that an EAGLE-3 head proposes: the most frequent ones of the continuations [default:
    /// all]
    #[arg(long, value_name = "N")]
    vocabulary: Option<usize>,
    /// Prompts, one per line of a .txt file, or one per record of .csv, .tsv or .jsonl (also chats)
    #[arg(long, value_name = "FILE", help_heading = "Continuations")]
    prompts: Option<PathBuf>,
    /// Treat each prompt as a user message in the model's chat template
    #[arg(long, conflicts_with = "data", help_heading = "Continuations")]
    chat: bool,
    /// Texts whose beginnings are prompts, of 32 tokens unless `max_length` is set: a file, or `{text:
    /// book.txt, max_length: 64, ...}` as in a recipe; of chats, the messages before the first answer
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Continuations")]
    data: Option<Data>,
    /// Number of continuations to sample [default: 1000]; with `--method int8`, number of prompts to measure
    /// [default: 16]
    #[arg(long, value_name = "N", help_heading = "Continuations")]
    samples: Option<usize>,
    /// Maximum length of a continuation in tokens, also when the draft is measured
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Continuations")]
    tokens: usize,
    /// Sampling temperature of the continuations [default: 1]
    #[arg(long, value_name = "T", help_heading = "Continuations")]
    temperature: Option<f64>,
    /// Seed of the random number generators [default: 0]
    #[arg(long, value_name = "N", help_heading = "Continuations")]
    seed: Option<u64>,
    /// Number of training steps [default: 1000]
    #[arg(long, value_name = "N", conflicts_with = "time", help_heading = "Training")]
    steps: Option<u64>,
    /// Duration of the training, such as 20m: the number of steps is chosen by the time of a few
    /// steps
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Training")]
    time: Option<Duration>,
    /// Peak learning rate [default: 0.0005]
    #[arg(long, visible_alias = "lr", value_name = "RATE", help_heading = "Training")]
    learning_rate: Option<f64>,
    /// Continuations per step [default: 8]
    #[arg(long, value_name = "N", help_heading = "Training")]
    batch_size: Option<BatchSize>,
    /// Precision of activations and gradients [default: f32]
    #[arg(long, value_enum, help_heading = "Training")]
    precision: Option<Precision>,
    /// Held-out prompts to measure the draft on, in the format of `--prompts` [default: a tenth of the
    /// prompts, at most 16]
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    test: Option<PathBuf>,
    /// Numbers of draft tokens to measure
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 2, 4, 8], conflicts_with = "no_measure", help_heading = "Measurement")]
    draft_tokens: Vec<usize>,
    /// Continue an interrupted run: complete continuations are not sampled again
    #[arg(long, help_heading = "Output")]
    resume: bool,
    #[command(flatten, next_help_heading = "Output")]
    writing: Writing,
}

/// The kinds of drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum Method {
    /// Some layers of the model, as a model of its own
    #[default]
    Layers,
    /// An EAGLE-3 head, which reads hidden states of the model, in the format of `speculators`
    Eagle3,
    /// The model itself with int8 weights, without training
    Int8,
    /// The continuations themselves, whose n-grams are proposed, without training
    Ngrams,
}

/// Default number and sampling temperature of the continuations.
const SAMPLES: usize = 1000;
const TEMPERATURE: f64 = 1.0;

/// Default number of training steps, peak learning rate, and continuations per step.
const STEPS: u64 = 1000;
const LEARNING_RATE: f64 = 5e-4;
const BATCH_SIZE: BatchSize = BatchSize::Samples(8);
/// Of this many steps, one belongs to the warm-up.
const WARMUP_DIVISOR: u64 = 20;

/// An error about a key of the recipe, with the argument that sets it.
fn of_argument(error: Error) -> Error {
    match error {
        Error::Option { what, reason } if !what.starts_with("--") => {
            let key = what.strip_prefix("distill: ").unwrap_or(&what);
            let argument = if key == "max_steps" { "steps".to_owned() } else { key.replace('_', "-") };
            Error::option(format!("--{argument}"), reason)
        }
        other => other,
    }
}

/// The error of a run that is interrupted before its training.
fn interrupted(folder: &Path) -> Error {
    let kept = format!("no output was written; the complete continuations are saved in {}", redact_path(folder).display());
    Error::run("interrupted", kept, "run the same command again with `--resume`: it continues with them")
}

/// The origin of the continuations.
fn draft_note(args: &Args, prompts: &Prompts) -> String {
    format!(
        "{} of up to {}, sampled by the model at temperature {} from {}; {} held out",
        counted(args.samples().count, "continuation"),
        counted(args.tokens, "token"),
        args.samples().temperature,
        counted(prompts.train.len().min(args.samples().count), "prompt"),
        counted(prompts.test.len(), "prompt"),
    )
}

/// A note on prompts that are not used as stated, if there are any.
fn unused_note(prompts: usize, used: &str, samples: usize) -> Option<String> {
    (prompts > 0).then(|| format!("{} not {used}, because `--samples` is {samples}", counted(prompts, "prompt")))
}

/// The first of the options that are set.
fn first_set<T>(options: impl IntoIterator<Item = (bool, T)>) -> Option<T> {
    options.into_iter().find_map(|(is_set, option)| is_set.then_some(option))
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        self.check()?;
        let model = open_input(&self.model, Some(&self.output))?;
        global.models.require_no_sizes()?;
        let language = LanguageModel::new(model.clone())?;
        language.require_prompts()?;
        let student = match self.method {
            Method::Layers => Some(Student::Layers(draft::layers(&model, self.layers)?)),
            Method::Eagle3 => Some(Student::Eagle3(DraftHead::default())),
            Method::Int8 => return self.quantize(model, &language, global),
            Method::Ngrams => None,
        };
        self.check_vocabulary(&language)?;
        match student {
            Some(_) => self.check_output(&model, global.builder()?.measure(false))?,
            None => ngrams::check_output(&self.output, self.writing.force)?,
        }
        let prompts = Prompts::read((&model, &language), self.source()?, self.test.as_deref(), self.samples().count)?;
        let folder = ResumeFolder::open(&self.output, self.resume, self.writing.force)?;
        let prepared = global.work(|work| {
            let device = global.models.device.open()?;
            let memory = memory_limit(global.models.memory, &device);
            let continuations = Continuations { model: (&model, &language), prompts: &prompts.train, samples: &self.samples(), folder: folder.path() };
            let data = continuations.sample(&device, memory, work)?;
            let Some(mut student) = student else { return Ok((data, None)) };
            if let (Student::Eagle3(head), Some(count)) = (&mut student, self.vocabulary) {
                head.vocabulary = Some(draft::write_vocabulary(count, &data, &language, folder.path())?);
            }
            let Some(time) = self.time else { return Ok((data, Some(self.distillation(&student, self.steps.unwrap_or(STEPS))))) };
            let sets = DataSets { train: Some(data.clone()), ..DataSets::default() };
            let context = Context { work: work.quiet(), seed: self.samples().seed, data: &sets, device, memory, memory_tracker: None, checkpoints: None };
            let batch = self.batch().min(self.samples().count);
            let steps = Steps { model: &model, distill: &self.distillation(&student, STEPS), batch, time, folder: folder.path() }.count(&context, work)?;
            Ok((data, Some(self.distillation(&student, steps))))
        });
        let (data, distill) = prepared.map_err(|error| match error {
            Error::Cancelled if folder.has_work() => interrupted(folder.path()),
            error => error,
        })?;
        let Some(distill) = distill else { return self.finish_ngrams(&model, (&data, folder), &prompts, global) };
        // The run opens the folder again, with the continuations.
        drop(folder);
        let pipeline = self.pipeline(distill, &data, &prompts, global)?;
        let report = pipeline.run(model, &self.output)?;
        output::report(&report, &self.output, global)
    }

    /// Checks options that do not depend on the model.
    fn check(&self) -> Result<()> {
        if let Some(file) = crate::output::file_name(&self.output).filter(|_| self.method != Method::Ngrams) {
            return Err(Error::option("--output", format!("`{file}` is a file, but a draft is a folder with its tokenizer: add a file with `--export`")));
        }
        if self.draft_tokens.is_empty() || self.draft_tokens.contains(&0) {
            return Err(Error::option("--draft-tokens", "must be at least 1"));
        }
        if let Some((_, twice)) = self.draft_tokens.iter().enumerate().find(|(at, count)| self.draft_tokens[..*at].contains(count)) {
            return Err(Error::option("--draft-tokens", format!("contains {twice} twice")));
        }
        if self.time.is_some() && self.batch_size == Some(BatchSize::Auto) {
            return Err(Error::option("--time", "needs a number as `--batch-size`, or specify `--steps`"));
        }
        if RankConfig::from_environment()?.is_some_and(|rank| rank.size > 1) {
            return Err(Error::option("draft", "samples in one process: train with `compress run` and the recipe of a draft in several processes"));
        }
        match (self.method, self.layers, self.vocabulary) {
            (Method::Layers | Method::Int8 | Method::Ngrams, _, Some(_)) => {
                return Err(Error::option("--vocabulary", "needs `--method eagle3`: other drafts have the vocabulary of the model"));
            }
            (Method::Int8, ..) => return self.check_int8(),
            (Method::Ngrams, ..) => self.require_no_training()?,
            (Method::Eagle3, Some(_), _) => return Err(Error::option("--layers", "has no effect on an EAGLE-3 head, which has one layer: remove it")),
            _ => {}
        }
        self.samples().check().map_err(of_argument)?;
        self.distillation(&Student::Layers(vec![0]), self.steps.unwrap_or(STEPS)).check().map_err(of_argument)
    }

    /// Checks that the model has as many tokens as requested.
    fn check_vocabulary(&self, model: &LanguageModel) -> Result<()> {
        let total = model.tokens()?;
        match self.vocabulary {
            Some(count) if count == 0 || count > total => {
                Err(Error::option("--vocabulary", format!("is {count}, but must be from 1 to {total}, the size of the model's vocabulary")))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the output can be written, in all its formats, before the long part.
    fn check_output(&self, model: &Model, builder: Builder) -> Result<()> {
        let pipeline = self.formats(builder)?.build()?;
        pipeline.check_writable(model, &self.output)?;
        pipeline.plan_output(model, &self.output).map(drop)
    }

    fn source(&self) -> Result<PromptSource<'_>> {
        match (&self.prompts, &self.data) {
            (Some(prompts), _) => Ok(PromptSource::Records(prompts, self.chat)),
            (None, Some(data)) => Ok(PromptSource::Windows(data)),
            (None, None) => Err(Error::option("draft", "no prompts: specify a file with --prompts, or texts with --data")),
        }
    }

    /// Number of continuations per step, if it is specified.
    fn batch(&self) -> usize {
        if let BatchSize::Samples(samples) = self.batch_size.unwrap_or(BATCH_SIZE) { samples } else { 1 }
    }

    fn samples(&self) -> Samples {
        Samples {
            count: self.samples.unwrap_or(SAMPLES),
            tokens: self.tokens,
            temperature: self.temperature.unwrap_or(TEMPERATURE),
            seed: self.seed.unwrap_or_default(),
        }
    }

    fn distillation(&self, student: &Student, steps: u64) -> Distill {
        let schedule = Schedule { kind: Curve::Cosine, warmup_steps: steps / WARMUP_DIVISOR, ..Schedule::default() };
        let (learning_rate, batch_size) = (self.learning_rate.unwrap_or(LEARNING_RATE), self.batch_size.unwrap_or(BATCH_SIZE));
        let precision = self.precision.unwrap_or_default();
        let training = Training { learning_rate, schedule, max_steps: Some(steps), batch_size, precision, ..Training::default() };
        draft::distillation(student.clone(), training)
    }

    /// The first option of the training that is set.
    fn training_option(&self) -> Option<&'static str> {
        let options = [
            (self.layers.is_some(), "--layers"),
            (self.steps.is_some(), "--steps"),
            (self.time.is_some(), "--time"),
            (self.learning_rate.is_some(), "--learning-rate"),
            (self.batch_size.is_some(), "--batch-size"),
            (self.precision.is_some(), "--precision"),
        ];
        first_set(options)
    }

    /// A note on prompts that are not continued, if there are any.
    fn not_continued(&self, prompts: &Prompts) -> Option<String> {
        let samples = self.samples().count;
        unused_note(prompts.train.len().saturating_sub(samples), "continued", samples)
    }

    /// How the draft is measured.
    fn test(&self, prompts: &Prompts) -> DraftTest {
        let (draft_tokens, prompts_from) = (self.draft_tokens.clone(), prompts.tested_on.clone());
        DraftTest { prompts: prompts.test.clone(), prompts_from, tokens: self.tokens, draft_tokens }
    }

    /// The run that trains, writes and measures the draft.
    fn pipeline(&self, distill: Distill, data: &Data, prompts: &Prompts, global: &Global) -> Result<Pipeline> {
        let trained = format!("trained on {}", draft_note(self, prompts));
        // A draft differs strongly from the model: its quality is the number of accepted proposals.
        let vocabulary = if let Some(Student::Eagle3(head)) = &distill.student { head.vocabulary.clone() } else { None };
        let builder = global.builder()?.pass(distill).train(data.clone()).seed(self.samples().seed).resume(true).note(trained).measure(false);
        let builder = self.not_continued(prompts).into_iter().fold(builder, Builder::note);
        let builder = if self.writing.no_measure { builder } else { builder.draft_test(self.test(prompts)) };
        self.formats(data.arrays.iter().chain(&vocabulary).try_fold(builder, |builder, path| builder.enclose(path))?)?.build()
    }

    /// Adds the formats and records of the output. Safetensors are always written: they are the draft for
    /// vLLM and `generate --draft`.
    fn formats(&self, builder: Builder) -> Result<Builder> {
        let Writing { force, allow_nonfinite, runtimes, records, .. } = &self.writing;
        let mut exports = self.writing.exports();
        if !exports.iter().any(|export| export.format().name() == "safetensors") {
            exports.insert(0, Safetensors::default().into());
        }
        let builder = exports.into_iter().fold(builder, Builder::export);
        records.configure(builder.force(*force).allow_nonfinite(*allow_nonfinite).loads(runtimes.loads.iter().copied()))
    }
}
