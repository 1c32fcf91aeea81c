//! Layers whose rows several ranks round. Given the moments of the inputs, rows depend on each other only by
//! the number of sweeps.

use std::rc::Rc;

use super::Layer;
use super::ranks::part;
use super::row_scales::RowScales;
use crate::error::{Error, Result};
use crate::train::Team;

/// Maximum bytes of one message; the communicator rejects those of more than 1 GiB.
const MESSAGE: usize = 256 << 20;

/// Divides the rows of layers among ranks.
pub(super) struct DividedRows(Rc<Team>);

impl DividedRows {
    pub fn new(team: &Rc<Team>) -> DividedRows {
        DividedRows(team.clone())
    }

    /// Whether `predicate` is false for the rows of every rank.
    pub fn none(&self, layer: &Layer, values: &[f32], predicate: fn(&[f32]) -> bool) -> bool {
        let count = self.0.size();
        (0..count).all(|rank| {
            let rows = part(layer.rows, rank, count);
            !predicate(&values[rows.start * layer.size..rows.end * layer.size])
        })
    }

    /// The bytes of every rank, of which the longest has `longest`.
    fn gather(&self, bytes: &[u8], longest: usize) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![Vec::new(); self.0.size()];
        for first in (0..longest).step_by(MESSAGE) {
            let own = bytes.get(first..bytes.len().min(first + MESSAGE)).unwrap_or(&[]);
            all.iter_mut().zip(self.0.gather(own)?).for_each(|(bytes, next)| bytes.extend(next));
        }
        Ok(all)
    }

    /// Rounds a weight `[rows, size]`, and returns the scales of all rows. `round` rounds the rows of this
    /// rank, which its layer describes. A weight with fewer rows than ranks is rounded by every rank.
    pub fn round(&self, layer: &Layer, values: &mut [f32], round: impl FnOnce(&Layer, &mut [f32]) -> Result<RowScales>) -> Result<RowScales> {
        let (rank, count) = (self.0.rank(), self.0.size());
        if layer.rows < count {
            return round(layer, values);
        }
        let elements = |rank: usize| {
            let rows = part(layer.rows, rank, count);
            rows.start * layer.size..rows.end * layer.size
        };
        let own = &mut values[elements(rank)];
        let scales = round(&Layer { rows: part(layer.rows, rank, count).len(), ..layer.clone() }, own)?;
        let message: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).chain(scales.to_bytes()).collect();
        // All rows have messages of the same length.
        let longest = message.len() / part(layer.rows, rank, count).len().max(1) * layer.rows.div_ceil(count);
        let mut all = RowScales::default();
        for (rank, message) in self.gather(&message, longest)?.iter().enumerate() {
            let rows = &mut values[elements(rank)];
            let too_few = || Error::run(format!("rank {rank}"), "sent too few rounded weights", "report this error");
            let (rounded, others) = message.split_at_checked(4 * rows.len()).ok_or_else(too_few)?;
            rows.iter_mut().zip(rounded.as_chunks::<4>().0).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
            all.extend(scales.with_bytes(others));
        }
        Ok(all)
    }
}
