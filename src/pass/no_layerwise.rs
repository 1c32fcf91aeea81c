//! Replaces `layerwise` in builds without the feature `run`: all functions return an error.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::quantize::{Corrections, Formats};
use super::{Context, Palettize, PruneUnstructured, Quantize};
use crate::error::{Error, Result};
use crate::kernel::cache::CacheScheme;
use crate::model::Model;
use crate::run_state::{Applied, ModelRun};
use crate::store::{Pattern, QuantizationSpec, Weights};

/// Checks whether the build can run models. Always returns an error.
pub(super) fn require(option: &str) -> Result<()> {
    Err(unable(option))
}

/// Returns no axes: models have no graph.
pub(super) fn input_axes(_model: &Model) -> BTreeMap<String, BTreeSet<usize>> {
    BTreeMap::new()
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn retain_supported(_pass: &str, _model: &Model, _names: &mut BTreeSet<&str>, _targets: &[Pattern]) -> Result<Vec<String>> {
    Err(unable("method"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn prune(_pass: &PruneUnstructured, _names: &BTreeSet<&str>, _model: &mut Model, _context: &Context, _applied: &mut Applied) -> Result<Value> {
    Err(unable("importance"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn quantize(
    _pass: &Quantize,
    _formats: (Formats, Option<&Corrections>),
    _model: &mut Model,
    _context: &Context,
    _applied: &mut Applied,
) -> Result<Map<String, Value>> {
    Err(unable("method"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn correct(
    _pass: &'static str,
    _corrections: &Corrections,
    _original: &Model,
    _rounded: &mut Model,
    _context: &Context,
    _applied: &mut Applied,
) -> Result<Map<String, Value>> {
    Err(unable("correct"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn declare_corrections(_model: &mut Model) -> Result<()> {
    Err(unable("correct"))
}

/// Returns no runs: models are not executed.
pub(super) fn model_runs(_pass: &Quantize, _weights: &BTreeSet<String>, _model: &Model) -> Result<Option<Vec<ModelRun>>> {
    Ok(None)
}

/// Returns no runs: models are not executed.
pub(super) fn runs_to_layers(_weights: &BTreeSet<String>, _models: u64, _model: &Model) -> Result<Option<Vec<ModelRun>>> {
    Ok(None)
}

/// Returns 0: nothing is corrected.
pub(super) fn correction_bytes(_sizes: [usize; 2]) -> usize {
    0
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn rescale_channels(
    _pass: &Quantize,
    _encodings: &BTreeMap<String, QuantizationSpec>,
    _model: &mut Model,
    _context: &Context,
    _applied: &mut Applied,
) -> Result<Map<String, Value>> {
    Err(unable("method"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn palettize(
    _pass: &Palettize,
    _encodings: &BTreeMap<String, QuantizationSpec>,
    _model: &mut Model,
    _context: &Context,
    _applied: &mut Applied,
) -> Result<usize> {
    Err(unable("importance"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn find_input_scales(_pass: &str, _encodings: &mut BTreeMap<String, QuantizationSpec>, _model: &Model, _context: &Context) -> Result<Vec<String>> {
    Err(unable("scheme"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn add_cache_scales(_scheme: CacheScheme, _model: &mut Model) -> Result<usize> {
    Err(unable("kv_cache"))
}

/// Unreachable, because [`require`] has returned an error before.
pub(super) fn add_calibrated_cache_scales(_pass: &str, _scheme: CacheScheme, _model: &mut Model, _context: &Context, _notes: &mut Vec<String>) -> Result<()> {
    Err(unable("kv_cache"))
}

/// Returns 0: there are no checkpoints.
pub(super) fn checkpoint_bytes(_names: &BTreeSet<String>, _weights: &Weights) -> u64 {
    0
}

fn unable(option: &str) -> Error {
    Error::Unsupported {
        what: format!("{option}: running a model on calibration samples, in a build without the feature `run`"),
        hint: "build compress with its default features".into(),
    }
}
