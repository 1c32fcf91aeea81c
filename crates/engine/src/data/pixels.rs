//! Image preprocessing, as configured by the image processor of the folder and the recipe.

use std::fmt;
use std::path::Path;

use fast_image_resize::{FilterType, ResizeAlg};
use image::DynamicImage;
use serde_json::{Map, Value};

use super::image_input::ImageInput;
use super::image_processors::{self, ImageProcessor};
use super::image_size::Size;
use super::options::{ChannelOrder, Data, ImageLayout};
use super::resample::{self, MAX_PIXELS, resize};
use super::{Target, qwen_vl};
use crate::arch::{Keys, ReadKeys, Settings};
use crate::error::{Error, Result};
use crate::ir::Element;
use crate::model::processor_settings;

/// Factor that scales bytes to 0 to 1.
const UNIT: f64 = 1.0 / 255.0;
/// ConvNeXt's processor crops images after resizing if the size is below this.
const CONVNEXT_NO_CROP: usize = 384;

/// Keys that do not affect the result. Values of disabled steps are ignored.
const KEYS: Keys = Keys {
    harmless: &[
        "_valid_processor_keys",
        "crop_size",
        "data_format",
        "device",
        "disable_grouping",
        // Of the annotations of detectors.
        "do_convert_annotations",
        "do_convert_rgb",
        "feature_extractor_type",
        "format",
        "image_mean",
        "image_processor_type",
        "image_std",
        "input_data_format",
        "max_size",
        "processor_class",
        "return_tensors",
        "rescale_factor",
        "size",
    ],
    neutral: &[
        ("do_align_long_axis", "false"),
        ("do_color_quantize", "false"),
        ("do_crop_margin", "false"),
        ("do_flip_channel_order", "false"),
        ("do_pad", "false"),
        ("do_reduce_labels", "false"),
        ("do_thumbnail", "false"),
        ("ensure_multiple_of", "1"),
        ("include_top", "false"),
        ("keep_aspect_ratio", "false"),
        ("pad_size", "null"),
        ("rescale_offset", "false"),
        ("size_divisor", "null"),
    ],
};

/// Preprocessing of images: resize, crop, rescale, normalize.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pixels {
    size: Option<(Size, ResizeAlg)>,
    /// Height and width of the center crop.
    crop: Option<(usize, usize)>,
    /// Whether half pixels in front of the crop are rounded to even numbers, instead of down.
    rounded_crop: bool,
    /// Factor on pixels.
    pub rescale: f64,
    /// Whether the channel order is BGR.
    reversed: bool,
    mean: Vec<f64>,
    std: Vec<f64>,
}

impl Pixels {
    /// Reads the preprocessing of the model's folder, and applies the data options.
    pub fn open(options: &Data, target: &Target, input: &ImageInput) -> Result<Pixels> {
        let settings = processor_settings(target.folder, target.synthesized)?;
        let mut pixels = if let Some((path, settings)) = &settings {
            Pixels::parse(settings.values(), path, input.size(), target.config)?.0
        } else if let Some(pixels) = Pixels::torchvision(target.config).filter(|_| input.channels == 3 && input.port.element == Element::Float) {
            pixels
        } else {
            let rescale = if input.port.element == Element::Int { 1.0 } else { UNIT };
            Pixels { rescale, ..Pixels::plain(&Data::default())? }
        };
        if let Some((path, settings)) = settings.as_ref().filter(|_| options.resize.is_none()) {
            image_processors::require_known_size(settings.values(), path)?;
        }
        if let Some(size) = options.resize.as_deref().and_then(Size::from_sides) {
            let filter = pixels.size.map_or(ResizeAlg::Convolution(FilterType::Bilinear), |(_, filter)| filter);
            (pixels.size, pixels.crop) = (Some((size, filter)), None);
        }
        pixels.reversed = options.channels == Some(ChannelOrder::Bgr);
        if pixels.reversed {
            // The file has them in RGB order.
            pixels.mean.reverse();
            pixels.std.reverse();
        }
        pixels.crop = options.crop.as_deref().and_then(Size::from_sides).map(Size::crop).or(pixels.crop);
        pixels.rescale = options.rescale.unwrap_or(pixels.rescale);
        for (values, given) in [(&mut pixels.mean, &options.mean), (&mut pixels.std, &options.std)] {
            if !given.is_empty() {
                values.clone_from(given);
            }
        }
        if pixels.reversed && input.channels != 3 {
            return Err(Error::option("data", format!("`channels: bgr` requires a model with 3 channels, this one has {}", input.channels)));
        }
        pixels.require_plausible_mean()?;
        if let Some((path, settings)) = &settings {
            image_processors::require_statistics(settings.values(), path, &pixels.mean, &pixels.std)?;
        }
        Ok(pixels)
    }

