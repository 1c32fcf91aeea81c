//! How good a model's answers are: on labels, or against another model.
//!
//! Models see the same batches one after another; nothing of what they say is kept but sums.

mod figures;
mod options;

pub use figures::{
    Accuracy, Compute, Continued, Cost, Fidelity, Latency, MeasuredFidelity, OutputFidelity, Quantiles, Runtime, SamplesFrom, Score, lower_is_better,
};
pub use options::{Evaluate, Precision};

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! What it takes to run models.

    mod classification;
    mod embedding;
    mod fidelity;
    mod language_modelling;
    mod latency;
    mod measure;
    pub(crate) mod quantized_values;
    mod runner;
    mod statistics;
    mod subject;

    pub(crate) use fidelity::Sums as FidelitySums;
    pub use latency::latency;
    use measure::{Metric, answer, by_parts, computed};
    pub use measure::{Outcome, Outcomes, Outputs, closeness, compare, evaluate};
    pub use runner::{ByBlocks, Candle, OnnxRuntime, Runner};
    pub use subject::{Subject, load};

    use super::{Fidelity, Latency, OutputFidelity, Precision, Quantiles, Runtime, Score};
}

#[cfg(feature = "run")]
pub use running::*;
