//! Logits of a teacher of which the largest are cached.

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor};
use half::f16;
use rayon::prelude::*;

use super::cache::{Cache, Entries, ZERO_PROBABILITY};
use super::floats::read;
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::on_host;
use crate::kernel::cross_entropy::log_sum;

/// A logit without a share of the sum of exponentials.
const MASKED: f32 = -1e30;

/// The cached columns of rows: `top` logits of each, and the logarithm of the probability of all others.
struct Rows<'e> {
    top: usize,
    temperature: f64,
    logits: &'e [(u32, f16)],
    rest: &'e [f16],
}

impl Cache {
    /// The teacher's logits for some rows of `entries`, for the student's logits `[rows, columns]`, on
    /// their device. Logits that are not cached differ from the student's by a constant, so that they have
    /// the cached probability together. Fails if a column index is out of range.
    pub fn logits(&self, entries: &Entries, rows: Range<usize>, student: &Tensor) -> Result<Tensor> {
        let (count, columns) = student.dims2()?;
        let logits = entries.logits.get(rows.start * self.top..rows.end * self.top);
        let (Some(logits), Some(rest)) = (logits.filter(|_| rows.len() == count), entries.rest.get(rows)) else {
            candle_core::bail!("{count} rows of logits are needed, but others are cached")
        };
        if logits.iter().any(|(column, _)| *column as usize >= columns) {
            candle_core::bail!("the cached logits are from a teacher with more than {columns} columns");
        }
        let rows = Rows { top: self.top, temperature: self.temperature, logits, rest };
        let student = student.to_dtype(DType::F32)?.contiguous()?;
        if on_host(student.device()) { rows.complete_on_host(&student) } else { rows.complete(&student) }
    }
}

impl Rows<'_> {
    /// All logits, in one pass over each row.
    fn complete_on_host(&self, student: &Tensor) -> Result<Tensor> {
        let (count, columns) = student.dims2()?;
        let mut completed = vec![0f32; count * columns];
        read(student, |student| {
            let cached = self.logits.par_chunks_exact(self.top.max(1)).zip(self.rest);
            let student = student.par_chunks_exact(columns.max(1));
            let rows = completed.par_chunks_exact_mut(columns.max(1)).zip(student).zip(cached);
            rows.for_each(|((out, student), (logits, rest))| complete_row(student, (logits, *rest), self.temperature as f32, out));
            Ok(())
        })?;
        Tensor::from_vec(completed, (count, columns), student.device())
    }

    /// All logits, by tensor operations.
    fn complete(&self, student: &Tensor) -> Result<Tensor> {
        let (count, device) = (student.dim(0)?, student.device());
        let on_device = |tensor: Tensor| transfer::to_device(&tensor, device, Cause::Answers);
        let shape = (count, self.top);
        let indices = on_device(Tensor::from_vec(self.logits.iter().map(|(column, _)| *column).collect::<Vec<u32>>(), shape, &Device::Cpu)?)?;
        let values = on_device(Tensor::from_vec(self.logits.iter().map(|(_, value)| value.to_f32()).collect::<Vec<f32>>(), shape, &Device::Cpu)?)?;
        let rest = on_device(Tensor::from_vec(self.rest.iter().map(|rest| exponent(*rest)).collect::<Vec<f32>>(), (count, 1), &Device::Cpu)?)?;
        let masked = Tensor::full(MASKED, shape, device)?;
        let scaled = (student.scatter(&indices, &masked, 1)? / self.temperature)?;
        let largest = scaled.max_keepdim(D::Minus1)?;
        let sum = (scaled.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?.log()? + largest)?;
        let others = (scaled.broadcast_add(&(rest - sum)?)? * self.temperature)?;
        others.scatter(&indices, &values, 1)
    }
}

/// A finite logarithm of the probability of the columns that are not cached.
fn exponent(rest: f16) -> f32 {
    rest.max(ZERO_PROBABILITY).to_f32()
}

/// Writes the logits of a row to `out`.
fn complete_row(student: &[f32], (logits, rest): (&[(u32, f16)], f16), temperature: f32, out: &mut [f32]) {
    let set = |out: &mut [f32], value: &dyn Fn(f16) -> f32| {
        for (column, logit) in logits {
            if let Some(out) = out.get_mut(*column as usize) {
                *out = value(*logit);
            }
        }
    };
    out.copy_from_slice(student);
    set(out, &|_| MASKED);
    let shift = (exponent(rest) - log_sum(out, 1.0 / temperature)) * temperature;
    out.iter_mut().for_each(|x| *x += shift);
    set(out, &f16::to_f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_on_the_host_equal_tensor_operations() {
        let (count, columns, top) = (5, 77, 4);
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 512.0 - 4.0;
        let student = Tensor::from_vec((0..count * columns).map(number).collect::<Vec<_>>(), (count, columns), &Device::Cpu).unwrap();
        let logits: Vec<(u32, f16)> = (0..count * top).map(|i| ((i % top * 19 + i / top) as u32, f16::from_f32(-number(i).abs()))).collect();
        // The largest logits have the whole probability in the last row.
        let rest: Vec<f16> = (0..count).map(|row| if row + 1 == count { f16::NEG_INFINITY } else { f16::from_f32(-(row as f32)) }).collect();
        for temperature in [1.0, 2.0] {
            let rows = Rows { top, temperature, logits: &logits, rest: &rest };
            let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let (found, expected) = (values(rows.complete_on_host(&student).unwrap()), values(rows.complete(&student).unwrap()));
            for (at, (a, b)) in found.iter().zip(&expected).enumerate() {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{at}: {a} and {b}");
            }
            for (column, logit) in &logits[..top] {
                assert_eq!(found[*column as usize], logit.to_f32());
            }
        }
    }
}
