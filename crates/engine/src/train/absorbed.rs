//! Weights that absorb an adapter: the forward pass uses the quantized sum of a weight and the product of
//! trained factors, with the scales of the weight, as the absorbable adapters of NNCF do.

use candle_core::Tensor;

/// A weight that absorbs an adapter.
#[derive(Debug, Clone)]
pub struct Absorbed {
    /// Names of the factors `[rank, in]` and `[out, rank]`.
    pub factors: [String; 2],
    /// Factor of the product.
    pub scale: f64,
    /// Whether the weight is stored as `[in, out]`.
    pub input_major: bool,
}

impl Absorbed {
    /// The sum of a weight and the scaled product of the factors.
    pub(super) fn sum(&self, weight: &Tensor, [inner, outer]: [&Tensor; 2]) -> candle_core::Result<Tensor> {
        let product = outer.matmul(inner)?.affine(self.scale, 0.0)?;
        weight + if self.input_major { product.t()? } else { product }
    }

    /// The gradients of both factors, from that of the weight: rounding passes it unchanged (straight-through
    /// estimator).
    pub(super) fn gradients(&self, gradient: &Tensor, [inner, outer]: [&Tensor; 2]) -> candle_core::Result<[Tensor; 2]> {
        let gradient = gradient.to_dtype(inner.dtype())?;
        let gradient = if self.input_major { gradient.t()? } else { gradient }.affine(self.scale, 0.0)?.contiguous()?;
        Ok([outer.t()?.contiguous()?.matmul(&gradient)?, gradient.matmul(&inner.t()?.contiguous()?)?])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn gradients_are_those_of_the_sum() {
        let var = |dims: [usize; 2]| Var::from_tensor(&Tensor::randn(0f32, 1.0, &dims[..], &Device::Cpu).unwrap()).unwrap();
        for input_major in [false, true] {
            let absorbed = Absorbed { factors: ["a", "b"].map(str::to_owned), scale: 1.5, input_major };
            let (inner, outer, weight) = (var([2, 5]), var([3, 2]), var(if input_major { [5, 3] } else { [3, 5] }));
            let weights = var(if input_major { [5, 3] } else { [3, 5] });
            let sum = absorbed.sum(&weight, [&inner, &outer]).unwrap();
            let store = (sum * weights.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
            let found = absorbed.gradients(&weights, [&inner, &outer]).unwrap();
            for (found, factor) in found.iter().zip([&inner, &outer]) {
                let difference = (found - store.get(factor).unwrap()).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
                assert!(difference.to_scalar::<f32>().unwrap() < 1e-5, "{input_major}");
            }
        }
    }
}
