//! Selection of groups and of the number of units to remove.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::scores::{self, Scores};
use super::widths::{self, Bundle};
use super::{Importance, NAME, PruneStructured, PrunedPart, Ranking, Target, latency, nested, sensitivity};
use crate::analysis::{self, Group, GroupUnit, Groups, Member, Role};
use crate::arch;
use crate::error::{Error, Result, counted};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::{Amount, Context, Scope};
use crate::run_state::WARNING;
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
    /// Notes on groups that are not selected.
    left_out: Vec<String>,
}

/// Number of latency measurements when searching for a target.
pub(super) const ATTEMPTS: usize = 7;

/// Parts that are pruned by default.
const DEFAULT_PARTS: [PrunedPart; 3] = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels];

/// The error if more remains with the smallest widths than a target allows.
fn unreachable_target(name: &str, target: f64, min: f64) -> Error {
    let reason =
        format!("{name} {target} cannot be reached: {min:.3} remains with every group at its minimum; list more `dims`, or lower `minimum` or `round_to`");
    Error::option(format!("{NAME}: target"), reason)
}

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
        let mut parts = parts(pass, &groups)?;
        let units: BTreeSet<GroupUnit> = parts.iter().filter_map(|part| part.unit()).collect();
        let hidden = groups.groups.iter().find(|group| group.unit == GroupUnit::Hidden).map(|group| group.size);
        // Groups whose size config.json specifies only by the residual stream are pruned with it.
        let follows = |group: &Group| {
            units.contains(&GroupUnit::Hidden) && group.unit == GroupUnit::Other && Some(group.size) == hidden && arch::has_uniform_widths(model_type)
        };
        let named = |members: &[Member]| {
            let any = |patterns: &[crate::store::Pattern]| members.iter().any(|member| patterns.iter().any(|pattern| pattern.matches(&member.param)));
            (pass.targets.is_empty() || any(&pass.targets)) && !any(&pass.ignore)
        };
        let is_selected = |group: &Group| (units.contains(&group.unit) || follows(group)) && named(&group.members);
        let selected = groups.groups.iter().enumerate().filter(|(_, group)| is_selected(group)).map(|(index, _)| index);
        let (mut selected, unranked): (Vec<usize>, Vec<usize>) = selected.partition(|index| is_ranked(&groups.groups[*index]));
        let unranked = leave_out(pass, &mut parts, &groups, [&selected, &unranked], graph)?;
        let left_out = unranked.into_iter().chain(nested::leave_out(&groups, &mut selected)).collect();
        if selected.is_empty() {
            return Err(Error::option(NAME, "no group is selected; `compress inspect --groups` prints the groups of tensors"));
        }
        let rule = format!("{} of {}", parts.iter().map(PrunedPart::to_string).collect::<Vec<_>>().join(", "), counted(selected.len(), "group"));
        let mut selection = Selection { groups, selected, bundles: Vec::new(), rule, left_out };
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
            // A plan assumes that the latency is proportional to the MACs. The actual latency can be lower.
            (Some(target @ Target::Latency(_)), _) => Ok(self.reach_target(target, graph, model, ranked)?.unwrap_or_else(|_| self.least_widths())),
            (Some(target), _) => self.reach_target(target, graph, model, ranked)?.map_err(|min| unreachable_target(target.name(), target.fraction(), min)),
        }
    }

    /// A note if more of the model remains than a target of MACs or parameters allows.
    pub fn missed_target(&self, pass: &PruneStructured, graph: &Graph, model: &Model, widths: &[usize]) -> Result<Option<String>> {
        let Some(target @ (Target::Params(_) | Target::Macs(_))) = pass.target else { return Ok(None) };
        let remaining = self.remaining_cost(target, graph, model)?(widths)?;
        let is_missed = remaining - target.fraction() >= widths::EXACT;
        Ok(is_missed.then(|| {
            let (name, fraction) = (target.name(), target.fraction());
            format!("{name} {fraction}: {remaining:.3} remains, which is nearer than the next smaller widths; a lower `round_to` allows more widths")
        }))
    }

    /// The smallest widths.
    fn least_widths(&self) -> Vec<usize> {
        self.widths_after(&self.bundles.iter().map(|bundle| bundle.widths.len().saturating_sub(1)).collect::<Vec<_>>())
    }

    /// Widths for a target of MACs or parameters, or what remains with the smallest widths if this is more.
    fn reach_target(&self, target: Target, graph: &Graph, model: &Model, ranked: Option<&Scores>) -> Result<std::result::Result<Vec<usize>, f64>> {
        let steps = widths::steps(&self.bundles, ranked);
        let remaining = self.remaining_cost(target, graph, model)?;
        let mut measure = |taken: &[usize]| remaining(&self.widths_after(taken));
        let taken = widths::reach_target(self.bundles.len(), &steps, target.fraction(), &mut measure)?;
        Ok(taken.map(|taken| self.widths_after(&taken)))
    }

    /// Widths for a target latency, found by bisection over the MACs.
    fn reach_latency(&self, target: f64, graph: &Graph, model: &Model, ranked: Option<&Scores>, context: &Context) -> Result<Vec<usize>> {
        let full = latency::seconds(graph, context)?;
        let (mut low, mut high) = (0.02, 1.0);
        let mut best: Option<(f64, Vec<usize>)> = None;
        for _ in 0..ATTEMPTS {
            let middle = f64::midpoint(low, high);
            // The minimum widths have more MACs than this.
            let Ok(widths) = self.reach_target(Target::Macs(middle), graph, model, ranked)? else {
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
            let distributed = widths::reach_target(bundles.len(), &steps, target, &mut |taken| Ok(remaining(taken)))?;
            let distributed = distributed.map_err(|min| unreachable_target("amount", target, min))?;
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

    /// The cost with given widths, as a fraction of the cost with all units.
    fn remaining_cost<'s>(&'s self, target: Target, graph: &'s Graph, model: &'s Model) -> Result<impl Fn(&[usize]) -> Result<f64> + 's> {
        let full = self.cost(target, graph, model, &self.widths_after(&vec![0; self.bundles.len()]))?;
        Ok(move |widths: &[usize]| Ok(self.cost(target, graph, model, widths)? / full.max(1.0)))
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
            let units = least_important(size, size - width, scores.and_then(|scores| scores.get(at)).map(Vec::as_slice));
            if !units.is_empty() {
                removed.insert(*index, units);
            }
        }
        removed
    }

    /// Notes on unexpected consequences of these widths.
    pub fn notes(&self, pass: &PruneStructured, widths: &[usize]) -> Vec<String> {
        let mut notes = self.left_out.clone();
        let groups = self.selected_groups();
        let keeps = |bundle: &Bundle| bundle.groups.iter().all(|index| groups[*index].size == widths[*index]);
        if self.bundles.iter().all(keeps) {
            notes.push(format!("{WARNING}{NAME}: no units were removed: {}", self.reason_for_full_widths(pass, |_| true)));
        } else if pass.target.is_none() {
            // A target determines the amount of each part.
            let units: BTreeSet<GroupUnit> = self.bundles.iter().map(|bundle| bundle.unit).collect();
            let of_unit = |unit: GroupUnit| self.bundles.iter().filter(move |bundle| bundle.unit == unit);
            let is_unchanged = |unit: &GroupUnit| of_unit(*unit).all(keeps) && !removes_nothing(pass.amount(part(*unit)));
            notes.extend(units.into_iter().filter(is_unchanged).map(|unit| {
                let reason = self.reason_for_full_widths(pass, |bundle| bundle.unit == unit);
                format!("{WARNING}{NAME}: no units of {} were removed: {reason}", part(unit))
            }));
        }
        let narrower: BTreeSet<&str> =
            groups.iter().zip(widths).filter(|(group, width)| group.size != **width).filter_map(|(group, _)| group.output.as_deref()).collect();
        notes.extend(narrower.into_iter().map(|output| format!("output `{output}` is narrower than before")));
        notes
    }

    /// Why all groups of these bundles keep their sizes: the amount is too small, or no group has a smaller
    /// width.
    fn reason_for_full_widths(&self, pass: &PruneStructured, includes: impl Fn(&Bundle) -> bool) -> String {
        let groups = self.selected_groups();
        let bundles = self.bundles.iter().filter(|bundle| includes(bundle));
        let Some(bundle) = bundles.max_by_key(|bundle| bundle.widths.len()) else { return "no group is selected".to_owned() };
        let name = bundle.groups.first().map_or("", |index| groups[*index].name.as_str());
        let (unit, size) = (bundle.unit, bundle.size);
        let options = match (unit, pass.minimum) {
            // Both options apply only to other units.
            (GroupUnit::Heads, _) => bundle.advice().map(|advice| (String::new(), advice)),
            (_, None) => Some((format!(" with `round_to: {}`", pass.round_to), "lower `round_to`")),
            (_, Some(minimum)) => Some((format!(" with `round_to: {}` and `minimum: {minimum}`", pass.round_to), "lower `round_to` or `minimum`")),
        };
        let (rule, advice) = options.unwrap_or_default();
        let advice = |prefix: &str| if advice.is_empty() { String::new() } else { format!("{prefix}{advice}") };
        match bundle.widths.get(1) {
            Some(next) => {
                let advice = advice(", or ");
                let (small, larger) =
                    if pass.target.is_some() { ("the target removes too little", "lower `target`") } else { ("the amount is too small", "increase `amount`") };
                format!("{small}, because the next width of `{name}` ({unit}) below {size} is {next}{rule}: {larger}{advice}")
            }
            None => format!("`{name}` ({unit}) has {}, and no smaller width is possible{rule}{}", counted(size, "unit"), advice(": ")),
        }
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

/// Whether an amount is zero for any number of units.
fn removes_nothing(amount: Amount) -> bool {
    amount.of(u64::from(u32::MAX)) == Some(0)
}

/// The part whose amount applies to groups of this unit.
fn part(unit: GroupUnit) -> PrunedPart {
    DEFAULT_PARTS.into_iter().find(|part| part.unit() == Some(unit)).unwrap_or(PrunedPart::Hidden)
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

/// Whether the units of a group can be ranked: a layer writes or reads one of its tensors as a whole. Experts
/// that are stored in one tensor have only a slice of it each.
fn is_ranked(group: &Group) -> bool {
    group.members.iter().any(|member| member.role != Role::Follows)
}

/// Removes the parts of which no group can be ranked from `parts`, and returns a note on the groups that are
/// left out. `[selected, unranked]` are the indices of groups with and without a ranking.
///
/// # Errors
/// If the options request one of these parts or tensors, or if no group can be ranked.
fn leave_out(
    pass: &PruneStructured,
    parts: &mut Vec<PrunedPart>,
    groups: &Groups,
    [selected, unranked]: [&[usize]; 2],
    graph: &Graph,
) -> Result<Option<String>> {
    let Some(first) = unranked.first().map(|index| &groups.groups[*index]) else { return Ok(None) };
    let has = |indices: &[usize], unit: GroupUnit| indices.iter().any(|index| groups.groups[*index].unit == unit);
    let is_lost = |part: &PrunedPart| part.unit().is_some_and(|unit| has(unranked, unit) && !has(selected, unit));
    let is_default = pass.dims.is_empty() && !matches!(pass.amount, Some(super::Amounts::Each(_)));
    let literal = |member: &Member| pass.targets.iter().any(|pattern| pattern.is_literal() && pattern.matches(&member.param));
    let is_listed = unranked.iter().flat_map(|index| &groups.groups[*index].members).any(literal);
    let tensor = first.members.first().map_or("", |member| member.param.as_str());
    let reason = format!("layers read slices or reshaped views of its tensors, as for experts that are stored in one tensor (`{tensor}`)");
    let has_experts = !analysis::mixtures(graph)?.is_empty();
    // Groups without a part have to follow the residual stream.
    if selected.is_empty() || is_listed || has(unranked, GroupUnit::Other) || (!is_default && parts.iter().any(is_lost)) {
        let ranked = [GroupUnit::Heads, GroupUnit::Mlp, GroupUnit::Channels, GroupUnit::Hidden].into_iter();
        let ranked = ranked.filter(|unit| groups.groups.iter().any(|group| group.unit == *unit && is_ranked(group)));
        let mut others: Vec<String> = ranked.map(|unit| unit.to_string()).collect();
        others.extend(has_experts.then(|| PrunedPart::Experts.to_string()));
        let others = if others.is_empty() { String::new() } else { format!("set `dims` to other parts ({}), or ", others.join(", ")) };
        let reason =
            format!("the units of `{}` ({}) cannot be ranked, because {reason}; {others}store a separate tensor for each expert", first.name, first.unit);
        return Err(Error::option(NAME, reason));
    }
    parts.retain(|part| !is_lost(part));
    let (count, advice) = (counted(unranked.len(), "group"), if has_experts { "; `dims: [experts]` removes whole experts" } else { "" });
    Ok(Some(format!("{NAME}: left unchanged, {} of {count}, because {reason}{advice}", first.unit)))
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
pub(in crate::pass) fn least_important(size: usize, count: usize, scores: Option<&[f64]>) -> Vec<usize> {
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
        assert_eq!(least_important(4, 2, Some(&[3.0, 0.5, 4.0, 0.1])), [1, 3]);
        assert_eq!(least_important(3, 1, Some(&[2.0, 2.0, 2.0])), [0]);
        assert_eq!(least_important(4, 2, None), [0, 1]);
    }

    /// Each expert of a stacked tensor would need its own units. By default, other parts are removed; such
    /// parts and tensors are refused if they are listed.
    #[test]
    fn units_of_stacked_experts_are_left_out() {
        let select = |name: &str, options: serde_json::Value| {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            let (model, pass) = (Model::open(folder).unwrap(), serde_json::from_value::<PruneStructured>(options).unwrap());
            let selection = Selection::new(&pass, &model, &model.graph().unwrap()).map_err(|error| error.to_string())?;
            Ok::<_, String>((selection.rule, selection.left_out.into_iter().next()))
        };
        for (name, options, expected) in [
            ("mixtral-fused", json!({}), "heads of 2 groups"),
            ("qwen2-moe-fused", json!({}), "heads, mlp of 4 groups"),
            ("qwen2-moe-fused", json!({ "dims": ["mlp"] }), "mlp of 2 groups"),
        ] {
            let (rule, note) = select(name, options).unwrap();
            assert_eq!(rule, expected, "{name}");
            let note = note.unwrap();
            assert!(note.contains("left unchanged, mlp of 2 groups") && note.contains("`model.layers.0.mlp.experts.gate_up_proj`"), "{note}");
        }
        for options in
            [json!({ "dims": ["heads", "mlp"] }), json!({ "amount": { "mlp": 0.5 } }), json!({ "targets": ["model.layers.0.mlp.experts.down_proj"] })]
        {
            let refused = select("mixtral-fused", options).unwrap_err();
            let parts = ["`model.layers.0.mlp.experts` (mlp) cannot be ranked", "set `dims` to other parts (heads, hidden, experts)"];
            assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");
        }
        assert_eq!(select("mixtral", json!({})).unwrap(), ("heads, mlp of 10 groups".to_owned(), None));
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
