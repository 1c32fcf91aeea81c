//! Rules of transformers with compressed-tensors.

use std::collections::BTreeSet;

use serde_json::Value;

use super::facts::{
    experts_of, initializes_from_weight, is_of_expert, is_only_bf16, is_position_table, loads_float_experts, loads_quantized_experts, loads_quantized_router,
    stacked_projection,
};
use super::folder::{Folder, Module};
use super::scheme::{Arguments, Group};
use super::transformers_names::MODEL_TYPES;
use super::{Finding, Needs, Rule, Target, compressed_tensors, fused, shared};
use crate::arch;
use crate::error::Result;
use crate::store::{DType, Role};

/// Formats that compressed-tensors 0.20 reads.
const FORMATS: [&str; 10] = [
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
];

pub(super) const RULES: &[Rule<Folder>] = &[
    Rule {
        name: "model-type",
        sentence: "`config.json` has a `model_type` that is known, or that names code of the model (`auto_map`).",
        source: "transformers/models/auto/configuration_auto.py",
        versions: &[],
        needs: Needs::Configuration,
        check: model_type,
    },
    shared::OWN_FORMAT.from("transformers/quantizers/auto.py"),
    Rule {
        name: "method",
        sentence: "The quantization method is known; with other methods, missing weights are filled with random values.",
        source: "transformers/quantizers/auto.py: AUTO_QUANTIZER_MAPPING",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::method,
    },
    Rule {
        name: "format",
        sentence: "The format of the weights is one of compressed-tensors 0.20.",
        source: "compressed_tensors/config/base.py: CompressionFormat",
        versions: &[],
        needs: Needs::Weights,
        check: format_is_known,
    },
    Rule {
        name: "layers",
        sentence: "All layers of `num_hidden_layers` are stored; missing ones are filled with random values.",
        source: "transformers/modeling_utils.py",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::layers,
    },
    shared::SHAPES.from("transformers/modeling_utils.py"),
    shared::TOKENIZER_FILES.from("transformers/tokenization_utils_base.py: from_pretrained"),
    Rule {
        name: "generation-config",
        sentence: "`generation_config.json` is an object.",
        source: "transformers/generation/configuration_utils.py: from_pretrained",
        versions: &[],
        needs: Needs::Configuration,
        check: generation,
    },
    shared::SELECTED.from("compressed_tensors/quantization/lifecycle/apply.py"),
    shared::IGNORED.from("compressed_tensors/quantization/lifecycle/apply.py"),
    shared::SCALES.from("compressed_tensors/compressors"),
    shared::GROUP_ROWS.from("compressed_tensors/quantization/lifecycle/forward.py"),
    Rule {
        name: "activation-groups",
        sentence: "The group size of activations divides the rows.",
        source: "compressed_tensors/quantization/lifecycle/forward.py",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: activation_groups,
    },
    Rule {
        name: "experts",
        sentence: "Experts in separate tensors have symmetric packed integers or FP8, or are floats in folders of FP8: transformers stacks them, which fails otherwise. In Llama 4, quantized folders have only separate experts, and other folders none. In Qwen3-VL, all experts of a layer are in one tensor.",
        source: "transformers/conversion_mapping.py",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: experts,
    },
    Rule {
        name: "expert-schemes",
        sentence: "In a layer, a projection of all experts has the same quantization, and packed experts have the same one in all projections: transformers stacks them, and otherwise computes wrong outputs or fails.",
        source: "transformers/integrations/compressed_tensors.py: CompressedTensorsDequantize",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: expert_schemes,
    },
    Rule {
        name: "routers",
        sentence: "Routers are floats, except in families whose routers are linear layers: their codes are ignored or read as weights.",
        source: "transformers/models/mixtral/modeling_mixtral.py: MixtralTopKRouter",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: routers,
    },
    Rule {
        name: "dinov2",
        sentence: "Folders of DINOv2 are not quantized, except those of gated networks whose `mlp.weights_in` have int8 or FP8 codes and no static activations: transformers splits these matrices, and not their other tensors.",
        source: "transformers/conversion_mapping.py: Dinov2Model",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: dinov2,
    },
    Rule {
        name: "packed-weights",
        sentence: "No layer is packed that the family initializes by `weight`, which packed layers do not have (T5, SigLIP, ModernBERT, Mamba 2, RT-DETR v2, classifiers of ResNet and EfficientNet).",
        source: "transformers/models/t5/modeling_t5.py: _init_weights",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: packed_weights,
    },
    Rule {
        name: "positions",
        sentence: "Position embeddings of BART, OPT and Whisper are floats: compressed-tensors calls quantized embeddings without positions.",
        source: "transformers/models/bart/modeling_bart.py: BartLearnedPositionalEmbedding",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: positions,
    },
    Rule {
        name: "zero-points",
        sentence: "No packed integers have zero points: these load only with `CompressedTensorsConfig(dequantize=True)`.",
        source: "compressed_tensors/compressors",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: zero_points,
    },
    Rule {
        name: "bfloat16",
        sentence: "With NVFP4, MXFP4, MXFP6 and MXFP8, the model is bfloat16, to which these are dequantized.",
        source: "compressed_tensors/compressors",
        versions: &["5.23"],
        needs: Needs::Weights,
        check: bfloat16,
    },
];

