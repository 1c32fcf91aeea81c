//! Selection of groups and of the number of units to remove.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::scores::{self, Scores};
use super::widths::{self, Bundle};
use super::{Importance, NAME, PruneStructured, PrunedPart, Ranking, Target, latency, sensitivity};
use crate::analysis::{self, Group, GroupUnit, Groups, Member, Role};
use crate::arch;
use crate::error::{Error, Result, counted};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::{Context, Scope};
use crate::store::select;

/// Groups selected for pruning.
pub(super) struct Selection {
    /// All groups of the model.
    pub groups: Groups,
    /// Indices of the selected groups.
    pub selected: Vec<usize>,
    bundles: Vec<Bundle>,
    /// Description of the selection for reports.
    pub rule: String,
}

/// Number of latency measurements when searching for a target.
const ATTEMPTS: usize = 7;

/// Parts that are pruned by default.
const DEFAULT_PARTS: [PrunedPart; 3] = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels];

impl Selection {
    /// Selects groups by part and by name. Returns an error if the model does not have a part, if a
    /// pattern does not match, or if no group is selected.
    pub fn new(pass: &PruneStructured, model: &Model, graph: &Graph) -> Result<Selection> {
        select::check("targets", &pass.targets, model.weights.by_name.keys())?;
        select::check("ignore", &pass.ignore, model.weights.by_name.keys())?;
        let mut groups = analysis::groups(graph)?;
        let model_type = if model.is_described() { model.config.model_type() } else { "" };
        // The config.json of a transformer cannot specify channels of convolutions before it.
        if arch::has_uniform_widths(model_type) {
            groups.groups.iter_mut().filter(|group| group.unit == GroupUnit::Channels).for_each(|group| group.unit = GroupUnit::Other);
        }
        let parts = parts(pass, &groups)?;
        let units: BTreeSet<GroupUnit> = parts.iter().filter_map(|part| part.unit()).collect();
        let hidden = groups.groups.iter().find(|group| group.unit == GroupUnit::Hidden).map(|group| group.size);
        // Groups whose size config.json specifies only by the width of the residual stream are pruned
        // with it.
        let follows = |group: &Group| {
            units.contains(&GroupUnit::Hidden) && group.unit == GroupUnit::Other && Some(group.size) == hidden && arch::has_uniform_widths(model_type)
        };
        let named = |members: &[Member]| {
            let any = |patterns: &[crate::store::Pattern]| members.iter().any(|member| patterns.iter().any(|pattern| pattern.matches(&member.param)));
            (pass.targets.is_empty() || any(&pass.targets)) && !any(&pass.ignore)
        };
        let is_selected = |group: &Group| (units.contains(&group.unit) || follows(group)) && named(&group.members);
        let selected: Vec<usize> = groups.groups.iter().enumerate().filter(|(_, group)| is_selected(group)).map(|(index, _)| index).collect();
        if selected.is_empty() {
            return Err(Error::option(NAME, "no group is selected; `compress inspect --groups` prints the groups of tensors"));
        }
        let rule = format!("{} of {}", parts.iter().map(PrunedPart::to_string).collect::<Vec<_>>().join(", "), counted(selected.len(), "group"));
        let mut selection = Selection { groups, selected, bundles: Vec::new(), rule };
        let uniform = pass.uniform.unwrap_or(arch::has_uniform_widths(model_type) || arch::has_stage_widths(model_type));
        selection.bundles = selection.bundle(pass, model_type, uniform);
        Ok(selection)
    }

    /// The selected groups.
    pub fn selected_groups(&self) -> Vec<&Group> {
        self.selected.iter().map(|index| &self.groups.groups[*index]).collect()
    }

    fn bundle(&self, pass: &PruneStructured, model_type: &str, uniform: bool) -> Vec<Bundle> {
        let groups = self.selected_groups();
        let amount = |part: PrunedPart| pass.amount(part);
        let joint = arch::derives_head_dim(model_type) && amount(PrunedPart::Heads) == amount(PrunedPart::Hidden);
        let both = [GroupUnit::Heads, GroupUnit::Hidden].iter().all(|unit| groups.iter().any(|group| group.unit == *unit));
        let mut by_key: BTreeMap<(GroupUnit, usize), Vec<usize>> = BTreeMap::new();
        for (index, group) in groups.iter().enumerate() {
            let key = match group.unit {
                _ if !uniform => (group.unit, index),
                GroupUnit::Other => (GroupUnit::Hidden, 0),
                GroupUnit::Heads if joint && both => (GroupUnit::Hidden, 0),
                GroupUnit::Channels if arch::has_stage_widths(model_type) => (GroupUnit::Channels, stage(group)),
                unit => (unit, 0),
            };
            by_key.entry(key).or_default().push(index);
        }
        by_key.into_iter().map(|((unit, _), members)| Bundle::new(unit, members, &groups, pass.round_to, pass.minimum)).collect()
    }

