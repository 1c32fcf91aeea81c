//! Checks a report against budgets.

use serde::Serialize;

use super::Report;
use super::format::{bytes, milliseconds, seconds};
use crate::error::{Error, Result};
use crate::evaluation::SamplesFrom;
use crate::ratio::suggest_percentage;
use crate::store::ByteSize;

/// Limits for a run; limits that are `None` are not checked.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct Budgets {
    /// Maximum size of the written weights (of the first format), like 25MB or 20MiB
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", help_heading = "Size"))]
    pub max_bytes: Option<ByteSize>,
    /// Maximum size relative to the input: 0.3 or 30%
    #[cfg_attr(feature = "cli", arg(long, value_name = "RATIO", value_parser = crate::ratio::parse, help_heading = "Size"))]
    pub max_size_ratio: Option<f64>,
    /// Maximum drop of the score: 0.01 is one point of accuracy; a negative value requires an improvement
    #[cfg_attr(feature = "cli", arg(long, value_name = "DROP", value_parser = parse::score, allow_negative_numbers = true, help_heading = "Quality"))]
    pub max_drop: Option<f64>,
    /// Minimum mean cosine similarity of the outputs to the input model's
    #[cfg_attr(feature = "cli", arg(long, value_name = "COSINE", value_parser = crate::ratio::parse, help_heading = "Quality"))]
    pub min_cosine: Option<f64>,
    /// Minimum cosine similarity of any single output to the input model's
    #[cfg_attr(feature = "cli", arg(long, value_name = "COSINE", value_parser = crate::ratio::parse, help_heading = "Quality"))]
    pub min_least_cosine: Option<f64>,
    /// Minimum signal-to-noise ratio of the outputs, in decibels
    #[cfg_attr(feature = "cli", arg(long, value_name = "DB", value_parser = parse::number, help_heading = "Quality"))]
    pub min_sqnr: Option<f64>,
    /// Minimum fraction of predictions with the same top class as the input model's
    #[cfg_attr(feature = "cli", arg(long, value_name = "PART", value_parser = crate::ratio::parse, help_heading = "Quality"))]
    pub min_agreement: Option<f64>,
    /// Minimum speed-up over the input model
    #[cfg_attr(feature = "cli", arg(long, value_name = "TIMES", value_parser = parse::number, help_heading = "Speed"))]
    pub min_speedup: Option<f64>,
    /// Maximum median latency of a batch, in milliseconds
    #[cfg_attr(feature = "cli", arg(long, value_name = "MS", value_parser = parse::number, help_heading = "Speed"))]
    pub max_latency: Option<f64>,
    /// Maximum 95th percentile of the latency of a batch, in milliseconds
    #[cfg_attr(feature = "cli", arg(long, value_name = "MS", value_parser = parse::number, help_heading = "Speed"))]
    pub max_latency_p95: Option<f64>,
    /// Maximum multiply-accumulates relative to the input model
    #[cfg_attr(feature = "cli", arg(long, value_name = "RATIO", value_parser = crate::ratio::parse, help_heading = "Speed"))]
    pub max_macs_ratio: Option<f64>,
    /// Maximum peak memory of the run, like 500MB
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", help_heading = "Run"))]
    pub max_memory: Option<ByteSize>,
    /// Maximum duration of the run, in seconds
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", value_parser = parse::number, help_heading = "Run"))]
    pub max_seconds: Option<f64>,
}

/// Command-line parsers of limits.
#[cfg(feature = "cli")]
mod parse {
    use crate::ratio::parse_fraction;

    /// Parses a difference of scores: a number or a percentage.
    pub fn score(text: &str) -> Result<f64, String> {
        parse_fraction(text).filter(|value| value.is_finite()).ok_or_else(|| format!("`{text}` is not a number or a percentage"))
    }

    /// Parses a finite number.
    pub fn number(text: &str) -> Result<f64, String> {
        text.parse().ok().filter(|value: &f64| value.is_finite()).ok_or_else(|| format!("`{text}` is not a number"))
    }
}

