//! Trials in ONNX Runtime.

use std::path::Path;

use super::{Scope, Status, Trial};
use crate::contract;
use crate::error::{Error, Result};
use crate::files;
use crate::model::Model;
use crate::onnx::file::encoder_decoder;
use crate::pipeline::running::memory::lack_for_onnx_runtime;
use crate::pipeline::running::onnx_comparison::{Comparison, SYNTHETIC, compare_onnx_model};
use crate::runtime;
use crate::work::Work;

/// Loads and runs an ONNX file. A graph has no numbered layers, so that no twin is made.
pub(super) fn run(path: &Path, scope: Scope, work: &Work) -> Result<Trial> {
    if files::is_dir(path) && encoder_decoder(path).is_some() {
        return Ok(Trial::not_run("the model is in several files, which `compress verify` runs together"));
    }
    let Some(file) = contract::running::find(path)? else { return Ok(Trial::not_run("the output has no .onnx file")) };
    if files::is_remote(&file) {
        return Ok(Trial::not_run("the file is remote: download it first"));
    }
    if scope == Scope::Twin {
        return Ok(Trial::not_run("ONNX files are run as a whole: use `--try`"));
    }
    if let Err(reason) = runtime::library() {
        return Ok(Trial::new(Status::NotInstalled, reason.to_string()));
    }
    let model = Model::open(&file)?;
    if let Some(lack) = lack_for_onnx_runtime(&[&model], None).filter(|_| scope == Scope::Auto) {
        return Ok(Trial::not_run(lack));
    }
    let version = runtime::description().map(|(version, _)| version);
    let trial = match compare_onnx_model(model, &file, (&[], SYNTHETIC), work) {
        Ok(Comparison::Agrees(finding)) => Trial::new(Status::Agrees, finding),
        Ok(Comparison::Differs(finding)) => Trial::new(Status::Differs, finding),
        Ok(Comparison::Incomplete(finding)) => Trial::new(Status::Runs, finding),
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        Err(error) => Trial::new(Status::Failed, error.to_string()),
    };
    Ok(Trial { version, ..trial.with_scope("the output") })
}
