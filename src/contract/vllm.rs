//! Rules of vLLM.

use serde_json::Value;

use super::facts::{VLLM_BITS, vllm_loads_embeddings};
use super::folder::Folder;
use super::scheme::{Arguments, Group};
use super::{Finding, Needs, Rule, Target, compressed_tensors, fused};
use crate::error::Result;
use crate::store::Role;

/// Families whose routers vLLM creates without a quantization.
const FLOAT_ROUTERS: [&str; 4] = ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"];

pub(super) const RULES: &[Rule<Folder>] = &[
    Rule {
        name: "architectures",
        sentence: "`config.json` names the model class in `architectures`.",
        source: "vllm/model_executor/models/registry.py",
        versions: &[],
        needs: Needs::Configuration,
        check: compressed_tensors::architectures,
    },
    Rule {
        name: "own-format",
        sentence: "The folder is not in a format that only compress reads.",
        source: "vllm/model_executor/layers/quantization/__init__.py",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::own_format,
    },
    Rule {
        name: "tokenizer",
        sentence: "The folder of a language model has a tokenizer.",
        source: "docs.vllm.ai, engine arguments: --tokenizer, --skip-tokenizer-init",
        versions: &[],
        needs: Needs::Configuration,
        check: compressed_tensors::tokenizer,
    },
    Rule {
        name: "layers",
        sentence: "All layers of `num_hidden_layers` are stored.",
        source: "vllm/model_executor/model_loader/default_loader.py",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::layers,
    },
    Rule {
        name: "shapes",
        sentence: "The weights have the names and shapes that `config.json` requires (of families that compress runs).",
        source: "vllm/model_executor/model_loader/weight_utils.py: default_weight_loader",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::shapes,
    },
    Rule {
        name: "tokenizer-files",
        sentence: "`tokenizer.json` and `tokenizer_config.json` are valid JSON, and so is `vocab.json` if `tokenizer.json` is missing.",
        source: "docs.vllm.ai, engine arguments: --tokenizer",
        versions: &[],
        needs: Needs::Configuration,
        check: compressed_tensors::tokenizer_files,
    },
    Rule {
        name: "fused-ignore",
        sentence: "`ignore` names all parts of a layer that is fused, or none.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/utils.py: should_ignore_layer",
        versions: &[],
        needs: Needs::Weights,
        check: fused::ignore,
    },
    Rule {
        name: "fused-scheme",
        sentence: "All parts of a layer that is fused have the same scheme.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/utils.py: find_matched_target",
        versions: &[],
        needs: Needs::Weights,
        check: fused::scheme,
    },
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
    Rule {
        name: "selected",
        sentence: "Every quantized matrix is selected by a target of `config_groups`, and `ignore` does not exclude it.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_scheme",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::selected,
    },
    Rule {
        name: "ignored",
        sentence: "Every matrix of floats that a target selects is in `ignore`.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_scheme",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::ignored,
    },
    Rule {
        name: "scales",
        sentence: "Every quantized matrix has its scales, zero points and shape.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/schemes",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::complete,
    },
    Rule {
        name: "group-rows",
        sentence: "The group size of integers divides the rows.",
        source: "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: create_weights",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::group_rows,
    },
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
    Rule {
        name: "tied-head",
        sentence: "A head that is tied to the embedding is not quantized.",
        source: "vllm/model_executor/models/llama.py: load_weights",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::tied_head,
    },
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
