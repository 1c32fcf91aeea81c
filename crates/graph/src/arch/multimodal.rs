//! Language models with a vision tower: Qwen-VL, Gemma 3, Mistral 3, Llama 4 and Qwen3.5.
//!
//! A graph has the language model, and reads texts without images, all of whose positions are equal on the
//! three axes of Qwen-VL (Wang et al., 2024). Passes copy the vision tower unchanged, unless sizes of images
//! make it part of the graph (`running/images.rs`).

use serde_json::{Map, Value, json};

use super::family::{EXEMPT, PREFIXES};
use super::{DECODER, DenseLayers, ExpertLayout, Family, Keys, LanguageModel, Tower, gemma, llama, llama4, qwen_moe, qwen3_next};
use crate::store::Role;

/// Keys of images, and of the tokens that represent them in texts.
const KEYS: Keys = Keys {
    harmless: &[
        "boi_token_id",
        "boi_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "video_token_id",
        "video_token_index",
        "vision_config",
        "vision_end_token_id",
        "vision_feature_layer",
        "vision_start_token_id",
        "vision_token_id",
    ],
    neutral: &[],
};

const EXPERT_KEYS: Keys = Keys {
    harmless: &["attention_dropout", "intermediate_size", "max_position_embeddings", "output_router_logits", "router_aux_loss_coef"],
    neutral: &[("partial_rotary_factor", "1.0")],
};

const QWEN2_VL_TEXT: Family = Family { model_type: "qwen2_vl_text", graph: graph!(running::build_qwen2_vl), gguf: None, genai: DECODER.genai, ..llama::QWEN2 };

const QWEN3_VL_TEXT: Family = Family { model_type: "qwen3_vl_text", graph: graph!(running::build_qwen3_vl), gguf: None, genai: DECODER.genai, ..llama::QWEN3 };

const QWEN3_VL_MOE_TEXT: Family = Family {
    model_type: "qwen3_vl_moe_text",
    graph: graph!(running::build_qwen3_vl_moe),
    keys: EXPERT_KEYS,
    routers: &["mlp.gate"],
    experts: Some(ExpertLayout {
        keys: &["num_experts", "num_local_experts"],
        dense: &[DenseLayers::Indices("mlp_only_layers", "decoder_sparse_step")],
        ..ExpertLayout::SEPARATE
    }),
    needs_stacked_experts: true,
    gguf: None,
    ..qwen_moe::QWEN3_MOE
};

const fn language_model(model_type: &'static str) -> LanguageModel {
    LanguageModel { model_type, sizes: &[], is_flat: false, tower: None }
}

/// A model whose language model is like `text` and has this `model_type`.
const fn with_vision(model_type: &'static str, of_text: &'static str, text: Family) -> Family {
    Family {
        model_type,
        graph: None,
        keys: KEYS,
        sizes: None,
        // By the names of transformers 5, and of older checkpoints.
        tied: &[
            ("lm_head.weight", "model.language_model.embed_tokens.weight"),
            ("lm_head.weight", "model.embed_tokens.weight"),
            ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
        ],
        embeddings: &["embed_tokens", "visual.pos_embed", "embeddings.position_embedding"],
        language_model: Some(language_model(of_text)),
        gguf: None,
        genai: DECODER.genai,
        ..text
    }
}

/// As [`with_vision`], with the keys of the language model next to `vision_config` in published files.
const fn flat(model_type: &'static str, of_text: &'static str, text: Family, tower: Tower) -> Family {
    let language_model = LanguageModel { is_flat: true, tower: Some(tower), ..language_model(of_text) };
    Family { language_model: Some(language_model), ..with_vision(model_type, of_text, text) }
}

/// As [`with_vision`], with a tower that can be run.
const fn with_images(model_type: &'static str, of_text: &'static str, text: Family, tower: Tower) -> Family {
    let language_model = LanguageModel { tower: Some(tower), ..language_model(of_text) };
    Family { language_model: Some(language_model), ..with_vision(model_type, of_text, text) }
}

const QWEN2_TOWER: Tower = Tower { model_type: "qwen2_vl_vision", patch: 14, image_token: 151_655, sections: [16, 24, 24], interleaved: false, values: &[] };
const QWEN3_TOWER: Tower = Tower { model_type: "qwen3_vl_vision", patch: 16, image_token: 151_655, sections: [24, 20, 20], interleaved: true, values: &[] };
const QWEN3_5_TOWER: Tower = Tower { image_token: 248_056, sections: [11, 11, 10], values: &[("deepstack_visual_indexes", "[]")], ..QWEN3_TOWER };

/// Sizes of the configuration class, which published files of Gemma 3 do not repeat.
const GEMMA3_SIZES: &[(&str, usize)] =
    &[("vocab_size", 262_208), ("hidden_size", 2304), ("intermediate_size", 9216), ("num_hidden_layers", 26), ("num_attention_heads", 8)];

