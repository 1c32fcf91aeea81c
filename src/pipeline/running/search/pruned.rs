//! Structured pruning as options of units, for ONNX files, whose layers may have different widths.
//!
//! The heads of an attention, the neurons of a feed-forward network or the channels between convolutions are
//! removed from several weights at once, which are one unit. Each of its options is a fraction of the units
//! that remain and a format. Pruning and rounding are not independent: the options are scored jointly, by the
//! outputs of the model in which only this unit has the option. The layers that read removed units are
//! refitted to the calibration samples, by `prune-structured`.

use std::collections::{BTreeMap, BTreeSet};

use super::formats::{Formats, Unit, Writing, Written, applied};
use super::onnx_layers::{OnnxLayers, file_bytes};
use crate::analysis::{self, GroupUnit};
use crate::error::{Error, Result};
use crate::exec::Rounding;
use crate::model::Model;
use crate::pass::{Amount, Context, Method, Pass, PruneStructured, Score, Scores, Step};
use crate::pass::{Amounts, PrunedPart, Repair, UnitImportance};
use crate::report::format::natural;
use crate::report::search::SearchLoss;
use crate::run_state::RunState;
use crate::store::Pattern;

/// Parts of layers whose units are removed.
const PARTS: [PrunedPart; 3] = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels];

/// Runs of whole models over the calibration samples in a pass that removes units: for the importance of
/// units, and of two models for the repair.
pub(super) const PRUNE_RUNS: u64 = 3;

/// Weights from which units are removed together.
struct Branch {
    name: String,
    part: PrunedPart,
    /// A tensor of no other branch, which selects the units.
    target: String,
    weights: BTreeSet<String>,
    /// Size of the weights as floats relative to that without pruning, for each remaining fraction; `None` if
    /// the pass does not remove this fraction.
    sizes: Vec<Option<f64>>,
}

/// The layers of a model, with remaining fractions of their units as further options. The option of a unit is
/// that of the layers, after those of all smaller fractions.
pub(super) struct Pruned {
    model: Model,
    layers: OnnxLayers,
    /// Remaining fractions in ascending order, without 1.
    fractions: Vec<f64>,
    branches: Vec<Branch>,
}

impl Pruned {
    /// Adds the fractions to the options of the layers.
    ///
    /// # Errors
    /// If no units can be removed.
    pub fn new(model: &Model, layers: OnnxLayers, fractions: &[f64]) -> Result<Pruned> {
        let mut pruned = Pruned { model: model.clone(), layers, fractions: ascending(fractions), branches: Vec::new() };
        pruned.branches = pruned.find()?;
        if pruned.branches.is_empty() {
            return Err(Error::option("--prune", "no heads, neurons or channels of this model can be removed"));
        }
        Ok(pruned)
    }

    /// The branches, which share no weights: in a chain of convolutions, every second group of channels.
    fn find(&self) -> Result<Vec<Branch>> {
        let graph = self.model.graph()?;
        let groups = analysis::groups(&graph)?.groups;
        let part = |unit: GroupUnit| PARTS.into_iter().find(|part| part.unit() == Some(unit));
        let candidates: Vec<_> = groups.iter().filter_map(|group| Some((group, part(group.unit)?))).collect();
        let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
        for (group, _) in &candidates {
            let names: BTreeSet<&str> = group.members.iter().map(|member| member.param.as_str()).collect();
            names.into_iter().for_each(|name| *uses.entry(name).or_default() += 1);
        }
        let (mut branches, mut used) = (Vec::new(), BTreeSet::new());
        for (group, part) in candidates {
            let weights: BTreeSet<String> = group.members.iter().map(|member| member.param.clone()).collect();
            let own = group.members.iter().find(|member| uses.get(member.param.as_str()) == Some(&1));
            let Some(own) = own.filter(|_| weights.is_disjoint(&used)) else { continue };
            let mut branch = Branch { name: group.name.clone(), part, target: own.param.clone(), weights, sizes: Vec::new() };
            branch.sizes = self.fractions.iter().map(|remaining| self.size(&branch, *remaining)).collect::<Result<_>>()?;
            if branch.sizes.iter().any(Option::is_some) {
                used.extend(branch.weights.iter().cloned());
                branches.push(branch);
            }
        }
        Ok(branches)
    }

