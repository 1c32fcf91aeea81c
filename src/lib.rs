#![doc = include_str!("../README.md")]

mod entry;
pub mod error;
pub mod evaluation;
pub mod export;
pub mod files;
pub mod kernel;
pub mod model;
pub mod output;
pub mod pass;
pub mod pipeline;
pub mod prelude;
mod program;
pub mod recipe;
pub mod report;
pub mod run_state;
pub mod store;
pub mod work;

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Modules for running models, which need the feature `run`.

    pub mod analysis;
    pub mod arch;
    pub(crate) mod cache;
    pub mod calibration;
    pub mod data;
    pub mod exec;
    pub mod generation;
    pub mod ir;
    pub mod onnx;
    pub mod runtime;
    pub mod train;
}

#[cfg(feature = "run")]
pub use running::*;

#[cfg(feature = "cli")]
pub mod cli;

pub use error::{Error, Result};
pub use model::Model;
pub use pipeline::Pipeline;
pub use recipe::Recipe;
pub use report::Report;
