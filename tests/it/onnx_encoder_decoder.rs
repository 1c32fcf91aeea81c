//! Encoder-decoder models as ONNX with caches: every step in ONNX Runtime has the logits of transformers.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use crate::common::numbers::{angle, largest};
use crate::common::{golden_model as golden, onnxruntime, work};
use candle_core::{DType, Device, Tensor};
use compress::export::{Export, Onnx};
use compress::pass::{QuantizeDynamic, QuantizeStatic, Step};
use compress::report::Report;
use compress::{Model, Pipeline, contract, pipeline};
use compress_engine::data::Data;
use compress_engine::evaluation::{Runtime, Subject};
use compress_engine::exec::{Executor, Inputs, Parameters, Residence, Rounding};
use compress_graph::analysis::EncoderDecoder;
use compress_graph::ir::Port;
use compress_onnx::proto::{GraphProto, ModelProto};
use compress_onnx::runtime::{EncoderDecoderSession, Options, Session};
use compress_onnx::{Precision, file};
use serde_json::json;

const TOLERANCE: f32 = 1e-4;

fn cached() -> Onnx {
    Onnx { cache: true, ..Onnx::default() }
}

fn written(model: &Path, out: &Path, steps: Vec<Step>, exports: Vec<Export>) -> compress::Result<Report> {
    let builder = steps.into_iter().fold(Pipeline::builder().threads(2), pipeline::Builder::pass);
    exports.into_iter().fold(builder, pipeline::Builder::export).build()?.run(Model::open(model)?, out)
}

/// Inputs of a golden model, and its logits in transformers.
fn expected(name: &str) -> (Inputs, Tensor) {
    let stored = candle_core::safetensors::load(golden(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    let inputs = stored.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("in/")?.to_owned(), tensor.clone()))).collect();
    (inputs, stored["out/logits"].clone())
}

/// Logits of the files in a folder, with this number of last tokens processed one at a time.
fn logits(folder: &Path, inputs: &Inputs, steps: usize) -> Tensor {
    let mut model = EncoderDecoderSession::open(folder, Options::default()).unwrap().expect("three files");
    let mut outputs = model.run(inputs, steps).unwrap();
    assert_eq!(outputs.keys().collect::<Vec<_>>(), ["logits"]);
    outputs.remove("logits").unwrap()
}

fn executor_logits(model: &Model, inputs: &Inputs) -> Tensor {
    let graph = model.graph().unwrap();
    let parameters = work(|work| Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Stored, work)).unwrap();
    Executor::new(&graph, parameters, Device::Cpu).with_rounding(Rounding::Tensor).run(inputs).unwrap().remove("logits").unwrap()
}

/// The graph of a file, with its weights.
fn parsed(path: &Path) -> GraphProto {
    let model: ModelProto = prost::Message::decode(std::fs::read(path).unwrap().as_slice()).unwrap();
    model.graph.unwrap()
}

fn names(ports: &[Port]) -> Vec<&str> {
    ports.iter().map(|port| port.name.as_str()).collect()
}

