//! Error compensation between the rows of a layer's weight. With the second moments `G` of the gradients of
//! the outputs and `H` of the inputs, the increase of the loss by an error `E` of the weight is approximately
//! `½ tr(G E H Eᵀ)`. Rows are therefore best rounded one after another, from targets that compensate for the
//! errors of previous rows as `kernel/compensation.rs` does for columns (Tseng et al. 2025, YAQA,
//! <https://arxiv.org/abs/2505.22988>).

use super::output_moments::{OutputGroup, OutputMoments};
use super::row_scales::RowScales;
use crate::error::Result;
use crate::kernel::compensation::{Compensation, Ratios};
use crate::kernel::epilogue::Epilogue;
use crate::kernel::operands::{LeftRows, Rows};
use crate::kernel::product::product;

/// Number of rows that are rounded at once, each without compensation for the others.
const ROWS: usize = 32;

/// Error compensation between the rows of a weight, in groups without compensation for each other.
pub(super) struct OutputFeedback {
    groups: Vec<GroupFeedback>,
    /// Number of rows of all groups.
    rows: usize,
}

struct GroupFeedback {
    /// Rows in processing order: those with large gradients first.
    order: Vec<usize>,
    /// `R[k][j] / R[j][j]` above the diagonal, with `G = R Rᵀ`.
    ratios: Vec<f32>,
    /// `R`, by which the errors of outputs are weighted.
    factor: Vec<f32>,
}

impl OutputFeedback {
    /// For the outputs at a distance of `step`. Outputs of groups without gradients are not compensated.
    /// `None` if other moments are not positive definite.
    pub fn new(moments: &OutputMoments, step: usize) -> Option<OutputFeedback> {
        let (mut groups, mut rows, mut first) = (Vec::new(), 0, 0);
        for group in &moments.groups {
            let selected: Vec<usize> = (0..group.size).filter(|at| (first + at).is_multiple_of(step)).collect();
            groups.push(GroupFeedback::new(group, &selected, rows)?);
            (first, rows) = (first + group.size, rows + selected.len());
        }
        Some(OutputFeedback { groups, rows })
    }

    /// Replaces the rows of a weight `[rows, size]` by the values that `round` chooses for blocks of rows,
    /// and returns the scales of all rows.
    pub fn round(&self, values: &mut [f32], size: usize, mut round: impl FnMut(&mut [f32]) -> Result<RowScales>) -> Result<RowScales> {
        let mut scales = RowScales::default();
        for group in &self.groups {
            group.round((&mut *values, size, self.rows), &mut scales, &mut round)?;
        }
        Ok(scales)
    }

    /// The errors of outputs `[n, rows]`, weighted so that half of the sum of their squares is the increase
    /// of the loss.
    pub fn weighted_errors(&self, outputs: &[f32], targets: &[f32]) -> Vec<f32> {
        let mut weighted = vec![0f32; outputs.len()];
        let mut first = 0;
        for GroupFeedback { order, factor, .. } in &self.groups {
            let count = order.len();
            let lines = || outputs.chunks_exact(self.rows.max(1)).zip(targets.chunks_exact(self.rows.max(1)));
            let errors: Vec<f32> = lines().flat_map(|(outputs, targets)| order.iter().map(|at| outputs[*at] - targets[*at])).collect();
            if errors.is_empty() {
                continue;
            }
            let mut products = vec![0f32; errors.len()];
            let right = Rows { values: factor, count, stride: count };
            product(&LeftRows::new(&errors, errors.len() / count, count, count), &right, count, Epilogue::NONE, &mut products);
            for (all, part) in weighted.chunks_exact_mut(self.rows).zip(products.chunks_exact(count)) {
                all[first..first + count].copy_from_slice(part);
            }
            first += count;
        }
        weighted
    }
}

