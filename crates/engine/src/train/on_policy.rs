//! Samples that end with continuations of the student, which the teacher scores (Agarwal et al., *On-Policy
//! Distillation of Language Models: Learning from Self-Generated Mistakes*, 2024).

use std::cell::Cell;
use std::str::FromStr;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::Weights;
use super::draw::Draw;
use crate::data::{ATTENTION_MASK, Batch, INPUT_IDS, NextTokens, References};
use crate::error::{Error, ParseError, Result, counted};
use crate::exec::transfer;
use crate::generation::{LanguageModel, Sampling};
use crate::ir::Graph;
use crate::model::Model;
use crate::ratio;
use crate::work::{Cancel, Work};
use crate::yaml_text::{parse_option, with_example};

/// Samples that the student continues from their prompts, with its weights at the time of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct OnPolicy {
    /// Fraction of the samples that the student continues
    #[serde(deserialize_with = "crate::ratio::ratio")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
    pub fraction: f64,
    /// Minimum length of a prompt in tokens [default: up to the first token with a loss, or 32 if all tokens
    /// have a loss]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<usize>,
    /// Maximum length of a continuation in tokens [default: up to the length of the sample]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Sampling temperature
    pub temperature: f64,
}

impl Default for OnPolicy {
    fn default() -> Self {
        Self { fraction: 0.5, prompt_tokens: None, tokens: None, temperature: 1.0 }
    }
}

impl FromStr for OnPolicy {
    type Err = ParseError;

    /// Parses a fraction, or an object like that of a recipe.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        if text.contains(['{', ':']) {
            return parse_option("on_policy", text);
        }
        let fraction = ratio::parse(text).map_err(|e| with_example("on_policy", e))?;
        Ok(OnPolicy { fraction, ..OnPolicy::default() })
    }
}

/// Length of a prompt in tokens if all tokens have a loss.
const PROMPT_TOKENS: usize = 32;

impl OnPolicy {
    /// Validates the options; `pass` is the prefix of error messages.
    pub fn check(&self, pass: &str) -> Result<()> {
        let reason = if !(self.fraction > 0.0 && self.fraction <= 1.0) {
            "`fraction` must be greater than 0 and at most 1"
        } else if self.prompt_tokens == Some(0) || self.tokens == Some(0) {
            "`prompt_tokens` and `tokens` must be at least 1"
        } else if !(self.temperature.is_finite() && self.temperature > 0.0) {
            "`temperature` must be a finite number greater than 0"
        } else {
            return Ok(());
        };
        Err(Error::option(format!("{pass}: on_policy"), reason))
    }

    /// Length of the prompt in a sample with these targets.
    fn prompt(&self, targets: &NextTokens) -> usize {
        let before = targets.first().map_or(0, |(at, _)| *at).saturating_add(1);
        match self.prompt_tokens {
            Some(least) => before.max(least),
            None if before > 1 => before,
            None => PROMPT_TOKENS,
        }
    }
}

/// A sample without padding.
#[derive(Debug, Clone, PartialEq)]
struct Text {
    ids: Vec<i64>,
    /// The target of each position with a loss.
    targets: NextTokens,
}

/// A student that continues samples of its training.
pub struct OnPolicySampler {
    options: OnPolicy,
    model: LanguageModel,
    /// In this run: all samples, continued samples, and generated tokens.
    counts: Cell<[u64; 3]>,
}

impl OnPolicySampler {
    /// A sampler for a model with the graph of its training, which generates token ids below `tokens`. Fails
    /// if the model does not continue texts.
    pub fn new(options: OnPolicy, model: Model, graph: Graph, tokens: usize) -> Result<OnPolicySampler> {
        let model = LanguageModel::with_graph(model, graph)?.without_tokens_from(tokens);
        model.require_prompts()?;
        Ok(OnPolicySampler { options, model, counts: Cell::default() })
    }

