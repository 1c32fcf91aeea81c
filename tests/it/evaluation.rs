//! Data sets and metrics, compared with PyTorch, Pillow and the library `tokenizers`
//! (`scripts/goldens evaluation`).
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress_engine::data::{Batch, Data, DataSet, Order, References, Task};
use compress_engine::evaluation::{Outcomes, Precision, Subject, evaluate};
use serde_json::Value;

use crate::common::golden;

pub fn expected() -> Value {
    serde_json::from_str(&fs::read_to_string(golden("evaluation/expected.json")).unwrap()).unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() { copy(&entry.path(), &target) } else { fs::copy(entry.path(), target).map(drop).unwrap() }
    }
}

/// A golden model with files of `golden/evaluation` under the file names of published models.
pub fn model(name: &str, extra: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy(&golden("models").join(name), folder.path());
    for (file, called) in extra {
        fs::copy(golden("evaluation").join(file), folder.path().join(called)).unwrap();
    }
    folder
}

pub const WORDS: (&str, &str) = ("word-pieces.json", "tokenizer.json");
pub const LETTERS: (&str, &str) = ("characters.json", "tokenizer.json");

pub fn options(yaml: &str) -> Data {
    serde_saphyr::from_str(yaml).unwrap()
}

/// The options with a path of `golden/evaluation`.
pub fn texts(file: &str, yaml: &str) -> Data {
    Data { text: Some(golden("evaluation").join(file)), ..options(yaml) }
}

pub fn score(folder: &Path, data: &Data) -> compress::Result<Outcomes> {
    crate::common::work(|work| {
        let mut subject = Subject::open(folder, 1)?;
        let data = DataSet::open(data, subject.target())?;
        evaluate(&data, &mut [subject.load(&Device::Cpu, work)?], &[], work)
    })
}

pub fn refused(folder: &Path, data: &Data) -> String {
    score(folder, data).unwrap_err().to_string()
}

pub fn batches(folder: &Path, data: &Data) -> compress::Result<Vec<Batch>> {
    let subject = Subject::open(folder, 1)?;
    let mut batches = Vec::new();
    DataSet::open(data, subject.target())?.for_each(|batch| {
        batches.push(batch);
        Ok(())
    })?;
    Ok(batches)
}

fn near(value: f64, wanted: &Value) {
    let wanted = wanted.as_f64().unwrap();
    assert!((value - wanted).abs() <= 1e-4 * wanted.abs().max(1.0), "{value} instead of {wanted}");
}

#[test]
fn classification_is_that_of_transformers() {
    let folder = model("bert-sequence-classification", &[WORDS]);
    for batch in [1, 5, 64] {
        let outcomes = score(folder.path(), &texts("labelled.csv", &format!("{{ label_column: label, batch_size: {batch} }}"))).unwrap();
        let (score, wanted) = (outcomes.models[0].score.clone().unwrap(), &expected()["classification"]);
        assert_eq!((outcomes.task, outcomes.samples as u64), (Task::Classification, wanted["samples"].as_u64().unwrap()));
        near(score.value, &wanted["accuracy"]);
        near(score.more["f1_macro"], &wanted["f1_macro"]);
        let [low, high] = score.ci95.unwrap();
        assert!(low < score.value && score.value < high);
    }
    // Rows without a label do not count.
    let file = folder.path().join("some.csv");
    let rows = fs::read_to_string(golden("evaluation/labelled.csv")).unwrap();
    let text = options("{ label_column: label, batch_size: 5 }");
    fs::write(&file, format!("{rows}98,red mat,-100\r\n99,old hat,-100\r\n")).unwrap();
    let outcomes = score(folder.path(), &Data { text: Some(file), ..text }).unwrap();
    let (score, wanted) = (outcomes.models[0].score.clone().unwrap(), &expected()["classification"]);
    assert_eq!(outcomes.samples as u64, wanted["samples"].as_u64().unwrap());
    near(score.value, &wanted["accuracy"]);
}

#[test]
fn similarity_is_that_of_transformers() {
    let folder = model("sentence-mean", &[WORDS]);
    let columns = "{ header: false, label_column: 0, text_column: 1, pair_column: 2, batch_size: 4 }";
    let outcomes = score(folder.path(), &texts("pairs.tsv", columns)).unwrap();
    let (score, wanted) = (outcomes.models[0].score.clone().unwrap(), &expected()["similarity"]);
    near(score.value, &wanted["spearman"]);
    near(score.more["pearson"], &wanted["pearson"]);
}

#[test]
fn perplexity_is_that_of_transformers() {
    let folder = model("llama", &[LETTERS]);
    let wanted = &expected()["perplexity"];
    for (name, stride) in [("disjoint", 15), ("overlapping", 4)] {
        let outcomes = score(folder.path(), &texts("book.txt", &format!("{{ max_length: 16, stride: {stride}, batch_size: 3 }}"))).unwrap();
        let score = outcomes.models[0].score.clone().unwrap();
        assert_eq!(outcomes.task, Task::LanguageModelling);
        assert_eq!(score.more["tokens"], wanted["tokens"].as_f64().unwrap());
        near(score.value, &wanted[name]);
    }
    let few = score(folder.path(), &texts("book.txt", "{ max_length: 16, samples: 3 }")).unwrap();
    assert_eq!((few.samples, few.models[0].score.as_ref().unwrap().more["tokens"]), (3, 45.0));
}

