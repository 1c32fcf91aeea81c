//! The data sets of a recipe, each opened and counted once per run.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::options::{Data, Task};
use super::{DataSet, Target};
use crate::error::Result;
use crate::ir::Port;
use crate::work::lock;

/// The data sets of a recipe.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DataSets {
    /// Evaluation data, for accuracy and other metrics
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "super::name_or_options::name_or_options")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "super::name_or_options::name_or_options_schema"))]
    pub evaluation: Option<Data>,
    /// Calibration data, for passes that collect activation statistics; labels are ignored
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "super::name_or_options::name_or_options")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "super::name_or_options::name_or_options_schema"))]
    pub calibration: Option<Data>,
    /// Training data
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "super::name_or_options::name_or_options")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "super::name_or_options::name_or_options_schema"))]
    pub train: Option<Data>,
    /// Data sets that this run has opened
    #[serde(skip)]
    pub opened: OpenSets,
}

impl DataSets {
    /// Opens a data set for a model, or returns the set that was opened before with the same options.
    pub fn open(&self, options: &Data, target: Target) -> Result<Arc<DataSet>> {
        self.opened.open(options, target)
    }

    /// Whether no data set is specified.
    pub fn is_empty(&self) -> bool {
        *self == DataSets::default()
    }

    /// Resolves relative paths against a folder.
    pub fn resolve(&mut self, folder: &Path) {
        for data in [&mut self.evaluation, &mut self.calibration, &mut self.train].into_iter().flatten() {
            data.resolve(folder);
        }
    }

    /// Ignores labels of calibration data, so that image folders may have any name, and labels of arrays any
    /// values. If a pass computes a loss `with_labels`, those of arrays are kept.
    pub fn ignore_labels(&mut self, with_labels: bool) {
        let ignores = |data: &Data| data.images.is_some() || (data.arrays.is_some() && !with_labels);
        for data in self.calibration.iter_mut().filter(|data| ignores(data)) {
            data.task.get_or_insert(Task::Fidelity);
        }
    }

    /// Returns the data sets with absolute paths.
    pub fn absolute(&self) -> DataSets {
        let mut sets = self.clone();
        sets.resolve(&std::env::current_dir().unwrap_or_default());
        sets
    }
}

/// Open data sets by their options and target. Clones share the cache. It is not part of a recipe, so
/// that all instances compare equal.
#[derive(Clone, Default)]
pub struct OpenSets(Arc<Mutex<Vec<Opened>>>);

struct Opened {
    options: Data,
    folder: PathBuf,
    config: Map<String, Value>,
    ports: [Vec<Port>; 2],
    set: Arc<DataSet>,
}

impl Opened {
    fn matches(&self, options: &Data, target: Target) -> bool {
        let [inputs, outputs] = &self.ports;
        self.options == *options && self.folder == target.folder && inputs == target.inputs && outputs == target.outputs && self.config == *target.config
    }
}

impl OpenSets {
    fn open(&self, options: &Data, target: Target) -> Result<Arc<DataSet>> {
        let mut opened = lock(&self.0);
        if let Some(found) = opened.iter().find(|opened| opened.matches(options, target)) {
            return Ok(found.set.clone());
        }
        let set = Arc::new(DataSet::open(options, target)?);
        let ports = [target.inputs.to_vec(), target.outputs.to_vec()];
        opened.push(Opened { options: options.clone(), folder: target.folder.to_owned(), config: target.config.clone(), ports, set: set.clone() });
        Ok(set)
    }
}

impl PartialEq for OpenSets {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl fmt::Debug for OpenSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} opened", lock(&self.0).len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_set_may_be_the_name_of_a_file() {
        let parse = |text: &str| serde_saphyr::from_str::<DataSets>(text);
        let sets = parse("{ calibration: a.txt, evaluation: b.npz, train: { text: c, samples: 3 } }").unwrap();
        assert_eq!(sets, parse("{ calibration: { text: a.txt }, evaluation: { arrays: b.npz }, train: { text: c, samples: 3 } }").unwrap());
        assert!(parse("{ calibration: null }").unwrap().is_empty());
        assert!(parse("{ calibration: { txt: a } }").unwrap_err().to_string().contains("txt"));
    }

    #[test]
    fn labels_of_calibration_data_are_ignored_unless_a_pass_reads_them() {
        let task = |data: Data, with_labels: bool| {
            let mut sets = DataSets { calibration: Some(data.clone()), evaluation: Some(data), ..DataSets::default() };
            sets.ignore_labels(with_labels);
            assert_eq!(sets.evaluation.and_then(|data| data.task), None);
            sets.calibration.and_then(|data| data.task)
        };
        let at = |name: &str| Data::at(Path::new(name));
        assert_eq!([true, false].map(|with_labels| task(at("a.npz"), with_labels)), [None, Some(Task::Fidelity)]);
        assert_eq!([true, false].map(|with_labels| task(at("images"), with_labels)), [Some(Task::Fidelity); 2]);
        assert_eq!(task(at("a.txt"), false), None);
    }

    #[test]
    fn a_set_is_opened_once_per_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.safetensors");
        let tensor = candle_core::Tensor::zeros((3, 2), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("x".to_owned(), tensor)].into(), &path).unwrap();
        let graph: crate::ir::Graph = "input x: float[batch, 2]\noutput y = x\n".parse().unwrap();
        let (inputs, outputs) = Port::from_graph(&graph);
        let (config, other) = (Map::new(), Map::from_iter([("a".to_owned(), Value::Null)]));
        let synthesized = crate::model::SynthesizedFiles::new();
        let target = |config| Target { inputs: &inputs, outputs: &outputs, ..Target::new(folder.path(), &synthesized, config) };
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
