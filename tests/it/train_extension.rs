//! Trainings that are resumed with more steps.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use compress::pass::Finetune;
use compress::report::Report;
use compress::{Error, Model, Pipeline};
use compress_core::store::ByteSize;
use compress_core::work::{Cancel, Event};
use compress_engine::data::Data;
use compress_engine::train::Every;

use crate::train::{Run, cancelled_after, classes, finetune, golden, samples, weights, with_training};

const MODEL: &str = "bert-sequence-classification";

/// Outputs of trainings, and the folder of their common checkpoint.
struct Trainings {
    run: Run,
    data: Data,
}

impl Trainings {
    fn new() -> Trainings {
        let run = Run::new();
        // Six batches of eight samples in an epoch, so that trainings end within one.
        let data = samples(MODEL, run.folder.path(), 48, classes(MODEL));
        Trainings { run, data }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.run.folder.path().join(name)
    }

    fn start(&self, pass: &Finetune, out: &str, resume: bool, stop: Option<u64>) -> compress::Result<Report> {
        let (cancel, watch) = cancelled_after(stop);
        let builder = Pipeline::builder().pass(pass.clone()).train(self.data.clone()).seed(3).resume(resume).progress(watch).cancel(cancel);
        let builder = if pass.training.evaluate_every.is_some() { builder.evaluation(self.data.clone()) } else { builder };
        builder.build()?.run(Model::open(golden(MODEL)).unwrap(), self.out(out))
    }

    fn require_equal(&self, one: &str, other: &str, what: &str) {
        let (one, other) = (weights(&self.out(one)), weights(&self.out(other)));
        for (name, values) in &one {
            assert!(values.iter().zip(&other[name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: {name} differs");
        }
    }
}

fn with_schedule(pass: Finetune, schedule: &str) -> Finetune {
    with_training!(pass, schedule: schedule.parse().unwrap(), average: Some(0.9))
}

fn extension(report: &Report) -> Option<&String> {
    report.notes.iter().find(|note| note.contains("the training continued after"))
}

fn is_checkpoint(folder: &Path) -> bool {
    folder.join("checkpoint.safetensors").exists()
}

/// Constant rates, and those before the decay of `decay_steps`, do not depend on the number of steps.
#[test]
fn an_extended_training_equals_a_longer_one() {
    let epochs = |epochs| with_training!(finetune(1), max_steps: None, epochs: Some(epochs));
    for (schedule, short, long) in [
        ("constant,warmup_steps=3", finetune(10), finetune(20)),
        ("linear,warmup_steps=2,decay_steps=4", finetune(10), finetune(20)),
        ("constant", epochs(2), epochs(3)),
    ] {
        let trainings = Trainings::new();
        let pass = |pass: Finetune| with_training!(with_schedule(pass, schedule), final_checkpoint: Some(trainings.out("last")));
        trainings.start(&pass(short.clone()), "short", false, None).unwrap();
        assert!(is_checkpoint(&trainings.out("last")));
        let error = trainings.start(&pass(long.clone()), "extended", false, None).unwrap_err();
        let start_over = format!("after removing {}", trainings.out("last").join("checkpoint.safetensors").display());
        let hint = error.hint().unwrap();
        assert!(error.to_string().contains("earlier training") && hint.contains("`resume`") && hint.contains(&start_over), "{error}: {hint}");
        let other = with_training!(pass(long.clone()), learning_rate: 1e-3);
        let error = trainings.start(&other, "other", true, None).unwrap_err();
        assert!(error.to_string().contains("different options"), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains(&start_over) && !hint.contains("`force`")), "{:?}", error.hint());
        let report = trainings.start(&pass(long.clone()), "extended", true, None).unwrap();
        let note = extension(&report).unwrap();
        assert!(!note.contains("learning rates"), "{note}");
        // The cache of results does not store it.
        assert_eq!(report.passes[0].details["training"]["extended"], true);
        trainings.start(&with_schedule(long, schedule), "whole", false, None).unwrap();
        trainings.require_equal("extended", "whole", schedule);
        let error = trainings.start(&pass(short), "fewer", true, None).unwrap_err().to_string();
        let what = if schedule == "constant" { "finetune: epochs" } else { "finetune: max_steps" };
        assert!(error.contains(what) && error.contains("has completed") && error.contains(&start_over), "{schedule}: {error}");
    }
}

/// A decay along the whole training continues on that of the longer one, which a note states.
#[test]
fn an_extension_of_a_decay_is_reported() {
    let trainings = Trainings::new();
    let pass = |steps| with_training!(with_schedule(finetune(steps), "cosine,warmup_steps=2"), final_checkpoint: Some(trainings.out("last")));
    trainings.start(&pass(5), "short", false, None).unwrap();
    let report = trainings.start(&pass(8), "long", true, None).unwrap();
    let note = extension(&report).unwrap();
    assert!(note.contains("after 5 of 5 steps, and now has 8; from step 4 on, learning rates"), "{note}");
    let table = std::fs::read_to_string(trainings.out("long").join("finetune.csv")).unwrap();
    let rates: Vec<f64> = table.lines().skip(1).map(|line| line.split(',').nth(4).unwrap().parse().unwrap()).collect();
    let schedule = pass(8).training.schedule;
    assert_eq!(rates, (5..8).map(|step| schedule.rate(step, 8, 3e-3)).collect::<Vec<_>>());
}

/// An interrupted training continues from its own checkpoint, and can have more steps then.
#[test]
fn an_interrupted_training_is_extended() {
    let trainings = Trainings::new();
    let pass = |steps| with_training!(with_schedule(finetune(steps), "constant"), checkpoint_every: Some(Every::Steps(2)));
    let error = trainings.start(&pass(6), "extended", false, Some(3)).unwrap_err();
    assert!(matches!(error, Error::Paused { .. }), "{error}");
    let report = trainings.start(&pass(9), "extended", true, None).unwrap();
    assert!(extension(&report).is_some_and(|note| note.contains("of 6 steps, and now has 9")), "{:?}", report.notes);
    trainings.start(&pass(9), "whole", false, None).unwrap();
    trainings.require_equal("extended", "whole", "interrupted");
}

/// A training that `patience` ends continues with a larger one, like a training that had it from the start.
#[test]
fn a_training_without_patience_is_extended() {
    for schedule in ["constant", "linear,decay_steps=4"] {
        let trainings = Trainings::new();
        // No score improves.
        let with_rate = |steps| with_training!(with_schedule(finetune(steps), schedule), learning_rate: 1e-12);
        let pass = |steps, patience| with_training!(with_rate(steps), final_checkpoint: Some(trainings.out("last")), evaluate_every: Some(2), patience);
        let report = trainings.start(&pass(10, Some(2)), "short", false, None).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("stopped early after step 4")), "{:?}", report.notes);
        assert!(is_checkpoint(&trainings.out("last")));
        for (steps, patience, expected) in [(12, 2, "ended the training after step 4, with 2 evaluations"), (12, 1, "smaller than that of the checkpoint, 2")] {
            let error = trainings.start(&pass(steps, Some(patience)), "refused", true, None).unwrap_err();
            assert!(error.is_misuse() && error.to_string().contains("finetune: patience") && error.to_string().contains(expected), "{error}");
        }
        let report = trainings.start(&pass(12, Some(4)), "extended", true, None).unwrap();
        assert!(extension(&report).is_some_and(|note| note.contains("after 4 of 10 steps, and now has 12")), "{:?}", report.notes);
        assert!(report.notes.iter().any(|note| note.contains("stopped early after step 8")), "{:?}", report.notes);
        let whole = with_training!(pass(12, Some(4)), final_checkpoint: Some(trainings.out("other")));
        trainings.start(&whole, "whole", false, None).unwrap();
        trainings.require_equal("extended", "whole", schedule);
        let checkpoint = |folder: &str| weights_of(&trainings.out(folder));
        assert_eq!(checkpoint("last"), checkpoint("other"), "{schedule}");
    }
}

