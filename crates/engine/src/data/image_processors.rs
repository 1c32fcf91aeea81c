//! Default values of the image processors of transformers, which apply to absent and null keys.

use std::path::Path;

use fast_image_resize::FilterType;
use serde_json::{Map, Value};

use super::image_size::Size;
use crate::error::{Error, Result};

/// `IMAGENET_STANDARD_MEAN` and `IMAGENET_STANDARD_STD`.
const STANDARD: [f64; 3] = [0.5; 3];
/// `IMAGENET_DEFAULT_MEAN` and `IMAGENET_DEFAULT_STD`.
const IMAGENET: [[f64; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];
/// `OPENAI_CLIP_MEAN` and `OPENAI_CLIP_STD`.
const OPENAI_CLIP: [[f64; 3]; 2] = [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_58, 0.275_777_11]];

/// Classes that resize images to another size than `size`, by rules of their own.
const OWN_SIZES: [&str; 4] = ["Donut", "Levit", "Perceiver", "PoolFormer"];

/// The class attributes of an image processor. All of them resize, and rescale by 1 / 255.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ImageProcessor {
    pub size: Size,
    /// Whether a number as `size` is the length of the shorter side (`default_to_square = False`).
    pub keeps_aspect: bool,
    /// Whether images are center-cropped.
    pub crops: bool,
    /// Side of the center crop.
    pub crop_size: Option<usize>,
    pub filter: FilterType,
    pub normalizes: bool,
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

impl ImageProcessor {
    /// The image processor with this [`class`].
    pub fn from_class(class: &str) -> Option<ImageProcessor> {
        let square = ImageProcessor {
            size: Size::Exactly(224, 224),
            keeps_aspect: false,
            crops: false,
            crop_size: None,
            filter: FilterType::CatmullRom,
            normalizes: true,
            mean: STANDARD,
            std: STANDARD,
        };
        let cropped = ImageProcessor { size: Size::Shorter(224), keeps_aspect: true, crops: true, crop_size: Some(224), ..square };
        let normalized = |processor: ImageProcessor, [mean, std]: [[f64; 3]; 2]| ImageProcessor { mean, std, ..processor };
        Some(match class {
            "Beit" => ImageProcessor { crop_size: Some(224), ..square },
            "Bit" | "ChineseCLIP" | "CLIP" => normalized(cropped, OPENAI_CLIP),
            "Blip" => ImageProcessor { size: Size::Exactly(384, 384), ..normalized(square, OPENAI_CLIP) },
            "ConvNext" => ImageProcessor { size: Size::Shorter(384), keeps_aspect: true, ..square },
            "DeiT" => ImageProcessor { size: Size::Exactly(256, 256), crops: true, crop_size: Some(224), ..square },
            "EfficientNet" => ImageProcessor { size: Size::Exactly(346, 346), crop_size: Some(289), ..square },
            "MobileNetV1" | "MobileNetV2" => ImageProcessor { size: Size::Shorter(256), filter: FilterType::Bilinear, ..cropped },
            "Pvt" => normalized(square, IMAGENET),
            // Qwen-VL computes a size from each image.
            "Qwen2VL" => normalized(square, OPENAI_CLIP),
            "RTDetr" => ImageProcessor {
                size: Size::Exactly(640, 640),
                keeps_aspect: true,
                filter: FilterType::Bilinear,
                normalizes: false,
                ..normalized(square, IMAGENET)
            },
            "Segformer" => ImageProcessor { size: Size::Exactly(512, 512), filter: FilterType::Bilinear, ..normalized(square, IMAGENET) },
            "Siglip" => ImageProcessor { keeps_aspect: true, ..square },
            "ViT" => ImageProcessor { filter: FilterType::Bilinear, ..square },
            _ => return None,
        })
    }
}

/// The class of a configuration, without its suffixes (`ViT` for `ViTImageProcessorFast` and
/// `ViTFeatureExtractor`). Empty without a class.
pub(super) fn class<'a>(value: impl Fn(&str) -> Option<&'a Value>) -> &'a str {
    let name = ["image_processor_type", "feature_extractor_type"].iter().find_map(|key| value(key)?.as_str()).unwrap_or_default();
    let name = name.strip_suffix("Fast").or(name.strip_suffix("Pil")).unwrap_or(name);
    name.strip_suffix("ImageProcessor").or(name.strip_suffix("FeatureExtractor")).unwrap_or(name)
}

