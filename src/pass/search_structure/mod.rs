//! Search for the structure of a smaller model: for each layer, the heads of attention, the neurons of the
//! feed-forward network, and whether either remains.
//!
//! Every option of every layer is repaired and scored separately, by the divergence of the model's outputs
//! on held-out samples, and the options with the least sum of scores for a number of parameters are chosen by
//! dynamic programming (as in Bercovich et al., *Puzzle*, 2024, <https://arxiv.org/abs/2411.19146>, whose
//! scores are of the same kind). Units are ranked by their activations, as in Muralidharan et al., *Compact
//! Language Models via Pruning and Knowledge Distillation*, 2024, <https://arxiv.org/abs/2407.14679>.
//!
//! ```yaml
//! passes:
//!   - search-structure: { limit: { layers: 0.5 }, uniform: false }
//! ```

mod branches;
mod choice;
mod forecast;
mod library;
mod options;
mod samples;
mod structure;
mod training;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use options::Limit;

use super::{Context, Pass, Plan, Samples, options_of};
use crate::arch;
use crate::error::{Error, Result, counted};
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::prune_structured::Repair;
use crate::pass::prune_structured::layers::influence;
use crate::ratio::suggest_percentage;
use crate::run_state::{Applied, RunState};
use choice::Chosen;
use library::{Fitting, Library, adjusted};
use samples::Measurement;
use structure::{Retained, Structure};
use training::Training;

/// Choose the width of each layer, and the parts to remove, for a number of parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct SearchStructure {
    /// Limit of the size: layers=0.5 (fraction of the parameters of all layers), params=12000000 or
    /// bytes=50MB
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE=LIMIT", default_value_t = Self::default().limit))]
    pub limit: Limit,
    /// Fractions of the neurons and of the heads of a layer that options keep
    #[cfg_attr(feature = "cli", arg(long, value_delimiter = ',', value_name = "FRACTION", default_values_t = Self::default().widths, value_parser = crate::ratio::parse))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratios"))]
    #[serde(deserialize_with = "crate::ratio::ratios")]
    pub widths: Vec<f64>,
    /// Choose the same widths for all layers, and remove only whole layers [default: true if config.json
    /// supports only one width]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uniform: Option<bool>,
    /// Numbers of neurons are multiples of this number
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().round_to))]
    pub round_to: usize,
    /// Adjustment of the layers that read removed units: none or least-squares
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().repair))]
    pub repair: Repair,
    /// Training steps of each option with fewer units, on the original outputs of its block
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().steps))]
    pub steps: usize,
    /// Learning rate of the first step, which decreases linearly
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().learning_rate))]
    pub learning_rate: f64,
    /// Also measure two usual choices of the same size: the least influential layers removed, and the same
    /// widths for all layers
    #[cfg_attr(feature = "cli", arg(long))]
    pub baselines: bool,
}

impl Default for SearchStructure {
    fn default() -> Self {
        Self {
            limit: Limit::Layers(0.75),
            widths: vec![0.75, 0.5, 0.25],
            uniform: None,
            round_to: 8,
            repair: Repair::LeastSquares,
            steps: 0,
            learning_rate: 3e-4,
            baselines: false,
        }
    }
}

const NAME: &str = "search-structure";

/// Loss of the removal of a layer in plans, which do not measure it.
const ASSUMED_LOSS: f64 = 4.0;

impl SearchStructure {
    /// Whether all layers have the same widths.
    fn is_uniform(&self, model: &Model) -> bool {
        self.uniform.unwrap_or_else(|| model.is_described() && arch::has_uniform_widths(model.config.model_type()))
    }

