//! Data sets of texts with images, for language models with a vision tower.
#![cfg(feature = "run")]

use std::fs;
use std::path::{Path, PathBuf};

use compress::Model;
use compress::pass::{Method, Quantize, Scheme, Step};
use compress_core::store::{OpenSize, OpenSizes};
use compress_engine::data::{Batch, Data, DataSet, LossOn, References, Task};
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
    let pass = Quantize { scheme: Scheme::W8A16, group_size: Some(8), method: Method::Gptq, ..Quantize::default() };
    let pipeline = pipeline().sizes(sizes(8, 16)).calibration(Data { samples: Some(8), ..data.clone() }).evaluation(data).pass(pass);
    let report = pipeline.build().unwrap().run(Model::open(model).unwrap(), folder.path().join("out")).unwrap();
    let found = serde_json::to_value(&report).unwrap();
    let [before, after] = ["before", "after"].map(|of| found["accuracy"][of]["candle"].as_f64().unwrap_or_else(|| panic!("{}", found["accuracy"])));
    // Without its images, the output would have another perplexity by a fifth.
    assert!((after / before - 1.0).abs() < 0.1, "{before} {after}");
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
    let mixed = Data { mix: vec![data(folder.path(), &[row()])], ..Data::default() };
    assert!(batch(folder.path(), &mixed).unwrap_err().contains("`mix` does not support texts with images"));
    let resized = Data { resize: Some(vec![8]), ..data(folder.path(), &[row()]) };
    let error = Data { mix: vec![resized], ..Data::default() }.check().unwrap_err().to_string();
    assert!(error.contains("`resize` applies only to images: remove it"), "{error}");
    // On texts only, an image would be left out.
    let subject = Subject::from_model(Model::open(model(folder.path())).unwrap()).unwrap();
    let error = DataSet::open(&data(folder.path(), &[row()]), subject.target()).and_then(|set| set.first()).unwrap_err().to_string();
    assert!(error.contains("line 1 has an image, but the model is run on texts only: set `sizes`"), "{error}");
}

/// The report of passes on texts with images.
fn run(folder: &Path, steps: Value, data: &Data, [height, width]: [usize; 2]) -> Result<Value, String> {
    let steps: Vec<Step> = serde_json::from_value(steps).unwrap();
    let builder = pipeline().sizes(sizes(height, width)).calibration(data.clone()).train(data.clone()).passes(steps);
    let report = builder.build().unwrap().run(Model::open(model(folder)).unwrap(), folder.join(format!("out-{height}-{width}")));
    report.map(|report| serde_json::to_value(&report).unwrap()).map_err(|e| e.to_string())
}

fn ten_texts(folder: &Path) -> Data {
    data(folder, &(0..10).map(|n| json!({ "text": "a<|image_pad|>bcdefgh", "image": image(n % 5) })).collect::<Vec<_>>())
}

/// A pass that changes nothing, and the largest image whose patches exceed usual texts.
#[test]
fn outputs_are_measured_with_images() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ten_texts(folder.path());
    let found = run(folder.path(), json!([{ "cast": { "to": "f32" } }]), &texts, [48, 64]).unwrap();
    let cosine = found["fidelity"]["cosine"].as_f64().unwrap_or_else(|| panic!("{} {}", found["fidelity"], found["notes"]));
    assert!(cosine > 0.99999, "{cosine}");
}

