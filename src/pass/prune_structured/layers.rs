//! Taking out whole layers: those that change what goes through them least.
//!
//! With calibration data, the influence of a layer is one less the mean cosine between a token's vector before and after
//! it (Men et al., *ShortGPT*, 2024, <https://arxiv.org/abs/2403.03853>). Without, layers go from the last but one
//! backwards (Gromov et al., *The Unreasonable Ineffectiveness of the Deeper Layers*, 2024,
//! <https://arxiv.org/abs/2403.17887>).

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, Tensor};
use serde_json::{Value, json};

use super::{NAME, cut};
use crate::analysis::{self, Layers};
use crate::arch;
use crate::data::Sides;
use crate::error::{Error, Result};
use crate::exec::Executor;
use crate::exec::transfer::{self, Cause};
use crate::ir::{Graph, GraphFile};
use crate::model::Model;
use crate::pass::calibrate::{self, computed};
use crate::pass::{Amount, Context};

/// What transformers calls what goes into the first layer of a backbone, and what comes out of the others before their numbers.
const STEM: &str = "stem";
const STAGE: &str = "stage";

/// What came of it.
pub(super) struct Removed {
    /// Tensors that are gone or have another name.
    pub tensors: BTreeSet<String>,
    pub notes: Vec<String>,
    pub details: Value,
    /// Whether names or shapes depend on what calibration data says.
    pub open: bool,
}

/// Takes layers out of a model.
///
/// # Errors
/// The model has no layers that repeat, none would be left, or running it fails.
pub(super) fn remove(model: &mut Model, amount: Amount, context: Option<&Context>) -> Result<Removed> {
    let graph = model.graph()?;
    let Some(found) = analysis::layers(&graph) else {
        return Err(Error::option(format!("{NAME}: dims"), "the model has no layers that repeat, each with attention and of one form"));
    };
    let all = found.layers.len();
    let wanted = amount.of(all as u64).map_or(all, |count| count as usize);
    if wanted >= all {
        let list = (1..all).map(|count| format!("{:.4}", count as f64 / all as f64).trim_end_matches('0').to_owned()).collect::<Vec<_>>().join(", ");
        return Err(Error::option(format!("{NAME}: amount"), format!("{amount} of {all} layers leaves none; it can take {list}")));
    }
    let influence = match context.filter(|context| context.data.calibration.is_some() && wanted > 0) {
        Some(context) => Some(influence(model, &graph, &found, context)?),
        None => None,
    };
    let mut order: Vec<usize> = match &influence {
        Some(influence) => {
            let mut order: Vec<usize> = (0..all).collect();
            order.sort_by(|a, b| influence[*a].total_cmp(&influence[*b]).then(b.cmp(a)));
            order
        }
        None => (0..all - 1).rev().chain([all - 1]).collect(),
    };
    order.truncate(wanted);
    let gone: BTreeSet<usize> = order.into_iter().collect();
    let tensors = take_out(model, &graph, &found, &gone)?;
    let how = if influence.is_some() { "of the least influence on calibration data" } else { "from the last but one backwards, without calibration data" };
    let list = gone.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let mut notes = vec![format!("layers removed, {how}: {}", if list.is_empty() { "none".to_owned() } else { list })];
    if !gone.is_empty() {
        notes.extend(settle(model, &found, &gone)?);
    }
    Ok(Removed { tensors, notes, details: json!({ "before": all, "gone": gone, "influence": influence }), open: false })
}

