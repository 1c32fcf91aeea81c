//! The options of all branches of a model, their costs, and the model with chosen options.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::branches::{self, Branch, Part};
use super::choice::{Chosen, LayerOptions, keep_one_branch, mixed, uniform};
use super::options::Limit;
use super::samples::Measurement;
use super::{NAME, SearchStructure};
use crate::analysis::{self, Group, GroupUnit, Groups, Layers};
use crate::arch;
use crate::error::{Error, Result, counted};
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::assignment::Choice;
use crate::pass::prune_structured::layers::{drop_layers, outside_readers, renamed};
use crate::pass::prune_structured::selection::least_important;
use crate::pass::prune_structured::{Repair, remove_units, require_no_token_prediction};
use crate::run_state::Applied;
use crate::store::{ByteSize, Weight};

/// An option of a branch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Retained {
    Whole,
    /// This number of units.
    Units(usize),
    Nothing,
}

/// A model with the options of its branches.
pub(super) struct Structure<'a> {
    pub model: &'a Model,
    pub graph: &'a Graph,
    pub found: Layers,
    pub groups: Groups,
    /// All branches, two of each layer.
    pub branches: Vec<Branch>,
    /// The options of each branch: the whole branch, then fewer and fewer units.
    pub options: Vec<Vec<Retained>>,
    limit: Limit,
    uniform: bool,
}

