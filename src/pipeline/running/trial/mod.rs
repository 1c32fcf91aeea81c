//! Trials: an output is loaded and run in a runtime, and the results are compared with those of the built-in
//! executor.
//!
//! Large outputs are represented by a twin in a temporary folder: the first layers, with the stored bytes of
//! their tensors, and the embeddings, the head and the other files. The first layers keep their numbers, so
//! that names in the configuration and settings that depend on the number remain valid.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod folder_twin;
mod gguf_twin;
mod layers;
mod llama_cpp;
mod log_probabilities;
mod onnxruntime;
mod python;
mod reference;
mod scratch;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::contract::{Runtime, Target};
use crate::error::Result;
use crate::report::format::bytes;
use crate::work::Work;

/// Maximum size of outputs that are run as a whole unless requested otherwise, in bytes.
const LARGEST: u64 = 500_000_000;

/// The part of an output that is run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scope {
    /// All of an output of up to 500 MB, otherwise a twin.
    #[default]
    Auto,
    /// All of it.
    Full,
    /// A twin.
    Twin,
}

/// How an output is run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The part that is run.
    pub scope: Scope,
    /// The Python interpreter with the runtimes; `python3` by default.
    pub python: Option<PathBuf>,
}

/// Result of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The runtime computes the same as the built-in executor.
    Agrees,
    /// The runtime computes something else.
    Differs,
    /// The runtime loads and runs the output; the results could not be compared.
    Runs,
    /// The runtime does not load or run the output.
    Failed,
    /// The runtime is not installed.
    NotInstalled,
    /// The output was not run for another reason.
    NotRun,
}

/// A trial of an output in a runtime.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trial {
    /// The result.
    pub status: Status,
    /// The part that was run, such as "the first 2 of 32 layers".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Version of the installed runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Difference from the built-in executor: the root mean square, relative to that of the outputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relative_error: Option<f64>,
    /// Largest relative error of an output that agrees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<f64>,
    /// The difference, the error of the runtime, or the reason not to run or compare.
    pub finding: String,
}

impl Trial {
    fn new(status: Status, finding: impl Into<String>) -> Trial {
        Trial { status, scope: None, version: None, relative_error: None, tolerance: None, finding: finding.into() }
    }

    fn not_run(reason: impl Into<String>) -> Trial {
        Trial::new(Status::NotRun, reason)
    }

    /// The result of a comparison.
    fn compared(relative_error: f64, tolerance: f64) -> Trial {
        let status = if relative_error <= tolerance { Status::Agrees } else { Status::Differs };
        let finding = if relative_error.is_finite() {
            format!("relative error {relative_error:.1e}, at most {tolerance:.0e} expected")
        } else {
            "the outputs have other shapes or are not finite".to_owned()
        };
        Trial { relative_error: Some(relative_error), tolerance: Some(tolerance), ..Trial::new(status, finding) }
    }

    fn with_scope(self, scope: &str) -> Trial {
        Trial { scope: Some(scope.to_owned()), ..self }
    }

    /// Whether the trial has found no defect.
    pub fn is_ok(&self) -> bool {
        !matches!(self.status, Status::Differs | Status::Failed)
    }
}

/// A local folder or file to run in a runtime, with its description.
struct Candidate {
    path: PathBuf,
    scope: String,
}

impl Candidate {
    fn full(path: &Path) -> Candidate {
        Candidate { path: path.to_owned(), scope: "the output".to_owned() }
    }
}

/// Whether all of an output of this size is run.
fn is_full(scope: Scope, size: u64) -> bool {
    match scope {
        Scope::Auto => size <= LARGEST,
        Scope::Full => true,
        Scope::Twin => false,
    }
}

/// The reason not to run an output of which no twin can be made.
fn without_twin(size: u64, reason: &str) -> Trial {
    Trial::not_run(format!("the output has {}, and a twin of its first layers is not possible: {reason}; use `--try=full` to run all of it", bytes(size)))
}

/// Loads and runs an output in a runtime, and compares the results with those of the built-in executor.
///
/// # Errors
/// The output cannot be read, the temporary folder cannot be written, or the Python interpreter of the
/// options cannot be started. Errors of the runtime are a result.
pub fn run(path: &Path, target: Target, options: &Options, work: &Work) -> Result<Trial> {
    match target.runtime() {
        Runtime::Transformers => python::run(&python::TRANSFORMERS, path, options, work),
        Runtime::Vllm => python::run(&python::VLLM, path, options, work),
        Runtime::Sglang => Ok(Trial::not_run("compress does not run SGLang: only the static rules are checked")),
        Runtime::LlamaCpp => llama_cpp::run(path, options.scope, work),
        Runtime::OnnxRuntime => onnxruntime::run(path, options.scope, work),
    }
}
