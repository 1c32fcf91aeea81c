//! Text generation, token by token: a sanity check of language models before and after compression.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod batches;
mod decoder;
mod decoder_prompt;
mod draft;
mod draft_head;
mod ngrams;
mod options;
mod proposals;
mod run;
mod sampling;
mod settings;
mod vocabulary;

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use serde::Serialize;

pub use draft::Speculation;
pub use ngrams::Ngrams;
pub use options::{Generate, Sampling};
pub use vocabulary::Vocabulary;

use crate::analysis::usual_sizes;
use crate::arch::draft_head::HIDDEN_STATES;
use crate::arch::{self, ModelKind, Positions};
pub use crate::data::{ChatTemplate, Message};
use crate::data::{DECODER_INPUT_IDS, Speech, max_positions};
use crate::error::{Error, Result};
use crate::exec::{Inputs, MemoryNeed, Residence, Schedule, SequenceCache, on_pool_thread};
use crate::ir::decoder::LOGITS;
use crate::ir::ops::{Rotary, RotaryScaling};
use crate::ir::{Dim, Graph, Node, Op};
use crate::model::Model;
use crate::work::{Event, MemoryLimit, ProgressUnit, Work};
use decoder::{CHUNK_TOKENS, Decoder, FEATURES, token_inputs};
use decoder_prompt::DecoderPrompt;
use draft::Drafter;
use draft_head::Head;
use run::{Prompt, Run};
use sampling::Sampler;
use settings::Settings;

/// Input that a model generates text from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// A prompt that is continued (decoder-only models).
    Prompt,
    /// A source text (encoder-decoder models).
    SourceText,
    /// A recording of speech.
    Recording,
    /// Hidden states of another model: a head for speculative decoding, which only proposes tokens.
    HiddenStates,
}

impl InputKind {
    fn plural(self) -> &'static str {
        match self {
            InputKind::Prompt => "prompts to continue",
            InputKind::SourceText => "source texts",
            InputKind::Recording => "recordings",
            InputKind::HiddenStates => "hidden states of the model that it is a head of",
        }
    }
}

/// Reason for the end of a continuation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopReason {
    /// An end-of-sequence token, which is the last token.
    Eos,
    /// The requested number of tokens.
    Tokens,
    /// The model's maximum number of positions.
    Positions,
}

/// Text generated from a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Continuation {
    /// Generated tokens, without the prompt.
    pub tokens: Vec<i64>,
    /// Reason for the end.
    pub end: StopReason,
    /// Seconds until the first token, without loading of weights.
    pub prefill_seconds: f64,
    /// Seconds for all further tokens.
    pub decode_seconds: f64,
    /// Accepted proposals; `None` without a draft.
    pub speculation: Option<Speculation>,
}

/// Tokens per second over several prompts; `None` if nothing was computed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// Prompt tokens per second, until the first generated token.
    pub prefill: Option<f64>,
    /// Generated tokens per second, after the first.
    pub decode: Option<f64>,
}

impl Speed {
    /// Computes the speed of continuations of prompts.
    pub fn new(prompts: &[Vec<i64>], continuations: &[Continuation]) -> Speed {
        let rate = |tokens: usize, seconds: f64| (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds);
        let later = continuations.iter().map(|found| found.tokens.len().saturating_sub(1));
        Speed {
            prefill: rate(prompts.iter().map(Vec::len).sum(), continuations.iter().map(|found| found.prefill_seconds).sum()),
            decode: rate(later.sum(), continuations.iter().map(|found| found.decode_seconds).sum()),
        }
    }
}

/// The first position at which two continuations differ; `None` if they are equal.
pub fn first_difference(one: &[i64], other: &[i64]) -> Option<usize> {
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    (same < one.len() || same < other.len()).then_some(same)
}

/// A model that generates text from prompts, source texts or recordings.
pub struct LanguageModel {
    model: Model,
    graph: Graph,
    input_kind: InputKind,
    /// First decoder tokens of encoder-decoder models.
    decoder_prompt: Option<DecoderPrompt>,
    /// Tokens that are never generated, and tokens that are not generated first.
    suppressed: [BTreeSet<i64>; 2],
    /// End-of-sequence tokens.
    ends: BTreeSet<i64>,
    /// Maximum number of tokens of a text.
    positions: Option<usize>,
    notes: Vec<String>,
    draft: Option<Draft>,
}

/// The source of proposed tokens.
struct Draft {
    source: Source,
    /// Maximum number of proposals per step.
    tokens: usize,
}

/// Kinds of drafts.
enum Source {
    Model(Box<LanguageModel>),
    Head(Box<Head>),
    Ngrams(Arc<Ngrams>),
}

