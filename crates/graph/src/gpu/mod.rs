//! Kernels for NVIDIA GPUs, written in CUDA (`kernels.cu`). Without the feature `cuda`, no tensor is on a
//! GPU, and every function returns `None`.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod launch;

use candle_core::{Device, Result, Tensor};

use crate::kernel::activation::ActivationFunction;
use crate::kernel::update::AdamW;

/// Functions that return `None` if they do not support the tensors: other devices, dtypes or layouts.
macro_rules! on_gpu {
    ($($(#[$meta:meta])* pub fn $name:ident($($argument:ident: $ty:ty),*) -> $result:ty;)*) => {
        $($(#[$meta])*
        pub fn $name($($argument: $ty),*) -> Result<Option<$result>> {
            #[cfg(feature = "cuda")]
            return cuda::$name($($argument),*);
            #[cfg(not(feature = "cuda"))]
            {
                let _ = ($($argument),*);
                Ok(None)
            }
        })*
    };
}

/// Losses over logits and the factors on their gradients.
#[derive(Debug, Clone, Copy)]
pub struct LogitLosses<'t> {
    /// The teacher's logits `[rows, classes]`, the temperature, and the factor on the gradient of the forward
    /// KL divergence.
    pub teacher: Option<(&'t Tensor, f64, f64)>,
    /// The class of each row, the label smoothing, and the factor on the gradient of the cross entropy.
    pub targets: Option<(&'t Tensor, f64, f64)>,
    /// Number of columns that have a class; the others get a gradient of 0.
    pub classes: usize,
}

/// Positions of the rows of a block of attention products in the sequence.
#[derive(Debug, Clone, Copy)]
pub struct Products {
    /// Number of rows of each sample: heads times queries.
    pub rows_per_sample: usize,
    /// Number of queries; row `r` belongs to query `r % queries`.
    pub queries: usize,
    /// Position of the first query.
    pub first: usize,
    /// Position of the first key.
    pub start: usize,
    /// Factor on the products.
    pub scale: f64,
    /// Whether later keys are hidden.
    pub causal: bool,
    /// Keys at least this many positions away are hidden.
    pub window: Option<usize>,
}

/// The integer grid of consecutive columns of a weight.
#[derive(Debug, Clone, Copy)]
pub struct ColumnGrid<'t> {
    /// Scales of the groups `[rows, groups]`, in f32.
    pub scales: &'t Tensor,
    /// Their zero points.
    pub zeros: &'t Tensor,
    /// The group of each column, in u32.
    pub groups: &'t Tensor,
    /// Marks weights that must be zero, or do not change, `[columns, rows]` in u8.
    pub zeroed: Option<&'t Tensor>,
    /// The smallest and largest integer.
    pub bounds: (f32, f32),
}

/// Number of columns that [`unit_factors`] eliminates at once.
pub const FACTORIZED: usize = 64;

/// A factorization `H = P D Pᵀ` with the unit upper triangle `P`.
#[derive(Debug)]
pub struct UnitFactors {
    /// `P`, in f32.
    pub ratios: Tensor,
    /// Inverses of the squares of [`FACTORIZED`] columns on the diagonal of `P`, in f32.
    pub inverses: Vec<Tensor>,
    /// `D`, in f64.
    pub costs: Tensor,
}

on_gpu! {
    /// Number of GPUs.
    pub fn count() -> usize;

    /// Opens a GPU with one stream for all threads.
    pub fn open(number: usize) -> Device;

    /// The index and the model of a GPU.
    pub fn name(device: &Device) -> (usize, Option<String>);

    /// The peak memory of the tensors on a GPU since the last call, in bytes.
    pub fn take_peak_memory(device: &Device) -> u64;

    /// Copies a contiguous tensor of `f32` to as many values on the host.
    pub fn copy_to_host(tensor: &Tensor, values: &mut [f32]) -> ();

    /// An elementwise function.
    pub fn activate(function: ActivationFunction, x: &Tensor) -> Tensor;

    /// Its gradient, from the argument or, where
    /// [`derivative_reads_result`](ActivationFunction::derivative_reads_result), the result.
    pub fn activate_back(function: ActivationFunction, operand: &Tensor, gradient: &Tensor) -> Tensor;

    /// The sum of tensors of the same shape.
    pub fn add(a: &Tensor, b: &Tensor) -> Tensor;

    /// The product of tensors of the same shape.
    pub fn multiply(a: &Tensor, b: &Tensor) -> Tensor;

    /// Adds a bias to rows in place. The rows must not share memory with other tensors.
    pub fn add_bias(rows: &Tensor, bias: &Tensor) -> ();

    /// A contiguous copy of a tensor with four axes, of which the last is contiguous.
    pub fn contiguous(x: &Tensor) -> Tensor;

    /// Rotates pairs of elements of `[batch, heads, positions, width]` by angles with the given cosines and
    /// sines `[positions, turned / 2]`; backwards for a negative sign.
    pub fn rotate(x: &Tensor, tables: (&Tensor, &Tensor), sign: f64) -> Tensor;

    /// The gradient of the input of a normalization, given its epsilon, an offset that is added to the
    /// weight, and whether it is layer normalization or root mean square normalization; and if `sums`, the
    /// gradients of weight and bias.
    pub fn norm_back(x: &Tensor, weight: &Tensor, gradient: &Tensor, kind: (f64, f64, bool), sums: bool) -> (Tensor, Option<[Tensor; 2]>);

    /// Replaces attention products `[…, keys]` by probabilities; keys are hidden where the integer mask
    /// `[batch, keys]` is 0. The products must not share memory with other tensors.
    pub fn attention_softmax(products: &Tensor, mask: Option<&Tensor>, at: Products) -> ();

    /// Replaces the gradient of probabilities by the gradient of the scores, times a factor.
    pub fn softmax_back(probabilities: &Tensor, gradient: &Tensor, factor: f64) -> ();

    /// Updates a parameter and its moments, all f32, in place.
    pub fn adamw(step: &AdamW, parameter: &Tensor, gradient: &Tensor, mean: &Tensor, square: &Tensor) -> ();

    /// The sum of squares of each tensor, in f64.
    pub fn sums_of_squares(tensors: &[&Tensor]) -> Tensor;

    /// Sums over rows of this width, in the dtype of the tensor.
    pub fn column_sums(tensor: &Tensor, width: usize) -> Tensor;

    /// Returns `count` rows: the sum of the rows with each index, and zeros for other indices.
    pub fn sum_rows_by_index(rows: &Tensor, indices: &Tensor, count: usize) -> Tensor;

    /// Replaces logits `[rows, columns]` by the gradient of the losses, and returns the losses of the rows
    /// `[rows, 2]` in f32: divergence and cross entropy. The logits must not share memory with other tensors.
    pub fn logit_losses(logits: &Tensor, losses: LogitLosses) -> Tensor;

    /// Rounds at most 128 columns of a weight in turn, with compensation by the later ones, as
    /// [`Block`](crate::kernel::compensation::Block). The operands are the targets and the weights
    /// `[columns, rows]`, and the ratios `[columns, columns]`; values and errors are written.
    pub fn round_columns(operands: [&Tensor; 3], grid: ColumnGrid, values: &Tensor, errors: &Tensor) -> ();

    /// Rounds each of at most 128 columns of a weight to its optimum given all other weights, as
    /// [`round_row`](crate::kernel::refinement::round_row). The operands are the gradients `[columns, rows]`
    /// and the second moments `[columns, columns]`. Levels are changed in place, changes of values are
    /// subtracted from the errors, and the only element of `moved`, in u32, becomes 1 if there is one.
    pub fn descend_columns(operands: [&Tensor; 2], grid: ColumnGrid, levels: &Tensor, errors: &Tensor, moved: &Tensor) -> ();

    /// The product of matrices of the same dtype, f32 or f64. One axis of each is contiguous.
    pub fn product(a: &Tensor, b: &Tensor) -> Tensor;

    /// Adds a factor times the product of two matrices to a matrix with contiguous rows, in place. All are
    /// f32 or f64; the memory that is written is not part of the factors.
    pub fn add_product(sum: &Tensor, a: &Tensor, b: &Tensor, factor: f64) -> ();

    /// The factors of a symmetric positive definite matrix in f32 or f64, with a number added to its
    /// diagonal. Only the upper triangle is read. Costs are NaN if the sum is not positive definite. The
    /// matrix is overwritten, and must not share memory with other tensors.
    pub fn unit_factors(matrix: &Tensor, added: f64) -> UnitFactors;
}