/// A score of -100 means that the pair has none, as for other tasks.
#[test]
fn pairs_without_a_score_are_excluded() {
    let folder = model("sentence-mean", &[WORDS]);
    let file = folder.path().join("some.tsv");
    let columns = "{ header: false, label_column: 0, text_column: 1, pair_column: 2 }";
    let pairs = fs::read_to_string(golden("evaluation/pairs.tsv")).unwrap();
    let with = |excluded: &str| {
        fs::write(&file, pairs.lines().map(|line| format!("{excluded}{line}\n")).collect::<String>()).unwrap();
        score(folder.path(), &Data { text: Some(file.clone()), ..options(columns) })
    };
    let outcomes = with("-100\tmat\that\n-100.0\thorse\tbarn\n").unwrap();
    near(outcomes.models[0].score.as_ref().unwrap().value, &expected()["similarity"]["spearman"]);
    assert_eq!(outcomes.samples, pairs.lines().count());
    let refused = |lines: &str| {
        fs::write(&file, lines).unwrap();
        score(folder.path(), &Data { text: Some(file.clone()), ..options(columns) }).unwrap_err().to_string()
    };
    let none = refused("-100\tmat\that\n-100\ta\tb\n");
    assert!(none.contains("contains no pair with a score"), "{none}");
    let one = refused("-100\tmat\that\n3\ta\tb\n");
    assert!(one.contains("at least two pairs with a score, but the data has 1 pair"), "{one}");
}

/// A byte order mark is not a token of the text.
#[test]
fn windows_begin_after_a_byte_order_mark() {
    let folder = model("llama", &[LETTERS]);
    let file = folder.path().join("marked.txt");
    fs::write(&file, format!("\u{feff}{}", fs::read_to_string(golden("evaluation/book.txt")).unwrap())).unwrap();
    let first = |data: Data| batches(folder.path(), &data).unwrap()[0].inputs["input_ids"].flatten_all().unwrap().to_vec1::<i64>().unwrap();
    for yaml in ["{ max_length: 16 }", "{ max_length: 16, samples: 1, sampling: spread }"] {
        assert_eq!(first(Data { text: Some(file.clone()), ..options(yaml) }), first(texts("book.txt", yaml)), "{yaml}");
    }
}