/// A limit and the measured value.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// Name of the limit on the command line.
    pub budget: &'static str,
    /// The value in the report.
    pub measured: f64,
    /// The limit.
    pub allowed: f64,
    /// Whether the limit is met.
    pub ok: bool,
    /// Unit for displaying both values.
    #[serde(skip)]
    unit: MeasureUnit,
    /// How to meet the limit.
    #[serde(skip)]
    advice: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum MeasureUnit {
    Plain,
    Bytes,
    Milliseconds,
    Seconds,
}

impl MeasureUnit {
    fn format(self, value: f64) -> String {
        match self {
            MeasureUnit::Plain => format!("{value:.4}"),
            MeasureUnit::Bytes => bytes(value.max(0.0) as u64),
            MeasureUnit::Milliseconds => milliseconds(value),
            MeasureUnit::Seconds => seconds(value),
        }
    }
}

impl Finding {
    /// How to meet the limit.
    #[doc(hidden)]
    pub fn advice(&self) -> &'static str {
        self.advice
    }

    /// The measured and the allowed value as text, with all digits if they would look equal otherwise.
    #[doc(hidden)]
    pub fn formatted(&self) -> [String; 2] {
        let texts = [self.measured, self.allowed].map(|value| self.unit.format(value));
        if texts[0] == texts[1] && self.measured != self.allowed { [self.measured, self.allowed].map(|value| value.to_string()) } else { texts }
    }
}

/// A limit with the corresponding value of the report. Names that start with `min` are lower limits.
struct Limit {
    name: &'static str,
    allowed: Option<f64>,
    measured: Option<f64>,
    unit: MeasureUnit,
    /// How to obtain the value if the report lacks it.
    hint: &'static str,
    /// How to meet the limit.
    advice: &'static str,
}

/// Metrics between -1 and 1.
const BOUNDED: [&str; 2] = ["accuracy", "spearman"];

const SAMPLES: &str =
    "add `data: { evaluation: ... }` to the recipe, and run it again; if it has these data, a note of the report states why nothing was measured";
const LABELS: &str = "add `data: { evaluation: ... }` with labels (`label_column`, or `task: language-modelling`) to the recipe, and run it again";
const CLASSES: &str = "add `data: { evaluation: ... }` to the recipe of a model with logits as outputs, and run it again";
const TIMES: &str = "add `data: { evaluation: ... }` and `evaluate: { latency: true }` to the recipe, and run it again";
const GRAPH: &str = "multiply-accumulates are counted for supported families, models with a graph.json, and .onnx files without unsupported operators";
const SYSTEM: &str = "the operating system of the run does not report it";

/// How to meet limits, by their names.
const ADVICE: [(&[&str], &str); 4] = [
    (
        &["max-bytes", "max-size-ratio"],
        "a smaller output needs fewer bits or more pruning: `compress auto MODEL -o DIR --max-size SIZE` chooses the format of each layer for a size",
    ),
    (
        &["max-drop", "min-cosine", "min-least-cosine", "min-sqnr", "min-agreement"],
        "a better output needs more bits, less pruning or calibration data: `compress analyze RECIPE` lists the layers that should not be quantized, and a `distill` pass recovers the rest",
    ),
    (
        &["min-speedup", "max-latency", "max-latency-p95", "max-macs-ratio"],
        "a faster output needs fewer operations or a format with fast kernels: `prune-structured --target latency=0.5` removes units, and `compress auto MODEL -o DIR --for onnxruntime --latency TIME` chooses formats by their times",
    ),
    (&["max-memory", "max-seconds"], "the run needs less memory with fewer `--threads`, and less time with more of them, or with `--no-measure`"),
];

/// Why a maximum drop was probably meant as a percentage: scores of at most 1 cannot drop by as much.
fn unreachable_drop(drop: f64, report: &Report) -> Option<String> {
    let metric = report.accuracy.as_ref()?.metric.as_deref().filter(|metric| BOUNDED.contains(metric))?;
    let suggestion = suggest_percentage(drop).filter(|_| drop >= 2.0)?;
    Some(format!("no {metric} can drop by more than {drop}: write {suggestion}"))
}

