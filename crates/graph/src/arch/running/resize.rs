//! Updates of the sizes in `config.json` after structured pruning, derived from the shapes of tensors.

use serde_json::{Map, Value, json};

use super::rope::parameters;
use super::{DenseLayers, Groups, IndirectSizes, Settings, Sizes, family};
use crate::arch::layer_list::listed_layers;

/// Looks up the shape of a tensor.
pub type Shapes<'s> = &'s dyn Fn(&str) -> Option<Vec<usize>>;

fn sizes(model_type: &str) -> Option<&'static Sizes> {
    family(model_type).filter(|family| family.graph.is_some())?.sizes
}

/// Whether `config.json` of a family can only specify one width for all layers.
pub fn has_uniform_widths(model_type: &str) -> bool {
    sizes(model_type).is_some()
}

/// Whether `config.json` of a family specifies one width per stage.
pub fn has_stage_widths(model_type: &str) -> bool {
    family(model_type).is_some_and(|family| family.has_stage_widths)
}

/// Whether the head width of a family is the width of the residual stream divided by the number of heads.
pub fn derives_head_dim(model_type: &str) -> bool {
    sizes(model_type).is_some_and(|sizes| sizes.head_dim.is_none())
}

/// The configuration key of the number of layers.
pub fn layers_key(model_type: &str) -> Option<&'static str> {
    sizes(model_type).map(|sizes| sizes.layers)
}

/// The values of `config.json` that change if only these layers, in order, have experts, and the others a
/// dense network.
pub fn dense_layers(config: &Map<String, Value>, has_experts: &[bool]) -> Vec<(&'static str, Value)> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("");
    let keys = family(model_type).and_then(|family| family.experts).map_or(&[][..], |experts| experts.dense);
    let dense: Vec<usize> = has_experts.iter().enumerate().filter(|(_, has)| !**has).map(|(layer, _)| layer).collect();
    let mut found = Vec::new();
    for key in keys {
        match *key {
            DenseLayers::Count(key) if dense.iter().copied().eq(0..dense.len()) => found.push((key, json!(dense.len()))),
            DenseLayers::Count(_) => {}
            DenseLayers::Types(key) => found.push((key, has_experts.iter().map(|has| if *has { "sparse" } else { "dense" }).collect())),
            DenseLayers::Experts(key) => {
                let sparse: Vec<usize> = (0..has_experts.len()).filter(|layer| !dense.contains(layer)).collect();
                found.push((key, json!(sparse)));
            }
            DenseLayers::Indices(key, step) => {
                found.push((key, json!(dense)));
                // The default is 1.
                found.extend(config.contains_key(step).then(|| (step, json!(1))));
            }
        }
    }
    found.retain(|(key, value)| config.get(*key) != Some(value));
    found
}

/// A tensor name and the index of one of its axes.
pub type Axis = (String, usize);

/// The axis that determines the width of the residual stream, and axes of the same width in tensors that
/// the graph does not read.
pub fn residual_stream_axes(model_type: &str, shapes: Shapes) -> Option<(Axis, Vec<Axis>)> {
    let sizes = sizes(model_type)?;
    let of = |(name, axis): (&str, usize)| {
        let (name, shape) = sizes.stored(name, shapes)?;
        Some((*shape.get(axis)?, (name, axis)))
    };
    let (width, stream) = of((sizes.hidden.1, sizes.hidden.2))?;
    Some((stream, sizes.unread.iter().filter_map(|axis| of(*axis)).filter(|(size, _)| *size == width).map(|(_, axis)| axis).collect()))
}

/// Whether transformers refuses the number of `longrope` factors in a configuration, because the family
/// computes another one from the width of the residual stream and the number of heads.
pub fn refuses_rope_factors(config: &Map<String, Value>) -> bool {
    const PART: &str = "partial_rotary_factor";
    let settings = Settings::new(config);
    let expected = || {
        let sizes = family(settings.text("model_type").ok()?).filter(|family| family.counts_rope_factors)?.sizes?;
        let rope = parameters(&settings).ok()??;
        let head = settings.size(sizes.hidden.0).ok()?.checked_div(settings.size(sizes.heads.0).ok()?)?;
        let part = rope.number_or(PART, settings.number_or(PART, 1.0).ok()?).ok()?;
        let factors = rope.numbers("short_factor").ok()?.len();
        Some(((head as f64 * part) as usize).checked_div(2) != Some(factors))
    };
    expected().unwrap_or(false)
}

/// The values of `config.json` that changed, for tensors of these shapes; `head_dim` is the width of a
/// head.
pub fn resized(config: &Map<String, Value>, head_dim: Option<usize>, shapes: Shapes) -> Vec<(&'static str, Value)> {
    let settings = Settings::new(config);
    let model_type = settings.text_or("model_type", "").unwrap_or("");
    if let Some(sizes) = sizes(model_type) {
        let mut found = sizes.resized(&settings, head_dim, shapes);
        if let Some(indirect) = family(model_type).and_then(|family| family.indirect_sizes) {
            indirect.resolve(&settings, &mut found);
        }
        return found;
    }
    if has_stage_widths(model_type) { resnet(&settings, shapes) } else { Vec::new() }
}