    /// Computes the importance of every unit.
    pub fn scores(&self, pass: &PruneStructured, graph: &Graph, model: &Model, context: &Context) -> Result<Scores> {
        match pass.importance {
            Importance::Auto | Importance::L1 | Importance::L2 => scores::by_weights(&self.selected_groups(), model, pass.importance, &context.work),
            Importance::Activation => sensitivity::by_activation(&self.selected_groups(), graph, model, context),
            Importance::Taylor => sensitivity::by_gradient(&self.selected_groups(), graph, model, context),
        }
    }

    /// Whether `activation` can rank all groups: each has a linear layer or convolution that reads it.
    pub fn is_read(&self, graph: &Graph) -> bool {
        let layers = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_)));
        let weights: BTreeSet<&str> = layers.filter_map(|node| Some(graph.value(*node.inputs.get(1)?).name.as_str())).collect();
        let reads = |member: &Member| member.role == Role::Reads && weights.contains(member.param.as_str());
        self.selected_groups().iter().all(|group| group.members.iter().any(reads))
    }

    /// Number of remaining units of each selected group. Returns an error if an amount is invalid or if a
    /// target cannot be reached.
    pub fn widths(&self, pass: &PruneStructured, graph: &Graph, model: &Model, scores: Option<&Scores>, ranking: Ranking) -> Result<Vec<usize>> {
        let ranked = scores.filter(|_| pass.scope() == Scope::Global);
        match (pass.target, ranking) {
            (None, _) => Ok(self.widths_after(&self.amounts(pass, ranked)?)),
            (Some(Target::Latency(target)), Ranking::Measured(context)) => self.reach_latency(target, graph, model, ranked, context),
            // A plan assumes that the latency is proportional to the MACs.
            (Some(target), _) => self.reach_target(target, graph, model, ranked),
        }
    }

    /// Widths for a target of MACs or parameters.
    fn reach_target(&self, target: Target, graph: &Graph, model: &Model, ranked: Option<&Scores>) -> Result<Vec<usize>> {
        let steps = widths::steps(&self.bundles, ranked);
        let full = self.cost(target, graph, model, &self.widths_after(&vec![0; self.bundles.len()]))?;
        let mut measure = |taken: &[usize]| Ok(self.cost(target, graph, model, &self.widths_after(taken))? / full.max(1.0));
        let taken = widths::reach_target(self.bundles.len(), &steps, target.fraction(), target.name(), &mut measure)?;
        Ok(self.widths_after(&taken))
    }

    /// Widths for a target latency, found by bisection over the MACs.
    fn reach_latency(&self, target: f64, graph: &Graph, model: &Model, ranked: Option<&Scores>, context: &Context) -> Result<Vec<usize>> {
        let full = latency::seconds(graph, context)?;
        let (mut low, mut high) = (0.02, 1.0);
        let mut best: Option<(f64, Vec<usize>)> = None;
        for _ in 0..ATTEMPTS {
            let middle = f64::midpoint(low, high);
            // The minimum widths have more MACs than this.
            let Ok(widths) = self.reach_target(Target::Macs(middle), graph, model, ranked) else {
                low = middle;
                continue;
            };
            let fraction = latency::seconds(&self.smaller(graph, &widths)?, context)? / full;
            if best.as_ref().is_none_or(|(known, _)| (fraction - target).abs() < (known - target).abs()) {
                best = Some((fraction, widths));
            }
            if fraction > target { high = middle } else { low = middle }
        }
        match best {
            Some((fraction, widths)) if fraction <= target * 1.1 => Ok(widths),
            best => {
                let closest = best.map_or(String::new(), |(fraction, _)| format!(": the closest result is {fraction:.2}"));
                Err(Error::option(
                    format!("{NAME}: target"),
                    format!("latency {target} cannot be reached{closest}; list more `dims`, or lower `minimum` or `round_to`"),
                ))
            }
        }
    }

    /// Number of steps of each bundle for the requested amounts.
    fn amounts(&self, pass: &PruneStructured, ranked: Option<&Scores>) -> Result<Vec<usize>> {
        let groups = self.selected_groups();
        let part = |unit: GroupUnit| DEFAULT_PARTS.into_iter().chain([PrunedPart::Hidden]).find(|part| part.unit() == Some(unit)).unwrap_or(PrunedPart::Hidden);
        let separately = |bundle: &Bundle| {
            let name = bundle.groups.first().map_or("", |index| groups[*index].name.as_str());
            bundle.width_index(name, pass.amount(part(bundle.unit)))
        };
        let mut taken: Vec<usize> = self.bundles.iter().map(separately).collect::<Result<_>>()?;
        // With a global ranking, the same total is removed from the bundles of one kind, but distributed
        // by importance.
        let units: BTreeSet<GroupUnit> = self.bundles.iter().map(|bundle| bundle.unit).collect();
        for unit in units.into_iter().filter(|_| ranked.is_some()) {
            let same: Vec<usize> = (0..self.bundles.len()).filter(|index| self.bundles[*index].unit == unit).collect();
            let bundles: Vec<Bundle> = same.iter().map(|index| self.bundles[*index].clone()).collect();
            let total: usize = bundles.iter().map(|bundle| bundle.size).sum();
            let remaining =
                |taken: &[usize]| bundles.iter().zip(taken).map(|(bundle, taken)| bundle.widths[*taken]).sum::<usize>() as f64 / total.max(1) as f64;
            let target = remaining(&same.iter().map(|index| taken[*index]).collect::<Vec<_>>());
            let steps = widths::steps(&bundles, ranked);
            let distributed = widths::reach_target(bundles.len(), &steps, target, "amount", &mut |taken| Ok(remaining(taken)))?;
            same.iter().zip(distributed).for_each(|(index, steps)| taken[*index] = steps);
        }
        Ok(taken)
    }

    /// Number of remaining units of each selected group after these numbers of steps of each bundle.
    fn widths_after(&self, taken: &[usize]) -> Vec<usize> {
        let groups = self.selected_groups();
        let mut widths: Vec<usize> = groups.iter().map(|group| group.size).collect();
        for (bundle, taken) in self.bundles.iter().zip(taken) {
            let width = bundle.widths.get(*taken).copied().unwrap_or(bundle.size);
            bundle.groups.iter().for_each(|index| widths[*index] = bundle.scaled_width(groups[*index], width));
        }
        widths
    }

    fn cost(&self, target: Target, graph: &Graph, model: &Model, widths: &[usize]) -> Result<f64> {
        let sizes = self.remaining(widths);
        match target {
            Target::Params(_) => {
                let shapes = self.groups.shapes(graph, &sizes);
                let count = |(name, weight): (&String, &crate::store::Weight)| shapes.get(name).unwrap_or(&weight.shape).iter().product::<usize>();
                Ok(model.weights.by_name.iter().map(count).sum::<usize>() as f64)
            }
            Target::Macs(_) | Target::Latency(_) => Ok(analysis::cost(&self.smaller(graph, widths)?, &analysis::usual_sizes(graph)).0 as f64),
        }
    }

    /// The graph with these widths of the selected groups.
    fn smaller(&self, graph: &Graph, widths: &[usize]) -> Result<Graph> {
        let sizes = self.remaining(widths);
        self.groups.rebuild(graph, &self.groups.shapes(graph, &sizes), &sizes)
    }

    /// A function that returns the number of remaining units of any group.
    fn remaining<'s>(&'s self, widths: &[usize]) -> impl Fn(&Group) -> usize + use<'s> {
        let by_index: BTreeMap<usize, usize> = self.selected.iter().copied().zip(widths.iter().copied()).collect();
        move |group: &Group| {
            let index = self.groups.groups.iter().position(|other| std::ptr::eq(other, group));
            index.and_then(|index| by_index.get(&index)).copied().unwrap_or(group.size)
        }
    }

    /// The units to remove by group index: the least important ones, or the first ones without scores.
    pub fn removed_units(&self, widths: &[usize], scores: Option<&Scores>) -> BTreeMap<usize, Vec<usize>> {
        let mut removed = BTreeMap::new();
        for (at, (index, width)) in self.selected.iter().zip(widths).enumerate() {
            let size = self.groups.groups[*index].size;
            let units = least_important(size, size - width, scores.and_then(|scores| scores.get(at)));
            if !units.is_empty() {
                removed.insert(*index, units);
            }
        }
        removed
    }

    /// Notes on unexpected consequences of these widths.
    pub fn notes(&self, widths: &[usize]) -> Vec<String> {
        let mut notes = Vec::new();
        if self.selected_groups().iter().zip(widths).all(|(group, width)| group.size == *width) {
            notes.push("no units were removed: the amount is smaller than the step between possible widths".to_owned());
        }
        let narrower: BTreeSet<&str> =
            self.selected_groups().iter().zip(widths).filter(|(group, width)| group.size != **width).filter_map(|(group, _)| group.output.as_deref()).collect();
        if narrower.contains("sentence_embedding") {
            notes.push("word_embedding_dimension in the configuration of the pooling module still specifies the original width".to_owned());
        }
        notes.extend(narrower.into_iter().map(|output| format!("output `{output}` is narrower than before")));
        notes
    }

    /// Sizes of groups before and after, for the report.
    pub fn details(&self, widths: &[usize]) -> Vec<Value> {
        self.selected_groups()
            .iter()
            .zip(widths)
            .map(|(group, width)| json!({ "name": group.name, "unit": group.unit, "before": group.size, "after": width }))
            .collect()
    }
}