    /// The evaluation preprocessing of torchvision's first ImageNet weights for the variant that
    /// `config.json` names.
    fn torchvision(config: &Map<String, Value>) -> Option<Pixels> {
        let text = |key: &str| config.get(key).and_then(Value::as_str);
        let variant = text("variant").filter(|_| text("model_type") == Some("torchvision"))?;
        let (shorter, side) = match variant {
            "efficientnet_b1" => (256, 240),
            "efficientnet_b2" => (288, 288),
            "efficientnet_b3" => (320, 300),
            "efficientnet_b4" => (384, 380),
            "efficientnet_b5" => (456, 456),
            "efficientnet_b6" => (528, 528),
            "efficientnet_b7" => (600, 600),
            _ => (256, 224),
        };
        let filter = if variant.starts_with("efficientnet") { FilterType::CatmullRom } else { FilterType::Bilinear };
        Some(Pixels {
            size: Some((Size::Shorter(shorter), ResizeAlg::Convolution(filter))),
            crop: Some((side, side)),
            rounded_crop: true,
            rescale: UNIT,
            mean: vec![0.485, 0.456, 0.406],
            std: vec![0.229, 0.224, 0.225],
            reversed: false,
        })
    }

    /// Rejects a mean for pixels from 0 to 255 where pixels are scaled to 0 to 1.
    fn require_plausible_mean(&self) -> Result<()> {
        match self.mean.iter().find(|mean| **mean > 1.0) {
            Some(mean) if (0.0..=UNIT * 1.01).contains(&self.rescale) => {
                let reason = format!("`mean` is {mean}, but `rescale` {:.6} scales pixels to 0 to 1", self.rescale);
                Err(Error::option("data", format!("{reason}: divide `mean` and `std` by 255, or set `rescale: 1`")))
            }
            _ => Ok(()),
        }
    }

    /// Preprocessing of arrays, from the data options only.
    pub fn plain(options: &Data) -> Result<Pixels> {
        let rescale = options.rescale.unwrap_or(1.0);
        let pixels = Pixels { size: None, crop: None, rounded_crop: false, rescale, mean: options.mean.clone(), std: options.std.clone(), reversed: false };
        pixels.require_plausible_mean()?;
        Ok(pixels)
    }

