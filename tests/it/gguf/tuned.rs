//! Blocks whose scales and minima are trained while their codes do not change.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use compress::pass::Step;
use compress::pipeline::Builder;
use compress::{Error, Pipeline, Report};
use compress_core::store::gguf::{GgufFile, Kind};
use compress_engine::data::{Data, Task};
use serde_json::{Value, json};

use super::compensated::calibration;
use super::importance::{Networks, tiny};
use crate::train::cancelled_after;

/// Trains scales on all samples in each step.
fn tuning(more: Value) -> Value {
    let mut options = json!({
        "scales": "only", "losses": { "soft": { "weight": 1, "temperature": 1 } }, "targets": ["*proj.weight"], "batch_size": 48,
        "learning_rate": 4e-3, "weight_decay": 0, "max_steps": 60, "evaluate_every": 20,
    });
    options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({ "distill": options })
}

/// A run in which only the types of matrices of layers round.
fn builder(folder: &Path, steps: &[Value]) -> Builder {
    let known = calibration(folder);
    let scored = Data { task: Some(Task::Fidelity), ..known.clone() };
    let export = serde_json::from_value::<compress::export::Export>(json!({ "gguf": { "types": { "token_embd": "F32" } } })).unwrap();
    let builder = Pipeline::builder().calibration(known).train(scored.clone()).evaluation(scored).export(export).seed(3);
    steps.iter().fold(builder, |builder, step| builder.pass(serde_json::from_value::<Step>(step.clone()).unwrap()))
}

/// Types and bytes of the tensors of a file.
fn tensors(file: &Path) -> BTreeMap<String, (Kind, Vec<u8>)> {
    GgufFile::open(file).unwrap().stored().map(|(name, kind, _, bytes)| (name.to_owned(), (kind, bytes.read_all().unwrap()))).collect()
}

fn divergence(report: &Report) -> f64 {
    report.accuracy.as_ref().unwrap().fidelity.as_ref().unwrap().kl.unwrap()
}

/// Codes and quantized scales stay, also in a model with several types; the divergence in training is that
/// of the file, which is lower than before.
#[test]
fn scales_are_trained_while_codes_stay() {
    for (width, scheme, method) in [(64, "Q4_K_M", "gptq"), (64, "Q4_1", "rtn"), (256, "Q4_K_M", "rtn"), (256, "Q2_K", "gptq")] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), Networks::Plain, width);
        let quantize = json!({ "quantize": { "scheme": scheme, "method": method } });
        let run = |name: &str, steps: &[Value]| {
            let path = folder.path().join(name);
            let report = builder(folder.path(), steps).build().unwrap().run(model.clone(), &path).unwrap();
            (report, tensors(&path))
        };
        let (rounded, before) = run("rounded.gguf", std::slice::from_ref(&quantize));
        let (tuned, after) = run("tuned.gguf", &[quantize.clone(), tuning(json!({}))]);
        let layers = if width == 64 { 14 } else { 7 };
        let notes = &tuned.notes;
        assert!(notes.iter().any(|note| note.contains(&format!("the codes of {layers} quantized weights did not change"))), "{scheme}: {notes:?}");
        assert!(notes.iter().any(|note| note.contains(&format!("{layers} weights written with the blocks of `quantize`"))), "{scheme}: {notes:?}");
        assert!(!notes.iter().any(|note| note.contains("rounds them again")), "{scheme}: {notes:?}");
        assert!(before.keys().eq(after.keys()), "{scheme}");
        let (mut changed, mut kinds) = (0, Vec::new());
        for (name, (kind, mut blocks)) in before {
            let (trained, (Kind::Blocks(block), true)) = (&after[&name], (kind, name.starts_with("blk."))) else {
                assert!((kind, blocks) == after[&name], "{scheme}: {name}");
                continue;
            };
            assert_eq!(kind, trained.0, "{scheme}: {name}");
            changed += usize::from(blocks != trained.1);
            block.put_factors(block.factors(&trained.1).collect::<Vec<_>>(), &mut blocks);
            assert!(blocks == trained.1, "{scheme}: the codes of {name} changed");
            kinds.push(block.name());
        }
        assert_eq!((changed, kinds.len()), (layers, layers), "{scheme}: {kinds:?}");
        let evaluations = tuned.passes.last().unwrap().details["training"]["evaluations"].as_array().unwrap().clone();
        let scores: Vec<f64> = evaluations.iter().map(|evaluation| evaluation["value"].as_f64().unwrap()).collect();
        let best = scores.iter().copied().fold(f64::INFINITY, f64::min);
        let (first, found) = (divergence(&rounded), divergence(&tuned));
        assert!((scores[0] - first).abs() <= 1e-3 * first, "{scheme}: {scores:?} in training, {first} written");
        assert!((best - found).abs() <= 1e-3 * found, "{scheme}: {scores:?} in training, {found} written");
        assert!(found < 0.98 * first, "{scheme}: {first} and {found} after training");
    }
}

