//! Chooses an option for each unit: the assignments with the least loss for their cost, which is a size in
//! bytes, a number of parameters or a time in nanoseconds.

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

/// A measured assignment.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Its cost.
    pub cost: u64,
    /// Its expected loss.
    pub loss: f64,
    /// Whether it is within the limit.
    pub is_within: bool,
    /// The limit relative to what was measured: less than 1 if it exceeds the limit.
    pub share: f64,
}

/// Number of assignments that are measured before the one with the least loss shows whether the limit can be
/// met.
const ESTIMATES: usize = 2;

/// The assignment of a front to measure next, to find the cheapest one within a limit; `None` if no cheaper
/// one can be within it. The `front` has costs in ascending order and expected losses in descending order.
/// Measured quantities are not additive, and expected losses only order the assignments: between the cheapest
/// one that is within the limit and the next one that exceeds it, the middle of the front is measured.
/// `round`: number of assignments that were measured for the limit before.
pub fn next_within(front: &[(u64, f64)], measured: &[Measured], is_new: impl Fn(usize) -> bool, round: usize) -> Option<usize> {
    let best = measured.iter().filter(|point| point.is_within).min_by_key(|point| point.cost);
    let least = best.map_or(0.0, |best| best.loss);
    let exceeding = measured.iter().filter(|point| !point.is_within && (best.is_none() || point.loss > least));
    let worst = exceeding.min_by(|a, b| a.loss.total_cmp(&b.loss));
    let bound = worst.map_or(f64::INFINITY, |worst| worst.loss);
    let is_cheaper = |cost: u64, loss: f64| best.is_none_or(|best| cost < best.cost && loss > least);
    let open: Vec<usize> =
        front.iter().enumerate().filter(|(at, (cost, loss))| is_cheaper(*cost, *loss) && *loss < bound && is_new(*at)).map(|(at, _)| at).collect();
    let target = match (best, worst) {
        (Some(_), Some(_)) if least > 0.0 => (least * bound).sqrt(),
        (Some(_), Some(_)) => return open.get(open.len() / 2).copied(),
        // Even the cheapest measured one is within the limit.
        (Some(_), None) => bound,
        // Proportionally less loss.
        (None, Some(worst)) if round < ESTIMATES => worst.loss * worst.share.clamp(0.0, 1.0),
        (None, _) => 0.0,
    };
    let at = open.iter().find(|at| front.get(**at).is_some_and(|(_, loss)| *loss <= target));
    at.or(open.last()).copied()
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
        layers.push(thinned(undominated(extended.collect(), |state: &State| (state.cost, state.loss))));
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

/// The states by ascending cost, without states whose loss is not less than that of a cheaper one. `totals`:
/// their costs and losses.
pub fn undominated<T>(mut states: Vec<T>, totals: impl Fn(&T) -> (u64, f64)) -> Vec<T> {
    states.sort_by(|a, b| {
        let ((cost, loss), (other_cost, other_loss)) = (totals(a), totals(b));
        cost.cmp(&other_cost).then(loss.total_cmp(&other_loss))
    });
    let mut least = f64::INFINITY;
    states.retain(|state| {
        let (_, loss) = totals(state);
        let better = loss < least;
        least = least.min(loss);
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
}
