//! Stochastic gradient descent, with momentum and Nesterov's momentum (Sutskever et al. 2013) as in PyTorch.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::{Algorithm, Settings, StateTensor, StepContext};
use crate::kernel::update;

/// State: the velocity, if there is momentum.
pub(super) struct Sgd {
    momentum: f64,
    nesterov: bool,
}

impl Sgd {
    pub(super) fn new(settings: &Settings) -> Sgd {
        Sgd { momentum: settings.momentum, nesterov: settings.nesterov }
    }
}

impl Algorithm for Sgd {
    const PARTS: &'static [&'static str] = &["velocity"];

    fn parts(&self, _: &str, _: &[usize], own: &[usize]) -> Vec<StateTensor> {
        let parts: &[&str] = if self.momentum > 0.0 { Self::PARTS } else { &[] };
        parts.iter().map(|part| (*part, own.to_vec(), DType::F32)).collect()
    }

    fn on_host(&self, context: StepContext, _: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        let step = update::Sgd { decay: context.weight_decay as f32, momentum: self.momentum as f32, nesterov: self.nesterov, rate: context.rate as f32 };
        let elements = parameter.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
        let Some(velocity) = state.first() else {
            elements.for_each(|(x, g)| update::sgd(&step, x, g));
            return Ok(());
        };
        floats::change(velocity, |velocity: &mut [f32]| {
            elements.zip(velocity.par_chunks_mut(CHUNK)).for_each(|((x, g), u)| update::sgd_momentum(&step, x, g, u));
            Ok(())
        })
    }

    fn by_operations(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let gradient = (gradient + parameter.affine(context.weight_decay, 0.0)?)?;
        let direction = match state.first() {
            None => gradient,
            Some(velocity) => {
                let new = (velocity.affine(self.momentum, 0.0)? + &gradient)?;
                floats::assign(velocity, &new)?;
                if self.nesterov { (gradient + new.affine(self.momentum, 0.0)?)? } else { new }
            }
        };
        parameter - direction.affine(context.rate, 0.0)?
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, build};
    use super::*;
    use candle_core::Device;

    #[test]
    fn only_momentum_needs_state() {
        let ones = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
        for (momentum, bytes, expected) in [(0.0, 0, -0.5), (0.5, 16, -0.75)] {
            let parameter = ones.copy().unwrap();
            let mut optimizer = build(Kind::Sgd, &Settings { momentum, ..Settings::default() }, &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
            // Two steps: 1 - 0.5 · 1 - 0.5 · 1 without, 1 - 0.5 · 1 - 0.5 · 1.5 with momentum; then a
            // third without a gradient.
            (1..=2).for_each(|step| optimizer.update("b", &parameter, &ones, 0.5, step).unwrap());
            optimizer.update("b", &parameter, &ones.zeros_like().unwrap(), 0.5, 3).unwrap();
            let last = if momentum > 0.0 { -0.25 - 0.5 * 0.75 } else { 0.0 };
            assert_eq!(optimizer.bytes(), bytes);
            assert_eq!(parameter.to_vec1::<f32>().unwrap(), [last; 4], "{expected}");
        }
    }
}
