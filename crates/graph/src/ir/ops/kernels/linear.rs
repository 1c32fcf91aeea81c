//! Kernels for matrix products.

use std::ops::Range;

use candle_core::{CpuStorage, Result, Tensor};

use super::super::linear::by_row;
use super::super::{Backward, Linear};
use super::host::{Host, column_sums, contiguous, readable, steps};
use super::{Fused, Gradients, Kernel};
use crate::kernel::activation::activate;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::few_rows::{self, FewRows};
use crate::kernel::matmul::{Columns, Left, Rows, product};
use crate::kernel::matmul_gradient::long_product;
use crate::kernel::one_row::{self, OneRow};
use crate::kernel::scratch::cleared;

impl Kernel for Linear {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        self.fused(inputs, &[])
    }

    fn fused(&self, inputs: &[Tensor], epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        let (x, weight) = (contiguous(&inputs[0])?, contiguous(&inputs[1])?);
        let (first, second) = weight.dims2()?;
        let out = if self.input_major { second } else { first };
        let mut shape = x.dims().to_vec();
        shape.pop();
        shape.push(out);
        let fits = |like: &Tensor| like.dims() == shape && like.is_contiguous();
        if epilogue.iter().any(|step| matches!(step, Fused::AddToRows(_) | Fused::MultiplyRows(_))) {
            return Ok(None);
        }
        let bias = inputs.get(2).map(|bias| Fused::AddToColumns(bias.clone()));
        let compute = || {
            let hosts = steps(bias.iter().chain(epilogue), fits)?;
            let steps = hosts.iter().map(|step| step.map(Host::floats)).collect::<Option<Vec<_>>>()?;
            let (x, weight) = (Host::new(&x)?, Host::new(&weight)?);
            let count = shape.iter().product();
            match weight.storage()? {
                (CpuStorage::F32(kept), start) => self.multiply(x.floats()?, &kept[start..], [first, second], count, &steps),
                (CpuStorage::BF16(kept), start) => self.multiply(x.floats()?, &kept[start..], [first, second], count, &steps),
                (CpuStorage::F16(kept), start) => self.multiply(x.floats()?, &kept[start..], [first, second], count, &steps),
                _ => None,
            }
        };
        compute().map(|values| Tensor::from_vec(values, shape.as_slice(), x.device())).transpose()
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
    fn multiply<T: FewRows + OneRow>(&self, x: &[f32], weight: &[T], [first, second]: [usize; 2], count: usize, steps: &[Fused<&[f32]>]) -> Option<Vec<f32>> {
        let (inner, out) = if self.input_major { (first, second) } else { (second, first) };
        let rows = count.checked_div(out)?;
        if let Some(sparse) = SparseRows::find(x, rows, inner, steps) {
            let others: Vec<_> = steps.iter().map(|step| step.map(|values| Some(sparse.gather(values, out)))).collect::<Option<_>>()?;
            let steps: Vec<_> = others.iter().map(|step| step.map(|values| Some(values.as_slice()))).collect::<Option<_>>()?;
            let kept = match sparse.rows.len() {
                0 => Vec::new(),
                some => self.multiply(&sparse.gather(x, inner), weight, [first, second], some * out, &steps)?,
            };
            return Some(sparse.scatter(&kept, count, out));
        }
        let mut y = cleared(count);
        let epilogue = Epilogue::new(steps);
        let columns = Columns { values: weight, count: out, stride: inner };
        match self.input_major {
            true if rows == 1 => one_row::product_by_rows(&x[..inner], &Rows { values: weight, count: out, stride: out }, epilogue, &mut y),
            false if rows == 1 => one_row::product(&x[..inner], &columns, epilogue, &mut y),
            true => product(&Left::pack(x, rows, inner, inner), &Rows { values: weight, count: out, stride: out }, out, epilogue, &mut y),
            false if rows <= few_rows::MAX_ROWS => few_rows::product(x, rows, &columns, inner, epilogue, &mut y),
            false => product(&Left::pack(x, rows, inner, inner), &columns, out, epilogue, &mut y),
        }
        Some(y)
    }
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
            |range: Range<usize>| Left::pack_transposed(&left[range.start * rows..], rows, range.len(), rows),
            |range: Range<usize>| Rows { values: &right[range.start * width..], count: width, stride: width },
            &mut y,
        );
        Some(y)
    };
    compute().map(|values| Tensor::from_vec(values, (rows, width), a.device())).transpose()
}
