//! Evaluation results, as stored in reports.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::counted;

/// Score of a model on labelled samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Score {
    /// `accuracy`, `perplexity`, `spearman`.
    pub metric: String,
    /// Value of the metric.
    pub value: f64,
    /// 95 % confidence interval.
    pub ci95: Option<[f64; 2]>,
    /// Additional metrics of the same outputs.
    pub more: BTreeMap<String, f64>,
}

impl Score {
    /// Difference by which another score is worse; negative if it is better.
    pub fn drop_to(&self, after: &Score) -> f64 {
        if lower_is_better(&self.metric) { after.value - self.value } else { self.value - after.value }
    }
}

/// Whether lower values of a metric are better.
pub fn lower_is_better(metric: &str) -> bool {
    matches!(metric, "perplexity" | KL_DIVERGENCE)
}

/// Name of the mean Kullback-Leibler divergence as a metric.
const KL_DIVERGENCE: &str = "kl_divergence";

/// Fidelity of the outputs of a model to those of another. All float outputs that both models have are
/// compared, and each field holds the value of the output with the worst value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Fidelity {
    /// The output with the lowest mean cosine.
    pub output: String,
    /// Mean cosine similarity of the rows of an output.
    pub cosine: f64,
    /// Lowest cosine similarity of any row.
    pub cosine_min: f64,
    /// Signal to quantization noise ratio in decibels; `None` for equal outputs.
    pub sqnr_db: Option<f64>,
    /// Mean Kullback-Leibler divergence of the predicted distributions, in nats; only for logits.
    pub kl: Option<f64>,
    /// Mean Kullback-Leibler divergence of the probability of a label, in nats; only for the logits of
    /// multi-label classifiers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_kl: Option<f64>,
    /// Fraction of the predictions with the same top class; only for logits.
    pub top1_agreement: Option<f64>,
    /// Largest absolute difference, of the output with the largest difference relative to its values.
    pub max_abs_error: f64,
    /// Largest absolute value of that output in the first model.
    pub largest: f64,
    /// Fidelity of each output.
    #[serde(default)]
    pub outputs: BTreeMap<String, OutputFidelity>,
    /// Outputs that were not compared, with the reasons.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_compared: BTreeMap<String, String>,
    /// Fraction of equal values of each output of integers or Booleans.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub equal: BTreeMap<String, f64>,
}

impl Fidelity {
    /// The KL divergence of classes, or that of labels.
    #[doc(hidden)]
    pub fn divergence(&self) -> Option<f64> {
        self.kl.or(self.label_kl)
    }

    /// The fidelity as a score: the KL divergence of classes or labels, or the mean cosine similarity.
    #[doc(hidden)]
    pub fn score(&self) -> Score {
        let (metric, value) = self.divergence().map_or(("cosine", self.cosine), |kl| (KL_DIVERGENCE, kl));
        Score { metric: metric.to_owned(), value, ci95: None, more: BTreeMap::new() }
    }
}

/// Fidelity of one output. A row is a token (padding excluded) of a text, a distribution of `logits`, or
/// else a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct OutputFidelity {
    /// Mean cosine similarity of the rows.
    pub cosine: f64,
    /// Lowest cosine similarity of any row.
    pub cosine_min: f64,
    /// Signal to quantization noise ratio over all rows in decibels; `None` for equal outputs.
    pub sqnr_db: Option<f64>,
    /// Mean Kullback-Leibler divergence, in nats; only for logits.
    pub kl: Option<f64>,
    /// Mean Kullback-Leibler divergence of the probability of a label, in nats; only for the logits of
    /// multi-label classifiers.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_kl: Option<f64>,
    /// Fraction of the rows with the same top class; only for logits.
    pub top1_agreement: Option<f64>,
    /// Largest absolute difference.
    pub max_abs_error: f64,
    /// Largest absolute value of the output in the first model; NaN if it has infinite or NaN values.
    pub largest: f64,
}

impl OutputFidelity {
    fn is_unusable(&self) -> bool {
        !(self.cosine.is_finite() && self.max_abs_error.is_finite())
    }
}

