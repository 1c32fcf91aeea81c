//! Distillation from files with the logits of a teacher, and from several teachers.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, Tensor};
use compress::Model;
use compress::pass::{Distill, MoreTeacher, Student};
use compress_engine::data::{Data, Task};
use compress_engine::exec::Rounding;
use compress_engine::train::optimizer::Kind;
use half::f16;
use serde_json::{Map, Value, json};

use crate::low_bits::outputs;
use crate::train::{Run, distill, ends, finetune, furthest, golden, losses, samples, with_training};

const MODEL: &str = "llama-grouped-tied";

/// Samples of a language model, and the responses of a server to them: for each token after the first, the
/// log-probabilities of all tokens.
struct Responses {
    run: Run,
    data: Data,
    lines: Vec<Value>,
}

impl Responses {
    fn new() -> Responses {
        let run = Run::new();
        let data = Data { task: Some(Task::LanguageModelling), ..samples(MODEL, run.folder.path(), 16, 0) };
        let inputs = candle_core::safetensors::load(data.arrays.as_ref().unwrap(), &Device::Cpu).unwrap();
        let logits = outputs(&Model::open(golden(MODEL)).unwrap(), &inputs.clone().into_iter().collect(), Rounding::Token).to_dtype(DType::F64).unwrap();
        let log_softmax = |logits: &Tensor| logits.broadcast_sub(&logits.exp().unwrap().sum_keepdim(D::Minus1).unwrap().log().unwrap()).unwrap();
        let (rows, ids) = (log_softmax(&logits).to_vec3::<f64>().unwrap(), inputs["input_ids"].to_vec2::<i64>().unwrap());
        let masks = inputs["attention_mask"].to_vec2::<i64>().unwrap();
        let line = |ids: Vec<i64>, mask: Vec<i64>, rows: Vec<Vec<f64>>| {
            let length = mask.iter().filter(|real| **real != 0).count();
            let next = |row: &Vec<f64>| row.iter().enumerate().map(|(id, value)| (id.to_string(), json!({ "logprob": value }))).collect::<Map<_, _>>();
            let prompt: Vec<Value> = [Value::Null].into_iter().chain(rows[..length - 1].iter().map(|row| Value::Object(next(row)))).collect();
            json!({ "prompt_token_ids": ids[..length], "prompt_logprobs": prompt })
        };
        let lines = ids.into_iter().zip(masks).zip(rows).map(|((ids, mask), rows)| line(ids, mask, rows)).collect();
        Responses { run, data, lines }
    }

    fn file(&self, name: &str, lines: &[Value]) -> PathBuf {
        let path = self.run.folder.path().join(name);
        std::fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
        path
    }

    fn error(&self, pass: Distill) -> String {
        self.run.train(MODEL, self.data.clone(), pass).unwrap_err().to_string()
    }
}

fn pass() -> Distill {
    let student = Some(Student::Layers(vec![0]));
    Distill { student, ..with_training!(distill(6, "{ soft: { temperature: 1 } }"), optimizer: Kind::Sgd, learning_rate: 0.1) }
}

/// A row of a cache: tokens, and the bits of their logits relative to the largest one.
type StoredRow = Vec<(u32, u16)>;

/// The rows of each text in a cache of the logits of all `tokens`.
fn stored(folder: &Path, tokens: usize) -> Vec<Vec<StoredRow>> {
    let mut texts = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let mut rest = &bytes[bytes.iter().position(|byte| *byte == b'\n').unwrap() + 1..];
        while let Some((header, after)) = rest.split_first_chunk::<28>() {
            let rows = u32::from_le_bytes(header[16..20].try_into().unwrap()) as usize;
            let (values, after) = after.split_at(rows * (6 * tokens + 2));
            let entry = |b: &[u8; 6]| (u32::from_le_bytes([b[0], b[1], b[2], b[3]]), u16::from_le_bytes([b[4], b[5]]));
            texts.push(values.chunks(6 * tokens + 2).map(|row| row.as_chunks::<6>().0.iter().map(entry).collect()).collect());
            rest = after;
        }
    }
    texts.sort();
    texts
}

