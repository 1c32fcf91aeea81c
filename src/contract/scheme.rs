//! The `quantization_config` of compressed-tensors as runtimes read it, including settings that this program
//! does not support.

use serde_json::{Map, Value};

use crate::store::{Codes, Pattern};

/// Arguments of weights or activations.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Arguments {
    pub bits: u64,
    /// Whether codes are integers, not floats.
    pub is_integer: bool,
    pub symmetric: bool,
    /// `tensor`, `channel`, `group`, `block`, `token`, `tensor_group` or `attn_head`.
    pub strategy: String,
    pub group_size: Option<i64>,
    /// Rows and columns of a block.
    pub block: Option<[u64; 2]>,
    /// Whether scales are computed while the model runs.
    pub dynamic: bool,
    pub actorder: Option<String>,
}

impl Arguments {
    /// The codes, if this program supports them.
    pub(super) fn codes(&self) -> Option<Codes> {
        Codes::from_type(self.is_integer, self.bits)
    }

    /// `None` for null.
    fn parse(value: &Value) -> Option<Arguments> {
        let values = value.as_object()?;
        let of = |key: &str| values.get(key).unwrap_or(&Value::Null);
        let group_size = of("group_size").as_i64();
        // Without a strategy, compressed-tensors infers it from the group size (quant_args.py).
        let inferred = match group_size {
            None => "tensor",
            Some(-1) => "channel",
            Some(_) => "group",
        };
        let sides: Option<Vec<u64>> = match of("block_structure") {
            Value::Array(sides) => sides.iter().map(Value::as_u64).collect(),
            Value::String(sides) => sides.split('x').map(|side| side.trim().parse().ok()).collect(),
            _ => None,
        };
        let actorder = match of("actorder") {
            Value::String(order) => Some(order.clone()),
            Value::Bool(true) => Some("group".to_owned()),
            _ => None,
        };
        Some(Arguments {
            bits: of("num_bits").as_u64().unwrap_or(8),
            is_integer: of("type").as_str().is_none_or(|name| name.eq_ignore_ascii_case("int")),
            symmetric: of("symmetric").as_bool().unwrap_or(true),
            strategy: of("strategy").as_str().unwrap_or(inferred).to_owned(),
            group_size,
            block: sides.and_then(|sides| sides.try_into().ok()),
            dynamic: !matches!(of("dynamic"), Value::Null | Value::Bool(false)),
            actorder,
        })
    }
}

/// An entry of `targets` or `ignore`: the name of a module, its class, or a regular expression.
pub(super) struct Selector {
    pub text: String,
    expression: Option<Pattern>,
}

impl Selector {
    fn list(value: Option<&Value>) -> Result<Vec<Selector>, String> {
        let entries = value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
        let selector = |text: &str| -> Result<Selector, String> {
            let expression = text.starts_with("re:").then(|| text.parse::<Pattern>()).transpose();
            Ok(Selector { text: text.to_owned(), expression: expression.map_err(|e| e.to_string())? })
        };
        entries.map(selector).collect()
    }

    /// Whether this is the name of a module, or an expression that matches it.
    pub(super) fn names(&self, module: &str) -> bool {
        self.text == module || self.expression.as_ref().is_some_and(|expression| expression.matches(module))
    }
}

/// An entry of `config_groups`.
pub(super) struct Group {
    pub name: String,
    pub targets: Vec<Selector>,
    pub weights: Option<Arguments>,
    pub inputs: Option<Arguments>,
    /// Format of the group, or of the whole checkpoint.
    pub format: String,
}

impl Group {
    /// Whether the weights are packed integers, and activations are floats.
    pub(super) fn has_packed_integers(&self) -> bool {
        self.format == "pack-quantized" && self.inputs.is_none() && self.weights.as_ref().is_some_and(|weights| weights.is_integer)
    }

    /// Whether two groups describe the same quantization.
    pub(super) fn is_equal(&self, other: &Group) -> bool {
        (&self.weights, &self.inputs, &self.format) == (&other.weights, &other.inputs, &other.format)
    }
}

