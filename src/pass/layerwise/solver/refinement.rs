//! The computations of `kernel/refinement.rs` with tensors, for sums on a GPU.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::device::{GridTensors, by_column, by_row, indices, part, product, upload};
use crate::exec::transfer::{self, Cause};
use crate::gpu;
use crate::kernel::column_solver::Grid;
use crate::kernel::grid::{Levels, QuantizationParams};
use crate::kernel::refinement::{Hessian, better_scale, round_row};

/// Columns whose weights are changed before the errors are updated.
const BLOCK: usize = 128;
/// Number of groups whose scales are chosen from one copy of their slopes to the host.
const GROUPS: usize = 16;

/// A weight in coordinate descent; matrices are `[size, rows]`. They are changed in place.
struct Descent<'h> {
    /// The damped second moments `[size, size]`.
    hessian: &'h Tensor,
    /// The targets minus the values. Their products with the second moments are the gradients.
    errors: Tensor,
    /// The numbers that scales are multiplied with.
    levels: Tensor,
}

/// Improves grid values that approximate targets, both `[size, rows]` in the order of the weight, and the
/// scales of their grid as [`Hessian::refine`], which processes levels that are not integers, and those of
/// blocks of GGUF files, which may not be integers. `hessian` are the damped second moments. Returns the
/// values.
pub(super) fn refine<S: Fn(f64) -> f32 + Send + Sync>(
    hessian: &Tensor,
    [targets, values]: [Tensor; 2],
    grid: &mut Grid<S>,
    frozen: &[bool],
    sweeps: usize,
) -> Result<Tensor> {
    let ((size, rows), device) = (values.dims2()?, hessian.device());
    if !matches!(grid.levels, Levels::Integers(_)) || grid.store.is_none() {
        let on_host = Hessian::from_damped(transfer::values(hessian, Cause::Statistics)?, size);
        let mut found = by_row(&values)?;
        on_host.refine(&by_row(&targets)?, &mut found, grid, frozen, sweeps);
        return by_column(&found, (rows, size), device);
    }
    let natural: Vec<usize> = (0..size).collect();
    let groups = indices(natural.iter().map(|column| (column / grid.group) as u32).collect(), device)?;
    let per_row = size.div_ceil(grid.group);
    let scales = |grid: &Grid<S>| {
        let scales: Vec<f32> = grid.steps.iter().map(|step| step.scale).collect();
        by_column(&scales, (rows, per_row), device)?.index_select(&groups, 0)
    };
    let errors = (targets - &values)?;
    let descent = Descent { hessian, errors, levels: (values / scales(grid)?)?.round()? };
    for _ in 0..sweeps {
        for first in (0..per_row).step_by(GROUPS) {
            descent.fit_scales((first, GROUPS.min(per_row - first)), grid)?;
        }
        let tensors = GridTensors::new(grid, &natural, frozen, device)?;
        let (moved, mut moved_on_host) = (Tensor::zeros(1, DType::U32, device)?, false);
        for first in (0..size).step_by(BLOCK) {
            moved_on_host |= descent.round_block(first, grid, (tensors.as_ref(), &moved), frozen)?;
        }
        if !moved_on_host && transfer::number(&moved, Cause::Statistics)? == 0.0 {
            break;
        }
    }
    descent.levels * scales(grid)?
}

