//! Contrastive training of sentence encoders on pairs of texts: steps equal those of sentence-transformers
//! (`scripts/goldens training`), to whose loss unit tests compare gradients (`scripts/goldens losses`).
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use compress::pass::Finetune;
use compress::report::Report;
use compress::{Model, Pipeline};
use compress_core::store::ByteSize;
use compress_engine::data::Data;
use compress_engine::train::BatchSize;
use compress_engine::train::optimizer::Kind;
use serde_json::Value;

use crate::common::numbers::checksums;
use crate::evaluation::{WORDS, model};
use crate::train::{ends, finetune, weights, with_training};

const PAIRS: &str = include_str!("../golden/training/contrastive.csv");
const EXPECTED: &str = include_str!("../golden/training/contrastive.json");

struct Encoder {
    folder: tempfile::TempDir,
    pairs: PathBuf,
    out: tempfile::TempDir,
}

impl Encoder {
    fn new() -> Encoder {
        let folder = model("sentence-mean", &[WORDS]);
        let pairs = folder.path().with_extension("csv");
        std::fs::write(&pairs, PAIRS).unwrap();
        Encoder { folder, pairs, out: tempfile::tempdir().unwrap() }
    }

    fn data(&self, options: &str) -> Data {
        Data { text: Some(self.pairs.clone()), ..serde_saphyr::from_str(options).unwrap() }
    }

    fn train(&self, losses: &str, data: &str, pass: Finetune) -> compress::Result<Report> {
        let pass = with_training!(pass, losses: losses.parse().unwrap(), batch_size: BatchSize::Samples(4));
        let pipeline = Pipeline::builder().pass(pass).train(self.data(data)).seed(3).force(true).build()?;
        pipeline.run(Model::open(self.folder.path()).unwrap(), self.out())
    }

    fn out(&self) -> PathBuf {
        self.out.path().join("out")
    }

    fn first_loss(&self, losses: &str, data: &str) -> f64 {
        ends(&self.train(losses, data, finetune(1)).unwrap()).0
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(Path::new(&self.pairs));
    }
}

const BOTH: &str = "{ task: contrastive, text_column: query, pair_column: match }";
const SWAPPED: &str = "{ task: contrastive, text_column: match, pair_column: query }";
const ALL: &str = "{ task: contrastive, text_column: query, pair_column: match, negative_column: other }";

#[test]
fn steps_are_those_of_sentence_transformers() {
    let (encoder, expected) = (Encoder::new(), serde_json::from_str::<Value>(EXPECTED).unwrap());
    let sgd = with_training!(finetune(4), optimizer: Kind::Sgd, momentum: 0.0, weight_decay: 0.0, clip_norm: 0.0, learning_rate: 0.1);
    for (case, data) in [("pairs", BOTH), ("negatives", ALL)] {
        let report = encoder.train("{ contrastive: { temperature: 0.5 } }", data, sgd.clone()).unwrap();
        let curve = report.passes[0].details["training"]["curve"].as_array().unwrap();
        let losses = expected[case]["losses"].as_array().unwrap();
        assert_eq!((curve.len(), losses.len()), (4, 4));
        for (step, (ours, theirs)) in curve.iter().zip(losses).enumerate() {
            let (ours, theirs) = (ours["loss"].as_f64().unwrap(), theirs["contrastive"].as_f64().unwrap());
            assert!((ours - theirs).abs() < 1e-4, "{case}, step {step}: {ours} instead of {theirs}");
        }
        let trained = weights(&encoder.out());
        let expected = expected[case]["weights"].as_object().unwrap();
        assert!(expected.len() > 20);
        for (name, theirs) in expected {
            let room = 1e-4 * (trained[name].len() as f64).sqrt();
            for (at, (ours, theirs)) in checksums(&trained[name]).iter().zip(theirs.as_array().unwrap()).enumerate() {
                let (theirs, room) = (theirs.as_f64().unwrap(), if at < 2 { room } else { 1e-4 });
                assert!((ours - theirs).abs() < room, "{case}, {name}, number {at}: {ours} instead of {theirs}");
            }
        }
    }
}

