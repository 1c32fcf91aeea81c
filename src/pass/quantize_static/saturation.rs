//! Detection of saturation: x86 without VNNI adds two products of uint8 and int8 in 16 bits and saturates
//! silently. This module simulates these products for the stored rows of the calibration samples.

use std::collections::BTreeMap;

use super::fit::{ValueQuantizers, input_quantizers};
use super::prepare::Prepared;
use super::{ActivationTarget, QuantizeStatic};
use crate::calibration::ValueStatistics;
use crate::error::{Result, counted};
use crate::ir::ops::{FakeQuantize, Op};
use crate::model::Model;
use crate::pass::consumers::weight_input;
use crate::store::{Encoding, Weight};

/// Returns a note if layers of a model for VNNI would saturate on other x86 processors.
pub(super) fn notes(
    pass: &QuantizeStatic,
    prepared: &Prepared,
    model: &Model,
    quantizers: &ValueQuantizers,
    statistics: &BTreeMap<String, ValueStatistics>,
) -> Result<Vec<String>> {
    if pass.target != ActivationTarget::Vnni {
        return Ok(Vec::new());
    }
    let (mut saturating, mut layers): (Vec<(String, f64)>, usize) = (Vec::new(), 0);
    let quantizers = input_quantizers(&prepared.graph, quantizers);
    for node in prepared.graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_))) {
        let (name, input) = (weight_input(&prepared.graph, node), &prepared.graph.value(node.inputs[0]).name);
        let (Some(by), Some(input), Some(weight)) = (quantizers.get(name), statistics.get(input), model.weights.by_name.get(name)) else { continue };
        if weight.encoding == Encoding::Dense {
            continue;
        }
        layers += 1;
        let fraction = saturated(weight, *by, &input.rows)?;
        if fraction > 0.0 {
            saturating.push((name.to_owned(), fraction));
        }
    }
    saturating.sort_by(|a, b| b.1.total_cmp(&a.1));
    let Some((_, fraction)) = saturating.first() else { return Ok(Vec::new()) };
    let names = saturating.iter().take(3).map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    Ok(vec![format!(
        "on x86 without VNNI, accumulators of {} of {} saturate for calibration samples ({names}; {:.2} % of the sums of the first): use `target: portable` to avoid this",
        saturating.len(),
        counted(layers, "layer"),
        100.0 * fraction
    )])
}

/// The fraction of sums in which two adjacent products overflow 16 bits.
fn saturated(weight: &Weight, by: FakeQuantize, rows: &[Vec<f32>]) -> Result<f64> {
    // Kernels of convolutions iterate over channels within a tap, so that adjacent products are channels
    // of the same tap.
    let inner = weight.shape.get(2..).unwrap_or(&[]).iter().product::<usize>().max(1);
    let levels: Vec<Vec<i32>> = rows.iter().map(|row| row.iter().map(|x| level(*x, by)).collect()).collect();
    let (mut sums, mut overflows) = (0u64, 0u64);
    let row = weight.row().max(1);
    weight.visit(row, &mut |block| {
        for weights in block.now.values.chunks_exact(row) {
            for levels in levels.iter().filter(|levels| levels.len() * inner == row) {
                sums += 1;
                let overflows_at = |tap: usize| {
                    let product = |channel: usize| levels[channel] * i32::from(weights[channel * inner + tap] as i8);
                    (0..levels.len() / 2).any(|pair| i16::try_from(product(2 * pair) + product(2 * pair + 1)).is_err())
                };
                overflows += u64::from((0..inner).any(overflows_at));
            }
        }
        Ok(())
    })?;
    Ok(if sums == 0 { 0.0 } else { overflows as f64 / sums as f64 })
}

/// The uint8 code of a value.
fn level(x: f32, by: FakeQuantize) -> i32 {
    ((x / by.scale).round_ties_even() as i32 + by.zero_point + 128).clamp(0, 255)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::{ActivationScheme, Codes, DType, Granularity, QuantizationSpec};
    use crate::work::Meter;

    #[test]
    fn two_large_products_of_equal_sign_saturate() {
        let dense = |values: &[f32], shape: &[usize]| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Weight::new(DType::F32, shape.to_vec(), Encoding::Dense, Arc::new(crate::store::Bytes { dtype: DType::F32, bytes }))
        };
        let affine = QuantizationSpec {
            codes: Codes::INT8,
            granularity: Granularity::Tensor,
            symmetric: true,
            scale_dtype: DType::F32,
            activations: ActivationScheme::None,
        };
        let quantized = |dense: &Weight, reduced| {
            crate::pass::weight_quantizer::WeightQuantizer::new("w", dense, affine.clone(), crate::pass::WeightObserver::Minmax, &Arc::new(Meter::default()))
                .reduced(reduced)
                .weight()
        };
        let matrix = dense(&[127.0, 127.0, 0.0, 127.0, -127.0, 64.0], &[3, 2]);
        let by = FakeQuantize { scale: 1.0, zero_point: -128 };
        assert_eq!(saturated(&quantized(&matrix, false), by, &[vec![255.0, 255.0]]).unwrap(), 1.0 / 3.0);
        assert_eq!(saturated(&quantized(&matrix, false), by, &[vec![128.0, 128.0]]).unwrap(), 0.0);
        assert_eq!(saturated(&quantized(&matrix, true), by, &[vec![255.0, 255.0]]).unwrap(), 0.0);
        // Two filters of two channels and two taps: only the second tap of the first filter saturates.
        let filters = dense(&[1.0, 127.0, 1.0, 127.0, 127.0, 127.0, 1.0, 1.0], &[2, 2, 1, 2]);
        assert_eq!(saturated(&quantized(&filters, false), by, &[vec![255.0, 255.0]]).unwrap(), 0.5);
    }
}
