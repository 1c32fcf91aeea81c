//! Removal of whole transformer layers, the least influential first.
//!
//! With calibration data, the influence of a layer is one minus the mean cosine similarity between the
//! hidden states of tokens before and after it (Men et al., *ShortGPT*, 2024,
//! <https://arxiv.org/abs/2403.03853>). Without, layers are removed backwards from the second last
//! (Gromov et al., *The Unreasonable Ineffectiveness of the Deeper Layers*, 2024,
//! <https://arxiv.org/abs/2403.17887>).

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, Tensor};
use serde_json::{Value, json};

use super::{NAME, Ranking, cut};
use crate::analysis::{self, Layer, Layers};
use crate::arch::{self, BLOCK_TYPES, LAYER_PATTERN, LAYER_TYPES};
use crate::data::SequenceRoles;
use crate::error::{Error, Result};
use crate::exec::Executor;
use crate::exec::transfer::{self, Cause};
use crate::ir::{Graph, GraphFile, Kind, Node, Op};
use crate::model::Model;
use crate::pass::calibrate::{self, tensor_error};
use crate::pass::plan::layout;
use crate::pass::{Amount, Context};
use crate::run_state::WARNING;

/// Name of the input of the first layer of a backbone in transformers, and the prefix of the names of the
/// outputs of layers.
const STEM: &str = "stem";
const STAGE: &str = "stage";

/// Result of a removal.
pub(super) struct Removed {
    /// Removed or renamed tensors.
    pub tensors: BTreeSet<String>,
    pub notes: Vec<String>,
    pub details: Value,
    /// Whether names, shapes or encodings depend on calibration data.
    pub open: bool,
}

/// Removes layers from a model.
pub(super) fn remove(model: &mut Model, amount: Amount, ranking: Ranking) -> Result<Removed> {
    let graph = model.graph()?;
    let Some(found) = analysis::layers(&graph) else {
        return Err(Error::option(format!("{NAME}: dims"), "the model has no repeated layers of equal structure with attention"));
    };
    let all = found.layers.len();
    let requested = amount.of(all as u64).map_or(all, |count| count as usize);
    if requested >= all {
        let list = (1..all).map(|count| format!("{:.4}", count as f64 / all as f64).trim_end_matches('0').to_owned()).collect::<Vec<_>>().join(", ");
        return Err(Error::option(format!("{NAME}: amount"), format!("{amount} of {all} layers would remove all of them; possible amounts: {list}")));
    }
    let influence = ranking.measured(|context| match &context.data.calibration {
        Some(_) if requested > 0 => influence(model, &graph, &found, context).map(Some),
        _ => Ok(None),
    })?;
    let influence = influence.flatten();
    let mut order: Vec<usize> = match &influence {
        Some(influence) => {
            let mut order: Vec<usize> = (0..all).collect();
            order.sort_by(|a, b| influence[*a].total_cmp(&influence[*b]).then(b.cmp(a)));
            order
        }
        None => (0..all - 1).rev().chain([all - 1]).collect(),
    };
    order.truncate(requested);
    let removed: BTreeSet<usize> = order.into_iter().collect();
    let open = !removed.is_empty() && differ(model, &found.tensors, all, &outside_readers(&graph, &found));
    let tensors = remove_layers(model, &graph, &found, &removed)?;
    let how = if influence.is_some() { "with the least influence on calibration data" } else { "backwards from the second last, without calibration data" };
    let list = removed.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let mut notes = vec![format!("layers removed, {how}: {}", if list.is_empty() { "none".to_owned() } else { list })];
    if !removed.is_empty() {
        notes.extend(update_config(model, &graph, &found, &removed)?);
    }
    Ok(Removed { tensors, notes, details: json!({ "before": all, "gone": removed, "influence": influence }), open })
}

/// Tensors of a layer that nodes outside of it read. They remain if the layer is removed.
pub(in crate::pass) fn outside_readers<'g>(graph: &'g Graph, found: &Layers) -> BTreeSet<&'g str> {
    let mut read = BTreeSet::new();
    for node in graph.nodes() {
        for value in node.inputs.iter().map(|id| graph.value(*id)).filter(|value| value.kind == Kind::Param) {
            let layer = analysis::layer_index(&value.name, &found.tensors).and_then(|number| found.layers.get(number));
            if layer.is_some_and(|layer| !layer.nodes.contains(&graph.value(node.output).name)) {
                read.insert(value.name.as_str());
            }
        }
    }
    read
}