fn model_type(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let missing = compressed_tensors::model_type(folder, target)?;
    let name = folder.model_type();
    if !missing.is_empty() || folder.get("auto_map").is_some_and(Value::is_object) || MODEL_TYPES.binary_search(&name).is_ok() {
        return Ok(missing);
    }
    let hint = "use the name from the config.json of the original model, or a newer version";
    Ok(vec![Finding::new("model_type", format!("is `{name}`, which {target} does not know"), hint)])
}

fn generation(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    Ok(folder.defects.generation())
}

fn format_is_known(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let Some(quantization) = folder.compressed_tensors() else { return Ok(Vec::new()) };
    let names = quantization.groups.iter().map(|group| group.format.as_str()).chain([quantization.format.as_str()]);
    let mut unknown: Vec<&str> = names.filter(|name| !name.is_empty() && !FORMATS.contains(name)).collect();
    unknown.sort_unstable();
    unknown.dedup();
    let finding =
        |name: &&str| Finding::new("format", format!("is `{name}`, which compressed-tensors 0.20 does not read"), "start from the original checkpoint");
    Ok(unknown.iter().map(finding).collect())
}

fn activation_groups(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let finding = |(name, module, group): (&String, &Module, &Group)| {
        let size = group.inputs.as_ref().filter(|inputs| inputs.strategy == "group").and_then(|inputs| u64::try_from(inputs.group_size?).ok())?;
        let [_, inputs] = module.shape;
        let reason = format!("has {inputs} inputs, which the group size of {size} of its activations in `{}` does not divide", group.name);
        let is_divided = size == 0 || (inputs as u64).is_multiple_of(size);
        (!is_divided).then(|| Finding::new(name.clone(), reason, "quantize it with one scale per token, as `--scheme FP8-DYNAMIC` does"))
    };
    Ok(folder.quantized().filter_map(finding).collect())
}

