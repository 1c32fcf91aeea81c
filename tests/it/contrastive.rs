//! Contrastive training of sentence encoders on pairs of texts. Unit tests compare the loss with
//! sentence-transformers (`scripts/goldens losses`).
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

use crate::evaluation::{WORDS, model};
use crate::train::{ends, finetune};

const PAIRS: &str = "query,match,other\nthe cat,a cat sat,the hat ate\na hat ate,the hat,cat\nthe mat,on the mat,a hat\nsat on,sat,ate\n";

struct Encoder {
    folder: tempfile::TempDir,
    pairs: PathBuf,
}

impl Encoder {
    fn new() -> Encoder {
        let folder = model("sentence-mean", &[WORDS]);
        let pairs = folder.path().with_extension("csv");
        std::fs::write(&pairs, PAIRS).unwrap();
        Encoder { folder, pairs }
    }

    fn data(&self, options: &str) -> Data {
        Data { text: Some(self.pairs.clone()), ..serde_saphyr::from_str(options).unwrap() }
    }

    fn train(&self, losses: &str, data: &str, pass: Finetune) -> compress::Result<Report> {
        let pass = Finetune { losses: losses.parse().unwrap(), batch_size: BatchSize::Samples(4), ..pass };
        let out = tempfile::tempdir().unwrap();
        let pipeline = Pipeline::builder().pass(pass).train(self.data(data)).seed(3).build()?;
        pipeline.run(Model::open(self.folder.path()).unwrap(), out.path().join("out"))
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
fn matching_texts_become_similar() {
    let encoder = Encoder::new();
    for data in [BOTH, ALL] {
        let report = encoder.train("{ contrastive: { temperature: 0.5 } }", data, finetune(60)).unwrap();
        let (first, last) = ends(&report);
        assert!(last < 0.7 * first, "{data}: {first} to {last}");
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

#[test]
fn other_data_and_divided_batches_are_refused() {
    let encoder = Encoder::new();
    let refused = |losses: &str, data: &str, pass: Finetune| encoder.train(losses, data, pass).unwrap_err().to_string();
    let error = refused("contrastive=1", "{ task: fidelity, text_column: query, pair_column: match }", finetune(1));
    assert!(error.contains("losses: contrastive") && error.contains("set `task: contrastive`"), "{error}");
    // Without optimizer state, activations are part of the peak.
    let pass = Finetune { optimizer: Kind::Sgd, momentum: 0.0, ..finetune(1) };
    let report = encoder.train("contrastive=1", BOTH, pass.clone()).unwrap();
    let peak = report.passes[0].details["memory"]["peak_bytes"].as_u64().unwrap();
    let error = refused("contrastive=1", BOTH, Finetune { memory_limit: Some(ByteSize(peak - 1)), ..pass });
    assert!(error.contains("`contrastive` compares all its texts: lower `batch_size`"), "{error}");
    let evaluated = Pipeline::builder().evaluation(encoder.data(BOTH)).pass(compress::pass::Cast::default()).build().unwrap();
    let error = evaluated.run(Model::open(encoder.folder.path()).unwrap(), encoder.folder.path().with_extension("out")).unwrap_err().to_string();
    assert!(error.contains("`task: embedding`"), "{error}");
}
