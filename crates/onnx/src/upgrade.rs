//! Conversion of nodes to a newer opset.
//!
//! Between opsets 7 and 24, few operators change their meaning. Most of the others have attributes that
//! became inputs.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::check::{bodies_mut, is_own};
use super::proto::{AttributeProto, DataType, NodeProto, TensorProto};

/// The oldest supported opset.
const OLDEST: i64 = 7;

/// Attributes that became inputs: operator, attribute, first opset with the input, position of the
/// input.
const INPUTS: [(&str, &str, i64, usize); 21] = [
    ("Squeeze", "axes", 13, 1),
    ("Unsqueeze", "axes", 13, 1),
    ("Split", "split", 13, 1),
    ("ReduceSum", "axes", 13, 1),
    ("ReduceMean", "axes", 18, 1),
    ("ReduceMax", "axes", 18, 1),
    ("ReduceMin", "axes", 18, 1),
    ("ReduceProd", "axes", 18, 1),
    ("ReduceL1", "axes", 18, 1),
    ("ReduceL2", "axes", 18, 1),
    ("ReduceLogSum", "axes", 18, 1),
    ("ReduceLogSumExp", "axes", 18, 1),
    ("ReduceSumSquare", "axes", 18, 1),
    ("TopK", "k", 10, 1),
    ("Slice", "starts", 10, 1),
    ("Slice", "ends", 10, 2),
    ("Slice", "axes", 10, 3),
    ("Pad", "pads", 11, 1),
    ("Pad", "value", 11, 2),
    ("Clip", "min", 11, 1),
    ("Clip", "max", 11, 2),
];

/// Operators that have another meaning before an opset and cannot be converted.
const INCOMPATIBLE: [(&str, i64); 7] =
    [("Upsample", 10), ("Scan", 9), ("BatchNormalization", 9), ("Resize", 11), ("DFT", 20), ("GroupNormalization", 21), ("Attention", 24)];

/// Values of text attributes that were renamed: operator, attribute, first opset with the new value, old
/// value (empty for a missing attribute), new value.
const RENAMED: [(&str, &str, i64, &str, &str); 3] = [
    ("RoiAlign", "coordinate_transformation_mode", 16, "", "output_half_pixel"),
    ("GridSample", "mode", 20, "bilinear", "linear"),
    ("GridSample", "mode", 20, "bicubic", "cubic"),
];

/// Converts a node from one opset to another. The last node of the result replaces it. `fresh` returns
/// unique names for constants. Fails for operators that have another meaning there.
pub(super) fn upgrade(node: NodeProto, from: i64, to: i64, fresh: &mut dyn FnMut(&str) -> String) -> Result<Vec<NodeProto>, String> {
    let between = |since: i64| from < since && to >= since;
    if !is_own(node.domain()) || from == to {
        return upgrade_bodies(node, from, to, fresh).map(|node| vec![node]);
    }
    if from < OLDEST || from > to {
        return Err(format!("it has opset {from}, which cannot be converted to opset {to}"));
    }
    if INCOMPATIBLE.iter().any(|(op, since)| *op == node.op_type() && between(*since)) {
        return Err(format!("`{}` of opset {from} has another meaning in opset {to}", node.op_type()));
    }
    if node.op_type() == "BatchNormalization" && between(14) && node.output.iter().skip(1).any(|output| !output.is_empty()) {
        return Err(format!("`BatchNormalization` of opset {from} with outputs of a training has another meaning in opset {to}"));
    }
    let mut node = upgrade_bodies(node, from, to, fresh)?;
    let mut nodes = Vec::new();
    let op = node.op_type().to_owned();
    for (_, attribute, _, input) in INPUTS.iter().filter(|(name, _, since, _)| *name == op && between(*since)) {
        let Some(position) = node.attribute.iter().position(|given| given.name() == *attribute) else { continue };
        let given = node.attribute.remove(position);
        let name = fresh(&format!("{}/{attribute}", node.output.first().map_or("", String::as_str)));
        nodes.push(constant(&given, name.clone()));
        let wanted = input.saturating_add(1).max(node.input.len());
        node.input.resize(wanted, String::new());
        if let Some(slot) = node.input.get_mut(*input) {
            *slot = name;
        }
    }
    for (_, name, _, old, new) in RENAMED.iter().filter(|(name, _, since, ..)| *name == op && between(*since)) {
        match node.attribute.iter_mut().find(|attribute| attribute.name() == *name) {
            Some(attribute) if attribute.s() == old.as_bytes() => *attribute = AttributeProto::text(name, new),
            None if old.is_empty() => node.attribute.push(AttributeProto::text(name, new)),
            _ => {}
        }
    }
    let int = |node: &NodeProto, name: &str| node.attribute.iter().find(|attribute| attribute.name() == name).and_then(|attribute| attribute.i);
    match node.op_type() {
        // Before opset 13, softmax normalized over all axes from `axis` on. For the last axis, this is
        // the same.
        "Softmax" | "LogSoftmax" | "Hardmax" if between(13) && int(&node, "axis") != Some(-1) => {
            let axis = int(&node, "axis").unwrap_or(1);
            return Ok(softmax_over_flattened_axes(node, axis, fresh));
        }
        "Dropout" if between(12) => node.attribute.retain(|attribute| attribute.name() != "ratio"),
        "Scatter" => node.op_type = Some("ScatterElements".into()),
        "Split" if between(18) && node.input.len() < 2 && int(&node, "num_outputs").is_none() => {
            node.attribute.push(AttributeProto::int("num_outputs", i64::try_from(node.output.len()).unwrap_or(i64::MAX)));
        }
        _ => {}
    }
    nodes.push(node);
    Ok(nodes)
}

