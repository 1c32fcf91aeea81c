//! Sums of products over the inputs of a layer, and their least-squares solution.

use std::rc::Rc;

use candle_core::{D, Tensor};

use crate::error::Result;
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::transposed_product;
use crate::kernel::solve::Factor;
use crate::pass::calibrate::{column_moments, nonzero_rows, numbers, tensor_error};

/// Minimum ridge, as a fraction of the mean square: draws weights towards the original ones if the data
/// is insufficient. For few rows, the ridge is the ratio of features to rows.
const RIDGE: f64 = 1e-3;

/// Weights `[n, 1]` that normalize rows to similar magnitude. Otherwise, a few tokens with massive
/// activations would dominate, although the normalization after the layer removes their magnitude. Rows
/// of zeros, which are tokens not routed to an expert, have the weight zero.
pub(in crate::pass) fn row_weights(rows: &Tensor) -> Result<Tensor> {
    let weights = || {
        let squares = rows.sqr()?.sum_keepdim(D::Minus1)?;
        let nonzero = nonzero_rows(rows)?;
        let mean = transfer::number(&(squares.sum_all()? / nonzero.sum_all()?.maximum(1.0)?)?, Cause::Statistics)? as f32;
        // With this minimum, the reciprocal of a tenth of the mean is finite in f32.
        let mean = f64::from(mean).max(1e-30);
        ((squares + 0.1 * mean)?.recip()? * mean)? * nonzero
    };
    weights().map_err(tensor_error)
}

