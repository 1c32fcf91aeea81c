//! In the place of what runs models on samples, in a build that cannot.

use std::collections::BTreeMap;

use super::Context;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::store::Affine;

/// Whether models can be run.
///
/// # Errors
/// They cannot.
pub(in crate::pass) fn require(option: &str) -> Result<()> {
    Err(Error::Unsupported {
        what: format!("{option}: running a model on calibration samples, in a build without the feature `run`"),
        hint: "build compress with its default features, or choose a scheme that finds scales while running".into(),
    })
}

/// Nothing: [`require`] was asked before.
pub(in crate::pass) fn find(pass: &str, _encodings: &mut BTreeMap<String, Affine>, _model: &Model, _context: &Context) -> Result<()> {
    require(pass)
}
