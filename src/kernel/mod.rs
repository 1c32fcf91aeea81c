//! Host loops over bytes: one small job each, vectorized by the compiler, free of any file or model.
//!
//! Every loop reads little-endian bytes, so no buffer needs to be aligned, and sums floats in a fixed
//! number of lanes, so results are the same on every instruction set and with any number of threads.

#[macro_use]
mod simd;
pub mod bitmask;
pub mod compare;
pub mod convert;
mod float;
pub mod histogram;
pub mod mask;
pub mod quantize;
pub mod scan;

pub(crate) use float::with_float;
pub use float::{Bf16, F16, F32, F64, Float};
pub use simd::instruction_set;
