//! Models: opened from checkpoints, run on data, calibrated, evaluated, trained.

pub mod evaluation;
pub mod model;
pub mod yaml_text;

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Modules that run models.

    pub mod calibration;
    pub mod data;
    pub mod exec;
    pub mod generation;
    pub mod train;

    pub(crate) use compress_core::{one_or_several, ratio, registry};
    pub(crate) use compress_graph::{analysis, gpu, ir};
    pub(crate) use compress_onnx::{self as onnx, runtime};
}

#[cfg(feature = "run")]
pub use running::*;

pub use model::Model;

use compress_core::{aliases, error, files, output, store, work};
use compress_graph::arch;
use compress_kernels as kernel;
