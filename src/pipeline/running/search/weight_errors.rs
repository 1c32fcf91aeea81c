//! Losses without samples: the relative squared errors of the weights, whose sum over the layers is about
//! proportional to the increase of the loss (Malinovskii et al. 2024, the linearity theorem of HIGGS,
//! <https://arxiv.org/abs/2411.17525>).

use super::Found;
use super::formats::{Formats, Unit, Written};
use crate::error::Result;
use crate::kernel::compare::{self, Difference};
use crate::model::Model;
use crate::pass::{Context, Score, Scores};
use crate::report::search::SearchLoss;

/// Values that are compared at a time.
const RUN: usize = 4096;

impl Found {
    /// Sets the loss of each format of each unit to the error of its weights.
    ///
    /// # Errors
    /// If a weight cannot be rounded.
    pub(super) fn score_by_weights(&mut self, model: &Model, formats: &dyn Formats, context: &Context) -> Result<()> {
        let floats = self.formats.len() - 1;
        let rounded = (0..floats).map(|format| {
            let options: Vec<usize> = self.units.iter().map(|unit| if unit.options[format].is_some() { format } else { floats }).collect();
            formats.rounded(&self.units, &options, &Scores::default(), context)
        });
        let rounded = rounded.collect::<Result<Vec<Option<Written>>>>()?;
        let work = |unit: &Unit| {
            let loss = |(option, written): (&Option<Score>, &Option<Written>)| match (option, written) {
                (Some(_), Some(written)) => unit_error(&unit.weights, |name| weight_error(name, model, &written.model)).map(Some),
                _ => Ok(None),
            };
            let losses = unit.options.iter().zip(&rounded).map(loss).collect::<Result<Vec<Option<f64>>>>()?;
            context.work.advance(unit.parameters)?;
            Ok(losses)
        };
        let losses = context.work.run("Comparing formats", &self.units, |unit| unit.parameters, work)?;
        for (unit, losses) in self.units.iter_mut().zip(losses) {
            unit.measured = false;
            for (option, loss) in unit.options.iter_mut().zip(losses) {
                *option = option.map(|score| Score { loss: loss.unwrap_or(score.loss), ..score }).filter(|score| score.loss.is_finite());
            }
        }
        self.loss = SearchLoss::WeightError;
        Ok(())
    }
}

/// The sum of the errors of the weights of a unit. Experts of a layer share the weight of one, because a
/// token passes few of them.
fn unit_error(weights: &[String], error: impl Fn(&str) -> Result<f64>) -> Result<f64> {
    let projection = |name: &String| {
        let (layer, expert) = name.split_once(".experts.")?;
        Some((layer.to_owned(), expert.trim_start_matches(char::is_numeric).to_owned()))
    };
    let projections: Vec<Option<(String, String)>> = weights.iter().map(projection).collect();
    let mut sum = 0.0;
    for (name, own) in weights.iter().zip(&projections) {
        let experts = if own.is_some() { projections.iter().filter(|other| *other == own).count() } else { 1 };
        sum += error(name)? / experts as f64;
    }
    Ok(sum)
}

/// The squared error of a weight relative to the squares of its values.
fn weight_error(name: &str, before: &Model, after: &Model) -> Result<f64> {
    let values = |model: &Model| model.weights.get(name)?.floats(name);
    let (before, after) = (values(before)?, values(after)?);
    let mut all = Difference::default();
    before.chunks(RUN).zip(after.chunks(RUN)).for_each(|(before, after)| all.add(&compare::floats(before, after)));
    Ok(if all.signal > 0.0 { all.noise / all.signal } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_a_layer_count_as_one() {
        let error = |weights: &[&str]| {
            let names: Vec<String> = weights.iter().map(|name| (*name).to_owned()).collect();
            unit_error(&names, |name| Ok(if name.contains("w2") { 4.0 } else { 1.0 })).unwrap()
        };
        assert_eq!(error(&["q.weight", "k.weight"]), 2.0);
        assert_eq!(error(&["a.experts.0.w1", "a.experts.1.w1"]), 1.0);
        assert_eq!(error(&["a.experts.0.w1", "a.experts.10.w1", "a.experts.0.w2", "a.experts.10.w2", "router.weight"]), 6.0);
    }
}
