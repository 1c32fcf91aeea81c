//! Chooses an option for each branch within a limit.

use std::collections::BTreeSet;

use crate::pass::assignment::{Choice, front};

/// The options of the branches of a layer: those of attention and those of the network. The first option of a
/// branch is the whole branch.
pub(super) type LayerOptions = [Vec<Choice>; 2];

/// An option for each branch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Chosen {
    /// Index of the option of attention and of the network of each layer; those of removed layers have no
    /// effect.
    pub options: Vec<[usize; 2]>,
    /// Indices of removed layers.
    pub removed: BTreeSet<usize>,
    /// Total cost of the layers.
    pub cost: u64,
    /// Total loss.
    pub loss: f64,
}

/// The choice with the least loss within a limit, or the smallest possible cost if no choice meets it.
pub(super) fn mixed(layers: &[LayerOptions], limit: u64) -> Result<Chosen, u64> {
    let units: Vec<Vec<Choice>> = layers.iter().flatten().cloned().collect();
    let assignments = front(&units);
    let Some(best) = assignments.iter().rev().find(|assignment| assignment.cost <= limit) else {
        return Err(assignments.first().map_or(0, |assignment| assignment.cost));
    };
    let options = best.options.as_chunks::<2>().0.to_vec();
    Ok(Chosen { options, removed: BTreeSet::new(), cost: best.cost, loss: best.loss })
}

/// As [`mixed`], with the same options for all layers, of which some are removed. `layers` have the same
/// numbers of options. `removal` has the loss of the removal of each layer, or `None` if it is not possible,
/// and `others` the cost of other tensors of each layer.
pub(super) fn uniform(layers: &[LayerOptions], others: &[u64], removal: &[Option<f64>], limit: u64) -> Result<Chosen, u64> {
    let [heads, neurons] = [0, 1].map(|part| layers.iter().map(|layer| layer[part].len()).min().unwrap_or(0));
    let (mut best, mut smallest): (Option<Chosen>, u64) = (None, u64::MAX);
    for pair in (0..heads).flat_map(|attention| (0..neurons).map(move |network| [attention, network])) {
        let kept = |(layer, other): (&LayerOptions, &u64)| {
            let [attention, network] = [0, 1].map(|part| layer[part][pair[part]]);
            Choice { cost: attention.cost.saturating_add(network.cost).saturating_add(*other), loss: attention.loss + network.loss }
        };
        let removed = |loss: &Option<f64>| loss.map(|loss| Choice { cost: 0, loss });
        let units: Vec<Vec<Choice>> =
            layers.iter().zip(others).map(kept).zip(removal).map(|(kept, loss)| [Some(kept), removed(loss)].into_iter().flatten().collect()).collect();
        let assignments = front(&units);
        smallest = smallest.min(assignments.first().map_or(u64::MAX, |assignment| assignment.cost));
        let Some(found) = assignments.iter().rev().find(|assignment| assignment.cost <= limit) else { continue };
        if best.as_ref().is_none_or(|best| found.loss < best.loss) {
            let removed = found.options.iter().enumerate().filter(|(_, option)| **option == 1).map(|(layer, _)| layer).collect();
            best = Some(Chosen { options: vec![pair; layers.len()], removed, cost: found.cost, loss: found.loss });
        }
    }
    best.ok_or(smallest)
}

