//! `config.json`. Its text is preserved unless a value changes.

use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::bits_and_bytes;
use super::fp8;
use super::modelopt;
use super::python_numbers::parse_config;
use super::quantization;
pub use super::quantization::OWN_METHOD;
use super::schemes::Schemes;
use crate::arch;
use crate::error::{Error, Result};
use crate::files;
use crate::kernel::cache::CacheScheme;
use crate::store::{DType, GptqConfig, OriginalFormat};

/// Key of the description of quantized weights.
const QUANTIZATION: &str = "quantization_config";

/// Prefix of the `model_type` of such folders, so that other libraries find no class for it:
/// transformers ignores unknown quantization methods, and would silently compute something else.
const OWN_TYPE: &str = "compress-";

/// The configuration of a model; empty for a bare file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    text: Option<String>,
    values: Map<String, Value>,
    /// Keys of the quantization description that do not depend on the weights, and are carried over.
    carried: Map<String, Value>,
    /// The quantization description of weights in the format of another tool.
    original_quantization: Option<Value>,
}

impl Config {
    /// Reads a file; returns an empty configuration if it does not exist.
    pub fn open(path: &Path) -> Result<Config> {
        let text = match files::read_to_string(path) {
            Ok(text) => text,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(Config::default()),
            Err(e) => return Err(Error::io("read", path)(e)),
        };
        Config::parse(path, text)
    }

    /// Parses the text of a file; `path` names it in error messages.
    pub fn parse(path: &Path, text: String) -> Result<Config> {
        let values = parse_config(&text).map_err(|e| Error::malformed(path, format!("not a JSON object: {e}")))?;
        let mut config = Config { text: Some(text), values, ..Config::default() };
        if let Some(own) = config.model_type().strip_prefix(OWN_TYPE).map(str::to_owned) {
            config.set("model_type", json!(own));
        }
        Ok(config)
    }

    /// Creates a configuration from values.
    pub fn from_values(values: Map<String, Value>) -> Config {
        Config { values, ..Config::default() }
    }

    /// Marks the configuration of a folder that other libraries must not open.
    pub fn mark_own(&mut self) {
        if !self.model_type().is_empty() {
            self.set("model_type", json!(format!("{OWN_TYPE}{}", self.model_type())));
        }
    }

    /// A value by key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Descriptions of numbers that both configurations have and that differ as 32-bit floats.
    pub fn differing_numbers(&self, other: &Config) -> Vec<String> {
        let single = |value: &Value| value.as_f64().map(|number| number as f32);
        let pairs = self.values.iter().filter_map(|(key, value)| Some((key, value, other.get(key)?)));
        let differing = pairs.filter(|(_, a, b)| single(a).zip(single(b)).is_some_and(|(a, b)| a != b));
        differing.map(|(key, a, b)| format!("`{key}` of {a} is written as {b}")).collect()
    }

    /// The quantization description of weights with an [original
    /// format](crate::store::Weight::original_format).
    pub fn original_quantization(&self) -> Option<&Value> {
        self.original_quantization.as_ref()
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> Option<DType> {
        match self.get("dtype").or_else(|| self.get("torch_dtype"))?.as_str()? {
            "bfloat16" => Some(DType::BF16),
            "float16" => Some(DType::F16),
            "float32" => Some(DType::F32),
            _ => None,
        }
    }

    /// All values.
    pub fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// `model_type`, or that of a head for speculative decoding; an empty string without one.
    pub fn model_type(&self) -> &str {
        arch::model_type(&self.values)
    }

    /// The class that the weights were saved from (`architectures`), or an empty string.
    pub fn class(&self) -> &str {
        self.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str).unwrap_or("")
    }

    /// Whether [`class`](Config::class) has a head, such as a classifier.
    pub fn has_head(&self) -> bool {
        let class = self.class();
        !class.is_empty() && (!class.ends_with("Model") || class.contains("Head"))
    }

    /// Whether linear weights are stored as `[in, out]` (transformers' `Conv1D`).
    pub fn has_conv1d(&self) -> bool {
        arch::family(self.model_type()).is_some_and(|family| family.is_input_major)
    }

    /// Adds or replaces a value.
    pub fn set(&mut self, key: &str, value: Value) {
        self.values.insert(key.to_owned(), value);
        self.text = None;
    }

    /// Removes a value.
    pub fn remove(&mut self, key: &str) {
        if self.values.shift_remove(key).is_some() {
            self.text = None;
        }
    }

