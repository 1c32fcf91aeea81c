//! Rules of folders in the format of compressed-tensors, which several runtimes share.

use serde_json::Value;

use super::facts::{METHODS, SERVER_METHODS, VLLM_BITS, has_tokenizer};
use super::folder::{Folder, Module, OWN_TYPE};
use super::scheme::{Arguments, Group};
use super::{Finding, Runtime, Target, config_values, missing_layers};
use crate::arch;
use crate::error::Result;
use crate::store::DType;

const OWN: &str = "run `compress densify`, which writes plain floats";
const OWN_IN_RUN: &str = "use `--layout dense`, which writes plain floats: no runtime loads palettes or the sparse layout";
const COPY_KEY: &str = "copy the key from the config.json of the original model";
const COPY_KEY_IN_RUN: &str = "copy the key from the config.json of the original model into that of the model's folder";
const RESAVE: &str = "the checkpoint is incomplete: save it again, or start from the original checkpoint";

/// Why a folder without a configuration is not loaded.
fn missing_config(folder: &Folder) -> Option<Finding> {
    let (reason, hint) = match folder.adapter {
        None => ("is missing", "copy it from the original model"),
        Some(_) => ("is missing: the folder contains an adapter", "check the folder of its base model, or a model to whose weights the adapter was added"),
    };
    folder.config.is_none().then(|| Finding::new("config.json", reason, hint).for_run("copy it into the model's folder"))
}

/// The configuration names the classes of the model.
pub(super) fn architectures(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    if let Some(missing) = missing_config(folder) {
        // vLLM loads adapters in addition to a model.
        let is_loaded = folder.adapter.is_some() && target.runtime() == Runtime::Vllm;
        return Ok(if is_loaded { Vec::new() } else { vec![missing] });
    }
    let names = folder.get("architectures").and_then(Value::as_array).map_or(0, Vec::len);
    let reason = format!("is missing or empty in config.json, by which {} selects the model class", target.runtime().name());
    Ok(if names == 0 { vec![Finding::new("architectures", reason, COPY_KEY).for_run(COPY_KEY_IN_RUN)] } else { Vec::new() })
}

/// The configuration has a model type.
pub(super) fn model_type(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    if let Some(missing) = missing_config(folder) {
        return Ok(vec![missing]);
    }
    let reason = format!("is missing in config.json, by which {} selects the model class", target.runtime().name());
    let is_missing = folder.model_type().is_empty();
    Ok(if is_missing { vec![Finding::new("model_type", reason, COPY_KEY).for_run(COPY_KEY_IN_RUN)] } else { Vec::new() })
}

/// The folder is not in a format that only this program reads.
pub(super) fn own_format(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let named = folder.get("model_type").and_then(Value::as_str).filter(|name| name.starts_with(OWN_TYPE));
    let [hint, in_run] = folder.defects.undescribed().map_or([OWN, OWN_IN_RUN], |hint| [hint; 2]);
    let of_type = named.map(|name| Finding::new("model_type", format!("is `{name}`: only compress reads the folder"), hint).for_run(in_run));
    let is_own = folder.quantization.as_ref().is_some_and(|quantization| quantization.method == crate::model::OWN_METHOD);
    let of_method = is_own.then(|| Finding::new("quant_method", "is `compress`: only compress reads the weights", OWN).for_run(OWN_IN_RUN));
    Ok(of_type.or(of_method).into_iter().collect())
}

/// The quantization method is known.
pub(super) fn method(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    const KEY: &str = "quantization_config";
    const HINT: &str = "use the file that was saved together with these weights";
    let runtime = target.runtime();
    let Some(value) = folder.get(KEY).filter(|value| !value.is_null()) else { return Ok(Vec::new()) };
    let Some(quantization) = &folder.quantization else { return Ok(vec![Finding::new(KEY, format!("is {value}, expected an object"), HINT)]) };
    let name = quantization.method.as_str();
    let is_known = if runtime == Runtime::Transformers {
        // Older files of bitsandbytes have no `quant_method`.
        METHODS.contains(&name) || ["load_in_4bit", "load_in_8bit"].iter().any(|key| quantization.values.get(*key) == Some(&Value::Bool(true)))
    } else {
        let name = name.to_lowercase().replace("compressed_tensors", "compressed-tensors");
        // Files of ModelOpt have other keys.
        let is_of_modelopt = name.is_empty() && ["producer", "quantization", "quant_algo"].iter().any(|key| quantization.values.contains_key(*key));
        is_of_modelopt || METHODS.contains(&name.as_str()) || SERVER_METHODS.contains(&name.as_str())
    };
    let finding = || match name {
        "" => Finding::new("quant_method", format!("is missing in `{KEY}`, and {} requires it", runtime.name()), HINT),
        _ => Finding::new("quant_method", format!("is `{name}`, which {} does not know", runtime.name()), HINT),
    };
    Ok(if is_known || name == crate::model::OWN_METHOD { Vec::new() } else { vec![finding()] })
}

