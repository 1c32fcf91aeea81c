//! Typed graphs of networks: operators, model families that build graphs, and analyses that do not run them.

pub mod analysis;
pub mod arch;
pub mod ir;

use compress_core::{error, files, store};
use compress_kernels as kernel;
