//! Control flow that depends on the values of inputs.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::bodies;
use super::proto::{Dimension, GraphProto, ModelProto, NodeProto, ValueInfoProto};

/// Whether the values of inputs decide which branches of `If` run or how often the body of `Loop` does.
/// These are decisions for a whole batch, so that its samples affect each other. Decisions by shapes, and by
/// inputs without a batch axis, are the same for all samples, unless shapes depend on values, as after
/// `NonZero`.
pub(crate) fn depends_on_values(model: &ModelProto) -> bool {
    let Some(graph) = &model.graph else { return false };
    let mut flow = Flow::default();
    flow.inputs.extend(graph.input.iter().filter(|input| has_batch_axis(input)).map(ValueInfoProto::name));
    // Inputs with default values are weights.
    flow.inputs.retain(|name| graph.initializer.iter().all(|initializer| initializer.name() != *name));
    flow.collect(graph);
    for function in &model.functions {
        flow.varying.extend(function.input.iter().map(String::as_str));
        function.node.iter().for_each(|node| flow.collect_node(node));
    }
    let mut open: Vec<(&str, Property)> = std::mem::take(&mut flow.decisions).into_iter().map(|name| (name, Property::Value)).collect();
    let mut seen = BTreeSet::new();
    while let Some((name, property)) = open.pop() {
        if !seen.insert((name, property)) {
            continue;
        }
        if flow.varying.contains(name) || (property == Property::Value && flow.inputs.contains(name)) {
            return true;
        }
        let Some(node) = flow.sources.get(name) else { continue };
        let inputs = node.input.iter().map(String::as_str).enumerate();
        open.extend(inputs.map(|(at, input)| (input, if property.depends_on_value(node.op_type(), at) { Property::Value } else { Property::Shape })));
    }
    false
}

/// Property of a tensor that determines a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Property {
    Value,
    Shape,
}

impl Property {
    /// Whether the property of an output of a node depends on the values of an input, and not only on its
    /// shape.
    fn depends_on_value(self, op: &str, input: usize) -> bool {
        match (self, op) {
            (Property::Value, op) => !matches!(op, "Shape" | "Size"),
            (Property::Shape, "NonZero" | "Compress" | "Unique" | "NonMaxSuppression" | "Range" | "ConstantOfShape") => true,
            (Property::Shape, "Reshape" | "Expand" | "Tile" | "Slice" | "TopK" | "Resize" | "Upsample" | "Pad" | "OneHot" | "Split") => input > 0,
            (Property::Shape, _) => false,
        }
    }
}

/// The values of a model that matter for decisions.
#[derive(Default)]
struct Flow<'m> {
    /// The nodes that compute values, by name.
    sources: BTreeMap<&'m str, &'m NodeProto>,
    /// Inputs of the model, whose values differ between batches.
    inputs: BTreeSet<&'m str>,
    /// Values of bodies and functions, and results of nodes with bodies, which may differ in any property.
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

/// Whether an axis of an input has no fixed size. The axis of the batch need not be the first one, as that of
/// the states of recurrent networks.
fn has_batch_axis(input: &ValueInfoProto) -> bool {
    let shape = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()?.shape.as_ref());
    shape.is_none_or(|shape| shape.dim.iter().any(|dim| !matches!(dim.value, Some(Dimension::DimValue(_)))))
}

#[cfg(test)]
mod tests {
    use super::super::body_layers::node_of;
    use super::super::proto::{AttributeProto, DimensionProto, TensorShapeProto, TensorTypeProto, TypeProto};
    use super::*;

    fn node(op: &str, input: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
        node_of(op, input.iter().map(|name| (*name).to_owned()).collect(), output, attribute)
    }

    fn input(name: &str, sizes: &[Dimension]) -> ValueInfoProto {
        let dim = sizes.iter().map(|size| DimensionProto { value: Some(size.clone()), denotation: None }).collect();
        let tensor_type = Some(TensorTypeProto { elem_type: Some(1), shape: Some(TensorShapeProto { dim }) });
        ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
    }

    #[test]
    fn decisions_by_values_are_found() {
        let one = |op: &str, value: &str| vec![node(op, &[value], "c", vec![])];
        let chain = |ops: &[&str]| {
            let name = |at: usize| {
                if at == 0 {
                    "x".to_owned()
                } else if at == ops.len() {
                    "c".to_owned()
                } else {
                    format!("v{at}")
                }
            };
            ops.iter().enumerate().map(|(at, op)| node(op, &[&name(at)], &name(at + 1), vec![])).collect::<Vec<_>>()
        };
        for (nodes, expected) in [
            (one("ReduceMax", "x"), true),
            (one("ReduceMax", "fixed"), false),
            (one("ReduceMax", "state"), true),
            (one("ReduceMax", "weight"), false),
            (chain(&["Shape", "Gather"]), false),
            (chain(&["Relu", "Shape", "Gather"]), false),
            (chain(&["NonZero", "Transpose", "Shape", "Gather"]), true),
            (vec![node("Shape", &["x"], "s", vec![]), node("Reshape", &["x", "s"], "r", vec![]), node("Size", &["r"], "c", vec![])], false),
            (vec![node("Cast", &["x"], "s", vec![]), node("Expand", &["weight", "s"], "r", vec![]), node("Size", &["r"], "c", vec![])], true),
        ] {
            let body = |attribute: &str| AttributeProto { g: Some(GraphProto::default()), i: None, r#type: Some(5), ..AttributeProto::int(attribute, 0) };
            let branches = node("If", &["c"], "y", vec![body("then_branch"), body("else_branch")]);
            let (batch, one) = (Dimension::DimParam("n".into()), Dimension::DimValue(1));
            let graph = GraphProto {
                node: [nodes, vec![branches]].concat(),
                input: vec![
                    input("x", std::slice::from_ref(&batch)),
                    input("fixed", std::slice::from_ref(&one)),
                    input("state", &[one.clone(), batch.clone()]),
                ],
                ..GraphProto::default()
            };
            assert_eq!(depends_on_values(&ModelProto { graph: Some(graph.clone()), ..ModelProto::default() }), expected, "{graph:?}");
        }
    }
}
