//! Files of the processors of models for texts and images.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Config, SynthesizedFiles, auxiliary_path, open_auxiliary_config, read_auxiliary_text};
use crate::error::{Error, Result};

/// Keys of `processor_config.json` with the settings of a processor.
const NESTED: [&str; 3] = ["image_processor", "feature_extractor", "audio_processor"];

/// The settings of the image processor or the feature extractor of a folder, and the path of their file: a
/// part of `processor_config.json`, which transformers 5 writes and prefers, or `preprocessor_config.json`.
/// `None` if a folder has neither.
///
/// # Errors
/// A file cannot be read, or is not a JSON object.
pub fn processor_settings(folder: &Path, synthesized: &SynthesizedFiles) -> Result<Option<(PathBuf, Config)>> {
    let [whole, own] = ["processor_config.json", "preprocessor_config.json"];
    let (nested, path) = (open_auxiliary_config(folder, synthesized, whole)?, auxiliary_path(folder, whole));
    match NESTED.iter().find_map(|key| Some((key, nested.get(key).filter(|value| !value.is_null())?))) {
        Some((_, Value::Object(values))) => Ok(Some((path, Config::from_values(values.clone())))),
        Some((key, other)) => Err(Error::malformed(&path, format!("`{key}` is {other}, expected an object"))),
        None => {
            let path = auxiliary_path(folder, own);
            let text = read_auxiliary_text(folder, synthesized, own)?;
            text.map(|text| Config::parse(&path, text).map(|config| (path, config))).transpose()
        }
    }
}

/// The chat template in `chat_template.json`, which some processors have instead of one of the tokenizer.
///
/// # Errors
/// The file cannot be read, or is not a JSON object.
pub fn processor_template(folder: &Path, synthesized: &SynthesizedFiles) -> Result<Option<String>> {
    let file = open_auxiliary_config(folder, synthesized, "chat_template.json")?;
    Ok(file.get("chat_template").and_then(|text| text.as_str()).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_those_that_transformers_reads() {
        let folder = tempfile::tempdir().unwrap();
        let found = || {
            let settings = processor_settings(folder.path(), &SynthesizedFiles::new()).map_err(|e| e.to_string())?;
            Ok::<_, String>(settings.and_then(|(path, config)| Some((path.file_name()?.to_str()?.to_owned(), config.get("size")?.as_u64()?))))
        };
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(found(), Ok(None));
        write("processor_config.json", r#"{ "processor_class": "P", "image_processor": { "size": 3 } }"#);
        let nested = Ok(Some(("processor_config.json".to_owned(), 3)));
        assert_eq!(found(), nested);
        write("preprocessor_config.json", r#"{ "size": 4 }"#);
        assert_eq!(found(), nested);
        write("processor_config.json", r#"{ "processor_class": "P" }"#);
        assert_eq!(found(), Ok(Some(("preprocessor_config.json".to_owned(), 4))));
        write("processor_config.json", r#"{ "feature_extractor": "x" }"#);
        assert!(found().unwrap_err().contains("processor_config.json: `feature_extractor` is \"x\", expected an object"));
    }
}