/// One less the mean cosine between what goes into each layer and what comes out.
fn influence(model: &Model, graph: &Graph, found: &Layers, context: &Context) -> Result<Vec<f64>> {
    let executor = Executor::new(graph, calibrate::parameters(graph, model, context)?, context.device.clone()).tracked(context.memory_tracker.as_ref());
    let wanted: BTreeSet<&str> = found.layers.iter().flat_map(|layer| [layer.input.as_str(), layer.output.as_str()]).collect();
    let observation = executor.observation(|name| wanted.contains(name));
    let sides = Sides::of(graph);
    let mut sums = vec![0f64; found.layers.len()];
    let mut count = 0f64;
    calibrate::for_each("Observing", model, context, |batch| {
        let mut seen: BTreeMap<String, Tensor> = BTreeMap::new();
        let linear = crate::ir::ops::Linear::default().into();
        executor.run_observed(&observation, &batch.inputs, &mut |name, tensor| {
            seen.insert(name.to_owned(), calibrate::rows(tensor, &linear, &batch, sides.token_axis(name))?);
            Ok(())
        })?;
        for (layer, sum) in found.layers.iter().zip(&mut sums) {
            let (Some(before), Some(after)) = (seen.get(&layer.input), seen.get(&layer.output)) else { continue };
            *sum += cosines(before, after).map_err(computed)?;
        }
        count += seen.values().next().map_or(0, |rows| rows.dims()[0]) as f64;
        Ok(())
    })?;
    Ok(block_influence(&sums, count))
}

/// One minus the mean of cosines that are summed over so many rows: 0 for a layer that changes nothing.
fn block_influence(sums: &[f64], count: f64) -> Vec<f64> {
    sums.iter().map(|sum| 1.0 - sum / count.max(1.0)).collect()
}

/// The sum of the cosines of rows.
fn cosines(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let norm = |x: &Tensor| x.sqr()?.sum(D::Minus1)?.sqrt();
    let cosine = ((a * b)?.sum(D::Minus1)? / ((norm(a)? * norm(b)?)? + 1e-12)?)?;
    transfer::number(&cosine.sum_all()?, Cause::Statistics)
}

/// The number that a layer, or an expert, has afterwards.
pub(super) fn renumbered(number: usize, gone: &BTreeSet<usize>) -> usize {
    number - gone.range(..number).count()
}

/// A name with the number that its layer, or what else is numbered behind a prefix, has afterwards.
pub(super) fn renamed(name: &str, prefix: &str, gone: &BTreeSet<usize>) -> String {
    match analysis::number(name, prefix) {
        Some(number) => {
            let rest = &name[prefix.len() + number.to_string().len()..];
            format!("{prefix}{}{rest}", renumbered(number, gone))
        }
        None => name.to_owned(),
    }
}

/// Takes layers out by number; answers in plain words what describes the result.
///
/// # Errors
/// The graph does not fit the weights.
pub(in crate::pass) fn keep_layers(model: &mut Model, graph: &Graph, found: &Layers, gone: &BTreeSet<usize>) -> Result<Vec<String>> {
    take_out(model, graph, found, gone)?;
    if gone.is_empty() { Ok(Vec::new()) } else { settle(model, found, gone) }
}

/// Renumbers the weights and rebuilds the graph without the layers.
fn take_out(model: &mut Model, graph: &Graph, found: &Layers, gone: &BTreeSet<usize>) -> Result<BTreeSet<String>> {
    let mut changed = BTreeSet::new();
    let drops = |name: &str| gone.iter().any(|number| found.layers[*number].nodes.contains(name));
    let left = graph.nodes().iter().filter(|node| !drops(&graph.value(node.output).name));
    let read: BTreeSet<&str> = left.flat_map(|node| &node.inputs).map(|id| graph.value(*id).name.as_str()).collect();
    let weights = std::mem::take(&mut model.weights.by_name);
    // Tensors of layers that go which others read, by the names that they have afterwards.
    let mut read_by_others: BTreeMap<String, String> = BTreeMap::new();
    for (name, weight) in weights {
        let number = analysis::number(&name, &found.tensors);
        let new = renamed(&name, &found.tensors, gone);
        // Other layers may read what the first one has, as those of T5 do.
        if number.is_some_and(|number| gone.contains(&number)) {
            if !read.contains(name.as_str()) {
                changed.insert(name);
                continue;
            }
            read_by_others.insert(new.clone(), name.clone());
        }
        if model.weights.by_name.contains_key(&new) {
            return Err(Error::tensor(
                read_by_others.get(&new).unwrap_or(&name),
                format!("is read by layers that stay, and would be named `{new}`, as another tensor is"),
                "keep the layer that has it",
            ));
        }
        if new != name {
            changed.insert(name);
        }
        model.weights.by_name.insert(new, weight);
    }
    let mut through: BTreeMap<&str, &str> = BTreeMap::new();
    gone.iter().map(|number| &found.layers[*number]).for_each(|layer| {
        through.insert(&layer.output, &layer.input);
    });
    let refer = |name: &str| {
        let mut name = name;
        while let Some(before) = through.get(name) {
            name = before;
        }
        let node = renamed(name, &found.nodes, gone);
        if node == name { renamed(name, &found.tensors, gone) } else { node }
    };
    let file = GraphFile::from(graph).edited(&drops, &refer);
    model.changed_graph = Some(std::sync::Arc::new(file.build(&model.weights)?));
    Ok(changed)
}

