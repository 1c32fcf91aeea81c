//! Importance of units by activations or gradients on calibration data.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, Device, Tensor};

use super::NAME;
use super::scores::{Scores, average, by_unit};
use crate::analysis::{Group, Member, Role};
use crate::data::{Batch, References, SequenceRoles};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{MemoryCategory, Tape};
use crate::ir::{Graph, Op, ValueId};
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate::{self, Moments, numbers, tensor_error};

/// Sums a tensor over all but one axis.
pub(in crate::pass) fn sum_except(tensor: &Tensor, axis: usize) -> Result<Vec<f64>> {
    let summed: Vec<usize> = (0..tensor.rank()).filter(|other| *other != axis).collect();
    numbers(&tensor.sum(summed).map_err(tensor_error)?)
}

/// The inputs of layers, from which the importance by activation is computed.
pub(super) fn layer_inputs(graph: &Graph) -> BTreeSet<&str> {
    let layers = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_)));
    layers.filter_map(|node| node.inputs.first()).map(|id| graph.value(*id).name.as_str()).collect()
}

/// Importance by activation: magnitudes of the inputs of the layers that read a unit, times their weights.
pub(super) fn by_activation(groups: &[&Group], graph: &Graph, model: &Model, context: &Context) -> Result<Scores> {
    // Inputs of layers. The channel axis of an input depends on whether a convolution or a linear layer
    // reads it.
    let mut read: Vec<(&str, &Op, Moments)> = Vec::new();
    let is_conv = |op: &Op| matches!(op, Op::Conv(_));
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_))) {
        let value = graph.value(node.inputs[0]).name.as_str();
        if !read.iter().any(|(other, op, _)| *other == value && is_conv(op) == is_conv(&node.op)) {
            read.push((value, &node.op, Moments::default()));
        }
    }
    let observed = layer_inputs(graph);
    let sides = SequenceRoles::new(graph);
    calibrate::observe(
        graph,
        model,
        |name| observed.contains(name),
        context,
        |batch, name, value| {
            let reads = read.iter_mut().filter(|(other, ..)| *other == name);
            reads.into_iter().try_for_each(|(_, op, moments)| moments.add(&calibrate::rows(value, op, batch, sides.token_axis(name))?))
        },
    )?;
    // Sums of squares of the input of the layer with a weight.
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
            let weight = calibrate::some_parameters(vec![&member.param], model, context)?.get(&member.param).map_err(tensor_error)?;
            let weights = sum_except(&weight.sqr().map_err(tensor_error)?, member.axis)?;
            // Units of a layer that no token reaches, such as an expert, are compared by their weights.
            let is_reached = weights.len() == squares.len() && squares.iter().any(|square| *square > 0.0);
            let products: Vec<f64> = if is_reached { weights.iter().zip(squares).map(|(w, s)| w * s).collect() } else { weights };
            members.push(by_unit(member, group.size, &products).into_iter().map(f64::sqrt).collect());
        }
        if members.is_empty() {
            return Err(Error::option(
                format!("{NAME}: importance"),
                format!("no layer reads `{}`, so that `activation` cannot rank it: use `l1`", group.name),
            ));
        }
        scores.push(average(members.into_iter(), group.size));
    }
    Ok(scores)
}

/// Importance by gradient: the squared first-order change of the mean loss of a batch, summed over batches,
/// each with the weight of its samples.
pub(super) fn by_gradient(groups: &[&Group], graph: &Graph, model: &Model, context: &Context) -> Result<Scores> {
    let (parameters, cuts) = calibrate::parameters_to_differentiate(graph, model, context)?;
    let members = |group: &&'_ Group| group.members.iter().filter(|member| member.role == Role::Writes).cloned().collect::<Vec<_>>();
    // Members by parameter, with the index of their group.
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
        let (name, gradient) = gradient_of_loss(&batch, &values).map_err(tensor_error)?;
        let from = outputs.get(&name).map(|id| (*id, gradient)).into_iter().collect();
        // First-order change of the loss without each unit.
        let mut changes: Scores = groups.iter().map(|group| vec![0.0; group.size]).collect();
        tape.backward(forward, from, &parameters, &memory_tracker, &mut |name, gradient| {
            let product = parameters.get(name).and_then(|parameter| gradient * parameter).map_err(tensor_error)?;
            for (at, member) in written.get(name).into_iter().flatten() {
                let units = by_unit(member, groups[*at].size, &sum_except(&product, member.axis)?);
                changes[*at].iter_mut().zip(units).for_each(|(sum, unit)| *sum += unit);
            }
            Ok(())
        })?;
        parameters.enter(&BTreeSet::new(), Some(&memory_tracker))?;
        scores.iter_mut().flatten().zip(changes.into_iter().flatten()).for_each(|(score, change)| *score += batch.samples as f64 * change * change);
        Ok(())
    })?;
    if scores.iter().flatten().all(|score| *score == 0.0) {
        return Err(Error::option(
            format!("{NAME}: importance"),
            "all gradients are zero: `taylor` needs labels, text for a language model, or batches of several samples",
        ));
    }
    let smallest = scores.iter().flatten().copied().filter(|score| *score > 0.0).fold(f64::INFINITY, f64::min);
    // Units that no token reaches, such as those of an expert, are compared by their weights, but cost
    // nothing in comparison with those of other groups.
    for (group, scores) in groups.iter().zip(&mut scores).filter(|(_, scores)| scores.iter().all(|score| *score == 0.0)) {
        for member in members(group) {
            let weight = calibrate::some_parameters(vec![&member.param], model, context)?.get(&member.param).map_err(tensor_error)?;
            let squares = sum_except(&weight.sqr().map_err(tensor_error)?, member.axis)?;
            scores.iter_mut().zip(by_unit(&member, group.size, &squares)).for_each(|(sum, unit)| *sum += unit * f64::EPSILON * smallest);
        }
    }
    Ok(scores)
}

