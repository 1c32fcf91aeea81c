//! Layers in the bodies of `If`, `Loop` and `Scan` in opaque subgraphs, and quantizers of their inputs.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::check::{bodies, bodies_mut, is_own, label};
use super::initializer_roles::int;
use super::proto::{AttributeProto, DataType, GraphProto, NodeProto, TensorProto};
use super::subgraph_parts::SubgraphParts;
use crate::ir::ops::FakeQuantize;

/// A layer in a body of a subgraph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyLayer {
    /// Name of the weight, which is an input of the subgraph.
    pub weight: String,
    /// Description of the node.
    pub label: String,
    /// Number of groups of a convolution; `None` for matrix products.
    pub groups: Option<usize>,
    /// Whether the nodes read the weight transposed, as `[in, out]`.
    pub(super) is_flipped: bool,
    /// Position of the weight among the inputs of the subgraph.
    pub(super) input: usize,
    pub(super) position: Position,
}

/// The position of a node: the nodes and their bodies that contain it, from the outermost one, and the node
/// in the last body.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub within: Vec<(usize, usize)>,
    pub node: usize,
}

impl Position {
    /// Positions in the order of the nodes, with nodes in bodies at the place of the node that contains them.
    fn order(&self) -> Vec<usize> {
        self.within.iter().flat_map(|(node, body)| [*node, *body]).chain([self.node]).collect()
    }
}

/// The integers of a weight. Values and scales are values of the graph around a subgraph.
pub(super) struct IntegerWeight {
    pub values: String,
    pub rank: usize,
    pub scales: String,
    /// The axis of the scales and their number; `None` for one scale.
    pub axis: Option<(i64, usize)>,
}

/// The name of the weight that an input of a subgraph contains, and whether it is transposed first.
fn weight_of<'p>(parts: &'p SubgraphParts, input: &'p str) -> (&'p str, bool) {
    let transposed = input.strip_suffix("/rows").filter(|weight| parts.nodes.iter().any(|node| is_transpose(node, input, weight)));
    transposed.map_or((input, false), |weight| (weight, true))
}

/// Whether a node provides the nodes of a subgraph with a transposed weight.
fn is_transpose(node: &NodeProto, input: &str, weight: &str) -> bool {
    node.op_type() == "Transpose" && node.input.first().is_some_and(|name| name == input) && node.output.first().is_some_and(|name| name == weight)
}

/// The layers in the bodies of a subgraph whose weights nothing else reads.
pub(super) fn layers(parts: &SubgraphParts) -> Vec<BodyLayer> {
    let mut uses = BTreeMap::new();
    collect_uses(&parts.nodes, &mut Vec::new(), &mut uses);
    let layer = |(input, (inner, _)): (usize, &(String, i32))| {
        let (weight, is_flipped) = weight_of(parts, inner);
        let [Some((position, node, 1))] = uses.get(weight).map_or(&[][..], Vec::as_slice) else { return None };
        let is_layer = match node.op_type() {
            "MatMul" => is_flipped,
            "Gemm" => int(node, "transA", 0) == 0 && (int(node, "transB", 0) == 0) == is_flipped,
            "Conv" => !is_flipped,
            _ => false,
        };
        let groups = (node.op_type() == "Conv").then(|| usize::try_from(int(node, "group", 1)).unwrap_or(1));
        let found = BodyLayer { weight: weight.to_owned(), label: label(node), groups, is_flipped, input, position: position.clone() };
        (is_layer && is_own(node.domain()) && !position.within.is_empty()).then_some(found)
    };
    parts.inputs.iter().enumerate().filter_map(layer).collect()
}

/// A use of a value: the position of the node, the node, and the position of its input. `None` for a use as
/// the result of a body.
type Use<'p> = Option<(Position, &'p NodeProto, usize)>;

/// The uses of all values.
fn collect_uses<'p>(nodes: &'p [NodeProto], within: &mut Vec<(usize, usize)>, uses: &mut BTreeMap<&'p str, Vec<Use<'p>>>) {
    for (at, node) in nodes.iter().enumerate() {
        for (input, name) in node.input.iter().enumerate() {
            uses.entry(name).or_default().push(Some((Position { within: within.clone(), node: at }, node, input)));
        }
        for (number, body) in bodies(node).enumerate() {
            body.output.iter().for_each(|output| uses.entry(output.name()).or_default().push(None));
            within.push((at, number));
            collect_uses(&body.node, within, uses);
            within.pop();
        }
    }
}

