//! Accuracy goal: leaves the most sensitive layers in floats until the quality of the model is sufficient.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::prepare::Prepared;
use super::{Damage, NAME, QuantizeStatic, sensitivity};
use crate::calibration::ValueStatistics;
use crate::error::{Error, ParseError, Result, counted};
use crate::evaluation::{Baseline, Comparison, Samples, Subject};
use crate::exec::Rounding;
use crate::model::Model;
use crate::pass::Context;
use crate::run_state::WARNING;

/// Required quality of the quantized model: one of `max_drop` and `min_cosine`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// Maximum drop of the score on the evaluation data (0.01: one point of accuracy)
    #[serde(default, deserialize_with = "crate::ratio::optional_ratio", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::optional_ratio_schema"))]
    pub max_drop: Option<f64>,
    /// Minimum mean cosine similarity of the outputs to those of the original, on the evaluation data or
    /// else the calibration data
    #[serde(default, deserialize_with = "crate::ratio::optional_ratio", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::optional_ratio_schema"))]
    pub min_cosine: Option<f64>,
    /// Maximum number of models to try
    #[serde(default = "trials")]
    pub max_trials: usize,
    /// Time limit in minutes
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
    /// Fail if the goal is not met; otherwise the best model is written with a warning
    #[serde(default)]
    pub strict: bool,
}

fn trials() -> usize {
    10
}

impl FromStr for Goal {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        serde_saphyr::from_str(text).map_err(|e| e.to_string().into())
    }
}

impl Goal {
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |reason: &str| Err(Error::option(NAME, format!("`accuracy_goal` {reason}")));
        match (self.max_drop, self.min_cosine) {
            (None, None) | (Some(_), Some(_)) => wrong("needs one of `max_drop` and `min_cosine`"),
            (Some(drop), _) if !(drop.is_finite() && drop >= 0.0) => wrong("`max_drop` must be at least 0"),
            (_, Some(cosine)) if !(0.0..=1.0).contains(&cosine) => wrong("`min_cosine` must be from 0 to 1"),
            _ if self.max_trials == 0 => wrong("`max_trials` must be at least 1"),
            _ if self.max_minutes.is_some_and(|minutes| minutes <= 0.0 || minutes.is_nan()) => wrong("`max_minutes` must be more than 0"),
            _ => Ok(()),
        }
    }

    /// A metric with the digits that distinguish it from the goal.
    fn shown(&self, metric: f64) -> String {
        let goal = self.max_drop.or(self.min_cosine).unwrap_or(metric);
        let digits = (4..12usize).find(|digits| format!("{metric:.digits$}") != format!("{goal:.digits$}")).unwrap_or(4);
        format!("{metric:.digits$}")
    }

    /// Distance of a metric from the goal, which is met if it is at least 0. NaN never meets it.
    fn margin(&self, figure: f64) -> f64 {
        if figure.is_nan() {
            return f64::NEG_INFINITY;
        }
        match (self.max_drop, self.min_cosine) {
            (Some(drop), _) => drop - figure,
            (_, Some(cosine)) => figure - cosine,
            _ => 0.0,
        }
    }

    /// Searches for the minimum number of layers in floats, of `count`: 0, 1, 2, 4 …, then by bisection.
    /// Returns all trials, and the best one.
    fn search(&self, count: usize, is_late: impl Fn() -> bool, mut measure: impl FnMut(usize) -> Result<f64>) -> Result<(Vec<Trial>, Trial)> {
        let mut trials: Vec<Trial> = Vec::new();
        let mut best = Trial { in_floats: 0, metric: f64::NAN };
        let (mut failed, mut met): (Option<usize>, Option<usize>) = (None, None);
        let mut next = Some(0);
        while let Some(in_floats) = next.filter(|_| trials.len() < self.max_trials && (trials.is_empty() || !is_late())) {
            let trial = Trial { in_floats, metric: measure(in_floats)? };
            trials.push(trial);
            let (margin, known) = (self.margin(trial.metric), self.margin(best.metric));
            let is_better = if margin >= 0.0 && known >= 0.0 { in_floats < best.in_floats } else { margin > known };
            if is_better {
                best = trial;
            }
            if margin >= 0.0 {
                met = Some(met.map_or(in_floats, |m| m.min(in_floats)))
            } else {
                failed = Some(failed.map_or(in_floats, |f| f.max(in_floats)))
            }
            next = match (failed, met) {
                (None, _) => None,
                (Some(f), None) if f < count => Some((2 * f).max(1).min(count)),
                (Some(f), Some(m)) if f + 1 < m => Some(f.midpoint(m)),
                _ => None,
            };
        }
        Ok((trials, best))
    }

    fn name(&self) -> &'static str {
        if self.max_drop.is_some() { "drop" } else { "cosine" }
    }
}

