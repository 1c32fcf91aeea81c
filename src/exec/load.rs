//! Where bytes become tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

use super::change;
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::store::{ActivationScheme, DType as Stored, Encoding, Weight, Weights};
use crate::work::{Work, lock};

/// What is kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// Parameters in the precision of the computation.
    Computed,
    /// Parameters as 16-bit floats where the checkpoint has them so; converted whenever they are used.
    Stored,
}

impl Residence {
    /// Bytes that a weight takes in memory.
    pub(super) fn bytes(self, weight: &Weight, compute: DType) -> u64 {
        (weight.elements() * self.dtype(weight, compute).size_in_bytes()) as u64
    }

    /// What a weight's elements are in memory.
    pub fn dtype(self, weight: &Weight, compute: DType) -> DType {
        match (self, weight.dtype) {
            (Residence::Stored, Stored::BF16) => DType::BF16,
            (Residence::Stored, Stored::F16) => DType::F16,
            _ => compute,
        }
    }
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

    /// The same without parameters that a test does not hold for.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| keep(name));
        self.rounding.retain(|name, _| keep(name));
    }

    /// Adds others.
    pub(super) fn extend(&mut self, others: Parameters) {
        self.tensors.extend(others.tensors);
        self.rounding.extend(others.rounding);
    }

    /// Those of these names that are loaded; tensors are shared.
    pub(super) fn some<'n>(&self, names: impl IntoIterator<Item = &'n String>) -> Parameters {
        let names: BTreeSet<&String> = names.into_iter().collect();
        let rounding = self.rounding.iter().filter(|(name, _)| names.contains(name)).map(|(name, scheme)| (name.clone(), *scheme)).collect();
        let tensors = self.tensors.iter().filter(|(name, _)| names.contains(name)).map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        Parameters { tensors, rounding, compute: self.compute }
    }

    /// Whether a parameter is loaded.
    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Loads parameters by name.
    ///
    /// # Errors
    /// As [`load`](Parameters::load).
    pub fn load_named(names: Vec<&String>, weights: &Weights, device: &Device, compute: DType, residence: Residence, work: &Work) -> Result<Parameters> {
        Self::load_reusing(&Spare::default(), names, weights, (device, compute, residence), work)
    }

    /// The same into the memory of tensors that nobody else refers to, where they fit.
    pub(super) fn load_reusing(
        spare: &Spare,
        names: Vec<&String>,
        weights: &Weights,
        (device, compute, residence): (&Device, DType, Residence),
        work: &Work,
    ) -> Result<Parameters> {
        let jobs: Vec<(&String, &Weight)> = names.into_iter().map(|name| weights.get(name).map(|w| (name, w))).collect::<Result<_>>()?;
        let tensors = work.run(
            "Loading",
            &jobs,
            |(_, w)| w.stored_bytes,
            |(name, weight)| {
                let keep = residence.dtype(weight, compute);
                let tensor = match spare.take(&weight.shape, keep).filter(|_| is_stored(weight, keep) || keep == DType::F32) {
                    Some(tensor) => fill(name, weight, &tensor).map(|()| tensor)?,
                    None => tensor(name, weight, device, keep)?,
                };
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
        self.tensors.values().map(super::bytes_of).sum()
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

/// Tensors of the host whose memory takes other weights.
#[derive(Debug, Default)]
pub(super) struct Spare(Mutex<Vec<Tensor>>);

impl Spare {
    pub fn of(tensors: Vec<Tensor>) -> Spare {
        Spare(Mutex::new(tensors))
    }

    fn take(&self, shape: &[usize], dtype: DType) -> Option<Tensor> {
        let mut tensors = lock(&self.0);
        let at = tensors.iter().position(|tensor| tensor.dims() == shape && tensor.dtype() == dtype)?;
        Some(tensors.swap_remove(at))
    }
}

/// Whether a weight of 16-bit floats is kept as it is.
fn is_stored(weight: &Weight, keep: DType) -> bool {
    matches!((keep, weight.dtype), (DType::BF16, Stored::BF16) | (DType::F16, Stored::F16))
}

/// Writes a weight into a tensor of its shape: as it is, or as floats of 32 bits.
fn fill(name: &str, weight: &Weight, tensor: &Tensor) -> Result<()> {
    let mut done = Ok(());
    let filled = if is_stored(weight, tensor.dtype()) {
        change(tensor, |values: &mut [u16]| {
            done = words(name, weight, values);
            Ok(())
        })
    } else {
        change(tensor, |values: &mut [f32]| {
            done = weight.floats_into(name, values);
            Ok(())
        })
    };
    filled.map_err(|e| Error::tensor(name, format!("cannot be loaded: {e}"), ""))?;
    done
}

/// A weight as a tensor: quantized and sparse weights as the floats they stand for.
fn tensor(name: &str, weight: &Weight, device: &Device, keep: DType) -> Result<Tensor> {
    let failed = |e: candle_core::Error| Error::tensor(name, format!("cannot be loaded: {e}"), "");
    let shape = weight.shape.as_slice();
    if !is_stored(weight, keep) {
        let values = weight.floats(name)?;
        return Tensor::from_vec(values, shape, device).and_then(|t| t.to_dtype(keep)).map_err(failed);
    }
    let mut values = vec![0u16; weight.elements()];
    words(name, weight, &mut values)?;
    match keep {
        DType::BF16 => Tensor::from_vec(values.reinterpret_into::<bf16>(), shape, device),
        _ => Tensor::from_vec(values.reinterpret_into::<f16>(), shape, device),
    }
    .map_err(failed)
}

/// Writes the elements of a weight of 16-bit floats, as bits.
fn words(name: &str, weight: &Weight, values: &mut [u16]) -> Result<()> {
    let mut left = values.iter_mut();
    weight.dense(name).visit(1, &mut |block| {
        let words = block.now.values.as_chunks().0;
        left.by_ref().zip(words).for_each(|(value, bytes)| *value = u16::from_le_bytes(*bytes));
        Ok(())
    })
}
