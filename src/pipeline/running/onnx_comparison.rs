//! Comparison of ONNX files in ONNX Runtime with the built-in executor.

use std::path::Path;
use std::time::Duration;

use candle_core::Device;

use super::agreement::judge;
use super::memory::{lack_for_onnx_runtime, memory_limit};
use crate::data::{self, Batch};
use crate::error::{Error, Result, counted};
use crate::evaluation::{self, Fidelity, FidelityAccumulator, Runs, Subject, quantized_values, without_common_nonfinite};
use crate::exec::Rounding;
use crate::files;
use crate::model::Model;
use crate::onnx::ModelFile;
use crate::onnx::file::encoder_decoder;
use crate::report::{OutputFile, Report};
use crate::runtime::Limits;
use crate::store::{ActivationScheme, Encoding, OpenSizes};
use crate::work::{MemoryLimit, Work};

/// Time limit of one run of a file where no evaluation was requested.
pub(super) const TIME: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });
/// Number of tokens that decoders with a KV cache process one by one.
const DECODE_STEPS: usize = 4;
/// The kind of synthetic samples for an encoder-decoder model of which only the inputs are known.
const SHORT_TEXTS: usize = 1;
/// Description of the samples that are run without evaluation data.
pub(super) const SYNTHETIC: &str = "synthetic sample";

/// Whether a static int8 file agrees with the built-in executor on each quantized value, and on the
/// outputs that follow from them; `None` for other files, for decoders with a cache, whose inputs differ
/// from the graph's, and for mixtures of experts.
pub(super) fn compare_quantized_values(model: &Model, file: &Path, samples: &[Batch], half: bool, work: &Work) -> Result<Option<(bool, String)>> {
    let graph = model.graph()?;
    if !quantized_values::is_static(&graph) || encoder_decoder(file).is_some() {
        return Ok(None);
    }
    let opened = ModelFile::open(file)?;
    if opened.has_kv_cache() {
        return Ok(None);
    }
    let Some(found) = quantized_values::compare(model, file, samples, work)? else { return Ok(None) };
    if let Some((name, steps)) = found.wrong {
        return Ok(Some((
            false,
            format!("`{name}` differs by {steps} quantization steps between ONNX Runtime and the built-in executor, given the same inputs"),
        )));
    }
    // Without dynamic quantization, the outputs are computed from the quantized values in floating point
    // only.
    let dynamic =
        model.weights.by_name.values().any(|w| matches!(&w.encoding, Encoding::Quantized(spec) if matches!(spec.activations, ActivationScheme::DynamicToken)));
    let (ok, difference) = judge(&found.outputs, half || dynamic, Some(&opened.output_rounding()));
    let count = samples.iter().map(|sample| sample.samples).sum::<usize>();
    let similar = if dynamic { ", or similar after layers with dynamic quantization," } else { "" };
    let difference = if ok { String::new() } else { format!("; outputs computed from them differ: {difference}") };
    Ok(Some((
        ok,
        format!(
            "{} quantized values are within one step{similar} on {}, each computed from the same inputs{difference}",
            found.values,
            counted(count, "sample")
        ),
    )))
}

/// Fidelity of an ONNX file in ONNX Runtime to the built-in executor on a batch.
pub(super) fn onnx_fidelity(model: Model, file: &Path, batch: &Batch, memory: MemoryLimit, work: &Work) -> Result<Fidelity> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let onnx = Subject::open_written(file, folder, model.config.values().clone(), work.threads)?.with_steps(DECODE_STEPS);
    let subjects = &mut [Subject::from_model(model)?.with_rounding(Rounding::Tensor), onnx];
    let mut models = evaluation::load(subjects, (&batch.inputs, &Device::Cpu), memory, Runs::Repeated, work)?;
    let outputs = models.iter_mut().map(|model| model.run(&batch.inputs)).collect::<Result<Vec<_>>>()?;
    let pair = outputs.first().zip(outputs.last()).ok_or_else(|| Error::option("ONNX Runtime", "no outputs to compare"))?;
    evaluation::output_fidelity(batch, pair.0, pair.1)
}

/// Whether a weight is quantized to integers. Codebooks do not count: all runtimes decode them to the
/// same floats.
pub(super) fn has_integers(model: &Model) -> bool {
    model.weights.by_name.values().any(|w| matches!(&w.encoding, Encoding::Quantized(spec) if !spec.codes.is_palette()))
}

