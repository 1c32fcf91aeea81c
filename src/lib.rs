#![doc = include_str!("../README.md")]

#[cfg(feature = "run")]
pub mod analysis;
#[cfg(feature = "run")]
pub mod arch;
#[cfg(feature = "run")]
mod cache;
#[cfg(feature = "run")]
pub mod calibration;
#[cfg(feature = "run")]
pub mod data;
mod entry;
pub mod error;
pub mod evaluation;
#[cfg(feature = "run")]
pub mod exec;
pub mod export;
#[cfg(feature = "run")]
pub mod ir;
pub mod kernel;
pub mod model;
#[cfg(feature = "run")]
pub mod onnx;
pub mod pass;
pub mod pipeline;
pub mod prelude;
mod program;
pub mod recipe;
pub mod report;
#[cfg(feature = "run")]
pub mod runtime;
pub mod store;
#[cfg(feature = "run")]
pub mod train;

#[cfg(feature = "cli")]
pub mod cli;

pub use error::{Error, Result};
pub use model::Model;
pub use pipeline::Pipeline;
pub use recipe::Recipe;
pub use report::Report;
