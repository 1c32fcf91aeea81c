//! Shapes of values that nodes compute from constants.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::initializer_roles::{int, text};
use super::numbers::KnownValues;
use super::proto::NodeProto;

/// Operators whose outputs can be larger than their inputs.
pub(super) const GROWING: [&str; 14] =
    ["ConstantOfShape", "Concat", "Einsum", "Expand", "Tile", "Range", "Pad", "OneHot", "Resize", "Upsample", "Gather", "MatMul", "MatMulInteger", "Gemm"];
/// Operators that broadcast their inputs.
pub(super) const BROADCAST: [&str; 19] = [
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Mod",
    "Max",
    "Min",
    "Sum",
    "Mean",
    "Where",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "And",
    "Or",
    "Xor",
];
/// Operators whose first output has the shape of the first input.
pub(super) const SAME_SHAPE: [&str; 35] = [
    "Identity",
    "Cast",
    "Neg",
    "Abs",
    "Sqrt",
    "Exp",
    "Log",
    "Reciprocal",
    "Floor",
    "Ceil",
    "Round",
    "Sign",
    "Not",
    "Sin",
    "Cos",
    "Tan",
    "Atan",
    "Clip",
    "Softmax",
    "LogSoftmax",
    "CumSum",
    "Tanh",
    "Erf",
    "Sigmoid",
    "Relu",
    "Gelu",
    "IsNaN",
    "IsInf",
    "Trilu",
    "BitwiseNot",
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "LayerNormalization",
    "InstanceNormalization",
];

/// Output shape of a node, if it follows from input shapes and known integers.
pub(super) fn output_sizes(known: &impl KnownValues, node: &NodeProto) -> Option<Vec<u64>> {
    let input = |at: usize| node.input_name(at);
    let sizes = |at: usize| known.sizes(input(at));
    let numbers = |at: usize| known.numbers(input(at)).and_then(|numbers| numbers.all());
    let unsigned = |values: Vec<i64>| values.into_iter().map(|value| u64::try_from(value).unwrap_or(0)).collect::<Vec<u64>>();
    match node.op_type() {
        "ConstantOfShape" => numbers(0).map(unsigned),
        "Expand" => Some(broadcast(&sizes(0)?, &unsigned(numbers(1)?))),
        "Tile" => {
            let (sizes, times) = (sizes(0)?, unsigned(numbers(1)?));
            Some(sizes.iter().zip(times).map(|(size, times)| size.saturating_mul(times)).collect())
        }
        "Range" => {
            let one = |at: usize| numbers(at).and_then(|values| values.first().copied());
            let (start, end, step) = (one(0)?, one(1)?, one(2)?);
            Some(vec![end.abs_diff(start).checked_div(step.unsigned_abs()).unwrap_or(0).saturating_add(1)])
        }
        // Padding of selected axes is not supported.
        "Pad" if !input(3).is_empty() => None,
        "Pad" => {
            let (sizes, pads) = (sizes(0)?, if node.input.len() > 1 { numbers(1)? } else { node.attribute.iter().find(|a| a.name() == "pads")?.ints.clone() });
            let more =
                |axis: usize| [axis, axis.saturating_add(sizes.len())].iter().filter_map(|at| pads.get(*at)).fold(0i64, |sum, pad| sum.saturating_add(*pad));
            Some(sizes.iter().enumerate().map(|(axis, size)| size.saturating_add_signed(more(axis))).collect())
        }
        "OneHot" => Some(vec![product(&sizes(0)?), u64::try_from(*numbers(1)?.first()?).unwrap_or(0)]),
        "Einsum" => einsum(&text(node, "equation")?, &(0..node.input.len()).map(sizes).collect::<Option<Vec<_>>>()?),
        "Resize" | "Upsample" => {
            if let Some(sizes) = numbers(3) {
                return Some(unsigned(sizes));
            }
            let name = if node.input.len() == 2 { input(1) } else { input(2) };
            Some(sizes(0)?.iter().zip(known.scales(name)?).map(|(size, scale)| (*size as f64 * f64::from(scale)) as u64).collect())
        }
        "Gather" => {
            let (of, at) = (sizes(0)?, sizes(1)?);
            let axis = axis(node, 0, of.len())?;
            let (before, after) = (of.get(..axis)?, of.get(axis.saturating_add(1)..)?);
            Some([before, &at, after].concat())
        }
        "MatMul" | "MatMulInteger" => {
            let (a, b) = (sizes(0)?, sizes(1)?);
            let batches = |sizes: &[u64]| sizes.iter().rev().skip(2).rev().copied().collect::<Vec<u64>>();
            let rows = a.iter().rev().nth(1);
            let columns = b.last().filter(|_| b.len() > 1);
            Some(broadcast(&batches(&a), &batches(&b)).into_iter().chain(rows.copied()).chain(columns.copied()).collect())
        }
        "Gemm" => {
            let side = |at: usize, transposed: &str, axis: usize| {
                sizes(at)?.get(if int(node, transposed, 0) == 0 { axis } else { 1usize.saturating_sub(axis) }).copied()
            };
            Some(vec![side(0, "transA", 0)?, side(1, "transB", 1)?])
        }
        "Concat" => {
            let all = (0..node.input.len()).map(sizes).collect::<Option<Vec<_>>>()?;
            let first = all.first()?;
            let axis = axis(node, 0, first.len())?;
            let along = all.iter().fold(0u64, |sum, sizes| sum.saturating_add(sizes.get(axis).copied().unwrap_or(1)));
            Some(first.iter().enumerate().map(|(place, size)| if place == axis { along } else { *size }).collect())
        }
        op if BROADCAST.contains(&op) => {
            let all: Option<Vec<Vec<u64>>> = (0..node.input.len()).map(sizes).collect();
            all?.into_iter().reduce(|a, b| broadcast(&a, &b))
        }
        op if SAME_SHAPE.contains(&op) => sizes(0),
        "Flatten" => {
            let sizes = sizes(0)?;
            let axis = axis(node, 1, sizes.len())?;
            Some(vec![product(sizes.get(..axis)?), product(sizes.get(axis..)?)])
        }
        _ => rearranged_sizes(known, node),
    }
}

