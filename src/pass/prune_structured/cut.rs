//! Removing units from the weights, and describing the smaller model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;

use crate::analysis::{Group, Groups};
use crate::arch;
use crate::error::{Error, Result};
use crate::ir::{Catalog, Graph, GraphFile, Op};
use crate::model::Model;
use crate::work::Meter;

/// Elements that stay, by tensor and axis.
pub(super) type Surviving = BTreeMap<(String, usize), Vec<usize>>;

/// What survives of all tensors that carry units to remove, which are named by the position of their group.
///
/// # Errors
/// A tensor is missing.
pub(super) fn surviving(model: &Model, groups: &Groups, gone: &BTreeMap<usize, Vec<usize>>) -> Result<Surviving> {
    let mut surviving: BTreeMap<(String, usize), Vec<bool>> = BTreeMap::new();
    for (index, units) in gone {
        for member in &groups.groups[*index].members {
            let size = model.weights.get(&member.param)?.shape[member.axis];
            let surviving = surviving.entry((member.param.clone(), member.axis)).or_insert_with(|| vec![true; size]);
            for unit in units {
                member.place.blocks(*unit, &mut |at| surviving[at..at + member.place.block].fill(false));
            }
        }
    }
    if let Some((stream, others)) = arch::beside_the_stream(model.config.model_type(), &|name| model.weights.shape(name))
        && let Some(of_stream) = surviving.get(&stream).cloned()
    {
        surviving.extend(others.into_iter().map(|axis| (axis, of_stream.clone())));
    }
    let places = |surviving: Vec<bool>| surviving.iter().enumerate().filter(|(_, surviving)| **surviving).map(|(at, _)| at).collect();
    Ok(surviving.into_iter().map(|(axis, surviving)| (axis, places(surviving))).collect())
}

/// Removes everything else from the tensors, and returns their names.
///
/// # Errors
/// A tensor is quantized, or nothing would be left of it.
pub(super) fn cut(model: &mut Model, surviving: &Surviving, meter: &Arc<Meter>) -> Result<BTreeSet<String>> {
    let mut changed = BTreeSet::new();
    for ((name, axis), surviving) in surviving {
        if surviving.is_empty() {
            return Err(Error::tensor(name, "would be left without elements", "remove less"));
        }
        let weight = model.weights.get(name)?.pick(name, *axis, surviving, meter.clone())?;
        model.weights.by_name.insert(name.clone(), weight);
        changed.insert(name.clone());
    }
    Ok(changed)
}

/// Builds the graph over the smaller weights, and has `config.json` describe it where it can; returns a note on which of the two it is.
///
/// # Errors
/// The graph does not fit the weights.
pub(super) fn describe(model: &mut Model, graph: &Graph, groups: &Groups, gone: &BTreeMap<usize, Vec<usize>>) -> Result<Vec<String>> {
    let left = |group: &Group| {
        let index = groups.groups.iter().position(|other| std::ptr::eq(other, group));
        group.size - index.and_then(|index| gone.get(&index)).map_or(0, Vec::len)
    };
    let smaller = groups.rebuild(graph, &model.weights, &left)?;
    settle(model, smaller, Vec::new())
}

/// Makes a graph the model's own, and has `config.json` describe it where it can.
///
/// # Errors
/// The graph does not fit the weights.
pub(super) fn settle(model: &mut Model, graph: Graph, more: Vec<(String, Value)>) -> Result<Vec<String>> {
    let head_dim = graph.nodes().iter().find_map(|node| match &node.op {
        Op::SplitHeads(op) => Some(op.head_dim),
        _ => None,
    });
    let resized = arch::resized(model.config.values(), head_dim, &|name| model.weights.shape(name)).into_iter().map(|(key, value)| (key.to_owned(), value));
    let values: Vec<(String, Value)> = resized.chain(more).collect();
    let before = model.config.clone();
    let keys: Vec<&str> = values.iter().map(|(key, _)| key.as_str()).collect();
    values.iter().for_each(|(key, value)| model.config.set(key, value.clone()));
    model.changed_graph = Some(Arc::new(graph));
    if model.graph_file()?.is_none() {
        let said = (!keys.is_empty()).then(|| format!("config.json describes the result: {}", keys.join(", ")));
        return Ok(said.into_iter().chain(arch::refused_heads(model.config.values())).collect());
    }
    model.config = before;
    Ok(vec![format!("config.json cannot describe the result, {} does: `compress` and its ONNX export read it, transformers does not", GraphFile::NAME)])
}
