//! Stand-in for `zstd_size` in builds without zstd: compressed sizes are not measured.
#![allow(clippy::unnecessary_wraps)]

use std::path::PathBuf;

use crate::error::Result;
use crate::report::Sizes;
use crate::work::Work;

/// Does nothing.
pub(super) fn measure_zstd_sizes(_sizes: &mut Sizes, _before: &[PathBuf], _after: &[PathBuf], _work: &Work) -> Result<()> {
    Ok(())
}
