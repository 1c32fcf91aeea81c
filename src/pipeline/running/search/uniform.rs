//! Structured pruning for runtimes that load one width for all layers.
//!
//! Heads and neurons are removed from all layers in the same proportion. Each choice of the fractions that
//! remain is a structure: a smaller model, in which the formats of each unit are scored like those of the
//! original one. The loss of the structure itself is measured, with all weights as floats and after the
//! layers that read removed units were refitted to the calibration samples; it is the loss of a further unit
//! without weights. All units of an assignment have options of the same structure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::formats::{Formats, Unit, Writing, Written, applied, retain};
use super::pruned::{PRUNE_RUNS, ascending, removed};
use crate::analysis::{self, GroupUnit};
use crate::error::{Error, Result};
use crate::exec::Rounding;
use crate::model::Model;
use crate::pass::{Amount, Amounts, Context, Method, PruneStructured, PrunedPart, Repair, Score, Scores, Step, UnitImportance};
use crate::report::format::natural;
use crate::report::search::SearchLoss;
use crate::work::lock;

/// Name of the unit that has the losses of the structures.
const WIDTHS: &str = "widths";
/// Parts of layers whose units are removed.
const PARTS: [PrunedPart; 2] = [PrunedPart::Heads, PrunedPart::Mlp];
/// Multiples that remaining neurons have, if a quarter of them is one: sizes of the groups and blocks that
/// share a scale.
const MULTIPLES: [usize; 5] = [256, 128, 64, 32, 16];

/// A model with the same widths in all layers.
struct Structure {
    /// Removed fractions of the parts, in words; empty for the original model.
    name: String,
    /// The pass that removes units; `None` for the original model.
    pass: Option<Step>,
    /// The planned model.
    model: Model,
    /// The formats of its units.
    formats: Box<dyn Formats>,
}

/// A function that returns the formats of a model with these names, or all that its runtime loads.
pub(super) type FormatsOf = Box<dyn Fn(&Model, &[String]) -> Result<Box<dyn Formats>> + Send + Sync>;

/// The formats of a model, and those of smaller models with the same number of layers. The options of a unit
/// are those of all structures, of which the last one is the original model.
pub(super) struct UniformWidths {
    model: Model,
    formats: FormatsOf,
    /// Names of the formats of a structure.
    names: Vec<String>,
    structures: Vec<Structure>,
    /// The structure whose weights were computed last.
    executed: Mutex<Option<(usize, Model)>>,
}

