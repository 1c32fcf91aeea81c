//! Notes about which libraries load the written quantization schemes.

use std::collections::{BTreeMap, BTreeSet};

use super::quantization::{Group, group_indices, groups, module};
use crate::arch;
use crate::contract::facts::{
    VLLM_BITS, experts_of, initializes_from_weight, is_of_expert, is_only_bf16, is_position_table, loads_float_experts, loads_quantized_experts,
    loads_quantized_router, stacked_projection, vllm_loads_embeddings,
};
use crate::model::{Model, stacked_experts};
use crate::store::writer::Item;
use crate::store::{ActivationScheme, Codes, DType, Encoding, FileFormat, FloatFormat, Granularity, QuantizationSpec, Role};

/// Layers by which compressed-tensors recognizes attention modules with a KV cache.
const KEY_LAYERS: [&str; 4] = ["k_proj", "v_proj", "qkv_proj", "kv_b_proj"];

/// Whether compressed-tensors recognizes a module as attention.
fn is_attention_module(items: &[Item], module: &str) -> bool {
    let layer = |item: &Item| item.name.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).and_then(|rest| rest.split('.').next()).map(str::to_owned);
    items.iter().filter_map(layer).any(|layer| KEY_LAYERS.contains(&layer.as_str()))
}

/// Notes about experts: transformers 5 stacks those of a layer in one tensor, except for families whose
/// experts it splits in quantized folders.
fn expert_notes(items: &[Item], groups: &[Group], model: &Model) -> Option<String> {
    let is_float = |item: &Item| item.weight.shape.len() == 2 && is_of_expert(&item.name) && item.weight.encoding == Encoding::Dense;
    let is_separate = || items.iter().any(|item| is_of_expert(&item.name));
    if arch::family(model.config.model_type()).is_some_and(|family| family.needs_stacked_experts) && is_separate() {
        return Some("transformers does not load separate experts of this family: use `extract-language-model` too, or load the output in vLLM".to_owned());
    }
    if arch::splits_experts(model.config.model_type()) {
        if groups.is_empty() && is_separate() {
            return Some("transformers loads separate experts of this family only in quantized folders: use `quantize` too".to_owned());
        }
        let is_stacked = |item: &Item| stacked_experts(&item.name, &item.weight).is_some();
        return (!groups.is_empty() && items.iter().any(is_stacked)).then(|| {
            "float experts of Llama 4 in one tensor: in quantized folders, transformers replaces them with one linear layer per expert and leaves these uninitialized, so its outputs are wrong: use `split-experts` before `quantize`".to_owned()
        });
    }
    let of_experts = || groups.iter().filter(|group| group.modules.iter().any(|module| is_of_expert(module)));
    if of_experts().any(|group| !loads_quantized_experts(group.format(), group.spec.symmetric)) {
        return Some(
            "quantized experts: transformers 4 and vLLM load them; transformers 5 fuses all experts of a layer into one tensor, which fails for these weights; it succeeds for symmetric schemes with float activations, such as W4A16, and for FP8"
                .to_owned(),
        );
    }
    if has_uneven_experts(items, groups) {
        return Some(
            "experts of a layer with different schemes: transformers 5 stacks them, and computes wrong outputs or fails: quantize all experts with the same scheme, or none"
                .to_owned(),
        );
    }
    if of_experts().any(|group| group.spec.activations != ActivationScheme::None) {
        return Some("quantized experts: transformers 5 fuses all experts of a layer into one tensor, and computes them with float activations".to_owned());
    }
    (groups.iter().any(|g| !loads_float_experts(g.spec.codes)) && items.iter().any(is_float)).then(|| {
        "float experts in separate tensors: transformers 5 stacks the experts of a layer, which fails in folders of integers or FP4; with FP8-DYNAMIC it loads them".to_owned()
    })
}

/// Whether a projection has different schemes in the experts of a layer, or packed experts have different
/// schemes in its projections.
fn has_uneven_experts(items: &[Item], groups: &[Group]) -> bool {
    let by_module = group_indices(groups);
    let owner = |name: &str| by_module.get(module(name)).copied();
    let is_packed = |name: &str| owner(name).and_then(|index| groups.get(index)).is_some_and(|group| group.packed);
    let names = || items.iter().filter(|item| item.weight.shape.len() == 2).map(|item| item.name.as_str());
    let packed: BTreeSet<&str> = names().filter(|name| is_packed(name)).filter_map(|name| experts_of(module(name))).collect();
    let mut first = BTreeMap::new();
    names().any(|name| {
        let Some((experts, projection)) = stacked_projection(module(name)) else { return false };
        let key = (experts, if packed.contains(experts) { "" } else { projection });
        *first.entry(key).or_insert(owner(name)) != owner(name)
    })
}

