//! Dropout in training: masks do not depend on how steps are computed.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use compress::pass::Finetune;
use compress::report::Report;
use compress::{Error, Model, Pipeline};
use compress_core::store::ByteSize;
use compress_engine::train::optimizer::Kind;
use compress_engine::train::{Checkpointing, Every, Offload};

use crate::train::{Run, cancelled_after, classes, finetune, furthest, golden, samples, with_training};

const MODEL: &str = "bert-sequence-classification";

fn trained(pass: &Finetune) -> (Report, BTreeMap<String, Vec<f32>>) {
    let run = Run::new();
    let report = run.train(MODEL, samples(MODEL, run.folder.path(), 24, classes(MODEL)), pass.clone()).unwrap();
    (report, run.weights())
}

fn train(pass: &Finetune) -> BTreeMap<String, Vec<f32>> {
    trained(pass).1
}

#[test]
fn masks_do_not_depend_on_micro_batches_recomputation_and_offloading() {
    let plain = with_training!(finetune(5), optimizer: Kind::Sgd, learning_rate: 0.1);
    let pass = with_training!(plain.clone(), dropout: Some(0.3), attention_dropout: Some(0.2));
    let expected = train(&pass);
    assert_eq!(train(&pass), expected);
    let (report, _) = trained(&pass);
    let memory = &report.passes[0].details["memory"];
    let activations = memory["phases"].as_array().unwrap().iter().find(|phase| phase["name"] == "activations").unwrap();
    let [peak, activations] = [&memory["peak_bytes"], &activations["measured_bytes"]].map(|bytes| bytes.as_u64().unwrap());
    let (report, weights) = trained(&with_training!(pass.clone(), memory_limit: Some(ByteSize(peak - activations / 2))));
    assert!(report.notes.iter().any(|note| note.contains("micro-batches")), "{:?}", report.notes);
    let apart = furthest(&expected, &weights);
    assert!(apart < 1e-5, "micro-batches: {apart}");
    assert!(furthest(&expected, &train(&plain)) > 1e-4, "dropout has no effect");
    assert!(furthest(&expected, &train(&with_training!(pass.clone(), dropout: Some(0.31)))) > 1e-4);
    assert!(furthest(&expected, &train(&with_training!(pass.clone(), attention_dropout: None))) > 1e-5, "dropout of attention has no effect");
    for other in [
        with_training!(pass.clone(), gradient_checkpointing: Checkpointing::Blocks),
        with_training!(pass.clone(), gradient_checkpointing: Checkpointing::Every(2)),
        with_training!(pass.clone(), offload: vec![Offload::Parameters]),
    ] {
        let apart = furthest(&expected, &train(&other));
        assert!(apart < 1e-5, "{:?} {:?}: {apart}", other.training.gradient_checkpointing, other.training.offload);
    }
}

#[test]
fn a_resumed_training_has_the_same_masks() {
    let pass = with_training!(finetune(7), dropout: Some(0.3), attention_dropout: Some(0.3), checkpoint_every: Some(Every::Steps(1)));
    let (whole, parts) = (Run::new(), Run::new());
    let data = samples(MODEL, whole.folder.path(), 24, classes(MODEL));
    whole.train(MODEL, data.clone(), pass.clone()).unwrap();
    let resume = |stop: Option<u64>| {
        let (cancel, watch) = cancelled_after(stop);
        let builder = Pipeline::builder().pass(pass.clone()).train(data.clone()).seed(3).resume(true).progress(watch).cancel(cancel);
        builder.build().unwrap().run(Model::open(golden(MODEL)).unwrap(), parts.out())
    };
    assert!(matches!(resume(Some(2)).unwrap_err(), Error::Paused { .. }));
    resume(None).unwrap();
    assert_eq!(whole.weights(), parts.weights());
}

#[test]
fn models_without_recognized_branches_are_refused() {
    let run = Run::new();
    let error = |name: &str, pass: Finetune| run.train(name, samples(name, run.folder.path(), 8, classes(name)), pass).unwrap_err().to_string();
    assert!(error("resnet-basic", with_training!(finetune(1), dropout: Some(0.1))).contains("needs a transformer with one stack of layers"));
    assert!(error("resnet-basic", with_training!(finetune(1), attention_dropout: Some(0.1))).contains("needs a model with attention"));
    assert!(error(MODEL, with_training!(finetune(1), dropout: Some(1.0))).contains("must be greater than 0 and less than 1"));
    let refused = error(MODEL, with_training!(finetune(1), attention_dropout: Some(0.0)));
    assert!(refused.contains("attention_dropout") && refused.contains("must be greater than 0 and less than 1"), "{refused}");
}
