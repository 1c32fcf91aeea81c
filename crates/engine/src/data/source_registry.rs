//! Data sources that the program registers, with samples from memory, a database or a generator.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::registry::Registry;

/// An array in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    pub(super) shape: Vec<usize>,
    pub(super) values: Values,
}

/// Values of an array.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Values {
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

    /// Sizes of the axes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values, if they are floats.
    pub fn as_floats(&self) -> Option<&[f32]> {
        if let Values::Float(values) = &self.values { Some(values) } else { None }
    }

    /// The values, if they are integers.
    pub fn as_ints(&self) -> Option<&[i64]> {
        if let Values::Int(values) = &self.values { Some(values) } else { None }
    }

    pub(super) fn len(&self) -> usize {
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

static SOURCES: Registry<Arc<dyn DataSource>> = Registry::new();

/// Registers a data source for the lifetime of the process. Data sets use it with
/// [`source`](super::Data::source).
///
/// # Errors
/// The name is taken.
pub fn register_source(name: &str, source: impl DataSource + 'static) -> Result<()> {
    let is_added = SOURCES.add(name, false, Arc::new(source));
    if is_added { Ok(()) } else { Err(Error::option("source", format!("`{name}` is already registered"))) }
}

/// The source with this name.
pub(super) fn find(name: &str) -> Result<Arc<dyn DataSource>> {
    SOURCES.get(name).ok_or_else(|| {
        let known = SOURCES.names().iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "none".to_owned() } else { known };
        Error::option("data", format!("this program has no data source `{name}`; the registered sources are: {known}"))
    })
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
