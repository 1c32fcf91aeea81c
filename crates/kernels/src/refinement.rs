//! Improves a rounded weight by coordinate descent on the error of a layer's output: scales of groups and
//! codes in turn (Behdin et al. 2023, QuantEase, <https://arxiv.org/abs/2309.01885>).
//!
//! With targets `W`, grid values `Q` and `H = XᵀX` plus damping, the error is `tr(E H Eᵀ)` for `E = W - Q`.
//! The gradient `G = E H` gives the optimal change of one weight, `Gⱼ / Hⱼⱼ`, and of the scale of a group
//! with the codes `c`, `G·c / cᵀHc`. No step increases the error.

use rayon::prelude::*;

use super::column_solver::Grid;
use super::compensation::damping_of;
use super::epilogue::Epilogue;
use super::operands::{LeftRows, Rows};
use super::pool::on_pool_thread;
use super::product::product;
use crate::grid::{Levels, QuantizationParams};

/// Columns whose scales and weights change before the gradients of other columns are computed.
const BLOCK: usize = 128;

/// Second moments of the inputs of a layer.
pub struct Hessian {
    size: usize,
    /// The symmetric matrix `[size, size]`.
    values: Vec<f32>,
}

impl Hessian {
    /// From the upper triangle of `H` `[size, size]`, with `damping` times the mean of the diagonal added to
    /// the diagonal.
    pub fn new(products: &[f32], size: usize, damping: f64) -> Hessian {
        let added = damping_of((0..size).map(|at| f64::from(products[at * size + at])), damping);
        let mut values = vec![0f32; size * size];
        values.par_chunks_mut(size.max(1)).enumerate().for_each(|(i, row)| {
            row.iter_mut().enumerate().for_each(|(j, out)| *out = products[i.min(j) * size + i.max(j)]);
            row[i] = (f64::from(row[i]) + added) as f32;
        });
        Hessian { size, values }
    }

    /// From a damped symmetric matrix `[size, size]`.
    pub fn from_damped(values: Vec<f32>, size: usize) -> Hessian {
        Hessian { size, values }
    }

    /// The product of `left` `[rows, height]` and a part of the matrix, given by its first row and column:
    /// `[rows, width]`.
    fn times(&self, left: &[f32], height: usize, (row, column): (usize, usize), width: usize) -> Vec<f32> {
        let rows = left.len() / height.max(1);
        let mut out = vec![0f32; rows * width];
        let right = Rows { values: &self.values[row * self.size + column..], count: width, stride: self.size };
        product(&LeftRows::new(left, rows, height, height), &right, width, Epilogue::NONE, &mut out);
        out
    }

    /// Improves grid values `[rows, size]`, in the order of the weight, and the scales of their grid, in the
    /// given number of sweeps over all columns. Values marked in `frozen` do not change; it is empty if there
    /// are none.
    pub fn refine<S: Fn(f64) -> f32 + Send + Sync>(&self, targets: &[f32], values: &mut [f32], grid: &mut Grid<S>, frozen: &[bool], sweeps: usize) {
        on_pool_thread(|| self.refine_blocks(targets, values, grid, frozen, sweeps, BLOCK));
    }

    /// As [`refine`](Hessian::refine), where the scales of about `block` columns move before their values do.
    pub fn refine_blocks<S: Fn(f64) -> f32 + Send + Sync>(
        &self,
        targets: &[f32],
        values: &mut [f32],
        grid: &mut Grid<S>,
        frozen: &[bool],
        sweeps: usize,
        block: usize,
    ) {
        let size = self.size;
        if size == 0 || values.is_empty() {
            return;
        }
        let group = grid.group.clamp(1, size);
        let block = (block / group).max(1) * group;
        let mut errors: Vec<f32> = targets.iter().zip(&*values).map(|(target, value)| target - value).collect();
        for _ in 0..sweeps {
            let mut changed = false;
            for first in (0..size).step_by(block) {
                let columns = (first, block.min(size - first));
                let mut gradients = self.times(&errors, size, (0, first), columns.1);
                let fitted = if grid.store.is_some() { columns.1 } else { 0 };
                for start in (0..fitted).step_by(group) {
                    let moved = self.fit_scales(columns, (start, group.min(columns.1 - start)), values, &mut gradients, grid);
                    // Values of earlier columns may not be optimal any longer.
                    changed |= moved && first > 0;
                }
                changed |= self.round_block(columns, values, &mut gradients, grid, frozen);
                let part = first..first + columns.1;
                let rows = errors.par_chunks_mut(size).zip(targets.par_chunks(size)).zip(values.par_chunks(size));
                rows.for_each(|((errors, targets), values)| {
                    part.clone().for_each(|at| errors[at] = targets[at] - values[at]);
                });
            }
            if !changed {
                break;
            }
        }
    }

