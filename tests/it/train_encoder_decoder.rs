//! Training of encoder-decoder models with padding on both sides: steps equal those of transformers and
//! PyTorch (`scripts/goldens training`), and padding does not affect losses.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use compress::pass::WeightImportance as Importance;
use compress::pass::{Distill, Finetune, PruneUnstructured, QuantizeDynamic, QuantizeStatic, Step, Student, Training};
use compress::report::Report;
use compress::{Model, Pipeline};
use compress_core::work::{Cancel, Event};
use compress_engine::data::{Data, Task};
use compress_engine::train::optimizer::Kind;
use compress_engine::train::{BatchSize, Checkpointing, Every, Offload, QuantizerScales};
use serde_json::Value;

use crate::common::numbers::checksums;
use crate::train::{Run, furthest, with_training};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn model(name: &str) -> PathBuf {
    goldens().join("models").join(name)
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(goldens().join("training/expected.json")).unwrap()).unwrap()
}

fn arrays(path: PathBuf) -> Data {
    Data { arrays: Some(path), ..Data::default() }
}

fn samples(case: &str) -> Data {
    arrays(goldens().join(format!("training/{case}.safetensors")))
}

type Arrays = HashMap<String, Tensor>;

fn stored(case: &str) -> Arrays {
    candle_core::safetensors::load(samples(case).arrays.unwrap(), &Device::Cpu).unwrap()
}

/// The arrays as data, in the folder of a run.
fn saved(run: &Run, arrays: &Arrays) -> Data {
    let path = run.folder.path().join("arrays.safetensors");
    candle_core::safetensors::save(arrays, &path).unwrap();
    self::arrays(path)
}

fn curve(report: &Report) -> Vec<Value> {
    report.passes.last().unwrap().details["training"]["curve"].as_array().unwrap().clone()
}

