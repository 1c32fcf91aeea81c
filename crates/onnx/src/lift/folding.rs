//! Folding of nodes that depend only on constants, with limits on their size.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::check::{self, label};
use super::super::elements;
use super::super::initializer_roles::int;
use super::super::opaque_subgraph::RANDOM;
use super::super::proto::NodeProto;
use super::numbers::{self, Number, Numbers};
use super::opaque::constant;
use super::{Lift, LiftedValue};
use crate::ir::{Dim, ValueId};

/// Maximum number of elements that the nodes of a file may compute from constants: 1 GiB of floats.
const MAX_ELEMENTS: u64 = 1 << 28;

impl<'f> Lift<'f> {
    /// Folds a node that depends only on constants. ONNX Runtime computes the value if it is a few
    /// integers. Fails if the result is too large.
    pub(super) fn fold(&mut self, node: &'f NodeProto) -> Result<Option<LiftedValue>, String> {
        let [name] = node.output.as_slice() else { return Ok(None) };
        let constant = |name: &&str| match self.lifted.get(name) {
            Some(LiftedValue::Numbers(numbers)) => numbers.all().is_some(),
            Some(LiftedValue::Constant | LiftedValue::Folded) => true,
            Some(_) => false,
            None => self.initializers.contains_key(name),
        };
        let reads = check::reads(node);
        // The limit applies only to values that depend on nothing but constants.
        if reads.is_empty() || !reads.iter().all(|name| self.from_constants.contains(name) || constant(name)) {
            return Ok(None);
        }
        let folds = reads.iter().all(|name| constant(name) && !self.is_parameter(name)) && !RANDOM.contains(&node.op_type());
        self.from_constants.insert(name);
        self.check_growth(node, name, folds)?;
        if !folds {
            return Ok(None);
        }
        let Some(cone) = self.cone(name, true).ok().filter(|cone| cone.values.is_empty() && cone.weights.is_empty()) else { return Ok(None) };
        let Ok(subgraph) = self.load_subgraph(&cone, Vec::new(), Vec::new(), &[], name, false) else { return Ok(None) };
        // Larger constants are computed by their consumers.
        if self.folded_sizes.get(name.as_str()).is_some_and(|sizes| product(sizes) > numbers::MAX_TRACKED as u64) {
            return Ok(Some(LiftedValue::Folded));
        }
        Ok(Some(subgraph.numbers().and_then(|(values, vector)| Numbers::new(&values, vector)).map_or(LiftedValue::Folded, LiftedValue::Numbers)))
    }

    /// Rejects a node whose output exceeds the limit for all sizes of open dimensions, even if it
    /// depends on inputs.
    pub(super) fn check_min_elements(&mut self, node: &'f NodeProto, name: &'f str) -> Result<(), String> {
        let input = |at: usize| node.input.get(at).map_or("", String::as_str);
        let numbers = |at: usize| {
            let each = numbers::lookup(self, input(at)).map(|numbers| numbers.each()).unwrap_or_default();
            each.iter().filter_map(Number::constant).fold(1u64, |all, number| all.saturating_mul(u64::try_from(number).unwrap_or(1)))
        };
        let before = self.min_elements_of(input(0));
        let min_elements = match node.op_type() {
            "ConstantOfShape" => numbers(0),
            "Expand" => numbers(1).max(if numbers(1) == 0 { 0 } else { before }),
            "Tile" => before.saturating_mul(numbers(1)),
            "Concat" => node.input.iter().fold(0u64, |all, name| all.saturating_add(self.min_elements_of(name))),
            op if SAME_SHAPE.contains(&op) => before,
            op if BROADCAST.contains(&op) => node.input.iter().map(|name| self.min_elements_of(name)).max().unwrap_or(1),
            _ => return Ok(()),
        };
        if min_elements > MAX_ELEMENTS && GROWING.contains(&node.op_type()) && min_elements > before {
            let reason = format!("{} creates at least {min_elements} elements, which exceeds the limit of {MAX_ELEMENTS}", label(node));
            self.broken.insert(name, reason.clone());
            self.refused.insert(name, reason.clone());
            return Err(reason);
        }
        self.min_elements.insert(name, min_elements);
        Ok(())
    }

