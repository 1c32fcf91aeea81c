//! What is measured of models, as a report holds it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// How well a model does on labelled samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// `accuracy`, `perplexity`, `spearman`.
    pub metric: String,
    /// Its value.
    pub value: f64,
    /// Where the value would be for other samples of the same kind, in 95 of 100 cases.
    pub ci95: Option<[f64; 2]>,
    /// Other figures of the same answers.
    pub more: BTreeMap<String, f64>,
}

impl Score {
    /// How much worse another score is; negative when it is better.
    pub fn drop_to(&self, after: &Score) -> f64 {
        if lower_is_better(&self.metric) { after.value - self.value } else { self.value - after.value }
    }
}

/// Whether small values of a metric are good ones.
pub fn lower_is_better(metric: &str) -> bool {
    metric == "perplexity"
}

/// Closeness of one model's answers to another's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fidelity {
    /// Which output is compared.
    pub output: String,
    /// Mean cosine of the answers: one for a sample, or one for each of its tokens that is not padding.
    pub cosine: f64,
    /// The least of these cosines.
    pub cosine_min: f64,
    /// Signal to noise over all answers; none when there is no difference.
    pub sqnr_db: Option<f64>,
    /// Mean Kullback-Leibler divergence of the predicted distributions, in nats; only for logits.
    pub kl: Option<f64>,
    /// Part of the answers whose likeliest class is the same; only for logits.
    pub top1_agreement: Option<f64>,
    /// Largest difference of a number.
    pub max_abs_error: f64,
    /// Largest number of the first model's answers, without its sign.
    pub largest: f64,
}

/// Where the samples of a [`Fidelity`] come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SamplesFrom {
    /// The evaluation data of the recipe.
    Evaluation,
    /// Samples of the calibration or training data that no pass has used.
    HeldOut,
    /// Random tokens or numbers: they show what is broken, not how well the model does on real data.
    Synthetic,
}

/// A [`Fidelity`] of the output against the input, and what it was measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredFidelity {
    /// Where the samples come from.
    pub samples_from: SamplesFrom,
    /// How many.
    pub samples: usize,
    /// Where the data is; nothing for synthetic samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// How close the answers are.
    #[serde(flatten)]
    pub fidelity: Fidelity,
}

impl MeasuredFidelity {
    /// The samples in words: how many, and of what.
    pub fn describe(&self) -> String {
        let (count, data) = (self.samples, self.data.as_deref().unwrap_or("the data"));
        let samples = if count == 1 { "sample" } else { "samples" };
        match self.samples_from {
            SamplesFrom::Evaluation => format!("{count} {samples} of {data}"),
            SamplesFrom::HeldOut => format!("{count} {samples} of {data} that no pass has used"),
            SamplesFrom::Synthetic => format!("{count} synthetic {samples}"),
        }
    }
}

/// A text that both models have continued, with the likeliest token each time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continued {
    /// The text that was given.
    pub prompt: String,
    /// What the input makes of it.
    pub before: String,
    /// What the output makes of it.
    pub after: String,
    /// The first token that differs, from 0 on; none where all are the same.
    pub first_difference: Option<usize>,
}

/// Median, and what 95 of 100 runs stay below, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
}

/// Time of one batch before and after, in the same minute and in turns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Who ran the models.
    pub runtime: String,
    /// Threads of an operator.
    pub threads: usize,
    /// Sizes of the first input.
    pub batch: Vec<usize>,
    /// Runs that were measured of each model.
    pub runs: usize,
    /// Of the input model.
    pub before_ms: Quantiles,
    /// Of the output.
    pub after_ms: Quantiles,
    /// Median before for the median after.
    pub speedup: f64,
}

/// Who runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// The built-in executor
    Candle,
    /// ONNX Runtime, for ONNX files
    #[cfg_attr(feature = "cli", value(name = "onnxruntime"))]
    OnnxRuntime,
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Runtime::Candle => "candle",
            Runtime::OnnxRuntime => "onnxruntime",
        })
    }
}

/// Accuracy before and after, by runtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// What was asked: `classification`, `language-modelling`, `embedding`, `fidelity`.
    pub task: String,
    /// What is measured; none when there are no labels.
    pub metric: Option<String>,
    /// Where the samples are.
    pub data: String,
    /// How many; windows, for perplexity.
    pub samples: usize,
    /// Of the input model.
    pub before: BTreeMap<Runtime, f64>,
    /// Of the output.
    pub after: BTreeMap<Runtime, f64>,
    /// 95 % intervals of the first runtime's values, before and after.
    pub ci95: Option<[[f64; 2]; 2]>,
    /// How much worse the first runtime's value became; negative when it became better.
    pub drop: Option<f64>,
    /// How close the output's answers are to the input's.
    pub fidelity: Option<Fidelity>,
    /// Other figures of the first runtime's answers, before and after.
    pub more: BTreeMap<String, [f64; 2]>,
}

/// Cost of one run before and after.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compute {
    /// Sizes that the figures hold for.
    pub sizes: BTreeMap<String, usize>,
    /// Of the input model.
    pub before: Cost,
    /// Of the output.
    pub after: Cost,
}

/// What one run costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Multiply-accumulates; zeros count like any other weight.
    pub macs: u64,
    /// Most bytes of values that are alive at once, four a number, weights not counted.
    pub activation_bytes: u64,
}
