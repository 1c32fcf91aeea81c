//! Low-rank decomposition of layers: `W ≈ B A` with `A` `[rank, in]` and `B` `[out, rank]`.
//!
//! ```yaml
//! passes:
//!   - decompose:
//!       rank: 0.5
//!       importance: activation
//!       rules: [{ targets: ["*.down_proj.weight"], rank: 0.7 }]
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::layerwise;
use super::{Amount, InputImportance, Pass, Plan, Samples, options_of, tower};
use crate::error::{Error, ParseError, Result, counted};
use crate::ir::ops::Conv;
use crate::ir::{Graph, Op, Rewrite, rebuild};
use crate::model::{self, Model};
use crate::pass::plan::placeholder;
use crate::pass::prune_structured::graph_file_note;
use crate::pass::targets::{self, SelectedWeights};
use crate::run_state::{Applied, RunState};
use crate::store::{DType, Origin, Pattern, Weight};

/// Different rank for some layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RankRule {
    /// Weights that the rule applies to
    pub targets: Vec<Pattern>,
    /// Rank of these layers, written like `rank` of the pass
    pub rank: Amount,
}

impl FromStr for RankRule {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        targets::parse_rule(text, "RANK").map(|(pattern, rank)| RankRule { targets: vec![pattern], rank })
    }
}

/// Replace layers by two low-rank layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Decompose {
    /// Rank of the two layers: a number, like 64, or the fraction of the parameters of the original layer
    /// that they have in total, like 0.5 or 50%
    #[cfg_attr(feature = "cli", arg(long, allow_negative_numbers = true, default_value_t = Self::default().rank))]
    pub rank: Amount,
    /// Weighting of approximation errors
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().importance))]
    pub importance: InputImportance,
    /// Weights to decompose: names with `*`, or `re:` and a regular expression [default: linear weights];
    /// convolutions must be listed explicitly
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Weights to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
    /// Another rank for some weights; the first rule that matches applies
    #[cfg_attr(feature = "cli", arg(long = "rule", value_name = "PATTERN=RANK"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RankRule>,
}

impl Default for Decompose {
    fn default() -> Self {
        let (importance, lists) = (InputImportance::Auto, (Vec::new(), Vec::new()));
        Self { rank: Amount::fraction(0.5), importance, targets: lists.0, ignore: lists.1, rules: Vec::new() }
    }
}

const NAME: &str = "decompose";

/// Low-rank factorization of a layer.
#[derive(Debug, Clone)]
pub(in crate::pass) struct Factorization {
    /// Name of the original weight.
    pub weight: String,
    /// Names of the weights of the two layers, in the order in which they are applied.
    pub parts: [String; 2],
    /// Stored shapes of the two weights.
    pub shapes: [Vec<usize>; 2],
    /// Number of outputs and inputs of the original matrix, and the rank.
    pub sizes: [usize; 3],
    /// Whether weights are stored as `[in, out]`.
    pub input_major: bool,
    /// Whether the layer is a convolution.
    pub convolution: bool,
    /// Dtype of the two weights.
    pub dtype: DType,
}

impl Factorization {
    /// Approximate memory of computing the factorization in bytes: copies of the matrix and of covariance
    /// matrices as f64.
    pub fn bytes(&self) -> usize {
        let [rows, size, _] = self.sizes;
        8 * (5 * rows * size + 4 * rows.max(size) * rows.max(size))
    }

    /// Number of parameters before and after, without biases.
    fn parameters(&self) -> [u64; 2] {
        let [rows, size, rank] = self.sizes;
        [(rows * size) as u64, (rank * (rows + size)) as u64]
    }

    /// Size of the checkpoint in bytes. Biases are not part of it.
    fn checkpoint_bytes(&self) -> u64 {
        self.parameters()[1].saturating_mul(self.dtype.bitsize() as u64 / 8)
    }
}

/// Name of a tensor of a layer in part 0 or 1 of its factorization.
fn part_name(name: &str, part: usize) -> String {
    let (module, tensor) = name.rsplit_once('.').unwrap_or(("", name));
    if module.is_empty() { format!("{part}.{tensor}") } else { format!("{module}.{part}.{tensor}") }
}

