//! Accuracy first: layers stay in floats, the most sensitive first, until the model is as good as it has to be.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::prepare::Prepared;
use super::{Damage, NAME, QuantizeStatic, sensitivity};
use crate::calibration::ValueStatistics;
use crate::data::DataSet;
use crate::error::{Error, Result};
use crate::evaluation::{self, Runner, Subject};
use crate::model::Model;
use crate::pass::Context;
use crate::work::Meter;

/// How good the quantized model has to be; one of `max_drop` and `min_cosine`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// How much worse its score on the evaluation data may be than the original's (0.01: one point of accuracy)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_drop: Option<f64>,
    /// Least mean cosine of its answers to the original's, on the evaluation data or else the calibration data
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_cosine: Option<f64>,
    /// How many models to try at most
    #[serde(default = "trials")]
    pub max_trials: usize,
    /// When to stop trying, in minutes
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
    /// Whether to fail when the goal is not met; else the best model is written with a warning
    #[serde(default)]
    pub strict: bool,
}

fn trials() -> usize {
    10
}

impl FromStr for Goal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        serde_saphyr::from_str(text).map_err(|e| e.to_string())
    }
}

impl Goal {
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |reason: &str| Err(Error::option(NAME, format!("`accuracy_goal` {reason}")));
        match (self.max_drop, self.min_cosine) {
            (None, None) | (Some(_), Some(_)) => wrong("needs one of `max_drop` and `min_cosine`"),
            (Some(drop), _) if !(drop.is_finite() && drop >= 0.0) => wrong("`max_drop` must be a number from 0 on"),
            (_, Some(cosine)) if !(0.0..=1.0).contains(&cosine) => wrong("`min_cosine` must be from 0 to 1"),
            _ if self.max_trials == 0 => wrong("`max_trials` must be at least 1"),
            _ if self.max_minutes.is_some_and(|minutes| minutes <= 0.0 || minutes.is_nan()) => wrong("`max_minutes` must be more than 0"),
            _ => Ok(()),
        }
    }

    /// How far a figure is beyond the goal: met from 0 on.
    fn margin(&self, figure: f64) -> f64 {
        match (self.max_drop, self.min_cosine) {
            (Some(drop), _) => drop - figure,
            (_, Some(cosine)) => figure - cosine,
            _ => 0.0,
        }
    }

    fn name(&self) -> &'static str {
        if self.max_drop.is_some() { "drop" } else { "cosine" }
    }
}

/// One model that was tried.
#[derive(Debug, Clone)]
struct Trial {
    kept: usize,
    figure: f64,
}

/// What came of it.
pub(super) struct Outcome {
    /// Layers that are quantized.
    pub layers: BTreeSet<String>,
    pub table: Value,
    /// What each layer alone does, the most sensitive first.
    pub damages: Vec<Damage>,
    pub note: String,
}

impl QuantizeStatic {
    /// Looks for the fewest layers that have to stay in floats: none, one, two, four …, then between the last two.
    ///
    /// # Errors
    /// The goal is strict and is not met; running fails.
    pub(super) fn pursue(
        &self,
        goal: &Goal,
        original: &Model,
        prepared: &Prepared,
        seen: &BTreeMap<String, ValueStatistics>,
        context: &Context,
        meter: &Arc<Meter>,
    ) -> Result<Outcome> {
        let start = Instant::now();
        let damages = sensitivity::ranked(self, prepared, seen, context)?;
        let order: Vec<String> = damages.iter().map(|found| found.name.clone()).collect();
        let judge = Judge::new(goal, original, context)?;
        let mut trials: Vec<Trial> = Vec::new();
        let mut best: Option<(f64, usize)> = None;
        let (mut failed, mut met): (Option<usize>, Option<usize>) = (None, None);
        let most = order.len();
        let late = || goal.max_minutes.is_some_and(|minutes| start.elapsed().as_secs_f64() > 60.0 * minutes);
        let mut next = Some(0);
        while let Some(kept) = next.filter(|_| trials.len() < goal.max_trials && (trials.is_empty() || !late())) {
            let figure = judge.figure(self.with_kept(prepared, &order, kept, seen, meter)?, context)?;
            trials.push(Trial { kept, figure });
            let margin = goal.margin(figure);
            let better = |(other, count): (f64, usize)| if margin >= 0.0 && other >= 0.0 { kept < count } else { margin > other };
            if best.is_none_or(better) {
                best = Some((margin, kept));
            }
            if margin >= 0.0 {
                met = Some(met.map_or(kept, |m| m.min(kept)))
            } else {
                failed = Some(failed.map_or(kept, |f| f.max(kept)))
            }
            next = match (failed, met) {
                (None, _) => None,
                (Some(f), None) if f < most => Some((2 * f).max(1).min(most)),
                (Some(f), Some(m)) if f + 1 < m => Some(f.midpoint(m)),
                _ => None,
            };
        }
        let (margin, kept) = best.unwrap_or((f64::NEG_INFINITY, 0));
        let figure = trials.iter().find(|trial| trial.kept == kept).map_or(f64::NAN, |trial| trial.figure);
        let names = order.iter().take(kept).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let left = if kept == 0 { "no layer has to stay in floats".to_owned() } else { format!("{kept} of {most} layers stay in floats: {names}") };
        if margin < 0.0 && goal.strict {
            return Err(Error::run(
                NAME,
                format!("the accuracy goal is not met: the best of the tried models ({}) has a {} of {figure:.4}", trials.len(), goal.name()),
                "ask for less, allow more trials, or leave `strict` out to get the best model",
            ));
        }
        let outcome = if margin >= 0.0 { "met" } else { "not met" };
        let tried = if trials.len() == 1 { "1 trial".to_owned() } else { format!("{} trials", trials.len()) };
        let note = format!("accuracy goal {outcome} after {tried}: {} {figure:.4}; {left}", goal.name());
        let rows: Vec<Value> = trials.iter().map(|t| json!({ "in_floats": t.kept, (goal.name()): t.figure, "met": goal.margin(t.figure) >= 0.0 })).collect();
        let table = json!({ "met": margin >= 0.0, "tried": rows, "in_floats": order[..kept] });
        Ok(Outcome { layers: order[kept..].iter().cloned().collect(), table, damages, note })
    }

