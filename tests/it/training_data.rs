//! Texts for training: the text of the assistant in chats (`scripts/goldens evaluation`), and ends of texts.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::pass::{Distill, Finetune, Step, Student};
use compress::{Model, Pipeline};
use compress_engine::data::{Batch, Data};
use compress_engine::train::BatchSize;

use crate::evaluation::{LETTERS, batches, expected, model, options, refused, score, texts};

const SPECIAL: (&str, &str) = ("special.json", "tokenizer_config.json");
const CHATS: [(&str, &str); 3] = [("merged.json", "tokenizer.json"), SPECIAL, ("answers.jinja", "chat_template.jinja")];

/// Tokens of a window, and the positions whose next token is predicted, each with that token.
type Window = (Vec<i64>, Vec<(usize, i64)>);

/// The windows of data, without padding.
fn windows(folder: &Path, data: &Data) -> Vec<Window> {
    let window = |batch: &Batch| (batch.inputs["input_ids"].to_vec2().unwrap().remove(0), batch.next_tokens().unwrap().unwrap().remove(0));
    batches(folder, &Data { batch_size: Some(1), ..data.clone() }).unwrap().iter().map(window).collect()
}

/// The golden chats in windows of the 32 positions of the model.
fn expected_windows() -> Vec<Window> {
    let rows = |key: &str| serde_json::from_value::<Vec<Vec<i64>>>(expected()["answers"][key].clone()).unwrap();
    let chat = |(ids, mask): (Vec<i64>, Vec<i64>)| {
        let window = |(ids, mask): (&[i64], &[i64])| (ids.to_vec(), (1..ids.len()).filter(|at| mask[*at] == 1).map(|at| (at - 1, ids[at])).collect());
        ids.chunks(32).zip(mask.chunks(32)).map(window).collect::<Vec<Window>>()
    };
    rows("tokens").into_iter().zip(rows("masks")).flat_map(chat).filter(|(_, next)| !next.is_empty()).collect()
}

/// With generation blocks in the template, and by turns without them.
#[test]
fn answers_are_those_of_transformers() {
    let folder = model("llama", &CHATS);
    let template = folder.path().join("chat_template.jinja");
    let marked = fs::read_to_string(&template).unwrap();
    let unmarked = marked.replace("{% generation", "{% if true").replace("endgeneration", "endif");
    assert_ne!(marked, unmarked);
    for text in [marked, unmarked] {
        fs::write(&template, &text).unwrap();
        assert_eq!(windows(folder.path(), &texts("answers.jsonl", "{ loss_on: assistant }")), expected_windows(), "{text}");
        let (all, default) = (texts("answers.jsonl", "{ loss_on: all }"), texts("answers.jsonl", "{}"));
        assert_eq!(windows(folder.path(), &all), windows(folder.path(), &default));
    }
}

/// A batch as arrays with labels of -100 except for the predicted tokens.
fn as_arrays(batch: &Batch, path: &Path) -> Data {
    let ids = &batch.inputs["input_ids"];
    let (rows, width) = ids.dims2().unwrap();
    let mut labels = vec![-100i64; rows * width];
    for (row, next) in batch.next_tokens().unwrap().unwrap().iter().enumerate() {
        next.iter().for_each(|(at, token)| labels[row * width + at + 1] = *token);
    }
    let labels = Tensor::from_vec(labels, (rows, width), &Device::Cpu).unwrap();
    let arrays = [("input_ids", ids.clone()), ("attention_mask", batch.inputs["attention_mask"].clone()), ("labels", labels)];
    candle_core::safetensors::save(&arrays.map(|(name, array)| (name.to_owned(), array)).into_iter().collect::<HashMap<_, _>>(), path).unwrap();
    Data { arrays: Some(path.to_owned()), ..Data::default() }
}

