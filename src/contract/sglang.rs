//! Rules of SGLang.

use super::folder::Folder;
use super::scheme::{Arguments, Group};
use super::{Finding, Needs, Rule, Target, compressed_tensors, fused};
use crate::error::Result;

pub(super) const RULES: &[Rule<Folder>] = &[
    Rule {
        name: "architectures",
        sentence: "`config.json` names the model class in `architectures`.",
        source: "python/sglang/srt/models/registry.py",
        versions: &[],
        needs: Needs::Configuration,
        check: compressed_tensors::architectures,
    },
    Rule {
        name: "own-format",
        sentence: "The folder is not in a format that only compress reads.",
        source: "python/sglang/srt/layers/quantization/__init__.py",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::own_format,
    },
    Rule {
        name: "tokenizer",
        sentence: "The folder of a language model has a tokenizer.",
        source: "docs.sglang.io, server arguments: --tokenizer-path, --skip-tokenizer-init",
        versions: &[],
        needs: Needs::Configuration,
        check: compressed_tensors::tokenizer,
    },
    Rule {
        name: "shapes",
        sentence: "The weights have the names and shapes that `config.json` requires (of families that compress runs).",
        source: "python/sglang/srt/model_loader/weight_utils.py: default_weight_loader",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::shapes,
    },
    Rule {
        name: "tokenizer-files",
        sentence: "`tokenizer.json` and `tokenizer_config.json` are valid JSON, and so is `vocab.json` if `tokenizer.json` is missing.",
        source: "docs.sglang.io, server arguments: --tokenizer-path",
        versions: &[],
        needs: Needs::Configuration,
        check: compressed_tensors::tokenizer_files,
    },
    Rule {
        name: "fused-ignore",
        sentence: "`ignore` names all parts of a layer that is fused, or none.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/utils.py: should_ignore_layer",
        versions: &[],
        needs: Needs::Weights,
        check: fused::ignore,
    },
    Rule {
        name: "fused-scheme",
        sentence: "All parts of a layer that is fused have the same scheme.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/utils.py: find_matched_target",
        versions: &[],
        needs: Needs::Weights,
        check: fused::scheme,
    },
    Rule {
        name: "selected",
        sentence: "Every quantized matrix is selected by a target of `config_groups`, and `ignore` does not exclude it.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py: get_quant_method",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::selected,
    },
    Rule {
        name: "scales",
        sentence: "Every quantized matrix has its scales, zero points and shape.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/schemes",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::complete,
    },
    Rule {
        name: "group-rows",
        sentence: "The group size of integers divides the rows.",
        source: "python/sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: create_weights",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::group_rows,
    },
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
    Rule {
        name: "tied-head",
        sentence: "A head that is tied to the embedding is not quantized.",
        source: "sgl-project/sglang#38143",
        versions: &[],
        needs: Needs::Weights,
        check: compressed_tensors::tied_head,
    },
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
