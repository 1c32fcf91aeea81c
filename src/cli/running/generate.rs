//! `compress generate`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use serde_json::{Value, json};

use super::args::Global;
use super::output;
use crate::error::{Error, Result, counted};
use crate::generation::{
    Continuation, Generate, InputKind, LanguageModel, Message, Ngrams, Sampling, Speculation, Speed, StopReason, Vocabulary, first_difference,
};
use crate::model::Model;
use crate::pipeline::memory_limit;
use crate::report::format;
use crate::report::terminal::{table, wrapped};

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("proposals").args(["drafts", "lookup"]).multiple(true), after_help = "Examples:
  compress generate ./smollm2 --prompt 'The capital of France is'
  compress generate out/smollm2-w4a16 --against ./smollm2 --prompt 'Once upon a time' --prompt 'Water boils at'
  compress generate ./smollm2-instruct --chat --prompt 'Why is the sky blue?'
  compress generate ./smollm2 --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95 --seed 7
  compress generate ./smollm2 --draft out/draft --prompt 'Once upon a time'
  compress generate ./smollm2 --lookup --prompt 'Repeat after me: the rain in Spain stays mainly in the plain.'
  compress generate ./flan-t5-small --prompt 'translate English to German: The house is small.'
  compress generate ./whisper-tiny.en --audio speech.wav

Without --temperature, --top-k and --top-p, decoding is greedy, as with `do_sample=False` in transformers. Texts end at
the `eos_token_id` of generation_config.json or config.json.")]
pub(in crate::cli) struct Args {
    /// Model folder
    model: PathBuf,
    /// A text to continue, or the input text of an encoder-decoder model; can be repeated
    #[arg(long = "prompt", value_name = "TEXT", required_unless_present = "recordings", allow_hyphen_values = true)]
    prompts: Vec<String>,
    /// A WAV file with speech to transcribe; can be repeated
    #[arg(long = "audio", value_name = "FILE", conflicts_with_all = ["prompts", "chat"])]
    recordings: Vec<PathBuf>,
    /// Treat each prompt as a user message, apply the model's chat template, and generate the answer
    #[arg(long)]
    chat: bool,
    /// Maximum number of generated tokens [default: 64; for recordings, the number of positions of the model]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Compare with another model on the same prompts, usually the original
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    /// Source of proposals that the model verifies: a smaller model with the same tokens, or texts whose
    /// n-grams are proposed (continuations.npz of `compress draft`, or a .txt file); can be repeated to
    /// combine an EAGLE-3 head with texts
    #[arg(long = "draft", value_name = "DRAFT", help_heading = "Speculative decoding")]
    drafts: Vec<PathBuf>,
    /// Propose tokens that followed the last ones earlier in the text, without a draft or with an EAGLE-3
    /// head
    #[arg(long, help_heading = "Speculative decoding")]
    lookup: bool,
    /// Maximum number of tokens that are proposed per step [default: 4]
    #[arg(long, value_name = "N", requires = "proposals", help_heading = "Speculative decoding")]
    draft_tokens: Option<usize>,
    /// Sample tokens, with logits divided by this; values below 1 favour likely tokens
    #[arg(long, value_name = "T", help_heading = "Sampling")]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    top_k: Option<usize>,
    /// Sample from the smallest set of most likely tokens with a total probability of at least P
    #[arg(long, value_name = "P", value_parser = crate::ratio::parse, help_heading = "Sampling")]
    top_p: Option<f64>,
    /// Seed of the random number generator [default: 0]
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    seed: Option<u64>,
}

