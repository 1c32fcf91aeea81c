//! Capabilities of runtimes, for the rules and for the notes in reports.

use std::collections::BTreeSet;
use std::path::Path;

use serde::de::IgnoredAny;

use crate::arch;
use crate::error::{Error, Result};
use crate::files;
use crate::model::parse_json;
use crate::store::{Codes, FloatFormat};

/// Widths of packed integers that all versions of vLLM load, with or without zero points.
pub(crate) const VLLM_BITS: [u8; 2] = [4, 8];

/// Whether a module or a weight belongs to a single expert, as in `mlp.experts.3.up_proj.weight`.
pub(crate) fn is_of_expert(name: &str) -> bool {
    name.split('.').zip(name.split('.').skip(1)).any(|(part, number)| part == "experts" && number.parse::<usize>().is_ok())
}

/// The module that contains all experts of a layer, as in `model.layers.0.mlp.experts`, for a module of one
/// of them.
pub(crate) fn experts_of(name: &str) -> Option<&str> {
    let (before, after) = name.rsplit_once(".experts.")?;
    after.split('.').next()?.parse::<usize>().ok()?;
    name.get(..before.len().saturating_add(".experts".len()))
}

/// The experts of a layer and a projection of them, which transformers 5 stacks in one tensor, for a module
/// of one expert.
pub(crate) fn stacked_projection(name: &str) -> Option<(&str, &str)> {
    let experts = experts_of(name)?;
    let (_, projection) = name.get(experts.len().saturating_add(1)..)?.split_once('.')?;
    Some((experts, projection))
}

/// Families whose routers are linear layers in transformers.
const LINEAR_ROUTERS: [&str; 5] = ["dbrx", "jetmoe", "llama4", "llama4_text", "phimoe"];

/// Whether transformers 5 loads a quantized router. Other routers than linear layers are parameters of their
/// own class, which compressed-tensors does not select. Found by loading folders with transformers 5.23.
pub(crate) fn loads_quantized_router(model_type: &str, module: &str) -> bool {
    arch::family(model_type).is_none() || LINEAR_ROUTERS.contains(&model_type) || module.ends_with(".shared_expert_gate")
}

/// Layers by family that transformers 5 initializes by the name `weight` after it has packed them, which
/// fails; without names, all layers. Found by loading folders with transformers 5.23.
const INITIALIZED: [(&str, &[&str]); 10] = [
    ("efficientnet", &[]),
    ("mamba2", &["out_proj"]),
    ("modernbert", &[]),
    ("mt5", &[]),
    ("resnet", &[]),
    ("rt_detr_v2", &["sampling_offsets", "attention_weights", "value_proj", "output_proj", "enc_score_head", "class_embed", "bbox_embed"]),
    ("siglip", &[]),
    ("siglip_text_model", &[]),
    ("siglip_vision_model", &[]),
    ("t5", &[]),
];

/// Whether transformers 5 fails for a packed linear layer of this family when it initializes it.
pub(crate) fn initializes_from_weight(model_type: &str, module: &str) -> bool {
    let layers = INITIALIZED.into_iter().find(|(family, _)| *family == model_type).map(|(_, layers)| layers);
    layers.is_some_and(|layers| layers.is_empty() || module.split('.').any(|part| layers.contains(&part)))
}

/// Whether a table contains position embeddings of BART, OPT or Whisper, whose modules compressed-tensors
/// cannot call.
pub(crate) fn is_position_table(module: &str) -> bool {
    module.rsplit('.').next() == Some("embed_positions")
}

/// Whether transformers 5 loads float experts in separate tensors from a folder with such codes. Found by
/// loading folders of each format with transformers 5.23.
pub(crate) fn loads_float_experts(codes: Codes) -> bool {
    codes.float().is_some_and(|format| format.row().loads_float_experts)
}

/// Whether transformers 5 loads quantized experts in separate tensors in a format of compressed-tensors. It
/// dequantizes them and stacks those of a layer, whose activations are floats then. Found by loading folders
/// of each scheme with transformers 5.23 and compressed-tensors 0.20.
pub(crate) fn loads_quantized_experts(format: &str, symmetric: bool) -> bool {
    symmetric && matches!(format, "pack-quantized" | "float-quantized")
}

/// Whether transformers dequantizes weights in a format of compressed-tensors to bfloat16, whatever the
/// dtype of the model.
pub(crate) fn is_only_bf16(format: &str) -> bool {
    FloatFormat::ALL.iter().flat_map(|float| float.row().files).any(|file| file.name == format && file.only_bf16)
}

/// Whether vLLM 0.33 loads embeddings with such codes. vLLM 0.11 loads no quantized embeddings.
pub(crate) fn vllm_loads_embeddings(codes: Codes, packed: bool, symmetric: bool) -> bool {
    packed && symmetric && matches!(codes, Codes::Integer(2 | 4 | 8))
}

/// Values of `--max-lora-rank` that all versions of vLLM accept (`vllm/config/lora.py`: `MaxLoRARanks`).
const VLLM_LORA_RANKS: [u64; 8] = [8, 16, 32, 64, 128, 256, 320, 512];

/// Changes of a run with which vLLM loads its adapter.
pub(crate) const VLLM_ADAPTER_REMEDY: &str = "use `kind: lora`, a lower rank, or `merge: true`";

/// The `--max-lora-rank` with which vLLM loads an adapter of this rank and kind, or why it does not.
pub(crate) fn vllm_adapter_rank(rank: u64, is_dora: bool) -> std::result::Result<u64, String> {
    if is_dora {
        return Err("vLLM does not load DoRA".into());
    }
    vllm_max_lora_rank(rank).ok_or_else(|| format!("vLLM loads ranks up to {}", VLLM_LORA_RANKS.into_iter().max().unwrap_or(0)))
}

