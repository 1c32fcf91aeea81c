//! Builds without the feature `run` cannot read ONNX files.

use std::path::Path;

use super::{Checked, Target};
use crate::error::{Error, Result};

/// Checks an ONNX file.
pub(super) fn check(path: &Path, _: Target) -> Result<Checked> {
    Err(Error::Unsupported { what: format!("{}: checking an ONNX file", path.display()), hint: "use a build with the feature `run`".into() })
}

/// Never finds a reason: reading a tokenizer needs the feature `run`.
pub(super) fn unreadable_tokenizer(_: &str) -> Option<String> {
    None
}
