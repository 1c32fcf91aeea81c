//! Compute kernels: small loops over slices, vectorized by the compiler, independent of files and
//! models.
//!
//! Kernels for stored weights process little-endian bytes, so that buffers need no alignment. Kernels
//! for model execution process f32. Floats are summed in a fixed number of lanes, or sequentially, so
//! results do not depend on the number of threads. For stored weights, they do not depend on the
//! instruction set either. Matrix products of model execution (`tile`) use fused multiply-add if it is
//! available, and large ones the tile registers of AMX (`split`). Second moments (`gram`) use products of
//! bf16 numbers (`pairs`).

#[macro_use]
pub mod simd;
pub mod bitmask;
pub mod cache;
pub mod compare;
pub mod convert;
pub mod exact;
mod float;
pub mod ggml;
pub mod grid;
pub mod histogram;
pub mod mask;
pub mod minifloat;
pub mod packing;
pub mod palette;
pub mod quantize;
pub mod scan;
mod weighted_error;

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Kernels for model execution.

    pub mod activation;
    pub mod activation_gradient;
    mod amx;
    pub mod attention;
    pub mod attention_gradient;
    mod attention_single;
    mod block_rounding;
    pub mod causal;
    pub mod channels;
    mod cholesky_f32;
    pub mod coded;
    pub mod codes;
    pub mod column_solver;
    pub mod columns;
    pub mod compensation;
    pub mod convolution;
    pub mod convolution_gradient;
    pub mod cross_entropy;
    pub mod delta;
    pub mod dense;
    pub mod divergence;
    mod dots;
    pub mod dynamic_8bit;
    pub mod eigen;
    pub mod epilogue;
    pub mod few_rows;
    pub mod fourier;
    pub mod gram;
    pub mod interleaved;
    pub mod linear;
    pub mod linear_histogram;
    pub mod low_rank;
    pub mod matmul;
    pub mod matmul_gradient;
    pub mod one_row;
    pub mod operands;
    mod pairs;
    pub mod pool;
    pub mod product;
    pub mod refinement;
    pub mod resize;
    pub mod rotation;
    pub mod rows;
    pub mod rows_gradient;
    pub mod scratch;
    pub mod shifted;
    pub mod solve;
    mod split;
    pub mod tile;
    pub mod trained_rounding;
    pub mod update;
}

#[cfg(feature = "run")]
pub use running::*;

pub use float::{Bf16, F16, F32, F64, Float};
pub use simd::instruction_set;
