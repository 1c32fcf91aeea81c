//! How the nodes of a file use its initializers.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::{bodies, is_own, order};
use super::proto::{GraphProto, ModelProto, NodeProto};
use crate::store::Role;

/// A use of a weight by a node or as a graph output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Usage {
    /// Position of the node in the graph; `None` inside of bodies.
    pub node: Option<usize>,
    /// Name of the node, if it has one.
    pub name: Option<String>,
    /// How the node uses the weight.
    pub kind: UsageKind,
}

/// How a node uses a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UsageKind {
    /// As the right operand of a matrix product, `[in, out]`.
    Columns,
    /// As the right operand of a matrix product, transposed: `[out, in]`.
    Rows,
    /// As the kernel of a convolution, `[out, in, …]`.
    Kernel,
    /// As an embedding table.
    Table,
    /// As another operand of a product, or by an operator that may multiply it.
    Operand,
    /// As the input of an `Identity`, whose uses are listed too.
    Identity,
    /// As a scale or zero point.
    QuantizationParameter,
    /// As a number that determines the shape of the output.
    Size,
    /// In any other way.
    Other,
}

/// The uses of each value, including those inside of bodies and those of its copies by `Identity`.
pub(super) fn usages(model: &ModelProto) -> BTreeMap<&str, Vec<Usage>> {
    let mut found = BTreeMap::new();
    if let Some(graph) = &model.graph {
        collect_usages(graph, true, &copies(graph), &mut found);
    }
    found
}

/// The values that `Identity` nodes copy, by the names of the copies. Exporters write equal weights once,
/// and all others as copies.
pub(super) fn copies(graph: &GraphProto) -> BTreeMap<&str, &str> {
    let mut originals: BTreeMap<&str, &str> = BTreeMap::new();
    for node in order(&graph.node).into_iter().filter_map(|position| graph.node.get(position)).filter(|node| is_identity(node)) {
        if let ([input], [output]) = (node.input.as_slice(), node.output.as_slice()) {
            originals.insert(output, originals.get(input.as_str()).copied().unwrap_or(input));
        }
    }
    originals
}

fn is_identity(node: &NodeProto) -> bool {
    node.op_type() == "Identity" && is_own(node.domain())
}

fn collect_usages<'m>(graph: &'m GraphProto, top: bool, copies: &BTreeMap<&'m str, &'m str>, found: &mut BTreeMap<&'m str, Vec<Usage>>) {
    let scales = graph.node.iter().filter(|node| node.op_type() == "DynamicQuantizeLinear").filter_map(|node| node.output.get(1));
    let scales: BTreeSet<&str> = scales.map(String::as_str).collect();
    // The scale of an integer product is that of its weight, multiplied by that of its activation.
    let is_scaled = |node: &NodeProto| node.op_type() == "Mul" && node.input.iter().any(|name| scales.contains(name.as_str()));
    let sizes = sizes(graph);
    let mut add = |name: &'m str, usage: Usage| {
        if let Some(original) = copies.get(name) {
            found.entry(original).or_default().push(usage.clone());
        }
        found.entry(name).or_default().push(usage);
    };
    for (position, node) in graph.node.iter().enumerate() {
        for (input, name) in node.input.iter().enumerate() {
            let own = node.name.clone().filter(|name| !name.is_empty());
            let kind = match node {
                _ if top && is_identity(node) => UsageKind::Identity,
                _ if is_quantization_parameter(node.op_type(), input) || is_scaled(node) => UsageKind::QuantizationParameter,
                _ => match usage_kind(node, input) {
                    UsageKind::Other if sizes.contains(name.as_str()) => UsageKind::Size,
                    kind => kind,
                },
            };
            add(name, Usage { node: top.then_some(position), name: own, kind });
        }
    }
    for output in &graph.output {
        add(output.name(), Usage { node: None, name: None, kind: UsageKind::Other });
    }
    graph.node.iter().flat_map(bodies).for_each(|body| collect_usages(body, false, copies, found));
}

/// An integer attribute, or `missing`.
pub(super) fn int(node: &NodeProto, name: &str, missing: i64) -> i64 {
    node.attribute.iter().find(|attribute| attribute.name() == name).map_or(missing, |attribute| attribute.i.unwrap_or(0))
}

/// A text attribute.
pub(super) fn text(node: &NodeProto, name: &str) -> Option<String> {
    let attribute = node.attribute.iter().find(|attribute| attribute.name() == name)?;
    Some(String::from_utf8_lossy(attribute.s()).into_owned())
}

/// A float attribute, or `missing`.
pub(super) fn float(node: &NodeProto, name: &str, missing: f32) -> f32 {
    node.attribute.iter().find(|attribute| attribute.name() == name).map_or(missing, |attribute| attribute.f.unwrap_or(0.0))
}

