//! Number of remaining units per group.

use super::scores::Scores;
use crate::analysis::{Group, GroupUnit};
use crate::error::{Error, Result};
use crate::pass::Amount;

/// Groups that are pruned in the same proportion.
#[derive(Debug, Clone)]
pub(super) struct Bundle {
    /// Units of the bundle.
    pub unit: GroupUnit,
    /// Indices of the groups in the selection.
    pub groups: Vec<usize>,
    /// Size of the largest group.
    pub size: usize,
    /// Possible widths of the largest group in descending order, starting with its size. All groups
    /// support these proportions.
    pub widths: Vec<usize>,
    /// Whether the sizes of the groups differ.
    pub is_uneven: bool,
}

impl Bundle {
    /// Bundles groups. `round_to` and `minimum` do not apply to heads.
    pub fn new(unit: GroupUnit, members: Vec<usize>, groups: &[&Group], round_to: usize, minimum: Option<usize>) -> Bundle {
        let size = members.iter().map(|index| groups[*index].size).max().unwrap_or(0);
        let fits = |width: &usize| {
            members.iter().map(|index| groups[*index]).all(|group| {
                let (step, min) = match group.unit {
                    GroupUnit::Heads => (1, 1),
                    _ => (round_to, minimum.unwrap_or(round_to)),
                };
                let remaining = group.size * width / size;
                (group.size * width).is_multiple_of(size) && remaining.is_multiple_of(step) && remaining >= min.max(1)
            })
        };
        let widths = std::iter::once(size).chain((1..size).rev().filter(fits)).collect();
        let is_uneven = members.iter().any(|index| groups[*index].size != size);
        Bundle { unit, groups: members, size, widths, is_uneven }
    }

    /// Width of a group if the largest group has the given width.
    pub fn scaled_width(&self, group: &Group, width: usize) -> usize {
        group.size * width / self.size.max(1)
    }

    /// The option that allows other widths, if the groups have no smaller ones in common.
    pub fn advice(&self) -> Option<&'static str> {
        let has_none = self.unit == GroupUnit::Heads && self.is_uneven && self.widths.len() == 1;
        has_none.then_some("use `uniform: false`, because no fraction of the different sizes of the groups is a whole number of units")
    }

    /// Index of the width closest to the remaining width after removing an amount. Returns an error if
    /// all units would be removed, or if the amount is a fractional number of heads.
    pub fn width_index(&self, name: &str, amount: Amount) -> Result<usize> {
        let wrong = |reason: String| Err(Error::option("prune-structured: amount", reason));
        let size = self.size;
        let exact = match amount {
            Amount::Count(count) | Amount::Number(count) => count as f64,
            Amount::Fraction(_) => amount.share() * size as f64,
        };
        let list = || self.widths.iter().map(|width| format!("{:.4}", 1.0 - *width as f64 / size as f64)).collect::<Vec<_>>();
        let listed = || {
            let all = list();
            let shown = all.iter().take(16).map(|text| text.trim_end_matches('0').trim_end_matches('.').to_owned()).collect::<Vec<_>>().join(", ");
            let more = if all.len() > 16 { ", ..." } else { "" };
            self.advice().map_or_else(|| format!("{shown}{more}"), |advice| format!("{shown}{more}; {advice}"))
        };
        if exact >= size as f64 {
            return wrong(format!("{amount} of {size} {} of `{name}` would remove all of them; possible amounts: {}", self.unit, listed()));
        }
        if self.unit == GroupUnit::Heads && (exact - exact.round()).abs() > 0.05 {
            return wrong(format!(
                "{amount} of {size} heads of `{name}` is {exact:.2} heads, but only whole heads can be removed; possible amounts: {}",
                listed()
            ));
        }
        let target = size as f64 - exact;
        let distance = |width: usize| (width as f64 - target).abs();
        let nearest = (0..self.widths.len()).min_by(|a, b| distance(self.widths[*a]).total_cmp(&distance(self.widths[*b])));
        Ok(nearest.unwrap_or(0))
    }
}