impl<'a> Structure<'a> {
    /// Finds the branches and their options. Only shapes are read.
    pub fn new(pass: &SearchStructure, model: &'a Model, graph: &'a Graph, uniform: bool) -> Result<Structure<'a>> {
        let Some(found) = analysis::layers(graph) else {
            return Err(Error::option(NAME, "the model has no repeated layers of equal structure with attention"));
        };
        require_no_token_prediction(NAME, model)?;
        let groups = analysis::groups(graph)?;
        let branches = branches::branches(graph, &found, &groups)?;
        // Of these families, config.json cannot specify fewer heads of the same width.
        let has_fixed_heads = uniform && model.is_described() && arch::derives_head_dim(model.config.model_type());
        let has_fixed_width = |branch: &Branch| has_fixed_heads && branch.part == Part::Attention;
        let is_removable = !uniform && found.layers.len() > 1;
        let options = branches.iter().map(|branch| options(pass, branch, is_removable, has_fixed_width(branch))).collect();
        let mut structure = Structure { model, graph, found, groups, branches, options, limit: pass.limit, uniform };
        if uniform && model.is_described() {
            structure.keep_described();
        }
        Ok(structure)
    }

    /// Removes the widths of all layers that `config.json` cannot specify, or that transformers refuses.
    /// Errors are those of the later choice.
    fn keep_described(&mut self) {
        for part in [0, 1] {
            let pairs = self.pairs();
            let Some(first) = pairs.first().map(|pair| self.options[pair[part]].clone()) else { continue };
            if pairs.iter().any(|pair| self.options[pair[part]] != first) {
                continue;
            }
            let is_refused = |option: usize| {
                let options = vec![if part == 0 { [option, 0] } else { [0, option] }; pairs.len()];
                let chosen = Chosen { options, ..Chosen::default() };
                let built = self.build(self.model, &chosen, None, (Repair::None, None), &mut Applied::new(NAME, Value::Null));
                built.is_ok_and(|model| !model.is_described() || arch::indivisible_heads(model.config.model_type(), model.config.values()).is_some())
            };
            let refused: Vec<Retained> = first.iter().enumerate().skip(1).filter(|(at, _)| is_refused(*at)).map(|(_, kept)| *kept).collect();
            for pair in &pairs {
                self.options[pair[part]].retain(|kept| !refused.contains(kept));
            }
        }
    }

    /// The indices of the attention and of the network of each layer.
    fn pairs(&self) -> Vec<[usize; 2]> {
        let index = |pair: &[Branch], first: usize| {
            if pair.first().is_some_and(|branch| branch.part == Part::Attention) { [first, first + 1] } else { [first + 1, first] }
        };
        self.branches.chunks(2).enumerate().map(|(layer, pair)| index(pair, 2 * layer)).collect()
    }

    /// The cost of a weight with this shape.
    fn weight_cost(&self, weight: &Weight, shape: &[usize]) -> u64 {
        let elements: usize = shape.iter().product();
        match self.limit {
            Limit::Layers(_) | Limit::Params(_) => elements as u64,
            Limit::Bytes(_) => (u128::from(weight.stored_bytes) * elements as u128).div_ceil(weight.elements().max(1) as u128) as u64,
        }
    }

    /// The cost of some of the weights of the model.
    fn sum_of<'n>(&self, names: impl IntoIterator<Item = &'n String>) -> u64 {
        let weights = names.into_iter().filter_map(|name| self.model.weights.by_name.get(name));
        weights.map(|weight| self.weight_cost(weight, &weight.shape)).sum()
    }

    /// The cost of a model.
    pub fn cost(&self, model: &Model) -> u64 {
        model.weights.by_name.values().map(|weight| self.weight_cost(weight, &weight.shape)).sum()
    }

    /// The cost of an option of a branch.
    fn option_cost(&self, branch: &Branch, kept: Retained) -> u64 {
        match (kept, &branch.units) {
            (Retained::Nothing, _) => 0,
            (Retained::Units(count), Some(units)) => {
                let size = |group: &Group| if self.groups.groups.get(units.group).is_some_and(|own| std::ptr::eq(own, group)) { count } else { group.size };
                let shapes = self.groups.shapes(self.graph, &size);
                let weights = branch.tensors.iter().filter_map(|name| Some((self.model.weights.by_name.get(name)?, shapes.get(name)?)));
                weights.map(|(weight, shape)| self.weight_cost(weight, shape)).sum()
            }
            _ => self.sum_of(&branch.tensors),
        }
    }

    /// The choices of all branches by layer. Without `losses` by branch and option, the loss of an option is
    /// the square of the removed fraction.
    pub fn choices(&self, losses: Option<&[Vec<f64>]>) -> Vec<LayerOptions> {
        let choices = |index: usize| {
            let branch = &self.branches[index];
            let choice = |(at, kept): (usize, &Retained)| {
                let assumed = match (kept, &branch.units) {
                    (Retained::Whole, _) => 0.0,
                    (Retained::Units(count), Some(units)) => (1.0 - *count as f64 / units.size as f64).powi(2),
                    _ => 2.0,
                };
                Choice { cost: self.option_cost(branch, *kept), loss: losses.map_or(assumed, |losses| losses[index][at]) }
            };
            self.options[index].iter().enumerate().map(choice).collect::<Vec<Choice>>()
        };
        self.pairs().into_iter().map(|pair| pair.map(&choices)).collect()
    }

    /// The same choices without the removal of branches, limited to the widths of all layers.
    fn common(&self, layers: &[LayerOptions]) -> Vec<LayerOptions> {
        let pairs = self.pairs();
        let widths = |part: usize| {
            let of = |pair: &[usize; 2]| self.options[pair[part]].iter().filter(|kept| **kept != Retained::Nothing).collect::<Vec<_>>();
            let first = pairs.first().map(of).unwrap_or_default();
            if pairs.iter().all(|pair| of(pair) == first) { first.len() } else { 1 }
        };
        let counts = [0, 1].map(widths);
        layers.iter().map(|layer| [0, 1].map(|part| layer[part].iter().take(counts[part]).copied().collect())).collect()
    }

    /// For each layer, the cost of all tensors that are removed with it.
    fn layer_costs(&self) -> Vec<u64> {
        let outside = outside_readers(self.graph, &self.found);
        let mut names: Vec<Vec<&String>> = vec![Vec::new(); self.found.layers.len()];
        for name in self.model.weights.by_name.keys().filter(|name| !outside.contains(name.as_str())) {
            if let Some(layer) = analysis::layer_index(name, &self.found.tensors).and_then(|index| names.get_mut(index)) {
                layer.push(name);
            }
        }
        names.into_iter().map(|names| self.sum_of(names)).collect()
    }

    /// The limit of the cost of the model.
    pub fn limit_cost(&self) -> u64 {
        match self.limit {
            Limit::Params(count) => count,
            Limit::Bytes(size) => size.0,
            Limit::Layers(fraction) => {
                let layers: u64 = self.layer_costs().into_iter().sum();
                // A limit of four digits in an error is met despite its rounding.
                self.cost(self.model) - layers + (fraction * layers as f64 + 1e-6) as u64
            }
        }
    }

    /// The error for a limit below the smallest cost, which names the smallest possible limit.
    fn impossible(&self, smallest: u64) -> Error {
        let nearest = match self.limit {
            Limit::Params(_) => Limit::Params(smallest),
            Limit::Bytes(_) => Limit::Bytes(ByteSize(smallest)),
            Limit::Layers(_) => {
                let layers: u64 = self.layer_costs().into_iter().sum();
                let needed = smallest.saturating_sub(self.cost(self.model) - layers);
                Limit::Layers((1e4 * needed as f64 / layers.max(1) as f64).ceil() / 1e4)
            }
        };
        let otherwise = if self.uniform { ", or set `uniform` to false" } else { "" };
        let reason = format!("{} cannot be met: the smallest possible limit is {nearest}; list smaller `widths`{otherwise}", self.limit);
        Error::option(format!("{NAME}: limit"), reason)
    }

    /// The choice with the least loss within the limit. Each branch has its own option.
    pub fn choose_mixed(&self, losses: Option<&[Vec<f64>]>) -> Result<Chosen> {
        let mut layers = self.choices(losses);
        // The branches of a single layer have no such option.
        if layers.len() > 1 {
            keep_one_branch(&mut layers);
        }
        let others = self.cost(self.model) - self.branches.iter().map(|branch| self.option_cost(branch, Retained::Whole)).sum::<u64>();
        self.within(others, |limit| mixed(&layers, limit))
    }

    /// The choice with the least loss within the limit, with the same options for all layers. `removal` has
    /// the loss of the removal of each layer, of which the layer with the largest one remains; without them,
    /// all layers remain.
    pub fn choose_uniform(&self, losses: Option<&[Vec<f64>]>, removal: Option<&[f64]>) -> Result<Chosen> {
        let layers = self.common(&self.choices(losses));
        let whole = self.layer_costs();
        let parts = self.pairs().into_iter().map(|pair| pair.map(|index| self.option_cost(&self.branches[index], Retained::Whole)).into_iter().sum::<u64>());
        let others: Vec<u64> = whole.iter().zip(parts).map(|(whole, parts)| whole.saturating_sub(parts)).collect();
        let removal: Vec<Option<f64>> = match removal.filter(|removal| removal.len() == layers.len()) {
            Some(removal) => {
                let largest = (0..removal.len()).max_by(|a, b| removal[*a].total_cmp(&removal[*b]).then(b.cmp(a)));
                removal.iter().enumerate().map(|(layer, loss)| Some(*loss).filter(|_| Some(layer) != largest)).collect()
            }
            None => vec![None; layers.len()],
        };
        self.within(self.cost(self.model) - whole.iter().sum::<u64>(), |limit| uniform(&layers, &others, &removal, limit))
    }

    /// Adds the cost of tensors that no choice affects.
    fn within(&self, others: u64, choose: impl FnOnce(u64) -> Result<Chosen, u64>) -> Result<Chosen> {
        let Some(limit) = self.limit_cost().checked_sub(others) else {
            return Err(self.impossible(others + choose(0).map_or_else(|smallest| smallest, |chosen| chosen.cost)));
        };
        choose(limit).map_err(|smallest| self.impossible(others + smallest))
    }

    /// The first layers of an order, as few as the limit requires, as a choice; `None` if the limit cannot be
    /// met.
    pub fn without_first(&self, order: &[usize]) -> Option<Chosen> {
        let (costs, mut cost, limit) = (self.layer_costs(), self.cost(self.model), self.limit_cost());
        let mut chosen = Chosen { options: vec![[0, 0]; self.found.layers.len()], ..Chosen::default() };
        for layer in order.iter().take(order.len().saturating_sub(1)) {
            if cost <= limit {
                break;
            }
            cost -= costs[*layer];
            chosen.removed.insert(*layer);
        }
        (cost <= limit).then_some(chosen)
    }

    /// The option of each branch of the layers that a choice keeps, with the index of the branch.
    pub fn retained<'s>(&'s self, chosen: &'s Chosen) -> impl Iterator<Item = (usize, &'s Branch, Retained)> + 's {
        let of_layer = move |(pair, options): ([usize; 2], &'s [usize; 2])| [0, 1].map(|part| (pair[part], self.options[pair[part]][options[part]]));
        let kept = self.pairs().into_iter().zip(&chosen.options).flat_map(of_layer);
        let kept = kept.map(move |(index, kept)| (index, &self.branches[index], kept));
        kept.filter(move |(_, branch, _)| !chosen.removed.contains(&branch.layer))
    }

    /// The model with a choice and the weights of `start`. `importance` has that of the units of each branch;
    /// without it, the first units are removed. With a measurement, the layers that read removed units are
    /// repaired on its fitted samples.
    pub fn build(
        &self,
        start: &Model,
        chosen: &Chosen,
        importance: Option<&[Vec<f64>]>,
        (repair, measurement): (Repair, Option<&Measurement>),
        applied: &mut Applied,
    ) -> Result<Model> {
        let mut model = start.clone();
        if !chosen.removed.is_empty() {
            applied.notes.extend(drop_layers(&mut model, self.graph, &self.found, &chosen.removed)?);
        }
        let without: Vec<&Branch> = self.retained(chosen).filter(|(_, _, kept)| *kept == Retained::Nothing).map(|(_, branch, _)| branch).collect();
        if !without.is_empty() {
            let graph = model.graph()?;
            applied.notes.extend(branches::remove(&mut model, &graph, &without)?);
        }
        applied.tensors.extend(self.model.weights.by_name.keys().filter(|name| !model.weights.by_name.contains_key(*name)).cloned());
        let graph = model.graph()?;
        let groups = analysis::groups(&graph)?;
        let mut removed: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, branch, kept) in self.retained(chosen) {
            let (Retained::Units(count), Some(units)) = (kept, &branch.units) else { continue };
            let reader = renamed(&units.member.param, &self.found.tensors, &chosen.removed);
            let is_same =
                |group: &Group| group.unit == branch.part.unit() && group.size == units.size && group.members.iter().any(|member| member.param == reader);
            let Some(group) = groups.groups.iter().position(is_same) else {
                return Err(Error::graph(format!("tensor `{reader}`"), "has no units that can be removed after the removal of other parts"));
            };
            removed.insert(group, least_important(units.size, units.size - count, importance.and_then(|importance| importance.get(index)).map(Vec::as_slice)));
        }
        let is_held_out = |sample: usize| measurement.is_some_and(|measurement| measurement.split.is_held_out(sample));
        let context = measurement.map(|measurement| measurement.context);
        remove_units(&mut model, (&graph, &groups), &removed, (repair, context, &is_held_out), applied)?;
        // Both removals note which file describes the result.
        let mut seen = BTreeSet::new();
        applied.notes.retain(|note| seen.insert(note.clone()));
        Ok(model)
    }

    /// The model without a branch.
    pub fn without(&self, branch: &Branch) -> Result<Model> {
        let mut model = self.model.clone();
        branches::remove(&mut model, self.graph, &[branch])?;
        Ok(model)
    }

    /// The model without a layer.
    pub fn without_layer(&self, layer: usize) -> Result<Model> {
        let mut model = self.model.clone();
        drop_layers(&mut model, self.graph, &self.found, &BTreeSet::from([layer]))?;
        Ok(model)
    }

    /// Description of an option of the attention (part 0) or of the network (part 1) of a layer.
    pub fn option_text(&self, layer: usize, part: usize, option: usize) -> String {
        let index = self.pairs()[layer][part];
        let branch = &self.branches[index];
        let unit = if branch.part.unit() == GroupUnit::Heads { "key-value head" } else { "neuron" };
        match (self.options[index][option], &branch.units) {
            (Retained::Nothing, _) => "removed".to_owned(),
            (Retained::Units(count), Some(units)) => format!("{count} of {}", counted(units.size, unit)),
            _ => "whole".to_owned(),
        }
    }

    /// Descriptions of the chosen options of the attention and of the network of each layer.
    pub fn description(&self, chosen: &Chosen) -> Vec<[String; 2]> {
        let text = |layer: usize, part: usize, option: usize| {
            if chosen.removed.contains(&layer) { "removed".to_owned() } else { self.option_text(layer, part, option) }
        };
        chosen.options.iter().enumerate().map(|(layer, options)| [0, 1].map(|part| text(layer, part, options[part]))).collect()
    }
}

/// The options of a branch. The last one is its removal, if it `is_removable`.
fn options(pass: &SearchStructure, branch: &Branch, is_removable: bool, has_fixed_width: bool) -> Vec<Retained> {
    let mut counts = Vec::new();
    if let Some(units) = branch.units.as_ref().filter(|_| !has_fixed_width) {
        let step = if branch.part == Part::Network { pass.round_to } else { 1 };
        let count = |width: &f64| ((width * units.size as f64 / step as f64).round() as usize).max(1) * step;
        counts = pass.widths.iter().map(count).filter(|count| *count < units.size).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts.dedup();
    }
    let units = counts.into_iter().map(Retained::Units);
    [Retained::Whole].into_iter().chain(units).chain(is_removable.then_some(Retained::Nothing)).collect()
}
