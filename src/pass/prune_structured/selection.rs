//! Which groups lose units, and how many.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::scores::{self, Scores};
use super::widths::{self, Bundle};
use super::{Importance, NAME, PruneStructured, PrunedPart, Target, latency, sensitivity};
use crate::analysis::{self, Group, GroupUnit, Groups, Member, Role};
use crate::arch;
use crate::error::{Error, Result};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::{Context, Scope};
use crate::store::select;

/// Groups that lose units.
pub(super) struct Selection {
    /// All groups of the model.
    pub groups: Groups,
    /// Positions of those that may lose units.
    pub chosen: Vec<usize>,
    bundles: Vec<Bundle>,
    /// In plain words.
    pub rule: String,
}

/// Measurements to find a time.
const ATTEMPTS: usize = 7;

/// Parts that are taken when nothing is said.
const USUAL: [PrunedPart; 3] = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels];

impl Selection {
    /// Selects by part and by name.
    ///
    /// # Errors
    /// The model has no such part, a pattern matches nothing, or nothing is left to select.
    pub fn new(pass: &PruneStructured, model: &Model, graph: &Graph) -> Result<Selection> {
        select::check("targets", &pass.targets, model.weights.by_name.keys())?;
        select::check("ignore", &pass.ignore, model.weights.by_name.keys())?;
        let mut groups = analysis::groups(graph)?;
        let model_type = if model.is_described() { model.config.model_type() } else { "" };
        // Channels in front of a transformer have no number of their own in its config.json.
        if arch::one_width(model_type) {
            groups.groups.iter_mut().filter(|group| group.unit == GroupUnit::Channels).for_each(|group| group.unit = GroupUnit::Other);
        }
        let parts = parts(pass, &groups)?;
        let units: BTreeSet<GroupUnit> = parts.iter().filter_map(|part| part.unit()).collect();
        let hidden = groups.groups.iter().find(|group| group.unit == GroupUnit::Hidden).map(|group| group.size);
        // What config.json calls by the width of the stream goes along with it.
        let follows =
            |group: &Group| units.contains(&GroupUnit::Hidden) && group.unit == GroupUnit::Other && Some(group.size) == hidden && arch::one_width(model_type);
        let named = |members: &[Member]| {
            let any = |patterns: &[crate::store::Pattern]| members.iter().any(|member| patterns.iter().any(|pattern| pattern.matches(&member.param)));
            (pass.targets.is_empty() || any(&pass.targets)) && !any(&pass.ignore)
        };
        let taken = |group: &Group| (units.contains(&group.unit) || follows(group)) && named(&group.members);
        let chosen: Vec<usize> = groups.groups.iter().enumerate().filter(|(_, group)| taken(group)).map(|(index, _)| index).collect();
        if chosen.is_empty() {
            return Err(Error::option(NAME, "no group is selected; `compress inspect --groups` shows which tensors belong together"));
        }
        let rule = format!("{} of {}", parts.iter().map(PrunedPart::to_string).collect::<Vec<_>>().join(", "), count(chosen.len(), "group"));
        let mut selection = Selection { groups, chosen, bundles: Vec::new(), rule };
        let uniform = pass.uniform.unwrap_or(arch::one_width(model_type) || model_type == "resnet");
        selection.bundles = selection.bundle(pass, model_type, uniform);
        Ok(selection)
    }

    /// The groups that may lose units.
    pub fn of(&self) -> Vec<&Group> {
        self.chosen.iter().map(|index| &self.groups.groups[*index]).collect()
    }

    fn bundle(&self, pass: &PruneStructured, model_type: &str, uniform: bool) -> Vec<Bundle> {
        let groups = self.of();
        let amount = |part: PrunedPart| pass.amount(part);
        let together = arch::heads_fill_the_stream(model_type) && amount(PrunedPart::Heads) == amount(PrunedPart::Hidden);
        let both = [GroupUnit::Heads, GroupUnit::Hidden].iter().all(|unit| groups.iter().any(|group| group.unit == *unit));
        let mut by_key: BTreeMap<(GroupUnit, usize), Vec<usize>> = BTreeMap::new();
        for (index, group) in groups.iter().enumerate() {
            let key = match group.unit {
                _ if !uniform => (group.unit, index),
                GroupUnit::Other => (GroupUnit::Hidden, 0),
                GroupUnit::Heads if together && both => (GroupUnit::Hidden, 0),
                GroupUnit::Channels if model_type == "resnet" => (GroupUnit::Channels, stage(group)),
                unit => (unit, 0),
            };
            by_key.entry(key).or_default().push(index);
        }
        by_key.into_iter().map(|((unit, _), members)| Bundle::new(unit, members, &groups, pass.round_to, pass.minimum)).collect()
    }

