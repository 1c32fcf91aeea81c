//! Samples of a registered data source, batched and checked.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::array_shape::matched_shape;
use super::largest::BatchSizes;
use super::options::{Data, Task};
use super::source_registry::{Array, DataSource, Sample, Values, find};
use super::{Batch, Order, PendingBatches, Port, References, SampleSource, Target, in_batches, shaped};
use crate::error::{Error, Result};
use crate::ir::Element;

/// A registered source, opened for a model.
pub(super) struct CustomSource {
    name: String,
    source: Arc<dyn DataSource>,
    ports: Vec<Port>,
    /// Number of classes of the model, if it is a constant.
    classes: Option<usize>,
    is_classified: bool,
    count: usize,
    batch: usize,
}

impl CustomSource {
    pub fn open(options: &Data, name: &str, task: Task, target: Target) -> Result<CustomSource> {
        let source = find(name)?;
        match task {
            Task::Fidelity => {}
            Task::Classification if source.has_classes() => {}
            Task::Classification => return Err(Error::option("task", format!("classification needs classes, which the data source `{name}` does not have"))),
            _ => return Err(Error::option("task", format!("{task} is not possible with a data source: use classification or fidelity"))),
        }
        let count = source.count().min(options.samples.unwrap_or(usize::MAX));
        let (ports, classes) = (target.inputs.to_vec(), target.classes());
        let is_classified = task == Task::Classification;
        Ok(CustomSource { name: name.to_owned(), source, ports, classes, is_classified, count, batch: options.batch(task, None) })
    }

    fn error(&self, number: usize, reason: String) -> Error {
        Error::option("data", format!("sample {number} of the data source `{}`: {reason}", self.name))
    }

    /// The arrays of a sample in the order of the model's inputs, each with its shape for the input.
    fn arrays(&self, number: usize, mut sample: Sample) -> Result<Vec<(Array, Vec<usize>)>> {
        let take = |port: &Port| {
            let array = match sample.inputs.remove(&port.name) {
                Some(array) => array,
                None => return Err(self.error(number, format!("has no array for the model's input `{}` ({})", port.name, port.sizes()))),
            };
            let is_right = matches!((&array.values, port.element), (Values::Int(_), Element::Int) | (Values::Float(_), Element::Float));
            if !is_right {
                return Err(self.error(number, format!("the array `{}` has values of another type than the model's input", port.name)));
            }
            if array.shape.iter().product::<usize>() != array.len() {
                return Err(self.error(number, format!("the array `{}` of the shape {:?} has {} values", port.name, array.shape, array.len())));
            }
            let shape = matched_shape(&array.shape, port.shape.get(1..).unwrap_or(&[]));
            let shape = shape
                .ok_or_else(|| self.error(number, format!("the array `{}` is {:?}, but the model's input is {}", port.name, array.shape, port.sizes())))?;
            Ok((array, shape))
        };
        let arrays = self.ports.iter().map(take).collect::<Result<_>>()?;
        match sample.inputs.keys().next() {
            None => Ok(arrays),
            Some(unused) => Err(self.error(number, format!("the model has no input `{unused}`"))),
        }
    }

    fn class(&self, number: usize, class: Option<usize>) -> Result<Option<usize>> {
        let class = class.ok_or_else(|| self.error(number, "has no class".into()))?;
        match self.classes {
            Some(count) if class >= count => Err(self.error(number, format!("is of the class {class}, but the model has {count} classes, numbered from 0"))),
            _ => Ok(Some(class)),
        }
    }

    fn batch(&self, samples: &[(usize, Sample)]) -> Result<Batch> {
        let mut rows = samples.iter().map(|(number, sample)| self.arrays(*number, sample.clone())).collect::<Result<Vec<_>>>()?;
        let mut inputs = BTreeMap::new();
        for port in self.ports.iter().rev() {
            let arrays: Vec<(Array, Vec<usize>)> = rows.iter_mut().filter_map(Vec::pop).collect();
            let Some((_, first)) = arrays.first() else { continue };
            if let Some(((number, _), (_, shape))) = samples.iter().zip(&arrays).find(|(_, (_, shape))| shape != first) {
                return Err(self.error(*number, format!("the array `{}` is {shape:?}, and {first:?} in the same batch: use `batch_size: 1`", port.name)));
            }
            let shape: Vec<usize> = [samples.len()].iter().chain(first).copied().collect();
            let (mut floats, mut ints) = (Vec::new(), Vec::new());
            for (array, _) in arrays {
                match array.values {
                    Values::Float(values) => floats.extend(values),
                    Values::Int(values) => ints.extend(values),
                }
            }
            let tensor = if port.element == Element::Int { Tensor::from_vec(ints, shape, &Device::Cpu) } else { Tensor::from_vec(floats, shape, &Device::Cpu) };
            inputs.insert(port.name.clone(), tensor.map_err(shaped)?);
        }
        let references = if self.is_classified {
            References::Classes(samples.iter().map(|(number, sample)| self.class(*number, sample.class)).collect::<Result<_>>()?)
        } else {
            References::None
        };
        Ok(Batch { inputs, references, samples: samples.len() })
    }
}

