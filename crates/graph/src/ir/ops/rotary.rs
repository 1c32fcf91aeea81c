//! Rotary position embedding.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::decoding::{DecodingState, Forward, Incremental};
use super::{Backward, OpSpec, require_floats};
use crate::ir::TensorType;

/// Rotates pairs of elements `(i, i + d/2)` of each head by an angle proportional to the position (RoPE:
/// Su et al., 2021).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rotary {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies for longer sequences.
    pub scaling: RotaryScaling,
    /// Number of leading elements of a head that are rotated; the others are unchanged. Defaults to all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
}

impl Default for Rotary {
    fn default() -> Self {
        Self { theta: 10_000.0, scaling: RotaryScaling::None, width: None }
    }
}

/// Scaling of the frequencies for longer sequences.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RotaryScaling {
    /// No scaling.
    #[default]
    None,
    /// Positions are divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The base grows for sequences longer than those of the training (dynamic NTK).
    Dynamic {
        /// Scaling factor.
        factor: f64,
        /// Longest sequence of the training.
        max_position: usize,
    },
    /// Low frequencies are divided and high ones unchanged, with linear interpolation in between (Llama
    /// 3.1).
    Llama3 {
        /// Divisor.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are unchanged.
        high: f64,
        /// Longest sequence of the original training.
        original: usize,
    },
    /// Interpolation by the number of rotations, with scaled attention (YaRN: Peng et al., 2023).
    Yarn {
        /// Divisor.
        factor: f64,
        /// Number of rotations above which a frequency is unchanged.
        beta_fast: f64,
        /// Number of rotations below which a frequency is divided.
        beta_slow: f64,
        /// Longest sequence of the original training.
        original: usize,
        /// Factor on sines and cosines.
        attention: f64,
        /// Whether the bounds of the interpolation are rounded to integers.
        truncate: bool,
    },
    /// Separate divisors for each frequency, for short and for long sequences (LongRoPE: Ding et al.,
    /// 2024).
    LongRope {
        /// Divisors for sequences up to `original`.
        short: Vec<f64>,
        /// Divisors for longer sequences.
        long: Vec<f64>,
        /// Longest sequence of the original training.
        original: usize,
        /// Factor on sines and cosines.
        attention: f64,
    },
}