/// The families.
pub(super) const FAMILIES: &[Family] = &[
    QWEN2_VL_TEXT,
    Family { model_type: "qwen2_5_vl_text", ..QWEN2_VL_TEXT },
    QWEN3_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    flat("qwen2_vl", "qwen2_vl_text", QWEN2_VL_TEXT, QWEN2_TOWER),
    flat("qwen2_5_vl", "qwen2_5_vl_text", QWEN2_VL_TEXT, Tower { model_type: "qwen2_5_vl_vision", ..QWEN2_TOWER }),
    with_images("qwen3_vl", "qwen3_vl_text", QWEN3_VL_TEXT, QWEN3_TOWER),
    with_images("qwen3_vl_moe", "qwen3_vl_moe_text", QWEN3_VL_MOE_TEXT, QWEN3_TOWER),
    Family {
        language_model: Some(LanguageModel { sizes: GEMMA3_SIZES, ..language_model("gemma3_text") }),
        ..with_vision("gemma3", "gemma3_text", gemma::GEMMA3)
    },
    with_vision("mistral3", "mistral", llama::MISTRAL),
    Family { exempt: &[("vision_model", Role::Vision)], ..with_vision("llama4", "llama4_text", llama4::LLAMA4_TEXT) },
    with_images("qwen3_5", "qwen3_5_text", qwen3_next::QWEN3_5, QWEN3_5_TOWER),
    with_images("qwen3_5_moe", "qwen3_5_moe_text", qwen3_next::QWEN3_5_MOE, QWEN3_5_TOWER),
];

/// A language model as a model of its own.
pub struct TextModel {
    /// The `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The class in `architectures`.
    pub class: &'static str,
    /// The other values of `config.json`.
    pub values: Map<String, Value>,
}

/// The names in transformers of a language model as a model of its own.
struct Alone {
    /// The `model_type` within a model with a vision tower.
    inside: &'static str,
    model_type: &'static str,
    class: &'static str,
    /// Defaults of the configuration within that model, with JSON values, if those of `model_type` differ.
    defaults: &'static [(&'static str, &'static str)],
    /// Whether positions have three axes, of which texts need one.
    has_sections: bool,
}

const fn alone(model_type: &'static str, class: &'static str) -> Alone {
    Alone { inside: model_type, model_type, class, defaults: &[], has_sections: false }
}

const QWEN2: Alone = Alone {
    inside: "qwen2_vl_text",
    defaults: &[("rms_norm_eps", "1e-5"), ("rope_theta", "1000000.0")],
    has_sections: true,
    ..alone("qwen2", "Qwen2ForCausalLM")
};
const QWEN3: Alone =
    Alone { inside: "qwen3_vl_text", defaults: &[("head_dim", "128"), ("rope_theta", "500000.0")], has_sections: true, ..alone("qwen3", "Qwen3ForCausalLM") };
const EXPERT_DEFAULTS: &[(&str, &str)] =
    &[("moe_intermediate_size", "1408"), ("norm_topk_prob", "true"), ("num_experts_per_tok", "4"), ("rope_theta", "500000.0")];
