//! Trials in runtimes that are Python packages.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde::Deserialize;

use super::log_probabilities::{LogProbability, relative_error};
use super::reference::{Arithmetic, Reference};
use super::scratch::Scratch;
use super::{Options, Status, Trial, folder_twin};
use crate::data::{Batch, DECODER_INPUT_IDS};
use crate::error::{Error, Result, counted};
use crate::evaluation::{self, Outputs};
use crate::exec::transfer::{self, Cause};
use crate::files;
use crate::model::parse_config;
use crate::program;
use crate::work::{Event, Work};

/// The interpreter without an option.
const PYTHON: &str = "python3";
/// Prints the first of its arguments that is not an installed package.
const PACKAGE_QUERY: &str = "import sys, importlib.util as u; sys.path[:] = [p for p in sys.path if p]; \
                             print(next((n for n in sys.argv[1:] if u.find_spec(n) is None), ''))";
/// Package that reads weights in its format for transformers.
const COMPRESSED_TENSORS: &str = "compressed_tensors";
/// Files in the temporary folder: the script, the module of the runtime, the inputs, and what the script
/// writes.
const SCRIPT: &str = "run_output.py";
const MODULE: &str = "compress_trial_runtime.py";
const INPUTS: &str = "inputs.safetensors";
const OUTPUTS: &str = "outputs.safetensors";
const RESULT: &str = "result.json";
/// Name of the output with log-probabilities before the softmax.
const LOGITS: &str = "logits";

/// A Python package that runs models.
pub(super) struct PythonRuntime {
    name: &'static str,
    packages: &'static [&'static str],
    /// A module with the function `run(folder, scratch, result)`.
    module: &'static str,
    /// Whether the built-in executor must compute logits of a text.
    needs_logits: bool,
    tolerance: fn(Arithmetic) -> f64,
    /// Relative error of the outputs of the script. The error of the inner result is the reason not to
    /// compare.
    relative_error: fn(&Batch, &Outputs, &Outputs) -> Result<std::result::Result<f64, String>>,
}

/// transformers, which computes in 32-bit floats from the stored weights.
pub(super) const TRANSFORMERS: PythonRuntime = PythonRuntime {
    name: "transformers",
    packages: &["torch", "transformers"],
    module: include_str!("transformers.py"),
    needs_logits: false,
    tolerance: |arithmetic| match arithmetic {
        Arithmetic { rounds_activations: true, .. } => 0.1,
        // Dequantized weights are rounded to the type of the model.
        Arithmetic { is_quantized: true, is_half: true, .. } => 1e-2,
        _ => 1e-3,
    },
    relative_error: fidelity_error,
};

/// vLLM, which computes in the type of the model.
pub(super) const VLLM: PythonRuntime = PythonRuntime {
    name: "vllm",
    packages: &["torch", "vllm"],
    module: include_str!("vllm.py"),
    needs_logits: true,
    tolerance: |arithmetic| if arithmetic.rounds_activations { 0.1 } else { 5e-2 },
    relative_error: log_probability_error,
};

/// The result of the script.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptResult {
    version: Option<String>,
    /// A package that cannot be imported.
    missing: Option<String>,
    /// Why the runtime does not load or run the folder.
    error: Option<String>,
    /// Parameters of the model that the folder does not contain.
    #[serde(default)]
    missing_tensors: Vec<String>,
}

/// Loads and runs a folder, or its twin, in a Python package.
pub(super) fn run(runtime: &PythonRuntime, path: &Path, options: &Options, work: &Work) -> Result<Trial> {
    if let Some(missing) = missing(runtime, path, options)? {
        return Ok(Trial::new(Status::NotInstalled, missing));
    }
    let scratch = Scratch::new()?;
    let candidate = match folder_twin::candidate(path, options.scope, &scratch, work)? {
        Ok(candidate) => candidate,
        Err(trial) => return Ok(trial),
    };
    let reference = Reference::compute(&candidate.path, work)?;
    if let Reference::Outputs { outputs, .. } = &reference
        && runtime.needs_logits
        && (outputs.get(LOGITS).is_none_or(|logits| logits.rank() != 3) || reference.batch().inputs.contains_key(DECODER_INPUT_IDS))
    {
        return Ok(Trial::not_run(format!("{} is run only with language models", runtime.name)));
    }
    let result = start(runtime, &candidate.path, reference.batch(), options, &scratch, work)?;
    let trial = match (result.missing, result.error) {
        (Some(package), _) => Trial::new(Status::NotInstalled, format!("the package `{package}` cannot be imported")),
        (None, Some(error)) => Trial::new(Status::Failed, error),
        (None, None) => compare(runtime, &reference, &result.missing_tensors, &scratch)?,
    };
    Ok(Trial { version: result.version, ..trial.with_scope(&candidate.scope) })
}