/// More candidates increase the loss, and only the symmetric loss is the same if the columns are exchanged.
#[test]
fn losses_depend_on_candidates_and_directions() {
    let encoder = Encoder::new();
    let (forward, symmetric) = ("{ contrastive: { temperature: 0.5 } }", "{ contrastive: { temperature: 0.5, symmetric: true } }");
    let (one, other) = (encoder.first_loss(forward, BOTH), encoder.first_loss(forward, SWAPPED));
    assert!((one - other).abs() > 1e-6, "{one} {other}");
    assert!(encoder.first_loss(forward, ALL) > one);
    for data in [BOTH, SWAPPED] {
        let mean = encoder.first_loss(symmetric, data);
        assert!((mean - (one + other) / 2.0).abs() < 1e-5, "{data}: {mean} of {one} and {other}");
    }
}

/// Evaluation data are compared with the pairs, and measure the result.
#[test]
fn other_data_evaluate_the_encoder() {
    let encoder = Encoder::new();
    let texts = encoder.folder.path().join("texts.csv");
    std::fs::write(&texts, "query\nthe mat ate\non a hat\n").unwrap();
    let evaluation = Data { text: Some(texts), ..encoder.data("{ task: fidelity, text_column: query }") };
    let pass = with_training!(finetune(2), losses: "contrastive=1".parse().unwrap());
    let pipeline = Pipeline::builder().pass(pass).train(encoder.data(BOTH)).evaluation(evaluation).build().unwrap();
    let out = tempfile::tempdir().unwrap();
    let report = pipeline.run(Model::open(encoder.folder.path()).unwrap(), out.path().join("out")).unwrap();
    assert_eq!(report.passes[0].details["training"]["steps"], 2);
}

#[test]
fn other_data_and_divided_batches_are_refused() {
    let encoder = Encoder::new();
    let refused = |losses: &str, data: &str, pass: Finetune| encoder.train(losses, data, pass).unwrap_err().to_string();
    let error = refused("contrastive=1", "{ task: fidelity, text_column: query, pair_column: match }", finetune(1));
    assert!(error.contains("losses: contrastive") && error.contains("set `task: contrastive`"), "{error}");
    // Without optimizer state, activations are part of the peak.
    let pass = with_training!(finetune(1), optimizer: Kind::Sgd, momentum: 0.0);
    let report = encoder.train("contrastive=1", BOTH, pass.clone()).unwrap();
    let peak = report.passes[0].details["memory"]["peak_bytes"].as_u64().unwrap();
    let error = refused("contrastive=1", BOTH, with_training!(pass, memory_limit: Some(ByteSize(peak - 1))));
    assert!(error.contains("`contrastive` compares all its texts: lower `batch_size`"), "{error}");
    let evaluated = Pipeline::builder().evaluation(encoder.data(BOTH)).pass(compress::pass::Cast::default()).build().unwrap();
    let error = evaluated.run(Model::open(encoder.folder.path()).unwrap(), encoder.folder.path().with_extension("out")).unwrap_err().to_string();
    assert!(error.contains("`task: embedding`"), "{error}");
}

/// A tokenizer without special tokens has no tokens for an empty text.
#[test]
fn empty_texts_are_named_by_their_line() {
    let encoder = Encoder::new();
    let path = encoder.folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    tokenizer["post_processor"] = Value::Null;
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    for (pairs, line) in [("query,match\nthe cat,a hat\n,the mat\n", 3), ("query,match\nthe cat,\nthe mat,a hat\n", 2)] {
        std::fs::write(&encoder.pairs, pairs).unwrap();
        let error = encoder.train("contrastive=1", BOTH, finetune(1)).unwrap_err().to_string();
        assert!(error.contains(&encoder.pairs.display().to_string()) && error.contains(&format!("line {line} has a text without tokens")), "{error}");
    }
}