    pub(super) fn min_elements_of(&self, name: &str) -> u64 {
        let open = |id: ValueId| self.builder.ty(id).shape.iter().filter_map(Dim::fixed).fold(1u64, |all, size| all.saturating_mul(size as u64));
        match (self.min_elements.get(name), self.lifted.get(name)) {
            (Some(min_elements), _) => *min_elements,
            (None, Some(LiftedValue::Value(id))) => open(*id),
            _ => 1,
        }
    }

    /// Rejects a node that expands constants beyond the limit, and records its output shape. `folds`:
    /// the output counts towards the limit of the file.
    fn check_growth(&mut self, node: &'f NodeProto, name: &'f str, folds: bool) -> Result<(), String> {
        let Some(sizes) = self.output_sizes(node) else { return Ok(()) };
        let count = product(&sizes);
        let larger = |name: &&str| self.sizes(name).is_none_or(|sizes| product(&sizes) < count);
        let grows = (GROWING.contains(&node.op_type()) || BROADCAST.contains(&node.op_type())) && check::reads(node).iter().all(larger);
        let all = self.folded_elements.saturating_add(if folds && grows { count } else { 0 });
        if grows && (count > MAX_ELEMENTS || all > MAX_ELEMENTS) {
            let what = if count > MAX_ELEMENTS { format!("{count} elements") } else { format!("{all} elements in total with other folded constants") };
            let reason = format!("{} creates {what}, which exceeds the limit of {MAX_ELEMENTS}", label(node));
            // It cannot be a part of an opaque subgraph either.
            self.broken.insert(name, reason.clone());
            self.refused.insert(name, reason.clone());
            return Err(reason);
        }
        self.folded_elements = all;
        self.folded_sizes.insert(name, sizes);
        Ok(())
    }

    /// Shape of a value, if it is known.
    fn sizes(&self, name: &str) -> Option<Vec<u64>> {
        if let Some(sizes) = self.folded_sizes.get(name) {
            return Some(sizes.clone());
        }
        if let Some(numbers) = numbers::lookup(self, name) {
            let (count, vector) = (numbers.each().len() as u64, numbers.constants().is_none_or(|(_, vector)| vector));
            return Some(if vector { vec![count] } else { Vec::new() });
        }
        if let Some(LiftedValue::Value(id)) = self.lifted.get(name) {
            return self.builder.ty(*id).shape.iter().map(|size| size.fixed().map(|size| size as u64)).collect();
        }
        let node_constant = || self.producers.get(name).and_then(|(_, node)| constant(node));
        let (sizes, _) = elements::shape(self.initializers.get(name).copied().or_else(node_constant)?).ok()?;
        Some(sizes.into_iter().map(|size| size as u64).collect())
    }

