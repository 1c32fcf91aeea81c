//! Data sets of texts with images, for language models with a vision tower.
#![cfg(feature = "run")]

use std::fs;
use std::path::{Path, PathBuf};

use compress::Model;
use compress::pass::{Method, Quantize, Scheme};
use compress_core::store::{OpenSize, OpenSizes};
use compress_engine::data::{Batch, Data, DataSet, LossOn, References};
use compress_engine::evaluation::Subject;
use serde_json::{Value, json};

use crate::common::{golden, golden_model, pipeline};

const TOKEN: i64 = 40;
const TEMPLATE: &str = "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}.{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// A golden model with a tokenizer that has an image token, an image processor and a chat template.
pub fn model(folder: &Path) -> PathBuf {
    let model = folder.join("qwen3-vl");
    fs::create_dir_all(&model).unwrap();
    fs::copy(golden_model("qwen3-vl").join("model.safetensors"), model.join("model.safetensors")).unwrap();
    let read = |path: PathBuf| serde_json::from_str::<Value>(&fs::read_to_string(path).unwrap()).unwrap();
    let mut config = read(golden_model("qwen3-vl").join("config.json"));
    config["image_token_id"] = json!(TOKEN);
    config["text_config"]["max_position_embeddings"] = json!(4096);
    let mut tokenizer = read(golden("evaluation/characters.json"));
    let flags = json!({ "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
    let mut added = json!({ "id": TOKEN, "content": "<|image_pad|>" });
    added.as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
    tokenizer["model"]["vocab"]["<|image_pad|>"] = json!(TOKEN);
    tokenizer["added_tokens"] = json!([added]);
    let processor = json!({ "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 2, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5] });
    for (name, value) in [("config.json", &config), ("tokenizer.json", &tokenizer), ("preprocessor_config.json", &processor)] {
        fs::write(model.join(name), value.to_string()).unwrap();
    }
    fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    model
}

fn image(number: usize) -> String {
    golden(&format!("evaluation/images/LABEL_{0}/{0}.png", number)).display().to_string()
}

fn data(folder: &Path, rows: &[Value]) -> Data {
    let file = folder.join("texts.jsonl");
    fs::write(&file, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    Data { text: Some(file), ..Data::default() }
}

fn sizes(height: usize, width: usize) -> OpenSizes {
    [("height", height), ("width", width)].map(|(name, size)| (name.to_owned(), OpenSize::One(size))).into()
}

fn batch(folder: &Path, data: &Data) -> Result<Batch, String> {
    let model = Model::open(model(folder)).unwrap();
    model.fix_sizes(&sizes(8, 16)).unwrap();
    let subject = Subject::from_model(model).unwrap();
    DataSet::open(data, subject.target()).and_then(|set| set.first()).map_err(|e| e.to_string())
}

fn rows(batch: &Batch, name: &str) -> Vec<Vec<i64>> {
    batch.inputs[name].to_vec2().unwrap()
}

#[test]
fn the_token_of_a_patch_stands_once_for_each_patch() {
    let folder = tempfile::tempdir().unwrap();
    let chat = json!([{ "role": "user", "content": [{ "type": "image" }, { "type": "text", "text": "b" }] }, { "role": "assistant", "content": "cd" }]);
    let texts = data(folder.path(), &[json!({ "text": "a<|image_pad|>bc", "image": image(0) }), json!({ "text": "<|image_pad|>d", "images": [image(1)] })]);
    let found = batch(folder.path(), &texts).unwrap();
    let patches = [TOKEN; 8];
    let text = |before: &[i64], after: &[i64]| [&[1], before, &patches, after].concat();
    // The tokenizer marks the start of a text, also after a special token.
    let (first, second) = (text(&[3, 4], &[3, 5, 6]), text(&[], &[3, 7]));
    let tokens = rows(&found, "input_ids");
    assert_eq!((tokens[0].as_slice(), &tokens[1][..second.len()]), (first.as_slice(), second.as_slice()));
    assert_eq!(rows(&found, "attention_mask").iter().map(|row| row.iter().sum::<i64>()).collect::<Vec<_>>(), [first.len() as i64, second.len() as i64]);
    assert_eq!(found.inputs["pixel_values"].dims(), [2, 3, 8, 16]);
    // Patches are not predicted, and the token after an image is.
    let labels = |row: usize| match &found.references {
        References::Tokens(labels) => labels[row].iter().flatten().copied().collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!((labels(0), labels(1)), (vec![3, 4, 3, 5, 6], vec![3, 7]));
    let chats = Data { loss_on: Some(LossOn::Assistant), ..data(folder.path(), &[json!({ "messages": chat, "image": image(2) })]) };
    let found = batch(folder.path(), &chats).unwrap();
    let References::Tokens(labels) = &found.references else { panic!("{:?}", found.references) };
    // `cd` and the end of the message.
    assert_eq!(labels[0].iter().flatten().copied().collect::<Vec<_>>(), [6, 7, 30]);
    assert_eq!(rows(&found, "input_ids")[0].iter().filter(|id| **id == TOKEN).count(), 8);
}

#[test]
fn language_models_are_calibrated_and_evaluated_on_texts_with_images() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Value> = (0..10).map(|n| json!({ "text": format!("{}<|image_pad|>abcdefghij", ["a", "bc"][n % 2]), "image": image(n % 5) })).collect();
    let (data, model) = (data(folder.path(), &rows), model(folder.path()));
    let pass = Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, ..Quantize::default() };
    let pipeline = pipeline().sizes(sizes(8, 16)).calibration(Data { samples: Some(8), ..data.clone() }).evaluation(data).pass(pass);
    let report = pipeline.build().unwrap().run(Model::open(model).unwrap(), folder.path().join("out")).unwrap();
    let evaluation = serde_json::to_string(&report).unwrap();
    assert!(evaluation.contains("\"perplexity\""), "{evaluation}");
}

#[test]
fn records_and_options_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |row: Value, change: &dyn Fn(&mut Data)| {
        let mut data = data(folder.path(), &[row]);
        change(&mut data);
        batch(folder.path(), &data).unwrap_err()
    };
    let text = "a<|image_pad|>b";
    for (row, reason) in [
        (json!({ "text": text }), "line 1 has no `image`"),
        (json!({ "text": text, "images": [image(0), image(1)] }), "line 1 has 2 images, expected one"),
        (json!({ "text": text, "image": { "bytes": "" } }), "line 1 has an image that is not the name of a file"),
        (json!({ "text": "ab", "image": image(0) }), "line 1 has 0 image tokens `<|image_pad|>`, expected one"),
        (json!({ "text": format!("{text}{text}"), "image": image(0) }), "line 1 has 2 image tokens"),
        (json!({ "text": text, "image": "none.png" }), "none.png"),
    ] {
        let error = refused(row, &|_| {});
        assert!(error.contains(reason), "{reason}: {error}");
    }
    let row = || json!({ "text": text, "image": image(0) });
    assert!(refused(row(), &|data| data.max_length = Some(6)).contains("after the first 6 tokens, of which an image takes 8: raise `max_length`"));
    assert!(refused(row(), &|data| data.stride = Some(2)).contains("`stride` does not apply to texts with images"));
    // On texts only, an image would be left out.
    let subject = Subject::from_model(Model::open(model(folder.path())).unwrap()).unwrap();
    let error = DataSet::open(&data(folder.path(), &[row()]), subject.target()).and_then(|set| set.first()).unwrap_err().to_string();
    assert!(error.contains("line 1 has an image, but the model is run on texts only: set `sizes`"), "{error}");
}
