//! Kernels over rows: normalization, softmax, embedding gradients.

use candle_core::{D, Result, Tensor};

use super::super::embedding::from_start;
use super::super::{Backward, Embedding, LayerNorm, RmsNorm, Saved, Softmax};
use super::host::{Host, by_rows, combined_rows, integers, norm_back};
use super::{Fused, Gradients, Kernel};
use crate::kernel::coded::CodedMatrix;
use crate::kernel::scratch::cleared;
use crate::kernel::{rows, rows_gradient};

impl Kernel for LayerNorm {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let bias = &inputs.get(2).map_or_else(|| weight.zeros_like(), |bias| Ok(bias.clone()))?;
        let epsilon = self.epsilon as f32;
        by_rows(x, [weight, bias], |x, y, [weight, bias]| rows::layer_norm(x, y, weight, bias, epsilon))
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if backward.inputs.len() < 3 {
            return Ok(None);
        }
        let epsilon = self.epsilon as f32;
        norm_back(backward, |x, g, weight, out, sums| rows_gradient::layer_norm(x, g, weight, epsilon, out, sums))
    }
}

impl Kernel for RmsNorm {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let [x, weight] = inputs else { return Ok(None) };
        let epsilon = self.epsilon as f32;
        by_rows(x, [&self.factors(weight)?], |x, y, [weight]| rows::rms_norm(x, y, weight, epsilon))
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let epsilon = self.epsilon as f32;
        let inputs = [backward.inputs[0].clone(), Saved::full(self.factors(backward.inputs[1].tensor()?)?)];
        norm_back(&Backward { inputs: &inputs, ..*backward }, |x, g, weight, out, sums| rows_gradient::rms_norm(x, g, weight, epsilon, out, sums))
    }
}

impl Kernel for Softmax {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        if !self.over_last(inputs[0].rank()) {
            return Ok(None);
        }
        let width = inputs[0].dim(D::Minus1)?;
        let kernel = |x: &[f32], y: &mut [f32], []: [&[f32]; 0]| {
            y.copy_from_slice(x);
            rows::softmax(y, width);
        };
        by_rows(&inputs[0], [], kernel)
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !self.over_last(backward.gradient.rank()) {
            return Ok(None);
        }
        let (y, gradient) = (backward.output.tensor()?.contiguous()?, backward.gradient.contiguous()?);
        let width = y.dim(D::Minus1)?;
        let kernel = |y: &[f32], g: &[f32], out: &mut [f32]| {
            out.copy_from_slice(g);
            rows_gradient::softmax(y, out, width, 1.0);
        };
        let found = combined_rows(&y, &gradient, width, kernel).transpose()?;
        Ok(found.map(|gradient| vec![Some(gradient).filter(|_| backward.needs_gradient(0))]))
    }
}

impl Kernel for Embedding {
    fn coded(&self, inputs: &[Tensor], table: &CodedMatrix, epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        let [rows, width] = table.shape();
        let Some(indices) = integers(&from_start(&inputs[0], rows)?)?.filter(|_| epilogue.is_empty()) else { return Ok(None) };
        let mut values = cleared(indices.len() * width);
        for (index, values) in indices.into_iter().zip(values.chunks_exact_mut(width)) {
            let Some(row) = usize::try_from(index).ok().filter(|row| *row < rows) else { return Ok(None) };
            table.decode(row..row + 1, values);
        }
        Tensor::from_vec(values, [inputs[0].dims(), &[width]].concat(), inputs[0].device()).map(Some)
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let table = backward.inputs[1].dims();
        if !backward.needs_gradient(1) {
            return Ok(Some(vec![None, None]));
        }
        let rows = backward.gradient.contiguous()?;
        let Some(indices) = integers(&from_start(backward.inputs[0].tensor()?, table[0])?)? else { return Ok(None) };
        let Some(host) = Host::new(&rows) else { return Ok(None) };
        let Some(values) = host.floats() else { return Ok(None) };
        let mut sums = cleared(table.iter().product());
        rows_gradient::scatter_rows(&indices, &values[..rows.elem_count()], table[1], &mut sums);
        Ok(Some(vec![None, Some(Tensor::from_vec(sums, table, rows.device())?)]))
    }
}
