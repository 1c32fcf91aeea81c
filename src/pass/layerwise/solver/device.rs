//! The computations of `kernel/compensation.rs` with tensors, for sums on a GPU. Squares on the diagonal are
//! factorized in 64 bits; everything else consists of matrix products in 32 bits, or in 64 bits for small
//! dampings.
//!
//! Weights are transposed, `[size, rows]`, so that consecutive columns are contiguous.

use candle_core::{DType, Device, Result, Tensor};

use super::super::moments::DeviceSums;
use crate::exec::transfer::{self, Cause};
use crate::gpu::{self, ColumnGrid, FACTORIZED, UnitFactors};
use crate::kernel::column_solver::{ColumnSolver, Grid, Zeros};
use crate::kernel::compensation::{self, Block, DAMPING_F32, Ratios};
use crate::kernel::grid::Levels;

/// Error compensation between the columns of a layer's weight on a device.
pub(in super::super) struct DeviceSolver {
    /// Columns in processing order, and the position of each column.
    order: [Tensor; 2],
    /// `R[k][j] / R[j][j]` above the diagonal, as in [`Compensation`](compensation::Compensation).
    ratios: Tensor,
    /// Inverses of the squares of [`FACTORIZED`] columns on the diagonal of the ratios.
    inverses: Vec<Tensor>,
    costs: Vec<f32>,
    /// The costs as a column.
    divisors: Tensor,
    /// `(X₀ - X)ᵀX`; `None` if the inputs have not changed.
    differences: Option<Tensor>,
    /// The damped moments, if coordinate descent follows.
    pub(super) hessian: Option<Tensor>,
}

impl DeviceSolver {
    /// From sums of products, with `damping` times the mean of the sums of squares added to the diagonal.
    /// `None` if the damped matrix is not positive definite.
    pub fn new(sums: &DeviceSums, squares: &[f64], order: &[usize], damping: f64, descends: bool) -> Result<Option<DeviceSolver>> {
        let DeviceSums { products, differences } = sums;
        let (size, device) = (order.len(), products.device());
        let added = compensation::damping_of(squares.iter().copied(), damping);
        let mut positions = vec![0u32; size];
        (0..).zip(order).for_each(|(position, column)| positions[*column] = position);
        let columns: Vec<u32> = order.iter().map(|column| *column as u32).collect();
        let is_ordered = order.is_sorted();
        let order = [indices(columns, device)?, indices(positions, device)?];
        let matrix = if is_ordered { products.clone() } else { products.index_select(&order[0], 0)?.index_select(&order[0], 1)? };
        let dtypes = if damping >= DAMPING_F32 { &[DType::F32, DType::F64][..] } else { &[DType::F64][..] };
        for dtype in dtypes {
            let UnitFactors { ratios, inverses, costs } = unit_factors(&matrix, *dtype, added)?;
            let values = transfer::values::<f32>(&costs, Cause::Statistics)?;
            if values.iter().all(|cost| cost.is_finite() && *cost > 0.0) {
                drop(matrix);
                let hessian = descends.then(|| products + (Tensor::eye(size, DType::F32, device)? * added)?).transpose()?;
                let divisors = costs.to_dtype(DType::F32)?.reshape((size, 1))?;
                let differences = differences.clone();
                return Ok(Some(DeviceSolver { order, ratios, inverses, costs: values, divisors, differences, hessian }));
            }
        }
        Ok(None)
    }

    pub fn costs(&self) -> &[f32] {
        &self.costs
    }

    /// A tensor `[n, size]` on the device.
    pub(super) fn upload(&self, values: &[f32]) -> Result<Tensor> {
        let size = self.costs.len();
        upload(values, (values.len() / size.max(1), size), self.ratios.device())
    }