    /// Moves the scales of a group of columns to their optimum. The group is a part of consecutive columns,
    /// whose gradients are given. Returns whether any moved.
    fn fit_scales<S: Fn(f64) -> f32 + Send + Sync>(
        &self,
        (first, count): (usize, usize),
        (start, width): (usize, usize),
        values: &mut [f32],
        gradients: &mut [f32],
        grid: &mut Grid<S>,
    ) -> bool {
        let (size, begin) = (self.size, first + start);
        let (index, groups) = (begin / grid.group, size.div_ceil(grid.group));
        let (levels, Some(store)) = (grid.levels, &grid.store) else { return false };
        let of_row = |(row, steps): (&[f32], &[QuantizationParams])| {
            let step = steps[index];
            row[begin..][..width].iter().map(|value| levels.level(*value, step)).collect::<Vec<_>>()
        };
        let codes: Vec<f32> = values.par_chunks(size).zip(grid.steps.par_chunks(groups)).flat_map_iter(of_row).collect();
        let products = self.times(&codes, width, (begin, first), count);
        let rows = values.par_chunks_mut(size).zip(gradients.par_chunks_mut(count)).zip(grid.steps.par_chunks_mut(groups));
        let moved = rows.zip(codes.par_chunks(width).zip(products.par_chunks(count))).map(|(((values, gradients), steps), (codes, products))| {
            let dot = |a: &[f32]| a[start..][..width].iter().zip(codes).map(|(a, code)| f64::from(*a) * f64::from(*code)).sum::<f64>();
            let (slope, curvature) = (dot(gradients), dot(products));
            let step = &mut steps[index];
            let Some((scale, change)) = better_scale(step.scale, slope, curvature, store) else { return false };
            step.scale = scale;
            values[begin..][..width].iter_mut().zip(codes).for_each(|(value, code)| *value = code * scale);
            subtract(gradients, products, change);
            true
        });
        moved.reduce(|| false, |a, b| a | b)
    }

    /// Rounds each weight of consecutive columns, whose gradients are given, to its optimum, given all other
    /// weights. Returns whether any changed.
    fn round_block<S: Fn(f64) -> f32 + Send + Sync>(
        &self,
        (first, width): (usize, usize),
        values: &mut [f32],
        gradients: &mut [f32],
        grid: &Grid<S>,
        frozen: &[bool],
    ) -> bool {
        let size = self.size;
        let (group, groups) = (grid.group, size.div_ceil(grid.group));
        let rows = values.par_chunks_mut(size).zip(gradients.par_chunks_mut(width)).zip(grid.steps.par_chunks(groups));
        let changed = rows.enumerate().map(|(row, ((values, gradients), steps))| {
            let step = |at: usize| steps[(first + at) / group];
            let is_frozen = |at: usize| frozen.get(row * size + first + at) == Some(&true);
            round_row(grid.levels, (&self.values[first * size + first..], size), gradients, &mut values[first..][..width], step, is_frozen)
        });
        changed.reduce(|| false, |a, b| a | b)
    }
}

/// A scale with a smaller error, rounded to its storage dtype, and the change. `slope` and `curvature` are
/// the products of the codes with the gradients, and with the second moments and the codes.
pub fn better_scale(scale: f32, slope: f64, curvature: f64, store: impl Fn(f64) -> f32) -> Option<(f32, f32)> {
    let stored = store(f64::from(scale) + if curvature > 0.0 { slope / curvature } else { 0.0 });
    let change = f64::from(stored) - f64::from(scale);
    // After rounding to its storage dtype, a scale can be worse.
    (stored.is_normal() && stored > 0.0 && change * change * curvature < 2.0 * change * slope).then_some((stored, change as f32))
}

/// Rounds each weight of consecutive columns of a row to its optimum, given all other weights. `hessian` are
/// the second moments of these columns, and the distance of their rows; the gradients of later columns are
/// updated. Returns whether any weight changed.
pub fn round_row(
    levels: Levels,
    (hessian, stride): (&[f32], usize),
    gradients: &mut [f32],
    values: &mut [f32],
    step: impl Fn(usize) -> QuantizationParams,
    is_frozen: impl Fn(usize) -> bool,
) -> bool {
    let mut changed = false;
    for at in (0..values.len()).filter(|at| !is_frozen(*at)) {
        let hessian = &hessian[at * stride..][..values.len()];
        let value = levels.nearest(values[at] + gradients[at] / hessian[at], step(at));
        let change = value - values[at];
        if change != 0.0 {
            subtract(&mut gradients[at + 1..], &hessian[at + 1..], change);
            values[at] = value;
            changed = true;
        }
    }
    changed
}

