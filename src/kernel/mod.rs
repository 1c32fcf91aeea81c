//! Host loops over bytes: one small job each, vectorized by the compiler, free of any file or model.
//!
//! Every loop reads little-endian bytes, so no buffer needs to be aligned, and sums floats in a fixed
//! number of lanes, so results are the same on every instruction set and with any number of threads.

#[macro_use]
mod simd;
#[cfg(feature = "run")]
pub mod activation;
#[cfg(feature = "run")]
pub mod attention;
pub mod bitmask;
pub mod compare;
pub mod convert;
#[cfg(feature = "run")]
pub mod convolution;
mod float;
pub mod histogram;
pub mod mask;
#[cfg(feature = "run")]
pub mod matmul;
pub mod quantize;
#[cfg(feature = "run")]
pub mod rows;
pub mod scan;
#[cfg(feature = "run")]
mod scratch;

pub(crate) use float::with_float;
pub use float::{Bf16, F16, F32, F64, Float};
pub use simd::instruction_set;