impl Fidelity {
    /// The worst values of several outputs. Without outputs, the values are those of equal outputs.
    #[doc(hidden)]
    pub fn worst_of(outputs: BTreeMap<String, OutputFidelity>, not_compared: BTreeMap<String, String>) -> Fidelity {
        // NaN ranks as the worst value.
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
            label_kl: worst(&|output| output.label_kl).and_then(|(_, output)| output.label_kl),
            top1_agreement: worst(&|output| output.top1_agreement.map(|part| -part)).and_then(|(_, output)| output.top1_agreement),
            max_abs_error: error.map_or(0.0, |output| output.max_abs_error),
            largest: error.map_or(0.0, |output| output.largest),
            outputs,
            not_compared,
            equal: BTreeMap::new(),
        }
    }

    /// An error message, if an output contains infinite or NaN values.
    #[doc(hidden)]
    pub fn not_finite(&self) -> Option<String> {
        let name = self.outputs.iter().find(|(_, output)| output.is_unusable()).map(|(name, _)| name)?;
        Some(format!("output `{name}` contains infinite or NaN values"))
    }

    /// Whether an output contains infinite or NaN values, but only finite ones in the first model.
    #[doc(hidden)]
    pub fn lost_finite_values(&self) -> bool {
        self.outputs.values().any(|output| output.is_unusable() && output.largest.is_finite())
    }
}

/// Origin of the samples of a [`Fidelity`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SamplesFrom {
    /// Evaluation data of the recipe.
    Evaluation,
    /// Samples of the calibration or training data that no pass has used.
    HeldOut,
    /// Random tokens or numbers: they reveal broken outputs, not the quality on real data.
    Synthetic,
}

/// [`Fidelity`] of the output model to the input model, with the samples it was measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct MeasuredFidelity {
    /// Origin of the samples.
    pub samples_from: SamplesFrom,
    /// Number of samples.
    pub samples: usize,
    /// Path of the data; `None` for synthetic samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Hash of the inputs of the first held-out sample; `None` for other samples, and for models with other
    /// tokens.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_sample: Option<String>,
    /// The fidelity.
    #[serde(flatten)]
    pub fidelity: Fidelity,
}

impl MeasuredFidelity {
    /// A fidelity with its samples.
    #[doc(hidden)]
    pub fn new(samples_from: SamplesFrom, samples: usize, data: Option<String>, fidelity: Fidelity) -> MeasuredFidelity {
        MeasuredFidelity { samples_from, samples, data, first_sample: None, fidelity }
    }

    /// Describes the samples: `32 samples of data.jsonl`.
    #[doc(hidden)]
    pub fn describe(&self) -> String {
        let (count, data) = (self.samples, self.data.as_deref().unwrap_or("the data"));
        match self.samples_from {
            SamplesFrom::Evaluation => format!("{} of {data}", counted(count, "sample")),
            SamplesFrom::HeldOut => format!("{} of {data}", counted(count, "held-out sample")),
            SamplesFrom::Synthetic => format!("{} (random inputs)", counted(count, "synthetic sample")),
        }
    }
}

/// Continuations of a prompt by both models, with greedy decoding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Continuation {
    /// The prompt.
    pub prompt: String,
    /// Continuation by the input model.
    pub before: String,
    /// Continuation by the output model.
    pub after: String,
    /// Index of the first generated token that differs; `None` if all are equal.
    pub first_difference: Option<usize>,
}

impl Continuation {
    /// Continuations of a prompt by the input and the output model.
    #[doc(hidden)]
    pub fn new(prompt: String, [before, after]: [String; 2], first_difference: Option<usize>) -> Continuation {
        Continuation { prompt, before, after, first_difference }
    }
}

/// Median and 95th percentile of the latency in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
}

/// Latency of one batch for the input and the output model, measured in alternation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Latency {
    /// Runtime that ran the models.
    pub runtime: String,
    /// Threads per operator.
    pub threads: usize,
    /// Shape of the first input.
    pub batch: Vec<usize>,
    /// Measured runs per model.
    pub runs: usize,
    /// Latency of the input model.
    pub before_ms: Quantiles,
    /// Latency of the output model.
    pub after_ms: Quantiles,
    /// Median of the ratios of consecutive runs, which other load on the machine affects least.
    pub speedup: f64,
    /// First and third quartile of the ratios of consecutive runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speedup_quartiles: Option<[f64; 2]>,
}

impl Latency {
    /// The speedup, with its quartiles if they are known: `1.52 (1.37 to 1.80)`.
    #[doc(hidden)]
    pub fn describe_speedup(&self) -> String {
        let spread = self.speedup_quartiles.map_or_else(String::new, |[low, high]| format!(" ({low:.2} to {high:.2})"));
        format!("{:.2}{spread}", self.speedup)
    }
}

