//! Products with the weight of a linear layer, by the number of rows and the form in which it is stored.

use super::epilogue::Epilogue;
use super::few_rows::{self, FewRows};
use super::interleaved;
use super::matmul;
use super::one_row::{self, OneRow};
use super::operands::{Columns, LeftRows, Right, Rows};
use super::product;

/// The weight of a linear layer.
pub trait LinearWeight: Right + Sized {
    /// The product with a single row.
    fn one_row(&self, x: &[f32], epilogue: Epilogue, out: &mut [f32]);

    /// The product with at most [`few_rows::MAX_ROWS`] rows.
    fn few_rows(&self, x: &[f32], rows: usize, epilogue: Epilogue, out: &mut [f32]);
}

impl<T: FewRows + OneRow> LinearWeight for Columns<'_, T> {
    fn one_row(&self, x: &[f32], epilogue: Epilogue, out: &mut [f32]) {
        one_row::product(x, self, epilogue, out);
    }

    fn few_rows(&self, x: &[f32], rows: usize, epilogue: Epilogue, out: &mut [f32]) {
        match rows <= interleaved::MAX_ROWS {
            true => one_row::product_of_rows(x, rows, self, epilogue, out),
            false => few_rows::product(x, rows, self, x.len() / rows, epilogue, out),
        }
    }
}

impl<T: OneRow> LinearWeight for Rows<'_, T> {
    fn one_row(&self, x: &[f32], epilogue: Epilogue, out: &mut [f32]) {
        one_row::product_by_rows(x, self, epilogue, out);
    }

    fn few_rows(&self, x: &[f32], rows: usize, epilogue: Epilogue, out: &mut [f32]) {
        let inner = x.len() / rows;
        matmul::product(&LeftRows::new(x, rows, inner, inner), self, self.count, epilogue, out);
    }
}

/// The product of `x` `[rows, inner]` and a weight with `width` outputs, with all threads.
pub fn product(x: &[f32], rows: usize, inner: usize, weight: &impl LinearWeight, width: usize, epilogue: Epilogue, out: &mut [f32]) {
    let x = &x[..rows * inner];
    match rows {
        1 => weight.one_row(x, epilogue, out),
        2..=few_rows::MAX_ROWS => weight.few_rows(x, rows, epilogue, out),
        _ => product::product(&LeftRows::new(x, rows, inner, inner), weight, width, epilogue, out),
    }
}