/// The teacher sees the images, layers are those of the language model, and its tower is not trained.
#[test]
fn training_reads_images_and_keeps_the_tower() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ten_texts(folder.path());
    let losses = json!({ "soft": { "weight": 1.0 }, "hidden": {} });
    let step = json!([{ "distill": { "max_steps": 1, "batch_size": 2, "learning_rate": 1e-9, "losses": losses } }]);
    let found = run(folder.path(), step, &texts, [8, 16]).unwrap();
    let curve = &found["passes"][0]["details"]["training"]["curve"][0]["losses"];
    let of = |loss: &str| curve[loss].as_f64().unwrap_or_else(|| panic!("{curve}"));
    assert!(of("soft").abs() < 1e-6 && of("hidden").abs() < 1e-6, "{curve}");
    let step = json!([{ "finetune": { "max_steps": 1, "batch_size": 2, "learning_rate": 0.1 } }]);
    run(folder.path(), step, &texts, [16, 16]).unwrap();
    let tensors = |path: PathBuf| candle_core::safetensors::load(path.join("model.safetensors"), &candle_core::Device::Cpu).unwrap();
    let (before, after) = (tensors(model(folder.path())), tensors(folder.path().join("out-16-16")));
    let values = |x: &candle_core::Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (name, tensor) in &before {
        let is_same = values(tensor) == values(&after[name]);
        assert_eq!(is_same, name.contains("visual."), "{name}");
    }
    let step = json!([{ "finetune": { "max_steps": 1, "batch_size": 2, "adapter": { "rank": 2 } } }]);
    let found = run(folder.path(), step, &texts, [8, 24]).unwrap();
    assert_eq!(found["passes"][0]["tensors_changed"], 14, "{}", found["passes"][0]);
}

#[test]
fn passes_that_do_not_run_the_tower_accept_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ten_texts(folder.path());
    let gptq = json!({ "quantize": { "scheme": "W4A16", "group_size": 8, "method": "gptq" } });
    for (number, steps) in [
        json!([gptq, "extract-language-model"]),
        json!([{ "quantize": { "scheme": "W8A8", "kv_cache": "fp8" } }]),
        json!([{ "prune-vocabulary": { "keep": [texts.text.clone().unwrap()] } }]),
    ]
    .into_iter()
    .enumerate()
    {
        run(folder.path(), steps.clone(), &texts, [8, 4 * (number + 2)]).unwrap_or_else(|e| panic!("{steps}: {e}"));
    }
    // A graph.json describes images of one size.
    run(folder.path(), json!([{ "decompose": { "rank": 4 } }]), &texts, [8, 20]).unwrap();
    let low_rank = Model::open(folder.path().join("out-8-20")).unwrap();
    assert!(low_rank.fix_sizes(&sizes(16, 16)).unwrap_err().to_string().contains("does not describe texts with images of this size"));
    low_rank.fix_sizes(&sizes(8, 20)).unwrap();
}

/// Files in columns and in the content of messages, options of images, and comparisons.
#[test]
fn images_are_found_wherever_records_name_them() {
    let folder = tempfile::tempdir().unwrap();
    let expected = batch(folder.path(), &data(folder.path(), &[json!({ "text": "a<|image_pad|>b", "image": image(0) })])).unwrap();
    let pixels = |batch: &Batch| batch.inputs["pixel_values"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let columns = folder.path().join("texts.csv");
    fs::write(&columns, format!("text,image\na<|image_pad|>b,{}\n", image(0))).unwrap();
    let content = json!([{ "type": "image", "image": image(0) }, { "type": "text", "text": "b" }]);
    let (columns, nulls) = (Data { text: Some(columns), ..Data::default() }, json!({ "text": "a<|image_pad|>b", "image": null, "images": [image(0)] }));
    let resized = Data { resize: Some(vec![8, 16]), ..columns.clone() };
    let compared = Data { task: Some(Task::Fidelity), ..columns.clone() };
    let chat = json!({ "messages": [{ "role": "user", "content": content }] });
    for set in [columns.clone(), resized.clone(), compared, data(folder.path(), &[nulls])] {
        let found = batch(folder.path(), &set).unwrap();
        assert_eq!((pixels(&found), rows(&found, "input_ids")), (pixels(&expected), rows(&expected, "input_ids")));
    }
    assert_eq!(pixels(&batch(folder.path(), &data(folder.path(), std::slice::from_ref(&chat))).unwrap()), pixels(&expected));
    let subject = Subject::from_model(Model::open(model(folder.path())).unwrap()).unwrap();
    for (set, reason) in [(data(folder.path(), &[chat]), "has an image"), (resized, "`resize` applies only to images"), (columns, "has an image")] {
        let error = DataSet::open(&set, subject.target()).and_then(|set| set.first()).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