fn add(sums: &mut [f64], values: &[f64]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

/// Sums of the features `x` of the original model and `y` of the pruned model, and of their products.
pub(in crate::pass) struct ProductSums {
    /// Number of rows.
    rows: f64,
    /// Sum of the weights of rows.
    pub count: f64,
    pub x: Vec<f64>,
    pub y: Vec<f64>,
    xy: Vec<f64>,
    yy: Vec<f64>,
}

impl ProductSums {
    /// Creates empty sums for these numbers of original and surviving features.
    pub fn new(features: usize, surviving: usize) -> ProductSums {
        let (xy, yy) = (vec![0.0; features * surviving], vec![0.0; surviving * surviving]);
        ProductSums { rows: 0.0, count: 0.0, x: vec![0.0; features], y: vec![0.0; surviving], xy, yy }
    }

    /// Adds rows with optional weights.
    pub fn add(&mut self, x: &Tensor, y: &Tensor, weights: Option<&Tensor>) -> Result<()> {
        self.rows += x.dims()[0] as f64;
        let Some(weights) = weights else {
            self.count += x.dims()[0] as f64;
            return self.add_weighted([x, x], [y, y]);
        };
        self.count += numbers(weights)?.iter().sum::<f64>();
        let weighted = |rows: &Tensor| rows.broadcast_mul(weights).map_err(tensor_error);
        self.add_weighted([x, &weighted(x)?], [y, &weighted(y)?])
    }

    fn add_weighted(&mut self, [x, weighted_x]: [&Tensor; 2], [y, weighted_y]: [&Tensor; 2]) -> Result<()> {
        let product = |a: &Tensor, b: &Tensor| transposed_product(a, b).map_err(tensor_error).and_then(|product| numbers(&product));
        add(&mut self.x, &column_moments(weighted_x)?[0]);
        add(&mut self.y, &column_moments(weighted_y)?[0]);
        add(&mut self.xy, &product(x, weighted_y)?);
        add(&mut self.yy, &product(y, weighted_y)?);
        Ok(())
    }

    /// The matrix `[x, y]` that selects the surviving features.
    pub fn selection(&self, surviving: &[usize]) -> Vec<f64> {
        let left = self.y.len();
        let mut matrix = vec![0.0; self.x.len() * left];
        surviving.iter().enumerate().for_each(|(j, i)| matrix[i * left + j] = 1.0);
        matrix
    }

    /// Adds the sums over other rows.
    pub fn merge(&mut self, other: &ProductSums) {
        self.rows += other.rows;
        self.count += other.count;
        for (sums, added) in [(&mut self.x, &other.x), (&mut self.y, &other.y), (&mut self.xy, &other.xy), (&mut self.yy, &other.yy)] {
            add(sums, added);
        }
    }

    /// The weighted mean per row of a sum over rows; 0 if all rows have the weight zero.
    pub fn mean(&self, sum: f64) -> f64 {
        if self.count > 0.0 { sum / self.count } else { 0.0 }
    }

    /// Covariances of `y` with itself, `[y, y]`, and of the residual of the selection with `y`, `[x, y]`;
    /// second moments unless `centred`.
    fn covariances(&self, surviving: &[usize], centred: bool) -> [Vec<f64>; 2] {
        let (n, left) = (self.x.len(), self.y.len());
        let centre = |sums: &[f64], at: usize| if centred { self.mean(sums[at]) } else { 0.0 };
        let yy: Vec<f64> = (0..left * left).map(|at| self.mean(self.yy[at]) - centre(&self.y, at / left) * centre(&self.y, at % left)).collect();
        let rest: Vec<f64> = (0..n * left)
            .map(|at| {
                let (i, j) = (at / left, at % left);
                let xy = self.mean(self.xy[at]) - centre(&self.x, i) * centre(&self.y, j);
                xy - surviving.binary_search(&i).map_or(0.0, |own| yy[own * left + j])
            })
            .collect();
        [yy, rest]
    }

    /// The matrix `[x, y]` that is added to the selection in the estimate `x ≈ M y + c`, with `c` free or
    /// zero. The residual of the selection is estimated, so that the ridge draws towards the selection.
    /// Rows of zeros have no residual. `None` without rows.
    pub fn correction(&self, surviving: &[usize], centred: bool) -> Option<Vec<f64>> {
        if self.rows == 0.0 {
            return None;
        }
        let left = self.y.len();
        let [mut yy, mut rest] = self.covariances(surviving, centred);
        let scale = (0..left).map(|j| yy[j * left + j]).sum::<f64>() / left.max(1) as f64;
        let ridge = RIDGE.max(left as f64 / self.rows.max(1.0));
        (0..left).for_each(|j| yy[j * left + j] += ridge * scale + f64::MIN_POSITIVE);
        Factor::new(yy, left)?.solve(&mut rest);
        Some(rest)
    }
}

/// Sums over the inputs of layers: over all rows, and over each half of the samples.
pub(in crate::pass) struct Sums {
    pub all: ProductSums,
    pub halves: [ProductSums; 2],
}

impl Sums {
    pub fn from_halves(halves: [ProductSums; 2]) -> Sums {
        let mut all = ProductSums::new(halves[0].x.len(), halves[0].y.len());
        halves.iter().for_each(|half| all.merge(half));
        Sums { all, halves }
    }

    /// The sums over the rows of all of them; `None` if there are none.
    pub fn of_all<'s>(sums: impl Iterator<Item = &'s Rc<Sums>>) -> Option<Rc<Sums>> {
        sums.cloned().reduce(|total, sums| {
            let halves = [0, 1].map(|half| {
                let mut merged = ProductSums::new(total.all.x.len(), total.all.y.len());
                [&total, &sums].into_iter().for_each(|part| merged.merge(&part.halves[half]));
                merged
            });
            Rc::new(Sums::from_halves(halves))
        })
    }
}

/// Sums of the products of all features of the original model, from which the [`ProductSums`] of a model
/// with a part of them follow, if earlier layers are unchanged.
pub(in crate::pass) struct FeatureProducts {
    rows: f64,
    count: f64,
    x: Vec<f64>,
    xx: Vec<f64>,
}

impl FeatureProducts {
    /// Creates empty sums for this number of features.
    pub fn new(features: usize) -> FeatureProducts {
        FeatureProducts { rows: 0.0, count: 0.0, x: vec![0.0; features], xx: vec![0.0; features * features] }
    }

