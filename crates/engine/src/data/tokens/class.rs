//! The tokenizer class that `AutoTokenizer` of transformers 5.23 uses for a model.

use serde_json::{Map, Value};

/// The effect of a tokenizer class of transformers. Lists are separated by spaces.
#[derive(Debug)]
pub(super) struct Class {
    /// Names without `Tokenizer` or `TokenizerFast` at the end.
    names: &'static str,
    /// Values of `model_type` that have this class by default.
    model_types: &'static str,
    /// The default value of `add_prefix_space` of byte-level classes, which takes precedence over
    /// `tokenizer.json`.
    pub(super) prefix_space: Option<bool>,
    /// Whether the pre-tokenizer of the class is a sequence that contains the byte-level pre-tokenizer.
    pub(super) is_sequence: bool,
    /// Whether token type ids are passed by default.
    pub(super) has_token_types: bool,
}

/// `TokenizersBackend` and classes without any of these effects.
const OTHER: Class = Class { names: "", model_types: "", prefix_space: None, is_sequence: false, has_token_types: false };

const CLASSES: &[Class] = &[
    byte_level("GPT2", "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt phi starcoder2", false),
    byte_level(
        "Bart LED Longformer Mvp Roberta",
        "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mra mvp roberta roberta-prelayernorm",
        false,
    ),
    byte_level("GPTNeoX", "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm", false),
    byte_level("CodeGen", "", false),
    byte_level("Whisper", "whisper", false),
    byte_level("Luke", "luke", false),
    byte_level("Blenderbot", "blenderbot", true),
    byte_level("LayoutLMv3", "layoutlmv3", true),
    Class { has_token_types: true, ..byte_level("Deberta MarkupLM", "deberta markuplm", false) },
    Class { is_sequence: true, ..byte_level("Cohere", "aya_vision cohere cohere2", false) },
    Class {
        is_sequence: true,
        ..byte_level(
            "Qwen2 Qwen3_5",
            "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr \
             moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 \
             qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl \
             qwen3_vl_moe qwen4_exp vibevoice",
            false,
        )
    },
    Class {
        names: "Bert Canine ConvBert DPRContextEncoder DPRQuestionEncoder DebertaV2 Electra FNet LayoutLM LayoutLMv2 Lxmert \
                MobileBert SqueezeBert Tapas",
        model_types: "align bark bert blip bros canine chinese_clip convbert deberta-v2 distilbert dpr electra ernie flava fnet \
                      git grounding-dino layoutlm layoutlmv2 lxmert megatron-bert mm-grounding-dino mobilebert nomic_bert \
                      squeezebert tapas tvp vilt visual_bert",
        has_token_types: true,
        ..OTHER
    },
    Class { names: "Siglip2", model_types: "siglip2", ..OTHER },
    Class { names: "", model_types: BACKEND_TYPES, ..OTHER },
];

/// Values of `model_type` for which transformers uses `TokenizersBackend`, whatever class is stored: those
/// registered with it, or with `MistralCommonBackend` (the two are alike here), and those of
/// `MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` without another registered class.
const BACKEND_TYPES: &str = "\
    EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe flex_olmo \
    fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite \
    granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 internlm3 iquestcoder \
    jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 \
    minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo \
    molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x \
    persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral \
    voxtral_realtime xlm-roberta-xl";

/// The values of `model_type` in `MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` with another registered class,
/// which replaces the stored one.
const REPLACED_TYPES: &str = "hyperclovax_vision_v2 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2";

const fn byte_level(names: &'static str, model_types: &'static str, prefix_space: bool) -> Class {
    Class { names, model_types, prefix_space: Some(prefix_space), ..OTHER }
}

fn contains(list: &str, name: &str) -> bool {
    list.split_whitespace().any(|listed| listed == name)
}

