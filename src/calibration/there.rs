//! Statistics of values on a device, made where they are: extremes, sums and counts come back, never the values.

use candle_core::{DType, Device, Result, Tensor};

use crate::exec::transfer::{self, Cause};

/// Values that are counted at once: floats of 32 bits know every number up to here.
const AT_ONCE: usize = 1 << 24;
/// Columns that are counted side by side.
const LANES: usize = 1 << 11;

/// What the columns of a value are like.
pub(super) struct Columns {
    pub low: Vec<f32>,
    pub high: Vec<f32>,
    pub sums: Vec<f64>,
    pub squares: Vec<f64>,
}

impl Columns {
    /// Of rows of floats, `[rows, columns]`.
    pub fn of(rows: &Tensor) -> Result<Columns> {
        let wide = rows.to_dtype(DType::F64)?;
        let (sums, squares) = (fetched(&wide.sum(0)?)?, fetched(&wide.sqr()?.sum(0)?)?);
        Ok(Columns { low: fetched(&rows.min(0)?)?, high: fetched(&rows.max(0)?)?, sums, squares })
    }

    /// The smallest and the largest value of all.
    pub fn extremes(&self) -> (f32, f32) {
        (self.low.iter().copied().fold(f32::INFINITY, f32::min), self.high.iter().copied().fold(f32::NEG_INFINITY, f32::max))
    }

    /// Whether all values are finite: squares of finite ones are, as doubles.
    pub fn are_finite(&self) -> bool {
        self.squares.iter().all(|sum| sum.is_finite())
    }
}

fn fetched<T: candle_core::WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    transfer::values(tensor, Cause::Statistics)
}

/// Rows in parts that are looked at one after the other.
pub(super) fn in_parts(rows: &Tensor) -> Result<Vec<Tensor>> {
    let (count, width) = rows.dims2()?;
    let step = (AT_ONCE / width.max(1)).max(1);
    (0..count).step_by(step).map(|first| rows.narrow(0, first, step.min(count - first))).collect()
}

/// Rows of a tensor, by their numbers.
pub(super) fn rows_of(rows: &Tensor, numbers: Vec<u32>) -> Result<Tensor> {
    if numbers.len() == rows.dim(0)? {
        return Ok(rows.clone());
    }
    let count = numbers.len();
    rows.index_select(&transfer::to_device(&Tensor::from_vec(numbers, count, &Device::Cpu)?, rows.device(), Cause::Batch)?, 0)
}

/// How many values of each column lie in each of `2 · half` bins around zero, whose width is `1 / inverse` of the column; or of all columns
/// together. Column by column.
pub(super) fn counts(rows: &Tensor, inverses: &[f32], half: i32, together: bool) -> Result<Vec<u64>> {
    let (count, width) = rows.dims2()?;
    let mut all = Vec::new();
    for first in (0..width).step_by(LANES) {
        let columns = LANES.min(width - first);
        // Where there are few columns, some rows are counted side by side.
        let beside = (1usize << count.trailing_zeros().min(31)).min((LANES / columns).next_power_of_two());
        let values = rows.narrow(1, first, columns)?.contiguous()?.reshape((count / beside, beside, columns))?;
        let scales = transfer::to_device(&Tensor::new(&inverses[first..first + columns], &Device::Cpu)?, rows.device(), Cause::Batch)?;
        let numbers = values.broadcast_mul(&scales)?.floor()?.affine(1.0, f64::from(half))?.clamp(0f32, (2 * half - 1) as f32)?.to_dtype(DType::U32)?;
        let none = Tensor::zeros((2 * half as usize, beside, columns), DType::F32, rows.device())?;
        let found = none.scatter_add(&numbers, &values.ones_like()?, 0)?.sum(1)?;
        let found: Vec<f32> = fetched(&if together { found.sum_keepdim(1)? } else { found }.t()?)?;
        match together && first > 0 {
            true => all.iter_mut().zip(found).for_each(|(sum, found)| *sum += found as u64),
            false => all.extend(found.into_iter().map(|found| found as u64)),
        }
    }
    Ok(all)
}
