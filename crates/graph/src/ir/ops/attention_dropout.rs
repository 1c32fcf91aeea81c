//! Dropout of attention probabilities.

use candle_core::{Result as Computed, Tensor};

use super::Backward;
use super::attention::Attention;
use super::softmax::{ProbabilityFactors, softmax};

impl Attention {
    /// The output with factors on the probabilities, after the softmax. No kernel computes it.
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub fn eval_with_factors(&self, inputs: &[Tensor], factors: ProbabilityFactors) -> Computed<Tensor> {
        self.attend(inputs, softmax, Some(factors))
    }

    /// The gradients of [`eval_with_factors`](Attention::eval_with_factors).
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub fn backward_with_factors(&self, backward: &Backward, factors: ProbabilityFactors) -> Computed<Vec<Option<Tensor>>> {
        self.differentiate(backward, Some(factors))
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use candle_core::Device;

    use super::*;
    use crate::ir::ops::{OpSpec, Saved};

    const SHAPES: [[usize; 4]; 3] = [[2, 4, 70, 3], [2, 2, 70, 3], [2, 2, 70, 5]];

    fn numbers(shape: &[usize], seed: u64) -> Tensor {
        let number = |at: usize| ((at as u64 * 7919 + seed * 104_729) % 1013) as f32 / 1013.0 - 0.5;
        Tensor::from_vec((0..shape.iter().product()).map(number).collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap()
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The sum of the outputs, each multiplied by a weight.
    fn sum(op: &Attention, inputs: &[Tensor], weights: &Tensor, factors: ProbabilityFactors) -> f64 {
        let output = values(&op.eval_with_factors(inputs, factors).unwrap());
        output.iter().zip(values(weights)).map(|(value, weight)| f64::from(*value) * f64::from(weight)).sum()
    }

    fn gradients(op: &Attention, inputs: &[Tensor], gradient: &Tensor, factors: Option<ProbabilityFactors>) -> Vec<Vec<f32>> {
        let saved: Vec<Saved> = inputs.iter().cloned().map(Saved::full).collect();
        let backward = Backward { inputs: &saved, output: &Saved::shape(gradient.dims()), gradient, needs_gradient: &[true; 3] };
        let found = factors.map_or_else(|| op.backward(&backward), |factors| op.backward_with_factors(&backward, factors));
        found.unwrap().into_iter().map(|gradient| values(&gradient.unwrap())).collect()
    }

    /// Factors of one change nothing, bit for bit.
    #[test]
    fn probabilities_without_dropout_are_unchanged() {
        let inputs: Vec<Tensor> = SHAPES.iter().zip(1..).map(|(shape, seed)| numbers(shape, seed)).collect();
        let gradient = numbers(&[2, 4, 70, 5], 4);
        let ones = |[batch, heads]: [usize; 2], [queries, keys]: [&Range<usize>; 2]| {
            Tensor::ones((batch, heads, queries.len(), keys.len()), candle_core::DType::F32, &Device::Cpu)
        };
        for op in
            [Attention::default(), Attention { causal: true, ..Attention::default() }, Attention { causal: true, window: Some(9), ..Attention::default() }]
        {
            assert!(values(&op.eval(&inputs).unwrap()) == values(&op.eval_with_factors(&inputs, &ones).unwrap()), "{op:?}");
            assert!(gradients(&op, &inputs, &gradient, None) == gradients(&op, &inputs, &gradient, Some(&ones)), "{op:?}");
        }
    }

    /// The gradients are the slopes of the output, with several blocks of queries and shared keys.
    #[test]
    fn gradients_are_the_slopes_of_the_dropped_probabilities() {
        let op = Attention { causal: true, scale: 0.7, ..Attention::default() };
        let inputs: Vec<Tensor> = SHAPES.iter().zip(5..).map(|(shape, seed)| numbers(shape, seed)).collect();
        let weights = numbers(&[2, 4, 70, 5], 8);
        assert!(op.blocks(&inputs[0], &inputs[1], false).unwrap().count() > 1);
        // A third of the probabilities is dropped.
        let factors = |[batch, heads]: [usize; 2], [queries, keys]: [&Range<usize>; 2]| {
            let each = |row: usize| (0..queries.len() * keys.len()).map(move |at| (row, at / keys.len(), at % keys.len()));
            let factor = |(row, query, key)| if (3 * row + 5 * (queries.start + query) + 7 * (keys.start + key)) % 11 < 4 { 0.0f32 } else { 1.5 };
            Tensor::from_vec((0..batch * heads).flat_map(each).map(factor).collect::<Vec<f32>>(), (batch, heads, queries.len(), keys.len()), &Device::Cpu)
        };
        let found = gradients(&op, &inputs, &weights, Some(&factors));
        for (input, gradient) in found.iter().enumerate() {
            for at in (0..gradient.len()).step_by(37) {
                let moved = |change: f32| {
                    let mut changed = inputs.clone();
                    let mut all = values(&changed[input]);
                    all[at] += change;
                    changed[input] = Tensor::from_vec(all, changed[input].shape(), &Device::Cpu).unwrap();
                    sum(&op, &changed, &weights, &factors)
                };
                let slope = (moved(0.01) - moved(-0.01)) / 0.02;
                assert!((slope - f64::from(gradient[at])).abs() < 1e-3 * (1.0 + slope.abs()), "input {input}, {at}: {} instead of {slope}", gradient[at]);
            }
        }
    }
}
