//! GGUF models compared with their originals, on files that `scripts/goldens gguf` wrote with
//! llama.cpp's package.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod compensated;
mod experts;
pub mod importance;
mod quantizer;
mod reading;
mod same_codes;
mod tuned;
mod types;
mod vocabularies;
mod writing;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use compress::export::{FileType, Gguf};
use compress::{Model, Pipeline};
use compress_core::store::gguf::{self, Kind};
use compress_core::store::{DType, Weight};
use compress_engine::model::read_auxiliary_text;
use serde_json::Value;

use crate::common::golden;

/// Names of the golden files of families, which have a configuration.
fn families() -> Vec<String> {
    let files = fs::read_dir(golden("gguf")).unwrap().map(|entry| entry.unwrap().path());
    let models = files.filter(|file| file.extension().is_some_and(|end| end == "gguf") && file.with_extension("json").is_file());
    let names: Vec<String> = models.map(|file| file.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    assert!(names.len() > 30, "{names:?}");
    names
}

/// Copies the weights of a golden file: those of `models`, unless llama.cpp supports only others.
fn copy_weights(name: &str, folder: &Path) {
    let own = golden(&format!("gguf/{name}.safetensors"));
    let source = if own.is_file() { own } else { golden(&format!("models/{name}/model.safetensors")) };
    fs::copy(source, folder.join("model.safetensors")).unwrap();
}

/// The original model of a golden file, with the configuration stored in it.
fn source(name: &str) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden(&format!("gguf/{name}.json")), folder.path().join("config.json")).unwrap();
    copy_weights(name, folder.path());
    let model = Model::open(folder.path()).unwrap();
    (folder, model)
}

/// Families whose norms have an offset in files.
const WITH_OFFSET: [&str; 3] = ["gemma", "qwen3-next", "qwen3_5"];

/// Checks that two models have the same weights, up to the rounding of adding and subtracting one for
/// norms, and of decays, which files do not store as logarithms.
fn same_weights(found: &Model, expected: &Model, what: &str) {
    assert!(found.weights.by_name.keys().eq(expected.weights.by_name.keys()), "{what}: {:?}", found.weights.by_name.keys());
    for (name, weight) in &expected.weights.by_name {
        let other: &Weight = found.weights.get(name).unwrap();
        assert_eq!((other.dtype, &other.shape), (weight.dtype, &weight.shape), "{what}: {name}");
        let is_offset = WITH_OFFSET.iter().any(|family| what.starts_with(family)) && name.ends_with("norm.weight");
        let least = if is_offset || name.ends_with("A_log") { 2.4e-7 } else { 0.0 };
        let (a, b) = (other.floats(name).unwrap(), weight.floats(name).unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= least), "{what}: {name}");
    }
}

/// Checks that two models have the same graph.
fn same_graph(found: &Model, expected: &Model, what: &str) {
    let [one, other] = [found, expected].map(|model| model.graph().unwrap().to_string());
    // The file has the raised base of rotary embeddings, as a 32-bit float.
    let is_same = if what.ends_with("alpha") { found.difference_from(expected) == Some(Ok(())) } else { one == other };
    assert!(is_same, "{what}: {one}");
}

fn tokenizer(model: &Model) -> tokenizers::Tokenizer {
    read_auxiliary_text(&model.path, &model.auxiliary.synthesized, "tokenizer.json").unwrap().unwrap().parse().unwrap()
}

/// Tokens of the golden texts.
fn tokens(model: &Model, texts: &Value) -> Value {
    let tokenizer = tokenizer(model);
    texts.as_array().unwrap().iter().map(|text| Value::from(tokenizer.encode_fast(text.as_str().unwrap(), true).unwrap().get_ids())).collect()
}

/// Writes a model as GGUF and opens the file.
fn written(model: Model, file_type: FileType) -> (tempfile::TempDir, Model, compress::Report) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let report = Pipeline::builder().export(Gguf { file_type, ..Gguf::default() }).measure(false).build().unwrap().run(model, &out).unwrap();
    let back = Model::open(out.join("model.gguf")).unwrap();
    (folder, back, report)
}

/// A model with a changed configuration, or with the files of a vocabulary.
fn changed(name: &str, file: &str, change: impl Fn(&mut Value)) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    if name.starts_with("tokenizer-") {
        let model = Model::open(golden(&format!("gguf/{name}.gguf"))).unwrap();
        Pipeline::builder().measure(false).force(true).build().unwrap().run(model, folder.path().join("in")).unwrap();
    } else {
        fs::create_dir(folder.path().join("in")).unwrap();
        fs::copy(golden(&format!("gguf/{name}.json")), folder.path().join("in/config.json")).unwrap();
        copy_weights(name, &folder.path().join("in"));
    }
    let path = folder.path().join("in").join(file);
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    let model = Model::open(folder.path().join("in")).unwrap();
    (folder, model)
}

fn export(model: Model, folder: &Path, file_type: FileType) -> Result<compress::Report, compress::Error> {
    Pipeline::builder().export(Gguf { file_type, ..Gguf::default() }).measure(false).build().unwrap().run(model, folder.join("out"))
}

/// Opens a golden file with changed keys and tensors.
fn rewritten(
    name: &str,
    change: impl Fn(&mut BTreeMap<String, gguf::Value>, &mut BTreeMap<String, Weight>),
) -> (tempfile::TempDir, Result<Model, compress::Error>) {
    let file = gguf::GgufFile::open(&golden(&format!("gguf/{name}.gguf"))).unwrap();
    let (mut values, mut tensors) = (file.values, file.tensors);
    change(&mut values, &mut tensors);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    put(&path, values, &tensors);
    let model = Model::open(&path);
    (folder, model)
}

/// Writes a file with these keys and tensors.
fn put(path: &Path, values: BTreeMap<String, gguf::Value>, tensors: &BTreeMap<String, Weight>) {
    let planned: Vec<_> = tensors.iter().map(|(name, weight)| (name.clone(), Kind::Plain(DType::F32), weight.shape.clone())).collect();
    let (mut bytes, padding) = gguf::header(&values.into_iter().collect::<Vec<_>>(), &planned).unwrap();
    for ((name, weight), padding) in tensors.iter().zip(padding) {
        bytes.extend(weight.floats(name).unwrap().iter().flat_map(|value| value.to_le_bytes()));
        bytes.resize(bytes.len() + padding as usize, 0);
    }
    fs::write(path, bytes).unwrap();
}