/// Runs the ONNX file of an output on synthetic samples, if it has one and ONNX Runtime is available.
/// The outputs are compared with those of the built-in executor, which runs the weights of the same
/// folder, or the ONNX file itself if the folder has no others. Returns the path, the result and the finding
/// of the check; the result is `None` if the file was not run or not compared.
pub(in crate::pipeline) fn check_onnx(output: &Path, folder: &Path, report: &Report, work: &Work) -> Result<Option<(String, Option<bool>, String)>> {
    let is_onnx = |file: &&OutputFile| file.path.ends_with(".onnx");
    let Some(file) = report.outputs.iter().find(is_onnx) else { return Ok(None) };
    let found = match crate::runtime::library() {
        _ if files::is_remote(folder) => Ok((None, "not run: the file is remote".into())),
        Err(reason) => Ok((None, format!("not run: {reason}"))),
        Ok(_) => check_agreement(output, &folder.join(&file.path), report, work),
    };
    let (passed, finding) = match found {
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        found => found.unwrap_or_else(|error| (Some(false), error.to_string())),
    };
    Ok(Some((format!("{}, run", file.path), passed, finding)))
}

/// Whether the ONNX file of a run computes with 16-bit floats.
fn half(report: &Report) -> bool {
    let exports = report.recipe.get("export").and_then(serde_json::Value::as_array).into_iter().flatten();
    exports.filter_map(|export| export.get("onnx")?.get("precision")).any(|precision| precision == "float16")
}

/// Fixes the open dimensions of a written file, if it has these dimensions.
pub(super) fn fix_sizes(model: &Model, sizes: &OpenSizes) {
    // A changed graph may no longer have a dimension that the user named. It needs no size then.
    drop(model.fix_sizes(sizes));
}

/// The result and the finding of the comparison; the result is `None` if the file was not run or not
/// compared.
fn check_agreement(output: &Path, file: &Path, report: &Report, work: &Work) -> Result<(Option<bool>, String)> {
    let half = half(report);
    if encoder_decoder(file).is_some() && !report.outputs.iter().any(|file| file.path.ends_with(".safetensors")) {
        let folder = file.parent().unwrap_or(Path::new(""));
        let mut subject = Subject::open_written(file, folder, serde_json::Map::new(), work.threads)?.with_steps(DECODE_STEPS);
        let batch = data::synthetic_for_ports(subject.target().inputs, 0, SHORT_TEXTS)?;
        subject.load(&Device::Cpu, work)?.run(&batch.inputs)?;
        return Ok((None, "ONNX Runtime runs it; not compared, because the output has no weights for the built-in executor".into()));
    }
    let model = Model::open(output)?;
    if let Some(lack) = lack_for_onnx_runtime(&[&model], None) {
        return Ok((None, format!("not run: {lack}")));
    }
    let sizes = report.recipe.get("sizes").and_then(|sizes| serde_json::from_value(sizes.clone()).ok());
    fix_sizes(&model, &sizes.unwrap_or_default());
    if model.onnx.is_some() {
        return Ok(match compare_onnx_model(model, file, (&[], SYNTHETIC), work)? {
            Comparison::Agrees(found) => (Some(true), found),
            Comparison::Incomplete(found) => (None, found),
            Comparison::Differs(found) => (Some(false), found),
        });
    }
    let coarse = half || has_integers(&model);
    let graph = model.graph()?;
    let (batch, is_static) = (data::synthetic(&graph, 0)?, quantized_values::is_static(&graph));
    if let Some((ok, found)) = compare_quantized_values(&model, file, std::slice::from_ref(&batch), half, work)? {
        return Ok((Some(ok), found));
    }
    let fidelity = onnx_fidelity(model, file, &batch, memory_limit(None, &Device::Cpu), work)?;
    let (ok, difference) = judge(&fidelity, coarse, None);
    Ok((Some(ok || is_static), format!("ONNX Runtime against the built-in executor on {}: {difference}", counted(batch.samples, SYNTHETIC))))
}

/// Result of the comparison of an ONNX file in ONNX Runtime with the built-in executor.
#[derive(Debug)]
pub(super) enum Comparison {
    Agrees(String),
    Differs(String),
    /// The file was not run to the end in both, for this reason.
    Incomplete(String),
}

