//! Activation statistics reduced on the device: only extremes, sums and counts are copied to the host.

use candle_core::{DType, Device, Result, Tensor};

use crate::exec::transfer::{self, Cause};
use crate::ir::ops::ScalarOps;

/// Elements per counting pass. The counts are `f32`, which represents every integer up to 2²⁴ exactly.
const MAX_CHUNK_ELEMENTS: usize = 1 << 24;
/// Columns per scatter operation.
const MAX_COLUMNS: usize = 1 << 11;

/// Extremes, sums and sums of squares of each column.
pub(super) struct ColumnStats {
    pub low: Vec<f32>,
    pub high: Vec<f32>,
    pub sums: Vec<f64>,
    pub squares: Vec<f64>,
}

impl ColumnStats {
    /// Reduces `f32` rows of shape `[rows, columns]`.
    pub fn from_rows(rows: &Tensor) -> Result<ColumnStats> {
        let wide = rows.to_dtype(DType::F64)?;
        let (sums, squares) = (fetch(&wide.sum(0)?)?, fetch(&wide.sqr()?.sum(0)?)?);
        Ok(ColumnStats { low: fetch(&rows.min(0)?)?, high: fetch(&rows.max(0)?)?, sums, squares })
    }

    /// The minimum and maximum over all columns.
    pub fn extremes(&self) -> (f32, f32) {
        (self.low.iter().copied().fold(f32::INFINITY, f32::min), self.high.iter().copied().fold(f32::NEG_INFINITY, f32::max))
    }

    /// The first sum of squares that is not finite. Squares of finite `f32` values are finite in `f64`,
    /// so this detects NaN and infinity.
    pub fn non_finite(&self) -> Option<f64> {
        self.squares.iter().copied().find(|sum| !sum.is_finite())
    }
}

fn fetch<T: candle_core::WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    transfer::values(tensor, Cause::Statistics)
}

/// Splits rows into chunks of at most [`MAX_CHUNK_ELEMENTS`] elements.
pub(super) fn row_chunks(rows: &Tensor) -> Result<Vec<Tensor>> {
    let (count, width) = rows.dims2()?;
    let step = (MAX_CHUNK_ELEMENTS / width.max(1)).max(1);
    let step = if step > MAX_COLUMNS { step - step % MAX_COLUMNS } else { step };
    (0..count).step_by(step).map(|first| rows.narrow(0, first, step.min(count - first))).collect()
}

/// Selects rows by index. The indices are ascending and distinct.
pub fn select_rows(rows: &Tensor, indices: Vec<u32>) -> Result<Tensor> {
    let count = indices.len();
    if count == rows.dim(0)? || count == 0 {
        return rows.narrow(0, 0, count);
    }
    rows.index_select(&transfer::to_device(&Tensor::from_vec(indices, count, &Device::Cpu)?, rows.device(), Cause::Statistics)?, 0)
}

/// Histogram counts of each column (`[columns, 2 · half]`), or of all columns in one histogram if
/// `pooled`. The bins are centred on zero and have the width `1 / inverse` of the column.
pub(super) fn histogram_counts(rows: &Tensor, inverses: &[f32], half: i32, pooled: bool) -> Result<Vec<u64>> {
    let (count, width) = rows.dims2()?;
    // For few columns, several rows are counted in parallel lanes.
    let lanes = (MAX_COLUMNS / width.max(1)).max(1);
    let full = count - count % lanes;
    let mut all = vec![0; if pooled { 1 } else { width } * 2 * half as usize];
    for (rows, lanes) in [(rows.narrow(0, 0, full)?, lanes), (rows.narrow(0, full, count - full)?, 1)] {
        if rows.elem_count() > 0 {
            add_counts(&mut all, &rows, lanes, inverses, half, pooled)?;
        }
    }
    Ok(all)
}

/// Adds the histogram counts of rows to `all`. The number of rows is a multiple of `lanes`.
fn add_counts(all: &mut [u64], rows: &Tensor, lanes: usize, inverses: &[f32], half: i32, pooled: bool) -> Result<()> {
    let (count, width) = rows.dims2()?;
    for first in (0..width).step_by(MAX_COLUMNS) {
        let columns = MAX_COLUMNS.min(width - first);
        let values = rows.narrow(1, first, columns)?.contiguous()?.reshape((count / lanes, lanes, columns))?;
        let scales = transfer::to_device(&Tensor::new(&inverses[first..first + columns], &Device::Cpu)?, rows.device(), Cause::Statistics)?;
        let bins = values.broadcast_mul(&scales)?.floor()?.affine(1.0, f64::from(half))?.clamp_scalar(0.0, f64::from(2 * half - 1))?.to_dtype(DType::U32)?;
        let zeros = Tensor::zeros((2 * half as usize, lanes, columns), DType::F32, rows.device())?;
        let counts = zeros.scatter_add(&bins, &values.ones_like()?, 0)?.sum(1)?;
        let counts: Vec<f32> = fetch(&if pooled { counts.sum_keepdim(1)? } else { counts }.t()?)?;
        let offset = if pooled { 0 } else { first * 2 * half as usize };
        all[offset..].iter_mut().zip(counts).for_each(|(sum, count)| *sum += count as u64);
    }
    Ok(())
}
