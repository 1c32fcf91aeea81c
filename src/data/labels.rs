//! Classes by number or by name.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{Port, References, Target};
use crate::error::{Error, Result};

/// Names that are listed in an error.
const LISTED: usize = 12;

/// What labels stand for.
pub(super) struct Classes {
    by_name: BTreeMap<String, usize>,
    /// How many classes the model tells apart, where that is known.
    count: Option<usize>,
}

impl Classes {
    pub fn of(target: &Target) -> Classes {
        let mut by_name = BTreeMap::new();
        if let Some(Value::Object(names)) = target.config.get("id2label") {
            by_name.extend(names.iter().filter_map(|(id, name)| Some((name.as_str()?.to_owned(), id.parse().ok()?))));
        }
        if let Some(Value::Object(ids)) = target.config.get("label2id") {
            by_name.extend(ids.iter().filter_map(|(name, id)| Some((name.clone(), usize::try_from(id.as_u64()?).ok()?))));
        }
        let logits = |port: &&Port| port.shape.len() == 2;
        let count =
            target.outputs.iter().find(|p| p.name == "logits").or(target.outputs.first()).filter(logits).and_then(|port| port.shape.last().copied().flatten());
        Classes { by_name, count }
    }

    /// The class that a label stands for.
    pub fn find(&self, label: &str, path: &Path, place: &str) -> Result<usize> {
        let label = label.trim();
        let lower = label.to_lowercase();
        let named = self.by_name.get(label).or_else(|| self.by_name.iter().find(|(name, _)| name.to_lowercase() == lower).map(|(_, id)| id)).copied();
        let class = named.or_else(|| label.parse().ok()).ok_or_else(|| Error::malformed(path, format!("{place}: `{label}` is no class; {}", self.known())))?;
        match self.count {
            Some(count) if class >= count => Err(Error::malformed(path, format!("{place}: class {class}, the model tells {count} apart, the first is 0"))),
            _ => Ok(class),
        }
    }

    /// The classes of samples by number; the first of each pair is the sample's place in its file.
    pub fn references(&self, numbers: impl IntoIterator<Item = (usize, i64)>, path: &Path) -> Result<References> {
        let class = |(index, number): (usize, i64)| self.find(&number.to_string(), path, &format!("label {index}"));
        numbers.into_iter().map(class).collect::<Result<_>>().map(References::Classes)
    }

    /// Classes for the names of folders: those that the model knows, else their order.
    pub fn for_folders(&self, names: &[String], path: &Path) -> Result<Vec<usize>> {
        let known = |name: &String| self.by_name.contains_key(name) || name.parse::<usize>().is_ok();
        if names.iter().all(known) {
            return names.iter().map(|name| self.find(name, path, &format!("folder `{name}`"))).collect();
        }
        match self.count {
            Some(count) if count != names.len() => Err(Error::malformed(
                path,
                format!("has {} folders, the model tells {count} classes apart, and the names are not those of config.json", names.len()),
            )),
            _ => Ok((0..names.len()).collect()),
        }
    }

    fn known(&self) -> String {
        if self.by_name.is_empty() {
            return "classes are numbers from 0, or names in label2id of config.json".into();
        }
        let mut names: Vec<&str> = self.by_name.keys().take(LISTED).map(String::as_str).collect();
        if self.by_name.len() > LISTED {
            names.push("...");
        }
        format!("config.json knows {}", names.join(", "))
    }
}
