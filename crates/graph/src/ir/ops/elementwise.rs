//! Elementwise sum and product of two tensors.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::summed_to;
use super::{Backward, OpSpec, require};
use crate::ir::{Dim, Element, TensorType};

macro_rules! elementwise {
    ($(#[$meta:meta])* $name:ident, $function:ident, $reads:literal, $back:path) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {}

        impl OpSpec for $name {
            fn arity(&self) -> Range<usize> {
                2..3
            }

            fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
                broadcast(inputs[0], inputs[1])
            }

            fn axes(&self, _inputs: &[&TensorType]) -> String {
                "* c, * c -> * c".into()
            }

            fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
                inputs[0].$function(&inputs[1])
            }

            fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
                let of = |input: usize| backward.gradient_of(input, || summed_to(&$back(backward, 1 - input)?, backward.inputs[input].dims()));
                Ok(vec![of(0)?, of(1)?])
            }

            fn reads_input(&self, _input: usize) -> bool {
                $reads
            }
        }
    };
}

elementwise!(
    /// Elementwise sum with broadcasting.
    Add, broadcast_add, false, through_sum
);
elementwise!(
    /// Elementwise product with broadcasting.
    Mul, broadcast_mul, true, through_product
);

fn through_sum(backward: &Backward, _other: usize) -> candle_core::Result<Tensor> {
    Ok(backward.gradient.clone())
}

fn through_product(backward: &Backward, other: usize) -> candle_core::Result<Tensor> {
    backward.gradient.broadcast_mul(backward.inputs[other].tensor()?)
}

pub(super) fn broadcast(a: &TensorType, b: &TensorType) -> Result<TensorType, String> {
    require(a, Element::Float, "the first input")?;
    require(b, Element::Float, "the second input")?;
    Ok(TensorType { element: Element::Float, shape: broadcast_sizes(&a.shape, &b.shape)? })
}

/// The broadcast shape of two shapes, aligned at their last axes.
pub(super) fn broadcast_sizes(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, String> {
    let rank = a.len().max(b.len());
    let axis = |sizes: &[Dim], i: usize| (i + sizes.len()).checked_sub(rank).map_or(Dim::Fixed(1), |at| sizes[at].clone());
    let both = |i: usize| {
        let (x, y) = (axis(a, i), axis(b, i));
        x.broadcast(&y).ok_or_else(|| format!("sizes {x} and {y} cannot be broadcast"))
    };
    (0..rank).map(both).collect()
}
