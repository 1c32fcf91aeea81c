//! Structured pruning: removes heads, neurons, channels, width of the residual stream, layers or experts,
//! so that tensors shrink and the model runs faster.
//!
//! Dependent dimensions are found by [`analysis::groups`](crate::analysis::groups). Units are ranked by
//! the magnitude of their weights (Li et al., *Pruning Filters for Efficient ConvNets*, 2017,
//! <https://arxiv.org/abs/1608.08710>; over whole groups as in Fang et al., *DepGraph*, 2023,
//! <https://arxiv.org/abs/2301.12900>), by the first-order change of the loss (Molchanov et al.,
//! *Importance Estimation for Neural Network Pruning*, 2019, <https://arxiv.org/abs/1906.10771>), or by
//! the products of weights and activations (as in Sun et al., *Wanda*, 2023,
//! <https://arxiv.org/abs/2306.11695>).
//!
//! ```yaml
//! passes:
//!   - prune-structured:
//!       dims: [heads, mlp]
//!       target: { macs: 0.5 }
//!       importance: taylor
//!       repair: least-squares
//! ```

pub(super) mod cut;
mod experts;
mod forecast;
mod latency;
pub(super) mod layers;
mod nested;
mod options;
pub(super) mod repair;
pub(super) mod scores;
pub(super) mod selection;
pub(super) mod sensitivity;
mod widths;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub(super) use cut::graph_file_note;
pub(super) use layers::drop_layers;
pub use options::{Amounts, Importance, PrunedPart, Repair, Target};

use super::{Context, Pass, Plan, Samples, Scope, options_of};
use crate::analysis::Groups;
use crate::arch;
use crate::error::{Error, Result, counted};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::Amount;
use crate::ratio::suggest_percentage;
use crate::run_state::{Applied, RunState, WARNING};
use crate::store::{Pattern, Role, Weight};
use selection::Selection;

/// Remove heads, neurons, channels, width, layers or experts from a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PruneStructured {
    /// Parts to remove [default: heads, mlp and channels, if the model has them]
    #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub dims: Vec<PrunedPart>,
    /// Amount to remove from each group: a fraction like 0.25 or 25%, a number of units, or an amount per
    /// kind: heads=0.25,mlp=64 [default: 0.25]
    #[cfg_attr(feature = "cli", arg(long, allow_negative_numbers = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amount: Option<Amounts>,
    /// Instead of an amount, the fraction of the cost to keep: macs=0.5 or macs=50%, params=0.5 or
    /// latency=0.5
    #[cfg_attr(feature = "cli", arg(long, value_name = "COST=FRACTION"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// Importance criterion; the least important units are removed
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().importance))]
    pub importance: Importance,
    /// Remove the same fraction of every group, or rank all groups jointly [default: tensor; global for a
    /// target]
    #[cfg_attr(feature = "cli", arg(long, value_enum))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    /// Remaining widths are multiples of this number; heads are always removed completely
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().round_to))]
    pub round_to: usize,
    /// Minimum number of remaining units per group [default: one head, else `round_to`]
    #[cfg_attr(feature = "cli", arg(long))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimum: Option<usize>,
    /// Prune all layers to the same width [default: true if config.json supports only one width]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uniform: Option<bool>,
    /// Adjustment of the layers that read removed units
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().repair))]
    pub repair: Repair,
    /// Tensors whose units may be removed: names with `*`, or `re:` and a regular expression [default: all]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors that keep all their units
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
    /// Whether samples are configured, by which layers are ranked.
    #[doc(hidden)]
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip)]
    pub has_samples: bool,
}

impl Default for PruneStructured {
    fn default() -> Self {
        Self {
            dims: Vec::new(),
            amount: None,
            target: None,
            importance: Importance::default(),
            scope: None,
            round_to: 8,
            minimum: None,
            uniform: None,
            repair: Repair::default(),
            targets: Vec::new(),
            ignore: Vec::new(),
            has_samples: false,
        }
    }
}

const NAME: &str = "prune-structured";

/// Warning when units of a transformer are ranked by their weights.
const WEIGHT_RANKING_NOTE: &str = "`importance: l1` and `l2` use only weights and can severely damage a transformer, in which a few neurons with small weights have huge activations; with `data: { calibration: ... }`, the pass can rank by activations";