/// Notes about modules whose class transformers 5 does not quantize or initialize.
fn module_notes(items: &[Item], groups: &[Group], model: &Model) -> Vec<String> {
    let model_type = model.config.model_type();
    let by_module = group_indices(groups);
    let is_router = |item: &&Item| item.weight.role == Some(Role::Router) && by_module.contains_key(module(&item.name));
    let router = items.iter().filter(is_router).find(|item| !loads_quantized_router(model_type, module(&item.name))).map(|item| {
        format!(
            "quantized routers, as `{}`: transformers 5 loads the routers of this family as floats, so that its outputs are wrong: quantize without routers",
            module(&item.name)
        )
    });
    let mut packed = groups.iter().filter(|group| group.format().ends_with("pack-quantized")).flat_map(|group| &group.modules);
    let packed = packed
        .find(|module| initializes_from_weight(model_type, module))
        .map(|module| format!("packed weights, as of `{module}`: transformers 5 fails when it initializes the layers of this family: use W8A8 or FP8"));
    router.into_iter().chain(packed).collect()
}

/// Notes about layers that vLLM fuses.
fn fused_notes(items: &[Item], groups: &[Group], model: &Model) -> Vec<String> {
    let by_module = group_indices(groups);
    let owner = |item: &Item| by_module.get(module(&item.name)).copied();
    let mut layers: BTreeMap<String, Vec<&Item>> = BTreeMap::new();
    for item in items.iter().filter(|item| item.weight.shape.len() == 2) {
        layers.entry(arch::fused_layer(model.config.model_type(), &item.name)).or_default().push(item);
    }
    let differ = |parts: &[&Item]| parts.iter().any(|part| parts.first().is_some_and(|first| owner(part) != owner(first)));
    let is_split = |(layer, parts): (&String, &[&Item])| {
        let is_last = |part: &Item| layer.rsplit('+').next().is_some_and(|last| module(&part.name).ends_with(last));
        let rows = |part: &Item| match owner(part).and_then(|index| groups.get(index)).map(|group| group.spec.granularity) {
            Some(Granularity::Block([rows, _])) => rows,
            _ => 1,
        };
        parts.len() > 1 && parts.iter().any(|part| !is_last(part) && part.weight.shape.first().is_some_and(|count| !count.is_multiple_of(rows(part))))
    };
    let differing = layers.iter().find(|(_, parts)| differ(parts)).map(|(layer, _)| {
        format!("vLLM rejects the folder, because it fuses `{layer}`, and these layers have different schemes: quantize all of them, or none")
    });
    let split = layers.iter().find(|(layer, parts)| is_split((layer, parts))).map(|(layer, _)| {
        format!("vLLM rejects the folder, because it fuses `{layer}`, and the outputs of these layers are not multiples of the block size: use FP8-DYNAMIC")
    });
    differing.into_iter().chain(split).collect()
}

/// A list of bit widths, as in "3 and 5 bits".
fn widths<'g>(groups: impl Iterator<Item = &'g Group<'g>>) -> Option<String> {
    let bits: BTreeSet<String> = groups.map(|g| g.spec.codes.bits().to_string()).collect();
    (!bits.is_empty()).then(|| format!("{} bits", bits.into_iter().collect::<Vec<_>>().join(" and ")))
}