    /// The batches of a step, in which the student continues some of the samples with these weights. All
    /// targets are tokens: those of the data, or of the continuations. `part`: the size of micro-batches.
    pub(super) fn continued(
        &self,
        batches: Vec<Batch>,
        weights: &Weights,
        (device, part): (&Device, Option<usize>),
        draw: Draw,
        work: &Work,
    ) -> Result<Vec<Batch>> {
        let most = part.unwrap_or_else(|| batches.iter().map(|batch| batch.samples).max().unwrap_or(1));
        let mut texts = batches.iter().map(texts).collect::<Result<Vec<_>>>()?;
        let mut random = draw.random();
        let (mut chosen, mut prompts) = (Vec::new(), Vec::new());
        for text in texts.iter_mut().flatten() {
            // Each sample takes one number, so that the choice of a sample does not depend on others.
            let is_drawn = random.f64() < self.options.fraction;
            let prompt = self.options.prompt(&text.targets);
            if is_drawn && prompt < text.ids.len() {
                let room = (text.ids.len() - prompt).min(self.options.tokens.unwrap_or(usize::MAX));
                prompts.push((text.ids[..prompt].to_vec(), room));
                chosen.push(text);
            }
        }
        let [samples, continued, tokens] = self.counts.get();
        let samples = samples + batches.iter().map(|batch| batch.samples as u64).sum::<u64>();
        if chosen.is_empty() {
            drop(chosen);
            self.counts.set([samples, continued, tokens]);
            return batches.into_iter().zip(texts).map(|(batch, texts)| rebuilt(batch, &texts)).collect();
        }
        let sampling = Sampling { temperature: self.options.temperature, seed: random.u64(..), ..Sampling::default() };
        // A canceled step ends with a checkpoint.
        let work = Work { cancel: &Cancel::default(), ..work.quiet() };
        let continuations = self.model.continue_with(weights.parameters()?, (&prompts, most), Some(sampling), device, &work);
        // The logits of the original weights are finite.
        let continuations = continuations.map_err(|e| match e {
            Error::Run { reason, .. } => Error::Diverged { step: 0, reason: format!("continuations of the student: {reason}") },
            e => e,
        })?;
        let generated: u64 = continuations.iter().map(|continuation| continuation.len() as u64).sum();
        self.counts.set([samples, continued + chosen.len() as u64, tokens + generated]);
        for (text, ((prompt, _), continuation)) in chosen.into_iter().zip(prompts.into_iter().zip(continuations)) {
            *text = Text::new(prompt, continuation);
        }
        batches.into_iter().zip(texts).map(|(batch, texts)| rebuilt(batch, &texts)).collect()
    }

    /// A note on the continuations of this run.
    pub(super) fn note(&self) -> String {
        let [samples, continued, tokens] = self.counts.get();
        let mean = tokens as f64 / continued.max(1) as f64;
        let reason =
            if continued == 0 && samples > 0 { ": no drawn sample is longer than its prompt, so lower `prompt_tokens` or use longer samples" } else { "" };
        format!("in this run, the student continued {continued} of {} itself, with {mean:.1} tokens on average{reason}", counted(samples as usize, "sample"))
    }
}

impl Text {
    /// A prompt with a continuation, whose tokens are the targets.
    fn new(prompt: Vec<i64>, continuation: Vec<i64>) -> Text {
        let first = prompt.len().saturating_sub(1);
        let targets = (first..).zip(continuation.iter().copied()).collect();
        Text { ids: [prompt, continuation].concat(), targets }
    }
}

fn wrong(reason: &str) -> Error {
    Error::option("distill: on_policy", reason)
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("continuations of the student", e)
}

/// The texts of a batch. Without targets, each token is the target of the previous one.
fn texts(batch: &Batch) -> Result<Vec<Text>> {
    let ids = batch.inputs.get(INPUT_IDS).filter(|ids| ids.rank() == 2).ok_or_else(|| wrong("needs samples with `input_ids`"))?;
    let width = ids.dims().last().copied().unwrap_or(0).max(1);
    let ids = transfer::read::<i64>(ids).map_err(failed)?;
    let mask = batch.inputs.get(ATTENTION_MASK).map(transfer::read::<i64>).transpose().map_err(failed)?;
    let mask = mask.unwrap_or_else(|| vec![1; ids.len()]);
    let targets = batch.next_tokens()?;
    let text = |(row, (ids, mask)): (usize, (&[i64], &[i64]))| {
        let length = mask.iter().take_while(|token| **token != 0).count();
        if mask[length..].iter().any(|token| *token != 0) {
            return Err(wrong("needs samples with padding only after their tokens: move the padding of the arrays to their end"));
        }
        let ids = ids[..length].to_vec();
        let next = || ids.iter().skip(1).copied().enumerate().collect();
        let targets = targets.as_ref().and_then(|targets| targets.get(row).cloned()).unwrap_or_else(next);
        Ok(Text { ids, targets })
    };
    ids.chunks(width).zip(mask.chunks(width)).enumerate().map(text).collect()
}

