//! Rules of vLLM.

use serde_json::Value;

use super::facts::{VLLM_ADAPTER_REMEDY, VLLM_BITS, vllm_adapter_rank, vllm_loads_embeddings};
use super::folder::{Adapter, Folder};
use super::scheme::{Arguments, Group};
use super::{Finding, Needs, Rule, Target, compressed_tensors, draft_head, extra_layers, fused, shared};
use crate::error::Result;
use crate::store::Role;

/// Families whose routers vLLM creates without a quantization.
const FLOAT_ROUTERS: [&str; 4] = ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"];

pub(super) const RULES: &[Rule<Folder>] = &[
    shared::ARCHITECTURES.from("vllm/model_executor/models/registry.py"),
    shared::OWN_FORMAT.from("vllm/model_executor/layers/quantization/__init__.py"),
    shared::METHOD.from("vllm/config/model.py: _verify_quantization"),
    shared::TOKENIZER.from("docs.vllm.ai, engine arguments: --tokenizer, --skip-tokenizer-init"),
    Rule {
        name: "layers",
        sentence: "All layers of `num_hidden_layers` are stored.",
        source: "vllm/model_executor/model_loader/default_loader.py",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::layers,
    },
    Rule {
        name: "extra-layers",
        sentence: "No layers after those of `num_hidden_layers` are stored, except for the prediction of several tokens.",
        source: "vllm/model_executor/models/llama.py, deepseek_v2.py: load_weights",
        versions: &[],
        needs: Needs::Weights,
        check: unread_layers,
    },
    Rule {
        name: "adapter",
        sentence: "An adapter is of LoRA without DoRA, biases and `modules_to_save`, and its rank is at most 512.",
        source: "vllm/lora/peft_helper.py: validate_legal, vllm/config/lora.py: MaxLoRARanks",
        versions: &[],
        needs: Needs::Weights,
        check: adapter,
    },
    Rule {
        name: "draft-head",
        sentence: "An EAGLE-3 head names its verifier, has layers of Llama or Qwen3, the states of three layers, and a valid vocabulary.",
        source: "vllm/model_executor/models/llama_eagle3.py, vllm/transformers_utils/configs/speculators, speculators/model.py: load_vocab_mappings",
        versions: &[],
        needs: Needs::Weights,
        check: draft_head::draft_head,
    },
    shared::SHAPES.from("vllm/model_executor/model_loader/weight_utils.py: default_weight_loader"),
    shared::ACTIVATION_FUNCTION.from("vllm/model_executor/models/llama.py, qwen2.py"),
    shared::TOKENIZER_FILES.from("docs.vllm.ai, engine arguments: --tokenizer"),
    shared::FUSED_IGNORE.from("vllm/model_executor/layers/quantization/compressed_tensors/utils.py: should_ignore_layer"),
    shared::FUSED_SCHEME.from("vllm/model_executor/layers/quantization/compressed_tensors/utils.py: find_matched_target"),
    Rule {
        name: "global-scale",
        sentence: "All parts of a layer that is fused have the same global NVFP4 scales.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
        versions: &[],
        needs: Needs::Tensors,
        check: fused::global_scales,
    },
    Rule {
        name: "fp8-block-rows",
        sentence: "In fused layers of FP8-BLOCK, the outputs of all parts but the last are multiples of the block size.",
        source: "vllm/model_executor/layers/quantization/utils/fp8_utils.py: validate_fp8_block_shape",
        versions: &[],
        needs: Needs::Weights,
        check: fused::block_rows,
    },
    shared::SELECTED.from("vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_scheme"),
    shared::IGNORED.from("vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_scheme"),
    shared::SCALES.from("vllm/model_executor/layers/quantization/compressed_tensors/schemes"),
    shared::GROUP_ROWS.from("vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: create_weights"),
    Rule {
        name: "group-size",
        sentence: "Packed integers of bfloat16 models or with zero points have groups of 32, 64 or 128, or one scale per row.",
        source: "vllm/model_executor/layers/quantization/utils/marlin_utils.py: MARLIN_SUPPORTED_GROUP_SIZES",
        versions: &["0.11"],
        needs: Needs::Weights,
        check: group_size,
    },
    Rule {
        name: "bits",
        sentence: "Packed integers have 4 or 8 bits; since the kernels of Humming, 2 to 8.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP",
        versions: &[],
        needs: Needs::Weights,
        check: bits,
    },
    Rule {
        name: "zero-points",
        sentence: "Packed integers with zero points have 4 or 8 bits.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_ZP_SUPPORTED_TYPES_MAP",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::zero_points,
    },
    Rule {
        name: "activations",
        sentence: "The quantization of weights and activations has a kernel.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts",
        versions: &[],
        needs: Needs::Weights,
        check: activations,
    },
    Rule {
        name: "routers",
        sentence: "Routers of Mixtral, Qwen2-MoE, DeepSeek-V2 and DeepSeek-V3 are floats.",
        source: "vllm/model_executor/models/mixtral.py, qwen2_moe.py, deepseek_v2.py",
        versions: &[],
        needs: Needs::Weights,
        check: routers,
    },
    Rule {
        name: "experts",
        sentence: "All experts of a layer have the same scheme.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe: get_moe_method",
        versions: &[],
        needs: Needs::Weights,
        check: fused::experts,
    },
    Rule {
        name: "embeddings",
        sentence: "Embeddings are floats; since 0.33 also packed symmetric integers of 2, 4 or 8 bits.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_quant_method",
        versions: &[],
        needs: Needs::Weights,
        check: embeddings,
    },
    Rule {
        name: "head",
        sentence: "The head of a language model (`lm_head`) is not quantized.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_quant_method",
        versions: &["0.11"],
        needs: Needs::Weights,
        check: compressed_tensors::heads,
    },
    shared::TIED_HEAD.from("vllm/model_executor/models/llama.py: load_weights"),
    Rule {
        name: "kv-cache",
        sentence: "`kv_cache_scheme` is FP8, symmetric, with one scale per tensor or head.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: validate_kv_cache_scheme",
        versions: &[],
        needs: Needs::Weights,
        check: kv_cache,
    },
    Rule {
        name: "kv-cache-scales",
        sentence: "A static `kv_cache_scheme` has stored scales; missing ones are 1.",
        source: "vllm/model_executor/layers/quantization/kv_cache.py",
        versions: &[],
        needs: Needs::Weights,
        check: kv_cache_scales,
    },
    Rule {
        name: "sparsity",
        sentence: "`sparsity_config` has no targets.",
        source: "vllm-project/vllm#36799",
        versions: &["0.33"],
        needs: Needs::Weights,
        check: sparsity,
    },
    Rule {
        name: "actorder",
        sentence: "`actorder` is static, so that groups consist of adjacent inputs.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py",
        versions: &["0.33"],
        needs: Needs::Weights,
        check: actorder,
    },
];

