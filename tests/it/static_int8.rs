//! Static int8: every golden model is calibrated on its golden inputs, written, opened, and run in ONNX
//! Runtime.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::{golden_model as golden, onnxruntime, outputs as run};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use compress::export::{Export, Layout, Onnx, Safetensors};
use compress::pass::{ActivationTarget, QuantizeStatic, Smooth};
use compress::report::Report;
use compress::{Model, Pipeline};
use compress_core::store::{ActivationScheme, Encoding};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::calibration::ActivationObserver;
use compress_engine::data::Data;
use compress_engine::exec::{Executor, Inputs, Parameters, Residence};
use compress_graph::ir::{Kind, Op};
use compress_onnx::proto::{DataType, ModelProto};
use compress_onnx::runtime::{Options, Session};
use compress_onnx::{Precision, file};
use prost::Message;

fn inputs(name: &str) -> Inputs {
    let golden = candle_core::safetensors::load(golden(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect()
}

/// The golden inputs as a data set.
fn calibration(name: &str, folder: &Path) -> Data {
    let path = folder.join("samples.safetensors");
    candle_core::safetensors::save(&inputs(name).into_iter().collect(), &path).unwrap();
    Data { arrays: Some(path), ..Data::default() }
}

struct Written {
    folder: tempfile::TempDir,
    report: Report,
}

impl Written {
    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }
}

fn quantized(name: &str, pass: QuantizeStatic, exports: Vec<Export>) -> compress::Result<Written> {
    let folder = tempfile::tempdir().unwrap();
    let mut pipeline = Pipeline::builder().pass(pass).calibration(calibration(name, folder.path()));
    for export in exports {
        pipeline = pipeline.export(export);
    }
    let report = pipeline.build()?.run(Model::open(golden(name))?, folder.path().join("out"))?;
    Ok(Written { folder, report })
}

/// Cosine similarity of all values.
fn cosine(a: &Tensor, b: &Tensor) -> f64 {
    let product = |a: &Tensor, b: &Tensor| (a * b).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

fn names() -> Vec<String> {
    let folder = golden("");
    let mut names: Vec<String> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Whether config.json describes a model completely, because compressed-tensors supports all its layers.
fn is_described(name: &str) -> bool {
    !["gpt2", "resnet", "mobilenet", "convnext", "efficientnet", "whisper", "rt-detr"].iter().any(|family| name.contains(family))
}

/// The cosine of an output to that of the float model, quantized without rescaling of channels.
fn unsmoothed(name: &str, output: &str, expected: &Tensor, inputs: &Inputs) -> f64 {
    let export = if is_described(name) { Safetensors::default() } else { Safetensors::with_layout(Layout::Sparse) };
    let written = quantized(name, QuantizeStatic { smooth: Smooth::None, ..QuantizeStatic::default() }, vec![export.into()]).unwrap();
    cosine(expected, &run(&Model::open(written.out()).unwrap(), inputs)[output])
}

#[test]
fn every_family_is_close_to_its_float_model_and_opens_again() {
    let ready = onnxruntime::has_onnx_runtime();
    let mut outputs = Vec::new();
    for name in names() {
        let mut exports: Vec<Export> = vec![if is_described(&name) { Safetensors::default() } else { Safetensors::with_layout(Layout::Sparse) }.into()];
        if ready {
            exports.push(Onnx::default().into());
        }
        // Separate factors are only for ONNX: config.json cannot describe an encoder with them.
        let pass = QuantizeStatic { smooth: Smooth::Free, ..QuantizeStatic::default() };
        let written = quantized(&name, pass, exports).unwrap_or_else(|e| panic!("{name}: {e}"));
        let model = Model::open(written.out()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(written.out().join("graph.json").exists(), !is_described(&name), "{name}");
        assert!(model.graph().unwrap().to_string().contains("FakeQuantize"), "{name}");
        let inputs = inputs(&name);
        let (before, after) = (run(&Model::open(golden(&name)).unwrap(), &inputs), run(&model, &inputs));
        for (output, tensor) in &before {
            let cosine = cosine(tensor, &after[output]);
            // Random weights with few channels are more sensitive to rounding than trained ones.
            assert!(cosine > 0.9 || cosine >= unsmoothed(&name, output, tensor, &inputs), "{name} {output}: {cosine}");
        }
        if !ready {
            continue;
        }
        let theirs = Session::open(&written.out().join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap();
        // Modules of sentence-transformers are floats in the folder and quantized in the ONNX file, with
        // a note.
        let is_same = !written.report.notes.iter().any(|note| note.contains("inputs of these layers are not quantized"));
        for (output, tensor) in &after {
            let cosine = self::cosine(tensor, &theirs[output]);
            outputs.push(cosine);
            assert!(cosine > if is_same { 0.999 } else { 0.99 }, "{name} {output}: {cosine} between the executor and ONNX Runtime");
        }
    }
    // Sums halfway between two steps may be rounded either way. Otherwise the executor computes the same
    // as the file, including quantized biases.
    let alike = outputs.iter().filter(|cosine| **cosine > 0.99999).count();
    assert!(alike * 10 >= outputs.len() * 9, "{alike} of {} outputs are alike", outputs.len());
}

#[test]
fn stored_scales_are_those_of_the_graph() {
    let written = quantized("llama-grouped-tied", QuantizeStatic::default(), vec![Safetensors::default().into()]).unwrap();
    let model = Model::open(written.out()).unwrap();
    let mut scales = BTreeSet::new();
    for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| name.ends_with("proj.weight")) {
        let Encoding::Quantized(affine) = &weight.encoding else { panic!("{name} is not quantized") };
        let ActivationScheme::Static(by) = affine.activations else { panic!("{name} has no static activations") };
        scales.insert(by.scale().to_bits());
    }
    let text = model.graph().unwrap().to_string();
    assert_eq!(text.matches(" = FakeQuantize").count(), scales.len());
    let config = std::fs::read_to_string(written.out().join("config.json")).unwrap();
    assert!(config.contains("\"dynamic\": false") && config.contains("\"strategy\": \"tensor\""), "{config}");
    // q, k and v share their input, and consumers that fuse them need a common scale.
    let scale = |name: &str| match &model.weights.by_name[&format!("model.layers.0.self_attn.{name}_proj.weight")].encoding {
        Encoding::Quantized(affine) => affine.activations,
        Encoding::Dense => panic!(),
    };
    assert!(scale("q") == scale("k") && scale("k") == scale("v"));
}

#[test]
fn onnx_contains_the_requested_integer_types() {
    let nodes = |pass: QuantizeStatic| {
        let written = quantized("resnet-basic", pass, vec![Onnx::default().into()]).unwrap();
        let bytes = std::fs::read(written.out().join(file::MODEL)).unwrap();
        ModelProto::decode(bytes.as_slice()).unwrap().graph.unwrap()
    };
    let zero_points = |graph: &compress_onnx::proto::GraphProto| {
        let names: BTreeSet<&str> = graph.node.iter().filter(|n| n.op_type() == "QuantizeLinear").map(|n| n.input[2].as_str()).collect();
        graph.initializer.iter().filter(|t| names.contains(t.name())).map(|t| t.data_type()).collect::<BTreeSet<_>>()
    };
    let graph = nodes(QuantizeStatic::default());
    assert!(graph.node.iter().all(|node| node.op_type() != "BatchNormalization"));
    let convolutions = graph.node.iter().filter(|n| n.op_type() == "Conv").count();
    let biases = graph.initializer.iter().filter(|t| t.data_type() == DataType::Int32).count();
    assert!(convolutions > 5 && biases == convolutions, "{convolutions} convolutions, {biases} biases of 32-bit integers");
    assert_eq!(zero_points(&graph), BTreeSet::from([DataType::Uint8]));
    assert_eq!(zero_points(&nodes(QuantizeStatic { target: ActivationTarget::Arm, ..QuantizeStatic::default() })), BTreeSet::from([DataType::Int8]));
    let reduced = nodes(QuantizeStatic { target: ActivationTarget::Portable, ..QuantizeStatic::default() });
    let integers = reduced.initializer.iter().filter(|t| t.data_type() == DataType::Int8 && t.dims.len() > 1);
    assert!(integers.flat_map(|t| t.raw_data()).all(|b| (-64..=64).contains(&(*b as i8))));
}

/// In token-wise layers, products are converted to floats before biases are added, because ONNX Runtime
/// fuses a product and an `Add` to a float product.
#[test]
fn biases_of_layers_over_tokens_are_floats() {
    for precision in [Precision::Float32, Precision::Float16] {
        let written = quantized("vit", QuantizeStatic::default(), vec![Onnx { precision, ..Onnx::default() }.into()]).unwrap();
        let bytes = std::fs::read(written.out().join(file::MODEL)).unwrap();
        let graph = ModelProto::decode(bytes.as_slice()).unwrap().graph.unwrap();
        let biases: Vec<_> = graph.initializer.iter().filter(|t| t.name().starts_with("encoder.") && t.name().ends_with("dense.bias")).collect();
        assert_eq!(biases.len(), 6, "{:?}", biases.iter().map(|bias| bias.name()).collect::<Vec<_>>());
        for bias in biases {
            assert_eq!(bias.data_type(), DataType::Float, "{}", bias.name());
            let readers: Vec<_> = graph.node.iter().filter(|node| node.input.iter().any(|input| input == bias.name())).map(|node| node.op_type()).collect();
            assert_eq!(readers, ["Sum"], "{}", bias.name());
        }
    }
}

/// If a quantizer's range exceeds the limit of a ReLU6, runtimes compute the preceding layer in floats.
/// The product of the scale of such a channel and that of its input underflows.
#[test]
fn channels_with_tiny_weights_are_supported() {
    let folder = tempfile::tempdir().unwrap();
    let changed = folder.path().join("in");
    std::fs::create_dir(&changed).unwrap();
    std::fs::copy(golden("vit").join("config.json"), changed.join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(golden("vit").join("model.safetensors"), &Device::Cpu).unwrap();
    for (kind, value) in [("weight", 1e-40f32), ("bias", 1e-44)] {
        let tensor = tensors.get_mut(&format!("encoder.layer.0.output.dense.{kind}")).unwrap();
        let row = Tensor::full(value, tensor.narrow(0, 0, 1).unwrap().shape(), &Device::Cpu).unwrap();
        *tensor = Tensor::cat(&[row, tensor.narrow(0, 1, tensor.dim(0).unwrap() - 1).unwrap()], 0).unwrap();
    }
    candle_core::safetensors::save(&tensors, changed.join("model.safetensors")).unwrap();
    let pipeline = Pipeline::builder().pass(QuantizeStatic::default()).calibration(calibration("vit", folder.path())).export(Onnx::default());
    pipeline.build().unwrap().run(Model::open(&changed).unwrap(), folder.path().join("out")).unwrap();
}

#[test]
fn ranges_end_at_the_clamp() {
    let written = quantized("torchvision-mobilenet-v2", QuantizeStatic::default(), vec![]).unwrap();
    let graph = Model::open(written.out()).unwrap().graph().unwrap();
    let mut found = 0;
    for node in graph.nodes() {
        let (Op::FakeQuantize(op), Kind::Node(before)) = (&node.op, &graph.value(node.inputs[0]).kind) else { continue };
        if let Op::Clip(clip) = &graph.nodes()[*before].op {
            let top = f64::from(op.scale) * f64::from(127 - op.zero_point);
            assert!(top <= clip.max * (1.0 + 1e-6) && op.zero_point == -128, "{}: {top}", graph.value(node.output).name);
            found += 1;
        }
    }
    assert!(found > 10, "{found}");
}

#[test]
fn a_goal_leaves_layers_in_floats_and_always_yields_a_model() {
    let with = |text: &str| QuantizeStatic { accuracy_goal: Some(text.parse().unwrap()), ..QuantizeStatic::default() };
    let goal = |text: &str| quantized("bert-sequence-classification", with(text), vec![Safetensors::default().into()]);
    let easy = goal("{ min_cosine: 0.5 }").unwrap();
    assert!(easy.report.notes.iter().any(|note| note.contains("goal met after 1 trial:")), "{:?}", easy.report.notes);
    let hard = goal("{ min_cosine: 1.0, max_trials: 3 }").unwrap();
    assert!(hard.report.notes.iter().any(|note| note.contains("not met after 2 trials")), "{:?}", hard.report.notes);
    // If all layers in floats do not meet the goal, because embedding tables are quantized, nothing else can.
    let details = &hard.report.passes[0].details;
    let (tried, layers) = (details["accuracy_goal"]["tried"].as_array().unwrap(), details["sensitivity"].as_array().unwrap().len() as u64);
    assert_eq!(tried.iter().map(|t| t["in_floats"].as_u64().unwrap()).collect::<Vec<_>>(), [0, layers]);
    let error = goal("{ min_cosine: 1.0, max_trials: 2, strict: true }").err().unwrap();
    assert!(error.to_string().contains("goal is not met") && !error.is_misuse(), "{error}");
}

/// In a post-norm encoder, the output of a layer is read by a quantizer and by the residual connection.
#[test]
fn quantizers_do_not_hide_the_layers_of_a_model() {
    for name in ["bert", "llama", "vit"] {
        let written = quantized(name, QuantizeStatic::default(), vec![Safetensors::with_layout(Layout::Sparse).into()]).unwrap();
        let layers = |path: &Path| {
            let layers = compress_graph::analysis::layers(&Model::open(path).unwrap().graph().unwrap()).unwrap().layers;
            layers.into_iter().map(|layer| (layer.input, layer.output)).collect::<Vec<_>>()
        };
        assert_eq!(layers(&written.out()), layers(&golden(name)), "{name}");
    }
}

#[test]
fn a_dequantized_model_can_be_quantized_again() {
    let folder = tempfile::tempdir().unwrap();
    let passes = [QuantizeStatic::default().into(), compress::pass::Dequantize::default().into(), compress::pass::Step::from(QuantizeStatic::default())];
    let pipeline = Pipeline::builder().calibration(calibration("bert", folder.path())).passes(passes).export(Safetensors::with_layout(Layout::Sparse));
    pipeline.build().unwrap().run(Model::open(golden("bert")).unwrap(), folder.path().join("out")).unwrap();
}

#[test]
fn calibration_errors_are_reported() {
    let refused = |name: &str, pass: QuantizeStatic| quantized(name, pass, vec![Safetensors::default().into()]).err().unwrap().to_string();
    assert!(refused("bert", QuantizeStatic { percentile: 20.0, ..QuantizeStatic::default() }).contains("`percentile`"));
    assert!(refused("bert", QuantizeStatic { ignore: vec!["*".parse().unwrap()], ..QuantizeStatic::default() }).contains("no weight is selected"));
    let without = Pipeline::builder().pass(QuantizeStatic::default()).build().err().unwrap();
    assert!(without.to_string().contains("calibration") && without.is_misuse(), "{without}");
    // A NaN is reported with the value in which it occurs.
    let folder = tempfile::tempdir().unwrap();
    let name = "torchvision-resnet18";
    let path = folder.path().join("nan.safetensors");
    let bad: std::collections::HashMap<String, Tensor> = inputs(name).into_iter().map(|(k, t)| (k, (t * f64::NAN).unwrap())).collect();
    candle_core::safetensors::save(&bad, &path).unwrap();
    let data = Data { arrays: Some(path), ..Data::default() };
    let pipeline = Pipeline::builder().pass(QuantizeStatic::default()).calibration(data).build().unwrap();
    let error = pipeline.run(Model::open(golden(name)).unwrap(), folder.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("NaN for a calibration sample") && error.contains("graph value"), "{error}");
    assert!(!folder.path().join("out").exists());
}

/// In `deberta`, position embeddings pass through the layers of tokens; in the other model, layers read
/// an embedding directly.
#[test]
fn a_layer_has_one_scale_for_all_its_inputs() {
    for name in ["deberta", "deberta-masked-lm"] {
        let before = Model::open(golden(name)).unwrap();
        let graph = before.graph().unwrap();
        let mut reads: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_))) {
            reads.entry(graph.value(node.inputs[1]).name.clone()).or_default().push(graph.value(node.inputs[0]).name.clone());
        }
        assert_eq!(reads.values().any(|values| values.len() == 2), name == "deberta");
        // The first sample has no padding, which calibration ignores.
        let inputs: Inputs = inputs(name).into_iter().map(|(input, all)| (input, all.narrow(0, 0, 1).unwrap())).collect();
        let extremes = |value: &Tensor| {
            let values = value.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            (values.iter().copied().fold(0f32, f32::min), values.iter().copied().fold(0f32, f32::max))
        };
        let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
        let parameters = Parameters::load(&graph, &before.weights, &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
        let executor = Executor::new(&graph, parameters, Device::Cpu);
        let mut seen = BTreeMap::new();
        let observation = executor.observation(|value| reads.values().flatten().any(|read| read == value));
        let mut see = |value: &str, tensor: &Tensor| {
            seen.insert(value.to_owned(), extremes(tensor));
            Ok(())
        };
        executor.run_observed(&observation, &inputs, &mut see).unwrap();
        let table = "deberta.encoder.rel_embeddings.weight";
        if name != "deberta" {
            let values = before.weights.by_name[table].floats(table).unwrap();
            seen.insert(table.to_owned(), extremes(&Tensor::new(values, &Device::Cpu).unwrap()));
        }

        let pass =
            QuantizeStatic { smooth: Smooth::None, observer: ActivationObserver::Minmax, headroom: false, embeddings: false, ..QuantizeStatic::default() };
        let written = quantized(name, pass, vec![Safetensors::default().into()]).unwrap();
        assert!(!written.report.notes.iter().any(|note| note.contains("meaningless")), "{:?}", written.report.notes);
        let model = Model::open(written.out()).unwrap();
        let graph = model.graph().unwrap();
        let mut held = 0;
        for node in graph.nodes() {
            let (Op::Linear(_), Kind::Node(input)) = (&node.op, graph.value(node.inputs[0]).kind) else { continue };
            let Op::FakeQuantize(by) = graph.nodes()[input].op else { continue };
            let weight = &graph.value(node.inputs[1]).name;
            let (low, high) = by.range();
            for value in &reads[weight] {
                let (least, most) = seen[value];
                assert!(low - by.scale <= least && most <= high + by.scale, "{name} {weight}: {low} to {high}, and {value} is {least} to {most}");
                held += 1;
            }
        }
        assert!(held >= 14, "{name}: {held}");
    }
}

/// A bias that two layers share is not quantized, and the bias correction of one layer is not added to it.
#[test]
fn a_bias_of_two_layers_is_not_changed() {
    let text = "input x: float[batch, 6]\nparam a.weight: float[5, 6]\nparam b.weight: float[5, 6]\nparam c.weight: float[5, 6]\nparam shared: float[5]\nparam own: float[5]\n\
        p = Linear{\"input_major\":false}(x, a.weight, shared) -> float[batch, 5]\nq = Linear{\"input_major\":false}(x, b.weight, shared) -> float[batch, 5]\n\
        r = Linear{\"input_major\":false}(x, c.weight, own) -> float[batch, 5]\n\
        s = Tanh(p) -> float[batch, 5]\nt = Tanh(q) -> float[batch, 5]\nu = Tanh(r) -> float[batch, 5]\noutput s = s\noutput t = t\noutput u = u\n";
    let graph: compress_graph::ir::Graph = text.parse().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("in");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("config.json"), "{}").unwrap();
    std::fs::write(place.join("graph.json"), serde_json::to_string(&compress_graph::ir::GraphFile::from(&graph)).unwrap()).unwrap();
    let values = |seed: usize, shape: &[usize]| {
        let number = |at: usize| ((at * 37 + seed * 11) % 23) as f32 / 11.0 - 0.9;
        Tensor::from_vec((0..shape.iter().product()).map(number).collect(), shape, &Device::Cpu).unwrap()
    };
    let tensors = graph.params().enumerate().map(|(seed, (_, value))| {
        let shape: Vec<usize> = value.ty.shape.iter().map(|dim| dim.fixed().unwrap()).collect();
        (value.name.clone(), values(seed, &shape))
    });
    let before: std::collections::HashMap<_, _> = tensors.collect();
    candle_core::safetensors::save(&before, place.join("model.safetensors")).unwrap();
    let samples = folder.path().join("samples.safetensors");
    candle_core::safetensors::save(&[("x".to_owned(), values(9, &[32, 6]))].into_iter().collect(), &samples).unwrap();
    let data = Data { arrays: Some(samples), ..Data::default() };
    let pipeline = Pipeline::builder().pass(QuantizeStatic::default()).calibration(data).export(Safetensors::default()).build().unwrap();
    pipeline.run(Model::open(&place).unwrap(), folder.path().join("out")).unwrap();
    let after = Model::open(folder.path().join("out")).unwrap().weights;
    let bias = |name: &str| (before[name].to_vec1::<f32>().unwrap(), after.get(name).unwrap().floats(name).unwrap());
    let (before, after) = bias("shared");
    assert_eq!(before, after);
    let (before, after) = bias("own");
    assert_ne!(before, after);
}

/// The result of `verify` for the ONNX file of a folder.
fn file_agrees(folder: &Path) -> compress::pipeline::Check {
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let checks = compress::pipeline::verify(folder, &work).unwrap();
    checks.into_iter().find(|check| check.path == "model.onnx, run").unwrap()
}

#[test]
fn verification_compares_every_quantized_value_and_finds_every_wrong_tensor() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let written = quantized("torchvision-mobilenet-v2", QuantizeStatic::default(), vec![Safetensors::default().into(), Onnx::default().into()]).unwrap();
    let how = &written.report.outputs.iter().find(|output| output.path == file::MODEL).unwrap().verified.how;
    assert!(how.contains("calibration sample") && how.contains("quantized values are within one step"), "{how}");
    let right = file_agrees(&written.out());
    assert!(right.ok && right.finding.contains("within one step"), "{}", right.finding);
    let alone = quantized("torchvision-mobilenet-v2", QuantizeStatic::default(), vec![Onnx::default().into()]).unwrap();
    let of_file = file_agrees(&alone.out());
    assert!(of_file.ok && of_file.finding.contains("within one step"), "{}", of_file.finding);

    let path = written.out().join(file::MODEL);
    let proto = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    let mut corrupted = 0;
    for (index, tensor) in proto.graph.as_ref().unwrap().initializer.iter().enumerate() {
        let mut proto = proto.clone();
        let changed = &mut proto.graph.as_mut().unwrap().initializer[index];
        let mut bytes = changed.raw_data().to_vec();
        match tensor.data_type() {
            // Output channels of a weight in reverse order.
            DataType::Int8 if tensor.dims.len() > 1 => {
                let row = bytes.len() / tensor.dims[0] as usize;
                bytes = bytes.chunks(row).rev().flatten().copied().collect();
            }
            // Scales multiplied by 1.5. ONNX Runtime ignores the scale of a bias, which is the product
            // of two others.
            DataType::Float if tensor.name().ends_with("weight_scale") => {
                let scales: Vec<f32> = bytes.as_chunks().0.iter().map(|scale| f32::from_le_bytes(*scale) * 1.5).collect();
                bytes = scales.into_iter().flat_map(f32::to_le_bytes).collect();
            }
            _ => continue,
        }
        if bytes == tensor.raw_data() {
            continue;
        }
        changed.raw_data = Some(bytes);
        std::fs::write(&path, proto.encode_to_vec()).unwrap();
        let wrong = file_agrees(&written.out());
        assert!(!wrong.ok, "{}: {}", tensor.name(), wrong.finding);
        corrupted += 1;
        if corrupted == 16 {
            break;
        }
    }
    assert!(corrupted == 16, "{corrupted}");
}

/// The report and the graph of a small network with this weight `[5, 6]`, calibrated on these samples.
fn small_network(samples: &[Vec<f32>], weight: Vec<f32>, pass: QuantizeStatic) -> (Report, compress_graph::ir::Graph) {
    let text = "input x: float[batch, 6]\nparam w: float[5, 6]\nparam b: float[5]\n\
        p = Linear{\"input_major\":false}(x, w, b) -> float[batch, 5]\ny = Tanh(p) -> float[batch, 5]\noutput y = y\n";
    let graph: compress_graph::ir::Graph = text.parse().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("in");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("config.json"), "{}").unwrap();
    std::fs::write(place.join("graph.json"), serde_json::to_string(&compress_graph::ir::GraphFile::from(&graph)).unwrap()).unwrap();
    let tensor = |values: Vec<f32>, shape: &[usize]| Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    let tensors = std::collections::HashMap::from([("w".to_owned(), tensor(weight, &[5, 6])), ("b".to_owned(), tensor(vec![0.1; 5], &[5]))]);
    candle_core::safetensors::save(&tensors, place.join("model.safetensors")).unwrap();
    let path = folder.path().join("samples.safetensors");
    // The last sample is held out.
    let x = tensor([samples.concat(), vec![0.5; 6]].concat(), &[samples.len() + 1, 6]);
    candle_core::safetensors::save(&std::collections::HashMap::from([("x".to_owned(), x)]), &path).unwrap();
    let data = Data { arrays: Some(path), samples: Some(samples.len()), ..Data::default() };
    let pipeline =
        Pipeline::builder().pass(QuantizeStatic { smooth: Smooth::None, targets: vec!["w".parse().unwrap()], ..pass }).calibration(data).build().unwrap();
    let report = pipeline.run(Model::open(&place).unwrap(), folder.path().join("out")).unwrap();
    (report, Model::open(folder.path().join("out")).unwrap().graph().unwrap())
}