    /// Specifies that the output head is not tied to the embedding table.
    pub fn untie(&mut self) {
        self.set("tie_word_embeddings", json!(false));
        // A key of LFM2, which takes precedence.
        if self.get("tie_embedding").is_some() {
            self.set("tie_embedding", json!(false));
        }
        // That of a language model with a vision tower, whose class has a default.
        let has_tower = arch::has_tower(self.model_type());
        if let Some(Value::Object(text)) = self.values.get_mut("text_config").filter(|_| has_tower) {
            text.insert("tie_word_embeddings".to_owned(), json!(false));
        }
    }

    /// Sets the dtype of the weights, under the key that the file already uses.
    pub fn set_dtype(&mut self, name: &str) {
        if self.values.is_empty() {
            return;
        }
        let key = if self.values.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        if self.get(key).and_then(Value::as_str) != Some(name) {
            self.set(key, json!(name));
        }
    }

    /// Pairs (alias, original) of weights that this configuration ties; `stored` returns whether a
    /// tensor is stored.
    ///
    /// If `tie_word_embeddings` is missing, a language model is tied if its head is not stored.
    pub fn tied_names(&self, stored: impl Fn(&str) -> bool) -> Vec<(&'static str, &'static str)> {
        let has_head =
            ["ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration"].iter().any(|end| self.class().ends_with(end));
        // The first key is one of LFM2, and takes precedence in transformers.
        let specified = ["tie_embedding", "tie_word_embeddings"].into_iter().find_map(|key| self.get(key).and_then(Value::as_bool));
        // transformers reads that of a language model with a vision tower only in some families.
        let specified = specified.or_else(|| self.values.get("text_config")?.get("tie_word_embeddings")?.as_bool());
        // A stored head of T5 is never tied: transformers writes `tie_word_embeddings` into every
        // configuration.
        let specified = specified.filter(|_| !self.shares_table());
        let tied =
            arch::tied(self.model_type()).iter().copied().filter(|(alias, original)| stored(original) && specified.unwrap_or(has_head && !stored(alias)));
        // Encoder-only models have no decoder table.
        let exists = |alias: &str| alias.starts_with("encoder.") || stored(alias) || stored("decoder.final_layer_norm.weight");
        let shared = arch::shared_tables(self.model_type()).iter().copied().filter(|(alias, original)| stored(original) && exists(alias));
        tied.chain(shared).collect()
    }

    /// Whether the family always shares one embedding table under several names.
    pub(super) fn shares_table(&self) -> bool {
        !arch::shared_tables(self.model_type()).is_empty()
    }

    /// Quantization keys that are written again regardless of the weights: the KV-cache scheme, and
    /// unrecognized keys.
    pub fn carried_quantization(&self) -> &Map<String, Value> {
        &self.carried
    }

    /// The quantization of the KV cache, if there is one.
    pub fn cache(&self) -> Result<Option<CacheScheme>> {
        let refused = quantization::unsupported(Path::new("config.json"));
        self.carried.get(quantization::CACHE).map(|scheme| quantization::cache(scheme).map_err(refused)).transpose()
    }

    /// Sets the quantization of the KV cache.
    pub fn set_cache(&mut self, scheme: CacheScheme) {
        self.carried.insert(quantization::CACHE.to_owned(), quantization::cache_scheme(scheme));
    }

    /// Removes the quantization of the KV cache.
    pub fn remove_cache(&mut self) {
        self.carried.shift_remove(quantization::CACHE);
    }

    /// Removes and parses the description of quantized weights and activations.
    pub(super) fn take_quantization(&mut self, path: &Path) -> Result<Schemes> {
        if self.get("compression_config").is_some_and(|old| !old.is_null()) {
            return Err(Error::Unsupported {
                what: format!("{}: `compression_config`", path.join("config.json").display()),
                hint: "rename it to `quantization_config`, the key of newer versions of compressed-tensors".into(),
            });
        }
        let nested = remove_nested_descriptions(&mut self.values, "");
        if self.get(QUANTIZATION).is_none_or(Value::is_null) {
            if let Some(key) = nested.first() {
                return Err(Error::Unsupported {
                    what: format!("{}: `{key}`", path.join("config.json").display()),
                    hint: "move it to the top level of the file, with the names of layers as in the checkpoint".into(),
                });
            }
            let file = path.join(quantization::MODELOPT);
            return match modelopt_description(&file)? {
                Some(described) => self.take_original(described, &file),
                None => Ok(Schemes::from_gptq(separate_description(path)?)),
            };
        }
        let quantization = self.values.shift_remove(QUANTIZATION).unwrap_or_default();
        self.text = None;
        let file = path.join("config.json");
        let refused = quantization::unsupported(&file);
        let described = quantization.get(OWN_METHOD).filter(|own| !own.is_null()).unwrap_or(&quantization);
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        if let Some(gptq) = quantization::gptq_config(&quantization).map_err(&refused)? {
            return Ok(Schemes::from_gptq(gptq));
        }
        if [OriginalFormat::FP8, OriginalFormat::MXFP4, OriginalFormat::MODELOPT, OriginalFormat::BITSANDBYTES].contains(&method) {
            return self.take_original(quantization, &file);
        }
        if method != "compressed-tensors" && method != OWN_METHOD {
            return Err(refused((format!("quantization method `{method}`"), quantization::FORMATS)));
        }
        self.carried = quantization::carried(described).map_err(&refused)?;
        Schemes::parse(described).map_err(refused)
    }

