//! Activation statistics collected over calibration samples: ranges, histograms and means. Samples are
//! reduced to counts and sums, so memory depends on the width of the model and not on the number of
//! samples.

mod channels;
mod device_stats;
mod histogram;
mod observer;
mod run;
mod statistics;
mod weighted_error;

pub use channels::Channels;
pub use device_stats::select_rows;
pub use histogram::{ActivationHistogram, BINS};
pub use observer::{ActivationObserver, validated_range, with_headroom};
pub use run::sample_sizes;
pub use run::{calibrate, calibrate_blockwise, observe_blockwise};
pub use statistics::{Axis, Fold, Request, RunningRange, ValueStatistics};
pub use weighted_error::WeightedError;
