//! Continuing texts, token by token: a sanity check of language models, before and after they are made smaller.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod opening;
mod options;
mod run;
mod sampling;
mod settings;
mod vocabulary;

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use serde::Serialize;

pub use options::{Generate, Sampling};
pub use vocabulary::Vocabulary;

use crate::analysis::usual_sizes;
use crate::arch::{self, ModelKind};
pub use crate::data::{ChatTemplate, Message};
use crate::data::{DECODED, Speech, longest};
use crate::error::{Error, Result};
use crate::exec::{Executor, Inputs, MemoryNeed, Parameters, Residence, Schedule, SequenceCache};
use crate::ir::decoder::LOGITS;
use crate::ir::ops::{Rotary, RotaryScaling};
use crate::ir::{Dim, Graph, Node, Op};
use crate::model::Model;
use crate::work::{Event, MemoryLimit, ProgressUnit, Work};
use opening::Opening;
use run::{Beginning, FEATURES, PIECE, Run, texts};
use sampling::Sampler;
use settings::Settings;

/// What a model makes texts of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// Their beginnings.
    Beginnings,
    /// Other texts.
    Texts,
    /// Recordings of speech.
    Recordings,
}

/// What made a continuation end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// A token that ends texts; it is the last one.
    Eos,
    /// As many tokens as were asked for.
    Tokens,
    /// As many positions as the model has.
    Positions,
}

/// What a model has made of a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Continuation {
    /// Its tokens, behind those of the prompt.
    pub tokens: Vec<i64>,
    /// What made it end.
    pub end: End,
    /// Seconds until the first token was known, weights not counted.
    pub prefill_seconds: f64,
    /// Seconds for all other tokens.
    pub decode_seconds: f64,
}

/// Tokens per second, of several prompts together; none where nothing was computed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// Of prompts, until the first token that comes behind each.
    pub prefill: Option<f64>,
    /// Of those that come behind the first.
    pub decode: Option<f64>,
}

impl Speed {
    /// Of prompts and what has come behind them.
    pub fn of(prompts: &[Vec<i64>], continuations: &[Continuation]) -> Speed {
        let rate = |tokens: usize, seconds: f64| (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds);
        let later = continuations.iter().map(|found| found.tokens.len().saturating_sub(1));
        Speed {
            prefill: rate(prompts.iter().map(Vec::len).sum(), continuations.iter().map(|found| found.prefill_seconds).sum()),
            decode: rate(later.sum(), continuations.iter().map(|found| found.decode_seconds).sum()),
        }
    }
}

/// The first place at which two continuations are not the same; none where they are.
pub fn first_difference(one: &[i64], other: &[i64]) -> Option<usize> {
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    (same < one.len() || same < other.len()).then_some(same)
}

/// A model that continues texts, or makes them of other texts or of recordings.
pub struct LanguageModel {
    model: Model,
    graph: Graph,
    reads: Reads,
    /// What texts begin with that are not continued.
    opening: Option<Opening>,
    /// Tokens that never come, and those that do not come first.
    suppressed: [BTreeSet<i64>; 2],
    /// Tokens that end a text.
    ends: BTreeSet<i64>,
    /// How many tokens a text has at most.
    positions: Option<usize>,
    notes: Vec<String>,
}

