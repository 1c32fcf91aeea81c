//! Two thin layers in the place of one: `W ≈ B A` with `A` `[rank, in]` and `B` `[out, rank]`.
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
use serde_json::{Map, Value, json};

use super::layerwise;
use super::{Amount, Context, InputImportance, Pass, Samples, options_of};
use crate::error::{Error, Result};
use crate::ir::ops::Conv;
use crate::ir::{Graph, GraphFile, Op, Rewrite, rebuild};
use crate::model::{self, Model};
use crate::pass::targets::{self, Chosen};
use crate::run_state::{Applied, RunState};
use crate::store::{BlockSink, DType, Encoding, Origin, Pattern, Weight, WeightSource, Weights, select};

/// A rank of its own for some layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RankRule {
    /// Weights that the rule is for
    pub targets: Vec<Pattern>,
    /// Their rank, as for all layers
    pub rank: Amount,
}

impl FromStr for RankRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        targets::parse_rule(text, "RANK").map(|(pattern, rank)| RankRule { targets: vec![pattern], rank })
    }
}

/// Put two thin layers in the place of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Decompose {
    /// Width between the two layers: a fraction, like 0.5 or 50%, of the parameters of a layer that both together keep, or a number, like 64
    #[cfg_attr(feature = "cli", arg(long, allow_negative_numbers = true, default_value_t = Self::default().rank))]
    pub rank: Amount,
    /// What errors count for when the layers are chosen
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().importance))]
    pub importance: InputImportance,
    /// Weights to decompose: names with `*`, or `re:` and a regular expression [default: linear weights]; convolutions have to be named
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
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

/// A layer that becomes two.
#[derive(Debug, Clone)]
pub(in crate::pass) struct Split {
    /// Name of its weight.
    pub weight: String,
    /// Names of the weights of the two, the one that is applied first at first.
    pub parts: [String; 2],
    /// Their shapes, as they are stored.
    pub shapes: [Vec<usize>; 2],
    /// Of the matrix: outputs, inputs, width between the two.
    pub sizes: [usize; 3],
    /// Whether weights are stored as `[in, out]`.
    pub input_major: bool,
    /// Whether it is a convolution.
    pub convolution: bool,
    /// Format of the parts.
    pub dtype: DType,
}

impl Split {
    /// Bytes that finding the two takes, about: some copies of the matrix and of products of its inputs and outputs, in 64 bits.
    pub fn bytes(&self) -> usize {
        let [rows, size, _] = self.sizes;
        8 * (5 * rows * size + 4 * rows.max(size) * rows.max(size))
    }

    /// Parameters before and after, biases left out.
    fn parameters(&self) -> [u64; 2] {
        let [rows, size, rank] = self.sizes;
        [(rows * size) as u64, (rank * (rows + size)) as u64]
    }
}

/// A part of a layer that is not computed yet.
struct Planned(String);

impl WeightSource for Planned {
    fn visit(&self, _unit: usize, _sink: BlockSink) -> Result<()> {
        Err(Error::tensor(&self.0, "is computed when the passes run, and not before", ""))
    }
}

/// What a pass makes of a model.
struct Plan {
    splits: Vec<Split>,
    applied: Applied,
}

/// Name of a layer's tensor in one of the two that take its place.
fn part_name(name: &str, part: usize) -> String {
    let (module, tensor) = name.rsplit_once('.').unwrap_or(("", name));
    if module.is_empty() { format!("{part}.{tensor}") } else { format!("{module}.{part}.{tensor}") }
}

impl Decompose {
    fn rank(&self, name: &str) -> Amount {
        let rule = self.rules.iter().find(|rule| rule.targets.iter().any(|pattern| pattern.matches(name)));
        rule.map_or(self.rank, |rule| rule.rank)
    }

