//! Global gradient norm and gradient clipping (Pascanu et al. 2013).

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::floats::{self, CHUNK};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::gpu;
use crate::ir::ops::on_host;
use crate::kernel::update;

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::candle(format!("the gradient of `{name}`"), e)
}

/// Elements of a gradient that are converted to f64 at a time on a device.
const CHUNK_ON_DEVICE: usize = if cfg!(test) { 3 } else { 1 << 22 };

/// The sum of squares of a tensor as an f64 scalar, without an f64 copy of the whole tensor.
fn squares_by_operations(gradient: &Tensor) -> candle_core::Result<Tensor> {
    let (values, count) = (gradient.flatten_all()?, gradient.elem_count());
    let chunks = (0..count).step_by(CHUNK_ON_DEVICE).map(|at| values.narrow(0, at, CHUNK_ON_DEVICE.min(count - at))?.to_dtype(DType::F64)?.sqr()?.sum_all());
    let sums = chunks.collect::<candle_core::Result<Vec<_>>>()?;
    if sums.is_empty() { Tensor::zeros((), DType::F64, gradient.device()) } else { Tensor::stack(&sums, 0)?.sum_all() }
}

/// The sums of squares of gradients, f64 `[gradients]` on their device, in the order of names.
pub(super) fn squares(gradients: &BTreeMap<String, Tensor>) -> Result<Option<Tensor>> {
    let all: Vec<&Tensor> = gradients.values().collect();
    if let Some(sums) = gpu::sums_of_squares(&all).map_err(|e| Error::candle("the gradient norm", e))? {
        return Ok(Some(sums));
    }
    let sum = |gradient: &Tensor| match on_host(gradient.device()) {
        true => Tensor::new(floats::read(&floats::on_host(gradient)?, |values| Ok(floats::squares(values)))?, gradient.device()),
        false => squares_by_operations(gradient),
    };
    let sums = gradients.iter().map(|(name, gradient)| sum(gradient).map_err(failed(name))).collect::<Result<Vec<_>>>()?;
    if sums.is_empty() { Ok(None) } else { Tensor::stack(&sums, 0).map(Some).map_err(|e| Error::candle("the gradient norm", e)) }
}

/// The global Euclidean norm, from the sum of squares of each gradient. Fails if one is not finite.
pub(super) fn norm_of(squares: &BTreeMap<&String, f64>) -> Result<f64> {
    if let Some((name, _)) = squares.iter().find(|(_, sum)| !sum.is_finite()) {
        return Err(Error::Diverged { step: 0, reason: format!("the gradient of `{name}` contains NaN or infinite values") });
    }
    Ok(squares.values().sum::<f64>().sqrt())
}

/// Scales all gradients by one factor so that their global norm is at most `max_norm`, like PyTorch's
/// `clip_grad_norm_`, including the 1e-6 that it adds to the norm.
pub(super) fn scale_to_norm(gradients: &mut BTreeMap<String, Tensor>, norm: f64, max_norm: f64) -> Result<()> {
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 {
        for (name, gradient) in gradients.iter_mut() {
            *gradient = scaled(gradient, factor).map_err(failed(name))?;
        }
    }
    Ok(())
}

/// The global Euclidean norm of all gradients. Squares are summed in f64 in the order of names. Fails if a
/// gradient contains NaN or infinite values.
pub fn norm(gradients: &BTreeMap<String, Tensor>) -> Result<f64> {
    let sums = squares(gradients)?.map_or(Ok(Vec::new()), |sums| transfer::values::<f64>(&sums, Cause::Step));
    norm_of(&gradients.keys().zip(sums.map_err(|e| Error::candle("the gradient norm", e))?).collect())
}

/// Scales all gradients by one factor so that their [`norm`] is at most `max_norm`. Returns the norm
/// before clipping.
pub fn clip(gradients: &mut BTreeMap<String, Tensor>, max_norm: f64) -> Result<f64> {
    let norm = norm(gradients)?;
    scale_to_norm(gradients, norm, max_norm)?;
    Ok(norm)
}

/// Returns a scaled copy: gradients may share memory.
fn scaled(gradient: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if !on_host(gradient.device()) || gradient.dtype() != DType::F32 {
        return gradient.affine(factor, 0.0);
    }
    let mut out = vec![0.0; gradient.elem_count()];
    floats::read(&gradient.contiguous()?, |values| {
        out.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(out, values)| update::scale(values, factor as f32, out));
        Ok(())
    })?;
    Tensor::from_vec(out, gradient.dims(), gradient.device())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn gradients() -> BTreeMap<String, Tensor> {
        let tensor = Tensor::new(&[[3f32, 0.0], [0.0, 0.0]], &Device::Cpu).unwrap();
        BTreeMap::from([("a".into(), tensor.t().unwrap()), ("b".into(), Tensor::new(&[4f32], &Device::Cpu).unwrap())])
    }

    #[test]
    fn gradients_above_the_limit_are_clipped() {
        let mut long = gradients();
        assert_eq!(clip(&mut long, 1.0).unwrap(), 5.0);
        assert!((norm(&long).unwrap() - 1.0).abs() < 1e-6);
        assert!((long["b"].to_vec1::<f32>().unwrap()[0] - 0.8).abs() < 1e-6);
        let mut short = gradients();
        assert_eq!(clip(&mut short, 6.0).unwrap(), 5.0);
        assert_eq!(short["b"].to_vec1::<f32>().unwrap(), [4.0]);
        assert_eq!(norm(&BTreeMap::new()).unwrap(), 0.0);
    }

    #[test]
    fn squares_are_summed_in_chunks_of_any_length() {
        for count in [0, 1, 2, 3, 4, 7, 9] {
            let values: Vec<f32> = (0..count).map(|i| i as f32 - 2.5).collect();
            let sum: f64 = values.iter().map(|x| f64::from(x * x)).sum();
            let tensor = Tensor::from_vec(values, count, &Device::Cpu).unwrap();
            assert_eq!(squares_by_operations(&tensor).unwrap().to_scalar::<f64>().unwrap(), sum, "{count}");
        }
        let transposed = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap().t().unwrap();
        assert_eq!(squares_by_operations(&transposed).unwrap().to_scalar::<f64>().unwrap(), 30.0);
    }

    #[test]
    fn gradients_that_share_memory_are_scaled_once() {
        let one = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
        let mut shared = BTreeMap::from([("a".into(), one.clone()), ("b".into(), one.clone())]);
        clip(&mut shared, 1.0).unwrap();
        assert!((norm(&shared).unwrap() - 1.0).abs() < 1e-6);
        assert_eq!(one.to_vec1::<f32>().unwrap(), [1.0; 4]);
    }

    #[test]
    fn out_of_memory_is_not_divergence() {
        let error = failed("layer.weight")(candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into()));
        assert!(error.is_out_of_memory() && error.to_string().contains("`layer.weight`"), "{error}");
    }

    #[test]
    fn a_non_finite_gradient_is_named() {
        let mut wrong = gradients();
        wrong.insert("layer.weight".into(), Tensor::new(&[1f32, f32::NAN], &Device::Cpu).unwrap());
        let error = clip(&mut wrong, 1.0).unwrap_err();
        assert!(matches!(error, Error::Diverged { .. }) && error.to_string().contains("`layer.weight`"), "{error}");
        assert_eq!(wrong["b"].to_vec1::<f32>().unwrap(), [4.0]);
    }
}
