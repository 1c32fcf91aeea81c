//! Unstructured pruning: zeros the least important weights.
//!
//! With `importance: l1` (magnitude), the pass needs only the weights. With `wanda` and `sparsegpt`,
//! which use the inputs of the layers on calibration samples, it runs the model block by block
//! (`pass/layerwise`).
//!
//! Han et al., *Learning both Weights and Connections for Efficient Neural Networks*, 2015
//! (<https://arxiv.org/abs/1506.02626>). The counts match `torch.nn.utils.prune`: `l1_unstructured` for
//! `scope: tensor`, `global_unstructured` for `scope: global`. Among equal magnitudes the first ones are
//! zeroed, so that the count is exact and the result is reproducible.
//!
//! ```yaml
//! passes:
//!   - prune-unstructured:
//!       amount: 0.5
//!       scope: global
//!       ignore: ["*embeddings*"]
//!       rules: [{ targets: ["*.down_proj.weight"], amount: 0.3 }]
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::targets::{self, SelectedWeights};
use super::threshold::RankingGroup;
use super::{Amount, NOfM, Pass, Plan, Samples, layerwise, options_of};
use crate::error::{Error, ParseError, Result, counted};
use crate::kernel::{Float, mask, scan, with_float};
use crate::model::{self, Model};
use crate::run_state::{Applied, ModelRun, Prepare, RunState};
use crate::store::{Block, BlockSink, Encoding, Pattern, Role, Rows, View, Weight, WeightSource, Weights, ZeroOrigin, least_common_multiple};
use crate::work::Meter;

/// Importance criterion of weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Importance {
    /// Magnitude; needs no data
    #[default]
    L1,
    /// Magnitude times the norm of the input over calibration samples, ranked within each row of a linear
    /// layer
    Wanda,
    /// Increase of the output error on calibration samples; the remaining weights of the row are updated
    /// to compensate
    Sparsegpt,
}

/// Set of weights that are ranked jointly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Scope {
    /// Each tensor separately: all tensors have the same sparsity
    #[default]
    Tensor,
    /// All selected tensors jointly
    Global,
}

/// Different amount for some tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Tensors that the rule applies to
    pub targets: Vec<Pattern>,
    /// Amount to zero in them
    pub amount: Amount,
}

impl FromStr for Rule {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        targets::parse_rule(text, "AMOUNT").map(|(pattern, amount)| Rule { targets: vec![pattern], amount })
    }
}

/// Zero the weights that are smallest in absolute value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PruneUnstructured {
    /// Weights to zero: a fraction like 0.5 or 50%, or a count like 1000 or `50 units` [default: 0.5]
    #[cfg_attr(feature = "cli", arg(long, allow_negative_numbers = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amount: Option<Amount>,
    /// Importance criterion: magnitude, or a criterion that uses calibration samples
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().importance))]
    pub importance: Importance,
    /// Rank weights inside each tensor, or across all of them
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().scope))]
    pub scope: Scope,
    /// Keep N of every M consecutive inputs, like 2:4, instead of an amount
    #[cfg_attr(feature = "cli", arg(long, value_name = "N:M"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<NOfM>,
    /// Tensors to prune: names with `*`, or `re:` and a regular expression [default: linear and
    /// convolution weights; with calibration samples, linear weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
    /// Another amount for some tensors, which are then ranked separately; the first rule that matches
    /// applies
    #[cfg_attr(feature = "cli", arg(long = "rule", value_name = "PATTERN=AMOUNT"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

const NAME: &str = "prune-unstructured";

impl PruneUnstructured {
    pub(super) fn amount(&self) -> Amount {
        self.amount.unwrap_or(Amount::fraction(0.5))
    }

    pub(super) fn rule(&self, name: &str) -> Option<usize> {
        self.rules.iter().position(|rule| rule.targets.iter().any(|p| p.matches(name)))
    }

