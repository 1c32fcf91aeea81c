//! Typed access to `config.json` of a model that is written as a GGUF file.

use serde_json::{Map, Value as Json};

use crate::arch::{self, GgufFamily, Recurrent, Setting};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::store::gguf::Value;

/// Typed access to `config.json`.
pub(super) struct Reader<'m> {
    pub model: &'m Model,
    pub family: &'static GgufFamily,
}

impl Reader<'_> {
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.model.config.get(key).filter(|value| !value.is_null())
    }

    pub fn refused(&self, what: &str, hint: impl Into<String>) -> Error {
        Error::Unsupported { what: format!("gguf: config.json: {what}"), hint: hint.into() }
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let wrong = |value| self.refused(&format!("`{key}` of {value}"), "must be a number");
        self.get(key).map(|value| value.as_f64().ok_or_else(|| wrong(value))).transpose()
    }

    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        let wrong = |value| self.refused(&format!("`{key}` of {value}"), "must be a positive integer");
        self.get(key).map(|value| value.as_u64().filter(|size| *size > 0).ok_or_else(|| wrong(value))).transpose()
    }

    /// A setting in the form of GGUF files.
    pub fn setting(&self, setting: &Setting) -> Result<Value> {
        let wrong = |value: &Json, what: &str| self.refused(&format!("`{}` of {value}", setting.key), format!("must be {what}"));
        let default = setting.default_value();
        let value = self.get(setting.key).unwrap_or(&default);
        match &default {
            Json::Bool(_) => value.as_bool().map(Value::Bool).ok_or_else(|| wrong(value, "true or false")),
            Json::Number(number) if number.is_u64() => value.as_u64().map(Value::Unsigned).ok_or_else(|| wrong(value, "an integer")),
            _ => value.as_f64().map(Value::Float).ok_or_else(|| wrong(value, "a number")),
        }
    }

    /// The number of neurons of the weights, if other keys than `intermediate_size` change it.
    pub fn stored_neurons(&self) -> Option<u64> {
        if self.family.recurrent.has_state_space_sizes() && self.family.experts.is_none() {
            return self.get("shared_intermediate_size").and_then(Json::as_u64);
        }
        let is_down = |name: &str| self.family.to_gguf(name).is_some_and(|name| name == "blk.0.ffn_down.weight");
        let mut down = self.model.weights.by_name.iter().filter(|(name, _)| self.family.recurrent == Recurrent::ShortConvolution && is_down(name));
        down.next().and_then(|(_, weight)| weight.shape.last().copied()).map(|neurons| neurons as u64)
    }

    /// The number of key-value heads; null has the meaning of as many as query heads.
    pub fn groups(&self) -> Result<u64> {
        const KEY: &str = "num_key_value_heads";
        let default = self.family.key_value_heads.filter(|_| self.model.config.get(KEY).is_none());
        self.size(KEY)?.or(default).map_or_else(|| self.required("num_attention_heads"), Ok)
    }

    /// The number of key-value heads of each layer, if some layers have none.
    pub fn groups_of_layers(&self, groups: u64) -> Result<Option<Vec<i64>>> {
        if !self.family.recurrent.lists_heads() {
            return Ok(None);
        }
        let own = |layer| if self.is_recurrent(layer) { 0 } else { i64::try_from(groups).unwrap_or(i64::MAX) };
        Ok(Some((0..self.layers()?).map(own).collect()))
    }

    /// The number of layers, for which some configurations only have the kinds of all layers.
    pub fn layers(&self) -> Result<u64> {
        let lists = self.family.recurrent == Recurrent::SingleParts;
        let listed = if lists { arch::listed_layers(|key| self.get(key)) } else { None };
        listed.map_or_else(|| self.required("num_hidden_layers"), |count| Ok(count as u64))
    }

    /// Whether a layer of the checkpoint has no attention.
    pub fn is_recurrent(&self, layer: u64) -> bool {
        self.family.is_recurrent(layer, self.model.weights.by_name.keys())
    }

    /// Parameters of rotary embeddings.
    pub fn rope(&self) -> Option<&Json> {
        self.get("rope_parameters").or(self.get("rope_scaling"))
    }

    /// Parameters of rotary embeddings of layers without a sliding window. The newer format has one group per
    /// attention type.
    pub fn rope_scaling(&self) -> Option<&Map<String, Json>> {
        let all = self.rope();
        all.and_then(|all| all.get("full_attention")).or(all).and_then(Json::as_object)
    }

    /// Number of rotated elements of a head.
    pub fn rotary_width(&self, head_dim: u64) -> Result<u64> {
        let Some((key, default)) = self.family.partial_rotary else { return Ok(head_dim) };
        let nested = self.get("rope_parameters").and_then(|parameters| parameters.get(key)).and_then(Json::as_f64);
        let width = self.family.rotary_width.map_or(Ok(None), |key| self.size(key))?;
        let part = match (nested.or(self.number(key)?), width) {
            (Some(part), _) => part,
            (None, Some(width)) => return Ok(width),
            (None, None) => default,
        };
        Ok((head_dim as f64 * part) as u64)
    }

    pub fn required(&self, key: &str) -> Result<u64> {
        self.size(key)?.ok_or_else(|| self.refused(&format!("a configuration without `{key}`"), "GGUF files require it"))
    }
}