/// Families that vLLM loads with `params_dict[name]`, which fails for the tensors of other layers.
const STRICT_LAYERS: [&str; 16] = [
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "glm4_moe",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
];
/// Keys with the number of layers that predict further tokens. They follow the other layers.
const PREDICTION_LAYERS: [&str; 2] = ["num_nextn_predict_layers", "num_mtp_modules"];

fn unread_layers(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let count = folder.get("num_hidden_layers").and_then(Value::as_u64).filter(|_| STRICT_LAYERS.contains(&folder.model_type()));
    let Some(count) = count else { return Ok(Vec::new()) };
    let predicting: u64 = PREDICTION_LAYERS.iter().filter_map(|key| folder.get(key)?.as_u64()).max().unwrap_or(0);
    let reason = format!("is stored, but `num_hidden_layers` in config.json is {count}, and {target} fails for tensors of other layers");
    let finding = |layer: String| {
        Finding::new(layer, reason.clone(), "correct `num_hidden_layers`, or remove the tensors").for_run("correct `num_hidden_layers` in the model's folder")
    };
    let names = folder.tensors.keys().map(String::as_str);
    Ok(extra_layers(names, "model.layers.", count.saturating_add(predicting)).map(finding).collect())
}

/// Modules that are stored as a whole, and that vLLM loads.
const SAVED_MODULES: [&str; 2] = ["classifier", "score"];
const MERGE: &str = "add it to the weights: `compress dequantize` for an output of compress, or `merge_and_unload` of PEFT";