/// Whether layers or experts, whose index follows `prefix` in the names of their tensors, differ in the
/// names, shapes or encodings of these tensors, so that the result depends on which of them are removed.
/// Tensors that `remain` anyway are not compared.
pub(super) fn differ(model: &Model, prefix: &str, count: usize, remain: &BTreeSet<&str>) -> bool {
    let mut units: Vec<Vec<_>> = (0..count).map(|_| Vec::new()).collect();
    for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| !remain.contains(name.as_str())) {
        let Some(number) = analysis::layer_index(name, prefix) else { continue };
        if let Some(unit) = units.get_mut(number) {
            unit.push((&name[prefix.len() + number.to_string().len()..], layout(weight)));
        }
    }
    units.iter().any(|unit| Some(unit) != units.first())
}

/// Influence of each layer: one minus the mean cosine similarity of its input and output.
pub(in crate::pass) fn influence(model: &Model, graph: &Graph, found: &Layers, context: &Context) -> Result<Vec<f64>> {
    let executor = Executor::new(graph, calibrate::parameters(graph, model, context)?, context.device.clone()).tracked(context.memory_tracker.as_ref());
    let observed: BTreeSet<&str> = found.layers.iter().flat_map(|layer| [layer.input.as_str(), layer.output.as_str()]).collect();
    let observation = executor.observation(|name| observed.contains(name));
    let sides = SequenceRoles::new(graph);
    let mut sums = vec![0f64; found.layers.len()];
    let mut count = 0f64;
    calibrate::for_each("Observing", model, context, |batch| {
        let mut values: BTreeMap<String, Tensor> = BTreeMap::new();
        let linear = crate::ir::ops::Linear::default().into();
        executor.run_observed(&observation, &batch.inputs, &mut |name, tensor| {
            values.insert(name.to_owned(), calibrate::rows(tensor, &linear, &batch, sides.token_axis(name))?);
            Ok(())
        })?;
        for (layer, sum) in found.layers.iter().zip(&mut sums) {
            let (Some(before), Some(after)) = (values.get(&layer.input), values.get(&layer.output)) else { continue };
            *sum += cosines(before, after).map_err(tensor_error)?;
        }
        count += values.values().next().map_or(0, |rows| rows.dims()[0]) as f64;
        Ok(())
    })?;
    Ok(block_influence(&sums, count))
}

/// One minus the mean cosine similarity, from sums over `count` rows: 0 for a layer that returns its input.
fn block_influence(sums: &[f64], count: f64) -> Vec<f64> {
    sums.iter().map(|sum| 1.0 - sum / count.max(1.0)).collect()
}

/// Sum of the cosine similarities of rows.
fn cosines(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let norm = |x: &Tensor| x.sqr()?.sum(D::Minus1)?.sqrt();
    let cosine = ((a * b)?.sum(D::Minus1)? / ((norm(a)? * norm(b)?)? + 1e-12)?)?;
    transfer::number(&cosine.sum_all()?, Cause::Statistics)
}

/// New index of a layer or expert after a removal.
pub(super) fn renumbered(number: usize, removed: &BTreeSet<usize>) -> usize {
    number - removed.range(..number).count()
}

/// Replaces the index after a prefix in a name by the new index.
pub(in crate::pass) fn renamed(name: &str, prefix: &str, removed: &BTreeSet<usize>) -> String {
    match analysis::layer_index(name, prefix) {
        Some(number) => {
            let rest = &name[prefix.len() + number.to_string().len()..];
            format!("{prefix}{}{rest}", renumbered(number, removed))
        }
        None => name.to_owned(),
    }
}

/// Removes layers by index. Returns notes on the description of the model.
pub(in crate::pass) fn drop_layers(model: &mut Model, graph: &Graph, found: &Layers, removed: &BTreeSet<usize>) -> Result<Vec<String>> {
    remove_layers(model, graph, found, removed)?;
    if removed.is_empty() { Ok(Vec::new()) } else { update_config(model, graph, found, removed) }
}