fn usage_kind(node: &NodeProto, input: usize) -> UsageKind {
    match (node.op_type(), input) {
        _ if !is_own(node.domain()) => UsageKind::Operand,
        ("MatMul", 1) => UsageKind::Columns,
        ("Gemm", 1) if int(node, "transB", 0) == 0 => UsageKind::Columns,
        ("Gemm", 1) => UsageKind::Rows,
        ("Conv", 1) => UsageKind::Kernel,
        ("Gather", 0) if int(node, "axis", 0) == 0 => UsageKind::Table,
        ("MatMul" | "Gemm" | "Transpose", 0) | ("ConvTranspose" | "LSTM" | "GRU" | "RNN", 1 | 2) | ("Einsum", _) => UsageKind::Operand,
        _ => UsageKind::Other,
    }
}

/// Whether an input of an operator of ONNX or ONNX Runtime is a scale or a zero point.
fn is_quantization_parameter(op: &str, input: usize) -> bool {
    match (op, input) {
        ("QLinearConcat", input) => input % 3 != 2,
        ("QuantizeLinear" | "DequantizeLinear", 1..)
        | ("QLinearAveragePool" | "QLinearGlobalAveragePool" | "QLinearLeakyRelu" | "QLinearReduceMean" | "QLinearSigmoid" | "QLinearSoftmax", 1..)
        | ("QLinearAdd" | "QLinearConv" | "QLinearMatMul" | "QLinearMul", 1 | 2 | 4..=7)
        | ("QLinearWhere", 2 | 3 | 5..)
        | ("QGemm", 1 | 2 | 4 | 5 | 7 | 8)
        | ("MatMulIntegerToFloat", 2..=5)
        | ("DynamicQuantizeMatMul" | "GatherBlockQuantized" | "MatMulNBits", 2 | 3)
        | ("QAttention", 3 | 4 | 6 | 7)
        | ("DynamicQuantizeLSTM" | "QEmbedLayerNormalization", 8..)
        | ("QMoE", 3 | 6 | 9) => true,
        _ => false,
    }
}

/// The floats that determine shapes: inputs of nodes such as `Resize`, and the values that they are computed
/// from.
fn sizes(graph: &GraphProto) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for node in order(&graph.node).into_iter().rev().filter_map(|position| graph.node.get(position)) {
        let (direct, is_source) = (size_inputs(node), node.output.iter().any(|name| found.contains(name.as_str())));
        let inputs = node.input.iter().enumerate().filter(|(at, name)| !name.is_empty() && (is_source || direct.contains(at)));
        found.extend(inputs.map(|(_, name)| name.as_str()));
    }
    found
}

/// Positions of the float inputs that determine the shape of a node's output.
pub(super) fn size_inputs(node: &NodeProto) -> std::ops::Range<usize> {
    match node.op_type() {
        _ if !is_own(node.domain()) => 0..0,
        "Upsample" | "Resize" => 1..3,
        "Range" => 0..3,
        _ => 0..0,
    }
}

/// Whether all uses of a value are as a scale or zero point.
pub(super) fn is_only_quantization_parameter(usages: &[Usage]) -> bool {
    let mut kinds = usages.iter().map(|usage| usage.kind).filter(|kind| *kind != UsageKind::Identity).peekable();
    kinds.peek().is_some() && kinds.all(|kind| kind == UsageKind::QuantizationParameter)
}

/// The role of a weight of this shape, and whether it is stored as `[in, out]`.
pub(super) fn role(usages: &[Usage], shape: &[usize]) -> (Role, bool) {
    let kinds = || usages.iter().map(|usage| usage.kind).filter(|kind| *kind != UsageKind::Identity);
    let all = |kind: UsageKind| kinds().next().is_some() && kinds().all(|found| found == kind);
    let any = |wanted: &[UsageKind]| kinds().any(|kind| wanted.contains(&kind));
    match shape.len() {
        _ if any(&[UsageKind::Size]) => (Role::Constant, false),
        2 if all(UsageKind::Columns) => (Role::Matrix, true),
        2 if all(UsageKind::Rows) => (Role::Matrix, false),
        // A single column has the scales of the rows of a table of integers.
        2 if all(UsageKind::Table) && shape.last() != Some(&1) => (Role::Table, false),
        3.. if all(UsageKind::Kernel) => (Role::Kernel, false),
        2 if any(&[UsageKind::Columns, UsageKind::Rows]) => (Role::Mixed, false),
        3.. if any(&[UsageKind::Kernel]) => (Role::Mixed, false),
        _ if shape.iter().all(|size| *size == 1) => (Role::Constant, false),
        2.. if any(&[UsageKind::Operand, UsageKind::Columns]) => (Role::Operand, false),
        _ => (Role::Other, false),
    }
}
