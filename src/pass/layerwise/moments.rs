//! What is remembered of what layers read.

use candle_core::{Device, Tensor};

use crate::error::Result;
use crate::exec::transfer::Cause;
use crate::exec::{floats_on_host, read};
use crate::kernel::{columns, gram};
use crate::pass::calibrate::{computed, not_finite, numbers, seen};

/// What is to be seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Sums of products of features, not of their squares alone.
    pub products: bool,
    /// So many rows of each batch as they are.
    pub rows: usize,
    /// What the original model's layers read at the same place, too.
    pub original: bool,
}

/// Sums over the rows that layers read.
pub(super) struct Moments {
    /// Features.
    pub size: usize,
    /// Rows.
    pub count: usize,
    /// Rows that are not all zeros: those of tokens that an expert does not see are.
    pub seen: usize,
    /// The upper triangle of `XᵀX`, or nothing.
    pub products: Vec<f32>,
    /// `(X₀ - X)ᵀX` with the rows `X₀` of the original model, or nothing where they are the same.
    pub differences: Vec<f32>,
    /// Of each feature, the sum of squares.
    pub squares: Vec<f64>,
    /// Of each feature, the sum of magnitudes.
    pub magnitudes: Vec<f64>,
    /// Of each feature, the largest magnitude.
    pub largest: Vec<f32>,
    /// Rows as they are, spread over the samples.
    pub rows: Vec<f32>,
    wanted: Wanted,
    batches: usize,
}

impl Moments {
    /// Of nothing yet.
    pub fn new(size: usize, wanted: Wanted) -> Moments {
        Moments {
            size,
            count: 0,
            seen: 0,
            products: if wanted.products { vec![0.0; size * size] } else { Vec::new() },
            differences: Vec::new(),
            squares: vec![0.0; size],
            magnitudes: vec![0.0; size],
            largest: vec![0.0; size],
            rows: Vec::new(),
            wanted,
            batches: 0,
        }
    }

    /// Takes rows `[n, size]`.
    ///
    /// # Errors
    /// One is not finite, or memory runs out.
    pub fn add(&mut self, name: &str, rows: &Tensor) -> Result<()> {
        if self.wanted.products && !matches!(rows.device(), Device::Cpu) {
            let products = rows.t().and_then(|transposed| transposed.contiguous()?.matmul(rows)).map_err(computed)?;
            self.products.iter_mut().zip(numbers(&products)?).for_each(|(sum, product)| *sum += product as f32);
        }
        let host = matches!(rows.device(), Device::Cpu);
        let found = floats_on_host(rows, Cause::Statistics).and_then(|rows| read(&rows, |values| Ok(self.add_rows(values, host)))).map_err(computed)?;
        found.ok_or_else(|| not_finite(name))
    }

    /// Takes rows of the original model `[n, size]` beside those that are taken by [`add`](Moments::add).
    ///
    /// # Errors
    /// One is not finite, or memory runs out.
    pub fn add_original(&mut self, name: &str, original: &Tensor, rows: &Tensor) -> Result<()> {
        // A row of zeros is a token that this expert has not seen: the original model says nothing about what it would answer.
        let differences = (original - rows).and_then(|differences| differences.broadcast_mul(&seen(original)?)).map_err(computed)?;
        if matches!(rows.device(), Device::Cpu) {
            let sums = &mut self.differences;
            let mut add = |left: &[f32], right: &[f32]| {
                if left.iter().any(|x| *x != 0.0) {
                    sums.resize(self.size * self.size, 0.0);
                    gram::add_cross(left, right, self.size, sums);
                }
                Ok(left.iter().all(|x| x.is_finite()))
            };
            let (left, right) = (floats_on_host(&differences, Cause::Statistics), floats_on_host(rows, Cause::Statistics));
            let finite = left.and_then(|left| right.and_then(|right| read(&left, |left| read(&right, |right| add(left, right))))).map_err(computed)?;
            return if finite { Ok(()) } else { Err(not_finite(name)) };
        }
        let products = differences.t().and_then(|transposed| transposed.contiguous()?.matmul(rows)).map_err(computed)?;
        self.differences.resize(self.size * self.size, 0.0);
        self.differences.iter_mut().zip(numbers(&products)?).for_each(|(sum, product)| *sum += product as f32);
        if self.differences.iter().all(|x| x.is_finite()) { Ok(()) } else { Err(not_finite(name)) }
    }

    /// Nothing where one is not finite.
    fn add_rows(&mut self, values: &[f32], products: bool) -> Option<()> {
        let count = values.len() / self.size.max(1);
        columns::magnitudes(values, self.size, &mut self.magnitudes, &mut self.squares, &mut self.largest);
        if !self.magnitudes.iter().all(|sum| sum.is_finite()) {
            return None;
        }
        if self.wanted.products && products {
            gram::add(values, self.size, &mut self.products);
        }
        // A row of zeros is padding, or a token that an expert has not seen.
        let told: Vec<&[f32]> = values.chunks_exact(self.size.max(1)).filter(|row| row.iter().any(|value| *value != 0.0)).collect();
        let taken = self.wanted.rows.min(told.len());
        for part in 0..taken {
            // Other places in each batch.
            self.rows.extend_from_slice(told[(part * told.len() / taken + self.batches * 7919) % told.len()]);
        }
        self.count += count;
        self.seen += told.len();
        self.batches += 1;
        Some(())
    }

    /// Mean magnitude of each feature.
    pub fn mean_magnitudes(&self) -> Vec<f64> {
        self.magnitudes.iter().map(|sum| sum / self.count.max(1) as f64).collect()
    }
}
