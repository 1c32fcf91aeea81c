//! Operators of older sets, spelled as newer ones have them.
//!
//! From opset 7 to 21, few operators mean something else under the same name, and most of those have an attribute that became an input.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::check::is_own;
use super::proto::{AttributeProto, DataType, NodeProto, TensorProto};

/// The oldest opset whose operators are known.
const OLDEST: i64 = 7;

/// Attributes that became inputs: operator, attribute, the opset from which on it is an input, which one.
const INPUTS: [(&str, &str, i64, usize); 20] = [
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
    ("Slice", "starts", 10, 1),
    ("Slice", "ends", 10, 2),
    ("Slice", "axes", 10, 3),
    ("Pad", "pads", 11, 1),
    ("Pad", "value", 11, 2),
    ("Clip", "min", 11, 1),
    ("Clip", "max", 11, 2),
];

/// Operators that mean something else before an opset, in ways that are not translated.
const OTHERS: [(&str, i64); 9] = [
    ("Upsample", i64::MAX),
    ("Scan", 9),
    ("BatchNormalization", 9),
    ("TopK", 10),
    ("Resize", 11),
    ("RoiAlign", 16),
    ("GridSample", 20),
    ("DFT", 20),
    ("GroupNormalization", 21),
];

/// A node of one opset as nodes of another, the last of which it is; `fresh` makes names for constants.
///
/// # Errors
/// It would mean something else there.
pub(super) fn upgrade(node: NodeProto, from: i64, to: i64, fresh: &mut dyn FnMut(&str) -> String) -> Result<Vec<NodeProto>, String> {
    let between = |since: i64| from < since && to >= since;
    if !is_own(node.domain()) || from == to {
        return bodies(node, from, to, fresh).map(|node| vec![node]);
    }
    if from < OLDEST || from > to {
        return Err(format!("it is of opset {from}, and is to be written in opset {to}"));
    }
    if OTHERS.iter().any(|(op, since)| *op == node.op_type() && between((*since).min(to))) {
        return Err(format!("`{}` of opset {from} is another operator in opset {to}", node.op_type()));
    }
    let mut node = bodies(node, from, to, fresh)?;
    let mut made = Vec::new();
    let op = node.op_type().to_owned();
    for (_, attribute, _, input) in INPUTS.iter().filter(|(name, _, since, _)| *name == op && between(*since)) {
        let Some(place) = node.attribute.iter().position(|given| given.name() == *attribute) else { continue };
        let given = node.attribute.remove(place);
        let name = fresh(&format!("{}/{attribute}", node.output.first().map_or("", String::as_str)));
        made.push(constant(&given, name.clone()));
        let wanted = input.saturating_add(1).max(node.input.len());
        node.input.resize(wanted, String::new());
        if let Some(slot) = node.input.get_mut(*input) {
            *slot = name;
        }
    }
    let int = |node: &NodeProto, name: &str| node.attribute.iter().find(|attribute| attribute.name() == name).and_then(|attribute| attribute.i);
    match node.op_type() {
        // Before, all axes from one on were one; of the last axis that is the same.
        "Softmax" | "LogSoftmax" | "Hardmax" if between(13) && int(&node, "axis") != Some(-1) => {
            let axis = int(&node, "axis").unwrap_or(1);
            return Ok(over_several_axes(node, axis, fresh));
        }
        "Dropout" if between(12) => node.attribute.retain(|attribute| attribute.name() != "ratio"),
        "Scatter" => node.op_type = Some("ScatterElements".into()),
        "Split" if between(18) && node.input.len() < 2 && int(&node, "num_outputs").is_none() => {
            node.attribute.push(AttributeProto::int("num_outputs", i64::try_from(node.output.len()).unwrap_or(i64::MAX)));
        }
        _ => {}
    }
    made.push(node);
    Ok(made)
}

/// A softmax over all axes from one on, as of a matrix whose rows hold these axes.
fn over_several_axes(node: NodeProto, axis: i64, fresh: &mut dyn FnMut(&str) -> String) -> Vec<NodeProto> {
    let (input, output) = (node.input.first().cloned().unwrap_or_default(), node.output.first().cloned().unwrap_or_default());
    let [sizes, rows, result] = ["sizes", "rows", "result"].map(|part| fresh(&format!("{output}/{part}")));
    let made = |op: &str, input: &[&String], output: &String, attribute: Vec<AttributeProto>| {
        let input = input.iter().map(|name| (*name).clone()).collect();
        NodeProto { op_type: Some(op.into()), input, output: vec![output.clone()], attribute, ..NodeProto::default() }
    };
    vec![
        made("Shape", &[&input], &sizes, Vec::new()),
        made("Flatten", &[&input], &rows, vec![AttributeProto::int("axis", axis)]),
        made(node.op_type(), &[&rows], &result, vec![AttributeProto::int("axis", -1)]),
        NodeProto { name: node.name.clone(), ..made("Reshape", &[&result, &sizes], &output, Vec::new()) },
    ]
}