    /// The width between the two layers of one `[rows, size]`, or why there are none.
    fn width(&self, name: &str, rows: usize, size: usize) -> Result<usize, &'static str> {
        let (all, each) = ((rows * size) as u64, (rows + size) as u64);
        let rank = match self.rank(name) {
            fraction @ Amount::Fraction(_) => (fraction.share() * all as f64 / each.max(1) as f64) as u64,
            Amount::Count(count) | Amount::Number(count) => count,
        };
        match rank {
            0 => Err("too small for layers of any width between them"),
            rank if rank.saturating_mul(each) >= all => Err("no larger than the two layers that would take their place"),
            rank => Ok(rank as usize),
        }
    }

    /// How the layer of a weight is split, or why it is not.
    fn split(&self, graph: &Graph, name: &str, weight: &Weight) -> Result<Split, &'static str> {
        let Some((id, _)) = graph.params().find(|(_, value)| value.name == name) else { return Err("not read by the model") };
        let readers: Vec<_> = graph.nodes().iter().filter(|node| node.inputs.contains(&id)).collect();
        let places = readers
            .iter()
            .all(|node| node.inputs.iter().position(|input| *input == id) == Some(1) && node.inputs.iter().filter(|input| **input == id).count() == 1);
        if graph.is_output(id) || !places || readers.is_empty() {
            return Err("read by other operators than linear layers and convolutions");
        }
        let (mut input_major, mut convolution) = (false, false);
        for (at, node) in readers.iter().enumerate() {
            let found = match &node.op {
                Op::Linear(op) => (op.input_major, false),
                Op::Conv(op) if op.groups == 1 => (false, true),
                Op::Conv(_) => return Err("of convolutions whose channels are in groups"),
                _ => return Err("read by other operators than linear layers and convolutions"),
            };
            if at > 0 && found != (input_major, convolution) {
                return Err("read by operators of several kinds");
            }
            (input_major, convolution) = found;
        }
        let (rows, size) = match weight.shape[..] {
            [a, b] if input_major => (b, a),
            [a, ..] => (a, weight.row()),
            [] => return Err("single numbers"),
        };
        let rank = self.width(name, rows, size)?;
        let shapes = match (weight.shape.get(2..), input_major) {
            (Some(window), _) if convolution => [[&[rank, weight.shape[1]], window].concat(), vec![rows, rank, 1, 1]],
            (_, true) => [vec![size, rank], vec![rank, rows]],
            _ => [vec![rank, size], vec![rows, rank]],
        };
        let dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
        Ok(Split {
            weight: name.to_owned(),
            parts: [0, 1].map(|part| part_name(name, part)),
            shapes,
            sizes: [rows, size, rank],
            input_major,
            convolution,
            dtype,
        })
    }

    fn plan(&self, model: &Model, graph: &Graph) -> Result<Plan> {
        let weights = &model.weights;
        for rule in &self.rules {
            select::check("rules", &rule.targets, weights.by_name.keys())?;
        }
        let Chosen { names, rule } = targets::choose(NAME, weights, &self.targets, &self.ignore, model::LINEAR_RULE, model::is_linear)?;
        let (mut splits, mut left) = (Vec::new(), BTreeMap::<&str, Vec<&str>>::new());
        for name in names {
            let weight = weights.get(name)?;
            targets::require_float(NAME, name, weight)?;
            match self.split(graph, name, weight) {
                Ok(split) => splits.push(split),
                Err(reason) => left.entry(reason).or_default().push(name),
            }
        }
        let taken = splits.iter().flat_map(|split| &split.parts).find(|name| weights.by_name.contains_key(*name));
        if let Some(name) = taken {
            return Err(Error::tensor(name, "is there already, where decompose would put a part of a layer", "add the layer to `ignore`"));
        }
        let mut applied = Applied { rule, tensors: splits.iter().map(|split| split.weight.clone()).collect(), ..Applied::new(NAME, self.options()) };
        for (reason, names) in left {
            if splits.is_empty() {
                return Err(Error::option(NAME, format!("nothing can be decomposed: {} weights are {reason} (the first: `{}`)", names.len(), names[0])));
            }
            applied.notes.push(format!("decompose: {} weights stay as they are: they are {reason} (the first: `{}`)", names.len(), names[0]));
        }
        let [before, after] = sums(&splits);
        applied.notes.push(format!(
            "decompose: {} layers of {:.2} million parameters become {} of {:.2} million, and compute {:.0} % of the products",
            splits.len(),
            before as f64 / 1e6,
            2 * splits.len(),
            after as f64 / 1e6,
            100.0 * after as f64 / before.max(1) as f64
        ));
        Ok(Plan { splits, applied })
    }
}

fn sums(splits: &[Split]) -> [u64; 2] {
    splits.iter().map(Split::parameters).fold([0, 0], |[a, b], [c, d]| [a + c, b + d])
}

