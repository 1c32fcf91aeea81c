//! Differences of the rows of an output of two models.

use std::cmp::Ordering;

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use super::embedding::cosine_from_products;
use super::{divergence, in_chunks};
use crate::exec::transfer::{self, Cause};
use crate::exec::{floats_on_host, read};
use crate::ir::ops::on_host;
use crate::model::LogitKind;

/// Differences of one row: a sample or a token.
#[derive(Default)]
pub(super) struct Row {
    pub cosine: f64,
    pub signal: f64,
    pub noise: f64,
    pub error: f64,
    pub largest: f64,
    pub divergence: f64,
    pub agrees: bool,
    /// The first element in both models.
    pub first: [f64; 2],
}

impl Row {
    pub(super) fn from_values(a: &[f32], b: &[f32], kind: LogitKind) -> Row {
        let first = |values: &[f32]| values.first().map_or(0.0, |value| f64::from(*value));
        let mut row = Row { first: [first(a), first(b)], ..Row::default() };
        let (mut both, mut other) = (0f64, 0f64);
        for (x, y) in a.iter().zip(b) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            both += x * y;
            other += y * y;
            row.signal += x * x;
            row.noise += (x - y) * (x - y);
            let error = (x - y).abs();
            if error > row.error || error.is_nan() {
                row.error = error;
            }
            row.largest = row.largest.max(x.abs());
        }
        row.cosine = cosine_from_products(both, row.signal, other);
        if !row.signal.is_finite() {
            row.largest = f64::NAN;
        }
        match kind {
            LogitKind::Classes => {
                (row.divergence, row.agrees) = (clamp_negative(divergence::of_classes(a, b)), argmax(a).is_some_and(|class| Some(class) == argmax(b)))
            }
            LogitKind::Labels => row.divergence = clamp_negative(divergence::of_labels(a, b)),
            LogitKind::Values => {}
        }
        row
    }
}

/// Differences of each row. Rows on a device are reduced there.
pub(super) fn rows(a: &Tensor, b: &Tensor, width: usize, kind: LogitKind) -> candle_core::Result<Vec<Row>> {
    if on_host(a.device()) || !a.device().same_device(b.device()) {
        let (a, b) = (floats_on_host(a, Cause::Answers)?, floats_on_host(b, Cause::Answers)?);
        let all = |a: &[f32], b: &[f32]| a.par_chunks_exact(width).zip(b.par_chunks_exact(width)).map(|(a, b)| Row::from_values(a, b, kind)).collect();
        return read(&a, |a| read(&b, |b| Ok(all(a, b))));
    }
    let flat = |tensor: &Tensor| tensor.reshape((tensor.elem_count() / width, width));
    let (a, b) = (flat(a)?, flat(b)?);
    in_chunks(a.dim(0)?, width, |rows| {
        let chunk = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len())?.to_dtype(DType::F64);
        rows_on_device(&chunk(&a)?, &chunk(&b)?, kind)
    })
}

/// [`Row::from_values`] for `[rows, width]` on a device.
pub(super) fn rows_on_device(a: &Tensor, b: &Tensor, kind: LogitKind) -> candle_core::Result<Vec<Row>> {
    let difference = (a - b)?;
    let sum = |products: Tensor| products.sum(D::Minus1);
    let mut figures =
        vec![sum((a * b)?)?, sum(a.sqr()?)?, sum(b.sqr()?)?, sum(difference.sqr()?)?, difference.abs()?.max(D::Minus1)?, a.abs()?.max(D::Minus1)?];
    let first = |tensor: &Tensor| tensor.narrow(1, 0, 1)?.squeeze(1);
    figures.extend([first(a)?, first(b)?]);
    match kind {
        LogitKind::Classes => {
            let agrees = a.argmax(D::Minus1)?.eq(&b.argmax(D::Minus1)?)?;
            figures.extend([divergence::of_classes_on_device(a, b)?, agrees.to_dtype(DType::F64)?]);
        }
        LogitKind::Labels => figures.push(divergence::of_labels_on_device(a, b)?),
        LogitKind::Values => {}
    }
    let values: Vec<f64> = transfer::values(&Tensor::stack(&figures, 1)?, Cause::Answers)?;
    let row = |values: &[f64]| {
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        let error = if at(3).is_nan() { f64::NAN } else { at(4) };
        let cosine = cosine_from_products(at(0), at(1), at(2));
        let largest = if at(1).is_finite() { at(5) } else { f64::NAN };
        Row {
            cosine,
            signal: at(1),
            noise: at(3),
            error,
            largest,
            divergence: clamp_negative(at(8)),
            agrees: at(9) > 0.0 && !at(0).is_nan(),
            first: [at(6), at(7)],
        }
    };
    Ok(values.chunks_exact(figures.len()).map(row).collect())
}

/// Index of the largest logit; the first one of equal logits. `None` if one is NaN.
pub(super) fn argmax(logits: &[f32]) -> Option<usize> {
    if logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    logits.iter().enumerate().max_by(|a, b| a.1.partial_cmp(b.1).unwrap_or(Ordering::Equal).then(b.0.cmp(&a.0))).map(|(index, _)| index)
}

/// Replaces a sum that is negative due to rounding by zero. Unlike `max`, preserves NaN.
pub(super) fn clamp_negative(sum: f64) -> f64 {
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_with_nan_have_no_top_class() {
        for (logits, agrees) in [([1f32, 2.0, 0.0], true), ([1.0, f32::NAN, 0.0], false)] {
            let tensor = Tensor::from_slice(&logits, (1, 3), &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
            let on_device = rows_on_device(&tensor, &tensor, LogitKind::Classes).unwrap();
            assert_eq!([Row::from_values(&logits, &logits, LogitKind::Classes).agrees, on_device[0].agrees], [agrees; 2]);
        }
    }
}