/// The smallest `--max-lora-rank` with which vLLM loads a LoRA adapter of this rank; `None` if vLLM does not
/// load it.
pub(crate) fn vllm_max_lora_rank(rank: u64) -> Option<u64> {
    VLLM_LORA_RANKS.into_iter().find(|limit| *limit >= rank)
}

/// Keys of `AUTO_QUANTIZER_MAPPING`. `bitsandbytes` is completed by the number of bits.
pub(crate) const METHODS: [&str; 28] = [
    "auto-round",
    "aqlm",
    "awq",
    "bitnet",
    "bitsandbytes",
    "bitsandbytes_4bit",
    "bitsandbytes_8bit",
    "compressed-tensors",
    "eetq",
    "fbgemm_fp8",
    "fouroversix",
    "fp8",
    "fp_quant",
    "gemma",
    "gguf",
    "gptq",
    "higgs",
    "hqq",
    "metal",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "quanto",
    "quark",
    "sinq",
    "spqr",
    "torchao",
    "vptq",
];
/// Other values of `quant_method` that vLLM or SGLang knows.
pub(crate) const SERVER_METHODS: [&str; 36] = [
    "auto-round-int8",
    "awq_marlin",
    "bitblas",
    "blockwise_int8",
    "cpu_awq",
    "cpu_gptq",
    "cpu_wna16",
    "deepgemm_fp8",
    "deepspeedfp",
    "experts_int8",
    "fp_quant",
    "gptq_bitblas",
    "gptq_marlin",
    "gptq_marlin_24",
    "humming",
    "inc",
    "ipex",
    "marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_fp8",
    "modelopt_mixed",
    "modelopt_mxfp8",
    "moe_wna16",
    "neuron_quant",
    "online",
    "petit_mxfp4",
    "petit_nvfp4",
    "ptpc_fp8",
    "qoq",
    "qqq",
    "rtn",
    "tpu_int8",
    "w4afp8",
    "w8a8_fp8",
    "w8a8_int8",
];

/// Files with the vocabulary of a tokenizer.
const VOCABULARIES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tokenizer.model.v3",
];

/// Whether a folder with these files has a tokenizer. Tokenizers with their own code have files of any name.
pub(crate) fn has_tokenizer(files: &BTreeSet<String>) -> bool {
    let is_of_tokenizer =
        |name: &String| VOCABULARIES.contains(&name.as_str()) || name.ends_with(".tiktoken") || (name.starts_with("tokenization_") && name.ends_with(".py"));
    files.iter().any(is_of_tokenizer)
}

/// The file of tokenizers that need no code of their model.
pub(crate) const FAST_TOKENIZER: &str = "tokenizer.json";

/// Whether runtimes parse a file of a model folder when they load the tokenizer. `is_fast`: whether the
/// folder has a `tokenizer.json`, which replaces the vocabulary of other files.
pub(crate) fn is_parsed_with_tokenizer(file: &Path, is_fast: bool) -> bool {
    let is = |name: &str| file == Path::new(name);
    is(FAST_TOKENIZER) || is("tokenizer_config.json") || (!is_fast && is("vocab.json"))
}

/// The reason why runtimes cannot parse a file as JSON. Python, which reads all files except tokenizer.json,
/// also accepts infinity and NaN.
pub(crate) fn invalid_json(path: &Path) -> Result<Option<String>> {
    let text = files::read(path).map_err(Error::io("read", path))?;
    let strict = || serde_json::from_slice::<IgnoredAny>(&text).err().map(|reason| reason.to_string());
    let is_strict = path.file_name().is_some_and(|name| name == FAST_TOKENIZER);
    let python = std::str::from_utf8(&text).ok().filter(|_| !is_strict);
    Ok(python.map_or_else(strict, |text| parse_json::<IgnoredAny>(text).err().map(|reason| reason.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_are_valid_except_in_tokenizers() {
        let folder = tempfile::tempdir().unwrap();
        let reason = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            invalid_json(&path).unwrap()
        };
        assert_eq!(reason("generation_config.json", r#"{"penalty": Infinity, "p": [NaN, -Infinity]}"#), None);
        assert_eq!(reason("modules.json", "[{\"idx\": 0}]"), None);
        assert!(reason("generation_config.json", r#"{"penalty": Infinite}"#).is_some());
        assert!(reason("tokenizer.json", r#"{"score": NaN}"#).is_some());
        assert!(reason("vocab.json", "{\"a\": \u{fffd}").is_some());
    }

    #[test]
    fn experts_have_a_number() {
        assert!(is_of_expert("model.layers.0.mlp.experts.3.up_proj"));
        assert!(!is_of_expert("model.layers.0.mlp.experts.gate_up_proj"));
        assert!(!is_of_expert("model.layers.0.mlp.shared_experts.up_proj"));
    }

    #[test]
    fn lora_ranks_are_rounded_up_to_those_of_vllm() {
        assert_eq!([1, 8, 9, 256, 257, 321, 512].map(vllm_max_lora_rank), [8, 8, 16, 256, 320, 512, 512].map(Some));
        assert_eq!(vllm_max_lora_rank(513), None);
    }

    #[test]
    fn formats_are_found_by_name() {
        assert!(["nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"].into_iter().all(is_only_bf16));
        assert!(!is_only_bf16("float-quantized") && !is_only_bf16("pack-quantized"));
        assert!(loads_float_experts(Codes::Float(FloatFormat::E4m3)) && !loads_float_experts(Codes::Integer(8)));
    }
}