    /// Adds rows with weights.
    pub fn add(&mut self, x: &Tensor, weights: &Tensor) -> Result<()> {
        let weighted = x.broadcast_mul(weights).map_err(tensor_error)?;
        self.rows += x.dims()[0] as f64;
        self.count += numbers(weights)?.iter().sum::<f64>();
        add(&mut self.x, &column_moments(&weighted)?[0]);
        add(&mut self.xx, &numbers(&transposed_product(x, &weighted).map_err(tensor_error)?)?);
        Ok(())
    }

    /// Sum of the squares of a feature.
    pub fn squares(&self, feature: usize) -> f64 {
        self.xx[feature * (self.x.len() + 1)]
    }

    /// The sums for a model with these features.
    pub fn surviving(&self, surviving: &[usize]) -> ProductSums {
        let features = self.x.len();
        let columns = |row: usize| surviving.iter().map(move |column| self.xx[row * features + column]);
        ProductSums {
            rows: self.rows,
            count: self.count,
            x: self.x.clone(),
            y: surviving.iter().map(|feature| self.x[*feature]).collect(),
            xy: (0..features).flat_map(columns).collect(),
            yy: surviving.iter().flat_map(|row| columns(*row)).collect(),
        }
    }
}

/// The factor between 0 and 1 on the correction that minimizes the error of a layer's outputs on held-out
/// rows: the correction is fitted to each of two halves of the rows and evaluated on the other half,
/// where the squared error is a parabola in the factor; the smaller result counts. `weight` is
/// `[outputs, x]`.
pub(super) fn held_out_share(weight: &Tensor, halves: &[ProductSums; 2], surviving: &[usize], centred: bool) -> Result<f64> {
    let mut share = 1.0_f64;
    let [first, second] = halves;
    for (fitted, held_out) in [(first, second), (second, first)] {
        let Some(correction) = fitted.correction(surviving, centred) else { return Ok(0.0) };
        let [yy, rest] = held_out.covariances(surviving, centred);
        let left = held_out.y.len();
        let tensor = |values: &[f64]| {
            let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
            let rows = values.len() / left.max(1);
            Tensor::from_vec(values, (rows, left), weight.device())
        };
        let product = |rows: &Tensor, matrix: &Tensor| transposed_product(&rows.t()?.contiguous()?, matrix);
        let sums = || {
            let predicted = product(weight, &tensor(&correction)?)?;
            let gain = (&predicted * product(weight, &tensor(&rest)?)?)?.sum_all()?;
            let cost = (product(&predicted, &tensor(&yy)?)? * &predicted)?.sum_all()?;
            Ok([transfer::number(&gain, Cause::Statistics)?, transfer::number(&cost, Cause::Statistics)?])
        };
        let [gain, cost]: [f64; 2] = sums().map_err(tensor_error)?;
        share = if cost > 0.0 && gain.is_finite() { share.min((gain / cost).max(0.0)) } else { 0.0 };
    }
    Ok(share)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Removed features are noise or a function of the surviving features: a correction to the noise of
    /// few rows makes held-out rows worse and is scaled down, and one that holds on held-out rows is
    /// applied.
    #[test]
    fn corrections_are_scaled_by_their_effect_on_held_out_rows() {
        let (features, left) = (24, 16);
        let surviving: Vec<usize> = (0..left).collect();
        let rows = |count: usize, linear: bool, seed: u64| {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut values: Vec<f32> = (0..count * features).map(|_| (0..6).map(|_| random.f32() - 0.5).sum()).collect();
            for row in values.chunks_mut(features).filter(|_| linear) {
                (left..features).for_each(|at| row[at] = row[at - left] - row[at - left + 1]);
            }
            let x = Tensor::from_vec(values, (count, features), &Device::Cpu).unwrap();
            let y = x.narrow(1, 0, left).unwrap().contiguous().unwrap();
            (x, y)
        };
        let sums = |(x, y): &(Tensor, Tensor)| {
            let mut sums = ProductSums::new(features, left);
            sums.add(x, y, None).unwrap();
            sums
        };
        let weight = rows(16, false, 1).0;
        let new = rows(2000, false, 2);
        for centred in [false, true] {
            let mut overfitted = 0;
            for seed in 10..30 {
                let halves = [0, 1].map(|half| sums(&rows(32, false, seed + 100 * half)));
                let mut all = ProductSums::new(features, left);
                halves.iter().for_each(|half| all.merge(half));
                let share = held_out_share(&weight, &halves, &surviving, centred).unwrap();
                let correction = all.correction(&surviving, centred).unwrap();
                // Output error of the layer for the removed features of new rows, minus their estimate.
                let error = |share: f64| {
                    let correction: Vec<f32> = correction.iter().map(|value| (share * value) as f32).collect();
                    let correction = Tensor::from_vec(correction, (features, left), &Device::Cpu).unwrap();
                    let surviving = new.1.pad_with_zeros(1, 0, features - left).unwrap();
                    let estimate = (surviving + new.1.matmul(&correction.t().unwrap()).unwrap()).unwrap();
                    let lost = (&new.0 - estimate).unwrap().matmul(&weight.t().unwrap()).unwrap();
                    lost.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()
                };
                overfitted += usize::from(error(1.0) > 1.05 * error(0.0));
                assert!(share < 0.9 && error(share) <= 1.1 * error(0.0), "{seed}: {share} {} {}", error(share), error(0.0));
            }
            assert!(overfitted > 10, "{overfitted}");
            let halves = [5, 6].map(|seed| sums(&rows(400, true, seed)));
            assert!(held_out_share(&weight, &halves, &surviving, centred).unwrap() > 0.9);
            let [all, _] = halves;
            let none = || ProductSums::new(features, left);
            for halves in [[sums(&rows(400, true, 5)), none()], [none(), all]] {
                assert_eq!(held_out_share(&weight, &halves, &surviving, centred).unwrap(), 0.0, "without held-out rows, nothing is corrected");
            }
        }
    }

    /// Sums for a part of the features equal the sums over rows with only these features.
    #[test]
    fn products_of_a_part_are_those_of_all_features() {
        let mut random = fastrand::Rng::with_seed(3);
        let x = Tensor::from_vec((0..40 * 6).map(|_| random.f32() - 0.4).collect::<Vec<_>>(), (40, 6), &Device::Cpu).unwrap();
        let surviving = [1usize, 2, 5];
        let y = x.index_select(&Tensor::new(&[1u32, 2, 5], &Device::Cpu).unwrap(), 1).unwrap();
        let weights = row_weights(&x).unwrap();
        let (mut all, mut expected) = (FeatureProducts::new(6), ProductSums::new(6, 3));
        all.add(&x, &weights).unwrap();
        expected.add(&x, &y, Some(&weights)).unwrap();
        let found = all.surviving(&surviving);
        assert_eq!([found.rows, found.count], [expected.rows, expected.count]);
        for (found, expected) in [(&found.x, &expected.x), (&found.y, &expected.y), (&found.xy, &expected.xy), (&found.yy, &expected.yy)] {
            assert!(found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{found:?} {expected:?}");
        }
        assert_eq!(all.squares(2), found.yy[4]);
    }

    #[test]
    fn rows_of_zeros_have_no_residual() {
        let zeros = Tensor::zeros((4, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        let weights = row_weights(&zeros).unwrap();
        assert_eq!(numbers(&weights).unwrap(), [0.0; 4]);
        let mut sums = ProductSums::new(3, 2);
        assert!(sums.correction(&[0, 2], true).is_none(), "without rows");
        sums.add(&zeros, &zeros.narrow(1, 0, 2).unwrap(), Some(&weights)).unwrap();
        for centred in [false, true] {
            assert_eq!(sums.correction(&[0, 2], centred).unwrap(), [0.0; 6]);
        }
    }

    #[test]
    fn large_rows_have_small_weights_and_zero_rows_have_weight_zero() {
        let rows = Tensor::new(&[[1f32, 0.0], [0.0, 10.0], [0.0, 0.0]], &Device::Cpu).unwrap();
        let weights = numbers(&row_weights(&rows).unwrap()).unwrap();
        // The mean square of the two rows that are not zero is 50.5.
        let expected = [50.5 / 6.05, 50.5 / 105.05, 0.0];
        assert!(weights.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-4), "{weights:?}");
    }
}
