//! Replacements for `graph.rs` in builds without the feature `run`, in which models have no graphs.
#![allow(clippy::unused_self)]

use std::collections::BTreeMap;
use std::path::Path;

use super::Model;
use crate::error::{Error, Result};
use crate::files;

/// Placeholder for graphs; has no values.
pub enum Graph {}

/// Placeholder for ONNX files; has no values.
pub enum ModelFile {}

#[doc(hidden)]
impl Model {
    pub(super) fn open_onnx(_path: &Path, file: &Path) -> Result<Model> {
        Err(Error::Unsupported {
            what: format!("{}: an .onnx file in a build without the feature `run`", file.display()),
            hint: "build compress with this feature".into(),
        })
    }

    /// Rejects sizes, which apply only to models that are run.
    pub fn fix_sizes(&self, sizes: &crate::store::OpenSizes) -> Result<()> {
        if sizes.is_empty() { Ok(()) } else { Err(Error::option("sizes", "a build without the feature `run` does not run models")) }
    }

    /// Returns false: only ONNX files record changes.
    pub fn changes(&self, _name: &str, _now: &crate::store::Weight) -> bool {
        false
    }

    /// Returns false: passes of this build do not add heads.
    pub(super) fn has_added_head(&self, _input: &Model) -> bool {
        false
    }

    /// The same model with these weights.
    #[allow(clippy::unnecessary_wraps)]
    pub fn with_weights(&self, weights: crate::store::Weights) -> Result<Model> {
        Ok(self.replace_weights(weights))
    }

    /// Returns `None`: without graphs, there is nothing to compare.
    pub fn difference_from(&self, _other: &Model) -> Option<std::result::Result<(), String>> {
        None
    }

    /// Whether the folder has a `graph.json`. Passes of this build do not change graphs.
    pub fn needs_graph_file(&self) -> bool {
        files::is_file(&self.path.join("graph.json"))
    }

    /// Returns `Ok`: this build does not know which weights a model requires.
    #[allow(clippy::unnecessary_wraps)]
    pub fn require_matching_weights(&self) -> Result<()> {
        Ok(())
    }

    /// Returns `Ok`, like [`require_matching_weights`](Model::require_matching_weights).
    #[allow(clippy::unnecessary_wraps)]
    pub fn require_weights_of_config(&self) -> Result<()> {
        Ok(())
    }

    /// Returns `Ok`, like [`require_matching_weights`](Model::require_matching_weights).
    #[allow(clippy::unnecessary_wraps)]
    pub fn require_used_biases<'n>(&self, _names: impl Iterator<Item = &'n str>) -> Result<()> {
        Ok(())
    }

    #[allow(clippy::unnecessary_wraps)]
    pub(super) fn pooled_widths(&self, _folder: &Path) -> Result<Vec<(String, usize)>> {
        Ok(Vec::new())
    }

    /// Returns an empty map: the inputs of layers are known from graphs only.
    pub fn inputs_of_layers(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}