    /// The option that removes all weights of the model, if one does. Tensors in `targets` may become zero.
    fn removes_everything(&self) -> Option<&'static str> {
        let all = self.targets.is_empty() && self.rules.is_empty();
        match self.pattern {
            _ if !all => None,
            Some(pattern) => (pattern.n == 0).then_some("pattern"),
            None => (self.amount().share() >= 1.0).then_some("amount"),
        }
    }

    /// Groups the selected names by amount: one group for each rule, and one for the remaining names.
    fn groups<'a>(&self, names: &BTreeSet<&'a str>) -> Vec<(Amount, Vec<&'a str>)> {
        let mut groups: Vec<(Amount, Vec<&str>)> = self.rules.iter().map(|rule| (rule.amount, Vec::new())).chain([(self.amount(), Vec::new())]).collect();
        for name in names {
            let index = self.rule(name).unwrap_or(self.rules.len());
            groups[index].1.push(name);
        }
        groups
    }

    fn ranking_groups(&self, amount: Amount, names: &[&str], model: &Model) -> Result<Vec<Arc<RankingGroup>>> {
        let member = |name: &&str| Ok(((*name).to_owned(), model.weights.get(name)?.clone()));
        let count = |what: &str, weights: u64| amount.of(weights).ok_or_else(|| too_many(amount, what, weights));
        let members: Vec<(String, Weight)> = names.iter().map(member).collect::<Result<_>>()?;
        if self.scope == Scope::Global {
            let weights = members.iter().map(|(_, w)| w.elements() as u64).sum();
            return Ok(vec![Arc::new(RankingGroup::new(members, count("the selected tensors", weights)?, true)?)]);
        }
        members
            .into_iter()
            .map(|(name, weight)| {
                let count = count(&format!("tensor `{name}`"), weight.elements() as u64)?;
                Ok(Arc::new(RankingGroup::new(vec![(name, weight)], count, false)?))
            })
            .collect()
    }

    fn apply_amounts(&self, names: &BTreeSet<&str>, model: &mut Model, applied: &mut Applied) -> Result<u64> {
        let mut removed = 0;
        for (amount, names) in self.groups(names) {
            if names.is_empty() {
                continue;
            }
            for group in self.ranking_groups(amount, &names, model)? {
                removed += group.count();
                if group.count() == 0 {
                    continue;
                }
                if group.is_counted_before() {
                    applied.preparations.push(group.clone() as Arc<dyn Prepare>);
                }
                for (index, (name, weight)) in group.members().iter().enumerate() {
                    let source = Masked { upstream: weight.clone(), group: group.clone(), index, rows: weight.all_rows(), meter: applied.meter.clone() };
                    model.weights.by_name.insert(name.clone(), weight.then(weight.dtype, Encoding::Dense, Arc::new(source)));
                }
            }
        }
        Ok(removed)
    }

    fn apply_pattern(&self, pattern: NOfM, names: &BTreeSet<&str>, model: &mut Model, applied: &mut Applied) -> Result<u64> {
        // Matrices, and kernels of files that state the role of a weight, are stored with the outputs first.
        let is_usual = |weight: &Weight| weight.role.map_or(weight.shape.len() == 2, |role| matches!(role, Role::Matrix | Role::Kernel));
        let is_unusual = |name: &&str| model.weights.by_name.get(*name).is_some_and(|weight| !is_usual(weight));
        let axes = if names.iter().any(is_unusual) { layerwise::input_axes(model) } else { BTreeMap::new() };
        let (mut removed, mut assumed) = (0, Vec::new());
        for name in names {
            let weight = model.weights.get(name)?.clone();
            if model.config.has_conv1d() && weight.shape.len() == 2 {
                return Err(Error::tensor(
                    name,
                    format!(
                        "belongs to a {} model, whose layers are stored as [in, out], but N:M patterns apply to consecutive inputs",
                        model.config.model_type()
                    ),
                    "use an amount instead of a pattern",
                ));
            }
            let by_bias = || if is_usual(&weight) { None } else { axis_by_bias(name, &weight, &model.weights) };
            let axis = match input_axis(name, &weight, axes.get(*name), pattern)?.or_else(by_bias) {
                Some(axis) => axis,
                None => {
                    assumed.extend((!is_usual(&weight) && weight.shape.len() > 2).then_some(*name));
                    1
                }
            };
            let Some(inputs) = weight.shape.get(axis).copied().filter(|_| weight.shape.len() >= 2) else {
                return Err(Error::tensor(
                    name,
                    format!("has the shape {:?}, but {pattern} needs at least two dimensions", weight.shape),
                    "add it to `ignore`",
                ));
            };
            if !inputs.is_multiple_of(pattern.m) {
                return Err(Error::tensor(
                    name,
                    format!("has {inputs} inputs (shape {:?}), which is not a multiple of the group size of {pattern}", weight.shape),
                    "add it to `ignore`, or choose another pattern",
                ));
            }
            removed += (weight.elements() / pattern.m * (pattern.m - pattern.n)) as u64;
            if pattern.n == pattern.m {
                continue;
            }
            let stride = weight.shape[axis + 1..].iter().product();
            let source = Patterned { upstream: weight.clone(), pattern, stride, meter: applied.meter.clone() };
            model.weights.by_name.insert((*name).to_owned(), weight.then(weight.dtype, Encoding::Dense, Arc::new(source)));
        }
        if let Some(first) = assumed.first() {
            applied.notes.push(format!(
                "{NAME}: {pattern} applies to the second axis of {} (the first: `{first}`), as of convolutions, because no graph shows how they are used; add transposed convolutions to `ignore`",
                counted(assumed.len(), "kernel")
            ));
        }
        Ok(removed)
    }
}

