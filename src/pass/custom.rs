//! Weight passes that the program registers.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::{PASSES, Pass, Plan, Step, targets};
use crate::entry::Constructor;
use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::model::Model;
use crate::registry::Registry;
use crate::run_state::{Applied, RunState};
use crate::store::{BlockSink, DType, Encoding, View, Weight, WeightSource, least_common_multiple};
use crate::work::Meter;

/// A pass that computes new values of each row of float weights. Rows are computed in any order by
/// several threads, while the weights are written.
pub trait CustomPass: fmt::Debug + Send + Sync {
    /// Returns a description of the weights that the pass changes, for plans and reports.
    fn rule(&self) -> String;

    /// Whether the pass changes the weight with this name and shape.
    fn selects(&self, name: &str, shape: &[usize]) -> bool;

    /// Replaces the values of a row: all values with the same index on the first axis. The result must
    /// depend only on the arguments. It is rounded to the type of the weight.
    ///
    /// # Errors
    /// The new values cannot be computed.
    fn apply(&self, name: &str, shape: &[usize], row: usize, values: &mut [f32]) -> Result<()>;

    /// Whether the pass sets weights to zero.
    fn zeroes(&self) -> bool {
        false
    }
}

pub(super) static REGISTERED: Registry<Constructor<Step>> = Registry::new();

/// Registers a pass for the lifetime of the process, so that recipes and [`Step::from_name`] know it.
/// `make` receives the options, or null.
///
/// # Errors
/// The name is taken.
pub fn register_pass<P: CustomPass + 'static>(name: &'static str, make: impl Fn(&Value) -> Result<P> + Send + Sync + 'static) -> Result<()> {
    let step = move |options: Value| make(&options).map(|pass| Step::Custom(Custom { name, options, pass: Arc::new(pass) }));
    let is_added = REGISTERED.add(name, PASSES.contains(&name), Arc::new(step));
    if is_added { Ok(()) } else { Err(Error::option("pass", format!("`{name}` already exists"))) }
}

/// A pass that the program has registered.
#[derive(Debug, Clone)]
pub struct Custom {
    name: &'static str,
    options: Value,
    pass: Arc<dyn CustomPass>,
}

impl PartialEq for Custom {
    fn eq(&self, other: &Custom) -> bool {
        (self.name, &self.options) == (other.name, &other.options)
    }
}

impl Serialize for Custom {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(self.name, &self.options)?;
        map.end()
    }
}

impl Pass for Custom {
    fn name(&self) -> &'static str {
        self.name
    }

    fn options(&self) -> Value {
        self.options.clone()
    }

    fn plan(&self, model: &Model, _state: &RunState) -> Result<Plan<'_>> {
        let (mut after, meter, mut changed) = (model.clone(), Arc::new(Meter::default()), BTreeSet::new());
        for (name, weight) in model.weights.by_name.iter().filter(|(name, weight)| self.pass.selects(name, &weight.shape)) {
            targets::require_float(self.name, name, weight)?;
            if weight.dtype == DType::F64 {
                return Err(Error::tensor(name, format!("has the dtype F64, which {} would round", self.name), "run `cast` before"));
            }
            let source = Changed { name: name.clone(), upstream: weight.clone(), pass: self.pass.clone(), meter: meter.clone() };
            after.weights.by_name.insert(name.clone(), weight.then(weight.dtype, Encoding::Dense, Arc::new(source)));
            changed.insert(name.clone());
        }
        if changed.is_empty() {
            return Err(Error::option(self.name, format!("no weight is selected ({})", self.pass.rule())));
        }
        let details = json!({ "changed": changed.len() });
        let applied =
            Applied { tensors: changed, rule: self.pass.rule(), meter, details, zeroes: self.pass.zeroes(), ..Applied::new(self.name, self.options()) };
        Ok(Plan::new(after, applied))
    }
}

/// A weight whose rows a pass changes.
struct Changed {
    name: String,
    upstream: Weight,
    pass: Arc<dyn CustomPass>,
    meter: Arc<Meter>,
}

impl WeightSource for Changed {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (dtype, length) = (self.upstream.dtype, self.upstream.row().max(1));
        let (mut floats, mut output, mut number) = (Vec::new(), Vec::new(), 0);
        self.upstream.visit(least_common_multiple(unit, length), &mut |block| {
            floats.resize(block.now.elements(), 0.0);
            output.resize(floats.len() * dtype.bitsize() / 8, 0);
            self.meter.time(|| {
                let decoded = block.now.decode(0, &mut floats);
                for row in floats.chunks_mut(length) {
                    self.pass.apply(&self.name, &self.upstream.shape, number, row)?;
                    number += 1;
                }
                let written = decoded && convert::from_f32(dtype, &floats, &mut output);
                if written { Ok(()) } else { Err(Error::tensor(&self.name, format!("has the dtype {dtype}"), "run `cast` before")) }
            })?;
            sink(block.becomes(View::dense(dtype, &output)))
        })
    }
}
