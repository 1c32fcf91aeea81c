//! What the values of a model are like, seen over samples: ranges, histograms, means. Nothing is kept of a sample but counts, so
//! memory depends on the model's width and never on the number of samples.

mod channels;
mod histogram;
mod observer;
mod run;
mod there;

pub use channels::Channels;
pub use histogram::{ActivationHistogram, BINS};
pub use observer::{ActivationObserver, Averages, Weighted, crossed, with_headroom};
pub use run::{Axis, Request, ValueStatistics, calibrate, calibrate_blockwise, observe_blockwise};
