//! Modules of a folder of sentence-transformers: `modules.json` names them, and those that have weights keep them in folders of their own.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::{Component, Path};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::files;

/// A module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its class in sentence-transformers, or the whole name of another library's class.
    pub kind: String,
    /// Its folder inside the model's; an empty text for the model's own.
    pub folder: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    path: String,
}

/// Classes whose weights are read.
const WITH_WEIGHTS: [&str; 2] = ["Dense", "LayerNorm"];

impl Module {
    /// Name of the file that lists modules.
    pub const LIST: &str = "modules.json";

    /// The modules of a folder in their order; none where it has no list of them.
    ///
    /// # Errors
    /// The list cannot be read, is none, or says that weights are in a folder outside the model's.
    pub fn list(folder: &Path) -> Result<Vec<Module>> {
        Self::listed(folder)?
    }

    /// The same, where a file that is no list of modules need not end the work: what it is instead stands inside.
    ///
    /// # Errors
    /// The list cannot be read.
    pub(crate) fn listed(folder: &Path) -> Result<Result<Vec<Module>>> {
        let path = folder.join(Self::LIST);
        if !files::is_file(&path) {
            return Ok(Ok(Vec::new()));
        }
        let text = files::read_to_string(&path).map_err(Error::io("read", &path))?;
        match serde_json::from_str(&text) {
            Ok(entries) => Self::of(folder, entries).map(Ok),
            Err(e) => Ok(Err(Error::malformed(&path, e))),
        }
    }

    fn of(folder: &Path, entries: Vec<Entry>) -> Result<Vec<Module>> {
        let module = |Entry { kind, path: inside }: Entry| {
            let own = kind.starts_with("sentence_transformers.");
            let class = kind.rsplit('.').next().filter(|_| own).unwrap_or(&kind).to_owned();
            let parts: Vec<&str> = inside.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
            let absolute = if inside.starts_with('/') { "/" } else { "" };
            let module = Module { kind: class, folder: format!("{absolute}{}", parts.join("/")) };
            // What is read of others is asked for where it is.
            if module.has_weights() {
                Module::require_inside(folder, &module.folder)?;
            }
            Ok(module)
        };
        entries.into_iter().map(module).collect()
    }

    /// Refuses a module's folder that is not inside the model's.
    ///
    /// # Errors
    /// It is outside.
    pub(crate) fn require_inside(folder: &Path, inside: &str) -> Result<()> {
        if inside.contains('\\') || !Path::new(inside).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(Error::malformed(&folder.join(Self::LIST), format!("names a folder outside the model: `{inside}`")));
        }
        Ok(())
    }

    /// Whether its weights are among those of the model, under the folder's name and a slash.
    pub fn has_weights(&self) -> bool {
        !self.folder.is_empty() && WITH_WEIGHTS.contains(&self.kind.as_str())
    }
}
