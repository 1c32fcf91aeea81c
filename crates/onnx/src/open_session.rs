//! Loading of models in ONNX Runtime within a memory limit.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::Path;
use std::time::Duration;

use prost::Message;

use super::constant_sizes;
use super::external::{DataFiles, ExternalData};
use super::inlining;
use super::proto::ModelProto;
use super::skeleton::Skeleton;
use crate::error::{Error, Result};
use crate::files;
use crate::runtime::{Limits, Loading, Options, Session};

impl Session {
    /// Loads a model file.
    ///
    /// # Errors
    /// ONNX Runtime is missing or refuses the model, loading it would take more memory than the limit, an
    /// input is not a numeric tensor, or no output is one.
    pub fn open(path: &Path, options: Options) -> Result<Session> {
        if files::is_remote(path) {
            return Err(Error::run(path.display(), "is a remote file", "ONNX Runtime opens only local files: download it first"));
        }
        if !path.is_file() {
            let hint = "ONNX Runtime runs exported models: write one with the format `onnx`, or omit the runtime `onnxruntime`";
            return Err(Error::run(path.display(), "no such file", hint));
        }
        let file = files::File::open(path).map_err(Error::io("open", path))?;
        let skeleton = Skeleton::read(path, &file)?;
        let model = ModelProto::decode(skeleton.bytes.as_slice()).map_err(|e| Error::malformed(path, format!("not an ONNX model: {e}")))?;
        Session::open_as(path, loading(&model, file.length(), path, options)?)
    }

    /// Loads a model from memory. `path` names it in errors, and its folder contains external data.
    ///
    /// # Errors
    /// As [`open`](Session::open).
    pub fn from_model(model: &ModelProto, path: &Path, options: Options) -> Result<Session> {
        let bytes = model.encode_to_vec();
        Session::from_bytes_as(&bytes, path, loading(model, bytes.len() as u64, path, options)?)
    }
}

/// How a model of this size, whose weights may be missing, can be loaded within the limits. Fails if that
/// would take more memory than the limit.
fn loading(model: &ModelProto, bytes: u64, path: &Path, options: Options) -> Result<Loading> {
    let tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
    let mut data_files = DataFiles::new(path);
    tensors.filter_map(|tensor| ExternalData::parse(tensor).ok()?).for_each(|data| drop(data_files.open(data.location)));
    let external = data_files.paths().iter().filter_map(|path| files::length(path).ok()).fold(0, u64::saturating_add);
    let bytes = bytes.saturating_add(external);
    let limits = options.limits.unwrap_or_else(|| Limits::for_size(Duration::MAX, bytes));
    let refused = |reason: String| Error::run(path.display(), reason, "");
    inlining::check_functions(model).map_err(refused)?;
    let folds = constant_sizes::may_fold(model, limits.memory).map_err(refused)?;
    Ok(Loading { options: Options { limits: Some(limits), ..options }, folds, bytes })
}