/// The `quantization_config` of a `config.json`.
pub(super) struct Quantization {
    pub method: String,
    pub format: String,
    pub groups: Vec<Group>,
    pub ignore: Vec<Selector>,
    pub values: Map<String, Value>,
}

impl Quantization {
    /// Fails if a regular expression is invalid.
    pub(super) fn parse(values: &Map<String, Value>) -> Result<Quantization, String> {
        let text = |values: &Map<String, Value>, key: &str| values.get(key).and_then(Value::as_str).map(str::to_owned);
        let format = text(values, "format").unwrap_or_default();
        let mut groups = Vec::new();
        for (name, group) in values.get("config_groups").and_then(Value::as_object).into_iter().flatten() {
            let Some(group) = group.as_object() else { continue };
            let arguments = |key: &str| group.get(key).and_then(Arguments::parse);
            groups.push(Group {
                name: name.clone(),
                targets: Selector::list(group.get("targets"))?,
                weights: arguments("weights"),
                inputs: arguments("input_activations"),
                format: text(group, "format").unwrap_or_else(|| format.clone()),
            });
        }
        let (method, ignore) = (text(values, "quant_method").unwrap_or_default(), Selector::list(values.get("ignore"))?);
        Ok(Quantization { method, format, groups, ignore, values: values.clone() })
    }

    /// Whether the weights are in the format of compressed-tensors.
    pub(super) fn is_compressed_tensors(&self) -> bool {
        self.method == "compressed-tensors"
    }

    /// The group of a module, by any of its names. Names and expressions take precedence over classes.
    pub(super) fn group(&self, names: &[String], class: &str) -> Option<&Group> {
        let is_named = |group: &&Group| group.targets.iter().any(|target| names.iter().any(|name| target.names(name)));
        let has_class = |group: &&Group| group.targets.iter().any(|target| target.text == class);
        self.groups.iter().find(is_named).or_else(|| self.groups.iter().find(has_class))
    }

    /// The entry of `ignore` that excludes a module, by any of its names.
    pub(super) fn ignored(&self, names: &[String], class: &str) -> Option<&str> {
        let excludes = |entry: &&Selector| entry.text == class || names.iter().any(|name| entry.names(name));
        self.ignore.iter().find(excludes).map(|entry| entry.text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn strategies_are_inferred_like_compressed_tensors() {
        let strategy = |value: Value| Arguments::parse(&value).unwrap().strategy;
        assert_eq!(strategy(json!({})), "tensor");
        assert_eq!(strategy(json!({ "group_size": -1 })), "channel");
        assert_eq!(strategy(json!({ "group_size": 64 })), "group");
        assert_eq!(strategy(json!({ "group_size": 16, "strategy": "tensor_group" })), "tensor_group");
        assert_eq!(Arguments::parse(&Value::Null), None);
        let block = Arguments::parse(&json!({ "block_structure": [128, 64], "dynamic": "local" })).unwrap();
        assert_eq!((block.block, block.dynamic), (Some([128, 64]), true));
    }

    #[test]
    fn names_take_precedence_over_classes() {
        let weights = |bits: u8| json!({ "num_bits": bits });
        let groups = json!({
            "a": { "targets": ["Linear"], "weights": weights(4) },
            "b": { "targets": ["re:.*down_proj$"], "weights": weights(8) },
        });
        let values = json!({ "config_groups": groups, "ignore": ["lm_head", "re:.*gate$"] });
        let quantization = Quantization::parse(values.as_object().unwrap()).unwrap();
        let group = |name: &str| quantization.group(&[name.to_owned()], "Linear").map(|group| group.name.as_str());
        assert_eq!((group("mlp.down_proj"), group("mlp.up_proj")), (Some("b"), Some("a")));
        assert_eq!(quantization.ignored(&["mlp.gate".to_owned()], "Linear"), Some("re:.*gate$"));
        assert_eq!(quantization.ignored(&["mlp.gate_proj".to_owned()], "Linear"), None);
        assert!(Quantization::parse(json!({ "ignore": ["re:("] }).as_object().unwrap()).is_err());
    }
}