/// The batch with other texts, of the same width.
fn rebuilt(batch: Batch, texts: &[Text]) -> Result<Batch> {
    let before = batch.inputs.get(INPUT_IDS).ok_or_else(|| wrong("needs samples with `input_ids`"))?;
    let (dtype, width) = (before.dtype(), before.dims().last().copied().unwrap_or(0));
    let padded = |values: &mut dyn Iterator<Item = i64>| values.chain(std::iter::repeat(0)).take(width).collect::<Vec<i64>>();
    let ids: Vec<i64> = texts.iter().flat_map(|text| padded(&mut text.ids.iter().copied())).collect();
    let mask: Vec<i64> = texts.iter().flat_map(|text| padded(&mut text.ids.iter().map(|_| 1))).collect();
    let labels = |text: &Text| {
        let mut labels = vec![None; width.saturating_sub(1)];
        for (at, token) in &text.targets {
            labels.get_mut(*at).into_iter().for_each(|label| *label = Some(*token));
        }
        labels
    };
    let references = References::Tokens(texts.iter().map(labels).collect());
    let tensor = |values: Vec<i64>| Tensor::from_vec(values, (texts.len(), width), &Device::Cpu)?.to_dtype(dtype);
    let mut inputs = batch.inputs;
    inputs.insert(INPUT_IDS.to_owned(), tensor(ids).map_err(failed)?);
    inputs.insert(ATTENTION_MASK.to_owned(), tensor(mask).map_err(failed)?);
    Ok(Batch { inputs, references, ..batch })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_a_fraction_or_an_object() {
        let parse = |text: &str| text.parse::<OnPolicy>();
        assert_eq!(parse("0.25").unwrap(), OnPolicy { fraction: 0.25, ..OnPolicy::default() });
        let written = parse("{fraction: 1, prompt_tokens: 4, tokens: 8, temperature: 0.9}").unwrap();
        assert_eq!(written, OnPolicy { fraction: 1.0, prompt_tokens: Some(4), tokens: Some(8), temperature: 0.9 });
        assert!(parse("{beta: 1}").unwrap_err().to_string().contains("beta"));
        for text in ["0", "1.5", "-1", "{prompt_tokens: 0}", "{tokens: 0}", "{temperature: 0}"] {
            assert!(parse(text).unwrap().check("distill").unwrap_err().to_string().contains("distill: on_policy"), "{text}");
        }
    }

    #[test]
    fn prompts_end_before_the_first_target() {
        let prompt = |prompt_tokens: Option<usize>, first: usize| OnPolicy { prompt_tokens, ..OnPolicy::default() }.prompt(&vec![(first, 7), (first + 1, 8)]);
        assert_eq!([prompt(None, 0), prompt(None, 1), prompt(None, 40)], [32, 2, 41]);
        assert_eq!([prompt(Some(4), 0), prompt(Some(4), 1), prompt(Some(4), 40)], [4, 4, 41]);
        assert_eq!(OnPolicy::default().prompt(&NextTokens::new()), 32);
    }

    #[test]
    fn batches_are_rebuilt_from_their_texts() {
        let tensor = |rows: [[i64; 4]; 2]| Tensor::new(&rows, &Device::Cpu).unwrap();
        let inputs = [(INPUT_IDS.to_owned(), tensor([[5, 6, 7, 8], [9, 3, 4, 0]])), (ATTENTION_MASK.to_owned(), tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))];
        let batch = |references| Batch { inputs: inputs.clone().into(), references, samples: 2 };
        let read = |batch: &Batch, name: &str| transfer::read::<i64>(&batch.inputs[name]).unwrap();
        for references in [References::None, References::Next(vec![1..4, 1..3])] {
            let batch = batch(references);
            let mut texts = texts(&batch).unwrap();
            assert_eq!(texts[1], Text { ids: vec![9, 3, 4], targets: vec![(0, 3), (1, 4)] });
            texts[0] = Text::new(vec![5, 6], vec![2]);
            let rebuilt = rebuilt(batch, &texts).unwrap();
            assert_eq!(read(&rebuilt, INPUT_IDS), [5, 6, 2, 0, 9, 3, 4, 0]);
            assert_eq!(read(&rebuilt, ATTENTION_MASK), [1, 1, 1, 0, 1, 1, 1, 0]);
            assert_eq!(rebuilt.references, References::Tokens(vec![vec![None, Some(2), None], vec![Some(3), Some(4), None]]));
        }
        let mut left = batch(References::None);
        left.inputs.insert(ATTENTION_MASK.to_owned(), tensor([[0, 1, 1, 1], [1, 1, 1, 1]]));
        assert!(texts(&left).unwrap_err().to_string().contains("padding only after"));
    }
}
