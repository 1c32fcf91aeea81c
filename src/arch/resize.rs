//! What `config.json` says of widths, after they have changed: read off the shapes of tensors.

use serde_json::{Map, Value, json};

use super::Settings;

/// Looks up the shape of a tensor.
pub type Shapes<'s> = &'s dyn Fn(&str) -> Option<Vec<usize>>;

/// Whether `config.json` of a family can only say one width for all layers.
pub fn one_width(model_type: &str) -> bool {
    KEYS.iter().any(|keys| keys.model_types.contains(&model_type))
}

/// Whether heads of a family are as wide as the residual stream divided by their number.
pub fn heads_fill_the_stream(model_type: &str) -> bool {
    KEYS.iter().any(|keys| keys.model_types.contains(&model_type) && keys.head_dim.is_none())
}

/// The key of a family that says how many layers there are.
pub fn layers_key(model_type: &str) -> Option<&'static str> {
    KEYS.iter().find(|keys| keys.model_types.contains(&model_type)).map(|keys| keys.layers)
}

/// Names of keys and of the tensors that tell their values.
struct Keys {
    model_types: &'static [&'static str],
    prefixes: &'static [&'static str],
    hidden: (&'static str, &'static str, usize),
    heads: (&'static str, &'static str, usize),
    /// Queries, keys and values in one tensor.
    fused: usize,
    groups: Option<(&'static str, &'static str)>,
    head_dim: Option<&'static str>,
    inner: (&'static str, &'static str, usize),
    layers: &'static str,
}

const KEYS: [Keys; 5] = [
    Keys {
        model_types: &["bert", "roberta", "xlm-roberta"],
        prefixes: &["bert.", "roberta.", ""],
        hidden: ("hidden_size", "embeddings.word_embeddings.weight", 1),
        heads: ("num_attention_heads", "encoder.layer.0.attention.self.query.weight", 0),
        fused: 1,
        groups: None,
        head_dim: None,
        inner: ("intermediate_size", "encoder.layer.0.intermediate.dense.weight", 0),
        layers: "num_hidden_layers",
    },
    Keys {
        model_types: &["vit"],
        prefixes: &["vit.", ""],
        hidden: ("hidden_size", "embeddings.cls_token", 2),
        heads: ("num_attention_heads", "encoder.layer.0.attention.attention.query.weight", 0),
        fused: 1,
        groups: None,
        head_dim: None,
        inner: ("intermediate_size", "encoder.layer.0.intermediate.dense.weight", 0),
        layers: "num_hidden_layers",
    },
    Keys {
        model_types: &["distilbert"],
        prefixes: &["distilbert.", ""],
        hidden: ("dim", "embeddings.word_embeddings.weight", 1),
        heads: ("n_heads", "transformer.layer.0.attention.q_lin.weight", 0),
        fused: 1,
        groups: None,
        head_dim: None,
        inner: ("hidden_dim", "transformer.layer.0.ffn.lin1.weight", 0),
        layers: "n_layers",
    },
    Keys {
        model_types: &["gpt2"],
        prefixes: &["transformer.", ""],
        hidden: ("n_embd", "wte.weight", 1),
        heads: ("n_head", "h.0.attn.c_attn.weight", 1),
        fused: 3,
        groups: None,
        head_dim: None,
        inner: ("n_inner", "h.0.mlp.c_fc.weight", 1),
        layers: "n_layer",
    },
    Keys {
        model_types: &["llama", "mistral", "qwen2", "qwen3"],
        prefixes: &["model.", ""],
        hidden: ("hidden_size", "embed_tokens.weight", 1),
        heads: ("num_attention_heads", "layers.0.self_attn.q_proj.weight", 0),
        fused: 1,
        groups: Some(("num_key_value_heads", "layers.0.self_attn.k_proj.weight")),
        head_dim: Some("head_dim"),
        inner: ("intermediate_size", "layers.0.mlp.gate_proj.weight", 0),
        layers: "num_hidden_layers",
    },
];

/// Values of `config.json` that describe tensors of these shapes, as far as that can be said; `head_dim` is the width of a head.
pub fn resized(config: &Map<String, Value>, head_dim: Option<usize>, shapes: Shapes) -> Vec<(&'static str, Value)> {
    let settings = Settings::new(config);
    let model_type = settings.text_or("model_type", "").unwrap_or("");
    if let Some(keys) = KEYS.iter().find(|keys| keys.model_types.contains(&model_type)) {
        return keys.resized(&settings, head_dim, shapes);
    }
    match model_type {
        "resnet" => resnet(&settings, shapes),
        _ => Vec::new(),
    }
}

impl Keys {
    fn resized(&self, settings: &Settings, head_dim: Option<usize>, shapes: Shapes) -> Vec<(&'static str, Value)> {
        let size = |name: &str, axis: usize| {
            let shape = self.prefixes.iter().find_map(|prefix| shapes(&format!("{prefix}{name}")))?;
            shape.get(axis).copied()
        };
        let mut found = Vec::new();
        let mut say = |key: &'static str, value: Option<usize>| {
            if let Some(value) = value
                && settings.get(key).and_then(Value::as_u64) != Some(value as u64)
            {
                found.push((key, json!(value)));
            }
        };
        say(self.hidden.0, size(self.hidden.1, self.hidden.2));
        say(self.inner.0, size(self.inner.1, self.inner.2));
        if let Some(width) = head_dim.filter(|width| *width > 0) {
            let heads = size(self.heads.1, self.heads.2).and_then(|wide| wide.checked_div(self.fused)?.checked_div(width));
            let groups = self.groups.and_then(|(key, name)| Some((key, size(name, 0)?.checked_div(width)?)));
            say(self.heads.0, heads);
            // By default there are as many as heads.
            if let Some((key, count)) = groups.filter(|(key, count)| settings.get(key).is_some() || Some(*count) != heads) {
                say(key, Some(count));
            }
            let follows = size(self.hidden.1, self.hidden.2).zip(heads).is_some_and(|(hidden, heads)| heads.checked_mul(width) == Some(hidden));
            if let Some(key) =
                self.head_dim.filter(|key| settings.get(key).is_some() || !follows || settings.text_or("model_type", "").is_ok_and(|t| t == "qwen3"))
            {
                say(key, Some(width));
            }
        }
        found
    }
}

fn resnet(settings: &Settings, shapes: Shapes) -> Vec<(&'static str, Value)> {
    let rows =
        |module: &str| ["resnet.", ""].iter().find_map(|prefix| shapes(&format!("{prefix}{module}.convolution.weight"))).and_then(|s| s.first().copied());
    let last = if settings.text_or("layer_type", "bottleneck").is_ok_and(|kind| kind == "basic") { 1 } else { 2 };
    let stages = settings.sizes("depths").map_or(0, |depths| depths.len());
    let hidden: Option<Vec<usize>> = (0..stages).map(|stage| rows(&format!("encoder.stages.{stage}.layers.0.layer.{last}"))).collect();
    let mut found = Vec::new();
    if let Some(width) = rows("embedder.embedder") {
        found.push(("embedding_size", json!(width)));
    }
    if let Some(hidden) = hidden {
        found.push(("hidden_sizes", json!(hidden)));
    }
    found.retain(|(key, value)| settings.get(key) != Some(value));
    found
}