/// The same for the nodes of its bodies.
fn bodies(mut node: NodeProto, from: i64, to: i64, fresh: &mut dyn FnMut(&str) -> String) -> Result<NodeProto, String> {
    for body in node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs)) {
        let mut nodes = Vec::with_capacity(body.node.len());
        for inner in std::mem::take(&mut body.node) {
            nodes.extend(upgrade(inner, from, to, fresh)?);
        }
        body.node = nodes;
    }
    Ok(node)
}

/// What an attribute holds, as a constant.
fn constant(attribute: &AttributeProto, name: String) -> NodeProto {
    let (data_type, dims, bytes) = match attribute.f {
        Some(value) => (DataType::Float, Vec::new(), value.to_le_bytes().to_vec()),
        None => {
            let count = i64::try_from(attribute.ints.len()).unwrap_or(i64::MAX);
            (DataType::Int64, vec![count], attribute.ints.iter().flat_map(|value| value.to_le_bytes()).collect())
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

    fn said(node: NodeProto, from: i64, to: i64) -> Result<Vec<NodeProto>, String> {
        upgrade(node, from, to, &mut str::to_owned)
    }

    #[test]
    fn attributes_become_inputs_from_their_opset_on() {
        let squeeze = || node("Unsqueeze", vec![AttributeProto::ints("axes", [1, 2])]);
        let nodes = said(squeeze(), 11, 17).unwrap();
        assert_eq!(nodes.iter().map(|node| node.op_type()).collect::<Vec<_>>(), ["Constant", "Unsqueeze"]);
        assert_eq!((nodes[1].input.as_slice(), nodes[1].attribute.len()), (&["x".to_owned(), "y/axes".to_owned()][..], 0));
        assert_eq!(said(squeeze(), 11, 12).unwrap(), [squeeze()]);
        let clip = said(node("Clip", vec![AttributeProto::float("max", 6.0)]), 9, 17).unwrap();
        assert_eq!(clip[1].input, ["x", "", "y/max"]);
        let split = said(node("Split", vec![AttributeProto::int("axis", 1)]), 13, 18).unwrap();
        assert_eq!(split[0].attribute.last().unwrap(), &AttributeProto::int("num_outputs", 1));
    }

    #[test]
    fn a_softmax_over_several_axes_is_one_over_rows() {
        let nodes = said(node("LogSoftmax", vec![AttributeProto::int("axis", 2)]), 11, 17).unwrap();
        assert_eq!(nodes.iter().map(|node| node.op_type()).collect::<Vec<_>>(), ["Shape", "Flatten", "LogSoftmax", "Reshape"]);
        assert_eq!((&nodes[1].attribute[0], &nodes[2].attribute[0]), (&AttributeProto::int("axis", 2), &AttributeProto::int("axis", -1)));
        assert_eq!((nodes[3].input.as_slice(), nodes[3].output.as_slice()), (&["y/result".to_owned(), "y/sizes".to_owned()][..], &["y".to_owned()][..]));
        assert_eq!(said(node("Softmax", vec![]), 11, 17).unwrap()[1].attribute, [AttributeProto::int("axis", 1)]);
        assert_eq!(said(node("Softmax", vec![]), 11, 12).unwrap(), [node("Softmax", vec![])]);
    }

    #[test]
    fn what_would_mean_something_else_is_refused() {
        assert!(said(node("Softmax", vec![AttributeProto::int("axis", -1)]), 11, 17).is_ok());
        assert!(said(node("Resize", vec![]), 10, 17).unwrap_err().contains("another operator"));
        assert!(said(node("Resize", vec![]), 11, 17).is_ok());
        assert!(said(node("Upsample", vec![]), 9, 17).is_err() && said(node("Relu", vec![]), 6, 17).is_err() && said(node("Relu", vec![]), 18, 17).is_err());
        let other = NodeProto { domain: Some("com.microsoft".into()), ..node("Softmax", vec![]) };
        assert_eq!(said(other.clone(), 6, 17).unwrap(), [other]);
    }
}
