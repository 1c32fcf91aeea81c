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
