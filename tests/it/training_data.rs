//! Texts for training: the text of the assistant in chats (`scripts/goldens evaluation`), ends of texts,
//! texts mixed by weight, and packed texts.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::pass::{Distill, Finetune, Step, Student, Training};
use compress::{Model, Pipeline};
use compress_engine::data::{Batch, Data, DataSet, DataSets, LossOn, Order};
use compress_engine::evaluation::Subject;
use compress_engine::train::BatchSize;
use compress_engine::train::optimizer::Kind;

use crate::evaluation::{LETTERS, WORDS, batches, expected, model, options, refused, score, texts};
use crate::train::{furthest, weights, with_training};

const SPECIAL: (&str, &str) = ("special.json", "tokenizer_config.json");
const CHATS: [(&str, &str); 3] = [("merged.json", "tokenizer.json"), SPECIAL, ("answers.jinja", "chat_template.jinja")];

/// Tokens of a window, and the positions whose next token is predicted, each with that token.
type Window = (Vec<i64>, Vec<(usize, i64)>);

/// The window of a batch of one sample.
fn window(batch: &Batch) -> Window {
    (batch.inputs["input_ids"].to_vec2().unwrap().remove(0), batch.next_tokens().unwrap().unwrap().remove(0))
}

/// The windows of data, without padding.
fn windows(folder: &Path, data: &Data) -> Vec<Window> {
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

/// Masked tokens are the labels, so that encoders learn without others.
#[test]
fn masked_language_models_learn_from_texts() {
    let (folder, out) = (model("bert-masked-lm", &[WORDS]), tempfile::tempdir().unwrap());
    let data = texts("pairs.tsv", "{ header: false, text_column: 1, max_length: 12 }");
    let pass = Finetune {
        training: Training {
            masking: Some("0.5".parse().unwrap()),
            max_steps: Some(60),
            batch_size: BatchSize::Samples(5),
            learning_rate: 1e-2,
            ..Training::default()
        },
        ..Finetune::default()
    };
    let run = |name: &str, input: &Path, step: Step| {
        let pipeline = Pipeline::builder().pass(step).train(data.clone()).seed(3).force(true).build().unwrap();
        pipeline.run(Model::open(input).unwrap(), out.path().join(name))
    };
    let report = run("one", folder.path(), pass.clone().into()).unwrap();
    let curve = report.passes[0].details["training"]["curve"].as_array().unwrap();
    let mean = |steps: &[serde_json::Value]| steps.iter().map(|step| step["loss"].as_f64().unwrap()).sum::<f64>() / steps.len() as f64;
    assert!(curve.len() == 60 && mean(&curve[50..]) < 0.9 * mean(&curve[..5]), "{} {}", mean(&curve[..5]), mean(&curve[50..]));
    run("two", folder.path(), pass.clone().into()).unwrap();
    assert!(furthest(&weights(&out.path().join("one")), &weights(&out.path().join("two"))) == 0.0);
    let error = |input: &Path, step: Step| run("three", input, step).unwrap_err().to_string();
    assert!(error(folder.path(), with_training!(pass.clone(), masking: None).into()).contains("language-modelling"));
    let with_token = |token: &str| with_training!(pass.clone(), masking: Some(format!("{{ mask_token: {token} }}").parse().unwrap()));
    assert!(error(folder.path(), with_token("nosuch").into()).contains("the mask token `nosuch` is not in the vocabulary of"));
    // The id of a token is as good as its text.
    let tokenizer: serde_json::Value = serde_json::from_str(&fs::read_to_string(folder.path().join("tokenizer.json")).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap();
    let (token, id) = vocabulary.iter().max_by_key(|(_, id)| id.as_u64()).unwrap();
    run("text", folder.path(), with_token(&serde_json::to_string(token).unwrap()).into()).unwrap();
    run("id", folder.path(), with_token(&id.to_string()).into()).unwrap();
    assert!(furthest(&weights(&out.path().join("text")), &weights(&out.path().join("id"))) == 0.0);
    assert!(error(folder.path(), with_token("99999").into()).contains("the mask token has the id 99999"));
    assert!(error(model("llama", &[LETTERS]).path(), pass.into()).contains("needs a masked language model"));
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
    train(folder, data, step).0
}

/// Losses of all steps, and the weights after them.
fn train(folder: &Path, data: &Data, step: Step) -> (Vec<f64>, BTreeMap<String, Vec<f32>>) {
    let out = tempfile::tempdir().unwrap();
    let pipeline = Pipeline::builder().pass(step).train(Data { batch_size: None, ..data.clone() }).seed(3).build().unwrap();
    let report = pipeline.run(Model::open(folder).unwrap(), out.path().join("out")).unwrap();
    let curve = report.passes.last().unwrap().details["training"]["curve"].as_array().unwrap().clone();
    (curve.iter().map(|step| step["loss"].as_f64().unwrap()).collect(), weights(&out.path().join("out")))
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert!(a.len() == b.len() && !a.is_empty());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn finetune(steps: u64) -> Finetune {
    Finetune {
        training: Training { max_steps: Some(steps), batch_size: BatchSize::Samples(64), learning_rate: 3e-3, ..Training::default() },
        ..Finetune::default()
    }
}

fn distill(losses: &str) -> Distill {
    let student = Some(Student::Layers(vec![0]));
    Distill {
        student,
        training: Training {
            losses: losses.parse().unwrap(),
            max_steps: Some(3),
            batch_size: BatchSize::Samples(64),
            learning_rate: 3e-3,
            ..Training::default()
        },
        ..Distill::default()
    }
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

/// The windows in the order of a training, without padding.
fn shuffled(folder: &Path, data: &Data, order: Order) -> Vec<Window> {
    let subject = Subject::open(folder, 1).unwrap();
    let mut found = Vec::new();
    let order = Order { batch: Some(1), ..order };
    let set = DataSet::open(data, subject.target()).unwrap();
    set.for_each_in(order, |batch| {
        found.push(window(&batch));
        Ok(ControlFlow::Continue(()))
    })
    .unwrap();
    assert_eq!(found.len(), set.batches(order).unwrap());
    found
}

#[test]
fn texts_are_mixed_by_weight() {
    let folder = model("llama", &CHATS);
    let file = |name: &str, word: &str, count: usize| {
        let path = folder.path().join(name);
        fs::write(&path, (0..count).map(|n| format!("{{\"text\": \"{word} {}\"}}\n", &"abcdefghijkl"[n..])).collect::<String>()).unwrap();
        path
    };
    let (large, small) = (file("large.jsonl", "rain", 12), file("small.jsonl", "mat", 3));
    let part = |path: &Path, weight: f64| Data { text: Some(path.to_owned()), weight: Some(weight), ..Data::default() };
    let mix = Data { mix: vec![part(&large, 1.0), Data { append_eos: Some(true), ..part(&small, 3.0) }], ..Data::default() };
    let own = |index: usize| windows(folder.path(), &Data { weight: None, ..mix.mix[index].clone() });
    // Without a seed, every window of both texts, in proportion as long as possible.
    let in_order = windows(folder.path(), &mix);
    let is_small = |(ids, _): &Window| ids.last() == Some(&2);
    assert_eq!(in_order.iter().take(4).filter(|window| is_small(window)).count(), 3);
    let sorted = |mut windows: Vec<Window>| {
        windows.sort();
        windows
    };
    assert_eq!(sorted(in_order.clone()), sorted([own(0), own(1)].concat()));
    let limited = Data { samples: Some(5), ..mix.clone() };
    assert_eq!(windows(folder.path(), &limited), in_order[..5]);
    // With one, as many windows, drawn by weight, and the same after an interruption.
    let order = |seed: u64| Order { shuffle: Some(seed), ..Order::default() };
    let all: Vec<Vec<Window>> = (0..40).map(|seed| shuffled(folder.path(), &mix, order(seed))).collect();
    assert!(all.iter().all(|epoch| epoch.len() == 15 && epoch.iter().all(|window| in_order.contains(window))));
    let share = all.iter().flatten().filter(|window| is_small(window)).count() as f64 / 600.0;
    assert!((share - 0.75).abs() < 0.05, "{share}");
    assert!(all[3] == shuffled(folder.path(), &mix, order(3)) && all[3] != all[4]);
    assert_eq!(shuffled(folder.path(), &mix, Order { skip: 6, ..order(3) }), all[3][6..]);
    assert_eq!(shuffled(folder.path(), &limited, order(3)), all[3][..5]);
    // A first line that may be a sample is noted, as for a single text.
    let table = folder.path().join("table.csv");
    fs::write(&table, "1,one\n2,two\n").unwrap();
    let tables = options(&format!("{{ mix: [{{ text: {}, text_column: 1 }}] }}", table.display()));
    let subject = Subject::open(folder.path(), 1).unwrap();
    let notes = DataSet::open(&tables, subject.target()).unwrap().notes();
    assert!(notes.len() == 1 && notes[0].contains("table.csv was taken as the header"), "{notes:?}");
    // Chats of which only the answers are predicted, with a text.
    let chats = Data { loss_on: Some(LossOn::Assistant), ..part(&texts("answers.jsonl", "{}").text.unwrap(), 1.0) };
    let with_chats = Data { mix: vec![chats, part(&large, 2.0)], batch_size: Some(64), ..Data::default() };
    let expected = [expected_windows(), own(0)].concat();
    let batch = batches(folder.path(), &with_chats).unwrap().remove(0);
    let next = batch.next_tokens().unwrap().unwrap();
    assert_eq!((batch.samples, next.iter().map(Vec::len).sum::<usize>()), (expected.len(), expected.iter().map(|(_, next)| next.len()).sum()));
    assert_eq!(sorted(windows(folder.path(), &with_chats)), sorted(expected));
    let trained = losses(folder.path(), &with_chats, finetune(2).into());
    assert_eq!(trained, losses(folder.path(), &with_chats, finetune(2).into()));
    assert!(difference(&trained, &losses(folder.path(), &Data { mix: vec![with_chats.mix[1].clone()], ..with_chats.clone() }, finetune(2).into())) > 1e-3);
}

/// A training draws from all samples of a mixture, and reads every text of packed samples.
#[test]
fn trained_texts_are_not_held_out() {
    let folder = model("llama", &[LETTERS]);
    let plain = texts("book.txt", "{ max_length: 16 }");
    let held_out = |trained: &Data| {
        let mut count = 0;
        let subject = Subject::open(folder.path(), 1).unwrap();
        let take = |_| {
            count += 1;
            Ok(ControlFlow::Continue(()))
        };
        assert!(DataSets::default().for_each_held_out(&plain, 0, &[trained], subject.target(), take).unwrap());
        count
    };
    let mixed = Data { mix: vec![Data { text: plain.text.clone(), ..Data::default() }], max_length: plain.max_length, ..Data::default() };
    assert!(held_out(&Data { samples: Some(2), ..plain.clone() }) > 0);
    assert_eq!(held_out(&Data { samples: Some(2), ..mixed }), 0);
    assert_eq!(held_out(&Data { packing: Some(true), ..plain.clone() }), 0);
}

#[test]
fn unsuitable_mixtures_are_refused() {
    let folder = model("llama", &[LETTERS]);
    let mix = |yaml: &str| options(&format!("{{ mix: [{{ text: {} }}], {yaml} }}", texts("book.txt", "{}").text.unwrap().display()));
    assert!(refused(folder.path(), &mix("task: fidelity")).contains("`mix` mixes texts of language models"));
    let encoder = model("sentence-mean", &[("word-pieces.json", "tokenizer.json")]);
    assert!(refused(encoder.path(), &mix("max_length: 8")).contains("`mix` mixes texts of language models"));
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    let mut data = mix("max_length: 8");
    data.mix.push(Data { text: Some(empty), ..Data::default() });
    let subject = Subject::open(folder.path(), 1).unwrap();
    let set = DataSet::open(&data, subject.target()).unwrap();
    let error = set.for_each_in(Order { shuffle: Some(1), ..Order::default() }, |_| Ok(ControlFlow::Continue(()))).unwrap_err().to_string();
    assert!(error.contains("empty.txt: contains no samples"), "{error}");
}

/// Texts of different lengths, of which several fit into a window.
fn short_texts(folder: &Path) -> Data {
    let path = folder.join("short.jsonl");
    let text = |n: usize| format!("{{\"text\": \"{}\"}}\n", ["rain", "a red hat", "on our old barn", "mat", "big drops fell over it"][n % 5]);
    fs::write(&path, (0..14).map(text).collect::<String>()).unwrap();
    Data { text: Some(path), ..Data::default() }
}

/// Causal attention with and without a window, soft caps, rotary scaling and experts. The step is one of
/// gradient descent, so that the weights show the gradients.
#[test]
fn packed_texts_are_trained_like_separate_ones() {
    let step = |losses: &str| -> Step {
        let (optimizer, learning_rate, clip_norm, weight_decay) = (Kind::Sgd, 0.1, 0.0, 0.0);
        if losses.contains("soft") {
            return with_training!(distill(losses), optimizer, learning_rate, clip_norm, weight_decay, max_steps: Some(1)).into();
        }
        with_training!(finetune(1), losses: losses.parse().unwrap(), optimizer, learning_rate, clip_norm, weight_decay).into()
    };
    let cases = [
        ("llama", "{ hard: 1 }"),
        ("llama", "{ soft: 1, hidden: 1 }"),
        ("llama-rope-llama3", "{ hard: 1 }"),
        ("gemma2", "{ hard: 1 }"),
        ("mixtral", "{ hard: 1 }"),
    ];
    for (name, losses) in cases {
        let folder = model(name, &[LETTERS, SPECIAL]);
        let separate = Data { append_eos: Some(true), batch_size: Some(64), ..short_texts(folder.path()) };
        let packed = Data { packing: Some(true), ..separate.clone() };
        let [rows, texts] = [&packed, &separate].map(|data| batches(folder.path(), data).unwrap().remove(0));
        assert!(rows.samples <= texts.samples / 2, "{name}: {} rows of {} texts", rows.samples, texts.samples);
        let count = |batch: &Batch| batch.next_tokens().unwrap().unwrap().iter().map(Vec::len).sum::<usize>();
        assert_eq!(count(&rows), count(&texts), "{name}");
        let numbers = rows.inputs["attention_mask"].to_vec2::<i64>().unwrap();
        assert!(numbers.iter().all(|row| row[0] == 1 && row.iter().max() > Some(&1)), "{name}: {numbers:?}");
        let [(found, weights), (expected, expected_weights)] = [&packed, &separate].map(|data| train(folder.path(), data, step(losses)));
        assert!(difference(&found, &expected) < 1e-6 * expected[0], "{name}, {losses}: {found:?} instead of {expected:?}");
        assert!(furthest(&weights, &expected_weights) < 5e-6, "{name}, {losses}: {}", furthest(&weights, &expected_weights));
    }
}

#[test]
fn packing_is_refused_where_texts_would_affect_each_other() {
    let error = |name: &str, step: Step, evaluation: bool| {
        let folder = model(name, &[LETTERS, SPECIAL]);
        let data = Data { packing: Some(true), ..short_texts(folder.path()) };
        let pipeline = Pipeline::builder().pass(step).train(data.clone());
        let pipeline = if evaluation { pipeline.evaluation(data) } else { pipeline };
        let out = tempfile::tempdir().unwrap();
        pipeline.build().and_then(|pipeline| pipeline.run(Model::open(folder.path()).unwrap(), out.path().join("out"))).unwrap_err().to_string()
    };
    let learned = error("gpt2", finetune(1).into(), false);
    assert!(learned.contains("`packing`") && learned.contains("Positions depends on the position in the row"), "{learned}");
    let attention = error("llama", distill("{ soft: 1, attention: 1 }").into(), false);
    assert!(attention.contains("losses: attention") && attention.contains("`packing`"), "{attention}");
    let evaluation = error("llama", finetune(1).into(), true);
    assert!(evaluation.contains("data: evaluation") && evaluation.contains("`packing` applies only to training data"), "{evaluation}");
}

/// The predicted memory is that of the largest batch: the first batch has the shortest texts.
#[test]
fn memory_is_predicted_for_the_longest_texts() {
    let folder = model("bert-sequence-classification", &[WORDS]);
    let text = |words: usize| vec!["a"; words].join(" ");
    let rows = |lengths: &[usize]| lengths.iter().map(|words| format!("{},0\n", text(*words))).collect::<String>();
    let path = folder.path().join("texts.csv");
    fs::write(&path, format!("text,label\n{}", rows(&[[1; 4], [2; 4], [14; 4], [3; 4]].concat()))).unwrap();
    let data = Data { text: Some(path), ..options("{ label_column: label, batch_size: 4 }") };
    let lengths: Vec<_> = batches(folder.path(), &data).unwrap().iter().map(Batch::token_count).collect();
    assert_eq!(lengths, [3, 4, 16, 5].map(Some));
    // One epoch, more than one, and the first batches of one.
    for (epochs, max_steps) in [(Some(1), None), (None, Some(7)), (None, Some(1))] {
        let pass = Finetune { training: Training { batch_size: BatchSize::Samples(4), epochs, max_steps, ..Training::default() }, ..Finetune::default() };
        let pipeline = Pipeline::builder().pass(pass).train(Data { batch_size: None, ..data.clone() }).seed(3).build().unwrap();
        let report = pipeline.run(Model::open(folder.path()).unwrap(), tempfile::tempdir().unwrap().path().join("out")).unwrap();
        let memory = &report.passes[0].details["memory"];
        let phase = memory["phases"].as_array().unwrap().iter().find(|phase| phase["name"] == "activations").unwrap();
        // In the first step, the optimizer has no state while activations are in memory.
        let totals = (max_steps != Some(1)).then(|| [memory["predicted_bytes"].as_f64(), memory["peak_bytes"].as_f64()]);
        for [predicted, measured] in totals.into_iter().chain([["predicted_bytes", "measured_bytes"].map(|key| phase[key].as_f64())]) {
            let ratio = predicted.unwrap() / measured.unwrap();
            assert!((0.9..1.1).contains(&ratio), "{epochs:?}, {max_steps:?}: {ratio}: {memory}");
        }
    }
}
