//! The image processor of Qwen-VL, whose graph divides images into patches.

use std::path::Path;

use serde_json::{Map, Value};

use crate::arch::{self, Settings};
use crate::error::{Error, Result};

/// Sizes of patches with the keys of `config.json`, and the default of the image processor, which is that of
/// towers too, except of the patches of Qwen3-VL.
const PATCHES: [(&str, &str, u64); 3] =
    [("patch_size", "patch_size", 14), ("merge_size", "spatial_merge_size", 2), ("temporal_patch_size", "temporal_patch_size", 2)];
/// Limits of the sizes of images, which have the size of the input instead.
const LIMITS: [&str; 2] = ["min_pixels", "max_pixels"];

/// Requires that patches are those of the configuration, if it is that of a tower.
pub(super) fn require_patches(values: &Settings, path: &Path, config: &Map<String, Value>) -> Result<()> {
    let sizes = PATCHES.iter().map(|(key, ..)| key).chain(&LIMITS);
    for (key, value) in sizes.filter_map(|key| Some((key, values.get(key)?))) {
        if !value.is_u64() {
            return Err(Error::malformed(path, format!("`{key}` is not supported: {value}")));
        }
    }
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let (patch, config) = match arch::tower(config) {
        Some((tower, vision)) => (tower.patch as u64, vision),
        None => match arch::towers().find(|tower| tower.model_type == model_type) {
            Some(tower) => (tower.patch as u64, config),
            None => return Ok(()),
        },
    };
    for (key, name, default) in PATCHES {
        let size = |value: Option<&Value>, default: u64| value.and_then(Value::as_u64).unwrap_or(default);
        let of_tower = if name == "patch_size" { patch } else { default };
        let (found, expected) = (size(values.get(key), default), size(config.get(name), of_tower));
        if found != expected {
            let reason = format!("`{key}` is {found}, but `{name}` in config.json is {expected}: use the image processor of this model");
            return Err(Error::malformed(path, reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::pixels::Pixels;
    use super::*;

    fn pixels(json: &str, config: &str) -> Result<String> {
        let [values, config]: [Map<String, Value>; 2] = [json, config].map(|json| serde_json::from_str(json).unwrap());
        Pixels::parse(&values, Path::new("p"), Some((28, 56)), &config).map(|(pixels, _)| pixels.to_string())
    }

    /// `OPENAI_CLIP_MEAN` and `OPENAI_CLIP_STD` of transformers, unless normalization is disabled.
    #[test]
    fn a_missing_mean_is_that_of_clip() {
        let resized = "resized to 28 x 56, pixels divided by 255";
        for json in [r#"{"image_processor_type":"Qwen2VLImageProcessor"}"#, r#"{"image_processor_type":"Qwen2VLImageProcessorFast","image_mean":null}"#] {
            let clip = "mean [0.48145466, 0.4578275, 0.40821073], std [0.26862954, 0.26130258, 0.27577711]";
            assert_eq!(pixels(json, "{}").unwrap(), format!("{resized}, {clip}"));
        }
        let given = r#"{"image_processor_type":"Qwen2VLImageProcessor","image_mean":[0.5],"image_std":[0.25]}"#;
        assert_eq!(pixels(given, "{}").unwrap(), format!("{resized}, mean [0.5], std [0.25]"));
        let raw = r#"{"image_processor_type":"Qwen2VLImageProcessor","do_normalize":false}"#;
        assert_eq!(pixels(raw, "{}").unwrap(), format!("{resized}, no mean, no std"));
    }

    #[test]
    fn patches_are_those_of_the_model() {
        let processor = |more: &str| format!(r#"{{"image_processor_type":"Qwen2VLImageProcessor"{more}}}"#);
        let tower = |more: &str| format!(r#"{{"model_type":"qwen2_5_vl_vision"{more}}}"#);
        for (given, config) in [
            (processor(""), tower("")),
            (processor(""), tower(r#","patch_size":14,"spatial_merge_size":2"#)),
            (
                processor(r#","patch_size":16,"merge_size":1,"temporal_patch_size":3"#),
                tower(r#","patch_size":16,"spatial_merge_size":1,"temporal_patch_size":3"#),
            ),
            (processor(r#","patch_size":16"#), r#"{"model_type":"other","patch_size":8}"#.to_owned()),
            (processor(r#","patch_size":16"#), "{}".to_owned()),
            (processor(r#","patch_size":16"#), r#"{"model_type":"qwen3_vl_vision"}"#.to_owned()),
        ] {
            assert!(pixels(&given, &config).is_ok(), "{given} {config}");
        }
        for (given, config, reason) in [
            (processor(r#","patch_size":16"#), tower(""), "`patch_size` is 16, but `patch_size` in config.json is 14"),
            (processor(""), tower(r#","patch_size":16"#), "`patch_size` is 14, but `patch_size` in config.json is 16"),
            (processor(""), r#"{"model_type":"qwen3_vl_vision"}"#.to_owned(), "`patch_size` is 14, but `patch_size` in config.json is 16"),
            (processor(r#","merge_size":4"#), tower(""), "`merge_size` is 4, but `spatial_merge_size` in config.json is 2"),
            (processor(r#","temporal_patch_size":1"#), tower(""), "`temporal_patch_size` is 1, but `temporal_patch_size` in config.json is 2"),
            (processor(r#","min_pixels":"56""#), tower(""), r#"`min_pixels` is not supported: "56""#),
        ] {
            let error = pixels(&given, &config).unwrap_err().to_string();
            assert!(error.contains(reason), "{given} {config}: {error}");
        }
    }
}