/// The rows of the texts of responses, and the largest difference of log-probabilities in a row.
fn expected(lines: &[Value]) -> (Vec<Vec<StoredRow>>, f32) {
    let mut range = 0f32;
    let mut row = |values: &Value| -> StoredRow {
        let value = |token: usize| values[token.to_string()]["logprob"].as_f64().unwrap() as f32;
        let tokens = values.as_object().unwrap().len();
        let highest = (0..tokens).map(value).fold(f32::NEG_INFINITY, f32::max);
        let relative = |token: usize| value(token) - highest;
        range = (0..tokens).map(relative).fold(range, |range, value| range.max(-value));
        (0..tokens).map(|token| (token as u32, f16::from_f32(relative(token)).to_bits())).collect()
    };
    let mut texts: Vec<Vec<StoredRow>> = lines.iter().map(|line| line["prompt_logprobs"].as_array().unwrap()[1..].iter().map(&mut row).collect()).collect();
    texts.sort();
    (texts, range)
}

/// A teacher's logits in a file are those of the teacher in 16 bits, and give the loss of the teacher.
#[test]
fn files_of_logits_replace_the_teacher() {
    let responses = Responses::new();
    let report = Run::new().train(MODEL, responses.data.clone(), pass()).unwrap();
    let direct = ends(&report).0;
    // Several files, of which one has a text that is not a sample.
    let other = json!({ "prompt_token_ids": [3, 4], "prompt_logprobs": [null, { "4": -0.5 }] });
    let (first, second) = responses.lines.split_at(5);
    let files = vec![responses.file("a.jsonl", first), responses.file("b.jsonl", &[&[other], second].concat())];
    let cache = responses.run.folder.path().join("cache");
    let (texts, range) = expected(&responses.lines);
    let tokens = texts[0][0].len();
    let with = Distill { teacher_logits: files, teacher_top: Some(tokens), teacher_cache: Some(cache.clone()), ..pass() };
    let report = responses.run.train(MODEL, responses.data.clone(), with).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("the logits of 16 samples were read from files, 16 of them")), "{:?}", report.notes);
    assert_eq!(stored(&cache, tokens), texts);
    // Half a unit in the last place of the logits changes logarithms of probabilities by at most twice as
    // much, and the mean of the differences of two of them accordingly.
    let error = f64::from(range) * 2f64.powi(-11);
    let bound = 2.0 * error * (1.0 + f64::from(range));
    assert!((ends(&report).0 - direct).abs() < bound, "{} instead of {direct}, with an error of at most {bound}", ends(&report).0);
}

#[test]
fn other_samples_and_options_are_refused() {
    let responses = Responses::new();
    let with = |lines: &[Value]| Distill { teacher_logits: vec![responses.file("a.jsonl", lines)], ..pass() };
    let error = responses.error(with(&responses.lines[..15]));
    assert!(error.contains("no record has the token ids of sample 16"), "{error}");
    let mut changed = responses.lines.clone();
    changed[3]["prompt_token_ids"][2] = json!(1);
    let error = responses.error(with(&changed));
    assert!(error.contains("sample 4") && error.contains("line 4, has the token 1 at position 2"), "{error}");
    let all = with(&responses.lines);
    for (pass, reason) in [
        (Distill { teacher: Some(golden(MODEL)), ..all.clone() }, "cannot be combined with `teacher`"),
        (with_training!(all.clone(), losses: losses("soft=1")), "needs `soft: { temperature: 1 }`"),
        (with_training!(all.clone(), losses: losses("{ soft: { temperature: 1 }, hidden: 1 }")), "contain only logits"),
    ] {
        let error = responses.error(pass);
        assert!(error.contains(reason), "{error}");
    }
}