    /// The relative size of the weights of a branch of which a fraction remains.
    fn size(&self, branch: &Branch, remaining: f64) -> Result<Option<f64>> {
        let (pass, state) = (self.pass(branch.part, remaining, vec![pattern(&branch.target)?]), RunState::default());
        // The pass reports units that it cannot rank, or layers that are too narrow.
        let Ok(plan) = pass.plan(&self.model, &state) else { return Ok(None) };
        let elements =
            |model: &Model| -> usize { branch.weights.iter().filter_map(|name| model.weights.by_name.get(name)).map(|weight| weight.elements()).sum() };
        let (before, after) = (elements(&self.model), elements(&plan.model));
        Ok((after < before).then(|| after as f64 / before as f64))
    }

    /// The pass that removes units of the branches with these targets.
    fn pass(&self, part: PrunedPart, remaining: f64, targets: Vec<Pattern>) -> PruneStructured {
        PruneStructured {
            dims: vec![part],
            amount: Some(Amounts::All(removed(remaining))),
            importance: UnitImportance::Activation,
            uniform: Some(false),
            repair: Repair::LeastSquares,
            targets,
            ..PruneStructured::default()
        }
    }

    /// Number of options of the layers.
    fn formats(&self) -> usize {
        self.layers.names().len()
    }

    /// Index of the first option without pruning.
    fn first_unpruned(&self) -> usize {
        self.formats() * self.fractions.len()
    }

    /// The layers of the units, and their formats.
    fn split(&self, units: &[Unit], options: &[usize]) -> (Vec<Unit>, Vec<usize>) {
        let (formats, unpruned) = (self.formats(), self.first_unpruned());
        let each = |(unit, option): (&Unit, &usize)| {
            let own = unit.options.get(unpruned..).unwrap_or_default().to_vec();
            let layer = |name: &String| Unit { weights: vec![name.clone()], options: own.clone(), ..Unit::new(name.clone(), 0) };
            let format = option % formats;
            unit.weights.iter().map(|name| (layer(name), format)).collect::<Vec<_>>()
        };
        units.iter().zip(options).flat_map(each).unzip()
    }

    /// The passes that remove units in a choice of options.
    fn pruning(&self, units: &[Unit], options: &[usize]) -> Result<Vec<Step>> {
        let mut passes: Vec<Step> = Vec::new();
        for (number, remaining) in self.fractions.iter().enumerate() {
            for part in PARTS {
                let is_chosen = |branch: &&Branch| {
                    let option = units.iter().position(|unit| unit.weights.iter().any(|name| branch.weights.contains(name))).and_then(|at| options.get(at));
                    branch.part == part && option.is_some_and(|option| option / self.formats() == number)
                };
                let targets = self.branches.iter().filter(is_chosen).map(|branch| pattern(&branch.target)).collect::<Result<Vec<Pattern>>>()?;
                if !targets.is_empty() {
                    passes.push(self.pass(part, *remaining, targets).into());
                }
            }
        }
        Ok(passes)
    }
}

/// Fractions in ascending order.
pub(super) fn ascending(fractions: &[f64]) -> Vec<f64> {
    let mut fractions = fractions.to_vec();
    fractions.sort_by(f64::total_cmp);
    fractions.dedup();
    fractions
}

/// The amount to remove so that a fraction remains, without the rounding of the difference: 0.3, not
/// 0.30000000000000004.
pub(super) fn removed(remaining: f64) -> Amount {
    Amount::fraction(((1.0 - remaining) * 1e9).round() / 1e9)
}

/// A pattern that matches one name.
fn pattern(name: &str) -> Result<Pattern> {
    name.parse().map_err(|e| Error::option("auto", e))
}

/// The sum of the scores of two layers in the same format.
fn sum(one: Option<Score>, other: Option<Score>) -> Option<Score> {
    one.zip(other).map(|(one, other)| Score { loss: one.loss + other.loss, bytes: one.bytes + other.bytes })
}

