//! `compress generate`

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde_json::{Value, json};

use super::args::Global;
use super::output;
use crate::error::{Error, Result};
use crate::generation::{Continuation, End, Generate, LanguageModel, Message, Reads, Sampling, Speed, Vocabulary, first_difference};
use crate::model::Model;
use crate::pipeline::memory_limit;
use crate::report::terminal::{table, wrapped};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress generate ./smollm2 --prompt 'The capital of France is'
  compress generate out/smollm2-w4a16 --against ./smollm2 --prompt 'Once upon a time' --prompt 'Water boils at'
  compress generate ./smollm2-instruct --chat --prompt 'Why is the sky blue?'
  compress generate ./smollm2 --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95 --seed 7
  compress generate ./flan-t5-small --prompt 'translate English to German: The house is small.'
  compress generate ./whisper-tiny.en --audio speech.wav

Without --temperature, --top-k and --top-p, the likeliest token comes each time, as with `do_sample=False` in transformers. Texts end at
the `eos_token_id` of generation_config.json or config.json.")]
pub(in crate::cli) struct Args {
    /// Model folder
    model: PathBuf,
    /// A text to continue, or to make another one of with an encoder and a decoder; may be given several times
    #[arg(long = "prompt", value_name = "TEXT", required_unless_present = "recordings", allow_hyphen_values = true)]
    prompts: Vec<String>,
    /// A recording of speech to write down, a WAV file; may be given several times
    #[arg(long = "audio", value_name = "FILE", conflicts_with_all = ["prompts", "chat"])]
    recordings: Vec<PathBuf>,
    /// Take each prompt as what a user says in a chat, by the model's own template, and continue with the answer
    #[arg(long)]
    chat: bool,
    /// Tokens of a continuation at most [default: 64; of recordings, as many as the model has positions]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Show what another model makes of the same prompts, usually the original
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    /// Draw tokens: divide logits by this first, below 1 likely tokens become likelier
    #[arg(long, value_name = "T", help_heading = "Sampling")]
    temperature: Option<f64>,
    /// Draw tokens, of so many of the likeliest
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    top_k: Option<usize>,
    /// Draw tokens, of as few of the likeliest as have this probability together
    #[arg(long, value_name = "P", help_heading = "Sampling")]
    top_p: Option<f64>,
    /// What draws begin with [default: 0]
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    seed: Option<u64>,
}