/// A tried model.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// Number of layers in floats.
    in_floats: usize,
    metric: f64,
}

/// Result of the search.
pub(super) struct Outcome {
    /// Quantized layers.
    pub layers: BTreeSet<String>,
    pub table: Value,
    /// Sensitivity of each layer, the most sensitive first.
    pub damages: Vec<Damage>,
    pub note: String,
}

impl QuantizeStatic {
    /// Leaves the minimum number of layers in floats. Returns an error if the goal is strict and is not met.
    pub(super) fn reach_goal(
        &self,
        goal: &Goal,
        original: &Model,
        prepared: &Prepared,
        statistics: &BTreeMap<String, ValueStatistics>,
        context: &Context,
    ) -> Result<Outcome> {
        let start = Instant::now();
        let damages = sensitivity::ranked(self, prepared, statistics, context)?;
        let order: Vec<String> = damages.iter().map(|damage| damage.name.clone()).collect();
        let evaluator = Evaluator::new(goal, original, context)?;
        let is_late = || goal.max_minutes.is_some_and(|minutes| start.elapsed().as_secs_f64() > 60.0 * minutes);
        let measure = |in_floats: usize| evaluator.metric(self.with_floats(prepared, &order, in_floats, statistics)?, context);
        let (trials, Trial { in_floats, metric }) = goal.search(order.len(), is_late, measure)?;
        let (margin, count) = (goal.margin(metric), order.len());
        let names = order.iter().take(in_floats).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let mut layers = if in_floats == 0 { "all layers are quantized".to_owned() } else { format!("{in_floats} of {count} layers stay in floats: {names}") };
        if margin < 0.0 && in_floats == count && self.embeddings {
            layers.push_str("; with `embeddings: false`, embedding tables stay in floats too");
        }
        if margin < 0.0 && goal.strict {
            return Err(Error::run(
                NAME,
                format!("the accuracy goal is not met: the best of {} tried models has a {} of {}", trials.len(), goal.name(), goal.shown(metric)),
                "relax the goal, increase `max_trials`, or remove `strict` to write the best model",
            ));
        }
        let outcome = if margin >= 0.0 { "met" } else { "not met" };
        let tried = counted(trials.len(), "trial");
        let prefix = if margin >= 0.0 { "" } else { WARNING };
        let note = format!("{prefix}accuracy goal {outcome} after {tried}: {} {}; {layers}", goal.name(), goal.shown(metric));
        let rows: Vec<Value> =
            trials.iter().map(|t| json!({ "in_floats": t.in_floats, (goal.name()): t.metric, "met": goal.margin(t.metric) >= 0.0 })).collect();
        let table = json!({ "met": margin >= 0.0, "tried": rows, "in_floats": order[..in_floats] });
        Ok(Outcome { layers: order[in_floats..].iter().cloned().collect(), table, damages, note })
    }

    /// Quantizes the model except for the first `in_floats` layers of `order`.
    fn with_floats(&self, prepared: &Prepared, order: &[String], in_floats: usize, statistics: &BTreeMap<String, ValueStatistics>) -> Result<Model> {
        let layers: BTreeSet<String> = order[in_floats..].iter().cloned().collect();
        let quantizers = self.quantizers(prepared, &layers, Some(statistics))?;
        self.fit(prepared, &quantizers, &layers, Some(statistics), &Arc::default())
    }
}

/// Evaluates the metric of the goal.
enum Evaluator {
    /// Drop of the score.
    Drop(Box<Baseline>),
    /// Mean cosine similarity of the outputs.
    Cosine(Box<Comparison>),
}