/// The range of the input of a small network, calibrated on these samples.
fn input_range(samples: &[Vec<f32>], pass: QuantizeStatic) -> (f32, f32) {
    let (_, graph) = small_network(samples, (0..30).map(|at| (at * 37 % 23) as f32 / 11.0 - 0.9).collect(), pass);
    let by = graph.nodes().iter().find_map(|node| if let Op::FakeQuantize(by) = node.op { Some(by) } else { None }).unwrap();
    by.range()
}

#[test]
fn one_unusual_sample_does_not_decide_the_range() {
    let sample = |seed: usize, factor: f32| (0..6).map(|at| factor * (((seed * 131 + at * 37) % 97) as f32 / 48.0 - 1.0)).collect::<Vec<f32>>();
    let usual: Vec<Vec<f32>> = (0..64).map(|seed| sample(seed, 1.0)).collect();
    let mut samples = usual.clone();
    samples[21] = sample(5, 8.0);
    let minmax = QuantizeStatic { observer: ActivationObserver::Minmax, ..QuantizeStatic::default() };
    let (least, most) = input_range(&samples, minmax.clone());
    let (low, high) = input_range(&samples, QuantizeStatic::default());
    let (usual_low, usual_high) = input_range(&usual, QuantizeStatic::default());
    assert!(low <= 0.99 * usual_low && high >= 0.99 * usual_high, "{low} to {high}, and {usual_low} to {usual_high} without the sample");
    assert!(low > 0.5 * least && high < 0.5 * most, "{low} to {high}, and samples reach from {least} to {most}");
    samples.rotate_left(17);
    samples.reverse();
    assert_eq!(input_range(&samples, minmax), (least, most));
}

#[test]
fn only_layers_whose_sums_saturate_are_noted() {
    let samples = [vec![1.0; 6], vec![0.75; 6]];
    let found = |target, second: f32| {
        let weight = (0..30).map(|at| if at % 2 == 0 { 1.0 } else { second }).collect();
        let (report, _) = small_network(&samples, weight, QuantizeStatic { target, ..QuantizeStatic::default() });
        report.notes.into_iter().filter(|note| note.contains("saturate")).collect::<Vec<_>>()
    };
    // Pairs of adjacent products add up to twice the largest product, or cancel.
    let [note] = &found(ActivationTarget::Vnni, 1.0)[..] else { panic!("no note") };
    assert!(note.contains("accumulators of 1 of 1 layer saturate"), "{note}");
    assert!(found(ActivationTarget::Vnni, -1.0).is_empty());
    assert!(found(ActivationTarget::Portable, 1.0).is_empty());
}
