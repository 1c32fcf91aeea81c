//! What a general compressor would make of the files.

use std::path::PathBuf;

use crate::error::Result;
use crate::report::Sizes;
use crate::store::compressed::compressed_size;
use crate::work::Work;

/// Measures the files before and after.
pub(super) fn compress_further(sizes: &mut Sizes, before: &[PathBuf], after: &[PathBuf], work: &Work) -> Result<()> {
    for (size, files) in [(&mut sizes.before, before), (&mut sizes.after, after)] {
        let found = compressed_size(files, work)?;
        (size.bytes_zstd, size.bytes_zstd_sampled) = (Some(found.bytes), found.sampled);
    }
    Ok(())
}