    /// A weight `[rows, size]`, and its change to the least-squares solution for the outputs of the original
    /// model. `None` if the inputs have not changed.
    pub fn change(&self, values: &[f32]) -> Result<Option<[Tensor; 2]>> {
        let Some(differences) = self.differences.as_ref().filter(|_| !values.is_empty()) else { return Ok(None) };
        let weight = self.upload(values)?;
        let change = differences.t()?.matmul(&weight.t()?)?.index_select(&self.order[0], 0)?;
        self.divide(&change)?;
        let change = change.index_select(&self.order[1], 0)?.t()?.contiguous()?;
        Ok(Some([weight, change]))
    }

    /// Replaces `B` `[size, n]`, with columns of the weight in processing order, by `H⁻¹ B`. The tensor must
    /// not share memory with others.
    fn divide(&self, values: &Tensor) -> Result<()> {
        let size = self.costs.len();
        let blocks = || (0..size).step_by(FACTORIZED).map(|start| (start, FACTORIZED.min(size - start))).zip(&self.inverses);
        for ((start, width), inverse) in blocks().rev() {
            let mut rows = values.narrow(0, start, width)?;
            let end = start + width;
            if end < size {
                let ratios = self.ratios.narrow(0, start, width)?.narrow(1, end, size - end)?;
                rows = with_product(rows, (&ratios, &values.narrow(0, end, size - end)?), -1.0)?;
            }
            values.slice_set(&inverse.matmul(&rows)?, 0, start)?;
        }
        for ((start, width), inverse) in blocks() {
            let mut rows = values.narrow(0, start, width)?.broadcast_div(&self.divisors.narrow(0, start, width)?)?;
            if start > 0 {
                let ratios = self.ratios.narrow(0, 0, start)?.narrow(1, start, width)?.t()?;
                rows = with_product(rows, (&ratios, &values.narrow(0, 0, start)?), -1.0)?;
            }
            values.slice_set(&inverse.t()?.matmul(&rows)?, 0, start)?;
        }
        Ok(())
    }

    /// The values that `rule` chooses for the columns of a weight `[size, rows]` in processing order, block
    /// by block. Blocks are rounded to integers on the device, and otherwise on the host.
    pub fn apply<S: Fn(f64) -> f32 + Send + Sync>(&self, weight: &Tensor, block: usize, rule: &mut ColumnSolver<S>) -> Result<Tensor> {
        let size = self.costs.len();
        let weights = weight.index_select(&self.order[0], 0)?;
        let (solved, errors) = (weights.zeros_like()?, weights.zeros_like()?);
        let grid = match (rule.zeros, &rule.grid) {
            (Zeros::None, Some(grid)) => GridTensors::new(grid, grid.order, &rule.zeroed, weights.device())?,
            _ => None,
        };
        for first in (0..size).step_by(block.max(1)) {
            let width = block.min(size - first);
            let rows = |tensor: &Tensor| tensor.narrow(0, first, width);
            let mut targets = rows(&weights)?;
            if first > 0 {
                let ratios = self.ratios.narrow(0, 0, first)?.narrow(1, first, width)?.t()?;
                targets = with_product(targets.copy()?, (&ratios, &errors.narrow(0, 0, first)?), 1.0)?;
            }
            let ratios = part(&self.ratios, (first, width), (first, width))?;
            let columns = grid.as_ref().map(|grid| grid.columns(first, width)).transpose()?;
            let operands = [&targets, &rows(&weights)?, &ratios];
            let rounded = match &columns {
                Some(columns) => gpu::round_columns(operands, columns.parameters(), &rows(&solved)?, &rows(&errors)?)?,
                None => None,
            };
            if rounded.is_none() {
                let [values, lost] = self.apply_on_host(operands, first, rule)?;
                solved.slice_set(&values, 0, first)?;
                errors.slice_set(&lost, 0, first)?;
            }
        }
        solved.index_select(&self.order[1], 0)
    }

