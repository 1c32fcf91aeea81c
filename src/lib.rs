#![doc = "x"]
pub mod error;
pub mod kernel;
pub mod store;
pub mod model;
pub mod pass;
pub mod export;
pub mod report;
pub mod recipe;
pub mod pipeline;
pub use error::{Error, Result};
#[cfg(feature = "cli")]
pub mod cli;
