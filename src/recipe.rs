//! Recipes: what to do to which model, as YAML.

pub(crate) mod message;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[cfg(feature = "run")]
use crate::data::DataSets;
use crate::error::{Error, Result};
#[cfg(feature = "run")]
use crate::evaluation::Evaluate;
use crate::export::Export;
use crate::pass::Step;

/// A recipe. Unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Folder or .safetensors file, relative to the recipe
    pub model: PathBuf,
    /// Start of every random choice
    #[serde(default)]
    pub seed: u64,
    /// Carry NaN and infinite weights along instead of stopping at them
    #[serde(default)]
    pub allow_nonfinite: bool,
    /// What to measure on
    #[cfg(feature = "run")]
    #[serde(default, skip_serializing_if = "DataSets::is_empty")]
    pub data: DataSets,
    /// What to do, in order
    #[serde(default)]
    pub passes: Vec<Step>,
    /// How to measure before and after; needs `data: { evaluation: ... }`
    #[cfg(feature = "run")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluate: Option<Evaluate>,
    /// What to write
    #[serde(default = "default_export")]
    pub export: Vec<Export>,
    /// Output folder, relative to the recipe
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<PathBuf>,
}

/// Values that aliases may add to a recipe.
const ALIASED: usize = 10_000;

fn default_export() -> Vec<Export> {
    vec![Export::default()]
}

impl Recipe {
    /// A recipe for a model, without passes.
    pub fn new(model: impl Into<PathBuf>) -> Recipe {
        Recipe {
            model: model.into(),
            seed: 0,
            allow_nonfinite: false,
            #[cfg(feature = "run")]
            data: DataSets::default(),
            passes: Vec::new(),
            #[cfg(feature = "run")]
            evaluate: None,
            export: default_export(),
            output: None,
        }
    }

    /// Parses a recipe; paths stay as they are written.
    ///
    /// # Errors
    /// The message has line, column and a snippet, and the names that would be accepted.
    pub fn parse(text: &str, path: &Path) -> Result<Recipe> {
        // An alias repeats what it names: a few lines could stand for millions of patterns.
        let aliases = serde_saphyr::alias_limits! { max_total_replayed_events: ALIASED };
        let options = serde_saphyr::options! { alias_limits: aliases };
        serde_saphyr::from_str_with_options(text, options).map_err(|e| located(path, e))
    }

    /// Reads a recipe, changes values in it (`key.inner=value`), and makes its paths relative to its folder.
    ///
    /// # Errors
    /// It cannot be read or parsed, or a key does not exist.
    pub fn open(path: &Path, set: &[(String, String)]) -> Result<Recipe> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let mut recipe = Recipe::parse(&text, path)?;
        for (key, value) in set {
            let wrong = |e: serde_json::Error| Error::option(format!("--set {key}={value}"), e);
            // Defaults are written out here, so that they can be set whether the file names them or not.
            let mut values = serde_json::to_value(&recipe).map_err(wrong)?;
            overrule(&mut values, key, value)?;
            recipe = serde_json::from_value(values).map_err(wrong)?;
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        recipe.model = folder.join(&recipe.model);
        #[cfg(feature = "run")]
        recipe.data.resolve(folder);
        recipe.output = recipe.output.map(|output| folder.join(output));
        Ok(recipe)
    }

    /// The recipe as YAML, defaults written out.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).unwrap_or_default()
    }
}

fn located(path: &Path, error: serde_saphyr::Error) -> Error {
    Error::Recipe { path: path.to_owned(), message: message::explain(&error, &path.to_string_lossy()) }
}

