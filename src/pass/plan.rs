//! Plans of passes: the model that a pass will produce, and the work that produces it.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::Context;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::run_state::Applied;
use crate::store::{BlockSink, DType, Encoding, Weight, WeightSource};

type Execution<'a> = Box<dyn FnOnce(&Context) -> Result<(Model, Applied)> + 'a>;

/// Planned result of a pass, determined without reading a tensor, and the work that remains.
pub struct Plan<'a> {
    /// The model after the pass: names, shapes and encodings. Values that execution computes are
    /// placeholders; all others are final.
    pub model: Model,
    /// The record of the pass, without the details that only execution determines.
    pub applied: Applied,
    execution: Option<Execution<'a>>,
}

impl fmt::Debug for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Plan").field("pass", &self.applied.name).field("executes", &self.execution.is_some()).finish_non_exhaustive()
    }
}

impl<'a> Plan<'a> {
    /// A plan of a pass whose whole work is done while the model is written.
    pub fn new(model: Model, applied: Applied) -> Plan<'a> {
        Plan { model, applied, execution: None }
    }

    /// Adds work that must be done before the model is written. It returns the planned model with its
    /// final values, and the final record of the pass.
    #[must_use]
    pub fn with_execution(self, execution: impl FnOnce(&Context) -> Result<(Model, Applied)> + 'a) -> Plan<'a> {
        Plan { execution: Some(Box::new(execution)), ..self }
    }

    /// Does the work. Returns the final model and the final record of the pass, to which the time of the
    /// work is added.
    ///
    /// # Errors
    /// If the samples do not fit the model, if memory runs out, if the work is cancelled, or if the model
    /// differs from the planned one although the record does not state that it is an estimate.
    pub fn execute(self, context: &Context) -> Result<(Model, Applied)> {
        let Some(execution) = self.execution else { return Ok((self.model, self.applied)) };
        let start = Instant::now();
        let (model, applied) = execution(context)?;
        applied.meter.add(start.elapsed());
        match difference(&self.model, &model).filter(|_| !self.applied.estimated) {
            None => Ok((model, applied)),
            Some(difference) => Err(Error::run(applied.name, format!("did not produce the planned model: {difference}"), "report this error")),
        }
    }
}

/// Values of a weight that is not computed yet.
struct Placeholder(String);

impl WeightSource for Placeholder {
    fn visit(&self, _unit: usize, _sink: BlockSink) -> Result<()> {
        Err(Error::tensor(&self.0, "is not available before the passes run", ""))
    }
}

/// A dense weight that execution computes.
pub(super) fn placeholder(name: &str, dtype: DType, shape: Vec<usize>) -> Weight {
    Weight::new(dtype, shape, Encoding::Dense, Arc::new(Placeholder(name.to_owned())))
}

/// The first difference between a planned and an executed model that affects its files.
fn difference(planned: &Model, executed: &Model) -> Option<String> {
    let (planned, executed) = (&planned.weights.by_name, &executed.weights.by_name);
    let missing = planned.keys().find(|name| !executed.contains_key(*name)).map(|name| format!("`{name}` is missing"));
    missing.or_else(|| {
        executed.iter().find_map(|(name, now)| match planned.get(name) {
            None => Some(format!("`{name}` was not planned")),
            Some(before) => (layout(before) != layout(now)).then(|| format!("`{name}` is {}, not {}", described(now), described(before))),
        })
    })
}

/// The properties of a weight that determine its layout in a file.
pub(super) fn layout(weight: &Weight) -> impl PartialEq + '_ {
    let encoding = if let Encoding::Quantized(affine) = &weight.encoding { Some(affine.scheme()) } else { None };
    (weight.dtype, &weight.shape, encoding)
}

fn described(weight: &Weight) -> String {
    format!("{} of shape {:?}", weight.describe(), weight.shape)
}
