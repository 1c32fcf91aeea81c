//! Rules of transformers with compressed-tensors.

use super::folder::Folder;
use super::{Finding, Rule, Target, compressed_tensors, fused};
use crate::error::Result;

/// Keys of `AUTO_QUANTIZER_MAPPING`. `bitsandbytes` is completed by the number of bits.
const METHODS: [&str; 28] = [
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
/// Formats of compressed-tensors 0.20, without those that it no longer reads.
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
        sentence: "`config.json` has a `model_type`.",
        source: "transformers/models/auto/configuration_auto.py",
        versions: &[],
        check: compressed_tensors::model_type,
    },
    Rule {
        name: "own-format",
        sentence: "The folder is not in a format that only compress reads.",
        source: "transformers/quantizers/auto.py",
        versions: &[],
        check: compressed_tensors::own_format,
    },
    Rule {
        name: "method",
        sentence: "The quantization method is known; with other methods, missing weights are filled with random values.",
        source: "transformers/quantizers/auto.py: AUTO_QUANTIZER_MAPPING",
        versions: &[],
        check: method,
    },
    Rule {
        name: "format",
        sentence: "The format of the weights is one of compressed-tensors 0.20.",
        source: "compressed_tensors/config/base.py: CompressionFormat",
        versions: &[],
        check: format_is_known,
    },
    Rule {
        name: "layers",
        sentence: "All layers of `num_hidden_layers` are stored; missing ones are filled with random values.",
        source: "transformers/modeling_utils.py",
        versions: &[],
        check: compressed_tensors::layers,
    },
    Rule {
        name: "selected",
        sentence: "Every quantized matrix is selected by a target of `config_groups`, and `ignore` does not exclude it.",
        source: "compressed_tensors/quantization/lifecycle/apply.py",
        versions: &[],
        check: compressed_tensors::selected,
    },
    Rule {
        name: "ignored",
        sentence: "Every matrix of floats that a target selects is in `ignore`.",
        source: "compressed_tensors/quantization/lifecycle/apply.py",
        versions: &[],
        check: compressed_tensors::ignored,
    },
    Rule {
        name: "scales",
        sentence: "Every quantized matrix has its scales, zero points and shape.",
        source: "compressed_tensors/compressors",
        versions: &[],
        check: compressed_tensors::complete,
    },
    Rule {
        name: "group-rows",
        sentence: "The group size of integers divides the rows.",
        source: "compressed_tensors/quantization/lifecycle/forward.py",
        versions: &[],
        check: compressed_tensors::group_rows,
    },
    Rule {
        name: "experts",
        sentence: "Experts in separate tensors are floats: they are stacked, which fails for quantized ones.",
        source: "transformers/conversion_mapping.py",
        versions: &["5.23"],
        check: experts,
    },
];

fn method(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let Some(quantization) = folder.quantization.as_ref().filter(|quantization| quantization.method != crate::model::OWN_METHOD) else {
        return Ok(Vec::new());
    };
    let name = quantization.method.as_str();
    if METHODS.contains(&name) {
        return Ok(Vec::new());
    }
    Ok(vec![Finding::new("quant_method", format!("is `{name}`, which transformers does not know"), "use the file that was saved together with these weights")])
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

fn experts(folder: &Folder, _: Target) -> Result<Vec<Finding>> {
    let quantized = folder.modules.iter().find(|(name, module)| module.is_quantized && folder.compressed_tensors().is_some() && fused::is_of_expert(name));
    let reason = "is a quantized expert in a separate tensor, and transformers stacks the experts of a layer";
    let hint = "load the folder in vLLM or transformers 4, or quantize without experts";
    Ok(quantized.map(|(name, _)| Finding::new(name.clone(), reason, hint)).into_iter().collect())
}