/// A model of text has a tokenizer.
pub(super) fn tokenizer(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let nested = folder.get("text_config").and_then(|config| config.get("vocab_size"));
    let is_text = folder.get("vocab_size").into_iter().chain(nested).any(Value::is_u64);
    if !is_text || has_tokenizer(&folder.files) {
        return Ok(Vec::new());
    }
    let reason = format!("is missing, and no other file has a vocabulary, which {} loads at the start", target.runtime().name());
    let finding = Finding::new("tokenizer.json", reason, "copy the tokenizer files of the original model into the folder");
    Ok(vec![finding.for_run("copy the tokenizer files of the original model into the model's folder, from which the run reads them")])
}

/// Families whose networks have a kernel for one activation function only.
const SILU: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

/// The network has the activation function that the runtime computes.
pub(super) fn activation_function(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    const KEY: &str = "hidden_act";
    let other = folder.get(KEY).and_then(Value::as_str).filter(|name| SILU.contains(&folder.model_type()) && *name != "silu");
    let finding = |name: &str| Finding::new(KEY, format!("is `{name}`, but {target} computes only `silu` in this family"), "load the folder in transformers");
    Ok(other.map(finding).into_iter().collect())
}

/// The runtime reads the files of the tokenizer.
pub(super) fn tokenizer_files(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    Ok(folder.defects.tokenizer(target.runtime()))
}

/// The configuration has acceptable values, and the weights have the names and shapes that it requires. Only
/// transformers loads a table that is stored as the head to which it is tied.
pub(super) fn shapes(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let refused = folder.config.as_ref().map(|config| config_values::refused(config, folder.model_type(), target.runtime()));
    let unnamed = if target.runtime() == Runtime::Transformers { None } else { unnamed_table(folder) };
    Ok(refused.into_iter().flatten().chain(folder.defects.shapes()).chain(unnamed).collect())
}

fn unnamed_table(folder: &Folder) -> Option<Finding> {
    let is_tied = folder.get("tie_word_embeddings").and_then(Value::as_bool) == Some(true);
    let [(alias, original)] = arch::tied(folder.model_type()) else { return None };
    let is_missing = is_tied && folder.tensors.contains_key(*alias) && !folder.tensors.contains_key(*original);
    let reason = format!("is missing, and `{alias}` is stored instead");
    is_missing.then(|| Finding::new(*original, reason, "run `compress cast MODEL -o DIR`, which renames it"))
}

/// All decoder layers are stored.
pub(super) fn layers(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let Some(count) = folder.get("num_hidden_layers").and_then(Value::as_u64) else { return Ok(Vec::new()) };
    let specified = format!("`num_hidden_layers` in config.json is {count}");
    Ok(missing_layers(folder.tensors.keys().map(String::as_str), "model.layers.", count, &specified, RESAVE))
}

/// Every quantized matrix is selected by a target and is not ignored.
pub(super) fn selected(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let Some(quantization) = folder.compressed_tensors() else { return Ok(Vec::new()) };
    let runtime = target.runtime().name();
    let finding = |(name, module): (&String, &Module)| {
        // Other names of the module may match entries for other modules.
        let own = std::slice::from_ref(name);
        if let Some(entry) = quantization.ignored(own, module.class) {
            let reason = format!("is quantized, but `{entry}` in `ignore` excludes it, so that {runtime} expects floats");
            return Some(Finding::new(name.clone(), reason, "remove the entry from `ignore` in config.json"));
        }
        if quantization.group(&module.names, module.class).is_none() {
            let reason = format!("is quantized, but no target of `config_groups` selects it, so that {runtime} expects floats");
            return Some(Finding::new(name.clone(), reason, "add the module to the `targets` of its group in config.json"));
        }
        None
    };
    Ok(folder.modules.iter().filter(|(_, module)| module.is_quantized).filter_map(finding).collect())
}

