//! Quantization-aware training: in every scheme, losses in training are those of the written model.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::pass::{Distill, Finetune, Palettize, Step, Training};
use compress::report::Report;
use compress::{Model, Pipeline};
use compress_core::store::{Codes, Encoding, ScaleFormat};
use compress_engine::data::{Data, Task};
use compress_engine::train::schedule::Schedule;
use compress_engine::train::{BatchSize, QuantizerScales};
use serde_json::json;

use crate::low_bits::{SCHEMES, llama, quantize};
use crate::train::with_training;

/// Random token ids. Different seeds have different texts.
fn ids(folder: &Path, count: usize, seed: u64, task: Task) -> Data {
    let path = folder.join(format!("ids-{count}-{seed}.safetensors"));
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as i64 % 40
    };
    let ids = Tensor::from_vec((0..count * 12).map(next).collect::<Vec<i64>>(), (count, 12), &Device::Cpu).unwrap();
    let arrays = [("attention_mask".to_owned(), ids.ones_like().unwrap()), ("input_ids".to_owned(), ids)];
    candle_core::safetensors::save(&arrays.into(), &path).unwrap();
    Data { arrays: Some(path), task: Some(task), ..Data::default() }
}

struct Desk {
    folder: tempfile::TempDir,
    model: PathBuf,
}

