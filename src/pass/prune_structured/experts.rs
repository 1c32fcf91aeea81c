//! Removal of whole experts, the least used first.
//!
//! The importance of an expert is the sum, over the calibration tokens routed to it, of the norm of its
//! output times its router weight (as in Lasby et al., *REAP the Experts*, 2025,
//! <https://arxiv.org/abs/2510.13999>, which uses the mean over these tokens).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};

use super::{NAME, Ranking, cut};
use crate::analysis::{self, Mixture};
use crate::arch;
use crate::data::SequenceRoles;
use crate::error::{Error, Result, counted};
use crate::ir::ops::{Combine, Concat, Dispatch, Linear, Mul, Reduce, ReduceKind, Slice};
use crate::ir::{Graph, GraphFile, Op, Rewrite, ValueId, rebuild};
use crate::model::Model;
use crate::pass::calibrate;
use crate::pass::{Amount, Context};
use crate::work::Meter;

use super::layers::{Removed, differ, renamed, renumbered};

/// Removed experts of each mixture.
type RemovedExperts = Vec<BTreeSet<usize>>;

/// Removes experts from every mixture of a model. `had_experts`: whether it had experts before layers were
/// removed. Returns an error if it never had any, or if too few would remain for a token.
pub(super) fn remove(model: &mut Model, amount: Amount, ranking: Ranking, had_experts: bool, meter: &Arc<Meter>) -> Result<Removed> {
    let graph = model.graph()?;
    let mixtures = analysis::mixtures(&graph)?;
    if mixtures.is_empty() && had_experts {
        let notes = vec!["no expert is removed: all of them are in removed layers".to_owned()];
        return Ok(Removed { tensors: BTreeSet::new(), notes, details: json!([]), open: false });
    }
    if mixtures.is_empty() {
        return Err(Error::option(format!("{NAME}: dims"), "the model has no experts"));
    }
    let counts = mixtures.iter().map(|mixture| removed_count(mixture, amount)).collect::<Result<Vec<_>>>()?;
    let removes = counts.iter().any(|count| *count > 0);
    let importance = if removes { ranking.measured(|context| importance(model, &graph, &mixtures, context))? } else { None };
    let open = removes && mixtures.iter().any(|mixture| is_open(model, mixture));
    let removed: RemovedExperts = mixtures
        .iter()
        .zip(&counts)
        .enumerate()
        .map(|(at, (mixture, count))| least_important(mixture, *count, importance.as_ref().and_then(|importance| importance.get(at)).map(Vec::as_slice)))
        .collect();
    let (tensors, smaller) = remove_experts(model, &graph, &mixtures, &removed, meter)?;
    let mut notes = Vec::new();
    if let Some(smaller) = smaller {
        let remaining: BTreeSet<usize> = mixtures.iter().zip(&removed).map(|(mixture, removed)| mixture.experts.len() - removed.len()).collect();
        let key = arch::family(model.config.model_type()).and_then(|family| family.experts_key(model.config.values()));
        let value = key.zip(remaining.first().filter(|_| remaining.len() == 1)).map(|(key, count)| (key.to_owned(), json!(count)));
        let all: usize = removed.iter().map(BTreeSet::len).sum();
        notes.push(format!("{} with the least use on calibration data removed from {}", counted(all, "expert"), counted(mixtures.len(), "mixture")));
        notes.extend(cut::set_graph(model, smaller, value.into_iter().collect())?);
    }
    let detail = |(at, (mixture, removed)): (usize, (&Mixture, &BTreeSet<usize>))| {
        let importance = importance.as_ref().and_then(|importance| importance.get(at));
        json!({ "mixture": mixture.sum, "before": mixture.experts.len(), "gone": removed, "importance": importance })
    };
    let details: Vec<Value> = mixtures.iter().zip(&removed).enumerate().map(detail).collect();
    Ok(Removed { tensors, notes, details: details.into(), open })
}

/// Number of experts to remove from a mixture, equally from each of its groups.
fn removed_count(mixture: &Mixture, amount: Amount) -> Result<usize> {
    let (all, top) = (mixture.experts.len(), mixture.route.top);
    let count = amount.of(all as u64).map_or(all, |count| count as usize);
    let selectable = |remaining: usize| mixture.route.groups.map_or(remaining, |groups| remaining / groups.count.max(1) * groups.top);
    let refuse = |reason: String| Err(Error::option(format!("{NAME}: amount"), format!("{amount} of the {all} experts of `{}` {reason}", mixture.sum)));
    match mixture.route.groups {
        Some(groups) if !count.is_multiple_of(groups.count) => refuse(format!("is {count}, which is not a multiple of the {} expert groups", groups.count)),
        _ if selectable(all.saturating_sub(count)) < top => {
            refuse(format!("leaves {} experts to select from, but the router selects {top} per token", selectable(all.saturating_sub(count))))
        }
        _ => Ok(count),
    }
}

