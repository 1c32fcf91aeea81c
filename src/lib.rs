#![doc = "x"]
pub mod error;
pub mod kernel;
pub mod store;
pub use error::{Error, Result};