/// Runtime that runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
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

/// Metric of the input and the output model, by runtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Accuracy {
    /// Evaluation task: `classification`, `language-modelling`, `embedding`, `fidelity`.
    pub task: String,
    /// Name of the metric; `None` without labels.
    pub metric: Option<String>,
    /// Path of the evaluation data.
    pub data: String,
    /// Hash of the contents of the evaluation data.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_blake3: Option<String>,
    /// Number of samples (windows, for perplexity; samples with a label, for accuracy).
    pub samples: usize,
    /// Value of the input model.
    pub before: BTreeMap<Runtime, f64>,
    /// Value of the output model.
    pub after: BTreeMap<Runtime, f64>,
    /// 95 % confidence intervals for the first runtime, before and after.
    pub ci95: Option<[[f64; 2]; 2]>,
    /// Difference by which the value of the first runtime is worse after than before; negative if it is
    /// better.
    pub drop: Option<f64>,
    /// Fidelity of the output model to the input model.
    pub fidelity: Option<Fidelity>,
    /// Additional metrics for the first runtime, before and after.
    pub more: BTreeMap<String, [f64; 2]>,
}

/// Computational cost of one run of the input and the output model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Compute {
    /// Sizes of the dynamic dimensions.
    pub sizes: BTreeMap<String, usize>,
    /// Cost of the input model.
    pub before: Cost,
    /// Cost of the output model.
    pub after: Cost,
}

impl Compute {
    /// Multiply-accumulate operations and bytes of activations of the input and the output model.
    #[doc(hidden)]
    pub fn new(sizes: BTreeMap<String, usize>, costs: [(u64, u64); 2]) -> Compute {
        let [before, after] = costs.map(|(macs, activation_bytes)| Cost { macs, activation_bytes });
        Compute { sizes, before, after }
    }
}

/// Computational cost of one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Cost {
    /// Multiply-accumulate operations. Zero weights count like other weights.
    pub macs: u64,
    /// Peak memory of the activations in bytes, with four bytes per element.
    pub activation_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_output_with_nan_is_found_among_others() {
        let lost = |(max_abs_error, largest)| {
            let equal = OutputFidelity {
                cosine: 1.0,
                cosine_min: 1.0,
                sqnr_db: None,
                kl: None,
                label_kl: None,
                top1_agreement: None,
                max_abs_error: 0.0,
                largest: 1.0,
            };
            let other = OutputFidelity { max_abs_error, largest, ..equal.clone() };
            Fidelity::worst_of([("a".to_owned(), equal), ("b".to_owned(), other)].into(), BTreeMap::new()).lost_finite_values()
        };
        assert_eq!([(f64::NAN, 1.0), (f64::NAN, f64::INFINITY), (0.5, 1.0)].map(lost), [true, false, false]);
    }

    #[test]
    fn a_worse_score_is_a_positive_drop() {
        let score = |metric: &str, value| Score { metric: metric.into(), value, ci95: None, more: BTreeMap::new() };
        assert!(lower_is_better("perplexity") && lower_is_better("kl_divergence") && !lower_is_better("accuracy") && !lower_is_better("spearman"));
        assert_eq!(score("perplexity", 20.0).drop_to(&score("perplexity", 25.0)), 5.0);
        assert_eq!(score("accuracy", 0.75).drop_to(&score("accuracy", 0.5)), 0.25);
    }

    #[test]
    fn each_field_holds_the_value_of_the_worst_output() {
        let output = |cosine: f64, sqnr_db, kl, max_abs_error, largest| OutputFidelity {
            cosine,
            cosine_min: cosine - 0.1,
            sqnr_db,
            kl,
            label_kl: None,
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
        let none = Fidelity::worst_of(BTreeMap::new(), BTreeMap::new());
        assert_eq!((none.cosine, none.cosine_min, none.max_abs_error, none.sqnr_db, none.not_finite()), (1.0, 1.0, 0.0, None, None));
        let score = |fidelity: Fidelity| (fidelity.score().metric, fidelity.score().value);
        assert_eq!(score(none.clone()), ("cosine".to_owned(), 1.0));
        assert_eq!(score(Fidelity { label_kl: Some(0.25), ..none }), ("kl_divergence".to_owned(), 0.25));
    }
}
