//! Elements around a tensor.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::places::{given_back, places, taken};
use super::windows::fit;
use super::{Backward, OpSpec, require, unfit};
use crate::ir::{Dim, Element, TensorType};

/// What stands around a tensor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PadMode {
    /// A number.
    #[default]
    Constant,
    /// What is inside, mirrored at the first and at the last element.
    Reflect,
    /// The first and the last element.
    Edge,
    /// What is inside, from its other end.
    Wrap,
}

/// Elements before and behind each axis, or fewer of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pad {
    /// How many before each axis, then how many behind each; negative numbers cut off. None for none.
    pub pads: Vec<i64>,
    /// What they are.
    pub mode: PadMode,
    /// The number, where they are all the same.
    pub value: f64,
}

impl Pad {
    /// Before and behind an axis of so many.
    fn around(&self, axis: usize, rank: usize) -> (i64, i64) {
        let at = |place: usize| self.pads.get(place).copied().unwrap_or(0);
        (at(axis), at(axis + rank))
    }

    /// The axes of so many that change.
    fn changed(&self, rank: usize) -> impl Iterator<Item = (usize, i64, i64)> + '_ {
        (0..rank)
            .map(move |axis| (axis, self.around(axis, rank)))
            .filter(|(_, around)| *around != (0, 0))
            .map(|(axis, (before, behind))| (axis, before, behind))
    }

    /// The element that stands at a place, counted from the first one inside.
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

    fn places(&self, axis: usize, size: usize, length: usize, (before, behind): (i64, i64), like: &Tensor) -> candle_core::Result<Tensor> {
        places(format!("{:?} {axis} {size} {before} {behind}", self.mode), like.device(), || {
            (0..length as i64).map(|at| self.inside(at - before, size as i64) as u32).collect()
        })
    }
}

/// A size with elements before and behind it.
fn padded(size: &Dim, before: i64, behind: i64) -> Result<Dim, String> {
    let changed = before.checked_add(behind).and_then(|by| size.moved(by));
    changed
        .filter(|changed| *changed != Dim::Fixed(0))
        .ok_or_else(|| format!("nothing is left of {size} elements with {before} before and {behind} behind them"))
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
            return Err(format!("there are {} pads for {rank} axes, {} are needed", self.pads.len(), 2 * rank));
        }
        for (axis, before, behind) in self.changed(rank) {
            // What is cut off is not mirrored.
            let cut = |size: usize| [before, behind].into_iter().fold(size as i64, |size, pad| size.saturating_add(pad.min(0)));
            let most = match (self.mode, shape[axis].fixed().map(cut)) {
                (PadMode::Wrap, _) if before.min(behind) < 0 => {
                    return Err(format!("axis {axis} is cut on one side, so nothing can be taken from its other end"));
                }
                (PadMode::Reflect, Some(size)) => size.saturating_sub(1),
                (PadMode::Wrap, Some(size)) => size,
                _ => i64::MAX,
            };
            if before.max(behind) > most.max(0) {
                return Err(format!("axis {axis} has {} elements, too few for pads of {before} and {behind}", shape[axis]));
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
            let length = padded(&Dim::Fixed(size), before, behind).map_err(unfit)?.fixed().unwrap_or(0);
            x = match self.mode {
                PadMode::Constant => fit(&x, axis, before as isize, length, self.value)?,
                _ => taken(&x, &self.places(axis, size, length, (before, behind), &x)?, axis)?,
            };
        }
        x.contiguous()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.of(0, || {
            let mut gradient = backward.gradient.clone();
            let changed: Vec<_> = self.changed(dims.len()).collect();
            for (axis, before, behind) in changed.into_iter().rev() {
                gradient = match self.mode {
                    PadMode::Constant => fit(&gradient, axis, (-before) as isize, dims[axis], 0.0)?,
                    _ => {
                        let places = self.places(axis, dims[axis], gradient.dim(axis)?, (before, behind), &gradient)?;
                        given_back(&gradient, &places, axis, dims[axis])?
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
