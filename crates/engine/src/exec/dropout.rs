//! Dropout of values in a forward pass (Srivastava et al., *Dropout: A Simple Way to Prevent Neural Networks
//! from Overfitting*, 2014), with masks that are computed again in the backward pass and in recomputed
//! segments.

use std::collections::BTreeSet;

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use super::transfer::{self, Cause};

/// The values to which dropout applies.
#[derive(Debug, Clone)]
pub struct Dropout {
    /// Probability of an element to become zero.
    pub rate: f64,
    /// Indices of the nodes that compute the values.
    pub nodes: BTreeSet<usize>,
}

/// The random numbers of a forward pass.
#[derive(Debug, Clone, Copy)]
pub struct DropoutSeed {
    /// Seed of the step.
    pub seed: u64,
    /// Number of the first sample, so that the mask of a sample does not depend on the micro-batch.
    pub first: usize,
}

/// The output function of SplitMix64 (Steele et al., *Fast Splittable Pseudorandom Number Generators*, 2014).
fn mix(state: u64) -> u64 {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

impl Dropout {
    /// The factor of each element of a value `[batch, ...]`: 0, or the reciprocal of the probability to
    /// remain.
    fn factors(&self, DropoutSeed { seed, first }: DropoutSeed, node: usize, dims: &[usize]) -> Vec<f32> {
        let width = dims.iter().skip(1).product::<usize>().max(1);
        let remaining = (1.0 / (1.0 - self.rate)) as f32;
        let mut factors = vec![0f32; dims.iter().product()];
        factors.par_chunks_mut(width).enumerate().for_each(|(row, factors)| {
            let key = [node as u64, first.wrapping_add(row) as u64].into_iter().fold(seed, |key, number| mix(key ^ number));
            for (at, factor) in factors.iter_mut().enumerate() {
                let number = (mix(key.wrapping_add(at as u64)) >> 11) as f64 / (1u64 << 53) as f64;
                *factor = if number < self.rate { 0.0 } else { remaining };
            }
        });
        factors
    }

    /// Multiplies a value, or its gradient, by the mask of the node that computes it.
    pub(super) fn apply(&self, seed: DropoutSeed, node: usize, value: Tensor) -> Result<Tensor> {
        if !self.nodes.contains(&node) {
            return Ok(value);
        }
        let factors = Tensor::from_vec(self.factors(seed, node, value.dims()), value.dims(), &Device::Cpu)?;
        value.mul(&transfer::to_device(&factors, value.device(), Cause::Batch)?.to_dtype(value.dtype())?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::DType;

    use super::super::{Inputs, MemoryTracker, Parameters, Tape};
    use super::*;
    use crate::ir::Graph;

    /// The result and the gradient of the weight, of a graph with dropout in the node `y`.
    fn run(text: &str, inputs: &Inputs, dropout: Option<Dropout>, cuts: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let graph: Graph = text.parse().unwrap();
        let weight: Vec<f32> = (0..9).map(|at| (at * 7 % 5) as f32 / 4.0 - 0.5).collect();
        let weight = Tensor::from_vec(weight, (3, 3), &Device::Cpu).unwrap();
        let (parameters, tracker) = (Parameters::from_tensors([("w".to_owned(), weight)].into(), DType::F32), MemoryTracker::default());
        let output = graph.outputs()[0].1;
        let tape = Tape::new(&graph, Device::Cpu, [output].into(), &|_| true, cuts).with_dropout(dropout);
        let seed = Some(DropoutSeed { seed: 5, first: 2 });
        let forward = tape.forward_with(seed, &parameters, inputs, &tracker, None).unwrap();
        let read = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (result, gradient) = (forward.taps()[&output].clone(), forward.taps()[&output].sin().unwrap());
        let mut sum = vec![0f32; 9];
        let mut add = |_: &str, found: Tensor| {
            read(&found).into_iter().zip(&mut sum).for_each(|(found, sum)| *sum += found);
            Ok(())
        };
        tape.backward(forward, [(output, gradient)].into(), &parameters, &tracker, &mut add).unwrap();
        (read(&result), sum)
    }

    /// Dropout is a product with the mask, also if the node is computed again in the backward pass.
    #[test]
    fn gradients_are_those_of_a_product_with_the_mask() {
        let (first, last) = ("input x: float[batch, 3]\n", "u = Linear(z, w) -> float[batch, 3]\noutput u = u\n");
        let dropped = format!("{first}param w: float[3, 3]\ny = Linear(x, w) -> float[batch, 3]\nz = Add(x, y) -> float[batch, 3]\n{last}");
        let product = format!(
            "{first}input m: float[batch, 3]\nparam w: float[3, 3]\ny = Linear(x, w) -> float[batch, 3]\nd = Mul(y, m) -> float[batch, 3]\nz = Add(x, d) -> float[batch, 3]\n{last}"
        );
        let dropout = Dropout { rate: 0.5, nodes: [0].into() };
        let values = |count: usize| (0..count).map(|at| (at * 5 % 7) as f32 / 3.0 - 1.0).collect::<Vec<f32>>();
        let x = Tensor::from_vec(values(12), (4, 3), &Device::Cpu).unwrap();
        let mask = Tensor::from_vec(dropout.factors(DropoutSeed { seed: 5, first: 2 }, 0, &[4, 3]), (4, 3), &Device::Cpu).unwrap();
        let with_mask: Inputs = BTreeMap::from([("x".to_owned(), x.clone()), ("m".to_owned(), mask)]);
        let inputs: Inputs = BTreeMap::from([("x".to_owned(), x)]);
        let expected = run(&product, &with_mask, None, &[]);
        assert_ne!(expected, run(&dropped, &inputs, None, &[]));
        for cuts in [&[][..], &[1], &[2]] {
            let (result, gradient) = run(&dropped, &inputs, Some(dropout.clone()), cuts);
            assert_eq!(result, expected.0, "{cuts:?}");
            assert!(gradient.iter().zip(&expected.1).all(|(a, b)| (a - b).abs() < 1e-6), "{cuts:?}: {gradient:?} {:?}", expected.1);
        }
    }

    #[test]
    fn masks_depend_on_seed_node_and_sample() {
        let dropout = Dropout { rate: 0.25, nodes: [3].into() };
        let seed = |seed, first| DropoutSeed { seed, first };
        let all = dropout.factors(seed(7, 0), 3, &[4, 50, 20]);
        let zeros = all.iter().filter(|factor| **factor == 0.0).count();
        assert!((900..1100).contains(&zeros), "{zeros} of 4000");
        assert!(all.iter().all(|factor| *factor == 0.0 || (*factor - 4.0 / 3.0).abs() < 1e-6));
        // Only the last samples, and in a narrower batch, of which each row has fewer tokens.
        assert_eq!(dropout.factors(seed(7, 2), 3, &[2, 50, 20]), all[2000..]);
        assert_eq!(dropout.factors(seed(7, 3), 3, &[1, 10, 20]), all[3000..3200]);
        assert_ne!(dropout.factors(seed(8, 0), 3, &[4, 50, 20]), all);
        assert_ne!(dropout.factors(seed(7, 0), 4, &[4, 50, 20]), all);
        let ones = Tensor::ones((4, 50, 20), candle_core::DType::F32, &Device::Cpu).unwrap();
        let same = |node| dropout.apply(seed(7, 0), node, ones.clone()).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(same(3) == all && same(4).iter().all(|factor| *factor == 1.0));
    }
}