impl Rotary {
    /// Frequencies in radians per position, and the factor on sines and cosines.
    pub fn frequencies(&self, width: usize, sequence: usize) -> (Vec<f64>, f64) {
        let base = |theta: f64| (0..width / 2).map(|i| theta.powf(-2.0 * i as f64 / width as f64)).collect::<Vec<_>>();
        let plain = base(self.theta);
        match &self.scaling {
            RotaryScaling::None => (plain, 1.0),
            RotaryScaling::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
            RotaryScaling::Dynamic { factor, max_position } => {
                let length = sequence.max(*max_position) as f64;
                let growth = factor * length / *max_position as f64 - (factor - 1.0);
                let width = width as f64;
                (base(self.theta * growth.powf(width / (width - 2.0))), 1.0)
            }
            RotaryScaling::Llama3 { factor, low, high, original } => {
                let original = *original as f64;
                let scale = |f: &f64| {
                    let wavelength = std::f64::consts::TAU / f;
                    if wavelength < original / high {
                        *f
                    } else if wavelength > original / low {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                (plain.iter().map(scale).collect(), 1.0)
            }
            RotaryScaling::Yarn { factor, beta_fast, beta_slow, original, attention, truncate } => {
                let dimension = |turns: f64| width as f64 * (*original as f64 / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln());
                let (low, high) = (dimension(*beta_fast), dimension(*beta_slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, mut high) = (low.max(0.0), high.min(width as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let scale = |(i, f): (usize, &f64)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                };
                (plain.iter().enumerate().map(scale).collect(), *attention)
            }
            RotaryScaling::LongRope { short, long, original, attention } => {
                let divisors = if sequence > *original { long } else { short };
                (plain.iter().zip(divisors).map(|(f, d)| f / d).collect(), *attention)
            }
        }
    }

    /// Number of elements of a head of this width that are rotated.
    pub fn turned(&self, width: usize) -> usize {
        self.width.unwrap_or(width)
    }

    /// Concatenates rotated elements and the elements of `x` that are not rotated.
    pub(super) fn with_rest(&self, turned: Tensor, x: &Tensor) -> candle_core::Result<Tensor> {
        let (from, width) = (turned.dim(3)?, x.dim(3)?);
        if from == width { Ok(turned) } else { Tensor::cat(&[turned, x.narrow(3, from, width - from)?], 3) }
    }

    /// Cosines and sines, `[positions, width / 2]` each, for `width` rotated elements. The end of
    /// `positions` is the length of the sequence.
    pub fn tables(&self, width: usize, positions: Range<usize>, device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
        let tables = constant(format!("{self:?} {width} {positions:?}"), device, |device| {
            let (frequencies, factor) = self.frequencies(width, positions.end);
            // The reference implementations compute angles as products of f32 numbers; f64 would differ
            // at large positions.
            let angles = || positions.clone().flat_map(|p| frequencies.iter().map(move |f| p as f32 * *f as f32));
            let values: Vec<f32> = angles().map(f32::cos).chain(angles().map(f32::sin)).map(|x| x * factor as f32).collect();
            Tensor::from_vec(values, (2, positions.len(), width / 2), device)
        })?;
        Ok((tables.get(0)?, tables.get(1)?))
    }
}

impl Rotary {
    /// The [`tables`](Rotary::tables) of the positions of heads `x` after `past`.
    pub(super) fn tables_after(&self, past: &DecodingState, x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let ((_, _, sequence, width), first, device) = (x.dims4()?, past.tokens(), x.device());
        let turned = self.turned(width);
        let Some(branches) = past.branches() else { return self.tables(turned, first..first + sequence, device) };
        let tables = constant(format!("{self:?} {turned} {first} {:?}", branches.depths()), device, |device| {
            let (cos, sin) = self.tables(turned, first..first + branches.positions(), device)?;
            let depths = Tensor::new(branches.depths(), device)?;
            Tensor::stack(&[cos.index_select(&depths, 0)?, sin.index_select(&depths, 0)?], 0)
        })?;
        Ok((tables.get(0)?, tables.get(1)?))
    }

    /// Rotates forwards, or backwards for a negative sign, by the angles of the positions after `past`.
    fn rotated(&self, x: &Tensor, sign: f64, past: &DecodingState) -> candle_core::Result<Tensor> {
        let turned = self.turned(x.dim(3)?);
        let (cos, sin) = self.tables_after(past, x)?;
        self.with_rest(rotate_halves(&x.narrow(3, 0, turned)?, &cos, &(sin * sign)?)?, x)
    }
}

impl OpSpec for Rotary {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        match inputs[0].shape[3].fixed().map(|width| (self.turned(width), width)) {
            Some((turned, width)) if turned > width || turned == 0 => Err(format!("{turned} elements of heads of width {width} cannot be rotated")),
            Some((width, _)) if width.is_multiple_of(2) => match &self.scaling {
                RotaryScaling::LongRope { short, long, .. } if short.len() != width / 2 || long.len() != width / 2 => {
                    Err(format!("expected {} divisors", width / 2))
                }
                _ => Ok(inputs[0].clone()),
            },
            _ => Err("the number of rotated elements must be fixed and even".into()),
        }
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b h s! d! -> b h s! d!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.rotated(&inputs[0], 1.0, &DecodingState::default())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || self.rotated(backward.gradient, -1.0, &DecodingState::default()))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }

    fn incremental(&self) -> Option<&dyn Incremental> {
        Some(self)
    }
}

impl Incremental for Rotary {
    fn token_axis(&self, _input: usize) -> Option<usize> {
        Some(2)
    }

    fn is_stable(&self, width: usize, before: usize, after: usize) -> bool {
        let follows_length = matches!(self.scaling, RotaryScaling::Dynamic { .. } | RotaryScaling::LongRope { .. });
        !follows_length || self.frequencies(self.turned(width), before) == self.frequencies(self.turned(width), after)
    }

    fn supports_branches(&self, _inputs: &[&TensorType]) -> bool {
        true
    }

    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, _forward: &Forward) -> candle_core::Result<Tensor> {
        self.rotated(&inputs[0], 1.0, past)
    }
}

/// Rotates pairs of elements `(i, i + d/2)` of heads by angles with these cosines and sines, `[positions,
/// d/2]`.
pub(super) fn rotate_halves(x: &Tensor, cos: &Tensor, sin: &Tensor) -> candle_core::Result<Tensor> {
    let half = x.dim(3)? / 2;
    let (first, second) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let (cos, sin) = (cos.to_dtype(x.dtype())?, sin.to_dtype(x.dtype())?);
    let of = |a: &Tensor, b: &Tensor| Ok::<_, candle_core::Error>((a.broadcast_mul(&cos)?, b.broadcast_mul(&sin)?));
    let ((a, b), (c, d)) = (of(&first, &second)?, of(&second, &first)?);
    Tensor::cat(&[(a - b)?, (c + d)?], 3)
}
