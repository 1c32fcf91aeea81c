//! Mixtures of experts. An expert processes only the rows of its tokens, unless other nodes read its
//! intermediate values.

use std::collections::BTreeMap;

use super::super::proto::{AttributeProto, DataType};
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{Combine, Dispatch, ExpertGroups, Op, Route, Slice};
use crate::ir::{Graph, Node, ValueId};

pub(super) fn route(op: &Route, n: &mut Lowering) -> Result<()> {
    let (x, top, axis) = (n.wide(&n.input(0))?, n.ints(&[op.top as i64]), || vec![AttributeProto::int("axis", -1)]);
    let probabilities = if op.sigmoid { n.emit("Sigmoid", "scores", &[&x], vec![]) } else { n.emit("Softmax", "probabilities", &[&x], axis()) };
    let biased = n.inputs() > 1;
    let mut candidates = probabilities.clone();
    if biased {
        let bias = n.wide(&n.input(1))?;
        candidates = n.emit("Add", "biased", &[&candidates, &bias], vec![]);
    }
    if let Some(groups) = &op.groups {
        candidates = mask_groups(groups, &candidates, biased, n)?;
    }
    let [mut weights, experts] = n.emit_many("TopK", ["weights", "experts"], &[&candidates, &top], axis());
    if biased {
        weights = n.emit("GatherElements", "unbiased", &[&probabilities, &experts], axis());
    }
    if op.normalised {
        let sum = n.reduce("ReduceSum", "sum", &weights, -1, true);
        weights = n.emit("Div", "parts", &[&weights, &sum], vec![]);
    }
    if op.scale != 1.0 {
        let scale = n.float_wide(op.scale);
        weights = n.emit("Mul", "scaled", &[&weights, &scale], vec![]);
    }
    let zero = n.float_wide(0.0);
    let zeros = n.emit("Mul", "zeros", &[&probabilities, &zero], vec![]);
    n.finish_wide("ScatterElements", &[&zeros, &experts, &weights], axis());
    Ok(())
}

/// Scores of experts; outside of the selected groups zero, or if they have a bias and can be negative, the
/// lowest number.
fn mask_groups(groups: &ExpertGroups, scores: &str, biased: bool, n: &mut Lowering) -> Result<String> {
    let (axis, top, each) = (|| vec![AttributeProto::int("axis", -1)], n.ints(&[groups.top as i64]), n.width(0)? / groups.count.max(1) as i64);
    // Leading axes are copied.
    let leading = n.ty(0)?.shape.len().saturating_sub(1);
    let [apart, together] = [vec![groups.count as i64, each], vec![n.width(0)?]].map(|last| [vec![0; leading], last].concat());
    let (apart, together, last) = (n.ints(&apart), n.ints(&together), n.ints(&[-1]));
    let by_group = n.emit("Reshape", "by_group", &[scores, &apart], vec![]);
    let best = if groups.pairs {
        let two = n.ints(&[2]);
        let [highest, _] = n.emit_many("TopK", ["two_highest", "two_experts"], &[&by_group, &two], axis());
        n.reduce("ReduceSum", "best", &highest, -1, false)
    } else {
        n.reduce("ReduceMax", "best", &by_group, -1, false)
    };
    let [scores, numbers] = n.emit_many("TopK", ["group_scores", "groups"], &[&best, &top], axis());
    let (zero, one) = (n.float_wide(0.0), n.float_wide(1.0));
    let zeros = n.emit("Mul", "no_groups", &[&best, &zero], vec![]);
    let ones = n.emit("Mul", "no_scores", &[&scores, &zero], vec![]);
    let ones = n.emit("Add", "ones", &[&ones, &one], vec![]);
    let seen = n.emit("ScatterElements", "seen_groups", &[&zeros, &numbers, &ones], axis());
    let seen = n.emit("Unsqueeze", "seen_columns", &[&seen, &last], vec![]);
    let kept = if biased {
        let (seen, least) = (n.cast("seen_by_group", &seen, DataType::Bool), n.float_wide(f64::from(f32::MIN)));
        n.emit("Where", "candidates_by_group", &[&seen, &by_group, &least], vec![])
    } else {
        n.emit("Mul", "seen_by_group", &[&by_group, &seen], vec![])
    };
    Ok(n.emit("Reshape", "candidates", &[&kept, &together], vec![]))
}

pub(super) fn dispatch(op: &Dispatch, n: &mut Lowering) -> Result<()> {
    let (x, weights) = (n.input(0), n.input(1));
    let combine = n.node().and_then(|node| combine_node(n.graph, *node.inputs.get(1)?));
    if combine.is_some_and(|combine| is_row_wise(n, combine, op.expert)) {
        let tokens = tokens(op.expert, &weights, n)?;
        if op.weighted {
            let (rows, weight) = (n.emit("GatherND", "rows", &[&x, &tokens], vec![]), weight_of(op.expert, &weights, &tokens, n)?);
            n.finish("Mul", &[&rows, &weight], vec![]);
        } else {
            n.finish("GatherND", &[&x, &tokens], vec![]);
        }
        return Ok(());
    }
    let (last, zero) = (n.ints(&[-1]), n.float(0.0));
    if op.weighted {
        let weight = column(op.expert, &weights, n)?;
        let weight = n.emit("Unsqueeze", "weight_column", &[&weight, &last], vec![]);
        n.finish("Mul", &[&x, &weight], vec![]);
        return Ok(());
    }
    let is_routed = is_routed(op.expert, &weights, n)?;
    let is_routed = n.emit("Unsqueeze", "sees", &[&is_routed, &last], vec![]);
    n.finish("Where", &[&is_routed, &x, &zero], vec![]);
    Ok(())
}