    fn search(&self, model: &Model, graph: &Graph, context: Option<&Context>) -> Result<(Model, Applied)> {
        let uniform = self.is_uniform(model);
        let structure = Structure::new(self, model, graph, uniform)?;
        let mut applied = Applied::new(NAME, self.options());
        applied.estimated = true;
        applied.rule = format!("attention and networks of {}", counted(structure.found.layers.len(), "layer"));
        if structure.cost(model) <= structure.limit_cost() {
            let (size, unit) = (structure.cost(model), self.limit.unit());
            applied.notes.push(format!("nothing was removed: the model has {size} {unit}, and the limit is {}", structure.limit_cost()));
            return Ok((model.clone(), applied));
        }
        let Some(context) = context else {
            let chosen = match uniform {
                true => structure.choose_uniform(None, Some(&vec![ASSUMED_LOSS; structure.found.layers.len()])),
                false => structure.choose_mixed(None),
            }?;
            let model = structure.build(model, &chosen, None, (self.repair, None), &mut applied)?;
            return Ok((model, applied));
        };
        let measurement = Measurement::new(model, context)?;
        let library = Library::measure(&structure, self.fitting(), uniform, &measurement)?;
        let chosen = match uniform {
            true => structure.choose_uniform(Some(&library.losses), Some(&library.layers)),
            false => structure.choose_mixed(Some(&library.losses)),
        }?;
        let found = self.build(&structure, &chosen, &library, &measurement, &mut applied)?;
        let (measured, kind) = measurement.named_loss(&found)?;
        let samples = counted(measurement.held_out, "held-out sample");
        applied.notes.push(format!("{kind} from the original model on {samples}: {measured:.4}; the sum of the scores is {:.4}", chosen.loss));
        let baselines = if self.baselines { self.baselines(&structure, &library, &measurement)? } else { Value::Null };
        for row in baselines.as_array().into_iter().flatten() {
            if let (Some(choice), Some(measured)) = (row["choice"].as_str(), row["measured"].as_f64()) {
                applied.notes.push(format!("{kind} with another choice within the limit, {choice}: {measured:.4}"));
            }
        }
        let scores = scores(&structure, &library, &chosen);
        let score = |layer: usize| {
            let chosen = scores.iter().filter(|row| row["layer"] == layer && row["chosen"] == true);
            chosen.filter_map(|row| row["loss"].as_f64()).sum::<f64>()
        };
        let layers = structure.description(&chosen).into_iter().enumerate();
        let layers = layers.map(|(layer, [attention, network])| json!({ "layer": layer, "attention": attention, "network": network, "score": score(layer) }));
        let layers: Vec<Value> = layers.collect();
        applied.details = json!({
            "loss": kind,
            "held_out_samples": measurement.held_out,
            "uniform": uniform,
            "unit": self.limit.unit(),
            "before": structure.cost(model),
            "limit": structure.limit_cost(),
            "after": structure.cost(&found),
            "predicted": chosen.loss,
            "measured": measured,
            "layers": layers,
            "scores": scores,
            "baselines": baselines,
        });
        Ok((found, applied))
    }

    fn fitting(&self) -> Fitting {
        Fitting { repair: self.repair, training: Training { steps: self.steps, rate: self.learning_rate } }
    }

    /// The model with a choice: repaired as a whole, or with the trained weights of each branch.
    fn build(&self, structure: &Structure, chosen: &Chosen, library: &Library, measurement: &Measurement, applied: &mut Applied) -> Result<Model> {
        let importance = Some(library.importance.as_slice());
        if self.steps == 0 {
            return structure.build(structure.model, chosen, importance, (self.repair, Some(measurement)), applied);
        }
        let trained = adjusted(structure, chosen, library, self.fitting(), measurement)?;
        for (_, branch, _) in structure.retained(chosen).filter(|(_, _, kept)| matches!(kept, Retained::Units(_))) {
            applied.tensors.extend(branch.tensors.iter().cloned());
        }
        structure.build(&trained, chosen, importance, (Repair::None, None), applied)
    }

