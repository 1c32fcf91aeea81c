//! Position ids: constants that exporters slice to the sequence length, ranges to that length, and counts of
//! the tokens that are not padding.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::elements;
use super::super::initializer_roles::int;
use super::super::numbers::{KnownValues, Number};
use super::super::proto::{DataType, NodeProto, TensorProto};
use super::opaque::constant;
use super::{Lift, LiftedValue};
use crate::ir::ops::{Positions, Reshape, Slice, TargetSize};
use crate::ir::{Dim, Element, ValueId};

/// Maximum number of copies, casts and sums with zero between two nodes.
const MAX_COPIES: usize = 8;
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
        self.positions_of(&is_length, first, rank, output)
    }

    /// Lifts a `Range` from zero to the length of an input `[batch, sequence]`.
    pub(super) fn counted_range(&mut self, node: &'f NodeProto, output: &str) -> Option<ValueId> {
        if node.op_type() != "Range" {
            return None;
        }
        let number = |at: usize| <[Number; 1]>::try_from(self.numbers(node.input.get(at)?)?.each()).ok();
        let ([start], [Number::Size(end)], [step]) = (number(0)?, number(1)?, number(2)?) else { return None };
        // Positions have 64 bits, and all inputs of a range have its type.
        if !self.is_wide(node.input.first()?) || start != Number::Constant(0) || step != Number::Constant(1) {
            return None;
        }
        self.positions_of(&|size: &Dim| *size == end, 0, 1, output)
    }

    /// Whether a value of known numbers has 64-bit integers in the file.
    fn is_wide(&self, name: &str) -> bool {
        let mut name = name;
        for _ in 0..MAX_COPIES {
            if let Some(tensor) = self.constant_tensor(name) {
                return tensor.data_type() == DataType::Int64;
            }
            let Some((_, node)) = self.producers.get(name) else { return false };
            match node.op_type() {
                "Shape" | "Size" => return true,
                "Cast" => return int(node, "to", 0) == DataType::Int64 as i64,
                "Constant" => return node.attribute.iter().any(|attribute| matches!(attribute.name(), "value_int" | "value_ints")),
                // Other operators on numbers have the type of their first input.
                _ => name = node.input_name(0),
            }
        }
        false
    }

    /// Positions from `first` on, as many as an input `[batch, sequence]` has columns, as a value
    /// `[sequence]` or `[1, sequence]`.
    fn positions_of(&mut self, is_length: &dyn Fn(&Dim) -> bool, first: i64, rank: usize, output: &str) -> Option<ValueId> {
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

    /// Lifts the position ids of RoBERTa, where `real` is 1 for tokens other than padding, and else 0:
    /// `cumsum(real) · real + first`.
    pub(super) fn counted_positions(&mut self, node: &'f NodeProto, output: &str) -> Option<ValueId> {
        let first = |at: usize| self.position(node.input.get(at)?);
        let (places, first) = match node.op_type() {
            "Add" => first(1).map(|first| (0, first)).or_else(|| Some((1, first(0)?)))?,
            _ => return None,
        };
        let product = self.integer_producer(node.input.get(places)?)?;
        let [a, b] = product.input.as_slice() else { return None };
        let (tokens, padding) = [(a, b), (b, a)].into_iter().filter(|_| product.op_type() == "Mul").find_map(|(counts, real)| {
            let sum = self.integer_producer(counts).filter(|sum| sum.op_type() == "CumSum")?;
            let is_plain = ["exclusive", "reverse"].iter().all(|name| int(sum, name, 0) == 0);
            let axis = self.integer(sum.input.get(1)?).filter(|axis| matches!(axis, 1 | -1) && is_plain);
            axis.and(self.unpadded(real)).filter(|found| self.unpadded(sum.input_name(0)) == Some(*found))
        })?;
        let positions = Positions { padding: Some(padding), offset: first.checked_sub(padding)? };
        self.builder.node(output, positions, &[tokens]).ok()
    }

    /// For a value that is 1 for tokens other than padding, and else 0: the tokens, and padding.
    fn unpadded(&self, name: &str) -> Option<(ValueId, i64)> {
        let not = self.integer_producer(name).filter(|not| not.op_type() == "Not")?;
        let equal = self.producers.get(not.input.first()?.as_str()).map(|(_, node)| *node).filter(|equal| equal.op_type() == "Equal")?;
        let [a, b] = equal.input.as_slice() else { return None };
        [(a, b), (b, a)].into_iter().find_map(|(tokens, padding)| {
            let Some(LiftedValue::Value(id)) = self.lifted.get(tokens.as_str()) else { return None };
            let ty = self.builder.ty(*id);
            (ty.element == Element::Int && ty.shape.len() == 2).then_some((*id, self.position(padding)?))
        })
    }

    /// The node that computes a value, before copies, casts to 32-bit or 64-bit integers, and sums with
    /// zero, as of the number of cached tokens. Counts of tokens fit into 32 bits.
    fn integer_producer(&self, name: &str) -> Option<&'f NodeProto> {
        let mut name = name;
        for _ in 0..MAX_COPIES {
            let (_, node) = self.producers.get(name)?;
            let [first, second] = [0, 1].map(|at| node.input_name(at));
            name = match node.op_type() {
                "Identity" => first,
                "Cast" if [DataType::Int32, DataType::Int64].iter().any(|to| int(node, "to", 0) == *to as i64) => first,
                "Add" if self.integer(second) == Some(0) => first,
                "Add" if self.integer(first) == Some(0) => second,
                _ => return Some(*node),
            };
        }
        None
    }

    /// The position, or the id of a token, that a constant of one 64-bit element contains.
    fn position(&self, name: &str) -> Option<i64> {
        let is_wide = self.constant_tensor(name)?.data_type() == DataType::Int64;
        self.integer(name).filter(|number| is_wide && (0..=MAX_POSITIONS as i64).contains(number))
    }

    /// The tensor of an initializer or a `Constant` node.
    pub(super) fn constant_tensor(&self, name: &str) -> Option<&'f TensorProto> {
        self.initializers.get(name).copied().or_else(|| self.producers.get(name).and_then(|(_, node)| constant(node)))
    }

    /// The integer that a constant of one element contains.
    fn integer(&self, name: &str) -> Option<i64> {
        match self.numbers(name)?.all()?.as_slice() {
            [number] => Some(*number),
            _ => None,
        }
    }

    /// Rank, first element and length of a constant of consecutive integers, which is `[n]` or `[1, n]`.
    fn consecutive(&self, name: &str) -> Option<(usize, i64, usize)> {
        let tensor = self.constant_tensor(name)?;
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