/// The weights without those that were split, biases under the name of the second layer's, and the graph over them.
fn rewire(model: &mut Model, graph: &Graph, splits: &[Split]) -> Result<BTreeSet<String>> {
    let by_weight: BTreeMap<&str, &Split> = splits.iter().map(|split| (split.weight.as_str(), split)).collect();
    let name_of = |id: &crate::ir::ValueId| graph.value(*id).name.as_str();
    let split_of = |node: &crate::ir::Node| node.inputs.get(1).and_then(|id| by_weight.get(name_of(id)).copied());
    // A bias that others read too keeps its name.
    let mut biases: BTreeMap<String, String> = BTreeMap::new();
    for node in graph.nodes().iter() {
        let (Some(split), Some(bias)) = (split_of(node), node.inputs.get(2)) else { continue };
        let module = |name: &str| name.rsplit_once('.').map_or(String::new(), |(module, _)| module.to_owned());
        let readers = graph.nodes().iter().filter(|node| node.inputs.contains(bias)).count();
        let name = name_of(bias);
        if readers == 1 && module(name) == module(&split.weight) && !graph.is_output(*bias) && !model.weights.by_name.contains_key(&part_name(name, 1)) {
            biases.insert(name.to_owned(), part_name(name, 1));
        }
    }
    for (old, new) in &biases {
        let weight = model.weights.get(old)?.clone();
        model.weights.by_name.insert(new.clone(), weight);
    }
    let rebuilt = rebuild(graph, &model.weights, &mut |mut step: Rewrite| {
        let Some(split) = split_of(step.node) else { return step.keep() };
        let [inner, outer] = [0, 1].map(|part| step.builder.param(&split.parts[part], &split.shapes[part]));
        // The second layer of two that is split again is `NAME.1`.
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
        let op: Op = if split.convolution { Conv::default().into() } else { step.node.op.clone() };
        step.builder.node(step.name, op, &step.inputs)
    })?;
    let gone: BTreeSet<String> = splits.iter().map(|split| split.weight.clone()).chain(biases.into_keys()).collect();
    model.weights.by_name.retain(|name, _| !gone.contains(name));
    model.changed_graph = Some(Arc::new(rebuilt));
    Ok(gone)
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
            let between = match rank {
                Amount::Fraction(_) => rank.share() > 0.0 && rank.share() < 1.0,
                Amount::Count(count) | Amount::Number(count) => count > 0,
            };
            if !between {
                let reason = format!("{rank} is neither a fraction between 0 and 1, of the parameters that are kept, nor a number of at least 1");
                return Err(Error::option(format!("{NAME}: {what}"), reason));
            }
        }
        match self.rules.iter().any(|rule| rule.targets.is_empty()) {
            true => Err(Error::option(format!("{NAME}: rules"), "a rule without `targets` is for nothing")),
            false => Ok(()),
        }
    }

    fn settle(&mut self, _model: &Model, sets: &[Samples]) {
        self.importance = self.importance.settled(sets);
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(if self.importance == InputImportance::Activation { Samples::Calibration } else { Samples::None })
    }

    fn keeps_work(&self) -> bool {
        true
    }

    fn kept_bytes(&self, changed: &BTreeSet<String>, after: &Weights) -> u64 {
        let parts = |name: &String| [0, 1].map(|part| after.by_name.get(&part_name(name, part)));
        // The bias of a layer is no part of it.
        let bytes = |weight: &Weight| (weight.elements() as u64).saturating_mul(weight.dtype.bitsize() as u64 / 8);
        changed.iter().map(|name| if let [Some(first), Some(second)] = parts(name) { bytes(first) + bytes(second) } else { 0 }).sum()
    }

    fn apply(&self, mut model: Model, run: &mut RunState, context: Option<&Context>) -> Result<Model> {
        let graph = model.graph()?;
        let Plan { splits, mut applied } = self.plan(&model, &graph)?;
        run.memory = run.memory.max(splits.iter().map(Split::bytes).max().unwrap_or(0) as u64);
        let [before, after] = sums(&splits);
        let mut details = Map::new();
        for (key, value) in [("decomposed", json!(splits.len())), ("parameters_before", json!(before)), ("parameters_after", json!(after))] {
            details.insert(key.to_owned(), value);
        }
        match context {
            Some(context) => {
                let meter = applied.meter.clone();
                details.extend(meter.time(|| layerwise::decompose(self, &splits, &mut model, run, context, &mut applied))?);
            }
            None => {
                for split in &splits {
                    for (name, shape) in split.parts.iter().zip(&split.shapes) {
                        let weight = Weight::new(split.dtype, shape.clone(), Encoding::Dense, Arc::new(Planned(name.clone())));
                        model.weights.by_name.insert(name.clone(), weight.of_origin(Origin::Rescaled));
                    }
                }
            }
        }
        applied.tensors.extend(rewire(&mut model, &graph, &splits)?);
        if model.needs_graph_file() {
            applied.notes.push(format!(
                "config.json cannot describe layers that are two, {} does: `compress` and its ONNX export read it, transformers does not",
                GraphFile::NAME
            ));
        }
        applied.details = Arc::new(move || details.clone().into());
        run.history.push(applied);
        Ok(model)
    }

    fn remedy(&self) -> &'static str {
        "`importance: activation` with calibration data, a larger `rank`, `rules` for the layers that `compress analyze` names, or a `distill` or `finetune` pass behind it"
    }
}