/// Every matrix of floats that a target selects is ignored.
pub(super) fn ignored(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    // In other families, matrices may belong to layers that are not of the class `Linear`.
    if arch::family(folder.model_type()).is_none_or(|family| family.is_input_major) {
        return Ok(Vec::new());
    }
    let runtime = target.runtime().name();
    let floats = [DType::F32, DType::F16, DType::BF16, DType::F64];
    let finding = |(name, module): (&String, &Module)| {
        let group = folder.group(module).filter(|group| group.weights.is_some())?;
        let is_selected = !module.is_quantized && module.is_linear() && floats.contains(&module.dtype) && folder.ignored(module).is_none();
        let reason = format!("is stored as floats, but `{}` of `config_groups` selects it, so that {runtime} expects codes with scales", group.name);
        is_selected.then(|| Finding::new(name.clone(), reason, "add the module to `ignore` in config.json"))
    };
    Ok(folder.modules.iter().filter_map(finding).collect())
}

/// Names of the tensors that a quantized matrix has in addition to its codes.
fn parts(group: &Group, weights: &Arguments) -> Vec<&'static str> {
    let mut parts = vec!["weight_scale"];
    if weights.is_integer && group.format == "pack-quantized" {
        parts.push("weight_shape");
    }
    if weights.is_integer && !weights.symmetric {
        parts.push("weight_zero_point");
    }
    if weights.strategy == "tensor_group" {
        parts.push("weight_global_scale");
    }
    match &group.inputs {
        Some(inputs) if inputs.strategy == "tensor_group" => parts.push("input_global_scale"),
        Some(inputs) if !inputs.dynamic && inputs.strategy == "tensor" => parts.push("input_scale"),
        _ => {}
    }
    parts
}

/// Every quantized matrix has its scales and zero points.
pub(super) fn complete(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for (name, module) in &folder.modules {
        let Some(group) = folder.group(module) else { continue };
        let Some(weights) = &group.weights else { continue };
        let is_code = matches!(module.dtype, DType::I8 | DType::F8_E4M3);
        if !module.is_quantized && !is_code {
            continue;
        }
        let missing = parts(group, weights).into_iter().map(|part| format!("{name}.{part}")).filter(|tensor| !folder.tensors.contains_key(tensor));
        found.extend(missing.map(|tensor| Finding::new(tensor, format!("is missing, but `{}` of `config_groups` specifies it", group.name), RESAVE)));
    }
    Ok(found)
}

/// The group size divides the rows, and the scales have one column for each group.
pub(super) fn group_rows(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for (name, module, group) in folder.quantized() {
        let Some(weights) = group.weights.as_ref().filter(|weights| weights.is_integer && weights.strategy == "group") else { continue };
        let size = weights.group_size.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
        let ([_, inputs], Some(size)) = (module.shape, size) else { continue };
        if inputs == 0 {
            continue;
        }
        let scales = folder.tensors.get(&format!("{name}.weight_scale")).and_then(|scales| scales.shape.get(1).copied());
        let groups = inputs.checked_div(size);
        if !inputs.is_multiple_of(size) {
            let reason = format!("has rows of {inputs} inputs, which the group size of {size} in `{}` of `config_groups` does not divide", group.name);
            found.push(Finding::new(name.clone(), reason, "quantize it with a group size that divides the rows, or with one scale per row (`group_size: -1`)"));
        } else if scales.is_some() && scales != groups {
            let reason = format!("has {} scales per row, but groups of {size} need {}", scales.unwrap_or(0), groups.unwrap_or(0));
            found.push(Finding::new(format!("{name}.weight_scale"), reason, "correct `group_size` in config.json, or start from the original checkpoint"));
        }
    }
    Ok(found)
}

