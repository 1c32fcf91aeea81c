//! The computations of `kernel/refinement.rs` with tensors, for sums on a GPU.

use candle_core::{DType, Result, Tensor};

use super::super::moments::column_sums;
use super::device::{DeviceSolver, GridTensors, by_column, by_row, download, indices, part, upload};
use crate::exec::transfer::{self, Cause};
use crate::gpu;
use crate::kernel::column_solver::Grid;
use crate::kernel::grid::{Levels, QuantizationParams};
use crate::kernel::refinement::{Hessian, better_scale, round_row};

/// Columns whose weights are changed before the gradients of all other columns are updated.
const BLOCK: usize = 128;

/// A weight in coordinate descent; matrices are `[size, rows]`.
struct Descent<'h> {
    /// The damped second moments `[size, size]`.
    hessian: &'h Tensor,
    /// The products of the second moments and the errors.
    gradients: Tensor,
    /// The numbers that scales are multiplied with, changed in place.
    levels: Tensor,
}

/// Improves grid values `[rows, size]`, in the order of the weight, and the scales of their grid as
/// [`Hessian::refine`], which processes levels that are not integers.
pub(super) fn refine<S: Fn(f64) -> f32 + Sync>(
    solver: &DeviceSolver,
    targets: &[f32],
    values: &mut [f32],
    grid: &mut Grid<S>,
    frozen: &[bool],
    sweeps: usize,
) -> Result<()> {
    let Some(hessian) = solver.hessian.as_ref().filter(|_| !values.is_empty()) else { return Ok(()) };
    let (size, device) = (hessian.dim(0)?, hessian.device());
    if !matches!(grid.levels, Levels::Integers(_)) {
        let on_host = Hessian::from_damped(transfer::values(hessian, Cause::Statistics)?, size);
        on_host.refine(targets, values, grid, frozen, sweeps);
        return Ok(());
    }
    let natural: Vec<usize> = (0..size).collect();
    let groups = indices(natural.iter().map(|column| (column / grid.group) as u32).collect(), device)?;
    let (rows, per_row) = (values.len() / size, size.div_ceil(grid.group));
    let scales = |grid: &Grid<S>| {
        let scales: Vec<f32> = grid.steps.iter().map(|step| step.scale).collect();
        by_column(&scales, (rows, per_row), device)?.index_select(&groups, 0)
    };
    let solved = solver.upload(values)?.t()?.contiguous()?;
    let gradients = hessian.matmul(&(solver.upload(targets)?.t()? - &solved)?)?;
    let mut descent = Descent { hessian, gradients, levels: (solved / scales(grid)?)?.round()? };
    for _ in 0..sweeps {
        for first in (0..size).step_by(grid.group.max(1)) {
            descent.fit_scales(first, grid)?;
        }
        let tensors = GridTensors::new(grid, &natural, frozen, device)?;
        let before = descent.levels.copy()?;
        for first in (0..size).step_by(BLOCK) {
            descent.round_block(first, grid, tensors.as_ref(), frozen)?;
        }
        let moved = column_sums(&(&descent.levels - before)?.abs()?)?;
        if transfer::values::<f32>(&moved, Cause::Statistics)?.iter().all(|moved| *moved == 0.0) {
            break;
        }
    }
    download(&(descent.levels * scales(grid)?)?.t()?.contiguous()?, values)
}

