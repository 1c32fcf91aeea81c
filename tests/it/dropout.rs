//! Dropout in training: masks do not depend on how steps are computed.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use compress::pass::Finetune;
use compress::{Error, Model, Pipeline};
use compress_engine::train::optimizer::Kind;
use compress_engine::train::{Checkpointing, Every, Offload};

use crate::train::{Run, cancelled_after, classes, finetune, furthest, golden, samples};

const MODEL: &str = "bert-sequence-classification";

fn train(pass: &Finetune) -> BTreeMap<String, Vec<f32>> {
    let run = Run::new();
    run.train(MODEL, samples(MODEL, run.folder.path(), 24, classes(MODEL)), pass.clone()).unwrap();
    run.weights()
}

#[test]
fn masks_do_not_depend_on_recomputation_and_offloading() {
    let plain = Finetune { optimizer: Kind::Sgd, learning_rate: 0.1, ..finetune(5) };
    let pass = Finetune { dropout: Some(0.3), ..plain.clone() };
    let expected = train(&pass);
    assert_eq!(train(&pass), expected);
    assert!(furthest(&expected, &train(&plain)) > 1e-4, "dropout has no effect");
    assert!(furthest(&expected, &train(&Finetune { dropout: Some(0.31), ..pass.clone() })) > 1e-4);
    for other in [
        Finetune { gradient_checkpointing: Checkpointing::Blocks, ..pass.clone() },
        Finetune { gradient_checkpointing: Checkpointing::Every(2), ..pass.clone() },
        Finetune { offload: vec![Offload::Parameters], ..pass.clone() },
    ] {
        let apart = furthest(&expected, &train(&other));
        assert!(apart < 1e-5, "{:?} {:?}: {apart}", other.gradient_checkpointing, other.offload);
    }
}

#[test]
fn a_resumed_training_has_the_same_masks() {
    let pass = Finetune { dropout: Some(0.3), checkpoint_every: Some(Every::Steps(1)), ..finetune(7) };
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
    assert!(error("resnet-basic", Finetune { dropout: Some(0.1), ..finetune(1) }).contains("needs a transformer with one stack of layers"));
    assert!(error(MODEL, Finetune { dropout: Some(1.0), ..finetune(1) }).contains("must be greater than 0 and less than 1"));
}