fn experts(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let family = arch::family(folder.model_type());
    let is_split = arch::splits_experts(folder.model_type());
    let separate = folder.modules.keys().find(|name| is_of_expert(name));
    if let Some(name) = separate.filter(|_| family.is_some_and(|family| family.needs_stacked_experts)) {
        let reason = "is an expert in a separate tensor, and transformers does not stack those of this family, so that its experts are uninitialized";
        return Ok(vec![Finding::new(name.clone(), reason, "use `extract-language-model` too, load the folder in vLLM, or keep experts in one tensor")]);
    }
    if folder.compressed_tensors().is_none() {
        let reason = "is an expert in a separate tensor, which transformers reads in this family only in quantized folders";
        let unread = separate.filter(|_| is_split).map(|name| Finding::new(name.clone(), reason, "quantize the folder, or remove `split-experts`"));
        return Ok(unread.into_iter().collect());
    }
    if is_split {
        let stacked = folder.tensors.iter().find(|(name, tensor)| tensor.shape.len() == 3 && name.split('.').any(|part| part == "experts"));
        let reason = "contains all experts of a layer, which transformers replaces with one linear layer each in quantized folders, and leaves uninitialized";
        return Ok(stacked.map(|(name, _)| Finding::new(name.clone(), reason, "use `split-experts` before `quantize`")).into_iter().collect());
    }
    let is_loaded = |group: &Group| loads_quantized_experts(&group.format, group.weights.as_ref().is_some_and(|weights| weights.symmetric));
    if let Some((name, _, group)) = folder.quantized().find(|(name, _, group)| is_of_expert(name) && !is_loaded(group)) {
        let reason = format!(
            "is a quantized expert in a separate tensor, and transformers stacks the experts of a layer, which fails for the weights of `{}`",
            group.name
        );
        let hint = "load the folder in vLLM or transformers 4, or quantize with a symmetric scheme with float activations, such as W4A16, or FP8";
        return Ok(vec![Finding::new(name, reason, hint)]);
    }
    let fails = |arguments: &Arguments| arguments.codes().is_some_and(|codes| !loads_float_experts(codes));
    let group = folder.quantized().map(|(_, _, group)| group).find(|group| group.weights.as_ref().is_some_and(fails));
    let float = folder.modules.iter().find(|(name, module)| !module.is_quantized && is_of_expert(name));
    let (Some(group), Some((name, _))) = (group, float) else { return Ok(Vec::new()) };
    let reason = format!(
        "is a float expert in a separate tensor, and transformers stacks the experts of a layer, which fails in a folder with the weights of `{}`",
        group.name
    );
    Ok(vec![Finding::new(name.clone(), reason, "load the folder in vLLM or transformers 4, quantize the experts too, or use `--scheme FP8-DYNAMIC`")])
}

fn expert_schemes(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let family = arch::family(folder.model_type());
    if folder.compressed_tensors().is_none() || arch::splits_experts(folder.model_type()) || family.is_some_and(|family| family.needs_stacked_experts) {
        return Ok(Vec::new());
    }
    let is_packed = |(name, _, group): &(&String, &Module, &Group)| is_of_expert(name) && group.format == "pack-quantized";
    let packed: BTreeSet<&str> = folder.quantized().filter(is_packed).filter_map(|(name, ..)| experts_of(name)).collect();
    let uneven = fused::differing(folder, |name, _| {
        let (experts, projection) = stacked_projection(name)?;
        Some((experts, if packed.contains(experts) { "" } else { projection }))
    });
    let finding = |(name, other): (&String, &String)| {
        let reason = format!("has another quantization than `{other}`, and transformers stacks the experts of a layer as if they had the same");
        Finding::new(name.clone(), reason, "quantize all projections of all experts with the same scheme, or none")
    };
    Ok(uneven.into_iter().map(finding).collect())
}

fn routers(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let is_wrong =
        |(name, module): &(&String, &Module)| module.is_quantized && module.role == Some(Role::Router) && !loads_quantized_router(folder.model_type(), name);
    let reason = "is a quantized router, and transformers loads the routers of this family as floats";
    let finding = |(name, _): (&String, &Module)| Finding::new(name.clone(), reason, "quantize without routers, the default of `compress quantize`");
    Ok(folder.modules.iter().filter(is_wrong).map(finding).collect())
}

