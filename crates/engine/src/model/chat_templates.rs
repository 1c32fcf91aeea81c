//! Chat templates of a model folder.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{SynthesizedFiles, auxiliary_path, processor_template, read_auxiliary_text};
use crate::error::{Error, Result};
use crate::files;

/// Name of the template that is not for a special purpose.
pub const DEFAULT_TEMPLATE: &str = "default";
/// File with the default template.
const FILE: &str = "chat_template.jinja";
/// A template in the folder of all others, which transformers 5 writes.
const TOOL_USE: &str = "additional_chat_templates/tool_use.jinja";

/// The chat templates by name, as in transformers: those of the `.jinja` files; without such files
/// `stored`, which is `chat_template` of `tokenizer_config.json`; or else that of the processor.
///
/// # Errors
/// A file cannot be read, or `stored` is a list with other entries than names and templates.
pub fn chat_templates(folder: &Path, synthesized: &SynthesizedFiles, stored: Option<&Value>) -> Result<BTreeMap<String, String>> {
    let default = |text: String| (DEFAULT_TEMPLATE.to_owned(), text);
    let mut found: BTreeMap<String, String> = read_auxiliary_text(folder, synthesized, FILE)?.map(default).into_iter().collect();
    let additional = auxiliary_path(folder, TOOL_USE).parent().filter(|additional| files::is_dir(additional)).map(Path::to_owned);
    let listed = additional.map(|additional| files::list(&additional).map_err(Error::io("list", &additional))).transpose()?.unwrap_or_default();
    for path in listed.into_iter().map(|entry| entry.path).filter(|path| path.extension().is_some_and(|extension| extension == "jinja")) {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        found.insert(name, files::read_to_string(&path).map_err(Error::io("read", &path))?);
    }
    match stored.filter(|_| found.is_empty()) {
        Some(Value::String(text)) => found.extend([default(text.clone())]),
        Some(Value::Array(list)) => {
            for entry in list {
                let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                let wrong = "`chat_template` is a list with entries other than names and templates";
                let named = text("name").zip(text("template"));
                found.extend([named.ok_or_else(|| Error::malformed(&auxiliary_path(folder, "tokenizer_config.json"), wrong))?]);
            }
        }
        _ => {}
    }
    if found.is_empty() {
        found.extend(processor_template(folder, synthesized)?.map(default));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The templates of `AutoTokenizer` of transformers 5.17.
    #[test]
    fn files_replace_the_stored_templates() {
        let folder = tempfile::tempdir().unwrap();
        let found = |stored: &Value| {
            let found = chat_templates(folder.path(), &SynthesizedFiles::new(), Some(stored)).map_err(|e| e.to_string())?;
            Ok::<_, String>(found.into_iter().map(|(name, text)| format!("{name}={text}")).collect::<Vec<_>>().join(" "))
        };
        let list = json!([{ "name": "default", "template": "a" }, { "name": "rag", "template": "b" }]);
        assert_eq!(found(&list).unwrap(), "default=a rag=b");
        assert_eq!(found(&json!("c")).unwrap(), "default=c");
        assert_eq!(found(&Value::Null).unwrap(), "");
        assert!(found(&json!(["a"])).unwrap_err().contains("tokenizer_config.json: `chat_template` is a list with entries other than"));
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        assert_eq!(found(&json!("c")).unwrap(), "default=c");
        for (name, text) in [("tool_use.jinja", "d"), ("other.jinja", "e"), ("notes.txt", "f")] {
            std::fs::write(folder.path().join("additional_chat_templates").join(name), text).unwrap();
        }
        assert_eq!(found(&list).unwrap(), "other=e tool_use=d");
        std::fs::write(folder.path().join("chat_template.jinja"), "g").unwrap();
        assert_eq!(found(&list).unwrap(), "default=g other=e tool_use=d");
    }
}