/// Why a weight is not factorized that does not only belong to layers.
const OTHER_READERS: &str = "read by other operators than linear layers and convolutions";

impl Decompose {
    fn rank(&self, name: &str) -> Amount {
        let rule = self.rules.iter().find(|rule| rule.targets.iter().any(|pattern| pattern.matches(name)));
        rule.map_or(self.rank, |rule| rule.rank)
    }

    /// Rank of the factorization of a `[rows, size]` matrix, or the reason why it is not factorized.
    fn resolve_rank(&self, name: &str, rows: usize, size: usize) -> Result<usize, &'static str> {
        let (all, each) = ((rows * size) as u64, (rows + size) as u64);
        let rank = match self.rank(name) {
            fraction @ Amount::Fraction(_) => (fraction.share() * all as f64 / each.max(1) as f64) as u64,
            Amount::Count(count) | Amount::Number(count) => count,
        };
        match rank {
            0 => Err("too small for a rank of at least 1"),
            rank if rank.saturating_mul(each) >= all => Err("not larger than the two layers of the factorization"),
            rank => Ok(rank as usize),
        }
    }

    /// Factorization of the layer of a weight, or the reason why it is not factorized.
    fn factorization(&self, graph: &Graph, name: &str, weight: &Weight) -> Result<Factorization, &'static str> {
        let Some((id, _)) = graph.params().find(|(_, value)| value.name == name) else { return Err(tower::unread(name)) };
        let readers: Vec<_> = graph.nodes().iter().filter(|node| node.inputs.contains(&id)).collect();
        let is_second_input = readers
            .iter()
            .all(|node| node.inputs.iter().position(|input| *input == id) == Some(1) && node.inputs.iter().filter(|input| **input == id).count() == 1);
        if graph.is_output(id) || !is_second_input || readers.is_empty() {
            return Err(OTHER_READERS);
        }
        let (mut input_major, mut convolution) = (false, false);
        for (at, node) in readers.iter().enumerate() {
            let found = match &node.op {
                Op::Linear(op) => (op.input_major, false),
                Op::Conv(op) if op.groups == 1 => (false, true),
                Op::Conv(_) => return Err("used by grouped convolutions"),
                _ => return Err(OTHER_READERS),
            };
            if at > 0 && found != (input_major, convolution) {
                return Err("read by operators of several kinds");
            }
            (input_major, convolution) = found;
        }
        let (rows, size) = match weight.shape[..] {
            [a, b] if input_major => (b, a),
            [a, ..] => (a, weight.row()),
            [] => return Err("without dimensions"),
        };
        let rank = self.resolve_rank(name, rows, size)?;
        let shapes = match (weight.shape.get(2..), input_major) {
            (Some(window), _) if convolution => [[&[rank, weight.shape[1]], window].concat(), [vec![rows, rank], vec![1; window.len()]].concat()],
            (_, true) => [vec![size, rank], vec![rank, rows]],
            _ => [vec![rank, size], vec![rows, rank]],
        };
        let dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
        Ok(Factorization {
            weight: name.to_owned(),
            parts: [0, 1].map(|part| part_name(name, part)),
            shapes,
            sizes: [rows, size, rank],
            input_major,
            convolution,
            dtype,
        })
    }

    /// Factorizations of all selected layers, and the record of the pass.
    fn factorizations(&self, model: &Model, graph: &Graph) -> Result<(Vec<Factorization>, Applied)> {
        let weights = &model.weights;
        let SelectedWeights { names, rule, notes } = targets::select_weights(NAME, weights, &self.targets, &self.ignore, model::LINEAR_RULE, model::is_linear)?;
        targets::check_rules(NAME, self.rules.iter().map(|rule| rule.targets.as_slice()), weights, &names)?;
        let (mut factorizations, mut skipped) = (Vec::new(), BTreeMap::<&str, Vec<&str>>::new());
        for name in names {
            let weight = weights.get(name)?;
            targets::require_float(NAME, name, weight)?;
            match self.factorization(graph, name, weight) {
                Ok(factorization) => factorizations.push(factorization),
                Err(OTHER_READERS) if model.onnx.as_ref().is_some_and(|file| file.is_of_scaled_gemm(name)) => {
                    skipped.entry("read by a Gemm with `alpha`, `beta` or `transA`").or_default().push(name);
                }
                Err(reason) => skipped.entry(reason).or_default().push(name),
            }
        }
        let is_taken = |name: &str| weights.by_name.contains_key(name) || graph.values().iter().any(|value| value.name == name);
        let conflict = factorizations.iter().flat_map(|f| &f.parts).find(|name| is_taken(name));
        if let Some(name) = conflict {
            return Err(Error::tensor(name, "exists already, but decompose needs its name for a part of a layer", "add the layer to `ignore`"));
        }
        let mut applied = Applied { rule, notes, tensors: factorizations.iter().map(|f| f.weight.clone()).collect(), ..Applied::new(NAME, self.options()) };
        applied.notes.extend(targets::left_unchanged(NAME, &skipped, &self.targets, factorizations.is_empty())?);
        let rules = self.rules.iter().map(|rule| rule.targets.as_slice());
        applied.notes.extend(targets::unused_rules(NAME, rules, factorizations.iter().map(|f| f.weight.as_str())));
        let [before, after] = parameters(&factorizations);
        applied.notes.push(format!(
            "decompose: replaces {} with {:.2} million parameters by {} with {:.2} million, which compute {:.0} % of the products",
            counted(factorizations.len(), "layer"),
            before as f64 / 1e6,
            counted(2 * factorizations.len(), "layer"),
            after as f64 / 1e6,
            100.0 * after as f64 / before.max(1) as f64
        ));
        Ok((factorizations, applied))
    }
}

