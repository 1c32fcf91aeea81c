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

    /// What is no finite number among the values: squares of finite ones are finite, as doubles.
    pub fn odd(&self) -> Option<f64> {
        self.squares.iter().copied().find(|sum| !sum.is_finite())
    }
}

fn fetched<T: candle_core::WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    transfer::values(tensor, Cause::Statistics)
}

/// Rows in parts that are looked at one after the other.
pub(super) fn in_parts(rows: &Tensor) -> Result<Vec<Tensor>> {
    let (count, width) = rows.dims2()?;
    let step = (AT_ONCE / width.max(1)).max(1);
    let step = if step > LANES { step - step % LANES } else { step };
    (0..count).step_by(step).map(|first| rows.narrow(0, first, step.min(count - first))).collect()
}

/// Rows of a tensor, by their numbers.
pub(super) fn rows_of(rows: &Tensor, numbers: Vec<u32>) -> Result<Tensor> {
    let count = numbers.len();
    if count == rows.dim(0)? || count == 0 {
        return rows.narrow(0, 0, count);
    }
    rows.index_select(&transfer::to_device(&Tensor::from_vec(numbers, count, &Device::Cpu)?, rows.device(), Cause::Statistics)?, 0)
}

/// How many values of each column lie in each of `2 · half` bins around zero, whose width is `1 / inverse` of the column; or of all columns
/// together. Column by column.
pub(super) fn counts(rows: &Tensor, inverses: &[f32], half: i32, together: bool) -> Result<Vec<u64>> {
    let (count, width) = rows.dims2()?;
    // Where there are few columns, some rows are counted side by side.
    let beside = (LANES / width.max(1)).max(1);
    let whole = count - count % beside;
    let mut all = vec![0; if together { 1 } else { width } * 2 * half as usize];
    for (rows, beside) in [(rows.narrow(0, 0, whole)?, beside), (rows.narrow(0, whole, count - whole)?, 1)] {
        if rows.elem_count() > 0 {
            count_in(&mut all, &rows, beside, inverses, half, together)?;
        }
    }
    Ok(all)
}

/// Adds what is counted of rows, some of them side by side.
fn count_in(all: &mut [u64], rows: &Tensor, beside: usize, inverses: &[f32], half: i32, together: bool) -> Result<()> {
    let (count, width) = rows.dims2()?;
    for first in (0..width).step_by(LANES) {
        let columns = LANES.min(width - first);
        let values = rows.narrow(1, first, columns)?.contiguous()?.reshape((count / beside, beside, columns))?;
        let scales = transfer::to_device(&Tensor::new(&inverses[first..first + columns], &Device::Cpu)?, rows.device(), Cause::Statistics)?;
        let numbers = values.broadcast_mul(&scales)?.floor()?.affine(1.0, f64::from(half))?.clamp(0f32, (2 * half - 1) as f32)?.to_dtype(DType::U32)?;
        let none = Tensor::zeros((2 * half as usize, beside, columns), DType::F32, rows.device())?;
        let found = none.scatter_add(&numbers, &values.ones_like()?, 0)?.sum(1)?;
        let found: Vec<f32> = fetched(&if together { found.sum_keepdim(1)? } else { found }.t()?)?;
        let place = if together { 0 } else { first * 2 * half as usize };
        all[place..].iter_mut().zip(found).for_each(|(sum, found)| *sum += found as u64);
    }
    Ok(())
}
