//! What is done to a tile of a result before it is stored: bias, normalisation, activation, sums with other matrices.

use rayon::prelude::*;

use super::activation::{self, ActivationFunction};

/// One thing that is done to the result; what it reads is a `T`, for kernels a slice.
#[derive(Debug, Clone, Copy)]
pub enum Fused<T> {
    /// Adds a number to each column.
    AddToColumns(T),
    /// Adds a number to each row.
    AddToRows(T),
    /// Multiplies each row by a number.
    MultiplyRows(T),
    /// Adds a matrix like the result.
    Add(T),
    /// Multiplies with a matrix like the result.
    Multiply(T),
    /// Applies a function.
    Activate(ActivationFunction),
}

impl<T> Fused<T> {
    /// The same with something else in the place of what it reads, if that can be had.
    pub fn map<'t, U>(&'t self, of: impl FnOnce(&'t T) -> Option<U>) -> Option<Fused<U>> {
        Some(match self {
            Fused::AddToColumns(values) => Fused::AddToColumns(of(values)?),
            Fused::AddToRows(values) => Fused::AddToRows(of(values)?),
            Fused::MultiplyRows(values) => Fused::MultiplyRows(of(values)?),
            Fused::Add(values) => Fused::Add(of(values)?),
            Fused::Multiply(values) => Fused::Multiply(of(values)?),
            Fused::Activate(function) => Fused::Activate(*function),
        })
    }
}

impl Fused<&[f32]> {
    /// The same for a result that begins at a row of this one.
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

/// What becomes of a product: some things are done to it, one after the other, and then it is stored.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// What is done.
    pub steps: &'a [Fused<&'a [f32]>],
    /// Whether it is added to what the result holds, instead of replacing it.
    pub accumulate: bool,
}

#[inline(always)]
fn combine(out: &mut [f32], other: &[f32], function: impl Fn(f32, f32) -> f32) {
    for (out, other) in out.iter_mut().zip(other) {
        *out = function(*out, *other);
    }
}

impl<'a> Epilogue<'a> {
    /// The product as it is.
    pub const NONE: Epilogue<'static> = Epilogue { steps: &[], accumulate: false };
    /// The product added to what is there.
    pub const ACCUMULATE: Epilogue<'static> = Epilogue { steps: &[], accumulate: true };

    /// These things, and the result replaces what is there.
    pub fn of(steps: &'a [Fused<&'a [f32]>]) -> Epilogue<'a> {
        Epilogue { steps, accumulate: false }
    }

    /// Finishes a stretch of a row of a product and stores it; the stretch begins at `column` of a result `width` wide.
    #[inline(always)]
    pub(super) fn store(&self, values: &mut [f32], [row, column, width]: [usize; 3], out: &mut [f32]) {
        self.apply(values, [row, column, width]);
        self.put(values, out);
    }

    /// Stores what is finished.
    #[inline(always)]
    pub(super) fn put(&self, values: &[f32], out: &mut [f32]) {
        if self.accumulate {
            combine(out, values, |a, b| a + b);
        } else {
            out.copy_from_slice(values);
        }
    }

    /// Finishes a stretch of a row.
    #[inline(always)]
    pub(super) fn apply(&self, out: &mut [f32], [row, column, width]: [usize; 3]) {
        for step in self.steps {
            match step {
                Fused::AddToColumns(values) => combine(out, &values[column..], |a, b| a + b),
                Fused::AddToRows(values) => out.iter_mut().for_each(|x| *x += values[row]),
                Fused::MultiplyRows(values) => out.iter_mut().for_each(|x| *x *= values[row]),
                Fused::Add(values) => combine(out, &values[row * width + column..], |a, b| a + b),
                Fused::Multiply(values) => combine(out, &values[row * width + column..], |a, b| a * b),
                Fused::Activate(function) => activation::apply(*function, out),
            }
        }
    }
}

simd! {
    fn apply(steps: &[Fused<&[f32]>], out: &mut [f32], row: usize, width: usize) {
        Epilogue::of(steps).apply(out, [row, 0, width]);
    }
}

/// The same for a matrix that was not made by a product.
pub fn apply_to(steps: &[Fused<&[f32]>], out: &mut [f32], width: usize) {
    out.par_chunks_mut(width.max(1)).enumerate().for_each(|(row, out)| apply(steps, out, row, width));
}
