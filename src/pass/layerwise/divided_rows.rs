//! Layers whose rows several ranks round: rows do not depend on each other, given the moments of the inputs.

use std::rc::Rc;

use super::Layer;
use super::ranks::part;
use crate::error::{Error, Result};
use crate::kernel::grid::QuantizationParams;
use crate::train::Team;

/// Divides the rows of layers among ranks.
pub(super) struct DividedRows(Rc<Team>);

impl DividedRows {
    pub fn new(team: &Rc<Team>) -> DividedRows {
        DividedRows(team.clone())
    }

    /// Rounds a weight `[rows, size]`, and returns the scales of all rows. `round` rounds the rows of this
    /// rank, which its layer describes. A weight with fewer rows than ranks is rounded by every rank.
    pub fn round(
        &self,
        layer: &Layer,
        values: &mut [f32],
        round: impl FnOnce(&Layer, &mut [f32]) -> Result<Vec<QuantizationParams>>,
    ) -> Result<Vec<QuantizationParams>> {
        let (rank, count) = (self.0.rank(), self.0.size());
        if layer.rows < count {
            return round(layer, values);
        }
        let elements = |rank: usize| {
            let rows = part(layer.rows, rank, count);
            rows.start * layer.size..rows.end * layer.size
        };
        let own = &mut values[elements(rank)];
        let steps = round(&Layer { rows: part(layer.rows, rank, count).len(), ..layer.clone() }, own)?;
        let numbers = own.iter().copied().chain(steps.iter().flat_map(|step| [step.scale, step.zero]));
        let message: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
        let mut all = Vec::new();
        for (rank, message) in self.0.gather(&message)?.iter().enumerate() {
            let numbers: Vec<f32> = message.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let rows = &mut values[elements(rank)];
            let too_few = || Error::run(format!("rank {rank}"), "sent too few rounded weights", "report this error");
            let (rounded, steps) = numbers.split_at_checked(rows.len()).ok_or_else(too_few)?;
            rows.copy_from_slice(rounded);
            all.extend(steps.as_chunks::<2>().0.iter().map(|[scale, zero]| QuantizationParams { scale: *scale, zero: *zero }));
        }
        Ok(all)
    }
}
