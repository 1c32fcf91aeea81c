//! Running a model: padding, invalid inputs, and other storage formats of weights.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::numbers::largest;
use crate::common::{Desk, golden_model as golden, pipeline};
use candle_core::{DType, Device, Tensor};
use compress::export::{Layout, Safetensors};
use compress::pass::{ActivationRounding, Amount, GranularityKind, PruneUnstructured, QuantizeDynamic};
use compress::{Error, Model};
use compress_engine::exec::{Executor, Inputs, Parameters, Residence};
use compress_graph::ir::Graph;

fn families() -> Vec<String> {
    std::fs::read_dir(golden("")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn parameters(model: &Model, graph: &Graph, residence: Residence) -> Parameters {
    crate::common::work(|work| Parameters::load(graph, &model.weights, &Device::Cpu, DType::F32, residence, work)).unwrap()
}

fn run_as(folder: &Path, inputs: &Inputs, residence: Residence) -> compress::Result<BTreeMap<String, Tensor>> {
    let model = Model::open(folder)?;
    let graph = model.graph()?;
    Executor::new(&graph, parameters(&model, &graph, residence), Device::Cpu).run(inputs)
}

fn run(folder: &Path, inputs: &Inputs) -> BTreeMap<String, Tensor> {
    run_as(folder, inputs, Residence::Computed).unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
}

fn text(rows: &[Vec<i64>], padding: i64) -> Inputs {
    let longest = rows.iter().map(Vec::len).max().unwrap();
    let fill = |value: fn(&i64) -> i64, rest: i64| {
        let values: Vec<i64> = rows.iter().flat_map(|row| (0..longest).map(move |i| row.get(i).map_or(rest, value))).collect();
        Tensor::from_vec(values, (rows.len(), longest), &Device::Cpu).unwrap()
    };
    Inputs::from([("input_ids".to_owned(), fill(|t| *t, padding)), ("attention_mask".to_owned(), fill(|_| 1, 0))])
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

#[test]
fn a_padded_batch_equals_single_texts() {
    let mut checked = 0;
    for name in families() {
        let folder = golden(&name);
        let graph = Model::open(&folder).unwrap().graph().unwrap();
        // Texts of the same length have no padding, those of CLIP end in a token that these lack, and
        // some inputs include images.
        let reads = |name: &str| graph.inputs().any(|(_, value)| value.name == name);
        if !reads("attention_mask") || reads("pixel_values") || reads("decoder_input_ids") || name == "clip-text" {
            continue;
        }
        let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
        let padding = config["pad_token_id"].as_i64().unwrap_or(0);
        let rows: Vec<Vec<i64>> = [6, 3, 1, 5].iter().map(|n| (0..*n).map(|i| 3 + (7 * i + n) % 11).collect()).collect();
        let batch = run(&folder, &text(&rows, padding));
        for (index, row) in rows.iter().enumerate() {
            for (output, alone) in run(&folder, &text(std::slice::from_ref(row), padding)) {
                let together = batch[&output].narrow(0, index, 1).unwrap();
                let together = if together.rank() == 3 { together.narrow(1, 0, row.len()).unwrap() } else { together };
                // Products with few rows sum in another order.
                assert!(distance(&together, &alone) <= 1e-5 * largest(&alone).max(1.0), "{name}, {output} of text {index}: {}", distance(&together, &alone));
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "only {checked} outputs were compared");
}

#[test]
fn observers_do_not_change_outputs() {
    for name in ["bert", "llama", "torchvision-resnet18", "torchvision-mobilenet-v2", "gpt2"] {
        let model = Model::open(golden(name)).unwrap();
        let graph = model.graph().unwrap();
        let executor = Executor::new(&graph, parameters(&model, &graph, Residence::Computed), Device::Cpu);
        let tensors = candle_core::safetensors::load(golden(name).join("golden.safetensors"), &Device::Cpu).unwrap();
        let inputs: Inputs = tensors.into_iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t))).collect();
        let observe = |wanted: &dyn Fn(&str) -> bool| {
            let mut seen = Vec::new();
            let look = &mut |node: &str, tensor: &Tensor| {
                seen.push((node.to_owned(), tensor.clone()));
                Ok(())
            };
            executor.run_observed(&executor.observation(wanted), &inputs, look).unwrap();
            seen
        };
        let all = observe(&|_| true);
        assert_eq!(all.len(), graph.nodes().len(), "{name}");
        let all: BTreeMap<String, Tensor> = all.into_iter().collect();
        for (output, tensor) in executor.run(&inputs).unwrap() {
            let (_, id) = graph.outputs().iter().find(|(name, _)| *name == output).unwrap();
            assert!(distance(&tensor, &all[&graph.value(*id).name]) < 1e-5, "{name}, {output}");
        }
        // Observers receive the same values, also if a run stops at each of them.
        let some: Vec<&String> = all.keys().step_by(3).collect();
        let observation = executor.observation(|node| some.iter().any(|name| *name == node));
        let mut run = executor.start(&inputs).unwrap();
        let seen = observe(&|node| some.iter().any(|name| *name == node));
        assert_eq!(seen.len(), some.len(), "{name}");
        for (node, tensor) in seen {
            assert!(distance(&tensor, &all[&node]) < 1e-5, "{name}, {node}");
            let stopped = executor.advance(&observation, &mut run, &node).unwrap();
            assert_eq!(distance(&tensor, &stopped), 0.0, "{name}, {node}");
        }
    }
}

#[test]
fn invalid_inputs_are_named() {
    let said = |name: &str, inputs: &Inputs| {
        let error = run_as(&golden(name), inputs, Residence::Computed).unwrap_err();
        assert!(matches!(error, Error::Run { .. }) && !error.is_misuse(), "{error:?}");
        error.to_string()
    };
    for (number, name) in [(1_000_000, "llama"), (-1, "bert")] {
        let error = said(name, &text(&[vec![3, 4, 5], vec![3, number]], 0));
        assert!(error.contains("input `input_ids`") && error.contains(&format!("contains {number} at row 1, column 1")) && error.contains("rows"), "{error}");
    }
    let error = said("bert", &text(&[vec![3; 17]], 0));
    assert!(error.contains("contains 16 at row 0, column 16") && error.contains("has 16 rows"), "{error}");
    assert!(said("llama", &Inputs::new()).contains("`input_ids`: is missing"));
    let flat = Tensor::zeros(3, DType::I64, &Device::Cpu).unwrap();
    let error = said("llama", &Inputs::from([("input_ids".to_owned(), flat)]));
    assert!(error.contains("input `input_ids`: has shape [3]"), "{error}");
}

fn cosine(a: &Tensor, b: &Tensor) -> f32 {
    let product = |a: &Tensor, b: &Tensor| (a * b).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
    product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

#[test]
fn quantized_and_sparse_weights_run_like_their_dequantized_values() {
    let desk = Desk::new();
    let quantize = |granularity, group_size, symmetric, activations| QuantizeDynamic { granularity, group_size, symmetric, activations, ..Default::default() };
    let (channel, group) = (GranularityKind::Channel, GranularityKind::Group);
    let passes = [
        quantize(channel, None, true, ActivationRounding::Token),
        quantize(channel, None, true, ActivationRounding::None),
        quantize(group, Some(16), true, ActivationRounding::None),
        quantize(group, Some(16), false, ActivationRounding::None),
        quantize(GranularityKind::Tensor, None, false, ActivationRounding::None),
    ];
    let inputs = text(&[vec![1, 5, 9, 60, 2, 7], vec![8, 3]], 0);
    for dtype in [crate::common::DType::F32, crate::common::DType::BF16] {
        let model = desk.pico(dtype, 2);
        let prune = || PruneUnstructured { amount: Some(Amount::fraction(0.6)), ..Default::default() };
        let mut builders: Vec<_> = passes.iter().map(|pass| pipeline().pass(pass.clone())).collect();
        builders.push(pipeline().pass(prune()).export(Safetensors::with_layout(Layout::Sparse)));
        builders.push(pipeline().pass(prune()).pass(passes[0].clone()));
        // For these, the inputs of layers are also rounded.
        let rounding = [0, builders.len() - 1];
        for (index, builder) in builders.into_iter().enumerate() {
            let compressed = desk.run(&model, builder).unwrap_or_else(|e| panic!("{index}: {e}")).path;
            let dense = desk.run(&compressed, pipeline().export(Safetensors::with_layout(Layout::Dense))).unwrap().path;
            let (ours, theirs) = (run(&compressed, &inputs), run(&dense, &inputs));
            // Densified weights are rounded to their original dtype; in f32 this is exact.
            let exact = dtype == crate::common::DType::F32 && !rounding.contains(&index);
            let tolerance = if exact { 1e-5 } else { 0.1 };
            for (output, tensor) in ours.iter().filter(|_| !rounding.contains(&index)) {
                assert!(distance(tensor, &theirs[output]) < tolerance, "{index}, {dtype}, {output}: {}", distance(tensor, &theirs[output]));
            }
            if rounding.contains(&index) {
                let (ours, theirs) = (&ours["logits"], &theirs["logits"]);
                assert!(distance(ours, theirs) > 1e-4, "{index}, {dtype}: inputs are not rounded");
                assert!(cosine(ours, theirs) > 0.995, "{index}, {dtype}: {}", cosine(ours, theirs));
            }
            let plain = run(&model, &inputs);
            assert!(distance(&ours["logits"], &plain["logits"]) > 0.0, "{index} changes nothing");
        }
    }
}

#[test]
fn weights_in_16_bits_compute_the_same_as_converted_ones() {
    let desk = Desk::new();
    let inputs = text(&[vec![1, 5, 9, 60, 2, 7], vec![8, 3]], 0);
    for dtype in [crate::common::DType::F16, crate::common::DType::BF16] {
        let model = desk.pico(dtype, 1);
        let [kept, converted] = [Residence::Stored, Residence::Computed].map(|residence| run_as(&model, &inputs, residence).unwrap());
        for (output, tensor) in kept {
            assert_eq!(distance(&tensor, &converted[&output]), 0.0, "{dtype}, {output}");
        }
    }
}

/// The first line that uses a plural for a count of one.
fn plural_of_one(text: &str) -> Option<&str> {
    const NOUNS: [&str; 9] = ["weights", "layers", "samples", "tensors", "files", "steps", "trials", "values", "convolutions"];
    let is_plural = |word: &&str| NOUNS.contains(&word.trim_matches(|c: char| !c.is_alphanumeric()));
    let is_wrong = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words
            .iter()
            .enumerate()
            .any(|(index, word)| *word == "1" && words.iter().skip(index + 1).take(2).take_while(|word| !word.ends_with(',')).any(is_plural))
    };
    text.lines().find(is_wrong)
}

#[test]
fn counts_of_one_are_singular() {
    assert_eq!(plural_of_one("2 weights\nmodel.onnx: 1 quantized weights"), Some("model.onnx: 1 quantized weights"));
    let (desk, targets) = (Desk::new(), ["encoder.layer.0.intermediate.dense.weight"]);
    let images = golden("../evaluation/images");
    for (model, step) in [
        ("bert", serde_json::json!({ "quantize-dynamic": { "targets": targets } })),
        ("bert", serde_json::json!({ "palettize": { "targets": targets } })),
        ("bert", serde_json::json!({ "decompose": { "targets": targets, "rank": 0.5 } })),
        ("torchvision-resnet18", serde_json::json!({ "quantize-static": { "accuracy_goal": { "min_cosine": 0.0 } } })),
    ] {
        let step: compress::pass::Step = serde_json::from_value(step).unwrap();
        let builder = compress::Pipeline::builder().pass(step).export(Safetensors::default()).export(compress::export::Onnx::default());
        let task = Some(compress_engine::data::Task::Fidelity);
        let data = compress_engine::data::Data { images: Some(images.clone()), samples: Some(1), task, crop: Some(vec![32]), ..Default::default() };
        let builder = if model == "bert" { builder } else { builder.calibration(data) };
        let (pipeline, input) = (builder.build().unwrap(), Model::open(golden(model)).unwrap());
        let plan = pipeline.plan(&input).unwrap();
        let report = pipeline.run(input, desk.place()).unwrap_or_else(|e| panic!("{model}: {e}"));
        let how = report.outputs.iter().map(|output| output.verified.how.clone());
        let texts = plan.notes.into_iter().chain(report.notes.clone()).chain(how).chain([report.to_terminal(), report.to_markdown()]);
        for text in texts {
            assert_eq!(plural_of_one(&text), None, "{model}");
        }
    }
}
