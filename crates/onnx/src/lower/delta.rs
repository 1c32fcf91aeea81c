//! The gated delta rule and the state space recurrence as a loop over tokens, and decays.

use super::super::proto::{AttributeProto, DataType, GraphProto, NodeProto, TensorTypeProto, TypeProto, ValueInfoProto};
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{Decay, GatedDelta};

/// The body of a loop under construction.
struct Body<'n, 'g> {
    lowering: &'n mut Lowering<'g>,
    graph: GraphProto,
}

impl Body<'_, '_> {
    /// Adds a node, and returns the name of its value.
    fn add(&mut self, op: &str, part: &str, inputs: &[&str]) -> String {
        let name = self.lowering.fresh(format!("{}/{part}", self.lowering.output()));
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|input| (*input).to_owned()).collect(),
            output: vec![name.clone()],
            name: Some(name.clone()),
            op_type: Some(op.to_owned()),
            ..NodeProto::default()
        });
        name
    }

    /// Adds an input, and returns its name.
    fn input(&mut self, part: &str) -> String {
        let name = self.lowering.fresh(format!("{}/{part}", self.lowering.output()));
        self.graph.input.push(float_info(&name));
        name
    }
}

/// Declares a float value of any shape.
fn float_info(name: &str) -> ValueInfoProto {
    let tensor = TensorTypeProto { elem_type: Some(DataType::Float as i32), shape: None };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type: Some(tensor), ..TypeProto::default() }), ..ValueInfoProto::default() }
}

/// The decays of a gated delta network.
pub(super) fn decay(op: &Decay, n: &mut Lowering) -> Result<()> {
    let inputs: Vec<String> = (0..n.inputs()).map(|i| n.wide(&n.input(i))).collect::<Result<_>>()?;
    let [values, biases, rates] = [&inputs[0], &inputs[1], &inputs[2]];
    let shifted = n.emit("Add", "shifted", &[values, biases], vec![]);
    let mut step = n.emit("Softplus", "step", &[&shifted], vec![]);
    if op.has_limits() {
        let (min, max) = (n.float_wide(op.min), op.max.map(|max| n.float_wide(max)));
        let bounds = [Some(step.as_str()), Some(min.as_str()), max.as_deref()];
        step = n.emit("Clip", "limited", &bounds.into_iter().flatten().collect::<Vec<_>>(), vec![]);
    }
    let speed = n.emit("Exp", "speed", &[rates], vec![]);
    let opposite = n.emit("Neg", "rate", &[&speed], vec![]);
    n.finish_wide("Mul", &[&step, &opposite], vec![]);
    Ok(())
}

/// A `Scan` over tokens, whose state is that of all heads.
pub(super) fn gated_delta(op: &GatedDelta, n: &mut Lowering) -> Result<()> {
    let [groups, heads] = [n.fixed(0, 1)?, n.fixed(2, 1)?];
    let [width, out] = [n.fixed(0, 3)?, n.fixed(2, 3)?];
    let mut inputs: Vec<String> = (0..5).map(|i| n.wide(&n.input(i))).collect::<Result<_>>()?;
    if n.inputs() > 5 {
        let padded = super::layer::padding_rows(n, 5);
        let nothing = n.float_wide(0.0);
        for (x, part) in inputs.iter_mut().skip(3).zip(["decays", "rates"]) {
            *x = n.emit("Where", part, &[&padded, &nothing, x.as_str()], vec![]);
        }
    }
    if groups != heads {
        let (copies, axis) = (n.ints(&[1, 1, heads / groups.max(1), 1, 1]), n.ints(&[2]));
        let shape = n.ints(&[0, heads, -1, width]);
        for (x, part) in inputs.iter_mut().zip(["queries", "keys"]) {
            let apart = n.emit("Unsqueeze", "group", &[x.as_str(), &axis], vec![]);
            let copied = n.emit("Tile", "group_copies", &[&apart, &copies], vec![]);
            *x = n.emit("Reshape", part, &[&copied, &shape], vec![]);
        }
    }
    let sizes = n.ints(&[heads, width, out]);
    let batch = n.emit("Shape", "batch", &[&inputs[2]], vec![AttributeProto::int("start", 0), AttributeProto::int("end", 1)]);
    let shape = n.emit("Concat", "state_shape", &[&batch, &sizes], vec![AttributeProto::int("axis", 0)]);
    let start = n.emit("ConstantOfShape", "start", &[&shape], vec![]);
    let attributes = vec![
        AttributeProto::int("num_scan_inputs", 5),
        AttributeProto::ints("scan_input_axes", [2, 2, 2, 1, 1]),
        AttributeProto::ints("scan_output_axes", [2]),
        AttributeProto::graph("body", body(op, n)),
    ];
    let inputs: Vec<&str> = [start.as_str()].into_iter().chain(inputs.iter().map(String::as_str)).collect();
    let [_, rows] = n.emit_many("Scan", ["last", "rows"], &inputs, attributes);
    if (op.scale - 1.0).abs() < f64::EPSILON {
        n.finish_wide("Identity", &[&rows], vec![]);
    } else {
        let scale = n.float_wide(op.scale);
        n.finish_wide("Mul", &[&rows, &scale], vec![]);
    }
    Ok(())
}

/// One token: from the state, and the query, key, value, decay and rate of each head, to the new state and
/// the product of the query with it.
fn body(op: &GatedDelta, n: &mut Lowering) -> GraphProto {
    let [row, column, number] = [n.ints(&[2]), n.ints(&[3]), n.ints(&[2, 3])];
    let name = n.fresh(format!("{}/token", n.output()));
    let mut body = Body { lowering: n, graph: GraphProto { name: Some(name), ..GraphProto::default() } };
    let [state, query, key, value, decay, rate] = ["state", "query", "key", "value", "log_decay", "rate"].map(|part| body.input(part));
    let decay = body.add("Exp", "decay", &[&decay]);
    let decay = body.add("Unsqueeze", "decay_of_state", &[&decay, &number]);
    let decayed = body.add("Mul", "decayed", &[&state, &decay]);
    let mut value = body.add("Unsqueeze", "value_row", &[&value, &row]);
    if !op.additive {
        let key_row = body.add("Unsqueeze", "key_row", &[&key, &row]);
        let found = body.add("MatMul", "found", &[&key_row, &decayed]);
        value = body.add("Sub", "error", &[&value, &found]);
    }
    let rate = body.add("Unsqueeze", "rate_of_row", &[&rate, &number]);
    let change = body.add("Mul", "change", &[&value, &rate]);
    let key_column = body.add("Unsqueeze", "key_column", &[&key, &column]);
    let added = body.add("MatMul", "added", &[&key_column, &change]);
    let next = body.add("Add", "next", &[&decayed, &added]);
    let query = body.add("Unsqueeze", "query_row", &[&query, &row]);
    let read = body.add("MatMul", "read", &[&query, &next]);
    let read = body.add("Squeeze", "row", &[&read, &row]);
    let mut graph = body.graph;
    graph.output = vec![float_info(&next), float_info(&read)];
    graph
}