    /// The values of a block of columns that `rule` chooses, and their errors.
    fn apply_on_host<S: Fn(f64) -> f32 + Send + Sync>(&self, operands: [&Tensor; 3], first: usize, rule: &mut ColumnSolver<S>) -> Result<[Tensor; 2]> {
        let [targets, weights, ratios] = operands;
        let (width, rows) = weights.dims2()?;
        let [mut targets, mut values] = [by_row(targets)?, by_row(weights)?];
        let mut errors = vec![0f32; values.len()];
        let ratios = transfer::values::<f32>(ratios, Cause::Statistics)?;
        let block = Block { ratios: Ratios { values: &ratios, stride: width }, first, costs: &self.costs[first..first + width] };
        block.apply(&mut values, &mut errors, (width, 0), &mut targets, rule);
        let device = weights.device();
        Ok([by_column(&values, (rows, width), device)?, by_column(&errors, (rows, width), device)?])
    }
}

/// The factors of a matrix after `added` is added to its diagonal, computed in `dtype`.
fn unit_factors(matrix: &Tensor, dtype: DType, added: f64) -> Result<UnitFactors> {
    // The factorization overwrites its matrix.
    let matrix = if matrix.dtype() == dtype { matrix.copy()? } else { matrix.to_dtype(dtype)? };
    if let Some(found) = gpu::unit_factors(&matrix, added)? {
        return Ok(found);
    }
    let (size, device) = (matrix.dim(0)?, matrix.device().clone());
    let tensor = |values: &[f64], shape: &[usize]| transfer::from_slice(values, shape, &device, Cause::Statistics);
    let ratios = Tensor::zeros((size, size), DType::F32, &device)?;
    let (mut rest, mut inverses, mut costs) = (matrix, Vec::new(), Vec::new());
    for first in (0..size).step_by(FACTORIZED).rev() {
        let width = FACTORIZED.min(size - first);
        let mut square = transfer::values::<f64>(&part(&rest, (first, width), (first, width))?, Cause::Statistics)?;
        square.iter_mut().step_by(width + 1).for_each(|value| *value += added);
        let [triangle, diagonal, inverse] = compensation::unit_factors(&square, width);
        let (diagonal, inverse) = (tensor(&diagonal, &[width])?, tensor(&inverse, &[width, width])?);
        let mut columns = Vec::with_capacity(3);
        if first > 0 {
            let panel = part(&rest, (0, first), (first, width))?.matmul(&inverse.t()?.broadcast_div(&diagonal)?.to_dtype(dtype)?)?;
            let update = panel.broadcast_mul(&diagonal.to_dtype(dtype)?)?.matmul(&panel.t()?)?;
            rest = (rest.narrow(0, 0, first)?.narrow(1, 0, first)? - update)?;
            columns.push(panel.to_dtype(DType::F32)?);
        }
        columns.push(tensor(&triangle, &[width, width])?.to_dtype(DType::F32)?);
        if first + width < size {
            columns.push(Tensor::zeros((size - first - width, width), DType::F32, &device)?);
        }
        ratios.slice_set(&Tensor::cat(&columns, 0)?, 1, first)?;
        inverses.push(inverse.to_dtype(DType::F32)?);
        costs.push(diagonal);
    }
    inverses.reverse();
    costs.reverse();
    let costs = if costs.is_empty() { Tensor::zeros(0, DType::F64, &device)? } else { Tensor::cat(&costs, 0)? };
    Ok(UnitFactors { ratios, inverses, costs })
}

/// A matrix plus a factor times a product, computed in place on a GPU, where the matrix must not share memory
/// with the others.
fn with_product(matrix: Tensor, (a, b): (&Tensor, &Tensor), factor: f64) -> Result<Tensor> {
    match gpu::add_product(&matrix, a, b, factor)? {
        Some(()) => Ok(matrix),
        None => matrix + (product(a, b)? * factor)?,
    }
}

/// The product of two matrices, of which each has a contiguous axis on a GPU.
pub(super) fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match gpu::product(a, b)? {
        Some(product) => Ok(product),
        None => a.contiguous()?.matmul(&b.contiguous()?),
    }
}

