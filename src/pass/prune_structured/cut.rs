//! Removes units from weights, and updates the graph and `config.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;

use crate::analysis::{Group, GroupUnit, Groups};
use crate::arch;
use crate::error::{Error, Result};
use crate::ir::{Catalog, Graph, GraphFile, Node, Op};
use crate::model::Model;
use crate::pass::tower;
use crate::run_state::WARNING;
use crate::store::Weight;
use crate::work::Meter;

/// Indices of the remaining elements, by tensor and axis.
pub(in crate::pass) type Surviving = BTreeMap<(String, usize), Vec<usize>>;

/// Finds a matrix outside of the graph that may read features of which some are removed, by its number of
/// columns. Returns an error if the model has a head, such as a classifier's, and otherwise a warning.
pub(super) fn other_reader<'g>(model: &Model, graph: &Graph, groups: impl Iterator<Item = &'g Group>, surviving: &Surviving) -> Result<Option<String>> {
    let known: BTreeSet<&str> = graph.params().map(|(_, value)| value.name.as_str()).chain(surviving.keys().map(|(name, _)| name.as_str())).collect();
    let tied = model.tied_names();
    let is_known = |name: &str| known.contains(name) || tied.iter().any(|(alias, original)| *alias == name && known.contains(*original));
    let is_other = |(name, weight): &(&String, &Weight)| weight.shape.len() == 2 && weight.is_float() && !is_known(name) && !arch::is_of_tower(name);
    let others: Vec<_> = model.weights.by_name.iter().filter(is_other).collect();
    for group in groups.filter(|group| group.unit == GroupUnit::Hidden || group.output.is_some()) {
        let Some((name, _)) = others.iter().find(|(_, weight)| weight.shape.last() == Some(&group.size)) else { continue };
        // transformers ignores heads in the checkpoint of a class without a head.
        if model.config.has_head() {
            let read = group.output.as_ref().map_or("hidden state".to_owned(), |output| format!("output `{output}`"));
            let reason = format!("is not part of the graph, and may read the {read}, which would become narrower");
            return Err(Error::tensor(name, reason, "remove the tensor from the checkpoint, or do not prune `hidden`"));
        }
        return Ok(Some(format!("{WARNING}`{name}` is not part of the graph and keeps its size, although it may read the hidden state")));
    }
    Ok(None)
}

/// Computes the remaining elements of all tensors that contain removed units. `removed` holds units by
/// the index of their group.
pub(in crate::pass) fn surviving(model: &Model, groups: &Groups, removed: &BTreeMap<usize, Vec<usize>>) -> Result<Surviving> {
    let mut surviving: BTreeMap<(String, usize), Vec<bool>> = BTreeMap::new();
    for (index, units) in removed {
        for member in &groups.groups[*index].members {
            let size = model.weights.get(&member.param)?.shape[member.axis];
            let surviving = surviving.entry((member.param.clone(), member.axis)).or_insert_with(|| vec![true; size]);
            for unit in units {
                member.layout.blocks(*unit, &mut |at| surviving[at..at + member.layout.block].fill(false));
            }
        }
    }
    if let Some((stream, others)) = arch::residual_stream_axes(model.config.model_type(), &|name| model.weights.shape(name))
        && let Some(of_stream) = surviving.get(&stream).cloned()
    {
        surviving.extend(others.into_iter().map(|axis| (axis, of_stream.clone())));
    }
    let indices = |surviving: Vec<bool>| surviving.iter().enumerate().filter(|(_, surviving)| **surviving).map(|(at, _)| at).collect();
    Ok(surviving.into_iter().map(|(axis, surviving)| (axis, indices(surviving))).collect())
}

