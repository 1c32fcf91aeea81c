//! Selection of fixed elements of an axis.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::initializer_roles::int;
use super::super::numbers::KnownValues;
use super::super::proto::NodeProto;
use super::{Lift, LiftedValue};
use crate::ir::ops::{Reshape, Select, Slice, TargetSize};
use crate::ir::{Element, ValueId};

/// Maximum distance of an index from either end of its axis.
const MAX_INDEX: u64 = 1 << 40;

impl<'f> Lift<'f> {
    /// Lifts a `Gather` of consecutive elements of a float value, with constant indices. A single index
    /// removes the axis.
    pub(super) fn gathered(&mut self, node: &'f NodeProto, output: &str) -> Option<ValueId> {
        let data = node.input.first().filter(|_| node.op_type() == "Gather")?;
        let Some(LiftedValue::Value(id)) = self.lifted.get(data.as_str()) else { return None };
        let (id, ty) = (*id, self.builder.ty(*id).clone());
        let (indices, is_vector) = self.numbers(node.input.get(1)?)?.constants()?;
        let rank = i64::try_from(ty.shape.len()).ok()?;
        let axis = int(node, "axis", 0);
        let axis = usize::try_from(if axis < 0 { axis.checked_add(rank)? } else { axis }).ok()?;
        let first = *indices.first().filter(|first| ty.element == Element::Float && first.unsigned_abs() <= MAX_INDEX)?;
        let start = match ty.shape.get(axis)?.fixed() {
            Some(size) if first < 0 => first.checked_add(i64::try_from(size).ok()?)?,
            _ => first,
        };
        // The last element does not precede the first one.
        let crosses_zero = first < 0 && indices.last().is_some_and(|last| *last >= 0);
        if crosses_zero || !indices.iter().zip(first..).all(|(index, wanted)| *index == wanted) {
            return None;
        }
        if let (false, 3, 1, Ok(index)) = (is_vector, rank, axis, usize::try_from(start)) {
            return self.builder.node(output, Select { index }, &[id]).ok();
        }
        let slice = Slice { start, length: Some(indices.len()), axis: i64::try_from(axis).ok()?, ..Slice::default() };
        if is_vector {
            return self.builder.node(output, slice, &[id]).ok();
        }
        let part = self.builder.node(&format!("{output}/part"), slice, &[id]).ok()?;
        let shape = (0..ty.shape.len()).filter(|other| *other != axis).map(TargetSize::Copy).collect();
        self.builder.node(output, Reshape { shape }, &[part]).ok()
    }
}
