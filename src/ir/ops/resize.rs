//! Axes made longer or shorter by interpolation.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::places::{given_back, places, taken};
use super::{Backward, OpSpec, require, unfit};
use crate::ir::{Dim, Element, TensorType};
use crate::kernel::resize::{ImagePlaces, Places};

/// What becomes of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// Its size times this, rounded down.
    Scale(f64),
    /// This size.
    #[serde(untagged)]
    Size(usize),
}

/// How an element is made of those beside its place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interpolation {
    /// It is the nearest one.
    #[default]
    Nearest,
    /// It lies between the two beside its place.
    Linear,
}

/// Where an element of the output lies in the input, as ONNX names it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Coordinates {
    /// Middles of elements are half a step from their edges.
    #[default]
    HalfPixel,
    /// The same; the only element of an axis lies at the first one.
    PytorchHalfPixel,
    /// First and last elements lie at first and last ones.
    AlignCorners,
    /// Places are divided by the scale.
    Asymmetric,
}

/// Which of two elements is the nearest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NearestMode {
    /// The nearer one, of two as near the first.
    #[default]
    RoundPreferFloor,
    /// The nearer one, of two as near the second.
    RoundPreferCeil,
    /// The first.
    Floor,
    /// The second.
    Ceil,
}

/// Axes made longer or shorter, one after the other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resize {
    /// What becomes of each axis; none for no change.
    pub sizes: Vec<Extent>,
    /// How elements are made.
    pub mode: Interpolation,
    /// Where they lie.
    pub coordinates: Coordinates,
    /// Which is the nearest, where one is taken.
    pub nearest: NearestMode,
}

/// An axis that changes: its number, its size before and after.
#[derive(Debug, Clone, Copy)]
struct Changed {
    axis: usize,
    before: usize,
    after: usize,
    scale: f32,
}

impl Extent {
    /// Whether it leaves an axis of this size as it is.
    pub(crate) fn keeps(self, size: &Dim) -> bool {
        match self {
            Extent::Scale(scale) => scale == 1.0,
            Extent::Size(after) => *size == Dim::Fixed(after),
        }
    }

    /// The size that it makes of another.
    fn of(self, size: &Dim) -> Option<Dim> {
        let scale = match self {
            Extent::Size(after) => return Some(Dim::Fixed(after)).filter(|_| after > 0),
            Extent::Scale(scale) if scale > 0.0 && scale.is_finite() => scale,
            Extent::Scale(_) => return None,
        };
        match size {
            Dim::Fixed(before) => {
                let after = (*before as f64 * scale).floor();
                (after >= 1.0 && after < u32::MAX.into()).then_some(Dim::Fixed(after as usize))
            }
            open if scale.fract() == 0.0 && scale < u32::MAX.into() => open.times(&Dim::Fixed(scale as usize)),
            // A part of an open size: as often as a window of so many elements fits.
            open => {
                let step = (1.0 / scale).round();
                let exact = step >= 1.0 && step < u32::MAX.into() && step * scale == 1.0;
                exact.then(|| open.window(step as usize, 0, step as usize)).flatten()
            }
        }
    }
}

impl Resize {
    /// The axes that change.
    fn changed(&self, dims: &[usize]) -> candle_core::Result<Vec<Changed>> {
        let of = |(axis, (extent, size)): (usize, (&Extent, &usize))| {
            let before = Dim::Fixed(*size);
            if extent.keeps(&before) {
                return None;
            }
            let after = extent.of(&before).and_then(|after| after.fixed()).ok_or_else(|| unfit(format!("nothing is left of {size} elements")));
            Some(after.map(|after| {
                let scale = if let Extent::Scale(scale) = extent { *scale as f32 } else { after as f32 / *size as f32 };
                Changed { axis, before: *size, after, scale }
            }))
        };
        self.sizes.iter().zip(dims).enumerate().filter_map(of).collect()
    }

    /// The places of the output's elements among those of the input.
    fn lies(&self, changed: Changed) -> impl Iterator<Item = f32> {
        let (coordinates, last) = (self.coordinates, changed.before.saturating_sub(1) as f32);
        (0..changed.after).map(move |at| {
            let middle = (at as f32 + 0.5) / changed.scale - 0.5;
            match coordinates {
                Coordinates::HalfPixel => middle,
                Coordinates::PytorchHalfPixel => {
                    if changed.after > 1 {
                        middle
                    } else {
                        0.0
                    }
                }
                Coordinates::AlignCorners => {
                    if changed.after > 1 {
                        at as f32 * last / (changed.after - 1) as f32
                    } else {
                        0.0
                    }
                }
                Coordinates::Asymmetric => at as f32 / changed.scale,
            }
        })
    }

    fn key(&self, changed: Changed, what: &str) -> String {
        format!("{:?} {:?} {:?} {changed:?} {what}", self.mode, self.coordinates, self.nearest)
    }