/// The results of a model.
struct ModelOutput {
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
        global.models.require_no_sizes()?;
        let open = |path: &PathBuf| {
            let model = LanguageModel::new(Model::open(path)?)?;
            let vocabulary = model.vocabulary()?;
            Ok::<_, Error>((path.clone(), model, vocabulary))
        };
        // Models with different vocabularies are rejected before any is loaded.
        let against = self.against.as_ref().map(open).transpose()?;
        let (path, model, vocabulary) = open(&self.model)?;
        if let Some((_, _, before)) = &against {
            before.require_same(&vocabulary)?;
        }
        let model = self.with_drafts(model, &vocabulary)?;
        let models: Vec<_> = against.into_iter().chain([(path, model, vocabulary)]).collect();
        // Invalid recordings are reported before a model is loaded.
        let recordings = models.iter().map(|(_, model, _)| self.read_recordings(model)).collect::<Result<Vec<_>>>()?;
        let device = global.models.device.open()?;
        let memory = memory_limit(global.models.memory, &device);
        let mut outputs = Vec::with_capacity(models.len());
        for ((path, model, vocabulary), recordings) in models.into_iter().zip(recordings) {
            let template = self.chat.then(|| model.chat_template()).transpose()?;
            let encode = |text: &String| match &template {
                Some(template) => vocabulary.encode_chat(&template.render(&[Message { role: "user".into(), content: text.clone() }])?),
                None => vocabulary.encode(text),
            };
            let prompts = self.prompts.iter().map(encode).collect::<Result<Vec<_>>>()?;
            let continuations = global.work(|work| {
                let continuations = match self.recordings.is_empty() {
                    true => model.generate(&prompts, &options, &device, memory, work),
                    false => model.transcribe(&recordings, &options, &device, memory, work),
                }?;
                self.drafts.iter().try_for_each(|draft| Model::check_remote(draft, work))?;
                Model::check_remote(&path, work).map(|()| continuations)
            })?;
            let text = |(index, found): (usize, &Continuation)| match prompts.get(index).filter(|_| model.input_kind() == InputKind::Prompt) {
                Some(prompt) => vocabulary.continuation(prompt, &found.tokens),
                None => vocabulary.decode(&found.tokens),
            };
            let texts = continuations.iter().enumerate().map(text).collect::<Result<_>>()?;
            outputs.push(ModelOutput { path, vocabulary, notes: model.notes().to_vec(), prompts, continuations, texts });
        }
        let Some(mut last) = outputs.pop() else { return Ok(()) };
        let before = outputs.pop();
        let differing = before.as_ref().map_or(0, |before| last.prompts.iter().zip(&before.prompts).filter(|(a, b)| a != b).count());
        if let Some(before) = before.as_ref().filter(|_| differing > 0) {
            last.notes.push(different_prompts_note(differing, &before.path));
        }
        if global.json { output::json(&self.data(&options, &last, before.as_ref())) } else { output::print(&self.text(&options, &last, before.as_ref())) }
    }

    fn options(&self) -> Result<Generate> {
        let samples = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some();
        if self.seed.is_some() && !samples {
            return Err(Error::option("--seed", "has no effect on greedy decoding: add --temperature, --top-k or --top-p"));
        }
        let sampling = Sampling { temperature: self.temperature.unwrap_or(1.0), top_k: self.top_k, top_p: self.top_p, seed: self.seed.unwrap_or(0) };
        let tokens = self.tokens.unwrap_or(if self.recordings.is_empty() { Generate::default().tokens } else { MAX_RECORDING_TOKENS });
        let options = Generate { tokens, sampling: samples.then_some(sampling) };
        options.check().map(|()| options)
    }

    /// A model that verifies the proposals of all drafts.
    fn with_drafts(&self, mut model: LanguageModel, vocabulary: &Vocabulary) -> Result<LanguageModel> {
        let (collections, networks): (Vec<_>, Vec<_>) = self.drafts.iter().partition(|path| Ngrams::is_collection(path));
        for (paths, kind) in [(&networks, "models"), (&collections, "collections of texts")] {
            if let [one, other, ..] = paths[..] {
                return Err(Error::option("--draft", format!("{} and {} are both {kind}: specify one", one.display(), other.display())));
            }
        }
        if let Some(collection) = collections.first().filter(|_| self.lookup) {
            return Err(Error::option("--lookup", format!("has no effect: n-grams of the text are always proposed with those of {}", collection.display())));
        }
        if let Some(path) = networks.first() {
            let draft = LanguageModel::new(Model::open(path)?)?;
            if draft.input_kind() != InputKind::HiddenStates && (self.lookup || !collections.is_empty()) {
                let other = collections.first().map_or("--lookup".to_owned(), |path| path.display().to_string());
                return Err(Error::option("--draft", format!("{} is a model, but only an EAGLE-3 head can be combined with {other}", path.display())));
            }
            model = self.with_draft(model, draft, vocabulary)?;
        }
        let ngrams = match collections.first() {
            Some(path) => Some(Ngrams::open(path, vocabulary)?),
            None => self.lookup.then(Ngrams::default),
        };
        match ngrams {
            Some(ngrams) => model.with_ngrams(Arc::new(ngrams), self.draft_tokens()),
            None => Ok(model),
        }
    }

    /// A model that verifies the proposals of a model or a head.
    fn with_draft(&self, model: LanguageModel, draft: LanguageModel, vocabulary: &Vocabulary) -> Result<LanguageModel> {
        // The tokenizer of a head is that of the model.
        if draft.input_kind() != InputKind::HiddenStates {
            vocabulary.require_draft(&draft.vocabulary()?)?;
        }
        let is_speech = [&model, &draft].iter().all(|model| model.input_kind() == InputKind::Recording);
        if is_speech && model.speech()? != draft.speech()? {
            return Err(Error::option("--draft", "computes spectrograms with other settings (preprocessor_config.json) than the model"));
        }
        model.with_draft(draft, self.draft_tokens())
    }

    /// Names of the sources of proposals.
    fn proposers(&self) -> Vec<String> {
        let lookup = self.lookup.then(|| "the text itself".to_owned());
        self.drafts.iter().map(|draft| draft.display().to_string()).chain(lookup).collect()
    }

    fn has_draft(&self) -> bool {
        self.lookup || !self.drafts.is_empty()
    }

    fn draft_tokens(&self) -> usize {
        self.draft_tokens.unwrap_or(DRAFT_TOKENS)
    }

    /// Reads the recordings in the format of a model's input.
    fn read_recordings(&self, model: &LanguageModel) -> Result<Vec<Tensor>> {
        if self.recordings.is_empty() {
            return Ok(Vec::new());
        }
        let speech = model.speech()?;
        self.recordings.iter().map(|path| speech.read(path)).collect()
    }

    /// Headings of the texts: prompts or file names.
    fn headings(&self) -> Vec<String> {
        self.prompts.iter().cloned().chain(self.recordings.iter().map(|path| path.display().to_string())).collect()
    }

    fn data(&self, options: &Generate, last: &ModelOutput, before: Option<&ModelOutput>) -> Value {
        let continuation = |output: &ModelOutput, index: usize| {
            let found = &output.continuations[index];
            json!({ "text": output.texts[index], "tokens": found.tokens, "end": found.end })
        };
        let prompt = |(index, text): (usize, &String)| {
            json!({
                "prompt": self.prompts.get(index),
                "prompt_tokens": last.prompts.get(index),
                "audio": self.recordings.get(index).map(|_| text),
                "continuation": continuation(last, index),
                "against": before.map(|before| continuation(before, index)),
                "first_difference": before.and_then(|before| last.first_difference(before, index)),
            })
        };
        json!({
            "model": last.path.to_string_lossy(),
            "against": before.map(|before| before.path.to_string_lossy()),
            "draft": self.has_draft().then(|| self.draft_data(&last.speculation())),
            "options": options,
            "chat": self.chat,
            "prompts": self.headings().iter().enumerate().map(prompt).collect::<Vec<_>>(),
            "speed": last.speed(),
            "speed_against": before.map(ModelOutput::speed),
            "notes": last.notes,
            "notes_against": before.map(|before| &before.notes),
        })
    }

    fn draft_data(&self, speculation: &Speculation) -> Value {
        json!({
            "sources": self.proposers(),
            "tokens": self.draft_tokens(),
            "steps": speculation.steps,
            "proposed": speculation.proposed.iter().sum::<usize>(),
            "accepted": speculation.accepted.iter().sum::<usize>(),
            "tokens_per_step": speculation.tokens_per_step(),
            "acceptance_rate": speculation.acceptance_rate(),
            "acceptance_by_position": speculation.acceptance_by_position(),
        })
    }

    fn draft_text(&self, speculation: &Speculation) -> String {
        let draft = self.proposers().join(" and ");
        let (Some(tokens), Some(rate)) = (speculation.tokens_per_step(), speculation.acceptance_rate()) else {
            return format!(" {draft}: proposed no tokens\n");
        };
        let positions: Vec<String> = speculation.acceptance_by_position().into_iter().map(format::rate).collect();
        let rate = format::rate(rate);
        format!(" {draft}: {tokens:.2} tokens per step; {rate} of the proposals accepted, by position {}\n", positions.join(", "))
    }

    fn text(&self, options: &Generate, last: &ModelOutput, before: Option<&ModelOutput>) -> String {
        let method = match options.sampling {
            Some(Sampling { seed, .. }) => format!("sampled with seed {seed}"),
            None => "greedy decoding".to_owned(),
        };
        let draft = if self.has_draft() { format!(", proposals of {}", self.proposers().join(" and ")) } else { String::new() };
        let mut out = format!("{}: {method}, at most {}{draft}\n", last.path.display(), counted(options.tokens, "token"));
        let columns = super::columns().unwrap_or(DEFAULT_COLUMNS);
        for (index, prompt) in self.headings().iter().enumerate() {
            out += &format!("\n> {prompt}\n");
            let Some(before) = before else {
                let found = &last.continuations[index];
                out += &format!("{}\n", wrapped(&[last.head(index).as_str()], [[last.texts[index].clone()]], columns));
                if found.end == StopReason::Positions {
                    out += " the text ends at the last position of the model\n";
                }
                continue;
            };
            let heads = [before, last].map(|output| output.head(index));
            out += &format!("{}\n", wrapped(&heads.each_ref().map(String::as_str), [[before.texts[index].clone(), last.texts[index].clone()]], columns));
            out += &match last.first_difference(before, index) {
                None => format!(" the continuations of {} are the same\n", counted(last.continuations[index].tokens.len(), "token")),
                Some(at) => format!(" first difference at token {}: {} and {}\n", at + 1, before.token(index, at), last.token(index, at)),
            };
        }
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
        let row = |output: &ModelOutput| vec![output.path.display().to_string(), number(output.speed().prefill), number(output.speed().decode)];
        out += &format!("\n{}\n", table(&["tokens per second", "prompt", "continuation"], before.into_iter().chain([last]).map(row)));
        if self.has_draft() {
            out += &self.draft_text(&last.speculation());
        }
        for output in before.into_iter().chain([last]) {
            for note in &output.notes {
                out += &format!(" note: {}: {note}\n", output.path.display());
            }
        }
        out
    }
}

