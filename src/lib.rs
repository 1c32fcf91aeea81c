#![doc = include_str!("../README.md")]

pub mod build;
mod entry;
pub mod export;
pub mod pass;
pub mod pipeline;
pub mod plugin;
pub mod prelude;
pub mod recipe;
pub mod report;
#[doc(hidden)]
pub mod run_state;

#[cfg(feature = "cli")]
pub mod cli;

pub use compress_core::work::{Cancel, Event, Progress};
pub use compress_core::{Error, ParseError, Result};
pub use compress_engine::Model;
pub use pipeline::Pipeline;
pub use recipe::Recipe;
pub use report::Report;

use compress_core::{error, files, output, program, store, work};
use compress_engine::{evaluation, model};
use compress_graph::arch;
use compress_kernels as kernel;
#[cfg(feature = "run")]
use {
    compress_core::cache,
    compress_engine::{calibration, data, exec, generation, train},
    compress_graph::{analysis, ir},
    compress_onnx::{self as onnx, runtime},
};