#[test]
fn chats_are_those_of_transformers() {
    let special = [LETTERS, ("special.json", "tokenizer_config.json")];
    let folder = model("llama", &[special[0], special[1], ("chat_template.jinja", "chat_template.jinja")]);
    let wanted = &expected()["chats"];
    let outcomes = score(folder.path(), &texts("chats.jsonl", "{ max_length: 16 }")).unwrap();
    let perplexity = outcomes.models[0].score.clone().unwrap();
    assert_eq!(perplexity.more["tokens"], wanted["count"].as_f64().unwrap());
    near(perplexity.value, &wanted["perplexity"]);
    let made: Vec<Vec<i64>> = batches(folder.path(), &texts("chats.jsonl", "{ task: fidelity, batch_size: 1 }"))
        .unwrap()
        .iter()
        .map(|batch| batch.inputs["input_ids"].flatten_all().unwrap().to_vec1().unwrap())
        .collect();
    // The model has 32 positions.
    let tokens = wanted["tokens"].as_array().unwrap().iter().map(|row| row.as_array().unwrap().iter().take(32).collect::<Vec<_>>());
    assert_eq!(serde_json::json!(made), serde_json::json!(tokens.collect::<Vec<_>>()));

    let file = folder.path().join("wrong.jsonl");
    let told = |lines: &str, more: &str| {
        fs::write(&file, lines).unwrap();
        refused(folder.path(), &Data { text: Some(file.clone()), ..options(&format!("{{ task: fidelity{more} }}")) })
    };
    let chat = r#"{"messages": [{"role": "user", "content": "a"}], "b": "c"}"#;
    assert!(told(r#"{"messages": []}"#, "").contains("line 1: the chat has no messages"));
    assert!(told(r#"{"messages": [{"content": "a"}]}"#, "").contains("line 1: a message of a chat has no `role`"));
    assert!(told(chat, ", pair_column: b").contains("line 1: chats do not support `pair_column`"));
    assert!(told(&format!("{{\"text\": \"a\"}}\n{chat}"), "").contains("line 2 is a chat, but the first line is a text"));
    assert!(told(&format!("{chat}\n{{\"text\": \"a\"}}"), "").contains("line 2 is a text, but the first line is a chat"));
    assert!(told(r#"{"messages": "[]"}"#, "").contains("line 1: `messages` is not a list"));
    assert!(told(r#"{"messages": [{"role": "user", "content": "a"}], "tools": "[]"}"#, "").contains("line 1: `tools` is not a list of objects"));
    assert!(told(r#"{"text": ["a"]}"#, "").contains("must be a string, a number or a boolean"));
    assert!(told(r#"{"messages": [{"role": "user", "content": 1}]}"#, "").contains("line 1: "));
    let bare = model("llama", &special);
    assert!(refused(bare.path(), &texts("chats.jsonl", "{}")).contains("a chat without chat_template.jinja"));
}

#[test]
fn outputs_in_16_bits_are_close() {
    let folder = model("llama", &[LETTERS]);
    let data = texts("book.txt", "{ max_length: 16, batch_size: 3 }");
    let value = |precision| {
        crate::common::work(|work| {
            let mut subject = Subject::open(folder.path(), 1)?.with_precision(precision);
            let data = DataSet::open(&data, subject.target())?;
            evaluate(&data, &mut [subject.load(&Device::Cpu, work)?], &[], work)
        })
        .unwrap()
        .models[0]
            .score
            .as_ref()
            .unwrap()
            .value
    };
    let plain = value(Precision::F32);
    for precision in [Precision::Bf16, Precision::F16] {
        let ratio = value(precision) / plain;
        assert!(ratio != 1.0 && (ratio - 1.0).abs() < 0.01, "{precision:?}: {ratio}");
    }
}

#[test]
fn images_are_those_of_pillow() {
    let wanted = candle_core::safetensors::load(golden("evaluation/pixels.safetensors"), &Device::Cpu).unwrap();
    for name in ["vit-image-classification", "resnet-basic"] {
        let folder = model(name, &[(&format!("{name}.json"), "preprocessor_config.json")]);
        let data = Data { images: Some(golden("evaluation/images")), ..options("{ batch_size: 4 }") };
        let batches = batches(folder.path(), &data).unwrap();
        let pixels: Vec<&Tensor> = batches.iter().map(|b| &b.inputs["pixel_values"]).collect();
        let difference = (Tensor::cat(&pixels, 0).unwrap() - &wanted[name]).unwrap().abs().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // A difference of one byte value is 1 / 255 / 0.224. Both implementations round to bytes, from
        // sums that differ in the last bits.
        let largest = difference.iter().copied().fold(0.0, f32::max);
        let steps = difference.iter().filter(|d| **d > 1e-4).count();
        assert!(largest <= 0.0176 && steps * 100 < difference.len(), "{name}: {largest}, {steps} of {}", difference.len());
        let outcomes = score(folder.path(), &data).unwrap();
        near(outcomes.models[0].score.as_ref().unwrap().value, &expected()["images"][name]);
    }
}

/// A network that classifies 2 x 3 numbers by the index of the largest.
fn largest_of_six(shape: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let nodes = if shape.contains(',') { r#"{"name": "flat", "op": "Flatten", "inputs": ["x"]}, "# } else { "" };
    let last = if nodes.is_empty() { "x" } else { "flat" };
    let graph = format!(
        r#"{{"inputs": {{"x": {{"element": "float", "shape": ["batch", {shape}]}}}}, "nodes": [{nodes}{{"name": "fc", "op": "Linear", "inputs": ["{last}", "w"]}}], "outputs": {{"logits": "fc"}}}}"#
    );
    fs::write(folder.path().join("graph.json"), graph).unwrap();
    let identity = Tensor::eye(6, candle_core::DType::F32, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("w".to_owned(), identity)].into(), folder.path().join("model.safetensors")).unwrap();
    folder
}

const ROWS: [[u8; 6]; 4] = [[9, 1, 1, 1, 1, 1], [1, 1, 9, 1, 1, 1], [1, 1, 1, 1, 1, 200], [1, 1, 1, 1, 7, 1]];
const CLASSES: [u8; 4] = [0, 2, 5, 3];

fn idx(path: &Path, sizes: &[u32], bytes: &[u8]) {
    let mut file = vec![0, 0, 8, sizes.len() as u8];
    sizes.iter().for_each(|size| file.extend(size.to_be_bytes()));
    file.extend(bytes);
    if path.extension().is_some_and(|e| e == "gz") {
        let mut packed = flate2::write::GzEncoder::new(fs::File::create(path).unwrap(), flate2::Compression::fast());
        packed.write_all(&file).unwrap();
        packed.finish().unwrap();
    } else {
        fs::write(path, file).unwrap();
    }
}

#[test]
fn idx_files_are_read() {
    let files = tempfile::tempdir().unwrap();
    let (images, labels) = (files.path().join("images.gz"), files.path().join("labels"));
    idx(&images, &[4, 2, 3], &ROWS.concat());
    idx(&labels, &[4], &CLASSES);
    let data = Data { images: Some(images.clone()), labels: Some(labels.clone()), ..options("{ batch_size: 3 }") };
    for shape in ["1, 2, 3", "6"] {
        let folder = largest_of_six(shape);
        assert_eq!(score(folder.path(), &data).unwrap().models[0].score.as_ref().unwrap().value, 0.75);
        let first = &batches(folder.path(), &data).unwrap()[0];
        assert!((first.inputs["x"].flatten_all().unwrap().to_vec1::<f32>().unwrap()[0] - 9.0 / 255.0).abs() < 1e-7);
        assert_eq!(first.references, References::Classes([0, 2, 5].map(Some).to_vec()));
    }
    let folder = largest_of_six("1, 2, 3");
    idx(&labels, &[3], &CLASSES[..3]);
    assert!(refused(folder.path(), &data).contains("contains 3 labels"));
    idx(&labels, &[4], &[0, 2, 6, 3]);
    assert!(refused(folder.path(), &data).contains("label 2: class 6 is out of range, the model has 6"));
    idx(&labels, &[4], &CLASSES);
    idx(&images, &[4, 2, 3], &ROWS.concat()[..20]);
    assert!(refused(folder.path(), &data).contains("is truncated: it should have 4 samples"));
    idx(&images, &[4, 3, 3], &[ROWS.concat(), ROWS[..2].concat()].concat());
    assert!(refused(folder.path(), &data).contains("is 3 x 3"), "{}", refused(folder.path(), &data));
    idx(&images, &[0, 2, 3], &[]);
    idx(&labels, &[0], &[]);
    assert!(refused(folder.path(), &data).contains("contains no samples"));
}

#[test]
fn arrays_are_read_from_both_kinds_of_files() {
    let files = tempfile::tempdir().unwrap();
    let plain = files.path().join("a.safetensors");
    let rows = Tensor::from_vec(ROWS.concat(), (4, 2, 3), &Device::Cpu).unwrap();
    let labels = Tensor::new(&CLASSES.map(i64::from), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("rows".to_owned(), rows), ("labels".to_owned(), labels)].into(), &plain).unwrap();
    let folder = largest_of_six("1, 2, 3");
    let both = [plain, golden("evaluation/arrays.npz")];
    for path in &both {
        let data = Data { arrays: Some(path.clone()), ..options("{ batch_size: 3 }") };
        assert_eq!(score(folder.path(), &data).unwrap().models[0].score.as_ref().unwrap().value, 0.75, "{}", path.display());
        let scaled = Data { rescale: Some(0.5), mean: vec![1.0], ..data.clone() };
        let first = &batches(folder.path(), &scaled).unwrap()[0];
        assert_eq!(first.inputs["x"].flatten_all().unwrap().to_vec1::<f32>().unwrap()[..2], [3.5, -0.5]);
        let named = |yaml: &str| refused(folder.path(), &Data { arrays: Some(path.clone()), ..options(yaml) });
        assert!(named("{ label_column: label }").contains("no array `label`; it contains `"));
        assert!(named("{ inputs: { y: rows } }").contains("the model has no input `y`; its inputs are `x`"));
        let error = named("{ inputs: { x: labels } }");
        assert!(error.contains("has rows of shape []"), "{error}");
    }
    for (shape, message) in [(&[4, 1, 3, 2][..], "numpy.transpose(array, (0, 1, 3, 2))"), (&[4, 6], "has rows of shape [6], but the model's input `x` is")] {
        let permuted = files.path().join("permuted.safetensors");
        let rows = Tensor::from_vec(ROWS.concat(), shape, &Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("rows".to_owned(), rows)].into(), &permuted).unwrap();
        let error = refused(folder.path(), &Data { arrays: Some(permuted), ..Data::default() });
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn data_that_does_not_match_the_model_is_rejected_by_name() {
    let bert = model("bert-sequence-classification", &[WORDS]);
    let wrong = |yaml: &str| refused(bert.path(), &texts("labelled.csv", yaml));
    assert!(wrong("{ label_column: class }").contains("no column `class`; the columns are `id`, `text`, `label`"));
    assert!(wrong("{ text_column: id, label_column: text }").contains("is not a class; the labels in config.json are LABEL_0, LABEL_1, LABEL_2"));
    assert!(wrong("{ label_column: id }").contains("line 5: class 3 is out of range, the model has 3"));
    assert!(wrong("{ label_column: label, max_length: 17 }").contains("`max_length` is 17, but the model accepts at most 16 tokens"));
    let task = wrong("{ task: language-modelling }");
    assert!(task.contains("needs an output `logits` with 3 dimensions; the outputs of the model are `"), "{task}");
    assert!(wrong("{ task: embedding }").contains("`pair_column`"));
    assert!(wrong("{ stride: 2, label_column: label }").contains("`stride`"));
    assert!(refused(bert.path(), &texts("missing.csv", "{ label_column: label }")).contains("missing.csv"));
    assert!(refused(bert.path(), &Data { images: Some(golden("evaluation/images")), ..Data::default() }).contains("but this is a text model"));
    let bare = model("bert-sequence-classification", &[]);
    assert!(refused(bare.path(), &texts("labelled.csv", "{ label_column: label }")).contains("without tokenizer.json"));
    let masked = model("bert-masked-lm", &[WORDS]);
    assert!(refused(masked.path(), &texts("book.txt", "{ task: language-modelling }")).contains("masked language model"));
    let vit = model("vit-image-classification", &[]);
    let wrong = refused(vit.path(), &Data { images: Some(golden("evaluation/images")), ..Data::default() });
    assert!(wrong.contains(".png: is ") && wrong.contains("is any x 3 x 12 x 12: set `resize`"), "{wrong}");
    let llama = model("llama", &[LETTERS]);
    assert!(refused(llama.path(), &texts("book.txt", "{ max_length: 8, stride: 9 }")).contains("only 7 tokens"));
    let answers = llama.path().join("answers.jsonl");
    fs::write(&answers, "{\"prompt\": \"abc\", \"answer\": \"abcd\"}\n").unwrap();
    for (option, task) in [("pair_column", None), ("label_column", Some(Task::LanguageModelling))] {
        let column = |name: &str| Some(name.parse().unwrap());
        let mut data = Data { text: Some(answers.clone()), text_column: column("prompt"), task, ..Data::default() };
        *if option == "pair_column" { &mut data.pair_column } else { &mut data.label_column } = column("answer");
        assert!(refused(llama.path(), &data).contains(&format!("`{option}` does not apply")), "{option}");
    }
    let empty = bert.path().join("empty.txt");
    fs::write(&empty, "\n").unwrap();
    assert!(refused(bert.path(), &Data { text: Some(empty), task: Some(Task::Fidelity), ..Data::default() }).contains("contains no samples"));
}

#[test]
fn a_folder_without_known_names_of_classes_must_have_as_many() {
    let files = tempfile::tempdir().unwrap();
    for (name, n) in [("cat", 0), ("dog", 1)] {
        fs::create_dir(files.path().join(name)).unwrap();
        fs::copy(golden(&format!("evaluation/images/LABEL_{n}/{n}.png")), files.path().join(name).join("a.png")).unwrap();
    }
    let vit = model("vit-image-classification", &[("vit-image-classification.json", "preprocessor_config.json")]);
    let data = Data { images: Some(files.path().to_owned()), ..Data::default() };
    assert!(refused(vit.path(), &data).contains("has 2 folders, but the model has 5 classes"));
    fs::write(files.path().join("dog/a.png"), "no picture").unwrap();
    let unlabelled = Data { task: Some(Task::Fidelity), ..data };
    assert!(batches(vit.path(), &unlabelled).unwrap_err().to_string().contains("a.png"));
}

/// Nested folders belong to the class of the folder that contains them, as in torchvision's `ImageFolder`.
#[test]
fn class_folders_are_read_recursively_and_need_images() {
    let vit = model("vit-image-classification", &[("vit-image-classification.json", "preprocessor_config.json")]);
    let files = tempfile::tempdir().unwrap();
    copy(&golden("evaluation/images"), files.path());
    let data = Data { images: Some(files.path().to_owned()), ..options("{ batch_size: 16 }") };
    let classes = || match batches(vit.path(), &data).unwrap().remove(0).references {
        References::Classes(classes) => classes,
        other => panic!("{other:?}"),
    };
    let usual = classes();
    let nested = files.path().join("LABEL_1/more/deep");
    fs::create_dir_all(&nested).unwrap();
    fs::rename(files.path().join("LABEL_1/6.png"), nested.join("6.png")).unwrap();
    assert_eq!(classes(), usual);
    // Files that are not read do not change the samples, except in a class that has no other files.
    for name in ["LABEL_1/a.gif", "LABEL_1/labels.txt", ".hidden", "README.md", "stray.png"] {
        fs::write(files.path().join(name), "").unwrap();
    }
    fs::create_dir(files.path().join(".cache")).unwrap();
    assert_eq!(classes(), usual);
    let subject = Subject::open(vit.path(), 1).unwrap();
    let notes = DataSet::open(&data, subject.target()).unwrap().notes();
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert!(notes[0].starts_with("1 image of an unsupported format is not read") && notes[0].contains("a.gif"), "{notes:?}");
    assert!(notes[1].starts_with("1 image outside of the class folders is not read, such as stray.png"), "{notes:?}");
    assert_eq!(notes[2], "4 other or hidden files are not read");
    fs::remove_dir_all(files.path().join("LABEL_1/more")).unwrap();
    fs::remove_file(files.path().join("LABEL_1/1.png")).unwrap();
    let error = refused(vit.path(), &data);
    assert!(error.contains("LABEL_1: contains no images: expected files with the extensions png") && error.contains("remove the class folder"), "{error}");
}

/// Token ids of the sample of a text file.
fn ids(folder: &Path, text: &str) -> compress::Result<Vec<Vec<i64>>> {
    let file = folder.join("text.txt");
    fs::write(&file, format!("{text}\n")).unwrap();
    let data = Data { text: Some(file), ..options("{}") };
    Ok(batches(folder, &data)?.iter().map(|batch| batch.inputs["input_ids"].flatten_all().unwrap().to_vec1().unwrap()).collect())
}

#[test]
fn texts_are_lowercased_and_truncated_by_the_configuration() {
    let place = model("sentence-mean", &[WORDS]);
    let folder = place.path();
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    let (upper, lower) = ("THE RAIN", "the rain");
    let plain = ids(folder, lower).unwrap();
    assert_eq!(ids(folder, upper).unwrap(), plain, "the tokenizer's own normalizer writes in lower case");

    // As in BertTokenizer of transformers 4 and 5, the configuration takes precedence over tokenizer.json.
    write("tokenizer_config.json", r#"{"tokenizer_class": "BertTokenizer", "do_lower_case": false}"#);
    assert_ne!(ids(folder, upper).unwrap(), plain);
    // As in sentence-transformers, texts are converted to lower case before tokenization.
    write("sentence_bert_config.json", r#"{"max_seq_length": 12, "do_lower_case": true}"#);
    assert_eq!(ids(folder, upper).unwrap(), plain);
    fs::remove_file(folder.join("sentence_bert_config.json")).unwrap();
    write("sentence_roberta_config.json", r#"{"max_seq_length": 3, "do_lower_case": false}"#);
    assert_eq!(ids(folder, lower).unwrap()[0].len(), 3);
    // The class that reads only tokenizer.json.
    write("tokenizer_config.json", r#"{"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": false}"#);
    assert_eq!(ids(folder, upper).unwrap(), ids(folder, lower).unwrap());

    write("config_sentence_transformers.json", r#"{"prompts": {"query": "query: "}, "default_prompt_name": "query"}"#);
    let refused = ids(folder, lower).unwrap_err().to_string();
    assert!(refused.contains("config_sentence_transformers.json: `default_prompt_name` of \"query\" is not supported"), "{refused}");
}

/// The expected ids are those of `AutoTokenizer` of transformers 5.
#[test]
fn truncation_side_and_token_types_follow_from_the_configuration() {
    let place = model("sentence-mean", &[WORDS]);
    let folder = place.path();
    fs::write(folder.join("pairs.csv"), "text,other\na b c d e,f g\n").unwrap();
    let read = |settings: &str, yaml: &str| {
        fs::write(folder.join("tokenizer_config.json"), settings).unwrap();
        batches(folder, &Data { text: Some(folder.join("pairs.csv")), ..options(yaml) })
    };
    let input =
        |settings: &str, yaml: &str, name: &str| -> Vec<i64> { read(settings, yaml).unwrap()[0].inputs[name].flatten_all().unwrap().to_vec1().unwrap() };
    let single = "{ task: fidelity, max_length: 4 }";
    let [right, left] = [[2i64, 5, 6, 3], [2, 8, 9, 3]];
    assert_eq!(input("{}", single, "input_ids"), right);
    assert_eq!(input(r#"{"truncation_side": "left"}"#, single, "input_ids"), left);
    let refused = read(r#"{"truncation_side": "middle"}"#, single).unwrap_err().to_string();
    assert!(refused.contains("tokenizer_config.json: `truncation_side` is \"middle\""), "{refused}");
    let pair = "{ task: fidelity, pair_column: other }";
    let (typed, zeros) = ([0i64, 0, 0, 0, 0, 0, 0, 1, 1, 1], [0i64; 10]);
    for (settings, expected) in [
        ("{}", typed),
        (r#"{"tokenizer_class": "BertTokenizer"}"#, typed),
        (r#"{"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}"#, zeros),
        (r#"{"tokenizer_class": "TokenizersBackend"}"#, zeros),
        (r#"{"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}"#, typed),
    ] {
        assert_eq!(input(settings, pair, "token_type_ids"), expected, "{settings}");
    }
    // The side in tokenizer.json is the default.
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    tokenizer["truncation"]["direction"] = "Left".into();
    fs::write(&path, tokenizer.to_string()).unwrap();
    assert_eq!(input("{}", single, "input_ids"), left);
    assert_eq!(input(r#"{"truncation_side": "right"}"#, single, "input_ids"), right);
}

#[test]
fn unknown_poolings_are_rejected_by_name() {
    let place = model("sentence-mean", &[]);
    let path = place.path().join("1_Pooling/config.json");
    let usual: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let refused = |key: &str, value: Value| {
        let mut changed = usual.clone();
        changed[key] = value;
        fs::write(&path, changed.to_string()).unwrap();
        compress::Model::open(place.path()).unwrap().graph().unwrap_err().to_string()
    };
    for (key, value) in [("pooling_mode_max_tokens", 1.into()), ("pooling_mode", "median".into()), ("pooling_mode", serde_json::json!(["mean", "median"]))] {
        let error = refused(key, value);
        assert!(error.contains(&format!("`{key}`")) && error.contains("1_Pooling/config.json"), "{key}: {error}");
    }
}

/// Modules may be outside of the model folder as long as only weights are processed, and modules without
/// weights are opened when the model is run.
#[test]
fn folders_of_modules_are_found() {
    let place = model("sentence-dense", &[]);
    let open = || compress::Model::open(place.path());
    let list = place.path().join("modules.json");
    let usual = fs::read_to_string(&list).unwrap();
    let expected = open().unwrap().graph().unwrap().to_string();
    fs::write(&list, usual.replace("\"1_Pooling\"", "\"./1_Pooling/\"").replace("\"2_Dense\"", "\"./2_Dense\"")).unwrap();
    assert_eq!(open().unwrap().graph().unwrap().to_string(), expected);
    fs::write(&list, usual.replace("\"1_Pooling\"", "\"../1_Pooling\"")).unwrap();
    let error = open().unwrap().graph().unwrap_err().to_string();
    assert!(error.contains("outside the model: `../1_Pooling`"), "{error}");
    // Passes over weights do not need to support all modules: unsupported ones are copied and reported.
    fs::write(&list, "{}").unwrap();
    let opened = open().unwrap();
    assert!(opened.weights.folders.is_empty() && opened.auxiliary.files.iter().any(|file| file.ends_with("2_Dense/model.safetensors")));
    let notes = opened.auxiliary.notes(place.path());
    assert!(notes.iter().any(|note| note.contains("modules.json") && note.contains("cannot be run")), "{notes:?}");
    let error = opened.graph().unwrap_err().to_string();
    assert!(error.contains("modules.json"), "{error}");
}

#[test]
fn unknown_modules_are_rejected_by_name() {
    let place = model("sentence-dense", &[]);
    let refused = |file: &str, before: &str, after: &str| {
        let path = place.path().join(file);
        let usual = fs::read_to_string(&path).unwrap();
        assert!(usual.contains(before), "{usual}");
        fs::write(&path, usual.replacen(before, after, 1)).unwrap();
        let error = compress::Model::open(place.path()).and_then(|model| model.graph()).unwrap_err().to_string();
        fs::write(&path, usual).unwrap();
        error
    };
    for (file, before, after, told) in [
        ("modules.json", "layer_norm.LayerNorm", "cnn.CNN", "module `CNN`"),
        ("modules.json", "sentence_transformers.base.modules.dense.Dense", "pylate.models.Dense", "module `pylate.models.Dense`"),
        ("modules.json", "\"2_Dense\"", "\"../2_Dense\"", "outside the model"),
        ("2_Dense/config.json", "torch.nn.modules.activation.Tanh", "torch.nn.Softmax", "2_Dense/config.json: `activation_function` of \"torch.nn.Softmax\""),
        ("2_Dense/config.json", "torch.nn.modules.activation.Tanh", "mine.Tanh", "`activation_function` of \"mine.Tanh\""),
        ("2_Dense/config.json", "\"in_features\": 16", "\"in_features\": 15", "`in_features` is 15, but the weights of the module have 16"),
        ("2_Dense/config.json", "\"module_input_name\": \"sentence_embedding\"", "\"module_input_name\": \"other\"", "reads `other`"),
        ("2_Dense/config.json", "\"bias\": true", "\"bias\": 1", "2_Dense/config.json: `bias` is 1"),
    ] {
        let error = refused(file, before, after);
        assert!(error.contains(told), "{after}: {error}");
    }
    fs::remove_file(place.path().join("2_Dense/model.safetensors")).unwrap();
    let error = compress::Model::open(place.path()).unwrap().graph().unwrap_err().to_string();
    assert!(error.contains("2_Dense/linear.weight"), "{error}");
}

/// Positions are counted from the padding token's id plus one.
#[test]
fn texts_are_limited_by_the_position_embeddings() {
    let place = model("mpnet", &[WORDS]);
    let found = ids(place.path(), &"the rain ".repeat(40)).unwrap();
    assert_eq!(found[0].len(), 38);
}

#[test]
fn counted_samples_are_those_that_run() {
    let files = tempfile::tempdir().unwrap();
    let (bert, llama) = (model("bert-sequence-classification", &[WORDS]), model("llama", &[LETTERS]));
    let open = |folder: &Path, name: &str, text: &str, yaml: &str| {
        let path = files.path().join(name);
        fs::write(&path, text).unwrap();
        let subject = Subject::open(folder, 1).unwrap();
        DataSet::open(&Data { text: Some(path), ..options(yaml) }, subject.target()).unwrap()
    };
    let check = |data: &DataSet, wanted: usize| {
        let mut seen = 0;
        data.for_each(|batch| {
            seen += batch.samples;
            Ok(())
        })
        .unwrap();
        assert_eq!((seen, data.count().unwrap(), data.samples()), (wanted, wanted, Some(wanted)));
        assert_eq!(data.batches(Order { batch: Some(8), ..Order::default() }).unwrap(), wanted.div_ceil(8));
        assert_eq!(data.batches(Order { batch: Some(1), part: (1, 2), skip: 1, ..Order::default() }).unwrap(), (wanted / 2).saturating_sub(1));
    };
    let fidelity = "task: fidelity";
    check(&open(bert.path(), "blank.txt", "a\n\n b\n   \n\nc", fidelity), 3);
    check(&open(bert.path(), "blank.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \"b\\n\\nc\"}\n", fidelity), 2);
    check(&open(bert.path(), "lines.csv", "text,label\n\"a\nb\n\nc\",1\n\nd,0\n\"e\n\",2\n", "label_column: label"), 3);
    check(&open(bert.path(), "cap.csv", "text\na\nb\nc\n", "{ task: fidelity, samples: 2 }"), 2);
    check(&open(bert.path(), "high.csv", "text\na\nb\nc\n", "{ task: fidelity, samples: 200 }"), 3);
    // Ten windows of fifteen letters (the tokenizer adds one token before them), independent of the
    // limit of samples.
    let windows = open(llama.path(), "book.txt", &"abcdefghijklmno".repeat(10)[1..], "{ max_length: 16, samples: 1000 }");
    assert_eq!(windows.samples(), None, "a cap is no count");
    windows.count().unwrap();
    check(&windows, 10);
}

/// A tokenizer that appends a token to each text, as those of T5 and Qwen3-Embedding do.
#[test]
fn windows_do_not_contain_the_token_that_a_tokenizer_appends() {
    let llama = model("llama", &[LETTERS]);
    let windows = |appends: bool| {
        let path = llama.path().join("tokenizer.json");
        let mut tokenizer: Value = serde_json::from_slice(&fs::read(golden("evaluation").join(LETTERS.0)).unwrap()).unwrap();
        if appends {
            let processor = &mut tokenizer["post_processor"];
            processor["single"].as_array_mut().unwrap().push(serde_json::json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } }));
            processor["special_tokens"]["</s>"] = serde_json::json!({ "id": "</s>", "ids": [2], "tokens": ["</s>"] });
        }
        fs::write(path, tokenizer.to_string()).unwrap();
        let found = batches(llama.path(), &texts("book.txt", "{ max_length: 16, samples: 5 }")).unwrap();
        found.iter().flat_map(|batch| batch.inputs["input_ids"].to_vec2::<i64>().unwrap()).collect::<Vec<_>>()
    };
    let appended = windows(true);
    assert!(appended.iter().all(|window| window[0] == 1 && !window.contains(&2)), "{appended:?}");
    assert_eq!(appended, windows(false));
}

/// Windows with `sampling: spread` start at lines, from the first to the last part of the file.
#[test]
fn spread_windows_cover_a_text() {
    let (files, llama) = (tempfile::tempdir().unwrap(), model("llama", &[LETTERS]));
    let path = files.path().join("text.txt");
    let letter = |line: usize| char::from(b'a' + (line / 250) as u8);
    let line = |line: usize| format!("{}\n", letter(line).to_string().repeat(39));
    fs::write(&path, (0..5_000).map(line).collect::<String>()).unwrap();
    let windows = |yaml: &str| {
        let found = batches(llama.path(), &Data { text: Some(path.clone()), ..options(yaml) }).unwrap();
        found.iter().flat_map(|batch| batch.inputs["input_ids"].to_vec2::<i64>().unwrap()).collect::<Vec<_>>()
    };
    let spread = windows("{ max_length: 16, samples: 10, sampling: spread }");
    let whole = windows("{ max_length: 16 }");
    let text = fs::read_to_string(&path).unwrap();
    for (part, window) in spread.iter().enumerate() {
        fs::write(files.path().join("part.txt"), &text[part * text.len() / 10..]).unwrap();
        let yaml = "{ max_length: 16, samples: 1 }";
        let first = batches(llama.path(), &Data { text: Some(files.path().join("part.txt")), ..options(yaml) }).unwrap();
        assert_eq!(*window, first[0].inputs["input_ids"].to_vec2::<i64>().unwrap()[0], "part {part}");
    }
    assert_eq!(spread, windows("{ max_length: 16, samples: 10, sampling: spread, batch_size: 3 }"), "the same for every batch size");
    let few = windows("{ max_length: 16, samples: 10 }");
    assert!(few == windows("{ max_length: 16, samples: 10, sampling: first }") && few == whole[..10] && few != spread);
    for (file, yaml, reason) in [
        ("chats.jsonl", "{ samples: 2, sampling: spread }", "plain text"),
        ("book.txt", "{ sampling: spread }", "requires `samples`"),
        ("book.txt", "{ samples: 2, sampling: spread, task: fidelity }", "task: language-modelling"),
    ] {
        let error = batches(llama.path(), &texts(file, yaml)).unwrap_err().to_string();
        assert!(error.contains(reason), "{yaml}: {error}");
    }
}

/// A text that is longer than the chunks of the tokenizer, in one line and without spaces.
#[test]
fn long_lines_and_scripts_without_blanks_are_text() {
    let files = tempfile::tempdir().unwrap();
    let llama = model("llama", &[LETTERS]);
    for (name, unit) in [("spaced", "ab cd efg "), ("chinese", "漢字かな交じり文")] {
        let path = files.path().join(format!("{name}.txt"));
        fs::write(&path, format!("\n{}", unit.repeat((5 << 20) / unit.len()))).unwrap();
        let subject = Subject::open(llama.path(), 1).unwrap();
        let data = DataSet::open(&Data { text: Some(path), ..options("max_length: 32") }, subject.target()).unwrap();
        assert!(data.count().unwrap() > (5 << 20) / 3 / 32, "{name}");
    }
}

#[test]
fn numbers_of_arrays_are_classes_by_index() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("a.safetensors");
    let folder = largest_of_six("6");
    let save = |labels: Tensor| {
        let rows = Tensor::from_vec(ROWS.concat(), (4, 6), &Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("rows".to_owned(), rows), ("labels".to_owned(), labels)].into(), &path).unwrap();
    };
    save(Tensor::new(&CLASSES.map(i64::from), &Device::Cpu).unwrap());
    fs::write(folder.path().join("config.json"), r#"{"id2label": {"0": "5", "1": "4", "2": "3", "3": "2", "4": "1", "5": "0"}}"#).unwrap();
    let data = |yaml: &str| Data { arrays: Some(path.clone()), ..options(yaml) };
    let accuracy = |yaml: &str| score(folder.path(), &data(yaml)).unwrap().models[0].score.as_ref().unwrap().value;
    assert_eq!((accuracy("{}"), accuracy("label_kind: index"), accuracy("label_kind: name")), (0.75, 0.75, 0.0));
    save(Tensor::new(&[0f32, 2.0, 5.0, 3.0], &Device::Cpu).unwrap());
    assert_eq!(accuracy("{}"), 0.75);
    save(Tensor::new(&[0f32, 2.5, 5.0, 3.0], &Device::Cpu).unwrap());
    assert!(refused(folder.path(), &data("{}")).contains("row 1 of array `labels` contains 2.5"));
}
