//! Taking out whole experts of mixtures: those that add least to what tokens get.
//!
//! The importance of an expert is the sum, over the tokens of calibration data that it sees, of the length of its answer times the weight that
//! the router gives it: how often and how much it is used (as in Lasby et al., *REAP the Experts*, 2025,
//! <https://arxiv.org/abs/2510.13999>, which takes the mean over those tokens).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};

use super::{NAME, cut};
use crate::analysis::{self, Mixture};
use crate::arch;
use crate::data::Sides;
use crate::error::{Error, Result};
use crate::ir::ops::{Concat, Dispatch, Linear, Mul, Reduce, ReduceKind, Slice};
use crate::ir::{Graph, GraphFile, Op, Rewrite, ValueId, rebuild};
use crate::model::Model;
use crate::pass::calibrate;
use crate::pass::{Amount, Context};
use crate::work::Meter;

use super::layers::{Removed, renamed, renumbered};
use super::selection::count;

/// Experts of a mixture that go, by the place of the mixture.
type Gone = Vec<BTreeSet<usize>>;

/// Takes experts out of every mixture of a model.
///
/// # Errors
/// The model has no experts, too few would be left for each token, or running it fails.
pub(super) fn remove(model: &mut Model, amount: Amount, context: Option<&Context>, meter: &Arc<Meter>) -> Result<Removed> {
    let graph = model.graph()?;
    let mixtures = analysis::mixtures(&graph)?;
    if mixtures.is_empty() {
        return Err(Error::option(format!("{NAME}: dims"), "the model has no experts"));
    }
    let wanted = mixtures.iter().map(|mixture| wanted(mixture, amount)).collect::<Result<Vec<_>>>()?;
    let importance = match context.filter(|_| wanted.iter().any(|wanted| *wanted > 0)) {
        Some(context) => Some(importance(model, &graph, &mixtures, context)?),
        None => None,
    };
    let open = mixtures.iter().any(|mixture| is_open(model, mixture));
    let gone: Gone = mixtures
        .iter()
        .zip(&wanted)
        .enumerate()
        .map(|(at, (mixture, wanted))| least(mixture, *wanted, importance.as_ref().and_then(|found| found.get(at)).map(Vec::as_slice)))
        .collect();
    let (tensors, smaller) = take_out(model, &graph, &mixtures, &gone, meter)?;
    let mut notes = Vec::new();
    if let Some(smaller) = smaller {
        let each: BTreeSet<usize> = mixtures.iter().zip(&gone).map(|(mixture, gone)| mixture.experts.len() - gone.len()).collect();
        let key = arch::experts_key(model.config.values());
        let said = key.zip(each.first().filter(|_| each.len() == 1)).map(|(key, left)| (key.to_owned(), json!(left)));
        let all: usize = gone.iter().map(BTreeSet::len).sum();
        notes.push(format!("{} of the least use on calibration data are gone from {}", count(all, "expert"), count(mixtures.len(), "mixture")));
        notes.extend(cut::settle(model, smaller, said.into_iter().collect())?);
    }
    let detail = |(at, (mixture, gone)): (usize, (&Mixture, &BTreeSet<usize>))| {
        let importance = importance.as_ref().and_then(|found| found.get(at));
        json!({ "mixture": mixture.sum, "before": mixture.experts.len(), "gone": gone, "importance": importance })
    };
    let details: Vec<Value> = mixtures.iter().zip(&gone).enumerate().map(detail).collect();
    Ok(Removed { tensors, notes, details: details.into(), open })
}

/// How many experts of a mixture go, the same of each of its groups.
fn wanted(mixture: &Mixture, amount: Amount) -> Result<usize> {
    let (all, top) = (mixture.experts.len(), mixture.route.top);
    let wanted = amount.of(all as u64).map_or(all, |count| count as usize);
    let seen = |left: usize| mixture.route.groups.map_or(left, |groups| left / groups.count.max(1) * groups.top);
    let refuse = |reason: String| Err(Error::option(format!("{NAME}: amount"), format!("{amount} of the {all} experts of `{}` {reason}", mixture.sum)));
    match mixture.route.groups {
        Some(groups) if !wanted.is_multiple_of(groups.count) => {
            refuse(format!("is {wanted}, which {} groups do not share: take a multiple of {}", groups.count, groups.count))
        }
        _ if seen(all.saturating_sub(wanted)) < top => refuse(format!("leaves {} to choose from, and {top} see each token", seen(all.saturating_sub(wanted)))),
        _ => Ok(wanted),
    }
}