/// Removes the last option, which is the removal of the branch, of the branch of each kind with the largest
/// loss of it: every model keeps one attention and one network.
pub(super) fn keep_one_branch(layers: &mut [LayerOptions]) {
    for part in [0, 1] {
        let loss = |layer: &LayerOptions| layer[part].last().map_or(0.0, |choice| choice.loss);
        let largest = (0..layers.len()).max_by(|a, b| loss(&layers[*a]).total_cmp(&loss(&layers[*b])).then(b.cmp(a)));
        if let Some(layer) = largest.filter(|layer| layers[*layer][part].len() > 1) {
            layers[layer][part].pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layers() -> impl Strategy<Value = Vec<LayerOptions>> {
        let choice = || (0u64..40, 0.0f64..10.0).prop_map(|(cost, loss)| Choice { cost, loss });
        let branch = move || prop::collection::vec(choice(), 3);
        prop::collection::vec((branch(), branch()).prop_map(|(attention, network)| [attention, network]), 1..4)
    }

    /// All assignments of options to the branches of layers.
    fn every(layers: &[LayerOptions]) -> Vec<Vec<[usize; 2]>> {
        layers.iter().fold(vec![Vec::new()], |all, layer| {
            let pairs = || (0..layer[0].len()).flat_map(|a| (0..layer[1].len()).map(move |b| [a, b]));
            all.iter().flat_map(|before: &Vec<[usize; 2]>| pairs().map(move |pair| before.iter().copied().chain([pair]).collect())).collect()
        })
    }

    fn sums(layers: &[LayerOptions], options: &[[usize; 2]]) -> (u64, f64) {
        let chosen = || layers.iter().zip(options).flat_map(|(layer, pair)| [layer[0][pair[0]], layer[1][pair[1]]]);
        (chosen().map(|choice| choice.cost).sum(), chosen().map(|choice| choice.loss).sum())
    }

    proptest! {
        #[test]
        fn no_mixed_choice_within_the_limit_has_less_loss(layers in layers(), limit in 0u64..200) {
            let possible: Vec<(u64, f64)> = every(&layers).iter().map(|options| sums(&layers, options)).collect();
            match mixed(&layers, limit) {
                Ok(chosen) => {
                    prop_assert!(chosen.cost <= limit && chosen.removed.is_empty());
                    let (cost, loss) = sums(&layers, &chosen.options);
                    prop_assert!(cost == chosen.cost && (loss - chosen.loss).abs() < 1e-9);
                    prop_assert!(possible.iter().all(|(cost, loss)| *cost > limit || *loss >= chosen.loss - 1e-9));
                }
                Err(smallest) => prop_assert!(smallest > limit && possible.iter().map(|(cost, _)| *cost).min() == Some(smallest)),
            }
        }

        #[test]
        fn no_uniform_choice_within_the_limit_has_less_loss(layers in layers(), limit in 0u64..200, losses in prop::collection::vec(0.0f64..20.0, 3)) {
            let others: Vec<u64> = (0..layers.len() as u64).collect();
            let mut removal: Vec<Option<f64>> = losses.iter().take(layers.len()).copied().map(Some).collect();
            removal[0] = None;
            let mut possible: Vec<(u64, f64)> = Vec::new();
            for pair in (0..3).flat_map(|a| (0..3).map(move |b| [a, b])) {
                for mask in (0..(1usize << layers.len())).filter(|mask: &usize| mask.is_multiple_of(2)) {
                    let is_removed = |layer: usize| (mask >> layer) & 1 == 1;
                    let one = |layer: usize| {
                        let (cost, loss) = sums(&layers[layer..=layer], &[pair]);
                        if is_removed(layer) { (0, removal[layer].unwrap()) } else { (cost + others[layer], loss) }
                    };
                    possible.push((0..layers.len()).map(one).fold((0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1)));
                }
            }
            match uniform(&layers, &others, &removal, limit) {
                Ok(chosen) => {
                    prop_assert!(chosen.cost <= limit && !chosen.removed.contains(&0));
                    prop_assert!(chosen.options.windows(2).all(|pair| pair[0] == pair[1]));
                    prop_assert!(possible.iter().any(|(cost, loss)| *cost == chosen.cost && (loss - chosen.loss).abs() < 1e-9));
                    prop_assert!(possible.iter().all(|(cost, loss)| *cost > limit || *loss >= chosen.loss - 1e-9));
                }
                Err(smallest) => prop_assert!(smallest > limit && possible.iter().map(|(cost, _)| *cost).min() == Some(smallest)),
            }
        }
    }

    #[test]
    fn the_branch_with_the_largest_loss_remains() {
        let branch = |loss: f64| vec![Choice { cost: 8, loss: 0.0 }, Choice { cost: 4, loss: 0.1 }, Choice { cost: 0, loss }];
        let mut layers = vec![[branch(0.5), branch(3.0)], [branch(0.7), branch(2.0)], [branch(0.7), branch(1.0)]];
        keep_one_branch(&mut layers);
        assert_eq!(layers.iter().map(|layer| [layer[0].len(), layer[1].len()]).collect::<Vec<_>>(), [[3, 2], [2, 3], [3, 3]]);
        assert_eq!(mixed(&layers, 0).unwrap_err(), 8, "half of one attention and of one network");
    }
}
