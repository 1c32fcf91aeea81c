//! Model evaluation: task metrics on labelled data, fidelity of the outputs to those of another model,
//! and latency.
//!
//! All models run on the same batches. Outputs are reduced to sums after each batch.

mod options;
mod results;

pub use options::{Benchmark, Evaluate, Precision};
pub use results::{
    Accuracy, Compute, Continuation, Cost, Fidelity, Latency, MeasuredFidelity, OutputFidelity, Quantiles, Runtime, SamplesFrom, Score, lower_is_better,
};

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! The part of this module that runs models.

    mod classification;
    mod common_nonfinite;
    mod comparison;
    mod custom_metric;
    mod divergence;
    mod embedding;
    mod fidelity;
    mod fidelity_rows;
    mod folded_states;
    mod language_modelling;
    mod latency;
    mod measure;
    mod metric;
    pub mod quantized_values;
    mod runner;
    mod statistics;
    mod subject;

    pub use common_nonfinite::without_common_nonfinite;
    pub use comparison::{Baseline, Comparison, Resources, Samples};
    pub use custom_metric::{CustomMetric, register_metric};
    pub use fidelity::FidelityAccumulator;
    pub use folded_states::without_folded_states;
    pub use latency::latency;
    pub use measure::{Outcome, Outcomes, compare, evaluate, evaluate_in, output_fidelity};
    pub use metric::Outputs;
    use metric::{Metric, in_chunks, select_output, tensor_error};
    pub use runner::{BlockwiseCandle, Candle, OnnxRuntime, Runner};
    pub use subject::{Runs, Subject, load, smaller_batch};

    use super::{Fidelity, Latency, OutputFidelity, Precision, Quantiles, Runtime, Score};
}

#[cfg(feature = "run")]
pub use running::*;
