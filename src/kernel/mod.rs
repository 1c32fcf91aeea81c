//! Host loops: one small job each, vectorized by the compiler, free of any file or model.
//!
//! Loops over weights at rest read little-endian bytes, so no buffer needs to be aligned; loops of a running model
//! read f32. Floats are summed in a fixed number of lanes, or one by one, so results are the same with any number of
//! threads; weights at rest come out the same on every instruction set too. Products of a running model (`tile`) use fused
//! multiply-add where there is one.

#[macro_use]
pub(crate) mod simd;
#[cfg(feature = "run")]
pub mod activation;
#[cfg(feature = "run")]
pub mod activation_gradient;
#[cfg(feature = "run")]
pub mod attention;
#[cfg(feature = "run")]
pub mod attention_gradient;
#[cfg(feature = "run")]
pub mod bins;
pub mod bitmask;
#[cfg(feature = "run")]
pub mod channels;
#[cfg(feature = "run")]
pub mod codes;
#[cfg(feature = "run")]
pub mod columns;
pub mod compare;
pub mod convert;
#[cfg(feature = "run")]
pub mod convolution;
#[cfg(feature = "run")]
pub mod convolution_gradient;
#[cfg(feature = "run")]
pub mod epilogue;
mod float;
pub mod histogram;
pub mod mask;
#[cfg(feature = "run")]
pub mod matmul;
#[cfg(feature = "run")]
pub mod matmul_gradient;
pub mod quantize;
#[cfg(feature = "run")]
pub mod rows;
#[cfg(feature = "run")]
pub mod rows_gradient;
pub mod scan;
#[cfg(feature = "run")]
mod scratch;
#[cfg(feature = "run")]
pub mod shifted;
#[cfg(feature = "run")]
pub mod solve;
#[cfg(feature = "run")]
mod tile;
#[cfg(feature = "run")]
pub mod update;

pub(crate) use float::with_float;
pub use float::{Bf16, F16, F32, F64, Float};
pub use simd::instruction_set;