/// A run that is interrupted in training and resumed writes the same bytes.
#[test]
fn resumed_trainings_write_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 64);
    let steps = [
        json!({ "quantize": { "scheme": "Q4_K_M", "method": "gptq" } }),
        tuning(json!({ "checkpoint_every": { "steps": 2 }, "batch_size": 16, "max_steps": 15, "evaluate_every": 5 })),
    ];
    let run = |name: &str, stop: Option<u64>| {
        let (cancel, watch) = cancelled_after(stop);
        let builder = builder(folder.path(), &steps).resume(stop.is_some()).progress(watch).cancel(cancel).measure(false);
        builder.build().unwrap().run(model.clone(), folder.path().join(name))
    };
    run("whole.gguf", None).unwrap();
    let error = run("parts.gguf", Some(6)).unwrap_err();
    assert!(matches!(error, Error::Paused { .. } | Error::Interrupted { .. } | Error::Cancelled), "{error}");
    let rest = run("parts.gguf", Some(u64::MAX)).unwrap();
    assert!(rest.notes.iter().any(|note| note.starts_with("8 steps in ")), "{:?}", rest.notes);
    let [whole, parts] = ["whole.gguf", "parts.gguf"].map(|name| fs::read(folder.path().join(name)).unwrap());
    assert!(whole == parts);
}

/// A state that is not better than the untrained one is not written, and scales are trained only of quantized
/// weights, without their codes.
#[test]
fn worse_scales_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 64);
    let quantize = json!({ "quantize": { "scheme": "Q4_0", "method": "rtn" } });
    let run = |name: &str, steps: &[Value]| builder(folder.path(), steps).measure(false).build().unwrap().run(model.clone(), folder.path().join(name));
    run("rounded.gguf", std::slice::from_ref(&quantize)).unwrap();
    run("worse.gguf", &[quantize.clone(), tuning(json!({ "learning_rate": 2.0, "max_steps": 2, "evaluate_every": 1 }))]).unwrap();
    assert!(tensors(&folder.path().join("rounded.gguf")) == tensors(&folder.path().join("worse.gguf")));
    for (options, words) in [
        (json!({ "targets": ["*norm*"] }), "`only` needs quantized weights"),
        (json!({ "scales": "learnable" }), "quantized to blocks of a GGUF file, whose codes are not trained"),
        (json!({ "scales": "fixed" }), "whose codes are not trained"),
    ] {
        let error = run("refused.gguf", &[quantize.clone(), tuning(options)]).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// The last layer of the teacher is the first one of a student, with another name.
#[test]
fn renamed_layers_keep_their_codes() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, 64);
    let steps = [json!({ "quantize": { "scheme": "Q4_0", "method": "rtn" } }), tuning(json!({ "student": { "layers": [1] }, "max_steps": 20 }))];
    let notes = builder(folder.path(), &steps).build().unwrap().run(model, folder.path().join("student.gguf")).unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("7 weights written with the blocks of `quantize`")), "{notes:?}");
    assert!(!notes.iter().any(|note| note.contains("rounds them again")), "{notes:?}");
}
