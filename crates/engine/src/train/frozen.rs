//! Frozen parameters of a training with adapters: weights in the precision of their files.

use std::collections::BTreeMap;

use candle_core::{DType, Device};

use crate::error::{Error, Result};
use crate::exec::{ManagedTensor, Parameters, Placement, Residence};
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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::exec::{MemoryTracker, Sharding};
    use crate::model::Model;
    use crate::train::{Adapter, Team, Training, Weights as Trained, ZeroKind};
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

    /// Evaluations of adapters read the base from the model, and gather only the factors.
    #[test]
    fn frozen_weights_next_to_adapters_are_not_gathered() {
        let model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama")).unwrap();
        let (graph, folder) = (model.graph().unwrap(), tempfile::tempdir().unwrap());
        let team = Team::from_environment(&Device::Cpu).unwrap();
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        for adapter in [Some(Adapter::default()), None] {
            let home = Placement::Sharded(Arc::new(Sharding::new(team.pool(), &Device::Cpu, folder.path()).unwrap()));
            let options = Training { adapter, targets: vec!["*down_proj.weight".parse().unwrap()], ..Training::default() };
            let kind = |_: &Weight| ZeroKind::Codes;
            let weights = Trained::load(&graph, &model, (&options, &kind), (home, &Device::Cpu, DType::F32), &MemoryTracker::with_budget(None), &work).unwrap();
            let gathered = weights.gather_model(&weights.trained, true).unwrap();
            let count = if options.adapter.is_some() { 2 } else { graph.params().count() };
            assert_eq!(gathered.len(), count);
            assert!(weights.trained.keys().all(|name| gathered.contains_key(name)));
        }
    }
}
