//! Parameters of the forward pass, computed from master weights.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::absorbed::Absorbed;
use super::fixed_codes::FixedCodes;
use super::floats::failed;
use super::output_norm::OutputNorms;
use super::scales;
use super::weight_rounding::Rounding;
use crate::error::{Error, Result};
use crate::exec::{ManagedTensor, Residence, load_tensor};
use crate::store::Weight;

pub(super) fn not_part(name: &str) -> Error {
    Error::tensor(name, "is not a parameter of this training", "")
}

/// Computes the parameters of the forward pass from master weights.
pub(super) struct ForwardWeights {
    pub masters: BTreeMap<String, ManagedTensor>,
    pub fixed: BTreeMap<String, ManagedTensor>,
    pub packed: Arc<BTreeMap<String, Weight>>,
    pub norms: Arc<OutputNorms>,
    pub rounded: Arc<BTreeMap<String, Rounding>>,
    pub with_fixed_codes: Arc<BTreeMap<String, Box<dyn FixedCodes>>>,
    pub absorbed: Arc<BTreeMap<String, Absorbed>>,
    pub device: Device,
    pub compute: DType,
}

impl ForwardWeights {
    pub fn get(&self, name: &str) -> Result<Tensor> {
        if let Some(weight) = self.packed.get(name) {
            // The executor keeps dequantized weights of 16-bit models in 16 bits.
            let stored = load_tensor(name, weight, &self.device, Residence::Stored.dtype(weight, self.compute))?;
            return stored.to_dtype(self.compute).map_err(failed(name));
        }
        if let Some(norm) = self.norms.get(name) {
            let copied = match (self.fixed.get(&norm.weight), self.packed.get(&norm.weight)) {
                (Some(kept), _) => kept.size() - kept.bytes(),
                (None, Some(weight)) => Residence::Computed.bytes(weight, self.compute),
                (None, None) => 0,
            };
            return self.norms.compute(name, norm, &|name| self.get(name), copied);
        }
        let (rounding, fixed_codes) = (self.rounded.get(name), self.with_fixed_codes.get(name));
        let learned = if rounding.is_some() || fixed_codes.is_some() { learned(&self.masters, name, &self.device)? } else { None };
        let Some(master) = self.masters.get(name) else {
            let fixed = self.fixed.get(name).ok_or_else(|| not_part(name))?.load(&self.device)?;
            if let Some(codes) = fixed_codes {
                return codes.dequantize(&fixed, learned.as_ref()).and_then(|weight| weight.to_dtype(self.compute)).map_err(failed(name));
            }
            let Some((rounding, absorbed)) = rounding.zip(self.absorbed.get(name)) else { return Ok(fixed) };
            let [inner, outer] = factors(&self.masters, absorbed, &self.device)?;
            let sum = absorbed.sum(&fixed, [&inner, &outer]);
            return sum.and_then(|sum| rounding.apply(&sum, None)?.to_dtype(self.compute)).map_err(failed(name));
        };
        let master = master.load(&self.device)?;
        let weight = rounding.map_or_else(|| Ok(master.clone()), |rounding| rounding.apply(&master, learned.as_ref()));
        weight.and_then(|weight| weight.to_dtype(self.compute)).map_err(failed(name))
    }
}

/// The factors of an adapter.
pub(super) fn factors(state: &BTreeMap<String, ManagedTensor>, absorbed: &Absorbed, device: &Device) -> Result<[Tensor; 2]> {
    let [inner, outer] = absorbed.factors.each_ref().map(|name| state.get(name).ok_or_else(|| not_part(name))?.load(device));
    Ok([inner?, outer?])
}

/// The logarithms on a weight's scales, if they are trained.
pub(super) fn learned(state: &BTreeMap<String, ManagedTensor>, name: &str, device: &Device) -> Result<Option<Tensor>> {
    state.get(&scales::logarithm_name(name)).map(|logarithms| logarithms.load(device)).transpose()
}