/// Whether a model has attention.
fn is_transformer(graph: &Graph) -> bool {
    graph.nodes().iter().any(|node| matches!(node.op, Op::Attention(_)))
}

/// Rejects models with layers that predict further tokens: the graph does not contain these layers, so they
/// would keep their sizes, which `config.json` specifies only once. Whole layers can be removed.
pub(super) fn require_no_token_prediction(pass: &str, model: &Model) -> Result<()> {
    let predicts = |(name, weight): &(&String, &Weight)| arch::role(name, weight) == Some(Role::TokenPrediction);
    let mut predicting = model.weights.by_name.iter().filter(predicts).map(|(name, _)| name.as_str()).peekable();
    if predicting.peek().is_none() {
        return Ok(());
    }
    let graph = model.graph()?;
    let read: BTreeSet<&str> = graph.params().map(|(_, value)| value.name.as_str()).collect();
    let Some(name) = predicting.find(|name| !read.contains(name)) else { return Ok(()) };
    Err(Error::Unsupported {
        what: format!("{pass}: a layer that predicts further tokens, which would keep its sizes (`{name}`),"),
        hint:
            "remove the tensors of such layers from the checkpoint, and set `num_nextn_predict_layers` in config.json to 0; only `prune-structured` with `dims: [layers]` supports them"
                .into(),
    })
}

/// How layers, experts and units are ranked.
#[derive(Clone, Copy)]
enum Ranking<'a> {
    /// By position, which suffices to predict shapes.
    Arbitrary,
    /// By their measured importance.
    Measured(&'a Context<'a>),
}

impl Ranking<'_> {
    /// The result of a measurement, or `None` if nothing is measured.
    fn measured<T>(self, measure: impl FnOnce(&Context) -> Result<T>) -> Result<Option<T>> {
        match self {
            Ranking::Arbitrary => Ok(None),
            Ranking::Measured(context) => measure(context).map(Some),
        }
    }
}

/// Removes units, which `removed` has by the index of their group, and repairs the layers that read them on
/// samples that are not held out, if a context is specified. Adds the changed tensors and notes to the record
/// of the pass.
pub(super) fn remove_units(
    model: &mut Model,
    (graph, groups): (&Graph, &Groups),
    removed: &BTreeMap<usize, Vec<usize>>,
    (repair, context, is_held_out): (Repair, Option<&Context>, &dyn Fn(usize) -> bool),
    applied: &mut Applied,
) -> Result<()> {
    let before = model.clone();
    let surviving = cut::surviving(model, groups, removed)?;
    let reduced = removed.keys().map(|index| &groups.groups[*index]);
    applied.notes.extend(cut::other_reader(model, graph, reduced, &surviving)?);
    applied.tensors.extend(cut::cut(model, &surviving, &applied.meter)?);
    if removed.is_empty() {
        return Ok(());
    }
    applied.notes.extend(cut::describe(model, graph, groups, removed)?);
    if let Some(context) = context.filter(|_| repair != Repair::None) {
        let repairing = repair::Repairing { before: &before, graph, after: model, surviving: &surviving, repair, is_held_out };
        let (layers, normalisations) = repairing.run(context)?;
        applied.notes.push(format!("repaired on calibration data: {}, {}", counted(layers, "layer"), counted(normalisations, "batch normalisation")));
        if layers == 0 {
            let reason = repair::reason_for_no_layers(graph, &surviving);
            applied.notes.push(format!("{WARNING}`repair` has adjusted no layer: {reason}"));
        }
    }
    Ok(())
}

impl PruneStructured {
    fn scope(&self) -> Scope {
        self.scope.unwrap_or(if self.target.is_some() { Scope::Global } else { Scope::Tensor })
    }

    /// The amount to remove of a part.
    fn amount(&self, part: PrunedPart) -> Amount {
        match &self.amount {
            None => Amount::fraction(0.25),
            Some(amounts) => amounts.get(part).unwrap_or(Amount::Count(0)),
        }
    }

    fn ranks_by_weights(&self) -> bool {
        matches!(self.importance, Importance::Auto | Importance::L1 | Importance::L2)
    }

    /// Whether this part is listed in the options.
    fn selects(&self, part: PrunedPart) -> bool {
        match (&self.amount, self.dims.is_empty()) {
            (Some(Amounts::Each(amounts)), true) => amounts.contains_key(&part),
            _ => self.dims.contains(&part),
        }
    }

