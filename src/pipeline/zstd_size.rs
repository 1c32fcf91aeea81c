//! Sizes of the files after zstd compression.

use std::path::PathBuf;

use crate::error::Result;
use crate::report::Sizes;
use crate::store::compressed::compressed_size;
use crate::work::Work;

/// Measures how large the input and output files would be after zstd compression, and adds both sizes.
pub(super) fn measure_zstd_sizes(sizes: &mut Sizes, before: &[PathBuf], after: &[PathBuf], work: &Work) -> Result<()> {
    for (size, files) in [(&mut sizes.before, before), (&mut sizes.after, after)] {
        let found = compressed_size(files, work)?;
        (size.bytes_zstd, size.bytes_zstd_sampled) = (Some(found.bytes), found.sampled);
    }
    Ok(())
}
