//! Rules of SGLang.

use super::folder::Folder;
use super::scheme::{Arguments, Group};
use super::{Finding, Needs, Rule, Target, compressed_tensors, shared};
use crate::error::Result;

pub(super) const RULES: &[Rule<Folder>] = &[
    shared::ARCHITECTURES.from("python/sglang/srt/models/registry.py"),
    shared::OWN_FORMAT.from("python/sglang/srt/layers/quantization/__init__.py"),
    shared::METHOD.from("python/sglang/srt/configs/model_config.py: _verify_quantization"),
    shared::TOKENIZER.from("docs.sglang.io, server arguments: --tokenizer-path, --skip-tokenizer-init"),
    shared::SHAPES.from("python/sglang/srt/model_loader/weight_utils.py: default_weight_loader"),
    shared::ACTIVATION_FUNCTION.from("python/sglang/srt/models/llama.py, qwen2.py"),
    shared::TOKENIZER_FILES.from("docs.sglang.io, server arguments: --tokenizer-path"),
    shared::FUSED_IGNORE.from("python/sglang/srt/layers/quantization/compressed_tensors/utils.py: should_ignore_layer"),
    shared::FUSED_SCHEME.from("python/sglang/srt/layers/quantization/compressed_tensors/utils.py: find_matched_target"),
    shared::SELECTED.from("python/sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py: get_quant_method"),
    shared::SCALES.from("python/sglang/srt/layers/quantization/compressed_tensors/schemes"),
    shared::GROUP_ROWS.from("python/sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: create_weights"),
    Rule {
        name: "bits",
        sentence: "Packed integers have 4 or 8 bits.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP",
        versions: &[],
        needs: Needs::Weights,
        check: bits,
    },
    Rule {
        name: "activations",
        sentence: "Integers in one byte each have int8 activations; 8-bit ones are symmetric and not in groups.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts",
        versions: &[],
        needs: Needs::Weights,
        check: activations,
    },
    Rule {
        name: "embeddings",
        sentence: "Embeddings are floats.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py: get_quant_method",
        versions: &[],
        needs: Needs::Weights,
        check: embeddings,
    },
    shared::TIED_HEAD.from("sgl-project/sglang#38143"),
];

fn bits(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    Ok(compressed_tensors::widths(folder, target, &[4, 8]))
}

/// Why no kernel computes the products of a group, if that is certain.
fn unsupported(group: &Group, weights: &Arguments, _: Target) -> Option<&'static str> {
    let Some(inputs) = &group.inputs else { return compressed_tensors::unpacked(group, weights) };
    match (weights.is_integer, inputs.is_integer) {
        (true, true) if weights.bits == 8 && !weights.symmetric => Some("has weights with zero points and integer activations"),
        (true, true) if weights.bits == 8 && weights.strategy == "group" => Some("has groups of 8-bit weights with integer activations"),
        _ => None,
    }
}

fn activations(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    Ok(compressed_tensors::kernels(folder, target, unsupported))
}

fn embeddings(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    Ok(compressed_tensors::embeddings(folder, target, |_, _, _| false))
}
