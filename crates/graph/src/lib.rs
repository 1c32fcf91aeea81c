//! Typed graphs of networks: operators, model families that build graphs, and analyses that do not run them.
//! Without the feature `run`, only the descriptions of model families.

pub mod arch;

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Modules that need graphs.

    pub mod analysis;
    pub mod gpu;
    pub mod ir;

    pub(crate) use compress_core::files;
    pub(crate) use compress_kernels as kernel;
}

#[cfg(feature = "run")]
pub use running::*;

use compress_core::{error, store};