impl Descent<'_> {
    /// The gradients of consecutive columns.
    fn gradients(&self, first: usize, width: usize) -> Result<Tensor> {
        self.hessian.narrow(0, first, width)?.matmul(&self.errors)
    }

    /// Subtracts the changes of consecutive columns from the errors.
    fn subtract(&self, changes: &Tensor, first: usize) -> Result<()> {
        let errors = (self.errors.narrow(0, first, changes.dim(0)?)? - changes)?;
        self.errors.slice_set(&errors, 0, first)
    }

    /// Moves the scales of consecutive groups of columns to their optimum, one after another.
    fn fit_scales<S: Fn(f64) -> f32 + Send + Sync>(&self, (index, count): (usize, usize), grid: &mut Grid<S>) -> Result<()> {
        let (size, rows) = self.levels.dims2()?;
        let (group, device) = (grid.group, self.levels.device());
        let (first, end) = (index * group, size.min((index + count) * group));
        let codes = self.levels.narrow(0, first, end - first)?;
        // A matrix product with it adds up the columns of each group.
        let is_member: Vec<f32> = (0..count).flat_map(|at| (first..end).map(move |column| if column / group == index + at { 1.0 } else { 0.0 })).collect();
        let members = upload(&is_member, (count, end - first), device)?;
        // The slopes, and for each group the products of its codes with its own and those of later groups.
        let mut sums = vec![members.matmul(&(self.gradients(first, end - first)? * &codes)?)?];
        for at in 0..count {
            let (start, width) = (at * group, group.min(end - first - at * group));
            let left = end - first - start;
            let square = self.hessian.narrow(0, first + start, left)?.narrow(1, first + start, width)?;
            let products = (product(&square, &codes.narrow(0, start, width)?)? * codes.narrow(0, start, left)?)?;
            sums.push(product(&members.narrow(0, at, count - at)?.narrow(1, start, left)?, &products)?);
        }
        let sums = transfer::values::<f32>(&Tensor::cat(&sums, 0)?.t()?.contiguous()?, Cause::Statistics)?;
        let mut changes = vec![0f32; rows * count];
        let each = count + count * (count + 1) / 2;
        let lines = grid.steps.par_chunks_mut(size.div_ceil(group)).zip(sums.par_chunks(each)).zip(changes.par_chunks_mut(count));
        let Some(store) = &grid.store else { return Ok(()) };
        lines.for_each(|((steps, sums), changes)| fit_row(&mut steps[index..][..count], sums, changes, store));
        if changes.iter().any(|change| *change != 0.0) {
            let groups = indices((first..end).map(|column| (column / group - index) as u32).collect(), device)?;
            let changes = by_column(&changes, (rows, count), device)?.index_select(&groups, 0)?;
            self.subtract(&(codes * changes)?, first)?;
        }
        Ok(())
    }

    /// Rounds each weight of a block to its optimum, given all other weights. Returns whether a weight
    /// changes if it is rounded on the host; otherwise, `moved` becomes 1 if one does.
    fn round_block<S: Fn(f64) -> f32 + Send + Sync>(
        &self,
        first: usize,
        grid: &Grid<S>,
        (tensors, moved): (Option<&GridTensors>, &Tensor),
        frozen: &[bool],
    ) -> Result<bool> {
        let size = self.levels.dim(0)?;
        let width = BLOCK.min(size - first);
        let square = part(self.hessian, (first, width), (first, width))?;
        let (gradients, levels) = (self.gradients(first, width)?, self.levels.narrow(0, first, width)?);
        if let Some(columns) = tensors.map(|tensors| tensors.columns(first, width)).transpose()? {
            let errors = self.errors.narrow(0, first, width)?;
            if gpu::descend_columns([&gradients, &square], columns.parameters(), &levels, &errors, moved)?.is_some() {
                return Ok(false);
            }
        }
        let ([found, changes], moved) = round_on_host([&gradients, &square, &levels], (first, size), grid, frozen)?;
        self.levels.slice_set(&found, 0, first)?;
        self.subtract(&changes, first)?;
        Ok(moved)
    }
}

/// Moves the scales of consecutive groups of a row to their optimum, one after another, and sets their
/// changes. `sums` are the slopes, and for each group the products of its codes with its own codes and those
/// of each later group.
fn fit_row(steps: &mut [QuantizationParams], sums: &[f32], changes: &mut [f32], store: impl Fn(f64) -> f32) {
    let (slopes, mut products) = sums.split_at(steps.len());
    let mut slopes: Vec<f64> = slopes.iter().map(|slope| f64::from(*slope)).collect();
    for (at, (step, change)) in steps.iter_mut().zip(changes).enumerate() {
        let (own, rest) = products.split_at(slopes.len() - at);
        products = rest;
        if let Some((scale, moved)) = better_scale(step.scale, slopes[at], f64::from(own[0]), &store) {
            (step.scale, *change) = (scale, moved);
            slopes[at..].iter_mut().zip(own).for_each(|(slope, product)| *slope -= f64::from(moved) * f64::from(*product));
        }
    }
}