impl Draft {
    /// The network, if there is one.
    fn model(&self) -> Option<&LanguageModel> {
        match &self.source {
            Source::Model(model) => Some(model),
            Source::Head(head) => Some(&head.network),
            Source::Ngrams(_) => None,
        }
    }

    /// The texts, if there are any.
    fn ngrams(&self) -> Option<&Arc<Ngrams>> {
        match &self.source {
            Source::Model(_) => None,
            Source::Head(head) => head.ngrams.as_ref(),
            Source::Ngrams(ngrams) => Some(ngrams),
        }
    }
}

impl LanguageModel {
    /// Prepares a model for generation.
    pub fn new(model: Model) -> Result<LanguageModel> {
        require_folder(&model)?;
        let graph = model.graph()?;
        LanguageModel::with_graph(model, graph)
    }

    /// As [`new`](LanguageModel::new), with another graph than that of the model.
    pub fn with_graph(model: Model, graph: Graph) -> Result<LanguageModel> {
        require_folder(&model)?;
        let has_input = |name: &str| graph.inputs().any(|(_, value)| value.name == name);
        let input_kind = match (has_input(DECODER_INPUT_IDS), has_input(FEATURES)) {
            (true, true) => InputKind::Recording,
            (true, false) => InputKind::SourceText,
            (false, _) if has_input(HIDDEN_STATES) => InputKind::HiddenStates,
            (false, _) => InputKind::Prompt,
        };
        let is_generative =
            |kind: ModelKind| matches!(kind, ModelKind::Decoder | ModelKind::DraftHead) || kind == ModelKind::EncoderDecoder && input_kind != InputKind::Prompt;
        if let Some(family) = arch::family(model.config.model_type()).filter(|family| !is_generative(family.kind) && model.changed_graph.is_none()) {
            return Err(Error::run(
                "this model",
                format!("models of type `{}` are not decoders and cannot generate text", family.model_type),
                "choose a language model with a decoder, like Llama or T5; `compress eval` measures other models",
            ));
        }
        SequenceCache::new(&graph)?;
        let supported: &[&str] = match input_kind {
            InputKind::Prompt => &["input_ids", "attention_mask"],
            InputKind::SourceText => &["input_ids", "attention_mask", DECODER_INPUT_IDS],
            InputKind::Recording => &[FEATURES, DECODER_INPUT_IDS],
            InputKind::HiddenStates => &["input_ids", "attention_mask", HIDDEN_STATES],
        };
        if let Some((_, value)) = graph.inputs().find(|(_, value)| !supported.contains(&value.name.as_str())) {
            return Err(Error::graph(format!("input `{}`", value.name), "is not supported in text generation"));
        }
        match graph.outputs().iter().find(|(name, _)| name == LOGITS) {
            Some((_, id)) if graph.value(*id).ty.shape.len() == 3 => {}
            _ => return Err(Error::graph("this model", "has no output `logits` per token: without a language-model head it cannot generate text")),
        }
        let settings = Settings::open(&model)?;
        let ends = settings.ends()?;
        let decoder_prompt = match input_kind {
            InputKind::Prompt | InputKind::HiddenStates => None,
            InputKind::SourceText => Some(DecoderPrompt::for_text(&settings)?),
            InputKind::Recording => Some(DecoderPrompt::for_speech(&settings)?),
        };
        let positions = if input_kind == InputKind::Prompt { stated_positions(&model) } else { max_positions(&graph) };
        // Dynamic and YaRN scaling of rotary embeddings exist to exceed the stated length.
        let is_extensible = |node: &Node| matches!(&node.op, Op::Rotary(Rotary { scaling: RotaryScaling::Dynamic { .. } | RotaryScaling::Yarn { .. }, .. }));
        let positions = positions.filter(|_| !graph.nodes().iter().any(is_extensible));
        let suppressed = [settings.tokens("suppress_tokens")?, settings.tokens("begin_suppress_tokens")?];
        let mut notes = settings.unsupported_notes();
        if ends.is_empty() {
            notes.push("neither generation_config.json nor config.json has an `eos_token_id`: generation ends only at the number of tokens".into());
        }
        Ok(LanguageModel { model, graph, input_kind, decoder_prompt, suppressed, ends, positions, notes, draft: None })
    }

    /// The same model, which never generates tokens from this one on.
    #[must_use]
    pub fn without_tokens_from(mut self, first: usize) -> LanguageModel {
        let count = Some(self.logit_count()).filter(|count| *count < usize::MAX).unwrap_or(0);
        let [always, _] = &mut self.suppressed;
        always.extend((first..count).filter_map(|token| i64::try_from(token).ok()));
        self
    }

