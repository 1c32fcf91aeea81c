//! Continuing texts, token by token: a sanity check of language models, before and after they are made smaller.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod chat;
mod options;
mod sampling;
mod vocabulary;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use serde_json::{Map, Value};

pub use chat::{ChatTemplate, Message};
pub use options::{Generate, Sampling};
pub use vocabulary::Vocabulary;

use crate::analysis::usual_sizes;
use crate::arch::{self, ModelKind};
use crate::error::{Error, Result};
use crate::exec::transfer::{Cause, values};
use crate::exec::{Answers, Executor, MemoryNeed, Parameters, Residence, Schedule, SequenceCache};
use crate::ir::ops::{Rotary, RotaryScaling};
use crate::ir::{Dim, Element, Graph, Node, Op};
use crate::model::{Model, config_beside};
use crate::work::{Event, MemoryLimit, ProgressUnit, Work};
use sampling::Sampler;

/// Tokens of a prompt that are run together at most.
const PIECE: usize = 512;
/// The output that next tokens are chosen by.
const LOGITS: &str = "logits";
/// Keys of `generation_config.json` that change which token is the likeliest one, and what they do at rest.
const CHANGING: [(&str, f64); 14] = [
    ("repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("num_beams", 1.0),
    ("suppress_tokens", f64::NAN),
    ("begin_suppress_tokens", f64::NAN),
    ("bad_words_ids", f64::NAN),
    ("forced_bos_token_id", f64::NAN),
    ("forced_eos_token_id", f64::NAN),
    ("sequence_bias", f64::NAN),
    ("guidance_scale", 1.0),
    ("exponential_decay_length_penalty", f64::NAN),
    ("stop_strings", f64::NAN),
];

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

/// A model that continues texts.
pub struct LanguageModel {
    model: Model,
    graph: Graph,
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
        if let Some(family) = arch::family(model.config.model_type()).filter(|family| family.kind != ModelKind::Decoder && model.changed_graph.is_none()) {
            return Err(Error::graph("config.json", format!("`{}` is no decoder: it does not continue texts", family.model_type)));
        }
        let graph = model.graph()?;
        SequenceCache::new(&graph)?;
        for (_, value) in graph.inputs() {
            if value.ty.element != Element::Int || !["input_ids", "attention_mask"].contains(&value.name.as_str()) {
                return Err(Error::graph(format!("input `{}`", value.name), "is not known of texts that are continued"));
            }
        }
        match graph.outputs().iter().find(|(name, _)| name == LOGITS) {
            Some((_, id)) if graph.value(*id).ty.shape.len() == 3 => {}
            _ => return Err(Error::graph("this model", "has no `logits` for each token: without a language head it does not continue texts")),
        }
        let settings = config_beside(&model.path, &model.beside.made, "generation_config.json")?;
        let ends = [settings.values(), model.config.values()].into_iter().find_map(|values| Some(values.get("eos_token_id")?).filter(|value| !value.is_null()));
        let ends = ends.map_or(Ok(BTreeSet::new()), |value| {
            numbers(value).ok_or_else(|| Error::graph("eos_token_id", format!("is {value}, expected a token or a list of them")))
        })?;
        let positions = stated_positions(&model);
        // Angles that grow with the length are there to go beyond.
        let grows = |node: &Node| matches!(&node.op, Op::Rotary(Rotary { scaling: RotaryScaling::Dynamic { .. } | RotaryScaling::Yarn { .. }, .. }));
        let positions = positions.filter(|_| !graph.nodes().iter().any(grows));
        // Where there is no file for generation, transformers takes what config.json says.
        let mut notes = match settings.values().is_empty() {
            true => changing("config.json", model.config.values()),
            false => changing("generation_config.json", settings.values()),
        };
        if ends.is_empty() {
            notes.push("neither generation_config.json nor config.json names an `eos_token_id`: texts end with the number of tokens alone".into());
        }
        Ok(LanguageModel { model, graph, ends, positions, notes })
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

    /// Continues prompts, one after the other.
    ///
    /// # Errors
    /// A prompt has no token, or more than the model has positions; options are impossible; reading fails; the model does not fit into
    /// memory; its answers are not numbers; the work is cancelled.
    pub fn generate(&self, prompts: &[Vec<i64>], options: &Generate, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Vec<Continuation>> {
        options.check()?;
        prompts.iter().enumerate().try_for_each(|(index, prompt)| self.check(index, prompt))?;
        self.require_memory(prompts, options, memory)?;
        let parameters = Parameters::load(&self.graph, &self.model.weights, device, DType::F32, Residence::Stored, work)?;
        let executor = Executor::new(&self.graph, parameters, device.clone());
        let total = (prompts.len() as u64).saturating_mul(options.tokens as u64);
        work.progress.on(Event::Begin { stage: "Generating", total, unit: ProgressUnit::Steps });
        // Threads of the pool begin work at once that one of them gives to the others.
        let found: Result<Vec<Continuation>> = rayon::scope(|_| {
            let mut cache = SequenceCache::new(&self.graph)?;
            let each = |(index, prompt): (usize, &Vec<i64>)| {
                cache.clear();
                Run { model: self, executor: &executor, cache: &mut cache, work }.continuation(prompt, options, Sampler::new(options.sampling, index))
            };
            prompts.iter().enumerate().map(each).collect()
        });
        work.progress.on(Event::End);
        found
    }

    fn check(&self, index: usize, prompt: &[i64]) -> Result<()> {
        let number = index.saturating_add(1);
        if prompt.is_empty() {
            return Err(Error::option(format!("prompt {number}"), "has no token: there is nothing to continue"));
        }
        match self.positions {
            Some(positions) if prompt.len() > positions => Err(Error::option(
                format!("prompt {number}"),
                format!("has {} tokens, and the model's texts end at {positions} (`max_position_embeddings`)", prompt.len()),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses what does not fit: parameters are all read for each token.
    fn require_memory(&self, prompts: &[Vec<i64>], options: &Generate, memory: MemoryLimit) -> Result<()> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
        let total = longest.saturating_add(options.tokens).min(self.positions.unwrap_or(usize::MAX).max(longest));
        let piece = if SequenceCache::is_stable(&self.graph, 1, total) { longest.min(PIECE) } else { total };
        let mut sizes = usual_sizes(&self.graph);
        let tokens = self.graph.inputs().find(|(_, value)| value.name == "input_ids").and_then(|(_, value)| value.ty.shape.get(1));
        if let Some(Dim::Named(name)) = tokens {
            sizes.insert(name.clone(), piece);
        }
        let mut need = MemoryNeed::of(&self.graph, &self.model.weights, DType::F32, Residence::Stored, &sizes);
        need.activations = need.activations.saturating_add(SequenceCache::bytes_of(&self.graph, total));
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

/// One prompt on its way.
struct Run<'r, 'g> {
    model: &'r LanguageModel,
    executor: &'r Executor<'g>,
    cache: &'r mut SequenceCache,
    work: &'r Work<'r>,
}

impl Run<'_, '_> {
    fn continuation(mut self, prompt: &[i64], options: &Generate, mut sampler: Sampler) -> Result<Continuation> {
        let (mut all, start) = (prompt.to_vec(), Instant::now());
        let (mut end, mut prefill_seconds) = (End::Tokens, 0.0);
        let mut found = 0usize;
        while found < options.tokens {
            if self.model.positions.is_some_and(|positions| all.len() > positions) {
                end = End::Positions;
                break;
            }
            let next = sampler.next(&self.logits(&all)?)?;
            all.push(next);
            found = found.saturating_add(1);
            if found == 1 {
                prefill_seconds = start.elapsed().as_secs_f64();
            }
            self.work.progress.on(Event::Advance(1));
            if self.model.ends.contains(&next) {
                end = End::Eos;
                break;
            }
        }
        // What is left of the count is not to come.
        self.work.progress.on(Event::Advance(options.tokens.saturating_sub(found) as u64));
        let decode_seconds = start.elapsed().as_secs_f64() - prefill_seconds;
        Ok(Continuation { tokens: all.split_off(prompt.len()), end, prefill_seconds, decode_seconds })
    }

    /// What may come behind all tokens so far, of which the model may have seen some.
    fn logits(&mut self, all: &[i64]) -> Result<Vec<f32>> {
        let graph = &self.model.graph;
        if !SequenceCache::is_stable(graph, self.cache.tokens(), all.len()) {
            self.cache.clear();
        }
        loop {
            self.work.cancel.check()?;
            let seen = self.cache.tokens();
            let piece = seen.saturating_add(PIECE).min(all.len());
            // Where the beginning would be another in the whole, the whole is run at once.
            let piece = if SequenceCache::is_stable(graph, piece, all.len()) { piece } else { all.len() };
            let tokens = all.get(seen..piece).unwrap_or_default().to_vec();
            let count = tokens.len();
            let row = |values: Vec<i64>| Tensor::from_vec(values, (1, count), &Device::Cpu).map_err(computed);
            let inputs: BTreeMap<String, Tensor> = [("attention_mask".to_owned(), row(vec![1; count])?), ("input_ids".to_owned(), row(tokens)?)].into();
            let outputs = self.executor.run_next(&inputs, self.cache, Answers::Last)?;
            if piece == all.len() {
                let logits = outputs.get(LOGITS).ok_or_else(|| Error::graph(LOGITS, "are not computed"))?;
                let values = values(logits, Cause::Answers).map_err(computed)?;
                let width = logits.dims().last().copied().unwrap_or(0);
                return if values.len() == width { Ok(values) } else { Err(Error::graph(LOGITS, "are not those of the last token alone")) };
            }
        }
    }
}

fn computed(e: candle_core::Error) -> Error {
    Error::computed("generation", e)
}

/// A token, or a list of them.
fn numbers(value: &Value) -> Option<BTreeSet<i64>> {
    match value.as_array() {
        Some(list) => list.iter().map(Value::as_i64).collect(),
        None => value.as_i64().map(|number| [number].into()),
    }
}

/// How many positions `config.json` says that the model has.
pub(crate) fn stated_positions(model: &Model) -> Option<usize> {
    let stated = ["max_position_embeddings", "n_positions"].into_iter().find_map(|key| model.config.get(key)?.as_u64());
    stated.map(|count| usize::try_from(count).unwrap_or(usize::MAX))
}

/// Settings of the model that would change what is the likeliest token, each with a word.
fn changing(file: &str, settings: &Map<String, Value>) -> Vec<String> {
    let changes = |(key, rest): &(&str, f64)| {
        let value = settings.get(*key).filter(|value| !value.is_null())?;
        (value.as_f64() != Some(*rest) && value.as_array().is_none_or(|list| !list.is_empty())).then(|| format!("{file}: `{key}` of {value} is not used"))
    };
    CHANGING.iter().filter_map(changes).collect()
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

    #[test]
    fn settings_that_are_not_used_are_told() {
        let settings = |text: &str| changing("generation_config.json", serde_json::from_str::<Value>(text).unwrap().as_object().unwrap());
        assert!(settings(r#"{"repetition_penalty": 1.0, "temperature": 0.6, "do_sample": true, "num_beams": 1, "suppress_tokens": []}"#).is_empty());
        let told = settings(r#"{"repetition_penalty": 1.1, "bad_words_ids": [[3]]}"#);
        assert!(told.len() == 2 && told[0].contains("`repetition_penalty` of 1.1"), "{told:?}");
        assert_eq!(numbers(&serde_json::json!([2, 7])), Some([2, 7].into()));
        assert_eq!(numbers(&serde_json::json!(2)), Some([2].into()));
        assert_eq!(numbers(&serde_json::json!("2")), None);
    }
}