impl UniformWidths {
    /// Adds all combinations of fractions of heads and of neurons to the formats.
    ///
    /// # Errors
    /// If a fraction is not possible for any part.
    pub fn new(model: &Model, loaded: FormatsOf, only: &[String], fractions: &[f64]) -> Result<UniformWidths> {
        let fractions = ascending(fractions);
        let round_to = round_to(model)?;
        let (mut structures, mut names, mut used, mut refused) = (Vec::new(), BTreeSet::new(), BTreeSet::new(), None);
        let all: Vec<f64> = fractions.iter().copied().chain([1.0]).collect();
        for (heads, mlp) in all.iter().flat_map(|heads| all.iter().map(move |mlp| (*heads, *mlp))) {
            let amounts: BTreeMap<PrunedPart, Amount> =
                PARTS.into_iter().zip([heads, mlp]).filter(|(_, remaining)| *remaining < 1.0).map(|(part, remaining)| (part, removed(remaining))).collect();
            if amounts.is_empty() {
                continue;
            }
            let count = amounts.len();
            let pass: Step = PruneStructured {
                amount: Some(Amounts::Each(amounts)),
                importance: UnitImportance::Activation,
                round_to,
                uniform: Some(true),
                repair: Repair::LeastSquares,
                ..PruneStructured::default()
            }
            .into();
            let mut widths = Vec::new();
            let planned = applied(model, std::slice::from_ref(&pass), |plan| {
                widths = removed_widths(&plan.applied.details);
                Ok((plan.model, plan.applied))
            });
            match planned {
                // A part that keeps all units is that of another structure.
                Ok((planned, _)) if widths.len() == count && names.insert(widths.join(" and ")) => {
                    used.extend([heads, mlp].map(f64::to_bits));
                    let formats = loaded(&planned, only)?;
                    structures.push(Structure { name: widths.join(" and "), pass: Some(pass), model: planned, formats });
                }
                Ok(_) => {}
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        if let Some(fraction) = fractions.iter().find(|fraction| !used.contains(&fraction.to_bits())) {
            let reason = refused.map_or_else(|| "these widths have no such multiples".to_owned(), |error| error.to_string());
            return Err(Error::option("--prune", format!("a fraction of {fraction} of the heads or neurons of all layers is not possible: {reason}")));
        }
        structures.sort_by_key(|structure| structure.model.weights.parameters());
        let formats = loaded(model, only)?;
        let names = formats.names();
        structures.push(Structure { name: String::new(), pass: None, model: model.clone(), formats });
        Ok(UniformWidths { model: model.clone(), formats: loaded, names, structures, executed: Mutex::default() })
    }

    /// Number of the structure of these options.
    fn structure(&self, options: &[usize]) -> usize {
        let last = self.structures.len() - 1;
        options.first().map_or(last, |option| option / self.names.len()).min(last)
    }

    /// The last structure, which is the original model.
    fn original(&self) -> usize {
        self.structures.len() - 1
    }

    /// The units of a structure with its formats.
    fn own(&self, units: &[Unit], at: usize) -> Vec<Unit> {
        let options = |unit: &Unit| unit.options.iter().skip(at * self.names.len()).take(self.names.len()).copied().collect();
        units.iter().filter(|unit| unit.name != WIDTHS).map(|unit| Unit { options: options(unit), ..unit.clone() }).collect()
    }

    /// The formats of the units of a structure.
    fn own_options(&self, units: &[Unit], options: &[usize]) -> Vec<usize> {
        units.iter().zip(options).filter(|(unit, _)| unit.name != WIDTHS).map(|(_, option)| option % self.names.len()).collect()
    }

    /// The scores of all structures: those of a weight in the order of structures, and the importance of
    /// columns by the number of the structure.
    fn joined(&self, mut scores: impl FnMut(usize) -> Result<Option<Scores>>) -> Result<Option<Scores>> {
        let (each, mut all) = (self.names.len() - 1, Scores::default());
        for at in 0..self.structures.len() {
            let Some(own) = scores(at)? else { return Ok(None) };
            for (name, options) in own.by_weight {
                let joined = all.by_weight.entry(name).or_insert_with(|| vec![None; each * self.structures.len()]);
                joined.iter_mut().skip(at * each).zip(options).for_each(|(joined, option)| *joined = option);
            }
            all.importance.extend(own.importance.into_iter().map(|(name, columns)| (format!("{at}:{name}"), columns)));
        }
        Ok(Some(all))
    }

    /// The scores of a structure.
    fn scores_of(&self, scores: &Scores, at: usize) -> Scores {
        let (each, prefix) = (self.names.len() - 1, format!("{at}:"));
        let own = |options: &Vec<Option<Score>>| options.iter().skip(at * each).take(each).copied().collect::<Vec<_>>();
        let by_weight = scores.by_weight.iter().map(|(name, options)| (name.clone(), own(options)));
        let columns = |(name, columns): (&String, &Arc<Vec<f32>>)| Some((name.strip_prefix(&prefix)?.to_owned(), columns.clone()));
        Scores { by_weight: by_weight.collect(), importance: scores.importance.iter().filter_map(columns).collect() }
    }

    /// The model of a structure with its weights. Only those of the last one remain in memory.
    fn executed(&self, at: usize, context: &Context) -> Result<Model> {
        let Some(pass) = &self.structures[at].pass else { return Ok(self.model.clone()) };
        let mut last = lock(&self.executed);
        match last.take() {
            Some((known, model)) if known == at => *last = Some((known, model)),
            _ => *last = Some((at, applied(&self.model, std::slice::from_ref(pass), |plan| plan.execute(context))?.0)),
        }
        Ok(last.as_ref().map_or_else(|| self.model.clone(), |(_, model)| model.clone()))
    }

    /// The formats of a model, with the same names.
    fn formats_of(&self, model: &Model) -> Result<Box<dyn Formats>> {
        let named = &self.names[..self.names.len() - 1];
        (self.formats)(model, named)
    }
}

/// Removed fractions of the parts in a plan of structured pruning, in words.
fn removed_widths(details: &Value) -> Vec<String> {
    let groups = details["groups"].as_array().map(Vec::as_slice).unwrap_or_default();
    let widths = |part: PrunedPart| {
        let name = part.to_string();
        let group = groups.iter().find(|group| group["unit"] == name.as_str())?;
        let (before, after) = (group["before"].as_f64()?, group["after"].as_f64()?);
        let what = if part == PrunedPart::Mlp { "neurons" } else { "heads" };
        (after < before).then(|| format!("{:.0} % of {what}", 100.0 * (1.0 - after / before)))
    };
    PARTS.into_iter().filter_map(widths).collect()
}

/// The multiple to which remaining neurons are rounded.
fn round_to(model: &Model) -> Result<usize> {
    let groups = analysis::groups(&model.graph()?)?.groups;
    let sizes: Vec<usize> = groups.iter().filter(|group| group.unit == GroupUnit::Mlp).map(|group| group.size).collect();
    let divides = |multiple: &usize| sizes.iter().all(|size| size.is_multiple_of(4 * multiple));
    Ok(MULTIPLES.into_iter().find(divides).unwrap_or(PruneStructured::default().round_to))
}

impl Formats for UniformWidths {
    fn names(&self) -> Vec<String> {
        let named = |structure: &Structure| {
            let suffix = if structure.pass.is_some() { format!(", {} pruned", structure.name) } else { String::new() };
            self.names.iter().map(move |name| format!("{name}{suffix}")).collect::<Vec<_>>()
        };
        self.structures.iter().flat_map(named).collect()
    }

    fn retain(&mut self, kept: &[bool]) {
        self.structures.iter_mut().for_each(|structure| structure.formats.retain(kept));
        retain(&mut self.names, kept);
    }

    fn structure_options(&self) -> usize {
        self.names.len()
    }

    fn loss(&self) -> SearchLoss {
        self.structures[self.original()].formats.loss()
    }

    fn rounding(&self) -> Rounding {
        self.structures[self.original()].formats.rounding()
    }

    fn scores(&self, context: &Context) -> Result<Scores> {
        let scores = self.joined(|at| self.formats_of(&self.executed(at, context)?)?.scores(context).map(Some));
        Ok(scores?.unwrap_or_default())
    }

    /// Those of each structure, after units were removed.
    fn score_runs(&self) -> Result<u64> {
        let all = self.structures.iter().map(|structure| structure.formats.score_runs()).sum::<Result<u64>>()?;
        Ok(all + self.prune_runs() * self.original() as u64)
    }

    fn prune_runs(&self) -> u64 {
        PRUNE_RUNS
    }

    fn sizes(&self) -> Result<Option<Scores>> {
        self.joined(|at| self.structures[at].formats.sizes())
    }

    /// The structures have the same units, and options that their widths allow.
    fn units(&self, scores: &Scores) -> Vec<Unit> {
        let (count, total) = (self.names.len(), self.names.len() * self.structures.len());
        let own: Vec<Vec<Unit>> = (0..).zip(&self.structures).map(|(at, structure)| structure.formats.units(&self.scores_of(scores, at))).collect();
        let others: Vec<u64> = self.structures.iter().zip(&own).map(|(structure, own)| structure.formats.other_bytes(own)).collect();
        let options = |unit: &Unit| {
            let named = own.iter().map(|own| own.iter().find(|other| other.name == unit.name));
            named.flat_map(|unit| unit.map_or_else(|| vec![None; count], |unit| unit.options.clone())).collect()
        };
        let last = own.last().map(Vec::as_slice).unwrap_or_default();
        let mut units: Vec<Unit> = last.iter().map(|unit| Unit { options: options(unit), ..unit.clone() }).collect();
        units.sort_by(|a, b| natural(&a.name, &b.name));
        let least = others.iter().min().copied().unwrap_or(0);
        let mut widths = Unit { measured: true, options: vec![None; total], ..Unit::new(WIDTHS.to_owned(), 0) };
        for (at, bytes) in others.into_iter().enumerate() {
            widths.options[(at + 1) * count - 1] = Some(Score { loss: 0.0, bytes: bytes - least });
        }
        units.insert(0, widths);
        units
    }

    /// The least of all structures. The unit of the widths has the differences.
    fn other_bytes(&self, units: &[Unit]) -> u64 {
        (0..self.structures.len()).map(|at| self.structures[at].formats.other_bytes(&self.own(units, at))).min().unwrap_or(0)
    }

    /// Those of the original model.
    fn references(&self, units: &[Unit]) -> Result<Vec<(String, Vec<usize>)>> {
        let (at, count) = (self.original(), self.names.len());
        let joined = |options: Vec<usize>| {
            let mut own = options.into_iter();
            let option = |unit: &Unit| if unit.name == WIDTHS { None } else { own.next() };
            units.iter().map(option).map(|option| at * count + option.unwrap_or(count - 1)).collect::<Vec<usize>>()
        };
        let own = self.structures[at].formats.references(&self.own(units, at))?;
        Ok(own.into_iter().map(|(name, options)| (name, joined(options))).collect())
    }

    fn rounded(&self, units: &[Unit], options: &[usize], scores: &Scores, context: &Context) -> Result<Option<Written>> {
        let at = self.structure(options);
        let model = self.executed(at, context)?;
        let rounded = self.formats_of(&model)?.rounded(&self.own(units, at), &self.own_options(units, options), &self.scores_of(scores, at), context)?;
        Ok(rounded.or_else(|| self.structures[at].pass.is_some().then_some(Written { model, bytes: None })))
    }

    fn writing(&self, units: &[Unit], options: &[usize], method: Option<Method>) -> Result<Option<Writing>> {
        let at = self.structure(options);
        let Structure { pass, formats, .. } = &self.structures[at];
        let writing = formats.writing(&self.own(units, at), &self.own_options(units, options), method)?;
        let Some(pass) = pass else { return Ok(writing) };
        let Writing { passes, exports } = writing.unwrap_or_else(|| Writing { passes: Vec::new(), exports: formats.float_exports() });
        Ok(Some(Writing { passes: [vec![pass.clone()], passes].concat(), exports }))
    }
}
