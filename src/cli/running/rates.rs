//! Rates of this machine, from which times are estimated.

use super::args::Global;
use crate::pipeline::{Builder, RateFile, Rates};
use crate::report::Report;

/// Adds the rates of this machine, so that plans and reports have estimated times: the stored ones, or with
/// `measures` measured ones.
pub(in crate::cli) fn with_rates(builder: Builder, global: &Global, measures: bool) -> Builder {
    let rates = if measures { rates(global) } else { rate_file(global).and_then(|file| file.load()) };
    rates.into_iter().fold(builder, Builder::rates)
}

/// The rates of this machine: the stored ones, or measured ones. `None` without a cache folder, or if the
/// device cannot be used, which is an error of the runs that need it.
pub(super) fn rates(global: &Global) -> Option<Rates> {
    let file = rate_file(global)?;
    file.load().or_else(|| file.load_or_measure(&global.models.device.open().ok()?).ok())
}

/// Stores the times of a run, from which later estimates are corrected.
pub(in crate::cli) fn record_times(report: &Report, global: &Global) {
    rate_file(global).iter().filter(|_| report.timing.is_some()).for_each(|file| file.record(report));
}

/// The file with the rates of this machine, with the device on which models run.
fn rate_file(global: &Global) -> Option<RateFile> {
    RateFile::of_user(&global.models.device.resolved().to_string(), global.threads())
}