/// Total number of parameters before and after.
fn parameters(factorizations: &[Factorization]) -> [u64; 2] {
    factorizations.iter().map(Factorization::parameters).fold([0, 0], |[a, b], [c, d]| [a + c, b + d])
}

/// Removes the factorized weights, renames their biases to those of the second layer, and rewrites the
/// graph. Returns the names of the removed weights.
fn rewire(model: &mut Model, graph: &Graph, factorizations: &[Factorization]) -> Result<BTreeSet<String>> {
    let by_weight: BTreeMap<&str, &Factorization> = factorizations.iter().map(|f| (f.weight.as_str(), f)).collect();
    let name_of = |id: &crate::ir::ValueId| graph.value(*id).name.as_str();
    let factorization_of = |node: &crate::ir::Node| node.inputs.get(1).and_then(|id| by_weight.get(name_of(id)).copied());
    // A bias with other readers keeps its name.
    let mut biases: BTreeMap<String, String> = BTreeMap::new();
    for node in graph.nodes().iter() {
        let (Some(factorization), Some(bias)) = (factorization_of(node), node.inputs.get(2)) else { continue };
        let module = |name: &str| name.rsplit_once('.').map_or(String::new(), |(module, _)| module.to_owned());
        let readers = graph.nodes().iter().filter(|node| node.inputs.contains(bias)).count();
        let name = name_of(bias);
        if readers == 1 && module(name) == module(&factorization.weight) && !graph.is_output(*bias) && !model.weights.by_name.contains_key(&part_name(name, 1))
        {
            biases.insert(name.to_owned(), part_name(name, 1));
        }
    }
    for (old, new) in &biases {
        let weight = model.weights.get(old)?.clone();
        model.weights.by_name.insert(new.clone(), weight);
    }
    let rebuilt = rebuild(graph, &model.weights, &mut |mut step: Rewrite| {
        let Some(factorization) = factorization_of(step.node) else { return step.copy() };
        let [inner, outer] = [0, 1].map(|part| step.builder.param(&factorization.parts[part], &factorization.shapes[part]));
        // If the second layer of a factorization is factorized again, its module is `NAME.1`.
        let mut module = step.name.to_owned();
        while graph.values().iter().any(|value| value.name == format!("{module}.0")) {
            module.push_str(".1");
        }
        let first = step.builder.node(&format!("{module}.0"), step.node.op.clone(), &[step.inputs[0], inner?])?;
        (step.inputs[0], step.inputs[1]) = (first, outer?);
        if let Some(new) = step.node.inputs.get(2).and_then(|bias| biases.get(name_of(bias))) {
            let shape = model.weights.get(new)?.shape.clone();
            step.inputs[2] = step.builder.param(new, &shape)?;
        }
        let op: Op = if factorization.convolution { Conv::default().into() } else { step.node.op.clone() };
        step.builder.node(step.name, op, &step.inputs)
    })?;
    // Weights of an ONNX file have roles, and patterns match the nodes that read them.
    for factorization in factorizations.iter().filter(|_| model.onnx.is_some()) {
        let original = model.weights.get(&factorization.weight)?.clone();
        for (part, name) in factorization.parts.iter().enumerate() {
            let readers = || original.readers.iter().map(|node| format!("{node}.{part}")).collect();
            model.weights.by_name.get_mut(name).into_iter().for_each(|weight| (weight.role, weight.readers) = (original.role, readers()));
        }
    }
    let removed: BTreeSet<String> = factorizations.iter().map(|f| f.weight.clone()).chain(biases.into_keys()).collect();
    model.weights.by_name.retain(|name, _| !removed.contains(name));
    model.changed_graph = Some(Arc::new(rebuilt));
    Ok(removed)
}