/// The least important experts, equally many of each group; without importance, the last experts of each
/// group.
fn least_important(mixture: &Mixture, count: usize, importance: Option<&[f64]>) -> BTreeSet<usize> {
    let groups = mixture.route.groups.map_or(1, |groups| groups.count.max(1));
    let each = mixture.experts.len() / groups;
    let of_group = |group: usize| {
        let mut order: Vec<usize> = (group * each..(group + 1) * each).rev().collect();
        if let Some(importance) = importance {
            order.sort_by(|a, b| importance[*a].total_cmp(&importance[*b]).then(b.cmp(a)));
        }
        order.truncate(count / groups);
        order
    };
    (0..groups).flat_map(of_group).collect()
}

/// Importance of every expert: the sum of its output norms times router weights.
fn importance(model: &Model, graph: &Graph, mixtures: &[Mixture], context: &Context) -> Result<Vec<Vec<f64>>> {
    let uses = |mixture: &Mixture| format!("{}/uses", mixture.sum);
    let by_sum: BTreeMap<&str, &Mixture> = mixtures.iter().map(|mixture| (mixture.sum.as_str(), mixture)).collect();
    let observed = rebuild(graph, &model.weights, &mut |step: Rewrite| {
        if let Some(mixture) = by_sum.get(step.name) {
            let length = Reduce { kind: ReduceKind::L2, axes: vec![-1], keep_dims: true };
            let lengths: Result<Vec<ValueId>> =
                (1..step.inputs.len()).map(|at| step.builder.node(&format!("{}/length.{}", step.name, at - 1), length.clone(), &[step.inputs[at]])).collect();
            // The weights may already be part of the inputs of experts.
            let (uses, is_weighted) = (uses(mixture), !matches!(step.node.op, Op::Combine(Combine { plain: true })));
            let node = if is_weighted { format!("{}/lengths", step.name) } else { uses.clone() };
            let mut used = step.builder.node(&node, Concat::default(), &lengths?)?;
            if is_weighted {
                used = step.builder.node(&uses, Mul {}, &[used, step.inputs[0]])?;
            }
            step.builder.output(&uses, used);
        }
        step.copy()
    })?;
    let index: BTreeMap<String, usize> = mixtures.iter().enumerate().map(|(at, mixture)| (uses(mixture), at)).collect();
    let mut sums: Vec<Vec<f64>> = mixtures.iter().map(|mixture| vec![0.0; mixture.experts.len()]).collect();
    let (sides, linear) = (SequenceRoles::new(graph), Op::from(Linear::default()));
    calibrate::observe(
        &observed,
        model,
        |name| index.contains_key(name),
        context,
        |batch, name, value| {
            let Some(sums) = index.get(name).and_then(|at| sums.get_mut(*at)) else { return Ok(()) };
            let [column_sums, _] = calibrate::column_moments(&calibrate::rows(value, &linear, batch, sides.token_axis(name))?)?;
            if column_sums.iter().any(|sum| !sum.is_finite()) {
                return Err(calibrate::not_finite(name));
            }
            sums.iter_mut().zip(column_sums).for_each(|(sum, added)| *sum += added);
            Ok(())
        },
    )?;
    Ok(sums)
}

/// Whether names, shapes or encodings of the remaining tensors depend on which experts are removed.
fn is_open(model: &Model, mixture: &Mixture) -> bool {
    match &mixture.prefixes[1] {
        Some(prefix) => differ(model, prefix, mixture.experts.len(), &BTreeSet::new()),
        None => mixture.experts.iter().any(|expert| !expert.tensors.is_empty()),
    }
}

