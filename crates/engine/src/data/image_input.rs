//! The image input of a model: its axes and channels.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::options::{Data, ImageLayout};
use super::{Batch, Port, Target, shaped};
use crate::error::{Error, Result};
use crate::ir::Element;

/// The image input of a model.
#[derive(Debug, Clone)]
pub(super) struct ImageInput {
    pub port: Port,
    pub channels: usize,
    pub layout: ImageLayout,
}

impl ImageInput {
    /// The image input of a model with a single input.
    pub fn from_target(options: &Data, target: &Target, path: &Path) -> Result<ImageInput> {
        let [port] = target.inputs else {
            let names = target.inputs.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
            return Err(Error::option(
                "data",
                format!("{}: the model has the inputs {names}, but image data supports only one: provide all inputs as `arrays`", path.display()),
            ));
        };
        ImageInput::from_port(options, port, path)
    }

    /// As [`from_target`](Self::from_target), for one of the inputs.
    pub fn from_port(options: &Data, port: &Port, path: &Path) -> Result<ImageInput> {
        let wrong = |reason: &str| Error::option("data", format!("{}: the model's input `{}` is {}, {reason}", path.display(), port.name, port.sizes()));
        let (layout, channels) = match port.shape.as_slice() {
            [_, first, _, last] => {
                let is_channels = |size: &Option<usize>| matches!(size, Some(1 | 3));
                let layout = options.layout.unwrap_or(if is_channels(last) && !is_channels(first) { ImageLayout::Nhwc } else { ImageLayout::Nchw });
                let channels = if layout == ImageLayout::Nhwc { *last } else { *first };
                let default = (options.layout.is_some() || options.channels.is_some()).then_some(3);
                (layout, channels.or(default).ok_or_else(|| wrong("without a fixed number of channels: set `layout: nchw` or `layout: nhwc`"))?)
            }
            // Flattened pixels, or images without a channel axis: one channel, unless the images have more.
            [_, Some(_)] | [_, _, _] if options.layout != Some(ImageLayout::Nhwc) => (ImageLayout::Nchw, 1),
            _ => return Err(wrong("which is not an image input")),
        };
        Ok(ImageInput { port: port.clone(), channels, layout })
    }

    /// Checks the number of channels of images; single-channel images are expanded to the channels of
    /// the input.
    pub fn require_channels(&mut self, channels: usize, path: &Path) -> Result<()> {
        if self.port.shape.len() == 2 {
            self.channels = channels;
        }
        if channels == 1 || channels == self.channels {
            return Ok(());
        }
        Err(Error::malformed(path, format!("has images with {channels} channels, but the model's input `{}` is {}", self.port.name, self.port.sizes())))
    }

    /// Checks the size of an image. `advice`: the option that changes it.
    pub fn require_size(&self, height: usize, width: usize, path: &Path, advice: &str) -> Result<()> {
        let shape = self.shape(1, height, width);
        let fits = shape.iter().zip(&self.port.shape).skip(1).all(|(have, want)| want.is_none_or(|want| want == *have));
        if fits {
            return Ok(());
        }
        let reason = format!(
            "is {height} x {width}, but the model's input `{}` is {}: {advice}, or add a preprocessor_config.json to the model",
            self.port.name,
            self.port.sizes()
        );
        Err(Error::malformed(path, reason))
    }

    /// Height and width, if both are fixed.
    pub fn size(&self) -> Option<(usize, usize)> {
        match (self.port.shape.as_slice(), self.layout) {
            ([_, _, height, width], ImageLayout::Nchw) | ([_, height, width, _], ImageLayout::Nhwc) => Some(((*height)?, (*width)?)),
            _ => None,
        }
    }

    /// The shape of a batch for the input.
    fn shape(&self, count: usize, height: usize, width: usize) -> Vec<usize> {
        match (self.port.shape.len(), self.layout) {
            (2, _) => vec![count, self.channels.saturating_mul(height).saturating_mul(width)],
            (3, _) => vec![count, height, width],
            (_, ImageLayout::Nchw) => vec![count, self.channels, height, width],
            (_, ImageLayout::Nhwc) => vec![count, height, width, self.channels],
        }
    }

    /// Minimum, mean and maximum of each channel of the images of a batch.
    pub fn channel_ranges(&self, batch: &Batch) -> Result<Vec<[f64; 3]>> {
        let Some(images) = batch.inputs.get(&self.port.name) else { return Ok(Vec::new()) };
        let values = images.to_dtype(DType::F64).and_then(|images| images.flatten_all()?.to_vec1::<f64>()).map_err(shaped)?;
        let channels = self.channels.max(1);
        let planes = batch.samples.saturating_mul(channels).max(1);
        let adjacent = if self.layout == ImageLayout::Nhwc { 1 } else { values.len().checked_div(planes).unwrap_or(0).max(1) };
        let mut found = vec![(f64::INFINITY, 0.0, f64::NEG_INFINITY, 0.0); channels];
        for (values, channel) in values.chunks(adjacent).zip((0..channels).cycle()) {
            let Some((low, sum, high, count)) = found.get_mut(channel) else { continue };
            for value in values {
                (*low, *sum, *high, *count) = (low.min(*value), *sum + value, high.max(*value), *count + 1.0);
            }
        }
        Ok(found.into_iter().filter(|(.., count)| *count > 0.0).map(|(low, sum, high, count)| [low, sum / count, high]).collect())
    }

