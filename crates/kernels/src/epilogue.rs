//! Operations fused into the computation of a result tile: bias, normalization, activation, sums with
//! other matrices.

use rayon::prelude::*;

use super::activation::{self, ActivationFunction};

/// A fused operation with operands of type `T`; for kernels, a slice.
#[derive(Debug, Clone, Copy)]
pub enum Fused<T> {
    /// Adds a value to each column.
    AddToColumns(T),
    /// Adds a value to each row.
    AddToRows(T),
    /// Multiplies each row by a value.
    MultiplyRows(T),
    /// Adds a matrix with the shape of the result.
    Add(T),
    /// Multiplies by a matrix with the shape of the result.
    Multiply(T),
    /// Applies an activation function.
    Activate(ActivationFunction),
}

impl<T> Fused<T> {
    /// Maps the operand, if the mapping succeeds.
    pub fn map<'t, U>(&'t self, operand: impl FnOnce(&'t T) -> Option<U>) -> Option<Fused<U>> {
        Some(match self {
            Fused::AddToColumns(values) => Fused::AddToColumns(operand(values)?),
            Fused::AddToRows(values) => Fused::AddToRows(operand(values)?),
            Fused::MultiplyRows(values) => Fused::MultiplyRows(operand(values)?),
            Fused::Add(values) => Fused::Add(operand(values)?),
            Fused::Multiply(values) => Fused::Multiply(operand(values)?),
            Fused::Activate(function) => Fused::Activate(*function),
        })
    }
}

impl Fused<&[f32]> {
    /// The operation for a result that consists of the rows from `row` on.
    pub fn from_row(self, row: usize, width: usize) -> Self {
        match self {
            Fused::AddToRows(values) => Fused::AddToRows(&values[row..]),
            Fused::MultiplyRows(values) => Fused::MultiplyRows(&values[row..]),
            Fused::Add(values) => Fused::Add(&values[row * width..]),
            Fused::Multiply(values) => Fused::Multiply(&values[row * width..]),
            Fused::AddToColumns(_) | Fused::Activate(_) => self,
        }
    }
}

/// Operations applied to a product before it is stored.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// The operations in order.
    pub steps: &'a [Fused<&'a [f32]>],
    /// Whether the product is added to the previous contents instead of replacing them.
    pub accumulate: bool,
}

#[inline(always)]
fn combine(out: &mut [f32], other: &[f32], function: impl Fn(f32, f32) -> f32) {
    for (out, other) in out.iter_mut().zip(other) {
        *out = function(*out, *other);
    }
}

impl<'a> Epilogue<'a> {
    /// Stores the product unchanged.
    pub const NONE: Epilogue<'static> = Epilogue { steps: &[], accumulate: false };
    /// Adds the product to the previous contents.
    pub const ACCUMULATE: Epilogue<'static> = Epilogue { steps: &[], accumulate: true };

    /// Applies these operations and replaces the previous contents.
    pub fn new(steps: &'a [Fused<&'a [f32]>]) -> Epilogue<'a> {
        Epilogue { steps, accumulate: false }
    }

    /// Applies the operations to part of a row, and stores it. The part starts at `column` of a result
    /// with `width` columns.
    #[inline(always)]
    pub(super) fn store(&self, values: &mut [f32], [row, column, width]: [usize; 3], out: &mut [f32]) {
        self.apply(values, [row, column, width]);
        self.put(values, out);
    }

    /// Stores final values.
    #[inline(always)]
    pub(super) fn put(&self, values: &[f32], out: &mut [f32]) {
        if self.accumulate {
            combine(out, values, |a, b| a + b);
        } else {
            out.copy_from_slice(values);
        }
    }

    /// Applies the operations to part of a row.
    #[inline(always)]
    pub(super) fn apply(&self, out: &mut [f32], [row, column, width]: [usize; 3]) {
        for step in self.steps {
            match step {
                // Operands of the length of the part: it may be fixed, and so is that of the loop.
                Fused::AddToColumns(values) => combine(out, &values[column..][..out.len()], |a, b| a + b),
                Fused::AddToRows(values) => out.iter_mut().for_each(|x| *x += values[row]),
                Fused::MultiplyRows(values) => out.iter_mut().for_each(|x| *x *= values[row]),
                Fused::Add(values) => combine(out, &values[row * width + column..][..out.len()], |a, b| a + b),
                Fused::Multiply(values) => combine(out, &values[row * width + column..][..out.len()], |a, b| a * b),
                Fused::Activate(function) => activation::apply(*function, out),
            }
        }
    }
}

simd! {
    fn apply(steps: &[Fused<&[f32]>], out: &mut [f32], row: usize, width: usize) {
        Epilogue::new(steps).apply(out, [row, 0, width]);
    }
}

/// Applies the operations to a complete matrix.
pub fn apply_to(steps: &[Fused<&[f32]>], out: &mut [f32], width: usize) {
    out.par_chunks_mut(width.max(1)).enumerate().for_each(|(row, out)| apply(steps, out, row, width));
}
