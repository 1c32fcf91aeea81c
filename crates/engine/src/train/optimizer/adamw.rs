//! AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization"), in PyTorch's order of
//! operations.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::{Algorithm, Settings, StateTensor, StepContext};
use crate::gpu;
use crate::kernel::update;

/// State: both moments in f32.
pub(super) struct AdamW {
    beta1: f64,
    beta2: f64,
    epsilon: f64,
}

impl AdamW {
    pub(super) fn new(settings: &Settings) -> AdamW {
        AdamW { beta1: settings.beta1, beta2: settings.beta2, epsilon: settings.epsilon }
    }

    /// Coefficients of a step.
    pub(super) fn coefficients(&self, context: StepContext) -> update::AdamW {
        let steps = context.step as f64;
        update::AdamW {
            shrink: (1.0 - context.rate * context.weight_decay) as f32,
            mean_share: (1.0 - self.beta1) as f32,
            square_left: self.beta2 as f32,
            square_share: (1.0 - self.beta2) as f32,
            root: (1.0 - self.beta2.powf(steps)).sqrt() as f32,
            epsilon: self.epsilon as f32,
            size: (context.rate / (1.0 - self.beta1.powf(steps))) as f32,
        }
    }

    /// Returns the new parameter and moments, computed with tensor operations.
    pub(super) fn stepped(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, mean: &Tensor, square: &Tensor) -> Result<[Tensor; 3]> {
        let step = self.coefficients(context);
        let mean = (mean + (gradient - mean)?.affine(step.mean_share.into(), 0.0)?)?;
        let square = (square.affine(step.square_left.into(), 0.0)? + gradient.sqr()?.affine(step.square_share.into(), 0.0)?)?;
        let direction = (&mean / square.sqrt()?.affine(1.0 / f64::from(step.root), step.epsilon.into())?)?;
        let parameter = (parameter.affine(step.shrink.into(), 0.0)? - direction.affine(step.size.into(), 0.0)?)?;
        Ok([parameter, mean, square])
    }
}

impl Algorithm for AdamW {
    const PARTS: &'static [&'static str] = &["mean", "square"];

    fn parts(&self, _: &str, _: &[usize], own: &[usize]) -> Vec<StateTensor> {
        Self::PARTS.iter().map(|part| (*part, own.to_vec(), DType::F32)).collect()
    }

    fn on_host(&self, context: StepContext, _: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        let step = self.coefficients(context);
        floats::change(&state[0], |mean: &mut [f32]| {
            floats::change(&state[1], |square: &mut [f32]| {
                let elements = parameter.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
                let moments = mean.par_chunks_mut(CHUNK).zip(square.par_chunks_mut(CHUNK));
                elements.zip(moments).for_each(|((x, g), (m, v))| update::adamw(&step, x, g, m, v));
                Ok(())
            })
        })
    }

    fn on_gpu(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<bool> {
        Ok(gpu::adamw(&self.coefficients(context), parameter, gradient, &state[0], &state[1])?.is_some())
    }

    fn by_operations(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let [parameter, mean, square] = self.stepped(context, parameter, gradient, &state[0], &state[1])?;
        floats::assign(&state[0], &mean)?;
        floats::assign(&state[1], &square)?;
        Ok(parameter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// The magnitude of the first step is the learning rate, independent of the gradient.
    #[test]
    fn the_first_step_has_the_size_of_the_learning_rate() {
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let mut optimizer = super::super::build(super::super::Kind::AdamW, &Settings::default(), &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
        let parameter = tensor(&[1.0, 1.0]);
        optimizer.update("b", &parameter, &tensor(&[1e-3, -5.0]), 0.25, 1).unwrap();
        for (ours, expected) in parameter.to_vec1::<f32>().unwrap().into_iter().zip([0.75f32, 1.25]) {
            assert!((ours - expected).abs() < 1e-4, "{ours}");
        }
    }
}
