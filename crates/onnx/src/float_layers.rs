//! Layers with float weights, and other nodes that must compute in floats, that read quantized values.
//!
//! When ONNX Runtime 1.31 loads a file, it quantizes the weights of such layers too, with one scale per
//! tensor (`WeightBiasQuantization`), if the scale of their input is a scalar. To compute in floats, these
//! layers read values whose scale is repeated for each channel.

use std::collections::{BTreeMap, BTreeSet};

use super::check::{is_own, reads};
use super::initializer_roles::{int, text};
use super::lowering::Lowering;
use super::proto::{AttributeProto, NodeProto};
use crate::ir::ops::FakeQuantize;
use crate::ir::{Op, TensorType};

/// Layers whose weights ONNX Runtime quantizes. It fuses `MatMul` and `Add` to `Gemm` first.
const LAYERS: [&str; 4] = ["Conv", "ConvTranspose", "Gemm", "MatMul"];

/// Whether ONNX Runtime 1.31 rejects a resize between quantized values, because it drops its empty inputs or
/// has no integer kernel.
fn is_float_resize(node: &NodeProto) -> bool {
    node.op_type() == "Resize" && (text(node, "mode").as_deref() == Some("cubic") || node.attribute.iter().any(|attribute| attribute.name() == "axes"))
}

/// Whether the integer kernel of ONNX Runtime 1.31 divides the averages of a pooling by a wrong count, or
/// does not support its dilations.
fn is_float_pooling(node: &NodeProto) -> bool {
    let is_dilated = |attribute: &AttributeProto| attribute.name() == "dilations" && attribute.ints.iter().any(|dilation| *dilation != 1);
    let divides_wrongly = int(node, "ceil_mode", 0) != 0 && int(node, "count_include_pad", 0) != 0;
    node.op_type() == "AveragePool" && (divides_wrongly || node.attribute.iter().any(is_dilated))
}

/// Separates poolings from the dequantization of their input by a maximum over one value, which ONNX Runtime
/// does not remove. It replaces them by integer kernels otherwise, whatever the scales are.
fn separate_poolings(n: &mut Lowering) {
    for at in (0..n.nodes.len()).rev().filter(|at| n.nodes.get(*at).is_some_and(is_float_pooling)).collect::<Vec<_>>() {
        let Some(input) = n.nodes[at].input.first().cloned() else { continue };
        let is_dequantized = |node: &NodeProto| node.op_type() == "DequantizeLinear" || TRANSPARENT.contains(&node.op_type());
        if !n.nodes.iter().any(|node| is_dequantized(node) && node.output.contains(&input)) {
            continue;
        }
        let name = n.fresh(format!("{input}/float"));
        n.nodes[at].input[0].clone_from(&name);
        n.nodes.insert(at, NodeProto { op_type: Some("Max".into()), name: Some(name.clone()), input: vec![input], output: vec![name], ..NodeProto::default() });
    }
}