simd! {
    fn subtract(out: &mut [f32], values: &[f32], factor: f32) {
        for (out, x) in out.iter_mut().zip(values) {
            *out -= factor * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::column_solver::{ColumnSolver, Range, Zeros};
    use super::super::compensation::Compensation;
    use super::super::gram;
    use super::*;
    use crate::ggml::BlockType;
    use crate::grid::{IntegerGrid, UNEVEN_LEVELS};
    use crate::minifloat::{self, Minifloat};

    fn number(i: usize) -> f32 {
        ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0
    }

    /// The damped error of a weight, in f64.
    fn objective(hessian: &Hessian, targets: &[f32], values: &[f32]) -> f64 {
        let errors: Vec<f64> = targets.iter().zip(values).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        errors
            .chunks(hessian.size)
            .map(|row| {
                (0..row.len())
                    .flat_map(|i| (0..row.len()).map(move |j| (i, j)))
                    .map(|(i, j)| row[i] * f64::from(hessian.values[i * hessian.size + j]) * row[j])
                    .sum::<f64>()
            })
            .sum()
    }

    fn any_levels() -> impl Strategy<Value = Levels> {
        let integers = (2u32..5, any::<bool>()).prop_map(|(bits, symmetric)| Levels::Integers(IntegerGrid { bits, symmetric }));
        prop_oneof![2 => integers, 1 => Just(Levels::Floats(Minifloat::E2m1)), 1 => Just(Levels::Uneven)]
    }

    /// The number of a code, before a zero point is subtracted.
    fn level(levels: Levels, code: i8) -> f32 {
        match levels {
            Levels::Integers(_) => f32::from(code),
            Levels::Floats(_) => minifloat::from_e2m1(code as u8),
            Levels::Uneven => UNEVEN_LEVELS[code as usize],
        }
    }

    /// The other numbers that could be better.
    fn neighbors(levels: Levels, code: i8) -> Vec<f32> {
        match levels {
            Levels::Integers(integers) => {
                let (lowest, highest) = integers.bounds();
                [-1.0, 1.0].map(|change| f32::from(code) + change).into_iter().filter(|q| (lowest..=highest).contains(q)).collect()
            }
            Levels::Floats(_) => (0..16).map(minifloat::from_e2m1).collect(),
            Levels::Uneven => UNEVEN_LEVELS.to_vec(),
        }
    }

    /// The error never rises, and no single weight can lower it in the end.
    fn descends([size, group, rows]: [usize; 3], levels: Levels, is_half: bool, seed: usize) -> Result<(), TestCaseError> {
        let group = group.min(size);
        // Correlated features.
        let samples: Vec<f32> = (0..2 * size * size).map(|i| number(i * i + seed) + number(i / size + seed)).collect();
        let mut products = vec![0f32; size * size];
        gram::add(&samples, size, &mut products);
        let hessian = Hessian::new(&products, size, 0.01);
        let targets: Vec<f32> = (0..rows * size).map(|i| number(i * 31 + seed)).collect();
        let order: Vec<usize> = (0..size).collect();
        let store = move |scale: f64| if is_half { half::bf16::from_f64(scale).to_f32() } else { scale as f32 };
        let mut grid = Grid { levels, group, steps: Vec::new(), order: &order, store: Some(store) };
        grid.fit(&targets, &vec![1.0; size], Range::MinMax);
        let mut values = targets.clone();
        grid.round(&mut values);
        let frozen: Vec<bool> = (0..values.len()).map(|at| at % 7 == 3).collect();
        let before = objective(&hessian, &targets, &values);
        let kept: Vec<i8> = grid.codes_of(&values);
        hessian.refine(&targets, &mut values, &mut grid, &frozen, 500);
        let after = objective(&hessian, &targets, &values);
        prop_assert!(after <= before * (1.0 + 1e-5) + 1e-9, "{before} became {after}");
        let codes = grid.codes_of(&values);
        prop_assert!(frozen.iter().enumerate().filter(|(_, frozen)| **frozen).all(|(at, _)| codes[at] == kept[at]), "frozen codes changed");
        for (at, code) in codes.iter().enumerate() {
            let step = grid.steps[at / size * size.div_ceil(group) + at % size / group];
            prop_assert_eq!(values[at], (level(levels, *code) - step.zero) * step.scale);
            prop_assert_eq!(store(step.scale.into()), step.scale);
            for other in neighbors(levels, *code).into_iter().filter(|_| !frozen[at]) {
                let mut changed = values.clone();
                changed[at] = (other - step.zero) * step.scale;
                prop_assert!(objective(&hessian, &targets, &changed) >= after * (1.0 - 1e-4), "{at}: {code} should be {other}");
            }
        }
        Ok(())
    }

    /// After the last change of a value, scales of later columns move: earlier values are not optimal.
    #[test]
    fn values_are_optimal_for_scales_that_moved_last() {
        descends([270, 4, 3], Levels::Integers(IntegerGrid { bits: 4, symmetric: false }), false, 767).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn the_error_never_rises_and_no_single_weight_can_lower_it(
            size in prop::sample::select(vec![1usize, 5, 33, 128, 150, 270]), group in prop::sample::select(vec![4usize, 32, 128, 300]),
            rows in 1usize..4, levels in any_levels(), is_half: bool, seed in 0usize..1000
        ) {
            descends([size, group, rows], levels, is_half, seed)?;
        }
    }

    /// For every type of GGUF files, compensation and coordinate descent with the scales of its encoder have
    /// a lower error than the encoder, and keep the scales.
    #[test]
    fn codes_of_block_types_are_compensated() {
        let (size, rows) = (512, 4);
        // Correlated features of different power.
        let common = |i: usize| number(i / size * 7) * (i % size % 5) as f32;
        let samples: Vec<f32> = (0..2 * size * size).map(|i| (number(i * i) + common(i)) * if i % size % 11 == 3 { 4.0 } else { 1.0 }).collect();
        let mut products = vec![0f32; size * size];
        gram::add(&samples, size, &mut products);
        let hessian = Hessian::new(&products, size, 0.01);
        let targets: Vec<f32> = (0..rows * size).map(|i| number(i * 31) * 0.1).collect();
        let mut order: Vec<usize> = (0..size).collect();
        let power = |at: usize| products[at * size + at];
        order.sort_by(|a, b| power(*b).total_cmp(&power(*a)).then(a.cmp(b)));
        let compensation = Compensation::new(&products, size, &order, 0.01).unwrap();
        let importance: Vec<f32> = (0..size).map(power).collect();
        for kind in BlockType::ALL {
            let Some((levels, group)) = kind.levels() else { continue };
            let mut blocks = vec![0; targets.len() / kind.elements() * kind.bytes()];
            let row = blocks.len() / rows;
            blocks.chunks_mut(row).zip(targets.chunks(size)).for_each(|(blocks, values)| kind.encode_row(values, &importance, blocks));
            let mut values = targets.clone();
            kind.decode(&blocks, &mut values);
            let rounded = objective(&hessian, &targets, &values);
            let steps = kind.params(&blocks);
            let mut grid = Grid { levels, group, steps: steps.clone(), order: &order, store: None::<fn(f64) -> f32> };
            let mut work: Vec<f32> = targets.chunks(size).flat_map(|row| order.iter().map(|column| row[*column])).collect();
            let mut solver = ColumnSolver::new(Zeros::None, Some(grid));
            compensation.apply(&mut work, 128, &mut solver);
            (0..work.len()).for_each(|at| values[at / size * size + order[at % size]] = work[at]);
            grid = solver.grid.unwrap();
            let compensated = objective(&hessian, &targets, &values);
            hessian.refine(&targets, &mut values, &mut grid, &[], 3);
            assert_eq!(grid.steps, steps, "{}", kind.name());
            kind.put_codes(&grid.codes_of(&values), &mut blocks);
            let assumed = values.clone();
            kind.decode(&blocks, &mut values);
            let refined = objective(&hessian, &targets, &values);
            assert!(compensated < rounded && refined <= compensated * (1.0 + 1e-4), "{}: {rounded}, {compensated}, {refined}", kind.name());
            let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
            assert!(values.iter().zip(&assumed).all(is_near), "{}", kind.name());
        }
    }

    /// The targets of each row are multiples of its codes, so that a scale without error exists.
    #[test]
    fn scales_move_to_their_optimum() {
        let hessian = Hessian::new(&[2.0, 1.0, 0.0, 3.0], 2, 0.0);
        let (order, levels) = ([0, 1], Levels::Integers(IntegerGrid { bits: 4, symmetric: true }));
        let steps = vec![QuantizationParams { scale: 0.5, zero: 0.0 }, QuantizationParams { scale: 1.0, zero: 0.0 }];
        let mut grid = Grid { levels, group: 2, steps, order: &order, store: Some(|scale| scale as f32) };
        let (targets, mut values) = ([1.2, 2.4, 3.0, 0.0], vec![1.0, 2.0, 3.0, 0.0]);
        hessian.refine(&targets, &mut values, &mut grid, &[], 1);
        assert_eq!(grid.steps.iter().map(|step| step.scale).collect::<Vec<_>>(), [0.6, 1.0]);
        assert!(values.iter().zip(targets).all(|(a, b)| (a - b).abs() < 1e-6), "{values:?}");
    }
}
