//! Holding a report to limits.

use serde::Serialize;

use super::Report;
use super::format::{bytes, milliseconds, seconds};
use crate::error::{Error, Result};
use crate::evaluation::SamplesFrom;
use crate::export::ByteSize;

/// Limits that a run is held to; those that are set count.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct Budgets {
    /// Most bytes of the written weights (of the first format), like 25MB or 20MiB
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", help_heading = "Size"))]
    pub max_bytes: Option<ByteSize>,
    /// Most bytes for each byte of the input: 0.3 or 30%
    #[cfg_attr(feature = "cli", arg(long, value_name = "RATIO", value_parser = parse::fraction, help_heading = "Size"))]
    pub max_size_ratio: Option<f64>,
    /// How much worse the score may be than the input's: 0.01 is one point of accuracy; negative: better by that much
    #[cfg_attr(feature = "cli", arg(long, value_name = "DROP", value_parser = parse::fraction, allow_negative_numbers = true, help_heading = "Answers"))]
    pub max_drop: Option<f64>,
    /// Least mean cosine of the answers to the input's
    #[cfg_attr(feature = "cli", arg(long, value_name = "COSINE", value_parser = parse::fraction, help_heading = "Answers"))]
    pub min_cosine: Option<f64>,
    /// Least cosine of any answer to the input's
    #[cfg_attr(feature = "cli", arg(long, value_name = "COSINE", value_parser = parse::fraction, help_heading = "Answers"))]
    pub min_least_cosine: Option<f64>,
    /// Least signal to noise of the answers, in decibels
    #[cfg_attr(feature = "cli", arg(long, value_name = "DB", value_parser = parse::number, help_heading = "Answers"))]
    pub min_sqnr: Option<f64>,
    /// Least part of the answers whose likeliest class is the input's
    #[cfg_attr(feature = "cli", arg(long, value_name = "PART", value_parser = parse::fraction, help_heading = "Answers"))]
    pub min_agreement: Option<f64>,
    /// How many times as fast as the input it has to be
    #[cfg_attr(feature = "cli", arg(long, value_name = "TIMES", value_parser = parse::number, help_heading = "Speed"))]
    pub min_speedup: Option<f64>,
    /// Longest median time of a batch, in milliseconds
    #[cfg_attr(feature = "cli", arg(long, value_name = "MS", value_parser = parse::number, help_heading = "Speed"))]
    pub max_latency: Option<f64>,
    /// Longest time that 95 of 100 batches stay below, in milliseconds
    #[cfg_attr(feature = "cli", arg(long, value_name = "MS", value_parser = parse::number, help_heading = "Speed"))]
    pub max_latency_p95: Option<f64>,
    /// Most multiply-accumulates for each of the input's
    #[cfg_attr(feature = "cli", arg(long, value_name = "RATIO", value_parser = parse::fraction, help_heading = "Speed"))]
    pub max_macs_ratio: Option<f64>,
    /// Most memory of the run itself, like 500MB
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", help_heading = "The run"))]
    pub max_memory: Option<ByteSize>,
    /// Longest time of the run itself, in seconds
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", value_parser = parse::number, help_heading = "The run"))]
    pub max_seconds: Option<f64>,
}

/// Parsers of limits on the command line.
#[cfg(feature = "cli")]
mod parse {
    use crate::pass::amount::{parse_fraction, suggest_percentage};

    /// A fraction or a ratio; a number from 2 to 100 is refused, because it is more likely to be a percentage.
    pub fn fraction(text: &str) -> Result<f64, String> {
        let value = parse_fraction(text).filter(|value| value.is_finite()).ok_or_else(|| format!("`{text}` is not a number or a percentage"))?;
        match suggest_percentage(value).filter(|_| value >= 2.0 && !text.contains('%')) {
            Some(meant) => Err(format!("`{text}` is not a fraction: write {meant}")),
            None => Ok(value),
        }
    }

    /// A finite number.
    pub fn number(text: &str) -> Result<f64, String> {
        text.parse().ok().filter(|value: &f64| value.is_finite()).ok_or_else(|| format!("`{text}` is not a number"))
    }
}

/// One limit and what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The limit by its name on the command line.
    pub budget: &'static str,
    /// What the report says.
    pub measured: f64,
    /// The limit.
    pub allowed: f64,
    /// Whether it is kept.
    pub ok: bool,
    /// How both are told to people.
    #[serde(skip)]
    unit: MeasureUnit,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum MeasureUnit {
    Plain,
    Bytes,
    Milliseconds,
    Seconds,
}