/// Sets `a.b.0.c=value`. Names of passes and formats stand for their entry in the list:
/// `prune-unstructured.amount=0.3` needs no number.
fn overrule(values: &mut Value, key: &str, text: &str) -> Result<()> {
    let value: Value = serde_saphyr::from_str(text).map_err(|e| Error::option(format!("--set {key}"), message::explain(&e, text)))?;
    let wrong = |reason: String| Error::option(format!("--set {key}"), reason);
    let parts: Vec<&str> = key.split('.').collect();
    let Some((last, parents)) = parts.split_last() else { return Err(wrong("no key".into())) };
    let mut parts = parents.to_vec();
    if let Some(list) =
        parents.first().and_then(|first| ["passes", "export"].into_iter().find(|list| values.get(first).is_none() && find(values.get(list), first).is_some()))
    {
        parts.insert(0, list);
    }
    let mut at = values;
    for part in parts {
        if let Value::Array(items) = at {
            let index = part.parse().ok().filter(|i| *i < items.len()).or_else(|| items.iter().position(|item| item.get(part).is_some()));
            let index = index.ok_or_else(|| wrong(format!("`{part}` is no entry of the list")))?;
            at = &mut items[index];
            if part.parse::<usize>().is_err() {
                at = at.get_mut(part).ok_or_else(|| wrong(format!("no `{part}`")))?;
            }
        } else {
            at = at.get_mut(part).ok_or_else(|| wrong(format!("the recipe has no `{part}`")))?;
        }
    }
    if at.is_null() {
        *at = Value::Object(serde_json::Map::new());
    }
    match at {
        Value::Object(map) => drop(map.insert((*last).to_owned(), value)),
        Value::Array(items) => {
            let slot = last.parse::<usize>().ok().and_then(|i| items.get_mut(i)).ok_or_else(|| wrong(format!("`{last}` is no entry of the list")))?;
            *slot = value;
        }
        _ => return Err(wrong(format!("`{last}` would be inside a plain value"))),
    }
    Ok(())
}

fn find<'v>(list: Option<&'v Value>, name: &str) -> Option<&'v Value> {
    list?.as_array()?.iter().find_map(|item| item.get(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "model: m\npasses:\n  - prune-unstructured: { amount: 0.5 }\n  - cast: { to: f16 }\nexport:\n  - safetensors\n";

    #[test]
    fn yaml_and_back() {
        let recipe = Recipe::parse(TEXT, Path::new("r.yaml")).unwrap();
        assert_eq!(Recipe::parse(&recipe.to_yaml(), Path::new("r.yaml")).unwrap(), recipe);
        assert_eq!(recipe.passes.len(), 2);
    }

    #[test]
    fn a_name_alone_means_everything_by_default() {
        let parse = |passes: &str| Recipe::parse(&format!("model: m\npasses:\n  - {passes}\n"), Path::new("r.yaml"));
        let full = parse("cast: {}").unwrap();
        assert_eq!(parse("cast").unwrap(), full);
        assert_eq!(parse("cast:").unwrap(), full);
        let two = parse("cast: {}\n    quantize-dynamic: {}").unwrap_err().to_string();
        assert!(two.contains("`quantize-dynamic` is a second pass in one entry"), "{two}");
    }

    #[test]
    fn mistakes_are_located() {
        let error = |text: &str| Recipe::parse(text, Path::new("r.yaml")).unwrap_err().to_string();
        let typo = error("model: m\npasses:\n  - prune-unstructured: { amuont: 0.5 }\n");
        assert!(typo.contains("3") && typo.contains("amuont") && typo.contains("`amount`"), "{typo}");
        let name = error("model: m\npasses:\n  - prune: {}\n");
        assert!(name.contains("prune") && name.contains("prune-unstructured"), "{name}");
        let range = error("model: m\npasses:\n  - prune-unstructured:\n      amount: 1.5\n");
        assert!(range.contains("1.5") && range.contains("4"), "{range}");
        let format = error("model: m\nexport: [safetensor]\n");
        assert!(format.contains("safetensor") && format.contains("`safetensors`"), "{format}");
        assert!(error("passes: []\n").contains("model"));
    }

    #[test]
    fn values_can_be_overruled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.yaml");
        std::fs::write(&path, TEXT).unwrap();
        let set = |pairs: &[(&str, &str)]| Recipe::open(&path, &pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Vec<_>>());
        let recipe = set(&[("prune-unstructured.amount", "0.25"), ("seed", "7"), ("passes.1.cast.to", "bf16"), ("output", "out")]).unwrap();
        assert_eq!(recipe.seed, 7);
        assert_eq!(recipe.output, Some(folder.path().join("out")));
        assert!(recipe.to_yaml().contains("0.25") && recipe.to_yaml().contains("bf16"));
        assert!(set(&[("safetensors.layout", "sparse")]).unwrap().to_yaml().contains("sparse"));
        assert!(set(&[("cast.to", "f8")]).unwrap_err().to_string().starts_with("--set cast.to=f8: unknown variant `f8`"));
        assert!(set(&[("quantize.amount", "1")]).unwrap_err().to_string().contains("no `quantize`"));
        assert!(set(&[("passes.7.cast.to", "f16")]).is_err());
        assert!(set(&[("seed", "x")]).is_err());
        assert!(set(&[("sed", "1")]).unwrap_err().to_string().contains("sed"));
    }
}
