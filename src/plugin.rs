//! Extensions of the crate by the program that uses it: passes, export formats, metrics, data sources and
//! stores of files. They are registered under a name for the lifetime of the process, before recipes that use
//! the name are read. `examples/plugins.rs` has one of each.

pub use compress_core::files::{Store, register_store};

pub use crate::export::custom::{CustomFormat as Format, WeightValues, register_format};
pub use crate::pass::custom::{CustomPass as Pass, register_pass};
#[cfg(feature = "run")]
pub use crate::{
    data::{Array, DataSource, Sample, register_source},
    evaluation::{CustomMetric as Metric, register_metric},
};