/// Bundle indices of all steps from one width to the next smaller one, in the order in which the steps
/// are applied.
pub(super) fn steps(bundles: &[Bundle], scores: Option<&Scores>) -> Vec<usize> {
    let mut steps: Vec<(f64, usize, usize)> = Vec::new();
    for (index, bundle) in bundles.iter().enumerate() {
        let mut key = 0f64;
        for (step, pair) in bundle.widths.windows(2).enumerate() {
            let part = |width: usize| 1.0 - width as f64 / bundle.size as f64;
            key = match scores {
                None => part(pair[1]),
                // Monotonic, so that the steps of a bundle stay in order.
                Some(scores) => key.max(cost(bundle, scores, part(pair[0]), part(pair[1]))),
            };
            steps.push((key, index, step));
        }
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    steps.into_iter().map(|(_, bundle, _)| bundle).collect()
}

/// Mean importance, relative to the mean of the group, of the units that are removed when the removed
/// fraction grows from `from` to `to`.
fn cost(bundle: &Bundle, scores: &Scores, from: f64, to: f64) -> f64 {
    let mut total = 0.0;
    for index in &bundle.groups {
        let mut sorted = scores[*index].clone();
        let size = sorted.len();
        sorted.sort_by(f64::total_cmp);
        let mean = sorted.iter().sum::<f64>() / size.max(1) as f64;
        let first = ((from * size as f64).round() as usize).min(size.saturating_sub(1));
        let last = ((to * size as f64).round() as usize).clamp(first + 1, size.max(first + 1));
        let removed = &sorted[first..last.min(size)];
        total += removed.iter().sum::<f64>() / removed.len().max(1) as f64 / mean.max(f64::MIN_POSITIVE);
    }
    total / bundle.groups.len().max(1) as f64
}

/// Applies steps until a measure is close to a target. Returns the number of steps of each bundle, or the
/// smallest measure if it is above the target.
pub(super) fn reach_target(
    bundles: usize,
    steps: &[usize],
    target: f64,
    measure: &mut dyn FnMut(&[usize]) -> Result<f64>,
) -> Result<std::result::Result<Vec<usize>, f64>> {
    let taken = |count: usize| {
        let mut taken = vec![0; bundles];
        steps[..count].iter().for_each(|bundle| taken[*bundle] += 1);
        taken
    };
    let min = measure(&taken(steps.len()))?;
    if min > target {
        return Ok(Err(min));
    }
    let (mut above, mut below) = (0, steps.len());
    while below - above > 1 {
        let middle = above.midpoint(below);
        if measure(&taken(middle))? > target { above = middle } else { below = middle }
    }
    // The step that crosses the target may be large: use later, smaller steps instead.
    let mut best = taken(above);
    let mut left = measure(&best)?;
    let over = taken(below);
    let overshot = measure(&over)?;
    if (overshot - target).abs() < EXACT {
        return Ok(Ok(over));
    }
    let mut blocked = vec![false; bundles];
    for &bundle in &steps[above..] {
        if blocked[bundle] || left - target < EXACT {
            continue;
        }
        let mut next = best.clone();
        next[bundle] += 1;
        let now = measure(&next)?;
        blocked[bundle] = target - now > EXACT;
        if !blocked[bundle] {
            (best, left) = (next, now);
        }
    }
    Ok(Ok(if (overshot - target).abs() < (left - target).abs() { over } else { best }))
}

/// Tolerance of targets.
pub(super) const EXACT: f64 = 0.005;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_important_units_are_removed_first() {
        let bundle = |index| Bundle { unit: GroupUnit::Mlp, groups: vec![index], size: 4, widths: vec![4, 3, 2], is_uneven: false };
        let bundles = [bundle(0), bundle(1)];
        let scores = vec![vec![1.0; 4], vec![5.0, 0.1, 0.2, 5.0]];
        assert_eq!(steps(&bundles, Some(&scores)), [1, 1, 0, 0]);
        assert_eq!(steps(&bundles, None), [0, 1, 0, 1]);
    }

    /// Costs are relative to the mean of each group, so that groups of any size and scale are comparable.
    #[test]
    fn costs_do_not_depend_on_the_size_and_the_scale_of_groups() {
        let scores = vec![vec![0.5; 4], vec![20.0; 12], vec![1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 2.0].map(|score| 7.0 * score).repeat(5)];
        let bundle = |groups| Bundle { unit: GroupUnit::Mlp, groups, size: 4, widths: vec![4, 3, 2], is_uneven: false };
        for (groups, from, to, expected) in [(vec![0], 0.0, 0.25, 1.0), (vec![1], 0.25, 0.5, 1.0), (vec![0, 1], 0.0, 0.5, 1.0), (vec![2, 3], 0.0, 0.25, 0.5)] {
            let found = cost(&bundle(groups.clone()), &scores, from, to);
            assert!((found - expected).abs() < 1e-12, "{groups:?}: {found}");
        }
    }

    /// The five heads of an encoder and the four of its decoder.
    #[test]
    fn groups_without_a_common_width_are_named() {
        let bundle = Bundle { unit: GroupUnit::Heads, groups: vec![0, 1], size: 5, widths: vec![5], is_uneven: true };
        let error = bundle.width_index("encoder", Amount::fraction(0.25)).unwrap_err().to_string();
        assert!(error.ends_with("of units") && error.contains("possible amounts: 0; use `uniform: false`"), "{error}");
        let even = Bundle { size: 4, widths: vec![4, 3, 2, 1], is_uneven: false, ..bundle };
        assert!(!even.width_index("encoder", Amount::fraction(0.4)).unwrap_err().to_string().contains("uniform"));
    }

    #[test]
    fn steps_are_applied_until_the_target_is_reached() {
        // Two bundles: ten small steps of 0.01 and three large of 0.2.
        let steps = [0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0];
        let mut measure = |taken: &[usize]| Ok(1.0 - 0.01 * taken[0] as f64 - 0.2 * taken[1] as f64);
        let taken = reach_target(2, &steps, 0.75, &mut measure).unwrap().unwrap();
        assert!((measure(&taken).unwrap() - 0.75).abs() < 0.011, "{taken:?}");
        assert!((reach_target(2, &steps, 0.1, &mut measure).unwrap().unwrap_err() - 0.3).abs() < 1e-9);
    }
}
