//! Distillation from files with the logits of a teacher, and from several teachers.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;

use candle_core::{D, DType, Device, Tensor};
use compress::Model;
use compress::pass::{Distill, Finetune, MoreTeacher, Student};
use compress_engine::data::{Data, Task};
use compress_engine::exec::Rounding;
use compress_engine::train::optimizer::Kind;
use serde_json::{Map, Value, json};

use crate::low_bits::outputs;
use crate::train::{Run, distill, finetune, furthest, golden, losses, samples};

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
    Distill { student, optimizer: Kind::Sgd, learning_rate: 0.1, ..distill(6, "{ soft: { temperature: 1 } }") }
}

/// A teacher's logits in a file train the student like the teacher.
#[test]
fn files_of_logits_replace_the_teacher() {
    let responses = Responses::new();
    let direct = Run::new();
    direct.train(MODEL, responses.data.clone(), pass()).unwrap();
    // Several files, of which one has a text that is not a sample.
    let other = json!({ "prompt_token_ids": [3, 4], "prompt_logprobs": [null, { "4": -0.5 }] });
    let (first, second) = responses.lines.split_at(5);
    let files = vec![responses.file("a.jsonl", first), responses.file("b.jsonl", &[&[other], second].concat())];
    let with = Distill { teacher_logits: files, teacher_top: Some(200), ..pass() };
    let report = responses.run.train(MODEL, responses.data.clone(), with).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("the logits of 16 samples were read from files, 16 of them")), "{:?}", report.notes);
    // The logits have 16 bits.
    let apart = furthest(&direct.weights(), &responses.run.weights());
    assert!(apart < 2e-3, "{apart}");
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
        (Distill { losses: losses("soft=1"), ..all.clone() }, "needs `soft: { temperature: 1 }`"),
        (Distill { losses: losses("{ soft: { temperature: 1 }, hidden: 1 }"), ..all.clone() }, "contain only logits"),
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
    other.train(MODEL, responses.data.clone(), Finetune { learning_rate: 1e-2, ..finetune(10) }).unwrap();
    let train = |teacher: PathBuf, more: Vec<MoreTeacher>| {
        let run = Run::new();
        run.train(MODEL, responses.data.clone(), Distill { teacher: Some(teacher), more_teachers: more, ..pass() }).unwrap();
        run.weights()
    };
    let more = |model: PathBuf, weight: f64| vec![MoreTeacher { model, weight, cache: None }];
    let (first, second) = (golden(MODEL), other.out());
    let one = train(first.clone(), Vec::new());
    assert!(furthest(&one, &train(first.clone(), more(first.clone(), 2.0))) < 1e-5);
    let mixed = train(first.clone(), more(second.clone(), 0.5));
    assert!(furthest(&one, &mixed) > 1e-4);
    assert!(furthest(&mixed, &train(second.clone(), more(first.clone(), 2.0))) < 1e-5);
    // Cached logits have 16 bits.
    let cached = MoreTeacher { cache: Some(responses.run.folder.path().join("cache")), ..more(second, 0.5).remove(0) };
    let apart = furthest(&mixed, &train(first, vec![cached]));
    assert!(apart > 0.0 && apart < 2e-3, "{apart}");
}

#[test]
fn teachers_with_other_vocabularies_and_losses_are_refused() {
    let responses = Responses::new();
    let more = |model: &str, weight: f64| vec![MoreTeacher { model: golden(model), weight, cache: None }];
    for (pass, reason) in [
        (Distill { more_teachers: more("bert", 1.0), ..pass() }, "logits"),
        (Distill { more_teachers: more(MODEL, 0.0), ..pass() }, "`weight` must be a finite number greater than 0"),
        (Distill { more_teachers: more(MODEL, 1.0), losses: losses("soft=1,hidden=1"), ..pass() }, "only probabilities are averaged"),
        (Distill { more_teachers: more(MODEL, 1.0), teacher_top: Some(4), ..pass() }, "which `teacher_top` requires"),
    ] {
        let error = responses.error(pass);
        assert!(error.contains(reason), "{error}");
    }
}