/// Why a runtime is not installed: no interpreter, or no package.
fn missing(runtime: &PythonRuntime, path: &Path, options: &Options) -> Result<Option<String>> {
    let file = path.join("config.json");
    let config = files::read_to_string(&file).map_err(Error::io("read", &file))?;
    let config = parse_config(&config).map_err(|e| Error::malformed(&file, e))?;
    let method = config.get("quantization_config").and_then(|described| described.get("quant_method")).and_then(serde_json::Value::as_str);
    let reader = method.filter(|method| *method == "compressed-tensors").map(|_| COMPRESSED_TENSORS);
    let arguments = ["-c", PACKAGE_QUERY].into_iter().chain(runtime.packages.iter().copied()).chain(reader);
    let found = match program::finish(interpreter(options), arguments) {
        Err(e) if options.python.is_none() && e.kind() == ErrorKind::NotFound => {
            return Ok(Some(format!("`{PYTHON}` is not on the PATH: specify an interpreter with `--python`")));
        }
        found => found.map_err(Error::io("start", Path::new(interpreter(options))))?,
    };
    if !found.succeeded {
        return Err(Error::run(Path::new(interpreter(options)).display(), last(&found.lines), "specify another interpreter with `--python`"));
    }
    let package = found.lines.first().map(|line| line.trim()).filter(|line| !line.is_empty());
    Ok(package.map(|package| {
        format!("`{}` has no package `{package}`: install it, or specify another interpreter with `--python`", Path::new(interpreter(options)).display())
    }))
}

fn interpreter(options: &Options) -> &OsStr {
    options.python.as_ref().map_or(OsStr::new(PYTHON), |path| path.as_os_str())
}

fn last(lines: &[String]) -> &str {
    lines.iter().rev().map(|line| line.trim()).find(|line| !line.is_empty()).unwrap_or("it ended without a message")
}

/// Runs the script of a runtime.
fn start(runtime: &PythonRuntime, folder: &Path, batch: &Batch, options: &Options, scratch: &Scratch, work: &Work) -> Result<ScriptResult> {
    let [script, module, inputs, result] = [SCRIPT, MODULE, INPUTS, RESULT].map(|name| scratch.path().join(name));
    for (file, text) in [(&script, include_str!("run_output.py")), (&module, runtime.module)] {
        std::fs::write(file, text).map_err(Error::io("write", file))?;
    }
    let tensors: HashMap<String, Tensor> = batch.inputs.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, &inputs).map_err(|e| Error::run(inputs.display(), e, ""))?;
    work.progress.on(Event::Message(&format!("running the output in {}", runtime.name)));
    let arguments: [OsString; 3] = [script.into(), files::absolute(folder).into(), scratch.path().into()];
    let finished = program::finish(interpreter(options), arguments).map_err(Error::io("start", Path::new(interpreter(options))))?;
    work.cancel.check()?;
    match std::fs::read_to_string(&result) {
        Ok(text) => serde_json::from_str(&text).map_err(|e| Error::malformed(&result, e)),
        // The interpreter was killed, or the library has ended it.
        Err(_) => {
            let error = format!("the interpreter ended without a result: {}", last(&finished.lines));
            Ok(ScriptResult { version: None, missing: None, error: Some(error), missing_tensors: Vec::new() })
        }
    }
}

