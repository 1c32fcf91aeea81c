//! How good a model's answers are: on labels, or against another model.
//!
//! Models see the same batches one after another; nothing of what they say is kept but sums.

#[cfg(feature = "run")]
mod classification;
#[cfg(feature = "run")]
mod embedding;
#[cfg(feature = "run")]
mod fidelity;
mod figures;
#[cfg(feature = "run")]
mod language_modelling;
#[cfg(feature = "run")]
mod latency;
#[cfg(feature = "run")]
mod measure;
mod options;
#[cfg(feature = "run")]
mod runner;
#[cfg(feature = "run")]
mod statistics;
#[cfg(feature = "run")]
mod subject;

#[cfg(feature = "run")]
pub(crate) use fidelity::Sums as FidelitySums;
pub use figures::{Accuracy, Compute, Cost, Fidelity, Latency, MeasuredFidelity, Quantiles, Runtime, SamplesFrom, Score, lower_is_better};
#[cfg(feature = "run")]
pub use latency::latency;
#[cfg(feature = "run")]
use measure::{Metric, answer, computed};
#[cfg(feature = "run")]
pub use measure::{Outcome, Outcomes, Outputs, closeness, compare, evaluate};
pub use options::Evaluate;
#[cfg(feature = "run")]
pub use runner::{Candle, OnnxRuntime, Runner};
#[cfg(feature = "run")]
pub use subject::Subject;
