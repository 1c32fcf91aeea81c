//! Data and metrics, held to what PyTorch, Pillow and the library `tokenizers` make of the same files
//! (`scripts/goldens-evaluation`).
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::data::{Batch, Data, DataSet, References, Task};
use compress::evaluation::{Outcomes, Subject, evaluate};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn expected() -> Value {
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

/// A golden model with files of `golden/evaluation` beside it, under the names that they have in published models.
fn model(name: &str, extra: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy(&golden("models").join(name), folder.path());
    for (file, called) in extra {
        fs::copy(golden("evaluation").join(file), folder.path().join(called)).unwrap();
    }
    folder
}

const WORDS: (&str, &str) = ("word-pieces.json", "tokenizer.json");
const LETTERS: (&str, &str) = ("characters.json", "tokenizer.json");

fn options(yaml: &str) -> Data {
    serde_saphyr::from_str(yaml).unwrap()
}

/// The options with a path of `golden/evaluation`.
fn texts(file: &str, yaml: &str) -> Data {
    Data { text: Some(golden("evaluation").join(file)), ..options(yaml) }
}

fn score(folder: &Path, data: &Data) -> compress::Result<Outcomes> {
    common::sweep(|sweep| {
        let mut subject = Subject::open(folder, 1)?;
        let data = DataSet::open(data, subject.target())?;
        evaluate(&data, &mut [subject.load(&Device::Cpu, sweep)?], &[], sweep)
    })
}

fn refused(folder: &Path, data: &Data) -> String {
    score(folder, data).unwrap_err().to_string()
}

fn batches(folder: &Path, data: &Data) -> compress::Result<Vec<Batch>> {
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

#[test]
fn images_are_those_of_pillow() {
    let wanted = candle_core::safetensors::load(golden("evaluation/pixels.safetensors"), &Device::Cpu).unwrap();
    for name in ["vit-image-classification", "resnet-basic"] {
        let folder = model(name, &[(&format!("{name}.json"), "preprocessor_config.json")]);
        let data = Data { images: Some(golden("evaluation/images")), ..options("{ batch_size: 4 }") };
        let batches = batches(folder.path(), &data).unwrap();
        let pixels: Vec<&Tensor> = batches.iter().map(|b| &b.inputs["pixel_values"]).collect();
        let difference = (Tensor::cat(&pixels, 0).unwrap() - &wanted[name]).unwrap().abs().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // A step of a byte is 1 / 255 / 0.224; both round to bytes, from sums that differ in the last bits.
        let largest = difference.iter().copied().fold(0.0, f32::max);
        let steps = difference.iter().filter(|d| **d > 1e-4).count();
        assert!(largest <= 0.0176 && steps * 100 < difference.len(), "{name}: {largest}, {steps} of {}", difference.len());
        let outcomes = score(folder.path(), &data).unwrap();
        near(outcomes.models[0].score.as_ref().unwrap().value, &expected()["images"][name]);
    }
}

/// A network that takes 2 x 3 numbers and says which of 6 is the largest.
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
        assert_eq!(first.references, References::Classes(vec![0, 2, 5]));
    }
    let folder = largest_of_six("1, 2, 3");
    idx(&labels, &[3], &CLASSES[..3]);
    assert!(refused(folder.path(), &data).contains("holds 3 labels"));
    idx(&labels, &[4], &[0, 2, 6, 3]);
    assert!(refused(folder.path(), &data).contains("label 2: class 6, the model tells 6 apart"));
    idx(&labels, &[4], &CLASSES);
    idx(&images, &[4, 2, 3], &ROWS.concat()[..20]);
    assert!(refused(folder.path(), &data).contains("ends before its 4 samples do"));
    idx(&images, &[4, 3, 3], &[ROWS.concat(), ROWS[..2].concat()].concat());
    assert!(refused(folder.path(), &data).contains("is 3 x 3"), "{}", refused(folder.path(), &data));
    idx(&images, &[0, 2, 3], &[]);
    idx(&labels, &[0], &[]);
    assert!(refused(folder.path(), &data).contains("holds no samples"));
}

#[test]
fn arrays_are_read_from_both_kinds_of_files() {
    let files = tempfile::tempdir().unwrap();
    let plain = files.path().join("a.safetensors");
    let rows = Tensor::from_vec(ROWS.concat(), (4, 6), &Device::Cpu).unwrap();
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
        assert!(named("{ label_column: label }").contains("no array `label`; there are `"));
        assert!(named("{ inputs: { y: rows } }").contains("the model has no input `y`; it takes `x`"));
        assert!(named("{ inputs: { x: labels } }").contains("has rows of []"));
    }
}

#[test]
fn what_does_not_fit_the_model_is_said_by_name() {
    let bert = model("bert-sequence-classification", &[WORDS]);
    let wrong = |yaml: &str| refused(bert.path(), &texts("labelled.csv", yaml));
    assert!(wrong("{ label_column: class }").contains("no column `class`; there are `id`, `text`, `label`"));
    assert!(wrong("{ label_column: text }").contains("is no class; config.json knows LABEL_0, LABEL_1, LABEL_2"));
    assert!(wrong("{ label_column: id }").contains("line 5: class 3, the model tells 3 apart"));
    assert!(wrong("{ label_column: label, max_length: 17 }").contains("`max_length` is 17, the model takes 16 tokens"));
    let task = wrong("{ task: language-modelling }");
    assert!(task.contains("needs an output `logits` of 3 axes"), "{task}");
    assert!(wrong("{ task: embedding }").contains("`pair_column`"));
    assert!(refused(bert.path(), &texts("missing.csv", "{ label_column: label }")).contains("missing.csv"));
    assert!(refused(bert.path(), &Data { images: Some(golden("evaluation/images")), ..Data::default() }).contains("not images alone"));
    let bare = model("bert-sequence-classification", &[]);
    assert!(refused(bare.path(), &texts("labelled.csv", "{ label_column: label }")).contains("text without tokenizer.json"));
    let masked = model("bert-masked-lm", &[WORDS]);
    assert!(refused(masked.path(), &texts("book.txt", "{ task: language-modelling }")).contains("fills in masked tokens"));
    let vit = model("vit-image-classification", &[]);
    let wrong = refused(vit.path(), &Data { images: Some(golden("evaluation/images")), ..Data::default() });
    assert!(wrong.contains(".png: is ") && wrong.contains("is any x 3 x 12 x 12: choose `resize`"), "{wrong}");
    let llama = model("llama", &[LETTERS]);
    assert!(refused(llama.path(), &texts("book.txt", "{ max_length: 8, stride: 9 }")).contains("room for 7 tokens"));
    let empty = bert.path().join("empty.txt");
    fs::write(&empty, "\n").unwrap();
    assert!(refused(bert.path(), &Data { text: Some(empty), task: Some(Task::Fidelity), ..Data::default() }).contains("holds no samples"));
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
    assert!(refused(vit.path(), &data).contains("has 2 folders, the model tells 5 classes apart"));
    fs::write(files.path().join("dog/a.png"), "no picture").unwrap();
    let unlabelled = Data { task: Some(Task::Fidelity), ..data };
    assert!(batches(vit.path(), &unlabelled).unwrap_err().to_string().contains("a.png"));
}