fn quantized_heads(folder: &Folder) -> impl Iterator<Item = &String> {
    let is_head = |name: &str| name == "lm_head" || name.ends_with(".lm_head");
    folder.modules.iter().filter(move |(name, module)| module.is_quantized && is_head(name)).map(|(name, _)| name)
}

/// The head of a language model is not quantized.
pub(super) fn heads(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let finding = |name: &String| Finding::new(name.clone(), format!("is a quantized head, which {target} does not load"), "quantize without the head");
    Ok(quantized_heads(folder).map(finding).collect())
}

/// Embeddings are floats, or in a form that the runtime loads.
pub(super) fn embeddings(folder: &Folder, target: Target, loads: fn(&Group, &Arguments, Target) -> bool) -> Vec<Finding> {
    let is_loaded = |module: &Module| folder.group(module).is_some_and(|group| group.weights.as_ref().is_some_and(|weights| loads(group, weights, target)));
    let refused = folder.modules.iter().filter(|(_, module)| module.is_quantized && module.class == "Embedding" && !is_loaded(module));
    let finding = |name: &String| Finding::new(name.clone(), format!("is a quantized embedding, which {target} does not load"), "quantize without embeddings");
    refused.map(|(name, _)| finding(name)).collect()
}

/// Every quantization of linear layers has a kernel. The function returns why there is none, if that is
/// certain.
pub(super) fn kernels(folder: &Folder, target: Target, missing: fn(&Group, &Arguments, Target) -> Option<&'static str>) -> Vec<Finding> {
    let finding = |(group, weights): (&Group, &Arguments)| {
        let reason = format!("{}, for which {target} has no kernel", missing(group, weights, target)?);
        Some(Finding::new(group.name.clone(), reason, "use a scheme of docs/llm-schemes.md"))
    };
    folder.linear_groups().into_iter().filter_map(finding).collect()
}

/// Integers of one byte each with float activations, which vLLM and SGLang do not support.
pub(super) fn unpacked(group: &Group, weights: &Arguments) -> Option<&'static str> {
    let is_unpacked = weights.is_integer && group.inputs.is_none() && matches!(group.format.as_str(), "int-quantized" | "naive-quantized");
    is_unpacked.then_some("has integers in one byte each with float activations, which only `pack-quantized` supports")
}

/// A tied head is not quantized.
pub(super) fn tied_head(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    // The first key is one of LFM2, and takes precedence.
    let specified = ["tie_embedding", "tie_word_embeddings"].into_iter().find_map(|key| Some((key, folder.get(key)?.as_bool()?)));
    let Some((key, true)) = specified else { return Ok(Vec::new()) };
    let reason = format!("is quantized, but `{key}` is true, so that {} uses the embedding instead", target.runtime().name());
    let hint = format!("quantize without the head, or set `{key}` to false");
    Ok(quantized_heads(folder).map(|name| Finding::new(name.clone(), reason.clone(), hint.clone())).collect())
}

/// Packed integers have one of these widths.
pub(super) fn widths(folder: &Folder, target: Target, supported: &[u64]) -> Vec<Finding> {
    let list = supported.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let wrong = folder.linear_groups().into_iter().filter(|(group, weights)| group.has_packed_integers() && !supported.contains(&weights.bits));
    let finding = |(group, weights): (&Group, &Arguments)| {
        let reason = format!("has weights of {} bits, but {target} loads packed integers of {list} bits", weights.bits);
        Finding::new(group.name.clone(), reason, "use `--scheme W4A16` or `W8A16`")
    };
    wrong.map(finding).collect()
}

/// Packed integers with zero points have 4 or 8 bits.
pub(super) fn zero_points(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let is_wrong = |group: &Group, weights: &Arguments| group.has_packed_integers() && !weights.symmetric && !VLLM_BITS.map(u64::from).contains(&weights.bits);
    let wrong = folder.linear_groups().into_iter().filter(|(group, weights)| is_wrong(group, weights));
    let finding = |(group, weights): (&Group, &Arguments)| {
        let reason = format!("has zero points for weights of {} bits, but {target} loads them only for 4 and 8 bits", weights.bits);
        Finding::new(group.name.clone(), reason, "use a symmetric scheme, or `--scheme W4A16-ASYM`")
    };
    Ok(wrong.map(finding).collect())
}