pub(super) fn body_at<'n>(nodes: &'n mut [NodeProto], within: &[(usize, usize)]) -> Option<&'n mut GraphProto> {
    let ((node, number), rest) = within.split_first()?;
    let body = bodies_mut(nodes.get_mut(*node)?).nth(*number)?;
    if rest.is_empty() { Some(body) } else { body_at(&mut body.node, rest) }
}

pub(super) fn node_of(op: &str, input: Vec<String>, output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto { op_type: Some(op.into()), name: Some(output.to_owned()), input, output: vec![output.to_owned()], attribute, ..NodeProto::default() }
}

fn tensor(name: String, kind: DataType, dims: Vec<usize>, bytes: Vec<u8>) -> TensorProto {
    let dims = dims.into_iter().map(|size| size as i64).collect();
    TensorProto { name: Some(name), data_type: Some(kind as i32), dims, raw_data: Some(bytes), ..TensorProto::default() }
}

/// Inserts quantizers of the inputs of layers into the bodies, and dequantizes weights there, because
/// runtimes fuse only nodes of the same graph. `fresh` returns unique names.
pub(super) fn insert_quantizers(
    nodes: &mut Vec<NodeProto>,
    quantized: &[(BodyLayer, FakeQuantize)],
    signed: bool,
    weights: &BTreeMap<&str, IntegerWeight>,
    fresh: &mut dyn FnMut(String) -> String,
) -> Result<(), String> {
    let mut quantized: Vec<_> = quantized.iter().collect();
    // Nodes are inserted from the last position on, so that earlier ones remain valid.
    quantized.sort_by_key(|(layer, _)| std::cmp::Reverse(layer.position.order()));
    for (layer, by) in quantized {
        let lost = || format!("{} is not in the subgraph", layer.label);
        let body = body_at(nodes, &layer.position.within).ok_or_else(lost)?;
        let node = body.node.get_mut(layer.position.node).ok_or_else(lost)?;
        let [x, weight, ..] = node.input.as_mut_slice() else { return Err(lost()) };
        let [scale, zero_point, integers, value] = ["scale", "zero_point", "integers", "quantized"].map(|part| fresh(format!("{}/input/{part}", layer.weight)));
        let parameters = |first: &str| vec![first.to_owned(), scale.clone(), zero_point.clone()];
        let mut inserted =
            vec![node_of("QuantizeLinear", parameters(x), &integers, vec![]), node_of("DequantizeLinear", parameters(&integers), &value, vec![])];
        *x = value;
        let (kind, zero) = if signed { (DataType::Int8, by.zero_point) } else { (DataType::Uint8, by.zero_point.saturating_add(128)) };
        body.initializer.push(tensor(scale, DataType::Float, vec![], by.scale.to_le_bytes().to_vec()));
        body.initializer.push(tensor(zero_point, kind, vec![], zero.to_le_bytes().into_iter().take(1).collect()));
        if let Some(IntegerWeight { values, rank, scales, axis }) = weights.get(layer.weight.as_str()) {
            // For exact accumulation on x86 without VNNI, ONNX Runtime converts only integers and zero points
            // of the same graph, and replaces missing zero points by a scalar. The `Reshape` changes
            // nothing: its result, computed when the file is loaded, is a constant of the body.
            let [shape, local, zero_points] = ["shape", "local", "zero_points"].map(|part| fresh(format!("{}/{part}", layer.weight)));
            *weight = fresh(format!("{}/dequantized", layer.weight));
            let zeros = axis.map(|(_, count)| count);
            body.initializer.push(tensor(shape.clone(), DataType::Int64, vec![*rank], vec![0; rank.saturating_mul(8)]));
            body.initializer.push(tensor(zero_points.clone(), DataType::Int8, zeros.into_iter().collect(), vec![0; zeros.unwrap_or(1)]));
            let axis = axis.iter().map(|(axis, _)| AttributeProto::int("axis", *axis)).collect();
            inserted.push(node_of("Reshape", vec![values.clone(), shape], &local, vec![]));
            inserted.push(node_of("DequantizeLinear", vec![local, scales.clone(), zero_points], weight, axis));
        }
        let at = layer.position.node;
        body.node.splice(at..at, inserted);
    }
    // Transposed weights are not read any more.
    let is_weight = |input: &String| input.strip_suffix("/rows").is_some_and(|weight| weights.contains_key(weight));
    nodes.retain(|node| node.op_type() != "Transpose" || !node.input.iter().any(is_weight));
    Ok(())
}