/// An output and the gradient of the loss with respect to it. The loss is the cross-entropy with the
/// labels or the next tokens. Without either, it is the mean square of the dot products of the features
/// of all pairs of samples in a batch.
fn gradient_of_loss(batch: &Batch, outputs: &BTreeMap<String, Tensor>) -> candle_core::Result<(String, Tensor)> {
    let gradient = match (&batch.references, outputs.get("logits")) {
        (References::Classes(classes), Some(logits)) if logits.rank() == 2 => {
            let labelled = (0..).zip(classes).filter_map(|(row, class)| Some((row, (*class)? as u32))).unzip();
            Some(labelled_gradient(logits, labelled)?)
        }
        (References::Next(_) | References::Tokens(_), Some(logits)) if logits.rank() == 3 => Some(next_token_gradient(batch, logits)?),
        _ => None,
    };
    gradient.map_or_else(|| similarity_gradient(outputs), |gradient| Ok(("logits".to_owned(), gradient)))
}

/// Gradient of the mean cross-entropy over rows.
fn cross_entropy_gradient(logits: &Tensor, classes: &[u32]) -> candle_core::Result<Tensor> {
    let indices = transfer::to_device(&Tensor::from_slice(classes, (classes.len(), 1), &Device::Cpu)?, logits.device(), Cause::Batch)?;
    let powers = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    let probabilities = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
    let ones = Tensor::ones(indices.shape(), logits.dtype(), logits.device())?;
    (probabilities - logits.zeros_like()?.scatter_add(&indices, &ones, 1)?)? / classes.len() as f64
}

/// Gradient of the mean cross-entropy over selected rows of logits and their classes.
fn labelled_gradient(logits: &Tensor, (rows, classes): (Vec<u32>, Vec<u32>)) -> candle_core::Result<Tensor> {
    if rows.is_empty() {
        return logits.zeros_like();
    }
    let selected = transfer::to_device(&Tensor::new(rows.as_slice(), &Device::Cpu)?, logits.device(), Cause::Batch)?;
    transfer::place_rows(&cross_entropy_gradient(&logits.index_select(&selected, 0)?, &classes)?, &rows, logits.dim(0)?)
}

/// Gradient of the mean over windows of the mean cross-entropy over their tokens.
fn next_token_gradient(batch: &Batch, logits: &Tensor) -> candle_core::Result<Tensor> {
    let targets = batch.next_tokens().map_err(candle_core::Error::wrap)?.unwrap_or_default();
    let mut windows = Vec::with_capacity(targets.len());
    for (window, targets) in targets.iter().enumerate() {
        windows.push(labelled_gradient(&logits.get(window)?, targets.iter().map(|(at, token)| (*at as u32, *token as u32)).unzip())?);
    }
    Tensor::stack(&windows, 0)? / targets.len() as f64
}

