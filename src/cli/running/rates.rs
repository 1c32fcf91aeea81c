//! Rates of this machine, from which times are estimated.

use super::args::Global;
use crate::error::Result;
use crate::pipeline::{Builder, RateFile, Rates};
use crate::report::Report;

/// Adds the rates of this machine, so that plans and reports have estimated times: the stored ones, or with
/// `measures` measured ones.
pub(in crate::cli) fn with_rates(builder: Builder, global: &Global, measures: bool) -> Result<Builder> {
    let rates = if measures { rates(global)? } else { rate_file(global).and_then(|file| file.load()) };
    Ok(rates.into_iter().fold(builder, Builder::rates))
}

/// The rates of this machine: the stored ones, or measured ones. `None` without a cache folder.
pub(super) fn rates(global: &Global) -> Result<Option<Rates>> {
    rate_file(global).map(|file| file.load_or_measure(&global.models.device.open()?)).transpose()
}

/// Stores the times of a run, from which later estimates are corrected.
pub(in crate::cli) fn record_times(report: &Report, global: &Global) {
    rate_file(global).iter().filter(|_| report.timing.is_some()).for_each(|file| file.record(report));
}

/// The file with the rates of this machine, with the device on which models run.
fn rate_file(global: &Global) -> Option<RateFile> {
    RateFile::of_user(&global.models.device.to_string(), global.threads())
}