impl Evaluator {
    fn new(goal: &Goal, original: &Model, context: &Context) -> Result<Evaluator> {
        let options = match (goal.max_drop, &context.data.evaluation, &context.data.calibration) {
            (_, Some(options), _) | (None, None, Some(options)) => options,
            _ => return Err(Error::option(NAME, "`accuracy_goal: { max_drop: ... }` needs `data: { evaluation: ... }` with labels")),
        };
        let data = context.data.open(options, Subject::from_model(original.clone())?.target())?;
        let original = original.clone();
        if goal.max_drop.is_none() {
            return Ok(Evaluator::Cosine(Box::new(Comparison::new(original, Samples::Set(data)))));
        }
        let without_labels = || Error::option(NAME, "`accuracy_goal: { max_drop: ... }` needs evaluation data with labels; without labels, use `min_cosine`");
        Ok(Evaluator::Drop(Box::new(Baseline::new(original, data, None, context.resources(Rounding::Token))?.ok_or_else(without_labels)?)))
    }

    /// The drop of the score, or the mean cosine similarity.
    fn metric(&self, model: Model, context: &Context) -> Result<f64> {
        let resources = context.resources(Rounding::Token);
        match self {
            Evaluator::Drop(baseline) => Ok(baseline.score_of(model, resources)?.map_or(f64::INFINITY, |now| baseline.score.drop_to(&now))),
            Evaluator::Cosine(comparison) => Ok(comparison.fidelity(&model, resources)?.cosine),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_is_positive_if_the_goal_is_met() {
        let goal = |text: &str| text.parse::<Goal>().unwrap();
        let drop = goal("{max_drop: 0.01}");
        assert!(drop.margin(0.005) > 0.0 && drop.margin(0.02) < 0.0 && drop.margin(-0.5) > drop.margin(0.0));
        let cosine = goal("{min_cosine: 0.99}");
        assert!(cosine.margin(0.995) > 0.0 && cosine.margin(0.98) < 0.0);
        assert_eq!([drop.margin(0.01), cosine.margin(0.99)], [0.0; 2]);
        assert_eq!([drop.margin(f64::NAN), cosine.margin(f64::NAN)], [f64::NEG_INFINITY; 2]);
    }

    #[test]
    fn metrics_have_the_digits_that_distinguish_them_from_the_goal() {
        let goal: Goal = "{min_cosine: 0.99}".parse().unwrap();
        assert_eq!([0.5, 0.9899, 0.989999, 0.99].map(|metric| goal.shown(metric)), ["0.5000", "0.9899", "0.989999", "0.9900"]);
    }

    #[test]
    fn the_search_finds_the_minimum_number_of_layers_in_floats() {
        let goal: Goal = "{min_cosine: 0.5, max_trials: 20}".parse().unwrap();
        for count in 0..20 {
            // The goal is met exactly with `enough` layers in floats, or never.
            for enough in 0..=count + 1 {
                let cosine = |in_floats: usize| 0.5 + (in_floats as f64 - enough as f64) / 64.0;
                let (trials, best) = goal.search(count, || false, |in_floats| Ok(cosine(in_floats))).unwrap();
                assert_eq!((best.in_floats, best.metric), (enough.min(count), cosine(enough.min(count))), "{count}");
                let tried: BTreeSet<usize> = trials.iter().map(|trial| trial.in_floats).collect();
                assert!(tried.len() == trials.len() && trials.len() <= 10 && *tried.last().unwrap() <= count, "{tried:?}");
                assert!(enough > 0 || trials.len() == 1, "the first trial meets the goal");
                let (trials, first) = goal.search(count, || true, |in_floats| Ok(cosine(in_floats))).unwrap();
                assert_eq!((trials.len(), first.in_floats), (1, 0));
            }
        }
        let (trials, best) = Goal { max_trials: 3, ..goal }.search(9, || false, |in_floats| Ok(if in_floats == 1 { 0.25 } else { 0.125 })).unwrap();
        assert_eq!((trials.len(), best.in_floats), (3, 1));
        assert_eq!(goal.search(2, || false, |_| Ok(f64::NAN)).unwrap().1.in_floats, 0);
    }
}
