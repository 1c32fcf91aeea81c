//! Backward passes of normalization and softmax, row by row, and column sums.

use rayon::prelude::*;

use super::matmul_gradient::sum_parts;
use super::rows::sum;

/// Number of elements summed by one job.
const CHUNK: usize = 1 << 15;
/// Number of jobs that share an embedding table.
const JOBS: usize = 16;

/// Sum of a term over two rows, with the same number of lanes as other sums of rows.
#[inline(always)]
fn sum_of_products(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0f32; 32];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<32>(), b.as_chunks::<32>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..32 {
            lanes[lane] += term(a[lane], b[lane]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane += term(*a, *b);
    }
    lanes.iter().sum()
}

simd! {
    /// Rows of [`layer_norm`](super::rows::layer_norm): writes the gradient of the input, and adds the
    /// gradients of weight and bias, concatenated, to `sums`. Either may be empty.
    pub fn layer_norm(input: &[f32], gradient: &[f32], weight: &[f32], epsilon: f32, output: &mut [f32], sums: &mut [f32]) {
        let width = weight.len().max(1);
        let mut weighted = vec![0f32; width];
        for (index, (row, gradient)) in input.chunks_exact(width).zip(gradient.chunks_exact(width)).enumerate() {
            let mean = sum(row, |x| x) / width as f32;
            let variance = sum(row, |x| (x - mean) * (x - mean)) / width as f32;
            let scale = 1.0 / (variance + epsilon).sqrt();
            if !sums.is_empty() {
                let (weights, biases) = sums.split_at_mut(width);
                for (((weight, bias), x), g) in weights.iter_mut().zip(biases).zip(row).zip(gradient) {
                    *weight += (x - mean) * scale * g;
                    *bias += g;
                }
            }
            if let Some(out) = output.get_mut(index * width..(index + 1) * width) {
                for ((weighted, weight), g) in weighted.iter_mut().zip(weight).zip(gradient) {
                    *weighted = weight * g;
                }
                let plain = sum(&weighted, |g| g) / width as f32;
                let along = sum_of_products(row, &weighted, |x, g| (x - mean) * g) * scale * scale / width as f32;
                for ((out, x), g) in out.iter_mut().zip(row).zip(&weighted) {
                    *out = (g - plain - (x - mean) * along) * scale;
                }
            }
        }
    }
}

simd! {
    /// As [`layer_norm`], for [`rms_norm`](super::rows::rms_norm), which has no bias.
    pub fn rms_norm(input: &[f32], gradient: &[f32], weight: &[f32], epsilon: f32, output: &mut [f32], sums: &mut [f32]) {
        let width = weight.len().max(1);
        let mut weighted = vec![0f32; width];
        for (index, (row, gradient)) in input.chunks_exact(width).zip(gradient.chunks_exact(width)).enumerate() {
            let scale = 1.0 / (sum(row, |x| x * x) / width as f32 + epsilon).sqrt();
            for ((weight, x), g) in sums.iter_mut().zip(row).zip(gradient) {
                *weight += x * scale * g;
            }
            if let Some(out) = output.get_mut(index * width..(index + 1) * width) {
                for ((weighted, weight), g) in weighted.iter_mut().zip(weight).zip(gradient) {
                    *weighted = weight * g;
                }
                let along = sum_of_products(row, &weighted, |x, g| x * g) * scale * scale / width as f32;
                for ((out, x), g) in out.iter_mut().zip(row).zip(&weighted) {
                    *out = (g - x * along) * scale;
                }
            }
        }
    }
}

simd! {
    /// Replaces the gradient `g` of a softmax's result `y` by `y (g - Σ y g) · scale`, row by row.
    pub fn softmax(result: &[f32], gradient: &mut [f32], width: usize, scale: f32) {
        let width = width.max(1);
        for (y, g) in result.chunks_exact(width).zip(gradient.chunks_exact_mut(width)) {
            let along = sum_of_products(y, g, |y, g| y * g);
            for (g, y) in g.iter_mut().zip(y) {
                *g = y * (*g - along) * scale;
            }
        }
    }
}

simd! {
    fn add_rows(rows: &[f32], sums: &mut [f32]) {
        for row in rows.chunks_exact(sums.len().max(1)) {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x;
            }
        }
    }
}

/// Number of rows per job.
pub fn rows_of_job(width: usize) -> usize {
    (CHUNK / width.max(1)).max(1)
}

/// Sums the columns of rows, whose width is the length of `sums`, in jobs of [`rows_of_job`] rows.
pub fn column_sums(rows: &[f32], sums: &mut [f32]) {
    let width = sums.len().max(1);
    let parts: Vec<Vec<f32>> = rows
        .par_chunks(rows_of_job(width) * width)
        .map(|rows| {
            let mut sums = vec![0.0; width];
            add_rows(rows, &mut sums);
            sums
        })
        .collect();
    sum_parts(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>(), sums);
}

/// Adds rows to the rows of a table with the given indices, in order.
pub fn scatter_rows(indices: &[i64], rows: &[f32], width: usize, table: &mut [f32]) {
    // Every job handles a range of indices, so that rows of one index are added in order for any number
    // of threads.
    let count = (table.len() / width.max(1)).div_ceil(JOBS).max(1);
    table.par_chunks_mut((count * width).max(1)).enumerate().for_each(|(job, table)| {
        for (index, row) in indices.iter().zip(rows.chunks_exact(width.max(1))) {
            let position = usize::try_from(*index).ok().and_then(|index| index.checked_sub(job * count));
            if let Some(sums) = position.and_then(|position| table.get_mut(position * width..(position + 1) * width)) {
                add_rows(row, sums);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_by_hand() {
        let mut output = [0.0; 2];
        // (x - mean) / deviation is (-1, 1) for any input, so only the gradients of weight and bias are
        // nonzero.
        let mut sums = [0.0; 4];
        layer_norm(&[1.0, 3.0], &[2.0, 5.0], &[1.0, 1.0], 0.0, &mut output, &mut sums);
        assert_eq!((output, sums), ([0.0, 0.0], [-2.0, 5.0, 2.0, 5.0]));
        let mut sums = [0.0; 2];
        rms_norm(&[3.0, -3.0], &[2.0, 5.0], &[1.0, 1.0], 0.0, &mut output, &mut sums);
        assert_eq!(sums, [2.0, -5.0]);
        assert!((output[0] - 7.0 / 6.0).abs() < 1e-6 && (output[1] - 7.0 / 6.0).abs() < 1e-6, "{output:?}");
        let mut gradient = [1.0, 3.0];
        softmax(&[0.5, 0.5], &mut gradient, 2, 2.0);
        assert_eq!(gradient, [-1.0, 1.0]);
    }

    #[test]
    fn rows_are_scattered_by_index() {
        let mut table = [0.0; 40];
        scatter_rows(&[3, 19, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, &mut table);
        assert_eq!((&table[6..8], &table[38..], table.iter().sum::<f32>()), (&[6.0, 8.0][..], &[3.0, 4.0][..], 21.0));
    }

    #[test]
    fn column_sums_are_independent_of_threads() {
        let values: Vec<f32> = (0..3000u32 * 70).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 / 4096.0).collect();
        let compute = |threads| {
            let mut sums = vec![f32::NAN; 70];
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| column_sums(&values, &mut sums));
            sums
        };
        assert_eq!(compute(1), compute(2));
        let want: f64 = values.iter().step_by(70).map(|x| f64::from(*x)).sum();
        assert!((f64::from(compute(1)[0]) - want).abs() < 1e-2);
    }
}
