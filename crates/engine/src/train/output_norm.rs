//! The norms of DoRA: of the weights of each output of a layer with its adapter.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::memory_reservation::MemoryReservation;
use crate::error::{Error, Result};
use crate::exec::{MemoryCategory, MemoryTracker};
use crate::ir::ops::ScalarOps;

/// Maximum number of elements of a weight that are converted to f32 at a time.
const PART: usize = 1 << 22;

/// The norm of the weights of each output of a layer with its adapter: a parameter that is computed from
/// others in each step, and through which no gradient flows (Liu et al., *DoRA*, 2024, section 4.3).
#[derive(Debug, Clone)]
pub struct OutputNorm {
    /// Name of the weight.
    pub weight: String,
    /// Names of the factors `[rank, in]` and `[out, rank]`.
    pub factors: [String; 2],
    /// Constant that the product of the factors is multiplied by.
    pub scale: f64,
    /// Whether the weight is stored as `[in, out]`.
    pub input_major: bool,
}

/// The norms of a training, by name.
#[derive(Default)]
pub(super) struct OutputNorms {
    by_name: BTreeMap<String, OutputNorm>,
    /// Records the memory that computing a norm takes.
    tracker: Arc<MemoryTracker>,
}

impl OutputNorms {
    pub fn new(by_name: BTreeMap<String, OutputNorm>, tracker: Arc<MemoryTracker>) -> OutputNorms {
        OutputNorms { by_name, tracker }
    }

    pub fn get(&self, name: &str) -> Option<&OutputNorm> {
        self.by_name.get(name)
    }

    /// The norms `[out]` of `norm`; `get` returns other parameters. `copied` bytes of its weight are loaded
    /// only for this.
    pub fn compute(&self, name: &str, norm: &OutputNorm, get: &dyn Fn(&str) -> Result<Tensor>, copied: u64) -> Result<Tensor> {
        let mut reservation = MemoryReservation::new(&self.tracker);
        reservation.add_bytes(MemoryCategory::Weights, name, copied)?;
        let weight = get(&norm.weight)?;
        let [inner, outer] = norm.factors.each_ref().map(|factor| get(factor));
        let (inner, outer) = (inner?, outer?);
        let (rank, outputs) = (inner.dims().first().copied().unwrap_or(0), outer.dims().first().copied().unwrap_or(0));
        reservation.add_bytes(MemoryCategory::Weights, name, workspace(weight.elem_count(), outputs, rank))?;
        norm.compute(&weight, &inner, &outer).map_err(|e| Error::candle(format!("tensor `{name}`"), e))
    }
}

/// Bytes in use while the norms of a weight with this number of elements are computed: a part of the weight
/// in f32 and its squares, and the weight times the first factor, twice.
pub(super) fn workspace(elements: usize, outputs: usize, rank: usize) -> u64 {
    let part = rows_at_once(elements.checked_div(outputs).unwrap_or(0), outputs) * elements.checked_div(outputs).unwrap_or(0);
    4 * 2 * (part + outputs * rank) as u64
}

/// Number of outputs with `inputs` weights each that are converted at a time.
fn rows_at_once(inputs: usize, outputs: usize) -> usize {
    (PART / inputs.max(1)).clamp(1, outputs.max(1))
}

impl OutputNorm {
    /// The norms of the rows of `W + s B A`, from ‖W‖² + 2s W·(B A) + s² ‖B A‖² for each row, so that the
    /// sum, which has the size of the weight, is not computed.
    fn compute(&self, weight: &Tensor, inner: &Tensor, outer: &Tensor) -> candle_core::Result<Tensor> {
        let dtype = outer.dtype();
        let (inner, outer) = (inner.to_dtype(DType::F32)?, outer.to_dtype(DType::F32)?);
        let rows = rows_at_once(inner.dim(1)?, outer.dim(0)?);
        let (squares, products) = self.products(weight, &inner, rows)?;
        let crossed = (&outer * products)?.sum(1)?.affine(2.0 * self.scale, 0.0)?;
        let of_term = (outer.matmul(&inner.matmul(&inner.t()?)?)? * &outer)?.sum(1)?.affine(self.scale.powi(2), 0.0)?;
        // Outputs without weights stay zero: their norm must not be rounded to zero. Rounding can make the
        // sum negative.
        let least = if dtype == DType::F16 { 2f64.powi(-28) } else { f64::from(f32::MIN_POSITIVE) };
        ((squares + crossed)? + of_term)?.maximum_scalar(least)?.sqrt()?.to_dtype(dtype)
    }

