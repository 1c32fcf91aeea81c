//! Sums of rows by index: the gradient of a lookup table.

use candle_core::{DType, Result, Tensor};

use super::on_host;
use crate::gpu;

/// Up to this number of target rows, [`sum_rows_by_index`] multiplies by a one-hot matrix on a device.
const FEW_ROWS: usize = 4096;
/// Number of elements of the one-hot matrix in memory at a time.
const ONE_HOT: usize = if cfg!(test) { 64 } else { 1 << 24 };

/// Sums rows `[n, width]` by their indices `[n]`. Returns `[count, width]`: row `i` is the sum of all rows
/// with index `i`.
pub fn sum_rows_by_index(rows: &Tensor, indices: &Tensor, count: usize) -> Result<Tensor> {
    if rows.device().is_cuda()
        && let Some(sums) = gpu::sum_rows_by_index(&rows.contiguous()?, indices, count)?
    {
        return Ok(sums);
    }
    // candle's `index_add` on a GPU has one thread per column, which walks over all indices.
    if on_host(rows.device()) || count > FEW_ROWS {
        Tensor::zeros((count, rows.dim(1)?), rows.dtype(), rows.device())?.index_add(indices, rows, 0)
    } else {
        sum_rows_by_product(rows, indices, count)
    }
}

fn sum_rows_by_product(rows: &Tensor, indices: &Tensor, count: usize) -> Result<Tensor> {
    let (n, piece) = (rows.dim(0)?, (ONE_HOT / count.max(1)).max(1));
    let targets = Tensor::arange(0u32, count as u32, rows.device())?.unsqueeze(1)?;
    let indices = indices.to_dtype(DType::U32)?.unsqueeze(0)?;
    let mut sum = Tensor::zeros((count, rows.dim(1)?), rows.dtype(), rows.device())?;
    for at in (0..n).step_by(piece) {
        let length = piece.min(n - at);
        let one_hot = targets.broadcast_eq(&indices.narrow(1, at, length)?)?.to_dtype(rows.dtype())?;
        sum = (sum + one_hot.matmul(&rows.narrow(0, at, length)?.contiguous()?)?)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn index_add_and_one_hot_product_agree() {
        for (n, count) in [(1, 1), (5, 3), (50, 7), (33, 100)] {
            let values: Vec<f32> = (0..n * 3).map(|i| i as f32).collect();
            let rows = Tensor::from_vec(values, (n, 3), &Device::Cpu).unwrap();
            let indices = Tensor::from_vec((0..n).map(|i| (i * i % count) as u32).collect::<Vec<_>>(), n, &Device::Cpu).unwrap();
            let expected = sum_rows_by_index(&rows, &indices, count).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(sum_rows_by_product(&rows, &indices, count).unwrap().to_vec2::<f32>().unwrap(), expected, "{n} {count}");
            let by_hand: f32 = (0..n).filter(|i| i * i % count == 0).map(|i| (i * 3) as f32).sum();
            assert_eq!(expected[0][0], by_hand);
        }
    }
}