/// Default token limit for recordings, which exceeds the positions of all models.
const MAX_RECORDING_TOKENS: usize = 1 << 12;
/// Default maximum number of proposals per step.
const DRAFT_TOKENS: usize = 4;
/// Number of columns if stdout is not a terminal.
const DEFAULT_COLUMNS: u16 = 100;

/// A note that models are compared on different inputs.
fn different_prompts_note(count: usize, before: &Path) -> String {
    let what = if count == 1 { "1 prompt has" } else { &format!("{count} prompts have") };
    format!(
        "{what} other tokens than in {}, so that the continuations are not comparable: the tokenizers or chat templates of the models differ",
        before.display()
    )
}

impl ModelOutput {
    fn speed(&self) -> Speed {
        Speed::new(&self.prompts, &self.continuations)
    }

    fn speculation(&self) -> Speculation {
        Speculation::of_all(&self.continuations)
    }

    fn first_difference(&self, before: &ModelOutput, index: usize) -> Option<usize> {
        first_difference(&before.continuations[index].tokens, &self.continuations[index].tokens)
    }

    fn head(&self, index: usize) -> String {
        let name = self.path.file_name().map_or(Path::new(&self.path), Path::new);
        let count = self.continuations[index].tokens.len();
        format!("{}, {}", name.display(), counted(count, "token"))
    }

    /// A token of a continuation as text; `the end` after its last token.
    fn token(&self, index: usize, position: usize) -> String {
        self.continuations[index].tokens.get(position).map_or("the end".to_owned(), |token| format!("`{}`", self.vocabulary.token(*token)))
    }
}
