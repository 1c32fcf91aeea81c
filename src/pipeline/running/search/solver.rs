//! Corrects predicted losses by measurements of mixtures.

/// A measurement of a mixture.
#[derive(Debug, Clone)]
pub struct Row {
    /// Predicted losses by group, which factors correct.
    pub losses: Vec<f64>,
    /// Loss that factors do not correct.
    pub fixed: f64,
    /// Measured loss.
    pub measured: f64,
}

/// Smallest measured loss that predictions are fitted to: smaller ones are rounding errors of the
/// measurement.
pub const LEAST_LOSS: f64 = 1e-12;

/// Non-negative factors of the groups so that the sums `fixed + Σ factor · loss` approximate the measured
/// losses with the least relative error. The factors of groups that the measurements do not determine are the
/// common factor of all groups.
pub fn factors(rows: &[Row]) -> Vec<f64> {
    let groups = rows.first().map_or(0, |row| row.losses.len());
    // In units of the measured loss of each row.
    let relative = |row: &Row| (row.losses.iter().map(|loss| loss / row.measured).collect::<Vec<f64>>(), 1.0 - row.fixed / row.measured);
    let scaled: Vec<(Vec<f64>, f64)> = rows.iter().filter(|row| row.measured > LEAST_LOSS).map(relative).collect();
    let totals: Vec<(f64, f64)> = scaled.iter().map(|(row, target)| (row.iter().sum(), *target)).collect();
    let squares: f64 = totals.iter().map(|(total, _)| total * total).sum();
    let common = totals.iter().map(|(total, target)| total * target).sum::<f64>() / squares;
    if !(common.is_finite() && common > 0.0) {
        return vec![1.0; groups];
    }
    let mut factors = vec![common; groups];
    // Coordinate descent with a penalty on the relative difference from the common factor.
    for _ in 0..SWEEPS {
        for group in 0..groups {
            let rest = |(row, target): &(Vec<f64>, f64)| {
                target - row.iter().zip(&factors).enumerate().filter(|(at, _)| *at != group).map(|(_, (loss, factor))| loss * factor).sum::<f64>()
            };
            let product: f64 = scaled.iter().map(|row| row.0[group] * rest(row)).sum();
            let square: f64 = scaled.iter().map(|(row, _)| row[group] * row[group]).sum();
            let penalty = PENALTY / (common * common);
            factors[group] = ((product + penalty * common) / (square + penalty)).max(0.0);
        }
    }
    factors
}

/// Sweeps of coordinate descent, which converges quickly for few groups.
const SWEEPS: usize = 200;
/// Penalty on relative differences from the common factor, in units of squared relative errors.
const PENALTY: f64 = 0.02;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_explain_the_measurements() {
        let row = |(a, b): (f64, f64)| Row { losses: vec![a, b, 0.0], fixed: 0.0, measured: 2.0 * a + 0.5 * b };
        let rows: Vec<Row> = [(1.0, 0.0), (0.5, 0.2), (0.1, 0.4)].map(row).to_vec();
        let found = factors(&rows);
        for row in &rows {
            let predicted: f64 = row.losses.iter().zip(&found).map(|(loss, factor)| loss * factor).sum();
            assert!((predicted / row.measured - 1.0).abs() < 0.1, "{predicted} {row:?} {found:?}");
        }
        // The third group does not occur.
        assert!(found[2] > 1.0 && found[2] < 2.5, "{found:?}");
        assert_eq!(factors(&[Row { losses: vec![0.0, 0.0], fixed: 0.0, measured: 1.0 }]), [1.0, 1.0]);
        assert_eq!(factors(&[]), [0.0; 0]);
    }

    /// A row with a large fixed part, whose remainder is inaccurate, has little effect on the factors.
    #[test]
    fn inaccurate_remainders_have_little_weight() {
        let mut rows: Vec<Row> = [(1.0, 0.1), (0.5, 0.2), (0.1, 0.4)].map(|(a, b)| Row { losses: vec![a, b], fixed: 0.0, measured: a + b }).to_vec();
        for remainder in [0.05, -0.02] {
            rows.push(Row { losses: vec![0.3, 0.2], fixed: 10.0, measured: 10.0 + remainder });
            let found = factors(&rows);
            assert!(found.iter().all(|factor| (factor - 1.0).abs() < 0.05), "{found:?}");
        }
    }
}
