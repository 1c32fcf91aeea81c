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

/// Closeness of one model's outputs to another's: every float output that both have is compared, and each figure is that of the output
/// where it is worst.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fidelity {
    /// The output with the lowest mean cosine.
    pub output: String,
    /// Mean cosine of the rows of an output.
    pub cosine: f64,
    /// Lowest cosine of any row.
    pub cosine_min: f64,
    /// Signal to noise ratio; `None` for equal outputs.
    pub sqnr_db: Option<f64>,
    /// Mean Kullback-Leibler divergence of the predicted distributions, in nats; only for logits.
    pub kl: Option<f64>,
    /// Fraction of the predictions with the same top class; only for logits.
    pub top1_agreement: Option<f64>,
    /// Largest absolute difference, of the output where it is largest relative to the values.
    pub max_abs_error: f64,
    /// Largest absolute value of the same output of the first model.
    pub largest: f64,
    /// Figures of each output.
    #[serde(default)]
    pub outputs: BTreeMap<String, OutputFidelity>,
    /// Float outputs that were not compared, each with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_compared: BTreeMap<String, String>,
}

/// Closeness of one output. A row is a token (padding excluded) of a text, a distribution of `logits`, or else a whole sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputFidelity {
    /// Mean cosine of the rows.
    pub cosine: f64,
    /// Lowest cosine of any row.
    pub cosine_min: f64,
    /// Signal to noise ratio over all rows; `None` for equal outputs.
    pub sqnr_db: Option<f64>,
    /// Mean Kullback-Leibler divergence, in nats; only for logits.
    pub kl: Option<f64>,
    /// Fraction of the rows with the same top class; only for logits.
    pub top1_agreement: Option<f64>,
    /// Largest absolute difference.
    pub max_abs_error: f64,
    /// Largest absolute value of the first model.
    pub largest: f64,
}

impl Fidelity {
    /// The worst figures of several outputs. Without any output, nothing differs.
    pub fn worst_of(outputs: BTreeMap<String, OutputFidelity>, not_compared: BTreeMap<String, String>) -> Fidelity {
        // NaN is worse than any number.
        let bad = |value: f64| if value.is_nan() { f64::INFINITY } else { value };
        let worst = |badness: &dyn Fn(&OutputFidelity) -> Option<f64>| {
            let rated = outputs.iter().filter_map(|(name, output)| Some((name, output, bad(badness(output)?))));
            rated.max_by(|a, b| a.2.total_cmp(&b.2).then(b.0.cmp(a.0))).map(|(name, output, _)| (name, output))
        };
        let cosine = worst(&|output| Some(-output.cosine));
        let error = worst(&|output| Some(output.max_abs_error / output.largest.max(1.0))).map(|(_, output)| output);
        Fidelity {
            output: cosine.map(|(name, _)| name.clone()).unwrap_or_default(),
            cosine: cosine.map_or(1.0, |(_, output)| output.cosine),
            cosine_min: worst(&|output| Some(-output.cosine_min)).map_or(1.0, |(_, output)| output.cosine_min),
            sqnr_db: worst(&|output| output.sqnr_db.map(|db| -db)).and_then(|(_, output)| output.sqnr_db),
            kl: worst(&|output| output.kl).and_then(|(_, output)| output.kl),
            top1_agreement: worst(&|output| output.top1_agreement.map(|part| -part)).and_then(|(_, output)| output.top1_agreement),
            max_abs_error: error.map_or(0.0, |output| output.max_abs_error),
            largest: error.map_or(0.0, |output| output.largest),
            outputs,
            not_compared,
        }
    }

    /// Why the figures are unusable, if a value of an output is infinite or not a number.
    pub fn not_finite(&self) -> Option<String> {
        let unusable = |output: &OutputFidelity| !(output.cosine.is_finite() && output.max_abs_error.is_finite());
        let name = self.outputs.iter().find(|(_, output)| unusable(output)).map(|(name, _)| name)?;
        Some(format!("output `{name}` holds values that are infinite or not a number"))
    }
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
    /// First and third quartile of the ratios of runs that followed each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speedup_quartiles: Option<[f64; 2]>,
}

impl Latency {
    /// How many times as fast, with the quartiles if these are known: `1.52 (1.37 to 1.80)`.
    pub fn describe_speedup(&self) -> String {
        let spread = self.speedup_quartiles.map_or_else(String::new, |[low, high]| format!(" ({low:.2} to {high:.2})"));
        format!("{:.2}{spread}", self.speedup)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worse_score_is_a_positive_drop() {
        let score = |metric: &str, value| Score { metric: metric.into(), value, ci95: None, more: BTreeMap::new() };
        assert!(lower_is_better("perplexity") && !lower_is_better("accuracy") && !lower_is_better("spearman"));
        assert_eq!(score("perplexity", 20.0).drop_to(&score("perplexity", 25.0)), 5.0);
        assert_eq!(score("accuracy", 0.75).drop_to(&score("accuracy", 0.5)), 0.25);
    }

    #[test]
    fn every_figure_is_that_of_the_worst_output() {
        let output = |cosine: f64, sqnr_db, kl, max_abs_error, largest| OutputFidelity {
            cosine,
            cosine_min: cosine - 0.1,
            sqnr_db,
            kl,
            top1_agreement: kl.map(|kl| 1.0 - kl),
            max_abs_error,
            largest,
        };
        let good = [
            ("boxes", output(0.99, Some(20.0), None, 5.0, 100.0)),
            ("logits", output(0.9, Some(25.0), Some(0.25), 0.5, 2.0)),
            ("same", output(1.0, None, None, 0.0, 1.0)),
        ];
        let named = |outputs: &[(&str, OutputFidelity)]| outputs.iter().map(|(name, output)| ((*name).to_owned(), output.clone())).collect::<BTreeMap<_, _>>();
        let worst = Fidelity::worst_of(named(&good), BTreeMap::new());
        assert_eq!((worst.output.as_str(), worst.cosine, worst.cosine_min, worst.sqnr_db), ("logits", 0.9, 0.8, Some(20.0)));
        assert_eq!((worst.kl, worst.top1_agreement, worst.max_abs_error, worst.largest), (Some(0.25), Some(0.75), 0.5, 2.0));
        assert_eq!(worst.not_finite(), None);
        let mut broken = named(&good);
        broken.insert("x".into(), output(f64::NAN, None, None, f64::NAN, 1.0));
        let broken = Fidelity::worst_of(broken, BTreeMap::new());
        assert!(broken.output == "x" && broken.cosine.is_nan() && broken.max_abs_error.is_nan() && broken.not_finite().unwrap().contains("`x`"));
        assert_eq!(broken.outputs["logits"], good[1].1);
    }
}