/// The tensors of a checkpoint, as bits.
fn weights_of(folder: &Path) -> BTreeMap<String, Vec<u32>> {
    let tensors = candle_core::safetensors::load(folder.join("checkpoint.safetensors"), &candle_core::Device::Cpu).unwrap();
    let bits = |tensor: &candle_core::Tensor| {
        let values = tensor.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    tensors.iter().map(|(name, tensor)| (name.clone(), bits(tensor))).collect()
}

/// A training that was interrupted before its first step completed has nothing to resume from.
#[test]
fn a_step_is_interrupted_between_its_batches() {
    let (trainings, cancel) = (Trainings::new(), Cancel::default());
    let handle = cancel.clone();
    // The score before the first step.
    let watch = move |event: Event| {
        if let Event::Message(text) = event
            && !text.contains("loss")
        {
            handle.cancel();
        }
    };
    let pass = with_training!(finetune(2), gradient_accumulation: 4, evaluate_every: Some(1));
    let builder = Pipeline::builder().pass(pass).train(trainings.data.clone()).evaluation(trainings.data.clone()).progress(watch).cancel(cancel);
    let error = builder.build().unwrap().run(Model::open(golden(MODEL)).unwrap(), trainings.out("out")).unwrap_err();
    assert!(!matches!(error, Error::Paused { .. }) && error.to_string().contains("interrupted"), "{error}");
}

/// The batches of a step are counted when they are read, and not only once all are in memory.
#[test]
fn batches_of_a_step_are_limited_when_they_are_read() {
    let trainings = Trainings::new();
    let report = trainings.start(&finetune(1), "small", false, None).unwrap();
    let peak = report.passes[0].details["memory"]["peak_bytes"].as_u64().unwrap();
    let pass = with_training!(finetune(1), gradient_accumulation: 1_000_000_000, memory_limit: Some(ByteSize(2 * peak)));
    let error = trainings.start(&pass, "large", false, None).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("data of"), "{error}");
}
