//! Files and their names, storage formats of weights, output transactions, errors and progress of `compress`.

#[cfg(not(unix))]
compile_error!("compress supports only Unix: file locks, renames and reads at offsets need POSIX functions");

pub mod aliases;
pub mod cache;
pub mod error;
pub mod files;
pub mod heap;
pub mod one_or_several;
pub mod output;
pub mod program;
pub mod ratio;
pub mod registry;
pub mod store;
pub mod work;

use compress_kernels as kernel;

pub use error::{Error, ParseError, Result};

/// The name of the tool, in reports and written files.
pub const NAME: &str = "compress";
