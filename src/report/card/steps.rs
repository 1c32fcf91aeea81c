//! Passes and formats as sentences.

use serde_json::Value;

use crate::error::counted;
use crate::export::Export;
use crate::pass::Step;
use crate::report::PassReport;
use crate::report::escape::{markdown, markdown_code};

/// Description of a pass, with options that are stated even if they have their defaults.
struct Sentence {
    pass: &'static str,
    text: &'static str,
    options: &'static [&'static str],
}

const fn sentence(pass: &'static str, text: &'static str, options: &'static [&'static str]) -> Sentence {
    Sentence { pass, text, options }
}

const SENTENCES: [Sentence; 16] = [
    sentence("prune-unstructured", "Weights with the smallest absolute values were set to zero", &["amount"]),
    sentence("prune-structured", "Heads, neurons, channels, width, layers or experts were removed", &["amount"]),
    sentence("search-structure", "The widths of layers and the parts to remove were chosen for a limit of the size", &["limit"]),
    sentence("prune-vocabulary", "Tokens were removed from the vocabulary", &[]),
    sentence("decompose", "Layers were replaced by two low-rank layers", &["rank"]),
    sentence("quantize", "Linear weights were quantized", &["scheme", "method"]),
    sentence("quantize-dynamic", "Linear weights were quantized to int8", &["granularity", "activations"]),
    sentence("quantize-static", "Weights were quantized to int8, and activations with scales found on calibration samples", &[]),
    sentence("palettize", "Weights were replaced by indices into small codebooks", &["bits"]),
    sentence("distill", "The model was trained on the outputs of a teacher", &[]),
    sentence("finetune", "The model was trained on labels or the next token", &[]),
    sentence("cast", "Floats were converted to another float format", &["to"]),
    sentence("dequantize", "Weights were dequantized", &[]),
    sentence("extract-language-model", "The language model was extracted from a model with a vision tower", &[]),
    sentence("split-experts", "Experts in one tensor were stored as separate linear layers", &[]),
    sentence("rotate", "The residual stream and the values of attention heads were rotated by orthogonal matrices, which preserves the outputs", &[]),
];

/// Longest option that is repeated in the card.
const MAX_OPTION: usize = 80;

/// A pass as a sentence.
pub(super) fn of_pass(pass: &PassReport) -> String {
    let known = SENTENCES.iter().find(|sentence| sentence.pass == pass.name);
    let defaults = Step::from_name(&pass.name).map_or(Value::Null, |step| step.pass().options());
    let details = details(&pass.name, &pass.options, &defaults, known.map_or(&[], |known| known.options));
    let text = known.map_or("A custom pass was applied", |known| known.text);
    format!("{text} ({details}): {}.", counted(pass.tensors_changed, "weight"))
}

/// Effects of layouts of safetensors on weights of any encoding.
const LAYOUTS: [(&str, &str); 2] =
    [("dense", "All weights were written as plain floats"), ("sparse", "Weights with many zeros were written as a bitmask with the other values")];

/// The formats of a recipe as sentences, without safetensors in a layout that keeps the encodings.
pub(super) fn of_formats(recipe: &Value) -> Vec<String> {
    let entries = recipe.get("export").and_then(Value::as_array).into_iter().flatten();
    let named = entries.filter_map(|entry| match entry {
        Value::String(name) => Some((name.as_str(), &Value::Null)),
        other => other.as_object()?.iter().next().map(|(name, options)| (name.as_str(), options)),
    });
    let sentence = |(name, options): (&str, &Value)| {
        if name == "safetensors" {
            let layout = options.get("layout").and_then(Value::as_str)?;
            let (_, text) = LAYOUTS.iter().find(|(known, _)| *known == layout)?;
            return Some(format!("{text} (`{name}`, `layout: {layout}`)."));
        }
        let defaults = Export::from_name(name).map_or(Value::Null, |export| export.format().options());
        let details = details(name, options, &defaults, if name == "gguf" { &["type"] } else { &[] });
        Some(format!("The result was written in the format {details}."))
    };
    named.filter_map(sentence).collect()
}

/// A name with the options in `stated`, and all options that differ from their defaults.
fn details(name: &str, options: &Value, defaults: &Value, stated: &[&str]) -> String {
    let is_stated = |key: &str, value: &Value| !value.is_null() && (stated.contains(&key) || defaults.get(key) != Some(value));
    let option = |(key, value): (&String, &Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let is_short = text.chars().count() <= MAX_OPTION;
        if is_short { markdown_code(&format!("{key}: {text}")) } else { format!("{} as in the recipe", markdown_code(key)) }
    };
    let options = options.as_object().into_iter().flatten().filter(|(key, value)| is_stated(key, value)).map(option);
    [markdown_code(name)].into_iter().chain(options).map(|part| markdown(&part)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pass::PASSES;

    #[test]
    fn every_pass_has_a_sentence() {
        for name in PASSES {
            assert!(SENTENCES.iter().any(|sentence| sentence.pass == *name), "{name}");
        }
    }

    #[test]
    fn options_that_matter_are_stated() {
        let details = |options: Value| details("quantize", &options, &json!({ "scheme": "W4A16", "observer": "l4" }), &["scheme"]);
        assert_eq!(details(json!({ "scheme": "W4A16", "observer": "l4", "guide": null })), "`quantize`, `scheme: W4A16`");
        assert_eq!(details(json!({ "scheme": "W8A8", "observer": "mse" })), "`quantize`, `scheme: W8A8`, `observer: mse`");
        assert_eq!(details(json!({ "scheme": "W8A8", "ignore": ["a".repeat(200)] })), "`quantize`, `scheme: W8A8`, `ignore` as in the recipe");
        let formats = of_formats(&json!({ "export": ["safetensors", { "gguf": { "type": "Q8_0" } }] }));
        assert_eq!(formats, ["The result was written in the format `gguf`, `type: Q8_0`."]);
        let dense = of_formats(&json!({ "export": [{ "safetensors": { "layout": "dense", "shard_size": "5GB" } }] }));
        assert_eq!(dense, ["All weights were written as plain floats (`safetensors`, `layout: dense`)."]);
        assert!(of_formats(&json!({ "export": [{ "safetensors": { "layout": "auto" } }] })).is_empty());
    }
}