/// Operators that ONNX Runtime moves a preceding `DequantizeLinear` across, or merges with a layer.
const TRANSPARENT: [&str; 8] = ["Identity", "MaxPool", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"];

/// The first opset in which `QuantizeLinear` has an output type. ONNX Runtime 1.31 inserts quantizers with
/// that type after transparent operators whose results are not quantized, if the scale is a scalar. On
/// x86, it then converts int8 activations to uint8, but not this type, and refuses its own result.
const PROPAGATED_DTYPE: u32 = 21;

/// Dequantizes the inputs of layers with float weights with one scale for each channel.
pub(super) fn repeat_input_scales(n: &mut Lowering) {
    let graph = n.graph;
    let quantized: BTreeMap<String, (FakeQuantize, &TensorType)> = graph
        .nodes()
        .iter()
        .filter_map(|node| match node.op {
            Op::FakeQuantize(by) => Some((n.wide_name(&n.names[node.output.index()]).to_owned(), (by, &graph.value(node.output).ty))),
            _ => None,
        })
        .collect();
    if quantized.is_empty() {
        return;
    }
    separate_poolings(n);
    let mut inserted: BTreeMap<usize, NodeProto> = BTreeMap::new();
    for (value, (dequantizer, consumers)) in float_consumers(n, &quantized) {
        let (by, ty) = quantized[&value];
        // The channels, or any other axis with several elements.
        let axes = (1..ty.shape.len()).chain([0]);
        let Some((axis, size)) = axes.filter_map(|axis| Some((axis, ty.shape.get(axis)?.fixed()?))).find(|(_, size)| *size > 1) else { continue };
        let mut node = n.nodes[dequantizer].clone();
        node.input.truncate(1);
        node.input.extend([n.floats(&format!("scale/{:?}x{size}", by.scale), &vec![by.scale.into(); size]), n.zero_point(by.zero_point, Some(size))]);
        node.attribute = vec![AttributeProto::int("axis", axis as i64)];
        let is_shared = n.nodes.iter().enumerate().any(|(at, other)| !consumers.contains(&at) && reads(other).contains(value.as_str()));
        if !is_shared {
            n.nodes[dequantizer] = node;
            continue;
        }
        let name = n.fresh(format!("{value}/channels"));
        consumers.into_iter().for_each(|at| n.nodes[at].input[0].clone_from(&name));
        (node.name, node.output) = (Some(name.clone()), vec![name]);
        inserted.insert(dequantizer, node);
    }
    let nodes = std::mem::take(&mut n.nodes).into_iter().enumerate();
    n.nodes = nodes.flat_map(|(at, node)| std::iter::once(node).chain(inserted.remove(&at))).collect();
}

/// The quantized values from which layers with float weights are computed, or other values that are not
/// quantized, after transparent operators (see [`PROPAGATED_DTYPE`]): the position of the
/// `DequantizeLinear`, and those of the consumers that lead to these layers.
fn float_consumers<'n>(n: &'n Lowering, quantized: &BTreeMap<String, (FakeQuantize, &TensorType)>) -> BTreeMap<String, (usize, BTreeSet<usize>)> {
    let outputs = n.nodes.iter().enumerate().flat_map(|(at, node)| node.output.iter().map(move |name| (name.as_str(), at)));
    let producers: BTreeMap<&str, usize> = outputs.filter(|(name, _)| !name.is_empty()).collect();
    let producer = |name: &str| producers.get(name).map(|at| (*at, &n.nodes[*at]));
    let mut varying: BTreeSet<&str> = n.graph.inputs().map(|(_, value)| value.name.as_str()).collect();
    for node in &n.nodes {
        if reads(node).iter().any(|name| varying.contains(name)) {
            varying.extend(node.output.iter().map(String::as_str));
        }
    }
    let is_float = |weight: &str| !varying.contains(weight) && producer(weight).is_none_or(|(_, node)| node.op_type() != "DequantizeLinear");
    let mut found: BTreeMap<String, (usize, BTreeSet<usize>)> = BTreeMap::new();
    let is_layer = |node: &NodeProto| LAYERS.contains(&node.op_type()) && node.input.get(1).is_some_and(|weight| is_float(weight));
    let stays_float = |node: &NodeProto| is_own(node.domain()) && (is_layer(node) || is_float_resize(node));
    let is_transparent = |node: &NodeProto| TRANSPARENT.contains(&node.op_type());
    // The dequantizer from which the node at a position reads a value, and the first node after it.
    let source = |at: usize, x: &'n str| {
        let (mut consumer, mut value) = (at, x);
        while let Some((at, node)) = producer(value).filter(|(_, node)| is_transparent(node))
            && let Some(input) = node.input.first()
        {
            (consumer, value) = (at, input.as_str());
        }
        let (dequantizer, _) = producer(value).filter(|(_, node)| node.op_type() == "DequantizeLinear" && quantized.contains_key(value))?;
        Some((dequantizer, value, consumer))
    };
    let mut add = |(dequantizer, value, consumer): (usize, &str, usize)| {
        found.entry(value.to_owned()).or_insert_with(|| (dequantizer, BTreeSet::new())).1.insert(consumer);
    };
    for (at, node) in n.nodes.iter().enumerate().filter(|(_, node)| stays_float(node)) {
        node.input.first().and_then(|x| source(at, x)).into_iter().for_each(&mut add);
    }
    if n.signed && n.opset >= PROPAGATED_DTYPE {
        for (at, node) in n.nodes.iter().enumerate().filter(|(_, node)| node.op_type() != "QuantizeLinear" && !is_transparent(node)) {
            let sources = node.input.iter().filter_map(|x| source(at, x));
            sources.filter(|(_, _, consumer)| *consumer != at).for_each(&mut add);
        }
    }
    found
}
