//! Padding of tensors.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gather::{cached_indices, gather, gather_gradient};
use super::windows::pad_or_crop;
use super::{Backward, OpSpec, require, shape_error};
use crate::ir::{Dim, Element, TensorType};

/// Values of the padding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PadMode {
    /// A constant.
    #[default]
    Constant,
    /// Reflection at the first and the last element.
    Reflect,
    /// Repetition of the first and the last element.
    Edge,
    /// Circular padding.
    Wrap,
}

/// Pads or crops axes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pad {
    /// Padding at the start of each axis, then at the end of each axis; negative numbers crop. Empty for
    /// no padding.
    pub pads: Vec<i64>,
    /// Values of the padding.
    pub mode: PadMode,
    /// The constant of [`PadMode::Constant`].
    pub value: f64,
}

impl Pad {
    /// Padding at the start and the end of an axis of a tensor with `rank` axes.
    fn around(&self, axis: usize, rank: usize) -> (i64, i64) {
        let at = |place: usize| self.pads.get(place).copied().unwrap_or(0);
        (at(axis), at(axis + rank))
    }

    /// Axes that change, with their padding at the start and the end.
    fn changed(&self, rank: usize) -> impl Iterator<Item = (usize, i64, i64)> + '_ {
        (0..rank)
            .map(move |axis| (axis, self.around(axis, rank)))
            .filter(|(_, around)| *around != (0, 0))
            .map(|(axis, (before, behind))| (axis, before, behind))
    }

    /// The source index of position `at`, which counts from the first original element.
    fn inside(&self, at: i64, size: i64) -> i64 {
        match self.mode {
            PadMode::Reflect if size > 1 => {
                let turn = 2 * (size - 1);
                let at = at.rem_euclid(turn);
                at.min(turn - at)
            }
            PadMode::Wrap => at.rem_euclid(size.max(1)),
            _ => at.clamp(0, (size - 1).max(0)),
        }
    }

    fn indices(&self, axis: usize, size: usize, length: usize, (before, behind): (i64, i64), like: &Tensor) -> candle_core::Result<Tensor> {
        cached_indices(format!("{:?} {axis} {size} {before} {behind}", self.mode), like.device(), || {
            (0..length as i64).map(|at| self.inside(at - before, size as i64) as u32).collect()
        })
    }
}

/// The size of an axis after padding.
fn padded(size: &Dim, before: i64, behind: i64) -> Result<Dim, String> {
    let changed = before.checked_add(behind).and_then(|by| size.moved(by));
    changed
        .filter(|changed| *changed != Dim::Fixed(0))
        .ok_or_else(|| format!("padding {size} elements with {before} before and {behind} after them leaves an empty axis"))
}

impl OpSpec for Pad {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let mut shape = inputs[0].shape.clone();
        let rank = shape.len();
        if !self.pads.is_empty() && self.pads.len() != 2 * rank {
            return Err(format!("got {} pads for {rank} axes, expected {}", self.pads.len(), 2 * rank));
        }
        for (axis, before, behind) in self.changed(rank) {
            // Cropped elements are not reflected.
            let cut = |size: usize| [before, behind].into_iter().fold(size as i64, |size, pad| size.saturating_add(pad.min(0)));
            let most = match (self.mode, shape[axis].fixed().map(cut)) {
                (PadMode::Wrap, _) if before.min(behind) < 0 => {
                    return Err(format!("axis {axis} is cropped, which circular padding does not support"));
                }
                (PadMode::Reflect, Some(size)) => size.saturating_sub(1),
                (PadMode::Wrap, Some(size)) => size,
                _ => i64::MAX,
            };
            if before.max(behind) > most.max(0) {
                return Err(format!("axis {axis} has {} elements, too few for padding of {before} and {behind}", shape[axis]));
            }
            shape[axis] = padded(&shape[axis], before, behind)?;
        }
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        let axes = super::letters(rank, |axis| (self.around(axis, rank) != (0, 0)).then(|| "_".to_owned()));
        format!("{axes} -> {axes}")
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let mut x = inputs[0].clone();
        for (axis, before, behind) in self.changed(x.rank()) {
            let size = x.dim(axis)?;
            let length = padded(&Dim::Fixed(size), before, behind).map_err(shape_error)?.fixed().unwrap_or(0);
            x = match self.mode {
                PadMode::Constant => pad_or_crop(&x, axis, before as isize, length, self.value)?,
                _ => gather(&x, &self.indices(axis, size, length, (before, behind), &x)?, axis)?,
            };
        }
        x.contiguous()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.gradient_of(0, || {
            let mut gradient = backward.gradient.clone();
            let changed: Vec<_> = self.changed(dims.len()).collect();
            for (axis, before, behind) in changed.into_iter().rev() {
                gradient = match self.mode {
                    PadMode::Constant => pad_or_crop(&gradient, axis, (-before) as isize, dims[axis], 0.0)?,
                    _ => {
                        let indices = self.indices(axis, dims[axis], gradient.dim(axis)?, (before, behind), &gradient)?;
                        gather_gradient(&gradient, &indices, axis, dims[axis])?
                    }
                };
            }
            gradient.contiguous()
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