/// Slices routers and stacked tensors, and removes and renames tensors of single experts. Returns the
/// names of changed tensors, and the smaller graph.
fn remove_experts(
    model: &mut Model,
    graph: &Graph,
    mixtures: &[Mixture],
    removed: &RemovedExperts,
    meter: &Arc<Meter>,
) -> Result<(BTreeSet<String>, Option<Graph>)> {
    if removed.iter().all(BTreeSet::is_empty) {
        return Ok((BTreeSet::new(), None));
    }
    let mut surviving = cut::Surviving::new();
    for (mixture, removed) in mixtures.iter().zip(removed) {
        let remaining: Vec<usize> = (0..mixture.experts.len()).filter(|number| !removed.contains(number)).collect();
        for (tensor, axis) in mixture.router.iter().cloned().chain(mixture.stacked.iter().map(|name| (name.clone(), 0))) {
            surviving.insert((tensor, axis), remaining.clone());
        }
    }
    let mut changed = cut::cut(model, &surviving, meter)?;
    let smaller = without(model, graph, mixtures, removed)?;

    // Tensors that only removed experts read.
    let read = |graph: &Graph| graph.params().map(|(_, value)| value.name.clone()).collect::<BTreeSet<String>>();
    let unused: BTreeSet<String> = read(graph).difference(&read(&smaller)).cloned().collect();
    // Finds the prefix and index of the expert in the name of a node (`names` = 0) or tensor (`names` = 1).
    let expert_of = |name: &str, names: usize| {
        let all = mixtures.iter().zip(removed).filter_map(|(mixture, removed)| Some((mixture.prefixes[names].as_deref()?, mixture.experts.len(), removed)));
        let index = |prefix: &str, count: usize| analysis::layer_index(name, prefix).filter(|number| *number < count);
        let mut found = all.filter_map(|(prefix, count, removed)| Some((prefix, index(prefix, count)?, removed)));
        found.next()
    };
    let new_name = |name: &str, names: usize| expert_of(name, names).map_or_else(|| name.to_owned(), |(prefix, _, removed)| renamed(name, prefix, removed));
    for (name, weight) in std::mem::take(&mut model.weights.by_name) {
        let is_removed = expert_of(&name, 1).is_some_and(|(_, number, removed)| removed.contains(&number));
        if is_removed || unused.contains(&name) {
            changed.insert(name);
            continue;
        }
        let new = new_name(&name, 1);
        if model.weights.by_name.contains_key(&new) {
            return Err(Error::tensor(&name, format!("cannot be renamed to `{new}`, which is the name of another tensor"), "rename one of them"));
        }
        if new != name {
            changed.insert(name);
        }
        model.weights.by_name.insert(new, weight);
    }
    let nodes: BTreeSet<&str> = smaller.nodes().iter().map(|node| smaller.value(node.output).name.as_str()).collect();
    let refer = |name: &str| new_name(name, usize::from(!nodes.contains(name)));
    let file = GraphFile::from(&smaller).edited(&|_| false, &refer);
    Ok((changed, Some(file.build(&model.weights)?)))
}