/// The experts of the least importance, as many of each group; the last ones where nothing is known.
fn least(mixture: &Mixture, wanted: usize, importance: Option<&[f64]>) -> BTreeSet<usize> {
    let groups = mixture.route.groups.map_or(1, |groups| groups.count.max(1));
    let each = mixture.experts.len() / groups;
    let of_group = |group: usize| {
        let mut order: Vec<usize> = (group * each..(group + 1) * each).rev().collect();
        if let Some(importance) = importance {
            order.sort_by(|a, b| importance[*a].total_cmp(&importance[*b]).then(b.cmp(a)));
        }
        order.truncate(wanted / groups);
        order
    };
    (0..groups).flat_map(of_group).collect()
}

/// For every expert, the sum of the lengths of its answers times their weights.
fn importance(model: &Model, graph: &Graph, mixtures: &[Mixture], context: &Context) -> Result<Vec<Vec<f64>>> {
    let uses = |mixture: &Mixture| format!("{}/uses", mixture.sum);
    let by_sum: BTreeMap<&str, &Mixture> = mixtures.iter().map(|mixture| (mixture.sum.as_str(), mixture)).collect();
    let observed = rebuild(graph, &model.weights, &mut |step: Rewrite| {
        if let Some(mixture) = by_sum.get(step.name) {
            let length = Reduce { kind: ReduceKind::L2, axes: vec![-1], keep: true };
            let lengths: Result<Vec<ValueId>> =
                (1..step.inputs.len()).map(|at| step.builder.node(&format!("{}/length.{}", step.name, at - 1), length.clone(), &[step.inputs[at]])).collect();
            let lengths = step.builder.node(&format!("{}/lengths", step.name), Concat::default(), &lengths?)?;
            let used = step.builder.node(&uses(mixture), Mul {}, &[lengths, step.inputs[0]])?;
            step.builder.output(&uses(mixture), used);
        }
        step.keep()
    })?;
    let place: BTreeMap<String, usize> = mixtures.iter().enumerate().map(|(at, mixture)| (uses(mixture), at)).collect();
    let mut sums: Vec<Vec<f64>> = mixtures.iter().map(|mixture| vec![0.0; mixture.experts.len()]).collect();
    let (sides, linear) = (Sides::of(graph), Op::from(Linear::default()));
    calibrate::observe(
        &observed,
        model,
        |name| place.contains_key(name),
        context,
        |batch, name, value| {
            let Some(sums) = place.get(name).and_then(|at| sums.get_mut(*at)) else { return Ok(()) };
            let [of_columns, _] = calibrate::column_moments(&calibrate::rows(value, &linear, batch, sides.token_axis(name))?)?;
            if of_columns.iter().any(|sum| !sum.is_finite()) {
                return Err(calibrate::not_finite(name));
            }
            sums.iter_mut().zip(of_columns).for_each(|(sum, more)| *sum += more);
            Ok(())
        },
    )?;
    Ok(sums)
}

/// Whether names or shapes of what is left depend on which experts go.
fn is_open(model: &Model, mixture: &Mixture) -> bool {
    let shapes = |number: usize| -> Vec<&[usize]> {
        let tensors = mixture.experts.get(number).map(|expert| &expert.tensors);
        tensors.into_iter().flatten().filter_map(|name| Some(model.weights.by_name.get(name)?.shape.as_slice())).collect()
    };
    let named = mixture.prefixes[1].is_some() || mixture.experts.iter().all(|expert| expert.tensors.is_empty());
    !named || (1..mixture.experts.len()).any(|number| shapes(number) != shapes(0))
}