    /// The model with the first so many layers in floats.
    fn with_kept(&self, prepared: &Prepared, order: &[String], kept: usize, seen: &BTreeMap<String, ValueStatistics>, meter: &Arc<Meter>) -> Result<Model> {
        let layers: BTreeSet<String> = order[kept..].iter().cloned().collect();
        let found = self.quantizers(prepared, &layers, Some(seen))?;
        self.fit(prepared, &found, &layers, Some(seen), meter)
    }
}

/// Loads models that run side by side on this data.
fn load<'s, const N: usize>(subjects: [&'s mut Subject; N], data: &DataSet, context: &Context<'s>) -> Result<Vec<Box<dyn Runner + 's>>> {
    evaluation::load(subjects, Some(&data.first()?.inputs), &context.device, context.memory, &context.work)
}

/// Says how good a model is.
struct Judge<'m> {
    original: &'m Model,
    data: Arc<DataSet>,
    /// The original's score, where scores count.
    score: Option<evaluation::Score>,
}

impl<'m> Judge<'m> {
    fn new(goal: &Goal, original: &'m Model, context: &Context) -> Result<Judge<'m>> {
        let options = match (goal.max_drop, &context.data.evaluation, &context.data.calibration) {
            (_, Some(options), _) | (None, None, Some(options)) => options,
            _ => return Err(Error::option(NAME, "`accuracy_goal: { max_drop: ... }` needs `data: { evaluation: ... }` with labels")),
        };
        let mut subject = Subject::of(original.clone())?;
        let data = context.data.open(options, subject.target())?;
        let mut score = None;
        if goal.max_drop.is_some() {
            let mut runner = load([&mut subject], &data, context)?;
            score = evaluation::evaluate(&data, &mut runner, &[], &context.work)?.models.into_iter().next().and_then(|outcome| outcome.score);
            if score.is_none() {
                return Err(Error::option(NAME, "`accuracy_goal: { max_drop: ... }` needs evaluation data with labels; without any, ask for `min_cosine`"));
            }
        }
        Ok(Judge { original, data, score })
    }

    /// The drop of the score, or the mean cosine.
    fn figure(&self, model: Model, context: &Context) -> Result<f64> {
        let mut after = Subject::of(model)?;
        match &self.score {
            Some(score) => {
                let mut runner = load([&mut after], &self.data, context)?;
                let outcomes = evaluation::evaluate(&self.data, &mut runner, &[], &context.work)?;
                Ok(outcomes.models.first().and_then(|o| o.score.as_ref()).map_or(f64::INFINITY, |now| score.drop_to(now)))
            }
            None => {
                let mut before = Subject::of(self.original.clone())?;
                let mut runners = load([&mut before, &mut after], &self.data, context)?;
                let outcomes = evaluation::evaluate(&self.data, &mut runners, &[(0, 1)], &context.work)?;
                Ok(outcomes.pairs.first().map_or(0.0, |fidelity| fidelity.cosine))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_met_on_its_better_side_only() {
        let goal = |text: &str| text.parse::<Goal>().unwrap();
        let drop = goal("{max_drop: 0.01}");
        assert!(drop.margin(0.005) > 0.0 && drop.margin(0.02) < 0.0 && drop.margin(-0.5) > drop.margin(0.0));
        let cosine = goal("{min_cosine: 0.99}");
        assert!(cosine.margin(0.995) > 0.0 && cosine.margin(0.98) < 0.0);
        assert_eq!([drop.margin(0.01), cosine.margin(0.99)], [0.0; 2]);
    }
}
