//! Results of running the input and output models.

use crate::evaluation::{Accuracy, Compute, Continuation, Latency, MeasuredFidelity};
use crate::report::DraftQuality;

/// Results of running the input and output models.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub compute: Option<Compute>,
    pub accuracy: Option<Accuracy>,
    pub fidelity: Option<MeasuredFidelity>,
    pub continuations: Vec<Continuation>,
    pub latency: Option<Latency>,
    pub draft: Option<DraftQuality>,
    pub notes: Vec<String>,
}
