//! Importance by what the model does on calibration data.

use std::collections::BTreeMap;

use candle_core::{D, DType, Tensor, Var};

use super::NAME;
use super::calibrate::{self, Squares, computed, numbers};
use super::scores::{Scores, average};
use crate::analysis::{Group, Member, Role};
use crate::data::{Batch, References};
use crate::error::{Error, Result};
use crate::exec::Executor;
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::Context;

/// Sums a vector over the elements of each unit.
fn by_unit(member: &Member, size: usize, elements: &[f64]) -> Vec<f64> {
    let mut units = vec![0.0; size];
    for (unit, sum) in units.iter_mut().enumerate() {
        member.place.blocks(unit, &mut |at| *sum += elements.iter().skip(at).take(member.place.block).sum::<f64>());
    }
    units
}

/// A tensor summed over everything but one axis.
fn over(tensor: &Tensor, axis: usize) -> Result<Vec<f64>> {
    let others: Vec<usize> = (0..tensor.rank()).filter(|other| *other != axis).collect();
    numbers(&tensor.sum(others).map_err(computed)?)
}

/// How large the values are that reach the layers which read a unit, times the weights that they meet.
///
/// # Errors
/// The data does not fit, or memory runs out.
pub(super) fn by_activation(groups: &[&Group], graph: &Graph, model: &Model, context: &Context) -> Result<Scores> {
    let parameters = calibrate::parameters(graph, model, context)?;
    let executor = Executor::new(graph, parameters.clone(), context.device.clone());
    let mut readers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if let (Op::Linear(_) | Op::Conv(_), Some(input)) = (&node.op, node.inputs.first()) {
            readers.entry(graph.value(*input).name.as_str()).or_default().push(index);
        }
    }
    let mut squares = Squares::new();
    calibrate::for_each("Observing", model, context, |batch| {
        let mut look = |name: &str, value: &Tensor| {
            for node in readers.get(name).into_iter().flatten() {
                let rows = calibrate::rows(value, &graph.nodes()[*node].op, &batch)?;
                let sums = numbers(&rows.sqr().and_then(|s| s.sum(0)).map_err(computed)?)?;
                let known = squares.entry(*node).or_insert_with(|| vec![0.0; sums.len()]);
                known.iter_mut().zip(sums).for_each(|(known, sum)| *known += sum);
            }
            Ok(())
        };
        executor.run_observed(&batch.inputs, &mut look).map(drop)
    })?;
    // The weight of a reading layer, and the squares of what it reads.
    let read = |member: &Member| {
        let reads = |node: &usize| graph.nodes()[*node].inputs.get(1).is_some_and(|id| graph.value(*id).name == member.param);
        squares.iter().find(|(node, _)| reads(node)).map(|(_, squares)| squares)
    };
    let mut scores = Scores::new();
    for group in groups {
        let mut members = Vec::new();
        for member in group.members.iter().filter(|member| member.role == Role::Reads) {
            let Some(squares) = read(member) else { continue };
            let weight = parameters.get(&member.param).map_err(computed)?;
            let weights = over(&weight.sqr().map_err(computed)?, member.axis)?;
            let products: Vec<f64> = if weights.len() == squares.len() { weights.iter().zip(squares).map(|(w, s)| w * s).collect() } else { weights };
            members.push(by_unit(member, group.size, &products).into_iter().map(f64::sqrt).collect());
        }
        if members.is_empty() {
            return Err(Error::option(format!("{NAME}: importance"), format!("no layer reads `{}`: activation says nothing of it, l1 does", group.name)));
        }
        scores.push(average(members.into_iter(), group.size));
    }
    Ok(scores)
}

