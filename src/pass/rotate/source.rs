//! Weights with rotated rows and columns.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::kernel::rotation::Rotation;
use crate::store::{BlockSink, DType, Encoding, Origin, Weight, WeightSource, changed_floats, least_common_multiple};
use crate::work::Meter;

/// A rotation of adjacent blocks of rows or columns of a matrix.
#[derive(Clone)]
pub(super) struct Turn {
    pub rotation: Arc<Rotation>,
    /// The rotated axis: 0 for rows, 1 for columns.
    pub axis: usize,
    /// The first row or column.
    pub first: usize,
    /// Number of blocks.
    pub count: usize,
}

/// The factors of a normalization, which are folded into the inputs of a layer.
#[derive(Clone)]
pub(super) struct Factors {
    pub name: String,
    pub weight: Weight,
    /// Offset that the normalization adds to its weight.
    pub offset: f64,
    /// The axis of the inputs.
    pub axis: usize,
}

/// Changes of a weight.
#[derive(Clone, Default)]
pub(super) struct Change {
    pub factors: Option<Factors>,
    pub turns: Vec<Turn>,
    /// Replaces all elements by this value.
    pub constant: Option<f32>,
}

impl Change {
    /// The changed weight, a matrix or vector of floats.
    pub fn apply(self, name: &str, weight: &Weight, meter: &Arc<Meter>) -> Weight {
        let source = Changed { name: name.to_owned(), upstream: weight.clone(), change: self, meter: meter.clone() };
        let mut changed = weight.then(weight.dtype, Encoding::Dense, Arc::new(source)).with_origin(Origin::Rescaled);
        changed.zero_origin = None;
        changed
    }

    /// Whether rows depend on each other, so that the whole weight is read into memory.
    pub fn mixes_rows(&self) -> bool {
        self.turns.iter().any(|turn| turn.axis == 0)
    }
}

struct Changed {
    name: String,
    upstream: Weight,
    change: Change,
    meter: Arc<Meter>,
}

impl Changed {
    /// The factors for each index of the axis of the inputs.
    fn factors(&self) -> Result<Option<(usize, Vec<f32>)>> {
        let Some(Factors { name, weight, offset, axis }) = &self.change.factors else { return Ok(None) };
        let stored = weight.floats(name)?;
        Ok(Some((*axis, stored.into_iter().map(|value| (f64::from(value) + offset) as f32).collect())))
    }

    /// Changes complete rows.
    fn change(&self, values: &mut [f32], columns: usize, factors: Option<&(usize, Vec<f32>)>) {
        if let Some(constant) = self.change.constant {
            values.fill(constant);
        }
        if let Some((axis, factors)) = factors {
            let rows = values.chunks_exact_mut(columns);
            match axis {
                0 => rows.zip(factors).for_each(|(row, factor)| row.iter_mut().for_each(|value| *value *= factor)),
                _ => rows.for_each(|row| row.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor)),
            }
        }
        for Turn { rotation, axis, first, count } in &self.change.turns {
            match axis {
                0 => rotation.rotate_rows(values, columns, *first, *count),
                _ => rotation.rotate_columns(values, columns, *first, *count),
            }
        }
    }
}

impl WeightSource for Changed {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (weight, columns, factors) = (&self.upstream, self.upstream.row().max(1), self.factors()?);
        // Factors of rows are indexed from the first row.
        let is_whole = self.change.mixes_rows() || factors.as_ref().is_some_and(|(axis, _)| *axis == 0);
        let whole = if is_whole {
            let mut values = weight.floats(&self.name)?;
            self.meter.time(|| self.change(&mut values, columns, factors.as_ref()));
            values
        } else {
            Vec::new()
        };
        let (largest, mut overflows) = (convert::largest(weight.dtype), false);
        let unit = if is_whole { unit } else { least_common_multiple(unit, columns) };
        changed_floats::visit(&self.name, weight, weight.dtype, unit, sink, |first, values| {
            match whole.get(first..first + values.len()).filter(|_| is_whole) {
                Some(changed) => values.copy_from_slice(changed),
                None => self.meter.time(|| self.change(values, columns, factors.as_ref())),
            }
            overflows |= values.iter().any(|value| value.abs() > largest && !convert::rounded(weight.dtype, *value).is_finite());
        })?;
        if !overflows {
            return Ok(());
        }
        let hint = if weight.dtype == DType::F16 { "cast the model to bf16 first (`cast: { to: bf16 }`)" } else { "check the checkpoint" };
        Err(Error::tensor(&self.name, format!("exceeds the range of {} after the rotation: the largest value is {largest:e}", weight.dtype), hint))
    }
}