    /// Parses a preprocessor configuration, for an input of this fixed height and width, and the `config` of
    /// the model. Also returns its unrecognized keys.
    pub(super) fn parse(values: &Map<String, Value>, path: &Path, input: Option<(usize, usize)>, config: &Map<String, Value>) -> Result<(Pixels, Vec<String>)> {
        let read = ReadKeys::default();
        let values = Settings::new(values).recording(&read);
        let wrong = |key: &str| Error::malformed(path, format!("`{key}` is not supported: {}", values.get(key).unwrap_or(&Value::Null)));
        let on = |key: &str| values.get(key).and_then(Value::as_bool);
        let length = |value: &Value| value.as_u64().filter(|n| (1..=MAX_PIXELS as u64).contains(n)).map(|n| n as usize);
        let number = |value: &Value, key: &str| value.get(key).and_then(length);
        let class = image_processors::class(|key| values.get(key));
        let processor = ImageProcessor::from_class(class);
        // Qwen-VL computes a size from each image; here, all images have that of the input.
        let is_adaptive = class == "Qwen2VL";
        if is_adaptive {
            qwen_vl::require_patches(&values, path, config)?;
        }
        let numbers = |key: &str, default: Option<[f64; 3]>| match values.get(key) {
            None | Some(Value::Null) => Ok(default.map_or(Vec::new(), Vec::from)),
            Some(Value::Array(items)) => items.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>().ok_or_else(|| wrong(key)),
            Some(_) => Err(wrong(key)),
        };
        // DETR and its variants.
        let is_detector = class.ends_with("Detr");
        let keeps_aspect = processor.map_or(is_detector || on("do_center_crop") == Some(true), |processor| processor.keeps_aspect);
        let square = |key: &str, default: Option<Size>| match values.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(size) => match (length(size), number(size, "height"), number(size, "width"), number(size, "shortest_edge")) {
                (Some(shorter), ..) if key == "size" && keeps_aspect => match values.get("max_size").and_then(length) {
                    Some(longer) => Ok(Some(Size::Limited { shorter, longer })),
                    None => Ok(Some(Size::Shorter(shorter))),
                },
                (Some(n), ..) => Ok(Some(Size::Exactly(n, n))),
                (_, Some(height), Some(width), _) => Ok(Some(Size::Exactly(height, width))),
                (.., Some(shorter)) => match number(size, "longest_edge").filter(|_| key == "size" && class != "ConvNext") {
                    None => Ok(Some(Size::Shorter(shorter))),
                    Some(longer) if processor.is_some() || is_detector => Ok(Some(Size::Limited { shorter, longer })),
                    Some(_) => {
                        let reason = format!("`longest_edge` of `size` has an unknown meaning for the class `{class}`");
                        Err(Error::malformed(path, format!("{reason}: specify `height` and `width` instead")))
                    }
                },
                _ => Err(wrong(key)),
            },
        };
        let given = |key: &str| values.get(key).filter(|value| !value.is_null());
        let filter = match given("resample") {
            Some(number) => resample::filter(number).ok_or_else(|| wrong("resample"))?,
            None => ResizeAlg::Convolution(processor.map_or(FilterType::Bilinear, |processor| processor.filter)),
        };
        let mut size = match on("do_resize") {
            Some(false) => None,
            _ if is_adaptive => input.map(|(height, width)| Size::Exactly(height, width)),
            _ => square("size", processor.map(|processor| processor.size))?,
        };
        let crops = on("do_center_crop").unwrap_or(processor.is_some_and(|processor| processor.crops));
        let default_crop = processor.and_then(|processor| processor.crop_size).map(|side| Size::Exactly(side, side));
        let mut crop = if crops { square("crop_size", default_crop)?.or(size) } else { None };
        if let (true, Some(Size::Shorter(edge))) = (class == "ConvNext", size) {
            let fraction = values.get("crop_pct").and_then(Value::as_f64).unwrap_or(224.0 / 256.0);
            if !fraction.is_normal() || fraction < 0.0 {
                return Err(wrong("crop_pct"));
            }
            (size, crop) = if edge < CONVNEXT_NO_CROP {
                (Some(Size::Shorter((edge as f64 / fraction) as usize)), Some(Size::Exactly(edge, edge)))
            } else {
                (Some(Size::Exactly(edge, edge)), None)
            };
        }
        let crop = crop.map(Size::crop);
        let factor = given("rescale_factor").map_or(Some(UNIT), Value::as_f64);
        let rescale = if on("do_rescale") == Some(false) { 1.0 } else { factor.ok_or_else(|| wrong("rescale_factor"))? };
        let normalize = on("do_normalize").unwrap_or(processor.is_none_or(|processor| processor.normalizes));
        // EfficientNet's processor divides by the deviation again unless `include_top` is false.
        let divides_twice = class == "EfficientNet" && on("include_top") != Some(false);
        let mean = if normalize { numbers("image_mean", processor.map(|processor| processor.mean))? } else { vec![] };
        let mut std = if normalize || divides_twice { numbers("image_std", processor.map(|processor| processor.std))? } else { vec![] };
        if normalize && divides_twice {
            std.iter_mut().for_each(|value| *value *= *value);
        }
        if std.iter().any(|value| !value.is_normal()) {
            return Err(wrong("image_std"));
        }
        let unknown = KEYS.check(&values, &path.file_name().unwrap_or_default().to_string_lossy())?;
        Ok((Pixels { size: size.map(|size| (size, filter)), crop, rounded_crop: false, rescale, mean, std, reversed: false }, unknown))
    }

    /// Preprocesses an image. Returns the values in the model's layout, the height and the width.
    pub fn preprocess(&self, image: &DynamicImage, input: &ImageInput, path: &Path) -> Result<(Vec<f32>, usize, usize)> {
        let channels = input.channels;
        let (mut height, mut width) = (image.height() as usize, image.width() as usize);
        let mut bytes = match channels {
            1 => super::gray::gray(image),
            3 => image.to_rgb8().into_raw(),
            _ => {
                return Err(Error::Unsupported {
                    what: format!("images for a model with {channels} channels"),
                    hint: "provide the samples as `arrays`".into(),
                });
            }
        };
        if let Some((size, filter)) = self.size {
            let (high, wide) = size.of_image(height, width);
            bytes = resize(bytes, (height, width), (high, wide), channels, filter).map_err(|e| Error::malformed(path, e))?;
            (height, width) = (high, wide);
        }
        if let Some((high, wide)) = self.crop {
            let (Some(margin_y), Some(margin_x)) = (height.checked_sub(high), width.checked_sub(wide)) else {
                return Err(Error::malformed(
                    path,
                    format!("is {height} x {width}, smaller than the center crop of {high} x {wide}: set a larger `resize` or a smaller `crop`"),
                ));
            };
            // torchvision rounds half pixels to even numbers, transformers rounds down.
            let before = |margin: usize| (margin / 2).saturating_add(usize::from(self.rounded_crop && margin % 4 == 3));
            let [row, left, cropped] = [width, before(margin_x), wide].map(|pixels| pixels.saturating_mul(channels));
            let rows = bytes.chunks_exact(row).skip(before(margin_y)).take(high);
            bytes = rows.filter_map(|row| row.get(left..)?.get(..cropped)).flatten().copied().collect();
            (height, width) = (high, wide);
        }
        let mut numbers = Vec::with_capacity(bytes.len());
        for channel in 0..channels {
            numbers.extend(bytes.iter().skip(channel).step_by(channels).map(|value| f32::from(*value)));
        }
        Ok((self.to_model_layout(numbers, input)?, height, width))
    }

    /// The option that gives all images the same size.
    pub fn size_advice(&self) -> String {
        Size::advice(self.size.map(|(size, _)| size), self.crop)
    }

    /// Whether images are resized or cropped.
    pub fn resizes(&self) -> bool {
        self.size.is_some() || self.crop.is_some()
    }

    /// Normalizes channel-first values, and converts them to the model's channel order and layout.
    pub fn to_model_layout(&self, mut numbers: Vec<f32>, input: &ImageInput) -> Result<Vec<f32>> {
        let (channels, count) = (input.channels.max(1), numbers.len());
        let pixels = count.checked_div(channels).unwrap_or(0).max(1);
        if self.reversed {
            numbers = numbers.chunks(pixels).rev().flatten().copied().collect();
        }
        self.normalize(&mut numbers, input.channels)?;
        if input.layout == ImageLayout::Nhwc && channels > 1 {
            numbers = (0..pixels).flat_map(|pixel| numbers.iter().skip(pixel).step_by(pixels)).copied().collect();
        }
        Ok(numbers)
    }

    /// Applies factor, mean and standard deviation to channel-first values.
    pub fn normalize(&self, numbers: &mut [f32], channels: usize) -> Result<()> {
        for (name, values) in [("mean", &self.mean), ("std", &self.std)] {
            if values.len() > 1 && values.len() != channels {
                return Err(Error::option("data", format!("`{name}` has {} values, but the samples have {channels} channels", values.len())));
            }
        }
        let pixels = numbers.len().checked_div(channels).unwrap_or(0).max(1);
        for (channel, values) in numbers.chunks_mut(pixels).enumerate() {
            let pick = |values: &[f64], default: f64| values.get(channel).or(values.first()).copied().unwrap_or(default);
            let (mean, std) = (pick(&self.mean, 0.0), pick(&self.std, 1.0));
            if self.rescale != 1.0 || mean != 0.0 || std != 1.0 {
                for value in values {
                    *value = ((f64::from(*value) * self.rescale - mean) / std) as f32;
                }
            }
        }
        Ok(())
    }
}