/// Options of the steps of `scripts/goldens training`.
fn finetune() -> Finetune {
    let schedule = serde_json::from_str(r#"{ "kind": "constant" }"#).unwrap();
    Finetune {
        training: Training {
            max_steps: Some(4),
            batch_size: BatchSize::Samples(4),
            learning_rate: 3e-3,
            weight_decay: 0.1,
            clip_norm: 0.0,
            schedule,
            ..Training::default()
        },
        ..Finetune::default()
    }
}

fn distill(terms: &str) -> Distill {
    Distill { training: Training { losses: terms.parse().unwrap(), ..finetune().training }, ..Distill::default() }
}

const TERMS: &str = "soft=1,hard=0.5,hidden=0.01";

fn assert_matches_pytorch(case: &str, name: &str, pass: impl Into<Step>) {
    let (run, expected) = (Run::new(), expected()[case].clone());
    let report = run.train(name, samples(case), pass).unwrap_or_else(|e| panic!("{case}: {e}"));
    let curve = curve(&report);
    assert_eq!(curve.len(), 4);
    for (step, (ours, theirs)) in curve.iter().zip(expected["losses"].as_array().unwrap()).enumerate() {
        for (loss, value) in theirs.as_object().unwrap() {
            let (ours, theirs) = (ours["losses"][loss].as_f64().unwrap_or_else(|| panic!("{case}: no {loss} in {ours}")), value.as_f64().unwrap());
            assert!((ours - theirs).abs() < 1e-4 * theirs.max(1.0), "{case}, step {step}, {loss}: {ours} instead of {theirs}");
        }
    }
    let (weights, mut compared) = (run.weights(), 0);
    for (weight, theirs) in expected["weights"].as_object().unwrap() {
        let values = &weights[weight];
        let room = 1e-4 * (values.len() as f64).sqrt();
        for (at, (ours, theirs)) in checksums(values).iter().zip(theirs.as_array().unwrap()).enumerate() {
            let (theirs, room) = (theirs.as_f64().unwrap(), if at < 2 { room } else { 1e-4 });
            assert!((ours - theirs).abs() < room, "{case}, {weight}, number {at}: {ours} instead of {theirs}");
            compared += 1;
        }
    }
    assert!(compared > 100, "{case}: {compared}");
}

#[test]
fn steps_are_those_of_pytorch() {
    for name in ["t5", "t5-gated", "mt5", "whisper"] {
        assert_matches_pytorch(&format!("finetune-{name}"), name, finetune());
    }
    assert_matches_pytorch("distill", "t5", Distill { teacher: Some(model("t5-gated")), ..distill(TERMS) });
}

/// Columns of one side, up to the longest of the selected samples.
fn cut(arrays: &Arrays, from: usize, count: usize) -> Arrays {
    let rows: Arrays = arrays.iter().map(|(name, tensor)| (name.clone(), tensor.narrow(0, from, count).unwrap())).collect();
    let longest = |name: &str, real: &dyn Fn(i64) -> bool| {
        let numbers = rows[name].to_vec2::<i64>().unwrap();
        numbers.iter().map(|row| row.iter().filter(|x| real(**x)).count()).max().unwrap()
    };
    let said = longest("labels", &|label| label != -100);
    let read = rows.contains_key("attention_mask").then(|| longest("attention_mask", &|kept| kept != 0));
    let narrow = |(name, tensor): (&String, &Tensor)| {
        let width = match name.as_str() {
            "labels" => Some(said),
            "input_ids" | "attention_mask" => read,
            _ => None,
        };
        (name.clone(), width.map_or(tensor.clone(), |width| tensor.narrow(1, 0, width).unwrap()).contiguous().unwrap())
    };
    rows.iter().map(narrow).collect()
}

/// The losses of single samples average to the loss of the batch: a loss counts the tokens of its side
/// without padding.
#[test]
fn losses_of_a_batch_are_means_over_its_samples() {
    let teacher = Run::new();
    let perturbed = PruneUnstructured { amount: Some("0.3".parse().unwrap()), ..PruneUnstructured::default() };
    Pipeline::builder().pass(perturbed).build().unwrap().run(Model::open(model("whisper")).unwrap(), teacher.out()).unwrap();
    let (read, said): (&[&str], &[&str]) = (&["hidden"], &[]);
    let cases = [
        ("t5", "distill", model("t5-gated"), "{ soft: 1, hard: 1, hidden: { layers: [[1, 0]] } }", read),
        ("t5", "distill", model("t5-gated"), "{ hidden: { layers: [[4, 2]] } }", said),
        ("whisper", "finetune-whisper", teacher.out(), "{ soft: 1, hidden: { layers: [[0, 1]] }, attention: { layers: [[2, 3]] } }", read),
        ("whisper", "finetune-whisper", teacher.out(), "{ hidden: { layers: [[2, 3]] }, attention: { target: relations, layers: [[3, 3]] } }", said),
    ];
    for (name, case, teacher, terms, of_encoder) in cases {
        let stored = stored(case);
        let losses = |from: usize, count: usize| {
            let (run, pass) =
                (Run::new(), Distill { teacher: Some(teacher.clone()), ..with_training!(distill(terms), max_steps: Some(1), learning_rate: 1e-9) });
            let report = run.train(name, saved(&run, &cut(&stored, from, count)), pass).unwrap_or_else(|e| panic!("{name}, {terms}: {e}"));
            curve(&report)[0].clone()
        };
        let items = |loss: &str, sample: usize| {
            let all = |name: &str, real: &dyn Fn(i64) -> bool| stored[name].to_vec2::<i64>().unwrap()[sample].iter().filter(|x| real(**x)).count();
            match (of_encoder.contains(&loss), stored.contains_key("attention_mask")) {
                (false, _) => all("labels", &|label| label != -100) as f64,
                (true, true) => all("attention_mask", &|kept| kept != 0) as f64,
                (true, false) => 1.0,
            }
        };
        let (together, alone): (Value, Vec<Value>) = (losses(0, 3), (0..3).map(|sample| losses(sample, 1)).collect());
        let mut compared = 0;
        for loss in ["soft", "hard", "hidden", "attention"].into_iter().filter(|loss| terms.contains(&format!("{loss}:"))) {
            let of = |losses: &Value| losses["losses"][loss].as_f64().unwrap();
            let sum: f64 = alone.iter().enumerate().map(|(sample, losses)| of(losses) * items(loss, sample)).sum();
            let mean = sum / (0..3).map(|sample| items(loss, sample)).sum::<f64>();
            assert!(mean > 1e-4 && (of(&together) / mean - 1.0).abs() < 1e-5, "{name}, {loss} of {terms}: {together} together, {mean} one by one");
            compared += 1;
        }
        assert!(compared > 0, "{terms}");
    }
}

#[test]
fn a_student_equal_to_the_teacher_has_zero_loss() {
    for (name, terms) in
        [("t5", "{ soft: 1, hidden: 1 }"), ("whisper", "{ soft: 1, hidden: 1, attention: 1 }"), ("whisper", "{ attention: { target: relations } }")]
    {
        let report = Run::new().train(name, samples(&format!("finetune-{name}")), distill(terms)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(curve(&report)[0]["loss"].as_f64().unwrap().abs() < 1e-6, "{name}: {:?}", curve(&report)[0]);
    }
}

/// Micro-batches and memory options do not change a step.
#[test]
fn micro_batches_and_memory_limits_do_not_change_steps() {
    let teacher = Some(model("t5-gated"));
    let pass = Distill { teacher, ..with_training!(distill(TERMS), optimizer: Kind::Sgd, learning_rate: 0.01, max_steps: Some(2)) };
    let whole = Run::new();
    whole.train("t5", samples("distill"), pass.clone()).unwrap();
    let single = with_training!(pass.clone(), batch_size: BatchSize::Samples(1), gradient_accumulation: 4);
    for (what, pass) in [
        ("one by one", single),
        ("layer by layer", with_training!(pass.clone(), gradient_checkpointing: Checkpointing::Blocks)),
        ("parameters that come and go", with_training!(pass.clone(), offload: vec![Offload::Parameters])),
    ] {
        let run = Run::new();
        run.train("t5", samples("distill"), pass).unwrap_or_else(|e| panic!("{what}: {e}"));
        let apart = furthest(&whole.weights(), &run.weights());
        assert!(apart < 1e-5, "{what}: {apart}");
    }
}

#[test]
fn cached_logits_depend_on_both_texts() {
    // The same source with two targets, and the same target for two sources.
    let mut twice = stored("distill");
    let again = |name: &str, by: usize, arrays: &Arrays| {
        Tensor::cat(&[&arrays[name], &Tensor::cat(&[&arrays[name].narrow(0, by, 4 - by).unwrap(), &arrays[name].narrow(0, 0, by).unwrap()], 0).unwrap()], 0)
            .unwrap()
    };
    let grown: Arrays = twice.keys().map(|name| (name.clone(), again(name, if name == "labels" { 1 } else { 0 }, &twice))).collect();
    twice = grown;
    let pass = Distill { teacher: Some(model("t5-gated")), ..with_training!(distill("soft=1"), optimizer: Kind::Sgd, learning_rate: 0.01, max_steps: Some(4)) };
    let (asked, kept) = (Run::new(), Run::new());
    asked.train("t5", saved(&asked, &twice), pass.clone()).unwrap();
    let cache = kept.folder.path().join("answers");
    let with = Distill { teacher_cache: Some(cache.clone()), teacher_top: Some(48), ..pass };
    let size = || std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
    kept.train("t5", saved(&kept, &twice), with.clone()).unwrap();
    let apart = furthest(&asked.weights(), &kept.weights());
    assert!(apart < 2e-3, "{apart}");
    // Each row of labels twice, with different logits.
    let rows = 2 * (9 + 4 + 6 + 2);
    let before = size();
    assert!(before > rows * 48 * 6 && before < (rows + 1) * 48 * 6 + 8 * 28 + 200, "{before}");
    let again = Run::new();
    again.train("t5", saved(&again, &twice), with.clone()).unwrap();
    assert_eq!((again.weights(), size()), (kept.weights(), before));
    let paged = Run::new();
    let cache = paged.folder.path().join("answers");
    paged.train("t5", saved(&paged, &twice), Distill { teacher_cache: Some(cache), ..with_training!(with, offload: vec![Offload::Parameters]) }).unwrap();
    let apart = furthest(&paged.weights(), &kept.weights());
    assert!(apart < 1e-5, "{apart}");
}

#[test]
fn an_interrupted_run_yields_the_result_of_an_uninterrupted_one() {
    let pass = Distill {
        teacher: Some(model("t5-gated")),
        ..with_training!(distill(TERMS), batch_size: BatchSize::Samples(2), max_steps: Some(6), checkpoint_every: Some(Every::Steps(1)), evaluate_every: Some(2))
    };
    let builder = || Pipeline::builder().pass(pass.clone()).train(samples("distill")).evaluation(samples("distill")).seed(3);
    let (whole, parts) = (Run::new(), Run::new());
    let report = builder().build().unwrap().run(Model::open(model("t5")).unwrap(), whole.out()).unwrap();
    let evaluations = report.passes[0].details["training"]["evaluations"].as_array().unwrap().clone();
    assert!(evaluations.len() == 4 && evaluations[0]["metric"] == "perplexity", "{evaluations:?}");
    let cancel = Cancel::default();
    let handle = cancel.clone();
    let watch = move |event: Event| match event {
        Event::Message(text) if text.contains("loss") => handle.cancel(),
        _ => {}
    };
    builder().progress(watch).cancel(cancel).build().unwrap().run(Model::open(model("t5")).unwrap(), parts.out()).unwrap_err();
    builder().resume(true).build().unwrap().run(Model::open(model("t5")).unwrap(), parts.out()).unwrap();
    assert_eq!(whole.weights(), parts.weights());
}

/// A folder of T5 with the tokenizer of the golden pairs.
fn with_tokenizer(run: &Run) -> PathBuf {
    let folder = run.folder.path().join("t5");
    std::fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(model("t5").join(file), folder.join(file)).unwrap();
    }
    std::fs::copy(goldens().join("training/letters.json"), folder.join("tokenizer.json")).unwrap();
    folder
}

fn pairs(path: PathBuf) -> Data {
    let column = |name: &str| Some(name.parse().unwrap());
    Data { text: Some(path), text_column: column("source"), pair_column: column("target"), ..Data::default() }
}

#[test]
fn pairs_of_texts_are_sources_and_targets() {
    let (run, expected) = (Run::new(), expected()["pairs"].clone());
    let folder = with_tokenizer(&run);
    let pass = with_training!(finetune(), max_steps: Some(1), batch_size: BatchSize::Samples(5));
    let data = pairs(goldens().join("training/pairs.csv"));
    let pipeline = Pipeline::builder().pass(pass.clone()).train(data.clone()).evaluation(Data { batch_size: Some(5), ..data }).build().unwrap();
    let report = pipeline.run(Model::open(&folder).unwrap(), run.out()).unwrap();
    let found = report.accuracy.as_ref().unwrap();
    let loss = expected["loss"].as_f64().unwrap();
    assert!(found.metric.as_deref() == Some("perplexity") && (found.more["negative_log_likelihood"][0] - loss).abs() < 1e-5, "{found:?} instead of {loss}");
    let tokens = expected["labels"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap()).filter(|label| label.as_i64() != Some(-100)).count();
    assert_eq!(found.more["tokens"], [tokens as f64; 2]);
    // Arrays of the same tokens result in the same loss.
    let (first, again) = (curve(&report)[0].clone(), Run::new());
    let tensor = |name: &str| {
        let rows: Vec<Vec<i64>> = serde_json::from_value(expected[name].clone()).unwrap();
        Tensor::new(rows, &Device::Cpu).unwrap()
    };
    let mask = tensor("input_ids").ne(0i64).unwrap().to_dtype(DType::I64).unwrap();
    let arrays =
        saved(&again, &[("input_ids".to_owned(), tensor("input_ids")), ("attention_mask".to_owned(), mask), ("labels".to_owned(), tensor("labels"))].into());
    let report = again.train("t5", arrays, pass).unwrap();
    let (ours, other) = (first["loss"].as_f64().unwrap(), curve(&report)[0]["loss"].as_f64().unwrap());
    assert!((ours - loss).abs() < 1e-5 && (other - loss).abs() < 1e-5, "{ours} of texts, {other} of arrays, instead of {loss}");
}

#[test]
fn decoder_inputs_and_labels_may_be_arrays() {
    let (name, stored) = ("finetune-t5", stored("finetune-t5"));
    let labels = stored["labels"].to_vec2::<i64>().unwrap();
    let shifted: Vec<Vec<i64>> =
        labels.iter().map(|row| std::iter::once(0).chain(row[..row.len() - 1].iter().map(|label| (*label).max(0))).collect()).collect();
    let mask: Vec<Vec<i64>> = labels.iter().map(|row| row.iter().map(|label| i64::from(*label != -100)).collect()).collect();
    let tensor = |rows: &[Vec<i64>]| Tensor::new(rows.to_vec(), &Device::Cpu).unwrap();
    let loss = |change: &dyn Fn(&mut Arrays), data: &dyn Fn(Data) -> Data, pass: Step| {
        let (run, mut arrays) = (Run::new(), stored.clone());
        change(&mut arrays);
        curve(&run.train("t5", data(saved(&run, &arrays)), pass).unwrap())[0]["loss"].as_f64().unwrap()
    };
    let plain = |data| data;
    let usual = loss(&|_| {}, &plain, finetune().into());
    let both = loss(
        &|arrays| {
            arrays.insert("decoder_input_ids".into(), tensor(&shifted));
        },
        &plain,
        finetune().into(),
    );
    assert_eq!(usual, both, "{name}");
    // Under another name, with padding instead of -100, which is equivalent.
    let renamed = |arrays: &mut Arrays| {
        arrays.remove("labels");
        let padded: Vec<Vec<i64>> = labels.iter().map(|row| row.iter().map(|label| (*label).max(0)).collect()).collect();
        arrays.insert("said".into(), tensor(&padded));
    };
    assert_eq!(usual, loss(&renamed, &|data| Data { label_column: Some("said".parse().unwrap()), ..data }, finetune().into()));
    // Without labels, the targets are the decoder tokens, shifted by one.
    let alone = |arrays: &mut Arrays| {
        arrays.remove("labels");
        arrays.insert("decoder_input_ids".into(), tensor(&shifted));
        arrays.insert("decoder_attention_mask".into(), tensor(&mask));
    };
    let next = loss(&alone, &|data| Data { task: Some(Task::LanguageModelling), ..data }, finetune().into());
    let shortened = |arrays: &mut Arrays| {
        let cut: Vec<Vec<i64>> = labels
            .iter()
            .map(|row| {
                let last = row.iter().rposition(|label| *label != -100).unwrap();
                row.iter().enumerate().map(|(at, label)| if at == last { -100 } else { *label }).collect()
            })
            .collect();
        arrays.insert("labels".into(), tensor(&cut));
    };
    let less = loss(&shortened, &plain, finetune().into());
    assert!((next - less).abs() < 1e-6 && (next - usual).abs() > 1e-3, "{next} and {less}, {usual} of all");
    // The teacher computes logits at all positions, independent of labels.
    let soft = || Distill { teacher: Some(model("t5-gated")), ..distill("soft=1") }.into();
    let (asked, given) = (loss(&|_| {}, &plain, soft()), loss(&alone, &plain, soft()));
    assert!((asked - given).abs() < 1e-6, "{asked} and {given}");
}

#[test]
fn quantized_models_train_with_fake_quantization() {
    let run = Run::new();
    let pass = with_training!(finetune(), scales: QuantizerScales::Learnable);
    let pipeline = Pipeline::builder().pass(QuantizeDynamic::default()).pass(pass).train(samples("finetune-t5")).build().unwrap();
    let report = pipeline.run(Model::open(model("t5")).unwrap(), run.out()).unwrap();
    let curve = curve(&report);
    assert!(curve[3]["loss"].as_f64().unwrap() < curve[0]["loss"].as_f64().unwrap() - 0.1, "{curve:?}");
    assert!(report.notes.iter().any(|note| note.contains("were trained")), "{:?}", report.notes);
}

#[test]
fn students_lose_layers_of_the_encoder() {
    let run = Run::new();
    let pass = Distill { student: Some(Student::Layers(vec![0])), ..distill("{ soft: 1, hidden: 0.01 }") };
    let report = run.train("t5", samples("finetune-t5"), pass).unwrap();
    let graph = Model::open(run.out()).unwrap().graph().unwrap().to_string();
    assert!(!graph.contains("encoder.block.1.") && graph.contains("decoder.block.2."));
    assert!(curve(&report)[3]["loss"].as_f64().unwrap() < curve(&report)[0]["loss"].as_f64().unwrap());
}

#[test]
fn unsuitable_samples_are_rejected() {
    let (run, stored, speech) = (Run::new(), stored("finetune-t5"), stored("finetune-whisper"));
    let without = |arrays: &Arrays, name: &str| {
        arrays.iter().filter(|(other, _)| *other != name).map(|(name, tensor)| (name.clone(), tensor.clone())).collect::<Arrays>()
    };
    let with = |arrays: &Arrays, name: &str, tensor: Tensor| {
        let mut arrays = arrays.clone();
        arrays.insert(name.into(), tensor);
        arrays
    };
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::I64, &Device::Cpu).unwrap();
    for (name, arrays, wanted) in [
        ("t5", without(&stored, "labels"), "there is no array for the model's input `decoder_input_ids`"),
        ("t5", with(&stored, "labels", zeros(&[4])), "one row of tokens per sample"),
        (
            "t5",
            with(&stored, "labels", Tensor::full(48i64, (4, 3), &Device::Cpu).unwrap()),
            "of array `labels` has label 48: labels are token ids, at least 0 and below 48",
        ),
        ("t5", with(&stored, "labels", Tensor::full(-7i64, (4, 3), &Device::Cpu).unwrap()), "has label -7"),
        (
            "t5",
            with(&with(&without(&stored, "labels"), "decoder_input_ids", zeros(&[4, 9])), "decoder_attention_mask", zeros(&[4, 7])),
            "has the shape [9], but its mask `decoder_attention_mask` is [7]",
        ),
        ("t5", with(&stored, "decoder_input_ids", zeros(&[4, 3])), "there must be one label per token"),
        ("whisper", with(&speech, "labels", zeros(&[4, 25])), "only 24 positions"),
        ("whisper", with(&speech, "labels", zeros(&[3, 5])), "`labels` has 3 rows"),
    ] {
        let error = run.train(name, saved(&run, &arrays), finetune()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let data = Data { task: Some(Task::Fidelity), ..saved(&run, &stored) };
    let error = run.train("t5", data, finetune()).unwrap_err().to_string();
    assert!(error.contains("requires `task: language-modelling`"), "{error}");
    let folder = with_tokenizer(&run);
    let refused = |data: Data| {
        let pipeline = Pipeline::builder().pass(finetune()).train(data).force(true).build().unwrap();
        pipeline.run(Model::open(&folder).unwrap(), run.out()).unwrap_err().to_string()
    };
    let path = |name: &str, text: &str| {
        let path = run.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let source = pairs(path("a.csv", "source,target\na,b\n"));
    assert!(refused(Data { stride: Some(4), ..source.clone() }).contains("`stride` does not apply to pairs of texts"));
    assert!(refused(Data { pair_column: None, ..source.clone() }).contains("`pair_column`"));
    assert!(refused(Data { label_column: Some("target".parse().unwrap()), ..source.clone() }).contains("do not use class labels"));
    assert!(refused(Data { task: Some(Task::Embedding), ..source }).contains("language-modelling and fidelity"));
    assert!(refused(pairs(path("b.csv", "source,target\na\n"))).contains("line 2 has 1 column, but"));
    assert!(refused(pairs(path("c.jsonl", "{ \"source\": \"a\" }\n"))).contains("no `target`"));
    assert!(refused(pairs(path("d.txt", "a\n"))).contains("applies only to texts in columns"));
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    std::fs::write(folder.join("config.json"), config.replace("\"decoder_start_token_id\": 0,", "")).unwrap();
    assert!(refused(pairs(path("e.csv", "source,target\na,b\n"))).contains("add it to config.json"));
    let error = run.train("whisper", pairs(path("f.csv", "source,target\na,b\n")), finetune()).unwrap_err().to_string();
    assert!(error.contains("without the input `input_ids`"), "{error}");
}

/// The values of padding do not affect calibration, also if both sides have the same length.
#[test]
fn calibration_ignores_the_padding_of_both_sides() {
    let stored = stored("finetune-t5");
    let rows = |name: &str| stored[name].to_vec2::<i64>().unwrap();
    let tensor = |rows: Vec<Vec<i64>>| Tensor::new(rows, &Device::Cpu).unwrap();
    let each = |rows: &[Vec<i64>], kept: &[Vec<i64>], padding: i64| {
        let row = |(row, kept): (&Vec<i64>, &Vec<i64>)| row.iter().zip(kept).map(|(token, kept)| if *kept == 0 { padding } else { *token }).collect();
        rows.iter().zip(kept).map(row).collect::<Vec<Vec<i64>>>()
    };
    let (read, kept) = (rows("input_ids"), rows("attention_mask"));
    let said: Vec<Vec<i64>> = rows("labels").iter().map(|row| row.iter().map(|label| i64::from(*label != -100)).collect()).collect();
    assert_eq!((read[0].len(), kept[0].len()), (said[0].len(), 9));
    let arrays = |[of_read, of_said]: [i64; 2], masked: bool| {
        let mut arrays: Arrays = [("attention_mask".to_owned(), stored["attention_mask"].clone())].into();
        arrays.insert("input_ids".into(), tensor(each(&read, &kept, of_read)));
        arrays.insert("decoder_input_ids".into(), tensor(each(&read, &said, of_said)));
        if masked {
            arrays.insert("decoder_attention_mask".into(), tensor(said.clone()));
        }
        arrays
    };
    let prune = || PruneUnstructured { importance: Importance::Wanda, amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
    for (what, pass) in [("wanda", Step::from(prune())), ("static", QuantizeStatic::default().into())] {
        let made = |padding: [i64; 2], masked: bool| {
            let run = Run::new();
            let builder = Pipeline::builder().pass(pass.clone()).calibration(saved(&run, &arrays(padding, masked)));
            builder.build().unwrap().run(Model::open(model("t5")).unwrap(), run.out()).unwrap_or_else(|e| panic!("{what}: {e}"));
            (run.weights(), Model::open(run.out()).unwrap().graph().unwrap().to_string())
        };
        let usual = made([0, 0], true);
        assert!(made([40, 41], true) == usual, "{what}: padding affects calibration");
        assert!(made([0, 41], false) != usual, "{what}: tokens do not affect calibration");
    }
}