/// Rejects a configuration with a class whose sizes are unknown, unless it does not resize.
pub(super) fn require_known_size(values: &Map<String, Value>, path: &Path) -> Result<()> {
    let class = class(|key| values.get(key));
    if !OWN_SIZES.contains(&class) || values.get("do_resize") == Some(&Value::Bool(false)) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{}: the resizing of `{class}ImageProcessor`", path.display()),
        hint: "set `resize`, and `crop` if needed, or provide preprocessed images as `arrays`".into(),
    })
}

/// Rejects a missing mean or standard deviation of a configuration with `do_normalize`, or with a class that
/// does not disable it.
pub(super) fn require_statistics(values: &Map<String, Value>, path: &Path, mean: &[f64], std: &[f64]) -> Result<()> {
    let class = class(|key| values.get(key));
    let default = || ImageProcessor::from_class(class).map_or(!class.is_empty(), |processor| processor.normalizes);
    if !values.get("do_normalize").and_then(Value::as_bool).unwrap_or_else(default) {
        return Ok(());
    }
    for (key, option, values) in [("image_mean", "mean", mean), ("image_std", "std", std)] {
        if values.is_empty() {
            let reason = format!("`{key}` is missing, and its default is unknown without a supported `image_processor_type`");
            return Err(Error::malformed(path, format!("{reason}: add `{key}`, set the option `{option}`, or set `do_normalize` to false")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::image_input::ImageInput;
    use super::super::options::Data;
    use super::super::pixels::Pixels;
    use super::super::{Port, Target};
    use super::*;
    use crate::ir::Element;

    fn described(values: Value) -> String {
        let Value::Object(values) = values else { panic!("{values}") };
        Pixels::parse(&values, Path::new("p"), None, &Map::new()).unwrap().0.to_string()
    }

    #[test]
    fn sizes_by_other_rules_are_refused() {
        let check = |values: Value| require_known_size(values.as_object().unwrap(), Path::new("p")).map_err(|e| e.to_string());
        let error = check(json!({ "image_processor_type": "LevitImageProcessorFast" })).unwrap_err();
        assert!(error.contains("p: the resizing of `LevitImageProcessor`"), "{error}");
        check(json!({ "image_processor_type": "LevitImageProcessor", "do_resize": false })).unwrap();
        check(json!({ "image_processor_type": "ViTImageProcessor" })).unwrap();
    }

    /// `size` of these classes after construction by transformers 5.23.
    #[test]
    fn a_number_as_size_is_interpreted_by_the_class() {
        for class in ["ViT", "DeiT", "Beit", "EfficientNet", "Segformer"] {
            for suffix in ["ImageProcessor", "ImageProcessorFast", "FeatureExtractor"] {
                let size = described(json!({ "feature_extractor_type": format!("{class}{suffix}"), "size": 16, "do_center_crop": true, "crop_size": 12 }));
                assert!(size.starts_with("resized to 16 x 16, center crop of 12 x 12,"), "{class}: {size}");
            }
        }
        for class in ["CLIP", "Bit", "Siglip", "MobileNetV2"] {
            let size = described(json!({ "image_processor_type": format!("{class}ImageProcessor"), "size": 16, "do_center_crop": false }));
            assert!(size.starts_with("resized to a shorter side of 16, pixels"), "{class}: {size}");
        }
        let convnext = |size: usize| described(json!({ "feature_extractor_type": "ConvNextFeatureExtractor", "size": size }));
        assert!(convnext(12).starts_with("resized to a shorter side of 13, center crop of 12 x 12,"), "{}", convnext(12));
        assert!(convnext(384).starts_with("resized to 384 x 384, pixels"), "{}", convnext(384));
        for values in [json!({ "size": 16 }), json!({ "size": 16, "image_processor_type": "OtherImageProcessor" })] {
            assert!(described(values.clone()).starts_with("resized to 16 x 16, pixels"), "{values}");
        }
        assert!(described(json!({ "size": 16, "do_center_crop": true })).starts_with("resized to a shorter side of 16, center crop of 16 x 16,"));
    }

    #[test]
    fn absent_and_null_keys_have_the_default_of_the_class() {
        let (half, unit) = ("mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5]", "pixels divided by 255");
        let clip = "mean [0.48145466, 0.4578275, 0.40821073], std [0.26862954, 0.26130258, 0.27577711]";
        let imagenet = "mean [0.485, 0.456, 0.406], std [0.229, 0.224, 0.225]";
        for (class, expected) in [
            ("ViT", format!("resized to 224 x 224, {unit}, {half}")),
            ("Siglip", format!("resized to 224 x 224, {unit}, {half}")),
            ("DeiT", format!("resized to 256 x 256, center crop of 224 x 224, {unit}, {half}")),
            ("ConvNext", format!("resized to 384 x 384, {unit}, {half}")),
            ("CLIP", format!("resized to a shorter side of 224, center crop of 224 x 224, {unit}, {clip}")),
            ("MobileNetV2", format!("resized to a shorter side of 256, center crop of 224 x 224, {unit}, {half}")),
            ("EfficientNet", format!("resized to 346 x 346, {unit}, mean [0.5, 0.5, 0.5], std [0.25, 0.25, 0.25]")),
            ("RTDetr", format!("resized to 640 x 640, {unit}, no mean, no std")),
            ("Segformer", format!("resized to 512 x 512, {unit}, {imagenet}")),
        ] {
            let class = format!("{class}ImageProcessor");
            assert_eq!(described(json!({ "image_processor_type": class })), expected, "{class}");
            let nulls = json!({
                "image_processor_type": class, "size": null, "do_resize": null, "do_center_crop": null, "crop_size": null, "resample": null,
                "do_rescale": null, "rescale_factor": null, "do_normalize": null, "image_mean": null, "image_std": null,
            });
            assert_eq!(described(nulls), expected, "{class}");
        }
        let vit = json!({ "image_processor_type": "ViTImageProcessor", "do_resize": false, "image_mean": [0.1], "do_rescale": false });
        assert_eq!(described(vit), "not resized, pixels multiplied by 1, mean [0.1], std [0.5, 0.5, 0.5]");
        let detr = json!({ "image_processor_type": "RTDetrImageProcessor", "do_normalize": true });
        assert!(described(detr.clone()).ends_with(imagenet), "{}", described(detr));
        let beit = json!({ "image_processor_type": "BeitImageProcessor", "size": 256, "do_center_crop": true });
        assert!(described(beit).starts_with("resized to 256 x 256, center crop of 224 x 224,"));
    }

    #[test]
    fn a_processor_that_normalizes_requires_mean_and_std() {
        let folder = tempfile::tempdir().unwrap();
        let (synthesized, config) = Default::default();
        let inputs = [Port { name: "x".into(), element: Element::Float, shape: vec![None, Some(3), None, None], number: None }];
        let open = |json: &str, options: Data| {
            std::fs::write(folder.path().join("preprocessor_config.json"), json).unwrap();
            let target = Target { inputs: &inputs, ..Target::new(folder.path(), &synthesized, &config) };
            Pixels::open(&options, &target, &ImageInput::from_target(&options, &target, Path::new("p"))?).map(|pixels| pixels.to_string())
        };
        let unknown = r#"{"image_processor_type":"OtherImageProcessor"}"#;
        for json in [r#"{"do_normalize":true}"#, unknown] {
            let error = open(json, Data::default()).unwrap_err().to_string();
            assert!(error.contains("preprocessor_config.json") && error.contains("`image_mean` is missing") && error.contains("add `image_mean`"), "{error}");
            let error = open(json, Data { mean: vec![0.5], ..Data::default() }).unwrap_err().to_string();
            assert!(error.contains("`image_std` is missing"), "{error}");
            let given = open(json, Data { mean: vec![0.5], std: vec![0.25], ..Data::default() }).unwrap();
            assert!(given.ends_with("mean [0.5], std [0.25]"), "{given}");
        }
        for json in ["{}", r#"{"do_normalize":null}"#, r#"{"do_normalize":false}"#, r#"{"image_processor_type":"RTDetrImageProcessor","do_resize":false}"#] {
            assert!(open(json, Data::default()).unwrap().ends_with("no mean, no std"), "{json}");
        }
        assert!(open(r#"{"image_processor_type":"ViTImageProcessor"}"#, Data::default()).unwrap().ends_with("std [0.5, 0.5, 0.5]"));
    }
}