    /// Parses the description of weights with an original format, which is written again with them.
    fn take_original(&mut self, described: Value, file: &Path) -> Result<Schemes> {
        let (fp8, nvfp4) = match described.get("quant_method").and_then(Value::as_str) {
            Some(OriginalFormat::FP8) => fp8::parse(&described, self.dtype()).map(|fp8| (Some(fp8), None)),
            Some(OriginalFormat::MODELOPT) => modelopt::parse(&described, self.dtype()),
            Some(OriginalFormat::BITSANDBYTES) => bits_and_bytes::check(&described).map(|()| (None, None)),
            _ => Ok((None, None)),
        }
        .map_err(quantization::unsupported(file))?;
        self.original_quantization = Some(described);
        Ok(Schemes::from_floats(fp8, nvfp4))
    }

    /// The text of the file: unchanged if no value was set, `None` if the configuration is empty.
    pub fn render(&self) -> Option<String> {
        match &self.text {
            Some(text) => Some(text.clone()),
            None if self.values.is_empty() => None,
            None => Some(format!("{:#}\n", Value::Object(self.values.clone()))),
        }
    }
}

/// Removes the descriptions of quantized weights from nested configurations, such as `text_config`, and
/// returns their paths.
fn remove_nested_descriptions(values: &mut Map<String, Value>, parent: &str) -> Vec<String> {
    let mut removed = Vec::new();
    for (key, value) in values.iter_mut().filter(|(key, _)| *key != QUANTIZATION) {
        let Value::Object(nested) = value else { continue };
        let path = format!("{parent}{key}.");
        if nested.get(QUANTIZATION).is_some_and(|described| !described.is_null()) {
            nested.shift_remove(QUANTIZATION);
            removed.push(format!("{path}{QUANTIZATION}"));
        }
        removed.extend(remove_nested_descriptions(nested, &path));
    }
    removed
}

/// The separate description of ModelOpt, as a value of `quantization_config`.
fn modelopt_description(file: &Path) -> Result<Option<Value>> {
    if !files::is_file(file) {
        return Ok(None);
    }
    let text = files::read_to_string(file).map_err(Error::io("read", file))?;
    let mut values: Value = serde_json::from_str(&text).map_err(|e| Error::malformed(file, format!("not a JSON object: {e}")))?;
    if let Some(object) = values.as_object_mut() {
        object.insert("quant_method".into(), OriginalFormat::MODELOPT.into());
    }
    Ok(Some(values))
}