impl LanguageModel {
    /// Looks at a model that is open.
    ///
    /// # Errors
    /// It does not continue texts, or asks for something that is not supported; the message names the family, the input or the node.
    pub fn of(model: Model) -> Result<LanguageModel> {
        if model.onnx.is_some() {
            return Err(Error::Unsupported {
                what: format!("{}: generation with an .onnx file", model.path.display()),
                hint: "generate with the folder that it was made from".into(),
            });
        }
        let graph = model.graph()?;
        let takes = |name: &str| graph.inputs().any(|(_, value)| value.name == name);
        let reads = match (takes(DECODED), takes(FEATURES)) {
            (true, true) => Reads::Recordings,
            (true, false) => Reads::Texts,
            (false, _) => Reads::Beginnings,
        };
        let decodes = |kind: ModelKind| kind == ModelKind::Decoder || kind == ModelKind::EncoderDecoder && reads != Reads::Beginnings;
        if let Some(family) = arch::family(model.config.model_type()).filter(|family| !decodes(family.kind) && model.changed_graph.is_none()) {
            return Err(Error::graph("config.json", format!("`{}` is no decoder: it does not continue texts", family.model_type)));
        }
        SequenceCache::new(&graph)?;
        let known: &[&str] = match reads {
            Reads::Beginnings => &["input_ids", "attention_mask"],
            Reads::Texts => &["input_ids", "attention_mask", DECODED],
            Reads::Recordings => &[FEATURES, DECODED],
        };
        if let Some((_, value)) = graph.inputs().find(|(_, value)| !known.contains(&value.name.as_str())) {
            return Err(Error::graph(format!("input `{}`", value.name), "is not known of texts that are continued"));
        }
        match graph.outputs().iter().find(|(name, _)| name == LOGITS) {
            Some((_, id)) if graph.value(*id).ty.shape.len() == 3 => {}
            _ => return Err(Error::graph("this model", "has no `logits` for each token: without a language head it does not continue texts")),
        }
        let settings = Settings::of(&model)?;
        let ends = settings.ends()?;
        let opening = match reads {
            Reads::Beginnings => None,
            Reads::Texts => Some(Opening::of_texts(&settings)?),
            Reads::Recordings => Some(Opening::of_speech(&settings)?),
        };
        let positions = if reads == Reads::Beginnings { stated_positions(&model) } else { longest(&graph) };
        // Angles that grow with the length are there to go beyond.
        let grows = |node: &Node| matches!(&node.op, Op::Rotary(Rotary { scaling: RotaryScaling::Dynamic { .. } | RotaryScaling::Yarn { .. }, .. }));
        let positions = positions.filter(|_| !graph.nodes().iter().any(grows));
        let suppressed = [settings.tokens("suppress_tokens")?, settings.tokens("begin_suppress_tokens")?];
        let mut notes = settings.changing();
        if ends.is_empty() {
            notes.push("neither generation_config.json nor config.json names an `eos_token_id`: texts end with the number of tokens alone".into());
        }
        Ok(LanguageModel { model, graph, reads, opening, suppressed, ends, positions, notes })
    }

    /// What it makes texts of.
    pub fn reads(&self) -> Reads {
        self.reads
    }

    /// What is to be said of the model's own settings.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Tokens that end a text.
    pub fn ends(&self) -> impl Iterator<Item = i64> {
        self.ends.iter().copied()
    }

    /// How many tokens a text has at most; nothing where there is no end, or none is named.
    pub fn positions(&self) -> Option<usize> {
        self.positions
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn vocabulary(&self) -> Result<Vocabulary> {
        Vocabulary::open(&self.model, &self.graph)
    }

    /// Its template of chats.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        ChatTemplate::open(&self.model.path, &self.model.beside.made)
    }

    /// How recordings become what it reads.
    ///
    /// # Errors
    /// It reads none, or `preprocessor_config.json` is missing or asks for something that is not done.
    pub fn speech(&self) -> Result<Speech> {
        self.require_recordings()?;
        Speech::open(&self.model.path, &self.model.beside.made)
    }

    /// Continues prompts, one after the other, or makes texts of them where the model has an encoder.
    ///
    /// # Errors
    /// A prompt has no token, or more than the model has positions; the model reads recordings; options are impossible; reading fails; the
    /// model does not fit into memory; its answers are not numbers; the work is cancelled.
    pub fn generate(&self, prompts: &[Vec<i64>], options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        prompts.iter().enumerate().try_for_each(|(index, prompt)| self.check(index, prompt))?;
        let begin = |prompt: &Vec<i64>| match self.reads {
            Reads::Beginnings => Ok(Beginning { tokens: prompt.clone(), inputs: Inputs::new() }),
            _ => Ok(Beginning { tokens: Vec::new(), inputs: texts("input_ids", prompt.clone())? }),
        };
        self.all(prompts.iter().map(begin).collect::<Result<_>>()?, options, device, memory, work)
    }

    /// Makes texts of recordings, one after the other, as [`speech`](LanguageModel::speech) reads them.
    ///
    /// # Errors
    /// As [`generate`](LanguageModel::generate), or the model reads no recordings.
    pub fn transcribe(&self, recordings: &[Tensor], options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        self.require_recordings()?;
        let begin = |features: &Tensor| Beginning { tokens: Vec::new(), inputs: [(FEATURES.to_owned(), features.clone())].into() };
        self.all(recordings.iter().map(begin).collect(), options, device, memory, work)
    }

    fn require_recordings(&self) -> Result<()> {
        match self.reads {
            Reads::Recordings => Ok(()),
            _ => Err(Error::option("recordings", format!("`{}` reads texts, not recordings", self.model.config.model_type()))),
        }
    }