/// Renumbers the weights and rebuilds the graph without the layers. Returns the names of removed and
/// renamed tensors.
fn remove_layers(model: &mut Model, graph: &Graph, found: &Layers, removed: &BTreeSet<usize>) -> Result<BTreeSet<String>> {
    let mut changed = BTreeSet::new();
    let is_removed = |name: &str| removed.iter().any(|number| found.layers[*number].nodes.contains(name));
    let remaining = graph.nodes().iter().filter(|node| !is_removed(&graph.value(node.output).name));
    let read: BTreeSet<&str> = remaining.flat_map(|node| &node.inputs).map(|id| graph.value(*id).name.as_str()).collect();
    let weights = std::mem::take(&mut model.weights.by_name);
    // Tensors of removed layers that remaining layers read, by their new names.
    let mut read_by_others: BTreeMap<String, String> = BTreeMap::new();
    for (name, weight) in weights {
        let number = analysis::layer_index(&name, &found.tensors);
        let new = renamed(&name, &found.tensors, removed);
        // Other layers may read tensors of the first layer, such as the relative position bias of T5.
        if number.is_some_and(|number| removed.contains(&number)) {
            if !read.contains(name.as_str()) {
                changed.insert(name);
                continue;
            }
            read_by_others.insert(new.clone(), name.clone());
        }
        if model.weights.by_name.contains_key(&new) {
            return Err(Error::tensor(
                read_by_others.get(&new).unwrap_or(&name),
                format!("is used by remaining layers, and its new name `{new}` would conflict with another tensor"),
                "keep the layer that it belongs to",
            ));
        }
        if new != name {
            changed.insert(name);
        }
        model.weights.by_name.insert(new, weight);
    }
    let mut through: BTreeMap<&str, &str> = BTreeMap::new();
    removed.iter().map(|number| &found.layers[*number]).for_each(|layer| {
        through.insert(&layer.output, &layer.input);
    });
    let refer = |name: &str| {
        let mut name = name;
        while let Some(before) = through.get(name) {
            name = before;
        }
        let node = renamed(name, &found.nodes, removed);
        if node == name { renamed(name, &found.tensors, removed) } else { node }
    };
    let file = GraphFile::from(graph).edited(&is_removed, &refer);
    model.changed_graph = Some(std::sync::Arc::new(file.build(&model.weights)?));
    Ok(changed)
}

/// Updates the number of layers, lists with one element per layer, and keys of layers with a dense network
/// in `config.json`. `graph` is that of all layers.
fn update_config(model: &mut Model, graph: &Graph, found: &Layers, removed: &BTreeSet<usize>) -> Result<Vec<String>> {
    let all = found.layers.len();
    let mut values: Vec<(String, Value)> = Vec::new();
    if let Some(key) = arch::layers_key(model.config.model_type()) {
        values.push((key.to_owned(), json!(all - removed.len())));
    }
    let remaining = |list: &[Value]| -> Value { list.iter().enumerate().filter(|(at, _)| !removed.contains(at)).map(|(_, value)| value.clone()).collect() };
    if let Some(pattern) = model.config.get(LAYER_PATTERN).and_then(Value::as_str).filter(|pattern| pattern.chars().count() == all) {
        let letters: String = pattern.chars().enumerate().filter(|(at, _)| !removed.contains(at)).map(|(_, letter)| letter).collect();
        values.push((LAYER_PATTERN.to_owned(), letters.into()));
    }
    if [LAYER_TYPES, BLOCK_TYPES, LAYER_PATTERN].iter().all(|key| model.config.get(key).is_none_or(Value::is_null)) {
        // The default depends on the indices of layers.
        values.extend(layer_types(graph, found).map(|types| (LAYER_TYPES.to_owned(), remaining(&types))));
    }
    let dense = arch::dense_layers(model.config.values(), &layers_with_experts(model, found, all - removed.len()));
    values.extend(dense.into_iter().map(|(key, value)| (key.to_owned(), value)));
    for (key, value) in model.config.values() {
        let Some(list) = value.as_array() else { continue };
        match key.as_str() {
            LAYER_TYPES | BLOCK_TYPES | "attn_type_list" | "no_rope_layers" if list.len() == all => values.push((key.clone(), remaining(list))),
            // The input of the first layer, and the output of each layer.
            "stage_names" if list.len() == all + 1 => values.push((key.clone(), json!(list[..=all - removed.len()]))),
            "out_features" | "_out_features" | "out_indices" | "_out_indices" => values.push((key.clone(), json!(stages(list, all, removed)))),
            _ => {}
        }
    }
    let smaller = model.graph()?;
    let attends = |graph: &Graph| graph.nodes().iter().any(|node| matches!(node.op, Op::Attention(_)));
    let lacks_attention = attends(graph) && !attends(&smaller);
    let mut notes = cut::set_graph(model, smaller, values)?;
    if lacks_attention {
        notes.push(format!("{WARNING}no attention layer remains, without which transformers cannot create the cache of a hybrid model: keep one of them"));
    }
    Ok(notes)
}

