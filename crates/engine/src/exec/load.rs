//! Loading of parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

use super::memory::{Fetch, MemoryTracker, PagedParameters};
use super::residence::{Residence, coded_parameters};
use super::{change, coded};
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::kernel::coded::CodedMatrix;
use crate::store::{ActivationScheme, DType as Stored, Encoding, Weight, Weights};
use crate::work::{Work, lock};

/// A parameter in memory.
enum Loaded {
    Tensor(Tensor),
    Coded(Arc<CodedMatrix>),
}

/// The parameters of a graph on a device.
#[derive(Debug, Clone)]
pub struct Parameters {
    tensors: BTreeMap<String, Tensor>,
    /// Quantized weights that stay integers.
    coded: BTreeMap<String, Arc<CodedMatrix>>,
    /// Rounding scheme of the inputs of a layer, by the name of its weight.
    rounding: BTreeMap<String, ActivationScheme>,
    compute: DType,
    /// Parameters that are only in memory while they are used.
    paged: Option<Arc<PagedParameters>>,
}

impl Parameters {
    /// Loads the parameters of a graph.
    pub fn load(graph: &Graph, weights: &Weights, device: &Device, compute: DType, residence: Residence, work: &Work) -> Result<Parameters> {
        let names = graph.params().map(|(_, value)| &value.name).collect();
        Self::load_reusing(&SpareTensors::default(), names, &coded_parameters(graph, residence, compute), weights, (device, compute, residence), work)
    }

