//! The weights of a model, by name.

use std::collections::BTreeMap;

use super::{Weight, ZeroOrigin, select};
use crate::error::{Error, Result};

/// The weights of a model, by name.
#[derive(Debug, Clone, Default)]
pub struct Weights {
    /// By name, in alphabetical order.
    pub by_name: BTreeMap<String, Weight>,
    /// Metadata of the original files.
    pub metadata: BTreeMap<String, String>,
    /// Folders with separate weight files. The names of their weights start with the folder and a slash.
    pub folders: Vec<String>,
    /// Parameters of a graph that are computed from weights and not stored.
    pub derived: BTreeMap<String, Weight>,
}

impl Weights {
    /// Looks up a weight, or a parameter that is computed from weights, by name. The error contains the most
    /// similar name.
    pub fn get(&self, name: &str) -> Result<&Weight> {
        self.find(name).ok_or_else(|| Error::NoMatch {
            field: "name",
            pattern: name.to_owned(),
            nearest: select::nearest(name, self.by_name.keys().map(String::as_str)),
        })
    }

    /// As [`get`](Weights::get), `None` for unknown names.
    pub fn find(&self, name: &str) -> Option<&Weight> {
        self.by_name.get(name).or_else(|| self.derived.get(name))
    }

    /// Records why elements of weights are zero. `Pruning` is not overwritten.
    pub fn set_zero_origin<'n>(&mut self, names: impl IntoIterator<Item = &'n str>, origin: ZeroOrigin) {
        for name in names {
            if let Some(weight) = self.by_name.get_mut(name).filter(|weight| weight.zero_origin != Some(ZeroOrigin::Pruning)) {
                weight.zero_origin = Some(origin);
            }
        }
    }

    /// The folder of a weight, if it is stored in a separate file.
    pub fn folder(&self, name: &str) -> Option<&str> {
        in_folder(&self.folders, name).map(|(folder, _)| folder)
    }

    /// Total number of elements.
    pub fn parameters(&self) -> u64 {
        self.by_name.values().map(|w| w.elements() as u64).sum()
    }
}

/// Splits a name into its folder, if it is one of `folders`, and the rest.
pub(super) fn in_folder<'f, 'n>(folders: &'f [String], name: &'n str) -> Option<(&'f str, &'n str)> {
    let matching = folders.iter().filter_map(|folder| Some((folder.as_str(), name.strip_prefix(folder.as_str())?.strip_prefix('/')?)));
    matching.max_by_key(|(folder, _)| folder.len())
}
