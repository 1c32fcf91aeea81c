//! Folds batch normalizations into adjacent layers (Jacob et al., 2018).

use std::sync::Arc;

use crate::error::Result;
use crate::ir::ops::{BatchNorm, Flatten, Op};
use crate::ir::{Graph, Node, Rewrite, ValueId, rebuild};
use crate::model::Model;
use crate::pass::consumers::{only_reader, weight_input};
use crate::store::{Computed, DType, Scaled, Weight};

/// Result of folding.
#[derive(Debug, Default)]
pub(super) struct Folded {
    pub count: usize,
    /// Names of normalizations that cannot be folded.
    pub unfolded: Vec<String>,
}

/// Affine transformation `y = x · scale + shift` per channel.
struct ChannelAffine {
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl ChannelAffine {
    fn from_batch_norm(op: &BatchNorm, graph: &Graph, node: &Node, model: &Model) -> Result<Option<ChannelAffine>> {
        let vector = |at: usize| -> Result<Vec<f32>> {
            let name = &graph.value(node.inputs[at]).name;
            model.weights.get(name)?.floats(name)
        };
        let is_computed = |id: &ValueId| graph.params().all(|(param, _)| param != *id);
        if node.inputs.len() != 5 || node.inputs.iter().skip(1).any(is_computed) {
            return Ok(None);
        }
        let (weight, bias, mean, variance) = (vector(1)?, vector(2)?, vector(3)?, vector(4)?);
        let scale: Vec<f32> = weight.iter().zip(&variance).map(|(w, v)| (f64::from(*w) / (f64::from(*v) + op.epsilon).sqrt()) as f32).collect();
        let shift = bias.iter().zip(&mean).zip(&scale).map(|((b, m), s)| b - m * s).collect();
        Ok(Some(ChannelAffine { scale, shift }))
    }
}

/// The layer that absorbs a normalization.
enum FoldTarget {
    /// The preceding convolution.
    Before(usize),
    /// The following layer, possibly after pooling and flattening.
    After { layer: usize, flatten: Option<Flatten> },
}

/// Folds batch normalizations. Replaces weights of the model, and returns the new graph.
pub(super) fn fold(model: &mut Model, graph: Graph) -> Result<(Graph, Folded)> {
    let mut folded = Folded::default();
    let mut removed: Vec<ValueId> = Vec::new();
    let mut biases: Vec<(usize, String)> = Vec::new();
    for node in graph.nodes() {
        let Op::BatchNorm(op) = &node.op else { continue };
        let name = graph.value(node.output).name.clone();
        let affine = ChannelAffine::from_batch_norm(op, &graph, node, model)?;
        let (Some(affine), Some(target)) = (affine, find_target(&graph, node, |layer| biases.iter().any(|(used, _)| *used == layer))) else {
            folded.unfolded.push(name);
            continue;
        };
        let layer = match &target {
            FoldTarget::Before(layer) => *layer,
            FoldTarget::After { layer, .. } if affine.scale.iter().all(|s| *s > 0.0) => *layer,
            FoldTarget::After { .. } => {
                folded.unfolded.push(name);
                continue;
            }
        };
        let affine = if matches!(target, FoldTarget::After { .. }) { scale_producer(&graph, node, model, affine)? } else { affine };
        let bias = target.apply(&graph, model, affine)?;
        biases.push((layer, bias));
        removed.push(node.output);
        folded.count += 1;
    }
    if removed.is_empty() {
        return Ok((graph, folded));
    }
    let weights = &model.weights;
    let after = rebuild(&graph, weights, &mut |step: Rewrite| {
        if removed.contains(&step.node.output) {
            return Ok(step.inputs[0]);
        }
        let folded = biases.iter().find(|(layer, _)| graph.nodes()[*layer].output == step.node.output);
        let Some((_, bias)) = folded else { return step.copy() };
        let mut inputs = step.inputs[..2].to_vec();
        inputs.push(step.builder.param(bias, &weights.get(bias)?.shape)?);
        step.builder.node(step.name, step.node.op.clone(), &inputs)
    })?;
    let used: Vec<&str> = after.params().map(|(_, value)| value.name.as_str()).collect();
    let unused: Vec<String> = graph.params().map(|(_, v)| v.name.clone()).filter(|name| !used.contains(&name.as_str())).collect();
    unused.iter().for_each(|name| drop(model.weights.by_name.remove(name)));
    Ok((after, folded))
}

/// Finds the layer that can absorb a normalization. `is_used` returns whether a layer has already
/// absorbed one.
fn find_target(graph: &Graph, node: &Node, is_used: impl Fn(usize) -> bool) -> Option<FoldTarget> {
    let producer = graph.nodes().iter().position(|n| n.output == node.inputs[0]);
    if let Some(index) = producer
        && matches!(graph.nodes()[index].op, Op::Conv(_))
        && only_reader(graph, node.inputs[0]).is_some()
        && !is_used(index)
        && is_exclusive(graph, index)
    {
        return Some(FoldTarget::Before(index));
    }
    let (mut value, mut flatten) = (node.output, None);
    loop {
        let reader = only_reader(graph, value)?;
        let next = &graph.nodes()[reader];
        match &next.op {
            Op::MaxPool(pool) if pool.padding == 0 => {}
            Op::Flatten(op) => flatten = Some(*op),
            // With padding, the shift would not apply to the padded zeros.
            Op::Conv(conv) if conv.padding == 0 && conv.groups == 1 && flatten.is_none() => break,
            Op::Linear(linear) if !linear.input_major => break,
            _ => return None,
        }
        value = next.output;
    }
    let layer = only_reader(graph, value)?;
    (!is_used(layer) && is_exclusive(graph, layer)).then_some(FoldTarget::After { layer, flatten })
}

/// Folds the scale of a normalization after a ReLU into the rows of the layer before the ReLU, which
/// commutes with positive factors. Returns the remaining transformation.
fn scale_producer(graph: &Graph, node: &Node, model: &mut Model, affine: ChannelAffine) -> Result<ChannelAffine> {
    let producer = |value: ValueId| graph.nodes().iter().position(|n| n.output == value).filter(|_| only_reader(graph, value).is_some());
    let layer = producer(node.inputs[0]).and_then(|relu| match &graph.nodes()[relu] {
        relu if matches!(relu.op, Op::Relu(_)) => producer(relu.inputs[0]),
        _ => None,
    });
    let rows = |layer: &usize| matches!(&graph.nodes()[*layer].op, Op::Conv(_)) || matches!(&graph.nodes()[*layer].op, Op::Linear(op) if !op.input_major);
    let Some(layer) = layer.filter(rows).filter(|layer| is_exclusive(graph, *layer)) else { return Ok(affine) };
    let scale = Arc::new(affine.scale);
    for id in &graph.nodes()[layer].inputs[1..] {
        let name = graph.value(*id).name.clone();
        let upstream = model.weights.get(&name)?.clone();
        let scaled = Scaled { name: name.clone(), upstream, rows: Some(scale.clone()), columns: None, offset: 0.0 }.weight(DType::F32);
        model.weights.by_name.insert(name, scaled);
    }
    Ok(ChannelAffine { scale: vec![1.0; scale.len()], shift: affine.shift })
}

/// Whether the weight and bias of a layer have no other readers.
fn is_exclusive(graph: &Graph, layer: usize) -> bool {
    graph.nodes()[layer].inputs[1..].iter().all(|id| only_reader(graph, *id).is_some())
}

impl FoldTarget {
    /// Replaces the weight and bias of the layer. Returns the name of the bias.
    fn apply(self, graph: &Graph, model: &mut Model, affine: ChannelAffine) -> Result<String> {
        let (FoldTarget::Before(layer) | FoldTarget::After { layer, .. }) = self;
        let node = &graph.nodes()[layer];
        let weight_name = weight_input(graph, node).to_owned();
        let weight = model.weights.get(&weight_name)?.clone();
        let outputs = weight.shape.first().copied().unwrap_or(0);
        let bias_name = match node.inputs.get(2) {
            Some(id) => graph.value(*id).name.clone(),
            None => format!("{}.bias", weight_name.strip_suffix(".weight").unwrap_or(&weight_name)),
        };
        let old: Option<Weight> = node.inputs.get(2).and_then(|_| model.weights.by_name.get(&bias_name).cloned());
        let name = bias_name.clone();
        let old_bias = move || old.as_ref().map_or_else(|| Ok(vec![0.0; outputs]), |bias| bias.floats(&name));
        let scaled = |rows, columns| Scaled { name: weight_name.clone(), upstream: weight.clone(), rows, columns, offset: 0.0 }.weight(DType::F32);
        let (new, bias) = match self {
            FoldTarget::Before(_) => {
                let scale = Arc::new(affine.scale);
                let (factors, shift) = (scale.clone(), affine.shift);
                let values = move || Ok(old_bias()?.iter().zip(factors.iter()).zip(&shift).map(|((b, s), t)| b * s + t).collect());
                (scaled(Some(scale), None), Computed { values }.weight(vec![outputs]))
            }
            FoldTarget::After { flatten, .. } => {
                let columns = weight.shape.get(1).copied().unwrap_or(1);
                let spread = |values: &[f32]| spread(values, columns, flatten);
                let (scale, shift) = (Arc::new(spread(&affine.scale)), spread(&affine.shift));
                let (upstream, name) = (weight.clone(), weight_name.clone());
                let values = move || shifted(old_bias()?, &upstream.floats(&name)?, &shift);
                (scaled(None, Some(scale)), Computed { values }.weight(vec![outputs]))
            }
        };
        model.weights.by_name.insert(weight_name, new);
        model.weights.by_name.insert(bias_name.clone(), bias);
        Ok(bias_name)
    }
}

/// Repeats values of channels for the columns of a flattened image.
fn spread(values: &[f32], columns: usize, flatten: Option<Flatten>) -> Vec<f32> {
    let (channels, plane) = (values.len().max(1), (columns / values.len().max(1)).max(1));
    (0..columns).map(|column| if flatten.is_some_and(|f| f.channels_last) { values[column % channels] } else { values[column / plane] }).collect()
}

/// Computes `bias + W · shift`, with a shift for each index of the second axis.
fn shifted(mut bias: Vec<f32>, weight: &[f32], shift: &[f32]) -> Result<Vec<f32>> {
    let row = weight.len() / bias.len().max(1);
    let inner = (row / shift.len().max(1)).max(1);
    for (bias, row) in bias.iter_mut().zip(weight.chunks_exact(row.max(1))) {
        let sum: f64 = row.chunks(inner).zip(shift).map(|(taps, shift)| taps.iter().map(|w| f64::from(*w)).sum::<f64>() * f64::from(*shift)).sum();
        *bias += sum as f32;
    }
    Ok(bias)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::testing;

    #[test]
    fn parameters_that_the_graph_computes_are_not_folded() {
        let text = "input x: float[batch, 2, 4, 4]\nparam a.weight: float[2, 2, 1, 1]\nparam s: float[2]\nparam m: float[2]\n\
            g = Abs(s) -> float[2]\nc = Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}(x, a.weight) -> float[batch, 2, 4, 4]\n\
            y = BatchNorm{\"epsilon\":1e-5}(c, g, m, m, g) -> float[batch, 2, 4, 4]\noutput y = y\n";
        let (_folder, mut model) = testing::model(text, |_, shape| vec![1.0; shape.iter().product()]).unwrap();
        let graph = model.graph().unwrap();
        let (_, folded) = fold(&mut model, graph).unwrap();
        assert_eq!((folded.count, folded.unfolded), (0, vec!["y".to_owned()]));
    }

    #[test]
    fn channels_are_spread_over_the_columns_of_a_flattened_image() {
        let layouts = [true, false].map(|channels_last| spread(&[1.0, 2.0], 6, Some(Flatten { channels_last })));
        assert_eq!(layouts, [[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]]);
        assert_eq!(spread(&[1.0, 2.0], 2, None), [1.0, 2.0]);
    }

    #[test]
    fn a_shift_of_inputs_is_added_to_the_bias() {
        // Two outputs, two channels, two taps each: bias + Σ W · shift.
        let weight = [1.0, 2.0, 3.0, 4.0, -1.0, 0.0, 0.5, 0.5];
        assert_eq!(shifted(vec![10.0, 20.0], &weight, &[1.0, -2.0]).unwrap(), [10.0 + 3.0 - 14.0, 20.0 - 1.0 - 2.0]);
    }
}