    /// Drops all parameters that `keep` does not select.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| keep(name));
        self.coded.retain(|name, _| keep(name));
        self.rounding.retain(|name, _| keep(name));
    }

    /// Adds the parameters of `others`.
    pub(super) fn extend(&mut self, others: Parameters) {
        self.tensors.extend(others.tensors);
        self.coded.extend(others.coded);
        self.rounding.extend(others.rounding);
    }

    /// The loaded parameters with these names; tensors are shared.
    pub(super) fn subset<'n>(&self, names: impl IntoIterator<Item = &'n String>) -> Parameters {
        let names: BTreeSet<&str> = names.into_iter().map(String::as_str).collect();
        let mut subset = Parameters { paged: None, ..self.clone() };
        subset.retain(|name| names.contains(name));
        subset
    }

    /// Whether a parameter is loaded.
    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.coded.contains_key(name)
    }

    /// Loads parameters by name.
    pub fn load_named(names: Vec<&String>, weights: &Weights, device: &Device, compute: DType, residence: Residence, work: &Work) -> Result<Parameters> {
        Self::load_reusing(&SpareTensors::default(), names, &BTreeSet::new(), weights, (device, compute, residence), work)
    }

    /// Loads parameters by name, reusing the memory of `spare` where the type and shape match. Those named in
    /// `coded` may stay integers.
    pub(super) fn load_reusing(
        spare: &SpareTensors,
        names: Vec<&String>,
        coded: &BTreeSet<String>,
        weights: &Weights,
        (device, compute, residence): (&Device, DType, Residence),
        work: &Work,
    ) -> Result<Parameters> {
        let jobs: Vec<(&String, &Weight)> = names.into_iter().map(|name| weights.get(name).map(|w| (name, w))).collect::<Result<_>>()?;
        let loaded = work.run(
            "Loading",
            &jobs,
            |(_, w)| w.stored_bytes,
            |(name, weight)| {
                let keep = residence.dtype(weight, compute);
                let matrix = if coded.contains(*name) { coded::from_weight(weight)? } else { None };
                let spare = || spare.take(&weight.shape, keep).filter(|_| is_stored(weight, keep) || keep == DType::F32);
                let loaded = if let Some(matrix) = matrix {
                    Loaded::Coded(Arc::new(matrix))
                } else if let Some(tensor) = spare() {
                    fill(name, weight, &tensor).map(|()| Loaded::Tensor(tensor))?
                } else {
                    Loaded::Tensor(tensor(name, weight, device, keep)?)
                };
                work.advance(weight.stored_bytes)?;
                Ok(loaded)
            },
        )?;
        let mut parameters = Parameters { rounding: rounding(&jobs), ..Self::from_tensors(BTreeMap::new(), compute) };
        for ((name, _), loaded) in jobs.into_iter().zip(loaded) {
            match loaded {
                Loaded::Tensor(tensor) => parameters.tensors.insert(name.clone(), tensor).map(drop),
                Loaded::Coded(matrix) => parameters.coded.insert(name.clone(), matrix).map(drop),
            };
        }
        Ok(parameters)
    }

    /// Parameters that are read from their files on each use, and the bytes of the largest. Fails if a
    /// parameter does not exist.
    pub fn streamed(names: Vec<&String>, weights: &Weights, device: &Device, compute: DType, residence: Residence) -> Result<(Parameters, u64)> {
        let jobs: Vec<(&String, &Weight)> = names.into_iter().map(|name| weights.get(name).map(|w| (name, w))).collect::<Result<_>>()?;
        let rounding = rounding(&jobs);
        let largest = jobs.iter().map(|(_, weight)| residence.bytes(weight, compute)).max().unwrap_or(0);
        let by_name: BTreeMap<String, Weight> = jobs.into_iter().map(|(name, weight)| (name.clone(), weight.clone())).collect();
        let device = device.clone();
        let fetch = move |name: &str| match by_name.get(name) {
            Some(weight) => tensor(name, weight, &device, residence.dtype(weight, compute)),
            None => Err(Error::tensor(name, "is not one of the streamed parameters", "")),
        };
        Ok((Parameters { rounding, ..Self::fetched(Box::new(fetch), compute) }, largest))
    }

    /// Parameters that a function returns on each use.
    pub fn fetched(fetch: Box<Fetch>, compute: DType) -> Parameters {
        Parameters { paged: Some(Arc::new(PagedParameters::new(fetch))), ..Self::from_tensors(BTreeMap::new(), compute) }
    }

    /// Adds parameters that a function returns on each use, and that are not kept in between.
    #[must_use]
    pub fn with_transient(self, fetch: Box<Fetch>) -> Parameters {
        Parameters { paged: Some(Arc::new(PagedParameters::transient(fetch))), ..self }
    }

    /// Makes the parameters with these names resident until the next call, if parameters are paged.
    pub fn enter(&self, names: &BTreeSet<String>, tracker: Option<&MemoryTracker>) -> Result<()> {
        self.paged.as_ref().map_or(Ok(()), |paged| paged.enter(names, tracker))
    }

    /// Parameters from tensors.
    pub fn from_tensors(tensors: BTreeMap<String, Tensor>, compute: DType) -> Parameters {
        Parameters { tensors, coded: BTreeMap::new(), rounding: BTreeMap::new(), compute, paged: None }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(super::bytes_of).sum::<u64>() + self.coded.values().map(|matrix| matrix.bytes() as u64).sum::<u64>()
    }

    /// Replaces one parameter.
    #[must_use]
    pub fn with(mut self, name: &str, tensor: Tensor) -> Parameters {
        self.coded.remove(name);
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    /// A parameter in the precision of the computation.
    pub fn get(&self, name: &str) -> candle_core::Result<Tensor> {
        self.stored(name)?.to_dtype(self.compute)
    }

    /// A parameter in its storage precision; integers are dequantized.
    pub(crate) fn stored(&self, name: &str) -> candle_core::Result<Tensor> {
        match (self.tensors.get(name), self.coded.get(name), &self.paged) {
            (Some(tensor), ..) => Ok(tensor.clone()),
            (None, Some(matrix), _) => {
                let [rows, row] = matrix.shape();
                let mut values = vec![0f32; rows * row];
                matrix.decode(0..rows, &mut values);
                Tensor::from_vec(values, (rows, row), &Device::Cpu)
            }
            (None, None, Some(paged)) => paged.get(name).map_err(candle_core::Error::wrap),
            (None, None, None) => candle_core::bail!("parameter `{name}` was not loaded"),
        }
    }

    /// A quantized parameter that stays integers.
    pub(super) fn coded(&self, name: &str) -> Option<&CodedMatrix> {
        self.coded.get(name).map(AsRef::as_ref)
    }

    /// Sets the rounding schemes of the inputs of layers, by the names of their weights.
    #[must_use]
    pub fn with_input_schemes(self, rounding: BTreeMap<String, ActivationScheme>) -> Parameters {
        Parameters { rounding, ..self }
    }

    /// The rounding scheme for the inputs of a layer with this weight.
    pub fn input_scheme(&self, name: &str) -> Option<ActivationScheme> {
        self.rounding.get(name).copied()
    }

    /// Precision of the computation.
    pub fn compute(&self) -> DType {
        self.compute
    }
}

