//! Corrections of the expected losses of single units by measured mixtures.
//!
//! The factors of the formats ([`factors`](super::solver::factors)) leave residuals, for example because the
//! rounded activations of a layer change those of others. Gaussian process regression distributes them over
//! the units of the measured mixtures: the losses of all units have independent errors, which are about as
//! large as the losses. Predictions of mixtures that resemble measured ones become accurate, and remain sums
//! over the units.

use super::formats::Unit;
use super::solver::LEAST_LOSS;
use super::{Found, Point};
use crate::pass::Score;

/// Variance of a relative residual that the units do not explain.
const NOISE: f64 = 1.0;
/// Least fraction of a loss that remains.
const LEAST: f64 = 0.25;

impl Found {
    /// Corrects the losses of the units that the measured losses of points contradict.
    fn correct(&mut self, points: &[Point]) {
        let rows: Vec<(&[usize], f64)> =
            points.iter().filter_map(|point| Some((point.options.as_slice(), point.measured.filter(|loss| *loss > LEAST_LOSS)?))).collect();
        let deviations = deviations(&self.units, self.formats.len());
        let covariance = |(one, loss): &(&[usize], f64), (other, other_loss): &(&[usize], f64)| {
            let shared = one.iter().zip(*other).enumerate().filter(|(_, (option, other))| option == other);
            shared.map(|(unit, (option, _))| deviations[unit][*option].powi(2)).sum::<f64>() / (loss * other_loss)
        };
        let mut system: Vec<Vec<f64>> = rows.iter().map(|row| rows.iter().map(|other| covariance(row, other)).collect()).collect();
        for (at, (row, (options, loss))) in system.iter_mut().zip(&rows).enumerate() {
            row[at] += NOISE;
            row.push(1.0 - self.point(options.to_vec()).predicted / loss);
        }
        let weights = solve(system);
        let is_finite = weights.iter().all(|weight| weight.is_finite());
        for ((options, loss), weight) in rows.iter().zip(&weights).filter(|_| is_finite) {
            for ((unit, option), deviations) in self.units.iter_mut().zip(*options).zip(&deviations) {
                let Some(score) = &mut unit.options[*option] else { continue };
                score.loss += deviations[*option].powi(2) * weight / loss;
            }
        }
    }

    /// Corrects the losses, limits the corrections, and predicts the points again.
    pub(super) fn fit_units(&mut self) {
        let before: Vec<Vec<Option<Score>>> = self.units.iter().map(|unit| unit.options.clone()).collect();
        self.correct(&self.points.clone());
        for (unit, before) in self.units.iter_mut().zip(before) {
            for (option, before) in unit.options.iter_mut().zip(before) {
                *option = option.zip(before).map(|(now, before)| Score { loss: now.loss.max(LEAST * before.loss), ..now });
            }
        }
        self.predict_points();
    }
}

/// Expected errors of the losses: each loss, and the mean of its format. Measured losses have none.
fn deviations(units: &[Unit], formats: usize) -> Vec<Vec<f64>> {
    let loss = |unit: &Unit, format: usize| unit.options[format].filter(|_| !unit.measured && format + 1 < formats).map_or(0.0, |score| score.loss);
    let mean = |format: usize| {
        let losses: Vec<f64> = units.iter().map(|unit| loss(unit, format)).filter(|loss| *loss > 0.0).collect();
        losses.iter().sum::<f64>() / losses.len().max(1) as f64
    };
    let means: Vec<f64> = (0..formats).map(mean).collect();
    let of = |unit: &Unit| -> Vec<f64> { (0..formats).map(|format| if unit.measured { 0.0 } else { loss(unit, format) + means[format] }).collect() };
    units.iter().map(of).collect()
}

/// Solves a positive definite system of linear equations, whose rows end with the right side.
fn solve(mut system: Vec<Vec<f64>>) -> Vec<f64> {
    let count = system.len();
    for pivot in 0..count {
        let (above, below) = system.split_at_mut(pivot + 1);
        for row in below {
            let factor = row[pivot] / above[pivot][pivot];
            row.iter_mut().zip(&above[pivot]).for_each(|(value, other)| *value -= factor * other);
        }
    }
    let mut solution = vec![0.0; count];
    for at in (0..count).rev() {
        let known: f64 = (at + 1..count).map(|other| system[at][other] * solution[other]).sum();
        solution[at] = (system[at][count] - known) / system[at][at];
    }
    solution
}

#[cfg(test)]
mod tests {
    use super::super::testing::found;
    use super::*;

    #[test]
    fn systems_are_solved() {
        let solution = solve(vec![vec![4.0, 1.0, 6.0], vec![1.0, 3.0, 7.0]]);
        assert!((solution[0] - 1.0).abs() < 1e-12 && (solution[1] - 2.0).abs() < 1e-12, "{solution:?}");
        assert!(solve(Vec::new()).is_empty());
    }

    /// The second unit has three times the expected loss in the first format. Mixtures with it were measured.
    #[test]
    fn measured_mixtures_correct_the_losses_of_their_units() {
        let mut found = found(&[[0.0; 2]; 3]);
        let exact = |found: &Found, options: &[usize]| found.point(options.to_vec()).predicted + if options[1] == 0 { 10.0 } else { 0.0 };
        let measured = [[0, 0, 0], [1, 0, 1], [0, 1, 0]].map(|options| Point { measured: Some(exact(&found, &options)), ..found.point(options.to_vec()) });
        let (close, far) = (exact(&found, &[1, 0, 0]), found.point(vec![1, 1, 1]).predicted);
        let before = found.point(vec![1, 0, 0]).predicted;
        found.points = measured.to_vec();
        found.fit_units();
        assert_eq!((before, close), (12.0, 22.0));
        let after = found.point(vec![1, 0, 0]).predicted;
        assert!((after - 15.6405).abs() < 0.001, "{after}");
        // Floats have no loss, and the losses of other formats remain close.
        assert_eq!(found.point(vec![2, 2, 2]).predicted, 0.0);
        let other = found.point(vec![1, 1, 1]).predicted;
        assert!((other / far).ln().abs() < 0.5, "{other} {far}");
        // Predicted points are those of the corrected losses.
        assert_eq!(found.points[0].predicted, found.point(vec![0, 0, 0]).predicted);
        // Measured losses are exact.
        let mut fixed = super::super::testing::found(&[[0.0; 2]; 3]);
        fixed.units.iter_mut().for_each(|unit| unit.measured = true);
        fixed.points = measured.to_vec();
        fixed.fit_units();
        assert_eq!(fixed.point(vec![1, 0, 0]).predicted, 12.0);
    }
}
