//! Inputs of the backward pass of one node.

use candle_core::{DType, Result, Tensor};

use crate::gpu;

/// An input or the output of a node, saved in the forward pass for its gradient.
#[derive(Debug, Clone)]
pub struct Saved {
    dims: Vec<usize>,
    tensor: Option<Tensor>,
}

impl Saved {
    /// Saves the value with its elements.
    pub fn full(tensor: Tensor) -> Saved {
        Saved { dims: tensor.dims().to_vec(), tensor: Some(tensor) }
    }

    /// Saves only the shape.
    pub fn shape(dims: &[usize]) -> Saved {
        Saved { dims: dims.to_vec(), tensor: None }
    }

    /// The shape.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The elements. Fails if the elements were not saved, because the op did not declare that it reads them.
    pub fn tensor(&self) -> Result<&Tensor> {
        match &self.tensor {
            Some(tensor) => Ok(tensor),
            None => candle_core::bail!("a value that the gradient needs was not saved"),
        }
    }
}

/// Saved values and output gradient of one node.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The saved inputs.
    pub inputs: &'a [Saved],
    /// The saved output.
    pub output: &'a Saved,
    /// Gradient with respect to the output, of the same shape.
    pub gradient: &'a Tensor,
    /// Whether each input needs a gradient.
    pub needs_gradient: &'a [bool],
}

impl Backward<'_> {
    /// The gradient of one input, if it is needed.
    pub(super) fn gradient_of(&self, input: usize, gradient: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        if self.needs_gradient(input) { gradient().map(Some) } else { Ok(None) }
    }

    /// Whether the gradient of this input is needed.
    pub(super) fn needs_gradient(&self, input: usize) -> bool {
        self.needs_gradient.get(input).is_some_and(|needed| *needed)
    }
}

/// The tensor in 32 bits if it has 16, for accumulation, exponentials and roots.
pub(super) fn wide(tensor: &Tensor) -> Result<Tensor> {
    if is_half(tensor) { tensor.to_dtype(DType::F32) } else { Ok(tensor.clone()) }
}

/// Whether elements have 16 bits.
pub(super) fn is_half(tensor: &Tensor) -> bool {
    matches!(tensor.dtype(), DType::BF16 | DType::F16)
}

/// Reduces the gradient of a broadcast result to the shape of the operand.
pub(super) fn summed_to(gradient: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if gradient.dims() == dims {
        return Ok(gradient.clone());
    }
    let lead = gradient.rank().saturating_sub(dims.len());
    let spread: Vec<usize> = (0..gradient.rank()).filter(|&axis| axis < lead || dims[axis - lead] != gradient.dims()[axis]).collect();
    if spread.iter().copied().eq(0..spread.len())
        && let Some(sums) = gpu::column_sums(gradient, dims.iter().product())?
    {
        return sums.reshape(dims);
    }
    wide(gradient)?.sum_keepdim(spread)?.to_dtype(gradient.dtype())?.reshape(dims)
}