    /// The name of the input, and the tensor of a batch for it.
    pub fn batch(&self, numbers: Vec<f32>, count: usize, height: usize, width: usize) -> Result<(String, Tensor)> {
        let shape = self.shape(count, height, width);
        let tensor = if self.port.element == Element::Float {
            Tensor::from_vec(numbers, shape, &Device::Cpu)
        } else if numbers.iter().all(|number| number.fract() == 0.0) {
            Tensor::from_vec(numbers.into_iter().map(|number| number as i64).collect::<Vec<_>>(), shape, &Device::Cpu)
        } else {
            let name = &self.port.name;
            return Err(Error::option("data", format!("`{name}` requires integers, but `rescale`, `mean` and `std` produce fractions: remove them")));
        };
        Ok((self.port.name.clone(), tensor.map_err(shaped)?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::ChannelOrder;
    use super::super::pixels::Pixels;
    use super::*;

    fn port(element: Element, shape: &[Option<usize>]) -> Port {
        Port { name: "x".into(), element, shape: shape.to_vec(), number: None }
    }

    #[test]
    fn inputs_of_any_layout_are_supported() {
        let (synthesized, config) = Default::default();
        let open = |element, shape: &[Option<usize>], options: Data| {
            let inputs = [port(element, shape)];
            let target = Target { inputs: &inputs, ..Target::new(Path::new("none"), &synthesized, &config) };
            let input = ImageInput::from_target(&options, &target, Path::new("p"))?;
            Pixels::open(&options, &target, &input).map(|pixels| (input, pixels))
        };
        let (float, none) = (Element::Float, Data::default());
        let nhwc = || Data { layout: Some(ImageLayout::Nhwc), ..Data::default() };
        let bgr = || Data { channels: Some(ChannelOrder::Bgr), ..Data::default() };
        for (shape, options, expected) in [
            (&[None, Some(3), None, None][..], none.clone(), (ImageLayout::Nchw, 3)),
            (&[None, Some(224), Some(224), Some(3)], none.clone(), (ImageLayout::Nhwc, 3)),
            (&[None, Some(1), Some(28), Some(28)], none.clone(), (ImageLayout::Nchw, 1)),
            (&[None, Some(3), Some(3), Some(3)], none.clone(), (ImageLayout::Nchw, 3)),
            (&[None, Some(3), Some(3), Some(3)], nhwc(), (ImageLayout::Nhwc, 3)),
            (&[None, None, None, None], nhwc(), (ImageLayout::Nhwc, 3)),
            (&[None, None, None, None], bgr(), (ImageLayout::Nchw, 3)),
            (&[None, Some(784)], none.clone(), (ImageLayout::Nchw, 1)),
            (&[None, Some(28), None], none.clone(), (ImageLayout::Nchw, 1)),
        ] {
            let (input, pixels) = open(float, shape, options).unwrap();
            assert_eq!(((input.layout, input.channels), pixels.rescale), (expected, 1.0 / 255.0), "{shape:?}");
        }
        for (shape, options, reason) in [
            (&[None, None, None, None][..], none.clone(), "fixed number of channels"),
            (&[None, Some(1), None, None], bgr(), "3 channels, this one has 1"),
            (&[None, Some(784)], nhwc(), "not an image input"),
            (&[None, None], none.clone(), "not an image input"),
        ] {
            assert!(open(float, shape, options).unwrap_err().to_string().contains(reason), "{reason}");
        }
        // Integer inputs receive the bytes unchanged.
        let (bytes, pixels) = open(Element::Int, &[Some(1), Some(2), Some(1), Some(3)], none).unwrap();
        assert_eq!(pixels.rescale, 1.0);
        let (_, tensor) = bytes.batch(vec![0.0, 255.0, 1.0, 2.0, 3.0, 4.0], 1, 2, 1).unwrap();
        assert_eq!((tensor.dims(), tensor.dtype()), (&[1, 2, 1, 3][..], candle_core::DType::I64));
        assert!(bytes.batch(vec![0.5; 6], 1, 2, 1).unwrap_err().to_string().contains("requires integers"));
        for (layout, last) in [(ImageLayout::Nchw, [4.0, 5.0]), (ImageLayout::Nhwc, [2.0, 5.0])] {
            let image_input = ImageInput { layout, ..bytes.clone() };
            let input = image_input.batch(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 1, 2, 1).unwrap();
            let batch = Batch { inputs: [input].into(), references: super::super::References::None, samples: 1 };
            let found = image_input.channel_ranges(&batch).unwrap();
            assert_eq!((found.len(), found[2]), (3, [last[0], (last[0] + last[1]) / 2.0, last[1]]), "{layout:?}");
        }
        assert!(bytes.require_size(2, 1, Path::new("p"), "").is_ok() && bytes.require_size(1, 2, Path::new("p"), "").is_err());
    }
}