/// Notes about which consumers support the quantization schemes.
pub(super) fn notes(items: &[Item], model: &Model) -> Vec<String> {
    let mut notes = Vec::new();
    let groups = groups(items);
    let dynamic = |g: &&Group| g.spec.activations == ActivationScheme::DynamicToken;
    if groups.iter().filter(dynamic).any(|g| !g.spec.symmetric) {
        notes.push("asymmetric weights with int8 activations: transformers loads them; vLLM supports only symmetric weights".to_owned());
    }
    let are_grouped = |g: &&Group| matches!(g.spec.granularity, Granularity::Group(_));
    if groups.iter().filter(dynamic).filter(are_grouped).any(|g| g.spec.codes.bits() == 4) {
        notes.push("int4 weights in groups with int8 activations: transformers loads them; vLLM has kernels only for processors without a GPU".to_owned());
    }
    if groups.iter().filter(dynamic).filter(are_grouped).any(|g| g.spec.codes.bits() != 4) {
        notes.push("group-wise weights with int8 activations: transformers loads them; vLLM supports only one scale per tensor or channel".to_owned());
    }
    if groups.iter().any(|g| g.spec.codes == Codes::Integer(4) && matches!(g.spec.activations, ActivationScheme::Float(..))) {
        notes.push("int4 weights with FP8 activations: transformers loads them; vLLM needs a GPU of compute capability 9.0".to_owned());
    }
    let packed = || groups.iter().filter(|g| g.packed && g.spec.codes.is_integer());
    let has_embeddings = groups.iter().any(|g| g.class == "Embedding");
    if has_embeddings {
        let has_positions = groups.iter().any(|g| g.class == "Embedding" && g.modules.iter().any(|module| is_position_table(module)));
        let transformers = match packed().all(|g| g.spec.symmetric) {
            _ if has_positions => "transformers fails for those of positions (`embed_positions`): add them to `ignore`; ",
            true => "transformers 5 loads them; ",
            false => "",
        };
        let mut embeddings = groups.iter().filter(|g| g.class == "Embedding");
        let others = match embeddings.all(|g| vllm_loads_embeddings(g.spec.codes, g.packed, g.spec.symmetric)) {
            true => "vLLM loads them from version 0.33; transformers 4 does not support this format",
            false => "transformers 4 and vLLM do not support this format",
        };
        notes.push(format!("quantized embeddings: {transformers}{others}"));
    }
    notes.extend(expert_notes(items, &groups, model));
    notes.extend(module_notes(items, &groups, model));
    if let Some(module) = items
        .iter()
        .filter(|item| model.is_cache_scale(&item.name))
        .filter_map(|item| item.name.strip_suffix(".k_scale"))
        .find(|module| !is_attention_module(items, module))
    {
        notes.push(format!(
            "scales of the KV cache: transformers ignores those of `{module}` and caches floats, because compressed-tensors recognizes attention by layers named {}; compress and its ONNX export use them",
            KEY_LAYERS.join(", ")
        ));
    }
    let integers = |g: &&Group| g.spec.codes.is_integer();
    if groups.iter().filter(integers).any(|g| g.class == "Linear" && g.spec.activations == ActivationScheme::None && !g.packed) {
        notes.push("weight-only int8 with zero points or a single scale: transformers loads it; vLLM has no kernel for it".to_owned());
    }
    let is_usual = |g: &&Group| VLLM_BITS.contains(&g.spec.codes.bits());
    if packed().any(|g| !g.spec.symmetric) {
        let vllm = match widths(packed().filter(|g| !g.spec.symmetric && !is_usual(g))) {
            None => "vLLM loads them".to_owned(),
            Some(bits) => format!("vLLM does not support them with {bits}"),
        };
        // transformers uses the first group of `config_groups` for all of them, and does not dequantize
        // embeddings.
        let transformers = match groups.iter().filter(|g| g.class == "Linear").count() {
            _ if has_embeddings => {
                "transformers cannot load the folder, because the embeddings are quantized too: add them to `ignore`, and load the folder with `CompressedTensorsConfig(dequantize=True)`"
            }
            1 => "transformers loads them only with `CompressedTensorsConfig(dequantize=True)`",
            _ => {
                "transformers does not load them in more than one group size or scheme: choose a `group_size` that divides all rows, and load the folder with `CompressedTensorsConfig(dequantize=True)`"
            }
        };
        notes.push(format!("packed zero points: {vllm}; {transformers}"));
    }
    if let Some(bits) = widths(packed().filter(|g| g.spec.symmetric && !is_usual(g))) {
        notes.push(format!("weights of {bits}: only recent versions of vLLM load them"));
    }
    notes.extend(fused_notes(items, &groups, model));
    let file = |spec: &QuantizationSpec| spec.codes.float().and_then(|format| format.file(spec.scale_format()));
    let used: Vec<(FloatFormat, &FileFormat)> = FloatFormat::ALL
        .iter()
        .flat_map(|format| format.row().files.iter().map(move |file| (*format, file)))
        .filter(|(_, known)| groups.iter().any(|g| file(&g.spec).is_some_and(|file| file.name == known.name)))
        .collect();
    for (_, file) in &used {
        if !notes.iter().any(|note| note == file.support) {
            notes.push(file.support.to_owned());
        }
    }
    // `cast` changes the dtype in `config.json`, and not the dtype from which weights were quantized.
    let is_other = |item: &Item| model.config.dtype().unwrap_or(item.weight.dtype) != DType::BF16;
    let is_float =
        |item: &Item| matches!(&item.weight.encoding, Encoding::Quantized(spec) if is_other(item) && file(spec).is_some_and(|file| is_only_bf16(file.name)));
    if let Some((format, _)) = used.iter().find(|(_, file)| is_only_bf16(file.name)).filter(|_| items.iter().any(is_float)) {
        notes.push(format!("{} in a model that is not bfloat16: transformers dequantizes the weights to bfloat16 and then fails on the dtype mismatch; `cast --to bf16` first, or load the model with that dtype", format.row().label));
    }
    if let Some(bits) = widths(packed().filter(|g| 32 % g.spec.codes.bits() != 0)) {
        notes.push(format!("weights of {bits}, packed across word boundaries: compressed-tensors reads them from version 0.18"));
    }
    if groups.iter().any(|g| g.spec.activations == ActivationScheme::DynamicToken) {
        notes.push("int8 activations are quantized by the consumer while the model runs; the speed-up needs integer kernels (vLLM has them; transformers computes in floating point)".to_owned());
    }
    if !groups.is_empty() && model.config.model_type().is_empty() {
        notes.push("the folder has no config.json with a model_type: the written config.json describes the quantization, but libraries cannot select a model class from it".to_owned());
    }
    notes
}