impl GroupFeedback {
    /// For selected outputs of a group, which are the rows from `first` on.
    fn new(OutputGroup { size, products, damping }: &OutputGroup, selected: &[usize], first: usize) -> Option<GroupFeedback> {
        let count = selected.len();
        let square = |at: usize| products[selected[at] * (size + 1)];
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|a, b| square(*b).total_cmp(&square(*a)).then(a.cmp(b)));
        let part: Vec<f32> = selected.iter().flat_map(|a| selected.iter().map(move |b| products[a.min(b) * size + a.max(b)])).collect();
        let (mut ratios, mut factor) = (vec![0f32; part.len()], vec![0f32; part.len()]);
        if part.iter().any(|product| *product != 0.0) {
            let compensation = Compensation::new(&part, count, &order, (*damping).into())?;
            ratios.copy_from_slice(compensation.ratios());
            factor.copy_from_slice(&ratios);
            for (at, line) in factor.chunks_exact_mut(count.max(1)).enumerate() {
                line[at] = 1.0;
                line.iter_mut().zip(compensation.costs()).for_each(|(ratio, cost)| *ratio *= cost.sqrt());
            }
        }
        order.iter_mut().for_each(|at| *at += first);
        Some(GroupFeedback { order, ratios, factor })
    }

    /// Replaces the rows of the group in a weight `[rows, size]`, and sets their scales.
    fn round(
        &self,
        (values, size, rows): (&mut [f32], usize, usize),
        scales: &mut RowScales,
        round: &mut impl FnMut(&mut [f32]) -> Result<RowScales>,
    ) -> Result<()> {
        let mut errors = vec![0f32; self.order.len() * size];
        for first in (0..self.order.len()).step_by(ROWS) {
            let order = &self.order[first..self.order.len().min(first + ROWS)];
            let added = self.compensation(&errors, first, order.len(), size);
            let target =
                |(at, row): (usize, &usize)| (0..size).map(|column| values[row * size + column] + added[column * order.len() + at]).collect::<Vec<f32>>();
            let mut block = order.iter().enumerate().flat_map(target).collect::<Vec<f32>>();
            let found = round(&mut block)?;
            for (at, row) in order.iter().enumerate() {
                let (rounded, value) = (&block[at * size..][..size], &mut values[row * size..][..size]);
                let error = &mut errors[(first + at) * size..][..size];
                error.iter_mut().zip(rounded).zip(&*value).for_each(|((error, rounded), value)| *error = value - rounded);
                value.copy_from_slice(rounded);
                scales.set_row((*row, rows), &found, (at, order.len()));
            }
        }
        Ok(())
    }

    /// The change of a block of rows with which they compensate for the errors of previous rows, `[size,
    /// count]`.
    fn compensation(&self, errors: &[f32], first: usize, count: usize, size: usize) -> Vec<f32> {
        let (rows, unchanged) = (self.order.len(), vec![0f32; count]);
        let mut added = vec![0f32; size * count];
        if first == 0 || size == 0 {
            return added;
        }
        let right = Rows { values: &self.ratios[first..], count, stride: rows };
        product(&LeftRows::transposed(errors, size, first, size), &right, count, Epilogue::NONE, &mut added);
        // Previous rows of the block already compensate for a part of the errors.
        let ratios = Ratios { values: &self.ratios[first * rows + first..], stride: rows };
        added.chunks_exact_mut(count.max(1)).for_each(|column| ratios.free(column, &unchanged, 0));
        added
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::grid::QuantizationParams;

    const SIZE: usize = 5;

    fn number(i: usize) -> f32 {
        ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0
    }

    fn single(rows: usize, damping: f32) -> OutputGroup {
        let gradients: Vec<f32> = (0..3 * rows * rows).map(|i| number(i * i + 3) + number(i / rows)).collect();
        let product = |a: usize, b: usize| gradients.chunks(rows).map(|row| row[a] * row[b]).sum::<f32>();
        OutputGroup { size: rows, products: (0..rows * rows).map(|at| product(at / rows, at % rows)).collect(), damping }
    }

    fn halves(values: &mut [f32]) -> Result<RowScales> {
        values.iter_mut().for_each(|value| *value = (2.0 * *value).round() / 2.0);
        let steps = (0..values.len() / SIZE).map(|row| QuantizationParams { scale: values[row * SIZE], zero: 0.0 });
        Ok(RowScales { steps: steps.collect(), blocks: Vec::new() })
    }

    fn damped(group: &OutputGroup) -> Vec<f64> {
        let size = group.size;
        let mean = (0..size).map(|at| f64::from(group.products[at * (size + 1)])).sum::<f64>() / size as f64;
        let added = |at: usize| if at / size == at % size { f64::from(group.damping) * mean } else { 0.0 };
        (0..size * size).map(|at| f64::from(group.products[at]) + added(at)).collect()
    }

    /// `tr(G E Eᵀ)` of errors `[rows, SIZE]`.
    fn loss(moments: &[f64], errors: &[f32]) -> f64 {
        let rows = errors.len() / SIZE;
        let dot = |a: usize, b: usize| (0..SIZE).map(|at| f64::from(errors[a * SIZE + at]) * f64::from(errors[b * SIZE + at])).sum::<f64>();
        (0..rows * rows).map(|at| moments[at] * dot(at / rows, at % rows)).sum()
    }

    fn errors(a: &[f32], b: &[f32]) -> Vec<f32> {
        a.iter().zip(b).map(|(a, b)| a - b).collect()
    }

    /// Half of the squares of the gradients is common to all outputs: in three blocks and more, compensation
    /// removes at least a quarter of the loss on average.
    #[test]
    fn compensated_rows_lose_less_and_have_their_scales() {
        for rows in [1, 3, ROWS, ROWS + 1, 3 * ROWS + 5] {
            let group = single(rows, 0.1);
            let moments = damped(&group);
            let feedback = OutputFeedback::new(&OutputMoments { groups: vec![group] }, 1).unwrap();
            let mut losses = [0.0; 2];
            for seed in 0..12 {
                let mut random = fastrand::Rng::with_seed(seed);
                let weight: Vec<f32> = (0..rows * SIZE).map(|_| random.f32()).collect();
                let (mut plain, mut compensated) = (weight.clone(), weight.clone());
                halves(&mut plain).unwrap();
                let steps = feedback.round(&mut compensated, SIZE, halves).unwrap().steps;
                assert!(steps.iter().zip(compensated.chunks(SIZE)).all(|(step, row)| step.scale == row[0]) && steps.len() == rows);
                assert!(rows > ROWS || plain == compensated);
                losses.iter_mut().zip([&plain, &compensated]).for_each(|(sum, values)| *sum += loss(&moments, &errors(values, &weight)));
            }
            let [plain, compensated] = losses;
            assert!(rows < 3 * ROWS || compensated < 0.75 * plain, "{rows}: {compensated} of {plain}");
        }
    }

    /// For given values of the first block, the targets of the second one minimize the loss.
    #[test]
    fn targets_minimize_the_loss() {
        let rows = ROWS + 6;
        let group = single(rows, 0.01);
        let moments = damped(&group);
        let feedback = OutputFeedback::new(&OutputMoments { groups: vec![group] }, 1).unwrap();
        let weight: Vec<f32> = (0..rows * SIZE).map(|i| number(7 * i + 1)).collect();
        let solve = |moved: Option<(usize, f32)>| {
            let (mut values, mut block) = (weight.clone(), 0);
            let rounded = feedback.round(&mut values, SIZE, |values| {
                block += 1;
                if block == 1 {
                    return halves(values);
                }
                moved.into_iter().for_each(|(at, change)| values[at] += change);
                Ok(RowScales::default())
            });
            rounded.map(|_| loss(&moments, &errors(&values, &weight))).unwrap()
        };
        let best = solve(None);
        assert!(best > 0.0);
        for at in 0..(rows - ROWS) * SIZE {
            let [less, more] = [-0.05, 0.05].map(|change| solve(Some((at, change))));
            assert!(less > best && more > best && (less - more).abs() < 0.02 * (less - best), "{at}: {less} {more} {best}");
        }
    }

    #[test]
    fn weighted_errors_have_the_loss_as_squares() {
        let groups = vec![single(9, 0.1), single(4, 1.0), single(1, 0.5)];
        let moments: Vec<Vec<f64>> = groups.iter().map(damped).collect();
        let feedback = OutputFeedback::new(&OutputMoments { groups }, 1).unwrap();
        let [outputs, targets] = [5, 11].map(|seed| (0..14 * SIZE).map(|i| number(i * seed)).collect::<Vec<f32>>());
        let found: f64 = feedback.weighted_errors(&outputs, &targets).iter().map(|error| f64::from(*error).powi(2)).sum();
        let error = errors(&outputs, &targets);
        let mut expected = 0.0;
        for (moments, (first, count)) in moments.iter().zip([(0, 9), (9, 4), (13, 1)]) {
            // One column for each row of outputs.
            let part: Vec<f32> = (0..count).flat_map(|at| error.chunks(14).map(move |row| row[first + at])).collect();
            expected += loss(moments, &part);
        }
        assert!((found - expected).abs() < 1e-4 * expected, "{found} {expected}");
    }

    /// Outputs without gradients are rounded without compensation, and their errors do not count. Moments
    /// that no gradients have are refused.
    #[test]
    fn groups_without_gradients_have_no_compensation() {
        let rows = ROWS + 6;
        let empty = OutputGroup { size: rows, products: vec![0.0; rows * rows], damping: 0.1 };
        let feedback = OutputFeedback::new(&OutputMoments { groups: vec![empty.clone(), single(rows, 0.1)] }, 1).unwrap();
        let weight: Vec<f32> = (0..2 * rows * SIZE).map(|i| number(7 * i + 1)).collect();
        let (mut plain, mut compensated) = (weight.clone(), weight.clone());
        halves(&mut plain).unwrap();
        feedback.round(&mut compensated, SIZE, halves).unwrap();
        assert!(plain[..rows * SIZE] == compensated[..rows * SIZE] && plain[rows * SIZE..] != compensated[rows * SIZE..]);
        let outputs: Vec<f32> = (0..2 * rows).map(number).collect();
        let weighted = feedback.weighted_errors(&outputs, &vec![0.0; 2 * rows]);
        assert!(weighted[..rows].iter().all(|error| *error == 0.0) && weighted[rows..].iter().any(|error| *error != 0.0));
        for wrong in [f32::NAN, -1.0] {
            let mut products = empty.products.clone();
            products[0] = wrong;
            assert!(OutputFeedback::new(&OutputMoments { groups: vec![OutputGroup { products, ..empty.clone() }] }, 1).is_none(), "{wrong}");
        }
    }

    /// Rows of several groups, of which only some are selected.
    #[test]
    fn selected_rows_are_those_of_all_groups() {
        let moments = OutputMoments { groups: vec![single(7, 0.1), single(8, 0.1)] };
        let feedback = OutputFeedback::new(&moments, 3).unwrap();
        let orders = feedback.groups.iter().map(|group| {
            let mut order = group.order.clone();
            order.sort_unstable();
            order
        });
        assert_eq!(orders.collect::<Vec<_>>(), [vec![0, 1, 2], vec![3, 4]]);
        let diagonal = |at: usize| moments.groups[1].products[at * 9];
        assert_eq!(feedback.groups[1].order[0] == 3, diagonal(2) >= diagonal(5));
    }
}