/// Compares the outputs of a script with those of the built-in executor.
fn compare(runtime: &PythonRuntime, reference: &Reference, missing_tensors: &[String], scratch: &Scratch) -> Result<Trial> {
    let filled = match missing_tensors {
        [] => String::new(),
        [first, ..] => {
            format!("; {} fills {} with random values, the first of which is `{first}`", runtime.name, counted(missing_tensors.len(), "missing tensor"))
        }
    };
    let incomparable = |reason: &str| {
        let status = if filled.is_empty() { Status::Runs } else { Status::Failed };
        Trial::new(status, format!("not compared with the built-in executor: {reason}{filled}"))
    };
    let (batch, outputs, arithmetic) = match reference {
        Reference::Outputs { batch, outputs, arithmetic } => (batch, outputs, *arithmetic),
        Reference::Unknown { reason, .. } => return Ok(incomparable(reason)),
    };
    let file = scratch.path().join(OUTPUTS);
    let found: Outputs = match candle_core::safetensors::load(&file, &Device::Cpu) {
        Ok(found) => found.into_iter().collect(),
        Err(e) => return Ok(Trial::new(Status::Failed, format!("the outputs cannot be read: {e}"))),
    };
    match (runtime.relative_error)(batch, outputs, &found)? {
        Err(reason) => Ok(incomparable(&reason)),
        Ok(error) => {
            let trial = Trial::compared(error, (runtime.tolerance)(arithmetic));
            let finding = if trial.is_ok() { trial.finding.clone() } else { format!("{}{filled}", trial.finding) };
            Ok(Trial { finding, ..trial })
        }
    }
}

/// Relative error of outputs with the names of the graph, without padding; infinite if shapes differ.
fn fidelity_error(batch: &Batch, expected: &Outputs, found: &Outputs) -> Result<std::result::Result<f64, String>> {
    let has_other_shape = |(name, tensor): (&String, &Tensor)| found.get(name).is_some_and(|found| found.dims() != tensor.dims());
    if expected.iter().any(has_other_shape) {
        return Ok(Ok(f64::INFINITY));
    }
    match evaluation::output_fidelity(batch, expected, found) {
        Err(Error::Cancelled) => Err(Error::Cancelled),
        Err(reason) => Ok(Err(reason.to_string())),
        // A NaN is not a small error.
        Ok(fidelity) if !(fidelity.max_abs_error.is_finite() && fidelity.cosine.is_finite()) => Ok(Ok(f64::INFINITY)),
        Ok(fidelity) => Ok(Ok(fidelity.sqnr_db.map_or(0.0, |decibels| 10f64.powf(-decibels / 20.0)))),
    }
}

/// Relative error of log-probabilities of single tokens: the tensors `text`, `position`, `token` and
/// `log_probability`. A position is that of the token, which the previous one predicts.
fn log_probability_error(batch: &Batch, expected: &Outputs, found: &Outputs) -> Result<std::result::Result<f64, String>> {
    let failed = |e: candle_core::Error| Error::run("outputs of the runtime", e, "");
    let Some(logits) = expected.get(LOGITS) else { return Ok(Err("the built-in executor computes no logits".to_owned())) };
    let length = batch.inputs.get("input_ids").and_then(|ids| ids.dim(1).ok()).unwrap_or(0);
    let column = |name: &str| -> Result<Vec<i64>> {
        let tensor: &Tensor = found.get(name).ok_or_else(|| Error::run("outputs of the runtime", format!("`{name}` is missing"), ""))?;
        transfer::values(tensor, Cause::Answers).map_err(failed)
    };
    let values: Vec<f64> = found.get("log_probability").map_or_else(|| Ok(Vec::new()), |values| transfer::values(values, Cause::Answers)).map_err(failed)?;
    let places = column("text")?.into_iter().zip(column("position")?).zip(column("token")?);
    let entry = |(((text, position), token), value): (((i64, i64), i64), f64)| {
        let row = usize::try_from(text).ok()?.checked_mul(length)?.checked_add(usize::try_from(position.checked_sub(1)?).ok()?)?;
        Some(LogProbability { row, token: usize::try_from(token).ok()?, value })
    };
    let entries: Option<Vec<LogProbability>> = places.zip(values).map(entry).collect();
    match entries.filter(|entries| !entries.is_empty()) {
        None => Ok(Err("the runtime has returned no log-probabilities".to_owned())),
        Some(entries) => relative_error(logits, &entries, None).map(Ok),
    }
}