impl Pass for Decompose {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        for (what, rank) in std::iter::once(("rank", self.rank)).chain(self.rules.iter().map(|rule| ("rules", rule.rank))) {
            let is_valid = match rank {
                Amount::Fraction(_) => rank.share() > 0.0 && rank.share() < 1.0,
                Amount::Count(count) | Amount::Number(count) => count > 0,
            };
            if !is_valid {
                let reason = format!("{rank} is neither a fraction between 0 and 1 of the parameters nor a number of at least 1");
                return Err(Error::option(format!("{NAME}: {what}"), reason));
            }
        }
        match self.rules.iter().any(|rule| rule.targets.is_empty()) {
            true => Err(Error::option(format!("{NAME}: rules"), "a rule has no `targets`")),
            false => Ok(()),
        }
    }

    fn resolve_defaults(&mut self, _model: &Model, sets: &[Samples]) {
        self.importance = self.importance.resolved(sets);
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(if self.importance == InputImportance::Activation { Samples::Calibration } else { Samples::None })
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let graph = model.graph()?;
        let (factorizations, mut applied) = self.factorizations(model, &graph)?;
        applied.memory = factorizations.iter().map(Factorization::bytes).max().unwrap_or(0) as u64;
        applied.checkpoint_bytes = Some(factorizations.iter().map(Factorization::checkpoint_bytes).sum());
        let [before, after] = parameters(&factorizations);
        applied.details = json!({ "decomposed": factorizations.len(), "parameters_before": before, "parameters_after": after });
        if self.importance == InputImportance::Activation {
            // The original model runs in parallel.
            applied.model_runs = layerwise::runs_to_supported(&applied.tensors, 2, model)?;
        }
        let mut planned = model.clone();
        for factorization in &factorizations {
            for (name, shape) in factorization.parts.iter().zip(&factorization.shapes) {
                let weight = placeholder(name, factorization.dtype, shape.clone());
                planned.weights.by_name.insert(name.clone(), weight.with_origin(Origin::Rescaled));
            }
        }
        applied.tensors.extend(rewire(&mut planned, &graph, &factorizations)?);
        let graph_file = graph_file_note(&planned, "factorized layers").filter(|_| planned.needs_graph_file());
        let mut executed = applied.clone();
        applied.notes.extend(graph_file.clone());
        Ok(Plan::new(planned, applied).with_execution(move |context| {
            let mut after = model.clone();
            let more = layerwise::decompose(self, &factorizations, &mut after, context, &mut executed)?;
            executed.details.as_object_mut().into_iter().for_each(|details| details.extend(more.clone()));
            rewire(&mut after, &graph, &factorizations)?;
            executed.notes.extend(graph_file);
            Ok((after, executed))
        }))
    }

    fn remedy(&self) -> &'static str {
        if self.importance == InputImportance::Activation {
            return "more calibration data, a larger `rank`, `rules` for the layers that `compress analyze` names, or a subsequent `distill` or `finetune` pass";
        }
        "`importance: activation` with calibration data, a larger `rank`, `rules` for the layers that `compress analyze` names, or a subsequent `distill` or `finetune` pass"
    }
}