    fn all(&self, beginnings: Vec<Beginning>, options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        options.check()?;
        self.require_memory(&beginnings, options, memory)?;
        let parameters = Parameters::load(&self.graph, &self.model.weights, device, DType::F32, Residence::Stored, work)?;
        let executor = Executor::new(&self.graph, parameters, device.clone());
        let total = (beginnings.len() as u64).saturating_mul(options.tokens as u64);
        work.progress.on(Event::Begin { stage: "Generating", total, unit: ProgressUnit::Steps });
        // Threads of the pool begin work at once that one of them gives to the others.
        let found: Result<Vec<Continuation>> = rayon::scope(|_| {
            let mut cache = SequenceCache::new(&self.graph)?;
            let each = |(index, beginning): (usize, Beginning)| {
                cache.clear();
                let run = Run { model: self, executor: &executor, cache: &mut cache, inputs: beginning.inputs, work };
                run.continuation(beginning.tokens, options, Sampler::new(options.sampling, index))
            };
            beginnings.into_iter().enumerate().map(each).collect()
        });
        work.progress.on(Event::End);
        found
    }

    fn check(&self, index: usize, prompt: &[i64]) -> Result<()> {
        let number = index.saturating_add(1);
        if self.reads == Reads::Recordings {
            return Err(Error::option(format!("prompt {number}"), "is a text, and the model reads recordings: give it one with --audio"));
        }
        if prompt.is_empty() {
            return Err(Error::option(format!("prompt {number}"), "has no token: there is nothing to continue"));
        }
        match self.positions {
            Some(positions) if self.reads == Reads::Beginnings && prompt.len() > positions => Err(Error::option(
                format!("prompt {number}"),
                format!("has {} tokens, and the model's texts end at {positions} (`max_position_embeddings`)", prompt.len()),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses what does not fit: parameters are all read for each token.
    fn require_memory(&self, beginnings: &[Beginning], options: &Generate, memory: MemoryLimit) -> Result<()> {
        let size = |name: &str, of: &dyn Fn(&Beginning) -> usize| {
            let input = self.graph.inputs().find(|(_, value)| value.name == name).and_then(|(_, value)| value.ty.shape.get(1));
            let longest = beginnings.iter().map(of).max().unwrap_or(1).max(1);
            (longest, if let Some(Dim::Named(size)) = input { Some(size.clone()) } else { None })
        };
        let opening = self.opening.as_ref().map_or(0, |opening| opening.tokens(Some(0)).len());
        let (decoded, read) = if self.reads == Reads::Beginnings { ("input_ids", None) } else { (DECODED, Some("input_ids")) };
        let (first, name) = size(decoded, &|beginning| beginning.tokens.len().saturating_add(opening));
        let total = first.saturating_add(options.tokens).min(self.positions.unwrap_or(usize::MAX).max(first));
        let piece = if SequenceCache::is_stable(&self.graph, 1, total) { first.min(PIECE) } else { total };
        let mut sizes = usual_sizes(&self.graph);
        sizes.extend(name.map(|name| (name, piece)));
        if let Some(read) = read {
            let (longest, name) = size(read, &|beginning| beginning.inputs.get(read).and_then(|tokens| tokens.dims().get(1).copied()).unwrap_or(1));
            sizes.extend(name.map(|name| (name, longest)));
        }
        let mut need = MemoryNeed::of(&self.graph, &self.model.weights, DType::F32, Residence::Stored, &sizes);
        need.activations = need.activations.saturating_add(SequenceCache::new(&self.graph)?.bytes_of(&self.graph, total, &sizes));
        match memory.schedule(&[(self.model.config.model_type(), need.clone())])? {
            Schedule::Whole => Ok(()),
            Schedule::Blockwise { .. } => Err(Error::run(
                "generation",
                format!("takes {} bytes of memory, and {} may be taken", need.whole(), memory.bytes.unwrap_or(0)),
                "every token reads all parameters, which must be in memory at once: take a computer with more, or a smaller model",
            )),
        }
    }
}

/// How many positions `config.json` says that the model has.
pub(crate) fn stated_positions(model: &Model) -> Option<usize> {
    let stated = ["max_position_embeddings", "n_positions"].into_iter().find_map(|key| model.config.get(key)?.as_u64());
    stated.map(|count| usize::try_from(count).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn continuations_differ_where_one_ends() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 5, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[], &[]), None);
    }
}
