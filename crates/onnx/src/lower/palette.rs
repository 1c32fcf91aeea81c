//! Weights that are computed from stored tensors: `Gather` looks up the values of palettized weights, and
//! `Cast` converts 16-bit floats. Neither depends on an input, so runtimes evaluate them once, when they load
//! the file.

use super::super::proto::{AttributeProto, DataType};
use super::Lowering;
use crate::store::Granularity;

/// Computes a parameter in 32-bit floats, if it is palettized or stored in 16 bits.
pub(in super::super) fn floats(value: usize, n: &mut Lowering) {
    let Some(slot) = n.enter_computed(value) else { return };
    if let (true, [half]) = (slot.widened, &slot.tensors[..]) {
        return n.compute(value, "Cast", &[&half.name], vec![AttributeProto::int("to", DataType::Float as i64)]);
    }
    let (Some(affine), [indices, palettes]) = (&slot.palette, &slot.tensors[..]) else { return };
    let mut found = n.cast("places", &indices.name, DataType::Int32);
    if let (Granularity::Block([high, _]), [rows, rest @ ..]) = (affine.granularity, &indices.dims[..])
        && high < *rows
    {
        // Palettes are concatenated: indices of later row blocks get an offset.
        let begins: Vec<i32> = (0..*rows).map(|row| (row / high.max(1) * affine.codes.entries()) as i32).collect();
        let dims = std::iter::once(*rows as i64).chain(rest.iter().map(|_| 1)).collect();
        let begins = n.own_ints("begins", dims, &begins);
        found = n.emit("Add", "place", &[&found, &begins], vec![]);
    }
    n.compute(value, "Gather", &[&palettes.name, &found], vec![AttributeProto::int("axis", 0)]);
}