/// Losses of all steps.
fn losses(folder: &Path, data: &Data, step: Step) -> Vec<f64> {
    let out = tempfile::tempdir().unwrap();
    let pipeline = Pipeline::builder().pass(step).train(data.clone()).seed(3).build().unwrap();
    let report = pipeline.run(Model::open(folder).unwrap(), out.path().join("out")).unwrap();
    let curve = report.passes.last().unwrap().details["training"]["curve"].as_array().unwrap().clone();
    curve.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert!(a.len() == b.len() && !a.is_empty());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn finetune(steps: u64) -> Finetune {
    Finetune { max_steps: Some(steps), batch_size: BatchSize::Samples(64), learning_rate: 3e-3, ..Finetune::default() }
}

fn distill(losses: &str) -> Distill {
    let student = Some(Student::Layers(vec![0]));
    Distill { student, losses: losses.parse().unwrap(), max_steps: Some(3), batch_size: BatchSize::Samples(64), learning_rate: 3e-3, ..Distill::default() }
}

/// Losses, distillation losses and perplexity are those of the same tokens with labels of -100 elsewhere.
#[test]
fn losses_on_answers_are_those_with_labels_of_minus_100() {
    let folder = model("llama", &CHATS);
    let data = |loss_on: &str| texts("answers.jsonl", &format!("{{ loss_on: {loss_on}, batch_size: 64 }}"));
    let (answers, all) = (data("assistant"), data("all"));
    let arrays = as_arrays(&batches(folder.path(), &answers).unwrap()[0], &folder.path().join("arrays.safetensors"));
    for step in [finetune(3).into(), distill("soft=1").into(), distill("{ soft: 0.5, hard: 0.5 }").into(), distill("{ soft: 1, hidden: 1 }").into()] {
        let step: Step = step;
        let [found, labelled, unmasked] = [&answers, &arrays, &all].map(|data| losses(folder.path(), data, step.clone()));
        assert!(difference(&found, &labelled) < 1e-5, "{found:?} instead of {labelled:?}");
        assert!(difference(&found, &unmasked) > 1e-3, "{found:?} and {unmasked:?}");
    }
    let value = |data: &Data| score(folder.path(), data).unwrap().models[0].score.as_ref().unwrap().clone();
    let [found, labelled, unmasked] = [&answers, &arrays, &all].map(value);
    assert!((found.value - labelled.value).abs() < 1e-3 && found.more["tokens"] == labelled.more["tokens"], "{found:?} instead of {labelled:?}");
    assert!(found.more["tokens"] < unmasked.more["tokens"]);
}

#[test]
fn options_of_texts_are_refused_where_they_do_not_apply() {
    let folder = model("llama", &CHATS);
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let of = |path: std::path::PathBuf, yaml: &str| refused(folder.path(), &Data { text: Some(path), ..options(yaml) });
    let plain = of(file("plain.txt", "a cat\n"), "{ loss_on: assistant }");
    assert!(plain.contains("plain.txt: `loss_on` applies only to chats"), "{plain}");
    let records = of(file("records.jsonl", "{ \"text\": \"a cat\" }\n"), "{ loss_on: all }");
    assert!(records.contains("records.jsonl: `loss_on` applies only to chats"), "{records}");
    let chats = || texts("answers.jsonl", "{}").text.unwrap();
    for (yaml, wanted) in [
        ("{ loss_on: assistant, task: fidelity }", "`loss_on` applies only to the windows of `task: language-modelling`"),
        ("{ append_eos: true }", "answers.jsonl: `append_eos` does not apply to chats"),
    ] {
        let error = of(chats(), yaml);
        assert!(error.contains(wanted), "{error}");
    }
    let chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n";
    let silent = of(file("silent.jsonl", chat), "{ loss_on: assistant }");
    assert!(silent.contains("silent.jsonl: line 1") && silent.contains("a chat without text of the assistant"), "{silent}");
    let config = fs::read_to_string(folder.path().join("config.json")).unwrap().replace("\"eos_token_id\": 2", "\"eos_token_id\": null");
    fs::write(folder.path().join("config.json"), config).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    let endless = of(file("plain.txt", "a cat\n"), "{ append_eos: true }");
    assert!(endless.contains("a model without an end-of-text token"), "{endless}");
}

#[test]
fn the_end_of_texts_is_a_token() {
    const END: i64 = 2;
    let folder = model("llama", &[LETTERS, SPECIAL]);
    let path = folder.path().join("texts.jsonl");
    // The second text ends with the token, and the third one fills a window.
    let filling = "a".repeat(30);
    fs::write(&path, format!("{{\"text\": \"a cat\"}}\n{{\"text\": \"a mat</s>\"}}\n{{\"text\": \"{filling}\"}}\n")).unwrap();
    let of = |yaml: &str| windows(folder.path(), &Data { text: Some(path.clone()), ..options(yaml) });
    let (with, without) = (of("{ append_eos: true }"), of("{}"));
    assert_eq!((of("{ append_eos: false }"), with.len()), (without.clone(), 3));
    let ids = |windows: &[Window]| windows.iter().map(|(ids, _)| ids.clone()).collect::<Vec<_>>();
    let mut expected = ids(&without);
    expected[0].push(END);
    assert_eq!((ids(&with), expected[1].last(), expected[2].len()), (expected.clone(), Some(&END), 32));
    assert_eq!(with[0].1.last(), Some(&(expected[0].len() - 2, END)));
    // A plain file is one text.
    let book = |yaml: &str| ids(&windows(folder.path(), &texts("book.txt", yaml))).concat();
    let (with, without) = (book("{ append_eos: true }"), book("{}"));
    assert_eq!(with, [without.clone(), vec![END]].concat());
    assert!(!without.contains(&END));
    let trained = |yaml: &str| losses(folder.path(), &Data { text: Some(path.clone()), ..options(yaml) }, finetune(1).into());
    assert!(difference(&trained("{ append_eos: true }"), &trained("{}")) > 1e-4);
}