impl Pass for PruneUnstructured {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        let mut full = self.clone();
        if self.pattern.is_none() {
            full.amount = Some(self.amount());
        }
        options_of(&full)
    }

    fn check(&self) -> Result<()> {
        for (what, amount) in self.amount.iter().map(|amount| ("amount", amount)).chain(self.rules.iter().map(|rule| ("rules", &rule.amount))) {
            let unit = amount.require_unit(|count| format!("`{count} units` for {count} weights"));
            unit.map_err(|reason| Error::option(format!("{NAME}: {what}"), reason))?;
        }
        if let Some(what) = self.removes_everything() {
            return Err(everything(what));
        }
        if self.importance != Importance::L1 {
            layerwise::require(&format!("{NAME}: importance"))?;
            if self.scope == Scope::Global {
                return Err(Error::option(NAME, "`scope: global` needs `importance: l1`: the other criteria are not comparable between layers"));
            }
        }
        if self.pattern.is_some() {
            let both = |what: &str| {
                Err(Error::option(NAME, format!("`pattern` and `{what}` exclude each other: a pattern determines the number of remaining weights")))
            };
            if self.amount.is_some() {
                return both("amount");
            }
            if self.scope == Scope::Global {
                return both("scope: global");
            }
            if !self.rules.is_empty() {
                return both("rules");
            }
        }
        match self.rules.iter().any(|rule| rule.targets.is_empty()) {
            true => Err(Error::option(NAME, "a rule has no `targets`")),
            false => Ok(()),
        }
    }

    fn runs_on(&self) -> Option<Samples> {
        (self.importance != Importance::L1).then_some(Samples::Calibration)
    }

    fn shares_samples(&self) -> bool {
        self.runs_on().is_some()
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let weights = &model.weights;
        let by_samples = self.importance != Importance::L1;
        let (rule, eligible): (_, fn(&str, &Weight) -> bool) =
            if by_samples { (model::LINEAR_RULE, model::is_linear) } else { (model::PRUNABLE_RULE, model::is_prunable) };
        let SelectedWeights { mut names, rule, mut notes } = targets::select_weights(NAME, weights, &self.targets, &self.ignore, rule, eligible)?;
        targets::check_rules(NAME, self.rules.iter().map(|rule| rule.targets.as_slice()), weights, &names)?;
        for name in &names {
            targets::require_float(NAME, name, weights.get(name)?)?;
        }
        if by_samples {
            notes.extend(layerwise::retain_supported(NAME, model, &mut names, &self.targets)?);
            names.iter().try_for_each(|name| weights.get(name)?.require_computable(name))?;
            notes.extend(targets::unused_rules(NAME, self.rules.iter().map(|rule| rule.targets.as_slice()), names.iter().copied()));
        }
        let tensors = names.iter().map(|name| (*name).to_owned()).collect();
        let mut applied = Applied { tensors, rule, notes, zeroes: true, ..Applied::new(NAME, self.options()) };
        let mut after = model.clone();
        if by_samples {
            applied.checkpoint_bytes = Some(layerwise::checkpoint_bytes(&applied.tensors, weights));
            // SparseGPT runs the original model in parallel; Wanda reads all inputs of a block before it
            // prunes its layers, so that most of the block runs again.
            let runs = layerwise::runs_to_layers(&applied.tensors, 2, model)?;
            let at_most = self.importance == Importance::Wanda;
            applied.model_runs = runs.map(|runs| runs.into_iter().map(|run| ModelRun { at_most, ..run }).collect());
            after.weights.set_zero_origin(names.iter().copied(), ZeroOrigin::Pruning);
            return Ok(Plan::new(after, applied.clone()).with_execution(move |context| {
                let mut after = model.clone();
                applied.details = layerwise::prune(self, &names, &mut after, context, &mut applied)?;
                after.weights.set_zero_origin(names.iter().copied(), ZeroOrigin::Pruning);
                Ok((after, applied))
            }));
        }
        let removed = match self.pattern {
            Some(pattern) => self.apply_pattern(pattern, &names, &mut after, &mut applied)?,
            None => self.apply_amounts(&names, &mut after, &mut applied)?,
        };
        let of: u64 = names.iter().map(|name| weights.by_name[*name].elements() as u64).sum();
        if removed == of && of > 0 && self.targets.is_empty() && self.rules.is_empty() {
            return Err(everything(&format!("amount: {}", self.amount())));
        }
        after.weights.set_zero_origin(names.iter().copied(), ZeroOrigin::Pruning);
        applied.details = json!({ "zeroed": removed, "of": of });
        Ok(Plan::new(after, applied))
    }

    fn remedy(&self) -> &'static str {
        if self.importance == Importance::L1 {
            return "`importance: sparsegpt` or `wanda` with calibration data, a smaller `amount` (2:4 is half), `ignore` for sensitive layers, or a subsequent `distill` or `finetune` pass, which preserves zeros";
        }
        "a smaller `amount` (2:4 is half), `ignore` for sensitive layers, or a subsequent `distill` or `finetune` pass, which preserves zeros"
    }
}