/// Has `config.json` say how many layers there are.
fn settle(model: &mut Model, found: &Layers, gone: &BTreeSet<usize>) -> Result<Vec<String>> {
    let all = found.layers.len();
    let mut values: Vec<(String, Value)> = Vec::new();
    if let Some(key) = arch::layers_key(model.config.model_type()) {
        values.push((key.to_owned(), json!(all - gone.len())));
    }
    for (key, value) in model.config.values() {
        let Some(list) = value.as_array() else { continue };
        match key.as_str() {
            "layer_types" | "no_rope_layers" if list.len() == all => {
                let kept: Vec<&Value> = list.iter().enumerate().filter(|(at, _)| !gone.contains(at)).map(|(_, value)| value).collect();
                values.push((key.clone(), json!(kept)));
            }
            // What goes into the first layer, and what comes out of each.
            "stage_names" if list.len() == all + 1 => values.push((key.clone(), json!(list[..=all - gone.len()]))),
            "out_features" | "_out_features" | "out_indices" | "_out_indices" => values.push((key.clone(), json!(stages(list, all, gone)))),
            _ => {}
        }
    }
    let smaller = model.graph()?;
    cut::settle(model, smaller, values)
}

/// The stages that a backbone of `all` layers answers, by number or by name, as they are numbered afterwards: what came out of a layer that
/// is gone comes out of the one before.
fn stages(list: &[Value], all: usize, gone: &BTreeSet<usize>) -> Vec<Value> {
    let mut kept: Vec<Value> = Vec::new();
    for stage in list {
        let stage = match stage {
            Value::String(name) => match analysis::number(name, STAGE).map(|number| renumbered(number, gone)) {
                Some(0) => json!(STEM),
                Some(number) => json!(format!("{STAGE}{number}")),
                None => stage.clone(),
            },
            _ => match stage.as_i64() {
                // Below zero, numbers count from behind the last.
                Some(number) => json!(renumbered(usize::try_from(if number < 0 { number + all as i64 + 1 } else { number }).unwrap_or(0), gone)),
                None => stage.clone(),
            },
        };
        if !kept.contains(&stage) {
            kept.push(stage);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_layer_that_changes_its_input_more_has_more_influence() {
        let before = Tensor::new(&[[1f32, 0.0], [0.0, 2.0]], &Device::Cpu).unwrap();
        let turned = Tensor::new(&[[0f32, 3.0], [0.0, 2.0]], &Device::Cpu).unwrap();
        let sums = [&before, &turned, &before.neg().unwrap()].map(|after| cosines(&before, after).unwrap());
        let influence = block_influence(&sums, 2.0);
        assert!(influence.iter().zip([0.0, 0.5, 2.0]).all(|(found, wanted)| (found - wanted).abs() < 1e-6), "{influence:?}");
    }
}
