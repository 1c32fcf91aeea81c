//! Modules of a sentence-transformers folder, as listed in `modules.json`. Modules with weights store
//! them in subfolders.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::{Component, Path};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::files;

/// A module of a sentence-transformers model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Class name in sentence-transformers, or the qualified name of a class of another library.
    pub kind: String,
    /// Subfolder of the module; empty for the model's folder.
    pub folder: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    path: String,
}

/// Classes whose weights are supported.
const WITH_WEIGHTS: [&str; 2] = ["Dense", "LayerNorm"];

impl Module {
    /// Name of the file that lists the modules.
    pub const LIST: &str = "modules.json";

    /// The modules of a folder in order. Empty without `modules.json`. Fails if the list refers to weights
    /// outside the model's folder.
    pub fn list(folder: &Path) -> Result<Vec<Module>> {
        Self::try_list(folder)?
    }

    /// As [`list`](Module::list), with a malformed list as the inner error, so that callers can ignore it.
    pub fn try_list(folder: &Path) -> Result<Result<Vec<Module>>> {
        let path = folder.join(Self::LIST);
        if !files::is_file(&path) {
            return Ok(Ok(Vec::new()));
        }
        let text = files::read_to_string(&path).map_err(Error::io("read", &path))?;
        match serde_json::from_str(&text) {
            Ok(entries) => Self::from_entries(folder, entries).map(Ok),
            Err(e) => Ok(Err(Error::malformed(&path, e))),
        }
    }

    fn from_entries(folder: &Path, entries: Vec<Entry>) -> Result<Vec<Module>> {
        let module = |Entry { kind, path: inside }: Entry| {
            let own = kind.starts_with("sentence_transformers.");
            let class = kind.rsplit('.').next().filter(|_| own).unwrap_or(&kind).to_owned();
            let parts: Vec<&str> = inside.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
            let absolute = if inside.starts_with('/') { "/" } else { "" };
            let module = Module { kind: class, folder: format!("{absolute}{}", parts.join("/")) };
            // For modules without weights, the folder is checked when it is used.
            if module.has_weights() {
                Module::require_inside(folder, &module.folder)?;
            }
            Ok(module)
        };
        entries.into_iter().map(module).collect()
    }

    /// Rejects a module's folder outside the model's folder.
    pub fn require_inside(folder: &Path, inside: &str) -> Result<()> {
        if inside.contains('\\') || !Path::new(inside).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(Error::malformed(&folder.join(Self::LIST), format!("refers to a folder outside the model: `{inside}`")));
        }
        Ok(())
    }

    /// Whether the module's weights are part of the model's weights, with its folder and a slash as prefix.
    pub fn has_weights(&self) -> bool {
        !self.folder.is_empty() && WITH_WEIGHTS.contains(&self.kind.as_str())
    }
}
