//! Position ids that exporters store as a constant and slice to the sequence length.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::elements;
use super::super::numbers::{KnownValues, Number};
use super::super::proto::{DataType, NodeProto};
use super::opaque::constant;
use super::{Lift, LiftedValue};
use crate::ir::ops::{Positions, Reshape, Slice, TargetSize};
use crate::ir::{Dim, Element, ValueId};

/// Maximum number of position ids.
const MAX_POSITIONS: u64 = 1 << 20;

impl<'f> Lift<'f> {
    /// Lifts a `Slice` of the first elements of consecutive integers, `[n]` or `[1, n]`, as many as an
    /// input `[batch, sequence]` has columns. A longer input is an error when the positions are looked
    /// up.
    pub(super) fn positions(&mut self, node: &'f NodeProto, output: &str) -> Option<ValueId> {
        if node.op_type() != "Slice" {
            return None;
        }
        let input = |at: usize| node.input.get(at).map(String::as_str).filter(|name| !name.is_empty());
        let numbers = |at: usize| self.numbers(input(at)?).map(|numbers| numbers.each());
        let (rank, first, count) = self.consecutive(input(0)?)?;
        let axis = i64::try_from(rank.checked_sub(1)?).ok()?;
        let last = |axes: &[Number]| matches!(axes, [Number::Constant(at)] if *at == axis || *at == -1);
        let axes = if input(3).is_some() { numbers(3)? } else { vec![Number::Constant(0)] };
        let steps = if input(4).is_some() { numbers(4)? } else { vec![Number::Constant(1)] };
        let [end] = <[Number; 1]>::try_from(numbers(2)?).ok()?;
        if numbers(1)? != [Number::Constant(0)] || steps != [Number::Constant(1)] || !last(&axes) {
            return None;
        }
        let is_length = |size: &Dim| match (&end, size) {
            (Number::Size(end), size) => end == size,
            (Number::Constant(end), Dim::Fixed(size)) => i64::try_from(*size) == Ok(*end) && *size <= count,
            _ => false,
        };
        let graph = self.file.model.graph.as_ref()?;
        let tokens = graph.input.iter().find_map(|port| {
            let Some(LiftedValue::Value(id)) = self.lifted.get(port.name()) else { return None };
            let ty = self.builder.ty(*id);
            matches!(ty.shape.as_slice(), [_, sequence] if ty.element == Element::Int && is_length(sequence)).then_some(*id)
        })?;
        let row = Slice { start: 0, length: Some(1), axis: 0, ..Slice::default() };
        let row = self.builder.node(&format!("{output}/row"), row, &[tokens]).ok()?;
        let positions = Positions { padding: None, offset: first };
        if rank == 2 {
            return self.builder.node(output, positions, &[row]).ok();
        }
        let positions = self.builder.node(&format!("{output}/positions"), positions, &[row]).ok()?;
        self.builder.node(output, Reshape { shape: vec![TargetSize::Rest] }, &[positions]).ok()
    }

    /// Rank, first element and length of a constant of consecutive integers, which is `[n]` or `[1, n]`.
    fn consecutive(&self, name: &str) -> Option<(usize, i64, usize)> {
        let node_constant = || self.producers.get(name).and_then(|(_, node)| constant(node));
        let tensor = self.initializers.get(name).copied().or_else(node_constant)?;
        let (shape, count) = elements::shape(tensor).ok()?;
        if tensor.data_type() != DataType::Int64 || !(2..=MAX_POSITIONS).contains(&count) || !matches!(shape.as_slice(), [_] | [1, _]) {
            return None;
        }
        self.require_unchanged(name).ok()?;
        let bytes = elements::inline(&self.with_elements(tensor).ok()?, DataType::Int64, count).ok()??;
        let values: Vec<i64> = bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        let first = values.first().copied().filter(|first| (0..=MAX_POSITIONS as i64).contains(first))?;
        values.iter().zip(first..).all(|(value, wanted)| *value == wanted).then_some((shape.len(), first, values.len()))
    }
}