    /// The importance of every unit.
    ///
    /// # Errors
    /// Reading fails, or a weight is not of floats.
    pub fn scores(&self, pass: &PruneStructured, graph: &Graph, model: &Model, context: &Context) -> Result<Scores> {
        match pass.importance {
            Importance::Auto | Importance::L1 | Importance::L2 => scores::by_weights(&self.of(), model, pass.importance, &context.work),
            Importance::Activation => sensitivity::by_activation(&self.of(), graph, model, context),
            Importance::Taylor => sensitivity::by_gradient(&self.of(), graph, model, context),
        }
    }

    /// Whether every group has a layer whose inputs say how much its units matter.
    pub fn is_read(&self, graph: &Graph) -> bool {
        let layers = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_)));
        let weights: BTreeSet<&str> = layers.filter_map(|node| Some(graph.value(*node.inputs.get(1)?).name.as_str())).collect();
        let reads = |member: &Member| member.role == Role::Reads && weights.contains(member.param.as_str());
        self.of().iter().all(|group| group.members.iter().any(reads))
    }

    /// How many units stay in each chosen group.
    ///
    /// # Errors
    /// An amount cannot be taken, or a target cannot be met.
    pub fn widths(&self, pass: &PruneStructured, graph: &Graph, model: &Model, scores: Option<&Scores>, context: Option<&Context>) -> Result<Vec<usize>> {
        let ranked = scores.filter(|_| pass.scope() == Scope::Global);
        match (pass.target, context) {
            (None, _) => Ok(self.widths_after(&self.amounts(pass, ranked)?)),
            (Some(Target::Latency(target)), Some(context)) => self.in_time(target, graph, model, ranked, context),
            // Time can only be measured: beforehand it is taken to follow the multiplications.
            (Some(target), _) => self.meet(target, graph, model, ranked),
        }
    }

    /// Widths that leave a part of what can be counted.
    fn meet(&self, target: Target, graph: &Graph, model: &Model, ranked: Option<&Scores>) -> Result<Vec<usize>> {
        let steps = widths::steps(&self.bundles, ranked);
        let whole = self.cost(target, graph, model, &self.widths_after(&vec![0; self.bundles.len()]))?;
        let mut measure = |taken: &[usize]| Ok(self.cost(target, graph, model, &self.widths_after(taken))? / whole.max(1.0));
        let taken = widths::meet(self.bundles.len(), &steps, target.fraction(), target.name(), &mut measure)?;
        Ok(self.widths_after(&taken))
    }

    /// Widths that leave a part of the time, found by bisection over multiplications.
    fn in_time(&self, target: f64, graph: &Graph, model: &Model, ranked: Option<&Scores>, context: &Context) -> Result<Vec<usize>> {
        let whole = latency::seconds(graph, context)?;
        let (mut low, mut high) = (0.02, 1.0);
        let mut best: Option<(f64, Vec<usize>)> = None;
        for _ in 0..ATTEMPTS {
            let middle = f64::midpoint(low, high);
            // What cannot be counted so low is at its narrowest already.
            let Ok(widths) = self.meet(Target::Macs(middle), graph, model, ranked) else {
                low = middle;
                continue;
            };
            let part = latency::seconds(&self.smaller(graph, &widths)?, context)? / whole;
            if best.as_ref().is_none_or(|(known, _)| (part - target).abs() < (known - target).abs()) {
                best = Some((part, widths));
            }
            if part > target { high = middle } else { low = middle }
        }
        match best {
            Some((part, widths)) if part <= target * 1.1 => Ok(widths),
            best => {
                let least = best.map_or(String::new(), |(part, _)| format!(": {part:.2} is as near as it gets"));
                Err(Error::option(
                    format!("{NAME}: target"),
                    format!("latency {target} cannot be met{least}; name more `dims`, or lower `minimum` or `round_to`"),
                ))
            }
        }
    }

    /// Steps of each bundle that leave what the amounts say.
    fn amounts(&self, pass: &PruneStructured, ranked: Option<&Scores>) -> Result<Vec<usize>> {
        let groups = self.of();
        let part = |unit: GroupUnit| USUAL.into_iter().chain([PrunedPart::Hidden]).find(|part| part.unit() == Some(unit)).unwrap_or(PrunedPart::Hidden);
        let alone = |bundle: &Bundle| {
            let name = bundle.groups.first().map_or("", |index| groups[*index].name.as_str());
            bundle.leave(name, pass.amount(part(bundle.unit)))
        };
        let mut taken: Vec<usize> = self.bundles.iter().map(alone).collect::<Result<_>>()?;
        // Ranked against each other, bundles of one kind lose together what they would lose one by one.
        let units: BTreeSet<GroupUnit> = self.bundles.iter().map(|bundle| bundle.unit).collect();
        for unit in units.into_iter().filter(|_| ranked.is_some()) {
            let same: Vec<usize> = (0..self.bundles.len()).filter(|index| self.bundles[*index].unit == unit).collect();
            let bundles: Vec<Bundle> = same.iter().map(|index| self.bundles[*index].clone()).collect();
            let total: usize = bundles.iter().map(|bundle| bundle.size).sum();
            let left = |taken: &[usize]| bundles.iter().zip(taken).map(|(bundle, taken)| bundle.widths[*taken]).sum::<usize>() as f64 / total.max(1) as f64;
            let target = left(&same.iter().map(|index| taken[*index]).collect::<Vec<_>>());
            let steps = widths::steps(&bundles, ranked);
            let found = widths::meet(bundles.len(), &steps, target, "amount", &mut |taken| Ok(left(taken)))?;
            same.iter().zip(found).for_each(|(index, steps)| taken[*index] = steps);
        }
        Ok(taken)
    }

    /// Units that stay in each chosen group after so many steps of each bundle.
    fn widths_after(&self, taken: &[usize]) -> Vec<usize> {
        let groups = self.of();
        let mut widths: Vec<usize> = groups.iter().map(|group| group.size).collect();
        for (bundle, taken) in self.bundles.iter().zip(taken) {
            let width = bundle.widths.get(*taken).copied().unwrap_or(bundle.size);
            bundle.groups.iter().for_each(|index| widths[*index] = bundle.of(groups[*index], width));
        }
        widths
    }

    fn cost(&self, target: Target, graph: &Graph, model: &Model, widths: &[usize]) -> Result<f64> {
        let of = self.left(widths);
        match target {
            Target::Params(_) => {
                let shapes = self.groups.shapes(graph, &of);
                let count = |(name, weight): (&String, &crate::store::Weight)| shapes.get(name).unwrap_or(&weight.shape).iter().product::<usize>();
                Ok(model.weights.by_name.iter().map(count).sum::<usize>() as f64)
            }
            Target::Macs(_) | Target::Latency(_) => Ok(analysis::cost(&self.smaller(graph, widths)?, &analysis::usual_sizes(graph)).0 as f64),
        }
    }

    /// The graph when so many units of each chosen group stay.
    fn smaller(&self, graph: &Graph, widths: &[usize]) -> Result<Graph> {
        let of = self.left(widths);
        self.groups.rebuild(graph, &self.groups.shapes(graph, &of), &of)
    }

    /// How many units of any group stay.
    fn left<'s>(&'s self, widths: &[usize]) -> impl Fn(&Group) -> usize + use<'s> {
        let of: BTreeMap<usize, usize> = self.chosen.iter().copied().zip(widths.iter().copied()).collect();
        move |group: &Group| {
            let index = self.groups.groups.iter().position(|other| std::ptr::eq(other, group));
            index.and_then(|index| of.get(&index)).copied().unwrap_or(group.size)
        }
    }

    /// The units to remove, by position of their group: those of the smallest importance, the first ones where there are no scores.
    pub fn gone(&self, widths: &[usize], scores: Option<&Scores>) -> BTreeMap<usize, Vec<usize>> {
        let mut gone = BTreeMap::new();
        for (at, (index, width)) in self.chosen.iter().zip(widths).enumerate() {
            let size = self.groups.groups[*index].size;
            let units = least_important(size, size - width, scores.and_then(|scores| scores.get(at)));
            if !units.is_empty() {
                gone.insert(*index, units);
            }
        }
        gone
    }

    /// Notes on what differs from what was asked for.
    pub fn notes(&self, widths: &[usize]) -> Vec<String> {
        let mut notes = Vec::new();
        if self.of().iter().zip(widths).all(|(group, width)| group.size == *width) {
            notes.push("nothing was removed: the amount is smaller than the step from one width to the next".to_owned());
        }
        let narrower: BTreeSet<&str> =
            self.of().iter().zip(widths).filter(|(group, width)| group.size != **width).filter_map(|(group, _)| group.output.as_deref()).collect();
        if narrower.contains("sentence_embedding") {
            notes.push("word_embedding_dimension in the configuration of the pooling still says the width of before".to_owned());
        }
        notes.extend(narrower.into_iter().map(|output| format!("output `{output}` has become narrower")));
        notes
    }

    /// Sizes before and after, for the report.
    pub fn details(&self, widths: &[usize]) -> Vec<Value> {
        self.of().iter().zip(widths).map(|(group, width)| json!({ "name": group.name, "unit": group.unit, "before": group.size, "after": width })).collect()
    }
}

