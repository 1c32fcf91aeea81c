//! Relative position bias of attention.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::decoding::{DecodingState, Forward, Incremental};
use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, require, require_floats, require_rank};
use crate::ir::{Element, TensorType};

/// Relative position bias (Raffel et al., 2020; MPNet): tokens `[batch, sequence]`, of which only the
/// shape is read, and a table `[rows, heads]` to `[heads, sequence, sequence]`.
///
/// Small distances have a row each. Larger distances share rows on a logarithmic scale up to
/// `max_distance`, from which on all have the last row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RelativeBias {
    /// Number of rows of the table.
    pub buckets: usize,
    /// The distance from which on all distances share one row.
    pub max_distance: usize,
    /// Whether keys after the query use the second half of the rows; otherwise they all use the first
    /// row.
    pub both_ways: bool,
}

impl Default for RelativeBias {
    fn default() -> Self {
        Self { buckets: 32, max_distance: 128, both_ways: true }
    }
}

impl RelativeBias {
    /// Number of rows for one direction.
    fn rows(&self) -> usize {
        if self.both_ways { self.buckets / 2 } else { self.buckets }
    }

    /// The row for a key `behind` positions after the query.
    fn bucket(&self, behind: i64) -> usize {
        let (rows, distance) = (self.rows(), if self.both_ways { behind.unsigned_abs() } else { (-behind).max(0).unsigned_abs() } as usize);
        let first = if self.both_ways && behind > 0 { rows } else { 0 };
        let exact = rows / 2;
        if distance < exact {
            return first + distance;
        }
        // In 32 bits and in this order, as in the training code of the checkpoints.
        let part = (distance as f32 / exact as f32).ln() / (self.max_distance as f64 / exact as f64).ln() as f32;
        first + (exact + (part * (rows - exact) as f32) as usize).min(rows - 1)
    }

    /// The rows for keys from `max_distance` positions before the query to `max_distance` after it.
    pub fn by_distance(&self) -> Vec<i64> {
        let far = self.max_distance as i64;
        (-far..=far).map(|behind| self.bucket(behind) as i64).collect()
    }

    fn validate(&self) -> Result<(), String> {
        let exact = self.rows() / 2;
        if exact == 0 || self.max_distance <= exact || self.max_distance > 1 << 20 {
            return Err(format!("{} buckets with a maximum distance of {} leave no rows for shared distances", self.buckets, self.max_distance));
        }
        Ok(())
    }

    /// The row of each pair of positions, query by query, for `sequence` queries after `past` tokens.
    fn pairs(&self, past: usize, sequence: usize, device: &Device) -> candle_core::Result<Tensor> {
        let (far, rows) = (self.max_distance as i64, self.by_distance());
        let (first, end) = (past as i64, (past + sequence) as i64);
        let of = |query: i64| (0..end).map(move |key| ((key - query).clamp(-far, far) + far) as usize);
        let pairs: Vec<i64> = (first..end).flat_map(of).map(|at| rows[at]).collect();
        Tensor::from_vec(pairs, sequence * (past + sequence), device)
    }

    fn all_pairs(&self, sequence: usize, device: &Device) -> candle_core::Result<Tensor> {
        constant(format!("rows by distance {self:?} {sequence}"), device, |device| self.pairs(0, sequence, device))
    }
}

impl Incremental for RelativeBias {
    fn token_axis(&self, input: usize) -> Option<usize> {
        (input == 0).then_some(1)
    }

    fn returns_pairs(&self) -> bool {
        true
    }

    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, _forward: &Forward) -> candle_core::Result<Tensor> {
        let (past, sequence, heads) = (past.tokens(), inputs[0].dim(1)?, inputs[1].dim(1)?);
        let rows = inputs[1].index_select(&self.pairs(past, sequence, inputs[1].device())?, 0)?;
        rows.t()?.contiguous()?.reshape((heads, sequence, past + sequence))
    }
}

impl OpSpec for RelativeBias {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [tokens, table] = [inputs[0], inputs[1]];
        require(tokens, Element::Int, "the tokens")?;
        require_rank(tokens, 2, "the tokens")?;
        require_floats(table, 2, "the table")?;
        self.validate()?;
        match table.shape[0].fixed() {
            Some(rows) if rows >= self.buckets => {}
            _ => return Err(format!("the table must have at least {} rows", self.buckets)),
        }
        let sequence = tokens.shape[1].clone();
        Ok(TensorType { element: Element::Float, shape: vec![table.shape[1].clone(), sequence.clone(), sequence] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "_ s!, _ h -> h s! s!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (sequence, heads) = (inputs[0].dim(1)?, inputs[1].dim(1)?);
        let rows = inputs[1].index_select(&self.all_pairs(sequence, inputs[1].device())?, 0)?;
        rows.t()?.contiguous()?.reshape((heads, sequence, sequence))
    }

    fn incremental(&self) -> Option<&dyn Incremental> {
        Some(self)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let table = backward.inputs[1].dims();
        let of_table = backward.gradient_of(1, || {
            let (heads, sequence, _) = backward.gradient.dims3()?;
            let rows = wide(&backward.gradient.reshape((heads, sequence * sequence))?)?.t()?.contiguous()?;
            let pairs = self.all_pairs(sequence, rows.device())?;
            sum_rows_by_index(&rows, &pairs, table[0])?.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![None, of_table])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference values: `MPNetEncoder.relative_position_bucket` and
    /// `T5Attention._relative_position_bucket` of transformers.
    #[test]
    fn rows_match_the_reference() {
        let both = RelativeBias::default();
        let at = |op: &RelativeBias, places: &[i64]| places.iter().map(|behind| op.bucket(*behind)).collect::<Vec<_>>();
        assert_eq!(at(&both, &[0, -1, -7, -8, -12, -16, -23, -32, -64, -91, -127, -128, -500]), [0, 1, 7, 8, 9, 10, 11, 12, 14, 15, 15, 15, 15]);
        assert_eq!(at(&both, &[1, 7, 8, 16, 32, 63, 64, 90, 91, 500]), [17, 23, 24, 26, 28, 29, 30, 30, 31, 31]);
        let back = RelativeBias { both_ways: false, ..both };
        assert_eq!(at(&back, &[3, 0, -15, -16, -30, -127, -128, -999]), [0, 0, 15, 16, 20, 31, 31, 31]);
        assert_eq!(both.by_distance().len(), 257);
    }
}