impl Budgets {
    /// Checks a report against all limits that are set.
    ///
    /// # Errors
    /// No limit is set, the report lacks a measurement, or no score can drop by more than the limit. The
    /// error names the settings to add to the recipe.
    pub fn check(&self, report: &Report) -> Result<Vec<Finding>> {
        let limits = self.limits(report);
        if limits.iter().all(|limit| limit.allowed.is_none()) {
            let names: Vec<String> = limits.iter().map(|limit| format!("--{}", limit.name)).collect();
            return Err(Error::option("check", format!("no budget is specified: use at least one of {}", names.join(", "))));
        }
        if let Some(reason) = self.max_drop.and_then(|drop| unreachable_drop(drop, report)) {
            return Err(Error::option("--max-drop", reason));
        }
        let requested = limits.iter().filter_map(|limit| Some((limit, limit.allowed?)));
        let findings = requested.map(|(limit, allowed)| {
            let missing = || Error::option(format!("--{}", limit.name), format!("the report does not contain this measurement: {}", limit.hint));
            let measured = limit.measured.ok_or_else(missing)?;
            let ok = if limit.name.starts_with("min") { measured >= allowed } else { measured <= allowed };
            Ok(Finding { budget: limit.name, measured, allowed, ok, unit: limit.unit, advice: limit.advice })
        });
        findings.collect()
    }

    fn limits(&self, report: &Report) -> [Limit; 13] {
        let size = |size: Option<ByteSize>| size.map(|size| size.0 as f64);
        let ratio = |after: u64, before: u64| Some(after as f64 / before.max(1) as f64);
        // Synthetic samples are not representative of the quality of a model.
        let measured = report.fidelity.as_ref().filter(|measured| measured.samples_from != SamplesFrom::Synthetic).map(|measured| &measured.fidelity);
        let fidelity = report.accuracy.as_ref().and_then(|accuracy| accuracy.fidelity.as_ref()).or(measured);
        let latency = report.latency.as_ref();
        let limit = |name: &'static str, allowed, measured, unit, hint| {
            let advice = ADVICE.iter().find(|(names, _)| names.contains(&name)).map_or("", |(_, advice)| *advice);
            Limit { name, allowed, measured, unit, hint, advice }
        };
        [
            limit("max-bytes", size(self.max_bytes), Some(report.size.after.bytes as f64), MeasureUnit::Bytes, ""),
            limit("max-size-ratio", self.max_size_ratio, ratio(report.size.after.bytes, report.size.before.bytes), MeasureUnit::Plain, ""),
            limit("max-drop", self.max_drop, report.accuracy.as_ref().and_then(|accuracy| accuracy.drop), MeasureUnit::Plain, LABELS),
            limit("min-cosine", self.min_cosine, fidelity.map(|f| f.cosine), MeasureUnit::Plain, SAMPLES),
            limit("min-least-cosine", self.min_least_cosine, fidelity.map(|f| f.cosine_min), MeasureUnit::Plain, SAMPLES),
            // Identical outputs have no noise.
            limit("min-sqnr", self.min_sqnr, fidelity.map(|f| f.sqnr_db.unwrap_or(f64::MAX)), MeasureUnit::Plain, SAMPLES),
            limit("min-agreement", self.min_agreement, fidelity.and_then(|f| f.top1_agreement), MeasureUnit::Plain, CLASSES),
            limit("min-speedup", self.min_speedup, latency.map(|l| l.speedup), MeasureUnit::Plain, TIMES),
            limit("max-latency", self.max_latency, latency.map(|l| l.after_ms.p50), MeasureUnit::Milliseconds, TIMES),
            limit("max-latency-p95", self.max_latency_p95, latency.map(|l| l.after_ms.p95), MeasureUnit::Milliseconds, TIMES),
            limit("max-macs-ratio", self.max_macs_ratio, report.compute.as_ref().and_then(|c| ratio(c.after.macs, c.before.macs)), MeasureUnit::Plain, GRAPH),
            limit("max-memory", size(self.max_memory), report.totals.peak_rss_bytes.map(|b| b as f64), MeasureUnit::Bytes, SYSTEM),
            limit("max-seconds", self.max_seconds, Some(report.totals.seconds), MeasureUnit::Seconds, ""),
        ]
    }
}
