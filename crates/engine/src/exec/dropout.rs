//! Dropout of values in a forward pass (Srivastava et al., *Dropout: A Simple Way to Prevent Neural Networks
//! from Overfitting*, 2014), with masks that are computed again in the backward pass and in recomputed
//! segments.

use std::collections::BTreeSet;
use std::ops::Range;

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
    /// Probability of an attention probability to become zero, in all nodes of attention.
    pub attention_rate: f64,
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

/// The key of a stream of random numbers.
fn keyed(seed: u64, numbers: &[usize]) -> u64 {
    numbers.iter().fold(seed, |key, number| mix(key ^ *number as u64))
}

/// The factors of the elements of a stream from `first` on: 0, or the reciprocal of the probability to
/// remain.
fn fill(factors: &mut [f32], rate: f64, key: u64, first: usize) {
    let remaining = (1.0 / (1.0 - rate)) as f32;
    for (at, factor) in factors.iter_mut().enumerate() {
        let number = (mix(key.wrapping_add((first + at) as u64)) >> 11) as f64 / (1u64 << 53) as f64;
        *factor = if number < rate { 0.0 } else { remaining };
    }
}

impl Dropout {
    /// The factor of each element of a value `[batch, ...]`: 0, or the reciprocal of the probability to
    /// remain.
    fn factors(&self, DropoutSeed { seed, first }: DropoutSeed, node: usize, dims: &[usize]) -> Vec<f32> {
        let width = dims.iter().skip(1).product::<usize>().max(1);
        let mut factors = vec![0f32; dims.iter().product()];
        factors.par_chunks_mut(width).enumerate().for_each(|(row, factors)| {
            fill(factors, self.rate, keyed(seed, &[node, first.wrapping_add(row)]), 0);
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

/// The mask of the attention probabilities of a node.
pub(super) struct AttentionMask<'d> {
    pub dropout: &'d Dropout,
    pub seed: DropoutSeed,
    pub node: usize,
}

impl AttentionMask<'_> {
    /// The factors for ranges of queries and keys: `[batch, heads, queries, keys]`. They depend neither on
    /// the ranges nor on the number of keys.
    pub fn factors(&self, [batch, heads]: [usize; 2], [queries, keys]: [&Range<usize>; 2], device: &Device) -> Result<Tensor> {
        let (DropoutSeed { seed, first }, rate) = (self.seed, self.dropout.attention_rate);
        let mut factors = vec![0f32; batch * heads * queries.len() * keys.len()];
        factors.par_chunks_mut(keys.len().max(1)).enumerate().for_each(|(at, factors)| {
            let (row, query) = (at / queries.len(), queries.start + at % queries.len());
            let key = keyed(seed, &[self.node, first.wrapping_add(row / heads), row % heads, query]);
            fill(factors, rate, key, keys.start);
        });
        let factors = Tensor::from_vec(factors, (batch, heads, queries.len(), keys.len()), &Device::Cpu)?;
        transfer::to_device(&factors, device, Cause::Batch)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use candle_core::DType;

    use super::super::{Inputs, MemoryTracker, Parameters, Tape};
    use super::*;
    use crate::ir::Graph;

    const SEED: DropoutSeed = DropoutSeed { seed: 5, first: 2 };

    /// The result of a graph, and the gradient of its weight.
    fn run(text: &str, weight: &Tensor, inputs: &Inputs, dropout: Option<Dropout>, cuts: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let graph: Graph = text.parse().unwrap();
        let (parameters, tracker) = (Parameters::from_tensors([("w".to_owned(), weight.clone())].into(), DType::F32), MemoryTracker::default());
        let output = graph.outputs()[0].1;
        let tape = Tape::new(&graph, Device::Cpu, [output].into(), &|_| true, cuts).with_dropout(dropout);
        let forward = tape.forward_with(Some(SEED), &parameters, inputs, &tracker, None).unwrap();
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

    fn golden() -> HashMap<String, Tensor> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training/dropout.safetensors");
        candle_core::safetensors::load(path, &Device::Cpu).unwrap()
    }

    fn require_equal(what: &str, found: &[f32], expected: &[f32]) {
        let is_equal = found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(is_equal, "{what}: {found:?} instead of {expected:?}");
    }

    /// Results and gradients are those of PyTorch with the same mask (`scripts/goldens dropout`), also if the
    /// node is computed again in the backward pass.
    #[test]
    fn results_and_gradients_equal_those_of_pytorch() {
        let golden = golden();
        let values = |name: &str| golden[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let dropout = Dropout { rate: 0.4, nodes: [0].into(), attention_rate: 0.0 };
        let kept: Vec<f32> = dropout.factors(SEED, 0, &[4, 3]).into_iter().map(|factor| f32::from(factor > 0.0)).collect();
        assert_eq!(kept, values("mask"));
        let graph = "input x: float[batch, 3]\nparam w: float[3, 3]\ny = Linear(x, w) -> float[batch, 3]\nz = Add(x, y) -> float[batch, 3]\nu = Linear(z, w) -> float[batch, 3]\noutput u = u\n";
        let inputs: Inputs = [("x".to_owned(), golden["x"].clone())].into();
        for cuts in [&[][..], &[1], &[2]] {
            let (result, gradient) = run(graph, &golden["w"], &inputs, Some(dropout.clone()), cuts);
            require_equal("result", &result, &values("u"));
            require_equal("gradient", &gradient, &values("gradient"));
        }
        assert_ne!(run(graph, &golden["w"], &inputs, None, &[]).0, values("u"));
    }

    /// Causal attention with fewer heads of keys, and its gradients, with the mask of each sample and head.
    #[test]
    fn attention_equals_that_of_pytorch() {
        let golden = golden();
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let dropout = Dropout { rate: 0.0, nodes: BTreeSet::new(), attention_rate: 0.4 };
        let mask = AttentionMask { dropout: &dropout, seed: SEED, node: 0 }.factors([2, 4], [&(0..6), &(0..6)], &Device::Cpu).unwrap();
        let kept: Vec<f32> = values(&mask).into_iter().map(|factor| f32::from(factor > 0.0)).collect();
        assert_eq!(kept, values(&golden["probabilities"]));
        let text = ATTENTION.replace("input ", "param ").replace("batch", "2");
        let graph: Graph = text.parse().unwrap();
        let inputs = ["q", "k", "v"].map(|name| (name.to_owned(), golden[name].clone()));
        let (parameters, tracker) = (Parameters::from_tensors(inputs.into(), DType::F32), MemoryTracker::default());
        let output = graph.outputs()[0].1;
        let tape = Tape::new(&graph, Device::Cpu, [output].into(), &|_| true, &[]).with_dropout(Some(dropout.clone()));
        let forward = tape.forward_with(Some(SEED), &parameters, &Inputs::new(), &tracker, None).unwrap();
        let attended = forward.taps()[&output].clone();
        require_equal("output", &values(&attended), &values(&golden["attended"]));
        let mut gradients = Vec::new();
        let mut add = |name: &str, found: Tensor| {
            gradients.push((name.to_owned(), values(&found)));
            Ok(())
        };
        tape.backward(forward, [(output, attended.sin().unwrap())].into(), &parameters, &tracker, &mut add).unwrap();
        gradients.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(gradients.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["k", "q", "v"]);
        for (name, gradient) in gradients {
            require_equal(&name, &gradient, &values(&golden[&format!("{name}_gradient")]));
        }
    }

    /// A node of attention with two samples, and the dropout of its probabilities.
    const ATTENTION: &str = "input q: float[batch, 4, 6, 3]\ninput k: float[batch, 2, 6, 3]\ninput v: float[batch, 2, 6, 5]\n\
        y = Attention{\"scale\":0.5,\"causal\":true,\"window\":null}(q, k, v) -> float[batch, 4, 6, 5]\noutput y = y\n";

    fn attention(rate: f64, seed: Option<DropoutSeed>, inputs: &Inputs) -> Vec<f32> {
        let graph: Graph = ATTENTION.parse().unwrap();
        let (parameters, tracker) = (Parameters::from_tensors(std::collections::BTreeMap::new(), DType::F32), MemoryTracker::default());
        let output = graph.outputs()[0].1;
        let dropout = Dropout { rate: 0.0, nodes: BTreeSet::new(), attention_rate: rate };
        let tape = Tape::new(&graph, Device::Cpu, [output].into(), &|_| true, &[]).with_dropout(Some(dropout));
        let forward = tape.forward_with(seed, &parameters, inputs, &tracker, None).unwrap();
        forward.taps()[&output].flatten_all().unwrap().to_vec1::<f32>().unwrap()
    }

    /// The expectation over seeds is the output without dropout, which evaluations compute.
    #[test]
    fn dropped_attention_has_the_expected_output() {
        const SEEDS: usize = 2000;
        let number = |at: usize| ((at * at * 7919 + 31 * at) % 1013) as f32 / 506.0 - 1.0;
        let random = |dims: [usize; 4]| Tensor::from_vec((0..dims.iter().product()).map(number).collect::<Vec<f32>>(), &dims, &Device::Cpu).unwrap();
        let inputs: Inputs =
            [("q", random([2, 4, 6, 3])), ("k", random([2, 2, 6, 3])), ("v", random([2, 2, 6, 5]))].map(|(name, value)| (name.to_owned(), value)).into();
        let plain = attention(0.0, Some(SEED), &inputs);
        assert!(attention(0.4, None, &inputs) == plain, "evaluations have dropout");
        let (mut sums, mut squares) = (vec![0f64; plain.len()], vec![0f64; plain.len()]);
        for seed in 0..SEEDS {
            let found = attention(0.4, Some(DropoutSeed { seed: seed as u64, first: 0 }), &inputs);
            for ((sum, square), value) in sums.iter_mut().zip(&mut squares).zip(&found) {
                *sum += f64::from(*value);
                *square += f64::from(*value).powi(2);
            }
        }
        for ((sum, square), plain) in sums.iter().zip(&squares).zip(&plain) {
            let mean = sum / SEEDS as f64;
            let error = ((square / SEEDS as f64 - mean * mean).max(0.0) / SEEDS as f64).sqrt();
            assert!(error > 0.0 && (mean - f64::from(*plain)).abs() < 5.0 * error, "{mean} instead of {plain}, with an error of {error}");
        }
    }

    /// A sample has the same mask in another micro-batch, with fewer tokens, and in other blocks.
    #[test]
    fn masks_of_attention_depend_on_seed_node_sample_head_and_position() {
        let dropout = Dropout { rate: 0.0, nodes: BTreeSet::new(), attention_rate: 0.25 };
        let factors = |seed, first, node, sizes: [usize; 2], [queries, keys]: [Range<usize>; 2]| {
            let mask = AttentionMask { dropout: &dropout, seed: DropoutSeed { seed, first }, node };
            mask.factors(sizes, [&queries, &keys], &Device::Cpu).unwrap()
        };
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let all = factors(7, 0, 3, [3, 4], [0..20, 0..20]);
        let zeros = values(&all).iter().filter(|factor| **factor == 0.0).count();
        assert!((1080..1320).contains(&zeros), "{zeros} of 4800");
        let part = all.narrow(0, 2, 1).unwrap().narrow(2, 5, 10).unwrap().narrow(3, 2, 13).unwrap();
        assert_eq!(values(&factors(7, 2, 3, [1, 4], [5..15, 2..15])), values(&part));
        let streams = [all.clone(), factors(8, 0, 3, [3, 4], [0..20, 0..20]), factors(7, 0, 4, [3, 4], [0..20, 0..20])].map(|factors| values(&factors));
        assert!(streams[0] != streams[1] && streams[0] != streams[2]);
        let heads: BTreeSet<Vec<u32>> = values(&all).chunks(20).map(|row| row.iter().map(|factor| factor.to_bits()).collect()).collect();
        assert!(heads.len() > 230, "{} different rows of 240", heads.len());
    }

    #[test]
    fn masks_depend_on_seed_node_and_sample() {
        let dropout = Dropout { rate: 0.25, nodes: [3].into(), attention_rate: 0.0 };
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