/// The tokenizer class of a model: that of `tokenizer_config.json` or else of `config.json`, except for
/// model types for which transformers ignores both, or else that of the model type. `None` if it cannot be
/// determined, for example because it may be in the repository of the model.
pub(super) fn tokenizer_class(settings: &Map<String, Value>, config: &Map<String, Value>) -> Option<&'static Class> {
    if settings.contains_key("auto_map") {
        return None;
    }
    let stored = [settings, config].into_iter().find_map(|values| values.get("tokenizer_class")?.as_str());
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("");
    let is_ignored = contains(BACKEND_TYPES, model_type) || contains(REPLACED_TYPES, model_type);
    let registered = || CLASSES.iter().find(|class| contains(class.model_types, model_type));
    stored.filter(|_| !is_ignored).map(named).or_else(registered)
}

/// transformers uses `TokenizersBackend` in place of unknown classes.
fn named(class: &str) -> &'static Class {
    let name = class.strip_suffix("Fast").unwrap_or(class).strip_suffix("Tokenizer");
    name.and_then(|name| CLASSES.iter().find(|class| contains(class.names, name))).unwrap_or(&OTHER)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    #[test]
    fn lists_are_disjoint_and_replaced_types_have_a_class() {
        let lists: [fn(&Class) -> &'static str; 2] = [|class| class.names, |class| class.model_types];
        for list in lists {
            let all: Vec<&str> = CLASSES.iter().flat_map(|class| list(class).split_whitespace()).collect();
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        }
        for model_type in REPLACED_TYPES.split_whitespace() {
            assert!(CLASSES.iter().any(|class| contains(class.model_types, model_type)), "{model_type}");
        }
    }

    /// The classes of `AutoTokenizer` of transformers 5.23; the empty name is that of `OTHER`. Where there is
    /// none here, transformers uses `TokenizersBackend`, or `GPT2Tokenizer` in the last case.
    #[test]
    fn classes_are_stored_or_follow_from_the_model_type() {
        let none = json!({});
        let class = |name: &str| json!({ "tokenizer_class": name });
        for (settings, model_type, expected) in [
            (&none, "gpt2", Some("GPT2")),
            (&none, "opt", Some("GPT2")),
            (&none, "florence2", Some("Roberta")),
            (&none, "vibevoice", Some("Qwen2")),
            (&none, "phi3", Some("")),
            (&none, "llama", None),
            (&none, "", None),
            (&class("GPT2Tokenizer"), "llama", Some("GPT2")),
            (&class("GPT2Tokenizer"), "", Some("GPT2")),
            (&class("GPT2Tokenizer"), "bert", Some("GPT2")),
            (&class("GPT2Tokenizer"), "modernbert", Some("")),
            (&class("GPT2Tokenizer"), "phi3", Some("")),
            (&class("GPTNeoXTokenizer"), "stablelm", Some("")),
            (&class("BertTokenizer"), "nystromformer", Some("")),
            (&class("GPT2Tokenizer"), "qwen2", Some("Qwen2")),
            (&class("PreTrainedTokenizerFast"), "qwen2", Some("Qwen2")),
            (&class("GPT2Tokenizer"), "qwen3", Some("GPT2")),
            (&class("PreTrainedTokenizerFast"), "gpt2", Some("")),
            (&class("FooTokenizer"), "gpt2", Some("")),
            (&class("Tokenizer"), "gpt2", Some("")),
            (&class(""), "gpt2", Some("")),
            (&json!({ "tokenizer_class": null }), "gpt2", Some("GPT2")),
            (&json!({ "tokenizer_class": "GPT2Tokenizer", "auto_map": {} }), "gpt2", None),
        ] {
            let object = |value: &Value| value.as_object().cloned().unwrap();
            let found = tokenizer_class(&object(settings), &object(&json!({ "model_type": model_type })));
            let expected = expected.map(|name| if name.is_empty() { "" } else { named(&format!("{name}Tokenizer")).names });
            assert_eq!(found.map(|class| class.names), expected, "{settings} {model_type}");
        }
    }
}
