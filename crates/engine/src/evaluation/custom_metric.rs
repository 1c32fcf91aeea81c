//! Metrics that the program registers.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Metric, Outputs, Score, tensor_error};
use crate::data::{Array, Batch, References};
use crate::error::{Error, Result};
use crate::exec::floats_on_host;
use crate::exec::transfer::Cause;
use crate::registry::Registry;

/// A metric of the outputs of a model, accumulated over batches. Higher values are better: an error is
/// negated.
pub trait CustomMetric: Send {
    /// Adds the float outputs of a batch, and the class of each sample, if the data has classes. A
    /// sample without a class is ignored by losses, and should be ignored by the metric.
    ///
    /// # Errors
    /// An output is missing or has another shape.
    fn add(&mut self, outputs: &BTreeMap<String, Array>, classes: Option<&[Option<usize>]>) -> Result<()>;

    /// Returns the value over all batches.
    ///
    /// # Errors
    /// The metric is not defined for these samples.
    fn value(&self) -> Result<f64>;
}

type Factory = Arc<dyn Fn() -> Box<dyn CustomMetric> + Send + Sync>;

static METRICS: Registry<Factory> = Registry::new();

/// Registers a metric for the lifetime of the process. Data sets use it with
/// [`metric`](crate::data::Data::metric).
///
/// # Errors
/// The name is taken.
pub fn register_metric<M: CustomMetric + 'static>(name: &str, make: impl Fn() -> M + Send + Sync + 'static) -> Result<()> {
    let is_reserved = ["accuracy", "perplexity", "spearman"].contains(&name);
    let is_added = METRICS.add(name, is_reserved, Arc::new(move || Box::new(make())));
    if is_added { Ok(()) } else { Err(Error::option("metric", format!("`{name}` is taken"))) }
}

/// A registered metric, as a metric of tensors.
pub(super) struct Registered {
    name: String,
    metric: Box<dyn CustomMetric>,
}

impl Registered {
    pub fn new(name: &str) -> Result<Registered> {
        let make = METRICS.get(name).ok_or_else(|| Error::option("data", format!("this program has no metric `{name}`")))?;
        Ok(Registered { name: name.to_owned(), metric: make() })
    }
}

impl Metric for Registered {
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()> {
        let mut arrays = BTreeMap::new();
        for (name, tensor) in outputs.iter().filter(|(_, tensor)| tensor.dtype().is_float()) {
            let values = floats_on_host(tensor, Cause::Answers).and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>()).map_err(tensor_error)?;
            arrays.insert(name.clone(), Array::floats(tensor.dims(), values));
        }
        let classes = if let References::Classes(classes) = &batch.references { Some(classes.as_slice()) } else { None };
        self.metric.add(&arrays, classes)
    }

    fn score(&self) -> Result<Score> {
        Ok(Score { metric: self.name.clone(), value: self.metric.value()?, ci95: None, more: BTreeMap::new() })
    }
}