/// The error about an option that would remove all weights.
fn everything(option: &str) -> Error {
    let reason = "sets all weights of the selected layers to zero, after which the model computes nothing useful";
    let next = "choose a smaller amount, such as 0.5, or name the tensors that are to become zero in `targets`";
    Error::option(format!("{NAME}: {option}"), format!("{reason}: {next}"))
}

pub(super) fn too_many(amount: Amount, what: &str, weights: u64) -> Error {
    Error::option(format!("{NAME}: amount"), format!("{amount} weights cannot be pruned from {what}, which has {weights}"))
}

/// The axis of a weight that holds the inputs of its layers, from the axes that layers of the graph `read`;
/// `None` if there are none.
fn input_axis(name: &str, weight: &Weight, read: Option<&BTreeSet<usize>>, pattern: NOfM) -> Result<Option<usize>> {
    let refuse = |reason: String| Err(Error::tensor(name, reason, "add it to `ignore`, or use an amount instead of a pattern"));
    let read: Vec<usize> = read.into_iter().flatten().copied().collect();
    match read[..] {
        [axis] => Ok(Some(axis)),
        [] if model::stacked_experts(name, weight).is_some() => refuse(format!(
            "stacks the weights of experts (shape {:?}), and it is unknown which axis holds their inputs, which {pattern} applies to",
            weight.shape
        )),
        [] => Ok(None),
        _ => refuse(format!("is read by layers in different axis orders (shape {:?}), but {pattern} applies to consecutive inputs", weight.shape)),
    }
}