impl SampleSource for CustomSource {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        let bytes = if self.count == 0 { 0 } else { self.source.sample(0)?.inputs.values().map(|array| array.len().saturating_mul(8)).sum() };
        let samples = (0..self.count).map(|number| Ok((number, self.source.sample(number)?)));
        Ok(in_batches(samples, self.batch, bytes, order, |samples| self.batch(samples)))
    }

    fn count(&self) -> Result<usize> {
        Ok(self.count)
    }

    fn batch_sizes(&self) -> BatchSizes {
        let is_fixed = self.ports.iter().all(|port| port.shape.iter().skip(1).all(Option::is_some));
        if is_fixed { BatchSizes::Equal } else { BatchSizes::Varying { tokens: None } }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::data::DataSet;
    use crate::data::source_registry::register_source;
    use crate::model::SynthesizedFiles;

    /// Samples with two values and a class; the sample 3 has another size.
    struct Pairs(usize);

    impl DataSource for Pairs {
        fn count(&self) -> usize {
            self.0
        }

        fn sample(&self, number: usize) -> Result<Sample> {
            let size = if number == 3 { 3 } else { 2 };
            let sample = Sample::new("x", Array::floats([size], vec![number as f32; size]));
            Ok(Sample { class: Some(number), ..sample })
        }

        fn has_classes(&self) -> bool {
            true
        }
    }

    #[test]
    fn samples_of_a_registered_source_are_batched_and_checked() {
        register_source("pairs", Pairs(3)).unwrap();
        register_source("four pairs", Pairs(4)).unwrap();
        assert!(register_source("pairs", Pairs(2)).unwrap_err().to_string().contains("already registered"));
        let graph: crate::ir::Graph = "input x: float[batch, features]\noutput y = x\n".parse().unwrap();
        let (inputs, outputs) = Port::from_graph(&graph);
        let (config, synthesized) = (Map::new(), SynthesizedFiles::new());
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(std::path::Path::new(""), &synthesized, &config) };
        let open = |text: &str| DataSet::open(&serde_saphyr::from_str(text).unwrap(), target);
        let set = open("{ source: pairs, batch_size: 2 }").unwrap();
        let mut batches = Vec::new();
        set.for_each(|batch| {
            batches.push((batch.inputs["x"].to_vec2::<f32>().unwrap(), batch.references));
            Ok(())
        })
        .unwrap();
        assert_eq!(batches[0], (vec![vec![0.0; 2], vec![1.0; 2]], References::Classes(vec![Some(0), Some(1)])));
        assert_eq!((batches.len(), set.count().unwrap(), set.task()), (2, 3, Task::Classification));
        assert_eq!(open("{ source: pairs, samples: 1 }").unwrap().count().unwrap(), 1);
        let uneven = open("source: four pairs").unwrap().first().unwrap_err().to_string();
        assert!(uneven.contains("sample 3") && uneven.contains("batch_size: 1"), "{uneven}");
        for (text, reason) in [
            ("source: none", "`four pairs`, `pairs`"),
            ("{ source: pairs, text: a.txt }", "exactly one of"),
            ("{ source: pairs, task: embedding }", "not possible with a data source"),
            ("{ source: pairs, mean: 1 }", "`mean` applies only to"),
        ] {
            assert!(open(text).err().is_some_and(|e| e.to_string().contains(reason)), "{text}");
        }
        let content = |text: &str| -> Result<String> {
            let (cancel, data) = (crate::work::Cancel::default(), serde_saphyr::from_str::<Data>(text).unwrap());
            data.content(&crate::work::Work { threads: 1, progress: &crate::work::Silent, cancel: &cancel })
        };
        assert_ne!(content("source: pairs").unwrap(), content("source: four pairs").unwrap());
    }
}