/// A softmax over all axes from `axis` on, as a softmax over the rows of a matrix.
fn softmax_over_flattened_axes(node: NodeProto, axis: i64, fresh: &mut dyn FnMut(&str) -> String) -> Vec<NodeProto> {
    let (input, output) = (node.input.first().cloned().unwrap_or_default(), node.output.first().cloned().unwrap_or_default());
    let [sizes, rows, result] = ["sizes", "rows", "result"].map(|part| fresh(&format!("{output}/{part}")));
    let node_of = |op: &str, input: &[&String], output: &String, attribute: Vec<AttributeProto>| {
        let input = input.iter().map(|name| (*name).clone()).collect();
        NodeProto { op_type: Some(op.into()), input, output: vec![output.clone()], attribute, ..NodeProto::default() }
    };
    vec![
        node_of("Shape", &[&input], &sizes, Vec::new()),
        node_of("Flatten", &[&input], &rows, vec![AttributeProto::int("axis", axis)]),
        node_of(node.op_type(), &[&rows], &result, vec![AttributeProto::int("axis", -1)]),
        NodeProto { name: node.name.clone(), ..node_of("Reshape", &[&result, &sizes], &output, Vec::new()) },
    ]
}

/// Upgrades the nodes in the bodies of a node.
fn upgrade_bodies(mut node: NodeProto, from: i64, to: i64, fresh: &mut dyn FnMut(&str) -> String) -> Result<NodeProto, String> {
    for body in bodies_mut(&mut node) {
        let mut nodes = Vec::with_capacity(body.node.len());
        for inner in std::mem::take(&mut body.node) {
            nodes.extend(upgrade(inner, from, to, fresh)?);
        }
        body.node = nodes;
    }
    Ok(node)
}