/// GPTQ or AWQ settings from the separate files that older tools wrote.
fn separate_description(folder: &Path) -> Result<GptqConfig> {
    for (name, method) in quantization::DESCRIPTIONS.into_iter().zip(["gptq", "awq"]) {
        let path = folder.join(name);
        if !files::is_file(&path) {
            continue;
        }
        let text = files::read_to_string(&path).map_err(Error::io("read", &path))?;
        let mut values: Value = serde_json::from_str(&text).map_err(|e| Error::malformed(&path, format!("not a JSON object: {e}")))?;
        if let Some(object) = values.as_object_mut() {
            object.insert("quant_method".into(), method.into());
        }
        return Ok(quantization::gptq_config(&values).map_err(quantization::unsupported(&path))?.unwrap_or_default());
    }
    Ok(GptqConfig::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchanged_text_and_key_order_are_preserved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let text = "{\"z\":1e-12,   \"a\": [1]}";
        std::fs::write(&path, text).unwrap();
        let mut config = Config::open(&path).unwrap();
        assert_eq!(config.render().unwrap(), text);
        config.set("b", json!(true));
        assert_eq!(config.render().unwrap(), "{\n  \"z\": 1e-12,\n  \"a\": [\n    1\n  ],\n  \"b\": true\n}\n");
        std::fs::write(&path, "[]").unwrap();
        assert!(Config::open(&path).unwrap_err().to_string().contains("not a JSON object"));
        assert_eq!(Config::open(&folder.path().join("none")).unwrap().render(), None);
    }

    /// Published files of Mamba 2 and Nemotron-H contain infinity.
    #[test]
    fn numbers_of_python_are_read() {
        let text = r#"{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "name": "NaN \" -Infinity", "low": -Infinity}"#;
        let mut config = Config::parse(Path::new("config.json"), text.to_owned()).unwrap();
        assert_eq!(config.render().unwrap(), text);
        assert_eq!(config.get("time_step_limit").unwrap(), &json!([0.0, { "__float__": "Infinity" }]));
        assert_eq!(config.get("name").unwrap(), "NaN \" -Infinity");
        config.set("number", json!(1));
        assert!(config.render().unwrap().contains("\"__float__\": \"-Infinity\""));
        assert!(Config::parse(Path::new("config.json"), "{\"low\": Infinite}".into()).is_err());
    }

    #[test]
    fn own_folders_are_marked_and_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, r#"{"model_type": "bert"}"#).unwrap();
        let mut config = Config::open(&path).unwrap();
        config.mark_own();
        std::fs::write(&path, config.render().unwrap()).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("\"compress-bert\""));
        assert_eq!(Config::open(&path).unwrap().model_type(), "bert");
    }

    #[test]
    fn the_tie_of_lfm2_takes_precedence() {
        for (own, usual, is_tied) in [(json!(true), false, true), (json!(false), true, false), (Value::Null, true, true)] {
            let values = json!({
                "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "tie_embedding": own, "tie_word_embeddings": usual
            });
            let config = Config::from_values(values.as_object().unwrap().clone());
            assert_eq!(config.tied_names(|_| true).len(), usize::from(is_tied), "{values}");
        }
    }

    #[test]
    fn a_null_description_is_ignored() {
        let values = Map::from_iter([("quantization_config".to_owned(), Value::Null)]);
        let mut config = Config { text: Some("kept".into()), values, ..Config::default() };
        assert!(config.take_quantization(Path::new("m")).unwrap().require_quantized(&crate::store::Weights::default()).is_ok());
        assert_eq!(config.render().unwrap(), "kept");
    }

    #[test]
    fn nested_descriptions_are_rejected_without_one_at_the_top_level() {
        let opened = |values: Value| {
            let mut config = Config::from_values(values.as_object().unwrap().clone());
            let found = config.take_quantization(Path::new("m")).map(|_| ());
            (found.map_err(|error| error.to_string()), Value::Object(config.values))
        };
        let gptq = json!({"quant_method": "gptq"});
        for (values, key) in [
            (json!({"text_config": {"quantization_config": gptq}}), "text_config.quantization_config"),
            (json!({"a_config": {"text_config": {"quantization_config": gptq}}, "quantization_config": null}), "a_config.text_config.quantization_config"),
        ] {
            let error = opened(values).0.unwrap_err();
            assert!(error.contains(&format!("config.json: `{key}`")), "{error}");
        }
        let null = json!({"text_config": {"quantization_config": null}});
        assert_eq!(opened(null.clone()), (Ok(()), null));
        // A description that no longer applies is not written again.
        let both = json!({"text_config": {"quantization_config": gptq, "a": 1}, "quantization_config": gptq});
        assert_eq!(opened(both), (Ok(()), json!({"text_config": {"a": 1}})));
    }

    #[test]
    fn unsupported_quantization_is_rejected() {
        let refused = |quantization: Value| {
            let mut config = Config { values: Map::from_iter([("quantization_config".to_owned(), quantization)]), ..Config::default() };
            config.take_quantization(Path::new("m")).unwrap_err().to_string()
        };
        assert!(refused(json!({"quant_method": "hqq"})).contains("quantization method `hqq`"));
        assert!(refused(json!({"quant_method": "gptq", "checkpoint_format": "marlin"})).contains("`checkpoint_format` of \"marlin\""));
        assert!(refused(json!({"quant_method": "awq", "version": "gemv"})).contains("`version` of \"gemv\""));
        let group = |weights: Value| json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}});
        assert!(refused(group(json!({"num_bits": 9, "type": "int"}))).contains("9 bits"));
        assert!(refused(group(json!({"num_bits": 5, "type": "float"}))).contains("5 bits, type \"float\""));
        let targets = |targets: Value| json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": targets}}});
        assert!(refused(targets(json!(["re:("]))).contains("pattern `re:(`"));
        assert!(refused(targets(json!([7]))).contains("the target 7"));
    }
}