/// The square of what the loss would change by, to first order, summed over batches.
///
/// # Errors
/// The data does not fit, or memory runs out.
pub(super) fn by_gradient(groups: &[&Group], graph: &Graph, model: &Model, context: &Context) -> Result<Scores> {
    let mut parameters = calibrate::parameters(graph, model, context)?;
    let mut variables: BTreeMap<&str, Var> = BTreeMap::new();
    let writes = |group: &&'_ Group| group.members.iter().filter(|member| member.role == Role::Writes).cloned().collect::<Vec<_>>();
    for member in groups.iter().flat_map(|group| &group.members).filter(|member| member.role == Role::Writes) {
        if !variables.contains_key(member.param.as_str()) {
            let variable = parameters.get(&member.param).and_then(|tensor| Var::from_tensor(&tensor)).map_err(computed)?;
            parameters = parameters.with(&member.param, variable.as_tensor().clone());
            variables.insert(member.param.as_str(), variable);
        }
    }
    let executor = Executor::new(graph, parameters, context.device.clone()).for_training();
    let mut scores: Scores = groups.iter().map(|group| vec![0.0; group.size]).collect();
    calibrate::for_each("Differentiating", model, context, |batch| {
        let outputs = executor.run(&batch.inputs)?;
        let gradients = loss(&batch, &outputs)?.backward().map_err(computed)?;
        let mut products: BTreeMap<&str, Tensor> = BTreeMap::new();
        for (name, variable) in &variables {
            if let Some(gradient) = gradients.get(variable.as_tensor()) {
                products.insert(name, (gradient * variable.as_tensor()).map_err(computed)?);
            }
        }
        for (group, scores) in groups.iter().zip(&mut scores) {
            let mut change = vec![0.0; group.size];
            for member in writes(group) {
                let Some(product) = products.get(member.param.as_str()) else { continue };
                let units = by_unit(&member, group.size, &over(product, member.axis)?);
                change.iter_mut().zip(units).for_each(|(sum, unit)| *sum += unit);
            }
            scores.iter_mut().zip(change).for_each(|(score, change)| *score += change * change);
        }
        Ok(())
    })?;
    if scores.iter().flatten().all(|score| *score == 0.0) {
        return Err(Error::option(
            format!("{NAME}: importance"),
            "no gradient reaches the weights: taylor needs labels, text for a language model, or batches of several samples",
        ));
    }
    Ok(scores)
}

/// What the gradient is of: cross-entropy with the labels or the next tokens; without either, how alike the samples of a
/// batch are to the model, the mean square of all products of two samples' features.
fn loss(batch: &Batch, outputs: &BTreeMap<String, Tensor>) -> Result<Tensor> {
    match (&batch.references, outputs.get("logits")) {
        (References::Classes(classes), Some(logits)) if logits.rank() == 2 => {
            let classes: Vec<u32> = classes.iter().map(|class| *class as u32).collect();
            cross_entropy(logits, &classes).map_err(computed)
        }
        (References::Next(places), Some(logits)) if logits.rank() == 3 => next_token(batch, places, logits).map_err(computed),
        _ => alike(outputs).map_err(computed),
    }
}

fn cross_entropy(logits: &Tensor, classes: &[u32]) -> candle_core::Result<Tensor> {
    let classes = Tensor::from_vec(classes.to_vec(), (classes.len(), 1), logits.device())?;
    let highest = logits.detach().max_keepdim(D::Minus1)?;
    let shifted = logits.broadcast_sub(&highest)?;
    let total = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    shifted.broadcast_sub(&total)?.gather(&classes, D::Minus1)?.neg()?.mean_all()
}

fn next_token(batch: &Batch, places: &[std::ops::Range<usize>], logits: &Tensor) -> candle_core::Result<Tensor> {
    let Some(tokens) = batch.inputs.get("input_ids") else { candle_core::bail!("no tokens") };
    let mut losses = Vec::new();
    for (window, places) in places.iter().enumerate() {
        let row = logits.get(window)?.narrow(0, places.start - 1, places.len())?;
        let next: Vec<u32> =
            tokens.get(window)?.narrow(0, places.start, places.len())?.to_dtype(DType::I64)?.to_vec1::<i64>()?.into_iter().map(|t| t as u32).collect();
        losses.push(cross_entropy(&row, &next)?);
    }
    Tensor::stack(&losses, 0)?.mean_all()
}

fn alike(outputs: &BTreeMap<String, Tensor>) -> candle_core::Result<Tensor> {
    let names = ["sentence_embedding", "pooler_output", "logits", "last_hidden_state"];
    let Some(features) = names.iter().find_map(|name| outputs.get(*name)).or_else(|| outputs.values().next()) else { candle_core::bail!("no outputs") };
    let features = if features.rank() == 2 { features.clone() } else { features.flatten_from(1)? };
    features.matmul(&features.t()?.contiguous()?)?.sqr()?.mean_all()
}
