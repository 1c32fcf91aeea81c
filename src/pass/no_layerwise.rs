//! In the place of what runs models layer by layer, in a build that cannot.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::{Context, Palettize, PruneUnstructured, Quantize};
use crate::error::{Error, Result};
use crate::kernel::cache::CacheFormat;
use crate::model::Model;
use crate::run_state::{Applied, RunState};
use crate::store::{Affine, Weights};

/// Whether models can be run.
///
/// # Errors
/// They cannot.
pub(super) fn require(option: &str) -> Result<()> {
    Err(unable(option))
}

/// Nothing: [`require`] was asked before.
pub(super) fn prune(
    _pass: &PruneUnstructured,
    _model: Model,
    _run: &mut RunState,
    _context: Option<&Context>,
    _names: &BTreeSet<&str>,
    _rule: String,
) -> Result<Model> {
    Err(unable("importance"))
}

/// Nothing: [`require`] was asked before.
pub(super) fn quantize(
    _pass: &Quantize,
    _encodings: &BTreeMap<String, Affine>,
    _model: &mut Model,
    _run: &RunState,
    _context: &Context,
    _applied: &mut Applied,
) -> Result<Map<String, Value>> {
    Err(unable("method"))
}

/// Nothing: [`require`] was asked before.
pub(super) fn palettize(
    _pass: &Palettize,
    _encodings: &BTreeMap<String, Affine>,
    _model: &mut Model,
    _run: &RunState,
    _context: &Context,
    _applied: &mut Applied,
) -> Result<usize> {
    Err(unable("importance"))
}

/// Nothing: [`require`] was asked before.
pub(super) fn find_input_scales(_pass: &str, _encodings: &mut BTreeMap<String, Affine>, _model: &Model, _context: &Context) -> Result<Vec<String>> {
    Err(unable("scheme"))
}

/// Nothing: [`require`] was asked before.
pub(super) fn find_cache_scales(_pass: &str, _format: CacheFormat, _model: &mut Model, _context: Option<&Context>) -> Result<usize> {
    Err(unable("kv_cache"))
}

/// Nothing is kept.
pub(super) fn kept_bytes(_names: &BTreeSet<String>, _weights: &Weights) -> u64 {
    0
}

fn unable(option: &str) -> Error {
    Error::Unsupported {
        what: format!("{option}: running a model on calibration samples, in a build without the feature `run`"),
        hint: "build compress with its default features".into(),
    }
}