    /// Input that the model generates text from.
    pub fn input_kind(&self) -> InputKind {
        self.input_kind
    }

    /// Notes on unsupported or missing settings of the model.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// End-of-sequence tokens.
    pub fn ends(&self) -> impl Iterator<Item = i64> {
        self.ends.iter().copied()
    }

    /// Size of the vocabulary, with padding.
    pub fn tokens(&self) -> Result<usize> {
        Some(self.logit_count()).filter(|count| *count < usize::MAX).ok_or_else(|| Error::graph(LOGITS, "have no fixed size"))
    }

    /// Maximum number of tokens of a text; `None` if it is unlimited or unknown.
    pub fn positions(&self) -> Option<usize> {
        self.positions
    }

    /// Opens the model's tokenizer.
    pub fn vocabulary(&self) -> Result<Vocabulary> {
        Vocabulary::open(&self.model, &self.graph)
    }

    /// Opens the model's chat template.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        ChatTemplate::open(&self.model.path, &self.model.auxiliary.synthesized)
    }

    /// Opens the model's preprocessing of recordings.
    pub fn speech(&self) -> Result<Speech> {
        self.require_recordings()?;
        Speech::open(&self.model.path, &self.model.auxiliary.synthesized)
    }

    /// Continues prompts one by one; encoder-decoder models generate a text from each. Fails if a prompt is
    /// empty or longer than the model's positions, or logits are not finite.
    pub fn generate(&self, prompts: &[Vec<i64>], options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        if self.input_kind == InputKind::HiddenStates {
            let hint = "pass the model with `generate MODEL --draft HEAD`";
            return Err(Error::run("this head", "only proposes tokens for another model", hint));
        }
        prompts.iter().enumerate().try_for_each(|(index, prompt)| self.check(index, prompt))?;
        let to_prompt = |prompt: &Vec<i64>| match self.input_kind {
            InputKind::Prompt => Ok(Prompt { tokens: prompt.clone(), inputs: Inputs::new() }),
            _ => Ok(Prompt { tokens: Vec::new(), inputs: token_inputs("input_ids", &[prompt.as_slice()])? }),
        };
        self.generate_all(prompts.iter().map(to_prompt).collect::<Result<_>>()?, options, device, memory, work)
    }

    /// Transcribes recordings one by one, given as spectrograms of [`speech`](LanguageModel::speech).
    pub fn transcribe(&self, recordings: &[Tensor], options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        self.require_recordings()?;
        let to_prompt = |features: &Tensor| Prompt { tokens: Vec::new(), inputs: [(FEATURES.to_owned(), features.clone())].into() };
        self.generate_all(recordings.iter().map(to_prompt).collect(), options, device, memory, work)
    }

    /// Checks that the model continues prompts.
    pub fn require_prompts(&self) -> Result<()> {
        let (name, kind) = (self.model.config.model_type(), self.input_kind);
        let refused = || Error::option(format!("a model of type `{name}`"), format!("takes {}, not {}", kind.plural(), InputKind::Prompt.plural()));
        if kind == InputKind::Prompt { Ok(()) } else { Err(refused()) }
    }

    fn require_recordings(&self) -> Result<()> {
        match self.input_kind {
            InputKind::Recording => Ok(()),
            _ => Err(Error::option("recordings", format!("models of type `{}` take texts, not recordings", self.model.config.model_type()))),
        }
    }

    fn generate_all(&self, prompts: Vec<Prompt>, options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        options.check()?;
        self.require_memory(&prompts, options, memory, device)?;
        let mut decoder = Decoder::load(self, 0, device, work)?;
        let mut draft = self.draft.as_ref().map(|draft| Drafter::load(draft, device, work)).transpose()?;
        let total = (prompts.len() as u64).saturating_mul(options.tokens as u64);
        work.progress.on(Event::Begin { stage: "Generating", total, done: 0, unit: ProgressUnit::Steps });
        let found: Result<Vec<Continuation>> = on_pool_thread(device, || {
            let generate = |(index, prompt): (usize, Prompt)| {
                draft.iter_mut().for_each(|draft| draft.start(prompt.inputs.clone()));
                decoder.start(prompt.inputs);
                let run = Run { decoder: &mut decoder, draft: draft.as_mut(), work };
                run.continuation(prompt.tokens, options, Sampler::new(options.sampling, index))
            };
            prompts.into_iter().enumerate().map(generate).collect()
        });
        work.progress.on(Event::End);
        found
    }

    fn check(&self, index: usize, prompt: &[i64]) -> Result<()> {
        let number = index.saturating_add(1);
        if self.input_kind == InputKind::Recording {
            return Err(Error::option(format!("prompt {number}"), "is a text, but the model takes recordings: specify one with --audio"));
        }
        if prompt.is_empty() {
            return Err(Error::option(format!("prompt {number}"), "has no tokens"));
        }
        match self.positions {
            Some(positions) if self.input_kind == InputKind::Prompt && prompt.len() > positions => Err(Error::option(
                format!("prompt {number}"),
                format!("has {} tokens, but the model supports at most {positions} (`max_position_embeddings`)", prompt.len()),
            )),
            _ => Ok(()),
        }
    }

    /// Checks the memory: every token reads all parameters, so that they must be resident.
    fn require_memory(&self, prompts: &[Prompt], options: &Generate, memory: MemoryLimit, device: &Device) -> Result<()> {
        let draft_tokens = self.draft.as_ref().map_or(0, |draft| draft.tokens);
        let mut need = self.memory_need(prompts, options, [draft_tokens.saturating_add(1), 0], device)?;
        if let Some(draft) = self.draft.as_ref().and_then(Draft::model) {
            need.parameters = need.parameters.saturating_add(draft.memory_need(prompts, options, [1, draft_tokens], device)?.total());
        }
        if let Some(ngrams) = self.draft.as_ref().and_then(Draft::ngrams) {
            need.parameters = need.parameters.saturating_add(ngrams.bytes());
        }
        match Schedule::choose(memory, &[(self.model.config.model_type(), need.clone())])? {
            Schedule::Resident => Ok(()),
            Schedule::Blockwise { .. } => Err(Error::run(
                "generation",
                format!("requires {} bytes of memory, but the limit is {}", need.total(), memory.bytes.unwrap_or(0)),
                "every token reads all parameters, which must fit into memory: use a machine with more memory, or a smaller model",
            )),
        }
    }

    /// Memory for the longest of the prompts, with at least `step` tokens per forward pass and a KV cache
    /// from which `removable` tokens can be removed.
    fn memory_need(&self, prompts: &[Prompt], options: &Generate, [step, removable]: [usize; 2], device: &Device) -> Result<MemoryNeed> {
        let size = |name: &str, length: &dyn Fn(&Prompt) -> usize| {
            let input = self.graph.inputs().find(|(_, value)| value.name == name).and_then(|(_, value)| value.ty.shape.get(1));
            let longest = prompts.iter().map(length).max().unwrap_or(1).max(1);
            (longest, if let Some(Dim::Named(size)) = input { Some(size.clone()) } else { None })
        };
        let added = self.decoder_prompt.as_ref().map_or(0, |prompt| prompt.tokens(Some(0)).len());
        let is_decoder = matches!(self.input_kind, InputKind::Prompt | InputKind::HiddenStates);
        let (decoder_input, encoder_input) = if is_decoder { ("input_ids", None) } else { (DECODER_INPUT_IDS, Some("input_ids")) };
        let (first, name) = size(decoder_input, &|prompt| prompt.tokens.len().saturating_add(added));
        let total = first.saturating_add(options.tokens).min(self.positions.unwrap_or(usize::MAX).max(first));
        let chunk = if SequenceCache::is_stable(&self.graph, 1, total) { first.min(CHUNK_TOKENS).max(step) } else { total };
        let mut sizes = usual_sizes(&self.graph);
        sizes.extend(name.map(|name| (name, chunk)));
        if let Some(input) = encoder_input {
            let (longest, name) = size(input, &|prompt| prompt.inputs.get(input).and_then(|tokens| tokens.dims().get(1).copied()).unwrap_or(1));
            sizes.extend(name.map(|name| (name, longest)));
        }
        let mut need = MemoryNeed::estimate(&self.graph, &self.model.weights, DType::F32, Residence::most_compact(device, DType::F32), &sizes);
        let cache = SequenceCache::with_removable(&self.graph, removable)?;
        need.activations = need.activations.saturating_add(cache.bytes_of(&self.graph, total, &sizes));
        Ok(need)
    }
}

/// Rejects .onnx files.
fn require_folder(model: &Model) -> Result<()> {
    match model.onnx.is_some() {
        false => Ok(()),
        true => Err(Error::Unsupported {
            what: format!("{}: generation with an .onnx file", model.path.display()),
            hint: "use the model folder that it was exported from".into(),
        }),
    }
}

/// Number of positions that `config.json` specifies.
pub fn stated_positions(model: &Model) -> Option<usize> {
    let positions = arch::family(model.config.model_type()).map_or(Positions::DEFAULT, |family| family.positions);
    let values = arch::text_values(model.config.values());
    let stated = positions.keys.iter().find_map(|key| values.get(*key)?.as_u64());
    stated.map(|count| usize::try_from(count).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_may_be_the_end_of_one() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 5, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[], &[]), None);
    }
}
