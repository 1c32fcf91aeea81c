//! In a build that runs no models, nobody changes what they compute.
#![allow(clippy::unused_self)]

use std::collections::BTreeMap;
use std::path::Path;

use super::Model;
use crate::error::{Error, Result};

/// What a model computes, of which there is none here.
pub enum Graph {}

/// An ONNX file, of which there is none here.
pub enum ModelFile {}

impl Model {
    pub(super) fn open_onnx(_path: &Path, file: &Path) -> Result<Model> {
        Err(Error::Unsupported {
            what: format!("{}: an .onnx file in a build without the feature `run`", file.display()),
            hint: "build compress with it".into(),
        })
    }

    /// Refuses sizes: what models compute is not known here.
    ///
    /// # Errors
    /// There are some.
    pub fn tell_sizes(&self, sizes: &crate::store::OpenSizes) -> Result<()> {
        if sizes.is_empty() { Ok(()) } else { Err(Error::option("sizes", "a build without the feature `run` opens no .onnx file")) }
    }

    pub(crate) fn changes(&self, _name: &str, _now: &crate::store::Weight) -> bool {
        false
    }

    #[allow(clippy::unnecessary_wraps)]
    pub(crate) fn holding(&self, weights: crate::store::Weights) -> Result<Model> {
        Ok(Model { weights, ..self.clone() })
    }

    pub(crate) fn difference_from(&self, _other: &Model) -> Option<std::result::Result<(), String>> {
        None
    }

    pub(crate) fn needs_graph_file(&self) -> bool {
        false
    }

    #[allow(clippy::unnecessary_wraps)]
    pub(super) fn pooled_widths(&self, _folder: &Path) -> Result<Vec<(String, usize)>> {
        Ok(Vec::new())
    }

    pub(crate) fn inputs_of_layers(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}