/// Consecutive rows and columns of a matrix, given by the first one and the number, contiguous: a copy unless
/// they already are.
pub(super) fn part(matrix: &Tensor, (row, rows): (usize, usize), (column, columns): (usize, usize)) -> Result<Tensor> {
    let view = matrix.narrow(0, row, rows)?.narrow(1, column, columns)?;
    if view.is_contiguous() {
        return Ok(view);
    }
    match gpu::contiguous(&view.unsqueeze(0)?.unsqueeze(0)?)? {
        Some(copy) => copy.reshape((rows, columns)),
        None => view.contiguous(),
    }
}

pub(super) fn indices(indices: Vec<u32>, device: &Device) -> Result<Tensor> {
    transfer::from_slice(&indices, indices.len(), device, Cause::Statistics)
}

pub(super) fn upload(values: &[f32], shape: (usize, usize), device: &Device) -> Result<Tensor> {
    transfer::from_slice(values, shape, device, Cause::Statistics)
}

pub(super) fn download(tensor: &Tensor, values: &mut [f32]) -> Result<()> {
    transfer::copy_to(tensor, values, Cause::Statistics)
}

/// A block `[width, rows]` on the host, row by row of the weight.
pub(super) fn by_row(block: &Tensor) -> Result<Vec<f32>> {
    transfer::values(&block.t()?.contiguous()?, Cause::Statistics)
}

/// A block `[width, rows]` from rows of the weight, on the device.
pub(super) fn by_column(values: &[f32], shape: (usize, usize), device: &Device) -> Result<Tensor> {
    upload(values, shape, device)?.t()?.contiguous()
}

/// An integer grid on a device.
pub(super) struct GridTensors {
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    zeroed: Option<Tensor>,
    bounds: (f32, f32),
}

impl GridTensors {
    /// The grid with columns in the given order, and a pruning mask `[rows, size]` in the same order, which
    /// may be empty. `None` on the CPU, and for levels that are not integers.
    pub fn new<S>(grid: &Grid<S>, order: &[usize], zeroed: &[bool], device: &Device) -> Result<Option<GridTensors>> {
        let Levels::Integers(integers) = grid.levels else { return Ok(None) };
        if device.is_cpu() {
            return Ok(None);
        }
        let shape = (grid.steps.len() / order.len().div_ceil(grid.group.max(1)).max(1), order.len().div_ceil(grid.group.max(1)));
        let [scales, zeros]: [Vec<f32>; 2] = [grid.steps.iter().map(|step| step.scale).collect(), grid.steps.iter().map(|step| step.zero).collect()];
        let groups = order.iter().map(|column| (column / grid.group) as u32).collect();
        let mask = || {
            let mask: Vec<u8> = zeroed.iter().map(|zeroed| u8::from(*zeroed)).collect();
            transfer::from_slice(&mask, (shape.0, order.len()), device, Cause::Statistics)?.t()?.contiguous()
        };
        Ok(Some(GridTensors {
            scales: upload(&scales, shape, device)?,
            zeros: upload(&zeros, shape, device)?,
            groups: indices(groups, device)?,
            zeroed: if zeroed.is_empty() { None } else { Some(mask()?) },
            bounds: integers.bounds(),
        }))
    }

    /// The grid of consecutive columns.
    pub fn columns(&self, first: usize, width: usize) -> Result<GridTensors> {
        let zeroed = self.zeroed.as_ref().map(|zeroed| zeroed.narrow(0, first, width)).transpose()?;
        let (scales, zeros) = (self.scales.clone(), self.zeros.clone());
        Ok(GridTensors { scales, zeros, groups: self.groups.narrow(0, first, width)?, zeroed, bounds: self.bounds })
    }

    pub fn parameters(&self) -> ColumnGrid<'_> {
        ColumnGrid { scales: &self.scales, zeros: &self.zeros, groups: &self.groups, zeroed: self.zeroed.as_ref(), bounds: self.bounds }
    }
}
