//! Files of the processors of models for texts and images.

use std::path::Path;

use super::{SynthesizedFiles, open_auxiliary_config};
use crate::error::Result;

/// The chat template in `chat_template.json`, which some processors have instead of one of the tokenizer.
///
/// # Errors
/// The file cannot be read, or is not a JSON object.
pub fn processor_template(folder: &Path, synthesized: &SynthesizedFiles) -> Result<Option<String>> {
    let file = open_auxiliary_config(folder, synthesized, "chat_template.json")?;
    Ok(file.get("chat_template").and_then(|text| text.as_str()).map(str::to_owned))
}
