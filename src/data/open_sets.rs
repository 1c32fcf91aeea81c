//! Data sets that are open, so that each is opened and counted once a run.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde_json::{Map, Value};

use super::{Data, DataSet, DataSets, Target};
use crate::error::Result;
use crate::ir::Port;
use crate::work::lock;

/// Data sets by what they were opened with. Clones share them; they are no part of what a recipe says, so that all are equal.
#[derive(Clone, Default)]
pub struct OpenedSets(Arc<Mutex<Vec<Opened>>>);

struct Opened {
    options: Data,
    folder: PathBuf,
    config: Map<String, Value>,
    ports: [Vec<Port>; 2],
    set: Arc<DataSet>,
}

impl Opened {
    fn fits(&self, options: &Data, target: Target) -> bool {
        let [inputs, outputs] = &self.ports;
        self.options == *options && self.folder == target.folder && inputs == target.inputs && outputs == target.outputs && self.config == *target.config
    }
}

impl OpenedSets {
    fn open(&self, options: &Data, target: Target) -> Result<Arc<DataSet>> {
        let mut opened = lock(&self.0);
        if let Some(found) = opened.iter().find(|opened| opened.fits(options, target)) {
            return Ok(found.set.clone());
        }
        let set = Arc::new(DataSet::open(options, target)?);
        let ports = [target.inputs.to_vec(), target.outputs.to_vec()];
        opened.push(Opened { options: options.clone(), folder: target.folder.to_owned(), config: target.config.clone(), ports, set: set.clone() });
        Ok(set)
    }
}

impl DataSets {
    /// Opens the files that options name and holds them to a model; what a run has opened before is the same set.
    ///
    /// # Errors
    /// As [`DataSet::open`].
    pub fn open(&self, options: &Data, target: Target) -> Result<Arc<DataSet>> {
        self.opened.open(options, target)
    }
}

impl PartialEq for OpenedSets {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl fmt::Debug for OpenedSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} opened", lock(&self.0).len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_opened_once_for_a_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.safetensors");
        let tensor = candle_core::Tensor::zeros((3, 2), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("x".to_owned(), tensor)].into(), &path).unwrap();
        let graph: crate::ir::Graph = "input x: float[batch, 2]\noutput y = x\n".parse().unwrap();
        let (inputs, outputs) = Port::of(&graph);
        let (config, other) = (Map::new(), Map::from_iter([("a".to_owned(), Value::Null)]));
        let made = crate::model::Made::new();
        let target = |config| Target { folder: folder.path(), made: &made, config, inputs: &inputs, outputs: &outputs };
        let sets = DataSets::default();
        let all = Data { arrays: Some(path), ..Data::default() };
        let first = sets.open(&all, target(&config)).unwrap();
        assert!(Arc::ptr_eq(&first, &sets.clone().open(&all, target(&config)).unwrap()));
        assert!(!Arc::ptr_eq(&first, &sets.open(&all, target(&other)).unwrap()));
        let less = sets.open(&Data { samples: Some(2), ..all.clone() }, target(&config)).unwrap();
        assert_eq!((first.count().unwrap(), less.count().unwrap()), (3, 2));
        assert_eq!(sets, DataSets::default());
        assert!(sets.open(&Data { samples: Some(0), ..all }, target(&config)).is_err());
    }
}
