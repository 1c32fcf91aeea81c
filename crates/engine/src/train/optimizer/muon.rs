//! Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): the Nesterov
//! momentum of a linear layer's matrix is orthogonalized by Newton-Schulz iterations. Updates have the
//! root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so that both need
//! the same learning rate, like `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. AdamW updates all
//! other parameters.

use std::collections::BTreeSet;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::adamw::AdamW;
use super::{Algorithm, Settings, StateTensor, StepContext};
use crate::ir::ops::ScalarOps;
use crate::kernel::update;

/// Coefficients of the iteration `x ← a x + b (x xᵀ) x + c (x xᵀ)² x`.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
const ITERATIONS: usize = 5;
/// Least norm that a matrix is divided by.
const LEAST_NORM: f64 = 1e-7;
/// Root mean square of AdamW's updates, divided by the learning rate.
const UPDATE_SIZE: f64 = 0.2;

/// State: the momentum of orthogonalized matrices, both moments of other parameters.
pub(super) struct Muon {
    matrices: BTreeSet<String>,
    momentum: f64,
    adamw: AdamW,
}

impl Muon {
    pub(super) fn new(settings: &Settings) -> Muon {
        Muon { matrices: settings.linear_weights.clone(), momentum: settings.momentum, adamw: AdamW::new(settings) }
    }

    fn is_orthogonalized(&self, name: &str, dims: &[usize]) -> bool {
        dims.len() == 2 && self.matrices.contains(name)
    }

    /// Factor of a parameter due to weight decay, and factor on its orthogonalized update.
    fn factors(context: StepContext, dims: &[usize]) -> (f64, f64) {
        let longest = dims.iter().copied().max().unwrap_or(0) as f64;
        (1.0 - context.rate * context.weight_decay, context.rate * UPDATE_SIZE * longest.sqrt())
    }
}

/// The matrix `U S Vᵀ` with all singular values near 1, for a matrix with the singular vectors `U` and `V`.
fn orthogonalized(matrix: Tensor) -> Result<Tensor> {
    let (rows, columns) = matrix.dims2()?;
    if matrix.elem_count() == 0 {
        return Ok(matrix);
    }
    let norm = matrix.sqr()?.sum_all()?.sqrt()?.maximum_scalar(LEAST_NORM)?;
    let mut x = matrix.broadcast_div(&norm)?;
    drop(matrix);
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        let transposed = x.t()?;
        // Products with the smaller of both Gram matrices.
        let gram = if rows <= columns { x.matmul(&transposed)? } else { transposed.matmul(&x)? };
        let factor = (gram.matmul(&gram)?.affine(c, 0.0)? + gram.affine(b, 0.0)?)?;
        let product = if rows <= columns { factor.matmul(&x)? } else { x.matmul(&factor)? };
        x = (x.affine(a, 0.0)? + product)?;
    }
    Ok(x)
}