/// A model, and what it has made of the prompts.
struct Told {
    path: PathBuf,
    vocabulary: Vocabulary,
    notes: Vec<String>,
    prompts: Vec<Vec<i64>>,
    continuations: Vec<Continuation>,
    texts: Vec<String>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let options = self.options()?;
        let open = |path: &PathBuf| {
            let model = LanguageModel::of(Model::open(path)?)?;
            let vocabulary = model.vocabulary()?;
            Ok::<_, Error>((path.clone(), model, vocabulary))
        };
        // What cannot be compared is said before anything is loaded.
        let models = self.against.iter().chain([&self.model]).map(open).collect::<Result<Vec<_>>>()?;
        if let [(_, _, before), (_, _, after)] = models.as_slice() {
            before.require_same(after)?;
        }
        // What no model can read is said before it is loaded too.
        let heard = models.iter().map(|(_, model, _)| self.heard(model)).collect::<Result<Vec<_>>>()?;
        let device = global.models.device.open()?;
        let memory = memory_limit(global.models.memory, &device);
        let mut told = Vec::with_capacity(models.len());
        for ((path, model, vocabulary), heard) in models.into_iter().zip(heard) {
            let template = self.chat.then(|| model.chat_template()).transpose()?;
            let encode = |text: &String| match &template {
                Some(template) => vocabulary.encode_chat(&template.render(&[Message { role: "user".into(), content: text.clone() }])?),
                None => vocabulary.encode(text),
            };
            let prompts = self.prompts.iter().map(encode).collect::<Result<Vec<_>>>()?;
            let continuations = global.work(|work| {
                let continuations = match self.recordings.is_empty() {
                    true => model.generate(&prompts, &options, &device, memory, work),
                    false => model.transcribe(&heard, &options, &device, memory, work),
                }?;
                Model::check_remote(&path, work).map(|()| continuations)
            })?;
            let text = |(index, found): (usize, &Continuation)| match prompts.get(index).filter(|_| model.reads() == Reads::Beginnings) {
                Some(prompt) => vocabulary.continuation(prompt, &found.tokens),
                None => vocabulary.decode(&found.tokens),
            };
            let texts = continuations.iter().enumerate().map(text).collect::<Result<_>>()?;
            told.push(Told { path, vocabulary, notes: model.notes().to_vec(), prompts, continuations, texts });
        }
        let Some(last) = told.pop() else { return Ok(()) };
        let before = told.pop();
        if global.json { output::json(&self.data(&options, &last, before.as_ref())) } else { output::print(&self.text(&options, &last, before.as_ref())) }
    }

    fn options(&self) -> Result<Generate> {
        let draws = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some();
        if self.seed.is_some() && !draws {
            return Err(Error::option("--seed", "is for draws, and the likeliest token comes each time: add --temperature, --top-k or --top-p"));
        }
        let sampling = Sampling { temperature: self.temperature.unwrap_or(1.0), top_k: self.top_k, top_p: self.top_p, seed: self.seed.unwrap_or(0) };
        let tokens = self.tokens.unwrap_or(if self.recordings.is_empty() { Generate::default().tokens } else { MOST });
        let options = Generate { tokens, sampling: draws.then_some(sampling) };
        options.check().map(|()| options)
    }

    /// The recordings as a model reads them.
    fn heard(&self, model: &LanguageModel) -> Result<Vec<Tensor>> {
        if self.recordings.is_empty() {
            return Ok(Vec::new());
        }
        let speech = model.speech()?;
        self.recordings.iter().map(|path| speech.read(path)).collect()
    }

    /// What is written over each text.
    fn heads(&self) -> Vec<String> {
        self.prompts.iter().cloned().chain(self.recordings.iter().map(|path| path.display().to_string())).collect()
    }

    fn data(&self, options: &Generate, last: &Told, before: Option<&Told>) -> Value {
        let of = |told: &Told, index: usize| {
            let found = &told.continuations[index];
            json!({ "text": told.texts[index], "tokens": found.tokens, "end": found.end })
        };
        let prompt = |(index, text): (usize, &String)| {
            json!({
                "prompt": self.prompts.get(index),
                "prompt_tokens": last.prompts.get(index),
                "audio": self.recordings.get(index).map(|_| text),
                "continuation": of(last, index),
                "against": before.map(|before| of(before, index)),
                "first_difference": before.and_then(|before| last.first_difference(before, index)),
            })
        };
        json!({
            "model": last.path.to_string_lossy(),
            "against": before.map(|before| before.path.to_string_lossy()),
            "options": options,
            "chat": self.chat,
            "prompts": self.heads().iter().enumerate().map(prompt).collect::<Vec<_>>(),
            "speed": last.speed(),
            "speed_against": before.map(Told::speed),
            "notes": last.notes,
            "notes_against": before.map(|before| &before.notes),
        })
    }

    fn text(&self, options: &Generate, last: &Told, before: Option<&Told>) -> String {
        let way = match options.sampling {
            Some(Sampling { seed, .. }) => format!("drawn with seed {seed}"),
            None => "the likeliest token each time".to_owned(),
        };
        let mut out = format!("{}: {way}, {} tokens at most\n", last.path.display(), options.tokens);
        let columns = super::columns().unwrap_or(COLUMNS);
        for (index, prompt) in self.heads().iter().enumerate() {
            out += &format!("\n> {prompt}\n");
            let Some(before) = before else {
                let found = &last.continuations[index];
                out += &format!("{}\n", wrapped(&[last.head(index).as_str()], [[last.texts[index].clone()]], columns));
                if found.end == End::Positions {
                    out += " the model has no more positions\n";
                }
                continue;
            };
            let heads = [before, last].map(|told| told.head(index));
            out += &format!("{}\n", wrapped(&heads.each_ref().map(String::as_str), [[before.texts[index].clone(), last.texts[index].clone()]], columns));
            out += &match last.first_difference(before, index) {
                None => format!(" all {} tokens are the same\n", last.continuations[index].tokens.len()),
                Some(at) => format!(" they differ from token {} on: {} and {}\n", at + 1, before.token(index, at), last.token(index, at)),
            };
        }
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
        let row = |told: &Told| vec![told.path.display().to_string(), number(told.speed().prefill), number(told.speed().decode)];
        out += &format!("\n{}\n", table(&["tokens per second", "prompt", "continuation"], before.into_iter().chain([last]).map(row)));
        for told in before.into_iter().chain([last]) {
            for note in &told.notes {
                out += &format!(" note: {}: {note}\n", told.path.display());
            }
        }
        out
    }
}

/// Tokens of a recording at most, where nothing is said: models have fewer positions.
const MOST: usize = 1 << 12;
/// Columns where stdout is no terminal.
const COLUMNS: u16 = 100;

impl Told {
    fn speed(&self) -> Speed {
        Speed::of(&self.prompts, &self.continuations)
    }

    fn first_difference(&self, before: &Told, index: usize) -> Option<usize> {
        first_difference(&before.continuations[index].tokens, &self.continuations[index].tokens)
    }

    fn head(&self, index: usize) -> String {
        let name = self.path.file_name().map_or(Path::new(&self.path), Path::new);
        let count = self.continuations[index].tokens.len();
        format!("{}, {count} tokens", name.display())
    }

    /// A token of a continuation as it stands in the vocabulary, or that there is none.
    fn token(&self, index: usize, at: usize) -> String {
        self.continuations[index].tokens.get(at).map_or("the end".to_owned(), |token| format!("`{}`", self.vocabulary.token(*token)))
    }
}