/// The types of all layers, if they differ and each of them mixes tokens.
fn layer_types(graph: &Graph, found: &Layers) -> Option<Vec<Value>> {
    const FULL: &str = "full_attention";
    let is_chunked = |node: &Node| node.inputs.iter().any(|id| graph.is_chunk_mask(*id));
    let kind = |node: &Node| match &node.op {
        Op::Attention(_) if is_chunked(node) => Some("chunked_attention"),
        Op::Attention(op) if op.window.is_some() => Some("sliding_attention"),
        Op::Attention(_) => Some(FULL),
        Op::GatedDelta(_) => Some("linear_attention"),
        Op::CausalConv(_) => Some("conv"),
        _ => None,
    };
    let kinds: Vec<(&str, &str)> = graph.nodes().iter().filter_map(|node| Some((graph.value(node.output).name.as_str(), kind(node)?))).collect();
    let of_layer = |layer: &Layer| {
        // A gated delta network contains a convolution, and comes after it.
        let own = || kinds.iter().rev().filter(|(name, _)| layer.nodes.contains(*name)).map(|(_, kind)| *kind);
        own().find(|kind| *kind != FULL).or_else(|| own().next())
    };
    let types: Vec<&str> = found.layers.iter().map(of_layer).collect::<Option<_>>()?;
    types.iter().any(|kind| Some(kind) != types.first()).then(|| types.into_iter().map(Value::from).collect())
}

/// Whether each of the first `count` layers has experts, by the names of its tensors.
fn layers_with_experts(model: &Model, found: &Layers, count: usize) -> Vec<bool> {
    let mut has_experts = vec![false; count];
    for name in model.weights.by_name.keys().filter(|name| name.split('.').any(|part| part == "experts")) {
        if let Some(layer) = analysis::layer_index(name, &found.tensors).and_then(|number| has_experts.get_mut(number)) {
            *layer = true;
        }
    }
    has_experts
}

/// Renumbers the output stages of a backbone of `all` layers, given by index or name. The output of a
/// removed layer becomes that of the previous layer.
fn stages(list: &[Value], all: usize, removed: &BTreeSet<usize>) -> Vec<Value> {
    let mut renumbered_stages: Vec<Value> = Vec::new();
    for stage in list {
        let stage = match stage {
            Value::String(name) => match analysis::layer_index(name, STAGE).map(|number| renumbered(number, removed)) {
                Some(0) => json!(STEM),
                Some(number) => json!(format!("{STAGE}{number}")),
                None => stage.clone(),
            },
            _ => match stage.as_i64() {
                // Negative indices count from the end.
                Some(number) => json!(renumbered(usize::try_from(if number < 0 { number + all as i64 + 1 } else { number }).unwrap_or(0), removed)),
                None => stage.clone(),
            },
        };
        if !renumbered_stages.contains(&stage) {
            renumbered_stages.push(stage);
        }
    }
    renumbered_stages
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_layer_that_changes_its_input_more_has_more_influence() {
        let before = Tensor::new(&[[1f32, 0.0], [0.0, 2.0]], &Device::Cpu).unwrap();
        let rotated = Tensor::new(&[[0f32, 3.0], [0.0, 2.0]], &Device::Cpu).unwrap();
        let sums = [&before, &rotated, &before.neg().unwrap()].map(|after| cosines(&before, after).unwrap());
        let influence = block_influence(&sums, 2.0);
        assert!(influence.iter().zip([0.0, 0.5, 2.0]).all(|(found, expected)| (found - expected).abs() < 1e-6), "{influence:?}");
    }
}