/// Gradient of the mean square of the dot products of all pairs of samples.
fn similarity_gradient(outputs: &BTreeMap<String, Tensor>) -> candle_core::Result<(String, Tensor)> {
    let names = ["sentence_embedding", "pooler_output", "logits", "last_hidden_state"];
    let named = names.iter().find_map(|name| outputs.get_key_value(*name)).or_else(|| outputs.iter().next());
    let Some((name, output)) = named else { candle_core::bail!("no outputs") };
    let features = output.flatten_from(1)?;
    let products = features.matmul(&features.t()?.contiguous()?)?;
    let gradient = (products.matmul(&features)? * (4.0 / products.elem_count() as f64))?;
    Ok((name.clone(), gradient.reshape(output.dims())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis;
    use crate::exec::Inputs;
    use crate::pass::testing::{calibrated, model, numbers, values};

    /// The score of a unit is the squared derivative of the loss by a factor on the weights that compute it,
    /// without the bias. The loss is the mean square of the dot products of all pairs of samples.
    #[test]
    fn taylor_scores_are_squared_derivatives_of_the_loss() {
        const SAMPLES: usize = 6;
        let text = "input x: float[batch, 3]\nparam a.weight: float[4, 3]\nparam a.bias: float[4]\nparam b.weight: float[2, 4]\n\
            h = Linear{\"input_major\":false}(x, a.weight, a.bias) -> float[batch, 4]\nt = Tanh(h) -> float[batch, 4]\n\
            y = Linear{\"input_major\":false}(t, b.weight) -> float[batch, 2]\noutput y = y\n";
        let scaled = |unit: usize, factor: f32| {
            let scale = |name: &str, mut values: Vec<f32>| {
                let row = values.len() / 4;
                values[unit * row..][..row].iter_mut().filter(|_| name == "a.weight").for_each(|value| *value *= factor);
                values
            };
            model(text, |name, shape| scale(name, numbers(shape))).unwrap()
        };
        let inputs = Inputs::from([("x".to_owned(), Tensor::from_vec(numbers(&[SAMPLES, 3]), (SAMPLES, 3), &Device::Cpu).unwrap())]);
        let (_folder, original) = scaled(0, 1.0);
        let graph = original.graph().unwrap();
        let loss = |unit: usize, factor: f32| {
            let y = values(&graph, &scaled(unit, factor).1, &inputs, |_| false).unwrap()["y"].to_vec2::<f32>().unwrap();
            let product = |i: usize, j: usize| y[i].iter().zip(&y[j]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let squares = (0..SAMPLES).flat_map(|i| (0..SAMPLES).map(move |j| (i, j))).map(|(i, j)| product(i, j).powi(2));
            squares.sum::<f64>() / (SAMPLES * SAMPLES) as f64
        };
        let expected: Vec<f64> = (0..4).map(|unit| SAMPLES as f64 * ((loss(unit, 1.01) - loss(unit, 0.99)) / 0.02).powi(2)).collect();
        let groups = analysis::groups(&graph).unwrap().groups;
        let [group] = &groups[..] else { panic!("{groups:?}") };
        let scores = calibrated(&inputs, |context| by_gradient(&[group], &graph, &original, context)).unwrap().unwrap();
        let largest = expected.iter().copied().fold(0.0, f64::max);
        assert!(scores[0].iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 0.01 * largest), "{scores:?}, not {expected:?}");
    }

    /// Units that no sample reaches, such as those of an expert, are ranked by their weights.
    #[test]
    fn units_without_inputs_are_ranked_by_their_weights() {
        let text = "input x: float[batch, 3]\nparam a.weight: float[4, 3]\nparam b.weight: float[2, 4]\n\
            param c.weight: float[5, 3]\nparam c.bias: float[5]\nparam d.weight: float[2, 5]\n\
            h = Linear{\"input_major\":false}(x, a.weight) -> float[batch, 4]\nt = Tanh(h) -> float[batch, 4]\n\
            u = Linear{\"input_major\":false}(t, b.weight) -> float[batch, 2]\n\
            g = Linear{\"input_major\":false}(x, c.weight, c.bias) -> float[batch, 5]\nr = Relu(g) -> float[batch, 5]\n\
            v = Linear{\"input_major\":false}(r, d.weight) -> float[batch, 2]\ny = Add(u, v) -> float[batch, 2]\noutput y = y\n";
        let (_folder, model) = model(text, |name, shape| if name == "c.bias" { vec![-100.0; 5] } else { numbers(shape) }).unwrap();
        let graph = model.graph().unwrap();
        let groups = analysis::groups(&graph).unwrap().groups;
        let groups: Vec<&Group> = groups.iter().filter(|group| [4, 5].contains(&group.size)).collect();
        let dead = groups.iter().position(|group| group.size == 5).unwrap();
        let inputs = Inputs::from([("x".to_owned(), Tensor::from_vec(numbers(&[6, 3]), (6, 3), &Device::Cpu).unwrap())]);
        let read = numbers(&[2, 5]);
        let by_reader = (0..5).map(|unit| f64::from(read[unit].powi(2) + read[5 + unit].powi(2)).sqrt()).collect::<Vec<_>>();
        let activation = calibrated(&inputs, |context| by_activation(&groups, &graph, &model, context)).unwrap().unwrap();
        let gradient = calibrated(&inputs, |context| by_gradient(&groups, &graph, &model, context)).unwrap().unwrap();
        let is_proportional = |found: &[f64], expected: &[f64]| found.iter().zip(expected).all(|(a, b)| (a / found[0] * expected[0] - b).abs() < 1e-6);
        assert!(activation[dead][0] > 0.0 && is_proportional(&activation[dead], &by_reader), "{:?}, not as {by_reader:?}", activation[dead]);
        // In comparison with units that are reached, they cost nothing.
        let least = gradient[1 - dead].iter().copied().fold(f64::INFINITY, f64::min);
        assert!(gradient[dead].iter().all(|score| *score > 0.0 && *score < 1e-9 * least), "{gradient:?}");
    }
}
