//! Gradients, op by op: what the walk backwards over a graph asks of each node.

use candle_core::{Result, Tensor, Var};

/// An input, or the output, of a node as it is remembered for the way back.
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

/// What is known on the way back through a node.
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

/// Gradients with respect to the inputs, by computing the node once more with `eval`, whose primitives have gradients.
///
/// # Errors
/// The device runs out of memory.
pub fn replay(eval: &dyn Fn(&[Tensor]) -> Result<Tensor>, backward: &Backward) -> Result<Vec<Option<Tensor>>> {
    let mut variables = Vec::with_capacity(backward.inputs.len());
    let mut inputs = Vec::with_capacity(backward.inputs.len());
    for (input, wanted) in backward.inputs.iter().zip(backward.wanted) {
        let tensor = input.tensor()?;
        if *wanted && tensor.dtype().is_float() {
            let variable = Var::from_tensor(tensor)?;
            inputs.push(variable.as_tensor().clone());
            variables.push(Some(variable));
        } else {
            inputs.push(tensor.clone());
            variables.push(None);
        }
    }
    let output = eval(&inputs)?;
    let gradients = (output * backward.gradient)?.sum_all()?.backward()?;
    Ok(variables.iter().map(|variable| variable.as_ref().and_then(|variable| gradients.get(variable).cloned())).collect())
}
