//! What attention adds for the distance of two tokens.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::past::{Forward, Past, Sequential};
use super::{Backward, OpSpec, require, require_floats, require_rank};
use crate::ir::{Element, TensorType};

/// A number for each head and each pair of places, found by how far the key is from the query (Raffel et al., 2020; MPNet): tokens
/// `[batch, sequence]`, of which only the sizes count, and a table `[rows, heads]` to `[heads, sequence, sequence]`.
///
/// Small distances have a row each; larger ones share rows, the more of them the larger they are, up to `max_distance`, from which on
/// all have the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RelativeBias {
    /// Rows of the table that distances are sorted into.
    pub buckets: usize,
    /// The distance from which on all have one row.
    pub max_distance: usize,
    /// Whether keys behind the query have the second half of the rows; otherwise all of them have the first row.
    pub both_ways: bool,
}

impl Default for RelativeBias {
    fn default() -> Self {
        Self { buckets: 32, max_distance: 128, both_ways: true }
    }
}

impl RelativeBias {
    /// Rows for one direction.
    fn rows(&self) -> usize {
        if self.both_ways { self.buckets / 2 } else { self.buckets }
    }

    /// The row of a key that stands so many places behind the query.
    fn bucket(&self, behind: i64) -> usize {
        let (rows, distance) = (self.rows(), if self.both_ways { behind.unsigned_abs() } else { (-behind).max(0).unsigned_abs() } as usize);
        let first = if self.both_ways && behind > 0 { rows } else { 0 };
        let exact = rows / 2;
        if distance < exact {
            return first + distance;
        }
        // In 32 bits and in this order, as the checkpoints were trained.
        let part = (distance as f32 / exact as f32).ln() / (self.max_distance as f64 / exact as f64).ln() as f32;
        first + (exact + (part * (rows - exact) as f32) as usize).min(rows - 1)
    }

    /// The rows of keys from `max_distance` before the query to as many behind it.
    pub fn by_distance(&self) -> Vec<i64> {
        let far = self.max_distance as i64;
        (-far..=far).map(|behind| self.bucket(behind) as i64).collect()
    }

    fn held(&self) -> Result<(), String> {
        let exact = self.rows() / 2;
        if exact == 0 || self.max_distance <= exact || self.max_distance > 1 << 20 {
            return Err(format!("{} rows and a distance of {} leave no rows for distances that share one", self.buckets, self.max_distance));
        }
        Ok(())
    }

    /// The row of each pair of places, one after the other, of the queries behind so many tokens.
    fn pairs(&self, past: usize, sequence: usize, device: &Device) -> candle_core::Result<Tensor> {
        let (far, rows) = (self.max_distance as i64, self.by_distance());
        let (first, end) = (past as i64, (past + sequence) as i64);
        let of = |query: i64| (0..end).map(move |key| ((key - query).clamp(-far, far) + far) as usize);
        let pairs: Vec<i64> = (first..end).flat_map(of).map(|at| rows[at]).collect();
        Tensor::from_vec(pairs, sequence * (past + sequence), device)
    }

    fn whole(&self, sequence: usize, device: &Device) -> candle_core::Result<Tensor> {
        constant(format!("rows by distance {self:?} {sequence}"), device, |device| self.pairs(0, sequence, device))
    }
}

impl Sequential for RelativeBias {
    fn axis(&self, input: usize) -> Option<usize> {
        (input == 0).then_some(1)
    }

    fn makes_pairs(&self) -> bool {
        true
    }

    fn follow(&self, inputs: &[Tensor], past: &mut Past, _forward: &Forward) -> candle_core::Result<Tensor> {
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
        self.held()?;
        match table.shape[0].fixed() {
            Some(rows) if rows >= self.buckets => {}
            _ => return Err(format!("the table must have {} rows at least", self.buckets)),
        }
        let sequence = tokens.shape[1].clone();
        Ok(TensorType { element: Element::Float, shape: vec![table.shape[1].clone(), sequence.clone(), sequence] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "_ s!, _ h -> h s! s!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (sequence, heads) = (inputs[0].dim(1)?, inputs[1].dim(1)?);
        let rows = inputs[1].index_select(&self.whole(sequence, inputs[1].device())?, 0)?;
        rows.t()?.contiguous()?.reshape((heads, sequence, sequence))
    }

    fn sequential(&self) -> Option<&dyn Sequential> {
        Some(self)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let table = backward.inputs[1].dims();
        let of_table = backward.of(1, || {
            let (heads, sequence, _) = backward.gradient.dims3()?;
            let rows = wide(&backward.gradient.reshape((heads, sequence * sequence))?)?.t()?.contiguous()?;
            let pairs = self.whole(sequence, rows.device())?;
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

    /// As `MPNetEncoder.relative_position_bucket` and `T5Attention._relative_position_bucket` of transformers give them.
    #[test]
    fn rows_are_those_of_the_reference() {
        let both = RelativeBias::default();
        let at = |op: &RelativeBias, places: &[i64]| places.iter().map(|behind| op.bucket(*behind)).collect::<Vec<_>>();
        assert_eq!(at(&both, &[0, -1, -7, -8, -12, -16, -23, -32, -64, -91, -127, -128, -500]), [0, 1, 7, 8, 9, 10, 11, 12, 14, 15, 15, 15, 15]);
        assert_eq!(at(&both, &[1, 7, 8, 16, 32, 63, 64, 90, 91, 500]), [17, 23, 24, 26, 28, 29, 30, 30, 31, 31]);
        let back = RelativeBias { both_ways: false, ..both };
        assert_eq!(at(&back, &[3, 0, -15, -16, -30, -127, -128, -999]), [0, 0, 15, 16, 20, 31, 31, 31]);
        assert_eq!(both.by_distance().len(), 257);
    }
}
