//! Host loops: one small job each, vectorized by the compiler, free of any file or model.
//!
//! Loops over weights at rest read little-endian bytes, so no buffer needs to be aligned; loops of a running model
//! read f32. Floats are summed in a fixed number of lanes, or one by one, so results are the same with any number of
//! threads; weights at rest come out the same on every instruction set too. Products of a running model (`tile`) use fused
//! multiply-add where there is one.

#[macro_use]
pub(crate) mod simd;
pub mod bitmask;
pub mod cache;
pub mod compare;
pub mod convert;
pub mod exact;
mod float;
pub mod ggml;
pub mod histogram;
pub mod mask;
pub mod narrow;
pub mod packing;
pub mod palette;
pub mod quantize;
pub mod scan;

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Loops of a running model.

    pub mod activation;
    pub mod activation_gradient;
    pub mod attention;
    pub mod attention_gradient;
    mod attention_single;
    pub mod bins;
    pub mod channels;
    pub mod choices;
    pub mod codes;
    pub mod columns;
    pub mod compensation;
    pub mod convolution;
    pub mod convolution_gradient;
    pub mod cross_entropy;
    pub mod dense;
    pub mod eigen;
    pub mod epilogue;
    pub mod few_rows;
    pub mod fourier;
    pub mod gram;
    pub mod grid;
    pub mod low_rank;
    pub mod matmul;
    pub mod matmul_gradient;
    pub mod one_row;
    pub mod resize;
    pub mod rows;
    pub mod rows_gradient;
    pub(crate) mod scratch;
    pub mod shifted;
    pub mod solve;
    pub(crate) mod tile;
    pub mod update;
}

#[cfg(feature = "run")]
pub use running::*;

pub(crate) use float::with_float;
pub use float::{Bf16, F16, F32, F64, Float};
pub use simd::instruction_set;
