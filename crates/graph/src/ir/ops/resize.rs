//! Resizing of axes by interpolation.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gather::{cached_indices, gather, gather_gradient};
use super::gradient::wide;
use super::{Backward, OpSpec, require, shape_error};
use crate::ir::{Dim, Element, TensorType};
use crate::kernel::resize::{AxisSources, ImageSources};

/// The target size of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// The input size times this factor, rounded down.
    Scale(f64),
    /// A fixed size.
    #[serde(untagged)]
    Size(usize),
}

/// Interpolation method.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interpolation {
    /// The nearest element.
    #[default]
    Nearest,
    /// Linear interpolation between the two neighbors.
    Linear,
}

/// Mapping of output positions to input positions, with ONNX's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Coordinates {
    /// Aligns the corners of the images; elements are centered at half positions.
    #[default]
    HalfPixel,
    /// As `HalfPixel`, but an axis with one output element reads the first input element.
    PytorchHalfPixel,
    /// Aligns the centers of the first and last elements.
    AlignCorners,
    /// Divides positions by the scale.
    Asymmetric,
}

/// Rounding of positions for nearest-neighbor interpolation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NearestMode {
    /// To the nearest element; ties to the first.
    #[default]
    RoundPreferFloor,
    /// To the nearest element; ties to the second.
    RoundPreferCeil,
    /// Down.
    Floor,
    /// Up.
    Ceil,
}

/// Resizes axes by separable interpolation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resize {
    /// Target size of each axis; empty for no change.
    pub sizes: Vec<Extent>,
    /// Interpolation method.
    pub mode: Interpolation,
    /// Mapping of output positions to input positions.
    pub coordinates: Coordinates,
    /// Rounding for nearest-neighbor interpolation.
    pub nearest: NearestMode,
}

/// An axis that changes, with its size before and after.
#[derive(Debug, Clone, Copy)]
struct Changed {
    axis: usize,
    before: usize,
    after: usize,
    scale: f32,
}

impl Extent {
    /// Whether an axis of this size does not change.
    pub fn is_identity(self, size: &Dim) -> bool {
        match self {
            Extent::Scale(scale) => scale == 1.0,
            Extent::Size(after) => *size == Dim::Fixed(after),
        }
    }

    /// The size after resizing an axis of this size.
    fn apply(self, size: &Dim) -> Option<Dim> {
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
            // A dynamic size divided by an integer: the number of windows of that extent.
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
            if extent.is_identity(&before) {
                return None;
            }
            let after =
                extent.apply(&before).and_then(|after| after.fixed()).ok_or_else(|| shape_error(format!("resizing {size} elements leaves an empty axis")));
            Some(after.map(|after| {
                let scale = if let Extent::Scale(scale) = extent { *scale as f32 } else { after as f32 / *size as f32 };
                Changed { axis, before: *size, after, scale }
            }))
        };
        self.sizes.iter().zip(dims).enumerate().filter_map(of).collect()
    }

    /// Input positions of the output elements, as fractions.
    fn source_positions(&self, changed: Changed) -> impl Iterator<Item = f32> {
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

    /// The input index of each output element, or the two indices to interpolate between and the weight
    /// of the second.
    fn indices(&self, changed: Changed) -> AxisSources {
        let last = changed.before.saturating_sub(1) as f32;
        if self.mode == Interpolation::Nearest {
            let nearest = match self.nearest {
                NearestMode::RoundPreferFloor => |x: f32| (x - 0.5).ceil(),
                NearestMode::RoundPreferCeil => |x: f32| (x + 0.5).floor(),
                NearestMode::Floor => f32::floor,
                NearestMode::Ceil => f32::ceil,
            };
            return AxisSources { first: self.source_positions(changed).map(|at| nearest(at).clamp(0.0, last) as u32).collect(), second: None };
        }
        let held: Vec<f32> = self.source_positions(changed).map(|at| at.clamp(0.0, last)).collect();
        let second = held.iter().map(|at| (at.floor() + 1.0).min(last) as u32).collect();
        AxisSources { first: held.iter().map(|at| at.floor() as u32).collect(), second: Some((second, held.iter().map(|at| at.fract()).collect())) }
    }

    /// The same as tensors on a device.
    fn parts(&self, changed: Changed, device: &Device) -> candle_core::Result<(Vec<Tensor>, Option<Tensor>)> {
        let mut parts = vec![cached_indices(self.key(changed, "first"), device, || self.indices(changed).first)?];
        let mut share = None;
        if self.mode == Interpolation::Linear {
            let second = || self.indices(changed).second.unwrap_or_default();
            parts.push(cached_indices(self.key(changed, "second"), device, || second().0)?);
            share = Some(constant(self.key(changed, "share"), device, |device| Tensor::from_vec(second().1, changed.after, device))?);
        }
        Ok((parts, share))
    }

    /// The indices for images `[images, channels, rows, columns]`; `None` if other axes change.
    pub(super) fn image_indices(&self, dims: &[usize]) -> candle_core::Result<Option<ImageSources>> {
        let &[_, _, rows, columns] = dims else { return Ok(None) };
        let mut found = ImageSources { rows: None, columns: None, size: [rows, columns] };
        for changed in self.changed(dims)? {
            let (places, size) = (Some(self.indices(changed)), changed.after);
            match changed.axis {
                2 => (found.rows, found.size[0]) = (places, size),
                3 => (found.columns, found.size[1]) = (places, size),
                _ => return Ok(None),
            }
        }
        Ok(Some(found))
    }
}

/// Reshapes a vector with an element for each index of `axis` for broadcasting with `like`.
fn along_axis(numbers: &Tensor, axis: usize, like: &Tensor) -> candle_core::Result<Tensor> {
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
            return Err(format!("got {} sizes for {} axes", self.sizes.len(), shape.len()));
        }
        for (size, extent) in shape.iter_mut().zip(&self.sizes).filter(|(size, extent)| !extent.is_identity(size)) {
            let known = size.fixed().is_some() || matches!(extent, Extent::Size(_));
            let hint = if known { "" } else { "; dynamic sizes can only be multiplied or divided by integers" };
            *size = extent.apply(size).ok_or_else(|| format!("{extent:?} cannot be applied to size {size}{hint}"))?;
        }
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let shape = &inputs[0].shape;
        let held = |axis: usize| self.sizes.get(axis).is_some_and(|extent| !extent.is_identity(&shape[axis]) || matches!(extent, Extent::Size(_)));
        let axes = super::letters(shape.len(), |axis| held(axis).then(|| "_".to_owned()));
        format!("{axes} -> {axes}")
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let mut x = wide(&inputs[0])?;
        for changed in self.changed(inputs[0].dims())? {
            let (parts, share) = self.parts(changed, x.device())?;
            let mut elements = parts.iter().map(|places| gather(&x, places, changed.axis));
            let (first, second) = (elements.next().unwrap_or_else(|| Ok(x.clone()))?, elements.next().transpose()?);
            x = match (second, share) {
                (Some(second), Some(share)) => (&first + (second - &first)?.broadcast_mul(&along_axis(&share, changed.axis, &first)?)?)?,
                _ => first,
            };
        }
        x.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let mut gradient = wide(backward.gradient)?;
            for changed in self.changed(backward.inputs[0].dims())?.into_iter().rev() {
                let (parts, share) = self.parts(changed, gradient.device())?;
                let of_second = share.map(|share| gradient.broadcast_mul(&along_axis(&share, changed.axis, &gradient)?)).transpose()?;
                let back = |gradient: &Tensor, places: &Tensor| gather_gradient(gradient, places, changed.axis, changed.before);
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
