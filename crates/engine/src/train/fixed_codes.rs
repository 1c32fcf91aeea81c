//! Quantized weights of which only the scales are trained.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::floats::failed;
use super::{QuantizerScales, scales};
use crate::error::{Error, Result};
use crate::exec::read;
use crate::exec::transfer::{self, Cause};
use crate::kernel::ggml::BlockType;
use crate::store::{ExactBlocks, Weight};

/// A quantized weight whose codes are fixed. The logarithms of factors on its scales are trained.
pub(super) trait FixedCodes: Send + Sync {
    /// Number of learned scales.
    fn learned_scales(&self) -> usize;

    /// The weight with these codes.
    fn dequantize(&self, codes: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor>;

    /// Gradient with respect to the logarithms of the scales.
    fn code_scale_gradient(&self, codes: &Tensor, learned: Option<&Tensor>, gradient: &Tensor) -> candle_core::Result<Tensor>;

    /// A weight of a model with these codes and the learned scales.
    fn written(&self, weight: (&str, &Weight), codes: &Tensor, learned: Option<&Tensor>) -> Result<Weight>;
}

/// Blocks processed by one job.
const JOB: usize = 1 << 8;

/// Blocks of a GGUF file, of which the 16-bit scales and minima are trained: all [factors of
/// blocks](BlockType::factors). The tensor of the codes has the bytes of the blocks.
pub(super) struct FixedBlocks {
    kind: BlockType,
    shape: Vec<usize>,
}

impl FixedBlocks {
    /// The blocks of a weight, with their bytes; `None` if it has none. Fails if the scales of the type are
    /// not 16-bit floats.
    pub fn from_weight(name: &str, weight: &Weight) -> Result<Option<(FixedBlocks, Tensor)>> {
        require_trainable(name, weight, QuantizerScales::Only)?;
        let Some(ExactBlocks { kind, .. }) = weight.exact_blocks() else { return Ok(None) };
        let bytes = weight.blocks()?;
        let count = bytes.len();
        let bytes = Tensor::from_vec(bytes, count, &Device::Cpu).map_err(failed(name))?;
        Ok(Some((FixedBlocks { kind, shape: weight.shape.clone() }, bytes)))
    }

    /// The factors of all blocks, multiplied by the exponentials of the learned logarithms.
    fn factors(&self, blocks: &[u8], learned: Option<&Tensor>) -> candle_core::Result<Vec<f32>> {
        let mut factors: Vec<f32> = self.kind.factors(blocks).collect();
        if let Some(logarithms) = learned {
            let logarithms = transfer::values::<f32>(logarithms, Cause::Weights)?;
            factors.par_iter_mut().zip(&logarithms).for_each(|(factor, logarithm)| *factor *= logarithm.exp());
        }
        Ok(factors)
    }

    /// The blocks to write, with the learned factors.
    fn blocks(&self, codes: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Vec<u8>> {
        let mut blocks = transfer::values::<u8>(codes, Cause::Weights)?;
        let factors = self.factors(&blocks, learned)?;
        self.kind.put_factors(factors, &mut blocks);
        Ok(blocks)
    }
}

impl FixedCodes for FixedBlocks {
    fn learned_scales(&self) -> usize {
        self.shape.iter().product::<usize>() / self.kind.elements() * self.kind.factors_per_block()
    }

    fn dequantize(&self, codes: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let (kind, blocks) = (self.kind, self.blocks(codes, learned)?);
        let mut values = vec![0f32; self.shape.iter().product()];
        let jobs = values.par_chunks_mut(JOB * kind.elements()).zip(blocks.par_chunks(JOB * kind.bytes()));
        jobs.for_each(|(values, blocks)| kind.decode(blocks, values));
        transfer::move_to(&Tensor::from_vec(values, self.shape.as_slice(), &Device::Cpu)?, codes.device(), Cause::Weights)
    }

    /// Rounding of the factors passes gradients unchanged.
    fn code_scale_gradient(&self, codes: &Tensor, learned: Option<&Tensor>, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let (kind, blocks) = (self.kind, transfer::values::<u8>(codes, Cause::Weights)?);
        let (factors, count) = (self.factors(&blocks, learned)?, kind.factors_per_block());
        let mut sums = vec![0f32; factors.len()];
        read(&crate::exec::floats_on_host(gradient, Cause::Weights)?, |gradients| {
            let jobs = sums.par_chunks_mut(JOB * count).zip(blocks.par_chunks(JOB * kind.bytes())).zip(gradients.par_chunks(JOB * kind.elements()));
            jobs.for_each(|((sums, blocks), gradients)| kind.factor_gradients(blocks, gradients, sums));
            Ok(())
        })?;
        let rate = scales::gradient_factor(kind.elements()) as f32;
        sums.iter_mut().zip(factors).for_each(|(sum, factor)| *sum *= factor * rate);
        let length = sums.len();
        transfer::move_to(&Tensor::from_vec(sums, length, &Device::Cpu)?, codes.device(), Cause::Weights)
    }