impl Formats for Pruned {
    fn names(&self) -> Vec<String> {
        let names = self.layers.names();
        let pruned = self.fractions.iter().flat_map(|remaining| names.iter().map(move |name| format!("{name}, {:.0} % pruned", 100.0 * (1.0 - remaining))));
        pruned.chain(names.iter().cloned()).collect()
    }

    fn retain(&mut self, kept: &[bool]) {
        self.layers.retain(kept);
    }

    fn loss(&self) -> SearchLoss {
        self.layers.loss()
    }

    fn rounding(&self) -> Rounding {
        self.layers.rounding()
    }

    fn scores(&self, context: &Context) -> Result<Scores> {
        self.layers.scores(context)
    }

    fn score_runs(&self) -> Result<u64> {
        self.layers.score_runs()
    }

    /// A mixture has a pass for each fraction and part.
    fn prune_runs(&self) -> u64 {
        PRUNE_RUNS * (self.fractions.len() * PARTS.len()) as u64
    }

    fn units(&self, scores: &Scores) -> Vec<Unit> {
        let (mut rest, mut units) = (self.layers.units(scores), Vec::new());
        for branch in &self.branches {
            let is_own = |unit: &Unit| unit.weights.iter().any(|name| branch.weights.contains(name));
            let (own, others): (Vec<Unit>, Vec<Unit>) = rest.into_iter().partition(is_own);
            rest = others;
            let mut own = own.into_iter();
            let Some(mut unit) = own.next() else { continue };
            for layer in own {
                unit.weights.extend(layer.weights);
                unit.parameters += layer.parameters;
                unit.options = unit.options.iter().zip(layer.options).map(|(one, other)| sum(*one, other)).collect();
            }
            let smaller = |score: Score, size: f64| Score { loss: 0.0, bytes: (score.bytes as f64 * size).ceil() as u64 };
            let pruned = branch.sizes.iter().flat_map(|size| unit.options.iter().map(move |score| score.zip(*size).map(|(score, size)| smaller(score, size))));
            let options = pruned.chain(unit.options.iter().copied()).collect();
            units.push(Unit { name: branch.name.clone(), measured: true, options, ..unit });
        }
        let without = |unit: Unit| Unit { options: vec![None; self.first_unpruned()].into_iter().chain(unit.options).collect(), ..unit };
        units.extend(rest.into_iter().map(without));
        units.sort_by(|a, b| natural(&a.name, &b.name));
        units
    }

    fn other_bytes(&self, units: &[Unit]) -> u64 {
        self.layers.other_bytes(units)
    }

    /// The uniform formats without pruning.
    fn references(&self, units: &[Unit]) -> Result<Vec<(String, Vec<usize>)>> {
        let (unpruned, floats) = (self.first_unpruned(), self.first_unpruned() + self.formats() - 1);
        let (layers, _) = self.split(units, &vec![floats; units.len()]);
        let joined = |options: Vec<usize>| {
            let mut formats = options.into_iter();
            let option = |unit: &Unit| {
                let of_layers = formats.by_ref().take(unit.weights.len()).collect::<Vec<usize>>();
                let first = of_layers.first().map(|format| unpruned + format);
                first.filter(|option| unit.options.get(*option).is_some_and(Option::is_some)).unwrap_or(floats)
            };
            units.iter().map(option).collect::<Vec<usize>>()
        };
        Ok(self.layers.references(&layers)?.into_iter().map(|(name, options)| (name, joined(options))).collect())
    }

    fn rounded(&self, units: &[Unit], options: &[usize], _scores: &Scores, context: &Context) -> Result<Option<Written>> {
        let Some(writing) = self.writing(units, options, None)? else { return Ok(None) };
        let (model, run) = applied(&self.model, &writing.passes, |plan| plan.execute(context))?;
        let (_, formats) = self.split(units, options);
        Ok(Some(Written { bytes: Some(file_bytes(&self.layers.export(&formats), &model, &run)?), model }))
    }