    /// Whether other parts than layers and experts are selected.
    fn selects_units(&self) -> bool {
        match (&self.amount, self.dims.is_empty()) {
            (Some(Amounts::Each(amounts)), true) => amounts.keys().any(|part| part.unit().is_some()),
            _ => self.dims.is_empty() || self.dims.iter().any(|part| part.unit().is_some()),
        }
    }

    /// Prunes the model.
    fn prune(&self, mut model: Model, ranking: Ranking) -> Result<(Model, Applied)> {
        if self.selects_units() || self.selects(PrunedPart::Experts) {
            require_no_token_prediction(NAME, &model)?;
        }
        let mut applied = Applied::new(NAME, self.options());
        let mut details = Map::new();
        let mut rules = Vec::new();
        let had_experts = PrunedPart::WHOLE.into_iter().all(|part| self.selects(part)) && !crate::analysis::mixtures(&model.graph()?)?.is_empty();
        for part in PrunedPart::WHOLE.into_iter().filter(|part| self.selects(*part)) {
            let amount = self.amount(part);
            let removed = match part {
                PrunedPart::Experts => experts::remove(&mut model, amount, ranking, had_experts, &applied.meter),
                _ => layers::remove(&mut model, amount, ranking),
            }?;
            applied.tensors.extend(removed.tensors);
            applied.notes.extend(removed.notes);
            applied.estimated |= removed.open;
            rules.push(format!("whole {part}"));
            details.insert(part.to_string(), removed.details);
        }
        if self.selects_units() {
            let graph = model.graph()?;
            let selection = Selection::new(self, &model, &graph)?;
            let scores = ranking.measured(|context| selection.scores(self, &graph, &model, context))?;
            let widths = selection.widths(self, &graph, &model, scores.as_ref(), ranking)?;
            let removed = selection.removed_units(&widths, scores.as_ref());
            applied.notes.extend(selection.notes(self, &widths));
            applied.notes.extend(selection.missed_target(self, &graph, &model, &widths)?);
            if self.ranks_by_weights() && is_transformer(&graph) && !removed.is_empty() {
                applied.notes.push(WEIGHT_RANKING_NOTE.to_owned());
            }
            let context = if let Ranking::Measured(context) = ranking { Some(context) } else { None };
            remove_units(&mut model, (&graph, &selection.groups), &removed, (self.repair, context, &|_| false), &mut applied)?;
            details.insert("groups".to_owned(), selection.details(&widths).into());
            rules.push(selection.rule.clone());
            applied.estimated |= self.scope() == Scope::Global || matches!(self.target, Some(Target::Latency(_)));
        }
        applied.rule = rules.join("; ");
        applied.details = details.into();
        Ok((model, applied))
    }
}