/// Runs an ONNX file in ONNX Runtime and, if its operators have a typed form, in the built-in executor:
/// on these samples with this description, or on synthetic ones if there are none.
pub(super) fn compare_onnx_model(model: Model, path: &Path, (samples, description): (&[Batch], &str), work: &Work) -> Result<Comparison> {
    let file = match Subject::open_original_file(&model, work.threads) {
        // Only inputs and outputs of other types than numbers are unsupported.
        Err(e @ Error::Unsupported { .. }) => return Ok(Comparison::Incomplete(format!("not run: {e}"))),
        file => file?,
    };
    let mut file = file.with_limits(Limits::for_size(TIME, model.stored_bytes()));
    let inputs = file.target().inputs.to_vec();
    let mut runner = file.load(&Device::Cpu, work)?;
    let mut rejection = None;
    let mut run = |kind: usize| {
        let batch = samples.first().cloned().map_or_else(|| data::synthetic_for_ports(&inputs, 0, kind), Ok)?;
        let outputs = runner.run(&batch.inputs)?;
        Ok((batch, outputs))
    };
    let accepted = (0..data::KINDS).find_map(|kind| match run(kind) {
        Err(e) if !matches!(e, Error::Cancelled | Error::Run { .. }) => {
            rejection.get_or_insert(e);
            None
        }
        found => Some(found),
    });
    let accepted = match accepted.transpose() {
        Err(e @ Error::Run { .. }) => return Ok(Comparison::Incomplete(format!("ONNX Runtime opens it; not run to the end: {e}"))),
        accepted => accepted?,
    };
    let Some((batch, outputs)) = accepted else {
        let reason = rejection.map_or_else(String::new, |e| e.to_string());
        return Ok(Comparison::Incomplete(format!("ONNX Runtime opens it; not run, because it accepts no synthetic sample: {reason}")));
    };
    // The built-in executor cannot run ONNX decoders with a KV cache.
    if model.onnx.as_ref().is_some_and(|file| file.has_kv_cache()) || model.graph().is_err() {
        return Ok(Comparison::Incomplete("ONNX Runtime runs it; not compared, because the built-in executor cannot run it".into()));
    }
    let samples = if samples.is_empty() { std::slice::from_ref(&batch) } else { samples };
    let half = model.onnx.as_ref().is_some_and(|file| file.is_half());
    let rounding = model.onnx.as_ref().map(|file| file.output_rounding());
    // Fails for files of other tools, which name quantized values differently.
    match compare_quantized_values(&model, path, samples, half, work) {
        Ok(Some((true, found))) => return Ok(Comparison::Agrees(found)),
        Ok(Some((false, found))) => return Ok(Comparison::Differs(found)),
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        Ok(None) | Err(_) => {}
    }
    let has_integers = model.weights.by_name.values().any(|weight| !weight.is_float() || weight.encoding != Encoding::Dense);
    // Deep static int8 networks amplify a rounding difference of one step: a large difference does not
    // imply a defect of the file.
    let amplifies = model.graph().is_ok_and(|graph| quantized_values::is_static(&graph));
    let subject = Subject::from_model(model).map(|subject| subject.with_rounding(Rounding::Tensor));
    let compared = subject.and_then(|mut subject| {
        let ours = subject.load(&Device::Cpu, work)?.run(&batch.inputs)?;
        let [ours, theirs] = without_common_nonfinite(&ours, &outputs)?;
        let mut fidelity = FidelityAccumulator::accepting_integers();
        fidelity.add(&batch, &ours, &theirs)?;
        Ok(fidelity.finish())
    });
    Ok(match compared {
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        Err(e) => Comparison::Incomplete(format!("ONNX Runtime runs it; not compared with the built-in executor: {e}")),
        Ok(fidelity) => {
            let (ok, difference) = judge(&fidelity, has_integers || half, rounding.as_ref());
            let found = format!("ONNX Runtime against the built-in executor on {}: {difference}", counted(batch.samples, description));
            match ok {
                true => Comparison::Agrees(found),
                // Rounding of floats may change an integer, such as the index of the largest one.
                false if fidelity.outputs.is_empty() => Comparison::Incomplete(found),
                false if amplifies => Comparison::Agrees(found),
                false => Comparison::Differs(found),
            }
        }
    })
}