    /// The shapes determine the times, so that units are ranked by their weights, and layers are not
    /// refitted.
    fn timed(&self, units: &[Unit], options: &[usize], context: &Context) -> Result<Option<Written>> {
        let Some(mut writing) = self.writing(units, options, None)? else { return Ok(None) };
        for step in &mut writing.passes {
            if let Step::PruneStructured(pass) = step {
                (pass.importance, pass.repair) = (UnitImportance::default(), Repair::None);
            }
        }
        let (model, _) = applied(&self.model, &writing.passes, |plan| plan.execute(context))?;
        Ok(Some(Written { model, bytes: None }))
    }

    fn writing(&self, units: &[Unit], options: &[usize], method: Option<Method>) -> Result<Option<Writing>> {
        let (layers, formats) = self.split(units, options);
        let (mut passes, rounded) = (self.pruning(units, options)?, self.layers.writing(&layers, &formats, method)?);
        if passes.is_empty() {
            return Ok(rounded);
        }
        let exports = vec![self.layers.export(&formats).into()];
        passes.extend(rounded.into_iter().flat_map(|writing| writing.passes));
        Ok(Some(Writing { passes, exports }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::onnx_layers::Arithmetics;
    use super::*;

    fn model(name: &str) -> Model {
        Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap()
    }

    /// Every weight is in one unit; units with pruned options have one for each fraction and format, whose
    /// sizes are those of the pruned weights.
    #[test]
    fn branches_are_units_with_pruned_options() {
        for name in ["bert", "vit", "torchvision-mobilenet-v2"] {
            let model = model(name);
            let pruned = Pruned::new(&model, OnnxLayers::new(&model, Arithmetics::Fast).unwrap(), &[0.5, 0.75, 0.5]).unwrap();
            assert_eq!(pruned.fractions, [0.5, 0.75]);
            let formats = pruned.formats();
            assert_eq!(pruned.names().len(), 3 * formats);
            let score = |weight: &crate::store::Weight| vec![Some(Score { loss: 0.1, bytes: weight.elements() as u64 }); formats - 1];
            let linear = model.weights.by_name.iter().filter(|(_, weight)| weight.shape.len() > 1);
            let scores = Scores { by_weight: linear.map(|(name, weight)| (name.clone(), score(weight))).collect(), ..Scores::default() };
            let units = pruned.units(&scores);
            let weights: Vec<&String> = units.iter().flat_map(|unit| &unit.weights).collect();
            assert_eq!(weights.iter().collect::<BTreeSet<_>>().len(), weights.len(), "{name}: a weight is in two units");
            assert_eq!(weights.len(), scores.by_weight.len(), "{name}");
            let branches: Vec<&Unit> = units.iter().filter(|unit| unit.options[..2 * formats].iter().any(Option::is_some)).collect();
            assert!(!branches.is_empty() && branches.iter().all(|unit| unit.measured), "{name}");
            for unit in branches {
                let bytes = |number: usize| unit.options[number * formats].map(|score| score.bytes);
                let (half, all) = (bytes(0).unwrap(), bytes(2).unwrap());
                assert!(half < all && bytes(1).is_none_or(|most| half <= most && most < all), "{name}: {unit:?}");
                // The planned model has the predicted size.
                let mut options = vec![3 * formats - 1; units.len()];
                options[units.iter().position(|other| other.name == unit.name).unwrap()] = formats - 1;
                let writing = pruned.writing(&units, &options, None).unwrap().unwrap();
                assert_eq!(writing.passes.len(), 1, "{name}");
                let (after, _) = applied(&model, &writing.passes, |plan| Ok((plan.model, plan.applied))).unwrap();
                let of = |model: &Model| unit.weights.iter().map(|name| model.weights.by_name[name].elements()).sum::<usize>() as f64;
                let expected = half as f64 / all as f64;
                // Biases and norms of the branch are not part of the unit.
                assert!((of(&after) / of(&model) - expected).abs() < 0.05, "{name} {}: {} instead of {expected}", unit.name, of(&after) / of(&model));
            }
            let all = pruned.references(&units).unwrap();
            assert!(all.iter().all(|(_, options)| options.iter().all(|option| *option >= 2 * formats)), "{name}");
        }
    }
}
