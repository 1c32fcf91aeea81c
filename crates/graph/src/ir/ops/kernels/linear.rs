//! Kernels for matrix products.

use std::ops::Range;

use candle_core::{CpuStorage, Result, Tensor};

use super::super::linear::by_row;
use super::super::{Backward, Linear};
use super::host::{Host, column_sums, contiguous, readable, steps};
use super::{Fused, Gradients, Kernel};
use crate::kernel::activation::activate;
use crate::kernel::coded::CodedMatrix;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::few_rows::FewRows;
use crate::kernel::linear::{LinearWeight, product};
use crate::kernel::matmul_gradient::long_product;
use crate::kernel::one_row::OneRow;
use crate::kernel::operands::{Columns, LeftRows, Rows};
use crate::kernel::scratch::cleared;

impl Kernel for Linear {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        self.fused(inputs, &[])
    }

    fn fused(&self, inputs: &[Tensor], epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        let weight = contiguous(&inputs[1])?;
        let (first, second) = weight.dims2()?;
        let [width, inner] = if self.input_major { [second, first] } else { [first, second] };
        let Some(host) = Host::new(&weight) else { return Ok(None) };
        let compute = |x: &[f32], count: usize, steps: &[Fused<&[f32]>]| match host.storage()? {
            (CpuStorage::F32(kept), start) => self.multiply_stored(x, &kept[start..], [inner, width], count, steps),
            (CpuStorage::BF16(kept), start) => self.multiply_stored(x, &kept[start..], [inner, width], count, steps),
            (CpuStorage::F16(kept), start) => self.multiply_stored(x, &kept[start..], [inner, width], count, steps),
            _ => None,
        };
        with_epilogue(&inputs[0], width, inputs.get(2), epilogue, compute)
    }

    fn coded(&self, inputs: &[Tensor], weight: &CodedMatrix, epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        let [width, inner] = weight.shape();
        with_epilogue(&inputs[0], width, inputs.get(1), epilogue, |x, count, steps| multiply(x, weight, [inner, width], count, steps))
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let weight = backward.inputs[1].dims();
        let (out, inner) = if self.input_major { (weight[1], weight[0]) } else { (weight[0], weight[1]) };
        let gradient = by_row(backward.gradient, out)?;
        let mut found = vec![None; backward.inputs.len()];
        if backward.needs_gradient(0) {
            // A linear layer with the transposed weight.
            let transposed = Linear { input_major: !self.input_major };
            let Some(of_input) = transposed.forward(&[backward.gradient.clone(), backward.inputs[1].tensor()?.clone()])? else { return Ok(None) };
            found[0] = Some(of_input);
        }
        if backward.needs_gradient(1) {
            let x = by_row(backward.inputs[0].tensor()?, inner)?;
            let product = if self.input_major { transposed_product(&x, &gradient)? } else { transposed_product(&gradient, &x)? };
            let Some(of_weight) = product else { return Ok(None) };
            found[1] = Some(of_weight.to_dtype(backward.inputs[1].tensor()?.dtype())?);
        }
        if backward.needs_gradient(2) {
            let Some(of_bias) = column_sums(&gradient)? else { return Ok(None) };
            found[2] = Some(of_bias);
        }
        Ok(Some(found))
    }
}

impl Linear {
    fn multiply_stored<T: FewRows + OneRow>(
        &self,
        x: &[f32],
        values: &[T],
        [inner, width]: [usize; 2],
        count: usize,
        steps: &[Fused<&[f32]>],
    ) -> Option<Vec<f32>> {
        match self.input_major {
            true => multiply(x, &Rows { values, count: width, stride: width }, [inner, width], count, steps),
            false => multiply(x, &Columns { values, count: width, stride: inner }, [inner, width], count, steps),
        }
    }
}