/// The parts to prune. Returns an error if the model does not have one of them.
fn parts(pass: &PruneStructured, groups: &Groups) -> Result<Vec<PrunedPart>> {
    let has = |part: &PrunedPart| part.unit().is_some_and(|unit| groups.groups.iter().any(|group| group.unit == unit));
    let all = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels, PrunedPart::Hidden];
    let available: Vec<String> = all.iter().filter(|part| has(part)).map(PrunedPart::to_string).collect();
    let available = if available.is_empty() { "no prunable parts".to_owned() } else { available.join(", ") };
    if let Some(part) = pass.dims.iter().find(|part| !PrunedPart::WHOLE.contains(part) && !has(part)) {
        return Err(Error::option(format!("{NAME}: dims"), format!("the model has no {part} to remove; it has {available}{}", frozen_axes(groups))));
    }
    let parts: Vec<PrunedPart> = if pass.dims.is_empty() {
        match &pass.amount {
            Some(super::Amounts::Each(amounts)) => amounts.keys().copied().filter(|part| !PrunedPart::WHOLE.contains(part)).collect(),
            _ => DEFAULT_PARTS.into_iter().filter(has).collect(),
        }
    } else {
        pass.dims.iter().copied().filter(|part| !PrunedPart::WHOLE.contains(part)).collect()
    };
    match parts.iter().find(|part| !has(part)) {
        None if !parts.is_empty() => Ok(parts),
        Some(part) => Err(Error::option(format!("{NAME}: amount"), format!("the model has no {part} to remove; it has {available}"))),
        None => Err(Error::option(NAME, format!("the model has no heads, mlp or channels to remove; it has {available}{}", frozen_axes(groups)))),
    }
}