/// Why vLLM does not load an adapter.
fn adapter_reason(Adapter { values, .. }: &Adapter) -> Option<String> {
    let of = |key: &str| values.get(key).unwrap_or(&Value::Null);
    if let Some(key) = ["r", "lora_alpha", "target_modules"].into_iter().find(|key| of(key).is_null()) {
        return Some(format!("has no `{key}`, which vLLM requires"));
    }
    let patterns = of("rank_pattern").as_object().into_iter().flatten().filter_map(|(_, rank)| rank.as_u64());
    let (rank, is_dora) = (of("r").as_u64().into_iter().chain(patterns).max().unwrap_or(0), *of("use_dora") == Value::Bool(true));
    let saved = of("modules_to_save").as_array().into_iter().flatten().find(|name| !name.as_str().is_some_and(|name| SAVED_MODULES.contains(&name)));
    match (vllm_adapter_rank(rank, is_dora), of("bias"), saved) {
        (Err(reason), ..) if is_dora => Some(format!("has `use_dora`: {reason}")),
        (_, Value::String(bias), _) if bias != "none" => Some(format!("has `bias` of `{bias}`: vLLM loads no biases")),
        (.., Some(name)) => Some(format!("has {name} in `modules_to_save`, which vLLM does not load")),
        (Err(reason), ..) => Some(format!("has rank {rank}: {reason}")),
        _ => None,
    }
}

fn adapter(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let finding = |adapter: &Adapter| Some(Finding::new(adapter.file.clone(), adapter_reason(adapter)?, MERGE).for_run(VLLM_ADAPTER_REMEDY));
    Ok(folder.adapter.iter().filter_map(finding).collect())
}

fn bits(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let usual = VLLM_BITS.map(u64::from);
    let supported: &[u64] = if target.version() == "0.11" { &usual } else { &[2, 3, 4, 5, 6, 7, 8] };
    Ok(compressed_tensors::widths(folder, target, supported))
}

fn group_size(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let dtype = folder.dtype();
    // Exllama's kernel for float16 has groups of any size.
    let is_wrong = |group: &Group, weights: &Arguments| {
        let is_packed = group.has_packed_integers() && weights.strategy == "group";
        is_packed && (dtype == "bfloat16" || !weights.symmetric) && weights.group_size.is_some_and(|size| ![32, 64, 128].contains(&size))
    };
    let wrong = folder.linear_groups().into_iter().filter(|(group, weights)| is_wrong(group, weights));
    let finding = |(group, weights): (&Group, &Arguments)| {
        let reason = format!("has groups of {}, but the kernels of {target} have groups of 32, 64 or 128", weights.group_size.unwrap_or(0));
        Finding::new(group.name.clone(), reason, "quantize with `--group-size 32`, `64` or `128`")
    };
    Ok(wrong.map(finding).collect())
}

/// Why no kernel computes the products of a group, if that is certain.
fn unsupported(group: &Group, weights: &Arguments, target: Target) -> Option<&'static str> {
    let is_old = target.version() == "0.11";
    if is_old && !weights.is_integer && (group.format.starts_with("mxfp") || weights.strategy == "group") {
        return Some("has floats in groups without a global scale");
    }
    let Some(inputs) = &group.inputs else { return compressed_tensors::unpacked(group, weights) };
    match (weights.is_integer, inputs.is_integer) {
        (true, true) if !weights.symmetric => Some("has weights with zero points and integer activations"),
        (true, true) if weights.bits != 4 && weights.strategy == "group" => Some("has integer activations, and groups of weights whose width is not 4 bits"),
        (true, true) if is_old && inputs.bits == 8 && !inputs.dynamic && inputs.strategy != "tensor" => {
            Some("has static integer activations with more than one scale")
        }
        (true, false) if !weights.symmetric => Some("has weights with zero points and FP8 activations"),
        (false, false) if weights.bits == 8 && !weights.symmetric => Some("has FP8 weights with zero points"),
        (false, false) if weights.bits == 8 && !inputs.dynamic && inputs.strategy != "tensor" => Some("has static FP8 activations with more than one scale"),
        _ => None,
    }
}

