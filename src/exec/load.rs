//! Where bytes become tensors.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::store::{ActivationScheme, DType as Stored, Encoding, Weight, Weights};
use crate::work::Work;

/// What is kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// Parameters in the precision of the computation.
    Computed,
    /// Parameters as 16-bit floats where the checkpoint has them so; converted whenever they are used.
    Stored,
}

/// The parameters of a graph on a device.
#[derive(Debug, Clone)]
pub struct Parameters {
    tensors: BTreeMap<String, Tensor>,
    /// How the inputs of layers are rounded, by weight.
    rounding: BTreeMap<String, ActivationScheme>,
    compute: DType,
}

impl Parameters {
    /// Loads what a graph needs.
    ///
    /// # Errors
    /// Reading fails, or the device runs out of memory.
    pub fn load(graph: &Graph, weights: &Weights, device: &Device, compute: DType, residence: Residence, work: &Work) -> Result<Parameters> {
        Self::load_named(graph.params().map(|(_, value)| &value.name).collect(), weights, device, compute, residence, work)
    }

    /// Loads what a graph needs but for some parameters, which it shares with others.
    ///
    /// # Errors
    /// As [`load`](Parameters::load).
    pub fn load_beside(self, graph: &Graph, weights: &Weights, device: &Device, residence: Residence, work: &Work) -> Result<Parameters> {
        let names = graph.params().map(|(_, value)| &value.name).filter(|name| !self.tensors.contains_key(*name)).collect();
        let mut all = Self::load_named(names, weights, device, self.compute, residence, work)?;
        all.tensors.extend(self.tensors);
        all.rounding.extend(self.rounding);
        Ok(all)
    }

    /// The same without parameters that a test does not hold for.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| keep(name));
        self.rounding.retain(|name, _| keep(name));
    }

    /// Loads parameters by name.
    ///
    /// # Errors
    /// As [`load`](Parameters::load).
    pub fn load_named(names: Vec<&String>, weights: &Weights, device: &Device, compute: DType, residence: Residence, work: &Work) -> Result<Parameters> {
        let jobs: Vec<(&String, &Weight)> = names.into_iter().map(|name| weights.get(name).map(|w| (name, w))).collect::<Result<_>>()?;
        let tensors = work.run(
            "Loading",
            &jobs,
            |(_, w)| w.stored_bytes,
            |(name, weight)| {
                let keep = match (residence, weight.dtype) {
                    (Residence::Stored, Stored::BF16) => DType::BF16,
                    (Residence::Stored, Stored::F16) => DType::F16,
                    _ => compute,
                };
                let tensor = tensor(name, weight, device, keep)?;
                work.advance(weight.stored_bytes)?;
                Ok(tensor)
            },
        )?;
        // Static integers are nodes of the graph.
        let scheme = |weight: &Weight| match &weight.encoding {
            Encoding::Affine(affine) if !matches!(affine.activations, ActivationScheme::None | ActivationScheme::Static(_)) => Some(affine.activations),
            _ => None,
        };
        let rounding = jobs.iter().filter_map(|(name, weight)| Some(((*name).clone(), scheme(weight)?))).collect();
        Ok(Parameters { tensors: jobs.iter().map(|(name, _)| (*name).clone()).zip(tensors).collect(), rounding, compute })
    }

    /// Parameters that are tensors already.
    pub fn of(tensors: BTreeMap<String, Tensor>, compute: DType) -> Parameters {
        Parameters { tensors, rounding: BTreeMap::new(), compute }
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
    }

    /// The same with another tensor in the place of one.
    #[must_use]
    pub fn with(mut self, name: &str, tensor: Tensor) -> Parameters {
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    /// A parameter in the precision of the computation.
    ///
    /// # Errors
    /// It was not loaded, or the device runs out of memory.
    pub fn get(&self, name: &str) -> candle_core::Result<Tensor> {
        self.stored(name)?.to_dtype(self.compute)
    }

    /// A parameter as it is kept in memory.
    pub(super) fn stored(&self, name: &str) -> candle_core::Result<Tensor> {
        match self.tensors.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => candle_core::bail!("parameter `{name}` was not loaded"),
        }
    }

    /// How the consumer of a weight rounds the inputs of its layer.
    pub(super) fn rounds_inputs(&self, name: &str) -> Option<ActivationScheme> {
        self.rounding.get(name).copied()
    }

    /// Precision of the computation.
    pub fn compute(&self) -> DType {
        self.compute
    }
}

/// A weight as a tensor: quantized and sparse weights as the floats they stand for.
fn tensor(name: &str, weight: &Weight, device: &Device, keep: DType) -> Result<Tensor> {
    let failed = |e: candle_core::Error| Error::tensor(name, format!("cannot be loaded: {e}"), "");
    let shape = weight.shape.as_slice();
    match (keep, weight.dtype) {
        (DType::BF16, Stored::BF16) => return Tensor::from_vec(words(name, weight, bf16::from_bits)?, shape, device).map_err(failed),
        (DType::F16, Stored::F16) => return Tensor::from_vec(words(name, weight, f16::from_bits)?, shape, device).map_err(failed),
        _ => {}
    }
    let values = weight.floats(name)?;
    Tensor::from_vec(values, shape, device).and_then(|t| t.to_dtype(keep)).map_err(failed)
}

/// The elements of a weight of 16-bit floats.
fn words<T>(name: &str, weight: &Weight, element: fn(u16) -> T) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(weight.elements());
    weight.dense(name).visit(1, &mut |block| {
        values.extend(block.now.values.as_chunks().0.iter().map(|bytes| element(u16::from_le_bytes(*bytes))));
        Ok(())
    })?;
    Ok(values)
}
