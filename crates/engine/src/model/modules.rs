//! Widths in the configuration files of sentence-transformers modules.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Config, Model};
use crate::error::{Error, Result};

/// Keys of the token embedding width in a pooling module's `config.json`.
const POOLING_WIDTHS: [&str; 2] = ["word_embedding_dimension", "embedding_dimension"];
/// Keys of widths in a module's `config.json`, with the tensors and axes that determine them.
const WIDTHS: [(&str, &str, usize); 3] = [("in_features", "linear.weight", 1), ("out_features", "linear.weight", 0), ("dimension", "norm.weight", 0)];

#[doc(hidden)]
impl Model {
    /// Configuration files of modules whose widths do not match the weights, with corrected widths, by
    /// path relative to `carried_from`.
    pub fn resized_modules(&self, carried_from: &Path) -> Result<BTreeMap<PathBuf, String>> {
        let mut found = BTreeMap::new();
        let mut change = |folder: &str, wrong: &dyn Fn(&Config) -> Vec<(&'static str, usize)>| {
            let name = PathBuf::from(folder).join("config.json");
            let mut config = Config::open(&carried_from.join(&name))?;
            let wrong = wrong(&config);
            wrong.iter().for_each(|(key, width)| config.set(key, json!(width)));
            found.extend(config.render().filter(|_| !wrong.is_empty()).map(|text| (name, text)));
            Ok(())
        };
        self.weights.folders.iter().try_for_each(|folder| change(folder, &|config| self.other_widths(folder, config)))?;
        for (folder, width) in self.pooled_widths(carried_from)? {
            let other = |config: &Config, key: &str| config.get(key).is_some_and(|value| value.as_u64() != Some(width as u64));
            change(&folder, &|config| POOLING_WIDTHS.into_iter().filter(|key| other(config, key)).map(|key| (key, width)).collect())?;
        }
        Ok(found)
    }

    /// Keys with widths that do not match the weights, and the correct widths.
    fn other_widths(&self, folder: &str, config: &Config) -> Vec<(&'static str, usize)> {
        let mismatch = |(key, tensor, axis): (&'static str, &str, usize)| {
            let width = *self.weights.by_name.get(&format!("{folder}/{tensor}"))?.shape.get(axis)?;
            let value = config.get(key)?;
            (value.as_u64() != Some(width as u64)).then_some((key, width))
        };
        WIDTHS.into_iter().filter_map(mismatch).collect()
    }

    /// Checks the widths in the modules' configuration files against the weights.
    pub(super) fn require_widths(&self) -> Result<()> {
        for folder in &self.weights.folders {
            let path = self.path.join(folder).join("config.json");
            let config = Config::open(&path)?;
            if let Some((key, width)) = self.other_widths(folder, &config).first() {
                let value = config.get(key).unwrap_or(&Value::Null);
                return Err(Error::malformed(&path, format!("`{key}` is {value}, but the weights of the module have {width}")));
            }
        }
        Ok(())
    }
}