impl MeasureUnit {
    fn tell(self, value: f64) -> String {
        match self {
            MeasureUnit::Plain => format!("{value:.4}"),
            MeasureUnit::Bytes => bytes(value.max(0.0) as u64),
            MeasureUnit::Milliseconds => milliseconds(value),
            MeasureUnit::Seconds => seconds(value),
        }
    }
}

impl Finding {
    /// Measured and allowed, as people read it; with more digits where both would look the same.
    pub fn words(&self) -> [String; 2] {
        let told = [self.measured, self.allowed].map(|value| self.unit.tell(value));
        if told[0] == told[1] && self.measured != self.allowed { [self.measured, self.allowed].map(|value| value.to_string()) } else { told }
    }
}

/// One limit, before it is held to anything: its name, its value, whether it is the least, and the figure.
struct Limit {
    name: &'static str,
    allowed: Option<f64>,
    measured: Option<f64>,
    unit: MeasureUnit,
    /// What to add to the recipe for the figure to be there.
    needs: &'static str,
}

const SAMPLES: &str = "add `data: { evaluation: ... }` to the recipe, and run it again";
const LABELS: &str = "add `data: { evaluation: ... }` with labels (`label_column`, or `task: language-modelling`) to the recipe, and run it again";
const CLASSES: &str = "add `data: { evaluation: ... }` to the recipe of a model that answers with logits, and run it again";
const TIMES: &str = "add `data: { evaluation: ... }` and `evaluate: { latency: true }` to the recipe, and run it again";
const GRAPH: &str = "it is counted for known families, models with a graph.json, and .onnx files without unknown products";
const SYSTEM: &str = "the system that the run was made on does not tell it";

impl Budgets {
    /// Holds a report to every limit that is set.
    ///
    /// # Errors
    /// No limit is set, or the report lacks a figure, with what to add to the recipe.
    pub fn check(&self, report: &Report) -> Result<Vec<Finding>> {
        let limits = self.limits(report);
        if limits.iter().all(|limit| limit.allowed.is_none()) {
            let names: Vec<String> = limits.iter().map(|limit| format!("--{}", limit.name)).collect();
            return Err(Error::option("check", format!("no budget is given: use at least one of {}", names.join(", "))));
        }
        let asked = limits.iter().filter_map(|limit| Some((limit, limit.allowed?)));
        let found = asked.map(|(limit, allowed)| {
            let missing = || Error::option(format!("--{}", limit.name), format!("the report does not have this figure: {}", limit.needs));
            let measured = limit.measured.ok_or_else(missing)?;
            let ok = if limit.name.starts_with("min") { measured >= allowed } else { measured <= allowed };
            Ok(Finding { budget: limit.name, measured, allowed, ok, unit: limit.unit })
        });
        found.collect()
    }

    fn limits(&self, report: &Report) -> [Limit; 13] {
        let size = |size: Option<ByteSize>| size.map(|size| size.0 as f64);
        let ratio = |after: u64, before: u64| Some(after as f64 / before.max(1) as f64);
        // Random samples cannot tell whether a model is good enough.
        let measured = report.fidelity.as_ref().filter(|measured| measured.samples_from != SamplesFrom::Synthetic).map(|measured| &measured.fidelity);
        let fidelity = report.accuracy.as_ref().and_then(|accuracy| accuracy.fidelity.as_ref()).or(measured);
        let latency = report.latency.as_ref();
        let limit = |name, allowed, measured, unit, needs| Limit { name, allowed, measured, unit, needs };
        [
            limit("max-bytes", size(self.max_bytes), Some(report.size.after.bytes as f64), MeasureUnit::Bytes, ""),
            limit("max-size-ratio", self.max_size_ratio, ratio(report.size.after.bytes, report.size.before.bytes), MeasureUnit::Plain, ""),
            limit("max-drop", self.max_drop, report.accuracy.as_ref().and_then(|accuracy| accuracy.drop), MeasureUnit::Plain, LABELS),
            limit("min-cosine", self.min_cosine, fidelity.map(|f| f.cosine), MeasureUnit::Plain, SAMPLES),
            limit("min-least-cosine", self.min_least_cosine, fidelity.map(|f| f.cosine_min), MeasureUnit::Plain, SAMPLES),
            // Answers without any difference have no noise.
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
