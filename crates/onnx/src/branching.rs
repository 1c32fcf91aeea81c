//! Control flow that depends on the values of inputs.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::bodies;
use super::proto::{Dimension, GraphProto, ModelProto, NodeProto, ValueInfoProto};

/// Whether the values of inputs decide which branches of `If` run or how often the body of `Loop` does.
/// These are decisions for a whole batch, so that its samples affect each other. Decisions by shapes, and by
/// inputs without a batch axis, are the same for all samples.
pub(crate) fn depends_on_values(model: &ModelProto) -> bool {
    let Some(graph) = &model.graph else { return false };
    let mut flow = Flow::default();
    let mut seen = BTreeSet::new();
    for initializer in &graph.initializer {
        // Inputs with default values are weights.
        seen.insert(initializer.name());
    }
    flow.varying.extend(graph.input.iter().filter(|input| has_batch_axis(input)).map(ValueInfoProto::name));
    flow.collect(graph);
    for function in &model.functions {
        flow.varying.extend(function.input.iter().map(String::as_str));
        function.node.iter().for_each(|node| flow.collect_node(node));
    }
    let mut open = std::mem::take(&mut flow.decisions);
    while let Some(name) = open.pop() {
        if !seen.insert(name) {
            continue;
        }
        if flow.varying.contains(name) {
            return true;
        }
        match flow.sources.get(name) {
            Some(node) if matches!(node.op_type(), "Shape" | "Size") => {}
            Some(node) => open.extend(node.input.iter().map(String::as_str)),
            None => {}
        }
    }
    false
}

/// The values of a model that matter for decisions.
#[derive(Default)]
struct Flow<'m> {
    /// The nodes that compute values, by name.
    sources: BTreeMap<&'m str, &'m NodeProto>,
    /// Values that differ between batches or iterations.
    varying: BTreeSet<&'m str>,
    /// Conditions and numbers of iterations.
    decisions: Vec<&'m str>,
}

impl<'m> Flow<'m> {
    fn collect(&mut self, graph: &'m GraphProto) {
        graph.node.iter().for_each(|node| self.collect_node(node));
    }

    fn collect_node(&mut self, node: &'m NodeProto) {
        self.sources.extend(node.output.iter().map(|output| (output.as_str(), node)));
        let is_loop = node.op_type() == "Loop";
        if is_loop || node.op_type() == "If" {
            self.decisions.extend(node.input.iter().take(if is_loop { 2 } else { 1 }).map(String::as_str));
        }
        if bodies(node).next().is_some() {
            self.varying.extend(node.output.iter().map(String::as_str));
        }
        for body in bodies(node) {
            // The first inputs of a loop are the number of the iteration and the condition.
            self.varying.extend(body.input.iter().skip(if is_loop { 2 } else { 0 }).map(ValueInfoProto::name));
            self.decisions.extend(body.output.iter().take(usize::from(is_loop)).map(ValueInfoProto::name));
            self.collect(body);
        }
    }
}

/// Whether the first axis of an input has no fixed size.
fn has_batch_axis(input: &ValueInfoProto) -> bool {
    let shape = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()?.shape.as_ref());
    shape.is_none_or(|shape| shape.dim.first().is_some_and(|dim| !matches!(dim.value, Some(Dimension::DimValue(_)))))
}
