//! Fake quantization of activations, as a pair of nodes.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use half::f16;

use super::super::check;
use super::super::initializer_roles::int;
use super::super::proto::{DataType, NodeProto};
use super::Lift;
use crate::ir::ops::FakeQuantize;

const UINT8: i64 = DataType::Uint8 as i64;
const INT8: i64 = DataType::Int8 as i64;

impl<'f> Lift<'f> {
    /// The fake quantization that a `DequantizeLinear` and its preceding `QuantizeLinear` represent, and
    /// the latter.
    pub(super) fn quantizer(&self, node: &'f NodeProto) -> Option<(FakeQuantize, &'f NodeProto)> {
        let [integers, scale, zero_point @ ..] = node.input.as_slice() else { return None };
        let (_, producer) = self.producers.get(integers.as_str()).filter(|_| node.op_type() == "DequantizeLinear")?;
        let own = producer.op_type() == "QuantizeLinear" && check::is_own(producer.domain());
        let plain = [node, producer].iter().all(|node| int(node, "block_size", 0) == 0 && int(node, "precision", 0) == 0);
        let plain = plain && int(node, "output_dtype", 0) <= 1;
        let [_, other_scale, other_zero_point @ ..] = producer.input.as_slice() else { return None };
        let one = |name: &str| self.file.repeated(name);
        let same = |a: &str, b: &str| a == b || one(a).zip(one(b)).is_some_and(|(a, b)| a == b);
        let zero_point = match (zero_point, other_zero_point) {
            // Without a zero point, only the attribute determines the integer type (opset 21).
            ([], []) => match int(producer, "output_dtype", 0) {
                0 | UINT8 => Some(-128),
                INT8 => Some(0),
                _ => None,
            },
            ([zero_point, ..], [other, ..]) if same(zero_point, other) => match one(zero_point)? {
                (DataType::Int8, bytes) => Some(i32::from(i8::from_le_bytes(bytes.try_into().ok()?))),
                (DataType::Uint8, bytes) => Some(i32::from(u8::from_le_bytes(bytes.try_into().ok()?)).saturating_sub(128)),
                _ => None,
            },
            _ => None,
        }?;
        let value = match one(scale)? {
            (DataType::Float, bytes) => f32::from_le_bytes(bytes.try_into().ok()?),
            (DataType::Float16, bytes) if self.file.is_half => f16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
            _ => return None,
        };
        (own && plain && same(scale, other_scale) && value.is_finite() && value > 0.0).then_some((FakeQuantize { scale: value, zero_point }, *producer))
    }
}
