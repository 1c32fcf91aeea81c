//! Indices of the largest elements.

use std::ops::Range;

use candle_core::{D, DType, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::{ScalarOps, constant};
use super::gradient::wide;
use super::{Backward, OpSpec, last, require};
use crate::ir::{Dim, Element, TensorType};

/// Indices of the `count` largest elements of the last axis, largest first; of equal elements, the first
/// precedes. NaN counts as infinity. The indices have no gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopK {
    /// Number of elements.
    pub count: usize,
}

impl Default for TopK {
    fn default() -> Self {
        Self { count: 1 }
    }
}

impl OpSpec for TopK {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let size = last(inputs[0])?.fixed().ok_or("the size of the last axis must be fixed")?;
        if !(1..=size).contains(&self.count) {
            return Err(format!("{} of {size} elements cannot be selected", self.count));
        }
        let mut shape = inputs[0].shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = Dim::Fixed(self.count);
        }
        Ok(TensorType { element: Element::Int, shape })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* _ -> * _".into()
    }

    /// Selects one element after the other: candle's `arg_sort` is limited to short rows on GPUs, and has
    /// no total order of NaN.
    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = wide(&inputs[0])?;
        let size = u32::try_from(x.dim(D::Minus1)?).unwrap_or(0);
        let numbers = constant(format!("numbers of {size}"), x.device(), |device| Tensor::arange(0u32, size, device))?;
        // Of selected elements; all others are larger.
        let taken = x.ones_like()?.affine(f64::NEG_INFINITY, 0.0)?;
        let least = if x.dtype() == DType::F64 { f64::MIN } else { f32::MIN.into() };
        let is_nan = x.ne(&x)?;
        let mut left = is_nan.where_cond(&taken.neg()?, &x)?.maximum_scalar(least)?;
        let mut found = Vec::with_capacity(self.count);
        for _ in 0..self.count {
            let best = left.argmax_keepdim(D::Minus1)?;
            left = best.broadcast_eq(&numbers)?.where_cond(&taken, &left)?;
            found.push(best);
        }
        Tensor::cat(&found, D::Minus1)?.to_dtype(DType::I64)
    }

    fn backward(&self, _backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![None])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn equal_elements_keep_their_order() {
        let x = Tensor::new(&[[1f32, 3.0, -2.0, 3.0, 2.0], [f32::NAN, 0.0, f32::INFINITY, f32::NAN, f32::NEG_INFINITY]], &Device::Cpu).unwrap();
        let found = |count| TopK { count }.eval(std::slice::from_ref(&x)).unwrap().to_vec2::<i64>().unwrap();
        assert_eq!(found(3), [[1, 3, 4], [0, 2, 3]]);
        assert_eq!(found(5), [[1, 3, 4, 0, 2], [0, 2, 3, 1, 4]]);
    }

    #[test]
    fn more_elements_than_there_are_cannot_be_selected() {
        let infer = |count| TopK { count }.infer(&[&TensorType::float([2, 5])]).map(|ty| ty.to_string());
        assert_eq!(infer(5).unwrap(), "int[2, 5]");
        assert!(infer(6).unwrap_err().contains("6 of 5") && infer(0).is_err());
        assert!(TopK { count: 2 }.infer(&[&TensorType::float([Dim::named("open")])]).unwrap_err().contains("fixed"));
    }
}