/// The value of an attribute as a `Constant` node.
fn constant(attribute: &AttributeProto, name: String) -> NodeProto {
    let (data_type, dims, bytes) = match attribute.f {
        Some(value) => (DataType::Float, Vec::new(), value.to_le_bytes().to_vec()),
        None => {
            let values: Vec<i64> = attribute.i.into_iter().chain(attribute.ints.iter().copied()).collect();
            (DataType::Int64, vec![i64::try_from(values.len()).unwrap_or(i64::MAX)], values.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
    };
    let tensor = TensorProto { data_type: Some(data_type as i32), dims, raw_data: Some(bytes), ..TensorProto::default() };
    NodeProto { op_type: Some("Constant".into()), output: vec![name], attribute: vec![AttributeProto::tensor("value", tensor)], ..NodeProto::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(op: &str, attributes: Vec<AttributeProto>) -> NodeProto {
        NodeProto { op_type: Some(op.into()), input: vec!["x".into()], output: vec!["y".into()], attribute: attributes, ..NodeProto::default() }
    }

    fn upgraded(node: NodeProto, from: i64, to: i64) -> Result<Vec<NodeProto>, String> {
        upgrade(node, from, to, &mut str::to_owned)
    }

    #[test]
    fn attributes_become_inputs() {
        let squeeze = || node("Unsqueeze", vec![AttributeProto::ints("axes", [1, 2])]);
        let nodes = upgraded(squeeze(), 11, 17).unwrap();
        assert_eq!(nodes.iter().map(|node| node.op_type()).collect::<Vec<_>>(), ["Constant", "Unsqueeze"]);
        assert_eq!((nodes[1].input.as_slice(), nodes[1].attribute.len()), (&["x".to_owned(), "y/axes".to_owned()][..], 0));
        assert_eq!(upgraded(squeeze(), 11, 12).unwrap(), [squeeze()]);
        let clip = upgraded(node("Clip", vec![AttributeProto::float("max", 6.0)]), 9, 17).unwrap();
        assert_eq!(clip[1].input, ["x", "", "y/max"]);
        let split = upgraded(node("Split", vec![AttributeProto::int("axis", 1)]), 13, 18).unwrap();
        assert_eq!(split[0].attribute.last().unwrap(), &AttributeProto::int("num_outputs", 1));
        let largest = upgraded(node("TopK", vec![AttributeProto::int("k", 3)]), 9, 17).unwrap();
        let k = largest[0].attribute[0].t.as_ref().unwrap();
        assert_eq!((k.dims.as_slice(), k.raw_data.as_deref(), largest[1].input[1].as_str()), (&[1][..], Some(&3i64.to_le_bytes()[..]), "y/k"));
    }

    #[test]
    fn a_softmax_over_several_axes_is_flattened() {
        let nodes = upgraded(node("LogSoftmax", vec![AttributeProto::int("axis", 2)]), 11, 17).unwrap();
        assert_eq!(nodes.iter().map(|node| node.op_type()).collect::<Vec<_>>(), ["Shape", "Flatten", "LogSoftmax", "Reshape"]);
        assert_eq!((&nodes[1].attribute[0], &nodes[2].attribute[0]), (&AttributeProto::int("axis", 2), &AttributeProto::int("axis", -1)));
        assert_eq!((nodes[3].input.as_slice(), nodes[3].output.as_slice()), (&["y/result".to_owned(), "y/sizes".to_owned()][..], &["y".to_owned()][..]));
        assert_eq!(upgraded(node("Softmax", vec![]), 11, 17).unwrap()[1].attribute, [AttributeProto::int("axis", 1)]);
        assert_eq!(upgraded(node("Softmax", vec![]), 11, 12).unwrap(), [node("Softmax", vec![])]);
    }

    #[test]
    fn renamed_values_of_attributes_are_converted() {
        let attributes = |op: &str, before: Vec<AttributeProto>, from: i64, to: i64| upgraded(node(op, before), from, to).unwrap()[0].attribute.clone();
        let mode = |value: &str| vec![AttributeProto::text("mode", value)];
        for (before, after) in [("bilinear", "linear"), ("bicubic", "cubic"), ("nearest", "nearest")] {
            assert_eq!(attributes("GridSample", mode(before), 16, 17), mode(before));
            assert_eq!(attributes("GridSample", mode(before), 16, 20), mode(after));
        }
        let pixels = vec![AttributeProto::text("coordinate_transformation_mode", "output_half_pixel")];
        assert_eq!(attributes("RoiAlign", vec![], 10, 17), pixels);
        assert_eq!(attributes("RoiAlign", vec![], 16, 17), []);
    }

    /// Each operator is refused only if its opset with another meaning is reached.
    #[test]
    fn operators_that_changed_their_meaning_are_refused() {
        for (op, from, same, other) in [("Attention", 23, 23, 24), ("GroupNormalization", 18, 20, 21), ("DFT", 17, 19, 20), ("Resize", 9, 10, 11)] {
            assert!(upgraded(node(op, vec![]), from, same).is_ok(), "{op}");
            assert!(upgraded(node(op, vec![]), from, other).unwrap_err().contains("another meaning"), "{op}");
        }
        assert!(upgraded(node("Softmax", vec![AttributeProto::int("axis", -1)]), 11, 17).is_ok());
        assert!(upgraded(node("Resize", vec![]), 10, 17).unwrap_err().contains("another meaning"));
        assert!(upgraded(node("Resize", vec![]), 11, 17).is_ok());
        assert!(
            upgraded(node("Upsample", vec![]), 9, 17).is_err()
                && upgraded(node("Relu", vec![]), 6, 17).is_err()
                && upgraded(node("Relu", vec![]), 18, 17).is_err()
        );
        let training = NodeProto { output: vec!["y".into(), "mean".into()], ..node("BatchNormalization", vec![]) };
        assert!(upgraded(training.clone(), 9, 17).unwrap_err().contains("another meaning"));
        assert!(upgraded(training.clone(), 9, 13).is_ok() && upgraded(training, 14, 17).is_ok());
        let other = NodeProto { domain: Some("com.microsoft".into()), ..node("Softmax", vec![]) };
        assert_eq!(upgraded(other.clone(), 6, 17).unwrap(), [other]);
    }
}
