//! Elements of outputs that are not finite in two runtimes.

use candle_core::{Device, Tensor};

use super::Outputs;
use crate::error::{Error, Result};
use crate::exec;
use crate::exec::transfer::{Cause, read};

/// Both outputs, in which elements that are NaN or the same infinity in both are zero: models mask elements
/// with infinities, and samples may be outside of the domain of an operator.
///
/// # Errors
/// If no other element remains.
pub fn without_common_nonfinite(ours: &Outputs, theirs: &Outputs) -> Result<[Outputs; 2]> {
    zeroed(ours, theirs).map_err(|e| Error::run("comparing outputs", e, ""))
}

fn zeroed(ours: &Outputs, theirs: &Outputs) -> candle_core::Result<[Outputs; 2]> {
    let mut both = [ours.clone(), theirs.clone()];
    let (mut count, mut ignored) = (0, 0);
    for (name, a) in ours {
        let Some(b) = theirs.get(name).filter(|b| a.dtype().is_float() && b.dtype().is_float() && a.dims() == b.dims()) else { continue };
        count += a.elem_count();
        // Most outputs are finite, and neither copied nor read twice.
        let is_finite = |values: &[f32]| Ok(values.iter().all(|value| value.is_finite()));
        if exec::read(&exec::floats_on_host(a, Cause::Answers)?, is_finite)? {
            continue;
        }
        let is_common = |(a, b): (&f32, &f32)| !a.is_finite() && (a == b || a.is_nan() && b.is_nan());
        let (mut a_values, mut b_values) = (read::<f32>(a)?, read::<f32>(b)?);
        let common: Vec<bool> = a_values.iter().zip(&b_values).map(is_common).collect();
        ignored += common.iter().filter(|common| **common).count();
        for (outputs, values) in both.iter_mut().zip([&mut a_values, &mut b_values]) {
            values.iter_mut().zip(&common).filter(|(_, common)| **common).for_each(|(value, _)| *value = 0.0);
            outputs.insert(name.clone(), Tensor::from_slice(values, a.dims(), &Device::Cpu)?);
        }
    }
    if ignored > 0 && ignored == count {
        candle_core::bail!("both runtimes return only NaN or infinities");
    }
    Ok(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only elements that are not finite in the same way in both outputs are ignored.
    #[test]
    fn common_values_that_are_not_finite_are_zero() {
        let output = |values: &[f32]| Outputs::from([("y".to_owned(), Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap())]);
        let (nan, most) = (f32::NAN, f32::INFINITY);
        let (a, b) = (output(&[nan, most, -most, nan, 1.0, 2.0]), output(&[nan, most, most, 3.0, nan, 2.0]));
        let [a, b] = without_common_nonfinite(&a, &b).unwrap().map(|outputs| outputs["y"].to_vec1::<f32>().unwrap());
        assert_eq!(format!("{a:?} {b:?}"), "[0.0, 0.0, -inf, NaN, 1.0, 2.0] [0.0, 0.0, inf, 3.0, NaN, 2.0]");
        assert!(without_common_nonfinite(&output(&[nan, most]), &output(&[nan, most])).is_err());
        // Outputs remain the same tensors if those of one runtime are finite.
        let (a, b) = (output(&[1.0, 2.0]), output(&[nan, 2.0]));
        let both = without_common_nonfinite(&a, &b).unwrap();
        assert_eq!(both.map(|outputs| outputs["y"].id()), [&a, &b].map(|outputs| outputs["y"].id()));
    }
}