/// Rebuilds the graph without the removed experts, without renaming nodes and tensors.
fn without(model: &Model, graph: &Graph, mixtures: &[Mixture], removed: &RemovedExperts) -> Result<Graph> {
    let mut owner: BTreeMap<&str, (usize, &BTreeSet<usize>)> = BTreeMap::new();
    for (mixture, removed) in mixtures.iter().zip(removed) {
        for (number, expert) in mixture.experts.iter().enumerate() {
            owner.extend(expert.nodes.iter().map(|node| (node.as_str(), (number, removed))));
        }
    }
    let sums: BTreeMap<&str, &BTreeSet<usize>> = mixtures.iter().zip(removed).map(|(mixture, removed)| (mixture.sum.as_str(), removed)).collect();
    let stacked: BTreeSet<&str> = mixtures.iter().flat_map(|mixture| &mixture.stacked).map(String::as_str).collect();
    rebuild(graph, &model.weights, &mut |mut step: Rewrite| {
        if let Some(removed) = sums.get(step.name) {
            let mut at = 0..;
            step.inputs.retain(|_| at.next().is_none_or(|at| at == 0 || !removed.contains(&(at - 1))));
            return step.copy();
        }
        let Some((number, removed)) = owner.get(step.name) else { return step.copy() };
        // Removed experts temporarily use index 0; their nodes are eliminated, because no node reads
        // their outputs.
        let number = if removed.contains(number) { 0 } else { renumbered(*number, removed) };
        let op = match &step.node.op {
            Op::Dispatch(op) => Dispatch { expert: number, ..*op }.into(),
            Op::Slice(slice) if step.node.inputs.first().is_some_and(|id| stacked.contains(graph.value(*id).name.as_str())) => {
                Slice { start: i64::try_from(number).unwrap_or(i64::MAX), ..*slice }.into()
            }
            other => other.clone(),
        };
        step.builder.node(step.name, op, &step.inputs)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Expert;
    use crate::ir::ops::{ExpertGroups, Route};
    use crate::pass::testing;
    use crate::store::DType;

    #[test]
    fn each_expert_group_loses_the_same_number() {
        let route = Route { groups: Some(ExpertGroups { count: 2, top: 1, pairs: false }), ..Route::default() };
        let experts = vec![Expert::default(); 8];
        let mixture = Mixture { sum: String::new(), route, router: Vec::new(), experts, stacked: BTreeSet::new(), prefixes: [None, None] };
        let importance = [0.1, 0.2, 0.3, 0.4, 9.0, 8.0, 7.0, 6.0];
        assert_eq!(least_important(&mixture, 4, Some(&importance)), BTreeSet::from([0, 1, 6, 7]));
        assert_eq!(least_important(&mixture, 2, None), BTreeSet::from([3, 7]));
    }

    /// If the experts of a mixture have different shapes or dtypes, the result depends on which are removed.
    #[test]
    fn layouts_are_open_if_the_experts_of_any_mixture_differ() {
        let mixture = |name: &str, input: &str, widths: [usize; 2]| {
            let expert = |(at, width): (usize, usize)| {
                let expert = format!("{name}.{at}");
                let params = format!("param {expert}.up.weight: float[{width}, 4]\nparam {expert}.down.weight: float[4, {width}]\n");
                let nodes = format!(
                    "{expert} = Dispatch{{\"expert\":{at}}}({input}, {name}.routing) -> float[batch, 4]\n\
                    {expert}.up = Linear{{\"input_major\":false}}({expert}, {expert}.up.weight) -> float[batch, {width}]\n\
                    {expert}.down = Linear{{\"input_major\":false}}({expert}.up, {expert}.down.weight) -> float[batch, 4]\n"
                );
                (params, nodes)
            };
            let (params, nodes): (String, String) = widths.into_iter().enumerate().map(expert).unzip();
            let nodes = format!(
                "{name}.scores = Linear{{\"input_major\":false}}({input}, {name}.router.weight) -> float[batch, 2]\n\
                {name}.routing = Route({name}.scores) -> float[batch, 2]\n{nodes}\
                {name}.sum = Combine({name}.routing, {name}.0.down, {name}.1.down) -> float[batch, 4]\n"
            );
            (format!("param {name}.router.weight: float[2, 4]\n{params}"), nodes)
        };
        let is_open = |widths: [usize; 2], dtype: DType| {
            let [(params, nodes), (more_params, more_nodes)] = [mixture("a", "x", [6, 6]), mixture("b", "a.sum", widths)];
            let text = format!("input x: float[batch, 4]\n{params}{more_params}{nodes}{more_nodes}output y = b.sum\n");
            let (_folder, mut model) = testing::model(&text, |_, shape| testing::numbers(shape)).unwrap();
            model.weights.by_name.get_mut("b.0.up.weight").unwrap().dtype = dtype;
            let removed = remove(&mut model, Amount::Count(1), Ranking::Arbitrary, false, &Arc::default()).unwrap();
            assert!(!model.weights.by_name.contains_key("b.1.up.weight"));
            removed.open
        };
        let found = [([6, 6], DType::F32), ([6, 8], DType::F32), ([6, 6], DType::F16)].map(|(widths, dtype)| is_open(widths, dtype));
        assert_eq!(found, [false, true, true]);
    }

    /// If layers are removed first, those with the experts can be among them.
    #[test]
    fn all_experts_can_be_in_removed_layers() {
        let text = "input x: float[batch, 4]\nparam w: float[4, 4]\ny = Linear(x, w) -> float[batch, 4]\noutput y = y\n";
        let (_folder, mut model) = testing::model(text, |_, shape| testing::numbers(shape)).unwrap();
        let removed = remove(&mut model, Amount::Count(1), Ranking::Arbitrary, true, &Arc::default()).unwrap();
        assert!(removed.tensors.is_empty() && removed.notes[0].contains("removed layers"), "{:?}", removed.notes);
        let error = remove(&mut model, Amount::Count(1), Ranking::Arbitrary, false, &Arc::default()).err().unwrap().to_string();
        assert!(error.contains("the model has no experts"), "{error}");
    }
}