fn activations(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    Ok(compressed_tensors::kernels(folder, target, unsupported))
}

fn routers(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    if !FLOAT_ROUTERS.contains(&folder.model_type()) {
        return Ok(Vec::new());
    }
    let routers = folder.modules.iter().filter(|(_, module)| module.is_quantized && module.role == Some(Role::Router));
    let finding = |name: &String| {
        Finding::new(name.clone(), "is a quantized router, and vLLM loads routers as floats", "quantize without routers, the default of `compress quantize`")
    };
    Ok(routers.map(|(name, _)| finding(name)).collect())
}

fn loads_embedding(group: &Group, weights: &Arguments, target: Target) -> bool {
    let is_packed = group.format == "pack-quantized" && group.inputs.is_none();
    target.version() != "0.11" && weights.codes().is_some_and(|codes| vllm_loads_embeddings(codes, is_packed, weights.symmetric))
}

fn embeddings(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    Ok(compressed_tensors::embeddings(folder, target, loads_embedding))
}

/// The `kv_cache_scheme`, unless it is null.
fn cache(folder: &Folder) -> Option<&Value> {
    folder.compressed_tensors()?.values.get("kv_cache_scheme").filter(|scheme| scheme.is_object())
}

fn kv_cache(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let Some(scheme) = cache(folder) else { return Ok(Vec::new()) };
    let of = |key: &str| scheme.get(key).unwrap_or(&Value::Null);
    let strategies: &[&str] = if target.version() == "0.11" { &["tensor"] } else { &["tensor", "attn_head"] };
    let is_strategy = of("strategy").as_str().is_none_or(|name| strategies.contains(&name));
    let wrong = match () {
        () if of("type").as_str() != Some("float") => "type",
        () if of("num_bits").as_u64() != Some(8) => "num_bits",
        () if of("symmetric") == false => "symmetric",
        () if !is_strategy => "strategy",
        () => return Ok(Vec::new()),
    };
    let reason = format!("has `{wrong}` of {}, but {target} supports symmetric FP8 caches with one scale", of(wrong));
    Ok(vec![Finding::new("kv_cache_scheme", reason, "quantize with `--kv-cache fp8`, or remove the key and the scales")])
}

fn kv_cache_scales(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let is_scale = |name: &String| [".k_scale", ".v_scale", ".kv_scale", ".output_scale"].iter().any(|end| name.ends_with(end));
    let is_static = cache(folder).is_some_and(|scheme| scheme.get("dynamic").is_none_or(|dynamic| matches!(dynamic, Value::Null | Value::Bool(false))));
    if !is_static || folder.tensors.keys().any(is_scale) {
        return Ok(Vec::new());
    }
    let reason = format!("is static, but no attention module has `k_scale` and `v_scale`, which {target} then replaces by 1");
    Ok(vec![Finding::new("kv_cache_scheme", reason, "calibrate the scales with `compress quantize --kv-cache fp8`, or remove the key")])
}

fn sparsity(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let config = folder.compressed_tensors().and_then(|quantization| quantization.values.get("sparsity_config"));
    let targets = config.and_then(|config| config.get("targets")).and_then(Value::as_array).map_or(0, Vec::len);
    let reason = format!("has targets, but {target} no longer loads sparse formats");
    Ok(if targets > 0 { vec![Finding::new("sparsity_config", reason, "store the zeros in dense weights, and remove the key")] } else { Vec::new() })
}

fn actorder(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let is_scattered = |weights: &Arguments| weights.actorder.as_deref().is_some_and(|order| ["group", "dynamic"].contains(&order));
    let groups = folder.linear_groups().into_iter().filter(|(_, weights)| is_scattered(weights));
    let reason = format!("has groups of scattered inputs (`actorder`), which {target} no longer loads");
    Ok(groups.map(|(group, _)| Finding::new(group.name.clone(), reason.clone(), "quantize with `actorder: static`, the default of other tools")).collect())
}