    /// The sums of squares of the weights of each output `[out]`, and `W Aᵀ` `[out, rank]`, from `rows`
    /// outputs at a time.
    fn products(&self, weight: &Tensor, inner: &Tensor, rows: usize) -> candle_core::Result<(Tensor, Tensor)> {
        let axis = usize::from(self.input_major);
        let (outputs, transposed) = (weight.dim(axis)?, inner.t()?);
        let (mut squares, mut products) = (Vec::new(), Vec::new());
        for start in (0..outputs).step_by(rows.max(1)) {
            let part = weight.narrow(axis, start, rows.min(outputs - start))?;
            let part = if self.input_major { part.t()? } else { part };
            let part = part.to_dtype(DType::F32)?.contiguous()?;
            squares.push(part.sqr()?.sum(1)?);
            products.push(part.matmul(&transposed)?);
        }
        Ok((Tensor::cat(&squares, 0)?, Tensor::cat(&products, 0)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn norm(input_major: bool) -> OutputNorm {
        OutputNorm { weight: String::new(), factors: Default::default(), scale: 0.5, input_major }
    }

    fn norms(norm: &OutputNorm, [weight, inner, outer]: [&Tensor; 3]) -> Vec<f32> {
        norm.compute(weight, inner, outer).unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn norms_are_those_of_the_weight_with_its_adapter() {
        let device = &Device::Cpu;
        let weight = Tensor::new(&[[1f32, 0.0], [0.0, 3.0], [0.0, 0.0]], device).unwrap();
        let transposed = Tensor::new(&[[1f32, 0.0, 0.0], [0.0, 3.0, 0.0]], device).unwrap();
        let inner = Tensor::new(&[[0f32, 2.0]], device).unwrap();
        let outer = Tensor::new(&[[1f32], [0.5], [0.0]], device).unwrap();
        for (weight, input_major) in [(&weight, false), (&transposed, true)] {
            let found = norms(&norm(input_major), [weight, &inner, &outer]);
            assert!((found[0] - 2f32.sqrt()).abs() < 1e-6 && (found[1] - 3.5).abs() < 1e-6 && found[2] < 1e-15, "{found:?}");
            let [weight, inner, outer] = [weight, &inner, &outer].map(|tensor| tensor.to_dtype(DType::F16).unwrap());
            let least = norms(&norm(input_major), [&weight, &inner, &outer])[2];
            assert!(least > 0.0, "{least}");
        }
    }

    /// Parts of any size have the norms of the sum, also if the term nearly cancels the weight.
    #[test]
    fn norms_equal_those_of_the_sum() {
        let numbers = |seed: usize, rows: usize, columns: usize| {
            let values: Vec<f32> = (0..rows * columns).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).collect();
            Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
        };
        let (inner, outer) = (numbers(1, 3, 20), numbers(2, 13, 3));
        let term = outer.matmul(&inner).unwrap().affine(0.5, 0.0).unwrap();
        let close = ((numbers(3, 13, 20) * 0.01).unwrap() - &term).unwrap();
        for weight in [numbers(3, 13, 20), close] {
            let expected: Vec<f32> = (&weight + &term).unwrap().sqr().unwrap().sum(1).unwrap().sqrt().unwrap().to_vec1().unwrap();
            for input_major in [false, true] {
                let stored = if input_major { weight.t().unwrap().contiguous().unwrap() } else { weight.clone() };
                let norm = norm(input_major);
                for (found, expected) in norms(&norm, [&stored, &inner, &outer]).iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-4 * expected.max(1.0), "{found} instead of {expected}");
                }
                let all = norm.products(&stored, &inner, 13).unwrap();
                for rows in [1, 5] {
                    let some = norm.products(&stored, &inner, rows).unwrap();
                    let difference = |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                    assert!(difference(&all.0, &some.0) < 1e-6 && difference(&all.1, &some.1) < 1e-5, "{rows}");
                }
            }
        }
    }

    #[test]
    fn memory_is_recorded_while_norms_are_computed() {
        let tracker = Arc::new(MemoryTracker::with_budget(None));
        let named = OutputNorm { weight: "w".to_owned(), factors: ["a", "b"].map(str::to_owned), ..norm(false) };
        let get = |name: &str| {
            let shape = match name {
                "w" => (6, 4),
                "a" => (2, 4),
                _ => (6, 2),
            };
            Ok(Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap())
        };
        OutputNorms::new([("n".to_owned(), named.clone())].into(), tracker.clone()).compute("n", &named, &get, 96).unwrap();
        assert_eq!((tracker.now(MemoryCategory::Weights), tracker.peaks().1), (0, 96 + 4 * 2 * (24 + 12)));
        // 4096 rows of 16384 elements are more than one part: 256 rows.
        assert_eq!(workspace(4096 << 14, 4096, 8), 4 * 2 * ((1 << 22) + 4096 * 8));
    }
}