/// The routing weights of an expert for its tokens, as a column.
fn weight_of(expert: usize, weights: &str, tokens: &str, n: &mut Lowering) -> Result<String> {
    let (column, last) = (column(expert, weights, n)?, n.ints(&[-1]));
    let weight = n.emit("GatherND", "weight", &[&column, tokens], vec![]);
    Ok(n.emit("Unsqueeze", "weight_column", &[&weight, &last], vec![]))
}

pub(super) fn combine(op: Combine, n: &mut Lowering) -> Result<()> {
    let (weights, width) = (n.input(0), n.ints(&[n.width(1)?]));
    let leading = n.ty(0)?.shape.len().saturating_sub(1) as i64;
    let attributes = vec![AttributeProto::int("start", 0), AttributeProto::int("end", leading)];
    let shape = n.emit("Shape", "tokens", &[&weights], attributes);
    let shape = n.emit("Concat", "shape", &[&shape, &width], vec![AttributeProto::int("axis", 0)]);
    let (zero, last) = (n.float(0.0), n.ints(&[-1]));
    let mut sum = n.emit("Expand", "zeros", &[&zero, &shape], vec![]);
    for expert in 0..n.inputs().saturating_sub(1) {
        let values = n.input(expert + 1);
        if n.node().is_some_and(|node| is_row_wise(n, node, expert)) {
            let tokens = tokens(expert, &weights, n)?;
            let part = if op.plain {
                values
            } else {
                let weight = weight_of(expert, &weights, &tokens, n)?;
                n.emit("Mul", "part", &[&values, &weight], vec![])
            };
            let before = n.emit("GatherND", "before", &[&sum, &tokens], vec![]);
            let rows = n.emit("Add", "rows", &[&before, &part], vec![]);
            sum = n.emit("ScatterND", "sum", &[&sum, &tokens, &rows], vec![]);
        } else {
            let part = if op.plain {
                let is_routed = is_routed(expert, &weights, n)?;
                let is_routed = n.emit("Unsqueeze", "sees", &[&is_routed, &last], vec![]);
                n.emit("Where", "part", &[&is_routed, &values, &zero], vec![])
            } else {
                let weight = column(expert, &weights, n)?;
                let weight = n.emit("Unsqueeze", "weight_column", &[&weight, &last], vec![]);
                n.emit("Mul", "part", &[&values, &weight], vec![])
            };
            sum = n.emit("Add", "sum", &[&sum, &part], vec![]);
        }
    }
    n.finish("Identity", &[&sum], vec![]);
    Ok(())
}

/// The routing weights of one expert, without the expert axis.
fn column(expert: usize, weights: &str, n: &mut Lowering) -> Result<String> {
    n.share(&format!("{weights}/of_{expert}|"), |n| {
        let number = n.int(expert as i64);
        Ok(n.emit("Gather", "value", &[weights, &number], vec![AttributeProto::int("axis", -1)]))
    })
}

/// Whether each token is routed to an expert.
fn is_routed(expert: usize, weights: &str, n: &mut Lowering) -> Result<String> {
    let column = column(expert, weights, n)?;
    n.share(&format!("{weights}/sees_{expert}|"), |n| Ok(n.cast("value", &column, DataType::Bool)))
}

/// Indices of the tokens that are routed to an expert, `[tokens, axes]`.
fn tokens(expert: usize, weights: &str, n: &mut Lowering) -> Result<String> {
    let is_routed = is_routed(expert, weights, n)?;
    n.share(&format!("{weights}/tokens_of_{expert}|"), |n| {
        let places = n.emit("NonZero", "axes", &[&is_routed], vec![]);
        Ok(n.emit("Transpose", "value", &[&places], vec![AttributeProto::ints("perm", [1, 0])]))
    })
}

/// The node that combines expert outputs with these routing weights.
fn combine_node(graph: &Graph, weights: ValueId) -> Option<&Node> {
    graph.nodes().iter().find(|node| matches!(node.op, Op::Combine(_)) && node.inputs.first() == Some(&weights))
}

/// Whether an expert computes each output row from one input row, and no other node reads its
/// intermediate values.
fn is_row_wise(n: &Lowering, combine: &Node, expert: usize) -> bool {
    let (graph, Some(weights)) = (n.graph, combine.inputs.first()) else { return false };
    let Some(output) = combine.inputs.get(expert + 1) else { return false };
    let mut reads: BTreeMap<ValueId, usize> = BTreeMap::from([(*output, 1)]);
    let mut open = vec![*output];
    while let Some(id) = open.pop() {
        let Some(node) = graph.producer(id) else { return false };
        let data = match &node.op {
            Op::Dispatch(op) if op.expert == expert && node.inputs.get(1) == Some(weights) => continue,
            Op::Linear(_) | Op::RmsNorm(_) | Op::LearnedFakeQuantize(_) => 1,
            Op::FakeQuantize(_) | Op::Clip(_) | Op::Scale(_) | Op::Slice(Slice { axis: -1, .. }) => 1,
            Op::Mul(_) | Op::Add(_) => 2,
            op if op.activation().is_some() => 1,
            _ => return false,
        };
        for input in node.inputs.iter().take(data) {
            let count = reads.entry(*input).or_default();
            *count += 1;
            if *count == 1 {
                open.push(*input);
            }
        }
    }
    reads.iter().all(|(id, count)| n.reads(*id) == *count && !graph.is_output(*id))
}
