//! Augmentation of training images: random horizontal flips and shifts.

use std::str::FromStr;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::draw::Draw;
use crate::data::{ATTENTION_MASK, Batch};
use crate::error::{Error, ParseError, Result};
use crate::exec::transfer;
use crate::yaml_text::parse_option;

/// Random changes of training images, in each step anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Augment {
    /// Flip each image horizontally with a probability of one half
    pub flip: bool,
    /// Shift each image by up to this many pixels in each direction; pixels at the border are repeated
    pub shift: usize,
}

impl FromStr for Augment {
    type Err = ParseError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        parse_option("augment", text)
    }
}

fn wrong(reason: impl std::fmt::Display) -> Error {
    Error::option("augment", reason)
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("augmented images", e)
}

/// The sizes of images, and the distances between values of neighboring pixels.
#[derive(Debug, Clone, Copy)]
struct Layout {
    channels: usize,
    height: usize,
    width: usize,
    /// Between channels, rows and columns.
    strides: [usize; 3],
}

impl Layout {
    /// The layout of images `[batch, channels, height, width]` or `[batch, height, width, channels]`.
    fn new(dims: &[usize]) -> Option<Layout> {
        let is_channels = |count: usize| matches!(count, 1 | 3);
        match *dims {
            [_, channels, height, width] if is_channels(channels) => Some(Layout { channels, height, width, strides: [height * width, width, 1] }),
            [_, height, width, channels] if is_channels(channels) => Some(Layout { channels, height, width, strides: [1, width * channels, channels] }),
            _ => None,
        }
    }

    fn elements(self) -> usize {
        self.channels * self.height * self.width
    }

    /// Copies an image: each pixel is that of the source at a distance, in a row that may be reversed.
    fn copy(self, source: &[f32], target: &mut [f32], [down, right]: [isize; 2], is_flipped: bool) {
        let moved = |at: usize, by: isize, size: usize| at.saturating_add_signed(by).min(size - 1);
        let [channel, row, column] = self.strides;
        for y in 0..self.height {
            let from_y = moved(y, down, self.height);
            for x in 0..self.width {
                let from_x = moved(if is_flipped { self.width - 1 - x } else { x }, right, self.width);
                for c in 0..self.channels {
                    target[c * channel + y * row + x * column] = source[c * channel + from_y * row + from_x * column];
                }
            }
        }
    }
}

impl Augment {
    /// Validates the options; `pass` is the prefix of error messages.
    pub(super) fn check(self, pass: &str) -> Result<()> {
        match self.flip || self.shift > 0 {
            true => Ok(()),
            false => Err(Error::option(format!("{pass}: augment"), "changes nothing: set `flip: true` or `shift`")),
        }
    }

    /// The batches of a step with changed images. Fails if the samples are not images.
    pub(super) fn augmented(self, batches: Vec<Batch>, draw: Draw) -> Result<Vec<Batch>> {
        let mut random = draw.random();
        batches.into_iter().map(|batch| self.augmented_batch(batch, &mut random)).collect()
    }