/// Computes an output of `width` columns from the rows of `x`, the number of elements of the output, and its
/// epilogue with the bias.
fn with_epilogue(
    x: &Tensor,
    width: usize,
    bias: Option<&Tensor>,
    epilogue: &[Fused<Tensor>],
    compute: impl Fn(&[f32], usize, &[Fused<&[f32]>]) -> Option<Vec<f32>>,
) -> Result<Option<Tensor>> {
    let x = contiguous(x)?;
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(width);
    let fits = |like: &Tensor| like.dims() == shape && like.is_contiguous();
    if epilogue.iter().any(|step| matches!(step, Fused::AddToRows(_) | Fused::MultiplyRows(_))) {
        return Ok(None);
    }
    let bias = bias.map(|bias| Fused::AddToColumns(bias.clone()));
    let computed = || {
        let hosts = steps(bias.iter().chain(epilogue), fits)?;
        let steps = hosts.iter().map(|step| step.map(Host::floats)).collect::<Option<Vec<_>>>()?;
        compute(Host::new(&x)?.floats()?, shape.iter().product(), &steps)
    };
    computed().map(|values| Tensor::from_vec(values, shape.as_slice(), x.device())).transpose()
}

fn multiply(x: &[f32], weight: &impl LinearWeight, [inner, width]: [usize; 2], count: usize, steps: &[Fused<&[f32]>]) -> Option<Vec<f32>> {
    let rows = count.checked_div(width)?;
    if let Some(sparse) = SparseRows::find(x, rows, inner, steps) {
        let others: Vec<_> = steps.iter().map(|step| step.map(|values| Some(sparse.gather(values, width)))).collect::<Option<_>>()?;
        let steps: Vec<_> = others.iter().map(|step| step.map(|values| Some(values.as_slice()))).collect::<Option<_>>()?;
        let kept = match sparse.rows.len() {
            0 => Vec::new(),
            some => multiply(&sparse.gather(x, inner), weight, [inner, width], some * width, &steps)?,
        };
        return Some(sparse.scatter(&kept, count, width));
    }
    let mut y = cleared(count);
    product(x, rows, inner, weight, width, Epilogue::new(steps), &mut y);
    Some(y)
}

/// The nonzero rows of an input, if they are at most half of all rows and the epilogue maps zero rows to
/// zero. This is the input of an expert.
struct SparseRows {
    rows: Vec<usize>,
}

impl SparseRows {
    fn find(x: &[f32], rows: usize, inner: usize, steps: &[Fused<&[f32]>]) -> Option<SparseRows> {
        let keeps = |step: &Fused<&[f32]>| match step {
            Fused::Activate(function) => {
                let mut zero = [0.0];
                activate(*function, &mut zero);
                zero == [0.0]
            }
            Fused::Multiply(_) => true,
            _ => false,
        };
        if inner == 0 || !steps.iter().all(keeps) {
            return None;
        }
        let rows_of_x = x.chunks_exact(inner).take(rows).enumerate();
        let some: Vec<usize> = rows_of_x.filter(|(_, row)| row.iter().any(|value| *value != 0.0)).map(|(index, _)| index).collect();
        (some.len() <= rows / 2).then_some(SparseRows { rows: some })
    }

    /// Gathers these rows of a matrix.
    fn gather(&self, values: &[f32], width: usize) -> Vec<f32> {
        self.rows.iter().flat_map(|row| &values[row * width..][..width]).copied().collect()
    }

    /// Scatters rows into a zero matrix.
    fn scatter(&self, kept: &[f32], count: usize, width: usize) -> Vec<f32> {
        let mut y = cleared(count);
        self.rows.iter().zip(kept.chunks_exact(width)).for_each(|(row, values)| y[row * width..][..width].copy_from_slice(values));
        y
    }
}

/// `aᵀ b` for two matrices with the same number of rows; `None` if the kernel does not support them.
pub(super) fn transposed_product(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    let ((inner, rows), (_, width)) = (a.dims2()?, b.dims2()?);
    if !readable([a, b]) {
        return Ok(None);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let compute = || {
        let (left, right) = (Host::new(&a)?, Host::new(&b)?);
        let (left, right) = (left.floats()?, right.floats()?);
        let mut y = cleared(rows * width);
        long_product(
            [rows, inner, width],
            |range: Range<usize>| LeftRows::transposed(&left[range.start * rows..], rows, range.len(), rows),
            |range: Range<usize>| Rows { values: &right[range.start * width..], count: width, stride: width },
            &mut y,
        );
        Some(y)
    };
    compute().map(|values| Tensor::from_vec(values, (rows, width), a.device())).transpose()
}