    fn written(&self, (name, weight): (&str, &Weight), codes: &Tensor, learned: Option<&Tensor>) -> Result<Weight> {
        let blocks = self.blocks(codes, learned).map_err(failed(name))?;
        if let Some(factor) = self.kind.factors(&blocks).find(|factor| !factor.is_finite()) {
            return Err(Error::tensor(name, format!("its scale {factor} is not a finite 16-bit float"), scales::LEARNED));
        }
        weight.with_learned_blocks(name, blocks).ok_or_else(|| Error::tensor(name, "has no blocks of a GGUF file", ""))
    }
}

/// Rejects training of the codes of blocks of GGUF files, and of scales that are not 16-bit floats.
pub(super) fn require_trainable(name: &str, weight: &Weight, scales: QuantizerScales) -> Result<()> {
    match (weight.exact_blocks(), scales) {
        (Some(_), QuantizerScales::Fixed | QuantizerScales::Learnable) => {
            let reason = "is quantized to blocks of a GGUF file, whose codes are not trained";
            Err(Error::tensor(name, reason, "quantize after the training, use `scales: only`, or exclude it with `ignore`"))
        }
        (Some(ExactBlocks { kind, .. }), QuantizerScales::Only) if kind.factors_per_block() == 0 => {
            let reason = format!("has blocks of the type {}, whose scales are not trained", kind.name());
            Err(Error::tensor(name, reason, "exclude it with `ignore`"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::DType;
    use crate::store::gguf::BlockScales;

    const ROWS: usize = 3;
    const WIDTH: usize = 512;

    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.45
        };
        (0..count).map(next).collect()
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// A weight in blocks of each type that `quantize` can choose.
    fn weights() -> impl Iterator<Item = (BlockType, Weight)> {
        let dense = Weight::computed("w", DType::F32, vec![ROWS, WIDTH], &numbers(5, ROWS * WIDTH)).unwrap();
        let kinds = BlockType::ALL.into_iter().filter(|kind| kind.levels().is_some());
        kinds.map(move |kind| (kind, dense.in_blocks(ExactBlocks { kind, file_type: None }, "w", BlockScales::Plain)))
    }

    /// Training computes with the values that are written, and unlearned scales are those of the file.
    #[test]
    fn written_blocks_have_the_trained_values() {
        for (kind, weight) in weights() {
            let (codes, bytes) = FixedBlocks::from_weight("w", &weight).unwrap().unwrap();
            let learned = |factor: f32| {
                let logarithms: Vec<f32> = numbers(9, codes.learned_scales()).into_iter().map(|number| factor * number).collect();
                Tensor::from_slice(&logarithms, logarithms.len(), &Device::Cpu).unwrap()
            };
            let stored = weight.floats("w").unwrap();
            for unlearned in [None, Some(&learned(0.0))] {
                assert_eq!(values(&codes.dequantize(&bytes, unlearned).unwrap()), stored, "{}", kind.name());
                let written = codes.written(("w", &weight), &bytes, unlearned).unwrap();
                assert_eq!(written.blocks().unwrap(), weight.blocks().unwrap(), "{}", kind.name());
            }
            let logarithms = learned(0.3);
            let trained = codes.dequantize(&bytes, Some(&logarithms)).unwrap();
            let written = codes.written(("w", &weight), &bytes, Some(&logarithms)).unwrap();
            assert_eq!(values(&trained), written.floats("w").unwrap(), "{}", kind.name());
            assert!(values(&trained) != stored && written.exact_blocks() == weight.exact_blocks(), "{}", kind.name());
            // Only factors differ.
            let mut blocks = weight.blocks().unwrap();
            kind.put_factors(kind.factors(&written.blocks().unwrap()).collect::<Vec<_>>(), &mut blocks);
            assert_eq!(blocks, written.blocks().unwrap(), "{}", kind.name());
            let infinite = codes.written(("w", &weight), &bytes, Some(&learned(100.0))).unwrap_err().to_string();
            assert!(infinite.contains("`w`") && infinite.contains("16-bit"), "{infinite}");
        }
    }

    /// A function that is linear in the weight changes by its derivative if one factor is doubled, which
    /// binary16 represents exactly.
    #[test]
    fn gradients_are_differences() {
        for (kind, weight) in weights() {
            let (codes, bytes) = FixedBlocks::from_weight("w", &weight).unwrap().unwrap();
            let gradients = numbers(13, ROWS * WIDTH);
            let sum = |logarithms: &[f32]| -> f64 {
                let learned = Tensor::from_slice(logarithms, logarithms.len(), &Device::Cpu).unwrap();
                let trained = values(&codes.dequantize(&bytes, Some(&learned)).unwrap());
                trained.iter().zip(&gradients).map(|(value, gradient)| f64::from(*value) * f64::from(*gradient)).sum()
            };
            let gradient = Tensor::from_slice(&gradients, (ROWS, WIDTH), &Device::Cpu).unwrap();
            let at = |logarithms: &[f32]| {
                let learned = Tensor::from_slice(logarithms, logarithms.len(), &Device::Cpu).unwrap();
                values(&codes.code_scale_gradient(&bytes, Some(&learned), &gradient).unwrap())
            };
            let zeros = vec![0f32; codes.learned_scales()];
            let (found, rate) = (at(&zeros), scales::gradient_factor(kind.elements()));
            assert_eq!(found.len(), zeros.len(), "{}", kind.name());
            for index in (0..zeros.len()).step_by(5) {
                let mut doubled = zeros.clone();
                doubled[index] = std::f32::consts::LN_2;
                let difference = sum(&doubled) - sum(&zeros);
                let derivative = f64::from(found[index]) / rate;
                assert!((difference - derivative).abs() <= 1e-5 * (1.0 + difference.abs()), "{} {index}: {difference} and {derivative}", kind.name());
                // Later derivatives are those of the exponential.
                assert!((at(&doubled)[index] - 2.0 * found[index]).abs() <= 1e-5 * found[index].abs(), "{} {index}", kind.name());
            }
            assert!(found.iter().any(|gradient| gradient.abs() > 1e-3), "{}", kind.name());
        }
    }
}