/// Probabilities of a teacher and of its copy are those of the teacher, and the order of two teachers has no
/// effect.
#[test]
fn probabilities_of_teachers_are_averaged() {
    let responses = Responses::new();
    let other = Run::new();
    other.train(MODEL, responses.data.clone(), with_training!(finetune(10), learning_rate: 1e-2)).unwrap();
    let train_with = |teacher: PathBuf, teacher_cache: Option<PathBuf>, more: Vec<MoreTeacher>| {
        let run = Run::new();
        let report = run.train(MODEL, responses.data.clone(), Distill { teacher: Some(teacher), teacher_cache, more_teachers: more, ..pass() }).unwrap();
        let phases = report.passes[0].details["memory"]["phases"].as_array().unwrap();
        let teachers = phases.iter().find(|phase| phase["name"] == "teacher").unwrap();
        (run.weights(), ["predicted_bytes", "measured_bytes"].map(|key| teachers[key].as_u64().unwrap()))
    };
    let train = |teacher: PathBuf, more: Vec<MoreTeacher>| train_with(teacher, None, more).0;
    let more = |model: PathBuf, weight: f64| vec![MoreTeacher { model, weight, cache: None }];
    let (first, second) = (golden(MODEL), other.out());
    let (one, bytes) = train_with(first.clone(), None, Vec::new());
    let (both, bytes_of_both) = train_with(first.clone(), None, more(first.clone(), 2.0));
    assert!(furthest(&one, &both) < 1e-5);
    // The forecast counts the parameters of all teachers.
    assert_eq!(bytes_of_both, bytes.map(|bytes| 2 * bytes));
    let mixed = train(first.clone(), more(second.clone(), 0.5));
    assert!(furthest(&one, &mixed) > 1e-4);
    assert!(furthest(&mixed, &train(second.clone(), more(first.clone(), 2.0))) < 1e-5);
    // Cached logits have 16 bits. Their probabilities are averaged in the same way.
    let folder = |name: &str| Some(responses.run.folder.path().join(name));
    let cached = |name: &str, model: &PathBuf, weight: f64| MoreTeacher { cache: folder(name), ..more(model.clone(), weight).remove(0) };
    let train = |teacher: &PathBuf, name: &str, more: Vec<MoreTeacher>| train_with(teacher.clone(), folder(name), more).0;
    let one_cached = train(&first, "first", Vec::new());
    assert!(furthest(&one_cached, &one) > 0.0);
    assert!(furthest(&one_cached, &train(&first, "first", vec![cached("copy", &first, 2.0)])) < 1e-5);
    let mixed = train(&first, "first", vec![cached("second", &second, 0.5)]);
    assert!(furthest(&one_cached, &mixed) > 1e-4);
    assert!(furthest(&mixed, &train(&second, "second", vec![cached("first", &first, 2.0)])) < 1e-5);
}

#[test]
fn teachers_with_other_vocabularies_and_losses_are_refused() {
    let responses = Responses::new();
    let more = |model: &str, weight: f64| vec![MoreTeacher { model: golden(model), weight, cache: None }];
    for (pass, reason) in [
        (Distill { more_teachers: more("bert", 1.0), ..pass() }, "logits"),
        (Distill { more_teachers: more(MODEL, 0.0), ..pass() }, "`weight` must be a finite number greater than 0"),
        (Distill { more_teachers: more(MODEL, 1.0), ..with_training!(pass(), losses: losses("soft=1,hidden=1")) }, "only probabilities are averaged"),
        (Distill { more_teachers: more(MODEL, 1.0), teacher_top: Some(4), ..pass() }, "which `teacher_top` requires"),
    ] {
        let error = responses.error(pass);
        assert!(error.contains(reason), "{error}");
    }
}

/// Logits of a masked language model belong to the token at their position, and those of a causal one to the
/// next token.
#[test]
fn masked_and_causal_models_are_not_compared() {
    let run = Run::new();
    let [causal, masked] = ["llama", "bert-masked-lm"];
    for (student, teacher) in [(causal, masked), (masked, causal)] {
        let data = Data { task: Some(Task::LanguageModelling), ..samples(student, run.folder.path(), 8, 0) };
        let more = vec![MoreTeacher { model: golden(teacher), weight: 1.0, cache: None }];
        for pass in [Distill { teacher: Some(golden(teacher)), ..distill(1, "soft=1") }, Distill { more_teachers: more, ..distill(1, "soft=1") }] {
            let error = run.train(student, data.clone(), pass).unwrap_err().to_string();
            assert!(error.contains("predicts other tokens than the student"), "{error}");
            assert!([causal, masked].iter().all(|name| error.contains(&golden(name).display().to_string())), "{error}");
        }
    }
}