/// Cuts routers and tensors of all experts, drops and renames those of single ones; answers names that have changed, and the smaller graph.
fn take_out(model: &mut Model, graph: &Graph, mixtures: &[Mixture], gone: &Gone, meter: &Arc<Meter>) -> Result<(BTreeSet<String>, Option<Graph>)> {
    if gone.iter().all(BTreeSet::is_empty) {
        return Ok((BTreeSet::new(), None));
    }
    let mut surviving = cut::Surviving::new();
    for (mixture, gone) in mixtures.iter().zip(gone) {
        let stay: Vec<usize> = (0..mixture.experts.len()).filter(|number| !gone.contains(number)).collect();
        for (tensor, axis) in mixture.router.iter().cloned().chain(mixture.stacked.iter().map(|name| (name.clone(), 0))) {
            surviving.insert((tensor, axis), stay.clone());
        }
    }
    let mut changed = cut::cut(model, &surviving, meter)?;
    let smaller = without(model, graph, mixtures, gone)?;

    // What only experts that go have read.
    let read = |graph: &Graph| graph.params().map(|(_, value)| value.name.clone()).collect::<BTreeSet<String>>();
    let unread: BTreeSet<String> = read(graph).difference(&read(&smaller)).cloned().collect();
    // By what stands before the numbers of experts, in names of nodes or of tensors.
    let of_expert = |name: &str, names: usize| {
        let found = mixtures.iter().zip(gone).filter_map(|(mixture, gone)| Some((mixture.prefixes[names].as_deref()?, mixture.experts.len(), gone)));
        let mut found = found.filter_map(|(prefix, count, gone)| Some((prefix, analysis::number(name, prefix).filter(|number| *number < count)?, gone)));
        found.next()
    };
    let new_name = |name: &str, names: usize| of_expert(name, names).map_or_else(|| name.to_owned(), |(prefix, _, gone)| renamed(name, prefix, gone));
    for (name, weight) in std::mem::take(&mut model.weights.by_name) {
        let goes = of_expert(&name, 1).is_some_and(|(_, number, gone)| gone.contains(&number));
        if goes || unread.contains(&name) {
            changed.insert(name);
            continue;
        }
        let new = new_name(&name, 1);
        if model.weights.by_name.contains_key(&new) {
            return Err(Error::tensor(&name, format!("would be named `{new}`, as another tensor is"), "give one of them another name"));
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

/// The graph without experts, whose tensors and nodes still have their names.
fn without(model: &Model, graph: &Graph, mixtures: &[Mixture], gone: &Gone) -> Result<Graph> {
    let mut owner: BTreeMap<&str, (usize, &BTreeSet<usize>)> = BTreeMap::new();
    for (mixture, gone) in mixtures.iter().zip(gone) {
        for (number, expert) in mixture.experts.iter().enumerate() {
            owner.extend(expert.nodes.iter().map(|node| (node.as_str(), (number, gone))));
        }
    }
    let sums: BTreeMap<&str, &BTreeSet<usize>> = mixtures.iter().zip(gone).map(|(mixture, gone)| (mixture.sum.as_str(), gone)).collect();
    let stacked: BTreeSet<&str> = mixtures.iter().flat_map(|mixture| &mixture.stacked).map(String::as_str).collect();
    rebuild(graph, &model.weights, &mut |mut step: Rewrite| {
        if let Some(gone) = sums.get(step.name) {
            let mut at = 0..;
            step.inputs.retain(|_| at.next().is_none_or(|at| at == 0 || !gone.contains(&(at - 1))));
            return step.keep();
        }
        let Some((number, gone)) = owner.get(step.name) else { return step.keep() };
        // An expert that goes reads what another does, until nobody reads what it says.
        let number = if gone.contains(number) { 0 } else { renumbered(*number, gone) };
        let op = match &step.node.op {
            Op::Dispatch(_) => Dispatch { expert: number }.into(),
            Op::Slice(slice) if step.node.inputs.first().is_some_and(|id| stacked.contains(graph.value(*id).name.as_str())) => {
                Slice { start: i64::try_from(number).unwrap_or(i64::MAX), ..*slice }.into()
            }
            other => other.clone(),
        };
        step.builder.node(step.name, op, &step.inputs)
    })
}
