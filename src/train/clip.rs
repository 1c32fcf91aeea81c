//! The length of all gradients together, and a bound to it (Pascanu et al. 2013).

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::floats::{self, CHUNK};
use crate::error::{Error, Result};
use crate::kernel::update;

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::tensor(name, format!("its gradient cannot be measured: {e}"), "")
}

/// The Euclidean norm of all gradients as one vector. Squares are summed as f64 in the order of names.
///
/// # Errors
/// A gradient that holds NaN or infinite values, by name; memory runs out.
pub fn norm(gradients: &BTreeMap<String, Tensor>) -> Result<f64> {
    let mut sums = Vec::with_capacity(gradients.len());
    // Sums of another device are fetched together: each time costs waiting for all that is under way.
    let mut waiting: Vec<Tensor> = Vec::new();
    for (name, gradient) in gradients {
        let mut sum = || match gradient.device() {
            Device::Cpu => floats::read(&floats::on_host(gradient)?, |values| Ok(Some(floats::squares(values)))),
            _ => {
                waiting.push(gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?);
                Ok(None)
            }
        };
        sums.push((name, sum().map_err(failed(name))?));
    }
    let mut fetched = Vec::new();
    if let Some(first) = gradients.keys().next().filter(|_| !waiting.is_empty()) {
        let fetch = || Tensor::stack(&waiting, 0)?.to_vec1::<f64>();
        fetched = fetch().map_err(failed(first))?;
    }
    let mut fetched = fetched.into_iter();
    let mut total = 0.0;
    for (name, sum) in sums {
        let sum = sum.or_else(|| fetched.next()).unwrap_or(f64::NAN);
        if !sum.is_finite() {
            let hint = "lower the learning rate, warm up longer, or compute in f32";
            return Err(Error::tensor(name, "its gradient holds values that are NaN or infinite", hint));
        }
        total += sum;
    }
    Ok(total.sqrt())
}

/// Shortens all gradients by one factor, so that their [`norm`] is no more than `most`; gives back what the norm was. As PyTorch's
/// `clip_grad_norm_`, down to the 1e-6 that it adds to the norm.
///
/// # Errors
/// As [`norm`].
pub fn clip(gradients: &mut BTreeMap<String, Tensor>, most: f64) -> Result<f64> {
    let norm = norm(gradients)?;
    let factor = most / (norm + 1e-6);
    if factor < 1.0 {
        for (name, gradient) in gradients.iter_mut() {
            *gradient = scaled(gradient, factor).map_err(failed(name))?;
        }
    }
    Ok(norm)
}

/// A new tensor: several gradients may share their memory.
fn scaled(gradient: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if !gradient.device().is_cpu() || gradient.dtype() != DType::F32 {
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
    use super::*;

    fn gradients() -> BTreeMap<String, Tensor> {
        let tensor = Tensor::new(&[[3f32, 0.0], [0.0, 0.0]], &Device::Cpu).unwrap();
        BTreeMap::from([("a".into(), tensor.t().unwrap()), ("b".into(), Tensor::new(&[4f32], &Device::Cpu).unwrap())])
    }

    #[test]
    fn long_gradients_are_shortened() {
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
    fn gradients_that_share_memory_are_scaled_once() {
        let one = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
        let mut shared = BTreeMap::from([("a".into(), one.clone()), ("b".into(), one.clone())]);
        clip(&mut shared, 1.0).unwrap();
        assert!((norm(&shared).unwrap() - 1.0).abs() < 1e-6);
        assert_eq!(one.to_vec1::<f32>().unwrap(), [1.0; 4]);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_named() {
        let mut wrong = gradients();
        wrong.insert("layer.weight".into(), Tensor::new(&[1f32, f32::NAN], &Device::Cpu).unwrap());
        let error = clip(&mut wrong, 1.0).unwrap_err();
        assert!(error.to_string().contains("`layer.weight`"), "{error}");
        assert_eq!(wrong["b"].to_vec1::<f32>().unwrap(), [4.0]);
    }
}