    /// Of each element the one that it is, or those that it lies between; and how near it is to the second of them.
    fn places(&self, changed: Changed) -> Places {
        let last = changed.before.saturating_sub(1) as f32;
        if self.mode == Interpolation::Nearest {
            let nearest = match self.nearest {
                NearestMode::RoundPreferFloor => |x: f32| (x - 0.5).ceil(),
                NearestMode::RoundPreferCeil => |x: f32| (x + 0.5).floor(),
                NearestMode::Floor => f32::floor,
                NearestMode::Ceil => f32::ceil,
            };
            return Places { first: self.lies(changed).map(|at| nearest(at).clamp(0.0, last) as u32).collect(), second: None };
        }
        let held: Vec<f32> = self.lies(changed).map(|at| at.clamp(0.0, last)).collect();
        let second = held.iter().map(|at| (at.floor() + 1.0).min(last) as u32).collect();
        Places { first: held.iter().map(|at| at.floor() as u32).collect(), second: Some((second, held.iter().map(|at| at.fract()).collect())) }
    }

    /// The same on a device.
    fn parts(&self, changed: Changed, device: &Device) -> candle_core::Result<(Vec<Tensor>, Option<Tensor>)> {
        let mut parts = vec![places(self.key(changed, "first"), device, || self.places(changed).first)?];
        let mut share = None;
        if self.mode == Interpolation::Linear {
            let second = || self.places(changed).second.unwrap_or_default();
            parts.push(places(self.key(changed, "second"), device, || second().0)?);
            share = Some(constant(self.key(changed, "share"), device, |device| Tensor::from_vec(second().1, changed.after, device))?);
        }
        Ok((parts, share))
    }

    /// Places in images `[images, channels, rows, columns]`; `None` where other axes change.
    pub(super) fn of_images(&self, dims: &[usize]) -> candle_core::Result<Option<ImagePlaces>> {
        let &[_, _, rows, columns] = dims else { return Ok(None) };
        let mut found = ImagePlaces { rows: None, columns: None, size: [rows, columns] };
        for changed in self.changed(dims)? {
            let (places, size) = (Some(self.places(changed)), changed.after);
            match changed.axis {
                2 => (found.rows, found.size[0]) = (places, size),
                3 => (found.columns, found.size[1]) = (places, size),
                _ => return Ok(None),
            }
        }
        Ok(Some(found))
    }
}

/// A number for each element of an axis, beside a tensor.
fn beside(numbers: &Tensor, axis: usize, like: &Tensor) -> candle_core::Result<Tensor> {
    let mut shape = vec![1; like.rank()];
    shape[axis] = numbers.elem_count();
    numbers.reshape(shape)?.to_dtype(like.dtype())
}

impl OpSpec for Resize {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let mut shape = inputs[0].shape.clone();
        if !self.sizes.is_empty() && self.sizes.len() != shape.len() {
            return Err(format!("there are {} sizes for {} axes", self.sizes.len(), shape.len()));
        }
        for (size, extent) in shape.iter_mut().zip(&self.sizes).filter(|(size, extent)| !extent.keeps(size)) {
            let known = size.fixed().is_some() || matches!(extent, Extent::Size(_));
            let hint = if known { "" } else { "; of a size that is open, whole multiples and whole parts are known" };
            *size = extent.of(size).ok_or_else(|| format!("{extent:?} makes no size of {size}{hint}"))?;
        }
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let shape = &inputs[0].shape;
        let held = |axis: usize| self.sizes.get(axis).is_some_and(|extent| !extent.keeps(&shape[axis]) || matches!(extent, Extent::Size(_)));
        let axes = super::letters(shape.len(), |axis| held(axis).then(|| "_".to_owned()));
        format!("{axes} -> {axes}")
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let mut x = wide(&inputs[0])?;
        for changed in self.changed(inputs[0].dims())? {
            let (parts, share) = self.parts(changed, x.device())?;
            let mut elements = parts.iter().map(|places| taken(&x, places, changed.axis));
            let (first, second) = (elements.next().unwrap_or_else(|| Ok(x.clone()))?, elements.next().transpose()?);
            x = match (second, share) {
                (Some(second), Some(share)) => (&first + (second - &first)?.broadcast_mul(&beside(&share, changed.axis, &first)?)?)?,
                _ => first,
            };
        }
        x.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.of(0, || {
            let mut gradient = wide(backward.gradient)?;
            for changed in self.changed(backward.inputs[0].dims())?.into_iter().rev() {
                let (parts, share) = self.parts(changed, gradient.device())?;
                let of_second = share.map(|share| gradient.broadcast_mul(&beside(&share, changed.axis, &gradient)?)).transpose()?;
                let back = |gradient: &Tensor, places: &Tensor| given_back(gradient, places, changed.axis, changed.before);
                gradient = match (parts.as_slice(), of_second) {
                    ([first, second], Some(of_second)) => (back(&(&gradient - &of_second)?, first)? + back(&of_second, second)?)?,
                    ([only, ..], _) => back(&gradient, only)?,
                    _ => gradient,
                };
            }
            gradient.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
