//! Chooses an option for each unit: the assignments with the least loss for their cost, which is a size in
//! bytes or a time in nanoseconds.

/// An option of a unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Its cost.
    pub cost: u64,
    /// Its loss.
    pub loss: f64,
}

/// An option for each unit, with the totals.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// Total cost.
    pub cost: u64,
    /// Total loss.
    pub loss: f64,
    /// Index of the option of each unit.
    pub options: Vec<usize>,
}

/// Largest number of partial assignments that are kept after each unit. With more, those with nearly equal
/// costs are merged.
const MAX_STATES: usize = 20_000;

/// A partial assignment that no other one beats in both cost and loss.
#[derive(Clone, Copy)]
struct State {
    cost: u64,
    loss: f64,
    /// Index of the state of the previous units, and the option of the last unit.
    previous: usize,
    option: usize,
}

/// The assignments that no other one beats, by ascending cost: the Pareto front, by dynamic programming over
/// the units. It is exact unless there are more than 20,000 partial assignments.
pub fn front(units: &[Vec<Choice>]) -> Vec<Assignment> {
    let mut layers: Vec<Vec<State>> = vec![vec![State { cost: 0, loss: 0.0, previous: 0, option: 0 }]];
    for unit in units {
        let before = &layers[layers.len() - 1];
        let extended = before.iter().enumerate().flat_map(|(previous, state)| {
            let extend = move |(option, choice): (usize, &Choice)| State {
                cost: state.cost.saturating_add(choice.cost),
                loss: state.loss + choice.loss,
                previous,
                option,
            };
            unit.iter().enumerate().map(extend)
        });
        layers.push(thinned(undominated(extended.collect())));
    }
    let last = layers.len() - 1;
    let assignment = |state: &State| {
        let (mut options, mut state) = (vec![0; last], *state);
        for (unit, option) in options.iter_mut().enumerate().rev() {
            *option = state.option;
            state = layers[unit][state.previous];
        }
        options
    };
    layers[last].iter().map(|state| Assignment { cost: state.cost, loss: state.loss, options: assignment(state) }).collect()
}

/// The states by ascending cost, without states that are not better than a cheaper one.
fn undominated(mut states: Vec<State>) -> Vec<State> {
    states.sort_by(|a, b| a.cost.cmp(&b.cost).then(a.loss.total_cmp(&b.loss)));
    let mut least = f64::INFINITY;
    states.retain(|state| {
        let better = state.loss < least;
        least = least.min(state.loss);
        better
    });
    states
}

/// At most [`MAX_STATES`] states: the last one, which has the least loss, of each interval of costs, and the
/// first.
fn thinned(states: Vec<State>) -> Vec<State> {
    let (Some(first), Some(last), true) = (states.first().copied(), states.last(), states.len() > MAX_STATES) else { return states };
    let width = (last.cost - first.cost) / (MAX_STATES as u64 - 1) + 1;
    let interval = |state: &State| (state.cost - first.cost) / width;
    let mut kept: Vec<State> = vec![first];
    for state in states.into_iter().skip(1) {
        match kept.last_mut() {
            Some(before) if interval(before) == interval(&state) && before.cost != first.cost => *before = state,
            _ => kept.push(state),
        }
    }
    kept
}

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
    use proptest::prelude::*;

    use super::*;

    fn choices() -> impl Strategy<Value = Vec<Vec<Choice>>> {
        let choice = (1u64..40, 0.0f64..10.0).prop_map(|(cost, loss)| Choice { cost, loss });
        prop::collection::vec(prop::collection::vec(choice, 1..4), 1..6)
    }

    /// All assignments.
    fn every(units: &[Vec<Choice>]) -> Vec<Assignment> {
        let empty = Assignment { cost: 0, loss: 0.0, options: Vec::new() };
        units.iter().fold(vec![empty], |all, unit| {
            let extend = |assignment: &Assignment| {
                let with = |(option, choice): (usize, &Choice)| Assignment {
                    cost: assignment.cost + choice.cost,
                    loss: assignment.loss + choice.loss,
                    options: assignment.options.iter().copied().chain([option]).collect(),
                };
                unit.iter().enumerate().map(with).collect::<Vec<_>>()
            };
            all.iter().flat_map(extend).collect()
        })
    }

    proptest! {
        /// At every cost, no assignment has less loss than the front.
        #[test]
        fn exhaustive_search_finds_nothing_better(units in choices()) {
            let (found, all) = (front(&units), every(&units));
            prop_assert!(found.windows(2).all(|pair| pair[0].cost < pair[1].cost && pair[0].loss > pair[1].loss));
            for assignment in &all {
                let best = found.iter().filter(|point| point.cost <= assignment.cost).map(|point| point.loss).fold(f64::INFINITY, f64::min);
                prop_assert!(best <= assignment.loss + 1e-9, "{assignment:?}");
            }
            for point in &found {
                let chosen: Vec<Choice> = units.iter().zip(&point.options).map(|(unit, option)| unit[*option]).collect();
                prop_assert_eq!(point.cost, chosen.iter().map(|choice| choice.cost).sum::<u64>());
                prop_assert!((point.loss - chosen.iter().map(|choice| choice.loss).sum::<f64>()).abs() < 1e-9);
            }
        }
    }

    /// With many units, merged states lose less than one percent.
    #[test]
    fn merged_states_are_close_to_the_convex_front() {
        let mut random = fastrand::Rng::with_seed(1);
        let units: Vec<Vec<Choice>> = (0..200)
            .map(|_| {
                let (elements, loss) = (random.u64(100_000..1_000_000), random.f64());
                [(4, 1.0), (5, 0.25), (6, 0.06), (8, 0.004)].map(|(bits, part)| Choice { cost: elements * bits / 8, loss: loss * part }).to_vec()
            })
            .collect();
        let found = front(&units);
        assert!(found.len() <= MAX_STATES && found.len() > MAX_STATES / 4);
        // For each Lagrange multiplier, the sum of the unit's best options is on the front.
        for multiplier in [1e-8, 1e-7, 3e-7, 1e-6, 3e-6] {
            let cost = |choice: &Choice| choice.loss + multiplier * choice.cost as f64;
            let best: Vec<Choice> = units.iter().map(|unit| *unit.iter().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap()).collect();
            let (cost, loss) = best.iter().fold((0, 0.0), |(cost, loss), choice| (cost + choice.cost, loss + choice.loss));
            let point = found.iter().rev().find(|point| point.cost <= cost).unwrap();
            assert!(point.loss <= 1.01 * loss, "{} {loss} at {cost}", point.loss);
        }
    }

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