    fn augmented_batch(self, mut batch: Batch, random: &mut fastrand::Rng) -> Result<Batch> {
        let image = |(name, tensor): (&String, &Tensor)| Some((name.clone(), Layout::new(tensor.dims()).filter(|_| name != ATTENTION_MASK)?));
        let images: Vec<(String, Layout)> = batch.inputs.iter().filter_map(image).collect();
        let [(name, layout)] = &images[..] else {
            return Err(wrong(format!("needs samples with one input of images with 1 or 3 channels, but they have {}", images.len())));
        };
        let Some(before) = batch.inputs.get(name) else { return Ok(batch) };
        if self.shift >= layout.height.min(layout.width) {
            return Err(wrong(format!("`shift: {}` is not smaller than images of {} × {} pixels", self.shift, layout.height, layout.width)));
        }
        let source = transfer::read::<f32>(before).map_err(failed)?;
        let mut target = vec![0f32; source.len()];
        let most = self.shift as isize;
        for (source, target) in source.chunks_exact(layout.elements()).zip(target.chunks_exact_mut(layout.elements())) {
            // Each image takes the same number of random numbers.
            let [down, right] = [(); 2].map(|()| random.isize(-most..=most));
            layout.copy(source, target, [down, right], self.flip && random.bool());
        }
        let tensor = Tensor::from_vec(target, before.dims(), &Device::Cpu).and_then(|tensor| tensor.to_dtype(before.dtype()));
        let tensor = tensor.map_err(failed)?;
        batch.inputs.insert(name.clone(), tensor);
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::References;

    fn draw(step: u64) -> Draw {
        Draw { seed: 3, step, rank: 0 }
    }

    fn batch(dims: &[usize]) -> Batch {
        let values: Vec<f32> = (0..dims.iter().product()).map(|at: usize| at as f32).collect();
        let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
        Batch { inputs: [("pixel_values".to_owned(), tensor)].into(), references: References::None, samples: dims[0] }
    }

    fn pixels(batches: &[Batch]) -> Vec<f32> {
        batches.iter().flat_map(|batch| transfer::read::<f32>(&batch.inputs["pixel_values"]).unwrap()).collect()
    }

    #[test]
    fn pixels_are_those_at_a_distance() {
        let layout = Layout::new(&[1, 1, 2, 3]).unwrap();
        let copied = |shift: [isize; 2], is_flipped: bool| {
            let mut target = vec![0.0; 6];
            layout.copy(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &mut target, shift, is_flipped);
            target
        };
        assert_eq!(copied([0, 0], false), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(copied([0, 0], true), [2.0, 1.0, 0.0, 5.0, 4.0, 3.0]);
        assert_eq!(copied([1, 0], false), [3.0, 4.0, 5.0, 3.0, 4.0, 5.0]);
        assert_eq!(copied([-1, 1], false), [1.0, 2.0, 2.0, 1.0, 2.0, 2.0]);
        assert_eq!(copied([0, -1], true), [1.0, 0.0, 0.0, 4.0, 3.0, 3.0]);
    }

    #[test]
    fn images_in_both_layouts_have_the_same_changes() {
        let options = Augment { flip: true, shift: 1 };
        let (first, last) = (batch(&[6, 3, 4, 5]), batch(&[6, 4, 5, 3]));
        let mut permuted = last.clone();
        let channels_last = first.inputs["pixel_values"].permute((0, 2, 3, 1)).unwrap().contiguous().unwrap();
        permuted.inputs.insert("pixel_values".to_owned(), channels_last);
        let changed = options.augmented(vec![first.clone()], draw(1)).unwrap();
        let other = options.augmented(vec![permuted], draw(1)).unwrap();
        let back = other[0].inputs["pixel_values"].permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
        assert_eq!(transfer::read::<f32>(&back).unwrap(), pixels(&changed));
        assert_ne!(pixels(&changed), pixels(std::slice::from_ref(&first)));
        assert_ne!(pixels(&changed), pixels(&options.augmented(vec![first.clone()], draw(2)).unwrap()));
        assert_eq!(pixels(&changed), pixels(&options.augmented(vec![first], draw(1)).unwrap()));
    }

    #[test]
    fn unsuitable_samples_and_options_are_rejected() {
        let options: Augment = "{ flip: true }".parse().unwrap();
        assert_eq!(options, Augment { flip: true, shift: 0 });
        assert!(options.check("finetune").is_ok() && Augment::default().check("finetune").is_err() && "{ turn: 1 }".parse::<Augment>().is_err());
        let message = |options: Augment, dims: &[usize]| options.augmented(vec![batch(dims)], draw(0)).unwrap_err().to_string();
        assert!(message(options, &[2, 8]).contains("images with 1 or 3 channels"));
        assert!(message(Augment { shift: 4, ..options }, &[2, 3, 4, 5]).contains("not smaller than images of 4 × 5"));
    }
}
