//! Metadata at the beginning of a card, in the form of the Hub (hub-docs: `modelcard.md`).

use serde::Serialize;
use serde_json::Value;

use super::Card;
use crate::contract::Runtime;
use crate::report::Layer;

/// Encodings of weights that are not quantized.
const DENSE: [&str; 13] = ["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool"];
/// Tags of the source that name its format, which is not that of the output.
const FORMAT_TAGS: [&str; 12] =
    ["safetensors", "pytorch", "tf", "jax", "rust", "onnx", "gguf", "openvino", "coreml", "tflite", "transformers.js", "compressed-tensors"];
/// Formats other than safetensors. Their names are also those of libraries and tags on the Hub.
const OTHER_FORMATS: [&str; 2] = ["gguf", "onnx"];
/// Maximum number and length of the tags that are taken from the source.
const MAX_TAGS: usize = 64;
const MAX_TAG: usize = 100;

/// The metadata, in the order of the file.
#[derive(Serialize)]
struct Metadata {
    #[serde(skip_serializing_if = "Option::is_none")]
    license: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    license_name: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    license_link: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    base_model: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base_model_relation: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    library_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline_tag: Option<String>,
    tags: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    datasets: Vec<String>,
}

/// The metadata of a card as YAML.
pub(super) fn yaml(card: &Card) -> String {
    let source = card.source;
    // Texts and lists of texts, as the Hub permits.
    let is_text = |value: &&Value| value.is_string() || value.as_array().is_some_and(|items| items.iter().all(Value::is_string));
    let stated = |key: &str| source.metadata.get(key).filter(is_text).cloned();
    let metadata = Metadata {
        license: stated("license"),
        license_name: stated("license_name"),
        license_link: stated("license_link"),
        language: stated("language"),
        base_model: source.base_models.clone(),
        base_model_relation: relation(card).filter(|_| !source.base_models.is_empty()),
        library_name: library(card),
        pipeline_tag: pipeline_tag(card),
        tags: tags(card),
        datasets: data_sets(card),
    };
    serde_saphyr::to_string(&metadata).map(|text| text.trim_end().to_owned() + "\n").unwrap_or_default()
}

fn text(card: &Card, key: &str) -> Option<String> {
    card.source.metadata.get(key)?.as_str().map(str::to_owned)
}

fn texts<'s>(card: &'s Card, key: &str) -> impl Iterator<Item = &'s str> {
    card.source.metadata.get(key).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

fn is_quantized(layer: &Layer) -> bool {
    let kind = layer.encoding.split(' ').next().unwrap_or_default().to_lowercase();
    !DENSE.contains(&kind.as_str())
}

/// Relation of the output to its base model. `None` if the weights are the same.
fn relation(card: &Card) -> Option<&'static str> {
    let is_changed = card.report.passes.iter().any(|pass| pass.tensors_changed > 0) || !card.source.earlier_steps.is_empty();
    match () {
        () if card.report.layers.iter().any(is_quantized) => Some("quantized"),
        () if is_changed => Some("finetune"),
        () => None,
    }
}

/// The library that loads the output.
fn library(card: &Card) -> Option<String> {
    if !card.has_format("safetensors") {
        return OTHER_FORMATS.into_iter().find(|format| card.has_format(format)).map(str::to_owned);
    }
    let loads = |target: &crate::contract::Target| target.runtime() == Runtime::Transformers;
    let in_transformers = card.loaded_by.is_some_and(|targets| targets.iter().any(loads));
    let stated = text(card, "library_name").filter(|name| !OTHER_FORMATS.contains(&name.as_str()));
    match () {
        () if stated.as_deref().is_some_and(|name| name != "transformers" || in_transformers) => stated,
        () if card.is_sentence_encoder() => Some("sentence-transformers".to_owned()),
        () => in_transformers.then(|| "transformers".to_owned()),
    }
}

/// The task: that of the source, unless the model class has changed.
fn pipeline_tag(card: &Card) -> Option<String> {
    let class = card.architecture();
    let stated = text(card, "pipeline_tag").filter(|_| class == card.source.architecture);
    let of_class = || card.task().map(|task| task.pipeline_tag);
    let of_folder = || card.is_sentence_encoder().then_some("sentence-similarity");
    stated.or_else(|| of_folder().or_else(of_class).map(str::to_owned))
}

/// Tags of the output, followed by those of the source that are not about its format.
fn tags(card: &Card) -> Vec<String> {
    let method = card.config.get("quantization_config").and_then(|config| config.get("quant_method")).and_then(Value::as_str);
    let formats = OTHER_FORMATS.into_iter().filter(|format| card.has_format(format));
    let mut tags: Vec<String> = ["compress"].into_iter().chain(formats).chain(method).map(str::to_owned).collect();
    for tag in texts(card, "tags").filter(|tag| !FORMAT_TAGS.contains(tag) && tag.len() <= MAX_TAG).take(MAX_TAGS) {
        if !tags.iter().any(|known| known == tag) {
            tags.push(tag.to_owned());
        }
    }
    tags
}

/// Data sets of the calibration and the training of this run, and of earlier runs.
fn data_sets(card: &Card) -> Vec<String> {
    let mut found = card.data_sets.to_vec();
    found.extend(texts(card, "datasets").filter(|_| card.source.is_own).map(str::to_owned));
    found.sort();
    found.dedup();
    found
}