    /// Output shape of a node, if it follows from input shapes and known integers.
    fn output_sizes(&self, node: &NodeProto) -> Option<Vec<u64>> {
        let input = |at: usize| node.input.get(at).map_or("", String::as_str);
        let sizes = |at: usize| self.sizes(input(at));
        let numbers = |at: usize| numbers::lookup(self, input(at)).and_then(|numbers| numbers.all());
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
                let (sizes, pads) =
                    (sizes(0)?, if node.input.len() > 1 { numbers(1)? } else { node.attribute.iter().find(|a| a.name() == "pads")?.ints.clone() });
                let more = |axis: usize| {
                    [axis, axis.saturating_add(sizes.len())].iter().filter_map(|at| pads.get(*at)).fold(0i64, |sum, pad| sum.saturating_add(*pad))
                };
                Some(sizes.iter().enumerate().map(|(axis, size)| size.saturating_add_signed(more(axis))).collect())
            }
            "OneHot" => Some(vec![product(&sizes(0)?), u64::try_from(*numbers(1)?.first()?).unwrap_or(0)]),
            "Resize" | "Upsample" => {
                if let Some(sizes) = numbers(3) {
                    return Some(unsigned(sizes));
                }
                let name = if node.input.len() == 2 { input(1) } else { input(2) };
                let scales = self.weight(name).filter(|weight| weight.elements() <= 8)?.floats(name).ok()?;
                Some(sizes(0)?.iter().zip(scales).map(|(size, scale)| (*size as f64 * f64::from(scale)) as u64).collect())
            }
            "Gather" => {
                let (of, at) = (sizes(0)?, sizes(1)?);
                let axis = int(node, "axis", 0);
                let axis = usize::try_from(if axis < 0 { axis.saturating_add(i64::try_from(of.len()).ok()?) } else { axis }).ok()?;
                let rest = of.iter().enumerate().filter(|(place, _)| *place != axis).map(|(_, size)| *size);
                Some(at.into_iter().chain(rest).collect())
            }
            "MatMul" => {
                let (a, b) = (sizes(0)?, sizes(1)?);
                let batches = |sizes: &[u64]| sizes.iter().rev().skip(2).rev().copied().collect::<Vec<u64>>();
                let rows = a.iter().rev().nth(1);
                let columns = b.last().filter(|_| b.len() > 1);
                Some(broadcast(&batches(&a), &batches(&b)).into_iter().chain(rows.copied()).chain(columns.copied()).collect())
            }
            "Concat" => {
                let all: Option<Vec<u64>> = (0..node.input.len()).map(|at| sizes(at).map(|sizes| product(&sizes))).collect();
                Some(vec![all?.into_iter().fold(0, u64::saturating_add)])
            }
            op if BROADCAST.contains(&op) => {
                let all: Option<Vec<Vec<u64>>> = (0..node.input.len()).map(sizes).collect();
                all?.into_iter().reduce(|a, b| broadcast(&a, &b))
            }
            op if SAME_SHAPE.contains(&op) => sizes(0),
            "Flatten" => Some(vec![product(&sizes(0)?)]),
            _ => self.rearranged_sizes(node),
        }
    }

    /// Output shape of a node that only rearranges elements.
    fn rearranged_sizes(&self, node: &NodeProto) -> Option<Vec<u64>> {
        let first = self.sizes(node.input.first()?)?;
        let count = product(&first);
        let given = |name: &str, at: usize| {
            let attribute = node.attribute.iter().find(|attribute| attribute.name() == name).map(|attribute| attribute.ints.clone());
            attribute.or_else(|| numbers::lookup(self, node.input.get(at)?).and_then(|numbers| numbers.all()))
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
}

/// Operators whose outputs can be larger than their inputs.
const GROWING: [&str; 11] = ["ConstantOfShape", "Concat", "Expand", "Tile", "Range", "Pad", "OneHot", "Resize", "Upsample", "Gather", "MatMul"];
/// Operators that broadcast their inputs.
const BROADCAST: [&str; 15] = ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Where", "Equal", "Greater", "Less", "And", "Or"];
/// Operators whose outputs have the shape of the first input.
const SAME_SHAPE: [&str; 17] =
    ["Identity", "Cast", "Neg", "Abs", "Sqrt", "Exp", "Log", "Reciprocal", "Floor", "Ceil", "Round", "Not", "Sin", "Cos", "Clip", "Softmax", "CumSum"];

/// Number of elements of a shape.
fn product(sizes: &[u64]) -> u64 {
    sizes.iter().fold(1, |count, size| count.saturating_mul(*size))
}

/// Broadcasts two shapes.
fn broadcast(a: &[u64], b: &[u64]) -> Vec<u64> {
    let rank = a.len().max(b.len());
    let size = |sizes: &[u64], axis: usize| axis.checked_sub(rank.saturating_sub(sizes.len())).and_then(|axis| sizes.get(axis)).copied().unwrap_or(1);
    (0..rank).map(|axis| size(a, axis).max(size(b, axis))).collect()
}
