//! Flattening of images to vectors.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, Element, TensorType};

/// `[batch, channels, height, width]` to `[batch, channels · height · width]`; with `channels_last`, to
/// `[batch, height · width · channels]`, the order of channels-last frameworks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Flatten {
    /// Whether channels vary fastest.
    pub channels_last: bool,
}

impl OpSpec for Flatten {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        let sizes: Option<Vec<usize>> = inputs[0].shape[1..].iter().map(Dim::fixed).collect();
        let sizes = sizes.ok_or("the size of the image must be fixed")?;
        let width = sizes.iter().try_fold(1usize, |width, size| width.checked_mul(*size)).ok_or("the size of the image overflows")?;
        Ok(TensorType { element: Element::Float, shape: vec![inputs[0].shape[0].clone(), Dim::Fixed(width)] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        if self.channels_last { "b c h! w! -> b (h! w! c)" } else { "b c h! w! -> b (c h! w!)" }.into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        if self.channels_last { inputs[0].permute((0, 2, 3, 1))?.flatten_from(1) } else { inputs[0].flatten_from(1) }
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.gradient_of(0, || {
            if self.channels_last {
                backward.gradient.reshape((dims[0], dims[2], dims[3], dims[1]))?.permute((0, 3, 1, 2))
            } else {
                backward.gradient.reshape(dims)
            }
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