impl Descent<'_> {
    /// The products of the second moments and a block of columns.
    fn times(&self, first: usize, block: &Tensor) -> Result<Tensor> {
        self.hessian.narrow(0, first, block.dim(0)?)?.t()?.matmul(block)
    }

    /// Moves the scales of the group of columns that starts at `first` to their optimum.
    fn fit_scales<S: Fn(f64) -> f32 + Sync>(&mut self, first: usize, grid: &mut Grid<S>) -> Result<()> {
        let (size, rows) = self.levels.dims2()?;
        let width = grid.group.min(size - first);
        let (index, per_row) = (first / grid.group, size.div_ceil(grid.group));
        let codes = self.levels.narrow(0, first, width)?;
        let products = self.times(first, &codes)?;
        let dot = |other: &Tensor| column_sums(&(other.narrow(0, first, width)? * &codes)?);
        let sums = transfer::values::<f64>(&Tensor::cat(&[dot(&self.gradients)?, dot(&products)?], 0)?, Cause::Statistics)?;
        let (slopes, curvatures) = sums.split_at(rows);
        let mut changes = vec![0f32; rows];
        let steps = grid.steps.iter_mut().skip(index).step_by(per_row);
        for (((step, change), slope), curvature) in steps.zip(&mut changes).zip(slopes).zip(curvatures) {
            if let Some((scale, moved)) = better_scale(step.scale, *slope, *curvature, &grid.store) {
                (step.scale, *change) = (scale, moved);
            }
        }
        if changes.iter().any(|change| *change != 0.0) {
            let changes = upload(&changes, (1, rows), self.levels.device())?;
            self.gradients = (&self.gradients - products.broadcast_mul(&changes)?)?;
        }
        Ok(())
    }

    /// Rounds each weight of a block to its optimum, given all other weights.
    fn round_block<S: Fn(f64) -> f32 + Sync>(&mut self, first: usize, grid: &Grid<S>, tensors: Option<&GridTensors>, frozen: &[bool]) -> Result<()> {
        let (size, rows) = self.levels.dims2()?;
        let width = BLOCK.min(size - first);
        let square = part(self.hessian, (first, width), (first, width))?;
        let (gradients, levels) = (self.gradients.narrow(0, first, width)?, self.levels.narrow(0, first, width)?);
        let mut changes = Tensor::zeros((width, rows), DType::F32, levels.device())?;
        let rounded = match tensors.map(|tensors| tensors.columns(first, width)).transpose()? {
            Some(columns) => gpu::descend_columns([&gradients, &square], columns.parameters(), &levels, &changes)?,
            None => None,
        };
        if rounded.is_none() {
            let found;
            [found, changes] = round_on_host([&gradients, &square, &levels], (first, size), grid, frozen)?;
            self.levels.slice_set(&found, 0, first)?;
        }
        self.gradients = (&self.gradients - self.times(first, &changes)?)?;
        Ok(())
    }
}

/// The levels of a block of columns after rounding, and the changes of their values.
fn round_on_host<S: Fn(f64) -> f32 + Sync>(operands: [&Tensor; 3], (first, size): (usize, usize), grid: &Grid<S>, frozen: &[bool]) -> Result<[Tensor; 2]> {
    let [gradients, square, levels] = operands;
    let (width, rows) = levels.dims2()?;
    let square = transfer::values::<f32>(square, Cause::Statistics)?;
    let [mut gradients, mut levels] = [by_row(gradients)?, by_row(levels)?];
    let mut changes = vec![0f32; levels.len()];
    let lines = gradients.chunks_exact_mut(width).zip(levels.chunks_exact_mut(width)).zip(changes.chunks_exact_mut(width));
    for ((row, ((gradients, levels), changes)), steps) in lines.enumerate().zip(grid.steps.chunks_exact(size.div_ceil(grid.group))) {
        let step = |at: usize| -> QuantizationParams { steps[(first + at) / grid.group] };
        let mut values: Vec<f32> = levels.iter().enumerate().map(|(at, level)| level * step(at).scale).collect();
        let is_frozen = |at: usize| frozen.get(row * size + first + at) == Some(&true);
        round_row(grid.levels, (&square, width), gradients, (&mut values, changes), step, is_frozen);
        for (at, value) in values.iter().enumerate().filter(|(at, _)| changes[*at] != 0.0) {
            levels[at] = grid.levels.level(*value, step(at));
        }
    }
    let device = operands[2].device();
    Ok([by_column(&levels, (rows, width), device)?, by_column(&changes, (rows, width), device)?])
}
