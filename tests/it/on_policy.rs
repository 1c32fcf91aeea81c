//! Distillation on continuations of the student: a student equal to its teacher has no loss, runs with the
//! same seed are equal, and interrupted runs resume bit-identically.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::pass::{Distill, Training};
use compress::pipeline::Builder;
use compress::report::Report;
use compress::{Error, Model, Pipeline};
use compress_engine::data::{Data, Task};
use compress_engine::train::{BatchSize, Every, Offload, OnPolicy};
use serde_json::Value;

use crate::common::golden_model as golden;
use crate::train::{Run, cancelled_after, furthest, with_training};

/// Eight texts of up to eight tokens.
fn samples(folder: &Path) -> Data {
    let lengths = [8, 6, 8, 7, 3, 8, 5, 8];
    let token = |row: usize, at: usize| if at < lengths[row] { 3 + ((row * 31 + at * 17) % 30) as i64 } else { 0 };
    let rows = |value: &dyn Fn(usize, usize) -> i64| {
        let values: Vec<i64> = (0..8).flat_map(|row| (0..8).map(move |at| (row, at))).map(|(row, at)| value(row, at)).collect();
        Tensor::from_vec(values, (8, 8), &Device::Cpu).unwrap()
    };
    let arrays = [("input_ids", rows(&token)), ("attention_mask", rows(&|row, at| i64::from(at < lengths[row])))];
    let path = folder.join("texts.safetensors");
    candle_core::safetensors::save(&arrays.map(|(name, tensor)| (name.to_owned(), tensor)).into_iter().collect::<HashMap<_, _>>(), &path).unwrap();
    Data { arrays: Some(path), task: Some(Task::LanguageModelling), ..Data::default() }
}

/// A distillation of which the student writes some samples after the second token.
fn distill(fraction: f64) -> Distill {
    Distill {
        student: Some("layers=0".parse().unwrap()),
        on_policy: Some(OnPolicy { fraction, prompt_tokens: Some(2), ..OnPolicy::default() }),
        training: Training {
            losses: "{ soft: { temperature: 1, divergence: reverse } }".parse().unwrap(),
            max_steps: Some(7),
            batch_size: BatchSize::Samples(4),
            learning_rate: 1e-2,
            ..Training::default()
        },
        ..Distill::default()
    }
}

fn train(run: &Run, pass: Distill) -> Report {
    run.train("llama", samples(run.folder.path()), pass).unwrap()
}

fn losses(report: &Report) -> Vec<f64> {
    let curve = report.passes.last().unwrap().details["training"]["curve"].as_array().unwrap();
    curve.iter().map(|step: &Value| step["loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_student_equal_to_its_teacher_has_no_loss_on_its_continuations() {
    let pass = Distill { student: None, ..with_training!(distill(1.0), max_steps: Some(2), learning_rate: 1e-30) };
    let report = train(&Run::new(), pass);
    assert!(losses(&report).iter().all(|loss| loss.abs() < 1e-5), "{:?}", losses(&report));
    // Each sample is longer than its prompt.
    let note = report.notes.iter().find(|note| note.starts_with("in this run, the student continued 8 of 8 samples itself"));
    assert!(note.is_some(), "{:?}", report.notes);
}

/// The samples depend on the seed and on the weights of the student, and a part of them is that of the data.
#[test]
fn the_seed_determines_the_continuations() {
    let (one, same, other, off) = (Run::new(), Run::new(), Run::new(), Run::new());
    let curves = [(&one, 1.0), (&same, 1.0), (&other, 0.5)].map(|(run, fraction)| losses(&train(run, distill(fraction))));
    assert_eq!(curves[0], curves[1]);
    assert!(furthest(&one.weights(), &same.weights()) == 0.0);
    let data = losses(&train(&off, Distill { on_policy: None, ..distill(1.0) }));
    assert!(curves[0] != curves[2] && curves[0] != data && curves[2] != data, "{curves:?} {data:?}");
    let short = Distill { on_policy: Some(OnPolicy { prompt_tokens: Some(8), fraction: 1.0, ..OnPolicy::default() }), ..distill(1.0) };
    // Texts without tokens after their prompt are those of the data.
    let report = train(&Run::new(), short);
    assert_eq!(losses(&report), data);
    assert!(report.notes.iter().any(|note| note.starts_with("in this run, the student continued 0 of 28 samples")), "{:?}", report.notes);
}

#[test]
fn an_interrupted_training_resumes_with_the_same_continuations() {
    let pass = with_training!(distill(0.5), checkpoint_every: Some(Every::Steps(2)), keep_checkpoints: Some(2), average: Some(0.9));
    let (whole, parts) = (Run::new(), Run::new());
    let data = samples(whole.folder.path());
    let builder = || -> Builder { Pipeline::builder().pass(pass.clone()).train(data.clone()).seed(3) };
    let report = builder().resume(true).build().unwrap().run(Model::open(golden("llama")).unwrap(), whole.out()).unwrap();
    let is_unused = |note: &String| note.contains("contains no work of an interrupted run to continue");
    assert!(report.notes.iter().any(is_unused), "{:?}", report.notes);
    let (cancel, watch) = cancelled_after(Some(3));
    let model = || Model::open(golden("llama")).unwrap();
    let error = builder().resume(true).progress(watch).cancel(cancel).build().unwrap().run(model(), parts.out()).unwrap_err();
    let Error::Paused { path, .. } = &error else { panic!("{error}") };
    // The checkpoints of steps 2 and 4 are kept, and the run goes back to the first one.
    let folder = path.parent().unwrap();
    std::fs::remove_file(path).unwrap();
    std::fs::remove_file(folder.join("checkpoint-4.safetensors")).unwrap();
    assert!(folder.join("checkpoint-2.safetensors").is_file());
    // Other options are another training.
    let changed = Pipeline::builder().pass(Distill { on_policy: None, ..pass.clone() }).train(data.clone()).seed(3).resume(true);
    assert!(changed.build().unwrap().run(model(), parts.out()).unwrap_err().to_string().contains("different options"));
    let rest = builder().resume(true).build().unwrap().run(model(), parts.out()).unwrap();
    assert!(rest.notes.iter().any(|note| note.starts_with("5 steps in ")) && !rest.notes.iter().any(is_unused), "{:?}", rest.notes);
    let (a, b) = (whole.weights(), parts.weights());
    assert!(a.keys().eq(b.keys()));
    for (name, values) in &a {
        assert!(values.iter().zip(&b[name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} differs");
    }
}

#[test]
fn unsuitable_options_are_refused_by_name() {
    let run = Run::new();
    let refused = |name: &str, pass: Distill| run.train(name, samples(run.folder.path()), pass).unwrap_err().to_string();
    let cached = Distill { teacher_cache: Some(run.folder.path().join("cache")), ..distill(0.5) };
    assert!(refused("llama", cached).contains("cannot be combined with `teacher_cache`: the student writes"));
    for losses in ["soft=1,hard=1", "hard=1", "hidden=1"] {
        assert!(refused("llama", with_training!(distill(0.5), losses: losses.parse().unwrap())).contains("without `hard`"), "{losses}");
    }
    assert!(refused("llama", with_training!(distill(0.5), offload: vec![Offload::Parameters])).contains("`offload: parameters`"));
    assert!(refused("llama", distill(1.5)).contains("`fraction`"));
    assert!(refused("bert-masked-lm", distill(0.5)).contains("needs a student that continues texts"));
}