/// Describes the axes that cannot be pruned, with the reasons.
fn frozen_axes(groups: &Groups) -> String {
    let mut reasons: Vec<String> = groups.frozen.iter().take(4).map(|frozen| format!("`{}` axis {} by {}", frozen.param, frozen.axis, frozen.reason)).collect();
    if reasons.is_empty() {
        return String::new();
    }
    if groups.frozen.len() > reasons.len() {
        reasons.push(format!("{} more", groups.frozen.len() - reasons.len()));
    }
    format!("; not prunable: {}", reasons.join(", "))
}

/// Number of the ResNet stage of a group, from 1; 0 before the first stage.
fn stage(group: &Group) -> usize {
    let number = |member: &Member| {
        let (_, rest) = member.param.split_once("stages.")?;
        rest.split('.').next()?.parse::<usize>().ok().map(|stage| stage + 1)
    };
    group.members.iter().filter(|member| member.role == crate::analysis::Role::Writes).filter_map(number).max().unwrap_or(0)
}

/// The units with the smallest scores in ascending order, or the first units without scores.
fn least_important(size: usize, count: usize, scores: Option<&Vec<f64>>) -> Vec<usize> {
    let mut units: Vec<usize> = (0..size).collect();
    if let Some(scores) = scores {
        units.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]).then(a.cmp(b)));
    }
    units.truncate(count);
    units.sort_unstable();
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_with_the_smallest_scores_are_removed() {
        assert_eq!(least_important(4, 2, Some(&vec![3.0, 0.5, 4.0, 0.1])), [1, 3]);
        assert_eq!(least_important(3, 1, Some(&vec![2.0, 2.0, 2.0])), [0]);
        assert_eq!(least_important(4, 2, None), [0, 1]);
    }

    /// Errors list four axes, and the number of the others.
    #[test]
    fn frozen_axes_are_listed() {
        let graph: Graph = "input x: float[batch, 2]\noutput y = x\n".parse().unwrap();
        let mut groups = analysis::groups(&graph).unwrap();
        let listed = |groups: &mut Groups, count: usize| {
            groups.frozen = (0..count).map(|at| analysis::FrozenAxis { param: format!("p{at}"), axis: at % 2, size: 3, reason: "an op".to_owned() }).collect();
            frozen_axes(groups)
        };
        assert_eq!(listed(&mut groups, 0), "");
        assert_eq!(listed(&mut groups, 1), "; not prunable: `p0` axis 0 by an op");
        let four = "; not prunable: `p0` axis 0 by an op, `p1` axis 1 by an op, `p2` axis 0 by an op, `p3` axis 1 by an op";
        assert_eq!(listed(&mut groups, 4), four);
        assert_eq!(listed(&mut groups, 6), format!("{four}, 2 more"));
    }
}
