//! Sums over the rows that a layer reads, and the least squares that are made of them.

use candle_core::{D, Tensor};

use crate::error::Result;
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::transposed_product;
use crate::kernel::solve::Factor;
use crate::pass::calibrate::{column_moments, computed, numbers, seen};

/// What is added to squares at least, in parts of their mean: keeps weights near what they were where data says little. With
/// few rows it is features by rows.
const RIDGE: f64 = 1e-3;

/// Weights of rows `[n, 1]` with which every row counts the same, however large its values are: a few tokens with huge values would
/// decide everything otherwise, and the normalisation behind the layer removes the size again. Rows of zeros count nothing: they are
/// tokens that an expert does not see, and say nothing about what it would answer.
pub(super) fn row_weights(rows: &Tensor) -> Result<Tensor> {
    let weights = || {
        let squares = rows.sqr()?.sum_keepdim(D::Minus1)?;
        let seen = seen(rows)?;
        let mean = transfer::number(&(squares.sum_all()? / seen.sum_all()?.maximum(1.0)?)?, Cause::Statistics)? as f32;
        let mean = f64::from(mean).max(f64::from(f32::MIN_POSITIVE));
        ((squares + 0.1 * mean)?.recip()? * mean)? * seen
    };
    weights().map_err(computed)
}

fn add(sums: &mut [f64], values: &[f64]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

/// Sums of features `x` of the original model and `y` of the smaller one, and of their products.
pub(super) struct Sums {
    /// How many rows.
    rows: f64,
    /// The sum of their weights.
    pub count: f64,
    pub x: Vec<f64>,
    pub y: Vec<f64>,
    xy: Vec<f64>,
    yy: Vec<f64>,
}

impl Sums {
    /// Over so many features of the original model, and so many that survive.
    pub fn new(features: usize, left: usize) -> Sums {
        Sums { rows: 0.0, count: 0.0, x: vec![0.0; features], y: vec![0.0; left], xy: vec![0.0; features * left], yy: vec![0.0; left * left] }
    }

    /// Adds rows, each with a weight where there are some.
    pub fn add(&mut self, x: &Tensor, y: &Tensor, weights: Option<&Tensor>) -> Result<()> {
        self.rows += x.dims()[0] as f64;
        let Some(weights) = weights else {
            self.count += x.dims()[0] as f64;
            return self.add_weighted([x, x], [y, y]);
        };
        self.count += numbers(weights)?.iter().sum::<f64>();
        let weighted = |rows: &Tensor| rows.broadcast_mul(weights).map_err(computed);
        self.add_weighted([x, &weighted(x)?], [y, &weighted(y)?])
    }

    fn add_weighted(&mut self, [x, weighted_x]: [&Tensor; 2], [y, weighted_y]: [&Tensor; 2]) -> Result<()> {
        let product = |a: &Tensor, b: &Tensor| transposed_product(a, b).map_err(computed).and_then(|product| numbers(&product));
        add(&mut self.x, &column_moments(weighted_x)?[0]);
        add(&mut self.y, &column_moments(weighted_y)?[0]);
        add(&mut self.xy, &product(x, weighted_y)?);
        add(&mut self.yy, &product(y, weighted_y)?);
        Ok(())
    }

    /// The matrix `[x, y]` that takes the surviving features as they are.
    pub fn selection(&self, surviving: &[usize]) -> Vec<f64> {
        let left = self.y.len();
        let mut matrix = vec![0.0; self.x.len() * left];
        surviving.iter().enumerate().for_each(|(j, i)| matrix[i * left + j] = 1.0);
        matrix
    }

    /// The matrix `M` of `x ≈ M y + c`, with `c` free or zero.
    pub fn estimate(&self, surviving: &[usize], centred: bool) -> Option<Vec<f64>> {
        let (n, left) = (self.x.len(), self.y.len());
        let mean = |sums: &[f64], at: usize| if centred { sums[at] / self.count } else { 0.0 };
        let mut yy: Vec<f64> = (0..left * left).map(|at| self.yy[at] / self.count - mean(&self.y, at / left) * mean(&self.y, at % left)).collect();
        let scale = (0..left).map(|j| yy[j * left + j]).sum::<f64>() / left.max(1) as f64;
        let ridge = RIDGE.max(left as f64 / self.rows.max(1.0));
        let mut matrix = self.selection(surviving);
        // The residual of the selection is estimated, so that the ridge draws towards the selection.
        let mut rest: Vec<f64> = (0..n * left)
            .map(|at| {
                let (i, j) = (at / left, at % left);
                let xy = self.xy[at] / self.count - mean(&self.x, i) * mean(&self.y, j);
                xy - surviving.binary_search(&i).map_or(0.0, |own| yy[own * left + j])
            })
            .collect();
        (0..left).for_each(|j| yy[j * left + j] += ridge * scale + f64::MIN_POSITIVE);
        Factor::new(yy, left)?.solve(&mut rest);
        matrix.iter_mut().zip(rest).for_each(|(m, r)| *m += r);
        Some(matrix)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn large_rows_get_small_weights_and_rows_of_zeros_none() {
        let rows = Tensor::new(&[[1f32, 0.0], [0.0, 10.0], [0.0, 0.0]], &Device::Cpu).unwrap();
        let weights = numbers(&row_weights(&rows).unwrap()).unwrap();
        // The mean square of the two rows that are not zero is 50.5.
        let wanted = [50.5 / 6.05, 50.5 / 105.05, 0.0];
        assert!(weights.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() < 1e-4), "{weights:?}");
    }
}
