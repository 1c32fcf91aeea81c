//! Matrix products, computed as floats (`kernel/matmul.rs`) or in tile registers (`kernel/split.rs`),
//! whichever is faster for their sizes.

use super::epilogue::Epilogue;
use super::matmul;
use super::operands::{LeftRows, Right};
use super::pool::on_pool_thread;
use super::split;

/// Computes the product of a left matrix and a right matrix of `width` columns with all threads. Rows of
/// `out` are contiguous.
pub fn product(left: &LeftRows, right: &impl Right, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    match split::is_faster(left, width, right.parts()) {
        true => on_pool_thread(|| split::product(left, right, width, epilogue, out)),
        false => matmul::product(left, right, width, epilogue, out),
    }
}