/// The levels of a block of columns after rounding, the changes of their values, and whether there are any.
fn round_on_host<S: Fn(f64) -> f32 + Send + Sync>(
    operands: [&Tensor; 3],
    (first, size): (usize, usize),
    grid: &Grid<S>,
    frozen: &[bool],
) -> Result<([Tensor; 2], bool)> {
    let [gradients, square, levels] = operands;
    let (width, rows) = levels.dims2()?;
    let square = transfer::values::<f32>(square, Cause::Statistics)?;
    let [mut gradients, mut levels] = [by_row(gradients)?, by_row(levels)?];
    let mut changes = vec![0f32; levels.len()];
    let lines = gradients.chunks_exact_mut(width).zip(levels.chunks_exact_mut(width)).zip(changes.chunks_exact_mut(width));
    for ((row, ((gradients, levels), changes)), steps) in lines.enumerate().zip(grid.steps.chunks_exact(size.div_ceil(grid.group))) {
        let step = |at: usize| -> QuantizationParams { steps[(first + at) / grid.group] };
        let before: Vec<f32> = levels.iter().enumerate().map(|(at, level)| level * step(at).scale).collect();
        let mut values = before.clone();
        let is_frozen = |at: usize| frozen.get(row * size + first + at) == Some(&true);
        round_row(grid.levels, (&square, width), gradients, &mut values, step, is_frozen);
        for (at, (value, before)) in values.iter().zip(&before).enumerate().filter(|(_, (value, before))| value != before) {
            changes[at] = value - before;
            levels[at] = grid.levels.level(*value, step(at));
        }
    }
    let device = operands[2].device();
    let tensors = [by_column(&levels, (rows, width), device)?, by_column(&changes, (rows, width), device)?];
    Ok((tensors, changes.iter().any(|change| *change != 0.0)))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::kernel::column_solver::Range;
    use crate::kernel::grid::IntegerGrid;

    const ROWS: usize = 3;

    fn number(i: usize) -> i32 {
        ((i as u32).wrapping_mul(2_654_435_761) >> 24) as i32
    }

    fn multiple(scale: f64) -> f32 {
        ((scale * 512.0).round() / 512.0) as f32
    }

    /// All values are multiples of 1/512 and all products are exact, so that results do not depend on the
    /// order of sums.
    #[test]
    fn scales_and_values_equal_those_of_the_host() {
        let sizes = [(5, 3), (40, 2), (130, 7), (300, 16), (300, 128), (150, 150)];
        for (size, group, symmetric) in sizes.into_iter().flat_map(|(size, group)| [true, false].map(|symmetric| (size, group, symmetric))) {
            let features: Vec<f32> = (0..24 * size).map(|i| (number(i * i + 7) % 3 - 1) as f32).collect();
            let product = |a: usize, b: usize| features.chunks(size).map(|row| row[a] * row[b]).sum::<f32>() + if a == b { 8.0 } else { 0.0 };
            let hessian: Vec<f32> = (0..size * size).map(|at| product(at / size, at % size)).collect();
            let tensor = Tensor::from_slice(&hessian, (size, size), &Device::Cpu).unwrap();
            let targets: Vec<f32> = (0..ROWS * size).map(|i| (number(i * 31) - 128) as f32 / 64.0).collect();
            let frozen: Vec<bool> = (0..targets.len()).map(|at| at % 7 == 3).collect();
            let order: Vec<usize> = (0..size).collect();
            let [before, host, device] = [None, Some(true), Some(false)].map(|on_host| {
                let levels = Levels::Integers(IntegerGrid { bits: 4, symmetric });
                let mut grid = Grid { levels, group, steps: Vec::new(), order: &order, store: Some(multiple as fn(f64) -> f32) };
                grid.fit(&targets, &vec![1.0; size], Range::MinMax);
                let mut values = targets.clone();
                grid.round(&mut values);
                match on_host {
                    None => {}
                    Some(true) => {
                        Hessian::from_damped(hessian.clone(), size).refine_blocks(&targets, &mut values, &mut grid, &frozen, 3, size.next_multiple_of(group))
                    }
                    Some(false) => {
                        let operands = [&targets, &values].map(|values| by_column(values, (ROWS, size), &Device::Cpu).unwrap());
                        values = by_row(&refine(&tensor, operands, &mut grid, &frozen, 3).unwrap()).unwrap();
                    }
                }
                (values, grid.steps.iter().map(|step| step.scale).collect::<Vec<f32>>())
            });
            assert!(device == host, "{size} {group} {symmetric}");
            assert!(size < 40 || (device.0 != before.0 && device.1 != before.1), "{size} {group} {symmetric}: unchanged");
        }
    }
}