impl Algorithm for Muon {
    const PARTS: &'static [&'static str] = &["momentum", "mean", "square"];

    fn parts(&self, name: &str, dims: &[usize], own: &[usize]) -> Vec<StateTensor> {
        if self.is_orthogonalized(name, dims) { vec![("momentum", dims.to_vec(), DType::F32)] } else { self.adamw.parts(name, dims, own) }
    }

    fn unit(&self, name: &str, dims: &[usize]) -> usize {
        if self.is_orthogonalized(name, dims) { dims.iter().product() } else { 1 }
    }

    /// The matrix, two terms of its next value, and the products of Gram matrices.
    fn workspace_bytes(&self, name: &str, dims: &[usize]) -> u64 {
        match dims {
            [rows, columns] if self.is_orthogonalized(name, dims) => 4 * (3 * rows * columns + (*rows.min(columns)).pow(2)) as u64,
            _ => 0,
        }
    }

    fn on_host(&self, context: StepContext, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        let [momentum] = state else { return self.adamw.on_host(context, dims, parameter, gradient, state) };
        let (kept, share) = (self.momentum as f32, (1.0 - self.momentum) as f32);
        let mut direction = gradient.to_vec();
        floats::change(momentum, |momentum: &mut [f32]| {
            let elements = direction.par_chunks_mut(CHUNK).zip(momentum.par_chunks_mut(CHUNK));
            elements.for_each(|(g, m)| {
                update::approach(m, share, g);
                update::approach(g, kept, m);
            });
            Ok(())
        })?;
        let direction = orthogonalized(Tensor::from_vec(direction, dims, momentum.device())?)?;
        let (shrink, size) = Self::factors(context, dims);
        floats::read(&direction, |direction| {
            let elements = parameter.par_chunks_mut(CHUNK).zip(direction.par_chunks(CHUNK));
            elements.for_each(|(x, d)| x.iter_mut().zip(d).for_each(|(x, d)| *x = *x * shrink as f32 - size as f32 * d));
            Ok(())
        })
    }

    fn by_operations(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let [momentum] = state else { return self.adamw.by_operations(context, parameter, gradient, state) };
        let between = |from: &Tensor, to: &Tensor, share: f64| from + (to - from)?.affine(share, 0.0)?;
        let new = between(momentum, gradient, 1.0 - self.momentum)?;
        floats::assign(momentum, &new)?;
        let direction = orthogonalized(between(gradient, &new, self.momentum)?)?;
        let (shrink, size) = Self::factors(context, parameter.dims());
        parameter.affine(shrink, 0.0)? - direction.affine(size, 0.0)?
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::tests::numbers;
    use super::super::{Kind, build};
    use super::*;

    #[test]
    fn singular_values_become_similar() {
        for dims in [[40, 12], [12, 40], [30, 30]] {
            let values: Vec<f32> = numbers(dims[0] * dims[1], 3).into_iter().enumerate().map(|(i, x)| x * if i % dims[1] < 3 { 20.0 } else { 1.0 }).collect();
            let x = orthogonalized(Tensor::from_vec(values, &dims[..], &Device::Cpu).unwrap()).unwrap();
            // The diagonal of the smaller Gram matrix averages the squared singular values, of 0.7 to 1.2.
            let gram = if dims[0] <= dims[1] { x.matmul(&x.t().unwrap()) } else { x.t().unwrap().matmul(&x) }.unwrap().to_vec2::<f32>().unwrap();
            for (i, row) in gram.iter().enumerate() {
                assert!((0.2..1.6).contains(&row[i]), "{dims:?}: {row:?}");
            }
        }
        let zeros = Tensor::zeros((3, 4), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(orthogonalized(zeros.clone()).unwrap().to_vec2::<f32>().unwrap(), zeros.to_vec2::<f32>().unwrap());
    }

    #[test]
    fn only_matrices_of_linear_layers_have_momentum() {
        let settings = Settings { linear_weights: ["a".to_owned(), "kernel".to_owned()].into(), momentum: 0.9, ..Settings::default() };
        let mut optimizer = build(Kind::Muon, &settings, &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
        for (name, dims) in [("a", &[6, 4][..]), ("embedding", &[5, 4]), ("kernel", &[2, 3, 3]), ("bias", &[6])] {
            let parameter = Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
            optimizer.update(name, &parameter, &parameter.copy().unwrap(), 0.1, 1).unwrap();
        }
        let state: Vec<String> = optimizer.state().into_keys().collect();
        assert_eq!(state, ["mean/bias", "mean/embedding", "mean/kernel", "momentum/a", "square/bias", "square/embedding", "square/kernel"]);
        assert_eq!(optimizer.bytes(), 4 * (24 + 2 * (20 + 18 + 6)));
        assert_eq!((optimizer.state_bytes("a", &[6, 4]), optimizer.state_bytes("embedding", &[5, 4])), (96, 160));
        assert_eq!((optimizer.workspace_bytes("a", &[6, 4]), optimizer.workspace_bytes("embedding", &[5, 4])), (4 * (72 + 16), 0));
    }
}
