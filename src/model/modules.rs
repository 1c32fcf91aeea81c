//! Modules of sentence-transformers that have weights of their own: what their files say of widths.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Config, Model};
use crate::error::{Error, Result};

/// The keys of a pooling's `config.json` that say how wide the vectors of tokens are.
const POOLED: [&str; 2] = ["word_embedding_dimension", "embedding_dimension"];
/// The keys of a module's `config.json` that say widths, with the tensors and axes that have them.
const WIDTHS: [(&str, &str, usize); 3] = [("in_features", "linear.weight", 1), ("out_features", "linear.weight", 0), ("dimension", "norm.weight", 0)];

impl Model {
    /// The files of modules, out of the folder that they are carried over from, whose widths are not those of the weights, as they have to
    /// be, by their names inside the folder.
    ///
    /// # Errors
    /// A file cannot be read, or is no JSON object.
    pub(crate) fn resized_modules(&self, carried_from: &Path) -> Result<BTreeMap<PathBuf, String>> {
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
            let other = |config: &Config, key: &str| config.get(key).is_some_and(|said| said.as_u64() != Some(width as u64));
            change(&folder, &|config| POOLED.into_iter().filter(|key| other(config, key)).map(|key| (key, width)).collect())?;
        }
        Ok(found)
    }

    /// Keys whose widths are not those of the weights, with these.
    fn other_widths(&self, folder: &str, config: &Config) -> Vec<(&'static str, usize)> {
        let of = |(key, tensor, axis): (&'static str, &str, usize)| {
            let width = *self.weights.by_name.get(&format!("{folder}/{tensor}"))?.shape.get(axis)?;
            let said = config.get(key)?;
            (said.as_u64() != Some(width as u64)).then_some((key, width))
        };
        WIDTHS.into_iter().filter_map(of).collect()
    }

    /// Holds what the files of modules say to the weights that were opened.
    pub(super) fn require_widths(&self) -> Result<()> {
        for folder in &self.weights.folders {
            let path = self.path.join(folder).join("config.json");
            let config = Config::open(&path)?;
            if let Some((key, width)) = self.other_widths(folder, &config).first() {
                let said = config.get(key).unwrap_or(&Value::Null);
                return Err(Error::malformed(&path, format!("`{key}` is {said}, and the weights beside it have {width}")));
            }
        }
        Ok(())
    }
}