impl IndirectSizes {
    /// Specifies the size itself.
    fn resolve(&self, settings: &Settings, found: &mut Vec<(&'static str, Value)>) {
        let (key, replaced) = self.replaced;
        let value = found.iter().find(|(name, _)| *name == replaced).map(|(_, value)| value.clone()).or_else(|| settings.get(replaced).cloned());
        if let Some(value) = value.filter(|value| settings.get(key).is_some_and(|before| before != value)) {
            found.push((key, value));
        }
        if settings.flag_or(self.adjusted, true).unwrap_or(true) {
            found.push((self.adjusted, json!(false)));
        }
    }
}

impl Sizes {
    /// The name of a tensor in the checkpoint, and its shape.
    fn stored(&self, name: &str, shapes: Shapes) -> Option<(String, Vec<usize>)> {
        self.prefixes.iter().map(|prefix| format!("{prefix}{name}")).find_map(|name| shapes(&name).map(|shape| (name, shape)))
    }

    fn resized(&self, settings: &Settings, head_dim: Option<usize>, shapes: Shapes) -> Vec<(&'static str, Value)> {
        let shape = |name: &str| self.stored(name, shapes).map(|(_, shape)| shape);
        // Some parts do not exist in every layer.
        let layers = settings.size(self.layers).ok().or_else(|| listed_layers(|key| settings.get(key))).unwrap_or(1);
        let first = |name: &str| shape(name).or_else(|| (1..layers).find_map(|layer| shape(&name.replacen("layers.0.", &format!("layers.{layer}."), 1))));
        let size = |name: &str, axis: usize| first(name)?.get(axis).copied();
        let mut found = Vec::new();
        let mut update = |key: &'static str, value: Option<usize>| {
            if let Some(value) = value
                && settings.get(key).and_then(Value::as_u64) != Some(value as u64)
            {
                found.push((key, json!(value)));
            }
        };
        update(self.hidden.0, size(self.hidden.1, self.hidden.2));
        for (key, name, axis) in self.other_sizes {
            update(key, size(name, *axis));
        }
        if let Some(width) = head_dim.filter(|width| *width > 0) {
            let heads = size(self.heads.1, self.heads.2).and_then(|wide| wide.checked_div(width));
            let groups = self.groups.and_then(|(key, name, contents)| {
                let all = size(name, 0)?.checked_div(width)?;
                Some((key, if contents == Groups::Fused { all.checked_sub(heads?)?.checked_div(2)? } else { all }))
            });
            update(self.heads.0, heads);
            if let Some((key, name, axis)) = self.decoder_heads {
                update(key, size(name, axis).and_then(|wide| wide.checked_div(width)));
            }
            // The default is the number of heads.
            if let Some((key, count)) = groups.filter(|(key, count)| settings.get(key).is_some() || Some(*count) != heads) {
                update(key, Some(count));
            }
            let follows = size(self.hidden.1, self.hidden.2).zip(heads).is_some_and(|(hidden, heads)| heads.checked_mul(width) == Some(hidden));
            if let Some(key) = self.head_dim.filter(|key| settings.get(key).is_some() || !follows || self.custom_head_dim_default) {
                update(key, Some(width));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_with_a_dense_network_are_described() {
        let changed = |config: Value, has_experts: &[bool]| dense_layers(config.as_object().unwrap(), has_experts);
        let qwen = json!({ "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [] });
        assert_eq!(changed(qwen, &[true, false, true]), [("mlp_only_layers", json!([1])), ("decoder_sparse_step", json!(1))]);
        let glm = json!({ "model_type": "glm4_moe_lite", "first_k_dense_replace": 1 });
        assert_eq!(changed(glm, &[true, true]), [("mlp_layer_types", json!(["sparse", "sparse"])), ("first_k_dense_replace", json!(0))]);
        assert!(changed(json!({ "model_type": "deepseek_v3", "first_k_dense_replace": 1 }), &[false, true]).is_empty());
        assert!(changed(json!({ "model_type": "mixtral" }), &[true]).is_empty());
        let llama4 = json!({ "model_type": "llama4_text", "moe_layers": [1, 3] });
        assert_eq!(changed(llama4, &[true, false, true]), [("moe_layers", json!([0, 2]))]);
    }

    #[test]
    fn rope_factors_of_phi3_follow_the_width_of_the_residual_stream() {
        let refused = |family: &str, width: usize, kind: &str| {
            let mut rope = json!({ "rope_type": kind, "partial_rotary_factor": 0.75 });
            if kind == "longrope" {
                rope["short_factor"] = json!([1.0, 1.2, 1.6]);
            }
            let config = json!({ "model_type": family, "hidden_size": width, "num_attention_heads": 2, "head_dim": 8, "rope_parameters": rope });
            refuses_rope_factors(config.as_object().unwrap())
        };
        assert!(refused("phi3", 8, "longrope"));
        assert!(!refused("phi3", 16, "longrope") && !refused("phi3", 8, "default") && !refused("llama", 8, "longrope"));
    }
}
