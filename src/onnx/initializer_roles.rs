//! What the nodes of a file make of its weights.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::check::{bodies, is_own};
use super::proto::{GraphProto, ModelProto, NodeProto};
use crate::store::Role;

/// A node that reads a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Use {
    /// Its position in the graph; nothing in a body.
    pub node: Option<usize>,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// How it reads the weight.
    pub how: How,
}

/// How a weight is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// As the right side of a product, `[in, out]`.
    Columns,
    /// The same, `[out, in]`.
    Rows,
    /// As the kernel of a convolution, outputs first.
    Kernel,
    /// As a table whose rows are looked up.
    Table,
    /// In another way.
    Other,
}

/// The nodes that read each value, those of bodies among them.
pub(super) fn uses(model: &ModelProto) -> BTreeMap<&str, Vec<Use>> {
    let mut found = BTreeMap::new();
    if let Some(graph) = &model.graph {
        of_graph(graph, true, &mut found);
    }
    found
}

fn of_graph<'m>(graph: &'m GraphProto, top: bool, found: &mut BTreeMap<&'m str, Vec<Use>>) {
    for (position, node) in graph.node.iter().enumerate() {
        for (input, name) in node.input.iter().enumerate() {
            let own = node.name.clone().filter(|name| !name.is_empty());
            found.entry(name.as_str()).or_default().push(Use { node: top.then_some(position), name: own, how: how(node, input) });
        }
        bodies(node).for_each(|body| of_graph(body, false, found));
    }
    for output in &graph.output {
        found.entry(output.name()).or_default().push(Use { node: None, name: None, how: How::Other });
    }
}

/// The whole number of an attribute.
pub(super) fn int(node: &NodeProto, name: &str, missing: i64) -> i64 {
    node.attribute.iter().find(|attribute| attribute.name() == name).map_or(missing, |attribute| attribute.i.unwrap_or(0))
}

/// The number of an attribute.
pub(super) fn float(node: &NodeProto, name: &str, missing: f32) -> f32 {
    node.attribute.iter().find(|attribute| attribute.name() == name).map_or(missing, |attribute| attribute.f.unwrap_or(0.0))
}

fn how(node: &NodeProto, input: usize) -> How {
    match (node.op_type(), input) {
        _ if !is_own(node.domain()) => How::Other,
        ("MatMul", 1) => How::Columns,
        ("Gemm", 1) if int(node, "transB", 0) == 0 => How::Columns,
        ("Gemm", 1) => How::Rows,
        ("Conv", 1) => How::Kernel,
        ("Gather", 0) if int(node, "axis", 0) == 0 => How::Table,
        _ => How::Other,
    }
}

/// What a weight of this rank is for, and whether it lies `[in, out]`.
pub(super) fn role(uses: &[Use], rank: usize) -> (Role, bool) {
    let all = |how: How| !uses.is_empty() && uses.iter().all(|u| u.how == how);
    match rank {
        2 if all(How::Columns) => (Role::Matrix, true),
        2 if all(How::Rows) => (Role::Matrix, false),
        2 if all(How::Table) => (Role::Table, false),
        3.. if all(How::Kernel) => (Role::Kernel, false),
        _ => (Role::Other, false),
    }
}