const ALONE: &[Alone] = &[
    QWEN2,
    Alone { inside: "qwen2_5_vl_text", ..QWEN2 },
    QWEN3,
    Alone { inside: "qwen3_vl_moe_text", defaults: EXPERT_DEFAULTS, ..Alone { model_type: "qwen3_moe", class: "Qwen3MoeForCausalLM", ..QWEN3 } },
    alone("gemma3_text", "Gemma3ForCausalLM"),
    alone("mistral", "MistralForCausalLM"),
    alone("ministral3", "Ministral3ForCausalLM"),
    alone("llama4_text", "Llama4ForCausalLM"),
    alone("qwen3_5_text", "Qwen3_5ForCausalLM"),
    alone("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
];

/// The language model of a model with a vision tower; `None` for other models.
pub fn extracted(config: &Map<String, Value>) -> Option<TextModel> {
    let language_model = super::family(super::model_type(config))?.language_model?;
    let nested = config.get("text_config").and_then(Value::as_object);
    let stated = nested.and_then(|text| text.get("model_type")).and_then(Value::as_str);
    let found = ALONE.iter().find(|row| row.inside == stated.unwrap_or(language_model.model_type))?;
    let mut values = match nested {
        Some(text) => text.clone(),
        None if language_model.is_flat => {
            config.iter().filter(|(key, _)| !KEYS.harmless.contains(&key.as_str())).map(|(key, value)| (key.clone(), value.clone())).collect()
        }
        None => Map::new(),
    };
    let rope = values.get("rope_parameters").or_else(|| values.get("rope_scaling")).and_then(Value::as_object);
    let has_base = rope.is_some_and(|rope| rope.contains_key("rope_theta"));
    let sizes = language_model.sizes.iter().map(|(key, size)| (*key, json!(size)));
    let defaults = found.defaults.iter().filter(|(key, _)| *key != "rope_theta" || !has_base);
    let defaults = defaults.map(|(key, text)| (*key, serde_json::from_str(text).unwrap_or_default()));
    for (key, value) in sizes.chain(defaults) {
        if values.get(key).is_none_or(Value::is_null) {
            values.insert(key.to_owned(), value);
        }
    }
    if found.has_sections {
        ["rope_parameters", "rope_scaling"].into_iter().for_each(|key| remove_sections(&mut values, key));
    }
    Some(TextModel { model_type: found.model_type, class: found.class, values })
}

/// Removes the axes of positions from the parameters of rotary embeddings.
fn remove_sections(values: &mut Map<String, Value>, key: &str) {
    let Some(Value::Object(rope)) = values.get_mut(key) else { return };
    rope.retain(|key, _| !key.starts_with("mrope_"));
    for kind in ["rope_type", "type"] {
        if rope.get(kind).and_then(Value::as_str) == Some("mrope") {
            rope.insert(kind.to_owned(), json!("default"));
        }
    }
    // The form of transformers 4 without scaling.
    if rope.keys().all(|key| ["rope_type", "type"].contains(&key.as_str())) {
        values.remove(key);
    }
}

/// All vision towers that can be run with a language model.
pub fn towers() -> impl Iterator<Item = Tower> {
    super::families().filter_map(|family| family.language_model?.tower)
}

/// The vision tower that can be run with a language model, and its configuration.
pub fn tower(config: &Map<String, Value>) -> Option<(Tower, &Map<String, Value>)> {
    let tower = super::family(super::model_type(config))?.language_model?.tower?;
    Some((tower, config.get("vision_config")?.as_object()?))
}

/// The id of the token of a patch in texts, and the number of patches of an image of this height
/// and width.
pub fn image_tokens(config: &Map<String, Value>, size: [usize; 2]) -> Option<(i64, usize)> {
    let (tower, vision) = tower(config)?;
    let number = |key: &str, default: usize| vision.get(key).and_then(Value::as_u64).map_or(default, |number| number as usize);
    let side = number("patch_size", tower.patch).checked_mul(number("spatial_merge_size", 2))?;
    let [rows, columns] = size.map(|pixels| pixels.checked_div(side));
    let token = config.get("image_token_id").and_then(Value::as_i64).unwrap_or(tower.image_token);
    Some((token, rows?.checked_mul(columns?)?))
}

/// Whether a tensor belongs to a vision tower, or projects its features.
pub fn is_of_tower(name: &str) -> bool {
    let is_tower = |part: &str| part == "vision_model" || EXEMPT.iter().any(|(name, role)| *name == part && *role == Role::Vision);
    name.split('.').any(is_tower)
}

/// The name in a text model of a tensor of a language model.
pub fn name_in_text_model(name: &str) -> String {
    let [new, published, without_head] = PREFIXES;
    let inside = name.strip_prefix(new).or_else(|| name.strip_prefix(published));
    inside.map_or_else(|| name.strip_prefix(without_head).unwrap_or(name).to_owned(), |rest| format!("model.{rest}"))
}

#[cfg(feature = "run")]
mod running {
    use crate::arch::llama::running::slides_by_number;
    use crate::arch::qwen_moe::running::qwen;
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, every_layer, prefix};
    use crate::arch::running::experts::Experts;
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    pub fn build_qwen2_vl(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder { qkv_bias: true, out_bias: false, ..Decoder::with_epsilon(s, None, 1e-5)? };
        let rope = RopeDefaults { theta: 1e6, has_sections: true, ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |index| slides_by_number(s, index, 80))?)
    }

    const QWEN3_ROPE: RopeDefaults = RopeDefaults { theta: 500_000.0, partial: None, original: None, has_sections: true };

    pub fn build_qwen3_vl(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder { head_norms: HeadNorms::Head, ..Decoder::new(s, Some(128))? };
        decoder.build(b, every_layer(s, decoder.head_dim, QWEN3_ROPE, |_| Ok(false))?)
    }

    pub fn build_qwen3_vl_moe(s: &Settings, b: &mut Builder) -> Result<()> {
        let experts = qwen(s, [60, 4, 1408], true)?;
        let (prefix, hidden) = (prefix(b), s.size("hidden_size")?);
        let shape = |layer: usize| b.stored_shape(&format!("{prefix}layers.{layer}.mlp.experts.down_proj"));
        // Published files have the axes `[experts, in, out]`.
        let input_major = (0..s.size("num_hidden_layers")?).find_map(shape).is_some_and(|shape| shape.get(2) == Some(&hidden));
        if !experts.route.normalised {
            // transformers normalizes regardless of the key, vLLM does not.
            return Err(Error::Unsupported {
                what: "config.json: `norm_topk_prob` of false".into(),
                hint: "versions of runtimes disagree on its effect in this family; passes that only read weights do not need it".into(),
            });
        }
        let experts = Experts { input_major, ..experts };
        let decoder = Decoder { head_norms: HeadNorms::Head, experts: Some(experts), ..Decoder::new(s, None)? };
        decoder.build(b, every_layer(s, decoder.head_dim, QWEN3_ROPE, |_| Ok(false))?)
    }
}