/// Output shape of an `Einsum` without an ellipsis.
fn einsum(equation: &str, inputs: &[Vec<u64>]) -> Option<Vec<u64>> {
    let equation: String = equation.chars().filter(|letter| !letter.is_whitespace()).collect();
    let (terms, output) = equation.split_once("->")?;
    let labels = |term: &str| term.chars().map(|label| label.is_ascii_alphabetic().then_some(label)).collect::<Option<Vec<char>>>();
    let mut sizes: BTreeMap<char, u64> = BTreeMap::new();
    for (term, shape) in terms.split(',').zip(inputs) {
        sizes.extend(labels(term)?.into_iter().zip(shape.iter().copied()));
    }
    labels(output)?.iter().map(|label| sizes.get(label).copied()).collect()
}

/// The attribute `axis`, or `missing`, counted from the first axis.
fn axis(node: &NodeProto, missing: i64, rank: usize) -> Option<usize> {
    let axis = int(node, "axis", missing);
    usize::try_from(if axis < 0 { axis.saturating_add(i64::try_from(rank).ok()?) } else { axis }).ok()
}

/// Output shape of a node that only rearranges elements.
fn rearranged_sizes(known: &impl KnownValues, node: &NodeProto) -> Option<Vec<u64>> {
    let first = known.sizes(node.input.first()?)?;
    let count = product(&first);
    let given = |name: &str, at: usize| {
        let attribute = node.attribute.iter().find(|attribute| attribute.name() == name).map(|attribute| attribute.ints.clone());
        attribute.or_else(|| known.numbers(node.input.get(at)?).and_then(|numbers| numbers.all()))
    };
    let place = |at: i64, rank: usize| usize::try_from(if at < 0 { at.saturating_add(i64::try_from(rank).ok()?) } else { at }).ok();
    match node.op_type() {
        "Reshape" => {
            let target = given("shape", 1)?;
            let known = target.iter().enumerate().filter(|(_, size)| **size != -1);
            let known: Vec<(usize, u64)> =
                known.map(|(axis, size)| (axis, if *size == 0 { first.get(axis).copied().unwrap_or(1) } else { size.unsigned_abs() })).collect();
            let rest = count.checked_div(known.iter().fold(1u64, |count, (_, size)| count.saturating_mul(*size))).unwrap_or(0);
            Some((0..target.len()).map(|axis| known.iter().find(|(at, _)| *at == axis).map_or(rest, |(_, size)| *size)).collect())
        }
        "Unsqueeze" => {
            let axes = given("axes", 1)?;
            let rank = first.len().saturating_add(axes.len());
            let new: Vec<usize> = axes.into_iter().map(|axis| place(axis, rank)).collect::<Option<_>>()?;
            let mut old = first.into_iter();
            Some((0..rank).map_while(|axis| if new.contains(&axis) { Some(1) } else { old.next() }).collect())
        }
        "Squeeze" => {
            let gone = given("axes", 1).map(|axes| axes.into_iter().map(|axis| place(axis, first.len())).collect::<Option<Vec<_>>>());
            let gone = gone.unwrap_or_else(|| Some((0..first.len()).filter(|axis| first.get(*axis) == Some(&1)).collect()))?;
            Some(first.into_iter().enumerate().filter(|(axis, _)| !gone.contains(axis)).map(|(_, size)| size).collect())
        }
        "Transpose" => {
            let perm = given("perm", usize::MAX).unwrap_or_else(|| (0..first.len()).rev().filter_map(|axis| i64::try_from(axis).ok()).collect());
            perm.into_iter().map(|axis| first.get(usize::try_from(axis).ok()?).copied()).collect()
        }
        _ => None,
    }
}

/// Number of elements of a shape.
pub(super) fn product(sizes: &[u64]) -> u64 {
    sizes.iter().fold(1, |count, size| count.saturating_mul(*size))
}

/// Broadcasts two shapes.
fn broadcast(a: &[u64], b: &[u64]) -> Vec<u64> {
    let rank = a.len().max(b.len());
    let size = |sizes: &[u64], axis: usize| axis.checked_sub(rank.saturating_sub(sizes.len())).and_then(|axis| sizes.get(axis)).copied().unwrap_or(1);
    (0..rank).map(|axis| size(a, axis).max(size(b, axis))).collect()
}
