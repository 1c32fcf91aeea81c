//! Frozen parameters of a training with adapters: weights in the precision of their files, and the norms of
//! outputs.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::exec::{ManagedTensor, Parameters, Placement, Residence};
use crate::ir::ops::ScalarOps;
use crate::store::{Encoding, Weight, Weights};
use crate::work::Work;

/// Frozen weights, by name.
#[derive(Default)]
pub(super) struct Frozen {
    /// Floats, in the precision of the checkpoint if that has 16 bits, else in that of the computation.
    pub dense: BTreeMap<String, ManagedTensor>,
    /// Weights that are stored as codes. They stay in their files, and are dequantized on each use.
    pub packed: BTreeMap<String, Weight>,
}

/// Whether a weight is stored as codes, which take less memory than its values.
fn is_packed(weight: &Weight) -> bool {
    weight.encoding != Encoding::Dense || weight.stored_type.is_some()
}

/// Bytes of a frozen weight in memory, and of the copy while it is used.
pub(super) fn bytes(weight: &Weight, compute: DType) -> [u64; 2] {
    let copy = Residence::Computed.bytes(weight, compute);
    match Residence::Stored.dtype(weight, compute) {
        _ if is_packed(weight) => [0, copy],
        stored if stored == compute => [copy, 0],
        _ => [Residence::Stored.bytes(weight, compute), copy],
    }
}

impl Frozen {
    /// Loads the weights with these names, stored at `home` and used on `device` in the dtype `compute`.
    pub fn load(names: Vec<&String>, weights: &Weights, (home, device, compute): (&Placement, &Device, DType), work: &Work) -> Result<Frozen> {
        let mut frozen = Frozen::default();
        let mut dense = Vec::new();
        for name in names {
            let weight = weights.get(name)?;
            if is_packed(weight) {
                frozen.packed.insert(name.clone(), weight.clone());
            } else {
                dense.push(name);
            }
        }
        let groups = home.name_groups(dense.into_iter());
        for names in &groups {
            let work = if groups.len() > 1 { work.quiet() } else { *work };
            work.cancel.check()?;
            let loaded = Parameters::load_named(names.iter().collect(), weights, device, compute, Residence::Stored, &work)?;
            for name in names {
                let tensor = loaded.stored(name).map_err(|e| Error::candle(format!("tensor `{name}`"), e))?;
                frozen.dense.insert(name.clone(), home.store(&tensor)?);
            }
        }
        Ok(frozen)
    }
}

/// The norm of the weights of each output of a layer with its adapter: a parameter that is computed from
/// others in each step, and through which no gradient flows (Liu et al., *DoRA*, 2024, section 4.3).
#[derive(Debug, Clone)]
pub struct OutputNorm {
    /// Name of the weight.
    pub weight: String,
    /// Names of the factors `[rank, in]` and `[out, rank]`.
    pub factors: [String; 2],
    /// Constant that the product of the factors is multiplied by.
    pub scale: f64,
    /// Whether the weight is stored as `[in, out]`.
    pub input_major: bool,
}

impl OutputNorm {
    /// The norms `[out]`; `get` returns other parameters.
    pub(super) fn compute(&self, name: &str, get: &dyn Fn(&str) -> Result<Tensor>) -> Result<Tensor> {
        let [inner, outer] = self.factors.each_ref().map(|factor| get(factor));
        let (weight, inner, outer) = (get(&self.weight)?, inner?, outer?);
        let compute = || {
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32);
            let term = wide(&outer)?.matmul(&wide(&inner)?)?.affine(self.scale, 0.0)?;
            let weight = if self.input_major { wide(&weight)?.t()? } else { wide(&weight)? };
            let norms = (weight + term)?.sqr()?.sum(1)?.sqrt()?;
            // Outputs without weights stay zero: their norm must not be rounded to zero.
            let least = if outer.dtype() == DType::F16 { 2f64.powi(-14) } else { f64::from(f32::MIN_POSITIVE).sqrt() };
            norms.maximum_scalar(least)?.to_dtype(outer.dtype())
        };
        compute().map_err(|e: candle_core::Error| Error::candle(format!("tensor `{name}`"), e))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::Model;
    use crate::work::{Cancel, Silent};

    /// 16-bit floats stay 16-bit floats in memory, whatever the precision of the computation is.
    #[test]
    fn frozen_weights_are_kept_as_they_are_stored() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama");
        let mut weights = Model::open(folder).unwrap().weights;
        let [half, full] = ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"].map(str::to_owned);
        let values = weights.get(&half).unwrap().floats(&half).unwrap();
        let narrow = Weight::computed(&half, crate::store::DType::BF16, weights.get(&half).unwrap().shape.clone(), &values).unwrap();
        weights.by_name.insert(half.clone(), narrow);
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        let home = Placement::Memory(Device::Cpu);
        let frozen = Frozen::load(vec![&half, &full], &weights, (&home, &Device::Cpu, DType::F32), &work).unwrap();
        assert_eq!([&half, &full].map(|name| frozen.dense[name].dtype()), [DType::BF16, DType::F32]);
        for name in [&half, &full] {
            assert_eq!(frozen.dense[name].bytes(), bytes(weights.get(name).unwrap(), DType::F32)[0], "{name}");
        }
        assert_eq!(bytes(weights.get(&half).unwrap(), DType::F32), [2 * 24 * 16, 4 * 24 * 16]);
        assert_eq!(bytes(weights.get(&half).unwrap(), DType::BF16), [2 * 24 * 16, 0]);
    }

    #[test]
    fn norms_are_those_of_the_weight_with_its_adapter() {
        let matrix = |name: &str| -> Result<Tensor> {
            Ok(match name {
                "weight" => Tensor::new(&[[1f32, 0.0], [0.0, 3.0], [0.0, 0.0]], &Device::Cpu).unwrap(),
                "transposed" => Tensor::new(&[[1f32, 0.0, 0.0], [0.0, 3.0, 0.0]], &Device::Cpu).unwrap(),
                "inner" => Tensor::new(&[[0f32, 2.0]], &Device::Cpu).unwrap(),
                _ => Tensor::new(&[[1f32], [0.5], [0.0]], &Device::Cpu).unwrap(),
            })
        };
        for (weight, input_major) in [("weight", false), ("transposed", true)] {
            let norm = OutputNorm { weight: weight.into(), factors: ["inner", "outer"].map(str::to_owned), scale: 0.5, input_major };
            let norms = norm.compute("norm", &matrix).unwrap().to_vec1::<f32>().unwrap();
            assert!((norms[0] - 2f32.sqrt()).abs() < 1e-6 && (norms[1] - 3.5).abs() < 1e-6 && norms[2] < 1e-15, "{norms:?}");
            let halves = |name: &str| Ok(matrix(name)?.to_dtype(DType::F16).unwrap());
            let least = norm.compute("norm", &halves).unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()[2];
            assert!(least > 0.0, "{least}");
        }
    }
}
