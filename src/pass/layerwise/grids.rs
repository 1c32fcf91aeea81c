//! Quantization grids of layers, and the weights of errors for which their scales are chosen.

use std::collections::BTreeMap;

use super::Layer;
use crate::error::{Error, Result};
use crate::kernel::column_solver::Grid;
use crate::kernel::grid::{IntegerGrid, Levels};
use crate::pass::weight_quantizer::stored_scale;
use crate::store::{Codes, Granularity, QuantizationSpec, Weight};

/// Error weights of columns, proportional to their mean squares plus a small constant.
pub(super) fn costs(squares: &[f64]) -> Vec<f32> {
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    let least = if mean > 0.0 { 1e-3 } else { 1.0 };
    squares.iter().map(|square| (square / mean.max(f64::MIN_POSITIVE) + least) as f32).collect()
}

/// The quantization grids of a layer, with columns in the given order.
pub(super) fn grid<'o>(
    (layer, weight): (&Layer, &Weight),
    affine: &QuantizationSpec,
    global_scales: &BTreeMap<String, f32>,
    order: &'o [usize],
) -> Result<Grid<'o, impl Fn(f64) -> f32 + Sync + use<'o>>> {
    let group = match affine.granularity {
        Granularity::Channel => Some(layer.size),
        Granularity::Group(size) => Some(size),
        Granularity::Tensor | Granularity::Block(_) => None,
    };
    let levels = match affine.codes {
        Codes::Integer(bits) => Some(Levels::Integers(IntegerGrid { bits: bits.into(), symmetric: affine.symmetric })),
        Codes::Float(format) => Some(Levels::Floats(format.codec())),
        Codes::Palette(_) => None,
    };
    let (Some(levels), Some(group), false) = (levels, group, layer.input_major) else {
        return Err(Error::tensor(
            &layer.weight,
            format!("cannot be quantized with calibration samples to {} of {:?} in shape {:?}", affine.codes, affine.granularity, weight.shape),
            "use `method: rtn`, or add it to `ignore`",
        ));
    };
    let store = stored_scale(affine, global_scale(global_scales, layer));
    Ok(Grid { levels, group, steps: Vec::new(), order, store: Some(store) })
}

/// The global scale of a layer's weight; 1 if it has none.
pub(super) fn global_scale(global_scales: &BTreeMap<String, f32>, layer: &Layer) -> f32 {
    global_scales.get(&layer.weight).copied().unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_relative_to_the_mean() {
        assert_eq!(costs(&[1.0, 3.0, 8.0, 0.0]), [1.0 / 3.0 + 1e-3, 1.0 + 1e-3, 8.0 / 3.0 + 1e-3, 1e-3].map(|cost: f64| cost as f32));
        assert_eq!(costs(&[0.0; 2]), [1.0; 2], "without samples, all columns are equal");
    }
}
