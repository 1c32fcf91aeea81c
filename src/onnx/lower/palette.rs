//! Weights that are places in palettes: `Gather` looks the values up. Nothing of it depends on an input, so runtimes do it once, when they
//! load the file.

use super::super::proto::{AttributeProto, DataType};
use super::Lowering;
use crate::store::Granularity;

/// The floats of a parameter, if it is stored so.
pub(in super::super) fn floats(value: usize, n: &mut Lowering) {
    let Some(slot) = n.turn_to_palette(value) else { return };
    let (Some(affine), [places, palettes]) = (&slot.palette, &slot.tensors[..]) else { return };
    let mut found = n.cast("places", &places.name, DataType::Int32);
    if let (Granularity::Block([high, _]), [rows, rest @ ..]) = (affine.granularity, &places.dims[..])
        && high < *rows
    {
        // Palettes lie one after another: places of later rows begin further on.
        let begins: Vec<i32> = (0..*rows).map(|row| (row / high.max(1) * affine.codes.entries()) as i32).collect();
        let dims = std::iter::once(*rows as i64).chain(rest.iter().map(|_| 1)).collect();
        let begins = n.own_ints("begins", dims, &begins);
        found = n.emit("Add", "place", &[&found, &begins], vec![]);
    }
    n.compute(value, "Gather", &[&palettes.name, &found], vec![AttributeProto::int("axis", 0)]);
}