/// Rounding schemes by weight. Static integer quantization is represented by nodes of the graph instead.
fn rounding(jobs: &[(&String, &Weight)]) -> BTreeMap<String, ActivationScheme> {
    jobs.iter().filter_map(|(name, weight)| Some(((*name).clone(), rounding_scheme(weight)?))).collect()
}

/// The scheme in which the executor rounds the inputs of a linear layer with this weight.
pub fn rounding_scheme(weight: &Weight) -> Option<ActivationScheme> {
    match &weight.encoding {
        Encoding::Quantized(affine) if !matches!(affine.activations, ActivationScheme::None | ActivationScheme::Static(_)) => Some(affine.activations),
        _ => None,
    }
}

/// Host tensors whose memory is reused for other weights.
#[derive(Debug, Default)]
pub(super) struct SpareTensors(Mutex<Vec<Tensor>>);

impl SpareTensors {
    pub fn new(tensors: Vec<Tensor>) -> SpareTensors {
        SpareTensors(Mutex::new(tensors))
    }

    fn take(&self, shape: &[usize], dtype: DType) -> Option<Tensor> {
        let mut tensors = lock(&self.0);
        let at = tensors.iter().position(|tensor| tensor.dims() == shape && tensor.dtype() == dtype)?;
        Some(tensors.swap_remove(at))
    }
}

/// Whether a weight with 16-bit floats is stored unchanged.
fn is_stored(weight: &Weight, keep: DType) -> bool {
    matches!((keep, weight.dtype), (DType::BF16, Stored::BF16) | (DType::F16, Stored::F16))
}

/// Writes a weight into a tensor of its shape: 16-bit floats unchanged, others as f32.
fn fill(name: &str, weight: &Weight, tensor: &Tensor) -> Result<()> {
    let mut done = Ok(());
    let filled = if is_stored(weight, tensor.dtype()) {
        change(tensor, |values: &mut [u16]| {
            done = read_half_bits(name, weight, values);
            Ok(())
        })
    } else {
        change(tensor, |values: &mut [f32]| {
            done = read_floats(name, weight, values);
            Ok(())
        })
    };
    filled.map_err(|e| Error::tensor(name, format!("cannot be loaded: {e}"), ""))?;
    done
}

/// Loads a weight as a tensor; quantized and sparse weights are converted to dense floats.
pub(crate) fn tensor(name: &str, weight: &Weight, device: &Device, keep: DType) -> Result<Tensor> {
    let failed = |e: candle_core::Error| Error::tensor(name, format!("cannot be loaded: {e}"), "");
    let shape = weight.shape.as_slice();
    if !is_stored(weight, keep) {
        let mut values = vec![0f32; weight.elements()];
        read_floats(name, weight, &mut values)?;
        return Tensor::from_vec(values, shape, device).and_then(|t| t.to_dtype(keep)).map_err(failed);
    }
    let mut values = vec![0u16; weight.elements()];
    read_half_bits(name, weight, &mut values)?;
    match keep {
        DType::BF16 => Tensor::from_vec(values.reinterpret_into::<bf16>(), shape, device),
        _ => Tensor::from_vec(values.reinterpret_into::<f16>(), shape, device),
    }
    .map_err(failed)
}

/// Writes the elements of a weight as f32.
fn read_floats(name: &str, weight: &Weight, values: &mut [f32]) -> Result<()> {
    if weight.dtype != Stored::F32 || weight.encoding != Encoding::Dense {
        return weight.floats_into(name, values);
    }
    weight.source().read_into(bytemuck::cast_slice_mut(values))?;
    values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
    Ok(())
}

/// Writes the elements of a weight of 16-bit floats as bits.
fn read_half_bits(name: &str, weight: &Weight, values: &mut [u16]) -> Result<()> {
    weight.dense(name).source().read_into(bytemuck::cast_slice_mut(values))?;
    values.iter_mut().for_each(|value| *value = u16::from_le(*value));
    Ok(())
}
