//! Measures of tensors and of their differences.

use candle_core::{DType, Tensor};

/// The largest absolute value.
pub fn largest(x: &Tensor) -> f32 {
    x.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// 1 minus the cosine similarity.
pub fn angle(a: &Tensor, b: &Tensor) -> f64 {
    let product = |a: &Tensor, b: &Tensor| (a * b).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    1.0 - product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

/// Checksums of a tensor, as in `scripts/lib/checksums.py`.
pub fn checksums(values: &[f32]) -> Vec<f64> {
    let norm = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let weight = |i: usize| ((7919 * i) % 2003) as f64 / 2003.0 - 0.5;
    let sum = values.iter().enumerate().map(|(i, x)| f64::from(*x) * weight(i)).sum::<f64>();
    [norm, sum].into_iter().chain(values.iter().take(4).map(|x| f64::from(*x))).collect()
}