    /// Usual choices within the same limit, with their divergence.
    fn baselines(&self, structure: &Structure, library: &Library, measurement: &Measurement) -> Result<Value> {
        let influence = influence(structure.model, structure.graph, &structure.found, measurement.context)?;
        let mut order: Vec<usize> = (0..influence.len()).collect();
        order.sort_by(|a, b| influence[*a].total_cmp(&influence[*b]).then(b.cmp(a)));
        let choices = [
            ("the layers with the least influence removed", structure.without_first(&order)),
            ("the same widths for all layers", structure.choose_uniform(Some(&library.losses), None).ok()),
        ];
        let mut rows = Vec::new();
        for (name, chosen) in choices {
            let Some(chosen) = chosen else {
                rows.push(json!({ "choice": name, "size": null, "measured": null }));
                continue;
            };
            let mut scratch = Applied::new(NAME, Value::Null);
            let model = self.build(structure, &chosen, library, measurement, &mut scratch)?;
            rows.push(json!({ "choice": name, "size": structure.cost(&model), "measured": measurement.loss(&model)? }));
        }
        Ok(rows.into())
    }
}

/// The scores of all options, with a mark at the chosen ones.
fn scores(structure: &Structure, library: &Library, chosen: &Chosen) -> Vec<Value> {
    let mut rows = Vec::new();
    let choices = structure.choices(Some(&library.losses));
    for (layer, (pair, chosen_options)) in choices.iter().zip(&chosen.options).enumerate() {
        let is_removed = chosen.removed.contains(&layer);
        for (part, name) in [(0, "attention"), (1, "network")] {
            for (option, choice) in pair[part].iter().enumerate() {
                let kept = structure.option_text(layer, part, option);
                let is_chosen = !is_removed && chosen_options[part] == option;
                rows.push(json!({ "layer": layer, "part": name, "kept": kept, "cost": choice.cost, "loss": choice.loss, "chosen": is_chosen }));
            }
        }
    }
    for (layer, loss) in library.layers.iter().enumerate() {
        rows.push(json!({ "layer": layer, "part": "layer", "kept": "removed", "cost": 0, "loss": loss, "chosen": chosen.removed.contains(&layer) }));
    }
    rows
}

impl Pass for SearchStructure {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: &str, reason: String| Err(Error::option(format!("{NAME}: {what}"), reason));
        if let Limit::Layers(fraction) = self.limit
            && !(fraction > 0.0 && fraction < 1.0)
        {
            let meant = suggest_percentage(fraction).map_or_else(String::new, |meant| format!("; write {meant}"));
            return wrong("limit", format!("layers {fraction} is not between 0 and 1: it is the remaining fraction{meant}"));
        }
        if let Some(width) = self.widths.iter().find(|width| !(**width > 0.0 && **width < 1.0)) {
            return wrong("widths", format!("{width} is not between 0 and 1: widths are remaining fractions; whole and removed parts are always options"));
        }
        if self.round_to == 0 {
            return wrong("round_to", "must be at least 1".into());
        }
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            return wrong("learning_rate", format!("{} is not a finite number greater than 0", self.learning_rate));
        }
        if self.steps == 0 && self.learning_rate != Self::default().learning_rate {
            return wrong("learning_rate", "has no effect without `steps`".into());
        }
        if self.repair == Repair::Bias {
            return wrong("repair", "supports only `none` and `least-squares`".into());
        }
        Ok(())
    }

    fn resolve_defaults(&mut self, model: &Model, _sets: &[Samples]) {
        self.uniform = Some(self.is_uniform(model));
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(Samples::Calibration)
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let graph = model.graph()?;
        let (planned, mut applied) = self.search(model, &graph, None)?;
        applied.model_runs = self.model_runs(model, &graph)?;
        Ok(Plan::new(planned, applied).with_execution(move |context| self.search(model, &model.graph()?, Some(context))))
    }

    fn remedy(&self) -> &'static str {
        "a larger `limit`, or a subsequent `distill` pass with the original model as teacher"
    }
}
