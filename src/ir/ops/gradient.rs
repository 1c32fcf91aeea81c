//! Gradients, op by op: what the walk backwards over a graph asks of each node.

use candle_core::{DType, Result, Tensor};

/// An input, or the output, of a node as it is remembered for its gradient.
#[derive(Debug, Clone)]
pub struct Saved {
    dims: Vec<usize>,
    tensor: Option<Tensor>,
}

impl Saved {
    /// A value with its elements.
    pub fn whole(tensor: Tensor) -> Saved {
        Saved { dims: tensor.dims().to_vec(), tensor: Some(tensor) }
    }

    /// A value of which only the shape is remembered.
    pub fn shape(dims: &[usize]) -> Saved {
        Saved { dims: dims.to_vec(), tensor: None }
    }

    /// The shape.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The elements.
    ///
    /// # Errors
    /// They were not kept: the op did not say that it reads them.
    pub fn tensor(&self) -> Result<&Tensor> {
        match &self.tensor {
            Some(tensor) => Ok(tensor),
            None => candle_core::bail!("a value that the gradient needs was not kept"),
        }
    }
}

/// What is known when gradients go back through a node.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The inputs.
    pub inputs: &'a [Saved],
    /// The output.
    pub output: &'a Saved,
    /// Gradient with respect to the output, of its shape.
    pub gradient: &'a Tensor,
    /// For which inputs a gradient is wanted.
    pub wanted: &'a [bool],
}

impl Backward<'_> {
    /// The gradient of one input, if it is wanted.
    pub(super) fn of(&self, input: usize, gradient: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        if self.wants(input) { gradient().map(Some) } else { Ok(None) }
    }

    /// Whether the gradient of this input is wanted.
    pub(super) fn wants(&self, input: usize) -> bool {
        self.wanted.get(input).is_some_and(|wanted| *wanted)
    }
}

/// The tensor in 32 bits if it has 16: sums, exponents and roots need them.
pub(super) fn wide(tensor: &Tensor) -> Result<Tensor> {
    if is_half(tensor) { tensor.to_dtype(DType::F32) } else { Ok(tensor.clone()) }
}

/// Whether elements have 16 bits.
pub(super) fn is_half(tensor: &Tensor) -> bool {
    matches!(tensor.dtype(), DType::BF16 | DType::F16)
}

/// The gradient of a tensor of these sizes that was spread over the gradient's axes.
pub(super) fn summed_to(gradient: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if gradient.dims() == dims {
        return Ok(gradient.clone());
    }
    let lead = gradient.rank().saturating_sub(dims.len());
    let spread: Vec<usize> = (0..gradient.rank()).filter(|&axis| axis < lead || dims[axis - lead] != gradient.dims()[axis]).collect();
    wide(gradient)?.sum_keepdim(spread)?.to_dtype(gradient.dtype())?.reshape(dims)
}

/// Up to how many target rows [`sum_rows_by_index`] multiplies by a one-hot matrix on a device, and how many elements of it are in
/// memory at a time.
const FEW_ROWS: usize = 4096;
const ONE_HOT: usize = if cfg!(test) { 64 } else { 1 << 24 };

/// Returns `[count, width]` in which row `i` is the sum of those of `rows` `[n, width]` whose index is `i`.
pub(super) fn sum_rows_by_index(rows: &Tensor, indices: &Tensor, count: usize) -> Result<Tensor> {
    // candle's `index_add` on a GPU has one thread per column, which walks over all indices.
    if rows.device().is_cpu() || count > FEW_ROWS {
        Tensor::zeros((count, rows.dim(1)?), rows.dtype(), rows.device())?.index_add(indices, rows, 0)
    } else {
        sum_rows_by_product(rows, indices, count)
    }
}

fn sum_rows_by_product(rows: &Tensor, indices: &Tensor, count: usize) -> Result<Tensor> {
    let (n, piece) = (rows.dim(0)?, (ONE_HOT / count.max(1)).max(1));
    let targets = Tensor::arange(0u32, count as u32, rows.device())?.unsqueeze(1)?;
    let indices = indices.to_dtype(DType::U32)?.unsqueeze(0)?;
    let mut sum = Tensor::zeros((count, rows.dim(1)?), rows.dtype(), rows.device())?;
    for at in (0..n).step_by(piece) {
        let length = piece.min(n - at);
        let one_hot = targets.broadcast_eq(&indices.narrow(1, at, length)?)?.to_dtype(rows.dtype())?;
        sum = (sum + one_hot.matmul(&rows.narrow(0, at, length)?.contiguous()?)?)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_are_summed_by_index_in_both_ways() {
        for (n, count) in [(1, 1), (5, 3), (50, 7), (33, 100)] {
            let values: Vec<f32> = (0..n * 3).map(|i| i as f32).collect();
            let rows = Tensor::from_vec(values, (n, 3), &Device::Cpu).unwrap();
            let indices = Tensor::from_vec((0..n).map(|i| (i * i % count) as u32).collect::<Vec<_>>(), n, &Device::Cpu).unwrap();
            let expected = sum_rows_by_index(&rows, &indices, count).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(sum_rows_by_product(&rows, &indices, count).unwrap().to_vec2::<f32>().unwrap(), expected, "{n} {count}");
            let by_hand: f32 = (0..n).filter(|i| i * i % count == 0).map(|i| (i * 3) as f32).sum();
            assert_eq!(expected[0][0], by_hand);
        }
    }
}
