//! Data sources that the program registers, with samples from memory, a database or a generator.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{Device, Tensor};

use super::array_shape::matched_shape;
use super::options::{Data, Task};
use super::{Batch, Order, PendingBatches, Port, References, SampleSource, Target, in_batches, shaped};
use crate::error::{Error, Result};
use crate::ir::Element;

/// An array in row-major order.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Array {
    /// Sizes of the axes, outermost first.
    pub shape: Vec<usize>,
    /// The values.
    pub values: Values,
}

/// Values of an array.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Values {
    /// Floats.
    Float(Vec<f32>),
    /// Integers, such as token ids.
    Int(Vec<i64>),
}

impl Array {
    /// An array of floats.
    pub fn floats(shape: impl Into<Vec<usize>>, values: impl Into<Vec<f32>>) -> Array {
        Array { shape: shape.into(), values: Values::Float(values.into()) }
    }

    /// An array of integers.
    pub fn ints(shape: impl Into<Vec<usize>>, values: impl Into<Vec<i64>>) -> Array {
        Array { shape: shape.into(), values: Values::Int(values.into()) }
    }

    /// The values, if they are floats.
    pub fn as_floats(&self) -> Option<&[f32]> {
        if let Values::Float(values) = &self.values { Some(values) } else { None }
    }

    /// The values, if they are integers.
    pub fn as_ints(&self) -> Option<&[i64]> {
        if let Values::Int(values) = &self.values { Some(values) } else { None }
    }

    fn len(&self) -> usize {
        match &self.values {
            Values::Float(values) => values.len(),
            Values::Int(values) => values.len(),
        }
    }

    /// The little-endian bytes of the values.
    fn bytes(&self) -> Vec<u8> {
        match &self.values {
            Values::Float(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Values::Int(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }
}

/// A sample of a data source.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Sample {
    /// Arrays by the name of the model's input, without the batch axis.
    pub inputs: BTreeMap<String, Array>,
    /// The class of the sample, for sources with classes.
    pub class: Option<usize>,
}

impl Sample {
    /// A sample with one input.
    pub fn new(input: impl Into<String>, array: Array) -> Sample {
        Sample { inputs: BTreeMap::from([(input.into(), array)]), class: None }
    }
}

/// A source of samples. It returns the same samples each time.
pub trait DataSource: Send + Sync {
    /// Returns the number of samples.
    fn count(&self) -> usize;

    /// Returns a sample by its number, from 0.
    ///
    /// # Errors
    /// The sample cannot be read.
    fn sample(&self, number: usize) -> Result<Sample>;

    /// Whether samples have classes, so that the task is classification.
    fn has_classes(&self) -> bool {
        false
    }
}

static SOURCES: RwLock<BTreeMap<String, Arc<dyn DataSource>>> = RwLock::new(BTreeMap::new());

/// Registers a data source for the lifetime of the process. Data sets use it with
/// [`source`](Data::source).
///
/// # Errors
/// The name is taken.
pub fn register_source(name: &str, source: impl DataSource + 'static) -> Result<()> {
    let mut sources = SOURCES.write().unwrap_or_else(PoisonError::into_inner);
    if sources.contains_key(name) {
        return Err(Error::option("source", format!("`{name}` is already registered")));
    }
    sources.insert(name.to_owned(), Arc::new(source));
    Ok(())
}

/// The source with this name.
fn find(name: &str) -> Result<Arc<dyn DataSource>> {
    let sources = SOURCES.read().unwrap_or_else(PoisonError::into_inner);
    sources.get(name).cloned().ok_or_else(|| {
        let known = sources.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "none".to_owned() } else { known };
        Error::option("data", format!("this program has no data source `{name}`; the registered sources are: {known}"))
    })
}

/// The task of a source, if the options do not specify it.
pub(super) fn task(name: &str) -> Result<Task> {
    Ok(if find(name)?.has_classes() { Task::Classification } else { Task::Fidelity })
}

/// Hash of all samples of a source.
pub(super) fn content(name: &str) -> Result<String> {
    let (source, mut hasher) = (find(name)?, blake3::Hasher::new());
    for number in 0..source.count() {
        let sample = source.sample(number)?;
        for (input, array) in &sample.inputs {
            hasher.update(format!("{input} {:?}\n", array.shape).as_bytes());
            hasher.update(&array.bytes());
        }
        hasher.update(format!("{:?}\n", sample.class).as_bytes());
    }
    Ok(hasher.finalize().to_string())
}

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
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::data::DataSet;
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
        let target = Target { folder: std::path::Path::new(""), synthesized: &synthesized, config: &config, inputs: &inputs, outputs: &outputs };
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
