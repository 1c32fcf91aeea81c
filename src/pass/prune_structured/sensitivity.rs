//! Importance by what the model does on calibration data.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, Device, Tensor};

use super::NAME;
use super::scores::{Scores, average};
use crate::analysis::{Group, Member, Role};
use crate::data::{Batch, References, Sides};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{MemoryCategory, Tape};
use crate::ir::{Graph, Op, ValueId};
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate::{self, Moments, computed, numbers};

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
    // The values that layers read, as convolutions or as linear layers do.
    let mut read: Vec<(&str, &Op, Moments)> = Vec::new();
    let is_conv = |op: &Op| matches!(op, Op::Conv(_));
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_))) {
        let value = graph.value(node.inputs[0]).name.as_str();
        if !read.iter().any(|(other, op, _)| *other == value && is_conv(op) == is_conv(&node.op)) {
            read.push((value, &node.op, Moments::default()));
        }
    }
    let wanted: BTreeSet<&str> = read.iter().map(|(value, ..)| *value).collect();
    let sides = Sides::of(graph);
    calibrate::observe(
        graph,
        model,
        |name| wanted.contains(name),
        context,
        |batch, name, value| {
            let reads = read.iter_mut().filter(|(other, ..)| *other == name);
            reads.into_iter().try_for_each(|(_, op, moments)| moments.add(&calibrate::rows(value, op, batch, sides.token_axis(name))?))
        },
    )?;
    // The squares of what the layer with a weight reads.
    let squares = |member: &Member| {
        let node = graph.nodes().iter().find(|node| node.inputs.get(1).is_some_and(|id| graph.value(*id).name == member.param))?;
        let value = &graph.value(node.inputs[0]).name;
        read.iter().find(|(other, op, _)| other == value && is_conv(op) == is_conv(&node.op)).map(|(.., moments)| &moments.squares)
    };
    let mut scores = Scores::new();
    for group in groups {
        let mut members = Vec::new();
        for member in group.members.iter().filter(|member| member.role == Role::Reads) {
            let Some(squares) = squares(member) else { continue };
            let weight = calibrate::some_parameters(vec![&member.param], model, context)?.get(&member.param).map_err(computed)?;
            let weights = over(&weight.sqr().map_err(computed)?, member.axis)?;
            let products: Vec<f64> = if weights.len() == squares.len() { weights.iter().zip(squares).map(|(w, s)| w * s).collect() } else { weights };
            members.push(by_unit(member, group.size, &products).into_iter().map(f64::sqrt).collect());
        }
        if members.is_empty() {
            return Err(Error::option(format!("{NAME}: importance"), format!("no layer reads `{}`: importance activation cannot rank it, l1 can", group.name)));
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
    let (parameters, cuts) = calibrate::parameters_to_differentiate(graph, model, context)?;
    let members = |group: &&'_ Group| group.members.iter().filter(|member| member.role == Role::Writes).cloned().collect::<Vec<_>>();
    // By parameter: the units that it writes, with the group's position.
    let mut written: BTreeMap<String, Vec<(usize, Member)>> = BTreeMap::new();
    for (at, group) in groups.iter().enumerate() {
        members(group).into_iter().for_each(|member| written.entry(member.param.clone()).or_default().push((at, member)));
    }
    let outputs: BTreeMap<String, ValueId> = graph.outputs().iter().cloned().collect();
    let tape = Tape::new(graph, context.device.clone(), outputs.values().copied().collect(), &|name| written.contains_key(name), &cuts);
    let memory_tracker = context.memory_tracker.clone().unwrap_or_default();
    memory_tracker.set(MemoryCategory::Weights, parameters.bytes())?;
    let mut scores: Scores = groups.iter().map(|group| vec![0.0; group.size]).collect();
    calibrate::for_each("Differentiating", model, context, |batch| {
        memory_tracker.begin_step(None);
        let forward = tape.forward(&parameters, &batch.inputs, &memory_tracker, None)?;
        let values = outputs.iter().filter_map(|(name, id)| Some((name.clone(), forward.taps().get(id)?.clone()))).collect();
        let (name, gradient) = gradient_of_loss(&batch, &values).map_err(computed)?;
        let from = outputs.get(&name).map(|id| (*id, gradient)).into_iter().collect();
        // What the loss would change by without each unit.
        let mut changes: Scores = groups.iter().map(|group| vec![0.0; group.size]).collect();
        tape.backward(forward, from, &parameters, &memory_tracker, &mut |name, gradient| {
            let product = parameters.get(name).and_then(|parameter| gradient * parameter).map_err(computed)?;
            for (at, member) in written.get(name).into_iter().flatten() {
                let units = by_unit(member, groups[*at].size, &over(&product, member.axis)?);
                changes[*at].iter_mut().zip(units).for_each(|(sum, unit)| *sum += unit);
            }
            Ok(())
        })?;
        parameters.enter(&BTreeSet::new(), Some(&memory_tracker))?;
        scores.iter_mut().flatten().zip(changes.into_iter().flatten()).for_each(|(score, change)| *score += change * change);
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

/// An output and the gradient of the loss with respect to it. The loss is the cross-entropy with the labels or the next tokens;
/// without either, how alike the samples of a batch are to the model, the mean square of all products of two samples' features.
fn gradient_of_loss(batch: &Batch, outputs: &BTreeMap<String, Tensor>) -> candle_core::Result<(String, Tensor)> {
    let gradient = match (&batch.references, outputs.get("logits")) {
        (References::Classes(classes), Some(logits)) if logits.rank() == 2 => {
            let labelled = (0..).zip(classes).filter_map(|(row, class)| Some((row, (*class)? as u32))).unzip();
            Some(of_rows(logits, labelled)?)
        }
        (References::Next(_) | References::Tokens(_), Some(logits)) if logits.rank() == 3 => Some(of_next_tokens(batch, logits)?),
        _ => None,
    };
    gradient.map_or_else(|| of_likeness(outputs), |gradient| Ok(("logits".to_owned(), gradient)))
}

/// Of the mean over rows.
fn of_cross_entropy(logits: &Tensor, classes: &[u32]) -> candle_core::Result<Tensor> {
    let places = transfer::to_device(&Tensor::from_slice(classes, (classes.len(), 1), &Device::Cpu)?, logits.device(), Cause::Batch)?;
    let powers = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    let probabilities = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
    let ones = Tensor::ones(places.shape(), logits.dtype(), logits.device())?;
    (probabilities - logits.zeros_like()?.scatter_add(&places, &ones, 1)?)? / classes.len() as f64
}

/// Of the mean over some rows of logits, each with its class.
fn of_rows(logits: &Tensor, (rows, classes): (Vec<u32>, Vec<u32>)) -> candle_core::Result<Tensor> {
    if rows.is_empty() {
        return logits.zeros_like();
    }
    let rows = transfer::to_device(&Tensor::new(rows, &Device::Cpu)?, logits.device(), Cause::Batch)?;
    logits.zeros_like()?.index_add(&rows, &of_cross_entropy(&logits.index_select(&rows, 0)?, &classes)?, 0)
}

/// Of the mean over windows of the mean over the tokens of each.
fn of_next_tokens(batch: &Batch, logits: &Tensor) -> candle_core::Result<Tensor> {
    let asked = batch.next_tokens().map_err(candle_core::Error::wrap)?.unwrap_or_default();
    let mut windows = Vec::with_capacity(asked.len());
    for (window, asked) in asked.iter().enumerate() {
        windows.push(of_rows(&logits.get(window)?, asked.iter().map(|(at, token)| (*at as u32, *token as u32)).unzip())?);
    }
    Tensor::stack(&windows, 0)? / asked.len() as f64
}

fn of_likeness(outputs: &BTreeMap<String, Tensor>) -> candle_core::Result<(String, Tensor)> {
    let names = ["sentence_embedding", "pooler_output", "logits", "last_hidden_state"];
    let named = names.iter().find_map(|name| outputs.get_key_value(*name)).or_else(|| outputs.iter().next());
    let Some((name, output)) = named else { candle_core::bail!("no outputs") };
    let features = output.flatten_from(1)?;
    let products = features.matmul(&features.t()?.contiguous()?)?;
    let gradient = (products.matmul(&features)? * (4.0 / products.elem_count() as f64))?;
    Ok((name.clone(), gradient.reshape(output.dims())?))
}