/// The axis of a kernel that holds its inputs, from the length of the bias, which is the number of outputs:
/// transposed convolutions store the inputs first. `None` if both axes or neither have this length.
fn axis_by_bias(name: &str, weight: &Weight, weights: &Weights) -> Option<usize> {
    let bias = weights.by_name.get(&format!("{}.bias", name.strip_suffix(".weight")?))?;
    match (&weight.shape[..], &bias.shape[..]) {
        ([first, second, _, ..], [outputs]) if (first == outputs) != (second == outputs) => Some(usize::from(first == outputs)),
        _ => None,
    }
}

/// Weight whose smallest elements are zeroed.
struct Masked {
    upstream: Weight,
    group: Arc<RankingGroup>,
    index: usize,
    /// Rows of the group member that `upstream` holds.
    rows: Range<usize>,
    meter: Arc<Meter>,
}

impl Masked {
    fn visit_as<F: Float>(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let cut = self.meter.time(|| self.group.cut(self.index, &self.rows))?;
        let threshold = F::from_key(cut.threshold);
        let mut ties = cut.ties;
        let mut output = Vec::new();
        self.upstream.visit(unit, &mut |block: Block| {
            let input = block.now.values;
            output.resize(input.len(), 0);
            self.meter.time(|| {
                // While ties remain, runs are counted before masking; only in the run with the last tie
                // are elements compared one by one.
                let step = if ties == 0 || ties == u64::MAX { input.len().max(1) } else { RUN * F::SIZE };
                for (input, output) in input.chunks(step).zip(output.chunks_mut(step)) {
                    mask_run::<F>(input, output, threshold, &mut ties);
                }
            });
            sink(block.becomes(View::dense(block.now.dtype, &output)))
        })
    }
}

/// Elements per run while ties remain.
const RUN: usize = 4096;

/// Zeros elements below the threshold, and the first `ties` elements equal to it. Decrements `ties`.
fn mask_run<F: Float>(input: &[u8], output: &mut [u8], threshold: F::Magnitude, ties: &mut u64) {
    if *ties == 0 {
        return mask::keep_from::<F>(input, output, threshold);
    }
    if *ties == u64::MAX {
        return mask::keep_above::<F>(input, output, threshold);
    }
    let equal = scan::count_equal::<F>(input, threshold);
    if equal <= *ties {
        mask::keep_above::<F>(input, output, threshold);
    } else {
        mask::keep_from_but_first::<F>(input, output, threshold, *ties);
    }
    *ties -= equal.min(*ties);
}

impl WeightSource for Masked {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        with_float!(self.upstream.dtype, F => self.visit_as::<F>(unit, sink), else self.upstream.visit(unit, sink))
    }

    /// Supported if the threshold is computed before writing. A threshold computed on demand needs the
    /// entire weight.
    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let (upstream, block) = self.upstream.rows(rows, unit).filter(|_| self.group.is_counted_before())?;
        let rows = self.rows.start + rows.start..self.rows.start + rows.end;
        let masked = Masked { upstream, group: self.group.clone(), index: self.index, rows, meter: self.meter.clone() };
        Some(Rows { source: Arc::new(masked), block })
    }
}

/// Weight with an N:M sparsity pattern.
struct Patterned {
    upstream: Weight,
    pattern: NOfM,
    stride: usize,
    meter: Arc<Meter>,
}

impl WeightSource for Patterned {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let NOfM { n, m } = self.pattern;
        let mut output = Vec::new();
        self.upstream.visit(least_common_multiple(unit, m * self.stride), &mut |block: Block| {
            output.resize(block.now.values.len(), 0);
            self.meter.time(|| with_float!(block.now.dtype, F => mask::keep_n_of_m::<F>(block.now.values, &mut output, n, m, self.stride), else ()));
            sink(block.becomes(View::dense(block.now.dtype, &output)))
        })
    }

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let (upstream, block) = self.upstream.rows(rows, least_common_multiple(unit, self.pattern.m * self.stride))?;
        Some(Rows { source: Arc::new(Patterned { upstream, meter: self.meter.clone(), ..*self }), block })
    }
}
