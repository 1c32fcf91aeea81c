//! Prepending of tokens to a sequence, such as a class token.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::summed_to;
use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, Element, TensorType};

/// Prepends `token: [1, n, width]` to every row of `[batch, sequence, width]`. Inputs: token, sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Prepend {}

impl OpSpec for Prepend {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        for (ty, what) in [(inputs[0], "the token"), (inputs[1], "the sequence")] {
            require_floats(ty, 3, what)?;
        }
        let (token, x) = (&inputs[0].shape, &inputs[1].shape);
        let (Some(count), Some(sequence)) = (token[1].fixed(), x[1].fixed()) else { return Err("the length of the sequence must be fixed".into()) };
        if token[0] != Dim::Fixed(1) || token[2] != x[2] {
            return Err(format!("the token must be [1, n, {}]", x[2]));
        }
        Ok(TensorType {
            element: Element::Float,
            shape: vec![x[0].clone(), Dim::Fixed(count.checked_add(sequence).ok_or("the length of the sequence overflows")?), x[2].clone()],
        })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "_ _ c, b _ c -> b _ c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (_, count, width) = inputs[0].dims3()?;
        let token = inputs[0].broadcast_as((inputs[1].dim(0)?, count, width))?.contiguous()?;
        Tensor::cat(&[&token, &inputs[1]], 1)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (token, sequence) = (backward.inputs[0].dims(), backward.inputs[1].dims());
        let of_token = backward.gradient_of(0, || summed_to(&backward.gradient.narrow(1, 0, token[1])?.contiguous()?, token))?;
        Ok(vec![of_token, backward.gradient_of(1, || backward.gradient.narrow(1, token[1], sequence[1])?.contiguous())?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