/// Removes all other elements from the tensors, and returns the names of the changed tensors. Returns an
/// error if a tensor is quantized or would become empty.
pub(super) fn cut(model: &mut Model, surviving: &Surviving, meter: &Arc<Meter>) -> Result<BTreeSet<String>> {
    let mut changed = BTreeSet::new();
    for ((name, axis), surviving) in surviving {
        if surviving.is_empty() {
            return Err(Error::tensor(name, "would become empty", "use a smaller `amount`"));
        }
        let weight = model.weights.get(name)?.index_select(name, *axis, surviving, meter.clone())?;
        model.weights.by_name.insert(name.clone(), weight);
        changed.insert(name.clone());
    }
    Ok(changed)
}

/// Rebuilds the graph for the smaller weights, and updates `config.json`. Returns notes on the
/// description of the model.
pub(super) fn describe(model: &mut Model, graph: &Graph, groups: &Groups, removed: &BTreeMap<usize, Vec<usize>>) -> Result<Vec<String>> {
    let size = |group: &Group| {
        let index = groups.groups.iter().position(|other| std::ptr::eq(other, group));
        group.size - index.and_then(|index| removed.get(&index)).map_or(0, Vec::len)
    };
    let smaller = groups.rebuild(graph, &model.weights, &size)?;
    set_graph(model, smaller, Vec::new())
}

/// A note that `config.json`, if the model has one, cannot describe a part of the result.
pub(in crate::pass) fn graph_file_note(model: &Model, part: &str) -> Option<String> {
    let file = GraphFile::NAME;
    let note = || format!("config.json cannot describe {part}, but {file} does: `compress` and its ONNX export read it, transformers does not");
    (!model.config.values().is_empty()).then(note)
}

/// The width of the first heads that attention splits. Other layers can have heads too, and after the removal
/// of layers, there may be no attention.
fn head_dim(graph: &Graph) -> Option<usize> {
    let keys = |node: &Node| graph.value(*node.inputs.get(1)?).ty.shape.last()?.fixed();
    let of_keys = keys(graph.nodes().iter().find(|node| matches!(node.op, Op::Attention(_)))?);
    let widths = || graph.nodes().iter().filter_map(|node| if let Op::SplitHeads(op) = &node.op { Some(op.head_dim) } else { None });
    widths().find(|width| Some(*width) == of_keys).or_else(|| widths().next())
}

/// Replaces the graph of a model. Updates `config.json` (with the additional values `more`) if it can
/// describe the graph. Returns notes on the description of the model.
///
/// # Errors
/// The model has a vision tower, which is not part of the graph and is made for the widths of the language
/// model.
pub(in crate::pass) fn set_graph(model: &mut Model, graph: Graph, more: Vec<(String, Value)>) -> Result<Vec<String>> {
    tower::require_none(model, "removing layers or units")?;
    let head_dim = head_dim(&graph);
    let resized = arch::resized(model.config.values(), head_dim, &|name| model.weights.shape(name)).into_iter().map(|(key, value)| (key.to_owned(), value));
    let values: Vec<(String, Value)> = resized.chain(more).collect();
    let before = model.config.clone();
    let keys: Vec<&str> = values.iter().map(|(key, _)| key.as_str()).collect();
    values.iter().for_each(|(key, value)| model.config.set(key, value.clone()));
    model.changed_graph = Some(Arc::new(graph));
    let refused = arch::refuses_rope_factors(model.config.values()) && !arch::refuses_rope_factors(before.values());
    if !refused && model.graph_file()?.is_none() {
        let note = (!keys.is_empty()).then(|| format!("config.json describes the result: {}", keys.join(", ")));
        return Ok(note.into_iter().chain(indivisible_heads_note(model)).collect());
    }
    model.config = before;
    Ok(graph_file_note(model, "the result").into_iter().collect())
}

/// A note that transformers refuses the number of heads.
fn indivisible_heads_note(model: &Model) -> Option<String> {
    let [(heads_key, heads), (width_key, width)] = arch::indivisible_heads(model.config.model_type(), model.config.values())?;
    Some(format!("transformers refuses `{heads_key}` {heads}, because it does not divide `{width_key}` {width}: choose an amount that leaves a divisor"))
}