/// The parts to take, held to what there is.
fn parts(pass: &PruneStructured, groups: &Groups) -> Result<Vec<PrunedPart>> {
    let has = |part: &PrunedPart| part.unit().is_some_and(|unit| groups.groups.iter().any(|group| group.unit == unit));
    let all = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels, PrunedPart::Hidden];
    let there: Vec<String> = all.iter().filter(|part| has(part)).map(PrunedPart::to_string).collect();
    if let Some(part) = pass.dims.iter().find(|part| **part != PrunedPart::Layers && !has(part)) {
        let there = if there.is_empty() { "nothing that can be removed".to_owned() } else { there.join(", ") };
        return Err(Error::option(format!("{NAME}: dims"), format!("the model has no {part} to remove; it has {there}{}", why(groups))));
    }
    let parts: Vec<PrunedPart> = if pass.dims.is_empty() {
        match &pass.amount {
            Some(super::Amounts::Each(amounts)) => amounts.keys().copied().filter(|part| *part != PrunedPart::Layers).collect(),
            _ => USUAL.into_iter().filter(has).collect(),
        }
    } else {
        pass.dims.iter().copied().filter(|part| *part != PrunedPart::Layers).collect()
    };
    match parts.iter().find(|part| !has(part)) {
        None if !parts.is_empty() => Ok(parts),
        Some(part) => Err(Error::option(format!("{NAME}: amount"), format!("the model has no {part} to remove; it has {}", there.join(", ")))),
        None => Err(Error::option(NAME, format!("the model has no heads, mlp or channels to remove; it has {}{}", there.join(", "), why(groups)))),
    }
}

/// What holds the axes that cannot be taken apart.
fn why(groups: &Groups) -> String {
    let mut reasons: Vec<String> = groups.held.iter().take(4).map(|held| format!("`{}` axis {} by {}", held.param, held.axis, held.reason)).collect();
    if reasons.is_empty() {
        return String::new();
    }
    if groups.held.len() > reasons.len() {
        reasons.push(format!("{} more", groups.held.len() - reasons.len()));
    }
    format!("; held: {}", reasons.join(", "))
}

/// Number of the stage of a ResNet that a group belongs to, from 1; 0 before the first.
fn stage(group: &Group) -> usize {
    let number = |member: &Member| {
        let (_, rest) = member.param.split_once("stages.")?;
        rest.split('.').next()?.parse::<usize>().ok().map(|stage| stage + 1)
    };
    group.members.iter().filter(|member| member.role == crate::analysis::Role::Writes).filter_map(number).max().unwrap_or(0)
}

pub(super) fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
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
}