/// Describes the preprocessing, for plans and reports.
impl fmt::Display for Pixels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.size {
            None => f.write_str("not resized")?,
            Some((Size::Exactly(height, width), _)) => write!(f, "resized to {height} x {width}")?,
            Some((Size::Shorter(edge), _)) => write!(f, "resized to a shorter side of {edge}")?,
            Some((Size::Limited { shorter, longer }, _)) => write!(f, "resized to a shorter side of {shorter} and a longer side of at most {longer}")?,
        }
        if let Some((height, width)) = self.crop {
            write!(f, ", center crop of {height} x {width}")?;
        }
        let factor = self.rescale;
        if factor == UNIT {
            f.write_str(", pixels divided by 255")?
        } else {
            write!(f, ", pixels multiplied by {factor}")?
        }
        for (name, values) in [("mean", &self.mean), ("std", &self.std)] {
            if values.is_empty() { write!(f, ", no {name}")? } else { write!(f, ", {name} {values:?}")? }
        }
        f.write_str(if self.reversed { ", channels in BGR order" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Port;

    fn pixels(json: &str) -> Result<Pixels> {
        let values: Map<String, Value> = serde_json::from_str(json).unwrap();
        Pixels::parse(&values, Path::new("p"), Some((28, 56)), &Map::new()).map(|(pixels, _)| pixels)
    }

    #[test]
    fn images_of_qwen_vl_have_the_size_of_the_input() {
        let json =
            r#"{"image_processor_type":"Qwen2VLImageProcessorFast","size":{"shortest_edge":3136,"longest_edge":9000},"min_pixels":null,"patch_size":14}"#;
        assert_eq!(pixels(json).unwrap().size, Some((Size::Exactly(28, 56), ResizeAlg::Convolution(FilterType::CatmullRom))));
        assert_eq!(
            pixels(&json.replace("Qwen2VLImageProcessorFast", "ViTImageProcessor")).unwrap().size.map(|(size, _)| size),
            Some(Size::Limited { shorter: 3136, longer: 9000 })
        );
    }

    #[test]
    fn a_mean_of_bytes_is_rejected_for_pixels_up_to_one() {
        let check = |json: &str| pixels(json).unwrap().require_plausible_mean().map_err(|e| e.to_string());
        assert!(check(r#"{"image_mean":[0.485,123.675,0.4]}"#).unwrap_err().contains("`mean` is 123.675"));
        assert!(check(r#"{"image_mean":[1.2],"do_rescale":true}"#).unwrap_err().contains("`rescale: 1`"));
        assert_eq!(check(r#"{"image_mean":[123.675],"do_rescale":false}"#), Ok(()));
        assert_eq!(check(r#"{"image_mean":[0.485,0.456,1.0]}"#), Ok(()));
    }

    #[test]
    fn torchvision_variants_have_their_own_preprocessing() {
        let synthesized = crate::model::SynthesizedFiles::new();
        let open = |config: &str, channels: usize, options: &Data| {
            let config: Map<String, Value> = serde_json::from_str(config).unwrap();
            let inputs = [Port { name: "x".into(), element: Element::Float, shape: vec![None, Some(channels), None, None], number: None }];
            let target = Target { inputs: &inputs, ..Target::new(Path::new("none"), &synthesized, &config) };
            Pixels::open(options, &target, &ImageInput::from_target(options, &target, Path::new("p")).unwrap()).unwrap()
        };
        let resnet = r#"{"model_type":"torchvision","variant":"resnet18"}"#;
        let described = |config: &str, options: &Data| open(config, 3, options).to_string();
        let usual = "resized to a shorter side of 256, center crop of 224 x 224, pixels divided by 255, mean [0.485, 0.456, 0.406], std [0.229, 0.224, 0.225]";
        assert_eq!(described(resnet, &Data::default()), usual);
        let (crop, mean) = (Data { crop: Some(vec![64]), ..Data::default() }, Data { mean: vec![0.5], ..Data::default() });
        assert_eq!(described(resnet, &crop), usual.replace("224 x 224", "64 x 64"));
        assert_eq!(described(resnet, &mean), usual.replace("[0.485, 0.456, 0.406]", "[0.5]"));
        let small = described(resnet, &Data { resize: Some(vec![32, 32]), ..Data::default() });
        assert!(small.starts_with("resized to 32 x 32, pixels divided by 255, mean [0.485"), "{small}");
        // `int(round(margin / 2))` of torchvision: of 59 columns beyond the crop, 30 are at its left.
        let mut wide = image::RgbImage::new(283, 256);
        (0..256).for_each(|y| wide.put_pixel(30, y, image::Rgb([255; 3])));
        let port = Port { name: "x".into(), element: Element::Float, shape: vec![None, Some(3), None, None], number: None };
        let input = ImageInput { port, channels: 3, layout: ImageLayout::Nchw };
        let (values, ..) = open(resnet, 3, &Data::default()).preprocess(&DynamicImage::ImageRgb8(wide), &input, Path::new("p")).unwrap();
        assert!(values[0] > 2.0 && values[1] < 0.0, "{:?}", &values[..2]);
        let efficientnet = open(r#"{"model_type":"torchvision","variant":"efficientnet_b4"}"#, 3, &Data::default());
        assert_eq!((efficientnet.size, efficientnet.crop), (Some((Size::Shorter(384), ResizeAlg::Convolution(FilterType::CatmullRom))), Some((380, 380))));
        for pixels in [open(resnet, 1, &Data::default()), open(r#"{"model_type":"resnet"}"#, 3, &Data::default())] {
            assert_eq!(pixels.to_string(), "not resized, pixels divided by 255, no mean, no std");
        }
    }

    #[test]
    fn invalid_sizes_and_factors_are_rejected() {
        for (json, key) in [
            (r#"{"size":0}"#, "size"),
            (r#"{"size":{"height":12,"width":0}}"#, "size"),
            (r#"{"size":{"shortest_edge":4611686018427387904}}"#, "size"),
            (r#"{"do_center_crop":true,"crop_size":0,"size":12}"#, "crop_size"),
            (r#"{"image_processor_type":"ConvNextImageProcessor","size":{"shortest_edge":12},"crop_pct":0.0}"#, "crop_pct"),
            (r#"{"image_processor_type":"ConvNextImageProcessor","size":{"shortest_edge":12},"crop_pct":-1}"#, "crop_pct"),
            (r#"{"image_std":[0.5,0,0.5]}"#, "image_std"),
            (r#"{"resample":"bicubic"}"#, "resample"),
            (r#"{"rescale_factor":"1/255"}"#, "rescale_factor"),
        ] {
            let error = pixels(json).unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}` is not supported")), "{json}: {error}");
        }
    }

    #[test]
    fn processor_configurations_are_parsed() {
        let vit = pixels(r#"{"do_resize":true,"size":{"height":224,"width":224},"resample":2,"image_mean":[0.5,0.5,0.5],"image_std":[0.5,0.5,0.5]}"#).unwrap();
        assert_eq!(vit.size, Some((Size::Exactly(224, 224), ResizeAlg::Convolution(FilterType::Bilinear))));
        assert_eq!((vit.crop, vit.mean.len()), (None, 3));
        let resnet = pixels(r#"{"feature_extractor_type":"ConvNextFeatureExtractor","crop_pct":0.875,"size":{"shortest_edge":224},"resample":3}"#).unwrap();
        assert_eq!(resnet.size.unwrap().0, Size::Shorter(256));
        assert_eq!(resnet.crop, Some((224, 224)));
        let mobilenet = pixels(r#"{"do_center_crop":true,"crop_size":{"height":224,"width":224},"size":{"shortest_edge":256},"do_normalize":false}"#).unwrap();
        assert_eq!((mobilenet.size.unwrap().0, mobilenet.crop, mobilenet.mean.len()), (Size::Shorter(256), Some((224, 224)), 0));
        let efficientnet =
            |more: &str| pixels(&format!(r#"{{"image_processor_type":"EfficientNetImageProcessor","image_mean":[0.5],"image_std":[0.5]{more}}}"#));
        for (more, std) in
            [("", vec![0.25]), (r#","include_top":true"#, vec![0.25]), (r#","include_top":false"#, vec![0.5]), (r#","do_normalize":false"#, vec![0.5])]
        {
            assert_eq!(efficientnet(more).unwrap().std, std, "{more}");
        }
        assert!(efficientnet(r#","rescale_offset":true"#).unwrap_err().to_string().contains("`rescale_offset`"));
        assert!(pixels(r#"{"size":{"longest_edge":5}}"#).unwrap_err().to_string().contains("`size`"));
        let error = pixels(r#"{"image_processor_type":"Idefics2ImageProcessor","size":{"shortest_edge":4,"longest_edge":5}}"#).unwrap_err().to_string();
        assert!(error.contains("`longest_edge` of `size` has an unknown meaning for the class `Idefics2`"), "{error}");
        for detr in [
            r#"{"image_processor_type":"DetrImageProcessor","size":{"shortest_edge":800,"longest_edge":1333}}"#,
            r#"{"feature_extractor_type":"DetrFeatureExtractor","size":800,"max_size":1333}"#,
        ] {
            let found = pixels(detr).unwrap().to_string();
            assert!(found.starts_with("resized to a shorter side of 800 and a longer side of at most 1333, "), "{found}");
        }
        assert!(pixels(r#"{"resample":9}"#).unwrap_err().to_string().contains("`resample`"));
    }

    #[test]
    fn images_are_cropped_and_normalized_per_channel() {
        let mut picture = image::RgbImage::new(4, 2);
        for (x, y, pixel) in picture.enumerate_pixels_mut() {
            *pixel = image::Rgb([x as u8, 10 + y as u8, 100]);
        }
        let picture = DynamicImage::ImageRgb8(picture);
        let plain = Pixels { size: None, crop: Some((2, 2)), rounded_crop: false, rescale: 1.0, mean: vec![], std: vec![], reversed: false };
        let pixels = Pixels { mean: vec![0.0, 10.0, 0.0], std: vec![1.0, 1.0, 50.0], ..plain };
        let port = Port { name: "x".into(), element: Element::Float, shape: vec![None; 4], number: None };
        let input = |channels, layout| ImageInput { port: port.clone(), channels, layout };
        let (numbers, height, width) = pixels.preprocess(&picture, &input(3, ImageLayout::Nchw), Path::new("p")).unwrap();
        assert_eq!((height, width), (2, 2));
        assert_eq!(numbers, [1.0, 2.0, 1.0, 2.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
        let last = pixels.preprocess(&picture, &input(3, ImageLayout::Nhwc), Path::new("p")).unwrap().0;
        assert_eq!(last, [1.0, 0.0, 2.0, 2.0, 0.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 2.0]);
        // Means are in the model's channel order, BGR.
        let reversed = Pixels { reversed: true, mean: vec![100.0, 10.0, 1.0], std: vec![], ..pixels };
        let first = reversed.preprocess(&picture, &input(3, ImageLayout::Nhwc), Path::new("p")).unwrap().0;
        assert_eq!(first, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
    }
}
