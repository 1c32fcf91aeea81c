//! Accuracy goal: leaves the most sensitive layers in floats until the quality of the model is sufficient.
//! The choices are those of the front of all choices of layers, which are measured like those of `compress
//! auto`.

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
use crate::pass::assignment::{Assignment, Measured, next_within};
use crate::run_state::WARNING;

/// Required quality of the quantized model: one of `max_drop` and `min_cosine`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// Maximum drop of the score on the evaluation data (0.01: one point of accuracy)
    #[serde(default, deserialize_with = "crate::ratio::optional_difference", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::optional_ratio"))]
    pub max_drop: Option<f64>,
    /// Minimum mean cosine similarity of the outputs to those of the original, on the evaluation data or
    /// else the calibration data
    #[serde(default, deserialize_with = "crate::ratio::optional_ratio", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::optional_ratio"))]
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

    /// The limit relative to a metric: less than 1 if the metric does not meet the goal.
    fn share(&self, metric: f64) -> f64 {
        let (limit, measured) = match (self.max_drop, self.min_cosine) {
            (Some(drop), _) => (drop, metric),
            (_, Some(cosine)) => (1.0 - cosine, 1.0 - metric),
            _ => (1.0, 1.0),
        };
        if measured > 0.0 { limit / measured } else { 1.0 }
    }

    /// Searches for the assignment with the fewest layers in floats, as [`auto`](crate::pass::assignment)
    /// does. Returns all trials, and the best one.
    fn search(&self, front: &[Assignment], is_late: impl Fn() -> bool, mut measure: impl FnMut(&Assignment) -> Result<f64>) -> Result<(Vec<Trial>, Trial)> {
        let costs: Vec<(u64, f64)> = front.iter().map(|assignment| (assignment.cost, assignment.loss)).collect();
        let mut trials: Vec<Trial> = Vec::new();
        let mut best = Trial { at: 0, in_floats: 0, metric: f64::NAN };
        let mut next = Some(0);
        while let Some((at, assignment)) = next.and_then(|at| Some((at, front.get(at)?))) {
            if trials.len() >= self.max_trials || !trials.is_empty() && is_late() {
                break;
            }
            let trial = Trial { at, in_floats: assignment.cost as usize, metric: measure(assignment)? };
            let (margin, known) = (self.margin(trial.metric), self.margin(best.metric));
            let is_better = if margin >= 0.0 && known >= 0.0 { trial.in_floats < best.in_floats } else { margin > known };
            if is_better {
                best = trial;
            }
            trials.push(trial);
            let measured = |trial: &Trial| {
                let (cost, loss) = costs.get(trial.at).copied().unwrap_or_default();
                Measured { cost, loss, is_within: self.margin(trial.metric) >= 0.0, share: self.share(trial.metric) }
            };
            let measured: Vec<Measured> = trials.iter().map(measured).collect();
            next = next_within(&costs, &measured, |at| trials.iter().all(|trial| trial.at != at), trials.len() - 1);
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
    /// Index of its assignment in the front.
    at: usize,
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
        let (front, evaluator) = (sensitivity::front_of(&damages), Evaluator::new(goal, original, context)?);
        let is_late = || goal.max_minutes.is_some_and(|minutes| start.elapsed().as_secs_f64() > 60.0 * minutes);
        let measure = |assignment: &Assignment| {
            let [layers, _] = sensitivity::quantized_and_floats(&damages, assignment);
            evaluator.metric(self.with_layers(prepared, &layers.into_iter().collect(), statistics)?, context)
        };
        let (trials, Trial { at, in_floats, metric }) = goal.search(&front, is_late, measure)?;
        let [quantized, floats] = front.get(at).map(|assignment| sensitivity::quantized_and_floats(&damages, assignment)).unwrap_or_default();
        let (margin, count) = (goal.margin(metric), damages.len());
        let names = floats.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
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
        let table = json!({ "met": margin >= 0.0, "tried": rows, "in_floats": floats });
        Ok(Outcome { layers: quantized.into_iter().collect(), table, damages, note })
    }

    /// Quantizes these layers of the model.
    fn with_layers(&self, prepared: &Prepared, layers: &BTreeSet<String>, statistics: &BTreeMap<String, ValueStatistics>) -> Result<Model> {
        let quantizers = self.quantizers(prepared, layers, Some(statistics))?;
        self.fit(prepared, &quantizers, layers, Some(statistics), &Arc::default())
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
        // A perplexity can rise by more than 1.
        assert_eq!([goal("{max_drop: 5}"), goal("{max_drop: 1%}")].map(|goal| goal.max_drop), [Some(5.0), Some(0.01)]);
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
        let front = |count: usize| {
            let damages = (0..count).map(|at| Damage { quantized: Some(1.0 - 0.1 * 0.8f64.powi(at as i32)), ..Damage::new(&at.to_string()) });
            sensitivity::front_of(&damages.collect::<Vec<_>>())
        };
        for count in 0..20 {
            // The goal is met exactly with `enough` layers in floats, or never.
            for enough in 0..=count + 1 {
                let cosine = |in_floats: u64| 0.5 + (in_floats as f64 - enough as f64) / 64.0;
                let (trials, best) = goal.search(&front(count), || false, |choice| Ok(cosine(choice.cost))).unwrap();
                assert_eq!((best.in_floats, best.metric), (enough.min(count), cosine(enough.min(count) as u64)), "{count}");
                let tried: BTreeSet<usize> = trials.iter().map(|trial| trial.in_floats).collect();
                assert!(tried.len() == trials.len() && trials.len() <= 10 && *tried.last().unwrap() <= count, "{tried:?}");
                assert!(enough > 0 || trials.len() == 1, "the first trial meets the goal");
                let (trials, first) = goal.search(&front(count), || true, |choice| Ok(cosine(choice.cost))).unwrap();
                assert_eq!((trials.len(), first.in_floats), (1, 0));
            }
        }
        let (trials, best) = Goal { max_trials: 2, ..goal }.search(&front(9), || false, |choice| Ok(0.125 * choice.cost.min(2) as f64)).unwrap();
        assert_eq!((trials.len(), best.in_floats > 0), (2, true));
        assert_eq!(goal.search(&front(2), || false, |_| Ok(f64::NAN)).unwrap().1.in_floats, 0);
    }
}
