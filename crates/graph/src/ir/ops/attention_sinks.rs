//! Attention sinks: a score of each head that takes a part of its softmax, as that of a key without a value.

use candle_core::{Result, Tensor};

/// The softmax of scores `[batch, groups, rows, keys]`, of which sinks `[heads]` take a part.
pub(super) fn softmax_with(scores: &Tensor, sinks: &Tensor, softmax: fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (batch, groups, rows, keys) = scores.dims4()?;
    let shared = sinks.dim(0)? / groups.max(1);
    let column = sinks.to_dtype(scores.dtype())?.reshape((1, groups, shared, 1))?;
    let column = column.broadcast_as((batch, groups, shared, rows / shared.max(1)))?.contiguous()?.reshape((batch, groups, rows, 1))?;
    softmax(&Tensor::cat(&[scores, &column], 3)?)?.narrow(3, 0, keys)?.contiguous()
}

/// The gradient of sinks `[heads]`, from the probabilities of keys and their gradient, both `[batch, groups,
/// rows, keys]`: the share of a sink times the mean gradient of the keys that it takes the share from.
pub(super) fn gradient(probabilities: &Tensor, gradient: &Tensor, heads: usize) -> Result<Tensor> {
    let share = (1.0 - probabilities.sum_keepdim(3)?)?;
    let taken = (share * (probabilities * gradient)?.sum_keepdim(3)?)?.neg()?;
    taken.reshape((probabilities.dim(0)?, heads, ()))?.sum(2)?.sum(0)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use crate::ir::ops::{Attention, Backward, OpSpec, Saved};

    /// A sink equals a key of zeros with a bias, and a value of zeros.
    #[test]
    fn sinks_equal_a_key_without_a_value() {
        let random = |shape: &[usize]| Tensor::randn(0f32, 1f32, shape, &Device::Cpu).unwrap();
        let (q, k, v, sinks) = (random(&[2, 4, 150, 8]), random(&[2, 2, 150, 8]), random(&[2, 2, 150, 12]), random(&[4]));
        let gradient = random(&[2, 4, 150, 12]);
        let column = sinks.reshape((4, 1, 1)).unwrap().broadcast_as((4, 150, 1)).unwrap();
        let bias = Tensor::cat(&[random(&[4, 150, 150]).zeros_like().unwrap(), column.contiguous().unwrap()], 2).unwrap();
        let run = |inputs: [Tensor; 4]| {
            let (op, saved) = (Attention { scale: 0.4, ..Attention::default() }, inputs.clone().map(Saved::full));
            let output = op.eval(&inputs).unwrap();
            let gradients = op.backward(&Backward { inputs: &saved, output: &Saved::full(output.clone()), gradient: &gradient, needs_gradient: &[true; 4] });
            let [of_queries, _, _, of_last] = <[_; 4]>::try_from(gradients.unwrap()).unwrap().map(Option::unwrap);
            [output, of_queries, of_last]
        };
        let [longer_k, longer_v] = [&k, &v].map(|rows| rows.pad_with_zeros(2, 0, 1).unwrap());
        let mut expected = run([q.clone(), longer_k, longer_v, bias]);
        expected[2] = expected[2].narrow(2, 150, 1).unwrap().sum((1, 2)).unwrap();
        for (found, expected) in run([q, k, v, sinks]).iter().zip(&expected) {
            assert!((found - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() < 2e-4);
        }
    }
}