impl Pass for PruneStructured {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        let mut full = self.clone();
        full.scope = Some(self.scope());
        if self.target.is_none() && self.amount.is_none() {
            full.amount = Some(Amounts::All(Amount::fraction(0.25)));
        }
        options_of(&full)
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: &str, reason: String| Err(Error::option(format!("{NAME}: {what}"), reason));
        if self.round_to == 0 {
            return wrong("round_to", "must be at least 1".into());
        }
        if let Some(target) = self.target {
            if self.amount.is_some() {
                return wrong("target", "excludes `amount`: a target determines the amounts".into());
            }
            if !(target.fraction() > 0.0 && target.fraction() < 1.0) {
                let meant = suggest_percentage(target.fraction()).map_or_else(String::new, |meant| format!("; write {meant}"));
                return wrong("target", format!("{} {} is not between 0 and 1: it is the remaining fraction{meant}", target.name(), target.fraction()));
            }
        }
        // Counts of layers or experts are small and unambiguous; a count of heads, channels or neurons
        // needs the name of the part.
        if let Some(Amounts::All(amount)) = self.amount.as_ref().filter(|_| self.selects_units()) {
            let part = self.dims.iter().copied().find(|part| part.unit().is_some()).unwrap_or(PrunedPart::Mlp);
            let unit = amount.require_unit(|count| format!("`{part}={count}` for a number of units"));
            unit.or_else(|reason| wrong("amount", reason))?;
        }
        let whole = PrunedPart::WHOLE.into_iter().find(|part| self.selects(*part));
        if let Some(part) = whole.filter(|_| self.target.is_some()) {
            return wrong("target", format!("cannot be combined with {part}: remove {part} in a separate pass, with an `amount`"));
        }
        if !self.selects_units() {
            let unused = [
                ("targets", !self.targets.is_empty()),
                ("ignore", !self.ignore.is_empty()),
                ("repair", self.repair != Repair::None),
                ("importance", !matches!(self.importance, Importance::Auto | Importance::L1)),
                ("scope", self.scope == Some(Scope::Global)),
                ("round_to", self.round_to != Self::default().round_to),
                ("minimum", self.minimum.is_some()),
                ("uniform", self.uniform.is_some()),
            ];
            if let Some((option, _)) = unused.into_iter().find(|(_, is_set)| *is_set) {
                return wrong(option, "applies only to heads, neurons, channels and widths, but `dims` lists none of them".into());
            }
        }
        if let Some(Amounts::Each(amounts)) = &self.amount
            && let Some(part) = amounts.keys().find(|part| !self.dims.is_empty() && !self.dims.contains(part))
        {
            return wrong("amount", format!("contains {part}, which is not listed in `dims`"));
        }
        if let Some(Amounts::Each(amounts)) = &self.amount
            && let Some(part) = self.dims.iter().find(|part| !amounts.contains_key(part))
        {
            return wrong("amount", format!("contains no amount for {part}, which `dims` lists: add `{part}=AMOUNT`, or remove {part} from `dims`"));
        }
        Ok(())
    }

    fn resolve_defaults(&mut self, model: &Model, sets: &[Samples]) {
        self.has_samples = !sets.is_empty();
        // Layers and experts are ranked separately.
        if self.importance == Importance::Auto && self.selects_units() {
            let ranked = || {
                let graph = model.graph()?;
                Ok::<_, Error>(is_transformer(&graph) && Selection::new(self, model, &graph)?.is_read(&graph))
            };
            // `plan` reports errors in the options.
            let use_activations = self.has_samples && ranked().unwrap_or(false);
            self.importance = if use_activations { Importance::Activation } else { Importance::L1 };
        }
    }

    fn runs_on(&self) -> Option<Samples> {
        let needs_samples = matches!(self.importance, Importance::Taylor | Importance::Activation) || self.repair != Repair::None;
        let ranks_layers = self.selects(PrunedPart::Layers) && self.has_samples;
        Some(if needs_samples || ranks_layers || self.selects(PrunedPart::Experts) { Samples::Calibration } else { Samples::None })
    }

    fn reads_labels(&self) -> bool {
        self.importance == Importance::Taylor
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let (planned, mut applied) = self.prune(model.clone(), Ranking::Arbitrary)?;
        applied.model_runs = self.model_runs(model)?;
        Ok(Plan::new(planned, applied).with_execution(move |context| self.prune(model.clone(), Ranking::Measured(context))))
    }

    fn remedy(&self) -> &'static str {
        match (self.selects_units(), self.ranks_by_weights(), self.repair) {
            (true, true, Repair::None) => {
                "`importance: activation` with calibration data, a smaller `amount`, `repair: least-squares`, or a subsequent `distill` pass"
            }
            (true, true, _) => "`importance: activation`, a smaller `amount`, or a subsequent `distill` pass",
            (true, false, Repair::None) => "a smaller `amount`, `repair: least-squares`, or a subsequent `distill` pass",
            _ => "a smaller `amount`, or a subsequent `distill` pass",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The options in a report are a valid recipe of the same run.
    #[test]
    fn recorded_options_can_be_run_again() {
        let default = PruneStructured::default();
        let half = PruneStructured { amount: Some(Amounts::All(Amount::fraction(0.5))), ..default.clone() };
        let target = PruneStructured { target: Some(Target::Params(0.5)), ..default.clone() };
        for pass in [default, half, target] {
            let options = pass.options();
            let again: PruneStructured = serde_json::from_value(options.clone()).unwrap();
            again.check().unwrap();
            assert_eq!((again.target, again.amount.is_some()), (pass.target, pass.target.is_none()), "{options}");
            assert!(pass.amount.is_none() || again.amount == pass.amount, "{options}");
            assert_eq!(again.options(), options);
        }
    }
}