#[test]
fn every_step_has_the_logits_of_transformers() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut models: Vec<String> = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    models.sort();
    let (mut families, mut failures) = (BTreeSet::new(), Vec::new());
    for (index, name) in models.iter().enumerate() {
        let model = Model::open(golden(name)).unwrap();
        let Some(graph) = model.graph().ok().filter(EncoderDecoder::is_in) else { continue };
        let (out, opset) = (folder.path().join(name), 17 + index as u32 % 5);
        let report = written(&golden(name), &out, vec![], vec![Onnx { opset: Some(opset), ..cached() }.into()]);
        if !graph.outputs().iter().any(|(output, _)| output == "logits") {
            let error = report.unwrap_err().to_string();
            assert!(error.contains("has no output `logits` per token"), "{error}");
            continue;
        }
        let how = &report.unwrap().outputs[0].verified.how;
        assert!(how.contains("run in ONNX Runtime on 2 synthetic samples"), "{how}");
        families.insert(model.config.model_type().to_owned());
        let (inputs, theirs) = expected(name);
        for steps in [0, 5, theirs.dim(1).unwrap() - 1] {
            let apart = largest(&(&logits(&out, &inputs, steps) - &theirs).unwrap()) / largest(&theirs).max(1.0);
            if apart > TOLERANCE || apart.is_nan() {
                failures.push(format!("{name} at opset {opset}, {steps} steps: {apart:e}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(families.iter().map(String::as_str).collect::<Vec<_>>(), ["mt5", "t5", "whisper"]);
}

#[test]
fn quantized_and_half_precision_models_continue_texts() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let int8 = || vec![Step::from(QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() })];
    let weights = || vec![Step::from(serde_json::from_value::<QuantizeDynamic>(json!({ "activations": "none" })).unwrap())];
    let half = || Onnx { precision: Precision::Float16, ..cached() };
    let cases: [(&str, &str, Vec<Step>, Onnx, f64); 6] = [
        ("int8", "t5", int8(), cached(), 1e-2),
        ("int8 speech", "whisper", int8(), cached(), 1e-2),
        ("int8 weights", "t5-gated", weights(), cached(), 1e-6),
        ("half", "mt5", vec![], half(), 1e-4),
        ("half speech", "whisper", vec![], half(), 1e-4),
        ("half int8", "t5", int8(), half(), 1e-2),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (case, name, steps, onnx, tolerance) in cases {
        let out = folder.path().join(case.replace(' ', "-"));
        written(&golden(name), &out, steps, vec![Export::default(), onnx.into()]).unwrap_or_else(|error| panic!("{case}: {error}"));
        let (inputs, whole) = expected(name);
        let ours = executor_logits(&Model::open(&out).unwrap(), &inputs);
        let [theirs, single] = [0, whole.dim(1).unwrap() - 1].map(|steps| logits(&out, &inputs, steps));
        let (apart, by_steps) = (angle(&ours, &theirs), angle(&ours, &single));
        // Dynamic scales of single tokens differ from those of the whole text, and activations in 16 bits are
        // rounded to other integers: the error of rounding is then another one, but not larger.
        let rounds_activations = case.contains("int8") && case != "int8 weights";
        let rounded = if rounds_activations { angle(&whole, &ours).max(tolerance) } else { tolerance };
        let limit = if onnx.precision == Precision::Float16 { rounded } else { tolerance };
        assert!(apart < limit, "{case}: {apart:e}, not below {limit:e}");
        assert!(by_steps < rounded, "{case} token by token: {by_steps:e}, not below {rounded:e}");
        // Values that pass from one file to another have the precision of the model.
        let element = |name: &str, input: &str| {
            let port = parsed(&out.join(name)).input.into_iter().find(|port| port.name() == input).unwrap();
            port.r#type.unwrap().tensor_type.unwrap().elem_type.unwrap()
        };
        let wanted = if onnx.precision == Precision::Float16 { 10 } else { 1 };
        let [first, next] = file::DECODERS;
        assert_eq!(element(first, "encoder_hidden_states"), wanted, "{case}");
        assert_eq!(["decoder.key", "encoder.value"].map(|part| element(next, &format!("past_key_values.0.{part}"))), [wanted; 2], "{case}");
    }
}

/// Activations of encoder and decoder are calibrated on the same samples.
#[test]
fn statically_quantized_models_continue_texts() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    for name in ["t5", "whisper"] {
        let folder = tempfile::tempdir().unwrap();
        let (inputs, theirs) = expected(name);
        let arrays = folder.path().join("arrays.safetensors");
        candle_core::safetensors::save(&inputs.clone().into_iter().collect::<HashMap<_, _>>(), &arrays).unwrap();
        let (out, data) = (folder.path().join("out"), Data { arrays: Some(arrays), ..Data::default() });
        let run = |out: &Path, onnx: Onnx| {
            let pipeline = Pipeline::builder().threads(2).pass(QuantizeStatic::default()).calibration(data.clone()).export(onnx).build().unwrap();
            pipeline.run(Model::open(golden(name)).unwrap(), out).unwrap_or_else(|error| panic!("{name}: {error}"));
        };
        run(&out, cached());
        let [all, single] = [0, theirs.dim(1).unwrap() - 1].map(|steps| logits(&out, &inputs, steps));
        let whole = folder.path().join("whole");
        run(&whole, Onnx::default());
        let whole = Session::open(&whole.join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap().remove("logits").unwrap();
        let integers = parsed(&out.join(file::DECODERS[1]));
        assert!(integers.node.iter().any(|node| node.op_type() == "QuantizeLinear"), "{name}");
        // Rounding rarely turns differences in the last bits into whole steps.
        assert!(angle(&whole, &all) < 1e-3, "{name}: {}", angle(&whole, &all));
        assert!(angle(&whole, &single) < 1e-2, "{name}: {}", angle(&whole, &single));
    }
}

#[test]
fn files_and_names_are_those_of_optimum() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let report = written(&golden("t5"), &out, vec![], vec![cached().into()]).unwrap();
    let files: Vec<&str> = report.outputs.iter().map(|output| output.path.as_str()).collect();
    assert_eq!(files, ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"]);
    let layers: BTreeSet<&str> = report.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert!(layers.len() > 30 && layers.len() == report.layers.len(), "a weight is counted twice");
    let graphs: BTreeMap<&str, _> = files.iter().map(|name| (*name, parsed(&out.join(name)))).collect();
    let weights = |name: &str, part: &str| graphs[name].initializer.iter().filter(|tensor| tensor.name().contains(part)).count();
    let [first, next] = file::DECODERS;
    assert_eq!(weights(next, "EncDecAttention.k") + weights(next, "EncDecAttention.v") + weights(next, "encoder.block"), 0);
    assert!(weights(first, "EncDecAttention.k") > 0 && weights(next, "EncDecAttention.q") > 0 && weights(file::ENCODER, "encoder.block") > 0);
    assert_eq!(weights(file::ENCODER, "decoder.block"), 0);
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let ports = |name: &str| Session::open(&out.join(name), Options::default()).unwrap().ports();
    let parts =
        |kind: &str, parts: &[&str]| -> Vec<String> { (0..3).flat_map(|number| parts.iter().map(move |part| format!("{kind}.{number}.{part}"))).collect() };
    let (own, all) = (["decoder.key", "decoder.value"], ["decoder.key", "decoder.value", "encoder.key", "encoder.value"]);
    let with = |first: &[&str], rest: Vec<String>| first.iter().map(|name| (*name).to_owned()).chain(rest).collect::<Vec<_>>();
    let (inputs, outputs) = ports(file::ENCODER);
    assert_eq!((names(&inputs), names(&outputs)), (vec!["input_ids", "attention_mask"], vec!["last_hidden_state"]));
    let (inputs, outputs) = ports(first);
    assert_eq!(names(&inputs), ["input_ids", "encoder_hidden_states", "encoder_attention_mask"]);
    assert_eq!(names(&outputs), with(&["logits"], parts("present", &all)));
    let (inputs, outputs) = ports(next);
    assert_eq!(names(&inputs), with(&["input_ids", "encoder_attention_mask"], parts("past_key_values", &all)));
    assert_eq!(names(&outputs), with(&["logits"], parts("present", &own)));
    // The folder is run as a whole, and verified file by file.
    let subject = Subject::open(&out, 1).unwrap();
    assert_eq!(subject.runtime(), Runtime::OnnxRuntime);
    assert_eq!(names(subject.target().inputs), ["input_ids", "attention_mask", "decoder_input_ids"]);
    let checks = work(|work| pipeline::verify(&out, work)).unwrap();
    assert!(checks.iter().all(|check| check.ok), "{checks:?}");
    assert!(checks.iter().any(|check| check.finding.starts_with("ONNX Runtime runs it")), "{checks:?}");
    let checked = contract::check(&out, "onnxruntime@1.16".parse().unwrap()).unwrap();
    assert!(checked.is_met() && !checked.rules.is_empty(), "{checked:?}");
    // Other weights in the folder are those of the model, also if they cannot be read.
    std::fs::write(out.join("model.safetensors"), [0; 9]).unwrap();
    let error = Subject::open(&out, 1).err().unwrap().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn unsuitable_exports_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, out: &str, reason: &str| {
        let error = written(&golden(name), &folder.path().join(out), vec![], vec![cached().into()]).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    };
    refused("t5", "model.onnx", "written to three files: use a folder as output");
    refused("t5-encoder", "encoder", "cannot generate text");
}

/// Passes read a file of the export like any ONNX file.
#[test]
fn a_decoder_file_is_quantized_alone() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    written(&golden("t5"), &out, vec![], vec![cached().into()]).unwrap();
    let (inputs, theirs) = expected("t5");
    for name in file::DECODERS {
        let changed = folder.path().join(format!("int8-{name}"));
        written(&out.join(name), &changed, vec![QuantizeDynamic::default().into()], vec![]).unwrap_or_else(|error| panic!("{name}: {error}"));
        let graph = parsed(&changed);
        assert!(graph.node.iter().any(|node| node.op_type() == "MatMulInteger"), "{name}");
        std::fs::copy(&changed, out.join(name)).unwrap();
    }
    let apart = angle(&theirs, &logits(&out, &inputs, theirs.dim(1).unwrap() - 1));
    assert!(apart < 0.02 && apart > 0.0, "{apart:e}");
}