fn dinov2(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    const HINT: &str = "use `quantize-dynamic` or `quantize-static` with `--export onnx`, or the original folder";
    if folder.compressed_tensors().is_none() || !["dinov2", "dinov2_with_registers"].contains(&folder.model_type()) {
        return Ok(Vec::new());
    }
    let is_split = |group: &&Group| {
        let has_bytes = ["int-quantized", "float-quantized", "naive-quantized"].contains(&group.format.as_str());
        has_bytes && group.inputs.as_ref().is_none_or(|inputs| inputs.dynamic)
    };
    let mut gated = folder.modules.iter().filter(|(name, _)| name.ends_with(".mlp.weights_in")).peekable();
    if gated.peek().is_none() {
        let reason = "is quantized, and transformers fails in quantized folders of this family without gated networks, because it converts `mlp.weights_in`";
        return Ok(folder.quantized().next().map(|(name, ..)| Finding::new(name.clone(), reason, HINT)).into_iter().collect());
    }
    let reason = "is split by transformers into two layers, but not its scales and static or packed tensors: only with int8 or FP8 codes and no static activations, the layers are complete";
    let wrong = gated.filter(|(_, module)| !module.is_quantized || folder.group(module).as_ref().is_none_or(|group| !is_split(group)));
    Ok(wrong.map(|(name, _)| Finding::new(name.clone(), reason, "use `--scheme W8A8` or `FP8-DYNAMIC` for all linear layers")).collect())
}

fn packed_weights(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let is_wrong =
        |(name, _, group): &(&String, &Module, &Group)| group.format.ends_with("pack-quantized") && initializes_from_weight(folder.model_type(), name);
    let reason = "is packed, and transformers fails when it initializes the layers of this family, because packed layers have no `weight`";
    let finding = |(name, ..): (&String, &Module, &Group)| Finding::new(name.clone(), reason, "use `--scheme W8A8` or `FP8-DYNAMIC`");
    Ok(folder.quantized().filter(is_wrong).map(finding).collect())
}

fn positions(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let reason = "is a quantized table of positions, for which transformers fails when it runs the model";
    let wrong = folder.modules.iter().filter(|(name, module)| module.is_quantized && is_position_table(name));
    Ok(wrong.map(|(name, _)| Finding::new(name.clone(), reason, "add `*embed_positions*` to `ignore`")).collect())
}

fn zero_points(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let has_zero_points = |arguments: &Arguments| arguments.is_integer && !arguments.symmetric;
    let mut groups = folder.quantized().map(|(_, _, group)| group);
    let packed = groups.find(|group| group.format == "pack-quantized" && group.weights.as_ref().is_some_and(has_zero_points));
    let Some(group) = packed else { return Ok(Vec::new()) };
    let has_embeddings = folder.modules.values().any(|module| module.is_quantized && module.class == "Embedding");
    // transformers uses the first group of `config_groups` for all of them, and does not dequantize
    // embeddings.
    let (reason, hint) = if has_embeddings {
        ("and the embeddings are quantized too", "quantize without embeddings, and load the folder with `CompressedTensorsConfig(dequantize=True)`")
    } else if folder.linear_groups().iter().any(|(other, _)| !other.is_equal(group)) {
        (
            "and other layers have another group size or scheme",
            "choose a `group_size` that divides all rows, and load the folder with `CompressedTensorsConfig(dequantize=True)`",
        )
    } else {
        ("which transformers does not load by default", "load the folder with `CompressedTensorsConfig(dequantize=True)`, or use a symmetric scheme")
    };
    Ok(vec![Finding::new(group.name.clone(), format!("has packed zero points, {reason}"), hint)])
}

fn bfloat16(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let Some(group) = folder.quantized().map(|(_, _, group)| group).find(|group| is_only_bf16(&group.format)) else { return Ok(Vec::new()) };
    // Without a dtype in `config.json`, the stored floats determine it.
    let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let stored: Vec<DType> =
        folder.tensors.iter().filter(|(name, tensor)| name.ends_with(".weight") && is_float(tensor.dtype)).map(|(_, tensor)| tensor.dtype).collect();
    let is_other = match folder.dtype() {
        "float32" | "float16" => true,
        "bfloat16" => false,
        _ => !stored.is_empty() && !stored.contains(&DType::BF16),
    };
    let reason = format!("has weights in `{}`, which transformers dequantizes to bfloat16, and the model has another dtype", group.format);
    let hint = "run `compress cast --to bf16` on the original model first, or load the folder with `dtype=torch.bfloat16`";
    Ok(if is_other { vec![Finding::new(group.name.clone(), reason, hint)] } else { Vec::new() })
}