impl Desk {
    fn new() -> Desk {
        let folder = tempfile::tempdir().unwrap();
        Desk { model: llama(folder.path()), folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, (model, out): (&Path, &str), steps: Vec<Step>, (train, evaluation): (&Data, &Data)) -> compress::Result<Report> {
        let builder = steps.into_iter().fold(Pipeline::builder().threads(2).seed(3).measure(false), |builder, step| builder.pass(step));
        let builder = builder.calibration(train.clone()).train(train.clone()).evaluation(evaluation.clone());
        builder.build()?.run(Model::open(model)?, self.at(out))
    }
}

fn constant() -> Schedule {
    serde_json::from_str(r#"{ "kind": "constant" }"#).unwrap()
}

fn finetune(steps: u64, learning_rate: f64, scales: QuantizerScales) -> Finetune {
    Finetune {
        training: Training { max_steps: Some(steps), learning_rate, scales, schedule: constant(), batch_size: BatchSize::Samples(12), ..Training::default() },
        ..Finetune::default()
    }
}

/// The score of the written model.
fn score(report: &Report) -> f64 {
    *report.accuracy.as_ref().unwrap().after.values().next().unwrap()
}

#[test]
fn losses_in_training_are_those_of_the_written_model() {
    let desk = Desk::new();
    let data = ids(desk.folder.path(), 12, 1, Task::LanguageModelling);
    let both = (&data, &data);
    for scheme in SCHEMES {
        for scales in [QuantizerScales::Fixed, QuantizerScales::Learnable] {
            let case = format!("{scheme}, {scales:?}");
            let out = format!("{scheme}-{scales:?}");
            let pass = with_training!(finetune(3, 1e-3, scales), evaluate_every: Some(3));
            let steps = vec![quantize(json!({ "scheme": scheme, "method": "rtn" })).into(), pass.into()];
            let report = desk.run((&desk.model, &out), steps, both).unwrap_or_else(|e| panic!("{case}: {e}"));
            let written = score(&report);
            let training = &report.passes.last().unwrap().details["training"];
            let scores: Vec<f64> = training["evaluations"].as_array().unwrap().iter().map(|score| score["value"].as_f64().unwrap()).collect();
            assert!(scores.len() == 2 && scores[1] < scores[0], "{case}: {scores:?}");
            assert!((scores[1] - written).abs() <= 1e-6 * written, "{case}: {} in training, {written} written", scores[1]);
            // The forward pass of a training step computes the loss of the file.
            let again = finetune(1, 1e-12, scales);
            let report = desk.run((&desk.at(&out), &format!("{out}-again")), vec![again.into()], both).unwrap_or_else(|e| panic!("{case}: {e}"));
            let loss = report.passes[0].details["training"]["curve"][0]["loss"].as_f64().unwrap();
            // The largest negative int8 of a token is halfway between two integers, and depends on the last
            // bit.
            let room = if matches!(scheme, "W8A8" | "W4A8") { 2e-4 } else { 1e-5 };
            assert!((loss - written.ln()).abs() <= room * loss, "{case}: the loss is {loss} in training and {} written", written.ln());
            // Codes of zero have a sign, which a step of nothing can change.
            let unchanged = [&out, &format!("{out}-again")].map(|out| crate::train::weights(&desk.at(out)));
            assert!(unchanged[0].keys().eq(unchanged[1].keys()), "{case}");
            for (name, values) in unchanged[0].iter().filter(|(name, _)| !name.ends_with("norm.weight") && !name.contains("embed_tokens")) {
                assert!(*values == unchanged[1][name], "{case}: a step of nothing changes {name}");
            }
        }
    }
}

/// An adapter that codes absorb is trained through their rounding: the loss in training is that of the
/// written model, which has the scales of the base.
#[test]
fn codes_absorb_adapters() {
    let desk = Desk::new();
    let data = ids(desk.folder.path(), 12, 1, Task::LanguageModelling);
    let both = (&data, &data);
    let adapter = |steps| {
        let options = "{ rank: 4, alpha: 8, absorb: true }".parse().unwrap();
        with_training!(finetune(steps, 0.05, QuantizerScales::Fixed), adapter: Some(options))
    };
    for scheme in ["W4A16", "W8A16", "W8A8", "W4A16-ASYM", "FP8-DYNAMIC", "NVFP4", "MXFP4"] {
        let [base, absorbed, longer] = ["base", "absorbed", "longer"].map(|out| format!("{scheme}-{out}"));
        desk.run((&desk.model, &base), vec![quantize(json!({ "scheme": scheme, "method": "rtn" })).into()], both).unwrap();
        let report = desk.run((&desk.at(&base), &absorbed), vec![adapter(6).into()], both).unwrap();
        let written = score(&report).ln();
        // The same steps and one more: its loss is that after the others.
        let report = desk.run((&desk.at(&base), &longer), vec![adapter(7).into()], both).unwrap();
        let loss = report.passes[0].details["training"]["curve"][6]["loss"].as_f64().unwrap();
        let room = if scheme == "W8A8" { 2e-4 } else { 1e-5 };
        assert!((loss - written).abs() <= room * loss, "{scheme}: the loss is {loss} in training and {written} written");
        let [before, after] = [&base, &absorbed].map(|out| Model::open(desk.at(out)).unwrap().weights);
        assert!(before.by_name.keys().eq(after.by_name.keys()), "{scheme}");
        let (mut count, mut changed) = (0, 0);
        for (name, weight) in &before.by_name {
            let other = after.get(name).unwrap();
            let [values, others] = [weight, other].map(|weight| weight.floats(name).unwrap());
            let Encoding::Quantized(_) = &weight.encoding else {
                assert!(values == others, "{scheme}: {name}");
                continue;
            };
            let [scales, kept] = [weight, other].map(|weight| weight.scales().unwrap().unwrap());
            assert!(scales.scales == kept.scales && scales.zero_points == kept.zero_points, "{scheme}: {name}");
            assert_eq!((weight.encoding.clone(), scales.global_scale), (other.encoding.clone(), kept.global_scale), "{scheme}: {name}");
            (count, changed) = (count + 1, changed + usize::from(values != others));
        }
        assert_eq!((count, changed), (14, 14), "{scheme}");
    }
    let error = desk.run((&desk.model, "float"), vec![adapter(1).into()], both).unwrap_err();
    assert!(error.to_string().contains("layers.0.") && error.hint().unwrap().contains("quantize it before"), "{error}");
}

/// Written codes and scales are numbers of their formats.
#[test]
fn trained_codes_are_numbers_of_their_formats() {
    let desk = Desk::new();
    let data = ids(desk.folder.path(), 12, 1, Task::LanguageModelling);
    for scheme in ["W4A8", "FP8-DYNAMIC", "NVFP4", "MXFP4", "MXFP6A16", "MXFP8"] {
        let pass = finetune(4, 0.1, QuantizerScales::Learnable);
        desk.run((&desk.model, scheme), vec![quantize(json!({ "scheme": scheme })).into(), pass.into()], (&data, &data)).unwrap();
        let model = Model::open(desk.at(scheme)).unwrap();
        let mut count = 0;
        for (name, weight) in &model.weights.by_name {
            let Encoding::Quantized(spec) = &weight.encoding else { continue };
            let scales = weight.scales().unwrap().unwrap();
            for (values, scale) in weight.floats(name).unwrap().chunks(scales.run).zip(&scales.scales) {
                let step = scale / scales.global_scale;
                let largest = match spec.codes {
                    Codes::Float(format) => format.row().max,
                    codes => f32::from(1u8 << (codes.bits() - 1)),
                };
                assert!(values.iter().all(|value| value.abs() <= largest * step * 1.001), "{scheme}: {name}");
                match spec.scale_format() {
                    ScaleFormat::Float => assert!(scale.is_normal(), "{scheme}: {name}"),
                    format => assert_eq!(format.nearest(*scale), *scale, "{scheme}: {name}"),
                }
            }
            count += 1;
        }
        assert_eq!(count, 14, "{scheme}");
    }
}

/// On texts that training has not read.
#[test]
fn training_through_rounding_reduces_its_loss() {
    let desk = Desk::new();
    let (train, held_out) = (ids(desk.folder.path(), 192, 1, Task::Fidelity), ids(desk.folder.path(), 32, 2, Task::Fidelity));
    for scheme in ["W4A8", "NVFP4", "MXFP4"] {
        let train_pass = Distill {
            training: Training {
                losses: "soft=1".parse().unwrap(),
                max_steps: Some(60),
                learning_rate: 1e-3,
                batch_size: BatchSize::Samples(16),
                ..Training::default()
            },
            ..Distill::default()
        };
        let divergence = |out: &str, pass: Option<Distill>| {
            let steps = std::iter::once(quantize(json!({ "scheme": scheme, "method": "rtn" })).into()).chain(pass.map(Step::from)).collect();
            let report = desk.run((&desk.model, &format!("{scheme}-{out}")), steps, (&train, &held_out)).unwrap();
            report.accuracy.as_ref().unwrap().fidelity.as_ref().unwrap().kl.unwrap()
        };
        let (rounded, trained) = (divergence("rounded", None), divergence("trained", Some(train_pass)));
        assert!(trained < 0.85 * rounded, "{scheme}: {rounded} rounded, {trained} trained");
    }
}

/// Although the recipe has calibration data, no codes are chosen on it by default that training replaces.
#[test]
fn codes_that_training_replaces_are_not_chosen() {
    let desk = Desk::new();
    let data = ids(desk.folder.path(), 12, 1, Task::LanguageModelling);
    for (method, chosen, words) in [
        (json!(null), "rtn", "quantize: `method` is `rtn`, because `finetune` trains the weights from their values before quantization"),
        (json!("gptq"), "gptq", "warning: quantize: `finetune` trains 14 of 14 weights from their values before quantization"),
    ] {
        let mut options = json!({ "scheme": "W4A16" });
        options.as_object_mut().unwrap().extend((!method.is_null()).then(|| ("method".to_owned(), method)));
        let steps = vec![quantize(options).into(), finetune(1, 1e-3, QuantizerScales::Fixed).into()];
        let report = desk.run((&desk.model, chosen), steps, (&data, &data)).unwrap();
        assert_eq!(report.recipe["passes"][0]["quantize"]["method"], chosen);
        assert_eq!(report.notes.iter().filter(|note| note.starts_with(words)).count(), 1, "{:?}", report.notes);
    }
}

#[test]
fn scales_of_floats_are_trained_while_codes_stay() {
    let desk = Desk::new();
    let data = ids(desk.folder.path(), 12, 1, Task::LanguageModelling);
    for scheme in ["FP8-DYNAMIC", "NVFP4A16", "MXFP4A16"] {
        let quantized = format!("{scheme}-rounded");
        desk.run((&desk.model, &quantized), vec![quantize(json!({ "scheme": scheme })).into()], (&data, &data)).unwrap();
        let pass = with_training!(finetune(20, 0.1, QuantizerScales::Only), targets: vec!["*proj.weight".parse().unwrap()]);
        let report = desk.run((&desk.at(&quantized), scheme), vec![pass.into()], (&data, &data)).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("the codes of 14 quantized weights did not change")), "{:?}", report.notes);
        let [before, after] = [&quantized, scheme].map(|out| crate::common::read(&desk.at(out)));
        let mut moved = 0;
        for (name, tensor) in &before {
            let is_scale = name.ends_with("weight_scale");
            assert!(is_scale || *tensor == after[name], "{scheme}: {name} changed");
            moved += usize::from(is_scale && *tensor != after[name]);
        }
        assert!(moved > 7, "{scheme}: the scales of {moved} of 14 weights were trained");
    }
}

#[test]
fn palettes_are_refused_before_training_by_name() {
    let desk = Desk::new();
    let data = ids(desk.folder.path(), 12, 1, Task::LanguageModelling);
    for scales in [QuantizerScales::Fixed, QuantizerScales::Learnable, QuantizerScales::Only] {
        let steps = vec![Palettize::default().into(), finetune(1, 1e-3, scales).into()];
        let error = desk.run((&desk.model, "palettes"), steps, (&data, &data)).unwrap_err();
        assert!(error.to_string().contains("proj.weight") && error.to_string().contains("palette4"), "{error}");
        assert!(error.hint().unwrap().contains("`ignore`"), "{error}");
        assert!(!desk.at("palettes").exists());
    }
}
